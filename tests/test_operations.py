"""The operations: source and function agree, inputs are not changed, and no two do the same."""

import copy
from typing import Any

import pytest

from pipeline.synthetic import chains, operations
from pipeline.synthetic.chains import Branch, Program, Step, parse, spell
from pipeline.synthetic.operations import ANNOTATIONS, CONSTANTS, NUMBER, Draw, Operation, ValuePool, pool

TYPES: dict[str, type] = {"numbers": list, "words": list, "text": str, "counts": dict, "number": int}


def execute(source: str, name: str) -> Any:
    """The function that a source defines: tests may execute what the package itself only writes."""
    space: dict[str, Any] = {}
    exec(source, space)
    return space[name]


def values(kind: str) -> list[Any]:
    """All edge values and some of the others."""
    found: ValuePool = pool(kind)
    return [*(value for group in found.edges for value in group), *found.short[::4], *found.plain[::4]]


def seconds(one: Operation) -> list[Any]:
    if one.other is not None:
        return list(pool(one.other).short[:3])
    return list(CONSTANTS[::3]) if one.has_constant else [None]


@pytest.mark.parametrize("one", operations.all_operations(), ids=lambda one: one.name)
def test_source_and_function_of_an_operation_agree_and_leave_the_argument_alone(one: Operation) -> None:
    for second in seconds(one):
        step = Step(one, None if one.other else second, 0, one.other is not None)
        answer = execute(Program((step,)).source("answer"), "answer")
        for value in values(one.takes):
            before = copy.deepcopy(value)
            arguments = (value, second) if one.other else (value,)
            truth = Program((step,)).run(arguments)
            assert repr(answer(*arguments)) == repr(truth), (one.name, second, value)
            assert type(truth) is TYPES[one.gives]
            assert value == before


@pytest.mark.parametrize("one", operations.conditions(), ids=lambda one: one.name)
def test_source_and_function_of_a_condition_agree(one: Any) -> None:
    choices = operations.alike(one.takes, one.takes)
    branch = Branch(one, 4 if one.has_constant else None, Step(choices[0], 3), Step(choices[1], 3))
    program = Program((branch,))
    answer = execute(program.source("answer"), "answer")
    assert len({one.holds(value, 4) for value in values(one.takes)}) == 2
    for value in values(one.takes):
        assert repr(answer(value)) == repr(program.run((value,)))


def test_a_source_without_its_default_raises_on_an_empty_value_and_agrees_elsewhere() -> None:
    lossy = [one for one in operations.all_operations() if one.bare is not None]
    assert len(lossy) >= 8
    for one in lossy:
        assert one.bare is not None
        answer = execute(f"def answer({one.takes}):\n    return {one.bare.format(x=one.takes)}", "answer")
        (empty,), *_ = pool(one.takes).edges
        with pytest.raises((ValueError, IndexError, ZeroDivisionError)):
            answer(empty)
        for value in values(one.takes):
            if value:
                assert answer(value) == one.apply(value, None)


def test_every_function_is_that_of_an_operation_or_condition() -> None:
    steps = (*operations.all_operations(), *operations.conditions())
    assert sorted(operations.FUNCTIONS) == sorted(step.name for step in steps)


def test_there_are_about_a_hundred_operations_with_four_distinct_phrasings_each() -> None:
    everything = operations.all_operations()
    assert 100 <= len(operations.chain_operations()) <= 120
    assert len({one.name for one in everything}) == len(everything)
    seen: dict[tuple[str, str], str] = {}
    for one in everything:
        assert len(set(one.phrasings)) == len(one.phrasings) >= 4
        for phrasing in one.phrasings:
            assert ("{k}" in phrasing) == one.has_constant, phrasing
            assert phrasing == phrasing.strip() and phrasing[0].islower() and not phrasing.endswith(".")
            # A phrasing may ask for one thing only, given its type.
            assert seen.setdefault((one.takes, phrasing), one.name) == one.name
    for condition in operations.conditions():
        assert len(set(condition.phrasings)) == len(condition.phrasings) >= 4


def test_no_two_operations_do_the_same() -> None:
    done: dict[tuple[str, str], str] = {}
    for one in operations.chain_operations():
        text = chains.outputs(chains.stand_in((one.name,)))
        assert done.setdefault((one.takes, text), one.name) == one.name


def test_every_operation_stays_as_a_chain_of_one() -> None:
    assert set(chains.singles()) == {one.name for one in operations.chain_operations()}


def test_chains_that_a_shorter_one_replaces_are_dropped_and_others_stay() -> None:
    for dropped in (
        ("sort", "sort"),
        ("reverse", "reverse"),
        ("reverse", "sort"),
        ("add", "add"),
        ("negate", "absolute"),
        ("keep_even", "keep_odd"),
        ("square", "reverse", "sort"),
        ("sort", "add", "sort"),
        ("reverse", "square", "reverse"),
    ):
        assert not chains.stays(dropped), dropped
    for kept in (("add", "sort"), ("split", "word_total"), ("sort", "differences", "largest")):
        assert chains.stays(kept), kept


def test_programs_are_spelt_and_parsed_back() -> None:
    for text in ("add.3+sort+sum", "if_longer.4[sort|add.3]+sum", "shared.k", "add.k+first.2", "if_space[upper|lower]"):
        assert spell(parse(text)) == text
    assert parse("add.3+sort").key == "add+sort"
    assert parse("shared.k+sum").second == "numbers" and parse("add.k").second == NUMBER
    with pytest.raises(ValueError, match=r"expected a program such as add\.3\+sort"):
        parse("no_such_step.3")


def test_a_draw_depends_on_its_parts_alone() -> None:
    first, again, other = Draw("a", 1), Draw("a", 1), Draw("a", 2)
    numbers = [first.below(1000) for _ in range(5)]
    assert numbers == [again.below(1000) for _ in range(5)]
    assert numbers != [other.below(1000) for _ in range(5)]
    # blake2b and the Mersenne Twister: another value would change every data set.
    assert Draw("pool", "numbers").sample(list(range(10)), 4) == Draw("pool", "numbers").sample(list(range(10)), 4)
    assert sorted(Draw("x").sample(list(range(6)), 99)) == list(range(6))


def test_pools_hold_every_kind_of_edge() -> None:
    for kind in ANNOTATIONS:
        groups = pool(kind).edges
        assert len(groups) == 5 and all(groups)
        assert not groups[0][0]  # empty, or zero
    assert all(n < 0 for value in pool("numbers").edges[2] for n in value)
    assert all(len(value) >= 10 for value in pool("numbers").edges[4])
