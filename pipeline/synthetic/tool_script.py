"""A conversation in the making: messages, executed calls, and the checks that every finished one has to pass.

`Script` appends messages in the OpenAI form and executes calls in its own `World`; `close` runs the checks and returns
the `Dialogue`. Checks (specs of the data, 2b): arguments are JSON and fit the schema, every call executes (an error is
allowed only where a repair follows), and every scalar of every argument is a span of what the user said, a value in an
earlier result, or the parameter's default. A violated check is a defect of the generator: AssertionError.

How people ask: the sentences around a wording, requests that no tool serves, and the assistant's plain sentences.

Each list of families ends in its held-out fifth (`HELD_OUT_SHARE`): training and validation draw from the part before
it, a test item of the quadrant "unseen template" from the held-out part alone.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from pipeline.ingest.records import Dialogue, Message
from pipeline.synthetic.tool_values import (
    ADJECTIVES,
    CITIES,
    FIRST_NAMES,
    NOUNS,
    Result,
    Tool,
    ToolError,
    Value,
    World,
    conjunction,
    execute,
    function,
    leaf_values,
    places,
    problems,
    words,
)

Call = tuple[Tool, dict[str, Value]]


@dataclass
class Script:
    """One conversation; `tools` are offered from the start, `late` are announced in a user turn."""

    tools: list[Tool]
    messages: list[Message] = field(default_factory=list)
    world: World = field(default_factory=World)
    late: list[Tool] = field(default_factory=list)
    calls: list[tuple[Call, Result]] = field(default_factory=list)
    num_calls: int = 0
    said: str = ""  # all user text so far
    results: list[Value] = field(default_factory=list)  # all scalars of results so far

    def user(self, text: str) -> None:
        """A user turn."""
        self.messages.append({"role": "user", "content": text})
        self.said += text + "\n"

    def announce(self, tool: Tool, before: str, after: str) -> None:
        """A user turn that brings a new tool, written the way the chat format lists tools."""
        self.late.append(tool)
        line = json.dumps(function(tool)["function"], ensure_ascii=False)
        self.messages.append({"role": "user", "content": f"{before}\n<tools>\n{line}\n</tools>\n{after}"})

    def say(self, text: str) -> None:
        """An assistant turn without calls."""
        self.messages.append({"role": "assistant", "content": text})

    def call(self, calls: list[Call]) -> list[Result]:
        """The assistant's calls, checked and executed; results are shown by `show`."""
        made = []
        self.calls = []
        for tool, arguments in calls:
            _check(self, tool, arguments)
            text = json.dumps(arguments, ensure_ascii=False)
            called = {"name": tool.name, "arguments": text}
            made.append({"id": f"call_{self.num_calls}", "type": "function", "function": called})
            self.num_calls += 1
            try:
                result = execute(tool, self.world, arguments)
            except ToolError as error:
                result = {"error": str(error)}
            self.calls.append(((tool, arguments), result))
        self.messages.append({"role": "assistant", "content": "", "tool_calls": made})
        return [result for _, result in self.calls]

    def show(self) -> None:
        """The results of the last calls, a message each."""
        first = self.num_calls - len(self.calls)
        for i, ((tool, _), result) in enumerate(self.calls):
            content = json.dumps(result, ensure_ascii=False)
            self.messages.append(
                {"role": "tool", "tool_call_id": f"call_{first + i}", "name": tool.name, "content": content}
            )
            self.results += leaf_values(result)

    def answer(self) -> None:
        """Show the last results and close with a sentence on each."""
        self.show()
        sentences = [sentence(tool, arguments, result) for (tool, arguments), result in self.calls]
        self.say(" ".join(dict.fromkeys(sentences)))

    def close(self, id_: str, category: str) -> Dialogue:
        """The finished record."""
        for _, result in self.calls:
            assert "error" not in result, (id_, category, self.messages)
        names = [tool.name for tool in (*self.tools, *self.late)]
        assert len(set(names)) == len(names), (id_, names)
        tools = [function(tool) for tool in self.tools]
        return Dialogue(id=id_, kind="tools", category=category, messages=self.messages, tools=tools)


def sentence(tool: Tool, arguments: dict[str, Value], result: Result) -> str:
    """The closing words on one call."""
    by_old_name = {tool.old_names.get(name, name): value for name, value in arguments.items()}
    return tool.answer.format_map({**by_old_name, **result})


def provenance(value: Value, said: str, results: list[Value], default: Value) -> str | None:
    """Where a scalar comes from: "user", "result", "default"; None if from nowhere."""
    text = "true" if value is True else "false" if value is False else str(value)
    if isinstance(value, str):
        found = text in said
    else:
        found = re.search(rf"(?<![\w.]){re.escape(text)}(?![\w]|\.\d)", said) is not None
    if found and value != "" and value is not None:
        return "user"
    if any(_within(value, leaf) for leaf in results):
        return "result"
    return "default" if value == default and type(value) is type(default) else None


def _within(value: Value, leaf: Value) -> bool:
    """Equal, or quoted in an error message."""
    if isinstance(value, str) and isinstance(leaf, str):
        return value == leaf or f'"{value}"' in leaf
    return value == leaf and isinstance(value, bool) == isinstance(leaf, bool)


