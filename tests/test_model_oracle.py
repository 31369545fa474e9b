"""The model against transformers: totals, log-probabilities, greedy text, files in both directions."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from pipeline.generation.sampling import Sampling, generate
from pipeline.model import checkpoint
from pipeline.model.config import ModelConfig
from pipeline.model.transformer import Transformer

pytestmark = pytest.mark.oracle
transformers = pytest.importorskip("transformers")

SHAPE = {"vocab_size": 320, "width": 64, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 32, "d_ff": 96}
COMMON = {"max_context": 256, "rope_theta": 50_000.0}
TOTALS = {
    "nano": 7_719_104,
    "tiny": 12_389_120,
    "small": 41_559_552,
    "medium": 137_842_944,
    "large": 1_362_028_096,
    "xlarge": 2_750_061_568,
    "7b": 7_208_219_648,
}  # with a vocabulary of 32,000


def theirs(config: ModelConfig):
    values = config.to_hf()
    return getattr(transformers, values["architectures"][0]), transformers.AutoConfig.for_model(**values)


def written(config: ModelConfig, folder: Path) -> Transformer:
    """A model whose norms and biases are random too, written to `folder`."""
    model = Transformer(config, torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.mul_(2)  # sharper logits than fresh weights give
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    return model


CONFIGS = [
    ModelConfig(**SHAPE, **COMMON, tied=True),
    ModelConfig(**SHAPE, **COMMON, tied=False),
    ModelConfig(**{**SHAPE, "head_dim": 16}, **COMMON, tied=True, bias=True),
    ModelConfig(**{**SHAPE, "head_dim": 16}, **COMMON, tied=False, qk_norm=False),
]


@pytest.mark.parametrize("config", CONFIGS, ids=["qwen3", "qwen3-untied", "qwen2", "llama"])
def test_logprobs_and_greedy_text_equal_transformers(config: ModelConfig, tmp_path: Path) -> None:
    model = written(config, tmp_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, local_files_only=True)
    assert type(reference).__name__ == config.to_hf()["architectures"][0]
    ids = torch.randint(0, config.vocab_size, (2, 100), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        ours = model(ids).log_softmax(-1)
        packed = model(ids, documents=torch.zeros_like(ids)).log_softmax(-1)
        expected = reference(ids).logits.log_softmax(-1)
    assert (ours - expected).abs().max() <= 1e-5
    assert (packed - expected).abs().max() <= 1e-5
    prompt = ids[0, :20].tolist()
    greedy = generate(model, [prompt], Sampling(64), stop=(), seeds=[0])[0].ids
    given = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, 20, dtype=torch.long)}
    answer = reference.generate(**given, max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert greedy == answer[0, 20:].tolist()


@torch.no_grad()
def test_qwen3_gives_the_very_bits_that_transformers_gives(tmp_path: Path) -> None:
    model = written(CONFIGS[0], tmp_path).train(False)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.randint(0, 320, (3, 200), generator=torch.Generator().manual_seed(3))
    assert torch.equal(model(ids), oracle(ids).logits)


@pytest.mark.parametrize("config", CONFIGS, ids=["qwen3", "qwen3-untied", "qwen2", "llama"])
def test_what_transformers_saves_loads_here(config: ModelConfig, tmp_path: Path) -> None:
    build, values = theirs(config)
    torch.manual_seed(0)
    reference = build(values)
    reference.save_pretrained(tmp_path)
    model = checkpoint.load_causal(tmp_path)
    assert model.config == config
    ids = torch.arange(50)[None]
    with torch.no_grad():
        difference = model(ids).log_softmax(-1) - reference.train(False)(ids).logits.log_softmax(-1)
    assert difference.abs().max() <= 1e-5


def test_sharded_directories_load(tmp_path: Path) -> None:
    build, values = theirs(CONFIGS[0])
    reference = build(values)
    reference.save_pretrained(tmp_path, max_shard_size="100KB")
    assert (tmp_path / checkpoint.INDEX).exists()
    state = checkpoint.load_causal(tmp_path).state_dict()
    for name, tensor in reference.state_dict().items():
        assert name == "lm_head.weight" or torch.equal(state[name], tensor)


@pytest.mark.parametrize("size", TOTALS)
def test_totals_equal_transformers_on_the_meta_device(size: str) -> None:
    values = yaml.safe_load((Path(__file__).parents[1] / "conf" / "model" / f"{size}.yaml").read_text())
    config = ModelConfig(**{**values, "vocab_size": 32_000})
    build, hf = theirs(config)
    with torch.device("meta"):
        reference = build(hf)
        ours = Transformer(config)
    assert ours.num_parameters() == config.num_parameters == TOTALS[size]
    assert sum(parameter.numel() for parameter in reference.parameters()) == TOTALS[size]
    assert {n: p.shape for n, p in ours.named_parameters()} == {n: p.shape for n, p in reference.named_parameters()}


def test_training_gradients_equal_transformers(tmp_path: Path) -> None:
    config = CONFIGS[0]
    model = written(config, tmp_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, local_files_only=True)
    ids = torch.randint(0, config.vocab_size, (2, 90), generator=torch.Generator().manual_seed(4))
    model(ids, documents=torch.zeros_like(ids)).log_softmax(-1).square().mean().backward()
    reference(ids).logits.log_softmax(-1).square().mean().backward()
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-3, atol=1e-5)
