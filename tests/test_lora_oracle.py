"""Adapters against peft on transformers' Qwen3 with the same weights: numbers, gradients, files in both directions."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.model import checkpoint, lora
from pipeline.model.config import ModelConfig
from pipeline.model.lora import AdapterConfig
from pipeline.model.transformer import Transformer

pytestmark = pytest.mark.oracle
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

CONFIG = ModelConfig(
    vocab_size=320,
    width=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=32,
    d_ff=96,
    max_context=128,
    rope_theta=50_000.0,
    tied=True,
)
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"targets": ("q_proj", "v_proj")},
    "rslora": {"rslora": True},
    "dora": {"dora": True},
    "all-linear": {"targets": ("all-linear",), "dora": True, "rslora": True},
    "tokens": {"targets": ("all-linear",), "trained_tokens": (2, 9, 300)},
}
TOKENS = ("token_adapter.trainable_tokens_delta", "lora_rows")  # peft's name, ours
IDS = torch.randint(0, 320, (3, 40), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformers directory with larger weights than fresh ones."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.AutoConfig.for_model(**CONFIG.to_hf()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2 if parameter.ndim > 1 else 1)
    model.save_pretrained(folder)
    return folder


def hf(base: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()


def stir(parameters: dict[str, Tensor]) -> None:
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for _, parameter in sorted(parameters.items()):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def theirs(base: Path, kind: str) -> Any:
    """A peft model whose adapter has moved away from zero."""
    options = dict(KINDS[kind])
    targets = options.pop("targets", ("q_proj", "k_proj", "v_proj", "o_proj"))
    config = peft.LoraConfig(
        r=4,
        lora_alpha=12,
        task_type="CAUSAL_LM",
        use_rslora=options.get("rslora", False),
        target_modules="all-linear" if targets == ("all-linear",) else list(targets),
        use_dora=options.get("dora", False),
        trainable_token_indices={"embed_tokens": list(options["trained_tokens"])}
        if "trained_tokens" in options
        else None,
    )
    torch.manual_seed(1)
    model = peft.get_peft_model(hf(base), config)
    stir({name: parameter for name, parameter in model.named_parameters() if "lora_" in name or "delta" in name})
    return model.eval()


def ours(base: Path, kind: str) -> tuple[Transformer, AdapterConfig]:
    model = checkpoint.load_causal(base).train(False)
    config = AdapterConfig(rank=4, alpha=12.0, **KINDS[kind])
    lora.attach(model, config, torch.Generator().manual_seed(1))
    stir(lora.adapter_state(model))
    return model, config


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_of_peft_gives_its_logits_gradients_and_merged_weights(
    kind: str, base: Path, tmp_path: Path
) -> None:
    reference = theirs(base, kind)
    reference.save_pretrained(tmp_path)
    model = checkpoint.load_causal(base).train(False)
    config = lora.import_peft(tmp_path, model)
    assert (config.rank, config.alpha, config.dora) == (4, 12.0, KINDS[kind].get("dora", False))
    logits, expected = model(IDS), reference(IDS).logits
    assert (logits - hf(base)(IDS).logits).abs().max() > 0.1
    assert (logits - expected).abs().max() <= 1e-5
    logits.log_softmax(-1).square().mean().backward()
    expected.log_softmax(-1).square().mean().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    wanted = {
        name.removeprefix("base_model.model.").replace(".default", "").replace(*TOKENS): p.grad
        for name, p in reference.named_parameters()
        if p.requires_grad
    }
    assert found.keys() == wanted.keys() == lora.adapter_state(model).keys()
    assert ("model.embed_tokens.lora_rows" in found) == (kind == "tokens")
    for name, gradient in found.items():
        assert gradient is not None and gradient.abs().max() > 1e-5
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6, msg=name)
    lora.merge(model)
    merged = reference.merge_and_unload().state_dict()
    for name, tensor in model.state_dict().items():
        assert (tensor - merged[name]).abs().max() <= (4e-6 if config.dora else 1e-6), name


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_peft_loads_what_is_exported_and_gives_the_same_outputs(kind: str, base: Path, tmp_path: Path) -> None:
    model, config = ours(base, kind)
    lora.export_peft(tmp_path / "ours", model, config, base_name=str(base))
    reference = peft.PeftModel.from_pretrained(hf(base), tmp_path / "ours").eval()  # a missing key would be a warning
    assert (model(IDS) - reference(IDS).logits).abs().max() <= 1e-5
    reference.save_pretrained(tmp_path / "theirs")
    written, again = (json.loads((tmp_path / who / "adapter_config.json").read_text()) for who in ("ours", "theirs"))
    assert sorted(again.pop("target_modules")) == written.pop("target_modules")
    assert written.items() <= again.items()
    defaults = peft.LoraConfig().to_dict()  # keys that are not written have peft's defaults
    left = {key: again[key] for key in again.keys() - written.keys() - {"peft_version"}}
    assert left == {key: defaults[key] for key in left}
    assert lora.import_peft(tmp_path / "theirs", checkpoint.load_causal(base)).modules == config.modules


def test_dropout_in_training_follows_peft(base: Path) -> None:
    """One layer with the same dropout mask; with DoRA, dropout reaches W x too."""
    layer = hf(base).model.layers[0].self_attn.q_proj
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(6))
    for dora in (False, True):
        adapter = lora.AdaptedLinear(
            layer, AdapterConfig(rank=4, alpha=12.0, dropout=0.3, dora=dora), torch.Generator()
        )
        stir({name: p for name, p in adapter.named_parameters() if name.startswith("lora_")})
        config = peft.LoraConfig(r=4, lora_alpha=12, lora_dropout=0.3, target_modules=["q"], use_dora=dora)
        reference = peft.get_peft_model(torch.nn.ModuleDict({"q": layer}), config).base_model.model["q"]
        for name, parameter in reference.named_parameters():
            if "lora_" in name:
                parameter.data.copy_(adapter.get_parameter(name.replace(".default", "")))
        torch.manual_seed(8)
        found = adapter.train()(x)
        torch.manual_seed(8)
        torch.testing.assert_close(found, reference.train()(x), rtol=0, atol=1e-5)
