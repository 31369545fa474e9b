"""Feedback from the page, appended to two files that `stage_tasks` reads on the next `dvc repro`.

    preferences.jsonl   one answer is better than another (`ingest/records.py`, Pair), as in `data/preferences`
    labels.jsonl        an answer is good or bad (Label), as in `data/labels`; in the same folder

Each line has the source "page" and the name of the API key that sent it: `key-` and the first 8 hex digits of the
key's SHA-256, or null without keys. A line is written completely or not at all, even with several servers or on a full
disk. Duplicates are stored once. If someone changes their mind about an answer, both labels are stored and cancel out.
A file can grow to 16 MiB.

Files are append-only. A line that cannot be parsed (truncated by a crash, broken by an editor) stays where it is and
does no harm: `stage_tasks` reports it in `feedback-rejected.jsonl`. That stage also decides how far to trust the rows
(`tasks.feedback`), because anyone who can use the server can also give feedback.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.ingest import records
from pipeline.ingest.records import Label, Pair
from pipeline.run.errors import ConfigError
from pipeline.run.types import JsonObject
from pipeline.serve.protocol import ApiFault, LabelBody, Message, PreferenceBody

MOST_BYTES = 16 * 2**20
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
BOM = b"\xef\xbb\xbf"


class Feedback:
    """A file of preferences or of labels."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file cannot be written."""
        self.path = path
        try:
            with _open_locked(path):
                pass
        except OSError as error:
            raise ConfigError(f"--feedback {path}: cannot be written ({error})") from error

    def add(self, body: PreferenceBody | LabelBody, owner: str) -> tuple[bool, int]:
        """Store a preference or a label. Returns whether it is new, and how many records the file has.
        `owner` is the digest of the request's key, empty without keys.

        Raises ApiFault without storing anything: 413 if the file is full, 507 if the disk is full, 503 if the file
        cannot be written.
        """
        record = _pair(body, owner) if isinstance(body, PreferenceBody) else _label(body, owner)
        try:
            with _open_locked(self.path) as descriptor:
                return self._append(descriptor, record)
        except OSError as error:
            if error.errno in NO_SPACE:
                raise ApiFault(
                    507,
                    f"no space left for {self.path}; nothing was stored; free some space and try again",
                    code="no_space",
                ) from error
            raise ApiFault(
                503, f"{self.path} cannot be written ({error.strerror}); nothing was stored", code="feedback_unwritable"
            ) from error

    def _append(self, descriptor: int, record: Pair | Label) -> tuple[bool, int]:
        content = _read_all(descriptor)
        ids = set(_parse_ids(content))
        if record.id in ids:
            return False, len(ids)
        line = (records.dumps(record) + "\n").encode()
        if content and not content.endswith(b"\n"):  # truncated by a crash or an editor
            line = b"\n" + line
        if len(content) + len(line) > MOST_BYTES:
            raise ApiFault(
                413,
                f"{self.path} is full ({len(content)} of {MOST_BYTES} bytes); train on it, then start a new file",
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


def labels_beside(preferences: Path) -> Path:
    """The label file for a preference file. Raises ConfigError if both would be the same file."""
    labels = preferences.with_name("labels.jsonl")
    if labels == preferences:
        raise ConfigError(f"--feedback {preferences}: this name is reserved for labels; use preferences.jsonl")
    return labels


@contextlib.contextmanager
def _open_locked(path: Path) -> Iterator[int]:
    """Open the file for appending and lock it, creating it if needed. Raises OSError."""
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
    """Whether the open file is still the one at `path`."""
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
    """The ids of all parsable lines."""
    for line in content.removeprefix(BOM).splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(record.get("id"), str):
            yield record["id"]


def _pair(body: PreferenceBody, owner: str) -> Pair:
    prompt, chosen, rejected = (_plain(messages) for messages in (body.prompt, body.chosen, body.rejected))
    tools = [tool.plain() for tool in body.tools or []]
    return Pair(
        id=_id([prompt, chosen, rejected, tools]),
        source="page",
        kind="page",
        prompt=prompt,
        chosen=chosen,
        rejected=rejected,
        tools=tools,
        given_by=_giver(owner),
    )


def _label(body: LabelBody, owner: str) -> Label:
    prompt, answer = _plain(body.prompt), _plain(body.answer)
    tools = [tool.plain() for tool in body.tools or []]
    return Label(
        id=_id([prompt, answer, body.desirable, tools]),
        source="page",
        kind="page",
        prompt=prompt,
        answer=answer,
        desirable=body.desirable,
        tools=tools,
        given_by=_giver(owner),
    )


def _plain(messages: Sequence[Message]) -> list[JsonObject]:
    return [message.plain() for message in messages]


def _id(content: list[object]) -> str:
    text = json.dumps(content, sort_keys=True, ensure_ascii=False)
    return f"page-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _giver(owner: str) -> str | None:
    return f"key-{owner[:8]}" if owner else None
