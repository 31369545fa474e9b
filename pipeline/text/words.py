"""Encoding word by word with a memory: three times the speed of the library's pipeline, with the same ids.

The library spends its time in the split pattern's Unicode classes. ASCII text needs none of them: Python's `re` splits
it by the same pattern with ASCII classes, and a word met before costs a dictionary look-up. The rest goes to the
library, in stretches that begin at a line's first character, where no match of the pattern can reach across: every
alternative that holds a line feed ends with it unless only white space follows.

Not promised: anything for another split pattern; `Tokenizer` asks `fits` first.
"""

import re
from itertools import chain
from typing import Any

import tokenizers

# The split pattern of Qwen2 (llama.cpp's pre-tokenizer `qwen2`): each digit alone, line feeds end a piece.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ASCII_WORDS = re.compile(PATTERN.replace(r"[^\s\p{L}\p{N}]", r"[^\sA-Za-z0-9]")
                         .replace(r"[^\r\n\p{L}\p{N}]", r"[^\r\nA-Za-z0-9]")
                         .replace(r"\p{L}", "[A-Za-z]").replace(r"\p{N}", "[0-9]"), re.ASCII)  # fmt: skip
LINE = re.compile(r"(?<=\n)(?=\S)")  # Python's \s holds all of the pattern's, so no white space follows here
LONGEST, MOST = 64, 1 << 17  # characters of a word, and words, that are remembered: about 30 MB


def fits(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Whether a tokenizer.json splits by PATTERN and then maps bytes, and does nothing else."""
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


class Words(dict[str, list[int]]):
    """Word -> ids, filled as words are met."""

    def __init__(self, plain: tokenizers.Tokenizer) -> None:
        """`plain` must know no added tokens and split by PATTERN."""
        super().__init__()
        self._plain = plain

    def __missing__(self, word: str) -> list[int]:
        ids = self._library(word)
        if len(self) >= MOST:
            self.clear()
        if len(word) <= LONGEST:
            self[word] = ids
        return ids

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Raises TypeError, as the library does, for lone surrogates."""
        if text.isascii():
            return list(chain.from_iterable(map(self.__getitem__, ASCII_WORDS.findall(text))))
        ids: list[int] = []
        for line in LINE.split(text):
            ids += self.encode(line) if line.isascii() else self._library(line)
        return ids

    def _library(self, text: str) -> list[int]:
        return self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids
