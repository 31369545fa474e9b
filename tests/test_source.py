"""Where the first model comes from: the keys, and a hub that is pinned, cached, away, or lacks what is needed."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.model import config
from pipeline.model.config import StartConfig
from pipeline.run.errors import ModelError
from tests.hubserver import REVISION, HubServer

ROOT = Path(__file__).parents[1]
OTHER = "f" * 40
CHILD = """
import json, sys
from pathlib import Path
from pipeline.run.errors import ModelError
from pipeline.model.config import StartConfig, located
hub, weights, tokenizer = json.loads(sys.argv[1])
try:
    path = Path(tokenizer) if tokenizer else None
    found = located(StartConfig(start="hub", hub=hub), None, weights=weights, tokenizer=path)
    reply = {"commit": found.commit, "files": sorted(path.name for path in found.folder.iterdir())}
except ModelError as error:
    reply = {"error": str(error)}
print("REPLY" + json.dumps(reply))
"""


@pytest.fixture(scope="module")
def server() -> Iterator[HubServer]:
    server = HubServer()
    small = {"config.json": b"{}", "tokenizer.json": b"{}", "pytorch_model.bin": b"pickle", "modeling.py": b"code"}
    server.files["me/whole"] = small | {"model.safetensors": b"w", "original/consolidated.safetensors": b"w"}
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    shards = dict.fromkeys(index["weight_map"].values(), b"w")
    server.files["me/sharded"] = small | shards | {"model.safetensors.index.json": json.dumps(index).encode()}
    server.files["me/pickles"] = small
    server.files["me/elsewhere"] = small | {
        "model.safetensors.index.json": b'{"weight_map": {"a": "../../model.safetensors"}}'
    }
    yield server
    server.shutdown()
    server.server_close()


def located(
    server: HubServer | None,
    home: Path,
    hub: str,
    *,
    weights: bool = True,
    tokenizer: Path | None = None,
    **environment: str,
) -> dict[str, Any]:
    """`source.located` in a process of its own: huggingface_hub reads its environment when it is imported."""
    settings = {
        "HF_ENDPOINT": server.url if server else "http://127.0.0.1:9",
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    asked = json.dumps([hub, weights, str(tokenizer) if tokenizer else None])
    done = subprocess.run(
        [sys.executable, "-c", CHILD, asked],
        env=clean | settings | environment,
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=120,
    )
    return json.loads(done.stdout.rpartition("REPLY")[2] or json.dumps({"crash": done.stderr}))


def test_keys_that_do_not_fit_are_refused_with_what_is_expected() -> None:
    assert StartConfig().scratch and StartConfig().inputs() == {}
    with pytest.raises(ValueError, match="start: expected scratch, pretrained, hub, got 'new'"):
        StartConfig(start="new")
    for wrong in (None, "name", "a/b@", "a/b c", "https://a/b"):
        with pytest.raises(ValueError, match="hub: expected owner/name or owner/name@revision"):
            StartConfig(start="hub", hub=wrong)
    for right in ("Qwen/Qwen3-0.6B", "a/b@main", f"a/b@{REVISION}", "a/b@refs/pr/1"):
        assert StartConfig(start="hub", hub=right).inputs() == {}


def test_a_folder_is_an_input_and_one_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert StartConfig(start="pretrained", pretrained=str(tmp_path)).inputs() == {"checkpoint": str(tmp_path)}
    assert StartConfig(start="scratch", pretrained=str(tmp_path)).inputs() == {}
    with pytest.raises(
        ModelError, match=r"language\.pretrained: expected a model directory, .*gone is none\. Give its path"
    ):
        StartConfig(start="pretrained", pretrained=str(tmp_path / "gone")).inputs()
    with pytest.raises(
        ModelError, match=r"For a model of the hub set language\.start=hub and language\.hub=Qwen/Qwen3-8B"
    ):
        StartConfig(start="pretrained", pretrained="Qwen/Qwen3-8B").inputs()


def test_a_tokenizer_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    start = StartConfig(start="hub", hub="me/whole")
    with pytest.raises(ModelError, match=r"expected the tokenizer of me/whole, found another; run dvc repro stage_tok"):
        config.recorded(tmp_path, start)
    config.record(tmp_path, StartConfig(start="hub", hub="me/other"), OTHER)
    with pytest.raises(ModelError, match=r"expected the tokenizer of me/whole, found me/other"):
        config.recorded(tmp_path, start)
    config.record(tmp_path, start, OTHER)
    assert config.recorded(tmp_path, start) == OTHER
    assert (
        config.lineage(start, OTHER) == {"pretrained": f"me/whole@{OTHER}"}
        and config.lineage(StartConfig(), None) == {}
    )


@pytest.mark.slow
@pytest.mark.full
def test_a_revision_becomes_a_commit_once_and_the_weights_follow_it(server: HubServer, tmp_path: Path) -> None:
    first = located(server, tmp_path / "home", "me/whole", weights=False)
    assert first == {"commit": REVISION, "files": ["config.json", "tokenizer.json"]}
    config.record(tmp_path / "tokenizer", StartConfig(start="hub", hub="me/whole"), first["commit"])
    server.commits.append(OTHER)
    try:
        again = located(server, tmp_path / "home", "me/whole", tokenizer=tmp_path / "tokenizer")
        assert again == {"commit": REVISION, "files": ["config.json", "model.safetensors", "tokenizer.json"]}
        assert located(server, tmp_path / "home", "me/whole", weights=False)["commit"] == OTHER
    finally:
        server.commits.remove(OTHER)
    assert not {name for name in server.gets if name.endswith((".bin", ".py"))}


@pytest.mark.slow
@pytest.mark.full
def test_shards_are_fetched_by_their_index_and_serve_without_a_network(server: HubServer, tmp_path: Path) -> None:
    pinned = f"me/sharded@{REVISION}"
    found = located(server, tmp_path, pinned)
    assert found["files"] == [
        "config.json",
        "model-1-of-2.safetensors",
        "model-2-of-2.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    assert located(None, tmp_path, pinned, HF_HUB_OFFLINE="1") == found


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize(
    ("hub", "message"),
    [
        (
            "me/pickles",
            "has neither model.safetensors nor model.safetensors.index.json; pickles (.bin) are not fetched",
        ),
        ("me/elsewhere", "names '../../model.safetensors'; expected safetensors of the same folder"),
        ("me/nothing", "the hub has no such model, or HF_TOKEN does not open it"),
        ("me/whole@no-branch", "the hub has no revision no-branch"),
    ],
)
def test_what_the_hub_does_not_have_is_said(hub: str, message: str, server: HubServer, tmp_path: Path) -> None:
    assert message in located(server, tmp_path, hub)["error"]


@pytest.mark.slow
@pytest.mark.full
def test_what_is_not_in_the_cache_is_said_where_the_hub_may_not_be_asked(server: HubServer, tmp_path: Path) -> None:
    pinned = f"me/whole@{REVISION}"
    assert (
        "HF_HUB_OFFLINE is set, and config.json is not in the cache"
        in located(None, tmp_path, pinned, HF_HUB_OFFLINE="1")["error"]
    )
    assert located(server, tmp_path, pinned, weights=False)["commit"] == REVISION
    assert (
        "HF_HUB_OFFLINE is set, and model.safetensors.index.json is not"
        in located(None, tmp_path, pinned, HF_HUB_OFFLINE="1")["error"]
    )


def test_a_hub_that_cannot_be_reached_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def away(*_: object, **__: object) -> str:
        """As `hf_hub_download` raises, after its retries, for a host that does not answer."""
        raise LocalEntryNotFoundError("Please check your connection.") from OSError("[Errno 111] Connection refused")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", away)
    for weights in (False, True):
        with pytest.raises(
            ModelError, match=r"me/whole@main: the hub could not be reached \(\[Errno 111\] Connection refused\)"
        ) as e:
            config.located(StartConfig(start="hub", hub="me/whole"), None, weights=weights)
        assert "language.start=pretrained, language.pretrained=<folder>" in str(e.value)
