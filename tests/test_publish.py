"""Publishing to a hub that speaks huggingface_hub's protocol: what arrives, what is sent again, what is refused."""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi, ModelCard, constants, snapshot_download

from pipeline.export import huggingface, smoke
from pipeline.model import checkpoint
from pipeline.model.transformer import Transformer
from pipeline.run import workdir
from pipeline.text.tokenizer import Tokenizer
from pipeline.tools import publish
from tests import deployment
from tests.hubserver import HubServer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
TOKEN = "hf_" + "wRiTe" * 7
REPO = "me/assistant"
Run = Callable[..., SimpleNamespace]
PROOF = {"max_difference": 0, "divergence": 0, "perplexity": 0, "greedy_equal": 64, "greedy_tokens": 64}
LARGE = ("gguf/a.gguf", "gguf/b.gguf", "model.safetensors")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub that accepts TOKEN."""
    server = HubServer()
    server.tokens = {TOKEN: "write"}
    monkeypatch.delenv("HF_HUB_DISABLE_XET", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)  # the default
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    server.released.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Transformer, byte_tokenizer: Tokenizer) -> Path:
    """models/deploy as the stage leaves it, made from models/tools, which was evaluated."""
    base = tmp_path / "models/base"
    checkpoint.save(base, tiny_model, byte_tokenizer, {"base": "someone/small@" + "a" * 40})
    tools = tmp_path / "models/tools"
    checkpoint.save(tools, tiny_model, byte_tokenizer, {"inputs": {"models/base": workdir.digest(base)}})
    out = tmp_path / "models/deploy"
    lineage = {"key": "0123456789abcdef", "model": "tools", "inputs": {"models/tools": workdir.digest(tools)}}
    huggingface.export(tiny_model, byte_tokenizer, lineage, out)
    (out / "gguf").mkdir()
    for n, name in enumerate("ab"):
        (out / f"gguf/{name}.gguf").write_bytes(b"GGUF" + bytes([n]) * 300_000)
    data = {name: json.loads(path.read_text()) for name, path in deployment.manifests(tmp_path).items()}
    made = huggingface.Exported(
        name="stagecoach-tools",
        model=tiny_model,
        tokenizer=byte_tokenizer,
        parity={"huggingface": PROOF},
        lineage=checkpoint.lineage(out),
        made_by={},
        data=data,
        gguf=None,
        onnx=False,
    )
    huggingface.write(out, made)
    huggingface.seal(out)
    evaluated(tmp_path, lineage["inputs"]["models/tools"])
    return out


def evaluated(root: Path, weights: str) -> None:
    """metrics/eval/tools.json as stage_evaluate writes it for these weights."""
    easy = {"n": 40, "pass_at_1": 0.925, "pass_at_1_low": 0.85, "pass_at_1_high": 0.975}
    humaneval = {"kind": "humaneval", "pass_at_1_greedy": 0.01, "pass_at_1_greedy_low": 0.0, "n": 164}
    numbers = {
        "text": {"bpb": 1.953806, "bpb_low": "not finite", "bpb_high": "not finite", "documents": 11},
        "problems": {"easy": easy},
        "benchmarks": {"HumanEval": humaneval | {"pass_at_1_greedy_high": 0.04}},
        "settings": {"data_seed": 42, "fresh_seed": "none"},
        "lineage": {"inputs": {"models/tools": weights}},
    }
    path = root / "metrics/eval/tools.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(numbers))


@pytest.fixture
def run(hub: HubServer, folder: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command on `folder`; its exit code, stdout and stderr. The token never appears in them."""

    def run(*options: str, to: str = REPO, endpoint: str = hub.url) -> SimpleNamespace:
        capsys.readouterr()
        code = publish.main([str(folder), "--to", to, "--endpoint", endpoint, *options])
        out, err = capsys.readouterr()
        assert TOKEN not in out + err and "s3cret" not in out + err
        return SimpleNamespace(code=code, out=out, err=err)

    return run


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def reseal(folder: Path) -> None:
    (folder / "SHA256SUMS").unlink()
    huggingface.seal(folder)


def test_what_is_published_loads_and_answers_like_the_model(
    run: Run, hub: HubServer, folder: Path, tiny_model: Transformer, tmp_path: Path
) -> None:
    done = run()
    assert done.code == 0, done.err
    assert done.out.splitlines()[-1] == f"{hub.url}/{REPO}/commit/{hub.heads[REPO]}"
    assert hub.private == {REPO}
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert hub.files[REPO].keys() == names | {".gitattributes"}
    api = HfApi(endpoint=hub.url, token=TOKEN)
    fetched = Path(api.snapshot_download(REPO, local_dir=tmp_path / "fetched"))
    model, tokenizer = huggingface.load(fetched)  # which checks SHA256SUMS, including the new card
    ids = tokenizer.encode("def add(left, right):")
    assert isinstance(model, Transformer)
    assert smoke.compare(tiny_model, smoke.Ours(model), ids).max_difference == 0
    for name in names - {"README.md", "SHA256SUMS"}:
        assert (fetched / name).read_bytes() == (folder / name).read_bytes()


