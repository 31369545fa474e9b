"""Read public Hugging Face hub datasets as records; for `data=hub`, conf/data/hub.yaml lists the datasets.

In: the datasets of one kind, and a folder that survives crashes. `datasets` streams each file of a dataset into
<set>/<split>/part-N.parquet.tmp (one column, the row as JSON), which is renamed when complete, so a restart skips the
complete parts and produces the same bytes. Out: `Accepted` rows. Rows are parsed by `shapes`, or by the AceCode section
below. `intake.Intake` accepts or rejects them, and writes the rejected ones to <set>/rejected.jsonl.

A revision is 40 hex digits; if none is given, `main` is resolved once, printed, and stored in <set>/revision.txt. An
interrupted file download is retried from its beginning, up to five times, in addition to huggingface_hub's own
retries within a file.

TIGER-Lab/AceCode-89K provides problems of a chosen difficulty, as used by DiffuCoder's coupled-GRPO. Rows are {id,
question, test_cases: [assert, ...], inferences: [{model_name, completion, pass_rate}, ...]}. Difficulty depends on how
often two models solved a question (apple/ml-diffucoder, recipes/process_data.py): the mean and standard deviation of
`pass_rate` over `qwen_coder_2.5` and `llama3_instruct`.

    hard     mean <= 20th percentile, and standard deviation >= 40th percentile of the full set
    medium   25th to 75th percentile of the mean, inclusive
    easy     mean >= 75th percentile

A question that does not contain "you" and whose best completion begins with `def` yields a second problem: a signature
with the question as its docstring. A question without a code block gets its first test appended, as a visible test.

Not guaranteed: that a dataset still has the columns its shape needs at a different revision; that the best completion
is correct (it becomes the answer only if it passed every test). HF_ENDPOINT, HF_HOME and HF_TOKEN are passed through to
huggingface_hub. The folder belongs to one configuration: different row caps need a different folder.
"""

import ast
import json
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.ingest import shapes
from pipeline.ingest.entries import HubSet
from pipeline.ingest.intake import Intake, RowCounts
from pipeline.ingest.own_files import Accepted, test_share
from pipeline.ingest.records import Problem, SourceRecord, Text
from pipeline.ingest.sources import DataConfig
from pipeline.ingest.tool_calls import RowError
from pipeline.run.errors import DataError
from pipeline.run.tracking import progress, say
from pipeline.run.types import JsonObject
from pipeline.run.workdir import write_atomically

NUM_RETRIES = 5
FIRST_WAIT = 2.0  # seconds before the first retry; doubled each time
BATCH_ROWS = 1000
REJECTED = "rejected.jsonl"
_SCHEMA = pa.schema([("row", pa.large_string())])
_REVISION = re.compile(r"[0-9a-f]{40}")
Result = TypeVar("Result")


class _Shards(Protocol):
    """A split as streamed by `datasets`, one shard per file."""

    @property
    def num_shards(self) -> int: ...
    def shard(self, num_shards: int, index: int) -> Iterable[JsonObject]: ...


def read_hub(config: DataConfig, kind: str, parts: Path, tally: RowCounts | None = None) -> Iterator[Accepted]:
    """The rows of every enabled dataset of `kind`, in the order of the entries, fetched into `parts`.

    Adds the row counts to `tally`; rejected rows are in `rejected_files(...)`.
    Raises DataError for a missing or gated dataset, a persistent network failure, or rows that fit no shape.
    """
    for number, entry in sets_of(config, kind).items():
        yield from _read_set(number, entry, config, kind, parts, tally or RowCounts())


def sets_of(config: DataConfig, kind: str) -> dict[int, HubSet]:
    """Entry index -> dataset, for the entries of a kind that name a dataset."""
    return {number: entry for number, entry in enumerate(config.entries(kind)) if isinstance(entry, HubSet)}


def folder_of(entry: HubSet, kind: str, parts: Path) -> Path:
    """The folder of a dataset's parts."""
    name = "-".join(part for part in (entry.id, entry.config, entry.data_dir) if part).replace("/", "--")
    return parts / kind / f"{name}@{entry.revision or 'main'}"


def rejected_files(config: DataConfig, kind: str, parts: Path) -> list[Path]:
    """The rejected-rows files of `kind`, in dataset order."""
    return [folder_of(entry, kind, parts) / REJECTED for entry in sets_of(config, kind).values()]


def revisions(config: DataConfig, kind: str, parts: Path) -> dict[str, str]:
    """Dataset -> the revision used (40 hex digits), for the manifest. Resolves it if necessary."""
    return {entry.id: _revision(entry, folder_of(entry, kind, parts)) for entry in sets_of(config, kind).values()}


