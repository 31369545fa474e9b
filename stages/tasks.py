"""Stage tasks: conversations, programming problems and preference pairs, with known truth.

    data/raw, data/own, feedback/preferences.jsonl -> data/{dialogues,problems,preferences}/{train,val,test}.jsonl
                                                   -> data/facts/{train,val,test,control}.jsonl

`data: machine` generates all three. `data: files` and `data: hub` bring their own where they name some, and the rest is
generated. Problems that are brought are tried in the sandbox: one whose tests cannot be judged, or whose own solution
fails them, stops the stage (of the user's files) or leaves (of the hub's sets, up to `max_rejected`). Test items whose
text stands in the training data are dropped here, so that no knob of this stage retrains the language model. Pairs that
people gave on the web page join the training pairs as far as `tasks.feedback` says. Facts are always invented.
"""

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.evaluation import code as evaluation_code
from pipeline.ingest import duplicates, hub, own_files
from pipeline.ingest import feedback as ingest_feedback
from pipeline.ingest import sources as ingest_sources
from pipeline.ingest.feedback import FeedbackConfig
from pipeline.ingest.records import Dialogue, Pair, Problem, write
from pipeline.run.config import block, group, main
from pipeline.run.errors import DataError
from pipeline.run.processes import pool_map
from pipeline.run.tracking import progress, say
from pipeline.run.workdir import Job
from pipeline.sandbox import candidates as sandbox_candidates
from pipeline.sandbox.candidates import Candidates
from pipeline.sandbox.judge import Judge, SandboxConfig
from pipeline.synthetic import drills, facts, preferences, programs, stories, tool_dialogues, tools

CHUNK = 200  # records that a worker process generates at a time
SHOWN = 5  # wrong problems that a message names
WORTH_A_WORKER = 500  # fewer are made sooner than a process starts
# Of the dialogues; a story has three times the trained tokens.
SHARES = {"tools": 0.40, "choice": 0.10, "code": 0.35, "copy": 0.05, "story": 0.05, "talk": 0.05}


@dataclass(frozen=True, kw_only=True)
class Params:
    """The block `tasks`."""

    dialogues: int
    """Conversations to train on."""
    problems: int
    """Programming problems with a known answer."""
    rl_problems: int
    """Problems for reinforcement learning: tests, no answer."""
    pairs: int
    """Preference pairs to train on."""
    services: int
    """That facts are invented about, four each, for the memory branch."""
    test_items: int
    """Held-out items of each kind; three times as many pairs, a third of each kind."""
    label_noise: float
    """Share of the training pairs whose answers are swapped."""
    feedback: FeedbackConfig | None = field(default_factory=FeedbackConfig)
    """{accept: reviewed, share: 0.2}: pairs that people gave on the web page; none: leave them out."""
    data: ingest_sources.DataConfig = group("data")
    sandbox: SandboxConfig = block("sandbox")

    def __post_init__(self) -> None:
        if min(self.dialogues, self.problems, self.rl_problems, self.pairs, self.test_items, self.services) < 1:
            raise ValueError("dialogues, problems, rl_problems, pairs, test_items, services: expected at least 1")
        if not 0 <= self.label_noise < 0.5:
            raise ValueError(f"label_noise: expected a share in [0, 0.5), got {self.label_noise}")


@dataclass(frozen=True)
class Chunk:
    """Records `first` to `stop` of a generator, for a worker process."""

    kind: str  # problems, dialogues, choices, tool pairs, story pairs
    split: str
    first: int
    stop: int
    seed: int


Splits = dict[str, list[Any]]  # train, val, test (and rl) -> records


