"""Key-value store: change values under keys. What counts is the store at the end."""

import random

KEYS = {
    "train": ["color", "size", "owner", "level", "city", "price"],
    "val": ["weight", "status", "language", "height", "brand", "score"],
}
VERBS = {"train": ("set", "delete", "copy"), "val": ("put", "remove", "clone")}


def task(split, number, seed):
    rng = random.Random(f"{split}/{seed}/{number}")
    one, two, three = rng.sample(KEYS[split], 3)
    store = {one: str(rng.randrange(10, 100)), two: str(rng.randrange(10, 100))}
    value, after = str(rng.randrange(100, 1000)), dict(store)
    changed = rng.choice((one, three))
    chosen = rng.sample(("set", "delete", "copy"), 1 + number % 2)
    for wish in chosen:
        if wish == "set":
            after[changed] = value
        elif wish == "delete":
            del after[two]
        else:
            after[three] = after[one]
    words = {"set": f"set {changed} to {value}", "delete": f"delete {two}", "copy": f"copy {one} to {three}"}
    text = " and ".join(words[wish] for wish in chosen)
    return {
        "question": f"{text[0].upper()}{text[1:]}.",
        "tools": [_tool(name, what) for name, what in zip(VERBS[split], ("key value", "key", "source target"))],
        "state": {"store": store, "names": list(VERBS[split])},
        "goal": after,
    }


def _tool(name, parameters):
    properties = {key: {"type": "string"} for key in parameters.split()}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    about = {"key value": "Store a value.", "key": "Take a key away.", "source target": "Copy the value of a key."}
    return {"type": "function", "function": {"name": name, "description": about[parameters], "parameters": schema}}


def call(state, name, arguments):
    store = state["store"]
    match state["names"].index(name):
        case 0:
            store[arguments["key"]] = arguments["value"]
        case 1:
            del store[arguments["key"]]
        case 2:
            store[arguments["target"]] = store[arguments["source"]]
    return "done"


def score(state, goal, answer):
    return float(state["store"] == goal)