def test_the_card_holds_metadata_results_and_lineage_that_the_hub_reads(run: Run, hub: HubServer) -> None:
    assert run("--license", "mit", "--language", "en", "code").code == 0
    card = ModelCard(hub.files[REPO]["README.md"].decode())
    assert card.data.to_dict() | {"model-index": None} == {
        "license": "mit",
        "language": ["en", "code"],
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": ["someone/small"],
        "tags": ["stagecoach", "tools"],
        "model-index": None,
    }
    assert card.data.model_name == "stagecoach-tools"
    found = {(r.dataset_type, r.dataset_config, r.metric_type): r for r in card.data.eval_results}
    assert {key: (r.metric_value, r.metric_args) for key, r in found.items()} == {
        ("stagecoach-text", None, "bpb"): (1.953806, None),
        ("stagecoach-problems", "easy", "pass@1"): (0.925, {"low": 0.85, "high": 0.975}),
        ("HumanEval", None, "pass@1_greedy"): (0.01, {"low": 0.0, "high": 0.04}),
    }
    assert {r.task_type for r in found.values()} == {"text-generation"}
    assert found["stagecoach-text", None, "bpb"].dataset_args == {"data_seed": 42}
    assert "| Easy problems, pass@1 | 92.5% | 85.0% to 97.5% |" in card.text
    assert "| Running text, bits per byte (lower is better) | 1.954 |  |" in card.text
    assert "stagecoach-tools: key | `0123456789abcdef`" in card.text
    assert f"hf download {REPO} --local-dir models/deploy" in card.text


