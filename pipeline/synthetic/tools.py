"""Tool conversations with known truth: their generators, the truth of each turn, and scored wrong answers.

`dialogues(split, count, seed)` yields `Dialogue` records of kind "tools". Each is a pure function of (split, seed,
number); quotas are exact in every block of 100. `Dialogue.category` is `<category>/<tool>/<template>` with tool in
{seen_tool, unseen_tool} and template in {seen_template, unseen_template}; `facets` splits it. Three domains of the
toolbox and the last fifth of every list of wordings and frames are held out from train and val. The test split cycles
through the four quadrants within each category. The splits share no opening request (a hash of its text assigns it to
a split). Training conversations continue with more requests for the same tools.

The truth follows from the record's messages and tools, so conversations loaded from disk can be scored.

`choice_dialogue(split, seed, number)` returns a `Dialogue` of kind "choice", to practice choosing among tools: a few
short tools, and a series of requests for one, two or three of them. Choosing the right tool is the last thing a small
model learns: it takes about ten thousand choices (docs/LOG.md), and half of the conversations from `dialogues` offer
only one tool. Nearly all tools are invented, many with meaningless names, so that a model must read the descriptions.
Each record is a pure function of the three arguments; the category is the number of tools. For training only: a request
may follow a call whose result was not shown. No wording, tool or opening request of the test split occurs.

`record(seed, number)` returns a transcript: a conversation of one of the two kinds (half each) as plain text, for the
language model's corpus. It uses only the training split, with a different seed than stage `tasks`, so held-out tools
and wordings never occur. Control tokens cannot occur in text (`Tokenizer.encode` produces none), so a turn consists of
a line with its role, followed by its content; a call is written as JSON. Transcripts make the tokenizer learn the words
of schemas and requests as single tokens (measured, docs/LOG.md), and let the model practice reading schemas before the
short fine-tuning stage (not measured separately).

`talk_dialogue(split, seed, number)` returns a conversation without tools: a `Dialogue` of kind "talk", a pure function
of the three arguments. The categories are "greeting", "question" (about the assistant), "request" (for code, in
everyday words) and "refusal" (a request that needs a tool). Without such conversations, a model trained mostly on calls
answers everything with a call, even if no tool is offered, and refuses most requests for code in everyday words
(docs/LOG.md). Held-out wordings occur only in the split "test".

Not guaranteed: that the requests sound like people, that a value worded differently than the truth is really wrong, or
that invented tools make sense; for transcripts: the chat format (only `text/chat.py` writes it), or that a conversation
differs from one made by stage tasks in more than its values.
"""

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import NamedTuple

from pipeline.ingest.records import Dialogue, Message, Text
from pipeline.run.types import JsonObject
from pipeline.synthetic import programs
from pipeline.synthetic.operations import Draw
from pipeline.synthetic.tool_dialogues import (
    INVENTED,
    RENAMED,
    DialogueOptions,
    Request,
    Script,
    build,
    draw_greeting,
    draw_others,
    request_each,
    request_several,
    stands_alone,
)
from pipeline.synthetic.tool_schemas import (
    ToolSpec,
    arguments_in,
    draw,
    fill,
    function,
    invent,
    problems,
    renamed,
    sibling,
)
from pipeline.synthetic.toolbox import seen
from pipeline.synthetic.wording import Value, fill_template, frame_request, pick_family, sentences, table, words

QUOTAS = {
    "simple": 22,
    "multiple": 18,
    "parallel": 10,
    "parallel_multiple": 8,
    "irrelevance": 12,
    "relevance": 5,
    "missing": 8,
    "later": 3,
    "dependent": 8,
    "repair": 4,
    "plain": 2,
}  # percent
MOST_DIALOGUES = 1_000_000  # per split; higher numbers are for `unserved_dialogues`
SPLITS = {"train": (0, 8), "val": (8, 9), "test": (9, 10)}  # each split's range of opening-request hashes, in tenths
NO_CALL_FIRST = ("irrelevance", "plain", "missing", "later")  # categories whose first assistant turn has no call
QUADRANTS = ((False, False), (True, False), (False, True), (True, True))  # (unseen tool, unseen template)


