"""Memory for training: the sizes in the table, each part by hand for one small case, the whole against what Linux
measures.
"""

from collections import Counter
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from pipeline.learning import footprint, reference
from pipeline.learning.footprint import Footprint, Work
from pipeline.model import lora
from pipeline.model.config import ModelConfig
from pipeline.model.cpu import native
from pipeline.model.heads import ActorCritic, RewardModel
from pipeline.model.lora import AdapterConfig
from pipeline.model.transformer import Transformer
from pipeline.run import device
from tests.peak import FOUR, MIDDLE, SMALL, TOTALS, WORK, at_32000, on_linux, planned_and_measured

# d 8, one head of 8, d_ff 16: a layer of 4 * 64 + 3 * 128 hidden weights, norms 16 + 16 + 8, a table of 64 * 8
HAND = ModelConfig(
    vocab_size=64, width=8, layers=1, heads=1, kv_heads=1, head_dim=8, d_ff=16, max_context=8, rope_theta=1e4, tied=True
)
HIDDEN, TABLE, ALL = 640, 512, 1192


@pytest.mark.parametrize("name", TOTALS)
def test_the_totals_are_those_of_the_table_and_of_our_own_model(name: str) -> None:
    config = at_32000(name)
    assert footprint.full(config).trained == config.num_parameters == TOTALS[name]
    with torch.device("meta"):
        model = Transformer(config)
    assert footprint.weights_of(model) == footprint.full(config)


@pytest.mark.oracle
@pytest.mark.parametrize("name", TOTALS)
def test_the_totals_are_those_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    shape = transformers.AutoConfig.for_model(**at_32000(name).to_hf())
    with torch.device("meta"):
        model = transformers.Qwen3ForCausalLM(shape)
    assert sum(p.numel() for p in model.parameters()) == TOTALS[name]


@pytest.mark.parametrize(
    ("name", "adamw", "muon"),
    [("medium", 2.2, 1.8), ("large", 21.8, 16.5), ("xlarge", 44.0, 33.3), ("7b", 115.3, 87.5)],
)
def test_states_take_the_gigabytes_of_the_table(name: str, adamw: float, muon: float) -> None:
    config = at_32000(name)
    for optimizer, expected in (("adamw", adamw), ("muon", muon)):
        one = footprint.footprint(footprint.full(config), [config], replace(WORK, optimizer=optimizer), 1)
        assert states(one) / 1e9 == pytest.approx(expected, abs=0.051)


def states(one: Footprint) -> float:
    return one.weights + one.gradients + one.optimizer


LOGITS = 4 * 64 * 4 + 4 * 8 * 4  # of four positions, and the gradient of their states
TOKEN = 64 + 32  # embedding, last norm, angles


def test_parts_of_one_device_by_hand() -> None:
    one = footprint.footprint(footprint.full(HAND), [HAND], WORK, 1)
    # four tokens; a layer keeps 16d + 12 * 8 + 12 * 8 + 16 d_ff and a mask of 4 * T; one more is worked on; 8d + 4h
    token = 2 * (128 + 96 + 96 + 256 + 16) + TOKEN
    assert one == Footprint(
        weights=4 * ALL,
        gradients=4 * ALL,
        optimizer=8 * ALL,
        copies=0,
        activations=4 * token,
        logits=LOGITS + 4 * TABLE,
        update=0,
    )
    assert one.total == 16 * ALL + one.activations + one.logits


