"""One tool conversation per category, drawn from a seed; and conversations without tools.

`build(category, options)` returns a conversation, or None if the draw failed and the caller should draw again.
`DialogueOptions` selects the tools and wordings that may occur. In training some tools are invented or renamed
(`tool_inventions.py`), so that a model has to read names; validation and test have only real tools. Categories and what
they teach:

    simple, multiple, parallel, parallel_multiple    one or several calls, one or several tools offered
    irrelevance, plain                               no offered tool fits, or nothing is requested: no call
    relevance                                        small talk around a request that does need a call
    missing                                          a required value is missing: ask for it, then call
    later                                            the fitting tool comes in a later user turn
    dependent                                        the second call needs a value from the first one's result
    repair                                           the first call fails, its message tells how to call again

`add_requests` continues a conversation, for training: most of its length is its tools, and one more request among them
costs a third of a new conversation.

`dialogue(split, seed, number)` makes conversations in which no tool is offered: `Dialogue` records of kind "talk", a
pure function of the three. The categories are "greeting", "question" (about the assistant) and "refusal" (a wish that
needs a tool). Without them a model that is mostly trained on calls answers everything with a call, also where there is
nothing to call. Held-out wordings occur only in the split "test".

Not promised: knowledge. The assistant refuses what it cannot do.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from pipeline.ingest.records import Dialogue, Message
from pipeline.synthetic import tool_script
from pipeline.synthetic.tool_inventions import invent, lookup, renamed, sibling, user_of
from pipeline.synthetic.tool_script import Call, Script
from pipeline.synthetic.tool_values import Tool, Value, draw, function, misspelt, placeholders, told, words
from pipeline.synthetic.toolbox import CHAINS, SEEN, UNSEEN, Chain

INVENTED, RENAMED = 0.65, 0.3  # shares of the training conversations with such tools
ANSWERED = 0.3  # share of the single-request conversations with result and closing sentence
REFUSED = 0.3  # share of the added requests that no offered tool serves
LENGTH = 1_200  # characters of tools and messages beyond which no request is added: most conversations fit 512 tokens
NUM_OFFERED = (*[2] * 11, *[3] * 5, 4, 4, 5, 6)  # mostly few: a schema has some 50 tokens

Request = tuple[str, list[Call]]  # a wish without its frame, and the calls that serve it


@dataclass(frozen=True)
class DialogueOptions:
    """Which tools and wordings a conversation may contain."""

    rng: Random
    unseen_tool: bool = False  # a called tool is of the held-out domains
    unseen_template: bool = False  # only held-out wordings and frames
    invented: bool = False
    renamed: bool = False
    continues: bool = False  # more requests follow, up to LENGTH characters in all
    accepts: Callable[[str], bool] = bool  # whether a request belongs to the split

    def draw_target(self) -> Tool:
        """A tool to call."""
        if self.invented:
            return invent(self.rng)
        return self.rng.choice(UNSEEN if self.unseen_tool else SEEN)

    def draw_wording(self, tool: Tool) -> str:
        """One of the tool's wordings that the options allow."""
        return tool_script.pick_family(tool.wordings, self.unseen_template, self.rng)

    def rename(self, tools: list[Tool]) -> dict[str, Tool]:
        """The tools by their original name, renamed if the options say so."""
        return {tool.name: renamed(tool, self.rng) if self.renamed else tool for tool in tools}


def build(category: str, options: DialogueOptions) -> Script | None:
    """A finished script; None if this draw failed. Raises KeyError for an unknown category."""
    script = BUILDERS[category](options)
    names = [tool.name for tool in (*script.tools, *script.late)] if script else []
    if script is None or len(set(names)) < len(names):
        return None
    return add_requests(script, options) if options.continues else script


def draw_others(options: DialogueOptions, targets: list[Tool], number: int, *, near: bool = True) -> list[Tool]:
    """Tools to offer beside the targets, without repeated names: first a near-duplicate, then any.

    Without `near`, only tools that are not `_alike` to a target.
    """
    rng, tools = options.rng, {tool.name: tool for tool in targets}
    domains = {tool.domain for tool in targets}
    pool = (*SEEN, *UNSEEN) if options.unseen_tool else SEEN
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


def _alike(tool: Tool, targets: list[Tool]) -> bool:
    """Whether a tool shares a word of its name or domain with a target."""
    words_of_tool = set(tool.name.split("_")) | set(tool.domain.split())
    return any(words_of_tool & (set(other.name.split("_")) | set(other.domain.split())) for other in targets)


