"""Two clones and a remote between them: what a push carries over, and that nothing trains after a pull.

These are the commands of docs/sharing.md. The remote is a folder or an S3-compatible server on this machine
(`rclone serve s3`; a real bucket's permissions, regions and speed are not tested).
"""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests.graph import Repository, copy_of_built, ran

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(2400)]
KEYS = {"AWS_ACCESS_KEY_ID": "maker", "AWS_SECRET_ACCESS_KEY": "only-in-the-environment"}
RCLONE = shutil.which("rclone", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
PRIVATE = ("data/raw/code", "data/raw/text", "data/tokens/code", "data/tokens/text")


@pytest.fixture
def maker(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    """The clone in which the graph was built; its `origin` is a bare repository that has the commit with dvc.lock."""
    repository, _ = copy_of_built(tmp_path / "maker", tmp_path_factory)
    repository.git("clone", "-q", "--bare", ".", "../origin.git")
    repository.git("remote", "add", "origin", "../origin.git")
    yield repository
    shutil.rmtree(tmp_path)  # half a gigabyte per test; pytest would keep those of three runs


def test_a_teammate_gets_every_result_through_a_folder_and_runs_nothing(maker: Repository) -> None:
    share_folder(maker)
    maker.dvc("push", "-q")
    teammate = clone_of(maker)
    assert teammate.repro("--pull") == set()
    assert_untrained_and_equal(teammate, maker)


@pytest.mark.skipif(
    RCLONE is None or importlib.util.find_spec("dvc_s3") is None, reason="needs rclone and dvc-s3, of the extra `dev`"
)
def test_a_teammate_gets_every_result_through_an_s3_server_and_a_wrong_secret_changes_nothing(
    maker: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with s3_server(tmp_path / "served") as endpoint:
        maker.dvc("remote", "add", "-d", "team", "s3://bucket/stagecoach")
        maker.dvc("remote", "modify", "team", "endpointurl", endpoint)
        publish(maker, "an S3 remote")
        maker.dvc("push", "-q", **KEYS)
        teammate = clone_of(maker)

        before = files_of(teammate)
        for command in (("pull", "models/deploy"), ("repro", "--pull")):
            refused = teammate.run("dvc", *command, check=False, **KEYS | {"AWS_SECRET_ACCESS_KEY": "another"})
            assert refused.returncode != 0
            assert "Forbidden" in refused.stdout and "Running stage" not in refused.stdout, refused.stdout
        assert files_of(teammate) == before

        teammate.dvc("pull", "-q", **KEYS)
        assert teammate.repro("--pull", **KEYS) == set()
    assert_untrained_and_equal(teammate, maker)
    for config in (*maker.folder.glob(".dvc/config*"), *teammate.folder.glob(".dvc/config*")):
        assert not any(value in config.read_text() for value in KEYS.values())


def test_an_experiment_comes_over_with_its_files_and_runs_nothing(maker: Repository) -> None:
    share_folder(maker)
    before = maker.sha("lora")
    maker.dvc("exp", "run", "-n", "shorter", "-S", "lora.steps=2", "stage_lora")
    maker.dvc("exp", "push", "origin", "shorter")
    teammate = clone_of(maker)
    assert "shorter" in teammate.dvc("exp", "list", "origin")
    teammate.dvc("exp", "pull", "origin", "shorter")
    teammate.dvc("exp", "apply", "shorter")
    assert teammate.repro("--pull", "stage_lora") == set()
    assert not (teammate.folder / ".work").exists()
    assert "steps: 2" in teammate.git("diff", "params.yaml")
    assert results(teammate) == results(maker)
    assert teammate.sha("lora") != before


def test_what_is_marked_private_stays_and_the_rest_runs_nothing_with_allow_missing(maker: Repository) -> None:
    """Without the flag, DVC rebuilds the missing corpus from the teammate's machine and trains everything on it."""
    maker.edit(
        "dvc.yaml",
        "      - data/raw/code\n      - data/raw/text\n      - metrics/corpus.json",
        "      - data/raw/code:\n          push: false\n      - data/raw/text:\n          push: false\n"
        "      - metrics/corpus.json",
    )
    maker.edit(
        "dvc.yaml",
        "      - data/tokens/${item.corpus}\n      - metrics/encode",
        "      - data/tokens/${item.corpus}:\n          push: false\n      - metrics/encode",
    )
    store = share_folder(maker)
    assert maker.changed() == set()
    maker.dvc("push", "-q")
    private = objects(maker, PRIVATE)
    stored = {path.parent.name + path.name for path in store.glob("files/md5/*/*")}
    assert len(private) > len(PRIVATE) and not private & stored
    assert objects(maker, ("models/deploy", "data/tokenizer")) <= stored

    teammate = clone_of(maker)
    assert ran(teammate.dvc("repro", "--pull", "--dry", "stage_corpus")) == {"stage_corpus"}
    teammate.dvc("pull", "-q", "--allow-missing")
    assert teammate.repro("--pull", "--allow-missing") == set()
    assert not (teammate.folder / ".work").exists()
    assert not any((teammate.folder / name).exists() for name in PRIVATE)
    assert results(teammate) == results(maker)


def share_folder(maker: Repository) -> Path:
    """Point the repository's default remote at a folder, by its absolute path, which experiments need."""
    store = maker.folder.parent / "store"
    maker.dvc("remote", "modify", "store", "url", str(store))
    publish(maker, "a folder as remote")
    return store


def publish(maker: Repository, message: str) -> None:
    maker.commit(message)
    maker.git("push", "-q", "origin", "main")


def clone_of(maker: Repository) -> Repository:
    """The teammate's clone: another folder, an empty cache, no `.work`."""
    folder = maker.folder.parent / "teammate"
    maker.git("clone", "-q", "../origin.git", str(folder))
    return Repository(folder)


def assert_untrained_and_equal(teammate: Repository, maker: Repository) -> None:
    """No stage has run, all is up to date, and all results and the output of `dvc metrics show` are the maker's."""
    assert not (teammate.folder / ".work").exists()
    assert teammate.changed() == set()
    assert teammate.git("status", "--porcelain") == ""
    assert results(teammate) == results(maker)
    shown = json.loads(teammate.dvc("metrics", "show", "--json"))
    assert shown == json.loads(maker.dvc("metrics", "show", "--json"))
    assert "reports/headlines/tools.json" in shown[""]["data"]


def results(repository: Repository) -> dict[str, str]:
    """sha256 of every file that the graph publishes as a model, a metric or a report."""
    found = {
        str(path.relative_to(repository.folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for folder in ("models", "metrics", "reports")
        for path in (repository.folder / folder).rglob("*")
        if path.is_file()
    }
    assert {"models/deploy/model.safetensors", "metrics/eval/tools.json", "reports/index.html"} <= found.keys()
    return found


def files_of(repository: Repository) -> dict[str, int]:
    """Every file with its size, except those in .git and .dvc/tmp."""
    return {
        name: path.stat().st_size
        for path in repository.folder.rglob("*")
        if path.is_file() and not (name := str(path.relative_to(repository.folder))).startswith((".git/", ".dvc/tmp/"))
    }


def objects(repository: Repository, outs: tuple[str, ...]) -> set[str]:
    """Names of these folders' contents in the cache: their listings (`.dir`) and each file."""
    lock = YAML(typ="safe").load(repository.folder / "dvc.lock")
    listings = [out["md5"] for stage in lock["stages"].values() for out in stage["outs"] if out["path"] in outs]
    assert len(listings) == len(outs)
    cache = repository.folder / ".dvc/cache/files/md5"
    return {*listings} | {
        entry["md5"] for name in listings for entry in json.loads((cache / name[:2] / name[2:]).read_text())
    }


@contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """The address of an S3-compatible server with an empty bucket `bucket`, which requires `KEYS`."""
    assert RCLONE is not None
    (folder / "bucket").mkdir(parents=True)
    pair = f"{KEYS['AWS_ACCESS_KEY_ID']},{KEYS['AWS_SECRET_ACCESS_KEY']}"
    server = subprocess.Popen(
        [RCLONE, "serve", "s3", "--addr", "127.0.0.1:0", "--auth-key", pair, "--config", os.devnull, str(folder)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stderr is not None
        said = server.stderr.readline()  # when it listens: "... Starting s3 server on [http://127.0.0.1:42825/]"
        assert "[http://127.0.0.1:" in said, said
        yield said.split("[")[1].split("/]")[0]
    finally:
        server.kill()
        server.communicate()
