"""Byte-level BPE with the Qwen2 split pattern, no normalizer, and every control token at a fixed id.

    ids 0-8     special, named by role: end_of_text, pad, turn_start, turn_end, fim_*, mask
    ids 9-14    added but not special (decoding keeps them): tool calls, tool responses, thinking (reserved)
    id  15      a spare; then the 256 bytes, the merges, and spares up to `vocab_size` (a multiple of 64)
    ids 15, 16  replace the spare if a corpus has repositories: repository name and file separator

Merges are learned in two steps: first within words, without the preceding character; then a space, underscore or other
such character is joined to a word's first piece. So a word splits into the same pieces everywhere, and " blanket" in a
prompt can be copied into "merge_blanket"; a model this small never learns that "_b" "lanket" is the same word
(docs/LOG.md). On separating spaces from words: Gow-Smith et al. 2022, arXiv:2204.04058.

`encode` never returns a control token, whatever the text contains ("no injection"): it uses a second tokenizer without
control tokens, and `chat.render` inserts these where they belong. A tokenizer is defined by its `tokenizer.json`:
`hash` is the sha256 of that file's bytes, which stay the same from stage to stage. Code refers to roles, never to ids.
`adopt` reuses the tokenizer of a pretrained checkpoint.

`WordCache` encodes word by word with a cache, at three times the speed of the library and with the same ids. The
library spends its time in the split pattern's Unicode classes. ASCII text does not need them: Python's `re` splits it
by the same pattern with ASCII classes, and a known word costs one dictionary lookup. Other text goes to the library, in
chunks that begin where a line begins with a non-space character. No match spans such a boundary: every alternative that
contains a line feed ends with it unless only whitespace follows.

`TEMPLATE` is the chat template in Jinja, for programs that run our models: transformers, llama.cpp, vLLM. We train on
the output of `chat.render`; the template must produce the same string, and a test compares the ids and assistant masks
of both in transformers. `{% generation %}` marks what is trained (transformers' `return_assistant_tokens_mask`).

Not guaranteed: that lone surrogates survive (they become U+FFFD); word-by-word encoding for a different split pattern
(`Tokenizer` checks `splits_by_pattern` first); in the template, canonical arguments (`arguments` given as JSON text are
passed through, while `chat.render` re-serializes them with ", " and ": ") and results sorted into call order
(`chat.render` sorts them).

**Adoption** of a pretrained checkpoint's tokenizer: its ids are kept, and missing control tokens are added.

    <checkpoint>/tokenizer.json, rows of its embedding -> Adopted: a Tokenizer, and which ids are new

Every id keeps its meaning, so the checkpoint's weights stay valid. A missing control token takes the first unused id;
the remaining ids, up to the number of embedding rows rounded up to a multiple of 64, become spares. Byte-level BPE only
(Qwen2, Qwen3, LLaMA 3): its tokens have known bytes, which are needed for bits per byte, fill-in-the-middle and the
server's grammars.

Two things are removed: whatever `tokenizer.json` puts around a text (LLaMA's begin-of-text token), because documents
and turns have our own delimiters; and Qwen's NFC normalization, so that every text decodes to itself and llama.cpp,
which has no NFC, splits identically. Only text that is not in NFC gets ids that differ from the checkpoint's.

Not guaranteed: that the checkpoint's own begin-of-text or end-of-text token is used; ours is `SPECIAL`.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from pipeline.run.errors import ModelError
from pipeline.run.types import JsonObject

SPECIAL = {
    "end_of_text": "<|endoftext|>",
    "pad": "<|pad|>",
    "turn_start": "<|im_start|>",
    "turn_end": "<|im_end|>",
    "fim_prefix": "<|fim_prefix|>",
    "fim_middle": "<|fim_middle|>",
    "fim_suffix": "<|fim_suffix|>",
    "fim_pad": "<|fim_pad|>",
    "mask": "<|mask|>",
}
ADDED = {
    "tool_call": "<tool_call>",
    "tool_call_end": "</tool_call>",
    "tool_response": "<tool_response>",
    "tool_response_end": "</tool_response>",
    "think": "<think>",
    "think_end": "</think>",
}
REPOSITORY = {"repo_name": "<|repo_name|>", "file_sep": "<|file_sep|>"}  # only for a corpus with repositories
SPARE = re.compile(r"<\|unused_\d+\|>")
SURROGATES = re.compile("[\ud800-\udfff]")
WORD_WITH_LEAD = re.compile(r"[^\r\nA-Za-z0-9][A-Za-z]+", re.ASCII)  # a word with the character before it
JOINED_SHARE = 0.3  # share of merges that join such a character to a word's first piece
MAX_COUNTED_WORDS = 500_000  # distinct words counted for the joins


class Tokenizer:
    """Converts text to ids and back. `vocab_size` includes the spares at the end, which never occur in text."""

    vocab_size: int
    serialized: str  # the text of tokenizer.json
    hash: str  # sha256 of `serialized`
    source: str  # where it was loaded from, for messages
    token_bytes: list[bytes]  # exact bytes of each id; b"" for specials and spares
    end_of_text: int
    pad: int
    turn_start: int
    turn_end: int
    fim_prefix: int
    fim_middle: int
    fim_suffix: int
    fim_pad: int
    mask: int
    tool_call: int
    tool_call_end: int
    tool_response: int
    tool_response_end: int
    think: int
    think_end: int
    repo_name: int | None  # text/repositories.py
    file_sep: int | None

    def __init__(self, serialized: str, source: str = "this tokenizer") -> None:
        """Build from the text of a tokenizer.json.

        Raises ModelError if it is not byte-level BPE, lacks a role, or has two control tokens with the same id.
        """
        self.serialized = serialized
        self.source = source
        self.hash = hashlib.sha256(serialized.encode()).hexdigest()
        try:
            state = json.loads(serialized)
            added = {entry["content"]: entry for entry in state["added_tokens"]}
            vocab: dict[str, int] = dict(state["model"]["vocab"])
            state["added_tokens"] = []
            self._plain = tokenizers.Tokenizer.from_str(json.dumps(state))
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{source}: not a BPE tokenizer.json ({error})") from error
        self._words = (
            WordCache(self._plain) if splits_by_pattern(state["pre_tokenizer"]) and not state["normalizer"] else None
        )
        if '"ByteLevel"' not in json.dumps(state["decoder"]):
            raise ModelError(f"{source}: expected byte-level BPE (decoder ByteLevel), found {state['decoder']}")
        self.control_ids = {content: entry["id"] for content, entry in added.items()}  # every added token by its text
        for role, content in (SPECIAL | ADDED).items():
            if content not in self.control_ids:
                raise ModelError(f"{source}: has no {content} ({role}); import the model as `base` (stage base)")
            setattr(self, role, self.control_ids[content])
        self.repo_name, self.file_sep = (self.control_ids.get(content) for content in REPOSITORY.values())
        self._check_distinct()
        self.vocab_size = 1 + max(*vocab.values(), *self.control_ids.values())
        self._fill_bytes(vocab, added)

    def _check_distinct(self) -> None:
        """Raise ModelError if two control tokens share an id: if padding had the end-of-turn id, other tools would mask
        the latter.
        """
        content_of = {id_: content for content, id_ in self.control_ids.items()}
        for content, id_ in self.control_ids.items():
            if content_of[id_] != content:
                raise ModelError(
                    f"{self.source}: {content} and {content_of[id_]} have the same id {id_}; give each its own id"
                )

    def _fill_bytes(self, vocab: dict[str, int], added: dict[str, JsonObject]) -> None:
        byte_of = byte_of_character()
        self._literal = [b""] * self.vocab_size  # the bytes of each id, including specials
        for content, id_ in vocab.items():
            if content not in added:
                self._literal[id_] = bytes(byte_of[c] for c in content)
        self.token_bytes = list(self._literal)
        self.special_ids = frozenset(entry["id"] for entry in added.values() if entry["special"])
        for content, entry in added.items():
            self._literal[entry["id"]] = content.encode()
            self.token_bytes[entry["id"]] = b"" if entry["special"] else content.encode()

    def encode(self, text: str) -> list[int]:
        """Ids of a text; never an added token, even if the text spells one. Lone surrogates become U+FFFD."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """`encode` each text. For split patterns other than ours, the library encodes, in its own threads."""
        try:
            return self._encode_valid(texts)
        except TypeError:  # the library's error for a str that UTF-8 cannot encode
            return self._encode_valid([SURROGATES.sub("\ufffd", text) for text in texts])

    def _encode_valid(self, texts: list[str]) -> list[list[int]]:
        if self._words is not None:
            return [self._words.encode(text) for text in texts]
        return [encoding.ids for encoding in self._plain.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of the ids: their joined bytes, with U+FFFD for invalid UTF-8. Tool-call tokens stay visible."""
        table = self.token_bytes if skip_special else self._literal
        return b"".join([table[id_] for id_ in ids]).decode("utf-8", errors="replace")

    @cached_property
    def byte_lengths(self) -> np.ndarray:
        """Number of UTF-8 bytes of each id, (V,) int64: the denominator of bits per byte."""
        return np.array([len(b) for b in self.token_bytes], dtype=np.int64)

    @cached_property
    def byte_ids(self) -> list[int]:
        """The id of each single byte, (256,), for encoding a fragment that is not valid UTF-8."""
        id_of = {literal: id_ for id_, literal in enumerate(self.token_bytes) if len(literal) == 1}
        return [id_of[bytes([b])] for b in range(256)]

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read `folder/tokenizer.json`. Raises ModelError if it is missing or unusable."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{path}: expected a tokenizer here, found none; run dvc repro stage_tokenizer")
        return cls(path.read_bytes().decode(), source=str(path))

    def save(self, folder: Path) -> None:
        """Write tokenizer.json (byte for byte), tokenizer_config.json and chat_template.jinja for transformers."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_bytes(self.serialized.encode())
        (folder / "chat_template.jinja").write_bytes(TEMPLATE.encode())
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",  # transformers' Qwen2Tokenizer would apply NFC
            "clean_up_tokenization_spaces": False,
            "eos_token": SPECIAL["turn_end"],
            "pad_token": SPECIAL["pad"],
            "chat_template": TEMPLATE,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def train(cls, texts: Iterator[str], vocab_size: int, *, repositories: bool = False) -> "Tokenizer":
        """Learn the merges from an iterator of texts; spares fill the vocabulary if there is too little text.

        `repositories`: use the REPOSITORY control tokens instead of spare 15, and learn one merge fewer.
        Raises ValueError if `vocab_size` is not a multiple of 64 or leaves no room for a merge.
        """
        last = REPOSITORY.values() if repositories else ["<|unused_0|>"]
        first = [*SPECIAL.values(), *ADDED.values(), *last]
        if vocab_size % 64 or vocab_size <= len(first) + 256:
            raise ValueError(f"vocab_size: expected a multiple of 64, at least 320, found {vocab_size}")
        joined = round(JOINED_SHARE * (vocab_size - len(first) - 256))
        split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        words = Counter[str]()

        def counted() -> Iterator[str]:
            for text in texts:
                words.update(ASCII_WORDS.findall(text))
                if len(words) > 2 * MAX_COUNTED_WORDS:  # bounds memory; words this rare yield no merges
                    frequent = words.most_common(MAX_COUNTED_WORDS)
                    words.clear()
                    words.update(dict(frequent))
                yield SURROGATES.sub("\ufffd", text)

        learner = tokenizers.Tokenizer(models.BPE())
        bare = pre_tokenizers.Split(Regex(r"\p{L}+"), behavior="isolated")
        learner.pre_tokenizer = pre_tokenizers.Sequence([split, bare, to_bytes])
        learner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - joined,
            special_tokens=first,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        learner.train_from_iterator(counted(), trainer)
        learner.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
        state = json.loads(learner.to_str())
        for entry in state["added_tokens"]:  # the trainer marks all as special: parsers would lose tool calls
            entry["special"] = entry["content"] not in ADDED.values()
        for pair in _joins(learner, words, joined):
            state["model"]["vocab"]["".join(pair)] = len(state["model"]["vocab"])
            state["model"]["merges"].append(list(pair))
        fill(state, [], vocab_size)
        return cls(json.dumps(state, ensure_ascii=False, indent=1))


def _joins(bare: tokenizers.Tokenizer, words: Counter[str], count: int) -> list[tuple[str, str]]:
    """The most frequent pairs of the character before a word and the word's first piece; ties are broken by text."""
    with_lead = {word: number for word, number in words.items() if WORD_WITH_LEAD.fullmatch(word) and word[0].isascii()}
    pairs = Counter[tuple[str, str]]()
    for number, encoding in zip(with_lead.values(), bare.encode_batch(list(with_lead)), strict=True):
        first, second = encoding.tokens[:2]
        pairs[first, second] += number
    return sorted(pairs, key=lambda pair: (-pairs[pair], pair))[:count]


