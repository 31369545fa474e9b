"""Evaluation of masked-diffusion models: the same problems as for causal models, plus their own curves.

    problems   pass@k of programs written on a canvas, by group                `suites.solved` with a `CanvasSubject`
    code       an upper bound on bits per byte of held-out sources             `documents`
    quality    pass@1 vs. forward passes: tokens per step, thresholds, caches
    order      how autoregressive the decoding is                              `with_orders`
    pairs      the effect of preference learning on held-out pairs             `measure`

Canvases are denoised by threshold, block by block with a cache (`canvas_threshold`, `canvas_block`, `canvas_cache`).
This takes a ninth of the forward passes needed with one token per pass, without a measurable loss on 256 problems
(docs/LOG.md, 2026-11-23); `quality` measures both ways. A completion costs forward passes over prompt and canvas;
`flops_per_answer` counts their operations, so that a model that decodes token by token can be given the same compute
(`suites.solved` gives the control's pass@k).

**Bits per byte** of documents are an upper bound, computed from the k form of the ELBO. The windows are those of
`evaluation/likelihood.py`: each token is scored once, within at most `context` tokens, after at least half as many
clean ones (except in a document's first window). Tokens after a window are not visible, so the bound applies to
generating a document window by window. It bounds the likelihood of random-order decoding (diffusion/training.py).

**Pairs** are measured as in `evaluation/preferences.py`, with estimated likelihoods. The models before and after
training are scored under the same masks (`draws` per answer, spread evenly), so only the model differs.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from pipeline.batches.batch import PADDING
from pipeline.batches.pairs import PairSplit
from pipeline.diffusion import files, training
from pipeline.diffusion import masks as diffusion_masks
from pipeline.diffusion.batches import SIDES, drawn_pairs
from pipeline.diffusion.masks import Drawn
from pipeline.diffusion.model import Denoiser, Noised
from pipeline.diffusion.sampling import CACHES, Denoising, Generation, denoise, global_ar, local_ar, order_of
from pipeline.evaluation import code, preferences, suites
from pipeline.evaluation.intervals import paired_difference, wilson
from pipeline.evaluation.likelihood import Likelihood, Scored, Window, windows
from pipeline.evaluation.suites import Plan, Subject, SuiteResult, SuiteSettings, solve
from pipeline.generation.sampling import Completion
from pipeline.ingest.records import Problem, Text
from pipeline.run import device
from pipeline.run.device import generator, stable_hash
from pipeline.run.tracking import Number, progress
from pipeline.run.types import JsonObject
from pipeline.sandbox.judge import Judge
from pipeline.text.tokenizer import Tokenizer

ROWS = 16  # per batch


@torch.no_grad()
def bounds(model: Denoiser, tokenizer: Tokenizer, texts: Sequence[str], *, context: int, draws: int) -> Likelihood:
    """Estimated upper bounds on the documents' nats, from `draws` masks per window. Raises ValueError for an invalid
    `context`.
    """
    if context < 2 or context % 2 or context > model.config.max_context:
        raise ValueError(f"context: expected an even number from 2 to {model.config.max_context}, found {context}")
    indices = [n for n, text in enumerate(texts) if text and tokenizer.decode(tokenizer.encode(text)) == text]
    scorable = [texts[index] for index in indices]
    encoded = tokenizer.encode_batch(scorable)
    all_windows = [
        window for number, ids in enumerate(encoded) for window in windows(number, ids, tokenizer.end_of_text, context)
    ]
    nats = np.zeros(len(encoded))
    was_training = model.training
    model.train(False)
    for first in range(0, len(all_windows), ROWS):
        batch_windows = all_windows[first : first + ROWS]
        keys = [diffusion_masks.key(0, "eval", f"document:{first + n}", 0) for n in range(len(batch_windows))]
        batch = drawn_windows(batch_windows, keys, draws)
        elbos = training.elbo(model, batch.to(next(model.parameters()).device)).cpu().numpy()
        for window, value in zip(batch_windows, elbos, strict=True):
            nats[window.document] -= float(value)
    model.train(was_training)
    scored = [
        Scored(float(n), len(ids), len(text.encode())) for n, ids, text in zip(nats, encoded, scorable, strict=True)
    ]
    return Likelihood(scored, len([text for text in texts if text]) - len(scorable), indices)


def drawn_windows(batch: Sequence[Window], keys: Sequence[int], draws: int) -> Drawn:
    """Windows as rows: the scored part is maskable, the context before it stays clean."""
    rows = [[window.ids[0], *window.targets] for window in batch]  # ids are shifted by one relative to targets
    width = max(map(len, rows))
    tokens = np.zeros((len(rows), width), dtype=np.int64)
    documents = np.full((len(rows), width), PADDING, dtype=np.int32)
    masks, scales = np.zeros((draws, len(rows), width), dtype=bool), np.zeros((draws, len(rows)), dtype=np.float32)
    lengths = np.zeros(len(rows), dtype=np.int64)
    for n, (row, window, key) in enumerate(zip(rows, batch, keys, strict=True)):
        tokens[n, : len(row)], documents[n, : len(row)] = row, 0
        scored = np.arange(1 + window.scored, len(row))
        drawn = diffusion_masks.elbo_draws(key, len(scored), draws)
        masks[:, n, scored], scales[:, n], lengths[n] = drawn.masks, drawn.scales, len(scored)
    positions = torch.from_numpy(np.where(documents == 0, np.arange(width), 0))
    inputs = [
        Noised(torch.from_numpy(tokens), torch.from_numpy(mask), torch.from_numpy(documents), positions)
        for mask in masks
    ]
    return Drawn(inputs, torch.from_numpy(scales), torch.from_numpy(lengths), {})


# -- canvases ----------------------------------------------------------------------------------------------------------


PER_STEP = (1, 2, 4, 8)  # tokens
THRESHOLDS = (0.7, 0.8, 0.9, 0.95, 0.99)
CACHED = (0.9, 0.99)  # thresholds also measured with caches
# the settings measured in each run
CURVE = ("1 a step", "4 a step", "threshold 0.9", "threshold 0.99", "threshold 0.99, dual cache")
AR_WITHIN = (1, 2, 4)


@dataclass(frozen=True, kw_only=True)
class CanvasSettings:
    """The keys of the `evaluate` block for masked-diffusion models."""

    canvas: int = 96
    """Canvas length in tokens."""
    canvas_block: int = 32
    """Block size in tokens, used with a threshold or a cache."""
    canvas_threshold: float | None = 0.99
    """Commit all tokens with at least this probability in each forward pass; none: one token per pass."""
    canvas_cache: str = "dual"
    """Which keys and values passes over a block reuse, if there is a threshold: none, prefix or dual."""
    canvas_problems: int = 100
    """Number of problems to answer, starting with the first."""
    canvas_samples: int = 1
    """Samples per problem at `temperature`, in addition to the greedy one."""
    elbo_draws: int = 8
    """Masks per window for bits per byte."""
    canvas_curve: tuple[str, ...] = ("diffusion",)
    """Models for which quality vs. forward passes is also measured, the most expensive part."""

    def __post_init__(self) -> None:
        numbers = (self.canvas, self.canvas_block, self.canvas_problems, self.canvas_samples, self.elbo_draws)
        if min(numbers) < 1 or self.canvas % self.canvas_block:
            raise ValueError(
                "canvas, canvas_block, canvas_problems, canvas_samples, elbo_draws: expected at least 1 each;"
                " `canvas_block` must divide `canvas`"
            )
        if self.canvas_threshold is not None and not 0 < self.canvas_threshold <= 1:
            raise ValueError(
                f"canvas_threshold: expected more than 0 and at most 1, or `none`, got {self.canvas_threshold}"
            )
        if self.canvas_cache not in CACHES:
            raise ValueError(f"canvas_cache: expected one of {', '.join(CACHES)}, got {self.canvas_cache!r}")


@dataclass(frozen=True)
class CanvasSubject(Subject):
    """A masked-diffusion model under test; `model` is its trunk."""

    denoiser: Denoiser
    canvas: CanvasSettings
    generations: list[Generation] = field(default_factory=list)  # the result of the last call of `complete`
    # cached greedy completions, which need no random numbers
    known: dict[tuple[str, Denoising], Generation] = field(default_factory=dict)

    def complete(
        self, suite: str, prompts: dict[str, list[int]], *, tokens: int, temperature: float, sample: int = 0
    ) -> dict[str, Completion]:
        """One completion per prompt, on a canvas of the configured length; `tokens` applies only to causal models."""
        top_p = self.settings.top_p if temperature else 1.0
        generations = self.generate(suite, prompts, replace(self.way, temperature=temperature, top_p=top_p), sample)
        self.generations[:] = generations.values()
        return {name: Completion(generation.ids, [], generation.stop) for name, generation in generations.items()}

    @property
    def way(self) -> Denoising:
        """The denoising settings for problems, at temperature 0."""
        canvas, trained_block = self.canvas, self.denoiser.traits.block_size
        if canvas.canvas_threshold is None:
            return Denoising(length=canvas.canvas, steps=canvas.canvas, block=trained_block or None)
        return Denoising(
            length=canvas.canvas,
            steps=canvas.canvas,
            block=trained_block or canvas.canvas_block,
            threshold=canvas.canvas_threshold,
            cache=canvas.canvas_cache,
        )

    def generate(
        self, suite: str, prompts: dict[str, list[int]], settings: Denoising, sample: int = 0
    ) -> dict[str, Generation]:
        """A canvas for each prompt that leaves room for one, by id."""
        room = self.model.config.max_context - settings.length
        fitting = {name: ids for name, ids in prompts.items() if 0 < len(ids) <= room}
        names = [name for name in fitting if (name, settings) not in self.known]
        seeds = [stable_hash(self.seed, suite, name, sample) % 2**63 for name in names]
        new = dict(zip(names, denoise(self.denoiser, [fitting[name] for name in names], settings, seeds), strict=True))
        if settings.temperature == 0 and settings.order != "random":
            self.known.update({(name, settings): generation for name, generation in new.items()})
        return {name: new[name] if name in new else self.known[name, settings] for name in fitting}


def opens(folder: Path) -> bool:
    """See `files.opens`."""
    return files.opens(folder)


def plan(
    model: Path,
    settings: SuiteSettings,
    own: CanvasSettings,
    *,
    seed: int,
    hardware: device.Hardware,
    sources: list[Text],
    problems: list[Problem],
    sandbox: Callable[[], Judge],
) -> tuple[Plan, JsonObject]:
    """The suites of a masked-diffusion model, and their settings."""
    loaded, tokenizer = files.load(model)
    settings = replace(settings, samples=own.canvas_samples)
    subject = CanvasSubject(loaded.train(False).trunk, tokenizer, settings, seed, denoiser=loaded, canvas=own)
    subject.denoiser.to(hardware.device)
    answered = problems[: own.canvas_problems]
    suites_of_it: Plan = {
        "code": lambda: documents(subject, sources[: settings.documents]),
        "problems": lambda: with_orders(solve(subject, answered, sandbox), subject, answered),
    }
    if model.name in own.canvas_curve:
        suites_of_it["quality"] = lambda: solve(subject, answered, sandbox, partial(quality, only=CURVE))
    return suites_of_it, asdict(settings) | {key.name: getattr(own, key.name) for key in fields(CanvasSettings)}


def curve_rows(numbers: JsonObject) -> list[dict[str, Number]]:
    """The rows of the curve of pass@1 vs. forward passes."""
    return [
        {
            "step": values["forwards"],
            "curve": f"quality: {name}",
            "value": values["pass_at_1"],
            "low": values["pass_at_1_low"],
            "high": values["pass_at_1_high"],
        }
        for name, values in numbers.get("quality", {}).items()
        if isinstance(values, dict)
    ]


def documents(subject: CanvasSubject, texts: Sequence[Text]) -> SuiteResult:
    """An upper bound on bits per byte over complete documents."""
    result = SuiteResult()
    scored = bounds(
        subject.denoiser,
        subject.tokenizer,
        [t.text for t in texts],
        draws=subject.canvas.elbo_draws,
        context=subject.settings.context,
    )
    result.numbers |= {"documents": len(scored.documents), "left_out": scored.left_out}
    if scored.documents:
        bits = [d.nats / math.log(2) for d in scored.documents]
        result.measure("bpb_bound", subject.bootstrap(bits, [d.bytes for d in scored.documents]))
        result.rows += suites.counted("code", "bound_bits", texts, scored)
    return result


def ways(canvas: int, block: int) -> dict[str, Denoising]:
    """The settings to measure, by name; the others are compared with the first one."""
    plain = Denoising(length=canvas, steps=canvas)
    settings = {f"{n} a step": replace(plain, steps=canvas // n) for n in PER_STEP if canvas % n == 0}
    by_block = replace(plain, block=block)
    settings |= {f"threshold {t}": replace(by_block, threshold=t) for t in THRESHOLDS}
    return settings | {
        f"threshold {t}, {cache} cache": replace(by_block, threshold=t, cache=cache)
        for t in CACHED
        for cache in ("prefix", "dual")
    }


def quality(
    subject: CanvasSubject, problems: Sequence[Problem], judge: Judge, only: Collection[str] | None = None
) -> SuiteResult:
    """Greedy pass@1 vs. forward passes for each setting (or for those in `only`), compared with the first setting
    problem by problem.
    """
    result, canvas = SuiteResult(), subject.canvas
    if subject.denoiser.traits.block_size:
        canvas = replace(canvas, canvas_block=subject.denoiser.traits.block_size)
    problems = problems[: canvas.canvas_problems]
    prompts = {p.id: suites.user(subject.tokenizer, p.question) for p in problems}
    first: list[float] = []
    for name, settings in ways(canvas.canvas, canvas.canvas_block).items():
        if only is not None and name not in only:
            continue
        if subject.denoiser.traits.block_size:
            settings = replace(settings, block=canvas.canvas_block)
            if settings.threshold is None and settings.steps < settings.blocks:
                continue
        generations = subject.generate("quality", prompts, settings)
        answered = [p for p in problems if p.id in generations]
        if not answered:
            return result
        texts = [[subject.tokenizer.decode(generations[p.id].ids)] for p in answered]
        passed = [float(judged.verdict == "passed") for judged in code.judge_answers(judge, answered, texts)]
        first = first or passed
        gain = paired_difference((first, None), (passed, None), generator=generator("quality", subject.seed))
        share, part = wilson(int(sum(passed)), len(passed)), SuiteResult()
        part.measure("pass_at_1", share)
        part.measure("gain", gain)
        forwards = float(np.mean([generation.forwards for generation in generations.values()]))
        part.numbers |= {"forwards": forwards, "n": len(passed)}
        result.numbers[name] = part.numbers
    return result


def with_orders(result: SuiteResult, subject: CanvasSubject, problems: Sequence[Problem]) -> SuiteResult:
    """The problem results, plus the last completions' AR-ness and share without an end, and the cost of an answer."""
    generations = [generation for generation in subject.generations if generation.steps]
    if generations:
        metrics: dict[str, float] = {
            "no_end": float(np.mean([generation.stop == "length" for generation in generations])),
            "forwards": float(np.mean([generation.forwards for generation in generations])),
        }
        orders = [order_of(generation.steps) for generation in generations]
        for k in AR_WITHIN:
            for name, ar_ness in (("local", local_ar), ("global", global_ar)):
                metrics[f"{name}_ar_{k}"] = float(np.mean([ar_ness(order, k) for order in orders]))
        prompts = [suites.user(subject.tokenizer, problem.question) for problem in problems]
        metrics["flops_per_answer"] = flops_per_answer(subject, prompts, metrics["forwards"])
        result.numbers |= {"decoding": metrics}
    return result


