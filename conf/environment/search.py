"""Search: two tools in turn. The first finds the id of a thing, the second tells about it; the answer must say it.

Validation has other nouns, attributes and verbs than training: no tool of it was seen.
"""

import random
import re

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gia", "Hugo", "Ines", "Jan", "Kira", "Leo", "Mia", "Nils", "Rosa")
NOUNS = {
    "train": ("order", "ticket", "invoice", "parcel", "room", "account", "recipe", "letter"),
    "val": ("booking", "contract", "machine", "project", "student", "vehicle"),
}
ATTRIBUTES = {
    "train": ("status", "owner", "price", "city", "date", "size"),
    "val": ("color", "manager", "weight", "language"),
}
FINDERS = {"train": ("find", "search", "lookup"), "val": ("locate", "seek", "identify")}
TELLERS = {"train": ("get", "read", "show"), "val": ("fetch", "describe", "report")}


def task(split, number, seed):
    rng = random.Random(f"{split}/{seed}/{number}")
    noun, (asked, other) = rng.choice(NOUNS[split]), rng.sample(ATTRIBUTES[split], 2)
    names = rng.sample(NAMES, 3)
    ids = {name: f"{noun[0].upper()}{rng.randrange(100, 1000)}" for name in names}
    facts = {ids[name]: {key: _made_up(rng) for key in (asked, other)} for name in names}
    find, tell = f"{rng.choice(FINDERS[split])}_{noun}", rng.choice(TELLERS[split])
    tools = [_tool(find, f"Find the id of a {noun}.", "name")]
    tools += [_tool(f"{tell}_{key}", f"The {key} of a {noun}.", f"{noun}_id") for key in (asked, other)]
    rng.shuffle(tools)
    return {
        "question": f"What is the {asked} of the {noun} of {names[0]}?",
        "tools": tools,
        "state": {"noun": noun, "find": find, "tell": tell, "ids": ids, "facts": facts, "said": []},
        "goal": {"id": ids[names[0]], "value": facts[ids[names[0]]][asked]},
    }


def _made_up(rng):
    return "".join(rng.choice(letters) for letters in ("bdfgklmnprstv", "aeiou") * 2) + str(rng.randrange(10, 100))


def _tool(name, description, parameter):
    schema = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def call(state, name, arguments):
    if name == state["find"]:
        result = {f"{state['noun']}_id": state["ids"][arguments["name"]]}
    else:
        key = name.removeprefix(f"{state['tell']}_")
        result = {key: state["facts"][arguments[f"{state['noun']}_id"]][key]}
    state["said"] += result.values()
    return result


def score(state, goal, answer):
    if goal["value"] in state["said"]:
        return 1.0 if re.search(rf"(?<!\w){goal['value']}(?!\w)", answer) else 0.5
    return 0.2 if goal["id"] in state["said"] else 0.0
