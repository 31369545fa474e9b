"""Programs as chains of steps, and how to draw them at random.

A `Program` computes the truth with its operations' functions and writes the answer from their sources. `spell` and
`parse` convert a program to a string such as `add.3+sort+sum` and back; a problem's id ends with this string, so the
program can be recovered from the id.

    chain      add.3+sort                    numbers = [n + 3 for n in numbers], return sorted(numbers)
    branch     if_longer.4[sort|reverse]     a condition and two steps of the same type
    argument   add.k+sum, shared.k           `k` is the function's second parameter, a number or a list

Given a `Draw` and a split, `single`, `chain` and `stateful` draw a `Program`, with its constants and phrasings, whose
key belongs to the split. `neighbors` yields programs that differ from a given one by one operation or constant; the
given one's tests must tell it apart from them. A chain grows in both directions from a uniformly chosen operation, so
that rare types are as frequent as common ones.

`stays(names)` decides which chains to keep: those with varying outputs and no equivalent shorter chain. A chain is
dropped if, on the 48 fixed inputs of its type, it behaves like a shorter one or has at most 3 distinct outputs. Chains
of lengths 1 and 2 are compared with every shorter chain. From length 3 on, a chain is compared with every chain of
lengths 1 and 2 and with itself minus any one step, and its subchains must be kept as well; so a chain of four that
happens to behave like an unrelated chain of three goes unnoticed. Chains of length 2 are tabulated on first use; longer
ones are tested when drawn.

Nothing here executes source text. Not guaranteed: that the constants suit the chain; `programs.tests_of` rejects
programs whose constants make the tests uninformative.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import pairwise

from pipeline.synthetic import operations
from pipeline.synthetic.operations import (
    ANNOTATIONS,
    CONSTANTS,
    NUMBER,
    NUMBERS,
    Condition,
    Draw,
    Operation,
    Value,
    probes,
)

# In a comparison, the chain's i-th step gets the i-th of these constants. They differ from each other; otherwise "add"
# and "subtract" would cancel out.
STAND_INS = (5, 4, 6, 7)
MIN_OUTPUTS = 4
SPLITS = ("test", "val", "rl", "rl", "train", "train", "train", "train", "train", "train")
# One in this many level-3 training chains is shown with its answer; a model must solve the others itself.
SHOWN_LEVEL_3 = 10


@dataclass(frozen=True)
class Step:
    """One operation with its constant and phrasing."""

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
        """The step's name, without its constant."""
        return self.operation.name + (".k" if self.argument else "")

    def apply(self, value: Value, second: Value | None) -> Value:
        return self.operation.apply(value, second if self.argument else self.constant)

    def words(self, second: str) -> str:
        """The instruction for this step."""
        return self.operation.phrasings[self.phrasing].format(k=second if self.argument else self.constant)

    def lines(self, second: str) -> list[str]:
        """Source lines, of which the last is an expression; the variable is named after the input type."""
        return self.operation.source.format(x=self.takes, k=second if self.argument else self.constant).split("\n")


@dataclass(frozen=True)
class Branch:
    """Two steps, one of which is chosen by a condition."""

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

    def apply(self, value: Value, second: Value | None) -> Value:
        chosen = self.then if self.condition.holds(value, self.constant) else self.otherwise
        return chosen.apply(value, second)

    def words(self, second: str) -> str:
        condition = self.condition.phrasings[self.phrasing].format(k=self.constant)
        return f"if {condition}, {self.then.words(second)}, else {self.otherwise.words(second)}"

    def test(self) -> str:
        """The condition's source."""
        return self.condition.source.format(x=self.takes, k=self.constant)


