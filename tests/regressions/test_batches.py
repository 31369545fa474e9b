"""Bugs in masks, shifts, positions and padding: what a batch says about its tokens."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.batches import pairs
from pipeline.batches.batch import Piece, TokenBatch, answered, token_batch
from pipeline.batches.dialogues import DialogueStream
from pipeline.batches.pairs import Encoded, PairSplit
from pipeline.ingest import records
from pipeline.ingest.records import Dialogue, Pair
from pipeline.learning import losses
from pipeline.model.config import ModelConfig
from pipeline.model.heads import RewardModel
from pipeline.model.layers import Layout
from pipeline.model.transformer import Transformer
from pipeline.rl import answers
from pipeline.run.errors import ModelError
from pipeline.text import chat
from pipeline.text.tokenizer import SPECIAL, Tokenizer
from tests import rollouts
from tests.rollouts import sampled


def piece(tokenizer: Tokenizer, reply: str) -> Piece:
    rendered = chat.render(
        tokenizer, [{"role": "user", "content": "Which way?"}, {"role": "assistant", "content": reply}]
    )
    return Piece(np.array(rendered.ids), np.array(rendered.trained))


def packed(rows: list[list[Piece]], length: int, pad: int, vocabulary: int) -> TokenBatch:
    """Rows of packed pieces."""
    return token_batch(
        rows,
        np.arange(len(rows)),
        packed=length,
        context=length,
        pad=pad,
        byte_lengths=np.ones(vocabulary, dtype=np.int64),
    )


@pytest.mark.parametrize("layout", ["answered", "packed"])
def test_the_end_of_a_turn_is_trained_whatever_token_pads(layout: str, byte_tokenizer: Tokenizer) -> None:
    """Bug museum: pad = EOS (huggingface/trl 1623). Padding was masked by its id, and the end with it, so no
    model learned to stop.
    """
    end, vocabulary = byte_tokenizer.turn_end, byte_tokenizer.vocab_size
    pieces = [piece(byte_tokenizer, "left"), piece(byte_tokenizer, "right, and on to the ferry")]
    for pad in (byte_tokenizer.pad, end):
        rows = answered(pieces, pad) if layout == "answered" else packed([[p] for p in pieces], 96, pad, vocabulary)
        for row, said in zip(rows.targets, ("left", "right, and on to the ferry"), strict=True):
            assert row[row >= 0].tolist() == [*byte_tokenizer.encode(said), end]


def test_a_tokenizer_that_pads_with_the_end_of_a_turn_is_refused(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    """Bug museum: pad = EOS (huggingface/trl 1623). Other programs would mask the end by this id."""
    byte_tokenizer.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    state = json.loads(path.read_text())
    ids = {entry["content"]: entry["id"] for entry in state["added_tokens"]}
    for entry in state["added_tokens"]:
        if entry["content"] == SPECIAL["pad"]:
            entry["id"] = ids[SPECIAL["turn_end"]]
    path.write_text(json.dumps(state))
    with pytest.raises(ModelError, match=r"tokenizer.json: .*pad.* and .*im_end.* have the same id 3"):
        Tokenizer.load(tmp_path)


LENGTHS = (3, 11, 6)


@pytest.fixture
def judged(tiny_model: Transformer) -> RewardModel:
    """A reward model that gives every token a different reward."""
    model = RewardModel(tiny_model)
    with torch.no_grad():
        model.score.weight.normal_(generator=torch.Generator().manual_seed(1))
    return model


@torch.no_grad()
def test_a_reward_is_read_at_the_last_token_of_its_own_row(judged: RewardModel, byte_tokenizer: Tokenizer) -> None:
    """Bug museum: last token by padding side (huggingface/trl 2778). The reward was read in the last
    column, or in the one before the first pad.

    The rows therefore have unequal lengths, and some contain the padding token or end with it.
    """
    pad, draws = byte_tokenizer.pad, np.random.default_rng(0)
    texts = [draws.integers(20, 300, length) for length in LENGTHS * 2]
    texts[1][4] = texts[2][-1] = texts[3][0] = pad
    alone = torch.stack([judged(torch.from_numpy(ids)[None])[0, -1] for ids in texts])
    pieces = [Piece(ids, np.arange(len(ids)) > 0) for ids in texts]
    record = rollouts.prompt(0).record
    assert isinstance(record, Pair)
    batch = pairs.batch_of([Encoded(record, *both) for both in zip(pieces[:3], pieces[3:], strict=True)], pad)
    found = judged(batch.input_ids, positions=batch.positions, documents=batch.documents, select=batch.ends)
    torch.testing.assert_close(found, alone, atol=1e-5, rtol=0)
    given = [rollouts.answer(rollouts.prompt(int(ids[0]), length=1), 0, ids[1:].tolist()) for ids in texts]
    torch.testing.assert_close(answers.raw_rewards(judged, given, pad), alone, atol=1e-5, rtol=0)


@torch.no_grad()
def slow_logprobs(model: Transformer, one: Piece) -> Tensor:
    """The log-probability of each trained token, from a pass over only the tokens before it."""
    trained = np.broadcast_to(one.trained, one.ids.shape)
    ids = torch.from_numpy(one.ids)
    return torch.stack([model(ids[None, :t])[0, -1].log_softmax(-1)[ids[t]] for t in range(1, len(ids)) if trained[t]])


def test_a_token_is_scored_by_what_stands_before_it(tiny_model: Transformer) -> None:
    """Bug museum: double shift (huggingface/trl 44). Logits that had already been shifted were shifted again."""
    draws = np.random.default_rng(0)
    pieces = [Piece(draws.integers(20, 300, length), np.arange(length) >= 2) for length in (5, 9, 3)]
    slow = torch.cat([slow_logprobs(tiny_model, one) for one in pieces])
    for rows in (answered(pieces, 0), packed([pieces[:2], pieces[2:]], 16, 0, 320)):
        found, _ = losses.token_logprobs(tiny_model, rows)
        torch.testing.assert_close(found.detach(), slow, atol=1e-5, rtol=0)


class Placed(Transformer):
    """A model with learned absolute positions besides RoPE, which sees only distances, so that a wrong first position
    shows.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, torch.Generator().manual_seed(0))
        draws = torch.Generator().manual_seed(1)
        self.places = torch.nn.Parameter(torch.randn(config.max_context, config.width, generator=draws))

    def line(
        self, ids: Tensor, positions: Tensor, layout: Layout, read: Any = None, chosen: Tensor | None = None
    ) -> Tensor:
        places = self.places[positions if chosen is None else positions[chosen]]
        return super().line(ids, positions, layout, read, chosen) + places


