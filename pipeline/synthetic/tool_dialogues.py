"""Tool conversations: the class `Script`, and functions that draw a random conversation for each category.

`Script` appends messages in OpenAI format and executes calls in its own `ToolWorld`; `close` runs the final checks and
returns the `Dialogue`. Checks: arguments are JSON and match the schema, every call executes (an error is allowed only
if a repair follows), and every scalar in every argument is a span of a user message, a value in an earlier result, or
the parameter's default. A failed check is a bug in the generator and raises AssertionError.

`build(category, options)` returns a conversation, or None if the draw failed and the caller should retry.
`DialogueOptions` selects the tools and wordings that may occur. In training, some tools are invented or renamed
(`tool_schemas.py`), so that a model has to read names; the validation and test splits have only real tools. Categories
and what they teach:

    simple, multiple, parallel, parallel_multiple    one or several calls, one or several tools offered
    irrelevance, plain                               no offered tool fits, or nothing is requested: no call
    relevance                                        small talk before a request that needs a call
    missing                                          a required value is missing: ask for it, then call
    later                                            the matching tool is offered only in a later user turn
    dependent                                        the second call needs a value from the first call's result
    repair                                           the first call fails; its message explains how to fix it

`add_requests` continues a conversation, for training: tool schemas make up most of its length, so another request costs
a third as much as a new conversation.

Not guaranteed: that the assistant knows anything; it refuses what its tools cannot do.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

from pipeline.ingest.records import Dialogue, Message
from pipeline.synthetic import toolbox
from pipeline.synthetic.tool_schemas import (
    Chain,
    Result,
    ToolError,
    ToolSpec,
    ToolWorld,
    arguments_in,
    draw,
    execute,
    fill,
    function,
    invent,
    leaf_values,
    lookup,
    placeholders,
    problems,
    renamed,
    sibling,
    user_of,
)
from pipeline.synthetic.toolbox import chains, fresh, seen, unseen
from pipeline.synthetic.wording import (
    Value,
    conjunction,
    fill_template,
    frame_request,
    join_wishes,
    misspelt,
    pick_family,
    sentences,
    table,
    words,
)

INVENTED, RENAMED = 0.65, 0.3  # fractions of training conversations with invented and with renamed tools
ANSWERED = 0.3  # fraction of single-request conversations that include the result and a closing sentence
REFUSED = 0.2  # fraction of added requests that no offered tool can serve
LENGTH = 1_200  # characters of tools and messages; past this, no request is added (most conversations fit 512 tokens)
NUM_OFFERED = (*[2] * 11, *[3] * 5, 4, 4, 5, 6)  # mostly few: a schema takes about 50 tokens

Call = tuple[ToolSpec, dict[str, Value]]
Request = tuple[str, list[Call]]  # a request without its frame, and the calls that fulfill it


@dataclass
class Script:
    """One conversation. `tools` are offered from the start; those in `late` are announced in a user turn."""

    tools: list[ToolSpec]
    messages: list[Message] = field(default_factory=list)
    world: ToolWorld = field(default_factory=ToolWorld)
    late: list[ToolSpec] = field(default_factory=list)
    calls: list[tuple[Call, Result]] = field(default_factory=list)
    num_calls: int = 0
    user_text: str = ""  # all user turns so far
    results: list[Value] = field(default_factory=list)  # all result scalars so far

    def user(self, text: str) -> None:
        """Add a user turn."""
        self.messages.append({"role": "user", "content": text})
        self.user_text += text + "\n"

    def announce(self, tool: ToolSpec, before: str, after: str) -> None:
        """Add a user turn that offers a new tool, in the format of the chat's tool list."""
        self.late.append(tool)
        line = json.dumps(function(tool)["function"], ensure_ascii=False)
        self.messages.append({"role": "user", "content": f"{before}\n<tools>\n{line}\n</tools>\n{after}"})

    def say(self, text: str) -> None:
        """Add an assistant turn without calls."""
        self.messages.append({"role": "assistant", "content": text})

    def call(self, calls: list[Call]) -> list[Result]:
        """Check, execute and add the assistant's calls; `show` adds their results."""
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
        """Add the results of the last calls, one message each."""
        first = self.num_calls - len(self.calls)
        for i, ((tool, _), result) in enumerate(self.calls):
            content = json.dumps(result, ensure_ascii=False)
            self.messages.append(
                {"role": "tool", "tool_call_id": f"call_{first + i}", "name": tool.name, "content": content}
            )
            self.results += leaf_values(result)

    def answer(self) -> None:
        """Add the last results and an assistant turn with one sentence per result."""
        self.show()
        closing = [closing_sentence(tool, arguments, result) for (tool, arguments), result in self.calls]
        self.say(" ".join(dict.fromkeys(closing)))

    def close(self, id_: str, category: str) -> Dialogue:
        """Check the conversation and return it as a record."""
        for _, result in self.calls:
            assert "error" not in result, (id_, category, self.messages)
        names = [tool.name for tool in (*self.tools, *self.late)]
        assert len(set(names)) == len(names), (id_, names)
        tools = [function(tool) for tool in self.tools]
        return Dialogue(id=id_, kind="tools", category=category, messages=self.messages, tools=tools)


