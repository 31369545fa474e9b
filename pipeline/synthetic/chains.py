"""A program as a chain of steps, the values it is run on, and the random draws that choose them.

`Program` is run by its operations' functions (truth) and written by their sources (answer). `spell` and `parse` convert
a program to text such as `add.3+sort+sum` and back; a problem's id ends in it, so the program can be recovered from it.

    chain      add.3+sort                    numbers = [n + 3 for n in numbers], return sorted(numbers)
    branch     if_longer.4[sort|reverse]     a condition and two steps of equal type
    argument   add.k+sum, shared.k           `k` is the function's second parameter, a number or a list

Nothing here executes source text.

`pool(kind)` returns the values of a type from which tests are drawn; `probes(kind)` its 48 fixed values: two programs
that agree on all of them count as the same. Both are the same on every machine and in every Python version: `Draw` uses
only `random.Random.random()`, whose sequence the Python documentation promises to keep.

Not promised: that a pool covers the whole type: no word is longer than ten letters, no number in a list is larger than
99.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from pipeline.synthetic import operation_table
from pipeline.synthetic.operation_table import Condition
from pipeline.synthetic.operations import ANNOTATIONS, COUNTS, NUMBER, NUMBERS, TEXT, WORDS, Operation, Value


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
        """The step without its constant."""
        return self.operation.name + (".k" if self.argument else "")

    def apply(self, value: Value, second: Value | None) -> Value:
        return self.operation.apply(value, second if self.argument else self.constant)

    def words(self, second: str) -> str:
        """The imperative that asks for this step."""
        return self.operation.phrasings[self.phrasing].format(k=second if self.argument else self.constant)

    def lines(self, second: str) -> list[str]:
        """Source lines, the last one an expression; the variable has the name of the type taken."""
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

    def apply(self, value: Value, second: Value | None) -> Value:
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
    """Steps, each of which takes the type that the previous one gives."""

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
        """The second parameter's name (`k` if there is none)."""
        return "k" if self.second in (None, NUMBER) else "others"

    @property
    def key(self) -> str:
        """The names of the steps without constants. Programs with the same key are the same problem."""
        return "+".join(step.name for step in self.steps)

    def run(self, arguments: tuple[Value, ...]) -> Value:
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
        """The function's source, one step after the other, without a newline at the end."""
        lines = [f"def {self.signature(name)}:"]
        if docstring is not None:
            lines.append(f'    """{docstring}"""')
        for step in self.steps:
            target = None if step is self.steps[-1] else step.gives
            body = _branch_lines(step, target) if isinstance(step, Branch) else _step_lines(step, target, self)
            lines += ["    " + line for line in body]
        return "\n".join(lines)


def _step_lines(step: Step, target: str | None, program: Program) -> list[str]:
    """The step's source lines; the last one returns its value, or assigns it to `target`."""
    *statements, value = step.lines(program.second_name)
    return [*statements, f"return {value}" if target is None else f"{target} = {value}"]


def _branch_lines(branch: Branch, target: str | None) -> list[str]:
    (then,), (otherwise,) = branch.then.lines("k"), branch.otherwise.lines("k")
    if target is None:
        return [f"if {branch.test()}:", f"    return {then}", f"return {otherwise}"]
    return [f"if {branch.test()}:", f"    {target} = {then}", "else:", f"    {target} = {otherwise}"]


def spell(program: Program) -> str:
    """The program as text, with its constants, without its phrasings."""
    return "+".join(_spell_step(step) for step in program.steps)


def _spell_step(step: Step | Branch) -> str:
    constant = "" if step.constant is None else f".{step.constant}"
    if isinstance(step, Branch):
        return f"{step.condition.name}{constant}[{_spell_step(step.then)}|{_spell_step(step.otherwise)}]"
    return step.name + constant


def parse(text: str) -> Program:
    """The program that `spell` wrote, with the first phrasings. Raises ValueError for any other text."""
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
        return Branch(operation_table.condition(name), int(constant) if constant else None, then, otherwise)
    name, _, constant = text.partition(".")
    if constant == "k":
        return Step(operation_table.operation(name), None, 0, True)
    return Step(operation_table.operation(name), int(constant) if constant else None)


