"""Seeds as pure functions, and the choice of device and precision."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from pipeline.run import device
from pipeline.run.config import Runtime
from pipeline.run.errors import ConfigError

ROOT = Path(__file__).parents[1]


def elsewhere(code: str, **environment: str) -> str:
    """What a fresh Python process prints."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_hash_is_the_same_in_every_process_and_forever() -> None:
    code = "from pipeline.run.device import stable_hash; print(stable_hash('flip', 42, 'é'))"
    assert device.stable_hash("flip", 42, "é") == 13570640438134887754  # `b2sum -l 64`, read as little-endian
    for seed, language in (("1", "C"), ("2", "tr_TR.UTF-8")):
        assert elsewhere(code, PYTHONHASHSEED=seed, LC_ALL=language, PYTHONUTF8="1") == "13570640438134887754"


def test_the_hash_tells_types_borders_and_order_apart() -> None:
    values = [
        device.stable_hash(*parts) for parts in ((1, 2), ("1", 2), (12,), ("12",), (2, 1), ("a", "b"), ("ab",), ())
    ]
    assert len(set(values)) == len(values)
    assert all(0 <= value < 2**64 for value in values)


def test_hashing_loads_no_torch() -> None:
    assert elsewhere("import sys, pipeline.run.device; print('torch' in sys.modules)") == "False"


def test_a_generator_is_a_function_of_its_parts_and_of_no_global_state() -> None:
    torch.manual_seed(1)
    first = torch.rand(5, generator=device.generator("row", 7))
    before = torch.get_rng_state()
    torch.manual_seed(2)
    second = torch.rand(5, generator=device.generator("row", 7))
    assert torch.equal(first, second)
    assert not torch.equal(first, torch.rand(5, generator=device.generator("row", 8)))
    torch.manual_seed(1)
    device.generator("row", 7)
    assert torch.equal(torch.get_rng_state(), before)


def test_each_micro_batch_of_each_rank_and_step_has_its_own_seed() -> None:
    drawn = set()
    for key in ((1, 2, 3, 0), (1, 2, 3, 1), (1, 2, 4, 0), (1, 3, 3, 0), (2, 2, 3, 0)):
        device.seed_step(*key)
        first = torch.rand(()).item()
        device.seed_step(*key)
        assert torch.rand(()).item() == first
        drawn.add(first)
    assert len(drawn) == 5


def test_ranks_come_from_the_launcher_s_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert (device.rank(), device.world_size()) == (0, 1)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (device.rank(), device.world_size()) == (3, 4)


def test_workers_are_what_is_asked_or_the_usable_cores() -> None:
    assert device.workers(5) == 5
    assert device.workers(0) == 1
    assert device.workers("auto") >= 1


def test_precision_is_what_was_asked_for_and_fp32_computes_in_fp32() -> None:
    assert device.hardware("fp32").precision == device.describe("fp32")["precision"] == "fp32"
    assert device.describe("bf16")["precision"] == "bf16"
    a = torch.ones(2, 2)
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        with device.hardware(precision).autocast():
            where = device.hardware(precision).device
            assert (a.to(where) @ a.to(where)).dtype == dtype


def test_memory_is_counted_in_bytes() -> None:
    cpu = torch.device("cpu")
    assert 2**27 < device.peak_memory(cpu) < device.total_memory(cpu) < 2**50


def test_page_locked_memory_is_for_gpus_and_may_be_declined() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert [device.pins(asked, gpu) for asked in ("auto", True, False)] == [True, True, False]
    assert [device.pins(asked, cpu) for asked in ("auto", False)] == [False, False]
    with pytest.raises(ConfigError, match=r"pin_memory: `true` needs CUDA, but the device is cpu"):
        device.pins(True, cpu)


@dataclass(frozen=True)
class Moved:
    """A batch that remembers where it was sent."""

    ids: torch.Tensor
    count: int
    where: str = ""

    def to(self, where: torch.device) -> "Moved":
        return Moved(self.ids, self.count, where.type)


def test_a_batch_that_is_pinned_goes_to_the_device_from_page_locked_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    locked = torch.zeros(2)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: locked)
    batch = Moved(torch.ones(2), 2)
    for pin, ids in ((True, locked), (False, batch.ids)):
        moved = device.move(batch, torch.device("cuda"), pin=pin)
        assert moved.ids is ids and (moved.count, moved.where) == (2, "cuda")


