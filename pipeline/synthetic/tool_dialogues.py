"""One tool conversation per category, drawn from a seed.

`build(category, setting)` gives a conversation or None (the draw did not work out; the caller draws again). A `Setting`
says which tools and which wordings may occur. In training some tools are invented or renamed (`tool_inventions.py`), so
that names have to be read; validation and test hold real tools alone. Categories and what they teach:

    simple, multiple, parallel, parallel_multiple    one or several calls, one or several tools offered
    irrelevance, plain                               no offered tool fits, or nothing is asked: an answer without a call
    relevance                                        small talk around a request that does need a call
    missing                                          a required value is not there: ask for it, then call
    later                                            the fitting tool comes in a later user turn
    dependent                                        the second call needs a value from the first one's result
    repair                                           the first call fails, its message says how to call again

`go_on` adds requests to a conversation, for training: the tools are what a conversation costs, and one more request
among them costs a third of a new conversation.

Conversations in which no tool is offered: greetings, questions about the assistant, and wishes that need a tool.

Without them a model that is mostly trained on calls writes a call to whatever it is asked, also where there is nothing
to call. In: split, seed, number. Out: `Dialogue` records of kind "talk", a pure function of the three; the categories
are "greeting", "question" (about the assistant) and "refusal". Held-out wordings occur in the split "test" alone.

Not promised: knowledge. What the assistant cannot do it says it cannot do.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from pipeline.ingest.records import Dialogue, Message
from pipeline.synthetic import tool_script
from pipeline.synthetic.tool_inventions import invent, lookup, renamed, sibling, user_of
from pipeline.synthetic.tool_script import Call, Script
from pipeline.synthetic.tool_values import Tool, Value, draw, function, misspelt, places, told, words
from pipeline.synthetic.toolbox import CHAINS, SEEN, UNSEEN, Chain

INVENTED, RENAMED = 0.65, 0.3  # shares of the training conversations with such tools
ANSWERED = 0.3  # share of the single-request conversations that go on to result and closing sentence
REFUSED = 0.3  # share of the added requests that no offered tool serves
LENGTH = 1_200  # characters of tools and messages beyond which no request is added: most conversations fit 512 tokens
NUM_OFFERED = (*[2] * 11, *[3] * 5, 4, 4, 5, 6)  # mostly few: a schema costs some 50 tokens

Request = tuple[str, list[Call]]  # a wish without its frame, and the calls that serve it


@dataclass(frozen=True)
class Setting:
    """What one conversation may contain."""

    rng: Random
    unseen_tool: bool = False  # a called tool is of the held-out domains
    unseen_template: bool = False  # wordings and frames of the held-out families alone
    invented: bool = False
    renamed: bool = False
    goes_on: bool = False  # more requests follow, up to LENGTH characters in all
    mine: Callable[[str], bool] = bool  # whether a request belongs to the split

    def target(self) -> Tool:
        """A tool to call."""
        if self.invented:
            return invent(self.rng)
        return self.rng.choice(UNSEEN if self.unseen_tool else SEEN)

    def wording(self, tool: Tool) -> str:
        """One of the tool's wordings that the setting allows."""
        return tool_script.family(tool.wordings, self.unseen_template, self.rng)

    def fresh(self, tools: list[Tool]) -> dict[str, Tool]:
        """The tools by their true name, under new names where the setting asks for it."""
        return {tool.name: renamed(tool, self.rng) if self.renamed else tool for tool in tools}


def build(category: str, setting: Setting) -> Script | None:
    """A finished script; None if this draw has no conversation of the category. Raises KeyError for another name."""
    script = BUILDERS[category](setting)
    names = [tool.name for tool in (*script.tools, *script.late)] if script else []
    if script is None or len(set(names)) < len(names):
        return None
    return go_on(script, setting) if setting.goes_on else script


def others(setting: Setting, targets: list[Tool], number: int, *, near: bool = True) -> list[Tool]:
    """Tools to offer beside the targets: one near-duplicate first, then any; no name twice."""
    rng, found = setting.rng, {tool.name: tool for tool in targets}
    domains = {tool.domain for tool in targets}
    pool = (*SEEN, *UNSEEN) if setting.unseen_tool else SEEN
    close = [tool for tool in pool if tool.domain in domains] if near else []
    while len(found) < len(targets) + number:
        first = near and len(found) == len(targets)
        if setting.invented and rng.random() < 0.8:
            tool = sibling(targets[0], rng) if first or (near and rng.random() < 0.3) else invent(rng)
        else:
            tool = rng.choice(close if first and close else pool)
        if near or not _alike(tool, targets):
            found.setdefault(tool.name, tool)
    return list(found.values())[len(targets) :]