# -- values and random draws -------------------------------------------------------------------------------------------

Item = TypeVar("Item")

_NOUNS = """
a ant apple bag ball banana bee bird blue boat book bus butterfly cake car cat chair cloud code cup dog door egg
elephant fire fish garden go green hat home ice it key kitchen lamp leaf map milk moon morning mountain note oak ocean
on owl paper pear pen picture rain red river road sandwich sea see ship sky snow song star stone sun tea tree triangle
umbrella up water window yellow
"""
VOCABULARY = tuple(_NOUNS.split())


class Draw:
    """A random generator: its draws are a pure function of the parts that seed it."""

    def __init__(self, *parts: int | str) -> None:
        digest = hashlib.blake2b("|".join(str(part) for part in parts).encode(), digest_size=8).digest()
        self._random = random.Random(int.from_bytes(digest, "big")).random

    def below(self, limit: int) -> int:
        """An integer from 0 to limit - 1."""
        return int(self._random() * limit)

    def between(self, low: int, high: int) -> int:
        """An integer from low to high, both included."""
        return low + int(self._random() * (high - low + 1))

    def pick(self, items: Sequence[Item]) -> Item:
        """A random item."""
        return items[int(self._random() * len(items))]

    def chance(self, share: float) -> bool:
        """True with that probability."""
        return self._random() < share

    def sample(self, items: Sequence[Item], count: int) -> list[Item]:
        """Different items in random order: `count` of them, or all."""
        shuffled = list(items)
        for i in range(min(count, len(shuffled))):
            j = i + int(self._random() * (len(shuffled) - i))
            shuffled[i], shuffled[j] = shuffled[j], shuffled[i]
        return shuffled[:count]


@dataclass(frozen=True)
class Pool:
    """Values of one type. They are shared: operations are pure and do not change them."""

    edges: tuple[tuple[Value, ...], ...]  # a tuple for each kind of edge: empty, one, negative, repeated, long
    short: tuple[Value, ...]  # for visible tests: a few tokens each
    plain: tuple[Value, ...]  # for hidden tests


@cache
def pool(kind: str) -> Pool:
    """The values of a type, built once. Raises KeyError for an unknown type."""
    build = {NUMBERS: _numbers, WORDS: _words, TEXT: _texts, COUNTS: _counts, NUMBER: _number}[kind]
    return build(Draw("pool", kind))


@cache
def probes(kind: str) -> tuple[Value, ...]:
    """48 fixed values: some of each edge, the rest plain."""
    values = pool(kind)
    edges = [value for group in values.edges for value in group[:2]]
    return tuple([*edges, *values.plain][:48])


def _list_of(draw: Draw, low: int, high: int, count: int) -> list[int]:
    return [draw.between(low, high) for _ in range(count)]


def _numbers(draw: Draw) -> Pool:
    single = tuple([n] for n in (7, 4, -3, 0, 12, 9))
    negative = tuple(_list_of(draw, -30, -1, draw.between(3, 7)) for _ in range(8))
    repeated = tuple([draw.between(-4, 9)] * draw.between(3, 5) + _list_of(draw, 0, 5, 3) for _ in range(8))
    long = tuple(_list_of(draw, -20, 40, draw.between(12, 16)) for _ in range(10))
    # Small numbers in `short`, because a digit is a token and constants are 2-9.
    short = [_list_of(draw, -5, 14, draw.between(3, 5)) for _ in range(60)]
    short += [draw.sample(_list_of(draw, 1, 9, 3) * 2, 5) for _ in range(20)]
    plain = [_list_of(draw, -12, 30, draw.between(2, 11)) for _ in range(80)]
    plain += [_list_of(draw, -3, 10, draw.between(4, 11)) for _ in range(60)]
    plain += [draw.sample(_list_of(draw, -9, 99, 4) * 2, draw.between(5, 8)) for _ in range(20)]
    return Pool((([],), single, negative, repeated, long), tuple(short), tuple(draw.sample(plain, len(plain))))


