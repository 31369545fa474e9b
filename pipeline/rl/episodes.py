"""Multi-turn reinforcement learning with tools: an environment's tasks, the answers to them, and their scores.

    conf/environment/<name>.py   task(split, number, seed) -> {"question", "tools", "state", "goal"}
                                 call(state, name, arguments) -> result       may change the state, or raise
                                 score(state, goal, answer) -> 0 to 1         for the end state and the last turn

    prompt --sample--> a turn --its calls--> results --append--> prompt and turn and results --sample--> the next turn

Everything is plain data, and all of it runs in the sandbox: standard library only, no files, no network, resource
limits. Sandbox children are stateless, so an answer's calls are replayed from its task's state for each new call. The
state is a function of the task and the calls, so a killed run resumes bit-exactly.

Sampled tokens are never changed: results are appended as ids (`chat.results`) and nothing is re-tokenized. Result
tokens are not the policy's: they have no log-probability and no loss (`Answer.own`). If a call cannot be parsed,
raises, hangs or returns anything but plain data, the reason becomes its result; results over LONGEST characters are
truncated. An answer ends with a turn without calls, at turn `max_turns`, or unfinished at `max_new_tokens` tokens,
including results.

The environment is trusted; the policy's arguments are not. A tool that passes them to `eval` is a security hole that
lets a policy write its own score.
"""

import ast
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.learning.reference import Start
from pipeline.rl import answers
from pipeline.rl.answers import Answer, Generate, Prompt, Task
from pipeline.rl.models import CausalSetting
from pipeline.rl.rollout import RolloutConfig
from pipeline.run.errors import DataError
from pipeline.run.types import JsonObject
from pipeline.run.workdir import Job
from pipeline.sandbox.judge import Judge
from pipeline.text import chat
from pipeline.text.tokenizer import Tokenizer

FUNCTIONS = ("task", "call", "score")
LONGEST = 2000  # maximum characters of a result
AT_ONCE = 50  # tasks created per child
DONE = 1 - 1e-9  # a task with at least this score counts as solved
DRIVER = """

def stagecoach_tasks(split, first, last, seed):
    import json

    return json.dumps([task(split, number, seed) for number in range(first, last)])


def stagecoach_play(state, calls, longest):
    import json

    for name, arguments in calls:
        try:
            text = json.dumps(call(state, name, arguments), ensure_ascii=False)
        except Exception as error:
            said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            text = json.dumps({"error": said[:longest]}, ensure_ascii=False)
    return text if len(text) <= longest else text[:longest] + f"... ({len(text)} characters in all)"


def stagecoach_score(state, calls, goal, answer):
    for name, arguments in calls:
        try:
            call(state, name, arguments)
        except Exception:
            pass
    return repr(float(score(state, goal, answer)))
"""