class Facets(NamedTuple):
    """The parts of `Dialogue.category`."""

    category: str
    unseen_tool: bool
    unseen_template: bool


def facets(dialogue: Dialogue) -> Facets:
    """Split the category into its parts; a category from another source ("simple") is treated as seen."""
    category, *rest = dialogue.category.split("/")
    return Facets(category, "unseen_tool" in rest, "unseen_template" in rest)


def dialogues(split: str, count: int, seed: int, first: int = 0, *, fresh: bool = False) -> Iterator[Dialogue]:
    """Conversations `first` to `count` - 1 of a split ("train", "val", "test"). Raises ValueError for other splits.

    A smaller `count` yields a prefix of the same conversations. If `fresh`, held-out tools are from FRESH_DOMAINS.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}; found {split!r}")
    order: list[str] = []
    for number in range(first, count):
        block, position = divmod(number, 100)
        if position == 0 or not order:
            order = [category for category, quota in QUOTAS.items() for _ in range(quota)]
            Random(f"tools/{split}/{seed}/order/{block}").shuffle(order)
        category = order[position]
        rank = QUOTAS[category] * block + order[:position].count(category)
        quadrant = QUADRANTS[rank % 4] if split == "test" else (False, False)
        yield _dialogue(split, seed, number, category, quadrant, fresh=fresh)


def unserved_dialogues(count: int, seed: int, *, fresh: bool = False) -> Iterator[Dialogue]:
    """More test conversations whose first request no offered tool can serve; needed because false calls are rare."""
    for number in range(count):
        yield _dialogue("test", seed, MOST_DIALOGUES + number, "irrelevance", QUADRANTS[number % 4], fresh=fresh)


def fresh_dialogues(known: Sequence[Dialogue], seed: int) -> list[Dialogue]:
    """Replace conversations from `dialogues` and `unserved_dialogues` with new ones for fresh tools; keep the rest."""
    generated = [d for d in known if d.id.startswith("tools/test/")]
    unserved = sum(map(is_unserved, generated))
    return [
        *dialogues("test", len(generated) - unserved, seed, fresh=True),
        *unserved_dialogues(unserved, seed, fresh=True),
        *(d for d in known if not d.id.startswith("tools/test/")),
    ]


def is_unserved(dialogue: Dialogue) -> bool:
    """Whether the conversation is from `unserved_dialogues`."""
    place, _, number = dialogue.id.rpartition("/")
    return place.startswith("tools/test/") and int(number) >= MOST_DIALOGUES


def _dialogue(
    split: str, seed: int, number: int, category: str, quadrant: tuple[bool, bool], *, fresh: bool = False
) -> Dialogue:
    """The conversation from the first successful draw with an opening request that belongs to the split."""
    id_ = f"tools/{split}/{seed}/{number}"
    tool, template = quadrant

    def accepts(request: str) -> bool:
        return belongs(request, split)

    for attempt in range(10_000):
        rng = Random(f"{id_}/{attempt}")
        invented, renamed = rng.random() < INVENTED, rng.random() < RENAMED
        train = split == "train"
        options = DialogueOptions(
            rng, tool, template, fresh, train and invented, train and renamed, continues=train, accepts=accepts
        )
        script = build(category, options)
        if script is None or not accepts(script.messages[0]["content"]):
            continue
        quadrant_name = f"{'un' * tool}seen_tool/{'un' * template}seen_template"
        return script.close(id_, f"{category}/{quadrant_name}")
    raise AssertionError(f"{id_}: no {category} conversation in 10,000 draws")


def belongs(request: str, split: str) -> bool:
    """Whether a request may open a conversation in the split, by a hash of its text."""
    low, high = SPLITS[split]
    return low <= hashlib.blake2b(request.encode(), digest_size=8).digest()[0] * 10 // 256 < high


# -- truth -------------------------------------------------------------------------------------------------------------


def turns(dialogue: Dialogue) -> list[int]:
    """Indices of the scored assistant messages: all with calls, and the first one if it must not have any."""
    assistant = [i for i, message in enumerate(dialogue.messages) if message["role"] == "assistant"]
    quiet = assistant[:1] if facets(dialogue).category in NO_CALL_FIRST else []
    return quiet + [i for i in assistant if dialogue.messages[i].get("tool_calls")]


def tools_at(dialogue: Dialogue, turn: int) -> list[JsonObject]:
    """The tools available at a turn: those offered, and those in `<tools>` blocks of earlier user turns."""
    tools = list(dialogue.tools)
    for message in dialogue.messages[:turn]:
        if message["role"] == "user" and "\n<tools>\n" in message["content"]:
            block = message["content"].split("\n<tools>\n", 1)[1].split("\n</tools>", 1)[0]
            tools += [{"type": "function", "function": json.loads(line)} for line in block.split("\n")]
    return tools


def calls(message: Message) -> list[tuple[str, Value]]:
    """(name, arguments) of each call in a message; None for arguments that are not JSON."""
    parsed = []
    for call in message.get("tool_calls") or []:
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except json.JSONDecodeError:
                arguments = None
        parsed.append((call["function"]["name"], arguments))
    return parsed


def truth(dialogue: Dialogue, turn: int) -> list[dict[str, dict[str, list[Value]]]]:
    """The accepted calls of a turn in BFCL format, [{name: {parameter: [accepted values]}}]; [] if no call is correct.

    `""` among the accepted values means that the parameter may be absent. A nested object is a dict of such lists,
    and a list of objects is a list of such dicts. Raises ValueError if `turn` is not an assistant message.
    """
    if dialogue.messages[turn]["role"] != "assistant":
        raise ValueError(
            f"{dialogue.id}: message {turn} is from the {dialogue.messages[turn]['role']}, not the assistant"
        )
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools_at(dialogue, turn)}
    return [
        {name: _accepted_values(schemas.get(name, {}), arguments)} for name, arguments in calls(dialogue.messages[turn])
    ]


def _accepted_values(parameters: JsonObject, arguments: dict[str, Value]) -> dict[str, list[Value]]:
    """The accepted values of each parameter: the correct one, and absence if that is equivalent."""
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    accepted: dict[str, list[Value]] = {}
    for name, value in arguments.items():
        may_be_absent = name not in required and properties.get(name, {}).get("default", arguments) == value
        accepted[name] = [_bfcl(value), *([""] if may_be_absent else [])]
    for name, schema in properties.items():
        if name not in arguments:
            accepted[name] = [schema["default"], ""] if "default" in schema else [""]
    return accepted


def _bfcl(value: Value) -> Value:
    if isinstance(value, dict):
        return {key: [_bfcl(item)] for key, item in value.items()}
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return [_bfcl(item) for item in value]
    return value


# -- scored answers ----------------------------------------------------------------------------------------------------


def gold(dialogue: Dialogue, message: Message, turn: int | None = None) -> float:
    """Score an assistant message at a turn, in [0, 1] (`turn` None: the first scored turn).

    If the truth has calls: 0.2 if every call is JSON + 0.2 if every call fits an offered schema + 0.2 names + 0.4
    values. The last two are averages over the larger of the two call counts, under the best assignment; a value counts
    only under the right name, and a parameter at its default is treated as absent. If the truth has none: 1 for text
    without a call, otherwise 0.
    """
    turn = turns(dialogue)[0] if turn is None else turn
    right, actual = calls(dialogue.messages[turn]), calls(message)
    if not right:
        return float(not actual and bool(message["content"].strip()) and "<tool_call>" not in message["content"])
    if not actual:
        return 0.0
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools_at(dialogue, turn)}
    is_json = all(isinstance(arguments, dict) for _, arguments in actual)
    fits = is_json and all(name in schemas and not problems(schemas[name], arguments) for name, arguments in actual)
    actual = actual[:8]
    short, long = sorted((right, actual), key=len)
    best = 0.0
    for chosen in itertools.permutations(long, len(short)):
        pairs = zip(short, chosen, strict=True) if short is right else zip(chosen, short, strict=True)
        best = max(best, sum(_call_score(schemas, *pair) for pair in pairs))
    return 0.2 * is_json + 0.2 * fits + best / len(long)


def _call_score(schemas: dict[str, JsonObject], right: tuple[str, Value], actual: tuple[str, Value]) -> float:
    """0.2 for the correct name, plus 0.4 times the fraction of correct values among all parameters of either call."""
    if right[0] != actual[0]:
        return 0.0
    if not isinstance(actual[1], dict):
        return 0.2
    properties = schemas.get(right[0], {}).get("properties", {})
    right_values, actual_values = (stated(properties, arguments) for arguments in (right[1], actual[1]))
    names = set(right_values) | set(actual_values)
    num_equal = sum(
        name in right_values and name in actual_values and right_values[name] == actual_values[name] for name in names
    )
    return 0.2 + 0.4 * (num_equal / len(names) if names else 1.0)


def stated(properties: dict[str, JsonObject], arguments: dict[str, Value]) -> dict[str, str]:
    """The parameters that differ from their default, as canonical strings (5.0 is 5, true is not 1)."""
    texts = {name: canonical(value) for name, value in arguments.items()}
    defaults = {name: canonical(schema["default"]) for name, schema in properties.items() if "default" in schema}
    return {name: text for name, text in texts.items() if name not in defaults or defaults[name] != text}


def canonical(value: Value) -> str:
    """A canonical string, identical for equal JSON values: keys sorted, integral floats as integers."""

    def plain(part: Value) -> Value:
        if isinstance(part, dict):
            return {key: plain(item) for key, item in part.items()}
        if isinstance(part, list):
            return [plain(item) for item in part]
        return int(part) if isinstance(part, float) and part.is_integer() else part

    return json.dumps(plain(value), sort_keys=True, ensure_ascii=False)


def wrong_answers(dialogue: Dialogue, seed: int, turn: int | None = None) -> list[tuple[str, Message]]:
    """(kind, assistant message) for preference pairs; each kind at most once, each scored below the correct answer.

    Kinds if the truth has a call: "wrong_tool", "wrong_type", "wrong_value", "missing", "invented", "refusal"; if not:
    "needless_call". `turn` None: the first scored turn.
    """
    turn = turns(dialogue)[0] if turn is None else turn
    rng = Random(f"{dialogue.id}/{turn}/{seed}/wrong")
    right = calls(dialogue.messages[turn])
    functions = {tool["function"]["name"]: tool["function"] for tool in tools_at(dialogue, turn)}
    if not right:
        name = rng.choice(sorted(functions))
        parameters = functions[name].get("parameters", {})
        properties, texts = parameters.get("properties", {}), _user_words(dialogue, turn)
        arguments = {
            key: _plausible_value(properties.get(key, {}), texts, rng) for key in parameters.get("required", [])
        }
        return [("needless_call", _message([(name, arguments)]))]
    index = rng.randrange(len(right))
    name, arguments = right[index]
    parameters = functions[name].get("parameters", {})
    properties = parameters.get("properties", {})
    other_name = _other_name(name, sorted(functions), rng)
    wrong: list[tuple[str, tuple[str, Value]]] = [("wrong_tool", (other_name, arguments))]
    if arguments:
        key = rng.choice(list(arguments))
        chosen = list(arguments) if len(right) > 1 else [key]
        changed = {k: _other_value(arguments, k, properties.get(k, {}), rng) for k in chosen}
        wrong.append(("wrong_value", (name, {**arguments, **changed})))
        wrong.append(("wrong_type", (name, {**arguments, key: _other_type(arguments[key])})))
    required = [key for key in parameters.get("required", []) if key in arguments]
    if required:
        key = rng.choice(required)
        wrong.append(("missing", (name, {k: value for k, value in arguments.items() if k != key})))
    unused = [noun for noun in words("nouns") if noun not in properties]
    wrong.append(("invented", (name, {**arguments, rng.choice(unused): rng.choice(words("nouns"))})))
    answers = [(kind, _message([*right[:index], call, *right[index + 1 :]])) for kind, call in wrong]
    answers.append(("refusal", {"role": "assistant", "content": rng.choice(sentences("refusals"))}))
    return [(kind, message) for kind, message in answers if gold(dialogue, message, turn) < 1.0]


def _message(named_calls: list[tuple[str, Value]]) -> Message:
    tool_calls = [
        {
            "id": f"call_{i}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
        }
        for i, (name, arguments) in enumerate(named_calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": tool_calls}


def _other_name(name: str, names: list[str], rng: Random) -> str:
    others = [other for other in names if other != name]
    return rng.choice(others) if others else f"{name}_{rng.choice(words('nouns'))}"


def _other_value(arguments: dict[str, Value], key: str, schema: JsonObject, rng: Random) -> Value:
    """A different value of the same type, taken from another parameter if one fits."""
    value = arguments[key]
    options = [option for option in schema.get("enum", ()) if option != value]
    if options:
        return rng.choice(options)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + rng.randint(1, 9)
    if isinstance(value, list):
        return value[1:] if len(value) > 1 else [*value, *value]
    if isinstance(value, dict):
        leaf = rng.choice(list(value))
        return {**value, leaf: _other_value(value, leaf, {}, rng)}
    other_texts = [v for k, v in arguments.items() if k != key and isinstance(v, str) and v != value]
    if other_texts and not schema.get("enum"):
        return rng.choice(other_texts)
    *start, last = str(value).split(" ")
    return " ".join([*start, rng.choice([noun for noun in words("nouns") if noun != last])])


def _other_type(value: Value) -> Value:
    if isinstance(value, str | bool) or value is None:
        return [value]
    return canonical(value) if not isinstance(value, list) else value[0]


def _user_words(dialogue: Dialogue, turn: int) -> list[str]:
    text = " ".join(message["content"] for message in dialogue.messages[:turn] if message["role"] == "user")
    return [word.strip(".,?!:'\"") for word in text.split() if word.strip(".,?!:'\"")]


def _plausible_value(schema: JsonObject, texts: list[str], rng: Random) -> Value:
    """A value that fits the schema; strings are taken from the user's words."""
    type_ = schema.get("type", "string")
    type_ = type_[0] if isinstance(type_, list) else type_
    if schema.get("enum"):
        return rng.choice(schema["enum"])
    if type_ == "array":
        return [_plausible_value(schema.get("items", {}), texts, rng)]
    if type_ == "object":
        return {key: _plausible_value(item, texts, rng) for key, item in schema.get("properties", {}).items()}
    return {"string": rng.choice(texts), "boolean": True}.get(type_, rng.randint(1, 99))


