"""The model card of an export: what it is, how each program runs it, how far each export is from its model, where it comes from.

    model, proofs, lineage, manifests of the data  --write-->  README.md

Every number in it was measured or counted by the run that wrote it. Commands of other programs are marked as not run here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.export.parity import LIMITS
from pipeline.model.heads import RewardModel
from pipeline.model.transformer import Transformer
from pipeline.text.tokenizer import Tokenizer

HERE = Path(__file__).parent  # card.md, and what it says of other programs, by the kind of export
Numbers = Mapping[str, float | int]

NOT_RUN_BY_OTHERS = "No third-party program runs this architecture. Serve it with `python -m pipeline.serve`."
SERVE = "```\npython -m pipeline.serve models/deploy          # our server: http://127.0.0.1:8000, OpenAI's API and a page\n```\n"
GGUF = """\
llama-cli -m models/deploy/@GGUF@ --jinja            # llama.cpp
ollama create @NAME@ -f models/deploy/ollama/Modelfile && ollama run @NAME@
"""


@dataclass(frozen=True)
class Exported:
    """What the card is of."""

    name: str
    model: Transformer | RewardModel
    tokenizer: Tokenizer
    parity: Mapping[str, Numbers]  # by the kind of export, as `parity.check` gives it
    lineage: Mapping[str, Any]  # of this export
    made_by: Mapping[str, Any]  # the lineage of the model; empty for one from elsewhere
    data: Mapping[str, Mapping[str, Any]]  # the manifest of each corpus
    gguf: str | None  # the path of the file to show with llama.cpp, if there is one
    onnx: bool


def write(out: Path, exported: Exported) -> None:
    """Write `out`/README.md."""
    model, reward = exported.model, isinstance(exported.model, RewardModel)
    config = model.config
    native = config.attention != "causal"
    what = "A reward model" if reward else "A masked-diffusion code model" if native else "A code assistant"
    facts = {
        "TASK": "text-classification" if reward else "text-generation",
        "WHAT": what,
        "PROGRAMS": _reward(exported.model) if isinstance(exported.model, RewardModel) else _programs(exported, native),
        "NAME": exported.name,
        "PARAMETERS": f"{model.num_parameters():,}",
        "CONTEXT": str(config.max_context),
        "VOCABULARY": str(exported.tokenizer.vocab_size),
        "TOKENIZER": exported.tokenizer.hash[:16],
        "PROOF": _proof(reward),
        "PARITY": _rewards(exported.parity) if reward else _parity(exported.parity),
        "DATA": "\n\n".join(_corpus(name, manifest) for name, manifest in exported.data.items()),
        "LINEAGE": _lineage(exported),
        "LIMITS": _limits(reward),
    }
    card = (HERE / "card.md").read_text(encoding="utf-8")
    for key, value in facts.items():
        card = card.replace(f"@{key}@", value)
    (out / "README.md").write_text(card, encoding="utf-8")


def _programs(exported: Exported, native: bool) -> str:
    if native:
        return f"{NOT_RUN_BY_OTHERS}\n\n{SERVE}"
    gguf = "" if exported.gguf is None else GGUF.replace("@GGUF@", exported.gguf).replace("@NAME@", exported.name)
    causal = (HERE / "card_causal.md").read_text(encoding="utf-8")
    onnx = (HERE / "card_onnx.md").read_text(encoding="utf-8") if exported.onnx else ""
    return f"{SERVE}\n{causal}{gguf}```\n{onnx}"


def _reward(model: RewardModel) -> str:
    said = (HERE / "card_reward.md").read_text(encoding="utf-8")
    said = said.replace("@MEAN@", f"{model.reward_mean:.3f}").replace("@STD@", f"{model.reward_std:.3f}")
    return f"{SERVE}\n{said}"


def _proof(reward: bool) -> str:
    if reward:
        return "The directory was read back and its rewards compared with the model's on a text of prose, code and many scripts."
    return (
        "Every export was read back and compared with the model on a text of prose, code and many scripts, most of which a small "
        "model has never seen the like of. The mean divergence, KL(model || export), is by how much the export's log-perplexity is "
        "worse on text that the model itself writes; the perplexity is that of the probe."
    )


def _parity(proofs: Mapping[str, Numbers]) -> str:
    head = "| export | mean divergence (nats) | largest difference of a log-probability | perplexity | greedy tokens equal | fails above |"
    return "\n".join([head, "|---|---|---|---|---|---|", *(_row(kind, found) for kind, found in proofs.items())])


def _row(kind: str, found: Numbers) -> str:
    label = {"huggingface": "this directory"}.get(kind, kind.upper() if kind.startswith("onnx") else f"GGUF {kind}")
    greedy = f"{found['greedy_equal']} of {found['greedy_tokens']}" if found["greedy_tokens"] else "none written"
    numbers = f"{found['divergence']:.1e} | {found['max_difference']:.2g} | {found['perplexity']:+.3%}"
    limit = LIMITS[kind]
    bounds = {"divergence": limit.divergence, "difference": limit.max_difference}
    told = [f"{name} {value:.2g}" for name, value in bounds.items() if value != float("inf")]
    return f"| {label} | {numbers} | {greedy} | {', '.join(told) or 'recorded only'} |"


def _rewards(proofs: Mapping[str, Numbers]) -> str:
    found = proofs["huggingface"]
    return (
        "| export | largest difference of a reward | tokens |\n|---|---|---|\n"
        f"| this directory | {found['max_difference']:g} | {found['probe_tokens']} |"
    )


def _corpus(name: str, manifest: Mapping[str, Any]) -> str:
    """A corpus by its manifest: size, parts, and every licence with its share of the bytes."""
    licences: dict[str, int] = {key: entry["bytes"] for key, entry in manifest["licences"].items()}
    total = max(1, sum(licences.values()))
    shares = [
        f"{_plain(key)} {count / total:.2%}" for key, count in sorted(licences.items(), key=lambda kv: (-kv[1], kv[0]))
    ]
    count, size = sum(manifest["documents"].values()), sum(manifest["bytes"].values())
    parts = ", ".join(sorted(manifest["parts"]))
    return (
        f"**{name}** ({manifest['data']}: {parts}): {count:,} documents, {size:,} bytes. Licences: {', '.join(shares)}."
    )


def _plain(text: str) -> str:
    return " ".join("".join(" " if c in "|`<>*_[]" else c for c in text).split())


def _lineage(exported: Exported) -> str:
    """What this export and its model were made from, by the hashes of `lineage.json`."""
    rows = ["| what | hash |", "|---|---|"]
    for whose, found in ((exported.name, exported.lineage), ("its model", exported.made_by)):
        rows += [
            f"| {whose}: {key} | `{value}` |" for key, value in sorted(found.items()) if not isinstance(value, Mapping)
        ]
        rows += [f"| {whose}: from {key} | `{value}` |" for key, value in sorted(found.get("inputs", {}).items())]
    return "\n".join(rows)


def _limits(reward: bool) -> str:
    if reward:
        return "It ranks by what its pairs taught it, surface included: a policy trained against it for long will find that out."
    return "It is as small as its data; it invents facts, and code it writes must not be run outside a sandbox."
