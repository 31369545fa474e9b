"""Coupled-GRPO with a sharded model: each process samples and scores with a whole copy of it."""

from typing import Any

import pytest

from tests import diffusion_workspace, sharded
from tests.diffusion_workspace import masked_workspace as masked_workspace
from tests.workspace import Workspace

pytestmark = [pytest.mark.slow, pytest.mark.full]


@pytest.mark.parametrize("changes", [{}, {"ref_sync": 0, "beta": 0.05, "adapter": {"rank": 2, "alpha": 4}}])
def test_two_processes_equal_one(changes: dict[str, Any], masked: Workspace) -> None:
    arguments = diffusion_workspace.arguments("diffusion_grpo", sharded.SMOOTH | changes)
    sharded.assert_equal_updates("diffusion_grpo", arguments, "diffusion")
