"""Each script in `benchmarks/` runs; here are those without a test file of their own, at the smallest scale."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.text.tokenizer import Tokenizer
from tests.corpora import documents, write_corpus
from tests.workspace import Workspace

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"


def run(*line: object, folder: Path, code: int = 0) -> str:
    """Run a script; returns its stdout if it exits with 0, else its stderr."""
    command = [sys.executable, *(str(word) for word in line)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == code, done.stderr[-4000:]
    assert "Traceback" not in done.stderr, done.stderr[-4000:]
    return done.stdout if code == 0 else done.stderr


def test_every_script_is_run_by_a_test() -> None:
    texts = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("*.py"))
    arms = {"attacker.py", "scaling_arms.py", "time_to_loss_arm.py", "train_arms.py"}  # other scripts start them
    for path in BENCHMARKS.glob("*.py"):
        named = f"{path.name}" in texts or f"benchmarks.{path.stem}" in texts or f"import {path.stem}" in texts
        assert named or path.name in arms, f"benchmarks/{path.name}: no test names it"


def test_golden_py_names_what_differs(tmp_path: Path) -> None:
    for name, value in (("before", {"a": "1", "b": "2"}), ("after", {"a": "1", "b": "3", "c": "4"})):
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    compare = (BENCHMARKS / "golden.py", "compare", tmp_path / "before.json")
    assert run(*compare, tmp_path / "before.json", folder=tmp_path)
    done = subprocess.run(
        [sys.executable, *map(str, compare), str(tmp_path / "after.json")], capture_output=True, text=True
    )
    assert done.returncode == 1 and " b" in done.stdout and " c" in done.stdout and " a" not in done.stdout


def test_exports_py_names_the_model_that_is_missing(tmp_path: Path) -> None:
    assert "models/deploy: expected a model directory, found nothing" in run(
        BENCHMARKS / "exports.py", folder=tmp_path, code=2
    )


@pytest.mark.skipif(importlib.util.find_spec("trl") is not None, reason="trl is here")
def test_rl_step_py_names_the_package_that_is_missing(tmp_path: Path) -> None:
    assert "expected trl 1.12.0" in run(BENCHMARKS / "rl_step.py", "grpo", folder=tmp_path, code=2)


@pytest.mark.slow
def test_sandbox_py_judges_as_many_programs_as_it_is_told(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in run(BENCHMARKS / "sandbox.py", 4, folder=tmp_path).splitlines()]
    assert rows[0]["cores"] == 1 and rows[0]["sealed"]["runs_per_second"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("has_tools", [True, False])
def test_constrain_py_completes_every_forced_call(has_tools: bool, workspace: Workspace) -> None:
    """If no dialogue has tools, it says so."""
    line = (BENCHMARKS / "constrain.py", "models/tools", "data/dialogues/test.jsonl", "--requests", 2)
    if not has_tools:
        assert "expected dialogues with tools, found none" in run(*line, folder=workspace.folder, code=2)
        return
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    tool = {"type": "function", "function": {"name": "f", "description": "f", "parameters": schema}}
    asked = {"messages": [{"role": "user", "content": "f?"}, {"role": "assistant", "content": "x"}], "tools": [tool]}
    Path("data/dialogues/test.jsonl").write_text(json.dumps(asked) + "\n")
    assert "complete and valid" in run(*line, folder=workspace.folder)


@pytest.mark.slow
@pytest.mark.full
def test_rollout_py_gives_the_ratio_of_its_two_sides(workspace: Workspace) -> None:
    sizes = ("--prompts", 2, "--samples", 2, "--tokens", 4, "--repeats", 1)
    printed = run(BENCHMARKS / "rollout.py", "models/tools", "data/problems/rl.jsonl", *sizes, folder=workspace.folder)
    row = json.loads(printed.splitlines()[-1])
    speeds = row["tokens_per_second"]
    assert row["ratio"] == pytest.approx(speeds["ours"] / speeds["theirs"], abs=0.01)


@pytest.mark.slow
@pytest.mark.full
def test_engine_py_has_a_line_for_each_engine(workspace: Workspace) -> None:
    sizes = ("--rounds", 1, "--tokens", 4, "--rows", 1, 2)
    printed = run(BENCHMARKS / "engine.py", "--model", "models/tools", *sizes, folder=workspace.folder)
    assert all(f"  {name} " in printed for name in ("int8", "bf16", "float32", "hf bf16", "hf float32"))


@pytest.mark.slow
@pytest.mark.full
def test_corpus_memory_py_measures_the_three_stages_of_data(tmp_path: Path) -> None:
    printed = run(
        BENCHMARKS / "corpus_memory.py",
        "--mb",
        1,
        "--folder",
        tmp_path / "copy",
        "--out",
        tmp_path / "out.json",
        folder=tmp_path,
    )
    assert all(stage in printed for stage in ("corpus", "tokenizer", "encode"))


@pytest.mark.slow
def test_big_outs_py_finds_one_copy_of_what_is_published(tmp_path: Path) -> None:
    """The work folder, models/ and DVC's cache have the same files (.dvc/config: hard links first)."""
    lines = run(BENCHMARKS / "big_outs.py", "--gigabytes", 0.06, "--folder", tmp_path, folder=tmp_path).splitlines()
    assert [line.split("; ")[1] for line in lines if "on disk" in line] == ["0.06 GB on disk"] * 2
    assert "prune --finished: 0.0 MB freed; freed 0.0 MB" in lines


@pytest.mark.slow
@pytest.mark.full
def test_rate_transfer_py_says_how_far_the_first_sizes_best_rate_is_behind(
    byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    write_corpus(tmp_path / "data", documents(90), documents(10, 100), byte_tokenizer)
    (tmp_path / "data/tokens").rename(tmp_path / "data/text")
    (tmp_path / "data/tokens").mkdir()
    (tmp_path / "data/text").rename(tmp_path / "data/tokens/text")
    line = (
        BENCHMARKS / "rate_transfer.py",
        tmp_path,
        "--sizes",
        "nano",
        "--steps",
        10,
        "--json",
        tmp_path / "found.json",
    )
    assert "behind" in run(*line, folder=tmp_path)
    table = json.loads((tmp_path / "found.json").read_text())
    assert list(table) == ["nano"] and len(table["nano"]["losses"]) == 5 and table["nano"]["behind"] == 0


@pytest.mark.slow
@pytest.mark.full
def test_cross_file_py_measures_held_out_packages_with_and_without_other_files(tmp_path: Path) -> None:
    sizes = ("--scale", "smoke", "--seeds", 1, "--items", 8, "--train-bytes", 300_000)
    places = ("--folder", tmp_path / "copy", "--out", tmp_path / "out.json")
    printed = run(BENCHMARKS / "cross_file.py", *sizes, *places, "code.steps=2", folder=tmp_path)
    assert "seed 1: line_exact" in printed and "over 1 seeds: line_exact" in printed
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["seeds"]["1"]["lines"] == 8 and found["seeds"]["1"]["functions"] == 4
    one, pooled = found["seeds"]["1"], found["all"]
    assert pooled["line_similarity_with"] == pytest.approx(one["line_similarity_with"])
    assert pooled["line_similarity_difference"] == pytest.approx(one["line_similarity_difference"])


def test_mistakes_py_makes_them_in_a_copy_and_shows_what_is_printed(tmp_path: Path) -> None:
    printed = run(BENCHMARKS / "mistakes.py", "negative number", folder=tmp_path)
    assert "| a negative number of steps | `python -m stages.code code.steps=-1` | 2 |" in printed
    assert printed.endswith("\n2 of 2 mistakes end with a clear message.\n")
