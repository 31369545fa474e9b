"""Rows that begin alike: what they share is computed once, with the results and gradients of rows computed alone."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.model import layers as model_layers
from pipeline.model.config import ModelConfig
from pipeline.model.cpu import layers as cpu_layers
from pipeline.model.layers import LEAST_SHARED, Branches, Line, begin_alike
from pipeline.model.transformer import Transformer

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
LENGTHS, COMMON = (90, 70, 200, 33, 91, 40), {2: (0, 60), 4: (0, 90), 5: (1, 39)}  # row: (parent row, how many tokens)


def made() -> Transformer:
    return Transformer(CONFIG, torch.Generator().manual_seed(0)).double()


def branching() -> tuple[Tensor, Tensor]:
    """Ids and documents (6, 200): rows 2 and 4 begin as row 0 does, row 5 is the beginning of row 1."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, CONFIG.vocab_size, (len(LENGTHS), max(LENGTHS)), generator=generator)
    for row, (parent, number) in COMMON.items():
        ids[row, :number] = ids[parent, :number]
        if number < LENGTHS[row] - 1:
            ids[row, number] = (ids[parent, number] + 1) % CONFIG.vocab_size
    ids[5, 39] = ids[1, 39]
    time = torch.arange(max(LENGTHS))
    documents = torch.where(time < torch.tensor(LENGTHS)[:, None], torch.arange(len(LENGTHS))[:, None], -1)
    return ids, documents


def shared(rows: Sequence[np.ndarray]) -> list[int]:
    """How many tokens of each row an earlier row in the line has already; checks their order."""
    found, seen = [0] * len(rows), set()
    for row, other, number in begin_alike(rows):
        assert not number or (other in seen and np.array_equal(rows[row][:number], rows[other][:number]))
        seen.add(row)
        found[row] = number
    assert seen == set(range(len(rows)))
    return found


def test_rows_that_begin_alike_share_each_beginning_once() -> None:
    ids, _ = branching()
    rows = [ids[row, :length].numpy() for row, length in enumerate(LENGTHS)]
    assert sum(shared(rows)) == 60 + 90 + 40  # row 5 is entirely in row 1
    assert shared([]) == [] and shared(rows[:1]) == [0]


def test_answers_share_their_prompt_and_prompts_how_they_begin() -> None:
    """Three prompts of 50 tokens, 30 of them the same, and four answers of 5 to each, in any order."""
    begin = np.arange(30)
    prompts = [np.concatenate([begin, np.arange(20) + 100 * n]) for n in (1, 2, 3)]
    rows = [np.concatenate([prompt, np.full(5, 1000 + n)]) for prompt in prompts for n in range(4)]
    for seed in range(5):
        mixed = [rows[n] for n in np.random.default_rng(seed).permutation(12)]
        assert sum(map(len, mixed)) - sum(shared(mixed)) == 30 + 3 * 20 + 12 * 5


def test_few_tokens_do_not_count_and_a_row_keeps_its_last_token() -> None:
    first = np.arange(50)
    short = np.concatenate([first[: LEAST_SHARED - 1], [99, 99]])
    assert shared([first, short]) == [0, 0]
    assert sorted(shared([first, first, first[:40]])) == [0, 40, 49]
    high = np.arange(300, 350)  # two-byte numbers are ordered as numbers
    assert sorted(shared([high, first, high[:20]])) == [0, 0, 20]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_results_and_gradients_are_those_of_rows_computed_alone(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, documents = branching()
    select = (documents >= 0) & (torch.arange(ids.shape[1]) % 3 > 0)
    weight = torch.randn(int(select.sum()), CONFIG.vocab_size, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = []
    for least in (LEAST_SHARED, 10_000):
        monkeypatch.setattr(model_layers, "LEAST_SHARED", least)
        model = made().to(dtype)
        logits = model(ids, documents=documents, select=select)
        (logits * weight).sum().backward()
        hidden = model.hidden(ids, documents=documents)
        assert not hidden[documents < 0].any()
        found.append(
            [logits, model.logits(hidden[select]), *(p.grad for p in model.parameters() if p.grad is not None)]
        )
    bound = 1e-10 if dtype == torch.float64 else 0.1
    for shared, alone in zip(*found, strict=True):
        assert (shared - alone).abs().max() <= bound * alone.abs().max()


def test_the_line_holds_each_shared_token_once() -> None:
    ids, documents = branching()
    line = Line.of(documents, True, ids)
    assert isinstance(line.layout, Branches)
    assert len(line.positions) == sum(LENGTHS) - 60 - 90 - 40
    assert line.kept is not None and len(line.kept) == sum(LENGTHS)


def test_dropout_and_both_directions_and_packed_rows_share_nothing() -> None:
    ids, documents = branching()
    assert not isinstance(Line.of(documents, False, ids).layout, Branches)
    two = documents.clone()
    two[:, :20] += 100  # two documents per row
    assert not isinstance(Line.of(two, True, ids).layout, Branches)
    model = made()
    model.dropout = 0.5
    _, line, _ = model._encode(ids, None, documents, None)
    assert line is not None and not isinstance(line.layout, Branches)
    model.eval()
    _, line, _ = model._encode(ids, None, documents, None)
    assert line is not None and isinstance(line.layout, Branches)


def test_ragged_attention_with_keys_before_the_queries() -> None:
    """The last queries of a document, against all its keys, give the last rows of the whole."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(200, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    whole = cpu_layers.ragged_attention(q, k, v, [120, 80], causal=True)
    late = torch.cat([q[50:120], q[197:]])
    found = cpu_layers.ragged_attention(late, k, v, [70, 3], causal=True, before=[50, 77])
    torch.testing.assert_close(found, torch.cat([whole[50:120], whole[197:]]), rtol=1e-10, atol=1e-12)
    kernels_of = lambda a, b, c: cpu_layers.ragged_attention(a, b, c, [2, 1], causal=True, before=[1, 2])  # noqa: E731
    small = [
        torch.randn(n, h, 2, generator=generator, dtype=torch.float64, requires_grad=True)
        for n, h in ((3, 2), (6, 1), (6, 1))
    ]
    assert torch.autograd.gradcheck(kernels_of, small)