@pytest.fixture
def placed(tiny_model: Transformer) -> Placed:
    return Placed(tiny_model.config).train(False)


def test_places_are_counted_from_the_start_of_each_text(placed: Placed) -> None:
    """Bug museum: no position ids (CarperAI/trlx 508). Positions were counted from the start of the padded row."""
    draws = np.random.default_rng(0)
    pieces = [Piece(draws.integers(20, 300, length), np.arange(length) >= 2) for length in (5, 9, 3)]
    slow = torch.cat([slow_logprobs(placed, one) for one in pieces])
    for rows in (answered(pieces, 0), packed([pieces[:2], pieces[2:]], 16, 0, 320)):
        found, _ = losses.token_logprobs(placed, rows)
        torch.testing.assert_close(found.detach(), slow, atol=1e-5, rtol=0)


def test_the_sampler_counts_places_as_training_does(placed: Placed, byte_tokenizer: Tokenizer) -> None:
    """Bug museum: no position ids (CarperAI/trlx 508). With unequal prompts in one batch, the ratio was not 1."""
    found = sampled(placed, byte_tokenizer)
    assert len({len(one.prompt.ids) for one in found}) == 3
    forced = answers.logprobs_of(placed, found, byte_tokenizer.pad, 1.0)
    for one, logprobs in zip(found, forced, strict=True):
        np.testing.assert_allclose(logprobs, one.logprobs, atol=1e-4)


CALL = {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": '{"at": "clock"}'}}
TURN = [
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_0", "name": "look", "content": "ten past nine"},
    {"role": "assistant", "content": "It is ten past nine."},
]


def test_what_a_tool_says_is_never_trained(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    """Bug museum: tool tokens trained (volcengine/verl 3960). The whole answer was trained, tool results too."""
    asked = [{"role": "user", "content": "When?"}]
    said = '<tool_call>\n{"name": "look", "arguments": {"at": "clock"}}\n</tool_call>It is ten past nine.'
    pair = Pair(
        id="a",
        source="made",
        kind="tools",
        prompt=asked,
        chosen=TURN,
        rejected=[{"role": "assistant", "content": "Late."}],
    )
    talk = Dialogue(id="a", kind="tools", category="simple", messages=[*asked, *TURN])
    for split in ("train", "val"):
        records.write(tmp_path / "pairs" / f"{split}.jsonl", [pair])
        records.write(tmp_path / "talks" / f"{split}.jsonl", [talk])
    (one,) = PairSplit(tmp_path / "pairs/train.jsonl", byte_tokenizer, 200, 400).pairs
    stream = DialogueStream(tmp_path / "talks", byte_tokenizer, context=256, tokens_per_step=256, seed=1)
    for targets in (
        pairs.batch_of([one], byte_tokenizer.pad).targets[0],
        stream.batch(0, 256, stream.rows(0, 256)).targets,
    ):
        assert byte_tokenizer.decode(targets[targets >= 0].tolist()) == said