# --- fetching --------------------------------------------------------------------------------------------------------


def fetch(entry: HubSet, split: str, folder: Path) -> list[Path]:
    """The parts of one split; missing parts are fetched. `split`: the split's name in the dataset."""
    revision = _revision(entry, folder)
    folder = folder / split
    folder.mkdir(parents=True, exist_ok=True)
    count_file = folder / "num_parts.txt"
    num_parts = int(count_file.read_text()) if count_file.exists() else None
    shards: _Shards | None = None
    paths: list[Path] = []
    num_rows = 0
    while (num_parts is None or len(paths) < num_parts) and (entry.max_rows is None or num_rows < entry.max_rows):
        path = folder / f"part-{len(paths)}.parquet"
        if num_parts is None or not path.exists():
            if shards is None:
                shards = _retry(entry, lambda: _open(entry, split, revision))
                num_parts = shards.num_shards
                write_atomically(count_file, f"{num_parts}\n")
            if not path.exists():
                _fetch_part(entry, shards, path, None if entry.max_rows is None else entry.max_rows - num_rows)
        paths.append(path)
        num_rows += pq.read_metadata(path).num_rows
    return paths


def _revision(entry: HubSet, folder: Path) -> str:
    if entry.revision is not None:
        if not _REVISION.fullmatch(entry.revision):
            raise DataError(f"{entry.id}: revision: expected 40 hex digits or null, got {entry.revision!r}")
        return entry.revision
    revision_file = folder / "revision.txt"
    if not revision_file.exists():
        from huggingface_hub import HfApi  # here and below: slow to import, and needed only for hub datasets

        revision = _retry(entry, lambda: HfApi().dataset_info(entry.id, revision="main").sha)
        if revision is None or not _REVISION.fullmatch(revision):
            raise DataError(f"{entry.id}: the hub returned no revision; set one in conf/data/hub.yaml")
        say(f"{entry.id}: revision {revision}")
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(revision_file, f"{revision}\n")
    return revision_file.read_text().strip()


def _open(entry: HubSet, split: str, revision: str) -> _Shards:
    """Open the split as a stream with one shard per file."""
    from datasets import load_dataset

    return load_dataset(
        entry.id, name=entry.config, data_dir=entry.data_dir, split=split, revision=revision, streaming=True
    )


def _fetch_part(entry: HubSet, shards: _Shards, path: Path, max_rows: int | None) -> None:
    """Stream one file of the dataset to `path`, via a .tmp next to it that each attempt rewrites."""
    index = int(path.stem.removeprefix("part-"))
    temporary = path.with_name(path.name + ".tmp")

    def copy() -> None:
        shard = shards.shard(num_shards=shards.num_shards, index=index)
        label = f"{entry.id} {path.parent.name} {index + 1}/{shards.num_shards}"
        with (
            pq.ParquetWriter(temporary, _SCHEMA, compression="zstd") as writer,
            progress(total=max_rows, desc=label, unit="row") as bar,
        ):
            for rows in _batches(shard, entry, max_rows):
                writer.write_table(pa.table({"row": rows}, schema=_SCHEMA))
                bar.update(len(rows))

    _retry(entry, copy)
    temporary.replace(path)


def _batches(shard: Iterable[JsonObject], entry: HubSet, max_rows: int | None) -> Iterator[list[str]]:
    rows: list[str] = []
    for number, row in enumerate(shard):
        if number == max_rows:
            break
        content = reduce(row) if entry.shape == "acecode" else row
        rows.append(json.dumps(content, default=str))
        if len(rows) == BATCH_ROWS:
            yield rows
            rows = []
    if rows:
        yield rows


def _retry(entry: HubSet, action: Callable[[], Result]) -> Result:
    """Run `action`, retrying up to five times on network failures. A missing or gated dataset raises immediately."""
    from datasets.exceptions import DatasetsError, FileNotFoundDatasetsError
    from datasets.utils.file_utils import CONNECTION_ERRORS_TO_RETRY
    from huggingface_hub.errors import RemoteEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    missing = (FileNotFoundDatasetsError, RemoteEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError)
    for attempt in range(NUM_RETRIES + 1):
        try:
            return action()
        except missing as error:
            raise DataError(
                f"{entry.id}: {_first_line(error)}. If the dataset is gated, accept its terms at "
                f"https://huggingface.co/datasets/{entry.id} and set HF_TOKEN; or set `enabled: false`"
            ) from error
        except (OSError, *CONNECTION_ERRORS_TO_RETRY) as error:
            if attempt == NUM_RETRIES:
                raise DataError(
                    f"{entry.id}: gave up after {NUM_RETRIES} retries ({_first_line(error)}). Finished parts are kept: "
                    "rerun to resume"
                ) from error
            wait = FIRST_WAIT * 2**attempt
            say(f"{entry.id}: {_first_line(error)}; retry {attempt + 1} of {NUM_RETRIES} in {wait:g} s")
            time.sleep(wait)
        # No such split or configuration, or a file whose format does not match its name.
        except (DatasetsError, pa.ArrowException, ValueError) as error:
            raise DataError(f"{entry.id}: {_first_line(error)}") from error
    raise AssertionError("the last attempt returns or raises")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0].rstrip(".")[:200] or type(error).__name__