PROBABILITIES = 2 * 4 * 64 * 4 + 8 * TABLE  # of four positions, their gradient, and the head's twice
PADDING = {"margin": device.TOP_PAD / 4}
CPU = {"kind": "cpu", "packed": False}
HALF = CPU | {"precision": "bf16"}
BY_HAND = (
    2 * 8 + 2 * 24 + 4 * 8 + 4 * 8 + 256 + 2 * 8 + 6 * 16
)  # one tile sees itself: its keys, values and 128 probabilities
WHOLE = 4 * (2 * BY_HAND + TOKEN)
SELECTIVE = 4 * (32 + 144 + 0.15 * (BY_HAND - 144) + BY_HAND + TOKEN)
NARROW = {"copies": 2 * HIDDEN, "logits": 2 * 64 * 4 + 6 * 8 * 4 + 12 * TABLE} | PADDING


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"ema": True}, {"weights": 8 * ALL}),
        ({"accumulates": True}, {"logits": LOGITS + 8 * TABLE}),
        (
            {"precision": "bf16"},
            {
                "copies": 2 * HIDDEN,
                "activations": 4 * (2 * (144 + 128 + 128 + 8) + TOKEN),
                "logits": 6 * 64 * 4 + 6 * 8 * 4 + 4 * TABLE,
            },
        ),
        ({"checkpointing": "full"}, {"activations": 4 * (32 + 592 + TOKEN)}),
        ({"packed": False}, {"activations": 4 * (2 * 576 + TOKEN)}),
        ({"selected": 1}, {"logits": 4 * 64 + 4 * 8 + 4 * TABLE}),
        ({"selected": 0}, {"logits": 0, "activations": 4 * (2 * 592 + TOKEN) + 4 * TABLE}),
        ({"answers": True}, {"logits": PROBABILITIES, "activations": 4 * (2 * 592 + TOKEN) + 4 * TABLE}),
        (
            {"answers": True, "accumulates": True},
            {"logits": PROBABILITIES, "activations": 4 * (2 * 592 + TOKEN) + 8 * TABLE},
        ),
        (
            {"masked": True},
            {"logits": 4 * TABLE + 4 * 64 * 4 + 8 * TABLE, "activations": 4 * (2 * 592 + TOKEN) + 4 * TABLE},
        ),
        (
            CPU,
            {"activations": 4 * (2 * (128 + 128 + 96 + 256 + 4 * 4) + TOKEN), "logits": LOGITS + 8 * TABLE} | PADDING,
        ),
        (
            CPU | {"checkpointing": "full"},
            {"activations": 4 * (32 + 1.4 * 624 + TOKEN), "logits": LOGITS + 8 * TABLE} | PADDING,
        ),
        # half-precision activations make room for the gradients of a single pass
        (HALF, {"activations": WHOLE, "gradients": max(0, 4 * ALL - WHOLE)} | NARROW),
        (
            HALF | {"checkpointing": "selective"},
            {"activations": SELECTIVE, "gradients": max(0, 4 * ALL - SELECTIVE)} | NARROW,
        ),
    ],
)
def test_a_setting_changes_the_parts_that_it_should(
    change: dict[str, Any], parts: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "has_attention_blocks", lambda: False)
    before = footprint.footprint(footprint.full(HAND), [HAND], WORK, 1)
    found = footprint.footprint(footprint.full(HAND), [HAND], replace(WORK, **change), 1)
    assert asdict(found) == pytest.approx(asdict(replace(before, **parts)), rel=1e-12)


def test_attention_in_blocks_keeps_no_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "has_attention_blocks", lambda: True)
    for context in (8, 2048):  # normed input; q, k, v; the result; rotated q and k; a head's sum; SwiGLU
        work = replace(WORK, kind="cpu", packed=False, precision="bf16", context=context)
        assert footprint.layer_bytes(HAND, work) == 2 * 8 + 2 * 24 + 2 * 8 + 2 * 16 + 4 + 2 * 8 + 6 * 16


def test_logits_stop_growing_where_they_come_in_parts() -> None:
    wide = replace(HAND, vocab_size=2**16)
    weights, rows = footprint.full(wide), 128  # 2^23 logits
    few, many = (footprint.footprint(weights, [wide], replace(WORK, selected=rows * n), 1).logits for n in (1, 3))
    assert few == 4 * 2**23 + 4 * 8 * rows + 4 * weights.head
    assert many - few == 4 * 8 * 2 * rows  # only the gradient of the states grows
    kept = (
        footprint.footprint(weights, [wide], replace(WORK, selected=rows * n, answers=True), 1).logits for n in (1, 3)
    )
    assert [4 * 2**23 * (n + 1) + 8 * weights.head for n in (1, 3)] == list(kept)  # the gradient comes in parts