def flops_per_answer(subject: CanvasSubject, prompts: Sequence[Sequence[int]], forwards: float) -> float:
    """Operations in a completion of `forwards` passes: 2 per weight for each position of a pass, plus attention.

    With a cache, a block's first pass computes all positions, and the others compute only those from just before the
    block to its end (dual) or to the end of the canvas (prefix: averaged over blocks).
    """
    config, settings = subject.denoiser.config, subject.way
    lengths = np.array([len(prompt) + settings.length for prompt in prompts], dtype=np.float64)
    windows = {"none": lengths, "prefix": (settings.length + settings.size) / 2 + 1, "dual": settings.size + 1}
    full_passes = min(float(settings.blocks), forwards)
    positions = full_passes * lengths + (forwards - full_passes) * windows[settings.cache]
    attention = 4 * config.layers * config.heads * config.head_dim * lengths
    return float((positions * (2 * config.matmul_parameters + attention)).mean())


# -- pairs -------------------------------------------------------------------------------------------------------------


PAIRS = 32  # per batch
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@torch.no_grad()
def elbos(model: Denoiser, split: PairSplit, pad: int, draws: int, hardware: device.Hardware) -> np.ndarray:
    """ELBOs (n, 2), in nats, of the chosen and rejected answers, in the training precision."""
    was_training, parts = model.training, []
    model.to(hardware.device).train(False)
    starts = range(0, len(split.pairs), PAIRS)
    with progress(total=len(starts), desc="held-out pairs", unit="batch") as bar, hardware.autocast():
        for first in starts:
            pairs = split.pairs[first : first + PAIRS]
            keys = [
                [diffusion_masks.key(0, "eval", f"{encoded.pair.id}/{side}", 0) for encoded in pairs] for side in SIDES
            ]
            batch = drawn_pairs(pairs, keys, pad, draws, stratified=True).to(hardware.device)
            logprobs = training.pair_elbos(model, batch)
            parts.append(torch.stack([logprobs.chosen, logprobs.rejected], 1).cpu().numpy())
            bar.update()
    model.train(was_training)
    return np.concatenate(parts)


def measure(split: PairSplit, before: np.ndarray, after: np.ndarray, seed: int, *, beta: float) -> JsonObject:
    """The metrics of `preferences.measure_pairs`, with `likelihood` as raw pair accuracy, and quantiles of beta * s."""
    margins = beta * ((after - before)[:, 0] - (after - before)[:, 1])
    quantiles = {f"q{100 * q:.0f}": float(np.quantile(margins, q)) for q in QUANTILES}
    return preferences.measure_pairs(split, before, after, seed) | {"margin": quantiles}