def run(
    params: Params,
    job: Job,
    *,
    own: Path,
    text: Path,
    code: Path,
    feedback: Path,
    dialogues: Path,
    problems: Path,
    pairs: Path,
    known: Path,
) -> None:
    """Write the four folders."""
    parts = job.folder / "parts"
    rows: dict[str, dict[str, int]] = {}  # what became of the rows that the user or the hub brought
    with progress(total=5, desc="tasks", unit="step") as bar:
        brought = {
            kind: _brought(kind, params.data, own, parts, rows) for kind in ("dialogues", "problems", "preferences")
        }
        if brought["problems"] is not None:
            _try_out(brought["problems"], params, job, parts, rows["problems"])
        bar.update()
        made = _problems(params, job) if brought["problems"] is None else brought["problems"]
        bar.update()
        talks = _dialogues(params, job, made) if brought["dialogues"] is None else brought["dialogues"]
        bar.update()
        dropped = _screen(talks, made, text, code, job.workers)
        bar.update()
        judged = _pairs(params, job) if brought["preferences"] is None else brought["preferences"]
        given, told = [], {}
        if params.feedback is not None:
            file, rejected = feedback / "preferences.jsonl", parts / "feedback-rejected.jsonl"
            given, told = ingest_feedback.pairs(file, params.feedback, len(judged["train"]), rejected)
        judged["train"] += given
        bar.update()
    invented = facts.facts(params.services, job.seed)
    for folder, splits in ((dialogues, talks), (problems, made), (pairs, judged), (known, invented)):
        folder.mkdir(parents=True)
        for split, records in splits.items():
            write(folder / f"{split}.jsonl", records)
    for kind, target in (("dialogues", dialogues), ("problems", problems), ("preferences", pairs), ("feedback", pairs)):
        files = [parts / f"{kind}-rejected.jsonl", *hub.rejected_files(params.data, kind, parts / "hub")]
        rejected = b"".join(path.read_bytes() for path in files if path.is_file())
        if rejected:
            (target / ("feedback-rejected.jsonl" if kind == "feedback" else hub.REJECTED)).write_bytes(rejected)
    if rows:
        job.report(rows=rows)
    if told.get("rows"):
        job.report(feedback=told)
    job.report(
        dialogues=_counts(talks),
        problems=_counts(made),
        preferences=_counts(judged),
        facts=_counts(invented),
        dropped_test_items=dropped,
        kinds=dict(sorted(Counter(d.kind for d in talks["train"]).items())),
        chosen_is_longer=preferences.chosen_is_longer(judged["train"]),
    )


def _counts(splits: Splits) -> dict[str, int]:
    return {split: len(records) for split, records in splits.items()}


def _brought(
    kind: str, data: ingest_sources.DataConfig, own: Path, parts: Path, counts: dict[str, dict[str, int]]
) -> Splits | None:
    """The user's records of a kind; None where none are named. Every second held-out row is for the test."""
    if data.source == "files" and getattr(data, kind):
        parts.mkdir(parents=True, exist_ok=True)
        rejected = parts / f"{kind}-rejected.jsonl"
        rows: Iterator[tuple[str, Any]] = own_files.read_files(own, data, kind, rejected, counts.setdefault(kind, {}))
    elif data.source == "hub" and any(entry.enabled for entry in data.hub.get(kind, [])):
        rows = hub.read_hub(data, kind, parts / "hub", counts.setdefault(kind, {}))
    else:
        return None
    splits: Splits = {"train": [], "val": [], "test": []}
    held_out = 0
    for split, record in rows:
        if split == "val":
            split = ("val", "test")[held_out % 2]
            held_out += 1
        splits[split].append(record)
    if kind == "problems":  # what has no reference answer can only be learnt from its tests
        splits["rl"] = [p for p in splits["train"] if p.answer is None]
        splits["train"] = [p for p in splits["train"] if p.answer is not None]
    return splits


