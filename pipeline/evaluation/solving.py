"""Evaluation for reinforcement learning from code execution: held-out problems, selection of training problems by
difficulty, and exact answers.

`HeldOutProblems` measures pass@1 and the divergence from the reference on problems used for neither training nor
testing (`data/problems/val.jsonl`). Every evaluation answers the same problems with the same seeds. At the end, the
policy and its reference are compared problem by problem (paired bootstrap).

`chosen` selects training problems by difficulty. A policy learns most from the problems it solves sometimes: if the
completions of a group all pass, or all fail, their advantages are 0. `frontier` measures how often the policy solves
each problem before training and selects those where 20% to 80% of 8 samples pass. If a problem's first 4 samples all
pass, or all fail, it gets no more samples and counts as always, or never, solved. Of the problems that 8 samples would
select, this misses 3% (of those solved 4 times) to 21% (2 or 6 times), but it saves half the samples for problems that
are too easy or too hard. It never selects a problem that 8 samples would not. The rates are stored in the work folder,
so a resumed run does not measure them again.

`ExactAnswers` measures a skill with a single correct answer per request.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from pipeline.evaluation.intervals import paired_difference, ratio, wilson
from pipeline.generation.sampling import Sampling, sampler
from pipeline.ingest import records
from pipeline.ingest.records import Dialogue, Problem
from pipeline.model.transformer import Transformer
from pipeline.rl import answers as rl_answers
from pipeline.rl.answers import Answer, Prompt
from pipeline.rl.episodes import EpisodeSetting
from pipeline.rl.models import CausalSetting, Setting
from pipeline.rl.rewards import Part, judged
from pipeline.run.device import Hardware, generator, stable_hash
from pipeline.run.errors import DataError
from pipeline.run.tracking import progress, say
from pipeline.run.types import JsonObject
from pipeline.run.workdir import write_atomically
from pipeline.sandbox.judge import Judge
from pipeline.text import chat
from pipeline.text.tokenizer import Tokenizer

More = Callable[[list[Answer]], JsonObject]
Verdicts = Callable[[Sequence[Answer]], list[str]]
SHOWN = 16  # problems in the samples file


@dataclass(frozen=True, kw_only=True)
class SolvingConfig:
    """Settings for evaluation during training and at the end."""

    eval_problems: int = 100
    """Held-out problems per evaluation."""
    eval_samples: int = 1
    """Answers per held-out problem."""

    def __post_init__(self) -> None:
        if self.eval_problems < 1 or self.eval_samples < 1:
            raise ValueError("eval_problems, eval_samples: expected at least 1 each")


class HeldOutProblems:
    """Measures how many held-out problems the policy solves."""

    def __init__(
        self,
        prompts: list[Prompt],
        setting: Setting,
        verdicts: Verdicts | None,
        config: SolvingConfig,
        more: More | None = None,
    ) -> None:
        """`verdicts` returns "passed" or the reason for failure for each answer; None if answers cannot be judged.

        `more` evaluates the policy's answers for the final report only, since it is too expensive for the curve.
        """
        self.more = more
        self.prompts = sorted(prompts, key=lambda p: stable_hash("held out", p.id))[: config.eval_problems]
        self.setting, self.verdicts, self.config = setting, verdicts, config

    def row(self, step: int) -> dict[str, float]:
        """The metrics at one point of the curve: pass@1 with its interval, divergence from the reference, length."""
        answers = self._answers()
        row: dict[str, float] = {}
        if self.verdicts is not None:
            passed = ratio(self._passed(answers), generator=generator("solving", self.setting.seed))
            row |= passed.named("gold")
        kl, k3 = self.setting.divergence(answers)
        length = float(np.mean([len(answer.ids) for answer in answers]))
        return row | {"kl_held_out": kl, "kl_k3": k3, "length": length}

    def report(self) -> JsonObject:
        """The final comparison of policy and reference, overall and by problem group, and the results of `more`."""
        answers = self._answers() if self.verdicts is not None or self.more else []
        further = self.more(answers) if self.more else {}
        if self.verdicts is None:
            return further
        sides = [self._passed(self._answers(of_reference=True)), self._passed(answers)]
        groups = [getattr(prompt.record, "group", prompt.kind) for prompt in self.prompts]
        comparison: JsonObject = {}
        for group in ("", *sorted(set(groups))):
            indices = [n for n, name in enumerate(groups) if group in ("", name)]
            before, after = ([side[n] for n in indices] for side in sides)
            gain = paired_difference((before, None), (after, None), generator=generator("solving", group))
            part: JsonObject = {"pass_at_1_before": float(np.mean(before)), "pass_at_1": float(np.mean(after))}
            part |= gain.named("gain") | {"n": len(indices)}
            comparison |= {group: part} if group else part
        return further | {"held_out": comparison}

    def write_samples(self, path: Path) -> None:
        """Write some problems with the reference's and policy's answers, one JSON line each."""
        path.parent.mkdir(parents=True, exist_ok=True)
        requests = [(prompt, 0) for prompt in self.prompts[:SHOWN]]
        lines = []
        for before, after in zip(
            self.setting.held_out(requests, of_reference=True), self.setting.held_out(requests), strict=True
        ):
            line = {"id": before.prompt.id, "before": before.text, "after": after.text, "finished": after.finished}
            if self.verdicts is not None:
                line |= {"verdict_before": self.verdicts([before])[0], "verdict_after": self.verdicts([after])[0]}
            if before.calls or after.calls:
                line |= {"calls_before": before.calls, "calls_after": after.calls}
            lines.append(line | {"prompt": getattr(before.prompt.record, "question", "")})
        path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")

    def _answers(self, *, of_reference: bool = False) -> list[Answer]:
        requests = [(prompt, sample) for prompt in self.prompts for sample in range(self.config.eval_samples)]
        return self.setting.held_out(requests, of_reference=of_reference)

    def _passed(self, answers: list[Answer]) -> list[float]:
        """The fraction of each problem's answers that pass all hidden tests."""
        assert self.verdicts is not None
        passed = [float(verdict == "passed") for verdict in self.verdicts(answers)]
        return np.array(passed).reshape(len(self.prompts), -1).mean(1).tolist()


