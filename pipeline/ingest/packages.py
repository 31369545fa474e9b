"""The same harvest on every machine (`data: packages`): named packages, of the versions in requirements.lock, byte for
byte.

    conf/data/packages.yaml (names) + requirements.lock (versions) + RECORD (sha256 of each file) -> Found

The packages are pure Python, so that every platform installs the same wheel of them, and permissively licensed. A
version that differs from the lock's, a file that differs from its RECORD, and a package that is not installed are
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
MEND = "Install what the lock has: python -m pip install -r requirements.lock (`make setup` does so)"


def versions(lock: Path = LOCK) -> dict[str, str]:
    """name -> version of every line of the lock. Raises DataError for a file that is not there or holds no versions."""
    try:
        lines = lock.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(
            f"{lock}: cannot be read ({error}); restore it with git checkout, or make it with make update"
        ) from error
    found = {}
    for line in lines:
        if match := re.match(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;]+)", line):
            found[canonical(match[1])] = match[2]
    if not found:
        raise DataError(f"{lock}: expected lines such as numpy==2.4.6, found none; make it anew with make update")
    return found


def packages(names: list[str], lock: Path = LOCK) -> list[Package]:
    """The installed packages of these names, checked against the lock. Raises DataError naming the first that does
    not fit.
    """
    expected = versions(lock)
    found = []
    for name in names:
        if name not in expected:
            raise DataError(
                f"conf/data/packages.yaml: {name}: not in {lock}; expected the name of a package of the lock"
            )
        try:
            package = package_of(name)
        except PackageNotFoundError:
            raise DataError(f"data: packages: {name} is not installed; expected {expected[name]}. {MEND}") from None
        if package.version != expected[name]:
            raise DataError(
                f"data: packages: {name}: expected version {expected[name]}, as {lock} has it, found {package.version}."
                f" {MEND}"
            )
        if not sources.is_permissive(package.licence):
            raise DataError(f"conf/data/packages.yaml: {name}: expected a permissive licence, found {package.licence}")
        found.append(package)
    return found


def checked(found: list[Found]) -> list[Found]:
    """The files with the sha256 that their package's RECORD gives, for whoever reads them. Raises DataError where it
    gives none.
    """
    sums: dict[str, dict[str, str]] = {}
    for entry in found:
        if entry.package not in sums:
            sums[entry.package] = _record(entry.package)
        if entry.path not in sums[entry.package]:
            raise DataError(f"data: packages: {entry.package}: RECORD has no sha256 of {entry.path}. {MEND}")
    return [replace(entry, sha256=sums[entry.package][entry.path]) for entry in found]


def _record(package: str) -> dict[str, str]:
    record = distribution(package).read_text("RECORD") or ""
    return {
        row[0]: row[1].removeprefix("sha256=") for row in csv.reader(record.splitlines()) if row[1:2] != [""] and row
    }


def verify(found: Found, raw: bytes) -> None:
    """Raise DataError where a file is not the one that was installed."""
    if found.sha256 is None:
        return
    here = base64.urlsafe_b64encode(hashlib.sha256(raw).digest()).rstrip(b"=").decode()
    if here != found.sha256:
        raise DataError(
            f"data: packages: {found.file}: expected sha256 {found.sha256}, as the package {found.package} was"
            f" installed, found {here}: the file was changed. Install it again: python -m pip install --force-reinstall"
            f" --no-deps {found.package}=={distribution(found.package).version}"
        )