def test_copies_of_layers_that_are_computed_again_are_one_layers() -> None:
    deep = replace(HAND, layers=4)
    for kind, checkpointing, layers in (
        ("cpu", "full", 1),
        ("cpu", "every_2", 3),
        ("cpu", "none", 4),
        ("cuda", "full", 4),
    ):
        work = replace(WORK, kind=kind, precision="bf16", checkpointing=checkpointing)
        assert footprint.footprint(footprint.full(deep), [deep], work, 1).copies == 2 * HIDDEN * layers


@pytest.mark.parametrize(
    ("packed", "context", "expected"),
    [(False, 100, (1, 1)), (False, 512, (2.5, 2.5)), (False, 1024, (4.5, 1.25)), (True, 1024, (4.5, 2.5))],
)
def test_tiles_reach_as_far_as_documents_do(packed: bool, context: int, expected: tuple[float, float]) -> None:
    """With 1,024 tokens, the eight tiles see 1 to 8 tiles; the probabilities of the first four are kept."""
    assert footprint.reaches(replace(WORK, packed=packed, context=context)) == expected


def saved(model: Transformer, rows: int, context: int, precision: str) -> float:
    """Bytes per token that the second layer saves for the backward pass, without parameters and copies of them."""
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    matrices = {tuple(parameter.shape) for parameter in model.parameters()}
    config = model.config
    heads = config.heads + 2 * config.kv_heads
    matrices |= {
        (heads * config.head_dim, config.width),
        (2 * config.d_ff, config.width),
    }  # side by side: q, k, v; gate, up
    kept: list[list[torch.Tensor]] = [[]]
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda *_: kept.append([]))
    ids = torch.randint(0, config.vocab_size, (rows, context), generator=device.generator(0))

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[-1].append(tensor)
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x),
        torch.autocast("cpu", enabled=precision == "bf16"),
    ):
        model.train()(ids, documents=torch.zeros_like(ids))
    earlier = {tensor.untyped_storage().data_ptr() for tensor in kept[0] + kept[1]}
    own = {tensor.untyped_storage().data_ptr(): tensor for tensor in kept[2]}
    copies = {place for place, x in own.items() if tuple(x.shape) in matrices or tuple(x.shape[::-1]) in matrices}
    return sum(own[x].untyped_storage().nbytes() for x in own.keys() - known - earlier - copies) / (rows * context)


