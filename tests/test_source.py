"""A checkpoint on the hub that is pinned, cached, unreachable, or lacks what is needed."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.model import config
from pipeline.run.errors import ModelError
from tests.hubserver import REVISION, HubServer

ROOT = Path(__file__).parents[1]
OTHER = "f" * 40
CHILD = """
import json, sys
from pipeline.run.errors import ModelError
from pipeline.model.config import fetched
try:
    found = fetched(sys.argv[1])
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


def fetched(server: HubServer | None, home: Path, hub: str, **environment: str) -> dict[str, Any]:
    """`config.fetched` in a separate process, because huggingface_hub reads its environment on import."""
    settings = {
        "HF_ENDPOINT": server.url if server else "http://127.0.0.1:9",
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, hub],
        env=clean | settings | environment,
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=120,
    )
    return json.loads(done.stdout.rpartition("REPLY")[2] or json.dumps({"crash": done.stderr}))


@pytest.mark.slow
@pytest.mark.full
def test_a_revision_becomes_a_commit_and_code_and_pickles_stay_where_they_are(
    server: HubServer, tmp_path: Path
) -> None:
    whole = ["config.json", "model.safetensors", "tokenizer.json"]
    assert fetched(server, tmp_path / "home", "me/whole") == {"commit": REVISION, "files": whole}
    server.commits.append(OTHER)
    try:
        assert fetched(server, tmp_path / "home", f"me/whole@{REVISION}") == {"commit": REVISION, "files": whole}
        assert fetched(server, tmp_path / "home", "me/whole")["commit"] == OTHER
    finally:
        server.commits.remove(OTHER)
    assert not {name for name in server.gets if name.endswith((".bin", ".py"))}


@pytest.mark.slow
@pytest.mark.full
def test_shards_are_fetched_by_their_index_and_serve_without_a_network(server: HubServer, tmp_path: Path) -> None:
    pinned = f"me/sharded@{REVISION}"
    found = fetched(server, tmp_path, pinned)
    assert found["files"] == [
        "config.json",
        "model-1-of-2.safetensors",
        "model-2-of-2.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    assert fetched(None, tmp_path, pinned, HF_HUB_OFFLINE="1") == found


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize(
    ("hub", "message"),
    [
        (
            "me/pickles",
            "found neither model.safetensors nor model.safetensors.index.json; pickles (.bin) are not fetched",
        ),
        ("me/elsewhere", "names '../../model.safetensors'; expected safetensors files in the same folder"),
        ("me/nothing", "the hub has no such model, or HF_TOKEN lacks access"),
        ("me/whole@no-branch", "the hub has no revision no-branch"),
    ],
)
def test_what_the_hub_does_not_have_is_said(hub: str, message: str, server: HubServer, tmp_path: Path) -> None:
    assert message in fetched(server, tmp_path, hub)["error"]


@pytest.mark.slow
@pytest.mark.full
def test_what_is_not_in_the_cache_is_said_where_the_hub_may_not_be_asked(server: HubServer, tmp_path: Path) -> None:
    pinned = f"me/whole@{REVISION}"
    assert (
        "HF_HUB_OFFLINE is set, and config.json is not in huggingface_hub's cache"
        in fetched(None, tmp_path, pinned, HF_HUB_OFFLINE="1")["error"]
    )
    assert fetched(server, tmp_path, pinned)["commit"] == REVISION
    for weights in tmp_path.rglob("model.safetensors"):
        weights.unlink()
    assert (
        "HF_HUB_OFFLINE is set, and model.safetensors.index.json is not"
        in fetched(None, tmp_path, pinned, HF_HUB_OFFLINE="1")["error"]
    )


def test_a_hub_that_cannot_be_reached_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def away(*_: object, **__: object) -> str:
        """Raise what `hf_hub_download` raises, after its retries, for a host that does not answer."""
        raise LocalEntryNotFoundError("Please check your connection.") from OSError("[Errno 111] Connection refused")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", away)
    with pytest.raises(
        ModelError, match=r"me/whole@main: the hub could not be reached \(\[Errno 111\] Connection refused\)"
    ) as e:
        config.fetched("me/whole")
    assert "set base.folder=<folder>" in str(e.value)
