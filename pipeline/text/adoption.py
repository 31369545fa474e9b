"""Adopts the tokenizer of a pretrained checkpoint: its ids stay, and the control tokens that it lacks are added.

    <checkpoint>/tokenizer.json, rows of its embedding -> Adopted: a Tokenizer, and which ids are new

Every id keeps its meaning, so the checkpoint's weights stay right. A missing control token takes the first id that no
token has; the remaining ids, up to the model's rows and to a multiple of 64, become spares. Byte-level BPE alone
(Qwen2, Qwen3, LLaMA 3): there the bytes of each token are known, which bits per byte, fill-in-the-middle and the
grammars of the server need.

Two things are removed. What `tokenizer.json` puts around a text (LLaMA's begin of text), because documents and turns
have our borders. And Qwen's NFC, so that every text decodes to itself, and llama.cpp, which has no NFC, splits alike:
only a text that is not in NFC gets other ids than from the checkpoint's own tokenizer.

Not promised: that the checkpoint's own begin or end of text is used; ours is `SPECIAL`.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from pipeline.run.errors import ModelError
from pipeline.run.types import JsonObject
from pipeline.text.tokenizer import ADDED, SPARE, SPECIAL, Tokenizer, byte_of_character, fill

MULTIPLE = 64  # of the embedding's rows: fits matrix units of all sizes
MAX_ROWS = 4  # times the tokens: the smallest Qwen models have 1.002 times as many
CONTROL = re.compile(r"<.+>|\[.+\]", re.DOTALL)  # how control tokens are written; other added tokens are text
PROBE = "Ünï 🙂\r\n\tdef f(x):\n    return  x + 1234567 # it's  e\u0301\u3000日本\x00\x7f"
REMEDY = "use a checkpoint with byte-level BPE: Qwen2, Qwen3 or LLaMA 3"


@dataclass(frozen=True)
class Adopted:
    """An adopted tokenizer, with its ids by origin, for the checkpoint's embedding."""

    tokenizer: Tokenizer
    known: tuple[int, ...]  # ids with a meaning in the checkpoint's own tokenizer
    fresh: tuple[int, ...]  # ids of the control tokens that were added


def adopt(folder: Path, rows: int) -> Adopted:
    """Adopt `folder`/tokenizer.json; `rows` are those of the model's embedding.

    Raises ModelError, with what to do, for a tokenizer that is missing, is no byte-level BPE, or changes a text.
    """
    path = folder / "tokenizer.json"
    state = _read(path)
    _require_byte_level_bpe(state, path)
    state |= {"normalizer": None, "post_processor": None, "truncation": None, "padding": None}
    state["model"]["dropout"] = None
    entries = {entry["content"]: entry for entry in state["added_tokens"]}
    used = {*state["model"]["vocab"].values(), *(entry["id"] for entry in entries.values())}
    spare = {entry["id"] for content, entry in entries.items() if SPARE.fullmatch(content)}
    for content in SPECIAL.values() & entries.keys():
        entries[content]["special"] = True  # Qwen's fim tokens are not: they would count as text
    for content in ADDED.values() & entries.keys():
        entries[content]["special"] = False  # decoding must keep the tool calls
    missing = [content for content in (SPECIAL | ADDED).values() if content not in entries]
    if max(rows, max(used)) > MAX_ROWS * len(used):  # the ids between would become spare tokens
        raise ModelError(
            f"{folder}/config.json: vocab_size {rows}, but {path} has {len(used)} tokens, the last with the id"
            f" {max(used)}; expected the two files of one checkpoint"
        )
    size = max(rows, 1 + max(used) + len(missing))
    fill(state, missing, size + -size % MULTIPLE)
    adopted = Tokenizer(json.dumps(state, ensure_ascii=False, indent=1), source=str(path))
    _check(adopted, path)
    return Adopted(adopted, tuple(sorted(used - spare)), tuple(adopted.control_ids[content] for content in missing))


def _read(path: Path) -> JsonObject:
    """The JSON of a BPE tokenizer. Raises ModelError."""
    if not path.is_file():
        other = [name for name in ("tokenizer.model", "vocab.json", "merges.txt") if (path.parent / name).is_file()]
        raise ModelError(
            f"{path} is missing{f', there is only {other[0]}' if other else ''}: a checkpoint is continued with its own"
            " tokenizer; write the file with AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers"
        )
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        kind, vocab = state["model"]["type"], state["model"].get("vocab")
        state["added_tokens"] = state.get("added_tokens") or []
        contents = [entry["content"] for entry in state["added_tokens"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: not a tokenizer.json ({error!r:.200}); fetch the checkpoint again") from error
    if kind != "BPE" or not isinstance(vocab, dict) or not vocab:
        raise ModelError(f"{path}: expected BPE, found {kind} and {len(vocab or ())} tokens; {REMEDY}")
    if len(set(contents)) < len(contents):
        raise ModelError(f"{path}: an added token stands there twice; fetch the checkpoint again")
    return state


def _require_byte_level_bpe(state: JsonObject, path: Path) -> None:
    """Raise ModelError, naming the key, for anything but byte-level BPE and what silently loses or changes text."""
    model, steps = state["model"], json.dumps(state.get("pre_tokenizer"))
    if model.get("byte_fallback") or '"ByteLevel"' not in json.dumps(state.get("decoder")):
        raise ModelError(
            f"{path}: a SentencePiece-style tokenizer (byte_fallback {model.get('byte_fallback', False)}, decoder"
            f" {(state.get('decoder') or {}).get('type')}), as LLaMA 2 and Mistral have: its tokens stand for"
            f" characters with spaces rewritten, not for bytes. This is not supported; {REMEDY}"
        )
    if (state.get("normalizer") or {"type": "NFC"})["type"] != "NFC":
        raise ModelError(
            f"{path}: normalizer {state['normalizer']['type']} changes texts; expected none or NFC; {REMEDY}"
        )
    if '"ByteLevel"' not in steps or '"add_prefix_space": true' in steps:
        raise ModelError(
            f"{path}: expected a pre_tokenizer with ByteLevel that adds no prefix space, found {steps[:200]}; {REMEDY}"
        )
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise ModelError(f"{path}: model.{key} = {model[key]!r} is not supported; {REMEDY}")
    if missing := sorted(byte for character, byte in byte_of_character().items() if character not in model["vocab"]):
        raise ModelError(
            f"{path}: {len(missing)} of the 256 bytes have no token ({missing[0]:#04x} first): text would be lost"
        )
    ours = (SPECIAL | ADDED).values()
    words = [
        entry["content"]
        for entry in state["added_tokens"]
        if not entry.get("special") and entry["content"] not in ours and not CONTROL.fullmatch(entry["content"])
    ]
    if words:
        raise ModelError(
            f"{path}: {len(words)} added tokens are ordinary text ({words[0]!r}), which is encoded without added"
            f" tokens here: the ids would not be the checkpoint's; {REMEDY}"
        )


def _check(adopted: Tokenizer, path: Path) -> None:
    """Raise ModelError if the library numbers the tokens differently, or a text does not decode to itself."""
    library = tokenizers.Tokenizer.from_str(adopted.serialized)
    for content, id_ in adopted.control_ids.items():
        if library.token_to_id(content) != id_:
            raise ModelError(
                f"{path}: {content} has the id {id_}, the library gives it {library.token_to_id(content)}: the ids have"
                " gaps, or it is an ordinary token too; fetch the checkpoint again"
            )
    if (decoded := adopted.decode(adopted.encode(PROBE))) != PROBE:
        raise ModelError(f"{path}: a text does not come back: {PROBE!r} became {decoded!r}; {REMEDY}")