# -- choices -----------------------------------------------------------------------------------------------------------


NUM_TOOLS = (2, 2, 3, 3, 4)
REAL, SIBLING = 0.1, 0.3  # fractions of tools that are from the toolbox, or near-duplicates of another offered tool
RENAMED_CHOICES = 0.3  # fraction of tools with a random name
REFUSED = 0.08  # fraction of requests that no tool fits
SEVERAL, TOGETHER = 0.15, 0.3  # fractions of requests with several calls to one tool, or calls to two or three tools
ANSWERED = 0.1  # fraction of calls followed by results and closing words
SCHEMA = 240  # maximum characters per tool
LENGTH = 1_250  # characters (about 500 tokens) beyond which no request is added


def choice_dialogue(split: str, seed: int, number: int) -> Dialogue:
    """Conversation `number` of a split ("train", "val")."""
    id_ = f"choice/{split}/{seed}/{number}"
    for attempt in range(1_000):
        script = _choice_script(Random(f"{id_}/{attempt}"), split)
        if script is not None:
            return replace(script.close(id_, str(len(script.tools))), kind="choice")
    raise AssertionError(f"{id_}: no conversation in 1,000 draws")


def _choice_script(rng: Random, split: str) -> Script | None:
    """One draw; None if names or values collide or a tool refuses the request."""
    tools = _draw_tools(rng)
    size = sum(map(_size, tools))
    if len({tool.name for tool in tools}) < len(tools):
        return None
    options, script = DialogueOptions(rng, invented=True), Script(tools)
    while size + sum(map(_length, script.messages)) < LENGTH:
        request = _draw_request(options, tools)
        if request is None:
            continue
        wish, wanted_calls = request
        text = frame_request(wish, False, rng)
        if not belongs(text, split):
            continue
        script.user(text)
        if not wanted_calls:
            script.say(rng.choice(sentences("refusals")))
        elif any("error" in result for result in script.call(wanted_calls)):
            return None
        elif rng.random() < ANSWERED:
            script.answer()
    return script


