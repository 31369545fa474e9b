"""Which problems a policy learns most from: those that it solves sometimes.

A group whose completions all pass, or all fail, has no advantages. `frontier` measures how often the policy solves each problem
before training and keeps those between 20 and 80 % of 8 samples. A problem whose first 4 samples all pass, or all fail, is asked no
further and counts as solved always, or never: of the problems that 8 samples would keep, this leaves out 3 to 21 % (those solved 4
times, and 2 or 6 times), and it spares half the samples of all that are too easy or too hard. What is kept is what 8 samples
would keep. The measurement is kept in the work folder: a resumed run asks nothing again.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.device import stable_hash
from pipeline.errors import DataError
from pipeline.reinforcement.answers import Prompt
from pipeline.reinforcement.rewards import judged
from pipeline.sandbox.judge import Judge
from pipeline.tracking import progress, say
from pipeline.work import write_atomically

FIRST, SAMPLES = 4, 8
LOW, HIGH = 0.2, 0.8
AT_ONCE = 32  # problems


def chosen(prompts: Sequence[Prompt], difficulty: str, most: int, setting: Any, judge: Judge | None, folder: Path) -> list[Prompt]:  # fmt: skip
    """The prompts of a difficulty: all, frontier (of the first `most` by hash), or one of the problems' groups.

    Raises DataError where none is left, or there is no sandbox to tell the frontier.
    """
    if difficulty == "all":
        return list(prompts)
    if difficulty != "frontier":
        groups = {getattr(prompt.record, "group", "") for prompt in prompts}
        if difficulty not in groups:
            raise DataError(f"difficulty: expected frontier, all, or a group of the problems ({', '.join(sorted(groups))}), got {difficulty!r}")  # fmt: skip
        return [prompt for prompt in prompts if getattr(prompt.record, "group", "") == difficulty]
    if judge is None:
        raise DataError(
            "difficulty: frontier needs the sandbox, to see which problems the policy solves; expected all or a group"
        )
    some = sorted(prompts, key=lambda prompt: stable_hash("frontier", prompt.id))[:most]
    rates = _rates(some, setting, judge, folder / "parts" / "frontier.json")
    found = [prompt for prompt in some if LOW <= rates[prompt.id] <= HIGH]
    told = f"{len(found)} of {len(some)} problems are solved by {LOW:.0%} to {HIGH:.0%} of {SAMPLES} samples"
    if not found:
        raise DataError(f"difficulty: {told}, none to learn from (mean {np.mean(list(rates.values())):.2f}); use easier or harder problems, or difficulty=all")  # fmt: skip
    say(f"frontier: {told}")
    return found


def _rates(prompts: Sequence[Prompt], setting: Any, judge: Judge, kept: Path) -> dict[str, float]:
    """How often each problem is solved, by id; each process asks its share."""
    ids = [prompt.id for prompt in prompts]
    if kept.is_file():
        told = json.loads(kept.read_text())
        if list(told) == ids:
            return told
    mine: dict[str, float] = {}
    share = prompts[setting.ranks.rank :: setting.ranks.world]
    with progress(total=len(share), desc="frontier", unit="problem") as bar:
        for first in range(0, len(share), AT_ONCE):
            some = share[first : first + AT_ONCE]
            passed = _passed(some, range(FIRST), setting, judge)  # (P, FIRST)
            sure = np.isin(passed.sum(1), (0, FIRST))  # (P,)
            open_ = [prompt for prompt, decided in zip(some, sure, strict=True) if not decided]
            more = _passed(open_, range(FIRST, SAMPLES), setting, judge)
            rates = passed.mean(1)
            rates[~sure] = np.concatenate([passed[~sure], more], axis=1).mean(1)
            mine |= dict(zip([p.id for p in some], rates.tolist(), strict=True))
            bar.update(len(some))
    together: dict[str, float] = {}
    for part in setting.ranks.gather(mine):
        together |= part
    found = {id_: together[id_] for id_ in ids}
    if setting.ranks.rank == 0:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, json.dumps(found))
    return found


def _passed(prompts: Sequence[Prompt], numbers: range, setting: Any, judge: Judge) -> np.ndarray:
    """Whether the samples of these numbers pass: (P, len(numbers)) bool. A sample hangs on its prompt and number alone."""
    if not prompts:
        return np.zeros((0, len(numbers)), dtype=bool)
    given = setting.held_out([(prompt, n) for prompt in prompts for n in numbers], purpose="frontier")
    passed = [verdict is not None and verdict.verdict == "passed" for verdict in judged(judge, given)]
    return np.array(passed).reshape(-1, len(numbers))
