"""Stage memory, run for real on tiny models: what it publishes, how it resumes, what it refuses."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from pipeline.memory.config import MemoryConfig
from pipeline.memory.files import QuantisedBank, Wider
from pipeline.memory.model import Memory
from pipeline.model import checkpoint
from pipeline.run import device
from tests.memory_models import arguments
from tests.stopping import killed
from tests.workspace import Ended, Workspace, command

pytestmark = pytest.mark.slow  # nearly all train; the ones not marked `full` are one per kind of stage

SAVING: dict[str, Any] = {"runtime.save_steps": 1}


def run(**changes: Any) -> Ended:
    return command("memory", arguments(**changes))


def finished(coded: Workspace, **changes: Any) -> tuple[dict[str, str], str]:
    ended = run(**changes)
    assert ended.code == 0, ended.said
    return {path: digest for path, digest in coded.published().items() if "memory" in path}, ended.said


def loaded(name: str) -> Any:
    return checkpoint.load(Path("models") / name)[0]


def test_it_publishes_a_memory_and_a_wider_model_of_its_size_on_the_untouched_base(coded: Workspace) -> None:
    _, said = finished(coded)
    base, memory, wider = coded.weights("code"), loaded("memory"), loaded("memory_baseline")
    for model, kind in ((memory, Memory), (wider, Wider)):
        assert isinstance(model.hook, kind)
        assert all(torch.equal(p, base[name]) for name, p in model.named_parameters() if not name.startswith("memory."))
    sizes = [
        sum(p.numel() for name, p in model.named_parameters() if name.startswith("memory."))
        for model in (memory, wider)
    ]
    assert abs(sizes[1] / sizes[0] - 1) < 0.05  # a row more or less matters at so small a size
    for name, parameter in memory.named_parameters():
        if "bank" in name or "router.weight" in name or "o_proj" in name:
            assert bool(parameter.any()), name
    assert "memory@memory: " in said and "memory@baseline: " in said
    told, curve = coded.numbers("memory"), coded.curve("memory")
    for name in ("base", "memory", "baseline"):
        assert told[name]["facts"]["n"] == told[name]["control"]["n"] == 6 and told[name]["code_bpb"] > 0
    assert told["over_baseline"]["says"] in ("more facts", "fewer facts", "no advantage found")
    assert told["trained_parameters"] == dict(zip(("memory", "baseline"), sizes, strict=True)) and told["leaky"] == 0
    last = [row for row in curve if row["memory/gain_bpb"]][-1]
    assert {f"memory/1/chapter/{n:02d}" for n in range(5)} <= last.keys() and float(
        last["memory/1/chapter_entropy"]
    ) <= 1
    assert sum(float(last[f"memory/1/chapter/{n:02d}"]) for n in range(5)) == pytest.approx(1.0, abs=1e-4)
    assert {row["phase"] for row in curve} == {"memory", "baseline"}


@pytest.mark.parametrize(
    "changes",
    [
        {"routing": "chunk", "centered": False},
        {"routing": "token"},
        {"storage": "factorized", "bank_rank": 4, "rank": 2, "share": "each", "layers": "all"},
        {"storage": "reduced", "bank_rank": 16},
    ],
)
@pytest.mark.full
def test_every_shape_trains(coded: Workspace, changes: dict[str, Any]) -> None:
    finished(coded, **changes)
    told = json.loads(Path("models/memory/memory.json").read_text())["config"]
    assert {name: told[name] for name in changes} == changes


@pytest.mark.full
def test_the_base_may_learn_too_with_adapters_or_whole(coded: Workspace) -> None:
    base = coded.weights("code")
    for changes in ({"adapter": {"rank": 2, "alpha": 4, "targets": ["all-linear"]}}, {"train_base": True}):
        finished(coded, **changes)
        for name in ("memory", "memory_baseline"):
            model = loaded(name)
            assert any(not torch.equal(p, base[name]) for name, p in model.named_parameters() if name in base), (
                name,
                changes,
            )


@pytest.mark.full
def test_three_rates_on_three_groups(coded: Workspace) -> None:
    """A rate of 0 leaves a group unchanged while the others move."""
    adapter = {"rank": 2, "alpha": 4, "targets": ["q_proj"]}
    fresh = Memory(loaded_config(), loaded("code").config, device.generator("memory", 1))
    for still in ("router", "bank", "lora"):
        finished(coded, adapter=adapter, learning_rates={still: 0.0}, weight_decay=0.0)
        base, model = coded.weights("code"), loaded("memory")
        assert isinstance(model.hook, Memory) and bool(model.hook.of(1)[0].o_proj.weight.any())
        same = {
            "router": torch.equal(model.hook.of(1)[0].router.weight, fresh.of(1)[0].router.weight),
            "bank": torch.equal(model.hook.bank[0].rows, fresh.bank[0].rows),
            "lora": torch.equal(
                model.model.layers[0].self_attn.q_proj.weight, base["model.layers.0.self_attn.q_proj.weight"]
            ),
        }
        assert same == {name: name == still for name in same}


def loaded_config() -> MemoryConfig:
    return MemoryConfig(rows=24, shared=1, chapters=5, top_k=2, layers="last_1", routing="prompt", window=16)


@pytest.mark.full
def test_the_wider_model_may_have_a_rate_of_its_own(coded: Workspace) -> None:
    same, _ = finished(coded)
    other, _ = finished(coded, baseline_learning_rate=1e-4)
    moved = {path for path in same if same[path] != other[path]}
    assert "models/memory_baseline/memory.safetensors" in moved
    assert "models/memory/memory.safetensors" not in moved


@pytest.mark.full
def test_routing_by_sequence_is_refused_unless_asked_for_and_said_to_leak(coded: Workspace) -> None:
    ended = run(routing="sequence")
    assert ended.code == 2 and "a causal loss would see the future" in ended.said
    assert not Path("models/memory").exists()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"rows": 25}, "expected a multiple of the 6 chapters"),
        ({"top_k": 6}, "expected at most 5"),
        ({"top_k": 1}, "learn nothing"),
        ({"layers": "last_9"}, "expected last_1 to last_2"),
        ({"quantize": "int2"}, "expected one of none, int8, int4"),
        ({"baseline_learning_rate": 0.0}, "baseline_learning_rate: expected more than 0"),
        ({"questions": 0}, "expected at least 1"),
        ({"load_balance": -1.0}, "expected at least 0"),
        ({"storage": "reduced", "bank_rank": 15}, "needs a multiple of the number of heads"),
        ({"train_base": True, "adapter": {"rank": 1, "alpha": 1}}, "expected at most one of the two"),
        ({"context": 8, "tokens_per_step": 512}, "tokens, more than `context`"),
        ({"context": 100000, "tokens_per_step": 100000}, "the model's context"),
    ],
)
@pytest.mark.full
def test_what_cannot_be_is_refused_by_name(coded: Workspace, changes: dict[str, Any], complaint: str) -> None:
    ended = run(**changes)
    assert ended.code == 2 and complaint in ended.said, ended.said[-2000:]
    assert not Path("models/memory").exists()


@pytest.mark.full
def test_a_bank_in_few_bits_is_published(coded: Workspace) -> None:
    finished(coded, quantize="int8")
    (bank,) = loaded("memory").hook.bank
    assert isinstance(bank, QuantisedBank) and bank.bits == 8
    told = coded.numbers("memory")["quantized"]
    assert 0 < told["bpb_after"] <= told["bpb_before"] * 1.005


@pytest.mark.full
def test_the_router_losses_change_what_is_learnt(coded: Workspace) -> None:
    plain, _ = finished(coded)
    for name, value in (("load_balance", 1.0), ("auxiliary", 10.0), ("z", 1.0)):
        other, _ = finished(coded, **{name: value})
        assert other["models/memory/memory.safetensors"] != plain["models/memory/memory.safetensors"], name
        assert other["models/memory_baseline/memory.safetensors"] == plain["models/memory_baseline/memory.safetensors"]


@pytest.mark.slow
@pytest.mark.parametrize("last", [pytest.param("1", marks=pytest.mark.full), "3"])
def test_a_killed_stage_publishes_what_an_uninterrupted_one_does(coded: Workspace, last: str) -> None:
    whole, _ = finished(coded, **SAVING)
    killed(int(last), "memory", arguments(**SAVING, **{"runtime.fresh": True}))
    again, said = finished(coded, **SAVING)
    assert "resumed at step" in said and again == whole


@pytest.mark.slow
@pytest.mark.full
def test_two_processes_learn_what_one_does(coded: Workspace) -> None:
    """DDP over gloo: choices are counted over both, so losses and weights are those of one process."""
    weights: list[dict[str, torch.Tensor]] = []
    for world in ("", "2"):
        line = [
            sys.executable,
            "-m",
            "stages.memory",
            *arguments(**{"runtime.fresh": True, "runtime.logging_steps": 1}, load_balance=1.0),
        ]
        environment = os.environ | {"STAGECOACH_MLFLOW": "off"} | ({"STAGECOACH_LAUNCH": world} if world else {})
        done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]
        weights.append(coded.weights("memory"))
    for name, one in weights[0].items():
        torch.testing.assert_close(weights[1][name], one, rtol=1e-3, atol=1e-5)


# -- a memory from the start -------------------------------------------------------------------------------------------

SHAPE: dict[str, Any] = {
    "vocab_size": 0,
    "width": 32,
    "layers": 3,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 16,
    "d_ff": 64,
    "max_context": 256,
    "rope_theta": 10000.0,
    "tied": True,
    "memory": {
        "rows": 24,
        "shared": 1,
        "chapters": 5,
        "top_k": 2,
        "layers": "last_1",
        "window": 16,
        "qk_norm": True,
        "bank_std": 1.0,
    },
}
FROM_START: dict[str, Any] = {
    "steps": 4,
    "tokens_per_step": 512,
    "context": 128,
    "optimizer": "muon",
    "learning_rate": 1e-2,
    "learning_rates": {"embedding": 0.02},
    "warmup_steps": 0,
    "eval_steps": 2,
    "eval_tokens": 400,
    "publish": "last",
}


def from_start(coded: Workspace, stage: str, shape: dict[str, Any] = SHAPE, **changes: Any) -> Ended:
    """Run stage language or code with a model file that may have a memory."""
    conf = coded.folder / "conf"
    if conf.is_symlink():
        source = conf.resolve()
        conf.unlink()
        shutil.copytree(source, conf)
    (conf / "model/own.yaml").write_text(yaml.safe_dump(shape | {"vocab_size": coded.tokenizer.vocab_size}))
    if not (coded.folder / "data/tokens/text").exists():
        shutil.copytree(coded.folder / "data/tokens/code", coded.folder / "data/tokens/text")
        coded.tokenizer.save(coded.folder / "data/tokenizer")
    (coded.folder / "models/scratch").mkdir(exist_ok=True)
    values = FROM_START | ({"induction_heads": False} if stage == "language" else {"text_weight": 1}) | changes
    given = [f"{stage}.{key}={json.dumps(value)}" for key, value in values.items()]
    return command(stage, ["model=own", "runtime.precision=fp32", *given])


@pytest.mark.full
def test_a_model_file_with_a_memory_is_trained_and_goes_on_with_its_router(coded: Workspace) -> None:
    shutil.rmtree(coded.folder / "models/code")
    for stage in ("language", "code"):
        ended = from_start(coded, stage)
        assert ended.code == 0, ended.said
        model = loaded(stage)
        assert isinstance(model.hook, Memory) and model.hook.config.chapters == 5
        rows = [row for row in coded.curve(stage) if row.get("memory/gain_bpb")]
        assert len(rows) >= 2 and {f"memory/2/chapter/{n:02d}" for n in range(5)} <= rows[-1].keys()
        assert all(float(row["load_balance"]) > 0 and float(row["z"]) >= 0 for row in coded.curve(stage) if row["loss"])
    before = [p.clone() for p in loaded("language").hook.parameters()]
    assert any(not torch.equal(a, b) for a, b in zip(before, loaded("code").hook.parameters(), strict=True))


def test_a_router_that_is_to_be_centered_wants_a_trained_base(coded: Workspace) -> None:
    ended = from_start(coded, "language", SHAPE | {"memory": SHAPE["memory"] | {"centered": True}})
    assert ended.code == 2 and "measures the center on a trained base" in ended.said


@pytest.mark.full
def test_a_model_with_a_memory_gets_no_second_one(coded: Workspace) -> None:
    shutil.rmtree(coded.folder / "models/code")
    for stage in ("language", "code"):
        assert from_start(coded, stage).code == 0
    ended = run()
    assert ended.code == 2 and "the model already has a memory" in ended.said


@pytest.mark.full
def test_the_router_of_a_model_file_learns_from_its_losses(coded: Workspace) -> None:
    spread = {}
    for weight in (0.0, 10.0):
        assert from_start(coded, "language", load_balance=weight, steps=12).code == 0
        spread[weight] = loaded("language").hook.readers["2"].router.weight.detach().clone()
    assert not torch.equal(spread[0.0], spread[10.0])


@pytest.mark.full
def test_weights_of_a_router_that_is_not_there_are_refused(coded: Workspace) -> None:
    ended = from_start(coded, "language", {k: v for k, v in SHAPE.items() if k != "memory"}, load_balance=0.1)
    assert ended.code == 2 and "since the model has no memory" in ended.said


@pytest.mark.full
def test_a_model_file_whose_memory_sees_the_future_is_refused(coded: Workspace) -> None:
    ended = from_start(coded, "language", SHAPE | {"memory": SHAPE["memory"] | {"routing": "sequence"}})
    assert ended.code == 2 and "a causal loss would see the future" in ended.said