def _try_out(splits: Splits, params: Params, job: Job, parts: Path, counts: dict[str, int]) -> None:
    """Judge every brought problem's own solution by its tests. Raises DataError, or ConfigError without a sandbox.

    A person can mend his own files, so one wrong problem stops the stage. Nobody here can mend a set of the hub: its
    wrong problems are named, written down and left out, as long as they are no more than `max_rejected` of all.
    """
    problems = [problem for records in splits.values() for problem in records]
    with Judge(params.sandbox, job.workers, url=job.runtime.sandbox_url) as judge:
        found = evaluation_code.faults(judge, ((problem, evaluation_code.solution(problem)) for problem in problems))
        wrong = {p.id: fault for p, fault in zip(problems, found, strict=True) if fault[1]}
    if not wrong:
        return
    named = [f"problem {identity!r}: {field}: {reason}" for identity, (field, reason) in wrong.items()]
    shown = "\n  ".join(named[:SHOWN])
    allowed = params.data.max_rejected if params.data.source == "hub" else 0.0
    if len(wrong) > allowed * len(problems):
        raise DataError(
            f"{len(wrong)} of {len(problems)} problems are wrong; repair them or take them out. "
            f"{'All of them' if len(wrong) <= SHOWN else f'The first {SHOWN}'}:\n  {shown}"
        )
    say(f"{len(wrong)} of {len(problems)} problems are left out:\n  {shown}")
    with (parts / "problems-rejected.jsonl").open("w", encoding="utf-8", newline="\n") as file:
        for identity, (field, reason) in wrong.items():
            file.write(json.dumps({"id": identity, "field": field, "reason": reason}) + "\n")
    for split, records in splits.items():
        splits[split] = [problem for problem in records if problem.id not in wrong]
    counts["rejected"] += len(wrong)
    counts["accepted"] -= len(wrong)


def generate(chunk: Chunk) -> list[Any]:
    """What a worker process does with a chunk."""
    if chunk.kind == "problems":
        return list(programs.problems(chunk.split, chunk.stop, chunk.seed, chunk.first))
    if chunk.kind == "story pairs":
        return list(preferences.story_pairs(_paths(chunk.split, chunk.stop)[chunk.first :], chunk.seed))
    if chunk.kind == "choices":
        return [tools.choice_dialogue(chunk.split, chunk.seed, n) for n in range(chunk.first, chunk.stop)]
    talks = tools.dialogues(chunk.split, chunk.stop, chunk.seed, chunk.first)
    return list(talks if chunk.kind == "dialogues" else preferences.tool_pairs(talks, chunk.seed))


def _chunks(kind: str, split: str, count: int, seed: int) -> list[Chunk]:
    return [Chunk(kind, split, first, min(first + CHUNK, count), seed) for first in range(0, count, CHUNK)]


