"""A program as a chain of steps: its value, its Python source, its key, and its short written form.

In: operations with their constants. Out: `Program`, which is run by its operations' functions (truth) and written by
their sources (answer). `spell` and `parse` turn a program into text such as `add.3+sort+sum` and back; a problem's id
ends in it, so a problem remembers its program.

    chain      add.3+sort                    numbers = [n + 3 for n in numbers], return sorted(numbers)
    branch     if_longer.4[sort|reverse]     a condition and two steps of equal type
    argument   add.k+sum, shared.k           `k` is the function's second parameter, a number or a list

Nothing here executes source text.
"""

from dataclasses import dataclass
from typing import Any

from pipeline.synthesis import operations
from pipeline.synthesis.operation import ANNOTATIONS, NUMBER, Operation
from pipeline.synthesis.operations_state import Condition


@dataclass(frozen=True)
class Step:
    """One operation with its constant."""

    operation: Operation
    constant: int | None = None
    phrasing: int = 0  # which of the operation's phrasings the question uses
    argument: bool = False  # `{k}` is the second parameter

    @property
    def takes(self) -> str:
        return self.operation.takes

    @property
    def gives(self) -> str:
        return self.operation.gives

    @property
    def name(self) -> str:
        """The step without its constant."""
        return self.operation.name + (".k" if self.argument else "")

    def apply(self, value: Any, second: Any) -> Any:
        return self.operation.apply(value, second if self.argument else self.constant)

    def words(self, second: str) -> str:
        """The imperative that asks for this step."""
        return self.operation.phrasings[self.phrasing].format(k=second if self.argument else self.constant)

    def lines(self, second: str) -> list[str]:
        """Statements, and last an expression, over the variable named for the type taken."""
        return self.operation.source.format(x=self.takes, k=second if self.argument else self.constant).split("\n")


@dataclass(frozen=True)
class Branch:
    """Two steps of which a condition chooses one."""

    condition: Condition
    constant: int | None
    then: Step
    otherwise: Step
    phrasing: int = 0
    argument: bool = False  # always false: a branch takes no second parameter

    @property
    def takes(self) -> str:
        return self.then.takes

    @property
    def gives(self) -> str:
        return self.then.gives

    @property
    def name(self) -> str:
        return f"{self.condition.name}[{self.then.name}|{self.otherwise.name}]"

    def apply(self, value: Any, second: Any) -> Any:
        chosen = self.then if self.condition.holds(value, self.constant) else self.otherwise
        return chosen.apply(value, second)

    def words(self, second: str) -> str:
        condition = self.condition.phrasings[self.phrasing].format(k=self.constant)
        return f"if {condition}, {self.then.words(second)}, else {self.otherwise.words(second)}"

    def test(self) -> str:
        """The source of the condition."""
        return self.condition.source.format(x=self.takes, k=self.constant)


@dataclass(frozen=True)
class Program:
    """Steps of which each takes what the one before gives."""

    steps: tuple[Step | Branch, ...]

    @property
    def takes(self) -> str:
        return self.steps[0].takes

    @property
    def gives(self) -> str:
        return self.steps[-1].gives

    @property
    def second(self) -> str | None:
        """The type of the second parameter; None where there is none."""
        for step in self.steps:
            if isinstance(step, Step) and step.argument:
                return step.operation.other or NUMBER
        return None

    @property
    def second_name(self) -> str:
        """The second parameter's name (also where there is none)."""
        return "k" if self.second in (None, NUMBER) else "others"

    @property
    def key(self) -> str:
        """The names of the steps without constants: what makes two programs the same problem."""
        return "+".join(step.name for step in self.steps)

    def run(self, arguments: tuple[Any, ...]) -> Any:
        """The program's value, by its operations' functions."""
        value = arguments[0]
        second = arguments[1] if len(arguments) > 1 else None
        for step in self.steps:
            value = step.apply(value, second)
        return value

    def signature(self, name: str) -> str:
        """`name(numbers: list[int], k: int) -> int`"""
        parameters = f"{self.takes}: {ANNOTATIONS[self.takes]}"
        if self.second is not None:
            parameters += f", {self.second_name}: {ANNOTATIONS[self.second]}"
        return f"{name}({parameters}) -> {ANNOTATIONS[self.gives]}"

    def source(self, name: str, docstring: str | None = None) -> str:
        """The function's text, one step after the other, without a line feed at its end."""
        lines = [f"def {self.signature(name)}:"]
        if docstring is not None:
            lines.append(f'    """{docstring}"""')
        for step in self.steps:
            target = None if step is self.steps[-1] else step.gives
            body = _branch_lines(step, target) if isinstance(step, Branch) else _step_lines(step, target, self)
            lines += ["    " + line for line in body]
        return "\n".join(lines)


def _step_lines(step: Step, target: str | None, program: Program) -> list[str]:
    """The step's statements; its value is returned, or assigned to `target`."""
    *statements, value = step.lines(program.second_name)
    return [*statements, f"return {value}" if target is None else f"{target} = {value}"]


def _branch_lines(branch: Branch, target: str | None) -> list[str]:
    (then,), (otherwise,) = branch.then.lines("k"), branch.otherwise.lines("k")
    if target is None:
        return [f"if {branch.test()}:", f"    return {then}", f"return {otherwise}"]
    return [f"if {branch.test()}:", f"    {target} = {then}", "else:", f"    {target} = {otherwise}"]


def spell(program: Program) -> str:
    """The program as text, with constants, without its phrasings."""
    return "+".join(_spell_step(step) for step in program.steps)


def _spell_step(step: Step | Branch) -> str:
    constant = "" if step.constant is None else f".{step.constant}"
    if isinstance(step, Branch):
        return f"{step.condition.name}{constant}[{_spell_step(step.then)}|{_spell_step(step.otherwise)}]"
    return step.name + constant


def parse(text: str) -> Program:
    """What `spell` wrote, with first phrasings. Raises ValueError if it is no program."""
    try:
        return Program(tuple(_parse_step(part) for part in text.split("+")))
    except (KeyError, ValueError) as error:
        raise ValueError(f"expected a program such as add.3+sort, found {text!r}") from error


def _parse_step(text: str) -> Step | Branch:
    if text.endswith("]"):
        head, _, tail = text[:-1].partition("[")
        then, otherwise = (_parse_step(part) for part in tail.split("|"))
        name, _, constant = head.partition(".")
        assert isinstance(then, Step) and isinstance(otherwise, Step)
        return Branch(operations.condition(name), int(constant) if constant else None, then, otherwise)
    name, _, constant = text.partition(".")
    if constant == "k":
        return Step(operations.operation(name), None, 0, True)
    return Step(operations.operation(name), int(constant) if constant else None)
