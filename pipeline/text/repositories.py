"""A file preceded by context from its repository, in the format of Qwen2.5-Coder.

    <|repo_name|>mine
    <|file_sep|>mine/errors.py
    class Wrong(ValueError): ...            files that the last file imports, or excerpts of these
    <|file_sep|>mine/check.py
    from mine.errors import Wrong           the file's own text before the part that is trained on
    def check(...                           the part itself: not included in a `Context`

    Context <-> JSON in the column `context` of a corpus;  Context -> ids (Hui et al. 2024, arXiv:2409.12186, section 3)

The two control tokens exist in tokenizers trained on a corpus with repositories, and in Qwen's (2.5 and 3). No text
can spell them: they are inserted between texts encoded by `Tokenizer.encode`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from pipeline.run.errors import ModelError
from pipeline.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Context:
    """The model's input before a part of a file."""

    repository: str  # the repository's name
    files: tuple[tuple[str, str], ...]  # (path, text) of what the file imports, in import order
    path: str  # of the file
    before: str = ""  # its own text before the part
    names: tuple[str, ...] = ()  # for held-out parts: the names used from other files, as written; not rendered

    def to_json(self) -> str:
        """The JSON stored in the column `context`."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Context:
        """Parse what `to_json` returned."""
        fields = json.loads(text)
        files = tuple((path, content) for path, content in fields["files"])
        return cls(**fields | {"files": files, "names": tuple(fields["names"])})

    def alone(self) -> Context:
        """The same context without other files."""
        return replace(self, files=())


def encode(tokenizer: Tokenizer, contexts: Sequence[Context]) -> list[list[int]]:
    """The ids of each context. Raises ModelError for a tokenizer without the two control tokens."""
    if tokenizer.repo_name is None or tokenizer.file_sep is None:
        raise ModelError(
            f"{tokenizer.source}: has no control tokens for repositories; only the tokenizers of Qwen2.5 and Qwen3 and "
            "those trained here on repositories have them. Use a glob for the files instead "
            "(code: [repos/mine/**/*.py])"
        )
    encoded = []
    for context in contexts:
        texts = [f"{path}\n{text}" for path, text in (*context.files, (context.path, context.before))]
        name, *files = tokenizer.encode_batch([f"{context.repository}\n", *texts])
        ids = [tokenizer.repo_name, *name]
        for file in files:
            ids += [tokenizer.file_sep, *file]
        encoded.append(ids)
    return encoded
