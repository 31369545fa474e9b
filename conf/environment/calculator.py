"""Calculator: a sum of two steps, each by a call. Validation has other names of tools and parameters."""

import random
import re

OPERATIONS = {  # what it does: names of the tool, word in the question
    "sum": (("add", "plus"), "plus"),
    "difference": (("subtract", "minus"), "minus"),
    "product": (("multiply", "times"), "times"),
}
COMPUTE = {"sum": lambda a, b: a + b, "difference": lambda a, b: a - b, "product": lambda a, b: a * b}
PARAMETERS = {"train": ("a", "b"), "val": ("left", "right")}
LARGEST = 10**12


def task(split, number, seed):
    rng = random.Random(f"{split}/{seed}/{number}")
    first, second = rng.sample(sorted(OPERATIONS), 2)
    a, b, c = rng.sample(range(12, 100), 3)
    names = {OPERATIONS[kind][0][split == "val"]: kind for kind in (first, second)}
    words = [OPERATIONS[kind][1] for kind in (first, second)]
    schema = {"type": "object", "properties": {key: {"type": "integer"} for key in PARAMETERS[split]}}
    schema["required"] = list(PARAMETERS[split])
    tools = [
        {"type": "function", "function": {"name": name, "description": f"The {kind} of two.", "parameters": schema}}
        for name, kind in sorted(names.items())
    ]
    return {
        "question": f"What is {a} {words[0]} {b}, and the result {words[1]} {c}?",
        "tools": tools,
        "state": {"names": names, "parameters": list(PARAMETERS[split]), "said": []},
        "goal": COMPUTE[second](COMPUTE[first](a, b), c),
    }


def call(state, name, arguments):
    a, b = (int(arguments[key]) for key in state["parameters"])
    if max(abs(a), abs(b)) > LARGEST:
        raise ValueError(f"expected numbers up to {LARGEST}")
    state["said"].append(COMPUTE[state["names"][name]](a, b))
    return state["said"][-1]


def score(state, goal, answer):
    if re.search(rf"(?<![\w-]){goal}(?!\w)", answer) and goal in state["said"]:
        return 1.0
    return 0.5 if goal in state["said"] else 0.0
