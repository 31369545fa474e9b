"""A change in masked diffusion reruns its stages, and of the others only those that use what it offers."""

from pathlib import Path

from tests.own_code import edit, hashes, rerun
from tests.own_code import own_code as own_code

OWN = {"diffusion", "diffusion_dpo", "diffusion_grpo"}


def test_a_change_reruns_the_stages_that_reach_it(own: Path) -> None:
    before, wing = hashes(own), own / "pipeline/diffusion"
    edit(wing / "serving.py", "self._counts.update", "self._counts.subtract")
    assert rerun(own, before) == set()
    edit(wing / "report.py", "SHADES = 5", "SHADES = 6")
    assert rerun(own, before) == {"report"}
    edit(wing / "files.py", 'attention != "causal"', 'attention == "bidirectional"')
    assert rerun(own, before) == {"base", "deploy", "diffusion", "evaluate", "report"}
    edit(wing / "model.py", "self.trunk, self.traits = trunk, traits", "self.traits, self.trunk = traits, trunk")
    assert rerun(own, before) == {*OWN, "base", "deploy", "evaluate", "report"}
