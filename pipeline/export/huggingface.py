"""The Hugging Face directory of a chosen model: weights, tokenizer, template, checksums, and their proof.

    models/<name> -> models/deploy, read back and compared on probe.txt

The directory is what transformers, vLLM and the converters read. `verify` loads it again and compares log-probabilities
and greedy tokens (of a reward model its rewards) with the model it was made from: the difference must be exactly 0.

`check` is for who loads a directory from elsewhere. It refuses what could run code, or is not as it was sealed; that the
weights are harmless to ask is not promised.
"""

import json
import re
from pathlib import Path
from typing import Any

from pipeline import checkpoint, denoisers
from pipeline.errors import GateError, ModelError
from pipeline.export import parity
from pipeline.model.config import read_config
from pipeline.model.denoiser import Denoiser
from pipeline.model.heads import RewardModel
from pipeline.model.transformer import Transformer
from pipeline.text.tokenizer import Tokenizer
from pipeline.work import sha256

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
                f"{path}: expected sha256 {expected[:12]}... as {SUMS} says, found {found[:12]}; fetch or export the model "
                f"again, or delete {SUMS} if you changed it on purpose"
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
    return checkpoint.load(folder) if read_config(folder).attention == "causal" else denoisers.load(folder)


def export(model: Exportable, tokenizer: Tokenizer, lineage: dict[str, Any], out: Path) -> None:
    """Write the directory, without its card."""
    if isinstance(model, RewardModel):
        checkpoint.save_reward(out, model, tokenizer, lineage)
    elif isinstance(model, Denoiser):
        denoisers.save(out, model, tokenizer, lineage)
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