def verdicts_of(judge: Judge | None) -> Verdicts | None:
    """The sandbox's verdict on the code of each answer; None without a sandbox."""
    if judge is None:
        return None
    return lambda answers: ["no_code" if v is None else v.verdict for v in judged(judge, answers)]


# -- prompts and verdicts ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The prompts, and the function that judges the answers."""

    prompts: list[Prompt]
    held_out: list[Prompt]
    verdicts: Verdicts | None
    task: Part | None = None


def of_problems(setting: CausalSetting, problems: Path, judge: Judge | None) -> Asked:
    """The prompts for problems with hidden tests, which the sandbox judges."""
    prompts, held_out = (
        rl_answers.problem_prompts(
            list(records.read(problems / f"{split}.jsonl", Problem)), setting.start.tokenizer, setting.config.max_prompt
        )
        for split in ("rl", "val")
    )
    return Asked(prompts=prompts, held_out=held_out, verdicts=verdicts_of(judge))


def of_environment(setting: EpisodeSetting, tasks: int, held_out: int) -> Asked:
    """The prompts for the given numbers of tasks from an environment, which judges the answers."""
    world, tokenizer, longest = setting.environment, setting.start.tokenizer, setting.config.max_prompt
    return Asked(
        prompts=rl_answers.task_prompts(world.tasks("train", tasks, setting.seed), tokenizer, longest),
        held_out=rl_answers.task_prompts(world.tasks("val", held_out, setting.seed), tokenizer, longest),
        verdicts=world.verdicts,
        task=world.scores,
    )


# -- difficulty --------------------------------------------------------------------------------------------------------


FIRST, SAMPLES = 4, 8  # per problem
LOW, HIGH = 0.2, 0.8  # fraction of samples that pass
AT_ONCE = 32  # problems sampled at a time


def chosen(
    prompts: Sequence[Prompt], difficulty: str, most: int, setting: Setting, judge: Judge | None, folder: Path
) -> list[Prompt]:
    """Select prompts by difficulty: `all`, `frontier` (among the first `most` by hash), or one of the problem groups.

    Raises DataError if no prompts are left, or if `frontier` is requested without a sandbox.
    """
    if difficulty == "all":
        return list(prompts)
    if difficulty != "frontier":
        groups = {getattr(prompt.record, "group", "") for prompt in prompts}
        if difficulty not in groups:
            raise DataError(
                f"difficulty: expected `frontier`, `all` or a problem group ({', '.join(sorted(groups))}), got"
                f" {difficulty!r}"
            )
        return [prompt for prompt in prompts if getattr(prompt.record, "group", "") == difficulty]
    if judge is None:
        raise DataError(
            "difficulty: `frontier` needs the sandbox to see which problems the policy solves; use `all` or a group"
        )
    candidates = sorted(prompts, key=lambda prompt: stable_hash("frontier", prompt.id))[:most]
    rates = _rates(candidates, setting, judge, folder / "parts" / "frontier.json")
    frontier = [prompt for prompt in candidates if LOW <= rates[prompt.id] <= HIGH]
    text = f"{len(frontier)} of {len(candidates)} problems are solved by {LOW:.0%} to {HIGH:.0%} of {SAMPLES} samples"
    if not frontier:
        raise DataError(
            f"difficulty: {text} (mean solve rate {np.mean(list(rates.values())):.2f}); use easier or harder"
            " problems, or difficulty=all"
        )
    say(f"frontier: {text}")
    return frontier