def _alike(tool: Tool, targets: list[Tool]) -> bool:
    """Of the same domain, or with a word of the name in common."""
    mine = set(tool.name.split("_")) | set(tool.domain.split())
    return any(mine & (set(other.name.split("_")) | set(other.domain.split())) for other in targets)


def _offer(setting: Setting, targets: list[Tool], number: int) -> tuple[Script, list[Tool]]:
    """A script that offers the targets and `number` others in random order, and the targets under their shown names."""
    shown = setting.fresh([*targets, *others(setting, targets, number)])
    offered = list(shown.values())
    setting.rng.shuffle(offered)
    return Script(offered), [shown[tool.name] for tool in targets]


def _finish(script: Script, rng: Random, share: float = ANSWERED) -> Script:
    if rng.random() < share:
        script.answer()
    return script


def _one_call(setting: Setting, num_others: int, before: str = "") -> Script:
    script, (tool,) = _offer(setting, [setting.target()], num_others)
    wording, values = setting.wording(tool), draw(tool, setting.rng)
    values = told(tool, wording, values)
    text = tool_script.framed(words(tool, wording, values, setting.rng), setting.unseen_template, setting.rng)
    script.user(f"{before} {text}".strip())
    script.call([(tool, values)])
    return _finish(script, setting.rng)


def simple(setting: Setting) -> Script:
    """One call, one tool offered."""
    return _one_call(setting, 0)


def multiple(setting: Setting) -> Script:
    """One call, two to six tools offered."""
    return _one_call(setting, setting.rng.choice(NUM_OFFERED) - 1)


def relevance(setting: Setting) -> Script:
    """Small talk before a request that needs a call."""
    chatter = tool_script.family(tool_script.CHATTER, setting.unseen_template, setting.rng)
    return _one_call(setting, setting.rng.randint(1, 2), tool_script.filled(chatter, setting.rng))


def parallel(setting: Setting) -> Script | None:
    """Two or three calls of one tool."""
    script, (tool,) = _offer(setting, [setting.target()], setting.rng.choice((0, 0, 1)))
    return _ask(script, setting, several_of(setting, tool))


def parallel_multiple(setting: Setting) -> Script | None:
    """Two or three tools, a call each."""
    rng = setting.rng
    targets = {tool.name: tool for tool in (setting.target() for _ in range(rng.choice((2, 2, 2, 3))))}
    while len(targets) < 2:
        tool = setting.target()
        targets[tool.name] = tool
    script, tools = _offer(setting, list(targets.values()), rng.choice((0, 0, 1)))
    return _ask(script, setting, one_of_each(setting, tools))


def several_of(setting: Setting, tool: Tool) -> Request | None:
    """Two or three requests for one tool, in one sentence; None where the draw does not keep them apart."""
    rng, wording = setting.rng, setting.wording(tool)
    number = rng.choice((2, 2, 2, 3))
    if not places(wording):
        return None
    drawn = [told(tool, wording, draw(tool, rng)) for _ in range(number)]
    shared = [{**drawn[0], places(wording)[-1]: each.get(places(wording)[-1])} for each in drawn]
    text = tool_script.coordinated(tool, wording, shared, rng) if rng.random() < 0.6 else None
    values = shared if text else drawn
    if any(values[i] == values[j] for i in range(number) for j in range(i)):
        return None
    text = text or tool_script.joined([words(tool, wording, each, rng) for each in values], rng)
    return text, [(tool, each) for each in values]


def one_of_each(setting: Setting, tools: list[Tool]) -> Request:
    """A request for each of the tools, in one sentence."""
    pieces, calls = [], list[Call]()
    for tool in tools:
        wording = setting.wording(tool)
        values = told(tool, wording, draw(tool, setting.rng))
        pieces.append(words(tool, wording, values, setting.rng))
        calls.append((tool, values))
    return tool_script.joined(pieces, setting.rng), calls


def _ask(script: Script, setting: Setting, request: Request | None) -> Script | None:
    """The script with a request, its calls and, in a fifth of the draws, results and closing words."""
    if request is None:
        return None
    text, calls = request
    script.user(tool_script.framed(text, setting.unseen_template, setting.rng))
    script.call(calls)
    return _finish(script, setting.rng, 0.2)


