"""pipeline/run/mlflow_store.py and report/champion.py: which version may be the champion, on a real store."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.model import checkpoint
from pipeline.model.transformer import Transformer
from pipeline.report import champion, claims
from pipeline.report.claims import Measured
from pipeline.report.metrics import read
from pipeline.run import mlflow_store
from pipeline.run.errors import GateError, InputError
from pipeline.run.tracking import Tracker
from pipeline.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))


def deploy(root: Path, key: str, right: list[int], *, digest: str = "weights", registered: bool = True) -> None:
    """Write what stage_deploy and an evaluation of `tools` leave behind; `right` says which problems were solved."""
    rate = sum(right) / len(right)
    inputs = {"models/tools": digest, "data/problems": "same"}
    write(
        root / "metrics/deploy.json", {"model": "tools", "lineage": {"key": key, "inputs": {"models/tools": "weights"}}}
    )
    numbers = {"easy": {"pass_at_1": rate, "pass_at_1_low": rate - 0.1, "pass_at_1_high": rate + 0.1}}
    write(root / "metrics/eval/tools.json", {"problems": numbers, "lineage": {"key": f"e{key}", "inputs": inputs}})
    rows = [{"suite": "problems", "id": str(n), "group": "easy", "sampled": r} for n, r in enumerate(right)]
    write(root / "metrics/eval/tools.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    folder = root / ".work/deploy" / key
    if not (folder / "out/models/deploy/config.json").exists():
        write(folder / "out/models/deploy/config.json", "{}")
    if registered:
        tracker = Tracker(
            "deploy", folder, {"stage": "deploy", "work.key": key, "git.commit": "c" * 40}, {}, quiet=False
        )
        tracker.register(folder / "out/models/deploy", model="tools")
        tracker.finish()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STAGECOACH_MLFLOW", "on")
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    shutil.copytree(ROOT / "stages", tmp_path / "stages")
    text = (ROOT / "params.yaml").read_text()
    write(tmp_path / "params.yaml", text.replace("\n  gate:", "\n  gate: {easy: 0.3}"))
    return tmp_path


@pytest.mark.slow
@pytest.mark.full
def test_the_alias_moves_only_to_a_model_that_reaches_its_gate_and_is_not_worse(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def say(*command: str) -> tuple[int, str]:
        code = champion.main(list(command))
        told = capsys.readouterr()
        return code, told.out + told.err

    assert "no versions registered yet" in say()[1]
    deploy(here, "k1", [1, 0] * 50)
    assert say("crown") == (0, "version 1 (tools, key k1) is now the champion\n")
    assert say("crown") == (0, "version 1 (tools, key k1) is already the champion\n")
    deploy(here, "k2", [1, 0] * 40 + [0, 0] * 10)  # ten problems lost, none gained
    code, text = say("crown")
    assert (
        code == GateError.exit_code and "Easy problems, pass@1 is worse than the champion's: −10.0 points (−1" in text
    )
    client, _ = mlflow_store.connect()
    present = mlflow_store.champion(client)
    assert present is not None and present.tags["work.key"] == "k1"
    deploy(here, "k3", [1, 0] * 35 + [0] * 30)
    code, text = say("crown", "--although", "smaller and fast")
    assert code == 0 and "now the champion, replacing version 1" in text
    present = mlflow_store.champion(client)
    assert present is not None and present.tags["champion.although"].startswith("smaller and fast: ")
    shown = say()[1].splitlines()
    assert [line[:11] for line in shown] == [
        "* version 3",
        "  version 2",
        "  version 1",
    ] and "key k3  commit cccccccccc" in shown[0]
    deploy(here, "k4", [1, 0, 0, 0] * 25)
    assert "at least 30.0%: 25.0%, at worst 15.0%" in say("crown")[1]


@pytest.mark.slow
@pytest.mark.full
def test_a_version_answers_in_another_program_after_its_work_folder_is_gone(
    here: Path, tiny_model: Transformer, byte_tokenizer: Tokenizer
) -> None:
    made = here / ".work/deploy/k1/out/models/deploy"
    checkpoint.save(made, tiny_model, byte_tokenizer, {"key": "k1"})
    (made / "gguf").mkdir()
    (made / "gguf/large.gguf").write_text("for other programs")
    deploy(here, "k1", [1, 0])
    assert champion.main(["crown"]) == 0
    shutil.rmtree(here / ".work")
    program = (
        "import mlflow; mlflow.set_tracking_uri('sqlite:///mlflow.db');"
        " model = mlflow.pyfunc.load_model('models:/stagecoach@champion'); import pipeline;"
        " print(pipeline.__file__);"
        " print(len(model.predict(['a', 'b'], params={'max_new_tokens': 4, 'temperature': 1.0, 'seed': 3})))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], cwd=here, capture_output=True, text=True, check=True)
    package, count = done.stdout.split()
    assert Path(package).is_relative_to(here / "mlartifacts") and count == "2"
    assert list(here.glob("mlartifacts/**/*.gguf")) == []


def test_without_a_minimum_no_model_becomes_champion(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (here / "params.yaml").read_text()
    write(here / "params.yaml", text.replace("  gate: {easy: 0.3}", "  gate:"))
    deploy(here, "k1", [1, 0])
    assert champion.main(["crown"]) == GateError.exit_code
    assert "report.gate sets no target" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.full
def test_a_resumed_run_registers_once_and_what_is_missing_is_said(here: Path) -> None:
    with pytest.raises(InputError, match="dvc repro stage_deploy"):
        champion.deployed()
    deploy(here, "k1", [1, 0], registered=False)
    with pytest.raises(InputError, match="not registered in this MLflow store"):
        champion.crown(None)
    for _ in range(2):
        deploy(here, "k1", [1, 0])
    client, _ = mlflow_store.connect()
    (only,) = mlflow_store.versions(client)
    assert (
        only.tags == {"work.key": "k1", "git.commit": "c" * 40, "model": "tools"}
        and mlflow_store.champion(client) is None
    )
    deploy(here, "k1", [1, 0], digest="others")
    with pytest.raises(
        InputError, match=r"measured on a different models/tools \(others\) than the one that was deployed \(weights\)"
    ):
        champion.deployed()
    (here / "metrics/eval/tools.json").unlink()
    with pytest.raises(InputError, match="dvc repro stage_evaluate@tools"):
        champion.deployed()


def test_a_champion_that_was_measured_over_other_items_is_an_objection_by_name() -> None:
    def measured(data_seed: int, right: list[int]) -> Measured:
        rate = sum(right) / len(right)
        rows = [
            {"suite": "problems", "id": f"p{n}", "item": f"{data_seed}/{n}", "group": "easy", "sampled": r, "parses": 1}
            for n, r in enumerate(right)
        ]
        numbers = {"parse_rate": 1.0, "easy": {"pass_at_1": rate}}
        return Measured({"problems": numbers, "settings": {"data_seed": data_seed}}, rows)

    assert champion.objections([], measured(42, [1] * 40), measured(42, [0] * 40)) == []
    assert champion.objections([], measured(1, [1] * 40), measured(42, [0] * 40)) == [
        "not comparable with the champion, measured on different items: data_seed 42 and 1 (Answers whose code parses,"
        " Easy problems, pass@1)"
    ]
    assert champion.objections([], measured(42, [0] * 19), measured(42, [1] * 19)) == [], "too few for a verdict"
    assert len(champion.objections([], measured(42, [0] * 20), measured(42, [1] * 20))) == 1


def test_a_gate_is_held_against_the_worse_end_of_the_interval(tmp_path: Path) -> None:
    deploy(tmp_path, "k1", [1, 0] * 10, registered=False)
    run = read(tmp_path / "metrics")
    states = {least: claims.gates(run, {"easy": least})[0].state for least in (0.39, 0.41)}
    assert states == {0.39: claims.HOLDS, 0.41: claims.FAILS}
    assert claims.gates(run, {"code_bpb": 1.0})[0].state == claims.UNKNOWN
    run.evaluations["tools"]["code"] = {"bpb": 1.0, "bpb_low": 0.9, "bpb_high": 1.1}
    assert [claims.gates(run, {"code_bpb": most})[0].state for most in (1.2, 1.05)] == [claims.HOLDS, claims.FAILS]