def _rates(prompts: Sequence[Prompt], setting: Setting, judge: Judge, path: Path) -> dict[str, float]:
    """The fraction of samples that solve each problem, by id; each process measures some of the problems."""
    ids = [prompt.id for prompt in prompts]
    if path.is_file():
        stored = json.loads(path.read_text())
        if list(stored) == ids:
            return stored
    own: dict[str, float] = {}
    share = prompts[setting.ranks.rank :: setting.ranks.world]
    with progress(total=len(share), desc="frontier", unit="problem") as bar:
        for first in range(0, len(share), AT_ONCE):
            chunk = share[first : first + AT_ONCE]
            passed = _passed(chunk, range(FIRST), setting, judge)  # (P, FIRST)
            decided = np.isin(passed.sum(1), (0, FIRST))  # (P,)
            undecided = [prompt for prompt, done in zip(chunk, decided, strict=True) if not done]
            more = _passed(undecided, range(FIRST, SAMPLES), setting, judge)
            means = passed.mean(1)
            means[~decided] = np.concatenate([passed[~decided], more], axis=1).mean(1)
            own |= dict(zip([p.id for p in chunk], means.tolist(), strict=True))
            bar.update(len(chunk))
    together: dict[str, float] = {}
    for part in setting.ranks.gather(own):
        together |= part
    rates = {id_: together[id_] for id_ in ids}
    if setting.ranks.rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(rates))
    return rates


def _passed(prompts: Sequence[Prompt], numbers: range, setting: Setting, judge: Judge) -> np.ndarray:
    """Whether the samples with these indices pass, (P, len(numbers)) bool."""
    if not prompts:
        return np.zeros((0, len(numbers)), dtype=bool)
    answers = setting.held_out([(prompt, n) for prompt in prompts for n in numbers], purpose="frontier")
    passed = [verdict is not None and verdict.verdict == "passed" for verdict in judged(judge, answers)]
    return np.array(passed).reshape(-1, len(numbers))


# -- exact answers -----------------------------------------------------------------------------------------------------

MOST, LONGEST = 200, 64  # conversations, tokens per answer


@dataclass(frozen=True)
class ExactAnswers:
    """Held-out prompts with one correct answer each: exact match of greedy answers, ignoring whitespace."""

    prompts: Sequence[list[int]]
    answers: Sequence[list[int]]
    tokenizer: Tokenizer
    hardware: Hardware

    @classmethod
    def of(cls, path: Path, tokenizer: Tokenizer, hardware: Hardware) -> "ExactAnswers":
        """From a file, the first MOST conversations whose first answer has at most LONGEST tokens."""
        prompts: list[list[int]] = []
        answers: list[list[int]] = []
        for dialogue in records.read(path, Dialogue):
            turn = next((n for n, message in enumerate(dialogue.messages) if message["role"] == "assistant"), None)
            answer = tokenizer.encode(dialogue.messages[turn]["content"]) if turn else []
            if answer and len(answer) <= LONGEST and len(prompts) < MOST:
                before = chat.render(tokenizer, dialogue.messages[:turn], dialogue.tools, generation_prompt=True)
                prompts.append(before.ids)
                answers.append(answer)
        return cls(prompts, answers, tokenizer, hardware)

    @torch.no_grad()
    def measure(self, model: Transformer) -> JsonObject:
        """The fraction of exact answers with a Wilson interval; only {"n": 0} if there are no conversations."""
        if not self.prompts:
            return {"n": 0}
        was_training = model.training
        model.to(self.hardware.device).train(False)
        with self.hardware.autocast():
            generate = sampler(model, Sampling(LONGEST + 8, temperature=0.0), {self.tokenizer.turn_end})
            completions = generate(list(self.prompts), [0] * len(self.prompts))
        model.train(was_training)
        said = [self.tokenizer.decode(completion.ids).split() for completion in completions]
        right = [self.tokenizer.decode(answer).split() for answer in self.answers]
        exact = [a == b for a, b in zip(said, right, strict=True)]
        return wilson(sum(exact), len(exact)).named("accuracy") | {"n": len(exact)}
