"""Stage tasks: build conversations, programming problems, preference pairs and labels with known answers.

    data/own, feedback -> data/{dialogues,problems,preferences,labels}/{train,val,test}.jsonl
                       -> data/skill/{train,val,test}.jsonl, data/facts/{train,val,test,control}.jsonl

`data: machine` and `data: packages` generate all of them; `data: hub` generates the kinds that it does not list. With
`data: files`, each kind lists its entries (`ingest/entries.py`): files, Hub data sets, or `packages` for generated
data, optionally weighted; an empty list yields empty files. A repository among the problems adds its tested functions
as tasks for reinforcement learning (`evaluation/mining.py`); `mined.csv` lists the outcome for each function. Supplied
problems are checked in the sandbox. A problem is bad if its tests cannot be judged or its own solution fails them. The
stage stops at a bad problem from a user's file, and skips those from a Hub data set (up to the fraction
`max_rejected`). Generated labels are the preference pairs of the same split, divided into single labels. Pairs and
labels that people gave on the web page (feedback/preferences.jsonl, feedback/labels.jsonl) join the training split,
each up to the limit in `tasks.feedback`; these pairs are not divided, so that the limit holds for labels too. Facts and
the skill (requests for SQL) are always synthetic. The generated test problems end with requests in everyday words.

Generated dialogues present problems with answers: the given ones, or generated ones if none of the given ones has an
answer.
"""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from pipeline.evaluation import code as evaluation_code
from pipeline.evaluation import mining
from pipeline.evaluation.mining import Mined
from pipeline.ingest import hub, mixture, own_files, repository
from pipeline.ingest import sources as ingest_sources
from pipeline.ingest.entries import PACKAGES, RepositoryEntry
from pipeline.ingest.intake import RowCounts
from pipeline.ingest.mixture import Lot, Splits
from pipeline.ingest.own_files import FeedbackConfig
from pipeline.ingest.records import Dialogue, Label, Pair, Problem, unpaired, write
from pipeline.run.config import block, group
from pipeline.run.errors import DataError
from pipeline.run.processes import pool_map
from pipeline.run.stage import main
from pipeline.run.tracking import progress, say
from pipeline.run.types import JsonObject
from pipeline.run.workdir import Job
from pipeline.sandbox.judge import Candidates, Judge, SandboxConfig, scores
from pipeline.synthetic import drills, preferences, programs, stories, tools

CHUNK = 200  # records that a worker process generates at a time
SHOWN = 5  # bad problems listed in a message
WORTH_A_WORKER = 500  # records; fewer are generated faster than a process starts
# Fractions of the dialogues; training covers three times as many tokens in a story as in any other dialogue.
SHARES = {"tools": 0.36, "choice": 0.09, "code": 0.33, "copy": 0.04, "story": 0.05, "talk": 0.13}


@dataclass(frozen=True, kw_only=True)
class Params:
    """The `tasks` block."""

    dialogues: int
    """Conversations to train on."""
    problems: int
    """Programming problems with a known answer."""
    rl_problems: int
    """Problems for reinforcement learning, with tests but no answer."""
    pairs: int
    """Preference pairs to train on."""
    skill: int
    """Conversations that teach a new skill, for the adapter branch."""
    services: int
    """Fictional services, each with four invented facts, for the memory branch."""
    test_items: int
    """Held-out items of each kind; for pairs, three times as many: equal numbers for code, tools and stories."""
    label_noise: float
    """Fraction of training pairs with swapped answers."""
    feedback: FeedbackConfig | None = field(default_factory=FeedbackConfig)
    """{accept: reviewed, share: 0.2}: which pairs and labels from the web page to train on; none: exclude them."""
    data: ingest_sources.DataConfig = group("data")
    sandbox: SandboxConfig = block("sandbox")

    def __post_init__(self) -> None:
        names = ("dialogues", "problems", "rl_problems", "pairs", "test_items", "skill", "services")
        if min(getattr(self, name) for name in names) < 1:
            raise ValueError(f"{', '.join(names)}: expected at least 1")
        if not 0 <= self.label_noise < 0.5:
            raise ValueError(f"label_noise: expected a fraction in [0, 0.5), got {self.label_noise}")

    def preflight(self, root: Path) -> list[str]:
        """Problems found before reading anything: globs for dialogues, problems, pairs or labels that match nothing."""
        return own_files.missing_globs(root / "data/own", self.data, ("dialogues", "problems", "preferences", "labels"))