def closing_sentence(tool: ToolSpec, arguments: dict[str, Value], result: Result) -> str:
    """The assistant's closing words about one call."""
    by_old_name = {tool.old_names.get(name, name): value for name, value in arguments.items()}
    return tool.answer.format_map({**by_old_name, **result})


def provenance(value: Value, user_text: str, results: list[Value], default: Value) -> str | None:
    """The source of a scalar: "user", "result" or "default"; None if it has no source."""
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
    """Whether a value equals a leaf of a result, or is quoted in one (as in an error message)."""
    if isinstance(value, str) and isinstance(leaf, str):
        return value == leaf or f'"{value}"' in leaf
    return value == leaf and isinstance(value, bool) == isinstance(leaf, bool)


def _check_call(script: Script, tool: ToolSpec, arguments: dict[str, Value]) -> None:
    """Assert that the arguments of a call match the schema and have a source."""
    assert tool in script.tools or tool in script.late, tool.name
    faults = problems(function(tool)["function"]["parameters"], arguments)
    assert not faults, (tool.name, arguments, faults)
    for name, value in arguments.items():
        default = tool.params[name].schema.get("default", script)  # `script` as a sentinel: it equals no value
        for leaf in leaf_values(value):
            source = provenance(leaf, script.user_text, script.results, default)
            assert source, (tool.name, name, leaf, script.user_text)


@dataclass(frozen=True)
class DialogueOptions:
    """Which tools and wordings a conversation may contain."""

    rng: Random
    unseen_tool: bool = False  # a called tool is from a held-out domain
    unseen_template: bool = False  # only held-out wordings and frames
    fresh: bool = False  # use the held-out domains on which no design choice was based
    invented: bool = False
    renamed: bool = False
    continues: bool = False  # more requests follow, up to LENGTH characters in total
    accepts: Callable[[str], bool] = bool  # whether a request belongs to the split

    def draw_target(self) -> ToolSpec:
        """A tool to call."""
        if self.invented:
            return invent(self.rng)
        return self.rng.choice(self.callable_tools())

    def callable_tools(self) -> tuple[ToolSpec, ...]:
        """The tools of the toolbox that a conversation may call."""
        return self.held_out_tools() if self.unseen_tool else seen()

    def held_out_tools(self) -> tuple[ToolSpec, ...]:
        """The tools of the held-out domains."""
        return fresh() if self.fresh else unseen()

    def draw_wording(self, tool: ToolSpec) -> str:
        """One of the tool's wordings that the options allow."""
        return pick_family(tool.wordings, self.unseen_template, self.rng)

    def rename(self, tools: list[ToolSpec]) -> dict[str, ToolSpec]:
        """The tools by original name, renamed if the options require it."""
        return {tool.name: renamed(tool, self.rng) if self.renamed else tool for tool in tools}


