"""The tests are isolated: they have their own home, and no required test is skipped (tests/conftest.py)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import AT_HOME, ROOT

WRITES_AT_HOME = """
from pathlib import Path
import subprocess
import sys

def test_a_person_is_never_asked():
    import huggingface_hub.constants
    import matplotlib
    for place in (Path.home(), matplotlib.get_cachedir(), huggingface_hub.constants.HF_HOME):
        (Path(place) / "written").mkdir(parents=True)
    assert subprocess.run(["git", "config", "user.name"], capture_output=True, text=True).stdout == ""
    assert not subprocess.run([sys.executable, "-m", "dvc", "config", "--global", "core.analytics", "false"]).returncode
"""


def run(folder: Path, source: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """pytest on one file, with the project's conftest, as another person would start it."""
    (folder / "tests").mkdir()
    (folder / "tests/conftest.py").symlink_to(ROOT / "tests/conftest.py")
    (folder / "tests/test_made.py").write_text(source)
    (folder / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    inherited = {name: value for name, value in os.environ.items() if name not in AT_HOME}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--basetemp={folder / 'made'}", "tests"],
        cwd=folder,
        env=inherited | {"PATH": path, "PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
    )


def test_no_test_reads_or_writes_the_home_of_who_runs_it(tmp_path: Path) -> None:
    home = tmp_path / "person"
    home.mkdir()
    (home / ".gitconfig").write_text("[user]\n\tname = a person\n")
    done = run(tmp_path, WRITES_AT_HOME, HOME=str(home), XDG_CONFIG_HOME=str(home / "config"))
    assert done.returncode == 0, done.stdout
    assert [path.name for path in home.iterdir()] == [".gitconfig"]


def test_this_home_is_not_a_persons_either() -> None:
    home = Path.home()
    assert home.name.startswith("stagecoach-home-")
    for name in AT_HOME:
        assert Path(os.environ[name]).is_relative_to(home)


SKIPPED = 'import pytest\ndef test_it():\n    pytest.skip("{}")\n'


@pytest.mark.parametrize(
    ("require", "reason", "code"),
    [
        ("chromium", "no Chromium on this machine (apt install chromium)", 1),
        ("chromium", "the browser's playwright is not installed", 1),
        ("chromium", "bf16 is emulated here, 50 times slower", 0),
        ("", "no Chromium on this machine (apt install chromium)", 0),
        ("chrome", "", 4),
    ],
)
def test_a_skip_for_want_of_what_is_required_fails(tmp_path: Path, require: str, reason: str, code: int) -> None:
    done = run(tmp_path, SKIPPED.format(reason), STAGECOACH_REQUIRE=require)
    assert done.returncode == code, done.stdout
    assert ("STAGECOACH_REQUIRE" in done.stdout + done.stderr) == bool(code)


def test_what_a_file_wrote_is_gone_when_its_tests_have_passed(tmp_path: Path) -> None:
    source = (
        "import pytest\n@pytest.fixture(scope='module')\n"
        "def copy(tmp_path_factory):\n    path = tmp_path_factory.mktemp('copy')\n"
        "    (path / 'large').write_text('x')\n    return path\n"
    )
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_kept.py").write_text(f"{source}def test_red(copy): assert not copy.exists()\n")
    (tmp_path / "tests").rename(tmp_path / "kept")
    done = run(tmp_path, f"{source}def test_green(copy): assert copy.exists()\n")
    assert done.returncode == 0 and not list((tmp_path / "made").glob("copy*/large"))
    (tmp_path / "kept/test_kept.py").rename(tmp_path / "tests/test_made.py")
    failed = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'made'}", "tests"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert failed.returncode == 1 and list((tmp_path / "made").glob("copy*/large"))
