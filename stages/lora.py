"""Stage lora: the fine-tuning of stage tools, with low-rank adapters on a frozen model.

    models/code + data/dialogues -> models/lora        (Hu et al. 2021, arXiv:2106.09685; rsLoRA, DoRA)

The adapter is published in peft's format (`models/lora/adapter/`), and merged into the weights of `models/lora` if the
merged model's logits equal those of the model with its adapter.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from pipeline.batches.batch import TokenBatch
from pipeline.batches.dialogues import DialogueStream
from pipeline.ingest import records
from pipeline.learning import gates, losses, reference
from pipeline.learning.fit import Watchers, fit
from pipeline.learning.losses import Loss, Term
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
    """The block `lora`; its keys are also those of FitConfig and Neftune, its adapter's those of AdapterConfig."""

    base: str = "code"
    """Where training begins: a model of models/; base: a checkpoint of your own (stage base)."""
    trained_roles: tuple[str, ...] = ()
    """Control tokens whose embeddings train too, whatever their ids: turn_start, tool_call."""
    adapter: AdapterConfig
    fit: FitConfig
    neftune: Neftune = field(default_factory=Neftune)

    def __post_init__(self) -> None:
        if unknown := [role for role in self.trained_roles if role not in SPECIAL | ADDED]:
            raise ValueError(f"trained_roles: expected some of {', '.join(SPECIAL | ADDED)}; got {unknown[0]!r}")


def run(params: Params, job: Job, *, base: Path, dialogues: Path, out: Path) -> None:
    """Fine-tune an adapter of `base` on the assistant's turns; save it, and the merged model, under `out`."""
    if records.is_empty(dialogues / "train.jsonl"):
        return checkpoint.pass_through(base, out, job, dialogues)
    model, tokenizer = checkpoint.load(base)
    model.neftune_alpha = params.neftune.neftune_alpha
    roles = (getattr(tokenizer, role) for role in params.trained_roles)
    adapter = replace(params.adapter, trained_tokens=(*params.adapter.trained_tokens, *roles))
    lora.attach(model, adapter, device.generator("adapter", job.seed))
    stream = DialogueStream(
        dialogues, tokenizer, context=params.fit.context, tokens_per_step=params.fit.tokens_per_step, seed=job.seed
    )
    gates.first_mask(stream.batch(0, params.fit.context, stream.rows(0, params.fit.context)), tokenizer)

    def loss(model: Transformer, batch: TokenBatch) -> Loss:
        return Loss([Term("loss", losses.read_out(model, batch, losses.next_token))])

    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    fit(
        model,
        stream,
        loss,
        params.fit,
        job,
        watchers=Watchers(save=partial(reference.save_merged, model, tokenizer, job)),
    )
    lora.export_peft(out / "adapter", model, adapter, base_name=str(base))
    difference = lora.merged_with_gate(model, reference.gate_rows(model))
    job.report(trained_parameters=trained, parameters=model.num_parameters(), merge_difference=difference)
    checkpoint.save(out, model, tokenizer, job.lineage)


if __name__ == "__main__":
    main(run, inputs={"base": "models/{base}", "dialogues": "data/dialogues"}, outs={"out": "models/lora"}, trains=True)