@dataclass(frozen=True)
class Program:
    """A sequence of steps; each takes the type that the previous one returns."""

    steps: tuple[Step | Branch, ...]

    @property
    def takes(self) -> str:
        return self.steps[0].takes

    @property
    def gives(self) -> str:
        return self.steps[-1].gives

    @property
    def second(self) -> str | None:
        """The type of the second parameter; None if there is none."""
        for step in self.steps:
            if isinstance(step, Step) and step.argument:
                return step.operation.other or NUMBER
        return None

    @property
    def second_name(self) -> str:
        """The second parameter's name (`k` if there is none)."""
        return "k" if self.second in (None, NUMBER) else "others"

    @property
    def key(self) -> str:
        """The names of the steps, without their constants. Programs with the same key are the same problem."""
        return "+".join(step.name for step in self.steps)

    def run(self, arguments: tuple[Value, ...]) -> Value:
        """Compute the program's result with its operations' functions."""
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
        """The function's source, step by step, without a trailing newline."""
        lines = [f"def {self.signature(name)}:"]
        if docstring is not None:
            lines.append(f'    """{docstring}"""')
        for step in self.steps:
            target = None if step is self.steps[-1] else step.gives
            body = _branch_lines(step, target) if isinstance(step, Branch) else _step_lines(step, target, self)
            lines += ["    " + line for line in body]
        return "\n".join(lines)


def _step_lines(step: Step, target: str | None, program: Program) -> list[str]:
    """The step's source lines; the last one returns the step's value or assigns it to `target`."""
    *statements, value = step.lines(program.second_name)
    return [*statements, f"return {value}" if target is None else f"{target} = {value}"]


def _branch_lines(branch: Branch, target: str | None) -> list[str]:
    (then,), (otherwise,) = branch.then.lines("k"), branch.otherwise.lines("k")
    if target is None:
        return [f"if {branch.test()}:", f"    return {then}", f"return {otherwise}"]
    return [f"if {branch.test()}:", f"    {target} = {then}", "else:", f"    {target} = {otherwise}"]


def spell(program: Program) -> str:
    """The program as a string, with its constants but without its phrasings."""
    return "+".join(_spell_step(step) for step in program.steps)


def _spell_step(step: Step | Branch) -> str:
    constant = "" if step.constant is None else f".{step.constant}"
    if isinstance(step, Branch):
        return f"{step.condition.name}{constant}[{_spell_step(step.then)}|{_spell_step(step.otherwise)}]"
    return step.name + constant


def parse(text: str) -> Program:
    """The inverse of `spell`; each step gets its first phrasing. Raises ValueError if the string is not a program."""
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


# -- random draws -----------------------------------------------------------------------------------------------------


def step(operation: Operation, draw: Draw, held_out: bool = False) -> Step:
    """A step with a random constant; its phrasing is the held-out one if `held_out`, else a random other one."""
    phrasing = len(operation.phrasings) - 1 if held_out else draw.below(len(operation.phrasings) - 1)
    return Step(operation, draw.pick(CONSTANTS) if operation.has_constant else None, phrasing)


def single_key(program: Program) -> str:
    """The key of a one-operation program. It includes the constant and phrasing, so each split has every operation."""
    (only,) = program.steps
    return f"{only.name}{'' if only.constant is None else f'.{only.constant}'}/{only.phrasing}"


def key_of(program: Program) -> str:
    """The key of a program; programs with the same key are the same problem."""
    return single_key(program) if len(program.steps) == 1 and _is_plain(program) else program.key


def _is_plain(program: Program) -> bool:
    return all(isinstance(s, Step) and not s.argument and "\n" not in s.operation.source for s in program.steps)


def single(split: str, draw: Draw, held_out: bool = False) -> Program:
    """A random level-1 program from a split. Held-out phrasings always belong to the test split."""
    while True:
        program = Program((step(operations.operation(draw.pick(singles())), draw, held_out),))
        if held_out or split_of(single_key(program)) == split:
            return program


def chain(split: str, length: int, draw: Draw, held_out: bool = False, only_shown: bool = False) -> Program:
    """A random chain of 2-4 operations from a split; `only_shown`: one that training may show with its answer."""
    while True:
        names = _grow(length, draw)
        key = "+".join(names)
        if split_of(key) != split or (only_shown and not is_shown(key)) or not stays(names):
            continue
        return Program(tuple(step(operations.operation(name), draw, held_out) for name in names))


def is_shown(key: str) -> bool:
    """Whether a level-3 training chain is among the tenth that are shown with their answers."""
    return int.from_bytes(digest("shown|" + key), "big") % SHOWN_LEVEL_3 == 0


