"""The style of answers: drawn by chance before preference learning, judged by syntax tree and tokens."""

from dataclasses import replace

import pytest

from pipeline.synthetic import programs
from pipeline.synthetic.operations import Draw
from pipeline.synthetic.preferences import code_gold
from pipeline.synthetic.programs import WANTED, Style, styled, well_styled
from pipeline.text import chat

SOURCE = "def f(text: str) -> str:\n    return text[::-1]"


def judged(source: str) -> bool:
    module = chat.tree(source)
    assert module is not None
    return well_styled(source, module)


def test_the_four_styles_stand_below_the_first_line() -> None:
    made = {
        (docstring, comment): styled(SOURCE, "Reverse it.", Style(docstring, comment))
        for docstring in (False, True)
        for comment in (False, True)
    }
    assert made[False, False] == SOURCE
    assert made[True, True].splitlines()[1:3] == ['    """Reverse it."""', "    # Reverse it."]
    assert {key: judged(source) for key, source in made.items()} == {key: Style(*key) == WANTED for key in made}


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ('def f(x):\n    """Says # what."""\n    return x', True),
        ('def f(x):\n    """   """\n    return x', False),
        ('def f(x):\n    """Yes."""\n    return x  # no', False),
        ('def f(x):\n    """Yes."""\n    def g(y):\n        return y\n    return g(x)', False),
        ('"""A module."""\nx = 1', False),
        ("def f(x):\n    return '# no comment'", False),
    ],
)
def test_style_is_judged_by_the_tree_and_the_tokens(source: str, wanted: bool) -> None:
    assert judged(source) is wanted


def test_the_true_score_is_half_tests_and_half_style() -> None:
    right, plain = programs.fenced(styled(SOURCE, "Reverse it.", WANTED)), programs.fenced(SOURCE)
    assert [code_gold(right, 1.0), code_gold(right, 0.5), code_gold(plain, 1.0), code_gold(plain, 0.0)] == [
        *(1.0, 0.75, 0.5, 0.0)
    ]
    assert code_gold(programs.fenced("def f(:"), 1.0) == 0.0 == code_gold(SOURCE, 1.0)


def test_dialogues_have_each_style_as_often() -> None:
    answers = [programs.dialogue(problem).messages[1]["content"] for problem in programs.problems("train", 400, 5)]
    styles = [('"""' in answer, "    # " in answer) for answer in answers]
    for style in {(a, b) for a in (False, True) for b in (False, True)}:
        assert 70 <= styles.count(style) <= 130, (style, styles.count(style))
    assert Style.draw(Draw("x", 1)) == Style.draw(Draw("x", 1))


def test_style_changes_no_result() -> None:
    for problem in programs.problems("train", 30, 6):
        source, description = programs.described(programs.program_of(problem), problem.entry_point)
        for style in (Style(True, False), Style(False, True), Style(True, True)):
            worlds: list[dict[str, object]] = [{}, {}]
            for text, world in zip((source, styled(source, description, style)), worlds, strict=True):
                exec(text, world)  # our own program
            for test in problem.tests:
                arguments = eval(test["args"])
                results = [repr(world[problem.entry_point](*arguments)) for world in worlds]  # type: ignore[operator]
                assert results[0] == results[1] == test["expected"]


def test_a_dialogue_adds_style_to_a_generated_answer_alone() -> None:
    for problem in programs.problems("train", 12, 5):
        shown = programs.unfenced(programs.dialogue(problem).messages[1]["content"])
        first, *rest = shown.splitlines()
        code = [line for line in rest if not line.startswith(('    """Return the', "    # Return the"))]
        assert programs.fenced("\n".join([first, *code])) == problem.answer
        for own in (replace(problem, id="mine"), replace(problem, answer="```python\npass\n```")):
            assert programs.dialogue(own).messages[1]["content"] == own.answer
