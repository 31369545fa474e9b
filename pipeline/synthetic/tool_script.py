"""A conversation under construction, and the sentences that people use around a request.

`Script` appends messages in the OpenAI form and executes calls in its own `World`; `close` runs the last checks and
returns the `Dialogue`. Checks: arguments are JSON and fit the schema, every call executes (an error is allowed only if
a repair follows), and every scalar of every argument is a span of a user message, a value in an earlier result, or the
parameter's default. A failed check is a bug of the generator: AssertionError.

The sentences are frames around a wording, requests that no tool serves, and the assistant's plain sentences. Each list
of families ends in its held-out fifth (`HELD_OUT_SHARE`): training and validation draw from the part before it, a test
item of the quadrant "unseen template" only from the held-out part.
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
    placeholders,
    problems,
    words,
)

Call = tuple[Tool, dict[str, Value]]


@dataclass
class Script:
    """One conversation. `tools` are offered from the start, `late` are announced in a user turn."""

    tools: list[Tool]
    messages: list[Message] = field(default_factory=list)
    world: World = field(default_factory=World)
    late: list[Tool] = field(default_factory=list)
    calls: list[tuple[Call, Result]] = field(default_factory=list)
    num_calls: int = 0
    user_text: str = ""  # of all user turns so far
    results: list[Value] = field(default_factory=list)  # all scalars of results so far

    def user(self, text: str) -> None:
        """Add a user turn."""
        self.messages.append({"role": "user", "content": text})
        self.user_text += text + "\n"

    def announce(self, tool: Tool, before: str, after: str) -> None:
        """Add a user turn that offers a new tool, written the way the chat format lists tools."""
        self.late.append(tool)
        line = json.dumps(function(tool)["function"], ensure_ascii=False)
        self.messages.append({"role": "user", "content": f"{before}\n<tools>\n{line}\n</tools>\n{after}"})

    def say(self, text: str) -> None:
        """Add an assistant turn without calls."""
        self.messages.append({"role": "assistant", "content": text})

    def call(self, calls: list[Call]) -> list[Result]:
        """Check, execute and add calls of the assistant; `show` adds their results."""
        tool_calls = []
        self.calls = []
        for tool, arguments in calls:
            _check_call(self, tool, arguments)
            text = json.dumps(arguments, ensure_ascii=False)
            function_call = {"name": tool.name, "arguments": text}
            tool_calls.append({"id": f"call_{self.num_calls}", "type": "function", "function": function_call})
            self.num_calls += 1
            try:
                result = execute(tool, self.world, arguments)
            except ToolError as error:
                result = {"error": str(error)}
            self.calls.append(((tool, arguments), result))
        self.messages.append({"role": "assistant", "content": "", "tool_calls": tool_calls})
        return [result for _, result in self.calls]

    def show(self) -> None:
        """Add the results of the last calls, a message each."""
        first = self.num_calls - len(self.calls)
        for i, ((tool, _), result) in enumerate(self.calls):
            content = json.dumps(result, ensure_ascii=False)
            self.messages.append(
                {"role": "tool", "tool_call_id": f"call_{first + i}", "name": tool.name, "content": content}
            )
            self.results += leaf_values(result)

    def answer(self) -> None:
        """Add the last results and an assistant turn with a sentence on each."""
        self.show()
        sentences = [closing_sentence(tool, arguments, result) for (tool, arguments), result in self.calls]
        self.say(" ".join(dict.fromkeys(sentences)))

    def close(self, id_: str, category: str) -> Dialogue:
        """Check the conversation and return it as a record."""
        for _, result in self.calls:
            assert "error" not in result, (id_, category, self.messages)
        names = [tool.name for tool in (*self.tools, *self.late)]
        assert len(set(names)) == len(names), (id_, names)
        tools = [function(tool) for tool in self.tools]
        return Dialogue(id=id_, kind="tools", category=category, messages=self.messages, tools=tools)


def closing_sentence(tool: Tool, arguments: dict[str, Value], result: Result) -> str:
    """The assistant's closing words about one call."""
    by_old_name = {tool.old_names.get(name, name): value for name, value in arguments.items()}
    return tool.answer.format_map({**by_old_name, **result})