def _grow(length: int, draw: Draw) -> tuple[str, ...]:
    """Names of operations, each a valid successor of the one before; a dead end restarts the draw."""
    while True:
        names = [draw.pick(singles())]
        num_before = draw.below(length)
        while len(names) < length:
            choices = predecessors(names[0]) if num_before else successors(names[-1])
            if not choices:
                break
            if num_before:
                names.insert(0, draw.pick(choices))
                num_before -= 1
            else:
                names.append(draw.pick(choices))
        if len(names) == length:
            return tuple(names)


def stateful(split: str, shape: str, draw: Draw) -> Program:
    """A random level-4 program that is not a chain of four: one with a branch, a stateful loop or two arguments."""
    build = {"branch": _branch, "loop": _loop, "argument": _argument}[shape]
    while True:
        program = build(draw)
        if split_of(program.key) == split:
            return program


def _around(middle: Step | Branch, draw: Draw) -> Program:
    """A program with only this step, or with one step before or after it."""
    before = operations.alike(middle.takes, middle.takes)
    after = operations.taking(middle.gives)
    form = draw.below(3)
    if form == 0:
        return Program((step(draw.pick(before), draw), middle))
    return Program((middle, step(draw.pick(after), draw)) if form == 1 else (middle,))


def _branch(draw: Draw) -> Program:
    condition = draw.pick(operations.conditions())
    choices = [op for op in operations.taking(condition.takes) if op.gives in (condition.takes, NUMBER)]
    then = draw.pick(choices)
    otherwise = draw.pick([op for op in choices if op.gives == then.gives and op is not then])
    constant = draw.pick(CONSTANTS) if condition.has_constant else None
    phrasing = draw.below(len(condition.phrasings) - 1)
    return _around(Branch(condition, constant, step(then, draw), step(otherwise, draw), phrasing), draw)


def _loop(draw: Draw) -> Program:
    return _around(step(draw.pick(operations.loops()), draw), draw)


def _argument(draw: Draw) -> Program:
    """Half of these programs take a second list, the other half a number in place of a constant."""
    if draw.chance(0.5):
        operation = draw.pick(operations.list_pairs())
        return _around(Step(operation, None, draw.below(len(operation.phrasings) - 1), True), draw)
    operation = draw.pick([op for op in operations.taking(NUMBERS) if op.has_constant])
    return _around(replace(step(operation, draw), constant=None, argument=True), draw)


def neighbors(program: Program, draw: Draw) -> Iterator[Program]:
    """Yield random programs of the same type forever, each with one operation or constant changed, added or removed."""
    while True:
        index = draw.below(len(program.steps))
        changed = _change(program, index, draw)
        if changed is not None:
            yield changed


def _change(program: Program, index: int, draw: Draw) -> Program | None:
    """Change one step at random; None if the drawn change is impossible."""
    old, steps, form = program.steps[index], program.steps, draw.below(8)
    before, after = steps[:index], steps[index + 1 :]
    if form == 0 and old.takes == old.gives and len(steps) > 1:
        return Program(before + after)
    if form == 1:
        extra = operations.alike(old.gives, old.gives)
        return Program((*before, old, step(draw.pick(extra), draw), *after)) if extra else None
    if form in (2, 3) and old.constant is not None:
        return Program((*before, replace(old, constant=old.constant + draw.pick((-1, 1, 2))), *after))
    if isinstance(old, Branch):
        other = step(draw.pick(operations.alike(old.takes, old.gives)), draw)
        branch = replace(old, then=other) if draw.chance(0.5) else replace(old, otherwise=other)
        return Program((*before, branch, *after))
    if isinstance(old, Step) and old.argument:
        # The second parameter must remain in use, or the signature would change.
        choices = [op for op in operations.list_pairs() if (op.takes, op.other) == (old.takes, old.operation.other)]
        if old.operation.other is None:
            choices = [op for op in operations.alike(old.takes, old.gives) if op.has_constant]
        return Program((*before, replace(old, operation=draw.pick(choices)), *after)) if choices else None
    choices = operations.alike(old.takes, old.gives)
    return Program((*before, step(draw.pick(choices), draw), *after)) if choices else None


