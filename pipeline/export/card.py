"""The model card of an export: what it is, how each program runs it, how far each export is from its model, where it comes from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.model.transformer import Transformer
from pipeline.text.tokenizer import Tokenizer

CARD = Path(__file__).parent / "card.md"
PROGRAMS = """\
In other programs, for which these files were written and in which they were not run:

```
llama-cli -m models/deploy/@GGUF@ --jinja            # llama.cpp
ollama create @NAME@ -f models/deploy/ollama/Modelfile && ollama run @NAME@
vllm serve models/deploy
```
"""


def write(
    out: Path, model: Transformer, tokenizer: Tokenizer, lineage: Mapping[str, Any],
    parity: Mapping[str, Mapping[str, float | int]], *, name: str, gguf: str | None,
) -> None:  # fmt: skip
    """Write `out`/README.md; `gguf` is the path in `out` of the file to show with llama.cpp, if there is one."""
    lines = [f"| {key} | `{value}` |" for key, value in sorted(lineage.items()) if not isinstance(value, Mapping)]
    facts = {
        "PROGRAMS": "" if gguf is None else PROGRAMS.replace("@GGUF@", gguf),
        "NAME": name,
        "PARAMETERS": f"{model.num_parameters():,}",
        "CONTEXT": str(model.config.max_context),
        "VOCABULARY": str(tokenizer.vocab_size),
        "TOKENIZER": tokenizer.hash[:16],
        "PARITY": "\n".join(_row(kind, found) for kind, found in parity.items()),
        "LINEAGE": "\n".join(lines),
    }
    card = CARD.read_text(encoding="utf-8")
    for key, value in facts.items():
        card = card.replace(f"@{key}@", value)
    (out / "README.md").write_text(card, encoding="utf-8")


def _row(kind: str, found: Mapping[str, float | int]) -> str:
    label = "this directory" if kind == "huggingface" else f"GGUF {kind}"
    greedy = f"{found['greedy_equal']} of {found['greedy_tokens']}"
    numbers = f"{found['divergence']:.1e} | {found['max_difference']:.2g} | {found['perplexity']:+.3%}"
    return f"| {label} | {numbers} | {greedy} |"
