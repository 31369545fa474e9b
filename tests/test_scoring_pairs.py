"""Log-probabilities of whole answers from logits, against trl's numbers and against one answer at a time."""

from types import SimpleNamespace

import pytest
import torch

from pipeline.batches.batch import Answered, Piece, answered
from pipeline.learning import pair_losses
from pipeline.learning.pair_losses import PairLoss, dpo, pair_logprobs, pairs_of
from pipeline.model.transformer import Transformer
from tests.goldens import Given, assert_near, cases, numbers, objective, rows_of, tensors


def test_dpo_from_logits_is_trl_s_with_all_its_metrics() -> None:
    case = cases("dpo")["logits"]
    given = tensors(case["inputs"], torch.float32)
    ids = torch.cat([given["chosen_ids"], given["rejected_ids"]])
    batch = rows_of(ids, torch.cat([given["chosen_mask"], given["rejected_mask"]]))
    policy, reference = (
        pair_logprobs(Given(torch.cat([given[f"{who}_chosen_logits"], given[f"{who}_rejected_logits"]])), batch)
        for who in ("policy", "reference")
    )
    loss = dpo(policy, reference, PairLoss(beta=case["inputs"]["beta"]))
    assert_near(objective(loss, {"pairs": 2}), case["expected"]["loss"], torch.float32)
    shown = numbers(loss, {"pairs": 2})
    assert len(case["expected"]) == 11
    for metric in case["expected"]:
        assert_near(shown[metric], case["expected"][metric], torch.float32)


def piece(prompt: list[int], answer: list[int]) -> Piece:
    ids = torch.tensor(prompt + answer).numpy()
    return Piece(ids, (torch.arange(len(ids)) >= len(prompt)).numpy())


CHOSEN = [piece([5, 6, 7], [8, 9]), piece([5, 6], [3, 3, 3, 3, 2])]
REJECTED = [piece([5, 6, 7], [1]), piece([5, 6], [4, 2])]


def rows(*pieces: Piece) -> Answered:
    return answered(list(pieces), pad=0)


@torch.no_grad()
def test_sums_are_those_of_each_answer_alone(tiny_model: Transformer) -> None:
    """Padding and neighbors do not matter; chosen answers come first."""
    pairs = pair_logprobs(tiny_model, rows(*CHOSEN, *REJECTED))
    assert pairs.num_chosen.tolist() == [2, 5]
    assert pairs.num_rejected.tolist() == [1, 2]
    for sums, pieces in ((pairs.chosen, CHOSEN), (pairs.rejected, REJECTED)):
        for found, one in zip(sums, pieces, strict=True):
            ids = torch.from_numpy(one.ids)
            logprobs = tiny_model(ids[None])[0].log_softmax(-1)
            first = int((~torch.as_tensor(one.trained)).sum())
            slowly = sum(float(logprobs[t - 1, ids[t]]) for t in range(first, len(ids)))
            assert found.item() == pytest.approx(slowly, abs=1e-4)


def test_precomputed_sums_make_the_pairs_of_the_model_that_gave_them(tiny_model: Transformer) -> None:
    batch = rows(*CHOSEN, *REJECTED)
    direct = pair_logprobs(tiny_model, batch)
    kept = pairs_of(torch.cat([direct.chosen, direct.rejected]).detach(), batch.targets >= 0)
    for name in ("chosen", "rejected", "num_chosen", "num_rejected"):
        assert torch.equal(getattr(kept, name), getattr(direct, name))
    assert kept.metrics == {}
    assert set(direct.metrics) == {"logits/chosen", "logits/rejected", "entropy", "mean_token_accuracy"}


def test_reference_sums_stand_in_the_order_of_the_pairs(tiny_model: Transformer) -> None:
    class Splits:
        """Two splits whose batches hold one pair each."""

        train, val = SimpleNamespace(pairs=[0, 1]), SimpleNamespace(pairs=[1])

        def batches(self, name: str) -> list[Answered]:
            order = [0, 1] if name == "train" else [1]
            return [Batch(*rows(CHOSEN[n], REJECTED[n])) for n in order]

    class Batch(Answered):
        def to(self, where: torch.device) -> Answered:
            return self

    found = pair_losses.reference_sums(tiny_model, Splits(), torch.device("cpu"))  # type: ignore[arg-type]
    whole = pair_logprobs(tiny_model, rows(*CHOSEN, *REJECTED))
    expected = torch.stack([whole.chosen, whole.rejected], 1)
    torch.testing.assert_close(torch.from_numpy(found["train"]), expected.detach(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.from_numpy(found["val"]), expected[1:].detach(), atol=1e-4, rtol=1e-4)
