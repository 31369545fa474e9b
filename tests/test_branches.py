"""Rows that begin alike: computed once as far as they do, with the results and gradients of rows computed alone."""

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.model import attention, kernels
from pipeline.model.attention import LEAST_SHARED, Branches, Line, begin_alike
from pipeline.model.config import ModelConfig
from pipeline.model.transformer import Transformer

CONFIG = ModelConfig(
    vocab_size=128, width=48, layers=3, heads=6, kv_heads=2, head_dim=16, d_ff=80, max_context=1280, rope_theta=1e4, tied=True
)  # fmt: skip
LENGTHS, COMMON = (90, 70, 200, 33, 91, 40), {2: (0, 60), 4: (0, 90), 5: (1, 39)}  # row: (of which row, how many)


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


def test_which_rows_begin_alike() -> None:
    ids, _ = branching()
    rows = [ids[row, :length].numpy() for row, length in enumerate(LENGTHS)]
    assert begin_alike(rows) == ([0, 0, 0, 0, 0, 1], [0, 0, 60, 0, 90, 39])


def test_a_child_is_nobodys_parent_and_few_tokens_do_not_count() -> None:
    first = np.arange(50)
    second = np.concatenate([first[:30], first[:20] + 90])
    third = np.concatenate([second[:40], first[:5]])  # agrees with `second` in 40 tokens, but that one is not whole
    short = np.concatenate([first[: LEAST_SHARED - 1], [99, 99]])
    assert begin_alike([first, second, third, short]) == ([0, 0, 0, 0], [0, 30, 30, 0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_results_and_gradients_are_those_of_rows_computed_alone(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, documents = branching()
    select = (documents >= 0) & (torch.arange(ids.shape[1]) % 3 > 0)
    weight = torch.randn(int(select.sum()), CONFIG.vocab_size, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = []
    for least in (LEAST_SHARED, 10_000):
        monkeypatch.setattr(attention, "LEAST_SHARED", least)
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
    assert len(line.positions) == sum(LENGTHS) - 60 - 90 - 39
    assert line.positions[-1] == 39
    assert line.kept is not None and len(line.kept) == sum(LENGTHS)


def test_dropout_and_both_directions_and_packed_rows_share_nothing() -> None:
    ids, documents = branching()
    assert not isinstance(Line.of(documents, False, ids).layout, Branches)
    two = documents.clone()
    two[:, :20] += 100  # two documents a row
    assert not isinstance(Line.of(two, True, ids).layout, Branches)
    model = made()
    model.dropout = 0.5
    _, line = model._encode(ids, None, documents, None)
    assert line is not None and not isinstance(line.layout, Branches)
    model.eval()
    _, line = model._encode(ids, None, documents, None)
    assert line is not None and isinstance(line.layout, Branches)


def test_ragged_attention_with_keys_before_the_queries() -> None:
    """The last queries of a document against all of it are the last rows of the whole."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(200, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    whole = kernels.ragged_attention(q, k, v, [120, 80], causal=True)
    late = torch.cat([q[50:120], q[197:]])
    found = kernels.ragged_attention(late, k, v, [70, 3], causal=True, before=[50, 77])
    torch.testing.assert_close(found, torch.cat([whole[50:120], whole[197:]]), rtol=1e-10, atol=1e-12)
    kernels_of = lambda a, b, c: kernels.ragged_attention(a, b, c, [2, 1], causal=True, before=[1, 2])  # noqa: E731
    small = [torch.randn(n, h, 2, generator=generator, dtype=torch.float64, requires_grad=True) for n, h in ((3, 2), (6, 1), (6, 1))]  # fmt: skip
    assert torch.autograd.gradcheck(kernels_of, small)
