"""Healthy runs of masked diffusion pass their gates for five seeds, and no alarm is raised.

For the alignment stages, see `test_stage_gates.py`.
"""

import re

import pytest

from tests import diffusion_workspace
from tests.diffusion_workspace import masked_workspace as masked_workspace
from tests.workspace import Workspace, command

pytestmark = pytest.mark.slow  # each test runs a stage five times
# This workspace's base is untrained, and the causal control starts from it.
TRUE_OF_THE_UNTRAINED = r"above ln V"


@pytest.mark.parametrize("stage", ["diffusion", "diffusion_dpo"])
def test_five_seeds_end_well_without_an_alarm(stage: str, masked: Workspace) -> None:
    params = masked.folder / "params.yaml"
    untouched = params.read_text()
    alarms = []
    for seed in (42, 1, 2, 3, 4):
        params.write_text(re.sub(r"^seed: \d+$", f"seed: {seed}", untouched, count=1, flags=re.M))
        assert f"seed: {seed}\n" in params.read_text()
        ended = command(stage, diffusion_workspace.arguments(stage, {}))
        assert ended.code == 0, ended.said
        assert "up to date" not in ended.said, "the seed changes nothing"
        alarms += [(seed, line) for line in ended.said.splitlines() if re.search("warning|alarm", line.lower())]
    assert [told for told in alarms if not re.search(TRUE_OF_THE_UNTRAINED, told[1])] == []