def test_killed_amid_a_file_it_sends_only_the_rest(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    """A process is killed while it uploads its second large file."""
    hub.put_faults = {2: "hold"}
    command = [sys.executable, "-m", "pipeline.tools.publish", str(folder), "--to", REPO, "--endpoint", hub.url]
    first = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"HF_TOKEN": TOKEN}, stderr=subprocess.DEVNULL)
    assert hub.holding.wait(60)
    deadline = time.monotonic() + 60
    while len(hub.objects) < 2 and time.monotonic() < deadline:  # the others are uploaded in parallel
        time.sleep(0.01)
    first.kill()
    first.wait()
    hub.released.set()
    arrived, sent = set(hub.objects), sum(hub.stored_bytes.values())
    large = {sha((folder / name).read_bytes()): (folder / name).stat().st_size for name in LARGE}
    assert len(arrived) == 2 and arrived < large.keys()
    assert hub.files[REPO].keys() == {".gitattributes"}  # nothing of it is published
    again = subprocess.run(command, cwd=ROOT, env=os.environ | {"HF_TOKEN": TOKEN}, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert TOKEN not in again.stdout + again.stderr
    assert set(hub.objects) == large.keys()
    assert sum(hub.stored_bytes.values()) - sent == sum(large[oid] for oid in large.keys() - arrived)
    assert hub.requests["put"] == 4
    assert {oid: hub.stored_bytes[oid] for oid in arrived} == {oid: large[oid] for oid in arrived}


def test_what_is_published_already_is_not_sent_and_not_committed_again(run: Run, hub: HubServer) -> None:
    first = run()
    puts, head = hub.requests["put"], hub.heads[REPO]
    again = run()
    assert again.code == 0 and again.out == first.out
    assert (hub.requests["put"], hub.requests["commit"], hub.heads[REPO]) == (puts, 1, head)


def test_another_version_sends_what_changed(run: Run, hub: HubServer, folder: Path) -> None:
    assert run().code == 0
    changed = b"GGUF" + b"c" * 1000
    (folder / "gguf/b.gguf").write_bytes(changed)
    reseal(folder)
    before = sum(hub.stored_bytes.values())
    assert run().code == 0
    assert sum(hub.stored_bytes.values()) - before == len(changed)
    assert hub.files[REPO]["gguf/b.gguf"] == changed


def test_a_large_file_goes_in_parts_where_the_hub_asks_for_them(run: Run, hub: HubServer, folder: Path) -> None:
    hub.part_size = 100_000
    assert run().code == 0
    assert hub.requests["parts"] >= 2 and hub.requests["put"] >= 8
    assert hub.files[REPO]["gguf/a.gguf"] == (folder / "gguf/a.gguf").read_bytes()


def test_a_branch_is_made_and_main_stays_as_it_was(run: Run, hub: HubServer) -> None:
    assert run("--revision", "draft/1").code == 0
    assert hub.files[REPO].keys() == {".gitattributes"}
    assert "model.safetensors" in hub.files[f"{REPO}@draft/1"]
    assert "--revision draft/1" in hub.files[f"{REPO}@draft/1"]["README.md"].decode()
    assert run().code == 0
    assert "model.safetensors" in hub.files[REPO]


def test_a_dry_run_lists_files_and_bytes_and_asks_no_hub(
    run: Run, hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    listed = run("--dry-run")
    assert listed.code == 0
    assert f"{(folder / 'model.safetensors').stat().st_size:>15,}  model.safetensors\n" in listed.out
    assert "(private, main)" in listed.out and "nothing was sent" in listed.out
    assert not hub.requests and not hub.gets and not hub.files
    assert run().out == ""  # without a token
    listing = listed.out.splitlines()[:-1]
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert run().code == 0
    sizes = [f"{len(content):>15,}  {name}" for name, content in sorted(hub.files[REPO].items()) if name[0] != "."]
    assert listing == sizes


@pytest.mark.parametrize("public", [False, True])
def test_visibility_is_what_was_asked_for(run: Run, hub: HubServer, public: bool) -> None:
    assert run(*(["--public"] if public else [])).code == 0
    assert (REPO in hub.private) is not public
    other = run(*([] if public else ["--public"]))
    assert other.code == 2 and hub.requests["commit"] == 1
    assert ("pass --public if everyone may read" if public else "is private; make it public on its page") in other.err


@pytest.mark.parametrize(
    ("token", "role", "message"),
    [
        (None, "", "no token: create one with write access in the hub's settings, and set HF_TOKEN"),
        ("hf_unknown", "", "the hub does not accept the token (401 Invalid credentials"),
        ("hf_reads", "read", "the token lacks permission (403 You don't have the rights"),
        ("hf_other", "other", "write access to repositories of me"),
    ],
)
@pytest.mark.parametrize("exists", [False, True])
def test_without_permission_nothing_is_sent(
    run: Run, hub: HubServer, monkeypatch: pytest.MonkeyPatch, token: str | None, role: str, message: str, exists: bool
) -> None:
    hub.echoes = True
    if exists:
        hub.files[REPO] = {".gitattributes": b""}
        hub.private.add(REPO)
    if token is None:
        monkeypatch.delenv("HF_TOKEN")
    else:
        monkeypatch.setenv("HF_TOKEN", token)
    hub.tokens |= {token: role} if token and role else {}
    done = run()
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert token is None or token not in done.err
    assert hub.requests["put"] == hub.requests["commit"] == 0
    assert "model.safetensors" not in hub.files.get(REPO, {})


def test_a_file_that_the_storage_refuses_is_named_and_nothing_is_published(run: Run, hub: HubServer) -> None:
    hub.put_faults, hub.echoes = {1: 403}, True
    done = run()
    assert done.code == 1 and "run again to resume" in done.err and "403 Request has expired" in done.err
    assert any(name in done.err for name in LARGE)
    assert hub.files[REPO].keys() == {".gitattributes"} and hub.requests["commit"] == 0
    assert run().code == 0


def test_a_hub_that_cannot_be_reached_is_said_at_once(run: Run) -> None:
    done = run(endpoint="http://127.0.0.1:9")
    assert done.code == 1 and done.out == ""
    assert "is the hub reachable?" in done.err and "onnection refused" in done.err


def test_a_repository_with_other_files_is_left_alone_unless_replaced(run: Run, hub: HubServer) -> None:
    theirs = {".gitattributes": b"", "config.json": b"{}", "weights.bin": b"w"}
    hub.files[REPO] = dict(theirs)
    hub.private.add(REPO)
    done = run()
    assert done.code == 2 and "has other files: config.json, weights.bin; choose another name" in done.err
    assert hub.files[REPO] == theirs and hub.requests["put"] == 0
    assert run("--replace").code == 0
    assert "weights.bin" not in hub.files[REPO] and hub.files[REPO]["config.json"] != b"{}"


def test_a_commit_by_another_in_between_is_not_overwritten(run: Run, hub: HubServer) -> None:
    hub.files[REPO] = {".gitattributes": b""}
    hub.private.add(REPO)
    hub.at_commit = lambda: hub.heads.update({REPO: "b" * 40})
    done = run()
    assert done.code == 1 and "changed in the meantime (412" in done.err
    assert hub.files[REPO] == {".gitattributes": b""}


def test_a_hub_that_keeps_other_bytes_is_noticed(run: Run, hub: HubServer, folder: Path) -> None:
    """The commit succeeds, but one file is not what was sent."""

    def spoil() -> None:
        hub.objects[sha((folder / "gguf/a.gguf").read_bytes())] = b"GGUF of another"

    hub.at_commit = spoil
    done = run()
    assert done.code == 1 and done.out == "" and "differs from what was sent: gguf/a.gguf; run again" in done.err


def test_a_card_that_the_hub_refuses_ends_before_any_file_is_sent(run: Run, hub: HubServer) -> None:
    done = run("--license", "mine")
    assert done.code == 2 and '"license" must be one of' in done.err
    assert hub.requests["put"] == hub.requests["commit"] == 0


@pytest.mark.parametrize("name", ["assistant", "a/b/c", "me/", "/x", "me/..", "me/a b", "https://hub/me/x", "me/-x"])
def test_a_name_that_is_not_owner_and_name_is_refused(run: Run, hub: HubServer, name: str) -> None:
    done = run(to=name)
    assert done.code == 2 and "--to: expected OWNER/NAME" in done.err
    assert not hub.requests


@pytest.mark.parametrize(
    "endpoint", ["http://hub.example.org", "https://me:secret@hub.example.org", "ftp://127.0.0.1", "hub"]
)
def test_an_endpoint_that_would_give_the_token_away_is_refused(run: Run, endpoint: str) -> None:
    done = run(endpoint=endpoint)
    assert done.code == 2 and "--endpoint" in done.err and "secret" not in done.err


def drop(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def alter(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes() + b" ")


def other_tokenizer(folder: Path) -> None:
    alter("tokenizer.json")(folder)
    reseal(folder)


def other_lineage(folder: Path) -> None:
    (folder / "lineage.json").write_text("{}")
    reseal(folder)


def other_weights_measured(folder: Path) -> None:
    evaluated(folder.parents[1], "feedfeedfeedfeed")


def emptied(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (emptied, "config.json, tokenizer.json, lineage.json, README.md, SHA256SUMS, *.safetensors is missing"),
        (drop("SHA256SUMS"), "expected a deployed model, but SHA256SUMS is missing"),
        (drop("gguf/a.gguf"), "found nothing"),
        (alter("model.safetensors"), "expected sha256"),
        (lambda folder: (folder / ".env").write_text("KEY=1"), "not listed in SHA256SUMS: .env"),
        (lambda folder: (folder / "run.py").write_text(""), "code; expected only safetensors and JSON"),
        (other_tokenizer, "parts of two different models; deploy tools again"),
        (other_lineage, "expected model, inputs and tokenizer"),
        (other_weights_measured, "evaluated models/tools feedfeedfeedfeed, but deployed"),
    ],
)
def test_a_folder_that_is_no_whole_model_is_not_published(
    run: Run, hub: HubServer, folder: Path, change: Callable[[Path], object], message: str
) -> None:
    change(folder)
    done = run()
    assert done.code == 2 and message in done.err
    assert not hub.requests and not hub.files


def test_a_model_that_was_not_measured_says_so(run: Run, hub: HubServer, folder: Path) -> None:
    (folder.parents[1] / "metrics/eval/tools.json").unlink()
    done = run()
    assert done.code == 0 and "the card will have no results" in done.err
    card = ModelCard(hub.files[REPO]["README.md"].decode())
    assert card.data.eval_results is None and "This model was not evaluated." in card.text


def test_the_base_is_named_only_while_the_lineage_leads_to_it(run: Run, hub: HubServer, folder: Path) -> None:
    (folder.parent / "base/config.json").write_text("{}")  # the base has changed since
    assert run().code == 0
    assert "base_model" not in ModelCard(hub.files[REPO]["README.md"].decode()).data.to_dict()


def test_the_token_travels_in_the_header_alone(run: Run, hub: HubServer) -> None:
    assert run().code == 0
    assert any(TOKEN in headers for headers in hub.headers_seen)
    assert TOKEN not in str(hub.files) and TOKEN.encode() not in b"".join(hub.files[REPO].values())


def test_snapshots_are_fetched_without_our_code(run: Run, hub: HubServer, tmp_path: Path) -> None:
    """The same repository, fetched with huggingface_hub alone as by somebody without Stagecoach."""
    assert run().code == 0
    fetched = snapshot_download(REPO, endpoint=hub.url, token=TOKEN, local_dir=tmp_path / "plain")
    sums = subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=fetched, capture_output=True)
    assert sums.returncode == 0, sums.stdout + sums.stderr
