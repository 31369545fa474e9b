"""One process needs no group; two agree on signals, saves, counts, norms and weights."""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from pipeline.learning import processes
from pipeline.learning.processes import Ranks, Sharding
from pipeline.run.errors import GateError
from tests.training import free_port

ROOT = Path(__file__).parents[1]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return Ranks("fp32", "unused")


def test_one_process_hears_itself(alone: Ranks) -> None:
    model = nn.Linear(2, 2)
    assert alone.wrap(model) is model
    assert alone.control(15, True, {"tokens": 3, "bytes": 4}) == (15, True, {"tokens": 3, "bytes": 4})
    assert alone.control(0, False, {"tokens": 0}) == (0, False, {"tokens": 0})
    assert alone.sum_float(1 / 3) == 1 / 3
    assert alone.sum_tensor(torch.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]
    with alone.no_sync(model, skip=True):
        alone.barrier()
    alone.check_equal_weights(model)


def test_the_gradient_norm_is_over_all_weights_and_clips_only_above_a_limit(alone: Ranks) -> None:
    model = nn.Linear(2, 1)

    def gradients(limit: float) -> list[float]:
        model.weight.grad, model.bias.grad = torch.tensor([[2.0, 4.0]]), torch.tensor([4.0])  # a norm of 6
        assert alone.gradient_norm(model, limit) == pytest.approx(6.0)
        return [*model.weight.grad[0].tolist(), model.bias.grad.item()]

    assert gradients(0) == gradients(7) == [2.0, 4.0, 4.0]
    assert gradients(3) == pytest.approx([1.0, 2.0, 2.0])


def test_a_device_without_foreach_kernels_is_never_asked_for_them(
    alone: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Apple's GPU has none, according to torch; clipping used to raise there at the first step."""
    assert not processes._device_has_foreach_support(torch.device("mps"))
    model = nn.Linear(2, 1)
    found = []
    for supported in (True, False):
        monkeypatch.setattr(processes, "_device_has_foreach_support", lambda where, answer=supported: answer)
        with monkeypatch.context() as patch:
            if not supported:
                patch.setattr(torch, "_foreach_norm", None)
                patch.setattr(torch, "_foreach_mul_", None)
            model.weight.grad, model.bias.grad = torch.tensor([[2.0, 4.0]]), torch.tensor([4.0])
            norm = alone.gradient_norm(model, 3.0)
        found.append((norm, model.weight.grad.tolist(), model.bias.grad.tolist()))
    assert found[0] == found[1]


@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_a_gradient_that_is_no_number_leaves_the_others_for_the_search_of_its_cause(alone: Ranks, limit: float) -> None:
    model = nn.Linear(2, 1)
    for bad in (math.nan, math.inf):
        model.weight.grad, model.bias.grad = torch.tensor([[2.0, 4.0]]), torch.tensor([bad])
        assert not math.isfinite(alone.gradient_norm(model, limit))
        assert model.weight.grad.tolist() == [[2.0, 4.0]]


def test_two_ranks_that_read_the_same_row_are_refused(alone: Ranks) -> None:
    alone.check_different_rows(np.array([3, 4]))
    alone.gather = lambda value: [value, [5, 6], [6]]  # type: ignore[method-assign]
    with pytest.raises(GateError, match="ranks 1 and 2 both read row 6: was each process launched with its own rank"):
        alone.check_different_rows(np.array([3, 4]))


SCRIPT = """
import os
import sys
from pathlib import Path
import torch
from torch import nn
from pipeline.run.errors import ConfigError, GateError
from pipeline.learning.processes import Ranks

ranks = Ranks("fp32", sys.argv[1])
mine = ranks.rank
assert ranks.world == 2
assert ranks.control(15 * mine, mine == 0, {"a": 3, "b": 4 + mine}) == (15, True, {"a": 6, "b": 9})
assert ranks.control(0, False, {"a": 1}) == (0, False, {"a": 2})
assert ranks.sum_float(0.5 + mine) == 2.0
torch.manual_seed(0)
model = nn.Linear(3, 1, bias=False)
ranks.check_equal_weights(model)
wrapped = ranks.wrap(model)
rows = torch.tensor([[1.0, 2.0, 3.0], [5.0, 6.0, 7.0]])
with ranks.no_sync(wrapped, skip=True):
    wrapped(rows[mine]).sum().backward()
assert model.weight.grad.tolist() == [rows[mine].tolist()], "skipping keeps gradients local"
with ranks.no_sync(wrapped, skip=False):
    wrapped(rows[mine]).sum().backward()
assert model.weight.grad.tolist() == [[6.0, 8.0, 10.0]], "the mean over ranks of both micro-batches"
ranks.barrier()
with torch.no_grad():
    model.weight[0, 0] += mine
try:
    ranks.check_equal_weights(model)
    assert mine == 0
except GateError as error:
    assert mine == 1 and "rank 1 starts from different weights than rank 0" in str(error)
try:
    Ranks("fp32", f"somewhere/key{mine}")
except ConfigError as error:
    assert f"rank {mine} computes key key{mine}, but rank {1 - mine} computes key{1 - mine}" in str(error), error
else:
    raise AssertionError("two keys are one too many")
os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
try:
    Ranks("fp16", sys.argv[1])
except ConfigError as error:
    assert "FSDP2 cannot train in fp16" in str(error)
    (Path(sys.argv[1]) / f"{mine}.ok").touch()
"""


def test_passes_are_dealt_so_that_a_model_that_is_cut_never_waits(alone: Ranks) -> None:
    """Five batches for three ranks: the last round has two, so the third rank makes a pass that does not count, if it
    must.
    """
    alone.world = 3
    shares = []
    for alone.rank in range(3):
        shares.append(list(alone.dealt(range(5))))
    assert shares == [[(0, True), (3, True)], [(1, True), (4, True)], [(2, True), (None, False)]]
    alone.sharding = Sharding(reshard=True, offload=False)
    assert list(alone.dealt(range(5))) == [(2, True), (3, False)]
    assert list(alone.dealt(range(0))) == []
    alone.greatest = lambda value: 3.0  # type: ignore[method-assign]
    assert alone.evened(["a", "b"]) == [("a", True), ("b", True), ("b", False)]


@pytest.mark.slow
@pytest.mark.full
def test_two_processes_agree(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, str(tmp_path / "script.py"), str(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(p.name for p in tmp_path.glob("*.ok")) == ["0.ok", "1.ok"]


DEATH = """
import os
import signal
import sys
import time
from pipeline.learning import processes

processes.GRACE_SECONDS = 0.5
ranks = processes.Ranks("fp32", "key")
ranks.barrier()
time.sleep(0.5)
if ranks.rank == int(sys.argv[1]):
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(0)
time.sleep(4)
print("on its own")
"""


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_dies_ends_one_that_does_not_wait_for_it_and_one_that_ends_does_not(
    tmp_path: Path, rank: int
) -> None:
    (tmp_path / "script.py").write_text(DEATH)
    for how, code, said in (("killed", 1, "another process of this run is gone"), ("ended", 0, "on its own")):
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
        ranks = [
            subprocess.Popen(
                [sys.executable, str(tmp_path / "script.py"), str(rank), how],
                env=os.environ
                | place
                | {"PYTHONPATH": str(ROOT), "RANK": str(n), "LOCAL_RANK": str(n), "CUDA_VISIBLE_DEVICES": ""},
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for n in range(2)
        ]
        output = ranks[1 - rank].communicate(timeout=100)[0]
        assert ranks[1 - rank].returncode == code and said in output, output
        assert ranks[rank].wait(100) == (-9 if how == "killed" else 0)
