"""pipeline/tools/reference.py: docs/reference.md is up to date, complete, and says what each key means
(tests/test_reference.py is about the frozen policy).
"""

import re
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.run.config import block
from pipeline.run.errors import InputError
from pipeline.tools import reference
from pipeline.tools.reference import KeyBlock, document, escaped, main, rows_of, section, shown, type_of

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Stands inside, or flat."""

    rank: int
    """how many"""
    scale: float = 1e-8
    """of a | b"""


@dataclass(frozen=True, kw_only=True)
class Params:
    """A stage's parameters."""

    steps: int | None = None
    """how long"""
    rates: dict[str, float] = field(default_factory=dict)
    """by name"""
    part: Part | None = None
    """{rank, scale}"""


@dataclass(frozen=True, kw_only=True)
class Longer(Params):
    """One field more."""

    width: int = 3
    """how wide"""


@dataclass(frozen=True, kw_only=True)
class Silent(Params):
    """One field without a docstring."""

    depth: int = 2


@dataclass(frozen=True, kw_only=True)
class Reader:
    """The keys of `flat` are its own, those of `part` another block's."""

    flat: Params
    part: Part = block("shared")


@pytest.fixture(scope="module")
def text() -> str:
    """What the generator writes about the repository."""
    return document(ROOT)


def sections(text: str) -> dict[str, str]:
    """heading -> the text below it; "" is the introduction."""
    first, *rest = re.split(r"^## ", text, flags=re.MULTILINE)
    return {"": first} | dict(part.split("\n", 1) for part in rest)


def keys(part: str) -> list[str]:
    """The keys of a section's table, in order."""
    return re.findall(r"^\| `([^`]+)` \|", part, flags=re.MULTILINE)


def test_the_file_in_docs_is_what_the_generator_makes(text: str) -> None:
    written = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert written == text, f"run python -m pipeline.tools.reference; {reference.difference(written, text)}"


def test_check_says_where_the_file_differs_and_leaves_it(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "reference.md"
    monkeypatch.setattr(reference, "OUT", out)
    monkeypatch.setattr(reference, "document", lambda root: text)
    assert main(["--check"]) == 1 and not out.exists()
    assert main([]) == 0 and main(["--check"]) == 0
    capsys.readouterr()
    old = out.read_text(encoding="utf-8").replace("Reference: every key", "Reference: some keys")
    out.write_text(old, encoding="utf-8")
    assert main(["--check"]) == 1 and out.read_text(encoding="utf-8") == old
    said = capsys.readouterr().err
    assert "reference.md is out of date: line 1: expected '# Reference: every key', found '# Reference: some" in said
    assert said.endswith("; run python -m pipeline.tools.reference\n")
    assert main(["--chekc"]) == 2 and out.read_text(encoding="utf-8") == old


@pytest.mark.parametrize(
    ("old", "said"),
    [
        ("a\nb\n", "line 3: expected 'c', found ''"),
        ("a\nb\nc", "line 4: expected '', found '(the end)'"),
        ("a\nb\nc\n\n", "line 5: expected '(the end)', found ''"),
        ("", "line 1: expected 'a', found ''"),
    ],
)
def test_a_difference_is_found_also_at_the_end(old: str, said: str) -> None:
    assert reference.difference(old, "a\nb\nc\n") == said


def test_a_new_field_makes_a_new_row_and_changes_no_other() -> None:
    short, longer = (section(KeyBlock(name="x", kind=kind), [{}]) for kind in (Params, Longer))
    assert longer == short + "| `width` | int | 3 | how wide |\n"


def test_a_field_without_a_meaning_is_refused_by_name() -> None:
    with pytest.raises(
        InputError, match=r"test_reference_keys\.Silent\.depth has no documented meaning.*docstring under the field"
    ):
        section(KeyBlock(name="x", kind=Silent), [{}])


def test_the_cells_tell_what_a_scale_file_says_from_what_it_leaves_to_the_default() -> None:
    given: list[dict[str, Any]] = [{}, {"steps": 7, "rates": {"head": 1e-5}, "part": {"rank": 2}}, {"part": "none"}]
    assert list(rows_of(Params, given)) == [
        ["`steps`", "int or none", "*none*", "7", "*none*", "how long"],
        ["`rates`", "dict of float", "*{}*", "{head: 1e-5}", "*{}*", "by name"],
        ["`part`", "block or none", "*none*", "below", "none", "{rank, scale}"],
        ["`part.rank`", "int", "–", "2", "–", "how many"],
        ["`part.scale`", "float", "*1e-8*", "*1e-8*", "*1e-8*", r"of a \| b"],
    ]


def test_keys_of_a_bare_dataclass_stand_flat_and_those_of_another_block_not_at_all() -> None:
    rows = list(rows_of(Reader, None))
    assert [row[0] for row in rows] == ["`steps`", "`rates`", "`part`", "`part.rank`", "`part.scale`"]
    assert rows[0] == ["`steps`", "int or none", "none", "how long"]
    assert rows[3] == ["`part.rank`", "int", "–", "how many"]


@pytest.mark.parametrize(
    ("raw", "cell"),
    [
        (None, "none"),
        (True, "true"),
        (0.1, "0.1"),
        (1e-5, "1e-5"),
        (1e20, "1e20"),
        (10.0, "10.0"),
        ((), "[]"),
        (["a", 1.5e-10], "[a, 1.5e-10]"),
        ({"a": False}, "{a: false}"),
    ],
)
def test_values_are_shown_as_yaml_writes_them(raw: object, cell: str) -> None:
    assert shown(raw) == cell


def test_types_are_shown_in_words() -> None:
    assert type_of(str | tuple[int, ...]) == "str or list of int"
    assert type_of(dict[str, list[Part]]) == "dict of list of block"
    assert type_of(Any) == "Any"


def test_nothing_in_a_cell_is_taken_for_markdown() -> None:
    assert escaped("a * b, <n>, _x, last_2, c|d, `e * _f | g`") == r"a \* b, \<n>, \_x, last_2, c\|d, `e * _f \| g`"


def test_every_row_has_as_many_cells_as_its_head(text: str) -> None:
    tables = re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
    assert len(tables) > 20
    for table in tables:
        counts = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(counts) == 1, table[:300]


def test_a_new_stage_appears_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("stages.extra", "Stage extra: what is new.\n\nMore.")
    module.Params = Reader  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "stages.extra", module)
    before = reference.stage_names
    monkeypatch.setattr(reference, "stage_names", lambda root: [*before(root), "extra"])
    found = sections(document(ROOT))
    names = list(found)
    assert "What is new.\n\nAlso reads: [`shared`](#shared).\n" in found["extra"]
    assert keys(found["extra"])[:2] == ["steps", "rates"]
    assert keys(found["shared"]) == ["rank", "scale"] and "Read by `extra`." in found["shared"]
    assert names.index("deploy") < names.index("extra") < names.index("runtime")