def build(category: str, options: DialogueOptions) -> Script | None:
    """A finished script; None if this draw failed. Raises KeyError for an unknown category."""
    script = BUILDERS[category](options)
    names = [tool.name for tool in (*script.tools, *script.late)] if script else []
    if script is None or len(set(names)) < len(names):
        return None
    return add_requests(script, options) if options.continues else script


def draw_others(options: DialogueOptions, targets: list[ToolSpec], number: int, *, near: bool = True) -> list[ToolSpec]:
    """Tools to offer alongside the targets, with distinct names: first a near-duplicate, then any others.

    Without `near`, only tools that are not `_alike` to any target.
    """
    rng, tools = options.rng, {tool.name: tool for tool in targets}
    domains = {tool.domain for tool in targets}
    pool = (*seen(), *options.held_out_tools()) if options.unseen_tool else seen()
    related = [tool for tool in pool if tool.domain in domains] if near else []
    while len(tools) < len(targets) + number:
        is_first = near and len(tools) == len(targets)
        if options.invented and rng.random() < 0.8:
            tool = sibling(targets[0], rng) if is_first or (near and rng.random() < 0.3) else invent(rng)
        else:
            tool = rng.choice(related if is_first and related else pool)
        if near or not _alike(tool, targets):
            tools.setdefault(tool.name, tool)
    return list(tools.values())[len(targets) :]


def _alike(tool: ToolSpec, targets: list[ToolSpec]) -> bool:
    """Whether a tool's name or domain shares a word with a target."""
    words_of_tool = set(tool.name.split("_")) | set(tool.domain.split())
    return any(words_of_tool & (set(other.name.split("_")) | set(other.domain.split())) for other in targets)


def _offer(options: DialogueOptions, targets: list[ToolSpec], number: int) -> tuple[Script, list[ToolSpec]]:
    """A script that offers the targets and `number` others in random order, and the targets as offered."""
    tool_of_name = options.rename([*targets, *draw_others(options, targets, number)])
    offered = list(tool_of_name.values())
    options.rng.shuffle(offered)
    return Script(offered), [tool_of_name[tool.name] for tool in targets]


def _maybe_answer(script: Script, rng: Random, share: float = ANSWERED) -> Script:
    """Add results and closing words to the script with probability `share`."""
    if rng.random() < share:
        script.answer()
    return script


def _one_call(options: DialogueOptions, num_others: int, small_talk: str = "") -> Script:
    script, (tool,) = _offer(options, [options.draw_target()], num_others)
    wording, values = options.draw_wording(tool), draw(tool, options.rng)
    values = arguments_in(tool, wording, values)
    text = frame_request(fill(tool, wording, values, options.rng), options.unseen_template, options.rng)
    script.user(f"{small_talk} {text}".strip())
    script.call([(tool, values)])
    return _maybe_answer(script, options.rng)


def simple(options: DialogueOptions) -> Script:
    """One call, one tool offered."""
    return _one_call(options, 0)


def multiple(options: DialogueOptions) -> Script:
    """One call, two to six tools offered."""
    return _one_call(options, options.rng.choice(NUM_OFFERED) - 1)


def relevance(options: DialogueOptions) -> Script:
    """Small talk before a request that needs a call."""
    chatter = pick_family(sentences("chatter"), options.unseen_template, options.rng)
    return _one_call(options, options.rng.randint(1, 2), fill_template(chatter, options.rng))


def parallel(options: DialogueOptions) -> Script | None:
    """Two or three calls to one tool."""
    script, (tool,) = _offer(options, [options.draw_target()], options.rng.choice((0, 0, 1)))
    return _add_request(script, options, request_several(options, tool))


def parallel_multiple(options: DialogueOptions) -> Script | None:
    """Two or three tools, one call each."""
    rng = options.rng
    targets = {tool.name: tool for tool in (options.draw_target() for _ in range(rng.choice((2, 2, 2, 3))))}
    while len(targets) < 2:
        tool = options.draw_target()
        targets[tool.name] = tool
    script, tools = _offer(options, list(targets.values()), rng.choice((0, 0, 1)))
    return _add_request(script, options, request_each(options, tools))


