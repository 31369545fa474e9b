"""Stage lora: learn a new skill from a few examples, with low-rank adapters on a frozen model.

    models/tools + data/skill -> models/lora        (Hu et al. 2021, arXiv:2106.09685; rsLoRA, DoRA)

The adapter is saved in PEFT format (`models/lora/adapter/`), and merged into the weights of `models/lora` if the merged
model's logits match those of the model with the adapter. If `control_rate` is set, a fully fine-tuned copy of the model
serves as a baseline: it sees the same examples in the same order. The copy is not kept.
"""

import copy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from pipeline.batches.batch import TokenBatch
from pipeline.batches.dialogues import DialogueStream
from pipeline.evaluation.solving import ExactAnswers
from pipeline.ingest import records
from pipeline.learning import gates, losses, reference
from pipeline.learning.fit import Watchers, fit
from pipeline.learning.losses import Loss, Term
from pipeline.learning.pretraining import Phases
from pipeline.learning.settings import FitConfig, Neftune
from pipeline.model import checkpoint, lora
from pipeline.model.lora import AdapterConfig
from pipeline.model.transformer import Transformer
from pipeline.run import device
from pipeline.run.stage import main
from pipeline.run.workdir import Job
from pipeline.text.tokenizer import ADDED, SPECIAL


@dataclass(frozen=True, kw_only=True)
class Params:
    """The `lora` block; it also has the keys of FitConfig, Neftune and, for the adapter, AdapterConfig."""

    base: str = "tools"
    """Model to start from: a folder in models/, or `base` for your own checkpoint (stage base)."""
    dialogues: str = "skill"
    """Folder in data/ with the conversations. skill: requests for SQL; dialogues: the conversations of stage tools."""
    control_rate: float | None = None
    """Learning rate of the fully fine-tuned copy; none: no copy."""
    trained_roles: tuple[str, ...] = ()
    """Control tokens with trainable embeddings, by name instead of id, for example [turn_start, tool_call]."""
    adapter: AdapterConfig
    fit: FitConfig
    neftune: Neftune = field(default_factory=Neftune)

    def __post_init__(self) -> None:
        if unknown := [role for role in self.trained_roles if role not in SPECIAL | ADDED]:
            raise ValueError(f"trained_roles: expected names from {', '.join(SPECIAL | ADDED)}; got {unknown[0]!r}")


def run(params: Params, job: Job, *, base: Path, dialogues: Path, out: Path) -> None:
    """Train an adapter for `base` on the assistant's turns; save the adapter and the merged model under `out`."""
    if records.is_empty(dialogues / "train.jsonl"):
        return checkpoint.pass_through(base, out, job, dialogues)
    model, tokenizer = checkpoint.load(base)
    model.neftune_alpha = params.neftune.neftune_alpha
    hardware = device.hardware(job.runtime.precision, job.runtime.base_weights)
    held_out = ExactAnswers.of(dialogues / "test.jsonl", tokenizer, hardware)
    told = {"base": held_out.measure(model)}
    control = None if params.control_rate is None else copy.deepcopy(model)
    roles = (getattr(tokenizer, role) for role in params.trained_roles)
    adapter = replace(params.adapter, trained_tokens=(*params.adapter.trained_tokens, *roles))
    lora.attach(model, adapter, device.generator("adapter", job.seed))
    reference.store(model, hardware)
    stream = DialogueStream(
        dialogues, tokenizer, context=params.fit.context, tokens_per_step=params.fit.tokens_per_step, seed=job.seed
    )
    gates.first_mask(stream.batch(0, params.fit.context, stream.rows(0, params.fit.context)), tokenizer)

    def loss(model: Transformer, batch: TokenBatch) -> Loss:
        return Loss([Term("loss", losses.read_out(model, batch, losses.next_token))])

    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    own_job = job
    if control is not None:
        phases = Phases(job)
        own = replace(params.fit, learning_rate=params.control_rate)
        fit(control, stream, loss, own, phases.begin("control", prefix="control/"), last=False)
        told["control"] = held_out.measure(control)
        own_job = phases.begin("adapter")
    watchers = Watchers(save=partial(reference.save_merged, model, tokenizer, job, base))
    fit(model, stream, loss, params.fit, own_job, watchers=watchers)
    lora.export_peft(out / "adapter", model, adapter, base_name=str(base))
    told["adapter"] = held_out.measure(model)
    difference = reference.merge(model, base)
    job.report(
        trained_parameters=trained, parameters=model.num_parameters(), merge_difference=difference, exact_match=told
    )
    checkpoint.save(out, model, tokenizer, job.lineage)


if __name__ == "__main__":
    main(
        run, inputs={"base": "models/{base}", "dialogues": "data/{dialogues}"}, outs={"out": "models/lora"}, trains=True
    )
