"""The stages of masked models, their evaluation and the server on the device of `accelerator.py`."""

import pytest

from tests import diffusion_workspace
from tests.accelerator import on_accelerator, to_measure
from tests.diffusion_workspace import masked_workspace as masked_workspace
from tests.workspace import Workspace

pytestmark = [pytest.mark.slow, pytest.mark.full]


def test_the_masked_models_train_there(masked: Workspace) -> None:
    on_accelerator({stage: diffusion_workspace.arguments(stage, {}) for stage in diffusion_workspace.STAGES})


def test_a_masked_model_is_measured_there(masked: Workspace) -> None:
    on_accelerator({"evaluate": ["diffusion", *to_measure(masked)]})


def test_a_masked_model_answers_there(masked: Workspace) -> None:
    on_accelerator({"serve": ["diffusion"]})