# --- mapping ---------------------------------------------------------------------------------------------------------


def _read_set(
    number: int, entry: HubSet, config: DataConfig, kind: str, parts: Path, tally: RowCounts
) -> Iterator[Accepted]:
    folder = folder_of(entry, kind, parts)
    parts_by_split = [("train", fetch(entry, entry.train, folder))]
    if entry.val is not None:
        parts_by_split.append(("val", fetch(entry, entry.val, folder)))
    try:
        convert = _row_converter(entry, kind, [path for _, paths in parts_by_split for path in paths])
    except RowError as error:
        raise DataError(f"{entry.id}: {error}") from error
    shares = (0.0, 0.0) if entry.val else (config.val_share, test_share(config, kind))
    with Intake(folder / REJECTED, config.max_rejected, entry.id, shares) as intake:
        for split, paths in parts_by_split:
            for path in paths:
                name = f"{entry.name}/{path.parent.name}/{path.stem}"
                for line, row in enumerate(_rows(path), start=1):
                    with intake.rejecting(name, line):
                        for record in convert(row):
                            with intake.rejecting(name, line):
                                for chosen, piece in intake.accept(record, name, line, split if entry.val else None):
                                    yield Accepted(number, name, line, intake.num_accepted, chosen, piece)
        intake.add_to(tally)


def _rows(path: Path) -> Iterator[JsonObject]:
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=BATCH_ROWS):
            yield from (json.loads(text) for text in batch.column(0).to_pylist())


def _row_converter(entry: HubSet, kind: str, paths: list[Path]) -> Callable[[JsonObject], list[SourceRecord]]:
    """The function that turns a row of this dataset into records."""
    if entry.shape == "acecode":
        if kind != "problems":
            raise RowError("shape", f"acecode produces problems, not {kind}")
        limits = thresholds(row["pass_rates"] for path in paths for row in _rows(path))
        return lambda row: [_with_set_name(problem, entry, row) for problem in problems(row, limits, entry.level)]
    named = entry.text_field if isinstance(entry.text_field, list) else [entry.text_field]
    columns = shapes.Columns(tuple(named) if kind in ("text", "code") or isinstance(entry.text_field, list) else ())
    shape = shapes.named(entry.shape, kind)
    if shape is None:
        sample = [row for path in paths[:1] for row, _ in zip(_rows(path), range(shapes.SAMPLE_ROWS), strict=False)]
        shape = shapes.detect(sample, kind, columns)
        if shape is None:
            content = ", ".join(sample[0]) if sample else "no rows"
            raise RowError("shape", f"no shape of {kind} ({', '.join(shapes.names(kind))}) fits the columns: {content}")
    row_shape = shape
    return lambda row: [_with_set_name(shapes.convert(row_shape, row, columns), entry, row)]


def _with_set_name(record: SourceRecord, entry: HubSet, row: JsonObject) -> SourceRecord:
    """Prefix the record's ids with the dataset name, so that ids never collide across datasets; a text also gets the
    name as its source, plus a license.
    """
    if isinstance(record, Text):
        license = row.get(entry.license_field) if entry.license_field else None
        path = f"{entry.id}/{record.path}" if record.path else ""
        return replace(
            record, source=entry.id, path=path, license=license if isinstance(license, str) else entry.license
        )
    identity = f"{entry.id}/{record.id}" if record.id else ""
    if isinstance(record, Problem):
        return replace(record, id=identity, key=f"{entry.id}/{record.key}" if record.key else "")
    return replace(record, id=identity)


# --- AceCode ---------------------------------------------------------------------------------------------------------


MODELS = ("qwen_coder_2.5", "llama3_instruct")
LEVELS = {"easy": 1, "medium": 3, "hard": 5}  # difficulty -> level of a Problem


