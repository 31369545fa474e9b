"""Bits per byte of documents under a masked-diffusion model: an upper bound, from the k form of its ELBO.

The windows are those of `likelihood.py`: each token is scored once, within at most `context` tokens, after at least half as many that
are clean (all of a shorter document's but the first window's). Tokens after a window are not seen, so the bound is that of writing a
document from the left by windows. What it bounds is the likelihood of random-order decoding (learning/scoring_masked.py).
"""

from collections.abc import Sequence

import numpy as np
import torch

from pipeline.evaluation.likelihood import Likelihood, Scored, Window, windows
from pipeline.learning import scoring_masked
from pipeline.model.denoiser import Denoiser, Noised
from pipeline.streams import masking
from pipeline.streams.batch import PADDING
from pipeline.streams.drawn import Drawn
from pipeline.text.tokenizer import Tokenizer

ROWS = 16  # of a batch


@torch.no_grad()
def bounds(model: Denoiser, tokenizer: Tokenizer, texts: Sequence[str], *, context: int, draws: int) -> Likelihood:
    """Estimated upper bounds of the documents' nats, by `draws` masks of each window. Raises ValueError as `likelihood`."""
    if context < 2 or context % 2 or context > model.config.max_context:
        raise ValueError(f"context: expected an even number from 2 to {model.config.max_context}, found {context}")
    places = [n for n, text in enumerate(texts) if text and tokenizer.decode(tokenizer.encode(text)) == text]
    kept = [texts[place] for place in places]
    encoded = tokenizer.encode_batch(kept)
    cut = [
        window for number, ids in enumerate(encoded) for window in windows(number, ids, tokenizer.end_of_text, context)
    ]
    nats = np.zeros(len(encoded))
    was_training = model.training
    model.train(False)
    for first in range(0, len(cut), ROWS):
        some = cut[first : first + ROWS]
        batch = drawn_windows(
            some, [masking.key(0, "eval", f"document:{first + n}", 0) for n in range(len(some))], draws
        )
        found = scoring_masked.elbo(model, batch.to(next(model.parameters()).device)).cpu().numpy()
        for window, value in zip(some, found, strict=True):
            nats[window.document] -= float(value)
    model.train(was_training)
    scored = [Scored(float(n), len(ids), len(text.encode())) for n, ids, text in zip(nats, encoded, kept, strict=True)]
    return Likelihood(scored, len([text for text in texts if text]) - len(kept), places)


def drawn_windows(some: Sequence[Window], keys: Sequence[int], draws: int) -> Drawn:
    """Windows as rows: what was read before the scored part, which may be masked, stays clean."""
    rows = [[window.ids[0], *window.targets] for window in some]  # ids are shifted by one against targets
    width = max(map(len, rows))
    tokens, documents = (
        np.zeros((len(rows), width), dtype=np.int64),
        np.full((len(rows), width), PADDING, dtype=np.int32),
    )
    masks, scales = np.zeros((draws, len(rows), width), dtype=bool), np.zeros((draws, len(rows)), dtype=np.float32)
    lengths = np.zeros(len(rows), dtype=np.int64)
    for n, (row, window, key) in enumerate(zip(rows, some, keys, strict=True)):
        tokens[n, : len(row)], documents[n, : len(row)] = row, 0
        places = np.arange(1 + window.scored, len(row))
        found = masking.elbo_draws(key, len(places), draws)
        masks[:, n, places], scales[:, n], lengths[n] = found.masks, found.scales, len(places)
    positions = torch.from_numpy(np.where(documents == 0, np.arange(width), 0))
    laid = [
        Noised(torch.from_numpy(tokens), torch.from_numpy(mask), torch.from_numpy(documents), positions)
        for mask in masks
    ]
    return Drawn(laid, torch.from_numpy(scales), torch.from_numpy(lengths), {})