def _cased(draw: Draw, word: str) -> str:
    return draw.pick((word, word, word, word.capitalize(), word.upper()))


def _words(draw: Draw) -> Pool:
    def some(low: int, high: int) -> list[str]:
        return [_cased(draw, draw.pick(VOCABULARY)) for _ in range(draw.between(low, high))]

    single = tuple([word] for word in ("sun", "Apple", "a", "WATER", "moon"))
    # Lists with empty words, in place of the negative numbers of other types.
    hollow = tuple(["", *some(1, 4), ""] for _ in range(4))
    repeated = tuple([draw.pick(VOCABULARY)] * draw.between(2, 4) + some(1, 3) for _ in range(8))
    long = tuple(some(11, 14) for _ in range(8))
    short = [[draw.pick(VOCABULARY) for _ in range(draw.between(2, 4))] for _ in range(60)]
    short += [draw.sample([draw.pick(VOCABULARY), draw.pick(VOCABULARY)] * 2, 3) for _ in range(20)]
    plain = [some(2, 9) for _ in range(110)] + [draw.sample(some(3, 4) * 2, 6) for _ in range(40)]
    return Pool((([],), single, hollow, repeated, long), tuple(short), tuple(draw.sample(plain, len(plain))))


def _texts(draw: Draw) -> Pool:
    def some(low: int, high: int) -> str:
        return " ".join(_cased(draw, draw.pick(VOCABULARY)) for _ in range(draw.between(low, high)))

    single = ("x", "A", "7", " ", "e")
    # Texts with odd spaces or without letters, in place of the negative numbers of other types.
    odd = ("  two  spaces ", "...", "12 34", "a-b_c", "Tab\there", "END.")
    repeated = ("aaaa", "abab abab", "zzz ZZZ", "go go go", "mississippi", "oooh no")
    long = tuple(some(9, 12) for _ in range(8))
    short = [" ".join(draw.pick(VOCABULARY) for _ in range(draw.between(1, 3))) for _ in range(60)]
    short += [some(1, 3) for _ in range(30)]
    plain = [some(1, 6) for _ in range(130)] + [some(2, 3) + draw.pick(("!", "?", "..", " 42")) for _ in range(20)]
    return Pool((("",), single, odd, repeated, long), tuple(short), tuple(draw.sample(plain, len(plain))))


def _counts(draw: Draw) -> Pool:
    def some(low: int, high: int, least: int, most: int) -> dict[str, int]:
        words = draw.sample(VOCABULARY, draw.between(low, high))
        return {word: draw.between(least, most) for word in words}

    single = tuple({word: n} for word, n in (("sun", 5), ("a", 1), ("key", 9), ("Sky", 3)))
    negative = tuple(some(2, 5, -9, -1) for _ in range(6))
    repeated = tuple(some(3, 5, 4, 4) for _ in range(6))
    long = tuple(some(10, 12, -5, 30) for _ in range(6))
    short = [some(2, 3, 0, 12) for _ in range(80)]
    plain = [some(2, 7, -4, 20) for _ in range(100)] + [some(3, 6, 0, 10) for _ in range(50)]
    return Pool((({},), single, negative, repeated, long), tuple(short), tuple(draw.sample(plain, len(plain))))


def _number(draw: Draw) -> Pool:
    negative = tuple(draw.between(-99, -2) for _ in range(8))
    repeated = (11, 77, 333, 5555, 1001, 2020)
    long = tuple(draw.between(10_000, 999_999) for _ in range(8))
    plain = [draw.between(2, 99) for _ in range(80)] + [draw.between(100, 999) for _ in range(50)]
    plain += [draw.between(-500, -1) for _ in range(20)]
    plain = list(dict.fromkeys(plain))
    short = tuple(range(2, 60))
    return Pool(((0,), (1, -1), negative, repeated, long), short, tuple(draw.sample(plain, len(plain))))