def request_several(options: DialogueOptions, tool: ToolSpec) -> Request | None:
    """Two or three requests for one tool, in one sentence; None if two requests have equal arguments."""
    rng, wording = options.rng, options.draw_wording(tool)
    number = rng.choice((2, 2, 2, 3))
    if not placeholders(wording):
        return None
    argument_sets = [arguments_in(tool, wording, draw(tool, rng)) for _ in range(number)]
    shared = [
        {**argument_sets[0], placeholders(wording)[-1]: arguments.get(placeholders(wording)[-1])}
        for arguments in argument_sets
    ]
    text = coordinate(tool, wording, shared, rng) if rng.random() < 0.6 else None
    values = shared if text else argument_sets
    if any(values[i] == values[j] for i in range(number) for j in range(i)):
        return None
    text = text or join_wishes([fill(tool, wording, arguments, rng) for arguments in values], rng)
    return text, [(tool, arguments) for arguments in values]


def request_each(options: DialogueOptions, tools: list[ToolSpec]) -> Request:
    """One request per tool, in one sentence."""
    wishes, calls = [], list[Call]()
    for tool in tools:
        wording = options.draw_wording(tool)
        values = arguments_in(tool, wording, draw(tool, options.rng))
        wishes.append(fill(tool, wording, values, options.rng))
        calls.append((tool, values))
    return join_wishes(wishes, options.rng), calls


def _add_request(script: Script, options: DialogueOptions, request: Request | None) -> Script | None:
    """Add a request, its calls and, in a fifth of cases, results and closing words. None if there is no request."""
    if request is None:
        return None
    text, calls = request
    script.user(frame_request(text, options.unseen_template, options.rng))
    script.call(calls)
    return _maybe_answer(script, options.rng, 0.2)


def add_requests(script: Script, options: DialogueOptions) -> Script | None:
    """Add requests for the offered tools, and some that no offered tool can serve, up to LENGTH characters.

    Returns None if a tool refuses a request (earlier calls may have changed the world).
    """
    rng, offered = options.rng, [*script.tools, *script.late]
    size = len(json.dumps([function(tool) for tool in script.tools]))
    tools = [tool for tool in offered if stands_alone(tool)]
    while size + sum(len(json.dumps(message)) for message in script.messages) < LENGTH:
        if script.messages[-1].get("tool_calls"):
            script.answer()
        form = rng.random()
        if form < REFUSED or not tools:
            (wanted,) = draw_others(options, offered, 1, near=False)
            request: Request | None = (request_each(options, [wanted])[0], [])
        elif form < 0.7:
            request = request_each(options, [rng.choice(tools)])
        elif form < 0.85 or len(tools) < 2:
            request = request_several(options, rng.choice(tools))
        else:
            request = request_each(options, rng.sample(tools, 2))
        if request is None:
            continue
        wish, calls = request
        text = frame_request(wish, options.unseen_template, rng)
        if not options.accepts(text):
            continue
        script.user(text)
        if not calls:
            script.say(rng.choice(sentences("refusals")))
        elif any("error" in result for result in script.call(calls)):
            return None
    return script


def stands_alone(tool: ToolSpec) -> bool:
    """Whether each wording states every required parameter (not the case for the second tool of a chain)."""
    required = {name for name, parameter in tool.params.items() if "default" not in parameter.schema}
    return all(required <= set(arguments_in(tool, wording, dict.fromkeys(tool.params))) for wording in tool.wordings)


