"""Preferences that people give on the page: appended to a file that `stage_tasks` reads on the next `dvc repro`.

A line is a pair in the form of `data/preferences` (`ingest/records.py`, Pair), with the source "page" and the name of
the API key that gave it: `key-` and the first 8 hex digits of its sha256, null where no key is needed. A line is
written whole or not at all, also with several servers and on a full disk. The same choice is stored once. The file may
grow to 16 MiB.

The file is only ever appended to. A line that cannot be parsed (cut by a crash, broken by an editor) stays where it is
and stops nothing: `stage_tasks` reports it in `feedback-rejected.jsonl`. That stage also decides how far to trust the
rows (`tasks.feedback`), because everybody who may ask may also give feedback.
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
            with _open_locked(path):
                pass
        except OSError as error:
            raise ConfigError(f"--feedback {path}: cannot be written ({error})") from error

    def add(self, body: PreferenceBody, owner: str) -> tuple[bool, int]:
        """Store a preference. Returns whether it is new, and how many the file has. `owner`: the digest of the key that
        asked, empty without keys.

        Raises ApiFault: 413 for a full file, 507 for a full disk, 503 for a file that cannot be written; nothing is
        stored then.
        """
        pair = _make_pair(body, owner)
        try:
            with _open_locked(self.path) as descriptor:
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
        content = _read_all(descriptor)
        ids = set(_parse_ids(content))
        if pair.id in ids:
            return False, len(ids)
        line = (records.dumps(pair) + "\n").encode()
        if content and not content.endswith(b"\n"):  # cut by a crash or an editor
            line = b"\n" + line
        if len(content) + len(line) > MOST_BYTES:
            raise ApiFault(
                413,
                f"{self.path} is full ({len(content)} of {MOST_BYTES} bytes); train on it, then begin a new one",
                code="feedback_full",
            )
        try:
            while line:
                line = line[os.write(descriptor, line) :]
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, len(content))
            raise
        return True, len(ids) + 1


@contextlib.contextmanager
def _open_locked(path: Path) -> Iterator[int]:
    """The file, open for appending and locked; created where it does not exist. Raises OSError."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_current(path, descriptor):  # else it was deleted or replaced while we waited for the lock
                yield descriptor
                return
        finally:
            os.close(descriptor)


def _is_current(path: Path, descriptor: int) -> bool:
    """Whether the open file is still the one at that path."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _read_all(descriptor: int) -> bytes:
    pieces, offset = [], 0
    while piece := os.pread(descriptor, 2**20, offset):
        pieces.append(piece)
        offset += len(piece)
    return b"".join(pieces)


def _parse_ids(content: bytes) -> Iterator[str]:
    """The ids of the lines that can be parsed."""
    for line in content.removeprefix(BOM).splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(record.get("id"), str):
            yield record["id"]


def _make_pair(body: PreferenceBody, owner: str) -> Pair:
    prompt, chosen, rejected = (
        [message.plain() for message in messages] for messages in (body.prompt, body.chosen, body.rejected)
    )
    tools = [tool.plain() for tool in body.tools or []]
    content = json.dumps([prompt, chosen, rejected, tools], sort_keys=True, ensure_ascii=False)
    return Pair(
        id=f"page-{hashlib.sha256(content.encode()).hexdigest()[:16]}",
        source="page",
        kind="page",
        prompt=prompt,
        chosen=chosen,
        rejected=rejected,
        tools=tools,
        given_by=f"key-{owner[:8]}" if owner else None,
    )
