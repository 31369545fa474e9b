"""Input of the wrong kind gives one line that names it and exit code 2, not a traceback."""

import shutil
from pathlib import Path

import pytest

from pipeline.ingest import records
from pipeline.ingest.records import Dialogue
from pipeline.run import device
from pipeline.run.config import Settings, parse_override, without_password
from pipeline.run.errors import ConfigError, DataError
from pipeline.sandbox.config import SandboxConfig
from pipeline.sandbox.remote import Remote, address
from tests.conftest import ROOT
from tests.workspace import Workspace


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    shutil.copy(ROOT / "params.yaml", tmp_path / "params.yaml")
    (tmp_path / "stages").symlink_to(ROOT / "stages")
    return tmp_path


@pytest.mark.parametrize(
    "name", ["conf/model/nano.yaml", "conf/scale/demo.yaml", "conf/data/packages.yaml", "params.yaml"]
)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1]\n", "expected a mapping of keys, found list"),
        (b"three\n", "expected a mapping of keys, found str"),
        (b"width: \xff\n", "not valid YAML: "),
        (b"a: [1\n", "not valid YAML: "),
    ],
)
def test_a_file_of_parameters_that_is_no_mapping_is_named(
    repository: Path, name: str, content: bytes, message: str
) -> None:
    (repository / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{name}: {message}") as caught:
        Settings(repository, [])
    assert "\n" not in str(caught.value)


def test_an_override_that_is_no_yaml_is_named() -> None:
    with pytest.raises(ConfigError, match=r"command line: lora\.steps: not valid YAML: '\[1'"):
        parse_override("lora.steps=[1")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"id": "\xff\xfe"}', "codec can't decode byte 0xff"),
        (b"[" * 100_000, "recursion|Expecting"),
        (b'{"id": "' + b"x" * 20, "Invalid control character"),
    ],
)
def test_a_record_that_cannot_be_read_is_named_with_its_line(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "train.jsonl"
    good = records.dumps(Dialogue(id="1", kind="chat", category="talk", messages=[])).encode()
    path.write_bytes(good + b"\n" + line + b"\n")
    with pytest.raises(DataError, match=rf"train\.jsonl:2: not JSON in UTF-8 \(.*({reason}).*\); run dvc repro"):
        list(records.read(path, Dialogue))


def test_dialogues_that_are_no_utf8_end_a_training_stage_with_one_line(workspace: Workspace) -> None:
    with (workspace.folder / "data/dialogues/train.jsonl").open("ab") as file:
        file.write(b'{"id": "\xff"}\n')
    ended = workspace.command("lora")
    assert ended.code == 2 and ended.said.count("\n") == 1
    assert "stage_lora: data/dialogues/train.jsonl:21: not JSON in UTF-8" in ended.said


def test_a_model_beyond_the_memory_of_the_machine_is_refused() -> None:
    device.need_memory(1_000_000, "a small one")
    with pytest.raises(
        ConfigError, match=r"a wide one: needs 1,000,000,000\.0 GB, but this machine has .* GB; use a smaller"
    ):
        device.need_memory(10**18, "a wide one")


def test_a_fresh_model_is_weighed_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.run.config import stage_params
    from stages import language

    params = stage_params("language", Settings(ROOT, ["model.width=1000000000"]))
    monkeypatch.setattr(language, "Transformer", lambda *_: pytest.fail("it was built"))
    with pytest.raises(ConfigError, match=r"a model of [\d,]+ weights in float32: needs [\d,.]+ GB"):
        language.fresh(params, None, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://user:s3cret@10.0.0.2:8801", "http://10.0.0.2:8801"),
        ("user:s3cret@10.0.0.2:8801", "10.0.0.2:8801"),
        ("https://user:s3/c@r%40et@host/x", "https://host/x"),
        ("https://host:1", "https://host:1"),
    ],
)
def test_a_password_is_left_out_of_an_address(url: str, shown: str) -> None:
    assert without_password(url) == shown


@pytest.mark.parametrize("url", ["http://user:s3cret@127.0.0.1:9", "user:s3cret@127.0.0.1:9"])
def test_no_message_of_a_sandbox_service_shows_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match=r"expected a sandbox service at http://127\.0\.0\.1:9, found none") as caught:
        Remote(url, SandboxConfig()).start()
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("url", ["ftp://user:s3cret@h:9/x", "http://user:s3cret@h:9/path", "http://user:s3cret@"])
def test_no_message_about_a_wrong_address_shows_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match=r"runtime\.sandbox\.url: expected an address such as") as caught:
        address(url)
    assert "s3cret" not in str(caught.value)