def _in_workers(chunks: list[Chunk], workers: int) -> Iterator[list[Any]]:
    """The records of each chunk, made in worker processes as far as they are asked for."""
    return pool_map(generate, chunks, min(workers, max(1, sum(c.stop - c.first for c in chunks) // WORTH_A_WORKER)))


def _generated(kind: str, counts: dict[str, int], seed: int, workers: int) -> Splits:
    """The first records of each split."""
    chunks = [chunk for split, count in counts.items() for chunk in _chunks(kind, split, count, seed)]
    splits: Splits = {split: [] for split in counts}
    for chunk, records in zip(chunks, _in_workers(chunks, workers), strict=True):
        splits[chunk.split] += records
    return splits


def _problems(params: Params, job: Job) -> Splits:
    counts = {
        "train": params.problems,
        "val": max(10, params.problems // 50),
        "rl": params.rl_problems,
        "test": 2 * params.test_items,
    }
    return _generated("problems", counts, job.seed, job.workers)


def _dialogues(params: Params, job: Job, problems: Splits) -> Splits:
    """Tools, choices, code, drills, stories and talk in their shares, in an order in which every stretch holds all
    of them.
    """
    splits: Splits = {}
    counts = {"train": params.dialogues, "val": max(20, params.dialogues // 40), "test": params.test_items}
    shares = {split: count if split == "test" else round(count * SHARES["tools"]) for split, count in counts.items()}
    calls = _generated("dialogues", shares, job.seed, job.workers)
    choices = _generated(
        "choices", {s: round(counts[s] * SHARES["choice"]) for s in ("train", "val")}, job.seed, job.workers
    )
    for split, count in counts.items():
        number = {kind: round(count * share) for kind, share in SHARES.items()}
        with_answer = [p for p in problems[split] if p.answer is not None]
        kinds = [
            calls[split],
            choices.get(split, []),
            [programs.dialogue(p) for p in with_answer[: number["code"]]] if split != "test" else [],
            [drills.dialogue(split, job.seed, n) for n in range(number["copy"])],
            [preferences.story_dialogue(path) for path in _paths(split, number["story"])],
            [tool_dialogues.dialogue(split, job.seed, n) for n in range(number["talk"])],
        ]
        splits[split] = _interleave(kinds)
    return splits


def _interleave(lists: list[list[Dialogue]]) -> list[Dialogue]:
    placed = [((n + 0.5) / len(one), k, d) for k, one in enumerate(lists) for n, d in enumerate(one)]
    return [d for _, _, d in sorted(placed, key=lambda entry: entry[:2])]


def _paths(split: str, count: int) -> list[str]:
    """Story paths of a split: val and test are numbers and families that no training text holds."""
    families = [f for f in stories.FAMILIES if split != "train" or f not in stories.HELD_OUT]
    step = {"train": 0, "val": 50, "test": 100}[split]
    paths = (
        f"stories/{family}/{number if split == 'train' else number * 100 + step - 50}"
        for number in itertools.count(1)
        for family in families
    )
    fitting = (path for path in paths if stories.is_held_out(path) == (split != "train"))
    return list(itertools.islice(fitting, count))


def _screen(talks: Splits, problems: Splits, text: Path, code: Path, workers: int) -> dict[str, int]:
    """Drop test items that the training data hold; how many of each kind."""
    items = [
        (f"dialogues {d.id}", next((m["content"] for m in d.messages if m["role"] == "user"), ""))
        for d in talks["test"]
        if d.kind != "story"
    ]
    items += [(f"problems {p.id}", programs.unfenced(p.answer)) for p in problems["test"] if p.answer]
    trained = [m["content"] for d in talks["train"] if d.kind != "code" for m in d.messages if m["role"] == "user"]
    hits = duplicates.found_in(items, [text, code], trained, workers)
    dropped = {}
    for kind, splits in (("dialogues", talks), ("problems", problems)):
        kept = [record for record in splits["test"] if f"{kind} {record.id}" not in hits]
        dropped[kind] = len(splits["test"]) - len(kept)
        splits["test"] = kept
    return dropped


def _pairs(params: Params, job: Job) -> Splits:
    splits: Splits = {}
    with Judge(params.sandbox, job.workers, url=job.runtime.sandbox_url) as judge:

        def scores(sources: list[tuple[Problem, str]]) -> Iterator[float | None]:
            asked = []
            for _, group in itertools.groupby(sources, key=lambda source: source[0].id):
                candidates = list(group)
                problem, hidden = candidates[0][0], [test for test in candidates[0][0].tests if not test["visible"]]
                texts = [programs.unfenced(content) for _, content in candidates]
                asked.append(Candidates(texts, problem.entry_point, hidden))
            for found in sandbox_candidates.scores(judge, asked):
                yield from found

        def made(kind: str) -> Iterator[Any]:
            for records in _in_workers(_chunks(kind, split, more, job.seed + 1), job.workers):
                yield from records

        def code_pairs() -> Iterator[Pair]:
            return preferences.code_pairs((p for p in made("problems") if p.answer), job.seed, scores)

        for split, count in (("train", params.pairs), ("val", params.test_items), ("test", 3 * params.test_items)):
            more = 2 * count + 100  # what gives no pair is passed over
            kinds = {"code": code_pairs, "tools": lambda: made("tool pairs"), "story": lambda: made("story pairs")}
            splits[split] = list(preferences.pairs(kinds, count=count, split=split))
    splits["train"] = list(preferences.flip(splits["train"], params.label_noise, job.seed))
    return splits


if __name__ == "__main__":
    main(
        run,
        inputs={"own": "data/own", "text": "data/raw/text", "code": "data/raw/code", "feedback": "feedback"},
        outs={
            "dialogues": "data/dialogues",
            "problems": "data/problems",
            "pairs": "data/preferences",
            "known": "data/facts",
        },
        seed="data_seed",
    )
