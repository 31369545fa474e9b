"""The memory's layers: what they may depend on, what they equal, how many weights they have."""

import math
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pipeline.memory.config import MemoryConfig
from pipeline.memory.model import Memory, Reading, cut
from pipeline.memory.training import CENTERED, UnitBatch, UnitStream, measure_centers
from pipeline.model.config import ModelConfig
from pipeline.model.transformer import Transformer
from pipeline.run import device
from pipeline.run.errors import ModelError
from tests.memory_models import NANO, STORAGES, TINY, asked, memory, opened, tokens


def test_reading_counts_among_the_operations_of_a_token() -> None:
    """By hand: two matrices of 32 x 32 per layer that reads, and 3 chapters of 8 rows under 4 heads of 8."""
    bare, reading = (Transformer(replace(TINY, memory=m)) for m in (None, memory(layers="last_2")))
    assert reading.flops_per_token(64) - bare.flops_per_token(64) == 2 * (6 * 2 * 32 * 32 + 12 * 4 * 8 * 3 * 8)


# -- what may be known ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("routing", ["chunk", "token", "prompt"])
@pytest.mark.parametrize("share", ["all", "each"])
def test_later_tokens_change_no_bit_of_what_was_predicted_before(routing: str, share: str) -> None:
    model = opened(memory(routing=routing, share=share, layers="all"))
    ids, trained = tokens(2, 41), asked(2, 41, 12)
    with torch.no_grad():
        first = model(ids, reading=Reading(trained=trained))
        for begin in (13, 16, 17, 24, 40):
            other = ids.clone()
            other[:, begin:] = (other[:, begin:] + 1) % TINY.vocab_size
            again = model(other, reading=Reading(trained=trained))
            since = 12 if routing == "prompt" else 0  # until the first loss, a prompt may see all of itself
            assert torch.equal(again[:, since:begin], first[:, since:begin])
            assert not torch.equal(again[:, begin:], first[:, begin:])


def test_routing_by_sequence_knows_the_future() -> None:
    model = opened(memory(routing="sequence", allow_leak=True))
    ids = tokens(2, 41)
    other = ids.clone()
    other[:, 30:] = (other[:, 30:] + 1) % TINY.vocab_size
    with torch.no_grad():
        assert not torch.equal(model(other)[:, :30], model(ids)[:, :30])


def guess(routing: str, steps: int) -> list[float]:
    """Losses of a small model on fresh uniform tokens, which cannot be predicted."""
    shape = ModelConfig(
        vocab_size=16,
        width=32,
        layers=2,
        heads=2,
        kv_heads=1,
        head_dim=16,
        d_ff=64,
        max_context=8,
        rope_theta=1e4,
        tied=False,
        memory=MemoryConfig(
            rows=64, chapters=16, top_k=4, routing=routing, window=2, layers="all", allow_leak=routing == "sequence"
        ),
    )
    generator = torch.Generator().manual_seed(0)
    model = Transformer(shape, generator)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0), []
    for _ in range(steps):
        ids = torch.randint(0, 16, (64, 9), generator=generator)
        loss = functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("routing", ["chunk", "token"])
def test_nobody_predicts_uniform_tokens(routing: str) -> None:
    losses = torch.tensor(guess(routing, 600))
    assert losses.unfold(0, 50, 1).mean(1).min() > math.log(16) - 0.02


@pytest.mark.slow
@pytest.mark.full
def test_but_routing_by_sequence_does() -> None:
    assert sum(guess("sequence", 600)[-50:]) / 50 < math.log(16) - 0.1


# -- what it equals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGES, ids=lambda storage: storage["storage"])
@pytest.mark.parametrize("rank", [None, 4])
def test_a_fresh_memory_changes_no_bit_of_the_base(storage: dict[str, Any], rank: int | None) -> None:
    base = Transformer(TINY, torch.Generator().manual_seed(0))
    model = Transformer(
        replace(TINY, memory=memory(rank=rank, layers="all", **storage)), torch.Generator().manual_seed(3)
    )
    model.load_state_dict(base.state_dict(), strict=False)
    ids = tokens(2, 30)
    documents = torch.tensor([[0] * 11 + [1] * 19, [0] * 25 + [-1] * 5], dtype=torch.int32)
    for told in ({}, {"documents": documents}):
        assert torch.equal(model(ids, **told), base(ids, **told))


