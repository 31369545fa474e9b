"""A long text on which two tokenizers must agree, and conversations on which two templates must."""

import itertools
import random
from pathlib import Path
from typing import Any

from pipeline.export import smoke

ROOT = Path(__file__).parents[1]
# first letter and number of letters of alphabets, syllabaries and signs
SCRIPTS = {
    "latin": (0x61, 26),
    "accented": (0xC0, 300),
    "greek": (0x391, 60),
    "cyrillic": (0x410, 64),
    "hebrew": (0x5D0, 27),
    "arabic": (0x621, 42),
    "devanagari": (0x904, 80),
    "thai": (0xE01, 58),
    "georgian": (0x10D0, 33),
    "hangul": (0xAC00, 11_000),
    "hiragana": (0x3041, 86),
    "katakana": (0x30A1, 90),
    "han": (0x4E00, 20_000),
    "rare han": (0x20000, 40_000),
    "emoji": (0x1F300, 700),
    "hands": (0x1F446, 20),
    "marks": (0x300, 112),
    "maths": (0x2200, 256),
    "letterlike": (0x1D400, 900),
    "digits": (0x660, 10),
    "fractions": (0x2150, 60),
}
SPACES = (
    " ",
    "  ",
    "\n",
    "\n\n",
    "\t",
    " \n ",
    "   \n\n\n",
    "\r\n",
    "\u00a0",
    "\u3000",
    "\u2009",
    "\u200b",
    "\u200d",
    "\ufe0f",
    "\x85",
)
JOINTS = ("", "-", "'", "’", "_", ".", ", ", "'s ", "'LL ", "(", ") ", "!!", "=", "/", "7", "12345", "½")
CONTRACTIONS = "I'm we're they'VE she'd it'S don't you'LL o'clock 'tis y'all's"


def long_text() -> str:
    """Python, shell, English and YAML of this repository, and words of many scripts with all joints and spaces.

    It contains no control tokens: programs disagree with `encode` on those by design.
    """
    own = ["pipeline/batches/*.py", "pipeline/learning/*.py", "README.md", ".ci/run", "Makefile", "dvc.yaml"]
    parts = [path.read_text(encoding="utf-8") for pattern in own for path in sorted(ROOT.glob(pattern))]
    return "\n".join([smoke.probe(), *parts, CONTRACTIONS, _scripts(random.Random(7), 3_000)])


def _scripts(draw: random.Random, words: int) -> str:
    pieces: list[str] = []
    names = itertools.cycle(SCRIPTS)
    for _ in range(words):
        first, count = SCRIPTS[next(names) if draw.random() < 0.8 else draw.choice(list(SCRIPTS))]
        pieces.append("".join(chr(first + draw.randrange(count)) for _ in range(draw.randrange(1, 7))))
        pieces.append(
            draw.choice(JOINTS) if draw.random() < 0.4 else draw.choice(SPACES) if draw.random() < 0.4 else " "
        )
    return "".join(pieces)


WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALLED: dict[str, Any] = {
    "role": "assistant",
    "content": "Let me look.",
    "tool_calls": [
        {"type": "function", "id": "1", "function": {"name": "get_weather", "arguments": {"city": "Köln 🌧"}}}
    ],
}
CONVERSATIONS: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = [
    ([{"role": "user", "content": "What is 2 + 2?\n\nSay it.  "}], []),
    ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße 你好"}], []),
    ([{"role": "user", "content": "Weather in Köln?"}], [WEATHER]),
    (
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Weather in Köln?"},
            CALLED,
            {"role": "tool", "content": '{"degrees": 3}'},
            {"role": "assistant", "content": "3 degrees."},
            {"role": "user", "content": "Thanks"},
        ],
        [WEATHER],
    ),
]