def provenance(value: Value, user_text: str, results: list[Value], default: Value) -> str | None:
    """The source of a scalar: "user", "result" or "default"; None if it has none."""
    text = "true" if value is True else "false" if value is False else str(value)
    if isinstance(value, str):
        is_in_text = text in user_text
    else:
        is_in_text = re.search(rf"(?<![\w.]){re.escape(text)}(?![\w]|\.\d)", user_text) is not None
    if is_in_text and value != "" and value is not None:
        return "user"
    if any(_is_in_result(value, leaf) for leaf in results):
        return "result"
    return "default" if value == default and type(value) is type(default) else None


def _is_in_result(value: Value, leaf: Value) -> bool:
    """Whether a value equals a leaf of a result, or is quoted in it (an error message)."""
    if isinstance(value, str) and isinstance(leaf, str):
        return value == leaf or f'"{value}"' in leaf
    return value == leaf and isinstance(value, bool) == isinstance(leaf, bool)


def _check_call(script: Script, tool: Tool, arguments: dict[str, Value]) -> None:
    """Assert that the arguments of a call fit the schema and have a source."""
    assert tool in script.tools or tool in script.late, tool.name
    faults = problems(function(tool)["function"]["parameters"], arguments)
    assert not faults, (tool.name, arguments, faults)
    for name, value in arguments.items():
        default = tool.params[name].schema.get("default", script)  # the script itself equals no value
        for leaf in leaf_values(value):
            assert provenance(leaf, script.user_text, script.results, default), (
                tool.name,
                name,
                leaf,
                script.user_text,
            )


# -- sentences ---------------------------------------------------------------------------------------------------------


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


def pick_family(families: Sequence[str], unseen: bool, rng: Random) -> str:
    """A member of the training part, or of the held-out part."""
    border = len(families) - max(1, round(HELD_OUT_SHARE * len(families)))
    return rng.choice(families[border:] if unseen else families[:border])


def frame_request(wording: str, unseen: bool, rng: Random) -> str:
    """A filled wording inside a frame, with the first letter capitalized."""
    text = pick_family(FRAMES, unseen, rng).replace("{}", wording)
    return text[0].upper() + text[1:]


def fill_template(template: str, rng: Random) -> str:
    """A template of this file with its placeholders filled."""
    noun, other = rng.sample(NOUNS, 2)
    names = {"first": rng.choice(FIRST_NAMES), "city": rng.choice(CITIES), "adjective": rng.choice(ADJECTIVES)}
    return template.format_map({**names, "noun": noun, "other": other})


def join_wishes(parts: list[str], rng: Random) -> str:
    """Several wordings in one sentence."""
    link = rng.choice((" and ", ", then ", " and also "))
    return link.join((", ".join(parts[:-1]), parts[-1])) if len(parts) > 1 else parts[0]


def coordinate(tool: Tool, wording: str, values: list[dict[str, Value]], rng: Random) -> str | None:
    """One wording for calls that differ only in its last placeholder: "find the phone of A and B".

    None if the wording does not end in a placeholder of a simple type.
    """
    last = placeholders(wording)[-1]
    if not wording.endswith(f"{{{last}}}") or last not in tool.params:
        return None
    if tool.params[last].schema["type"] not in ("string", "number", "integer") or "enum" in tool.params[last].schema:
        return None
    stem = wording[: -len(last) - 2]
    ends = [words(tool, f"{{{last}}}", {last: each[last]}, rng) for each in values]
    start = words(tool, stem, values[0], rng) if placeholders(stem) else stem
    return start + conjunction(ends)


def ask_for(name: str, rng: Random) -> str:
    """The question for a missing parameter, with its name as in the schema."""
    spoken = name.replace("_", " ")
    return rng.choice((f"Which {spoken} should I use?", f"Which {spoken} do you mean?", f"What is the {spoken}?"))


def reply_with(tool: Tool, name: str, value: Value, rng: Random) -> str:
    """The user's answer to that question."""
    kind = tool.params[name].kind
    if isinstance(kind, dict):
        text = " and ".join(f"{leaf} {item}" for leaf, item in value.items())
    else:
        text = words(tool, f"{{{name}}}", {name: value}, rng)
    assert all(str(leaf) in text for leaf in leaf_values(value)), (name, value, text)
    return rng.choice(REPLIES).format(value=text, param=name.replace("_", " "))