def _offer(options: DialogueOptions, targets: list[Tool], number: int) -> tuple[Script, list[Tool]]:
    """A script that offers the targets and `number` others in random order, and the targets as they are offered."""
    tool_of_name = options.rename([*targets, *draw_others(options, targets, number)])
    offered = list(tool_of_name.values())
    options.rng.shuffle(offered)
    return Script(offered), [tool_of_name[tool.name] for tool in targets]


def _maybe_answer(script: Script, rng: Random, share: float = ANSWERED) -> Script:
    """The script, in a share of the draws with results and closing words."""
    if rng.random() < share:
        script.answer()
    return script


def _one_call(options: DialogueOptions, num_others: int, small_talk: str = "") -> Script:
    script, (tool,) = _offer(options, [options.draw_target()], num_others)
    wording, values = options.draw_wording(tool), draw(tool, options.rng)
    values = told(tool, wording, values)
    text = tool_script.frame_request(words(tool, wording, values, options.rng), options.unseen_template, options.rng)
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
    chatter = tool_script.pick_family(tool_script.CHATTER, options.unseen_template, options.rng)
    return _one_call(options, options.rng.randint(1, 2), tool_script.fill_template(chatter, options.rng))


def parallel(options: DialogueOptions) -> Script | None:
    """Two or three calls of one tool."""
    script, (tool,) = _offer(options, [options.draw_target()], options.rng.choice((0, 0, 1)))
    return _add_request(script, options, request_several(options, tool))


def parallel_multiple(options: DialogueOptions) -> Script | None:
    """Two or three tools, a call each."""
    rng = options.rng
    targets = {tool.name: tool for tool in (options.draw_target() for _ in range(rng.choice((2, 2, 2, 3))))}
    while len(targets) < 2:
        tool = options.draw_target()
        targets[tool.name] = tool
    script, tools = _offer(options, list(targets.values()), rng.choice((0, 0, 1)))
    return _add_request(script, options, request_each(options, tools))


def request_several(options: DialogueOptions, tool: Tool) -> Request | None:
    """Two or three requests for one tool, in one sentence; None if two of them have equal arguments."""
    rng, wording = options.rng, options.draw_wording(tool)
    number = rng.choice((2, 2, 2, 3))
    if not placeholders(wording):
        return None
    argument_sets = [told(tool, wording, draw(tool, rng)) for _ in range(number)]
    shared = [
        {**argument_sets[0], placeholders(wording)[-1]: arguments.get(placeholders(wording)[-1])}
        for arguments in argument_sets
    ]
    text = tool_script.coordinate(tool, wording, shared, rng) if rng.random() < 0.6 else None
    values = shared if text else argument_sets
    if any(values[i] == values[j] for i in range(number) for j in range(i)):
        return None
    text = text or tool_script.join_wishes([words(tool, wording, arguments, rng) for arguments in values], rng)
    return text, [(tool, arguments) for arguments in values]


def request_each(options: DialogueOptions, tools: list[Tool]) -> Request:
    """One request for each of the tools, in one sentence."""
    wishes, calls = [], list[Call]()
    for tool in tools:
        wording = options.draw_wording(tool)
        values = told(tool, wording, draw(tool, options.rng))
        wishes.append(words(tool, wording, values, options.rng))
        calls.append((tool, values))
    return tool_script.join_wishes(wishes, options.rng), calls


def _add_request(script: Script, options: DialogueOptions, request: Request | None) -> Script | None:
    """Add a request, its calls and, in a fifth of the draws, results and closing words; None without a request."""
    if request is None:
        return None
    text, calls = request
    script.user(tool_script.frame_request(text, options.unseen_template, options.rng))
    script.call(calls)
    return _maybe_answer(script, options.rng, 0.2)