def go_on(script: Script, setting: Setting) -> Script | None:
    """More requests for the offered tools, and some that none of them serves, up to LENGTH characters.

    None where a tool refuses what was asked (the world is no longer as it was at the start).
    """
    rng, known = setting.rng, [*script.tools, *script.late]
    size = len(json.dumps([function(tool) for tool in script.tools]))
    tools = [tool for tool in known if stands_alone(tool)]
    while size + sum(len(json.dumps(message)) for message in script.messages) < LENGTH:
        if script.messages[-1].get("tool_calls"):
            script.answer()
        form = rng.random()
        if form < REFUSED or not tools:
            (wanted,) = others(setting, known, 1, near=False)
            request: Request | None = (one_of_each(setting, [wanted])[0], [])
        elif form < 0.7:
            request = one_of_each(setting, [rng.choice(tools)])
        elif form < 0.85 or len(tools) < 2:
            request = several_of(setting, rng.choice(tools))
        else:
            request = one_of_each(setting, rng.sample(tools, 2))
        if request is None:
            continue
        text = tool_script.framed(request[0], setting.unseen_template, rng)
        if not setting.mine(text):
            continue
        script.user(text)
        if not request[1]:
            script.say(rng.choice(tool_script.REFUSALS))
        elif any("error" in result for result in script.call(request[1])):
            return None
    return script


def stands_alone(tool: Tool) -> bool:
    """Whether each wording states every required parameter (the second half of a chain's does not)."""
    required = {name for name, parameter in tool.params.items() if "default" not in parameter.schema}
    return all(required <= set(told(tool, wording, dict.fromkeys(tool.params))) for wording in tool.wordings)


def irrelevance(setting: Setting) -> Script:
    """A request for a tool that is not offered, or for something no tool does."""
    rng = setting.rng
    if rng.random() < 0.35:
        tools, text = [setting.target()], tool_script.family(tool_script.UNSERVED, setting.unseen_template, rng)
        tools += others(setting, tools, rng.choice((0, 1, 2)))
        text = tool_script.filled(text, rng)
    else:
        wanted = setting.target()
        tools = others(setting, [wanted], rng.choice((1, 1, 2, 3)), near=False)
        if setting.unseen_tool:  # what is offered has to be unseen
            tools = [tool for tool in UNSEEN if not _alike(tool, [wanted])]
            tools = rng.sample(tools, min(len(tools), rng.choice((1, 1, 2, 3))))
        wording = setting.wording(wanted)
        text = words(wanted, wording, told(wanted, wording, draw(wanted, rng)), rng)
        text = tool_script.framed(text, setting.unseen_template, rng)
    script = Script(list(setting.fresh(tools).values()))
    script.user(text)
    script.say(rng.choice(tool_script.REFUSALS))
    return script


def plain(setting: Setting) -> Script:
    """A greeting: tools are there, none is wanted."""
    target = setting.target()
    script, _ = _offer(setting, [target], setting.rng.choice((0, 1)))
    said, answer = tool_script.PLAIN[setting.rng.randrange(4) if not setting.unseen_template else 4]
    state = setting.rng.getstate()
    script.user(tool_script.filled(said, setting.rng))
    setting.rng.setstate(state)  # the same name in the answer
    script.say(tool_script.filled(answer, setting.rng))
    return script


def missing(setting: Setting) -> Script | None:
    """A required value is missing: the assistant asks, the user tells, the assistant calls."""
    rng = setting.rng
    script, (tool,) = _offer(setting, [setting.target()], rng.choice((0, 0, 1, 2)))
    if not tool.missing:
        return None
    name, wording = rng.choice(tool.missing)
    values = draw(tool, rng)
    known = told(tool, wording, values)
    if name in known:
        return None
    script.user(tool_script.framed(words(tool, wording, known, rng), setting.unseen_template, rng))
    script.say(tool_script.asking(name, rng))
    script.user(tool_script.reply(tool, name, values[name], rng))
    script.call([(tool, {key: values[key] for key in tool.params if key in known or key == name})])
    return _finish(script, rng, 0.2)


def later(setting: Setting) -> Script:
    """At first no tool fits; then the user brings one."""
    rng = setting.rng
    target = setting.target()
    shown = setting.fresh([target, *others(setting, [target], rng.choice((1, 1, 2)), near=False)])
    tool = shown.pop(target.name)
    script = Script(list(shown.values()))
    wording = setting.wording(tool)
    values = told(tool, wording, draw(tool, rng))
    script.user(tool_script.framed(words(tool, wording, values, rng), setting.unseen_template, rng))
    script.say(rng.choice(tool_script.REFUSALS))
    script.announce(tool, rng.choice(tool_script.NEWS), rng.choice(tool_script.AGAIN))
    script.call([(tool, values)])
    return _finish(script, rng, 0.2)