def _size(tool: ToolSpec) -> int:
    return len(json.dumps(function(tool)["function"]))


def _length(message: Message) -> int:
    """Approximate length of a message in the chat format, in characters."""
    return 20 + len(message["content"]) + sum(40 + len(name) + len(json.dumps(a)) for name, a in calls(message))


def _draw_tools(rng: Random) -> list[ToolSpec]:
    num_tools, tools = rng.choice(NUM_TOOLS), list[ToolSpec]()
    while len(tools) < num_tools:
        base = rng.choice(tools) if tools and rng.random() < SIBLING else None
        if rng.random() < REAL:
            tool = rng.choice(seen())
        else:
            tool = sibling(base, rng) if base and base.run is None else invent(rng)
        tool = renamed(tool, rng) if rng.random() < RENAMED_CHOICES else tool
        if stands_alone(tool) and _size(tool) <= SCHEMA:
            tools.append(tool)
    return tools


def _draw_request(options: DialogueOptions, tools: list[ToolSpec]) -> Request | None:
    """A request and the calls that fulfill it; None if the draw fails."""
    rng, form = options.rng, options.rng.random()
    if form < REFUSED:
        (wanted,) = draw_others(options, tools, 1, near=False)
        return request_each(options, [wanted])[0], []
    if form < REFUSED + SEVERAL:
        return request_several(options, rng.choice(tools))
    num_tools = rng.choice((2, 2, 3)) if form < REFUSED + SEVERAL + TOGETHER else 1
    return request_each(options, rng.sample(tools, min(len(tools), num_tools)))


