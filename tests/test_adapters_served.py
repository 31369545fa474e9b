"""Adapters over one served base: each answers as its merged model does, and the base's weights are in memory once."""

import json
from pathlib import Path

import pytest
import torch

from pipeline.export import inference
from pipeline.model import checkpoint, lora
from pipeline.model.lora import AdapterConfig
from pipeline.model.transformer import Transformer
from pipeline.run.errors import ConfigError, ModelError
from pipeline.serve import models
from pipeline.serve.engine import Engine
from pipeline.text.tokenizer import Tokenizer
from tests.engine import ask, finished, prompt


def adapter(folder: Path, base: Path, seed: int, **values: object) -> Transformer:
    """An adapter with random weights in peft's format; returns the model with it attached."""
    model, _ = checkpoint.load(base)
    config = AdapterConfig(**{"rank": 2, "alpha": 4.0, "targets": (lora.ALL,)} | values)  # type: ignore[arg-type]
    draws = torch.Generator().manual_seed(seed)
    lora.attach(model, config, draws)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3, generator=draws)
    lora.export_peft(folder, model, config, base_name="models/tools")
    return model.eval()


@pytest.fixture
def base(tiny_model: Transformer, byte_tokenizer: Tokenizer, tmp_path: Path) -> Path:
    checkpoint.save(tmp_path / "tools", tiny_model, byte_tokenizer, {})
    return tmp_path / "tools"


@pytest.mark.parametrize("targets", [(lora.ALL,), ("q_proj", "v_proj", "up_proj")])
def test_a_model_beside_its_adapter_has_the_logits_of_the_merged_one(targets: tuple[str, ...], base: Path) -> None:
    adapted = adapter(base.parent / "a", base, 1, targets=targets)
    plain, _ = checkpoint.load(base)
    fused = inference.for_serving(plain.eval(), "native")
    twin = inference.with_adapter(fused, adapted)
    ids = torch.tensor([prompt(1, 40)])
    before = fused(ids)
    with torch.no_grad():
        torch.testing.assert_close(twin(ids), adapted(ids), atol=2e-4, rtol=1e-4)
        assert (twin(ids) - before).abs().max() > 0.1
        assert torch.equal(fused(ids), before)  # the base is unaffected


def test_two_adapters_answer_side_by_side_over_weights_that_lie_in_memory_once(base: Path) -> None:
    merged = {}
    for name, seed in (("sql", 1), ("rust", 2)):
        model = adapter(base.parent / name, base, seed)
        lora.merge(model)
        merged[f"tools:{name}"] = model
    folders = [base.parent / "rust", base, base.parent / "sql"]  # in any order
    served = {one.id: one for one in models.load(folders, rows=2, queue=2, weights="native")}
    assert set(served) == {"tools", "tools:sql", "tools:rust"}
    engines = {name: one.engine for name, one in served.items()}
    assert all(isinstance(engine, Engine) for engine in engines.values())
    heard = {}
    for name, engine in engines.items():
        assert isinstance(engine, Engine)
        heard[name] = ask(engine, prompt(3, 12), top=1)[0]
    for name, engine in engines.items():
        assert isinstance(engine, Engine)
        finished(engine, heard[name])
        table = [block.product.weight for block in engine.model.modules() if isinstance(block, inference.LowRank)]
        assert len(table) == (0 if name == "tools" else 8)
        if table:
            own = {weight.data_ptr() for weight in engines["tools"].model.parameters()}  # type: ignore[union-attr]
            assert {weight.data_ptr() for weight in table} <= own
    for name, model in merged.items():
        with torch.no_grad():
            whole = model(torch.tensor([prompt(3, 12) + heard[name].ids]))[0].log_softmax(-1)
        for place, said in enumerate(heard[name].said):
            assert said.logprob == pytest.approx(float(whole[11 + place, said.token]), abs=1e-3)
    assert heard["tools:sql"].ids != heard["tools:rust"].ids


def test_the_folder_of_stage_lora_is_called_after_its_parent(base: Path) -> None:
    adapter(base.parent / "lora/adapter", base, 1)
    served = models.load([base, base.parent / "lora/adapter"], rows=1, queue=1, weights="native")
    assert [one.id for one in served] == ["tools", "tools:lora"]


def test_what_cannot_be_served_beside_a_base_is_refused_by_name(base: Path) -> None:
    adapter(base.parent / "a", base, 1)
    with pytest.raises(ConfigError, match="'tools', which is not served; served: nothing"):
        models.load([base.parent / "a"], rows=1, queue=1, weights="native")
    adapter(base.parent / "b/a", base, 2)
    with pytest.raises(ConfigError, match="two adapters are called 'tools:a'"):
        models.load([base, base.parent / "a", base.parent / "b/a"], rows=1, queue=1, weights="native")
    adapter(base.parent / "d", base, 1, dora=True)
    with pytest.raises(ConfigError, match="DoRA"):
        models.load([base, base.parent / "d"], rows=1, queue=1, weights="native")
    written = base.parent / "a/adapter_config.json"
    for broken in ("{", "[]", "{}"):
        (base.parent / "broken").mkdir(exist_ok=True)
        (base.parent / "broken/adapter_config.json").write_text(broken)
        with pytest.raises(ModelError, match="expected the JSON of a LoRA adapter"):
            models.load([base, base.parent / "broken"], rows=1, queue=1, weights="native")
    written.write_text(json.dumps(json.loads(written.read_text()) | {"base_model_name_or_path": "other"}))
    with pytest.raises(ConfigError, match="'other', which is not served; served: tools"):
        models.load([base, base.parent / "a"], rows=1, queue=1, weights="native")