@dataclass(frozen=True)
class Chunk:
    """Records `first` to `stop` (exclusive) of a generator, for a worker process."""

    kind: str  # problems, dialogues, choices, tool pairs, story pairs
    split: str
    first: int
    stop: int
    seed: int


R = TypeVar("R", Dialogue, Problem, Pair, Label)


def run(
    params: Params,
    job: Job,
    *,
    own: Path,
    feedback: Path,
    dialogues: Path,
    problems: Path,
    pairs: Path,
    labels: Path,
    known: Path,
    skill: Path,
) -> None:
    """Write the six output folders."""
    parts = job.folder / "parts"
    parts.mkdir(parents=True, exist_ok=True)
    tallies: dict[str, RowCounts] = {}  # kind -> counts of supplied rows
    with progress(total=5, desc="tasks", unit="step") as bar:
        dialogue_lots = mixture.read_lots("dialogues", Dialogue, params.data, own, parts, tallies)
        problem_lots = mixture.read_lots("problems", Problem, params.data, own, parts, tallies)
        pair_lots = mixture.read_lots("preferences", Pair, params.data, own, parts, tallies)
        label_lots = mixture.read_lots("labels", Label, params.data, own, parts, tallies)
        mined = _mine(problem_lots, params, job, own)
        _try_out(problem_lots, params, job, parts, tallies)
        bar.update()
        mixture.hold_out("problems", problem_lots, params.data)
        _to_rl(problem_lots)
        _fill(problem_lots, lambda: _generate_problems(params, job))
        problem_splits = mixture.join(problem_lots)  # each problem once, regardless of weight, to build dialogues from
        bar.update()
        mixture.hold_out("dialogues", dialogue_lots, params.data)
        _fill(dialogue_lots, lambda: _generate_dialogues(params, job, _with_answers(problem_splits, params, job)))
        bar.update()
        mixture.hold_out("preferences", pair_lots, params.data)
        _fill(pair_lots, lambda: _pairs(params, job))
        bar.update()
        mixture.hold_out("labels", label_lots, params.data)
        once = mixture.join(pair_lots)  # each pair once, regardless of weight
        _fill(label_lots, lambda: {split: list(unpaired(records)) for split, records in once.items()})
        tables: dict[str, list[JsonObject]] = {}
        dialogue_splits, tables["dialogues"] = mixture.combine("dialogues", dialogue_lots, job.seed, tallies)
        problem_splits, tables["problems"] = mixture.combine("problems", problem_lots, job.seed, tallies)
        pair_splits, tables["preferences"] = mixture.combine("preferences", pair_lots, job.seed, tallies)
        label_splits, tables["labels"] = mixture.combine("labels", label_lots, job.seed, tallies)
        problem_splits["rl"] = problem_splits.get("rl") or list(problem_splits["train"])  # they have tests too
        mixture.tell_small("dialogues", dialogue_lots, len(dialogue_splits["test"]))
        mixture.tell_small("problems", problem_lots, len(problem_splits["test"]))
        mixture.tell_small("preferences", pair_lots, len(pair_splits["test"]))
        mixture.tell_small("labels", label_lots, len(label_splits["test"]))
        feedback_counts = _add_feedback(params.feedback, feedback, parts, pair_splits["train"], label_splits["train"])
        bar.update()
    fact_splits = drills.facts(params.services, job.seed)
    skill_counts = {"train": params.skill, "val": max(10, params.skill // 10), "test": params.test_items}
    skill_splits = {split: list(drills.queries(split, count, job.seed)) for split, count in skill_counts.items()}
    for folder, splits in (
        (dialogues, dialogue_splits),
        (problems, problem_splits),
        (pairs, pair_splits),
        (labels, label_splits),
        (known, fact_splits),
        (skill, skill_splits),
    ):
        folder.mkdir(parents=True)
        for split, records in splits.items():
            write(folder / f"{split}.jsonl", records)
    for name, one in mined.items():
        job.report(**{f"mined/{name}": one.summary()})
    if mined:
        (problems / "mined.csv").write_text(mining.table(mined.values()), encoding="utf-8")
    folders = {"dialogues": dialogues, "problems": problems, "preferences": pairs, "labels": labels}
    _write_rejected(params.data, parts, folders)
    if any(tables.values()):
        job.report(mixture={kind: table for kind, table in tables.items() if table})
        say("\n".join(mixture.shown(kind, table) for kind, table in tables.items() if table))
    if tallies:
        job.report(
            rows={kind: tally.totals for kind, tally in tallies.items()},
            rows_by_file={kind: tally.files for kind, tally in tallies.items()},
        )
        say("\n".join(tally.shown(kind) for kind, tally in tallies.items()))
    job.report(
        **feedback_counts,
        dialogues=_counts(dialogue_splits),
        problems=_counts(problem_splits),
        preferences=_counts(pair_splits),
        labels=_counts(label_splits),
        good_labels={split: sum(label.desirable for label in records) for split, records in label_splits.items()},
        facts=_counts(fact_splits),
        skill=_counts(skill_splits),
        kinds=dict(sorted(Counter(d.kind for d in dialogue_splits["train"]).items())),
        chosen_is_longer=preferences.chosen_is_longer(pair_splits["train"]),
    )


def _add_feedback(
    config: FeedbackConfig | None, folder: Path, parts: Path, pairs: list[Pair], labels: list[Label]
) -> JsonObject:
    """Add the feedback from the web page to the training records. Returns the counts of both files, for the report."""
    counts: JsonObject = {}
    if config is not None:
        file, rejected = folder / "preferences.jsonl", parts / "feedback-preferences-rejected.jsonl"
        more_pairs, counts["feedback"] = own_files.feedback(file, Pair, config, len(pairs), rejected)
        file, rejected = folder / "labels.jsonl", parts / "feedback-labels-rejected.jsonl"
        more_labels, counts["feedback_labels"] = own_files.feedback(file, Label, config, len(labels), rejected)
        pairs += more_pairs
        labels += more_labels
    return {name: summary for name, summary in counts.items() if summary["rows"]}


def _write_rejected(data: ingest_sources.DataConfig, parts: Path, folders: dict[str, Path]) -> None:
    """Write the rejected rows of each kind, from files and from the web page, to the folder of its records."""
    for kind, folder in folders.items():
        files = [
            parts / f"{kind}-rejected.jsonl",
            parts / f"{kind}-wrong.jsonl",
            *hub.rejected_files(data, kind, parts / "hub"),
        ]
        given = [parts / f"feedback-{kind}-rejected.jsonl"]
        for name, sources in ((hub.REJECTED, files), ("feedback-rejected.jsonl", given)):
            rows = b"".join(path.read_bytes() for path in sources if path.is_file())
            if rows:
                (folder / name).write_bytes(rows)


def _counts(splits: Mapping[str, Sized]) -> dict[str, int]:
    return {split: len(records) for split, records in splits.items()}


def _fill(lots: Sequence[Lot[R]], generate: Callable[[], Splits[R]]) -> None:
    """Generate the records of the `packages` lot, if there is one."""
    for lot in lots:
        if lot.source == PACKAGES:
            lot.splits = generate()


def _mine(lots: Sequence[Lot[Problem]], params: Params, job: Job, own: Path) -> dict[str, Mined]:
    """Fill the lots of repositories with tasks for reinforcement learning. Raises DataError if one yields none."""
    found: dict[str, Mined] = {}
    entries = [(lot, entry) for lot in lots for entry in lot.entries if isinstance(entry, RepositoryEntry)]
    if not entries:
        return found
    with Judge(params.sandbox, job.workers, url=job.runtime.sandbox_url) as judge:
        for lot, entry in entries:
            source = repository.read(repository.find(own, entry.repository), params.data.max_bytes)
            mined = found[entry.repository] = mining.mine(source, judge)
            say(mined.shown(entry.repository))
            if not mined.problems:
                raise DataError(f"{entry.repository}: none of its functions can be used as a task; {mined.reasons()}")
            share = params.data.val_share + params.data.test_share
            split_of = repository.splits(source, repository.held_out(entry, source, share))
            for split, problems in mining.apart(mined.problems, split_of, share).items():
                lot.splits[split] += problems
    return found


def _try_out(
    lots: Sequence[Lot[Problem]], params: Params, job: Job, parts: Path, tallies: dict[str, RowCounts]
) -> None:
    """Run every supplied problem's own solution against its tests. Raises DataError if too many fail, and ConfigError
    without a sandbox.

    Users can fix their own files, so one bad problem stops the stage. They cannot fix a Hub data set: its bad problems
    are listed, written to a file and skipped, up to the fraction `max_rejected`.
    """
    supplied = [(lot, [p for records in lot.splits.values() for p in records]) for lot in lots]
    supplied = [(lot, problems) for lot, problems in supplied if problems]
    if not supplied:
        return
    with (
        Judge(params.sandbox, job.workers, url=job.runtime.sandbox_url) as judge,
        (parts / "problems-wrong.jsonl").open("w", encoding="utf-8", newline="\n") as file,
    ):
        for lot, problems in supplied:
            solved = ((problem, evaluation_code.solution(problem)) for problem in problems)
            faults = evaluation_code.faults(judge, solved)
            wrong = {p.id: fault for p, fault in zip(problems, faults, strict=True) if fault[1]}
            _check_wrong(lot, wrong, len(problems), params.data.max_rejected if lot.source == "hub" else 0.0)
            for id_, (field, reason) in wrong.items():
                tallies["problems"].drop(lot.files[id_])
                file.write(json.dumps({"id": id_, "field": field, "reason": reason}) + "\n")
            lot.splits = {split: [p for p in ps if p.id not in wrong] for split, ps in lot.splits.items()}


def _to_rl(lots: Sequence[Lot[Problem]]) -> None:
    """Move supplied problems that have tests but no answer from the training split to the `rl` split."""
    for lot in lots:
        if any(lot.splits.values()):
            lot.splits["rl"] = [p for p in lot.splits["train"] if p.answer is None]
            lot.splits["train"] = [p for p in lot.splits["train"] if p.answer is not None]


def _check_wrong(lot: Lot[Problem], wrong: dict[str, tuple[str, str]], num_problems: int, allowed: float) -> None:
    """Raise DataError if more than the fraction `allowed` of the problems is bad; otherwise print the skipped ones."""
    lines = [
        f"{lot.files[id_]}:{lot.lines.get(id_, 1)}: problem {id_!r}: {field}: {reason}"
        for id_, (field, reason) in wrong.items()
    ]
    shown = "\n  ".join(lines[:SHOWN])
    if len(wrong) > allowed * num_problems:
        raise DataError(
            f"{len(wrong)} of {num_problems} problems are invalid; fix or remove them. "
            f"{'All of them' if len(wrong) <= SHOWN else f'The first {SHOWN}'}:\n  {shown}"
        )
    if wrong:
        say(f"{len(wrong)} of {num_problems} problems skipped:\n  {shown}")


def generate(chunk: Chunk) -> list[Any]:
    """Generate the records of a chunk; their type depends on the chunk's kind. Runs in a worker process."""
    if chunk.kind == "problems":
        return list(programs.problems(chunk.split, chunk.stop, chunk.seed, chunk.first))
    if chunk.kind == "story pairs":
        return list(preferences.story_pairs(_paths(chunk.split, chunk.stop)[chunk.first :], chunk.seed))
    if chunk.kind == "choices":
        return [tools.choice_dialogue(chunk.split, chunk.seed, n) for n in range(chunk.first, chunk.stop)]
    dialogues = tools.dialogues(chunk.split, chunk.stop, chunk.seed, chunk.first)
    return list(dialogues if chunk.kind == "dialogues" else preferences.tool_pairs(dialogues, chunk.seed))


def _chunks(kind: str, split: str, count: int, seed: int) -> list[Chunk]:
    return [Chunk(kind, split, first, min(first + CHUNK, count), seed) for first in range(0, count, CHUNK)]


def _generate_chunks(chunks: list[Chunk], workers: int) -> Iterator[list[Any]]:
    """The records of each chunk, generated in worker processes just before the caller needs them."""
    return pool_map(generate, chunks, min(workers, max(1, sum(c.stop - c.first for c in chunks) // WORTH_A_WORKER)))


def _generated(kind: str, counts: dict[str, int], seed: int, workers: int) -> dict[str, list[Any]]:
    """The first `counts[split]` records of each split; their type depends on `kind`."""
    chunks = [chunk for split, count in counts.items() for chunk in _chunks(kind, split, count, seed)]
    splits: dict[str, list[Any]] = {split: [] for split in counts}
    for chunk, records in zip(chunks, _generate_chunks(chunks, workers), strict=True):
        splits[chunk.split] += records
    return splits


def _generate_problems(params: Params, job: Job) -> Splits[Problem]:
    counts = {
        "train": params.problems,
        "val": max(10, params.problems // 50),
        "rl": params.rl_problems,
        "test": 2 * params.test_items,
    }
    splits = _generated("problems", counts, job.seed, job.workers)
    splits["test"] += programs.requests(job.seed)
    return splits


def _with_answers(problems: Splits[Problem], params: Params, job: Job) -> Splits[Problem]:
    """Problems to build dialogues from: the given ones, or generated ones if the given ones have no answers."""
    return problems if any(p.answer is not None for p in problems["train"]) else _generate_problems(params, job)


def _generate_dialogues(params: Params, job: Job, problems: Splits[Problem]) -> Splits[Dialogue]:
    """Tool, choice, code, drill, story and talk dialogues in the proportions of SHARES, evenly interleaved."""
    splits: Splits[Dialogue] = {}
    counts = {"train": params.dialogues, "val": max(20, params.dialogues // 40), "test": params.test_items}
    tool_counts = {s: count if s == "test" else shared(count)["tools"] for s, count in counts.items()}
    calls = _generated("dialogues", tool_counts, job.seed, job.workers)
    calls["test"] += tools.unserved_dialogues(params.test_items, job.seed)
    choice_counts = {s: shared(counts[s])["choice"] for s in ("train", "val")}
    choices = _generated("choices", choice_counts, job.seed, job.workers)
    for split, count in counts.items():
        number = shared(count)
        with_answer = [p for p in problems[split] if p.answer is not None]
        kinds = [
            calls[split],
            choices.get(split, []),
            [programs.dialogue(p) for p in with_answer[: number["code"]]] if split != "test" else [],
            [drills.dialogue(split, job.seed, n) for n in range(number["copy"])],
            [preferences.story_dialogue(path) for path in _paths(split, number["story"])],
            [tools.talk_dialogue(split, job.seed, n) for n in range(number["talk"])],
        ]
        splits[split] = mixture.interleaved(kinds)
    return splits


def shared(count: int) -> dict[str, int]:
    """Split `count` dialogues among the kinds; the returned numbers sum to `count`."""
    ends = [round(count * end) for end in itertools.accumulate(SHARES.values())]
    return {kind: end - start for kind, start, end in zip(SHARES, [0, *ends], ends, strict=False)}


def _paths(split: str, count: int) -> list[str]:
    """Story paths of a split: val and test use indices and families that occur in no training text."""
    families = [f for f in stories.FAMILIES if split != "train" or f not in stories.HELD_OUT]
    step = {"train": 0, "val": 50, "test": 100}[split]
    paths = (
        f"stories/{family}/{number if split == 'train' else number * 100 + step - 50}"
        for number in itertools.count(1)
        for family in families
    )
    fitting = (path for path in paths if stories.is_held_out(path) == (split != "train"))
    return list(itertools.islice(fitting, count))


def _pairs(params: Params, job: Job) -> Splits[Pair]:
    """Preference pairs for code, tools and stories. Our generators write the code, so it may run without a sandbox."""
    splits: Splits[Pair] = {}
    with Judge(replace(params.sandbox, allow_unsafe=True), job.workers, url=job.runtime.sandbox_url) as judge:

        def program_scores(sources: list[tuple[Problem, str]]) -> Iterator[float | None]:
            candidates = []
            for _, group in itertools.groupby(sources, key=lambda source: source[0].id):
                answers = list(group)
                problem, hidden = answers[0][0], [test for test in answers[0][0].tests if not test["visible"]]
                texts = [programs.unfenced(content) for _, content in answers]
                candidates.append(Candidates(texts, problem.entry_point, hidden))
            for shares in scores(judge, candidates):
                yield from shares

        def generated(kind: str) -> Iterator[Any]:
            for records in _generate_chunks(_chunks(kind, split, limit, job.seed + 1), job.workers):
                yield from records

        def code_pairs() -> Iterator[Pair]:
            return preferences.code_pairs((p for p in generated("problems") if p.answer), job.seed, program_scores)

        for split, count in (("train", params.pairs), ("val", params.test_items), ("test", 3 * params.test_items)):
            limit = 2 * count + 100  # more than needed: some records yield no pair
            kinds = {
                "code": code_pairs,
                "tools": lambda: generated("tool pairs"),
                "story": lambda: generated("story pairs"),
            }
            splits[split] = list(preferences.pairs(kinds, count=count, split=split))
    splits["train"] = list(preferences.flip(splits["train"], params.label_noise, job.seed))
    return splits


if __name__ == "__main__":
    main(
        run,
        inputs={"own": "data/own", "feedback": "feedback"},
        outs={
            "dialogues": "data/dialogues",
            "problems": "data/problems",
            "pairs": "data/preferences",
            "labels": "data/labels",
            "known": "data/facts",
            "skill": "data/skill",
        },
        seed="data_seed",
    )