@pytest.mark.parametrize("targets", [None, lora.TARGETS[:4], ("all-linear",)])
@pytest.mark.parametrize(
    ("precision", "context", "kv_heads"),
    [("fp32", 128, 3), ("fp32", 1024, 3), ("fp32", 640, 1), ("bf16", 128, 3), ("bf16", 512, 1)],
)
def test_a_layer_saves_what_the_arithmetic_says(
    precision: str, context: int, kv_heads: int, targets: tuple[str, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Odd sizes of vocabulary and rows tell activations from weights. Norm scales and ranks add 3% at most."""
    monkeypatch.setitem(footprint.LEFT, precision, 0)
    config = ModelConfig(
        vocab_size=211,
        width=192,
        layers=3,
        heads=3,
        kv_heads=kv_heads,
        head_dim=64,
        d_ff=352,
        max_context=1024,
        rope_theta=1e4,
        tied=True,
    )
    model = Transformer(config, torch.Generator().manual_seed(0))
    if targets:
        lora.attach(model, AdapterConfig(rank=2, alpha=4, targets=targets), torch.Generator())
    adapted, _ = footprint.adapters_of(model)
    work = Work(
        row=context, context=context, selected=context, kind="cpu", precision=precision, packed=False, adapted=adapted
    )
    assert saved(model, 7, context, precision) == pytest.approx(footprint.layer_bytes(config, work), rel=0.03)


def test_muon_saves_a_moment_of_the_hidden_matrices_and_pays_with_stacks() -> None:
    one = footprint.footprint(footprint.full(HAND), [HAND], replace(WORK, optimizer="muon"), 1)
    assert one.optimizer == 8 * ALL - 4 * HIDDEN
    assert one.update == 4 * 64 * (14 + 6) == max(4 * 64 * 20, 2 * 128 * 17, 128 * 17)
    assert (
        footprint.sharded(one, HAND, replace(WORK, optimizer="muon"), 8).update == one.update
    )  # each gathers it whole
    many = Counter({(4096, 4096): 144})  # of which 16 make 2^28 numbers, the most that are gathered at once
    assert footprint.update_bytes(many, replace(WORK, optimizer="muon", precision="bf16")) == 16 * 2**24 * (12 + 4)
    added = replace(WORK, optimizer="muon", kind="cpu")
    assert footprint.update_bytes(footprint.matrices(HAND), added) == 4 * 64 * 20 + 3 * 128 * 17


def test_data_parallel_has_the_gradients_twice() -> None:
    one = footprint.footprint(footprint.full(HAND), [HAND], WORK, 1)
    assert footprint.data_parallel(one, footprint.full(HAND)) == replace(one, gradients=8 * ALL)


def test_sharded_states_are_divided_and_one_block_is_whole() -> None:
    one = footprint.footprint(footprint.full(HAND), [HAND], WORK, 1)
    whole = HIDDEN + TABLE
    assert footprint.sharded(one, HAND, WORK, 4) == replace(
        one, weights=ALL + 4 * whole, gradients=ALL + 4 * whole, optimizer=2 * ALL
    )


def test_an_adapter_trains_little_on_frozen_weights() -> None:
    weights = footprint.adapted(HAND, rank=2, targets=("q_proj", "down_proj"), narrow=False)
    trained = (2 * 8 + 8 * 2) + (2 * 16 + 8 * 2)
    assert (weights.trained, weights.frozen) == (trained, 4 * ALL)
    assert weights.cast == trained + TABLE + HIDDEN
    assert weights.hidden == Counter({(2, 8): 1, (8, 2): 2, (2, 16): 1})


def test_a_frozen_model_of_half_precision_keeps_its_embedding_in_float32() -> None:
    tied, untied = (footprint.frozen(replace(HAND, tied=tied), narrow=True) for tied in (True, False))
    assert (tied.frozen, tied.cast, tied.narrow) == (4 * ALL - 2 * HIDDEN, TABLE, HIDDEN)
    assert (untied.frozen, untied.cast, untied.narrow) == (4 * (ALL + TABLE) - 2 * (HIDDEN + TABLE), 0, HIDDEN + TABLE)


def test_the_cpus_operators_copy_what_is_stored_in_bf16_too() -> None:
    weights = footprint.adapted(HAND, rank=2, targets=("q_proj",), narrow=True)
    work = replace(WORK, precision="bf16", adapted=frozenset({"q_proj"}))
    on_gpu, on_cpu = (
        footprint.footprint(weights, [HAND], replace(work, kind=kind), 1).copies for kind in ("cuda", "cpu")
    )
    assert on_cpu - on_gpu == 2 * HIDDEN + 8 * 64  # and the adapted matrix with its adapter, in float32


def test_a_heap_does_not_use_the_blocks_of_sampling_again() -> None:
    one = footprint.footprint(footprint.full(HAND), [HAND], WORK, 1)
    assert replace(one, sampling=1e6).total == states(one) + 1e6
    assert replace(one, sampling=1e6, margin=1.0).total == one.total + 1e6 + 1.0


def test_four_models_of_ppo_by_hand() -> None:
    actor, critic = footprint.full(HAND), footprint.full(HAND, head=False)
    assert critic.trained == ALL + 8  # the row that gives a value
    weights = actor + critic + footprint.frozen(HAND, narrow=True) + footprint.frozen(HAND, head=False, narrow=True)
    assert weights.trained == 2 * ALL + 8
    assert weights.frozen == 2 * (4 * ALL - 2 * HIDDEN) + 4 * 8
    one = footprint.footprint(weights, [HAND, HAND], replace(WORK, answers=True), 1)
    assert one.activations == 2 * 4 * 1280 + 4 * TABLE  # two models keep activations, one has a head
    assert one.logits == PROBABILITIES


def test_an_existing_model_counts_as_its_configuration_does() -> None:
    untied = replace(HAND, tied=False)
    assert footprint.weights_of(Transformer(untied)) == footprint.full(untied)
    adapted = Transformer(HAND, torch.Generator().manual_seed(0))
    lora.attach(adapted, AdapterConfig(rank=2, alpha=4, targets=("q_proj", "down_proj")), torch.Generator())
    assert footprint.weights_of(adapted) == footprint.adapted(
        HAND, rank=2, targets=("q_proj", "down_proj"), narrow=False
    )
    assert footprint.weights_of(reference.narrow(adapted)) == footprint.adapted(
        HAND, rank=2, targets=("q_proj", "down_proj"), narrow=True
    )
    pair = footprint.weights_of(ActorCritic(Transformer(HAND), RewardModel(Transformer(HAND))))
    assert pair.trained == 2 * ALL + 8


@pytest.mark.parametrize("tied", [True, False])
def test_a_narrowed_model_holds_what_the_plan_says(tied: bool) -> None:
    config = replace(HAND, tied=tied)
    model = reference.narrow(Transformer(config).requires_grad_(False))
    assert footprint.weights_of(model) == replace(footprint.frozen(config, narrow=True), hidden=Counter())


def test_the_largest_micro_batch_is_a_power_of_two_or_all_rows() -> None:
    for limit, rows, expected in ((100, 6, 6), (59, 6, 4), (39, 6, 2), (10, 6, 1), (9, 6, 0), (10_000, 512, 512)):
        assert footprint.largest(limit, lambda n: 10.0 * n, rows) == expected, (limit, rows)


WIDE = {"width": 256, "layers": 2, "d_ff": 768, "vocab_size": 65536}
MUON = {"width": 384, "layers": 10, "d_ff": 1024, "vocab_size": 8192}
ADAPTER = {"rank": 8, "alpha": 16, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]}
CASES: dict[str, dict[str, Any]] = {
    "adamw": {"shape": MIDDLE, "rows": 2, "micro_batch": 2, "context": 128},
    "accumulating in bf16": {"shape": MIDDLE, "rows": 2, "micro_batch": 1, "context": 128, "precision": "bf16"},
    "checkpointing": {"shape": MIDDLE, "rows": 4, "micro_batch": 4, "context": 64, "checkpointing": "full"},
    "selective in bf16": {
        "shape": SMALL,
        "rows": 16,
        "micro_batch": 16,
        "context": 256,
        "checkpointing": "selective",
        "precision": "bf16",
    },
    "muon": {"shape": MUON, "rows": 2, "micro_batch": 1, "context": 64, "optimizer": "muon"},
    "long rows in bf16": {"shape": SMALL, "rows": 1, "micro_batch": 1, "context": 2048, "precision": "bf16"},
    "a large vocabulary in bf16": {"shape": WIDE, "rows": 2, "micro_batch": 1, "context": 256, "precision": "bf16"},
    "an adapter in bf16": {
        "shape": SMALL,
        "rows": 8,
        "micro_batch": 8,
        "context": 256,
        "precision": "bf16",
        "adapter": ADAPTER,
    },
    "an adapter on a base in bf16": FOUR | {"adapter": ADAPTER, "base": "bf16"},
    "dpo": FOUR | {"method": "dpo"},
    "dpo with an adapter": FOUR | {"method": "dpo", "adapter": ADAPTER, "base": "bf16"},
    "grpo": FOUR | {"method": "grpo", "rows": 8},
    "grpo with an adapter": FOUR | {"method": "grpo", "rows": 48, "adapter": ADAPTER, "base": "bf16", "steps": 2},
}


@pytest.mark.slow
@pytest.mark.full
@on_linux
@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_within_a_fifth_of_the_measured_peak(name: str) -> None:
    planned_and_measured(CASES[name])