def fill(state: JsonObject, contents: list[str], vocab_size: int) -> None:
    """Append added tokens to the parsed tokenizer.json, then spares until `vocab_size` ids exist."""
    entries = state["added_tokens"]
    next_id = 1 + max(*state["model"]["vocab"].values(), *(entry["id"] for entry in entries))
    spare = sum(bool(SPARE.fullmatch(entry["content"])) for entry in entries)
    spares = (f"<|unused_{spare + n}|>" for n in range(vocab_size - next_id - len(contents)))
    for content in (*contents, *spares):
        entries.append(
            {
                "id": next_id,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": content not in ADDED.values(),
            }
        )
        next_id += 1


def byte_of_character() -> dict[str, int]:
    """The byte for each GPT-2 character: printable Latin-1 maps to itself, the other bytes start at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(rest)}


# --- words -----------------------------------------------------------------------------------------------------------


# The split pattern of Qwen2 (llama.cpp's pre-tokenizer `qwen2`): single digits; line feeds end a piece.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ASCII_WORDS = re.compile(
    PATTERN.replace(r"[^\s\p{L}\p{N}]", r"[^\sA-Za-z0-9]")
    .replace(r"[^\r\n\p{L}\p{N}]", r"[^\r\nA-Za-z0-9]")
    .replace(r"\p{L}", "[A-Za-z]")
    .replace(r"\p{N}", "[0-9]"),
    re.ASCII,
)
LINE = re.compile(r"(?<=\n)(?=\S)")  # Python's \s includes the pattern's, so no chunk starts with whitespace
MAX_CACHED_LENGTH, MOST = 64, 1 << 17  # characters per word, and words: about 30 MB


def splits_by_pattern(pre_tokenizer: JsonObject | None) -> bool:
    """Whether a tokenizer.json's pre_tokenizer only splits by PATTERN and then maps bytes."""
    steps = (pre_tokenizer or {}).get("pretokenizers", [])
    if [step.get("type") for step in steps] != ["Split", "ByteLevel"]:
        return False
    split, byte_level = steps
    return (
        split["pattern"] == {"Regex": PATTERN}
        and split["behavior"] == "Isolated"
        and not split["invert"]
        and not byte_level["add_prefix_space"]
        and not byte_level["use_regex"]
    )


