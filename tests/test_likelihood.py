"""Bits per byte: exact for models whose answer is known, every token counted once."""

import math
from pathlib import Path

import pytest
import torch

from pipeline.evaluation import likelihood as evaluation_likelihood
from pipeline.evaluation.likelihood import likelihood, token_nats, windows
from pipeline.model.config import ModelConfig
from pipeline.model.transformer import Transformer
from pipeline.run.errors import ModelError
from pipeline.text.tokenizer import Tokenizer

TEXTS = [
    "def add(a, b):\n    return a + b\n",
    "one two three four five six seven eight nine ten " * 6,
    "\N{GRINNING FACE}\N{GRINNING FACE} na\u00efve \u4f60\u597d",
    "x",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    corpus = Path(__file__).read_text(encoding="utf-8")
    return Tokenizer.train(iter([corpus]), 384)


def shape(vocab_size: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab_size,
        width=32,
        layers=2,
        heads=2,
        kv_heads=1,
        head_dim=16,
        d_ff=32,
        max_context=256,
        rope_theta=1e4,
        tied=True,
    )


def sharp(vocab_size: int) -> Transformer:
    model = Transformer(shape(vocab_size), torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.2)
    return model


def test_a_uniform_model_has_log2_v_bits_a_token(tokenizer: Tokenizer) -> None:
    model = Transformer(shape(384))  # zero weights: every logit is 0
    result = likelihood(model, tokenizer, TEXTS, context=16)
    tokens = sum(len(tokenizer.encode(text)) for text in TEXTS)
    num_bytes = sum(len(text.encode()) for text in TEXTS)
    assert result.left_out == 0 and [d.bytes for d in result.documents] == [len(t.encode()) for t in TEXTS]
    assert result.bits_per_byte == pytest.approx(math.log2(384) * tokens / num_bytes, rel=1e-14)
    assert result.perplexity == pytest.approx(384, rel=1e-12)


def test_a_model_without_context_scores_alike_at_any_window(tokenizer: Tokenizer) -> None:
    """Attention and SwiGLU switched off: a token's probabilities depend on the token before it alone."""
    model = sharp(384)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    results = [likelihood(model, tokenizer, TEXTS, context=context) for context in (2, 6, 32, 256)]
    assert results[0].bits_per_byte > 0.5
    for result in results[1:]:
        assert result.bits_per_byte == pytest.approx(results[0].bits_per_byte, rel=1e-6)


def test_scores_equal_one_token_at_a_time(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Window by window as the rule says: the first scores all, later ones advance by half and score their last half."""
    monkeypatch.setattr(evaluation_likelihood, "BATCH_TOKENS", 40)
    model, context, start = sharp(384), 12, 0
    documents = [tokenizer.encode(text) for text in TEXTS]
    assert len(documents[1]) > 5 * context
    got = token_nats(model, documents, start=start, context=context)
    for ids, nats in zip(documents, got):
        read = [start, *ids]
        for place, token in enumerate(ids):
            begin = 0 if place < context else ((place - context) // (context // 2) + 1) * (context // 2)
            with torch.no_grad():
                logits = model(torch.tensor([read[begin : place + 1]]))[0, -1].double()
            assert nats[place] == pytest.approx((logits.logsumexp(0) - logits[token]).item(), abs=1e-5)


def test_in_bf16_only_the_rounding_differs(tokenizer: Tokenizer) -> None:
    model = sharp(384)
    exact = likelihood(model, tokenizer, TEXTS, context=16)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = likelihood(model, tokenizer, TEXTS, context=16)
    assert rounded.bits_per_byte != exact.bits_per_byte
    assert rounded.bits_per_byte == pytest.approx(exact.bits_per_byte, rel=5e-3)
    assert [d.nats for d in rounded.documents] == pytest.approx([d.nats for d in exact.documents], rel=3e-2)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 12, 13, 100])
def test_windows_score_every_token_once(length: int) -> None:
    ids = list(range(1, length + 1))
    scored: list[int] = []
    for window in windows(0, ids, 0, 8):
        assert len(window.ids) == len(window.targets) <= 8
        assert all(target == token + 1 for token, target in zip(window.ids, window.targets))
        assert window.scored in (0, 4)
        scored += window.targets[window.scored :]
    assert scored == ids


def test_the_batch_changes_nothing(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sharp(384)
    together = likelihood(model, tokenizer, TEXTS, context=16)
    alone = [likelihood(model, tokenizer, [text], context=16).documents[0] for text in TEXTS]
    assert [d.nats for d in together.documents] == pytest.approx([d.nats for d in alone], rel=1e-6)
    assert model.training, "the mode is restored"


class Lowering:
    """A tokenizer with a normalizer that lowercases its input."""

    def __init__(self, inner: Tokenizer) -> None:
        self.inner, self.end_of_text, self.token_bytes = inner, inner.end_of_text, inner.token_bytes

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [self.inner.encode(text.lower()) for text in texts]

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        return self.inner.decode(ids)


def test_texts_that_the_tokenizer_changes_are_left_out_and_counted(tokenizer: Tokenizer) -> None:
    result = likelihood(sharp(384), Lowering(tokenizer), ["plain", "Capital", ""], context=8)  # type: ignore[arg-type]
    assert result.left_out == 1 and len(result.documents) == 1


def test_wrong_bytes_of_a_token_are_an_error(tokenizer: Tokenizer) -> None:
    wrong = Lowering(tokenizer)
    wrong.token_bytes = [b"?" for _ in tokenizer.token_bytes]
    with pytest.raises(ModelError, match="bits per byte would be wrong"):
        likelihood(sharp(384), wrong, ["plain"], context=8)  # type: ignore[arg-type]


@pytest.mark.parametrize("context", [1, 7, 258])
def test_a_context_that_does_not_fit_is_refused(tokenizer: Tokenizer, context: int) -> None:
    with pytest.raises(ValueError, match="context"):
        likelihood(sharp(384), tokenizer, TEXTS, context=context)
