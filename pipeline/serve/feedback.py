"""Preferences that people give on the page, appended to a file that `stage_tasks` reads: the loop closes with `dvc
repro`.

A line is a pair in the form of `data/preferences` (`ingest/records.py`, Pair) with the source "page" and the name of
the API key that gave it: `key-` and the first 8 hex digits of its sha256, null where no key is asked for. Lines are
written whole or not at all, also by several servers at a time and on a full disk; the same choice twice is stored once.
The file ends at 16 MB.

The file is only ever appended to. A line that cannot be read (cut by a crash, broken by an editor) stays where it is
and stops nothing: `stage_tasks` writes it down in `feedback-rejected.jsonl`. How far the rows are believed is decided
there too (`tasks.feedback`), for whoever may ask may give.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from pipeline.ingest import records
from pipeline.ingest.records import Pair
from pipeline.run.errors import ConfigError
from pipeline.serve.protocol import ApiFault, PreferenceBody

MOST_BYTES = 16 * 2**20
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
BOM = b"\xef\xbb\xbf"


class Feedback:
    """The file of preferences."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError where it cannot be written."""
        self.path = path
        try:
            with _locked(path):
                pass
        except OSError as error:
            raise ConfigError(f"--feedback {path}: cannot be written ({error})") from error

    def add(self, body: PreferenceBody, owner: str) -> tuple[bool, int]:
        """Whether the pair is new, and how many can be read. `owner`: the digest of the key that asked, empty without
        keys.

        Raises ApiFault: 413 for a full file, 507 for a full disk, 503 for a file that cannot be written; nothing is
        stored then.
        """
        pair = _pair(body, owner)
        try:
            with _locked(self.path) as descriptor:
                return self._append(descriptor, pair)
        except OSError as error:
            if error.errno in NO_SPACE:
                raise ApiFault(
                    507,
                    f"no space left for {self.path}; nothing was stored; free some and send it again",
                    code="no_space",
                ) from error
            raise ApiFault(
                503, f"{self.path} cannot be written ({error.strerror}); nothing was stored", code="feedback_unwritable"
            ) from error

    def _append(self, descriptor: int, pair: Pair) -> tuple[bool, int]:
        held = _whole(descriptor)
        known = set(_ids(held))
        if pair.id in known:
            return False, len(known)
        line = (records.dumps(pair) + "\n").encode()
        if held and not held.endswith(b"\n"):  # cut by a crash or an editor
            line = b"\n" + line
        if len(held) + len(line) > MOST_BYTES:
            raise ApiFault(
                413,
                f"{self.path} is full ({len(held)} of {MOST_BYTES} bytes); train on it, then begin a new one",
                code="feedback_full",
            )
        try:
            while line:
                line = line[os.write(descriptor, line) :]
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, len(held))
            raise
        return True, len(known) + 1


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    """The file, open to be appended to and locked; made anew where it is gone. Raises OSError."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_at(path, descriptor):  # else it was deleted or replaced while we waited
                yield descriptor
                return
        finally:
            os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether the open file is still the one under that name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _whole(descriptor: int) -> bytes:
    pieces, at = [], 0
    while piece := os.pread(descriptor, 2**20, at):
        pieces.append(piece)
        at += len(piece)
    return b"".join(pieces)


def _ids(held: bytes) -> Iterator[str]:
    """The ids of the rows that can be read."""
    for row in held.removeprefix(BOM).splitlines():
        try:
            found = json.loads(row)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict) and isinstance(found.get("id"), str):
            yield found["id"]


def _pair(body: PreferenceBody, owner: str) -> Pair:
    prompt, chosen, rejected = (
        [message.plain() for message in messages] for messages in (body.prompt, body.chosen, body.rejected)
    )
    tools = [tool.plain() for tool in body.tools or []]
    said = json.dumps([prompt, chosen, rejected, tools], sort_keys=True, ensure_ascii=False)
    identity = f"page-{hashlib.sha256(said.encode()).hexdigest()[:16]}"
    giver = f"key-{owner[:8]}" if owner else None
    return Pair(
        id=identity,
        source="page",
        kind="page",
        prompt=prompt,
        chosen=chosen,
        rejected=rejected,
        tools=tools,
        given_by=giver,
    )
