"""The list of mutants stays valid: each changes exactly one existing place and names existing tests."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import mutants  # noqa: E402  # pyright: ignore[reportMissingImports]
from mutants import MUTANTS, Mutant  # noqa: E402  # pyright: ignore[reportMissingImports]


def test_every_mutant_changes_exactly_one_place_and_names_tests_that_are_there() -> None:
    for mutant in MUTANTS:
        text = (ROOT / mutant.file).read_text()
        assert text.count(mutant.old) == 1, (mutant.file, mutant.old)
        changed = text.replace(mutant.old, mutant.new)
        assert changed != text
        if mutant.file.endswith(".py"):
            compile(changed, mutant.file, "exec")  # a syntax error would be killed by any test
        else:
            yaml.safe_load(changed)
        assert all((ROOT / "tests" / name).is_file() for name in mutant.tests.split()), mutant.tests


def test_forty_or_more_mutants_over_five_subjects_and_none_twice() -> None:
    assert len(MUTANTS) >= 40 and len({mutants.key_of(mutant) for mutant in MUTANTS}) == len(MUTANTS)
    found = Counter(mutant.subject for mutant in MUTANTS)
    assert all(found[subject] >= 5 for subject in ("losses", "loop", "resume", "masks", "jail"))


def test_a_mutant_dies_by_the_test_that_notices_it_and_lives_where_none_does(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "sums.py").write_text("def add(a, b):\n    return a + b\n")
    body = "from sums import add\n\ndef test_add():\n    assert add(2, {}) == {}\n"
    (tmp_path / "tests/test_weak.py").write_text(body.format(2, 4))
    (tmp_path / "tests/test_good.py").write_text(body.format(3, 5))
    for tests, expected in (("test_weak.py", ""), ("test_weak.py test_good.py", "tests/test_good.py::test_add")):
        assert mutants.killed_by(tmp_path, Mutant("losses", "sums.py", "a + b", "a * b", tests)) == expected
    assert "a + b" in (tmp_path / "sums.py").read_text()
    with pytest.raises(RuntimeError, match="names no test"):
        mutants.killer(tmp_path, "test_absent.py")
