"""Mistakes that used to give a traceback or no message at all; benchmarks/mistakes.py makes many more."""

from pathlib import Path

import pytest

from pipeline.model.config import BaseConfig
from pipeline.run import codehash, workdir
from pipeline.run.errors import ConfigError
from pipeline.sandbox import service


def test_a_port_that_cannot_be_is_refused_by_the_sandbox_service(capsys: pytest.CaptureFixture[str]) -> None:
    assert service.main(["--port", "80000"]) == 2
    assert capsys.readouterr().err == "--port: expected 1 to 65535, got 80000\n"


def test_a_work_folder_that_is_a_file_is_named_and_a_cache_in_it_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGECOACH_WORK", str(tmp_path / "work"))
    (tmp_path / "work").write_text("")
    cache = workdir.JsonCache("digests.json", 10)
    assert cache.get("a", lambda: 1) == 1
    cache.save()
    with pytest.raises(ConfigError, match=r"work/corpus/lock: .*work is not a folder; nothing was computed"):
        workdir.need_writable(tmp_path / "work/corpus/lock")


def test_a_syntax_error_is_reported_with_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages/toy.py").write_text('"""A stage."""\n\ndef run((:\n')
    monkeypatch.chdir(tmp_path)
    assert codehash.main() == 2
    assert capsys.readouterr().err.startswith("stages/toy.py:3: invalid syntax")


def test_a_folder_with_weights_and_no_configuration_is_not_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data/pretrained"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("Put a checkpoint here.")
    assert BaseConfig().absent
    (folder / "model.safetensors").write_text("")
    assert not BaseConfig().absent
