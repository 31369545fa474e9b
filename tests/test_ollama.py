"""Ollama's template gives the same text as training, executed by Go if it is installed, otherwise as recorded from
an earlier run.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pipeline.export import gguf
from pipeline.text import chat
from pipeline.text.tokenizer import SPECIAL

GOLDEN = Path(__file__).parent / "golden" / "ollama"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "The time.",
        "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}, "required": []},
    },
}
ASKED = [{"role": "user", "content": "What is 2 + 2?\n\nSay it.  "}]
CALLED = [
    {"role": "user", "content": "Weather in Oslo and Rome?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": "get_weather", "arguments": {"city": name}}}
            for name in ("Oslo", "Rome")
        ],
    },
    {"role": "tool", "content": '{"degrees": 3}'},
    {"role": "tool", "content": '{"degrees": 21}'},
    {"role": "assistant", "content": "3 and 21 degrees."},
    {"role": "user", "content": "And the time?"},
    {
        "role": "assistant",
        "content": "Let me look.",
        "tool_calls": [{"type": "function", "function": {"name": "clock", "arguments": {}}}],
    },
    {"role": "tool", "content": "noon"},
]
SYSTEM = {"role": "system", "content": "Be brief."}
CONVERSATIONS: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = [
    (ASKED, []),
    ([SYSTEM, *ASKED], []),
    (ASKED, [WEATHER]),
    ([SYSTEM, *ASKED], [WEATHER, CLOCK]),
    (CALLED, [WEATHER, CLOCK]),
    ([*ASKED, {"role": "assistant", "content": "4"}, *ASKED], []),
]


def cases() -> list[dict[str, Any]]:
    """What Go is given: every conversation, and code to fill in."""
    talk = [
        {"template": gguf.OLLAMA_TEMPLATE, "messages": messages, "tools": tools} for messages, tools in CONVERSATIONS
    ]
    return [*talk, {"template": gguf.OLLAMA_TEMPLATE, "prompt": "def f(", "suffix": "    return x\n"}]


def spaced(text: str) -> str:
    """Write JSON that is alone on its line as training does, but with sorted keys, since Ollama chooses their order."""

    def again(match: re.Match[str]) -> str:
        return json.dumps(json.loads(match[0]), ensure_ascii=False, sort_keys=True)

    return re.sub(r"^\{.*\}$", again, text, flags=re.MULTILINE)


def golden() -> list[dict[str, Any]]:
    return json.loads((GOLDEN / "texts.json").read_text(encoding="utf-8"))


def test_the_texts_are_those_of_training() -> None:
    texts = [case["text"] for case in golden()]
    for (messages, tools), text in zip(CONVERSATIONS, texts, strict=False):
        expected = chat.render_text(messages, tools, generation_prompt=True)
        assert spaced(text) == spaced(expected)
    assert texts[-1] == f"{SPECIAL['fim_prefix']}def f({SPECIAL['fim_suffix']}    return x\n{SPECIAL['fim_middle']}"
    assert len(texts) == len(CONVERSATIONS) + 1


def test_the_golden_file_is_of_these_cases() -> None:
    assert [case["given"] for case in golden()] == cases()


@pytest.mark.oracle
def test_go_gives_the_golden_texts_again(tmp_path: Path) -> None:
    """To recreate the file, write what this compares."""
    if shutil.which("go") is None:
        pytest.skip("needs go (1.19 or newer) to execute Ollama's template")
    command = ["go", "run", str(GOLDEN / "main.go")]
    environment = {
        "GOCACHE": str(tmp_path),
        "GOFLAGS": "-mod=mod",
        "PATH": "/usr/local/go/bin:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(tmp_path),
    }
    done = subprocess.run(
        command, input=json.dumps(cases()), capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [case["text"] for case in golden()]


def test_the_modelfile_names_weights_context_stop_and_template(tmp_path: Path) -> None:
    gguf.write_modelfile(tmp_path / "ollama/Modelfile", "../gguf/a-q8_0.gguf", 512, temperature=0.8)
    text = (tmp_path / "ollama/Modelfile").read_text(encoding="utf-8")
    head, _, template = text.partition('TEMPLATE """')
    assert head.splitlines() == [
        "FROM ../gguf/a-q8_0.gguf",
        "PARAMETER num_ctx 512",
        "PARAMETER temperature 0.8",
        'PARAMETER stop "<|im_end|>"',
    ]
    assert template == f'{gguf.OLLAMA_TEMPLATE}"""\n'
    assert '"""' not in gguf.OLLAMA_TEMPLATE