@dataclass(frozen=True)
class Environment:
    """An environment that runs in the sandbox of `judge`."""

    name: str
    source: str
    judge: Judge

    @classmethod
    def of(cls, path: Path, judge: Judge) -> "Environment":
        """Load an environment. Raises DataError if the file does not define one."""
        source = path.read_text(encoding="utf-8")
        try:
            defined = {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
        except SyntaxError as error:
            raise DataError(f"{path}: not Python ({error})") from error
        if missing := [name for name in FUNCTIONS if name not in defined]:
            raise DataError(f"{path}: expected the functions {', '.join(FUNCTIONS)}; found no {missing[0]}")
        return cls(path.stem, source + DRIVER, judge)

    def tasks(self, split: str, count: int, seed: int) -> dict[str, Task]:
        """The first `count` tasks of a split (train or val), keyed by id. Raises DataError if the environment fails."""
        chunks: list[list[object]] = [
            [split, first, min(first + AT_ONCE, count), seed] for first in range(0, count, AT_ONCE)
        ]
        made: list[JsonObject] = []
        for text, reason in self.judge.texts(self.source, "stagecoach_tasks", chunks):
            if text is None:
                raise DataError(f"environment {self.name}: task(...) failed: {reason}")
            made += json.loads(text)
        try:
            return {
                f"{self.name}/{split}/{n}": Task(row["question"], row["tools"], row["state"], row["goal"])
                for n, row in enumerate(made)
            }
        except (KeyError, TypeError) as error:
            raise DataError(
                f"environment {self.name}: task(...): expected `question`, `tools`, `state` and `goal`;"
                f" failed with {error!r}"
            ) from error

    def results(self, played: Sequence[tuple[Task, list[JsonObject]]]) -> list[str]:
        """For each task, the result of its last call, after replaying the calls before it."""
        rows = [[task.state, _pairs(calls), LONGEST] for task, calls in played]
        found = self.judge.texts(self.source, "stagecoach_play", rows)
        return [text if text is not None else _error(f"the tool failed: {reason}") for text, reason in found]

    def scores(self, given: Sequence[Answer]) -> list[float | None]:
        """The score of each answer, 0 to 1; None if the sandbox returns no score."""
        rows = []
        for answer in given:
            task = answer.prompt.record
            assert isinstance(task, Task)
            rows.append([task.state, _pairs(answer.calls), task.goal, answer.text if answer.finished else ""])
        found = [text for text, _ in self.judge.texts(self.source, "stagecoach_score", rows)]
        return [None if text is None else min(1.0, max(0.0, float(text))) for text in found]

    def verdicts(self, given: Sequence[Answer]) -> list[str]:
        """`passed` if a task is solved, else `failed`."""
        return ["passed" if score is not None and score >= DONE else "failed" for score in self.scores(given)]


def _pairs(calls: Sequence[JsonObject]) -> list[list[object]]:
    return [[call["name"], call["arguments"]] for call in calls]


def _error(reason: str) -> str:
    return json.dumps({"error": reason}, ensure_ascii=False)


@dataclass
class _Episode:
    """An answer being sampled."""

    prompt: Prompt
    number: int
    ids: list[int] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    calls: list[JsonObject] = field(default_factory=list)
    text: str = ""
    finished: bool = False

    def append(self, ids: Sequence[int], *, own: bool) -> None:
        """Append ids, either the policy's or a tool result's."""
        self.ids += ids
        self.own += [own] * len(ids)

    @property
    def task(self) -> Task:
        """The task of the prompt."""
        assert isinstance(self.prompt.record, Task)
        return self.prompt.record


def play(
    generate: Generate,
    requests: Sequence[tuple[Prompt, int]],
    tokenizer: Tokenizer,
    environment: Environment,
    *,
    seed: int,
    max_turns: int,
    max_new_tokens: int,
) -> list[Answer]:
    """A multi-turn answer to each (prompt, sample index). Output of `generate` beyond the token budget is cut off."""
    episodes = [_Episode(prompt, number) for prompt, number in requests]
    going = list(episodes)
    for turn in range(max_turns):
        if not going:
            break
        seeds = [answers.seed_of(seed, one.prompt, one.number, *([turn] if turn else [])) for one in going]
        said = generate([one.prompt.ids + one.ids for one in going], seeds)
        asking = []
        for one, completion in zip(going, said, strict=True):
            ids = [*completion.ids, tokenizer.turn_end] if completion.stop == "stop" else list(completion.ids)
            left = max_new_tokens - len(one.ids)
            one.append(ids[:left], own=True)
            one.logprobs += completion.logprobs[:left]
            one.text = tokenizer.decode(completion.ids)
            one.finished = completion.stop == "stop" and len(ids) <= left
            reply = chat.parse(one.text)
            if one.finished and turn + 1 < max_turns and (reply.tool_calls or reply.error):
                asking.append((one, reply))
        going = list(_answered(asking, tokenizer, environment, max_new_tokens))
    return [
        Answer(one.prompt, one.number, one.ids, one.logprobs, one.finished, one.text, own=one.own, calls=one.calls)
        for one in episodes
    ]


def _answered(
    asking: Sequence[tuple[_Episode, chat.Reply]], tokenizer: Tokenizer, environment: Environment, limit: int
) -> Iterator[_Episode]:
    """Run the calls of each turn and append their results; yield the episodes with room for another token."""
    contents: list[list[str]] = [[] for _ in asking]
    for nth in range(max((len(reply.tool_calls) for _, reply in asking), default=0)):
        calling = [n for n, (_, reply) in enumerate(asking) if nth < len(reply.tool_calls)]
        for n in calling:
            asking[n][0].calls.append(asking[n][1].tool_calls[nth])
        found = environment.results([(asking[n][0].task, asking[n][0].calls) for n in calling])
        for n, result in zip(calling, found, strict=True):
            contents[n].append(result)
    for (one, reply), content in zip(asking, contents, strict=True):
        if reply.error:
            content.append(_error(reply.error))
        ids = chat.results(tokenizer, content)
        if len(one.ids) + len(ids) < limit:
            one.append(ids, own=False)
            yield one
        else:
            one.finished = False


class EpisodeSetting(CausalSetting):
    """The setting for multi-turn answers."""

    def __init__(
        self,
        start: Start,
        config: RolloutConfig,
        job: Job,
        environment: Path,
        judge: Judge | None,
        max_turns: int,
        engine_for: Path | None = None,
    ) -> None:
        """Raises DataError if the file `environment` does not define an environment."""
        super().__init__(start, config, job, engine_for=engine_for)
        assert judge is not None  # required by the reward `task`
        self.environment, self.max_turns = Environment.of(environment, judge), max_turns

    def _drawn(self, generate: Generate, requests: Sequence[tuple[Prompt, int]], seed: int) -> list[Answer]:
        return play(
            generate,
            requests,
            self.start.tokenizer,
            self.environment,
            seed=seed,
            max_turns=self.max_turns,
            max_new_tokens=self.config.max_new_tokens,
        )
