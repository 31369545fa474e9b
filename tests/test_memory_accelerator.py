"""The stage of a model with a memory on the device of `accelerator.py`."""

import pytest

from tests import memory_models
from tests.accelerator import on_accelerator
from tests.workspace import Workspace


@pytest.mark.slow
@pytest.mark.full
def test_the_memory_trains_there(coded: Workspace) -> None:
    on_accelerator({"memory": memory_models.arguments()})
