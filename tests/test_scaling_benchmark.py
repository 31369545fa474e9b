"""The benchmark of scaling: its shards and clock by hand, its plot and table, and two tiny processes that train
together.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import scaling, scaling_arms
from benchmarks.train_speed import SIZES
from pipeline.ingest import shards


def test_made_up_parts_become_shards_that_the_stream_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling_arms, "PART", 30_000)
    monkeypatch.setattr(scaling_arms, "PIECE", 10_000)
    monkeypatch.setattr(scaling_arms, "VAL", 5_000)
    written = scaling_arms.write(tmp_path, {"tokens": 70_000})
    ids = np.fromfile(tmp_path / "tokens/train.bin", dtype="<u2")
    starts = np.fromfile(tmp_path / "tokens/train.idx", dtype="<u8")
    end = scaling_arms.tokenizer_of(tmp_path).end_of_text
    assert len(ids) == starts[-1] == 70_000 and len(starts) == written["documents"] + 1
    assert np.array_equal(np.flatnonzero(ids == end) + 1, starts[1:])  # each document ends with it and holds no other
    assert np.diff(starts).max() < scaling_arms.LONGEST + scaling_arms.SHORTEST * 20
    found = scaling_arms.read(tmp_path, {"batches": 3})
    assert 70_000 // scaling_arms.CONTEXT <= found["rows"] <= 1.2 * 70_000 / scaling_arms.CONTEXT
    assert list((tmp_path / "cache").iterdir())  # the second reader finds the index


def test_made_up_documents_go_through_the_encoder_in_batches(tmp_path: Path) -> None:
    found = scaling_arms.encode(tmp_path, {"documents": shards.ROWS + 6})
    assert json.loads((tmp_path / "encoded/train-0.json").read_text())["documents"] == 70
    assert found["tokens"] > 70 * 300


def test_the_clock_counts_from_the_end_of_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(
        scaling_arms, "time", SimpleNamespace(perf_counter=lambda: now[0], process_time=lambda: now[0] / 2)
    )
    clock = scaling_arms.Clock(2, 3)
    for step in range(7):
        now[0] = step * step  # each step takes longer than the one before
        clock.tick()
    assert clock.found == {"seconds": 16 - 1, "cpu_seconds": 7.5}  # from the second tick to the fifth


def test_memory_stands_beside_the_plan_without_what_any_process_holds() -> None:
    assert scaling.beside(3 << 30, 1 << 30, 1 << 30) == {"held_mib": 2048, "plan_mib": 1024, "plan_over_held": 0.5}
    spec = scaling.spec_of(scaling.MODELS["2M"], 8, 256, "fp32")
    alone, beside, cut = scaling.planned(spec), scaling.planned(spec, 2), scaling.planned(spec, 2, sharded=True)
    assert cut < alone and beside < alone  # each of the two has half of the rows
    assert scaling.planned(spec | {"rows": 16}, 2) == alone + 4 * scaling.model_of(spec).num_parameters


def test_models_have_the_sizes_of_their_names() -> None:
    for name, size in scaling.MODELS.items():
        found = scaling.model_of(scaling.spec_of(size, 1, 8, "fp32")).num_parameters / 1e6
        assert found == pytest.approx(float(name[:-1]), rel=0.2), name


@pytest.mark.slow
@pytest.mark.full
def test_a_table_and_four_panels_show_every_row(tmp_path: Path) -> None:
    rows: dict[str, list[dict[str, Any]]] = {
        "sizes": [
            {"parameters": 10**n, "gflops_per_cpu_second": n, "held_mib": 2 * n, "plan_mib": 3 * n} for n in (6, 7)
        ],
        "contexts": [{"context": 128, "per_cpu_second": 5, "held_mib": 1, "plan_mib": 1}],
        "corpora": [{"tokens": 10**6, "batch_ms": 1.5, "peak_mib": 150, "index_peak_mib": 160}],
    }
    assert scaling.table(rows["sizes"]).splitlines()[2].split() == ["10,000,000", "7", "14", "21"]
    scaling.plot(rows, tmp_path / "plot.png", "a machine")  # processes were not asked for
    assert (tmp_path / "plot.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.full
def test_two_processes_train_together_and_each_tells_its_own() -> None:
    first, second = scaling.launched("2, DDP", scaling.spec_of(SIZES["tiny"], 4, 8, "fp32"), 2)
    for rank in (first, second):
        assert 0 < rank["cpu_seconds"] <= 1.5 * rank["seconds"] and rank["peak"] > 50e6


@pytest.mark.slow
@pytest.mark.full
def test_a_run_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scaling.PROCESSES, "two", "two")
    with pytest.raises(RuntimeError, match="STAGECOACH_LAUNCH: expected a number of processes"):
        scaling.launched("two", {}, 2)
