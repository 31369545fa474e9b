"""The Hugging Face directory of an exported model: weights, tokenizer, template, checksums, verification, model card.

    models/<name> --export--> models/deploy, the directory for transformers, vLLM and converters
    models/deploy --verify--> read back and compared on probe.txt
    model, verification results, lineage, data manifests  --write-->  README.md

`verify` compares log-probabilities and greedy tokens (for a reward model, its rewards) with those of the original
model: the difference must be exactly 0.

`check` protects users who load a directory from elsewhere. It rejects files that could run code, and files that differ
from SHA256SUMS. Not guaranteed: that the model's outputs are harmless.

The model card describes the model, how to run it in each program, the distance of each export from the model, and the
model's lineage. Every number in the card was measured or counted by the run that wrote the card. Commands for other
programs are marked as not tested here.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.export import smoke
from pipeline.export.smoke import LIMITS, Exportable, own_format, own_formats, trunk
from pipeline.model import checkpoint
from pipeline.model.heads import RewardModel
from pipeline.model.transformer import Transformer
from pipeline.run.errors import GateError, ModelError
from pipeline.run.types import JsonObject
from pipeline.run.workdir import sha256
from pipeline.text.tokenizer import Tokenizer

SUMS = "SHA256SUMS"
# without this, transformers 4 adds token types, which its `generate` rejects
INPUTS = ["input_ids", "attention_mask"]
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib")
CODE = (".py", ".pyc", ".so")


def check(folder: Path) -> None:
    """Raise ModelError for a model directory with code or pickles, or with files that differ from its SHA256SUMS.

    Call this before loading anything from the folder. Without SHA256SUMS, it only looks for code and pickles.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder}: expected a model directory, found {'a file' if folder.exists() else 'nothing'}")
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in CODE + PICKLES:
            what = "code" if path.suffix.lower() in CODE else "a pickle, which may run code"
            raise ModelError(
                f"{path}: found {what}; expected only safetensors and JSON. Convert the model, or delete the file"
            )
    for path in sorted(folder.glob("*config.json")):  # not tokenizer.json, where `auto_map` could be a token
        if _names_code(path):
            raise ModelError(f"{path}: auto_map would run code from the directory; remove the key to load it anyway")
    if (folder / SUMS).is_file():
        _check_sums(folder)


def _names_code(path: Path) -> bool:
    """Whether `auto_map` is a key of a JSON object in the file, at any depth and with any escaping."""
    matches: list[bool] = []

    def look(pairs: list[tuple[str, object]]) -> None:
        matches.extend(key == "auto_map" for key, _ in pairs)

    try:
        json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=look)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: expected JSON ({error!r:.200}); fetch the model again") from error
    return any(matches)


def _check_sums(folder: Path) -> None:
    sums = {}
    for number, line in enumerate((folder / SUMS).read_text(encoding="utf-8").splitlines(), start=1):
        match = re.fullmatch(r"([0-9a-f]{64})  (.+)", line)
        inside = match and not Path(match[2]).is_absolute() and ".." not in Path(match[2]).parts
        if not match or not inside:
            raise ModelError(
                f"{folder / SUMS}: line {number} is not `sha256  path within the directory`; fetch the model again"
            )
        sums[match[2]] = match[1]
    for name, expected in sums.items():
        path = folder / name
        actual = sha256(path) if path.is_file() else "nothing"
        if actual != expected:
            raise ModelError(
                f"{path}: expected sha256 {expected[:12]}... from {SUMS}, found {actual[:12]}; fetch or export the"
                f" model again, or delete {SUMS} if you changed the file on purpose"
            )
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".safetensors", ".jinja") and path.name not in sums:
            raise ModelError(
                f"{path}: not listed in {SUMS}; delete this file, or {SUMS} if you added the file on purpose"
            )


def load(folder: Path) -> tuple[Exportable, Tokenizer]:
    """The model (of any kind) and the tokenizer in a directory. Raises the errors of `check` and `checkpoint.load`."""
    check(folder)
    try:
        architectures = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures")
    except FileNotFoundError as error:
        raise ModelError(f"{folder / 'config.json'} is missing: {folder} is not a model directory") from error
    is_reward = bool(architectures) and str(architectures[0]).endswith("ForSequenceClassification")
    if is_reward:
        return checkpoint.load_reward(folder)
    own = next((own for own in own_formats() if own.opens(folder)), None)
    return checkpoint.load(folder) if own is None else own.load(folder)


