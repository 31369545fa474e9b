"""The service's files of preferences and labels: what a full disk, a cut line, wrong bytes or a deleted file leave."""

import errno
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.ingest import own_files
from pipeline.ingest.own_files import FeedbackConfig
from pipeline.ingest.records import Label
from pipeline.run.errors import ConfigError
from pipeline.serve import feedback as serve_feedback
from pipeline.serve.feedback import Feedback, labels_beside
from pipeline.serve.protocol import ApiFault, LabelBody, PreferenceBody


def body(number: int, text: str = "left") -> PreferenceBody:
    sides = {name: [{"role": "assistant", "content": said}] for name, said in (("chosen", text), ("rejected", "right"))}
    return PreferenceBody.model_validate(
        {"model": "nano", "prompt": [{"role": "user", "content": f"Way {number}?"}], **sides}
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "feedback/preferences.jsonl"


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_bytes().splitlines()]


def test_a_choice_is_stored_once_with_who_gave_it(file: Path) -> None:
    feedback = Feedback(file)
    owner = "0123456789abcdef" * 4
    assert [feedback.add(body(1), owner), feedback.add(body(1), owner), feedback.add(body(2), "")] == [
        (True, 1),
        (False, 1),
        (True, 2),
    ]
    assert [row["given_by"] for row in rows(file)] == ["key-01234567", None]
    assert all("reviewed" not in row for row in rows(file))


@pytest.mark.parametrize(
    "damage",
    [
        lambda held: held[:-20],  # cut within a row
        lambda held: held + b'{"id": "\xff\xfe"}\n',
        lambda held: held + b'{"id" 3}\n',
        lambda held: held + b'{"id": ["x"], "prompt": 1}\n[1]\nnull\n',
        lambda held: held + b"\x00" * 5000,  # a block that a power cut left unwritten
        lambda held: held + b'{"id": ' + b"[" * 100_000 + b"\n",
        lambda held: held + b'{"id": ' + b"9" * 5000 + b"}\n",
        lambda held: b"\xef\xbb\xbf" + held.replace(b"\n", b"\r\n"),  # saved by a Windows editor
    ],
)
def test_rows_that_cannot_be_read_stay_and_stop_nothing(file: Path, damage: Any) -> None:
    feedback = Feedback(file)
    feedback.add(body(0), "")
    file.write_bytes(damage(file.read_bytes()))
    before = file.read_bytes()
    assert feedback.add(body(1), "")[0] and not feedback.add(body(1), "")[0] and feedback.add(body(2), "")[0]
    held = file.read_bytes()
    assert held.startswith(before)  # no existing row is touched
    assert [json.loads(line)["prompt"][0]["content"] for line in held.splitlines()[-2:]] == ["Way 1?", "Way 2?"]


@pytest.mark.parametrize("what", ["file", "folder", "replaced"])
def test_a_file_that_was_deleted_is_made_anew(file: Path, what: str) -> None:
    feedback = Feedback(file)
    feedback.add(body(0), "")
    file.unlink()
    if what == "folder":
        file.parent.rmdir()
    elif what == "replaced":
        file.write_text("")
    assert feedback.add(body(1), "") == (True, 1)
    assert [row["prompt"][0]["content"] for row in rows(file)] == ["Way 1?"]