class WordCache(dict[str, list[int]]):
    """Word -> ids: a cache, filled on demand."""

    def __init__(self, plain: tokenizers.Tokenizer) -> None:
        """`plain` must have no added tokens and split by PATTERN."""
        super().__init__()
        self._plain = plain

    def __missing__(self, word: str) -> list[int]:
        ids = self._encode_with_library(word)
        if len(self) >= MOST:
            self.clear()
        if len(word) <= MAX_CACHED_LENGTH:
            self[word] = ids
        return ids

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Raises TypeError for lone surrogates, like the library."""
        if text.isascii():
            return list(chain.from_iterable(map(self.__getitem__, ASCII_WORDS.findall(text))))
        ids: list[int] = []
        for line in LINE.split(text):
            ids += self.encode(line) if line.isascii() else self._encode_with_library(line)
        return ids

    def _encode_with_library(self, text: str) -> list[int]:
        return self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids


# --- chat template ---------------------------------------------------------------------------------------------------


TEMPLATE = """\
{%- set ns = namespace(first=0) -%}
{%- set opens = messages and messages[0].role in ['system', 'developer'] -%}
{%- if opens or tools -%}
    {{- '<|im_start|>system\\n' -}}
    {%- if opens -%}
        {%- set ns.first = 1 -%}
        {{- messages[0].content or '' -}}
        {{- '\\n\\n' if tools and messages[0].content else '' -}}
    {%- endif -%}
    {%- if tools -%}
        {{- 'Tools you can call:\\n<tools>\\n' -}}
        {%- for tool in tools -%}
            {{- (tool.function if tool.function is defined else tool) | tojson }}{{ '\\n' -}}
        {%- endfor -%}
        {{- '</tools>' -}}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages[ns.first:] -%}
    {%- if message.role == 'assistant' -%}
        {{- '<|im_start|>assistant\\n' -}}
        {%- generation -%}
        {%- set text = (message.content or '') | trim -%}
        {{- text -}}
        {%- for call in message.tool_calls or [] -%}
            {%- set function = call.function if call.function is defined else call -%}
            {{- '\\n' if text or not loop.first else '' -}}
            {{- '<tool_call>\\n{"name": ' -}}{{- function.name | tojson -}}{{- ', "arguments": ' -}}
            {{- function.arguments if function.arguments is string else function.arguments | tojson -}}
            {{- '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>' -}}
        {%- endgeneration -%}
        {{- '\\n' -}}
    {%- elif message.role == 'tool' -%}
        {{- '<|im_start|>tool\\n<tool_response>\\n' -}}{{- message.content or '' -}}
        {{- '\\n</tool_response><|im_end|>\\n' -}}
    {%- else -%}
        {{- '<|im_start|>' -}}{{- 'system' if message.role == 'developer' else message.role -}}{{- '\\n' -}}
        {{- message.content or '' -}}{{- '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


# -- tokenizers of other models ----------------------------------------------------------------------------------------


MULTIPLE = 64  # embedding rows are padded to a multiple of this, which suits all matrix units
MAX_ROWS = 4  # embedding rows per token; the smallest Qwen models have 1.002
CONTROL = re.compile(r"<.+>|\[.+\]", re.DOTALL)  # the form of control tokens; other added tokens are text
PROBE = "Ünï 🙂\r\n\tdef f(x):\n    return  x + 1234567 # it's  e\u0301\u3000日本\x00\x7f"
REMEDY = "use a checkpoint with byte-level BPE: Qwen2, Qwen3 or LLaMA 3"


@dataclass(frozen=True)
class Adopted:
    """An adopted tokenizer and the origin of its ids, for the checkpoint's embedding."""

    tokenizer: Tokenizer
    known: tuple[int, ...]  # ids used by the checkpoint's own tokenizer
    fresh: tuple[int, ...]  # ids of the added control tokens


def adopt(folder: Path, rows: int) -> Adopted:
    """Adopt `folder`/tokenizer.json; `rows`: number of rows of the model's embedding.

    Raises ModelError, with a remedy, if the tokenizer is missing, is not byte-level BPE, or changes text.
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
        entries[content]["special"] = True  # Qwen does not mark its FIM tokens as special; they would be seen as text
    for content in ADDED.values() & entries.keys():
        entries[content]["special"] = False  # decoding must keep the tool calls
    missing = [content for content in (SPECIAL | ADDED).values() if content not in entries]
    if max(rows, max(used)) > MAX_ROWS * len(used):  # the ids in between would become spares
        raise ModelError(
            f"{folder}/config.json: vocab_size {rows}, but {path} has {len(used)} tokens with a maximum id"
            f" of {max(used)}; expected both files from the same checkpoint"
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
            f"{path} is missing{f' (found only {other[0]})' if other else ''}: continued training uses the checkpoint's"
            " tokenizer; create the file with AutoTokenizer.from_pretrained(...).save_pretrained(...) in transformers"
        )
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        kind, vocab = state["model"]["type"], state["model"].get("vocab")
        state["added_tokens"] = state.get("added_tokens") or []
        contents = [entry["content"] for entry in state["added_tokens"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: not a tokenizer.json ({error!r:.200}); download the checkpoint again") from error
    if kind != "BPE" or not isinstance(vocab, dict) or not vocab:
        raise ModelError(f"{path}: expected BPE, found {kind} with {len(vocab or ())} tokens; {REMEDY}")
    if len(set(contents)) < len(contents):
        raise ModelError(f"{path}: an added token is listed twice; download the checkpoint again")
    return state


def _require_byte_level_bpe(state: JsonObject, path: Path) -> None:
    """Raise ModelError, naming the key, unless this is byte-level BPE that never silently loses or changes text."""
    model, steps = state["model"], json.dumps(state.get("pre_tokenizer"))
    if model.get("byte_fallback") or '"ByteLevel"' not in json.dumps(state.get("decoder")):
        raise ModelError(
            f"{path}: a SentencePiece-style tokenizer (byte_fallback {model.get('byte_fallback', False)}, decoder"
            f" {(state.get('decoder') or {}).get('type')}), as in LLaMA 2 and Mistral: its tokens represent"
            f" characters with rewritten spaces, not bytes. This is not supported; {REMEDY}"
        )
    if (state.get("normalizer") or {"type": "NFC"})["type"] != "NFC":
        raise ModelError(
            f"{path}: normalizer {state['normalizer']['type']} changes text; expected no normalizer or NFC; {REMEDY}"
        )
    if '"ByteLevel"' not in steps or '"add_prefix_space": true' in steps:
        raise ModelError(
            f"{path}: expected a ByteLevel pre_tokenizer without add_prefix_space, found {steps[:200]}; {REMEDY}"
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
            f"{path}: {len(words)} added tokens are ordinary text ({words[0]!r}), but text is encoded without added"
            f" tokens here, so the ids would differ from the checkpoint's; {REMEDY}"
        )


def _check(adopted: Tokenizer, path: Path) -> None:
    """Raise ModelError if the library assigns different ids, or text does not survive a round trip."""
    library = tokenizers.Tokenizer.from_str(adopted.serialized)
    for content, id_ in adopted.control_ids.items():
        if library.token_to_id(content) != id_:
            raise ModelError(
                f"{path}: {content} has id {id_}, but the library assigns {library.token_to_id(content)}: the ids have"
                " gaps, or it is also an ordinary token; download the checkpoint again"
            )
    if (decoded := adopted.decode(adopted.encode(PROBE))) != PROBE:
        raise ModelError(f"{path}: text does not survive a round trip: {PROBE!r} became {decoded!r}; {REMEDY}")