def _check(script: Script, tool: Tool, arguments: dict[str, Value]) -> None:
    """Schema and provenance of one call."""
    assert tool in script.tools or tool in script.late, tool.name
    wrong = problems(function(tool)["function"]["parameters"], arguments)
    assert not wrong, (tool.name, arguments, wrong)
    for name, value in arguments.items():
        default = tool.params[name].schema.get("default", script)  # the script itself is no value's equal
        for leaf in leaf_values(value):
            assert provenance(leaf, script.said, script.results, default), (tool.name, name, leaf, script.said)


# -- tool_requests -----------------------------------------------------------------------------------------------------


HELD_OUT_SHARE = 0.2

FRAMES = (
    "{}.",
    "please {}.",
    "can you {}?",
    "could you please {}?",
    "I need you to {}.",
    "I want you to {}.",
    "{}, please.",
    "hello, {}.",
    "would you {} for me?",
    "my wish for today: {}.",
)
CHATTER = (
    "I am {first} and I just came home.",
    "It is a {adjective} day in {city}.",
    "My {noun} is {adjective} again.",
    "{first} told me about you.",
    "I have a {adjective} week in {city}.",
    "Sorry to bother you, I am {first}.",
    "I work with {first} in {city}.",
    "We have a {adjective} {noun} at home.",
    "Life is {adjective} since {first} left {city}.",
    "{first} sends greetings from {city}.",
)
UNSERVED = (
    "Write a poem about a {adjective} {noun}.",
    "Tell me a joke about a {noun}.",
    "Who invented the {noun}?",
    "What is the capital near {city}?",
    "Explain how a {noun} works.",
    "Tell me the history of {city}.",
    "What is the meaning of the word {noun}?",
    "Sing a song about {city}.",
    "Why is the {noun} {adjective}?",
    "Draw a {adjective} {noun}.",
    "Give me a riddle with a {noun}.",
    "Do you like {city}?",
    "Is a {noun} better than a {other}?",
    "Tell {first} a story about a {adjective} {noun}.",
    "What do you think of a {adjective} {noun}?",
    "How old is {first}?",
    "Make up a tale of {first} and the {noun}.",
    "What rhymes with {noun}?",
    "Which language do people speak in {city}?",
    "How does one cook a {adjective} {noun}?",
)
REFUSALS = ("I have no tool for that.", "None of my tools can do that.", "Sorry, I cannot do that with my tools.")
PLAIN = (
    ("Hello, I am {first}.", "Hello {first}, how can I help?"),
    ("Good morning from {city}!", "Good morning! How can I help?"),
    ("Thank you, {first} and I are happy.", "You are welcome."),
    ("Hi, {first} here, just saying hello.", "Hello {first}, how can I help?"),
    ("Greetings, my name is {first}.", "Hello {first}, how can I help?"),
)
NEWS = ("Here is a new tool:", "You can use this tool now:", "I added a tool:")
AGAIN = ("Try again.", "Please try again.", "Does it work now?")
REPLIES = ("{value}", "{value}.", "Use {value}.", "The {param} is {value}.", "It is {value}.")


def family(families: Sequence[str], unseen: bool, rng: Random) -> str:
    """A member of the seen part, or of the held-out part."""
    border = len(families) - max(1, round(HELD_OUT_SHARE * len(families)))
    return rng.choice(families[border:] if unseen else families[:border])


def framed(wording: str, unseen: bool, rng: Random) -> str:
    """The filled wording inside a frame, with a capital first letter where a letter comes first."""
    text = family(FRAMES, unseen, rng).replace("{}", wording)
    return text[0].upper() + text[1:]


def filled(template: str, rng: Random) -> str:
    """A template of this file with its places filled."""
    noun, other = rng.sample(NOUNS, 2)
    names = {"first": rng.choice(FIRST_NAMES), "city": rng.choice(CITIES), "adjective": rng.choice(ADJECTIVES)}
    return template.format_map({**names, "noun": noun, "other": other})


def joined(parts: list[str], rng: Random) -> str:
    """Several wordings in one sentence."""
    link = rng.choice((" and ", ", then ", " and also "))
    return link.join((", ".join(parts[:-1]), parts[-1])) if len(parts) > 1 else parts[0]


def coordinated(tool: Tool, wording: str, values: list[dict[str, Value]], rng: Random) -> str | None:
    """ "find the phone of A and B": one wording for calls that differ in its last place alone; None where it has
    none.
    """
    last = places(wording)[-1]
    if not wording.endswith(f"{{{last}}}") or last not in tool.params:
        return None
    if tool.params[last].schema["type"] not in ("string", "number", "integer") or "enum" in tool.params[last].schema:
        return None
    stem = wording[: -len(last) - 2]
    ends = [words(tool, f"{{{last}}}", {last: each[last]}, rng) for each in values]
    head = words(tool, stem, values[0], rng) if places(stem) else stem
    return head + conjunction(ends)


def asking(name: str, rng: Random) -> str:
    """The question for a missing parameter; it names the parameter as the schema does."""
    spoken = name.replace("_", " ")
    return rng.choice((f"Which {spoken} should I use?", f"Which {spoken} do you mean?", f"What is the {spoken}?"))


def reply(tool: Tool, name: str, value: Value, rng: Random) -> str:
    """The user's answer to that question."""
    kind = tool.params[name].kind
    if isinstance(kind, dict):
        text = " and ".join(f"{leaf} {item}" for leaf, item in value.items())
    else:
        text = words(tool, f"{{{name}}}", {name: value}, rng)
    assert all(str(leaf) in text for leaf in leaf_values(value)), (name, value, text)
    return rng.choice(REPLIES).format(value=text, param=name.replace("_", " "))
