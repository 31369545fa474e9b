"""Lines and functions across files: which are chosen, what a prompt has room for, what counts as right."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.evaluation import cross_file
from pipeline.evaluation.cross_file import HeldOut, Item, items, prompts_of, score, similarity
from pipeline.evaluation.suites import Subject
from pipeline.generation.sampling import Completion
from pipeline.model.transformer import Transformer
from pipeline.text import repositories
from pipeline.text.repositories import Context
from pipeline.text.tokenizer import Tokenizer
from tests.suites import SETTINGS

USE = (
    "from money import euros\nimport stock\n\n\n"
    "def total(n):\n    price = euros(n)  # twice\n    return euros(price)\n\n\n"
    "def left(item):\n    '''Call euros.'''\n    return (stock.count(item))\n\n\nédge = 'é', stock.LIMIT\n"
)
FILES = (("money.py", "def euros(amount):\n"), ("stock.py", "def count(item):\n"))
NAMES = ("euros", "stock.LIMIT", "stock.count")
CONTEXT = Context("shop", FILES, "use.py", names=NAMES)
FILE = HeldOut("shop/use.py", USE, (CONTEXT,), (len(USE),))


@pytest.fixture(scope="module", name="tokenizer")
def repository_tokenizer() -> Tokenizer:
    return Tokenizer.train(iter([USE * 3]), 448, repositories=True)


def test_lines_begin_at_the_first_use_of_a_name_of_another_file_and_never_in_an_import() -> None:
    lines, _ = items([FILE])
    assert [(item.name, item.reference) for item in lines] == [
        ("euros", " euros(n)  # twice"),
        ("stock.count", ".count(item))"),
        ("stock.LIMIT", ".LIMIT"),
    ]
    assert all(item.context.before + item.reference in USE for item in lines)
    assert lines[0].context.before.endswith("price =") and lines[0].context.files == FILES


def test_functions_are_the_bodies_that_use_such_a_name_without_their_docstring() -> None:
    _, functions = items([FILE])
    assert [item.reference for item in functions] == [
        "    price = euros(n)  # twice\n    return euros(price)",
        "    return (stock.count(item))",
    ]
    assert items([replace(FILE, contexts=(replace(CONTEXT, names=()),))]) == ([], [])


def test_an_item_has_the_context_of_the_part_that_it_is_in() -> None:
    second = replace(CONTEXT, files=FILES[1:])
    lines, _ = items([replace(FILE, contexts=(CONTEXT, second), ends=(USE.index("def left"), len(USE)))])
    assert [item.context.files for item in lines] == [FILES, FILES[1:], FILES[1:]]


@given(st.integers(12, 120), st.integers(0, 2))
def test_a_prompt_fills_its_room_with_own_text_last_and_other_files_first(room: int, number: int) -> None:
    tokenizer = Tokenizer.train(iter([USE * 3]), 448, repositories=True)
    subject: Any = type("S", (), {"tokenizer": tokenizer})
    context = items([FILE])[0][number].context
    with_files, without = prompts_of(subject, [context, context.alone()], room)
    own = tokenizer.encode(context.before)
    assert len(with_files) <= room and len(without) <= room
    least = min(len(own), int(room / 3))
    assert with_files[-least:] == without[-least:] == own[-least:]
    (head,) = repositories.encode(tokenizer, [replace(context, before="")])
    if len(head) + len(own) < room:
        assert with_files == [tokenizer.end_of_text, *head, *own]
    else:
        assert len(with_files) == room


def test_a_line_is_right_but_for_space_and_a_body_ends_where_its_indentation_does() -> None:
    line = Item("f", 0, CONTEXT, " euros(n)", "euros")
    assert score(" euros(n) ", line, "line") == {"exact": 1.0, "similarity": 1.0, "name": 1.0}
    assert score(" dollars(n)", line, "line")["name"] == 0.0
    assert score(" euros(m)", line, "line") == {"exact": 0.0, "similarity": 1 - 1 / 8, "name": 1.0}
    body = replace(line, reference="    a = 1\n    return a")
    assert (
        cross_file._cut("    a = 1\n\n    return a\ndef g():\n    pass", body, "function")
        == "    a = 1\n\n    return a"
    )
    assert cross_file._cut(" euros(n)\nx", line, "line") == " euros(n)"


@given(st.text("ab", max_size=6), st.text("ab", max_size=6), st.text("ab", max_size=6))
def test_edit_similarity_is_a_levenshtein_distance(one: str, two: str, three: str) -> None:
    def distance(a: str, b: str) -> float:
        return round((1 - similarity(a, b)) * max(len(a), len(b), 1), 6)

    assert distance(one, two) == distance(two, one) and (distance(one, two) == 0) == (one == two)
    assert distance(one, three) <= distance(one, two) + distance(two, three) + 1e-6
    assert distance("kitten", "sitting") == 3


def test_the_difference_is_of_the_same_items_and_resamples_files(
    tiny_model: Transformer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that copies a name only where it is shown is right with the other files and wrong without."""
    subject = Subject(tiny_model, tokenizer, replace(SETTINGS, context=400, cross_file=6), 1)
    monkeypatch.setattr(type(tiny_model), "config", replace(tiny_model.config, max_context=512), raising=False)
    answers = {"line": " euros(n)  # twice", "function": "    return (stock.count(item))\nx"}

    def complete(self: Subject, suite: str, prompts: dict[str, list[int]], **_: Any) -> dict[str, Completion]:
        kind = suite.split()[1]
        shown = {name: ids.count(tokenizer.file_sep or -1) > 1 for name, ids in prompts.items()}
        texts = {name: answers[kind] if seen else "    pass" for name, seen in shown.items()}
        return {name: Completion(tokenizer.encode(text), [], "stop") for name, text in texts.items()}

    monkeypatch.setattr(Subject, "complete", complete)
    files = [replace(FILE, name=f"shop/use{n}.py") for n in range(2)]
    result = cross_file.measured(subject, files)
    numbers = result.numbers
    assert (numbers["lines"], numbers["functions"], numbers["lines_left_out"]) == (6, 3, 0)
    assert numbers["line_exact_with"] == pytest.approx(1 / 3) == numbers["line_exact_difference"]
    assert numbers["line_exact_without"] == 0 and numbers["line_name_difference"] == pytest.approx(1 / 3)
    assert numbers["line_exact_difference_low"] == pytest.approx(1 / 3)  # both files score alike
    assert len(result.rows) == 2 * (6 + 3)
    assert numbers["function_exact_with"] in (pytest.approx(1 / 3), pytest.approx(2 / 3))  # 3 drawn of 4; 2 of 4 right
    assert sum(row["right"] for row in result.rows) == 2 + round(3 * numbers["function_exact_with"])
