"""Turn the commits of a repository in `data/own/` into dialogues: given a diff, write the commit message.

    RepositoryEntry of `dialogues` -> git log -> user: the diff, assistant: the message    (newest first)

Limits: MOST_COMMITS commits, LOG_BYTES bytes of log, SECONDS seconds. A commit is rejected, with a recorded reason, if
its diff has no text or more than DIFF_BYTES bytes, if its message has fewer than FEWEST_WORDS words, or if it contains
a secret. Email addresses are replaced as in all sources. Merges are skipped. A commit that touches a held-out folder
(`repository.held_out`) is used for validation or test. If no folder is held out, `val_share` and `test_share` of the
commits are held out instead.

The repository may be untrusted, and git runs programs named in a repository's own configuration. So external diffs,
text conversion, signatures, hooks, file monitors and lazy fetching are disabled.

Not guaranteed: that DVC notices a commit that changes no file (DVC ignores `.git`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from pipeline.ingest import cleaning, repository
from pipeline.ingest.entries import RepositoryEntry
from pipeline.ingest.intake import Intake, RowCounts
from pipeline.ingest.own_files import Accepted, test_share
from pipeline.ingest.records import Dialogue
from pipeline.ingest.sources import DataConfig
from pipeline.ingest.tool_calls import RowError
from pipeline.run.errors import DataError
from pipeline.run.processes import output_of
from pipeline.run.tracking import say

MOST_COMMITS, LOG_BYTES, SECONDS = 2000, 64_000_000, 120.0
DIFF_BYTES = 4000
FEWEST_WORDS = 3  # in a message
QUESTION = "Write the commit message of this change.\n\n```diff\n{diff}\n```"
COMMIT = re.compile(rb"[0-9a-f]{40,64}")
PATH = re.compile(r"^diff --git a/(.*) b/\1$", re.MULTILINE)
GIT = (
    *("git", "--no-pager", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null"),
    *("-c", "log.showSignature=false", "-c", "protocol.allow=never", "-c", "core.quotePath=false"),
)
LOG = (
    *("log", "--no-merges", "--no-ext-diff", "--no-textconv", "--no-color", "--no-renames", "--src-prefix=a/"),
    *("--dst-prefix=b/", "--submodule=short", "-p", "--unified=3", f"--max-count={MOST_COMMITS}"),
    "--format=%x00%x00%H%x00%B%x00",
)


def read(own: Path, config: DataConfig, parts: Path, tally: RowCounts) -> Iterator[Accepted]:
    """The commits of every repository among the `dialogues` entries. Adds the commit counts to `tally`.

    Raises DataError if a folder is not itself a git repository, git is missing, or no commit is left.
    """
    for number, entry in enumerate(config.entries("dialogues")):
        if isinstance(entry, RepositoryEntry):
            yield from _read(repository.find(own, entry.repository), number, entry, config, parts, tally)


def _read(
    root: Path, number: int, entry: RepositoryEntry, config: DataConfig, parts: Path, tally: RowCounts
) -> Iterator[Accepted]:
    found = repository.read(root, config.max_bytes)
    held_out = repository.held_out(entry, found, config.val_share)
    shares = (0.0, 0.0) if held_out else (config.val_share, test_share(config, "dialogues"))
    rejected = parts / f"dialogues-repository-{number}-rejected.jsonl"
    with Intake(rejected, None, f"commits of {entry.repository}", shares) as intake:
        for line, (commit, message, diff) in enumerate(commits(root), start=1):
            with intake.rejecting(entry.repository, line):
                record = _dialogue(f"{entry.repository}@{commit}", message, diff)
                touched = any(repository.is_inside(path, folder) for path in PATH.findall(diff) for folder in held_out)
                split = ("val" if touched else "train") if held_out else None
                for chosen, accepted in intake.accept(record, entry.repository, line, split):
                    yield Accepted(number, entry.repository, line, intake.num_accepted, chosen, accepted)
        intake.add_to(tally)
        if not intake.num_accepted:
            raise DataError(f"dialogues: {entry.repository}: no usable commit among {intake.num_rows}; see {rejected}")
    say(f"dialogues: {entry.repository}: {intake.num_accepted} commits, {intake.num_rejected} left out")


def _dialogue(identity: str, message: str, diff: str) -> Dialogue:
    """A commit as a dialogue. Raises RowError with the reason if the commit is left out."""
    if "\n@@ " not in f"\n{diff}":
        raise RowError("diff", "has no text")
    if len(diff.encode()) > DIFF_BYTES:
        raise RowError("diff", f"has more than {DIFF_BYTES} bytes")
    if len(message.split()) < FEWEST_WORDS:
        raise RowError("message", f"has fewer than {FEWEST_WORDS} words")
    try:
        message, diff = (cleaning.without_secrets(cleaning.normalize(text)) for text in (message, diff))
    except cleaning.Dropped as dropped:
        raise RowError("commit", str(dropped)) from dropped
    messages = [{"role": "user", "content": QUESTION.format(diff=diff)}, {"role": "assistant", "content": message}]
    return Dialogue(id=identity, kind="chat", category="commit", messages=messages)


def commits(root: Path) -> Iterator[tuple[str, str, str]]:
    """(hash, message, diff) of each commit within the limits, newest first. Raises DataError."""
    if not (root / ".git").exists():
        raise DataError(f"dialogues: {root}: has no .git; clone the repository there, or remove the entry")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_NO_LAZY_FETCH": "1"}
    environment |= {"GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C.UTF-8"}
    try:
        done = output_of([*GIT, "-C", str(root), *LOG], environment=environment, most_bytes=LOG_BYTES, seconds=SECONDS)
    except FileNotFoundError:
        raise DataError("dialogues: reading commits needs git; install it, or remove the entry") from None
    if done.code:
        raise DataError(f"dialogues: {root}: git cannot read the commits: {done.errors.strip()[:500]}")
    for entry in done.output.split(b"\0\0")[1:]:
        commit, _, rest = entry.partition(b"\0")
        message, _, diff = rest.partition(b"\0")
        if COMMIT.fullmatch(commit):
            texts = (part.decode("utf-8", "replace").strip("\n") for part in (message, diff))
            yield (commit.decode(), *texts)  # type: ignore[misc]
