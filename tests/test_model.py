"""The transformer against slow, obvious versions of itself, and its configuration files."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor

from pipeline.model import checkpoint
from pipeline.model.cache import KVCache
from pipeline.model.config import ModelConfig
from pipeline.model.cpu import layers
from pipeline.model.layers import Block, Masked, positions_in
from pipeline.model.transformer import Transformer
from pipeline.run.config import Value, build
from pipeline.run.errors import ModelError

CONFIG = ModelConfig(
    vocab_size=128,
    width=48,
    layers=3,
    heads=6,
    kv_heads=2,
    head_dim=16,
    d_ff=80,
    max_context=1280,
    rope_theta=1e4,
    tied=True,
)
SIZES = sorted(path.stem for path in (Path(__file__).parents[1] / "conf" / "model").glob("*.yaml"))


def made(config: ModelConfig = CONFIG, seed: int = 0) -> Transformer:
    model = Transformer(config, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for parameter in model.parameters():  # far from the flat start, so that errors show
            parameter.mul_(1.6 if parameter.ndim > 1 else 1.1)
    return model


def some_ids(*shape: int) -> Tensor:
    return torch.randint(0, CONFIG.vocab_size, shape, generator=torch.Generator().manual_seed(5))


def packed(lengths: list[list[int]]) -> Tensor:
    return torch.stack([torch.cat([torch.full((n,), i) for i, n in enumerate(row)]) for row in lengths])


def obvious_attention(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], causal: bool) -> Tensor:
    """One query at a time."""
    group = q.shape[1] // k.shape[1]
    out = torch.zeros_like(q)
    first = 0
    for length in lengths:
        for i in range(first, first + length):
            last = i + 1 if causal else first + length
            for head in range(q.shape[1]):
                scores = k[first:last, head // group] @ q[i, head] / math.sqrt(q.shape[2])
                out[i, head] = torch.softmax(scores, 0) @ v[first:last, head // group]
        first += length
    return out


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("causal", [True, False])
def test_ragged_attention_equals_one_query_at_a_time(kv_heads: int, causal: bool) -> None:
    lengths = [1, 66, 3]
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(70, 4, 8, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 70, kv_heads, 8, generator=generator, dtype=torch.float64)
    got = layers.ragged_attention(q, k, v, lengths, causal=causal)
    torch.testing.assert_close(got, obvious_attention(q, k, v, lengths, causal), rtol=1e-10, atol=1e-12)


def test_hand_written_gradients_equal_finite_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "QUERY_BLOCK", 2)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)

    q, k, v = drawn(6, 4, 2), drawn(6, 2, 2), drawn(6, 2, 2)
    for causal in (True, False):
        assert torch.autograd.gradcheck(
            lambda a, b, c, flag=causal: layers.ragged_attention(a, b, c, [1, 5], causal=flag), (q, k, v)
        )
    assert torch.autograd.gradcheck(lambda x, w: layers.rms_norm(x, w, 1e-6), (drawn(3, 2, 4), drawn(4)))
    angles = torch.randn(3, 1, 2, generator=generator, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: layers.rotate(x, angles.cos(), angles.sin()), (drawn(3, 2, 4),))


def test_cpu_norm_and_rotation_equal_the_plain_formulas() -> None:
    x, weight = torch.randn(7, 3, 8, generator=torch.Generator().manual_seed(0)), torch.linspace(0.5, 2, 8)
    angles = torch.randn(7, 1, 4, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(layers.rms_norm(x, weight, 1e-6), torch.nn.functional.rms_norm(x, (8,), weight, 1e-6))
    low = x.bfloat16()  # takes the plain path, which computes in float32
    torch.testing.assert_close(
        layers.rms_norm(low, weight, 1e-6), layers.rms_norm(low.float(), weight, 1e-6).bfloat16()
    )
    turned = layers.rotate(x, angles.cos(), angles.sin())
    first, second = torch.complex(x[..., :4], x[..., 4:]), torch.complex(angles.cos(), angles.sin())
    torch.testing.assert_close(torch.complex(turned[..., :4], turned[..., 4:]), first * second)


@pytest.mark.parametrize("lengths", [[[30, 10, 24], [64], [1, 63]], [[600, 100], [3, 697], [700]]])
@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
def test_a_packed_row_equals_its_documents_alone(lengths: list[list[int]], attention: str) -> None:
    model = made(replace(CONFIG, attention=attention))
    ids = some_ids(3, sum(lengths[0]))
    documents = packed(lengths)
    with torch.no_grad():
        together = model(ids, documents=documents)
        causal = attention == "causal"
        masked = model.line(ids.flatten(), positions_in(documents).flatten(), Masked.of(documents, causal))
        assert torch.allclose(model.logits(masked).view_as(together), together, atol=1e-5)
        for row, sizes in enumerate(lengths):
            begin = 0
            for size in sizes:
                alone = model(ids[row : row + 1, begin : begin + size])[0]
                assert torch.allclose(together[row, begin : begin + size], alone, atol=1e-5)
                begin += size


def test_padding_is_left_out_and_changes_nothing() -> None:
    model = made()
    ids = some_ids(2, 40)
    documents = packed([[25, 15], [30, 10]])
    documents[0, 25:] = -1
    changed = torch.where(documents < 0, 7, ids)
    select = documents >= 0
    with torch.no_grad():
        before, after = model(ids, documents=documents), model(changed, documents=documents)
        assert torch.equal(before[select], after[select])
        assert torch.allclose(before[0, :25], model(ids[:1, :25])[0], atol=1e-5)
        assert torch.equal(model(ids, documents=documents, select=select), before[select])
        some = select & (ids % 3 == 0)
        assert torch.allclose(model(ids, documents=documents, select=some), before[some], atol=1e-6)
        assert torch.allclose(model(ids, select=some), model(ids)[some], atol=1e-6)
        assert not model.hidden(ids, documents=documents)[~select].any()


def test_few_selected_tokens_are_all_that_the_last_feed_forward_part_computes() -> None:
    """Their logits and all gradients equal those of a pass that computes every token."""
    model, ids, documents = made(), some_ids(2, 40), packed([[25, 15], [30, 10]])
    select, computed = ids % 3 == 0, list[int]()
    last = model.model.layers[-1]
    assert isinstance(last, Block) and select.float().mean() < 0.7
    last.mlp.register_forward_hook(lambda _, given, __: computed.append(given[0].shape[0]))
    results = []
    for few in (True, False):
        model.zero_grad()
        logits = model(ids, documents=documents, select=select) if few else model(ids, documents=documents)[select]
        logits.square().sum().backward()
        results.append([logits, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert computed == [int(select.sum()), ids.numel()]
    assert len(results[0]) == len(results[1]) == 1 + len(list(model.parameters()))
    for found, expected in zip(*results, strict=True):
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_gradients_of_the_packed_way_equal_the_masked_way() -> None:
    ids, documents = some_ids(2, 90), packed([[40, 50], [80, 10]])
    grads = []
    for way in ("packed", "masked"):
        model = made()
        if way == "packed":
            hidden = model.hidden(ids, documents=documents).flatten(0, 1)
        else:
            hidden = model.line(ids.flatten(), positions_in(documents).flatten(), Masked.of(documents, True))
        model.logits(hidden).log_softmax(-1).square().mean().backward()
        grads.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], rtol=1e-3, atol=1e-5)


def test_a_later_token_changes_no_earlier_logit_bit() -> None:
    model = made()
    ids = some_ids(2, 70)
    changed = ids.clone()
    changed[:, 50] = (changed[:, 50] + 1) % CONFIG.vocab_size
    for documents in (None, packed([[70], [20, 50]])):
        with torch.no_grad():
            before, after = model(ids, documents=documents), model(changed, documents=documents)
        assert torch.equal(before[:, :50], after[:, :50])
        assert not torch.equal(before[:, 50], after[:, 50])


def test_positions_matter_by_distance_only() -> None:
    model = made()
    ids = some_ids(1, 30)
    with torch.no_grad():
        shifted = model(ids, positions=torch.arange(30)[None] + 100)
        assert torch.allclose(model(ids), shifted, atol=1e-4)
        assert not torch.allclose(model(ids), model(ids, positions=2 * torch.arange(30)[None]), atol=1e-2)


def test_a_row_that_returns_to_a_document_is_refused() -> None:
    with pytest.raises(ValueError, match="returns to an earlier id"):
        made()(some_ids(1, 4), documents=torch.tensor([[0, 1, 1, 0]]))


@pytest.mark.parametrize("cuts", [[60], [1] * 60, [20, 1, 1, 30, 8], [59, 1]])
def test_cached_equals_uncached(cuts: list[int]) -> None:
    model = made()
    ids = some_ids(2, 60)
    cache = KVCache(CONFIG, 2, dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        pieces = [model(piece, cache=cache) for piece in ids.split(cuts, dim=1)]
        assert torch.allclose(torch.cat(pieces, dim=1), model(ids), atol=1e-5)
    assert cache.lengths == [60, 60] and cache.capacity == 256


def test_the_cache_refuses_more_than_the_context() -> None:
    cache = KVCache(CONFIG, 1, dtype=torch.float32, device=torch.device("cpu"))
    cache.reserve(1280)
    assert cache.capacity == 1280
    with pytest.raises(ValueError, match="context of 1280"):
        cache.reserve(1281)


@pytest.mark.parametrize("policy", ["full", "every_2", "selective"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_checkpointing_changes_no_gradient_bit(policy: str, dropout: float) -> None:
    grads = []
    for checkpointing in ("none", policy):
        model = made()
        model.checkpointing = checkpointing  # type: ignore[assignment]
        model.dropout = dropout
        torch.manual_seed(0)
        model(some_ids(2, 40), documents=packed([[40], [15, 25]])).square().mean().backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))


def test_dropout_acts_in_training_only() -> None:
    model = made()
    plain = model(some_ids(1, 20))
    model.dropout = 0.3
    assert not torch.equal(model(some_ids(1, 20)), plain)
    model.train(False)
    assert torch.equal(model(some_ids(1, 20)), plain)


def test_initial_weights_depend_on_the_generator_alone() -> None:
    torch.manual_seed(1)
    first = Transformer(CONFIG, torch.Generator().manual_seed(3)).state_dict()
    before = torch.get_rng_state()
    second = Transformer(CONFIG, torch.Generator().manual_seed(3)).state_dict()
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert abs(first["model.embed_tokens.weight"].std().item() - 0.05) < 1e-3
    assert abs(first["model.layers.0.mlp.down_proj.weight"].std().item() - 0.05 / math.sqrt(6)) < 1e-3
    assert torch.equal(first["model.norm.weight"], torch.ones(48))


def test_a_fresh_model_is_nearly_uniform() -> None:
    model = Transformer(CONFIG, torch.Generator().manual_seed(0))
    loss = -model(some_ids(4, 50)).log_softmax(-1).mean()
    assert abs(loss.item() - math.log(CONFIG.vocab_size)) < 0.1


@pytest.mark.parametrize("size", SIZES)
def test_every_model_file_builds_and_counts_right(size: str) -> None:
    values = yaml.safe_load((Path(__file__).parents[1] / "conf" / "model" / f"{size}.yaml").read_text())
    config = build(ModelConfig, {key: Value(value, size) for key, value in values.items()}, "model")
    with torch.device("meta"):
        model = Transformer(config)
    hook = 0 if model.hook is None else model.hook.num_parameters()
    assert model.num_parameters() == config.num_parameters + hook
    own = [(n, p) for n, p in model.named_parameters() if n.startswith(("model.", "lm_head."))]
    matmuls = sum(p.numel() for n, p in own if p.ndim > 1 and "embed" not in n)
    head = config.vocab_size * config.width if config.tied else 0
    assert config.matmul_parameters == matmuls + head
    assert (
        config.flops_per_token(512) == 6 * (matmuls + head) + 12 * config.layers * config.heads * config.head_dim * 512
    )
    assert config.vocab_size % 64 == 0
    assert model.hook is not None or ModelConfig.from_hf(config.to_hf()) == config


def test_config_json_serves_both_generations_of_transformers() -> None:
    values = replace(CONFIG, rope_theta=5e5).to_hf()
    assert values["rope_theta"] == values["rope_parameters"]["rope_theta"] == 5e5
    assert values["torch_dtype"] == values["dtype"] == "float32"
    assert values["architectures"] == ["Qwen3ForCausalLM"] and values["head_dim"] == 16
    for missing in ("rope_theta", "rope_parameters"):
        assert ModelConfig.from_hf({k: v for k, v in values.items() if k != missing}).rope_theta == 5e5
    assert replace(CONFIG, bias=True).to_hf()["architectures"] == ["Qwen2ForCausalLM"]
    assert replace(CONFIG, attention="bidirectional").to_hf()["model_type"] == "stagecoach_mdm"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type = 'yarn'"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_theta": 3.0}, "correct one of them"),
        ({"num_key_value_heads": 5}, "kv_heads"),
    ],
)
def test_a_config_that_would_compute_something_else_is_refused(change: dict, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_hf(CONFIG.to_hf() | change)


@pytest.mark.parametrize("change", [{"heads": 5}, {"head_dim": 15}, {"layers": 0}, {"attention": "sideways"}])
def test_shapes_that_do_not_fit_are_refused(change: dict) -> None:
    with pytest.raises(ValueError, match="expected"):
        replace(CONFIG, **change)


def test_weights_load_strictly(tmp_path: Path) -> None:
    model = made()
    state = model.state_dict()

    def loaded(tensors: dict[str, Tensor]) -> Transformer:
        save_file(tensors, tmp_path / "model.safetensors")
        fresh = Transformer(CONFIG)
        checkpoint.load_weights(fresh, tmp_path)
        return fresh

    again = loaded(state)
    assert all(torch.equal(state[name], tensor) for name, tensor in again.state_dict().items())
    assert torch.equal(
        loaded({**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()})(some_ids(1, 5)),
        model(some_ids(1, 5)),
    )
    with pytest.raises(ModelError, match="ties the head"):
        loaded({**state, "lm_head.weight": torch.zeros(128, 48)})
    with pytest.raises(ModelError, match="1 keys missing"):
        loaded({name: tensor for name, tensor in state.items() if name != "model.norm.weight"})
    with pytest.raises(ModelError, match="1 keys unknown"):
        loaded({**state, "model.extra": torch.zeros(1)})
    with pytest.raises(ModelError, match="has shape"):
        loaded({**state, "model.norm.weight": torch.zeros(47)})
    (tmp_path / "model.safetensors").write_bytes(b"\x10" * 40)
    with pytest.raises(ModelError, match="damaged"):
        checkpoint.load_weights(model, tmp_path)


def test_autocast_to_bf16_stays_near_float32() -> None:
    model = made()
    ids, documents = some_ids(1, 24), packed([[10, 14]])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        low = model(ids, documents=documents)
    with torch.no_grad():
        high = model(ids, documents=documents)
    assert low.dtype == torch.bfloat16
    assert (low.float() - high).abs().mean() < 0.05 * high.abs().mean()


def test_neftune_noise_is_uniform_and_scaled_by_each_documents_length() -> None:
    """arXiv:2310.05914, section 2: +-alpha / sqrt(L d) for a sequence of L tokens and embeddings of d numbers."""
    model, lengths = made(), [100, 400, 12]
    plain = model(some_ids(1, 512), documents=packed([lengths]))
    model.neftune_alpha = 5.0
    x = torch.zeros(512, CONFIG.width)
    positions = torch.cat([torch.arange(n) for n in lengths])
    noise = model._noise(x, positions)  # pyright: ignore[reportPrivateUsage]
    for part, length in zip(noise.split(lengths), lengths, strict=True):
        bound = 5.0 / math.sqrt(length * CONFIG.width)
        assert 0.95 * bound < float(part.abs().max()) <= bound
        assert math.isclose(float(part.abs().mean()), bound / 2, rel_tol=0.1)
        assert abs(float(part.mean())) < 0.1 * bound
    model.train()
    ids, documents = some_ids(1, 512), packed([lengths])
    assert not torch.equal(model(ids, documents=documents), plain)
    model.eval()
    assert torch.equal(model(ids, documents=documents), plain)


def test_rows_that_begin_alike_get_noise_of_their_own() -> None:
    model = made().train()
    model.neftune_alpha = 5.0
    ids = some_ids(1, 60).expand(2, 60)
    first, second = model(ids, documents=torch.arange(2)[:, None].expand(2, 60))
    assert not torch.allclose(first, second)
