"""The Hugging Face directory of a chosen model: weights, tokenizer, template, checksums, and their proof.

    models/<name> -> models/deploy, read back and compared on probe.txt

The directory is what transformers, vLLM and the converters read. `verify` loads it again and compares log-probabilities
and greedy tokens (of a reward model its rewards) with the model it was made from: the difference must be exactly 0.

`check` is for who loads a directory from elsewhere. It refuses what could run code, or is not as it was sealed; that
the weights are harmless to ask is not promised.

The model card of an export: what it is, how each program runs it, how far each export is from its model, where it comes
from.

    model, proofs, lineage, manifests of the data  --write-->  README.md

Every number in it was measured or counted by the run that wrote it. Commands of other programs are marked as not run
here.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.diffusion import files as diffusion_files
from pipeline.diffusion.model import Denoiser
from pipeline.export import parity
from pipeline.export.parity import LIMITS
from pipeline.model import checkpoint
from pipeline.model.config import read_config
from pipeline.model.heads import RewardModel
from pipeline.model.transformer import Transformer
from pipeline.run.errors import GateError, ModelError
from pipeline.run.workdir import sha256
from pipeline.text.tokenizer import Tokenizer

Exportable = Transformer | RewardModel | Denoiser
SUMS = "SHA256SUMS"
INPUTS = [
    "input_ids",
    "attention_mask",
]  # without this transformers 4 gives token types too, and its `generate` refuses them
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib")
CODE = (".py", ".pyc", ".so")


def check(folder: Path) -> None:
    """Raise ModelError, naming the file, where a model directory holds code or pickles, or differs from its SHA256SUMS.

    To be called before anything of the folder is loaded. A directory without SHA256SUMS is only searched for code.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder}: expected a model directory, found {'a file' if folder.exists() else 'nothing'}")
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in CODE + PICKLES:
            what = "code" if path.suffix.lower() in CODE else "a pickle, which may run code"
            raise ModelError(
                f"{path}: {what}; expected safetensors and JSON alone. Convert the model, or delete the file"
            )
    for path in sorted(folder.glob("*config.json")):  # not tokenizer.json, in which it might be a token
        if _names_code(path):
            raise ModelError(
                f"{path}: auto_map asks for code of the directory to be run; remove the key if you trust it"
            )
    if (folder / SUMS).is_file():
        _check_sums(folder)


def _names_code(path: Path) -> bool:
    """Whether `auto_map` is a key of a JSON object of the file, at any depth and however it is escaped."""
    found: list[bool] = []

    def look(pairs: list[tuple[str, Any]]) -> None:
        found.extend(key == "auto_map" for key, _ in pairs)

    try:
        json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=look)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: expected JSON ({error!r:.200}); fetch the model again") from error
    return any(found)


def _check_sums(folder: Path) -> None:
    named = {}
    for number, line in enumerate((folder / SUMS).read_text(encoding="utf-8").splitlines(), start=1):
        match = re.fullmatch(r"([0-9a-f]{64})  (.+)", line)
        inside = match and not Path(match[2]).is_absolute() and ".." not in Path(match[2]).parts
        if not match or not inside:
            raise ModelError(
                f"{folder / SUMS}: line {number} is not `sha256  path within the directory`; fetch the model again"
            )
        named[match[2]] = match[1]
    for name, expected in named.items():
        path = folder / name
        found = sha256(path) if path.is_file() else "nothing"
        if found != expected:
            raise ModelError(
                f"{path}: expected sha256 {expected[:12]}... as {SUMS} says, found {found[:12]}; fetch or export the"
                f" model again, or delete {SUMS} if you changed it on purpose"
            )
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".safetensors", ".jinja") and path.name not in named:
            raise ModelError(f"{path}: {SUMS} does not name it; delete it, or {SUMS} if you added it on purpose")