def test_every_key_of_params_yaml_has_its_row(text: str) -> None:
    found = sections(text)
    for name, values in yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8")).items():
        if not isinstance(values, dict):
            assert name in keys(found[""]), name
            continue
        inner = {f"{key}.{deeper}" for key, value in values.items() if isinstance(value, dict) for deeper in value}
        missing = ({*values} | inner) - {*keys(found[name])}
        assert not missing, (name, missing)


def test_sections_stand_in_the_order_of_params_yaml(text: str) -> None:
    blocks = [
        name for name, values in yaml.safe_load((ROOT / "params.yaml").read_text()).items() if isinstance(values, dict)
    ]
    assert [name for name in sections(text) if name in blocks] == blocks


def test_every_link_of_the_contents_leads_to_a_heading(text: str) -> None:
    links = set(re.findall(r"\]\(#([\w-]+)\)", text))
    assert links == {name.replace(" ", "-") for name in sections(text) if name}


def test_the_sizes_are_those_that_the_model_files_say(text: str) -> None:
    for path in (ROOT / "conf" / "model").glob("*.yaml"):
        said = re.search(r"(\d[\d,]+) parameters", path.read_text(encoding="utf-8").splitlines()[0])
        if said is not None:  # the other files round it
            assert f"| `{path.stem}` |" in text
            assert re.search(rf"^\| `{path.stem}` \|.*\| {said[1]} \|$", text, flags=re.MULTILINE), path


def test_every_preset_is_listed(text: str) -> None:
    found = sections(text)
    for path in (ROOT / "conf" / "preset").glob("*/*.yaml"):
        assert f"{path.parent.name}.preset={path.stem}" in keys(found["presets"])
        assert keys(found[path.parent.name])[0] == "preset"


def test_every_environment_variable_that_the_code_reads_is_told(text: str) -> None:
    read: set[str] = set()
    for path in (path for folder in ("pipeline", "stages") for path in (ROOT / folder).rglob("*.py")):
        if path.stem == "reference" and path.parent.name == "pipeline":
            continue  # it names them all
        code = path.read_text(encoding="utf-8")
        read |= set(re.findall(r'environ(?:\.get\(|\.setdefault\(|\[)"([A-Z_]+)"', code))
        read |= set(re.findall(r'"([A-Z_]+)" (?:not )?in os\.environ', code))
        read |= set(re.findall(r'"(STAGECOACH_[A-Z_]+)"', code))  # names that are kept in a constant
    assert {"STAGECOACH_LAUNCH", "STAGECOACH_API_KEYS", "MACHINE_RANK", "LOCAL_RANK"} <= read
    told = sections(text)["environment"]
    assert not {name for name in read if f"`{name}`" not in told}
