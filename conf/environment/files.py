"""Files in memory: move, append, count. What counts are the files at the end, or the number that is said."""

import random
import re

NAMES = {
    "train": ("notes", "todo", "plan", "list", "draft", "log"),
    "val": ("report", "agenda", "recipe", "index", "letter", "diary"),
}
WORDS = ("apple", "bread", "chalk", "daisy", "eagle", "flute", "grape", "house", "ivory", "jelly")
TOOLS = {"rename": ("Rename a file.", "path", "new_path"), "append": ("Add a line to a file.", "path", "line")}
TOOLS["read"] = ("The lines of a file.", "path")


def task(split, number, seed):
    rng = random.Random(f"{split}/{seed}/{number}")
    one, two, three = (f"{name}.txt" for name in rng.sample(NAMES[split], 3))
    files = {path: rng.sample(WORDS, rng.randrange(2, 6)) for path in (one, two)}
    word, count = rng.choice(WORDS), None
    after = {path: list(rows) for path, rows in files.items()}
    match rng.randrange(3):
        case 0:
            question = f"Rename {one} to {three}."
            after[three] = after.pop(one)
        case 1:
            question = f"Add the line {word} to {two}."
            after[two].append(word)
        case _:
            question, count = f"How many lines does {one} have?", len(files[one])
    goal = {"files": after, "count": count}
    return {"question": question, "tools": [_tool(*row) for row in TOOLS.items()], "state": files, "goal": goal}


def _tool(name, row):
    schema = {"type": "object", "properties": {key: {"type": "string"} for key in row[1:]}, "required": list(row[1:])}
    return {"type": "function", "function": {"name": name, "description": row[0], "parameters": schema}}


def call(state, name, arguments):
    rows = state[arguments["path"]]
    match name:
        case "rename":
            state[arguments["new_path"]] = state.pop(arguments["path"])
        case "append":
            rows.append(arguments["line"])
        case "read":
            return rows
        case _:
            raise ValueError(f"no tool {name}; there are {', '.join(TOOLS)}")
    return "done"


def score(state, goal, answer):
    if state != goal["files"]:
        return 0.0
    return float(goal["count"] is None or re.search(rf"(?<!\d){goal['count']}(?!\d)", answer) is not None)
