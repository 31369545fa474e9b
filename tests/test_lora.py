"""Adapters: unchanged at the start, off when disabled, equal when merged; and PEFT's numbers without PEFT."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.generation.sampling import Decoder, Sampling, generate
from pipeline.learning import gates, optim
from pipeline.model import checkpoint, lora
from pipeline.model.config import ModelConfig
from pipeline.model.layers import Linear
from pipeline.model.lora import AdaptedLinear, AdapterConfig
from pipeline.model.transformer import Transformer
from pipeline.run.errors import GateError, ModelError
from pipeline.text.tokenizer import Tokenizer

GOLDEN = Path(__file__).parent / "golden" / "peft.json"
KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"rslora": True},
    "dora": {"dora": True},
    "all": {"targets": ("all-linear",), "dora": True, "rslora": True},
    "tokens": {"trained_tokens": (1, 5, 96)},
}
CONFIGS = [
    ModelConfig(
        vocab_size=97,
        width=24,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=8,
        d_ff=40,
        max_context=64,
        rope_theta=1e4,
        tied=True,
    ),
    ModelConfig(
        vocab_size=97,
        width=24,
        layers=2,
        heads=4,
        kv_heads=1,
        head_dim=6,
        d_ff=40,
        max_context=64,
        rope_theta=1e4,
        tied=False,
        bias=True,
    ),
]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fresh(config: ModelConfig = CONFIGS[0]) -> Transformer:
    """A model with random biases, and weights so large that logits differ by several units."""
    model = Transformer(config, seeded(0)).train(False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(1.5)
            if name.endswith("bias"):
                parameter.normal_(generator=seeded(len(name)))
    return model


def stirred(model: Transformer, seed: int = 5, size: float = 0.1) -> Transformer:
    """Move every adapter parameter, as training would."""
    generator = seeded(seed)
    for tensor in lora.adapter_state(model).values():
        tensor.add_(size * torch.randn(tensor.shape, generator=generator))
    return model


def adapted(kind: str, config: ModelConfig = CONFIGS[0], **more: Any) -> Transformer:
    model = fresh(config)
    lora.attach(model, AdapterConfig(rank=3, alpha=6.0, **KINDS[kind], **more), seeded(1))
    return model


IDS = torch.randint(0, 97, (64, 20), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 0}, "adapter.rank: expected at least 1, found 0"),
        ({"alpha": 0.0}, "adapter.alpha: expected a positive number"),
        ({"dropout": 1.0}, r"adapter.dropout: expected a number in \[0, 1\), found 1.0"),
        ({"dropout": -0.1}, "adapter.dropout"),
        ({"targets": ("q_proj", "lm_head")}, "names from q_proj, k_proj, .*found .*lm_head"),
        ({"targets": ("q_proj", "all-linear")}, "or all-linear alone"),
        ({"targets": ()}, "adapter.targets"),
    ],
)
def test_a_wrong_configuration_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdapterConfig(**{"rank": 4, "alpha": 8.0} | change)


def test_the_scale_is_alpha_over_r_or_over_its_root() -> None:
    assert AdapterConfig(rank=16, alpha=32.0).scale == 2.0
    assert AdapterConfig(rank=16, alpha=32.0, rslora=True).scale == 8.0


@pytest.mark.parametrize("config", CONFIGS, ids=["tied", "untied-bias"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_fresh_adapter_leaves_the_outputs_unchanged(kind: str, config: ModelConfig) -> None:
    expected = fresh(config)(IDS)
    found = adapted(kind, config)(IDS)
    if config.bias:  # Wx + b is fused in the base layer
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("config", CONFIGS, ids=["tied", "untied-bias"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_disabled_is_the_base_model_bit_for_bit(kind: str, config: ModelConfig) -> None:
    model = stirred(adapted(kind, config))
    on = model(IDS)
    with lora.disabled(model):
        with lora.disabled(model):
            pass
        assert torch.equal(model(IDS), fresh(config)(IDS))
    assert torch.equal(model(IDS), on)
    assert (on - fresh(config)(IDS)).abs().max() > 0.1


@torch.no_grad()
def test_adapters_come_back_when_the_disabled_block_fails() -> None:
    model = stirred(adapted("lora"))
    with pytest.raises(KeyError), lora.disabled(model):
        raise KeyError
    assert all(layer.enabled for layer in lora.adapters(model))


@pytest.mark.parametrize("config", CONFIGS, ids=["tied", "untied-bias"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_merged_equals_attached(kind: str, config: ModelConfig) -> None:
    model, names = stirred(adapted(kind, config)), fresh(config).state_dict().keys()
    attached = model(IDS)
    difference = lora.merged_with_gate(model, IDS)
    assert 0 < difference <= 2e-5
    assert float((model(IDS) - attached).abs().max()) == pytest.approx(difference, abs=1e-5)
    assert model.state_dict().keys() == names and not lora.adapters(model)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert type(model.model.layers[0].self_attn.q_proj) is Linear  # type: ignore[union-attr]


@torch.no_grad()
def test_rows_of_the_folded_weight_are_those_of_the_formula() -> None:
    model = stirred(adapted("dora"))
    layer = lora.adapters(model)[0]
    w, a, b = layer.weight.double(), layer.lora_A.weight.double(), layer.lora_B.weight.double()
    m = layer.lora_magnitude_vector.weight.double()
    whole = w + 2.0 * b @ a
    for row, folded in enumerate(layer.folded()):
        torch.testing.assert_close(folded.double(), m[row] * whole[row] / whole[row].pow(2).sum().sqrt())


def test_only_the_adapter_trains_and_its_parameters_are_counted_by_hand() -> None:
    model = adapted("lora")
    # width 24, q and o 32 wide, k and v 16 wide, rank 3, 2 layers: r (in + out) each
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 2 * 3 * (56 + 40 + 40 + 56) == 1152
    model = adapted("all")
    # and gate, up, down of 40; DoRA adds one number per row
    rows = 32 + 16 + 16 + 24 + 40 + 40 + 24
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 2 * (3 * (192 + 3 * 64) + rows) == 2688
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == set(lora.adapter_state(model))
    ends = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector.weight")
    assert all(name.endswith(ends) for name in trained) and len(trained) == 2 * 7 * 3
    assert set(fresh().state_dict()) == set(model.state_dict()) - trained
    model(IDS).square().mean().backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


def test_the_loop_trains_the_adapter_and_its_gate_lets_b_alone_begin() -> None:
    model = adapted("dora").train()
    members = optim.groups(model)
    assert set(members) == {"lora"}
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    settings = optim.OptimizerConfig(
        optimizer="adamw", learning_rate=1e-2, weight_decay=0.0, betas=(0.9, 0.999), eps=1e-8
    )
    optimizers = optim.Optimizers(model, replace(settings, weight_decay=0.5), fast_bf16=False)
    for group in optimizers.optimizers[0].param_groups:
        assert {p.ndim < 2 for p in group["params"]} == {group["weight_decay"] == 0}  # no decay on magnitudes
    optimizers = optim.Optimizers(model, settings, fast_bf16=False)
    model(IDS[:8]).logsumexp(-1).sum().backward()
    gates.gradients(members, model)
    assert all(
        not p.grad.any() for n, p in model.named_parameters() if "lora_A" in n and p.grad is not None
    )  # B is zero
    optimizers.step(1.0)
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == {name for name in lora.adapter_state(model) if "lora_A" not in name}


def test_a_model_with_its_adapter_is_not_saved_as_a_whole_model(byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="merge the adapter"):
        checkpoint.save(tmp_path, adapted("lora"), byte_tokenizer, {})
    assert not list(tmp_path.iterdir())


def test_only_the_named_modules_get_an_adapter() -> None:
    model = adapted("lora", targets=("v_proj", "gate_proj"))
    places = {name.rpartition(".lora_")[0].removeprefix("model.layers.") for name in lora.adapter_state(model)}
    assert places == {f"{i}.{place}" for i in (0, 1) for place in ("self_attn.v_proj", "mlp.gate_proj")}


def test_a_is_uniform_within_one_over_the_root_of_its_inputs_and_b_is_zero() -> None:
    config = AdapterConfig(rank=64, alpha=1.0)
    layer = AdaptedLinear(Linear(100, 7), config, seeded(3))
    a = layer.lora_A.weight.detach()
    assert 0.0995 < float(a.abs().max()) <= 0.1
    assert float(a.std()) == pytest.approx(0.1 / 3**0.5, rel=0.02)
    assert not layer.lora_B.weight.any()
    again = AdaptedLinear(Linear(100, 7), config, seeded(3)).lora_A.weight
    assert torch.equal(a, again) and not torch.equal(a, AdaptedLinear(Linear(100, 7), config, seeded(4)).lora_A.weight)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_dropout_falls_on_what_enters_the_adapter_in_training_only(kind: str) -> None:
    torch.manual_seed(0)
    config = AdapterConfig(rank=2, alpha=2.0, dropout=0.5, dora=kind == "dora")
    base = Linear(400, 3)
    with torch.no_grad():
        base.weight.normal_(generator=seeded(0))
    layer = AdaptedLinear(base.train(), config, seeded(1))
    with torch.no_grad():
        layer.lora_B.weight.normal_(generator=seeded(2))
    x = torch.ones(4000, 400)
    with torch.no_grad():
        found = layer(x)
        still = layer.train(False)(x)
        assert torch.equal(still, layer(x))
    assert found.std(dim=0).min() > 0.01  # the rows of x are equal, what comes out is not
    torch.testing.assert_close(found.mean(0), still[0], rtol=0.02, atol=0.05)  # on average nothing is lost


@pytest.mark.parametrize("checkpointing", ["full", "every_2", "selective"])
@pytest.mark.parametrize("kind", ["lora", "all"])
def test_gradient_checkpointing_gives_the_same_gradients(kind: str, checkpointing: Any) -> None:
    gradients = []
    for mode in ("none", checkpointing):
        model = stirred(adapted(kind, dropout=0.3)).train()
        model.checkpointing = mode
        torch.manual_seed(7)
        logits = model(IDS[:4])
        with lora.disabled(model), torch.no_grad():
            model(IDS[:4])  # the reference runs between forward and backward
        logits.square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_cached_decoding_sees_the_adapter(kind: str) -> None:
    model = stirred(adapted(kind))
    ids = IDS[0, :12].tolist()
    decoder = Decoder(model, 1)
    decoder.feed([0], [ids[:5]])
    steps = torch.cat([decoder.feed([0], [[token]]) for token in ids[5:]])
    torch.testing.assert_close(steps, model(IDS[:1, :12])[0, 5:], rtol=0, atol=2e-5)
    answer = generate(model, [ids], Sampling(16), stop=(), seeds=[0])[0].ids
    with lora.disabled(model):
        assert generate(model, [ids], Sampling(16), stop=(), seeds=[0])[0].ids != answer
    lora.merge(model)
    assert generate(model, [ids], Sampling(16), stop=(), seeds=[0])[0].ids == answer


@torch.no_grad()
def test_a_bf16_base_keeps_its_dtype_and_its_adapter_float32() -> None:
    model = fresh().to(torch.bfloat16)
    lora.attach(model, AdapterConfig(rank=3, alpha=6.0, dora=True), seeded(1))
    assert {t.dtype for t in lora.adapter_state(model).values()} == {torch.float32}
    assert model(IDS[:2]).dtype == torch.bfloat16
    lora.merge(stirred(model))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@torch.no_grad()
def test_the_merge_gate_stops_what_float32_would_have_kept() -> None:
    model = stirred(adapted("lora").to(torch.bfloat16))
    with pytest.raises(
        GateError, match=r"change the logits of 64 rows by at most 0.0001, found .*torch.bfloat16 instead"
    ):
        lora.merged_with_gate(model, IDS)


@torch.no_grad()
def test_an_adapter_that_is_not_finite_fails_the_merge_gate() -> None:
    model = stirred(adapted("lora"))
    lora.adapters(model)[3].lora_B.weight[0, 0] = float("nan")
    with pytest.raises(GateError, match="found inf"):
        lora.merged_with_gate(model, IDS)


def test_dora_refuses_weights_that_were_not_loaded() -> None:
    with pytest.raises(ModelError, match=r"layers.0.self_attn.q_proj.weight: a row of zeros .* load the weights first"):
        lora.attach(Transformer(CONFIGS[0]), AdapterConfig(rank=2, alpha=1.0, dora=True), seeded(0))


@torch.no_grad()
def test_state_goes_from_one_model_to_another() -> None:
    model, other = stirred(adapted("all")), adapted("all")
    lora.load_adapter_state(other, {name: tensor.clone() for name, tensor in lora.adapter_state(model).items()})
    assert torch.equal(model(IDS), other(IDS))


def test_a_state_that_does_not_fit_is_refused_by_name() -> None:
    model = adapted("lora")
    state = lora.adapter_state(model)
    name = "model.layers.1.mlp.up_proj.lora_A.weight"
    with pytest.raises(ModelError, match=f"the 16 parameters of the attached adapter, found 1 unknown .{name}"):
        lora.load_adapter_state(model, state | {name: torch.zeros(3, 24)})
    first = next(iter(state))
    with pytest.raises(ModelError, match=f"found 1 missing .{first}"):
        lora.load_adapter_state(model, {key: tensor for key, tensor in state.items() if key != first})
    with pytest.raises(ModelError, match=rf"{first} has shape \[4, 24\], expected \[3, 24\]; the rank"):
        lora.load_adapter_state(model, state | {first: torch.zeros(4, 24)})


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_what_is_exported_is_imported(kind: str, tmp_path: Path) -> None:
    config = AdapterConfig(rank=3, alpha=6.0, dropout=0.25, **KINDS[kind])
    model, other = fresh(), fresh()
    lora.attach(model, config, seeded(1))
    lora.export_peft(tmp_path / "a", stirred(model), config, base_name="models/tools")
    lora.export_peft(tmp_path / "b", model, config, base_name="models/tools")
    assert all((tmp_path / "a" / p.name).read_bytes() == p.read_bytes() for p in (tmp_path / "b").iterdir())
    found = lora.import_peft(tmp_path / "a", other)
    assert (found.rank, found.scale, found.dropout, found.dora) == (3, config.scale, 0.25, config.dora)
    assert found.modules == config.modules
    assert torch.equal(model(IDS), other(IDS))


def exported(folder: Path, **changes: Any) -> Path:
    config = AdapterConfig(rank=3, alpha=6.0)
    lora.export_peft(folder, adapted("lora"), config, base_name="models/tools")
    values = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(values | changes))
    return folder


def test_a_rank_beyond_the_files_is_refused_before_it_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = exported(tmp_path, r=10**9)
    monkeypatch.setattr(lora, "attach", lambda *_: pytest.fail("an adapter was built"))
    with pytest.raises(
        ModelError, match=r"lora_A\.weight has shape \[3, \d+\], expected \[1000000000, \d+\]: the rank"
    ):
        lora.import_peft(folder, fresh())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peft_type", "IA3"),
        ("task_type", "SEQ_CLS"),
        ("bias", "all"),
        ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"q_proj": 8}),
        ("alpha_pattern", {"q_proj": 8}),
        ("layers_to_transform", [0]),
        ("lora_bias", True),
        ("init_lora_weights", "pissa"),
        ("fan_in_fan_out", True),
        ("a_key_of_tomorrow", 1),
    ],
)
def test_what_is_not_supported_is_refused_by_name(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"adapter_config.json: {key} = .* is not supported here; expected"):
        lora.import_peft(exported(tmp_path, **{key: value}), fresh())


def test_an_adapter_directory_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    for targets in ("model.*q_proj", ["q_proj", "embed_tokens"], [7]):
        with pytest.raises(ModelError, match=r"adapter_config.json: .*targets: expected names from q_proj"):
            lora.import_peft(exported(tmp_path / "c", target_modules=targets), fresh())
    folder = exported(tmp_path / "d", target_modules=["model.layers.0.self_attn.q_proj"])  # one layer, as peft names it
    kept = {
        key: tensor
        for key, tensor in load_file(folder / "adapter_model.safetensors").items()
        if "0.self_attn.q_" in key
    }
    save_file(kept, folder / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=r"found 2 missing \(model.layers.1.self_attn.q_proj.lora_A.weight"):
        lora.import_peft(folder, fresh())
    folder = exported(tmp_path / "a")
    state = load_file(folder / "adapter_model.safetensors")
    state.pop("base_model.model.model.layers.1.self_attn.o_proj.lora_B.weight")
    save_file(state, folder / "adapter_model.safetensors")
    model = fresh()
    with pytest.raises(ModelError, match=r"found 1 missing \(model.layers.1.self_attn.o_proj.lora_B.weight\)"):
        lora.import_peft(folder, model)
    assert not lora.adapters(model) and model.state_dict().keys() == fresh().state_dict().keys()
    (folder / "adapter_model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(ModelError, match="damaged"):
        lora.import_peft(folder, fresh())
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"a .bin adapter must be converted first"):
        lora.import_peft(folder, fresh())
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"expected the JSON of a LoRA adapter .*'r'"):
        lora.import_peft(folder, fresh())
    with pytest.raises(ModelError, match="is not an adapter directory"):
        lora.import_peft(tmp_path / "b", fresh())


def golden_cases() -> list[dict[str, Any]]:
    return json.loads(GOLDEN.read_text())["cases"]


@pytest.mark.parametrize("case", golden_cases(), ids=lambda case: case["name"])
def test_one_layer_gives_the_numbers_of_peft(case: dict[str, Any]) -> None:
    given = {name: torch.tensor(values) for name, values in case["inputs"].items()}
    expected: dict[str, Tensor] = {name: torch.tensor(values) for name, values in case["expected"].items()}
    base = Linear(given["weight"].shape[1], given["weight"].shape[0], bias=True)
    with torch.no_grad():
        base.weight.copy_(given["weight"])
        base.bias.copy_(given["bias"])
    base.requires_grad_(False)
    config = AdapterConfig(rank=case["r"], alpha=case["lora_alpha"], rslora=case["use_rslora"], dora=case["use_dora"])
    layer = AdaptedLinear(base, config, seeded(0))
    for name, parameter in layer.named_parameters():
        if name in given and name.startswith("lora_"):
            assert "magnitude" not in name or not torch.equal(parameter, given[name])
            parameter.data.copy_(given[name])
    out = layer(given["x"])
    torch.testing.assert_close(out, expected["forward"], rtol=0, atol=1e-5)
    (out * given["upstream"]).sum().backward()
    for name, parameter in layer.named_parameters():
        if name.startswith("lora_"):
            torch.testing.assert_close(parameter.grad, expected[f"grad.{name}"], rtol=0, atol=1e-5)
    torch.testing.assert_close(layer.folded(), expected["merged"], rtol=0, atol=4e-6 if config.dora else 1e-6)


@torch.no_grad()
def test_the_merge_gate_counts_in_the_size_of_the_logits() -> None:
    """A sharp model's logits are large, and float32's rounding grows with them."""
    model = stirred(adapted("lora"))
    model.model.norm.weight.mul_(1e4)
    largest = float(model(IDS).abs().max())
    difference = lora.merged_with_gate(model, IDS)
    assert 1e-4 < difference < 1e-5 * largest


@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "v_proj")])
def test_gradients_of_the_folded_matrix_are_those_of_three_products(targets: tuple[str, ...]) -> None:
    """W + k B A as one matrix in float32 gives the outputs, dA and dB of the formula with separate thin products."""
    generator = torch.Generator().manual_seed(0)
    model = Transformer(CONFIGS[0], generator)
    lora.attach(model, AdapterConfig(rank=4, alpha=8.0, targets=targets), generator)
    layers = [layer for layer in lora.adapters(model) if isinstance(layer, AdaptedLinear)]
    with torch.no_grad():
        for layer in layers:
            layer.lora_B.weight.normal_(0.0, 0.1, generator=generator)
    for layer in layers:
        x = torch.randn(300, layer.weight.shape[1], generator=generator)
        above = torch.randn(300, layer.weight.shape[0], generator=generator)
        thin = [layer.lora_A.weight, layer.lora_B.weight]
        assert layer.plain
        folded = torch.autograd.grad(torch.nn.functional.linear(x, layer.matrix), thin, above)
        for found, expected in zip(folded, torch.autograd.grad(layer(x), thin, above), strict=True):
            assert (found - expected).norm() <= 1e-6 * expected.norm()


def test_an_adapter_trains_in_bf16_as_it_does_in_float32_and_no_worse_than_three_products() -> None:
    generator = torch.Generator().manual_seed(0)
    model = Transformer(CONFIGS[0], generator)
    lora.attach(model, AdapterConfig(rank=4, alpha=8.0, targets=("all-linear",)), generator)
    for layer in lora.adapters(model):
        if isinstance(layer, AdaptedLinear):
            torch.nn.init.normal_(layer.lora_B.weight, std=0.1, generator=generator)
    ids = torch.randint(0, CONFIGS[0].vocab_size, (3, 60), generator=generator)
    weights = torch.randn(3, 60, CONFIGS[0].width, generator=generator, dtype=torch.float64)

    def gradients(model: Transformer, half_precision: bool) -> list[Tensor]:
        parameters = [p for p in model.parameters() if p.requires_grad]
        with torch.autocast("cpu", torch.bfloat16, enabled=half_precision):
            hidden = model.hidden(ids)
        return [x.double() for x in torch.autograd.grad((hidden.double() * weights).sum(), parameters)]

    folded = gradients(model, True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AdaptedLinear, "plain", False)
        apart = gradients(model, True)
    exact = gradients(model.double(), False)
    errors = [
        [float((x - y).norm() / y.norm()) for x, y in zip(found, exact, strict=True)] for found in (folded, apart)
    ]
    assert max(errors[0]) <= 0.03
    assert sum(errors[0]) <= 1.1 * sum(errors[1])
