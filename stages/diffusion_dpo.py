"""Stage diffusion_dpo: preference tuning of a masked-diffusion model, by DPO on estimated likelihoods.

    models/diffusion + data/preferences -> models/diffusion_dpo        (LLaDA 1.5, Zhu et al. 2025, arXiv:2505.19223)

The likelihood of an answer is estimated as the mean over `diffusion_steps` masked forward passes, with the same masks
for policy and reference (the VRPO estimator). The reference's estimates are precomputed for every pair and pass; then
the reference is released.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch

from pipeline.batches.pairs import PairSplit
from pipeline.diffusion import files, measure, sampling, training
from pipeline.diffusion.batches import NoisedPairs, check_texts, of_kinds
from pipeline.diffusion.masks import Drawn
from pipeline.diffusion.model import Denoiser
from pipeline.diffusion.sampling import EncodedPrompt
from pipeline.ingest import records
from pipeline.learning import gates, reference
from pipeline.learning.fit import Watchers, fit
from pipeline.learning.losses import Loss
from pipeline.learning.settings import PairConfig
from pipeline.model import checkpoint
from pipeline.model.lora import AdapterConfig
from pipeline.run import device
from pipeline.run.stage import main
from pipeline.run.tracking import write_json
from pipeline.run.workdir import Job


@dataclass(frozen=True, kw_only=True)
class Params:
    """The `diffusion_dpo` block; its training keys are those of PairConfig."""

    base: str = "diffusion"
    """Model to start from: a folder in models/, or `base` for your own checkpoint (stage base)."""
    diffusion_steps: int
    """Masked passes averaged per likelihood estimate: more passes lower the variance at the same memory."""
    beta: float
    """KL strength: larger values keep the policy closer to the reference."""
    sft_weight: float
    """Weight of the chosen answer's mean negative log-likelihood in the loss."""
    timesteps: str = "stratified"
    """stratified: mask counts spread evenly over the passes; independent: drawn separately for each pass."""
    dpo_reduction: str = "sum"
    """Reduction over an answer's tokens: sum or mean."""
    kinds: list[str] = field(default_factory=list)
    """Kinds of pairs to train on, for example [code]; []: all."""
    eval_draws: int = 8
    """Masked passes averaged per likelihood estimate of a held-out answer."""
    adapter: AdapterConfig | None = None
    """{rank, alpha, ...}: train only an adapter and merge it at the end."""
    fit: PairConfig

    def __post_init__(self) -> None:
        for name in ("diffusion_steps", "eval_draws"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1 masked pass, got {getattr(self, name)}")
        if self.beta <= 0 or self.sft_weight < 0:
            raise ValueError(f"expected beta > 0 and sft_weight >= 0, got {self.beta} and {self.sft_weight}")
        for name, options in {"timesteps": ("stratified", "independent"), "dpo_reduction": training.REDUCTIONS}.items():
            if getattr(self, name) not in options:
                raise ValueError(f"{name}: expected one of {', '.join(options)}, got {getattr(self, name)!r}")


def run(params: Params, job: Job, *, base: Path, pairs: Path, out: Path, trace: Path) -> None:
    """Train `base` on the pairs and save the model directory `out`."""
    if records.is_empty(pairs / "train.jsonl"):
        write_json(trace, {"settings": {}, "prompts": []})
        return checkpoint.pass_through(base, out, job, pairs)
    hardware = device.hardware(job.runtime.precision, job.runtime.base_weights)
    model, start = training.begin(base, params.adapter, job.seed, hardware)
    config, tokenizer = params.fit, start.tokenizer
    config.check_context(model)
    splits = {
        name: check_texts(
            of_kinds(
                PairSplit(pairs / f"{name}.jsonl", tokenizer, config.max_prompt, config.max_length),
                params.kinds,
                str(pairs),
            ),
            model.traits.mask,
            str(pairs),
        )
        for name in ("train", "val", "test")
    }
    stream = NoisedPairs(
        splits["train"],
        splits["val"],
        pad=tokenizer.pad,
        pairs=config.pairs,
        seed=job.seed,
        max_length=config.max_length,
        draws=params.diffusion_steps,
        stratified=params.timesteps == "stratified",
    )
    with start.reference.model(hardware.device) as reference_model, hardware.autocast():
        _add_reference_estimates(
            stream, reference_model, job, config.resolve_steps(stream.tokens_per_epoch) * config.pairs, hardware.device
        )
    before = measure.elbos(model, splits["test"], tokenizer.pad, params.eval_draws, hardware)
    start.reference.release()
    gate = gates.first_dpo(float(np.log(2)), hardware.precision, params.beta)
    fit(model, stream, partial(loss, params=params), config, job, watchers=Watchers(first=gate))
    after = measure.elbos(model, splits["test"], tokenizer.pad, params.eval_draws, hardware)
    job.report(test=measure.measure(splits["test"], before, after, job.seed, beta=params.beta))
    job.report(**reference.finish(start, base), dropped={name: dict(split.dropped) for name, split in splits.items()})
    files.save(out, model, tokenizer, job.lineage)
    traced = [
        EncodedPrompt(
            e.pair.id,
            str(e.pair.prompt[-1].get("content", "")),
            e.chosen.ids[: int(np.argmax(e.chosen.trained))].tolist(),
        )
        for e in splits["test"].pairs
    ]
    sampling.write([out / "trace.json", trace], model, tokenizer, traced)


def _add_reference_estimates(
    stream: NoisedPairs, reference_model: torch.nn.Module, job: Job, num_pairs: int, target: torch.device
) -> None:
    """Add the reference's estimates for a run over `num_pairs` pairs to the stream, one pass over the data at a time.
    The estimates are cached in the work folder, so that a resumed run does not recompute them.
    """
    folder = job.folder / "parts"
    folder.mkdir(exist_ok=True)
    passes = -(-num_pairs // len(stream.train.pairs))
    for name, turn in [*(("train", turn) for turn in range(passes)), ("val", 0)]:
        path = folder / f"reference-{stream.fingerprint}-{num_pairs}-{name}-{turn}.npy"
        if path.is_file():
            stream.references[name, turn] = np.load(path)
            continue
        estimates = training.reference_elbos(
            reference_model, stream, name, turn, stream.read(name, turn, num_pairs), target
        )
        stream.references[name, turn] = estimates
        if device.rank() == 0:
            part = path.with_suffix(".part")
            with part.open("wb") as file:
                np.save(file, estimates)
            part.replace(path)


def loss(model: Denoiser, batch: Drawn, *, params: Params) -> Loss:
    """The DPO loss on a batch of pairs."""
    assert batch.reference is not None
    policy = training.pair_elbos(model, batch)
    return training.diffusion_dpo(
        policy,
        training.pairs_of(batch.reference, batch.lengths),
        beta=params.beta,
        sft_weight=params.sft_weight,
        reduction=params.dpo_reduction,
    )


if __name__ == "__main__":
    main(
        run,
        inputs={"base": "models/{base}", "pairs": "data/preferences"},
        outs={"out": "models/diffusion_dpo", "trace": "metrics/traces/diffusion_dpo.json"},
        trains=True,
    )