@dataclass(frozen=True)
class Thresholds:
    """Difficulty thresholds: percentiles over the full set."""

    hard_mean: float  # 20th percentile of the mean
    hard_std: float  # 40th percentile of the standard deviation
    medium_mean: float  # 25th percentile of the mean
    easy_mean: float  # 75th percentile of the mean

    def takes(self, pass_rates: list[float], level: str) -> bool:
        """Whether a question with these pass rates has this difficulty."""
        if not pass_rates:
            return False
        mean, std = float(np.mean(pass_rates)), float(np.std(pass_rates))
        if level == "hard":
            return mean <= self.hard_mean and std >= self.hard_std
        return mean >= self.easy_mean if level == "easy" else self.medium_mean <= mean <= self.easy_mean

    def group(self, pass_rates: list[float]) -> str:
        """The difficulty based on the mean only, for a dataset that is not filtered by difficulty."""
        mean = float(np.mean(pass_rates)) if pass_rates else 0.0
        return "easy" if mean >= self.easy_mean else "medium" if mean >= self.medium_mean else "hard"


def reduce(row: JsonObject) -> JsonObject:
    """The part of a row that is stored: the best of about twenty completions, and the pass rates of MODELS."""
    inferences = [i for i in row.get("inferences") or [] if isinstance(i, dict)]
    rated = [i for i in inferences if isinstance(i.get("pass_rate"), int | float)]
    best = max(rated, key=lambda inference: inference["pass_rate"], default={})
    return {
        "id": row.get("id"),
        "question": row.get("question"),
        "test_cases": row.get("test_cases"),
        "pass_rates": [float(i["pass_rate"]) for i in rated if i.get("model_name") in MODELS],
        "best": {"completion": best.get("completion"), "pass_rate": best.get("pass_rate")},
    }


def thresholds(all_pass_rates: Iterable[list[float]]) -> Thresholds:
    """The thresholds over all questions that either model tried. Raises RowError if there are none."""
    rated = [rates for rates in all_pass_rates if rates]
    if not rated:
        raise RowError("inferences", f"no pass_rate of {' or '.join(MODELS)} in the entire dataset")
    means = [float(np.mean(rates)) for rates in rated]
    stds = [float(np.std(rates)) for rates in rated]
    hard, medium, easy = (float(value) for value in np.percentile(means, (20, 25, 75)))
    return Thresholds(hard, float(np.percentile(stds, 40)), medium, easy)


def problems(row: JsonObject, limits: Thresholds, level: str | None) -> list[Problem]:
    """The problems of one reduced row: none if its difficulty is not `level`, else one or two with the same key."""
    if level is not None and not limits.takes(row["pass_rates"], level):
        return []
    question, cases = row["question"], row["test_cases"]
    if not isinstance(question, str) or not question.strip():
        raise RowError("question", "expected a string")
    if not isinstance(cases, list) or not cases:
        raise RowError("test_cases", "expected a list of asserts")
    tests = [shapes.parse_test(case, f"test_cases[{index}]") for index, case in enumerate(cases)]
    entry_point = shapes.most_called([test.get("assert", "") for test in tests])
    if not entry_point:
        raise RowError("test_cases", "no test calls a function")
    completion = row["best"]["completion"] if isinstance(row["best"]["completion"], str) else ""
    identity = "" if row["id"] is None else str(row["id"])
    group = level or limits.group(row["pass_rates"])
    signature = _signature(completion, entry_point)

    def problem(name: str, text: str) -> Problem:
        has_block = "```" in text
        if not has_block:
            text = f"{text}\n\nFor example:\n```python\n{cases[0]}\n```"
        return Problem(
            id=name,
            level=LEVELS[group],
            group=group,
            key=identity,
            question=text,
            entry_point=entry_point,
            signature=signature,
            tests=[{**test, "visible": not has_block and index == 0} for index, test in enumerate(tests)],
            answer=completion if completion and row["best"]["pass_rate"] == 1 else None,
        )

    versions = [problem(identity, question)]
    if "you" not in question.lower() and completion.startswith("def") and signature:
        versions.append(problem(f"{identity}/signature" if identity else "", _as_docstring(signature, question)))
    return versions


def _signature(completion: str, entry_point: str) -> str:
    """`def f(x: int) -> int:` of the function under test; empty if the completion does not parse or lacks it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            body = ast.parse(completion).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == entry_point:
            returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            return f"def {node.name}({ast.unparse(node.args)}){returns}:"
    return ""


def _as_docstring(signature: str, question: str) -> str:
    lines = question.strip().replace("\\", "\\\\").replace('"""', "'''").splitlines()
    indented = "\n".join(f"    {line}".rstrip() for line in lines)
    return f'```python\n{signature}\n    """\n{indented}\n    """\n```'
