"""Practice in choosing: a few short tools, and one request after the other for one, two or three of them.

What a small model learns last is which of the offered tools is meant: it takes some ten thousand choices (docs/LOG.md), and
half of the conversations of tools.py offer one tool alone. Nearly all tools are invented, many under a name that says
nothing, so that the description has to be read.
For training alone: a request may follow a call whose result nobody showed.

In: split, seed, number. Out: `Dialogue` records of kind "choice", a pure function of the three; the category is the number
of tools. No wording, tool or opening request of the test split occurs. Not promised: sense.
"""

import json
from random import Random

from pipeline.streams.records import Dialogue, Message
from pipeline.synthesis import tool_requests as requests
from pipeline.synthesis.tool_dialogues import Request, Setting, one_of_each, others, several_of, stands_alone
from pipeline.synthesis.tool_inventions import invent, renamed, sibling
from pipeline.synthesis.tool_script import Script
from pipeline.synthesis.tool_shape import Tool, function
from pipeline.synthesis.toolbox import SEEN
from pipeline.synthesis.tools import belongs, calls

NUM_TOOLS = (2, 2, 3, 3, 4)
REAL, SIBLING, RENAMED = 0.1, 0.3, 0.3  # shares: of the toolbox, near-duplicate of an offered one, under another name
REFUSED, SEVERAL, TOGETHER = 0.1, 0.15, 0.3  # shares of the requests: no tool fits, calls of one tool, of two or three
ANSWERED = 0.1  # share of the calls whose results and closing words are there
SCHEMA, LENGTH = 240, 1_250  # characters: of a tool at most, and beyond which no request is added: about 500 tokens


def dialogue(split: str, seed: int, number: int) -> Dialogue:
    """Conversation `number` of a split ("train", "val")."""
    id_ = f"choice/{split}/{seed}/{number}"
    for attempt in range(1_000):
        script = _script(Random(f"{id_}/{attempt}"), split)
        if script is not None:
            made = script.close(id_, str(len(script.tools)))
            return Dialogue(id=id_, kind="choice", category=made.category, messages=made.messages, tools=made.tools)
    raise AssertionError(f"{id_}: no conversation in 1,000 draws")


def _script(rng: Random, split: str) -> Script | None:
    """One draw; None where names or values collide or a tool refuses what was asked."""
    tools = _tools(rng)
    size = sum(map(_size, tools))
    if len({tool.name for tool in tools}) < len(tools):
        return None
    setting, script = Setting(rng, invented=True), Script(tools)
    while size + sum(map(_length, script.messages)) < LENGTH:
        request = _request(setting, tools)
        text = requests.sentence(request[0], False, rng) if request else ""
        if request is None or not belongs(text, split):
            continue
        script.user(text)
        if not request[1]:
            script.say(rng.choice(requests.REFUSALS))
        elif any("error" in result for result in script.call(request[1])):
            return None
        elif rng.random() < ANSWERED:
            script.answer()
    return script


def _size(tool: Tool) -> int:
    return len(json.dumps(function(tool)["function"]))


def _length(message: Message) -> int:
    """About the characters that the chat format needs for a message."""
    return 20 + len(message["content"]) + sum(40 + len(name) + len(json.dumps(a)) for name, a in calls(message))


def _tools(rng: Random) -> list[Tool]:
    number, tools = rng.choice(NUM_TOOLS), list[Tool]()
    while len(tools) < number:
        base = rng.choice(tools) if tools and rng.random() < SIBLING else None
        if rng.random() < REAL:
            tool = rng.choice(SEEN)
        else:
            tool = sibling(base, rng) if base and base.run is None else invent(rng)
        tool = renamed(tool, rng) if rng.random() < RENAMED else tool
        if stands_alone(tool) and _size(tool) <= SCHEMA:
            tools.append(tool)
    return tools


def _request(setting: Setting, tools: list[Tool]) -> Request | None:
    """What is wished and the calls that serve it; None where the draw has none."""
    rng, form = setting.rng, setting.rng.random()
    if form < REFUSED:
        (wanted,) = others(setting, tools, 1, near=False)
        return one_of_each(setting, [wanted])[0], []
    if form < REFUSED + SEVERAL:
        return several_of(setting, rng.choice(tools))
    number = rng.choice((2, 2, 3)) if form < REFUSED + SEVERAL + TOGETHER else 1
    return one_of_each(setting, rng.sample(tools, min(len(tools), number)))