def irrelevance(options: DialogueOptions) -> Script:
    """A request for a tool that is not offered, or for something no tool can do."""
    rng = options.rng
    if rng.random() < 0.35:
        tools = [options.draw_target()]
        template = pick_family(sentences("unserved"), options.unseen_template, rng)
        tools += draw_others(options, tools, rng.choice((0, 1, 2)))
        text = fill_template(template, rng)
    else:
        wanted = options.draw_target()
        tools = draw_others(options, [wanted], rng.choice((1, 1, 2, 3)), near=False)
        if options.unseen_tool:  # offer only unseen tools
            tools = [tool for tool in options.held_out_tools() if not _alike(tool, [wanted])]
            tools = rng.sample(tools, min(len(tools), rng.choice((1, 1, 2, 3))))
        wording = options.draw_wording(wanted)
        text = fill(wanted, wording, arguments_in(wanted, wording, draw(wanted, rng)), rng)
        text = frame_request(text, options.unseen_template, rng)
    script = Script(list(options.rename(tools).values()))
    script.user(text)
    script.say(rng.choice(sentences("refusals")))
    return script


def plain(options: DialogueOptions) -> Script:
    """A greeting: tools are offered but not needed."""
    target = options.draw_target()
    script, _ = _offer(options, [target], options.rng.choice((0, 1)))
    greeting, answer = draw_greeting(options.unseen_template, options.rng)
    script.user(greeting)
    script.say(answer)
    return script


def missing(options: DialogueOptions) -> Script | None:
    """A required value is missing: the assistant asks, the user replies, the assistant calls."""
    rng = options.rng
    script, (tool,) = _offer(options, [options.draw_target()], rng.choice((0, 0, 1, 2)))
    if not tool.missing:
        return None
    name, wording = rng.choice(tool.missing)
    values = draw(tool, rng)
    stated = arguments_in(tool, wording, values)
    if name in stated:
        return None
    script.user(frame_request(fill(tool, wording, stated, rng), options.unseen_template, rng))
    script.say(ask_for(name, rng))
    script.user(reply_with(tool, name, values[name], rng))
    script.call([(tool, {key: values[key] for key in tool.params if key in stated or key == name})])
    return _maybe_answer(script, rng, 0.2)


def later(options: DialogueOptions) -> Script:
    """At first no tool fits; then the user offers one that does."""
    rng = options.rng
    target = options.draw_target()
    tool_of_name = options.rename([target, *draw_others(options, [target], rng.choice((1, 1, 2)), near=False)])
    tool = tool_of_name.pop(target.name)
    script = Script(list(tool_of_name.values()))
    wording = options.draw_wording(tool)
    values = arguments_in(tool, wording, draw(tool, rng))
    script.user(frame_request(fill(tool, wording, values, rng), options.unseen_template, rng))
    script.say(rng.choice(sentences("refusals")))
    script.announce(tool, rng.choice(sentences("news")), rng.choice(sentences("again")))
    script.call([(tool, values)])
    return _maybe_answer(script, rng, 0.2)


def dependent(options: DialogueOptions) -> Script | None:
    """Two requests in one turn; the second call needs a value from the first call's result."""
    rng = options.rng
    first, second, chain = _draw_chain(options)
    tool_of_name = options.rename([first, second, *draw_others(options, [first, second], rng.choice((0, 0, 0, 1)))])
    first, second = tool_of_name[first.name], tool_of_name[second.name]
    offered = list(tool_of_name.values())
    rng.shuffle(offered)
    script = Script(offered)
    link = next(name for name in second.params if second.old_names.get(name, name) == chain.param)
    wording = options.draw_wording(first)
    values = arguments_in(first, wording, draw(first, rng))
    tail = pick_family(chain.tails, options.unseen_template, rng)
    for old_name, name in zip(second.old_names.values(), second.params, strict=False):
        tail = tail.replace(f"{{{old_name}}}", f"{{{name}}}")
    second_values = arguments_in(second, tail, draw(second, rng))
    wishes = [fill(first, wording, values, rng), fill(second, tail, second_values, rng)]
    text = rng.choice((", then ", " and then ")).join(wishes)
    script.user(frame_request(text, options.unseen_template, rng))
    (result,) = script.call([(first, values)])
    if chain.key not in result:
        return None
    script.show()
    second_values = {**second_values, link: result[chain.key]}
    script.call([(second, {name: second_values[name] for name in second.params if name in second_values})])
    return _maybe_answer(script, rng)