def export(model: Exportable, tokenizer: Tokenizer, lineage: JsonObject, out: Path) -> None:
    """Write the model directory, except for the model card."""
    if isinstance(model, RewardModel):
        checkpoint.save_reward(out, model, tokenizer, lineage)
    elif isinstance(model, Transformer):
        checkpoint.save(out, model, tokenizer, lineage)
    else:
        own = own_format(model)
        assert own is not None, type(model)
        own.save(out, model, tokenizer, lineage)
    path = out / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | {"model_input_names": INPUTS}
    path.write_text(json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def seal(out: Path) -> None:
    """Write SHA256SUMS for all files below `out`, in the format of `sha256sum --check`."""
    files = sorted(p for p in out.rglob("*") if p.is_file() and p != out / SUMS)
    sums = "".join(f"{sha256(p)}  {p.relative_to(out)}\n" for p in files)
    (out / SUMS).write_text(sums, encoding="utf-8")


def verify(model: Exportable, tokenizer: Tokenizer, out: Path) -> dict[str, float | int]:
    """Read `out` back, compare it with `model`, and return the differences. Raises GateError if anything differs."""
    exported, exported_tokenizer = load(out)
    text = smoke.probe()
    ids = tokenizer.encode(text)
    if exported_tokenizer.encode(text) != ids or tokenizer.decode(ids) != text:
        raise GateError(f"{out}: the exported tokenizer splits the probe differently or does not reproduce it")
    if isinstance(model, RewardModel) and isinstance(exported, RewardModel):
        return smoke.check_rewards(model, exported, ids, out)
    if type(model) is not type(exported):
        raise GateError(f"{out}: the export is a {type(exported).__name__}, expected a {type(model).__name__}")
    if own := own_format(model):
        own.check_same(model, exported, out)
    ours, theirs = trunk(model), trunk(exported)
    assert isinstance(ours, Transformer) and isinstance(theirs, Transformer)
    return smoke.check_parity(smoke.compare(ours, smoke.Ours(theirs), ids), "huggingface", out)


# -- model card --------------------------------------------------------------------------------------------------------


HERE = Path(__file__).parent  # contains card.md, and its parts for each kind of export
Numbers = Mapping[str, float | int]

NOT_RUN_BY_OTHERS = "No third-party program can run this architecture. Serve it with `python -m pipeline.serve`."
SERVE = (
    "```\npython -m pipeline.serve models/deploy          # our server at http://127.0.0.1:8000, with OpenAI's API"
    " and a web page\n```\n"
)
GGUF = """\
llama-cli -m models/deploy/@GGUF@ --jinja            # llama.cpp
ollama create @NAME@ -f models/deploy/ollama/Modelfile && ollama run @NAME@
"""


@dataclass(frozen=True)
class Exported:
    """The contents of the model card."""

    name: str
    model: Exportable
    tokenizer: Tokenizer
    parity: Mapping[str, Numbers]  # by kind of export, as returned by `smoke.check_parity`
    lineage: JsonObject  # of this export
    made_by: JsonObject  # the model's lineage; empty if the model is from elsewhere
    data: Mapping[str, JsonObject]  # each corpus's manifest
    gguf: str | None  # the path of the GGUF file for the llama.cpp command; None: there is none
    onnx: bool


def write(out: Path, exported: Exported) -> None:
    """Write the model card to `out`/README.md."""
    model, own = trunk(exported.model), own_format(exported.model)
    reward = isinstance(model, RewardModel)
    what = "A reward model" if reward else "A code assistant" if own is None else own.WHAT
    programs = _reward_programs(model) if reward else _programs(exported, native=own is not None)
    facts = {
        "TASK": "text-classification" if reward else "text-generation",
        "WHAT": what,
        "PROGRAMS": programs,
        "NAME": exported.name,
        "PARAMETERS": f"{model.num_parameters():,}",
        "CONTEXT": str(model.config.max_context),
        "VOCABULARY": str(exported.tokenizer.vocab_size),
        "TOKENIZER": exported.tokenizer.hash[:16],
        "PROOF": _proof_text(reward),
        "PARITY": _reward_table(exported.parity) if reward else _parity_table(exported.parity),
        "DATA": "\n\n".join(_corpus_text(name, manifest) for name, manifest in exported.data.items()),
        "LINEAGE": _lineage_table(exported),
        "LIMITS": _limits_text(reward),
    }
    card = (HERE / "card.md").read_text(encoding="utf-8")
    for key, value in facts.items():
        card = card.replace(f"@{key}@", value)
    (out / "README.md").write_text(card, encoding="utf-8")


def _programs(exported: Exported, *, native: bool) -> str:
    if native:
        return f"{NOT_RUN_BY_OTHERS}\n\n{SERVE}"
    gguf = "" if exported.gguf is None else GGUF.replace("@GGUF@", exported.gguf).replace("@NAME@", exported.name)
    causal = (HERE / "card_causal.md").read_text(encoding="utf-8")
    onnx = (HERE / "card_onnx.md").read_text(encoding="utf-8") if exported.onnx else ""
    return f"{SERVE}\n{causal}{gguf}```\n{onnx}"


def _reward_programs(model: RewardModel) -> str:
    text = (HERE / "card_reward.md").read_text(encoding="utf-8")
    text = text.replace("@MEAN@", f"{model.reward_mean:.3f}").replace("@STD@", f"{model.reward_std:.3f}")
    return f"{SERVE}\n{text}"


def _proof_text(reward: bool) -> str:
    if reward:
        return (
            "The directory was read back, and its rewards were compared with the model's on a text that contains prose,"
            " code and many writing systems."
        )
    return (
        "Every export was read back and compared with the model on a text that contains prose, code and many writing"
        " systems, most of it unlike anything a small model has seen. The mean divergence, KL(model || export), is the"
        " increase in the export's log-perplexity on text that the model itself would write; the perplexity column"
        " shows the relative change on the text used here."
    )


def _parity_table(proofs: Mapping[str, Numbers]) -> str:
    head = (
        "| export | mean divergence (nats) | largest log-probability difference | perplexity | equal greedy tokens"
        " | fails above |"
    )
    return "\n".join(
        [head, "|---|---|---|---|---|---|", *(_parity_row(kind, result) for kind, result in proofs.items())]
    )


def _parity_row(kind: str, result: Numbers) -> str:
    label = {"huggingface": "this directory"}.get(kind, kind.upper() if kind.startswith("onnx") else f"GGUF {kind}")
    greedy = f"{result['greedy_equal']} of {result['greedy_tokens']}" if result["greedy_tokens"] else "not applicable"
    numbers = f"{result['divergence']:.1e} | {result['max_difference']:.2g} | {result['perplexity']:+.3%}"
    limit = LIMITS[kind]
    bounds = {"divergence": limit.divergence, "difference": limit.max_difference}
    limits = [f"{name} {value:.2g}" for name, value in bounds.items() if value != float("inf")]
    return f"| {label} | {numbers} | {greedy} | {', '.join(limits) or 'recorded only'} |"


def _reward_table(proofs: Mapping[str, Numbers]) -> str:
    result = proofs["huggingface"]
    return (
        "| export | largest reward difference | tokens |\n|---|---|---|\n"
        f"| this directory | {result['max_difference']:g} | {result['probe_tokens']} |"
    )


def _corpus_text(name: str, manifest: JsonObject) -> str:
    """A description of a corpus, from its manifest: size, parts, and every license with its share of the bytes."""
    licenses: dict[str, int] = {key: entry["bytes"] for key, entry in manifest["licenses"].items()}
    total = max(1, sum(licenses.values()))
    shares = [
        f"{_without_markup(key)} {count / total:.2%}"
        for key, count in sorted(licenses.items(), key=lambda kv: (-kv[1], kv[0]))
    ]
    count, size = sum(manifest["documents"].values()), sum(manifest["bytes"].values())
    parts = ", ".join(sorted(manifest["parts"]))
    return (
        f"**{name}** ({manifest['data']}: {parts}): {count:,} documents, {size:,} bytes. Licenses: {', '.join(shares)}."
    )


def _without_markup(text: str) -> str:
    return " ".join("".join(" " if c in "|`<>*_[]" else c for c in text).split())


def _lineage_table(exported: Exported) -> str:
    """A table of the hashes in the `lineage.json` of this export and of the exported model."""
    rows = ["| what | hash |", "|---|---|"]
    for subject, lineage in ((exported.name, exported.lineage), ("its model", exported.made_by)):
        rows += [
            f"| {subject}: {key} | `{value}` |"
            for key, value in sorted(lineage.items())
            if not isinstance(value, Mapping)
        ]
        rows += [f"| {subject}: from {key} | `{value}` |" for key, value in sorted(lineage.get("inputs", {}).items())]
    return "\n".join(rows)


def _limits_text(reward: bool) -> str:
    if reward:
        return (
            "The model ranks answers by what it learned from its training pairs, including surface features: a policy"
            " trained against it for long enough will exploit them."
        )
    return "The model is small, as is its training data. It makes up facts. Do not run its code outside a sandbox."