def load(folder: Path) -> tuple[Exportable, Tokenizer]:
    """The model of a directory, whatever kind it says it is. Raises ModelError as `check` and `checkpoint.load`."""
    check(folder)
    try:
        said = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures")
    except FileNotFoundError as error:
        raise ModelError(f"{folder / 'config.json'} is missing: {folder} is not a model directory") from error
    reward = bool(said) and str(said[0]).endswith("ForSequenceClassification")
    if reward:
        return checkpoint.load_reward(folder)
    return checkpoint.load(folder) if read_config(folder).attention == "causal" else diffusion_files.load(folder)


def export(model: Exportable, tokenizer: Tokenizer, lineage: dict[str, Any], out: Path) -> None:
    """Write the directory, without its card."""
    if isinstance(model, RewardModel):
        checkpoint.save_reward(out, model, tokenizer, lineage)
    elif isinstance(model, Denoiser):
        diffusion_files.save(out, model, tokenizer, lineage)
    else:
        checkpoint.save(out, model, tokenizer, lineage)
    path = out / "tokenizer_config.json"
    named = json.loads(path.read_text(encoding="utf-8")) | {"model_input_names": INPUTS}
    path.write_text(json.dumps(named, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def seal(out: Path) -> None:
    """Write SHA256SUMS, as `sha256sum --check` reads it, of every file below `out`."""
    files = sorted(p for p in out.rglob("*") if p.is_file() and p != out / SUMS)
    sums = "".join(f"{sha256(p)}  {p.relative_to(out)}\n" for p in files)
    (out / SUMS).write_text(sums, encoding="utf-8")


def verify(model: Exportable, tokenizer: Tokenizer, out: Path) -> dict[str, float | int]:
    """Read `out` back and compare it with `model`. Raises GateError when anything differs. See `parity.Found`."""
    again, their_tokenizer = load(out)
    text = parity.probe()
    ids = tokenizer.encode(text)
    if their_tokenizer.encode(text) != ids or tokenizer.decode(ids) != text:
        raise GateError(f"{out}: the exported tokenizer splits the probe differently or does not give it back")
    if isinstance(model, RewardModel) and isinstance(again, RewardModel):
        return parity.check_rewards(model, again, ids, out)
    if type(model) is not type(again):
        raise GateError(f"{out}: read back, it is a {type(again).__name__}, exported was a {type(model).__name__}")
    if isinstance(model, Denoiser) and isinstance(again, Denoiser):
        if again.traits != model.traits:
            raise GateError(f"{out}: read back, its traits are {again.traits}, exported were {model.traits}")
        model, again = model.trunk, again.trunk
    assert isinstance(model, Transformer) and isinstance(again, Transformer)
    return parity.check(parity.compare(model, parity.Ours(again), ids), "huggingface", out)


# -- card --------------------------------------------------------------------------------------------------------------


HERE = Path(__file__).parent  # card.md, and what it says of other programs, by the kind of export
Numbers = Mapping[str, float | int]

NOT_RUN_BY_OTHERS = "No third-party program runs this architecture. Serve it with `python -m pipeline.serve`."
SERVE = (
    "```\npython -m pipeline.serve models/deploy          # our server: http://127.0.0.1:8000, OpenAI's API and a"
    " page\n```\n"
)
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
        return (
            "The directory was read back and its rewards compared with the model's on a text of prose, code and many"
            " scripts."
        )
    return (
        "Every export was read back and compared with the model on a text of prose, code and many scripts, most of"
        " which a small model has never seen the like of. The mean divergence, KL(model || export), is by how much the"
        " export's log-perplexity is worse on text that the model itself writes; the perplexity is that of the probe."
    )


def _parity(proofs: Mapping[str, Numbers]) -> str:
    head = (
        "| export | mean divergence (nats) | largest difference of a log-probability | perplexity | greedy tokens equal"
        " | fails above |"
    )
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
        return (
            "It ranks by what its pairs taught it, surface included: a policy trained against it for long will find"
            " that out."
        )
    return "It is as small as its data; it invents facts, and code it writes must not be run outside a sandbox."
