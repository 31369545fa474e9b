"""The words of a problem: question, answer, docstring.

In: a `Program` and its visible tests. Out: text. Questions are short and of few forms, because the smallest model
learns them from a million tokens; what varies is the operations, their phrasings, constants, names and examples.
"""

from collections.abc import Sequence
from typing import Any

from pipeline.synthesis.chains import Program
from pipeline.synthesis.inputs import Draw

NAMES = ("solve", "process", "convert", "compute", "transform", "change", "build", "update", "handle", "apply")
ORDINALS = ("First", "Second", "Third", "Fourth")

CHAIN_FRAMES = (
    "Write `{signature}`: {steps}.",
    "Write a Python function `{signature}`. It should {steps}.",
    "Implement `{signature}` to {steps}.",
)
EXAMPLE_FRAMES = (
    "Write `{signature}` so that these examples hold.",
    "Find the rule in these examples and write `{signature}`.",
)


def in_order(program: Program, name: str, draw: Draw) -> str:
    """The question of levels 1 to 4: the steps one after the other."""
    frame = draw.pick(CHAIN_FRAMES)
    return frame.format(signature=program.signature(name), steps=_then(_phrases(program)))


def out_of_order(program: Program, name: str, draw: Draw) -> str:
    """The question of level 5: the steps in another order than they are done, with words that tell the order."""
    phrases = _phrases(program)
    if draw.chance(0.5):
        first, *rest = phrases[::-1]
        told = f"In the end {first}; " + "; ".join(f"before that, {phrase}" for phrase in rest)
    else:
        numbered = [f"{ORDINALS[place].lower()}, {phrase}" for place, phrase in enumerate(phrases)]
        rotation = draw.between(1, len(numbered) - 1)
        told = "; ".join(numbered[rotation:] + numbered[:rotation]).capitalize()
    return f"Write `{program.signature(name)}`. {told}."


def by_examples(program: Program, name: str, draw: Draw) -> str:
    """The question of level 5 that says nothing: only the examples below it tell."""
    return draw.pick(EXAMPLE_FRAMES).format(signature=program.signature(name))


def with_examples(question: str, name: str, tests: Sequence[dict[str, Any]]) -> str:
    """The question followed by its visible tests, one a line."""
    lines = [f"{name}({test['args'][1:-1]}) == {test['expected']}" for test in tests if test["visible"]]
    return question + "\n\n" + "\n".join(lines)


def docstring(program: Program) -> str:
    """One sentence that says what the program does."""
    told = _then(_phrases(program))
    return told[0].upper() + told[1:] + "."


def fenced(source: str) -> str:
    """An answer: the source as one fenced block and nothing else."""
    return f"```python\n{source}\n```"


def unfenced(answer: str) -> str:
    """The source in what `fenced` made."""
    return answer.removeprefix("```python\n").removesuffix("\n```")


def _phrases(program: Program) -> list[str]:
    return [step.words(program.second_name) for step in program.steps]


def _then(phrases: list[str]) -> str:
    return ", then ".join(phrases)
