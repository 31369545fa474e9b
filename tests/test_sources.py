"""ingest/sources.py: what this machine has, in an order that depends only on names."""

import random
from pathlib import Path

import pytest

from pipeline.ingest import sources
from pipeline.ingest.sources import DataConfig, Found
from pipeline.run.errors import DataError

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def found(package: str, path: str) -> Found:
    return Found(file=Path("/") / path, package=package, path=path, license="MIT")


def test_the_closure_holds_indirect_requirements_and_neither_extras_nor_the_project() -> None:
    packages = sources.closure(PYPROJECT)
    names = [package.name for package in packages]
    assert {"numpy", "torch", "dvc", "pyyaml", "fsspec"} <= set(names)
    assert not {"stagecoach", "pytest", "ruff", "pyright", "hypothesis", "peft"} & set(names)
    assert names == sorted(set(names))
    assert all(package.version and package.license for package in packages)


def test_markers_and_extras_are_followed_as_pip_does(tmp_path: Path) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_text('[project]\nname = "x"\ndependencies = ["numpy; python_version < \'3\'", "six", "X"]\n')
    assert [package.name for package in sources.closure(file)] == ["six"]
    file.write_text('[project]\nname = "x"\ndependencies = ["fsspec[http]"]\n')
    assert "aiohttp" in {package.name for package in sources.closure(file)}


def test_a_direct_requirement_that_is_not_installed_is_named(tmp_path: Path) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_text('[project]\nname = "x"\ndependencies = ["no-such-package>=1"]\n')
    with pytest.raises(DataError, match="no-such-package>=1: not installed"):
        sources.closure(file)
    with pytest.raises(DataError, match=r"expected a \[project\] table"):
        sources.closure(tmp_path / "absent.toml")


def test_the_order_takes_a_file_of_every_package_before_a_second_of_any() -> None:
    files = [found(f"p{p}", f"p{p}/f{f}.py") for p in range(5) for f in range(p + 1)]
    order = sources.ordered(files)
    packages = [entry.package for entry in order]
    assert sorted(packages[:5]) == [f"p{p}" for p in range(5)]
    assert sorted(packages[5:9]) == [f"p{p}" for p in range(1, 5)]
    digests = [sources.digest(package) for package in packages[:5]]
    assert digests == sorted(digests)
    shuffled = list(files)
    random.Random(0).shuffle(shuffled)
    assert sources.ordered(shuffled) == order


def test_another_package_moves_no_file_of_the_others() -> None:
    files = [found(f"p{p}", f"p{p}/f{f}.py") for p in range(4) for f in range(3)]
    more = sources.ordered([*files, found("new", "new.py")])
    assert [entry for entry in more if entry.package != "new"] == sources.ordered(files)


@pytest.mark.parametrize(
    ("path", "is_test"),
    [
        ("numpy/core/numeric.py", False),
        ("numpy/testing/utils.py", False),
        ("unittest/case.py", False),
        ("numpy/tests/util.py", True),
        ("test/support.py", True),
        ("a/test_b.py", True),
        ("a/b_test.py", True),
        ("a/conftest.py", True),
        ("a/attest.py", False),
        ("../../bin/script.py", True),
    ],
)
def test_tests_are_known_by_their_path(path: str, is_test: bool) -> None:
    assert sources.is_test(path) == is_test


def test_the_standard_library_is_one_package_per_top_module(tmp_path: Path) -> None:
    for path in ("json/__init__.py", "json/tool.py", "abc.py", "test/x.py", "site-packages/y.py", "data.txt"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).touch()
    entries = sources.python_files([], tmp_path)
    assert [(e.package, e.path) for e in entries] == [
        ("python/abc", "abc.py"),
        ("python/json", "json/__init__.py"),
        ("python/json", "json/tool.py"),
    ]


def test_shell_scripts_are_found_by_suffix_or_first_line_and_never_in_the_project(tmp_path: Path) -> None:
    project = tmp_path / "project"
    files = {
        "bin/tool": "#!/bin/sh\necho",
        "bin/env": "#! /usr/bin/env bash\n",
        "bin/python": "#!/usr/bin/python3\n",
        "lib/a.sh": "echo",
        "lib/b.bash": "echo",
        "lib/tool-1.2": "#!/bin/bash -e\n",
        "lib/c.txt": "#!/bin/sh\n",
        "bin/fish": "#!/usr/bin/fish\n",
        "project/own.sh": "echo",
        "bin/data": "\0\1",
    }
    for path, content in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(content)
    (tmp_path / "bin" / "link.sh").symlink_to(tmp_path / "lib" / "a.sh")
    names = {Path(e.path).name for e in sources.shell_scripts(project, (tmp_path,))}
    assert names == {"tool", "env", "a.sh", "b.bash", "tool-1.2"}


@pytest.mark.parametrize(
    ("license", "permissive"),
    [
        ("MIT", True),
        ("MIT License", True),
        ("BSD-3-Clause", True),
        ("3-Clause BSD License", True),
        ("Apache Software License", True),
        ("Apache-2.0 WITH LLVM-exception", True),
        ("Apache-2.0 OR GPL-2.0-or-later", True),
        ("GPL-3.0-only OR (MIT AND MPL-2.0)", False),
        ("MPL-2.0 AND (Apache-2.0 OR MIT)", False),
        ("MIT AND MPL-2.0", False),
        ("(MIT AND ISC) OR GPL-2.0-only", True),
        ("BSD License (BSD-3-Clause)", True),
        ("GPL-2+", False),
        ("LGPL-2.1", False),
        ("PSF-2.0", True),
        ("CC0-1.0", True),
        ("Zlib", True),
        ("unknown", False),
        ("own", False),
        ("MIT AND", False),
        ("(MIT", False),
        ("", False),
        ("Permitted by nobody", False),
    ],
)
def test_permissive_licenses_are_told_from_the_others(license: str, permissive: bool) -> None:
    assert sources.is_permissive(license) == permissive


def test_debian_copyright_files_give_the_first_license_or_the_common_ones() -> None:
    assert sources.of_debian("Format: x\n\nFiles: *\nLicense: GPL-2+\n text\n\nLicense: MIT\n") == "GPL-2+"
    text = "See `/usr/share/common-licenses/GPL-3'. Also /usr/share/common-licenses/Artistic."
    assert sources.of_debian(text) == "Artistic AND GPL-3"
    assert sources.of_debian("All rights reserved.") == "unknown"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": "web"}, "source: expected"),
        ({"licenses": "some"}, "licenses: expected"),
        ({"min_bytes": 9, "max_bytes": 9}, "min_bytes"),
        ({"max_rejected": 2.0}, "max_rejected"),
        ({"hub": {"images": []}}, "hub: expected one of the kinds"),
    ],
)
def test_a_wrong_data_config_says_what_was_expected(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(**({"source": "machine"} | change))