def dependent(setting: Setting) -> Script | None:
    """Two requests in one turn; the second call's value stands in the first one's result."""
    rng = setting.rng
    first, second, chain = _chain(setting)
    shown = setting.fresh([first, second, *others(setting, [first, second], rng.choice((0, 0, 0, 1)))])
    first, second = shown[first.name], shown[second.name]
    offered = list(shown.values())
    rng.shuffle(offered)
    script = Script(offered)
    link = next(name for name in second.params if second.old_names.get(name, name) == chain.param)
    wording = setting.wording(first)
    values = told(first, wording, draw(first, rng))
    tail = tool_script.family(chain.tails, setting.unseen_template, rng)
    for before, after in zip((second.old_names.values()), second.params, strict=False):
        tail = tail.replace(f"{{{before}}}", f"{{{after}}}")
    more = told(second, tail, draw(second, rng))
    pieces = [words(first, wording, values, rng), words(second, tail, more, rng)]
    text = rng.choice((", then ", " and then ")).join(pieces)
    script.user(tool_script.framed(text, setting.unseen_template, rng))
    (result,) = script.call([(first, values)])
    if chain.key not in result:
        return None
    script.show()
    linked = {**more, link: result[chain.key]}
    script.call([(second, {name: linked[name] for name in second.params if name in linked})])
    return _finish(script, rng)


def _chain(setting: Setting) -> tuple[Tool, Tool, Chain]:
    """Two tools of which the first feeds the second."""
    rng = setting.rng
    tools = {tool.name: tool for tool in (*SEEN, *UNSEEN)}
    if setting.invented:
        noun = rng.choice(tool_script.NOUNS)
        first, second = lookup(rng, noun), user_of(rng, noun)
        return first, second, Chain(first.name, f"{noun}_id", second.name, f"{noun}_id", second.wordings)
    fitting = [c for c in CHAINS if (tools[c.second] in UNSEEN) == setting.unseen_tool]
    chain = rng.choice(fitting)
    return tools[chain.first], tools[chain.second], chain


def repair(setting: Setting) -> Script | None:
    """The user's slip of the pen makes the first call fail; the error names the right value."""
    setting = replace(setting, invented=False)  # an invented tool refuses nothing
    rng = setting.rng
    target = rng.choice([tool for tool in (UNSEEN if setting.unseen_tool else SEEN) if tool.fragile])
    script, (tool,) = _offer(setting, [target], rng.choice((0, 0, 1)))
    wording = setting.wording(tool)
    values: dict[str, Value] = told(tool, wording, draw(tool, rng))
    assert tool.fragile is not None
    values[tool.fragile] = misspelt(values[tool.fragile], rng)
    script.user(tool_script.framed(words(tool, wording, values, rng), setting.unseen_template, rng))
    (result,) = script.call([(tool, values)])
    if "error" not in result:
        return None
    script.show()
    right = result["error"].rsplit('did you mean "', 1)[-1].split('"')[0]
    (result,) = script.call([(tool, {**values, tool.fragile: right})])
    return None if "error" in result else _finish(script, rng)


BUILDERS: dict[str, Callable[[Setting], Script | None]] = {
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


# -- small_talk --------------------------------------------------------------------------------------------------------


ABLE = "I can write Python functions, tell stories and call the tools that you offer."
QUESTIONS = (
    ("What can you do?", ABLE),
    ("Who are you?", "I am a small code assistant, trained with Stagecoach."),
    ("What are you?", "I am a small code assistant, trained with Stagecoach."),
    ("Can you help me?", ABLE),
    ("How can you help me?", ABLE),
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
    """Conversation `number` of a split: one to three exchanges, the first of which gives the category."""
    id_ = f"talk/{split}/{seed}/{number}"
    rng = Random(id_)
    unseen = split == "test"
    category = rng.choice(("greeting", "question", "refusal", "refusal"))
    messages: list[Message] = []
    for form in (category, *rng.choices(("question", "refusal", "refusal"), k=rng.choice((0, 0, 1, 2)))):
        asked, answer = _exchange(form, unseen, rng)
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return Dialogue(id=id_, kind="talk", category=category, messages=messages)


def _exchange(form: str, unseen: bool, rng: Random) -> tuple[str, str]:
    """What the user says, and the answer."""
    if form == "question":
        return rng.choice(QUESTIONS)
    if form == "refusal":
        return _wish(unseen, rng), rng.choice(tool_script.REFUSALS)
    if rng.random() < 0.4 and not unseen:
        return rng.choice(GREETINGS)
    said, answer = tool_script.PLAIN[4 if unseen else rng.randrange(4)]
    state = rng.getstate()
    said = tool_script.filled(said, rng)
    rng.setstate(state)  # the same name in the answer
    return said, tool_script.filled(answer, rng)


def _wish(unseen: bool, rng: Random) -> str:
    """Something that needs a tool, or knowledge."""
    if rng.random() < 0.5:
        return tool_script.filled(tool_script.family(tool_script.UNSERVED, unseen, rng), rng)
    tool = rng.choice(SEEN)
    wording = tool_script.family(tool.wordings, unseen, rng)
    return tool_script.framed(words(tool, wording, told(tool, wording, draw(tool, rng)), rng), unseen, rng)
