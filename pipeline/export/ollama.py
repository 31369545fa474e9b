"""Ollama's Modelfile: the model's file, its context, where to stop, and its template in Go's words.

    ollama create mine -f models/deploy/ollama/Modelfile

Ollama runs no Jinja. TEMPLATE says in Go's text/template what `text/template.py` says in Jinja, and the insertion of code between
a prefix and a suffix. What Ollama gives it: `.System` the system messages joined, `.Messages` all of them, `.Tools`, `.Prompt` and
`.Suffix` of a completion; a tool's `.Function` prints as JSON, and `json` prints what it is given so.

Not promised: the spaces of JSON; Ollama's has none after commas and colons, the model was trained on those with one.
"""

from pathlib import Path

from pipeline.text.chat import CALL, CALL_END, END, RESPONSE, RESPONSE_END, START
from pipeline.text.tokenizer import SPECIAL

_PREFIX, _SUFFIX, _MIDDLE = (SPECIAL[name] for name in ("fim_prefix", "fim_suffix", "fim_middle"))
TEMPLATE = "".join((
    "{{ if .Suffix }}", _PREFIX, "{{ .Prompt }}", _SUFFIX, "{{ .Suffix }}", _MIDDLE,
    "{{ else }}",
    "{{ if or .System .Tools }}", START, "system\n{{ .System }}",
    "{{ if .Tools }}{{ if .System }}\n\n{{ end }}Tools you can call:\n<tools>\n",
    "{{ range .Tools }}{{ .Function }}\n{{ end }}</tools>{{ end }}", END, "\n{{ end }}",
    "{{ range .Messages }}",
    '{{ if eq .Role "user" }}', START, "user\n{{ .Content }}", END, "\n",
    '{{ else if eq .Role "assistant" }}', START, "assistant\n{{ .Content }}{{ $said := .Content }}",
    "{{ range $number, $call := .ToolCalls }}{{ if or $number $said }}\n{{ end }}", CALL,
    '\n{"name": "{{ .Function.Name }}", "arguments": {{ .Function.Arguments }}}\n', CALL_END, "{{ end }}", END, "\n",
    '{{ else if eq .Role "tool" }}', START, "tool\n", RESPONSE, "\n{{ .Content }}\n", RESPONSE_END, END, "\n",
    "{{ end }}{{ end }}", START, "assistant\n{{ end }}",
))  # fmt: skip


def write(path: Path, weights: str, context: int, *, temperature: float) -> None:
    """Write the Modelfile of the GGUF file `weights`, a path from where the Modelfile lies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        f"FROM {weights}",
        f"PARAMETER num_ctx {context}",
        f"PARAMETER temperature {temperature:g}",
        f'PARAMETER stop "{END}"',
        f'TEMPLATE """{TEMPLATE}"""',
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
