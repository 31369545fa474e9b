"""The report's baseline: the metrics of another commit, from DVC's cache.

    python -m pipeline.report.baseline pin [REV]     set report.baseline in params.yaml to the hash of REV (or HEAD)
    python -m pipeline.report.baseline unpin         remove the baseline

The hash is in params.yaml because a cached stage that read "the last commit" would depend on an input that DVC does not
track. `metrics_at` works while DVC is locked, so stage `report` can call it. Not supported: commits whose metrics are
neither in the cache nor on the remote.
"""

import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from pipeline.report import metrics
from pipeline.report.metrics import MetricsRun
from pipeline.run.errors import ConfigError, InputError, StagecoachError

if TYPE_CHECKING:
    from dvc.api import DVCFileSystem

# the value may be missing, since `dvc exp run -S` writes null as an empty value
LINE = re.compile(r"^(report:\n(?:[ #].*\n)*?  baseline:)(?: *[^\s#]+)?", re.MULTILINE)
WORKSPACE = "workspace"


@contextmanager
def metrics_at(revision: str) -> Iterator[Path]:
    """A temporary folder with the `metrics/` of a commit, branch, tag or experiment. Raises InputError."""
    from dvc.api import DVCFileSystem
    from dvc.exceptions import DvcException

    commit = resolve(revision)
    with tempfile.TemporaryDirectory(prefix="stagecoach-metrics-") as scratch:
        folder = Path(scratch) / "metrics"
        try:
            files = DVCFileSystem(rev=commit)
            built = _built(files)
            if not built:
                raise InputError(
                    f"{revision} has no metrics: expected a commit with dvc.lock; run make and commit dvc.lock"
                )
            for path in built:
                target = Path(scratch) / path
                target.parent.mkdir(parents=True, exist_ok=True)
                files.get(path, str(target), recursive=files.isdir(path))
        except (DvcException, OSError) as error:
            message = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise InputError(
                f"the metrics of {revision} are not in the cache: fetch them with dvc fetch --all-commits metrics, or"
                f" choose another revision ({message})"
            ) from error
        yield folder


def _built(files: "DVCFileSystem") -> list[str]:
    """The outputs below metrics/ in the commit's dvc.lock; branch outputs are missing if only the spine was built."""
    if not files.exists("dvc.lock"):
        return []
    stages = yaml.safe_load(files.read_text("dvc.lock")).get("stages", {}).values()
    paths = [out["path"] for stage in stages for out in stage.get("outs", ())]
    return sorted(path for path in paths if path.startswith("metrics/"))


def at(revision: str) -> MetricsRun:
    """The metrics at a revision; `workspace` is the working tree. Raises InputError."""
    if revision == WORKSPACE:
        if not Path("metrics").is_dir():
            raise InputError("metrics/ does not exist; run dvc repro")
        return metrics.read(Path("metrics"))
    with metrics_at(revision) as folder:
        return metrics.read(folder)


def resolve(revision: str) -> str:
    """The full hash of a revision. Raises InputError."""
    from dvc.exceptions import NotDvcRepoError
    from dvc.repo import Repo
    from dvc.scm import NoSCMError, RevError, resolve_rev

    try:
        with Repo() as repository:
            return resolve_rev(repository.scm, revision)  # pyright: ignore[reportArgumentType]
    except (NotDvcRepoError, NoSCMError, RevError) as error:
        raise InputError(
            f"{revision}: expected a commit, branch, tag or experiment of this repository: {error}"
        ) from error


def experiments_of(commit: str) -> list[tuple[str, str]]:
    """(name, full hash) of the experiments that started from a commit, sorted by name."""
    from dvc.repo import Repo

    with Repo() as repository:
        found = repository.experiments.ls(rev=commit)
    return sorted((name, str(revision)) for several in found.values() for name, revision in several)


def file_at(revision: str, path: str) -> str:
    """The text of a file at a commit."""
    from dvc.api import DVCFileSystem

    return str(DVCFileSystem(rev=revision).read_text(path))


def pin(path: Path, value: str) -> None:
    """Set `report.baseline` in params.yaml, changing nothing else. Raises ConfigError if it has no such line."""
    text, count = LINE.subn(lambda match: f"{match[1]} {value}".rstrip(), path.read_text(encoding="utf-8"))
    if count != 1:
        raise ConfigError(f"{path}: expected a block `report:` with a line `  baseline:`, found none; add it")
    path.write_text(text, encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Command line of this module."""
    try:
        if arguments[:1] == ["pin"] and len(arguments) <= 2:
            revision = resolve(arguments[1] if len(arguments) == 2 else "HEAD")
            with metrics_at(revision):  # fail now instead of in the report
                pin(Path("params.yaml"), revision)
            sys.stdout.write(f"report.baseline is now {revision}; run dvc repro stage_report to compare with it\n")
        elif arguments == ["unpin"]:
            pin(Path("params.yaml"), "")
            sys.stdout.write("report.baseline is now null; the report has no baseline\n")
        else:
            raise ConfigError("usage: python -m pipeline.report.baseline pin [REV] | unpin")
    except StagecoachError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
