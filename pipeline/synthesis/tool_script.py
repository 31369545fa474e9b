"""A conversation in the making: messages, executed calls, and the checks that every finished one has to pass.

`Script` appends messages in the OpenAI form and executes calls in its own `World`; `close` runs the checks and returns
the `Dialogue`. Checks (specs of the data, 2b): arguments are JSON and fit the schema, every call executes (an error is
allowed only where a repair follows), and every scalar of every argument is a span of what the user said, a value in an
earlier result, or the parameter's default. A violated check is a defect of the generator: AssertionError.
"""

import json
import re
from dataclasses import dataclass, field

from pipeline.streams.records import Dialogue, Message
from pipeline.synthesis.tool_shape import Tool, execute, function, leaf_values, problems
from pipeline.synthesis.tool_values import Value
from pipeline.synthesis.tool_world import Result, ToolError, World

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