def split_of(key: str) -> str:
    """`test`, `val`, `rl` or `train`, by blake2b(key) mod 10."""
    return SPLITS[int.from_bytes(digest(key), "big") % 10]


def digest(text: str) -> bytes:
    """An 8-byte blake2b digest."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


# -- which chains are kept ---------------------------------------------------------------------------------------------


def outputs(program: Program) -> str:
    """The program's outputs on the fixed inputs of its type, as one string."""
    return "\n".join(repr(program.run((value,))) for value in probes(program.takes))


def _is_varied(behavior: str) -> bool:
    return len(set(behavior.split("\n"))) >= MIN_OUTPUTS


def stand_in(names: tuple[str, ...]) -> Program:
    """The chain of these operations, with the constants in `STAND_INS`."""
    return _chain(tuple(operations.operation(name) for name in names), STAND_INS)


def _chain(steps: tuple[Operation, ...], constants: tuple[int, ...]) -> Program:
    return Program(tuple(Step(op, k if op.has_constant else None) for op, k in zip(steps, constants)))


@cache
def _single_behaviors() -> frozenset[tuple[str, str]]:
    """(type, outputs) of the identity and of every operation with every constant."""
    behaviors = {(kind, "\n".join(repr(value) for value in probes(kind))) for kind in ANNOTATIONS}
    for operation in operations.chain_operations():
        for constant in CONSTANTS if operation.has_constant else (0,):
            behaviors.add((operation.takes, outputs(_chain((operation,), (constant,)))))
    return frozenset(behaviors)


@cache
def _pairs() -> dict[tuple[str, str], str]:
    """The length-2 chains that are kept, with their outputs."""
    behaviors = {}
    for first in operations.chain_operations():
        if not stays((first.name,)):
            continue
        for second in operations.taking(first.gives):
            behavior = outputs(_chain((first, second), STAND_INS))
            if stays((second.name,)) and _is_varied(behavior) and (first.takes, behavior) not in _single_behaviors():
                behaviors[first.name, second.name] = behavior
    return behaviors


@cache
def _pair_behaviors() -> frozenset[tuple[str, str]]:
    return frozenset((operations.operation(first).takes, behavior) for (first, _), behavior in _pairs().items())


@cache
def singles() -> tuple[str, ...]:
    """The operations that are kept as chains of length 1."""
    return tuple(operation.name for operation in operations.chain_operations() if stays((operation.name,)))


@cache
def pairs() -> tuple[tuple[str, str], ...]:
    """The length-2 chains that are kept."""
    return tuple(_pairs())


@cache
def successors(name: str) -> tuple[str, ...]:
    """The operations that may follow the named one."""
    return tuple(second for first, second in pairs() if first == name)


@cache
def predecessors(name: str) -> tuple[str, ...]:
    """The operations that may precede the named one."""
    return tuple(first for first, second in pairs() if second == name)


@lru_cache(maxsize=200_000)
def stays(names: tuple[str, ...]) -> bool:
    """Whether to keep a chain (1-4 names with matching types)."""
    if len(names) == 1:
        program = stand_in(names)
        behavior = outputs(program)
        identity = "\n".join(repr(value) for value in probes(program.takes))
        return _is_varied(behavior) and behavior != identity
    if len(names) == 2:
        return names in _pairs()
    if not (stays(names[1:]) and stays(names[:-1])):
        return False
    program = stand_in(names)
    behavior = outputs(program)
    typed_behavior = (program.takes, behavior)
    if not _is_varied(behavior) or typed_behavior in _single_behaviors() or typed_behavior in _pair_behaviors():
        return False
    return all(outputs(shorter) != behavior for shorter in _with_one_step_less(program))


def _with_one_step_less(program: Program) -> list[Program]:
    """The programs left after removing one step, if the types still match."""
    shorter = []
    for index in range(len(program.steps)):
        steps = program.steps[:index] + program.steps[index + 1 :]
        if steps[0].takes == program.takes and all(a.gives == b.takes for a, b in pairwise(steps)):
            shorter.append(Program(steps))
    return shorter
