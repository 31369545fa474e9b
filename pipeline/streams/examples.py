"""Programming problems with their answers on a canvas, for the fine-tuning of masked-diffusion models.

    data/problems/{train,val}.jsonl  --chat.render-->  prompt | answer, end of turn, fill ... up to the canvas

A diffusion model writes on a canvas whose length is given, so it must learn to stop: behind the answer and its end the canvas
is filled, and the filling is noised and predicted like the rest (LLaDA, arXiv:2502.09992, appendix B.1). How long a canvas is
hangs on the example and the pass, never on its neighbours. The prompt stays clean. The causal control reads the same examples
in the same order, without the filling.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from pipeline.device import stable_hash
from pipeline.errors import DataError
from pipeline.model.denoiser import Traits
from pipeline.streams import masking, records
from pipeline.streams.batch import PADDING, Piece, TokenBatch, answered
from pipeline.streams.noised import Noise, NoisedBatch, Row, evaluated_row, laid_out, masking_fingerprint, noised_row
from pipeline.streams.records import Problem
from pipeline.text import chat
from pipeline.text.tokenizer import Tokenizer

UNIT = 32  # tokens by which canvases grow
MOST_DROPPED = 0.1
EVALUATION_ROWS = 32
NORMS = ("answer", "tokens", "batch")


@dataclass(frozen=True)
class Example:
    """A problem as ids."""

    id: str
    prompt: list[int]
    answer: list[int]  # its end of turn included


class ExampleSplit:
    """One split, encoded, in memory."""

    def __init__(self, path: Path, tokenizer: Tokenizer, traits: Traits, *, max_prompt: int, max_new: int) -> None:
        """Raises DataError for a missing file, text that holds the mask, or more than a tenth left out as too long."""
        if not path.is_file():
            raise DataError(f"{path}: expected programming problems here, found none; run dvc repro stage_tasks")
        self.examples: list[Example] = []
        self.dropped = 0
        problems = [problem for problem in records.read(path, Problem) if problem.answer is not None]
        for problem in problems:
            example = encoded(problem, tokenizer)
            if traits.mask in (*example.prompt, *example.answer):
                raise DataError(f"{path}: problem {problem.id} holds the mask token, which no text may; take it out")
            if len(example.prompt) > max_prompt or len(example.answer) > max_new // UNIT * UNIT:
                self.dropped += 1
            else:
                self.examples.append(example)
        if not self.examples or self.dropped > MOST_DROPPED * len(problems):
            raise DataError(
                f"{path}: {self.dropped} of {len(problems)} problems with an answer do not fit; at most a tenth may be left "
                f"out. Raise max_prompt ({max_prompt}) and max_new_tokens ({max_new}), or mend the file"
            )

    def digest(self) -> str:
        """A hash of every id, in order."""
        told = json.dumps([[example.id, example.prompt, example.answer] for example in self.examples])
        return hashlib.sha256(told.encode()).hexdigest()


def encoded(problem: Problem, tokenizer: Tokenizer) -> Example:
    """Prompt and answer of a problem that has one. Raises DataError for an empty answer."""
    if not (problem.answer or "").strip():
        raise DataError(f"problem {problem.id}: its answer is empty; mend it, or leave `answer` out")
    asked = [{"role": "user", "content": problem.question}]
    prompt = chat.render(tokenizer, asked, generation_prompt=True).ids
    whole = chat.render(tokenizer, [*asked, {"role": "assistant", "content": problem.answer}])
    end = int(np.flatnonzero(np.array(whole.trained))[-1]) + 1
    return Example(problem.id, prompt, whole.ids[len(prompt) : end])


class ExampleStream:
    """Examples on canvases under masks: a `protocols.Stream`."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, traits: Traits, noise: Noise, *, rows: int, max_prompt: int,
                 max_new: int, norm: str, seed: int) -> None:  # fmt: skip
        """`norm` is what a row's loss is divided by: its canvas (answer), all canvases (tokens), nothing (batch)."""
        self.train, self.val = (
            ExampleSplit(folder / f"{split}.jsonl", tokenizer, traits, max_prompt=max_prompt, max_new=max_new)
            for split in ("train", "val")
        )
        self._traits, self._noise, self._rows, self._max_new = traits, noise, rows, max_new
        self._norm, self._seed = norm, seed
        identity = [self.train.digest(), self.val.digest(), rows, max_prompt, max_new, norm, seed]
        data = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
        self.fingerprint = masking_fingerprint(data, noise)
        self.tokens_per_epoch = len(self.train.examples) * (max_prompt + max_new)
        self._order: tuple[int, np.ndarray] = (-1, np.arange(0))

    def rows(self, step: int, context: int) -> np.ndarray:
        """Places of the step's rows in the endless sequence of passes, (rows,)."""
        return np.arange(step * self._rows, (step + 1) * self._rows)

    def chosen(self, rows: Sequence[int] | np.ndarray) -> list[tuple[Example, int]]:
        """The example at each place, and the pass that it is read in."""
        count = len(self.train.examples)
        return [(self.train.examples[self._at(int(row) // count)[int(row) % count]], int(row) // count) for row in rows]

    def _at(self, turn: int) -> np.ndarray:
        if self._order[0] != turn:
            draws = np.random.default_rng(stable_hash("examples", self._seed, turn) % 2**63)
            self._order = (turn, draws.permutation(len(self.train.examples)))
        return self._order[1]

    def batch(self, step: int, context: int, rows: np.ndarray) -> NoisedBatch:
        """Those rows under their masks."""
        times = masking.times(self._seed, step, self._rows, shared=self._noise.t_scope == "batch", stream="sft")
        given, drawn = [], []
        for row, (example, turn) in zip(rows, self.chosen(rows), strict=True):
            key = masking.key(self._seed, "canvas", example.id, turn)
            canvas = masking.canvas(key, len(example.answer) - 1, self._max_new, UNIT)
            one = self._row(example, canvas, masking.key(self._seed, "sft", example.id, turn))
            given.append((example, canvas, one))
            drawn.append(noised_row(one, float(times[int(row) - step * self._rows]), self._noise))
        return self._batch(given, drawn)

    def evaluation(self, tokens: int) -> Iterator[NoisedBatch]:
        """The val split in its order on its shortest canvases, the k form, until `tokens` of them have been given."""
        given = 0
        for first in range(0, len(self.val.examples), EVALUATION_ROWS):
            if given >= tokens:
                return
            examples = self.val.examples[first : first + EVALUATION_ROWS]
            rows = []
            for example in examples:
                canvas = UNIT * -(-len(example.answer) // UNIT)
                rows.append((example, canvas, self._row(example, canvas, masking.key(0, "eval", example.id, 0))))
            drawn = [evaluated_row(one, (n + 0.5) / len(rows)) for n, (_, _, one) in enumerate(rows)]
            batch = self._batch(rows, drawn)
            given += batch.counts["tokens"]
            yield batch

    def _row(self, example: Example, canvas: int, key: int) -> Row:
        size = self._noise.block_size
        blocks = np.arange(canvas) // size if size else np.zeros(canvas, dtype=np.int64)
        numbers = masking.uniforms(key, int(blocks[-1]) + canvas)
        return Row(len(example.prompt) + np.arange(canvas), blocks, numbers)

    def _batch(self, rows: list[tuple[Example, int, Row]], drawn: list[tuple[np.ndarray, np.ndarray]]) -> NoisedBatch:
        longest = max(len(example.prompt) + canvas for example, canvas, _ in rows)
        tokens = np.full((len(rows), longest), self._traits.fill, dtype=np.int64)
        documents = np.full((len(rows), longest), PADDING, dtype=np.int32)
        blocks = np.zeros((len(rows), longest), dtype=np.int64)  # the prompt is one block
        for n, (example, canvas, row) in enumerate(rows):
            ids = example.prompt + example.answer
            tokens[n, : len(ids)] = ids
            documents[n, : len(example.prompt) + canvas] = 0
            blocks[n, row.places] = 1 + row.blocks
        positions = np.where(documents == 0, np.arange(longest), 0)
        noised, weights = laid_out(
            torch.from_numpy(tokens), torch.from_numpy(documents), torch.from_numpy(positions), [row for *_, row in rows],
            drawn, blocks if self._noise.block_size else None, None,
        )  # fmt: skip
        if self._norm == "answer":
            lengths = torch.tensor([canvas for _, canvas, _ in rows], dtype=torch.float32)
            weights = weights / lengths.repeat_interleave(noised.masks.sum(1))
        counts = {"tokens": sum(canvas for _, canvas, _ in rows), "rows": len(rows), "positions": int((documents == 0).sum())}  # fmt: skip
        return NoisedBatch(noised, weights, counts)


class PlainExamples:
    """The same examples in the same order for the causal control: a `protocols.Stream` of next tokens."""

    def __init__(self, noised: ExampleStream, tokenizer: Tokenizer) -> None:
        self._noised, self._tokenizer = noised, tokenizer
        self.fingerprint = f"{noised.fingerprint}-next"
        self.tokens_per_epoch = noised.tokens_per_epoch

    def rows(self, step: int, context: int) -> np.ndarray:
        """As the masked stream's."""
        return self._noised.rows(step, context)

    def batch(self, step: int, context: int, rows: np.ndarray) -> TokenBatch:
        """Those examples; the targets are the answers and their ends."""
        return self._batch([example for example, _ in self._noised.chosen(rows)])

    def evaluation(self, tokens: int) -> Iterator[TokenBatch]:
        """The val split in its order, until `tokens` targets have been given."""
        given, examples = 0, self._noised.val.examples
        for first in range(0, len(examples), EVALUATION_ROWS):
            if given >= tokens:
                return
            batch = self._batch(examples[first : first + EVALUATION_ROWS])
            given += batch.num_targets
            yield batch

    def _batch(self, examples: Sequence[Example]) -> TokenBatch:
        pieces = []
        for example in examples:
            ids = np.array(example.prompt + example.answer, dtype=np.int64)
            pieces.append(Piece(ids, np.arange(len(ids)) >= len(example.prompt)))
        rows = answered(pieces, self._tokenizer.pad)
        said = rows.targets[rows.targets >= 0].numpy()
        return TokenBatch(*rows, num_bytes=int(self._tokenizer.byte_lengths[said].sum()))
