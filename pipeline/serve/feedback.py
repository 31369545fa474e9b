"""Preferences that people give on the page, appended to a file that `stage_tasks` reads: the loop closes with `dvc repro`.

A line is a pair in the form of `data/preferences` (`streams/records.py`, Pair) with the source "page". Lines are written whole or
not at all, also by several servers at a time; the same choice twice is stored once. The file ends at 16 MB.
"""

import fcntl
import hashlib
import json
import os
from pathlib import Path

from pipeline.errors import ConfigError
from pipeline.serve.faults import ApiFault
from pipeline.serve.protocol import PreferenceBody
from pipeline.streams import records
from pipeline.streams.records import Pair

MOST_BYTES = 16 * 2**20


class Feedback:
    """The file of preferences."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError where it cannot be written."""
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        except OSError as error:
            raise ConfigError(f"--feedback {path}: cannot be written ({error})") from error

    def add(self, body: PreferenceBody) -> tuple[bool, int]:
        """Whether the pair is new, and how many there are. Raises ApiFault for a full file."""
        pair = _pair(body)
        line = (records.dumps(pair) + "\n").encode()
        with self.path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            held = file.read()
            if held and not held.endswith(b"\n"):  # cut by a crash or an editor
                held += b"\n"
            known = [json.loads(row).get("id") for row in held.splitlines() if row.startswith(b'{"id"')]
            if pair.id in known:
                return False, len(known)
            if len(held) + len(line) > MOST_BYTES:
                raise ApiFault(
                    413, f"{self.path} is full ({len(held)} of {MOST_BYTES} bytes); train on it, then begin a new one", code="feedback_full"
                )  # fmt: skip
            file.seek(0, os.SEEK_END)
            if file.tell() != len(held):
                file.write(b"\n")
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        return True, len(known) + 1


def _pair(body: PreferenceBody) -> Pair:
    prompt, chosen, rejected = (
        [message.plain() for message in messages] for messages in (body.prompt, body.chosen, body.rejected)
    )
    tools = [tool.plain() for tool in body.tools or []]
    said = json.dumps([prompt, chosen, rejected, tools], sort_keys=True, ensure_ascii=False)
    identity = f"page-{hashlib.sha256(said.encode()).hexdigest()[:16]}"
    return Pair(id=identity, source="page", kind="page", prompt=prompt, chosen=chosen, rejected=rejected, tools=tools)