def test_the_device_is_asked_for_by_one_key_and_one_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    chosen = {}
    for kind in ("auto", "cpu", "mps"):
        monkeypatch.setenv(device.ASKED, kind)
        chosen[kind] = device.hardware("fp32").device.type
    assert chosen == {"auto": "cpu", "cpu": "cpu", "mps": "mps"}  # Apple's GPU is used only when asked for
    monkeypatch.setenv(device.ASKED, "cuda")
    with pytest.raises(ConfigError, match=r"runtime\.device: expected one of this machine's devices \(mps, cpu\)"):
        device.hardware("fp32")
    with pytest.raises(ValueError, match="device: expected one of auto, cpu, cuda, mps, got 'tpu'"):
        Runtime(device="tpu")


def test_a_machine_whose_gpus_are_not_asked_for_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv(device.ASKED, raising=False)
    assert device.num_gpus() == 4
    monkeypatch.setenv(device.ASKED, "cpu")
    assert device.num_gpus() == 0


HOLDER = (
    "import sys; from pathlib import Path; import torch; from pipeline.run import device;"
    " torch.cuda.device_count = lambda: int(sys.argv[2]);"
    " told = device.claim_gpus(int(sys.argv[3]), Path(sys.argv[1]));"
    " import os; print(os.environ.get('CUDA_VISIBLE_DEVICES', 'any'), told, sep='|', flush=True); sys.stdin.read()"
)


def holder(locks: Path, count: int, number: int = 1, **environment: str) -> tuple["subprocess.Popen[str]", str, str]:
    """A process that wants `number` of a machine's `count` GPUs, the ones it took, and what it was told."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(locks), str(count), str(number)],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    taken, _, told = process.stdout.readline().strip().partition("|")
    return process, taken, told


def test_stages_side_by_side_take_a_gpu_each_and_one_that_finds_none_says_so(tmp_path: Path) -> None:
    running = [holder(tmp_path / "locks", 2) for _ in range(3)]
    try:
        assert [taken for _, taken, _ in running[:2]] == ["0", "1"]
        assert [told for _, _, told in running[:2]] == ["", ""]
        assert running[2][1] in ("0", "1")
        assert running[2][2] == f"no other GPU is free: sharing {running[2][1]} with another stage, which slows both"
        running[0][0].communicate()
        running.append(holder(tmp_path / "locks", 2))
        assert running[3][1:] == ("0", "")
    finally:
        for process, *_ in running:
            process.kill()
            process.wait()


def test_several_processes_take_as_many_gpus(tmp_path: Path) -> None:
    running = [holder(tmp_path / "locks", 4), *(holder(tmp_path / "locks", 4, 2) for _ in range(2))]
    for process, *_ in running:
        process.kill()
        process.wait()
    assert [taken for _, taken, _ in running[:2]] == ["0", "1,2"]
    (_, last, told), shared = running[2], running[2][1].removeprefix("3,")
    assert last.startswith("3,") and shared in ("0", "1", "2")
    assert told == f"no other GPU is free: sharing {shared} with another stage, which slows both"


def test_only_the_gpus_that_a_person_shows_are_taken_and_a_rank_or_a_machine_without_takes_none(tmp_path: Path) -> None:
    for count, environment, expected in (
        (2, {"CUDA_VISIBLE_DEVICES": "3,GPU-1/2"}, "3"),
        (0, {}, "any"),
        (2, {"LOCAL_RANK": "1"}, "any"),
        (2, {"STAGECOACH_DEVICE": "cpu"}, "any"),
    ):
        process, taken, told = holder(tmp_path / "locks", count, **environment)
        process.communicate()
        assert (taken, told) == (expected, "")


def test_a_folder_of_locks_that_cannot_be_used_ends_no_stage(tmp_path: Path) -> None:
    (tmp_path / "locks").write_text("")
    process, taken, told = holder(tmp_path / "locks", 2)
    process.communicate()
    assert taken == "any" and process.returncode == 0
    assert told.endswith("concurrent stages may use the same GPU")