def test_a_file_that_another_program_replaced_meanwhile_is_not_written_to_in_vain(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An editor saves under another name and renames, between our opening and our lock."""
    feedback = Feedback(file)
    original, count = serve_feedback.fcntl.flock, [0]

    def flock(descriptor: int, kind: int) -> None:
        original(descriptor, kind)
        count[0] += 1
        if count[0] == 1:
            other = file.with_name("saved")
            other.write_text("")
            other.replace(file)

    monkeypatch.setattr(serve_feedback.fcntl, "flock", flock)
    assert feedback.add(body(1), "") == (True, 1)
    assert len(rows(file)) == 1 and count == [2]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("when", ["write", "fsync"])
def test_a_full_disk_leaves_whole_rows_and_is_507(
    file: Path, monkeypatch: pytest.MonkeyPatch, code: int, when: str
) -> None:
    feedback = Feedback(file)
    feedback.add(body(0), "")
    before, original = file.read_bytes(), os.write

    def write(descriptor: int, data: bytes) -> int:
        original(descriptor, data[: len(data) // 2])
        raise OSError(code, os.strerror(code))

    def fsync(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(serve_feedback.os, when, write if when == "write" else fsync)
        for _ in range(2):
            with pytest.raises(ApiFault, match=r"no space left for .*preferences\.jsonl; nothing was stored") as caught:
                feedback.add(body(1), "")
            assert (caught.value.status, caught.value.code) == (507, "no_space")
            assert file.read_bytes() == before
    assert feedback.add(body(1), "") == (True, 2)


def test_a_write_in_pieces_is_finished(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.write
    monkeypatch.setattr(serve_feedback.os, "write", lambda descriptor, data: original(descriptor, data[:7]))
    assert Feedback(file).add(body(1), "") == (True, 1)
    assert len(rows(file)) == 1


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no small file system without root: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_on_a_disk_that_is_really_full_the_service_goes_on(full_disk: Path) -> None:
    file = full_disk / "feedback/preferences.jsonl"
    feedback, stored, refused = Feedback(file), 0, []
    for number in range(40):
        try:
            stored += feedback.add(body(number, "left " * 600), "")[0]
        except ApiFault as fault:
            refused.append(fault.status)
    assert stored > 10 and len(refused) == 40 - stored > 10 and set(refused) == {507}
    assert len(rows(file)) == stored  # each whole
    file.write_text("")  # somebody makes room
    assert feedback.add(body(99), "") == (True, 1)


@pytest.mark.parametrize("what", ["read-only file system", "a folder"])
def test_a_file_that_cannot_be_written_is_503_and_says_why(
    file: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    feedback = Feedback(file)
    if what == "a folder":
        file.unlink()
        file.mkdir()
    else:

        def read_only(*_: Any) -> int:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        monkeypatch.setattr(serve_feedback.os, "open", read_only)
    with pytest.raises(ApiFault, match=r"preferences\.jsonl cannot be written \(.*\); nothing was stored") as caught:
        feedback.add(body(1), "")
    assert caught.value.status == 503


def test_a_full_file_is_413(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_feedback, "MOST_BYTES", 900)
    feedback = Feedback(file)
    feedback.add(body(0), "")
    feedback.add(body(1), "")
    with pytest.raises(ApiFault, match=r"is full .*start a new file") as caught:
        feedback.add(body(2), "")
    assert caught.value.status == 413


def test_a_place_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--feedback .*: cannot be written"):
        Feedback(tmp_path / "file/preferences.jsonl")


def thumb(number: int, *, up: bool, text: str = "left") -> LabelBody:
    return LabelBody.model_validate(
        {
            "model": "nano",
            "prompt": [{"role": "user", "content": f"Way {number}?"}],
            "answer": [{"role": "assistant", "content": text}],
            "desirable": up,
        }
    )


def test_a_label_is_stored_once_and_its_opposite_is_another_one(tmp_path: Path) -> None:
    file = labels_beside(tmp_path / "feedback/preferences.jsonl")
    feedback, owner = Feedback(file), "0123456789abcdef" * 4
    bodies = [thumb(1, up=True), thumb(1, up=True), thumb(1, up=False), thumb(2, up=True), thumb(1, up=True, text="x")]
    assert [feedback.add(one, owner) for one in bodies] == [(True, 1), (False, 1), (True, 2), (True, 3), (True, 4)]
    assert file.name == "labels.jsonl" and [row["desirable"] for row in rows(file)] == [True, False, True, True]
    assert {row["given_by"] for row in rows(file)} == {"key-01234567"}


def test_labels_are_as_safe_on_a_full_disk_as_preferences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "labels.jsonl"
    feedback = Feedback(file)
    feedback.add(thumb(0, up=True), "")
    before, original = file.read_bytes(), os.write

    def write(descriptor: int, data: bytes) -> int:
        original(descriptor, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(serve_feedback.os, "write", write)
        with pytest.raises(ApiFault, match=r"no space left for .*labels\.jsonl; nothing was stored"):
            feedback.add(thumb(1, up=True), "")
    assert file.read_bytes() == before and feedback.add(thumb(1, up=True), "") == (True, 2)


def test_preferences_and_labels_are_two_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"this name is reserved for labels; use preferences\.jsonl"):
        labels_beside(tmp_path / "labels.jsonl")


def test_what_the_page_stores_is_what_the_next_build_reads(tmp_path: Path) -> None:
    file = tmp_path / "labels.jsonl"
    for number in range(3):
        Feedback(file).add(thumb(number, up=number == 1), "")
    found, told = own_files.feedback(file, Label, FeedbackConfig(), 100, tmp_path / "rejected.jsonl")
    assert [label.desirable for label in found] == [False, True, False] and told["rejected"] == 0
    assert [(label.prompt[0]["content"], label.answer[0]["content"]) for label in found] == [
        (f"Way {number}?", "left") for number in range(3)
    ]