# -- transcripts -------------------------------------------------------------------------------------------------------


SOURCE = "transcripts"


def record(seed: int, number: int) -> Text:
    """Transcript `number`, a pure function of (seed, number)."""
    if number % 4 < 2:
        dialogue = choice_dialogue("train", seed, number)
    else:
        (dialogue,) = dialogues("train", number + 1, seed, number)
    lines = ["Tools you can call:", *(json.dumps(tool["function"], ensure_ascii=False) for tool in dialogue.tools)]
    for message in dialogue.messages:
        lines.append(message["role"])
        if message["content"]:
            lines.append(message["content"])
        for name, arguments in calls(message):
            lines.append(json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False))
    return Text(text="\n".join((*lines, "")), source=SOURCE, path=f"{SOURCE}/{seed}/{number}", license="CC0-1.0")


# -- conversations without tools ---------------------------------------------------------------------------------------


TALK = {"request": 0.7, "refusal": 0.16, "greeting": 0.07, "question": 0.07}  # fractions of the exchanges


def talk_dialogue(split: str, seed: int, number: int) -> Dialogue:
    """Conversation `number` of a split: one to three exchanges; the first one determines the category."""
    id_ = f"talk/{split}/{seed}/{number}"
    rng = Random(id_)
    unseen = split == "test"
    forms = rng.choices(tuple(TALK), tuple(TALK.values()), k=rng.choice((1, 2, 3)))
    messages: list[Message] = []
    for turn, form in enumerate(forms):
        question, answer = _draw_exchange(form, unseen, rng, f"{id_}/{turn}")
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Dialogue(id=id_, kind="talk", category=forms[0], messages=messages)


def _draw_exchange(form: str, unseen: bool, rng: Random, id_: str) -> tuple[str, str]:
    """A user message and its answer."""
    if form == "request":
        return programs.request(Draw(id_), held_out=unseen)
    if form == "question":
        return rng.choice(tuple(table("tools.yaml")["questions"].items()))
    if form == "refusal":
        return _draw_wish(unseen, rng), rng.choice(sentences("refusals"))
    if rng.random() < 0.4 and not unseen:
        return rng.choice(tuple(table("tools.yaml")["short_greetings"].items()))
    return draw_greeting(unseen, rng)


def _draw_wish(unseen: bool, rng: Random) -> str:
    """A request that needs a tool or knowledge."""
    if rng.random() < 0.5:
        return fill_template(pick_family(sentences("unserved"), unseen, rng), rng)
    tool = rng.choice(seen())
    wording = pick_family(tool.wordings, unseen, rng)
    return frame_request(fill(tool, wording, arguments_in(tool, wording, draw(tool, rng)), rng), unseen, rng)
