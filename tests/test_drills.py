"""The drills: pure functions of their number, everything in them occurs twice, nothing from the tests is given away."""

import json
import re

from pipeline.synthetic import drills
from pipeline.synthetic.tool_schemas import problems
from pipeline.synthetic.toolbox import seen, unseen
from pipeline.synthetic.tools import dialogues
from pipeline.synthetic.wording import lines

TEXTS = [drills.drill(3, number) for number in range(1200)]


def test_a_drill_is_a_function_of_its_seed_and_number() -> None:
    assert [drills.drill(3, number) for number in range(1200)] == TEXTS
    assert len(set(TEXTS)) == 1200
    assert drills.drill(4, 0) != TEXTS[0]
    made = list(drills.records(20_000, 3))
    assert [record.text for record in made] == TEXTS[: len(made)]
    sizes = [len(record.text.encode()) for record in made]
    assert sum(sizes[:-1]) < 20_000 <= sum(sizes)
    assert {record.source for record in made} == {"drills"}
    assert made[7].path == "drills/3/7"


def test_what_is_asked_for_again_is_what_stood_there() -> None:
    again, rows_of = lines("drills.yaml", "again"), lines("drills.yaml", "rows")
    rows = recalls = 0
    for text in TEXTS:
        halves = re.split(rf"\n(?:{'|'.join(again)})\s", text)
        if len(halves) != 2:
            continue
        first, second = halves
        if first.split(" ", 1)[0] in rows_of:
            rows += 1
            assert first.split(" ", 1)[1] == second.removesuffix("\n")
        else:
            recalls += 1
            assert sorted(first.split("\n")) == sorted(second.removesuffix("\n").split("\n"))
    assert min(rows, recalls) > 60


def test_every_object_holds_what_the_lines_before_it_say() -> None:
    objects = calls = choices = 0
    for text in TEXTS:
        above, schemas, described = "", {}, {}
        for line in text.splitlines():
            if not line.startswith("{"):
                above += f"{line}\n"
                continue
            made = json.loads(line)
            if "parameters" in made:
                schemas[made["name"]] = made["parameters"]
                continue
            if set(made) == {"name", "description"}:
                described[made["name"]] = made["description"]
                continue
            if set(made) == {"name"} and made["name"] in described:
                verb, thing = described[made["name"]].lower().rstrip(".").split(" the ")
                assert f"{verb} the {thing}" in above.lower(), (text, made)
                choices += 1
                above = ""
                continue
            if "arguments" in made:
                calls += 1
                assert not problems(schemas[made["name"]], made["arguments"])
                made = made["arguments"]
            objects += 1
            for name, value in made.items():
                assert f"{name}: {value}" in above or f"{name} {value}" in above, (text, name)
            above = ""
    assert objects > 300 and calls > 150 and choices > 400


def test_conversations_ask_for_what_the_answer_says() -> None:
    talks = [drills.dialogue("train", 3, number) for number in range(300)]
    assert talks == [drills.dialogue("train", 3, number) for number in range(300)]
    assert not {talk.messages[0]["content"] for talk in talks} & {
        drills.dialogue("test", 3, number).messages[0]["content"] for number in range(300)
    }
    assert {talk.category for talk in talks} == {"again", "record", "request", "choose"}
    for talk in talks:
        if talk.category == "choose":
            described = {
                one["name"]: one["description"] for one in map(json.loads, talk.messages[0]["content"].split("\n"))
            }
            for asked, answer in zip(talk.messages[1::2], talk.messages[2::2], strict=True):
                meant = described[json.loads(answer["content"])["name"]].lower().rstrip(".")
                assert meant in asked["content"].lower()
            continue
        asked, answer = (message["content"] for message in talk.messages)
        if talk.category == "again":
            assert asked.split(":\n", 1)[1] == answer
        else:
            joint = ": " if talk.category == "record" else " "
            assert all(f"{name}{joint}{value}" in asked for name, value in json.loads(answer).items())


def test_no_tool_is_named_and_no_request_stands_in_a_drill() -> None:
    together = "\n".join(TEXTS)
    assert not [tool.name for tool in (*seen(), *unseen()) if "_" in tool.name and tool.name in together]
    assert not [d.id for d in dialogues("test", 60, 3) if d.messages[0]["content"] in together]
