"""Log-probabilities at the trained positions alone equal those of the whole forward pass."""

import torch

from pipeline.learning.scoring import trained_logits
from pipeline.model.transformer import Transformer
from pipeline.streams.batch import TokenBatch

I = -100  # noqa: E741 (nothing is trained here)
BATCH = TokenBatch(
    input_ids=torch.tensor([[7, 8, 9, 7, 4, 5, 6, 0], [9, 9, 8, 1, 2, 3, 3, 2]]),
    targets=torch.tensor([[8, I, 7, I, 5, 6, I, I], [I, I, I, 2, 3, 3, 2, 1]]),
    documents=torch.tensor([[0, 0, 0, 0, 1, 1, 1, -1], [0] * 8], dtype=torch.int32),
    positions=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5, 6, 7]]),
    num_bytes=9,
)


def test_selected_logits_are_those_of_the_trained_positions_row_by_row(tiny_model: Transformer) -> None:
    logits, targets = trained_logits(tiny_model, BATCH)
    assert targets.tolist() == [8, 7, 5, 6, 2, 3, 3, 2, 1]
    assert logits.shape == (9, tiny_model.config.vocab_size)
    whole = tiny_model(BATCH.input_ids, positions=BATCH.positions, documents=BATCH.documents)
    places = [(0, 0), (0, 2), (0, 4), (0, 5), *((1, t) for t in range(3, 8))]
    torch.testing.assert_close(logits, torch.stack([whole[b, t] for b, t in places]), atol=1e-5, rtol=1e-5)


def test_a_document_in_a_packed_row_is_scored_as_if_it_were_alone(tiny_model: Transformer) -> None:
    logits, _ = trained_logits(tiny_model, BATCH)
    alone = tiny_model(BATCH.input_ids[:1, 4:7])
    torch.testing.assert_close(logits[2:4], alone[0, :2], atol=1e-5, rtol=1e-5)


def test_a_batch_without_targets_gives_no_logits(tiny_model: Transformer) -> None:
    import dataclasses

    logits, targets = trained_logits(tiny_model, dataclasses.replace(BATCH, targets=torch.full((2, 8), I)))
    assert logits.shape == (0, tiny_model.config.vocab_size)
    assert targets.shape == (0,)