def add_requests(script: Script, options: DialogueOptions) -> Script | None:
    """Add requests for the offered tools, and some that none of them serves, up to LENGTH characters.

    None if a tool refuses a request (the world has changed since the start).
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
        text = tool_script.frame_request(wish, options.unseen_template, rng)
        if not options.accepts(text):
            continue
        script.user(text)
        if not calls:
            script.say(rng.choice(tool_script.REFUSALS))
        elif any("error" in result for result in script.call(calls)):
            return None
    return script


def stands_alone(tool: Tool) -> bool:
    """Whether each wording states every required parameter (for the second tool of a chain it does not)."""
    required = {name for name, parameter in tool.params.items() if "default" not in parameter.schema}
    return all(required <= set(told(tool, wording, dict.fromkeys(tool.params))) for wording in tool.wordings)


def irrelevance(options: DialogueOptions) -> Script:
    """A request for a tool that is not offered, or for something no tool does."""
    rng = options.rng
    if rng.random() < 0.35:
        tools = [options.draw_target()]
        template = tool_script.pick_family(tool_script.UNSERVED, options.unseen_template, rng)
        tools += draw_others(options, tools, rng.choice((0, 1, 2)))
        text = tool_script.fill_template(template, rng)
    else:
        wanted = options.draw_target()
        tools = draw_others(options, [wanted], rng.choice((1, 1, 2, 3)), near=False)
        if options.unseen_tool:  # offer only unseen tools
            tools = [tool for tool in UNSEEN if not _alike(tool, [wanted])]
            tools = rng.sample(tools, min(len(tools), rng.choice((1, 1, 2, 3))))
        wording = options.draw_wording(wanted)
        text = words(wanted, wording, told(wanted, wording, draw(wanted, rng)), rng)
        text = tool_script.frame_request(text, options.unseen_template, rng)
    script = Script(list(options.rename(tools).values()))
    script.user(text)
    script.say(rng.choice(tool_script.REFUSALS))
    return script


def plain(options: DialogueOptions) -> Script:
    """A greeting: tools are offered, none is needed."""
    target = options.draw_target()
    script, _ = _offer(options, [target], options.rng.choice((0, 1)))
    greeting, answer = _draw_greeting(options.unseen_template, options.rng)
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
    stated = told(tool, wording, values)
    if name in stated:
        return None
    script.user(tool_script.frame_request(words(tool, wording, stated, rng), options.unseen_template, rng))
    script.say(tool_script.ask_for(name, rng))
    script.user(tool_script.reply_with(tool, name, values[name], rng))
    script.call([(tool, {key: values[key] for key in tool.params if key in stated or key == name})])
    return _maybe_answer(script, rng, 0.2)


def later(options: DialogueOptions) -> Script:
    """At first no tool fits; then the user adds one."""
    rng = options.rng
    target = options.draw_target()
    tool_of_name = options.rename([target, *draw_others(options, [target], rng.choice((1, 1, 2)), near=False)])
    tool = tool_of_name.pop(target.name)
    script = Script(list(tool_of_name.values()))
    wording = options.draw_wording(tool)
    values = told(tool, wording, draw(tool, rng))
    script.user(tool_script.frame_request(words(tool, wording, values, rng), options.unseen_template, rng))
    script.say(rng.choice(tool_script.REFUSALS))
    script.announce(tool, rng.choice(tool_script.NEWS), rng.choice(tool_script.AGAIN))
    script.call([(tool, values)])
    return _maybe_answer(script, rng, 0.2)


def dependent(options: DialogueOptions) -> Script | None:
    """Two requests in one turn; the second call needs a value from the first one's result."""
    rng = options.rng
    first, second, chain = _draw_chain(options)
    tool_of_name = options.rename([first, second, *draw_others(options, [first, second], rng.choice((0, 0, 0, 1)))])
    first, second = tool_of_name[first.name], tool_of_name[second.name]
    offered = list(tool_of_name.values())
    rng.shuffle(offered)
    script = Script(offered)
    link = next(name for name in second.params if second.old_names.get(name, name) == chain.param)
    wording = options.draw_wording(first)
    values = told(first, wording, draw(first, rng))
    tail = tool_script.pick_family(chain.tails, options.unseen_template, rng)
    for old_name, name in zip(second.old_names.values(), second.params, strict=False):
        tail = tail.replace(f"{{{old_name}}}", f"{{{name}}}")
    second_values = told(second, tail, draw(second, rng))
    wishes = [words(first, wording, values, rng), words(second, tail, second_values, rng)]
    text = rng.choice((", then ", " and then ")).join(wishes)
    script.user(tool_script.frame_request(text, options.unseen_template, rng))
    (result,) = script.call([(first, values)])
    if chain.key not in result:
        return None
    script.show()
    second_values = {**second_values, link: result[chain.key]}
    script.call([(second, {name: second_values[name] for name in second.params if name in second_values})])
    return _maybe_answer(script, rng)