def _draw_chain(options: DialogueOptions) -> tuple[ToolSpec, ToolSpec, Chain]:
    """Two tools; the first provides a value for the second."""
    rng = options.rng
    if options.invented:
        noun = rng.choice(words("nouns"))
        first, second, key = lookup(rng, noun), user_of(rng, noun), f"{noun}_id"
        return first, second, Chain(first=first.name, key=key, second=second.name, param=key, tails=second.wordings)
    tools = toolbox.tools()
    chain = rng.choice([c for c in chains() if tools[c.second] in options.callable_tools()])
    return tools[chain.first], tools[chain.second], chain


def repair(options: DialogueOptions) -> Script | None:
    """A user's typo makes the first call fail; the error message contains the correct value."""
    options = replace(options, invented=False)  # an invented tool never fails
    rng = options.rng
    target = rng.choice([tool for tool in options.callable_tools() if tool.fragile])
    script, (tool,) = _offer(options, [target], rng.choice((0, 0, 1)))
    wording = options.draw_wording(tool)
    values: dict[str, Value] = arguments_in(tool, wording, draw(tool, rng))
    assert tool.fragile is not None
    values[tool.fragile] = misspelt(values[tool.fragile], rng)
    script.user(frame_request(fill(tool, wording, values, rng), options.unseen_template, rng))
    (result,) = script.call([(tool, values)])
    if "error" not in result:
        return None
    script.show()
    right = result["error"].rsplit('did you mean "', 1)[-1].split('"')[0]
    (result,) = script.call([(tool, {**values, tool.fragile: right})])
    return None if "error" in result else _maybe_answer(script, rng)


BUILDERS: dict[str, Callable[[DialogueOptions], Script | None]] = {
    "simple": simple,
    "multiple": multiple,
    "parallel": parallel,
    "parallel_multiple": parallel_multiple,
    "irrelevance": irrelevance,
    "relevance": relevance,
    "missing": missing,
    "later": later,
    "dependent": dependent,
    "repair": repair,
    "plain": plain,
}


def draw_greeting(unseen: bool, rng: Random) -> tuple[str, str]:
    """A greeting and its answer, with the same name in both; the last pair is held out."""
    greeting, answer = tuple(table("tools.yaml")["greetings"].items())[4 if unseen else rng.randrange(4)]
    state = rng.getstate()
    greeting = fill_template(greeting, rng)
    rng.setstate(state)  # the same name in the answer
    return greeting, fill_template(answer, rng)


# -- requests and replies ----------------------------------------------------------------------------------------------


def coordinate(tool: ToolSpec, wording: str, values: list[dict[str, Value]], rng: Random) -> str | None:
    """One request for calls that differ only in the wording's last placeholder: "find the phone of A and B".

    None if the wording does not end in a placeholder of a simple type.
    """
    last = placeholders(wording)[-1]
    if not wording.endswith(f"{{{last}}}") or last not in tool.params:
        return None
    if tool.params[last].schema["type"] not in ("string", "number", "integer") or "enum" in tool.params[last].schema:
        return None
    stem = wording[: -len(last) - 2]
    ends = [fill(tool, f"{{{last}}}", {last: each[last]}, rng) for each in values]
    start = fill(tool, stem, values[0], rng) if placeholders(stem) else stem
    return start + conjunction(ends)


def ask_for(name: str, rng: Random) -> str:
    """The question about a missing parameter, which is named as in the schema."""
    spoken = name.replace("_", " ")
    return rng.choice((f"Which {spoken} should I use?", f"Which {spoken} do you mean?", f"What is the {spoken}?"))


def reply_with(tool: ToolSpec, name: str, value: Value, rng: Random) -> str:
    """The user's reply, which states the missing parameter."""
    kind = tool.params[name].kind
    if isinstance(kind, dict):
        text = " and ".join(f"{leaf} {item}" for leaf, item in value.items())
    else:
        text = fill(tool, f"{{{name}}}", {name: value}, rng)
    assert all(str(leaf) in text for leaf in leaf_values(value)), (name, value, text)
    return rng.choice(sentences("replies")).format(value=text, param=name.replace("_", " "))
