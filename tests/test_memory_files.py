"""A memory's files: they give back what was saved and refuse what does not belong to them. Banks in few bits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.memory import files
from pipeline.memory.config import MemoryConfig
from pipeline.memory.files import QuantisedBank, WiderConfig, dequantize, quantize, quantized
from pipeline.memory.model import Bank, Memory
from pipeline.model import checkpoint
from pipeline.model.transformer import Transformer
from pipeline.run.errors import ModelError
from pipeline.text.tokenizer import Tokenizer
from tests.memory_models import NANO, memory, opened, tokens


def kept(
    model: Transformer, tokenizer: Tokenizer, folder: Path, config: MemoryConfig | WiderConfig, **how: Any
) -> Transformer:
    """Attach something nonzero beside the model, and save both under `folder`."""
    beside = files.attach(model, config, torch.Generator().manual_seed(7))
    for parameter in beside.parameters():
        parameter.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(8))
    for center in beside.centers() if isinstance(beside, Memory) else ():
        center.normal_(0, 0.1, generator=torch.Generator().manual_seed(9))
    checkpoint.save(folder, model, tokenizer, {}, **how)
    return model.train(False)


def ids_of(model: Transformer) -> Tensor:
    return tokens(2, 40) % model.config.vocab_size


@pytest.mark.parametrize(
    "config",
    [
        memory(),
        memory(share="each", layers="all", storage="reduced", bank_rank=16, centered=True),
        memory(rank=4, storage="factorized", bank_rank=8),
        WiderConfig(width=24, layers=(0, 1)),
    ],
)
def test_what_is_saved_is_loaded(
    tiny_model: Transformer, byte_tokenizer: Tokenizer, tmp_path: Path, config: Any
) -> None:
    model = kept(tiny_model, byte_tokenizer, tmp_path / "m", config)
    found, _ = checkpoint.load(tmp_path / "m")
    assert torch.equal(found.train(False)(ids_of(model)), model(ids_of(model)))
    assert all(parameter.requires_grad for parameter in found.parameters())
    told = json.loads((tmp_path / "m/config.json").read_text())
    assert told["model_type"] == "stagecoach_memory" and told["base_model_type"] == "qwen3"
    assert not any(name.startswith("memory.") for name in load_file(tmp_path / "m/model.safetensors"))


def test_a_base_that_is_rounded_when_saved_is_known_again(
    tiny_model: Transformer, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    kept(tiny_model, byte_tokenizer, tmp_path / "m", memory(), precision="bf16")
    checkpoint.load(tmp_path / "m")


def test_a_memory_on_another_base_is_refused(
    tiny_model: Transformer, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    kept(tiny_model, byte_tokenizer, tmp_path / "m", memory())
    weights = load_file(tmp_path / "m/model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] + 1e-3
    save_file(weights, tmp_path / "m/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="trained on another base"):
        checkpoint.load(tmp_path / "m")


def test_files_that_are_not_whole_are_refused(
    tiny_model: Transformer, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    kept(tiny_model, byte_tokenizer, tmp_path / "m", memory())
    told = (tmp_path / "m/memory.json").read_text()
    weights = load_file(tmp_path / "m/memory.safetensors")
    for change, complaint in (
        (lambda: (tmp_path / "m/memory.json").unlink(), r"memory\.json is missing"),
        (lambda: (tmp_path / "m/memory.json").write_text("{"), "not JSON"),
        (lambda: (tmp_path / "m/memory.json").write_text("{}"), "expected the keys kind, config, base and bits"),
        (
            lambda: (tmp_path / "m/memory.json").write_text(told.replace('"rows": 48', '"rows": 50')),
            "expected a multiple",
        ),
        (lambda: (tmp_path / "m/memory.json").write_text(told.replace('"rows": 48', '"rows": 96')), "do not match"),
        (lambda: (tmp_path / "m/memory.safetensors").write_bytes(b"nothing"), "missing or damaged"),
        (lambda: (tmp_path / "m/memory.safetensors").unlink(), "missing or damaged"),
        (lambda: save_file(dict(list(weights.items())[1:]), tmp_path / "m/memory.safetensors"), "do not match"),
    ):
        change()
        with pytest.raises(ModelError, match=complaint):
            checkpoint.load(tmp_path / "m")
        (tmp_path / "m/memory.json").write_text(told)
        save_file(weights, tmp_path / "m/memory.safetensors")
    checkpoint.load(tmp_path / "m")


# -- banks in few bits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "most"), [(8, 127), (4, 7)])
def test_rows_in_few_bits_are_off_by_half_a_step_at_most(bits: int, most: int) -> None:
    rows = torch.randn(64, 10, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, 64)[:, None]
    rows[5] = 0
    numbers, scales = quantize(rows, bits)
    torch.testing.assert_close(scales[:, 0], rows.abs().amax(1) / most)
    found = dequantize(numbers, scales, bits)
    assert ((found - rows).abs() <= scales / 2 * (1 + 1e-5)).all() and not found[5].any()
    assert numbers.element_size() * numbers.shape[1] * 8 == bits * 10
    assert (found.abs().amax(1) <= rows.abs().amax(1) * (1 + 1e-5)).all()


def test_numbers_by_hand() -> None:
    """max 12.7 gives s = 0.1: -12.7, 0.04, 0.06, 3.14 are -127, 0, 1, 31; in 4 bits of max 7, s = 1."""
    numbers, scales = quantize(torch.tensor([[-12.7, 0.04, 0.06, 3.14]]), 8)
    assert numbers.tolist() == [[-127, 0, 1, 31]] and scales.item() == pytest.approx(0.1)
    packed, scales = quantize(torch.tensor([[-7.0, 7.0, 0.4, -2.6]]), 4)
    assert packed.tolist() == [[1 | 15 << 4, 8 | 5 << 4]] and scales.item() == 1.0
    assert dequantize(packed, scales, 4).tolist() == [[-7.0, 7.0, 0.0, -3.0]]


@pytest.mark.parametrize("storage", [{"storage": "full"}, {"storage": "factorized", "bank_rank": 16}])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_bank_in_few_bits_reads_and_keeps(
    storage: dict[str, Any], bits: int, tiny_model: Transformer, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = kept(tiny_model, byte_tokenizer, tmp_path / "m", memory(**storage))
    assert isinstance(model.hook, Memory)
    whole = model(ids_of(model))
    (bank,) = model.hook.bank
    assert isinstance(bank, Bank)
    which = torch.tensor([[3, 0], [7, 7]])
    quantized(model.hook, bits)
    (narrow,) = model.hook.bank
    assert isinstance(narrow, QuantisedBank) and not any("rows" in name for name, _ in model.named_parameters())
    rows = dequantize(*quantize(bank.rows.detach(), bits), bits)
    expected = rows if bank.factor is None else rows @ bank.factor.T
    torch.testing.assert_close(narrow(which), expected[which])
    torch.testing.assert_close(narrow(), expected)
    found = model(ids_of(model))
    assert 0 < (found - whole).abs().max() < (0.05 if bits == 8 else 0.5)
    checkpoint.save(tmp_path / "q", model, byte_tokenizer, {})
    again, _ = checkpoint.load(tmp_path / "q")
    assert torch.equal(again.train(False)(ids_of(model)), found)


def test_what_cannot_be_put_into_few_bits_is_refused() -> None:
    model = opened(memory(storage="reduced", bank_rank=16))
    assert isinstance(model.hook, Memory)
    with pytest.raises(ValueError, match="expected 8 or 4 bits, got 3"):
        quantized(model.hook, 3)
    odd = Bank(memory(storage="factorized", bank_rank=15), 32)
    with pytest.raises(ValueError, match="rows of even length, got 15"):
        QuantisedBank(odd, 4)


# -- what it is compared with -----------------------------------------------------------------------------------------


def test_the_wider_model_has_as_many_weights() -> None:
    shape = memory(rows=1024, chapters=15, top_k=4)
    target = Memory(shape, NANO).num_parameters()
    config = WiderConfig.like(shape, target, NANO)
    model = Transformer(NANO, torch.Generator().manual_seed(0))
    beside = files.attach(model, config, torch.Generator().manual_seed(1))
    assert abs(beside.num_parameters() / target - 1) < 0.01 and config.layers == (4, 5)
    ids = tokens(1, 9)
    plain = Transformer(NANO, torch.Generator().manual_seed(0))
    assert torch.equal(model(ids), plain(ids))  # its output projection is zero
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        f"memory.{name}" for name, _ in beside.named_parameters()
    }
    for wrong, complaint in (
        ({"width": 0, "layers": (0,)}, "expected at least 1"),
        ({"width": 3, "layers": (6,)}, "from 0 to 5"),
    ):
        with pytest.raises(ValueError, match=complaint):
            files.attach(Transformer(NANO), WiderConfig(**wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 10**9 * 48}, r"memory\.safetensors: its tensors do not match memory\.json \(bank\.0\.rows: expected"),
        ({"rows": 10**24 * 48}, r"memory\.json: invalid sizes"),
        ({"rank": 10**9}, r"its tensors do not match"),
    ],
)
def test_a_shape_larger_than_the_file_is_refused_before_a_memory_is_built(
    tiny_model: Transformer,
    byte_tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    message: str,
) -> None:
    kept(tiny_model, byte_tokenizer, tmp_path / "m", memory())
    path = tmp_path / "m/memory.json"
    told = json.loads(path.read_text())
    told["config"] |= changes
    path.write_text(json.dumps(told))
    monkeypatch.setattr(files, "attach", lambda *_: pytest.fail("a memory was built"))
    with pytest.raises(ModelError, match=message):
        checkpoint.load(tmp_path / "m")