def dense(model: Transformer, layer: int, x: Tensor) -> Tensor:
    """Attention over the whole bank, as a formula, for a memory without low rank."""
    assert isinstance(model.hook, Memory)
    reader, bank = model.hook.of(layer)
    normed, rows = reader.norm(x), bank()
    q, k, v = (
        p(y).unflatten(-1, (-1, reader.head_dim))
        for p, y in ((reader.q_proj, normed), (reader.k_proj, rows), (reader.v_proj, rows))
    )
    k, v = (y.repeat_interleave(reader.heads // reader.kv_heads, 1) for y in (k, v))
    weights = (torch.einsum("nhd,mhd->hnm", q, k) / reader.head_dim**0.5).softmax(-1)
    return x + reader.o_proj(torch.einsum("hnm,mhd->nhd", weights, v).flatten(1))


@pytest.mark.parametrize("storage", STORAGES, ids=lambda storage: storage["storage"])
@pytest.mark.parametrize("routing", ["chunk", "token"])
def test_all_chapters_with_equal_p_are_attention_over_the_bank(storage: dict[str, Any], routing: str) -> None:
    model = opened(memory(top_k=5, routing=routing, layers=(1,), **storage), double=True)
    assert isinstance(model.hook, Memory)
    reader, _ = model.hook.of(1)
    for parameter in reader.router.parameters():
        parameter.data.zero_()
    x = torch.randn(29, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    units = cut(torch.arange(29), routing=routing, window=8)
    torch.testing.assert_close(model.hook.read(1, x, units, Reading()), dense(model, 1, x), rtol=1e-12, atol=1e-12)


def test_weights_scale_the_rows_of_their_chapters_in_one_softmax() -> None:
    """By hand: chapters 2 and 0 chosen with p 0.5 and 0.3, one shared; w = 2 * 0.5 / 0.8, 2 * 0.3 / 0.8, 1."""
    config = memory(rows=8, chapters=3, shared=1, top_k=2, layers=(0,))
    model = opened(config, double=True)
    assert isinstance(model.hook, Memory)
    reader, bank = model.hook.of(0)
    reader.router.weight.data.zero_()
    reader.router.bias.data.copy_(torch.tensor([0.3, 0.2, 0.5], dtype=torch.float64).log())  # type: ignore[union-attr]
    x = torch.randn(1, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    found = model.hook.read(0, x, cut(torch.arange(1), routing="chunk", window=8), Reading())
    normed = reader.norm(x)
    which, w = [0, 1, 6, 7, 2, 3], torch.tensor([1.0, 1.0, 1.25, 1.25, 0.75, 0.75], dtype=torch.float64)
    rows = bank.rows[which]
    q = reader.q_proj(normed).view(4, 8)
    k, v = (p(rows).view(6, 2, 8).repeat_interleave(2, 1) for p in (reader.k_proj, reader.v_proj))
    mass = w * (torch.einsum("hd,mhd->hm", q, k) / 8**0.5).exp()
    out = torch.einsum("hm,mhd->hd", mass / mass.sum(1, keepdim=True), v).flatten()
    torch.testing.assert_close(found, x + reader.o_proj(out), rtol=1e-12, atol=1e-12)


def test_units_of_one_token_are_gathered_or_masked_alike() -> None:
    model = opened(memory(layers=(1,)), double=True)
    assert isinstance(model.hook, Memory)
    reader, bank = model.hook.of(1)
    normed = torch.randn(29, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    masked = cut(torch.arange(29), routing="token", window=8)
    gathered = replace(masked, sources=masked.places)
    routed = reader.route(normed)
    whole = reader.projected(bank)
    first, second = (reader.attend(normed, units, routed, bank, whole) for units in (masked, gathered))
    torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12)


def test_normed_queries_and_keys_are_blind_to_the_size_of_rows_and_a_gate_multiplies_what_is_read() -> None:
    model = opened(memory(qk_norm=True, gated=True, layers=(1,)), double=True)
    memory_ = model.hook
    assert isinstance(memory_, Memory)
    reader, bank = memory_.of(1)
    normed = torch.randn(6, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    units = cut(torch.arange(6), routing="chunk", window=8)
    routed = reader.route(torch.zeros(1, 32, dtype=torch.float64))
    keys, values = reader.projected(bank)
    read = reader.attend(normed, units, routed, bank)
    bank.rows.data *= 1000  # type: ignore[union-attr, operator]
    larger, _ = reader.projected(bank)
    torch.testing.assert_close(
        larger.square().mean(-1), torch.ones(keys.shape[:-1], dtype=torch.float64), rtol=0, atol=1e-6
    )
    cosine = functional.cosine_similarity(larger, keys, dim=-1)
    torch.testing.assert_close(cosine, torch.ones_like(cosine))
    torch.testing.assert_close(reader.projected(bank)[1], 1000 * values)
    assert reader.gate_proj is not None
    gate = functional.silu(reader.gate_proj(normed))
    torch.testing.assert_close(reader.out(normed, read), reader.o_proj(gate * read))


def test_a_centered_router_sees_what_a_unit_has_of_its_own() -> None:
    model = opened(memory(centered=True, layers=(1,)), double=True)
    memory_ = model.hook
    assert isinstance(memory_, Memory)
    reader, _ = memory_.of(1)
    reader.center.copy_(torch.arange(32) % 2)
    u = torch.stack([reader.center + 3.0 * (torch.arange(32) < 8), torch.zeros(32, dtype=torch.float64)])
    first = reader.router.weight[:, :8].sum(1) * 2  # 3 in 8 of 32 numbers: RMS 1.5, so 2 at unit RMS
    expected = torch.stack([first, torch.zeros(5)]) + reader.router.bias
    torch.testing.assert_close(reader.route(u).logits, expected, rtol=0, atol=1e-5)


class Steps:
    """A stream with one batch per step."""

    def __init__(self, batches: list[UnitBatch]) -> None:
        self.batches = batches

    def rows(self, step: int, context: int) -> np.ndarray:
        return np.arange(2)

    def batch(self, step: int, context: int, rows: np.ndarray) -> UnitBatch:
        return self.batches[step]


def test_a_center_is_the_mean_over_the_units_of_the_first_steps() -> None:
    model = opened(memory(centered=True, layers="all", routing="chunk"))
    assert isinstance(model.hook, Memory)
    batches = []
    for step in range(CENTERED):
        ids = tokens(2, 20, seed=step)
        places = torch.arange(20).expand(2, -1)
        units = cut(places.flatten(), routing="chunk", window=8)
        batches.append(UnitBatch(ids, ids, torch.zeros(2, 20, dtype=torch.int32), places, 40, len(units.places)))
    readings = []
    for batch in batches:
        readings.append(Reading(trained=batch.targets >= 0, watch=True))
        with torch.no_grad():
            model(batch.input_ids, reading=readings[-1])
    expected = [torch.cat([reading.means[layer] for reading in readings]) for layer in range(3)]
    assert len(expected[0]) == 6 * CENTERED  # chunks of 8, 8 and 4 tokens
    centers = [center.clone() for center in model.hook.centers()]
    measure_centers(model, cast("UnitStream", Steps(batches)), 20, device.hardware("fp32"))
    for center, u, before in zip(model.hook.centers(), expected, centers, strict=True):
        assert not torch.equal(center, before)
        torch.testing.assert_close(center, u.mean(0).detach(), rtol=0, atol=1e-5)


def test_the_deviation_of_fresh_rows_is_as_said() -> None:
    for std in (0.02, 1.0):
        fresh = Memory(memory(rows=1200, bank_std=std), TINY, torch.Generator().manual_seed(0))
        assert float(fresh.bank[0].rows.detach().std()) == pytest.approx(std, rel=0.02)  # type: ignore[union-attr, arg-type]
        assert float(fresh.readers["1"].router.weight.detach().std()) == pytest.approx(0.02, rel=0.2)  # type: ignore[union-attr, arg-type]


def test_plain_products_are_what_the_kernel_says() -> None:
    model = opened(memory(), double=True)
    reader, _ = model.hook.of(1)  # type: ignore[union-attr, operator]
    generator = torch.Generator().manual_seed(3)
    q, keys, values = (
        torch.randn(5, num, heads, 8, generator=generator, dtype=torch.float64)
        for num, heads in ((7, 4), (9, 2), (9, 2))
    )
    weights = torch.randn(5, 9, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(
        reader._products(q, keys, values, weights), reader._kernel(q, keys, values, weights), rtol=0, atol=1e-12
    )  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("storage", STORAGES, ids=lambda storage: storage["storage"])
def test_a_bank_projected_once_reads_as_rows_gathered_first(storage: dict[str, Any]) -> None:
    model = opened(memory(rows=96, chapters=11, layers=(1,), **storage), double=True)
    assert isinstance(model.hook, Memory)
    reader, bank = model.hook.of(1)
    normed = torch.randn(9, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    units = cut(torch.arange(9), routing="chunk", window=8)  # 2 units, fewer than C / k
    routed = reader.route(normed[:2])
    first, second = (reader.attend(normed, units, routed, bank, given) for given in (None, reader.projected(bank)))
    torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12)


# -- units -------------------------------------------------------------------------------------------------------------


def spans(places: Tensor, num: int) -> list[list[int]]:
    return [[place for place in row if place < num] for row in places.tolist()]


def test_a_chunk_chooses_from_the_one_before_it_in_its_document() -> None:
    positions = torch.tensor([0, 1, 2, 3, 4, 0, 1, 0, 1, 2])
    units = cut(positions, routing="chunk", window=2)
    assert units.sources is not None
    assert spans(units.places, 10) == [[0, 1], [2, 3], [4], [5, 6], [7, 8], [9]]
    assert spans(units.sources, 10) == [[], [0, 1], [2, 3], [], [], [7, 8]]
    assert units.counts.flatten().tolist() == [1, 2, 2, 1, 1, 2]


def test_an_answer_chooses_from_its_prompt_and_text_without_one_goes_by_chunks() -> None:
    # a document that begins with a loss, then a prompt | prompt, answer, prompt, answer, a tail | no loss at all
    trained = [*(1, 1, 1, 0, 0, 1, 0), *(0, 0, 1, 0, 1, 1, 0), *(0, 0, 0)]
    positions = [*range(7), *range(7), *range(3)]
    units = cut(torch.tensor(positions), routing="prompt", window=2, trained=torch.tensor(trained, dtype=torch.bool))
    assert units.sources is not None
    assert spans(units.places, 17) == [[0, 1], [2], [3, 4, 5, 6], [7, 8, 9], [10, 11, 12, 13], [14, 15], [16]]
    assert spans(units.sources, 17) == [[], [0, 1], [3, 4], [7, 8], [10], [], [14, 15]]


def test_where_no_prompt_is_known_routing_by_prompt_goes_by_chunks() -> None:
    by_prompt, by_chunk = (opened(memory(routing=routing), seed=4) for routing in ("prompt", "chunk"))
    ids = tokens(2, 30)
    assert torch.equal(by_prompt(ids), by_chunk(ids))
    assert not torch.equal(by_prompt(ids, reading=Reading(trained=asked(2, 30, 12))), by_chunk(ids))


def test_padding_belongs_to_no_unit() -> None:
    positions, padding = torch.tensor([0, 1, 2, 0, 1, 2]), torch.tensor([True, True, False, False, False, True])
    units = cut(positions, routing="chunk", window=4, padding=padding)
    assert spans(units.places, 6) == [[2], [3, 4]] and units.back.tolist() == [4, 4, 0, 2, 3, 4]
    alone = cut(positions, routing="token", window=4, padding=padding)
    assert spans(alone.places, 6) == [[2], [3], [4]] and alone.back.tolist() == [3, 3, 0, 1, 2, 3]


# -- weights -----------------------------------------------------------------------------------------------------------


def test_parameter_counts_are_those_worked_out_by_hand() -> None:
    assert (
        Memory(memory(rows=1024, chapters=15, top_k=4), NANO).num_parameters()
        == 2 * (98_304 + 2_895 + 192) + 196_608
        == 399_390
    )
    qwen = replace(NANO, width=1536, layers=28, heads=12, kv_heads=2, head_dim=128)
    config = MemoryConfig(
        rows=2048,
        chapters=8,
        top_k=2,
        storage="factorized",
        bank_rank=256,
        rank=128,
        layers=(0, 1, 2, 3, 4, 23, 24, 25, 26, 27),
    )
    with torch.device("meta"):
        assert Memory(config, qwen).num_parameters() == 10 * 1_245_184 + 917_504 + 122_960 + 15_360 == 13_507_664


def test_banks_are_shared_as_said() -> None:
    def banks(share: str) -> list[int]:
        model = opened(memory(share=share, layers="all"))
        assert isinstance(model.hook, Memory)
        return list(model.hook.bank_of.values())

    assert (banks("all"), banks("each"), banks("every_2")) == ([0, 0, 0], [0, 1, 2], [0, 0, 1])


@pytest.mark.parametrize(
    ("layers", "placed"),
    [
        ("all", [0, 1, 2, 3, 4, 5]),
        ("first_2", [0, 1]),
        ("last_2", [4, 5]),
        ("every_3", [2, 5]),
        ("none", []),
        ((4, 1), [1, 4]),
    ],
)
def test_placement(layers: str | tuple[int, ...], placed: list[int]) -> None:
    assert memory(layers=layers).placed(6) == placed


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"rows": 50}, "memory.rows: expected a multiple of the 6 chapters"),
        ({"top_k": 6}, "memory.top_k: expected at most 5"),
        ({"top_k": 1}, "the router would learn nothing"),
        ({"layers": "middle"}, "memory.layers: expected `all`, `none`"),
        ({"routing": "word"}, "memory.routing: expected one of chunk"),
        ({"storage": "sparse"}, "memory.storage: expected one of full"),
        ({"storage": "factorized"}, "memory.bank_rank: required with factorized or reduced storage"),
        ({"bank_rank": 8}, "memory.bank_rank: required with factorized or reduced storage"),
        ({"share": "some"}, "memory.share: expected `all`, `each`"),
        ({"rank": 0}, "memory.rank: expected at least 1"),
        ({"window": 0}, "memory.window: expected at least 1"),
        ({"shared": -1}, "memory.shared: expected at least 0"),
    ],
)
def test_shapes_that_cannot_be_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        memory(**changes)


def test_what_does_not_fit_the_model_is_refused() -> None:
    for layers in ("last_7", (0, 6), (1, 1)):
        with pytest.raises(ValueError, match=r"memory\.layers: expected"):
            replace(NANO, memory=memory(layers=layers))
    with pytest.raises(ValueError, match="a causal loss would see the future"):
        replace(NANO, memory=memory(routing="sequence"))
    with pytest.raises(ValueError, match="use causal attention"):
        replace(NANO, memory=memory(), attention="bidirectional")
    with pytest.raises(ValueError, match="needs a multiple of the number of heads \\(4\\)"):
        Memory(memory(storage="reduced", bank_rank=18), TINY)


def test_a_shape_survives_its_file_and_a_foreign_key_is_refused() -> None:
    for config in (memory(), memory(layers=(0, 2), storage="reduced", bank_rank=16)):
        assert (
            MemoryConfig.from_json(
                {
                    **config.to_json(),
                    "layers": list(config.layers) if isinstance(config.layers, tuple) else config.layers,
                }
            )
            == config
        )
    with pytest.raises(ModelError, match="unknown key depth; valid keys"):
        MemoryConfig.from_json(memory().to_json() | {"depth": 3})
    with pytest.raises(ModelError, match="expected a multiple"):
        MemoryConfig.from_json(memory().to_json() | {"rows": 47})