def _draw_chain(options: DialogueOptions) -> tuple[Tool, Tool, Chain]:
    """Two tools, the first of which provides a value for the second."""
    rng = options.rng
    tools = {tool.name: tool for tool in (*SEEN, *UNSEEN)}
    if options.invented:
        noun = rng.choice(tool_script.NOUNS)
        first, second = lookup(rng, noun), user_of(rng, noun)
        return first, second, Chain(first.name, f"{noun}_id", second.name, f"{noun}_id", second.wordings)
    chain = rng.choice([c for c in CHAINS if (tools[c.second] in UNSEEN) == options.unseen_tool])
    return tools[chain.first], tools[chain.second], chain


def repair(options: DialogueOptions) -> Script | None:
    """A typo of the user makes the first call fail; the error message contains the right value."""
    options = replace(options, invented=False)  # an invented tool never fails
    rng = options.rng
    target = rng.choice([tool for tool in (UNSEEN if options.unseen_tool else SEEN) if tool.fragile])
    script, (tool,) = _offer(options, [target], rng.choice((0, 0, 1)))
    wording = options.draw_wording(tool)
    values: dict[str, Value] = told(tool, wording, draw(tool, rng))
    assert tool.fragile is not None
    values[tool.fragile] = misspelt(values[tool.fragile], rng)
    script.user(tool_script.frame_request(words(tool, wording, values, rng), options.unseen_template, rng))
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


# -- conversations without tools ---------------------------------------------------------------------------------------


ABILITIES = "I can write Python functions, tell stories and call the tools that you offer."
QUESTIONS = (
    ("What can you do?", ABILITIES),
    ("Who are you?", "I am a small code assistant, trained with Stagecoach."),
    ("What are you?", "I am a small code assistant, trained with Stagecoach."),
    ("Can you help me?", ABILITIES),
    ("How can you help me?", ABILITIES),
    ("How are you?", "I am fine. How can I help?"),
    ("Are you a human?", "No, I am a small code assistant, trained with Stagecoach."),
    ("Thanks!", "You are welcome."),
    ("Thank you very much.", "You are welcome."),
    ("Bye!", "Goodbye."),
)
GREETINGS = (
    ("Hi", "Hello, how can I help?"),
    ("Hello!", "Hello, how can I help?"),
    ("Hey there", "Hello, how can I help?"),
)


def dialogue(split: str, seed: int, number: int) -> Dialogue:
    """Conversation `number` of a split: one to three exchanges; the first one determines the category."""
    id_ = f"talk/{split}/{seed}/{number}"
    rng = Random(id_)
    unseen = split == "test"
    category = rng.choice(("greeting", "question", "refusal", "refusal"))
    messages: list[Message] = []
    for form in (category, *rng.choices(("question", "refusal", "refusal"), k=rng.choice((0, 0, 1, 2)))):
        question, answer = _draw_exchange(form, unseen, rng)
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Dialogue(id=id_, kind="talk", category=category, messages=messages)


def _draw_exchange(form: str, unseen: bool, rng: Random) -> tuple[str, str]:
    """A user message and its answer."""
    if form == "question":
        return rng.choice(QUESTIONS)
    if form == "refusal":
        return _draw_wish(unseen, rng), rng.choice(tool_script.REFUSALS)
    if rng.random() < 0.4 and not unseen:
        return rng.choice(GREETINGS)
    return _draw_greeting(unseen, rng)


def _draw_greeting(unseen: bool, rng: Random) -> tuple[str, str]:
    """A greeting of tool_script.PLAIN and its answer, with the same name in both; the last one is held out."""
    greeting, answer = tool_script.PLAIN[4 if unseen else rng.randrange(4)]
    state = rng.getstate()
    greeting = tool_script.fill_template(greeting, rng)
    rng.setstate(state)  # the same name in the answer
    return greeting, tool_script.fill_template(answer, rng)


def _draw_wish(unseen: bool, rng: Random) -> str:
    """A wish that needs a tool, or knowledge."""
    if rng.random() < 0.5:
        return tool_script.fill_template(tool_script.pick_family(tool_script.UNSERVED, unseen, rng), rng)
    tool = rng.choice(SEEN)
    wording = tool_script.pick_family(tool.wordings, unseen, rng)
    return tool_script.frame_request(words(tool, wording, told(tool, wording, draw(tool, rng)), rng), unseen, rng)
