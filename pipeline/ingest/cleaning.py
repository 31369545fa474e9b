"""Cleans one document: what it must be to stay, and what of it stays. Stateless; `duplicates` compares documents.

    bytes or text -> encoding -> size -> lines -> generated -> syntax -> secrets -> Document, kept or with a drop reason
    Python source -> docstrings -> paragraphs of prose; METADATA -> README -> paragraphs of prose

The first check that fails names the reason, so every document leaves by one door. E-mail addresses and passwords in
URLs are replaced by fixed ones; private keys and tokens drop the document.

Not promised: that no secret passes. The patterns know the formats listed in SECRETS, not passwords in prose.
"""

from __future__ import annotations

import ast
import re
import warnings
from dataclasses import dataclass

from pipeline.ingest import packages, sources
from pipeline.ingest.duplicates import fingerprint, signature
from pipeline.ingest.records import Text
from pipeline.ingest.sources import DataConfig, Found, split_of
from pipeline.run.errors import DataError

LONGEST_LINE, MEAN_LINE, ALPHANUMERIC, ESCAPES = 1000, 100, 0.25, 0.05
HEAD_LINES = 15
MARKS = ("generated", "do not edit")
SURROGATE = re.compile("[\ud800-\udfff]")
LETTERS_AND_DIGITS = bytes(b for b in range(256) if b >= 128 or chr(b).isalnum())

# Each pattern with a literal that it cannot do without: looking for that first is a hundred times faster.
SECRETS = tuple(
    (literal, re.compile(pattern))
    for literal, pattern in (
        ("PRIVATE KEY", r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----"),
        ("AKIA", r"\bAKIA[0-9A-Z]{16}\b"),  # AWS: the key's id, long-lived or not, and below the key
        ("ASIA", r"\bASIA[0-9A-Z]{16}\b"),
        ("ecret", r"(?i:aws_?secret(?:_?access)?_?key)\W{1,6}[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+])"),
        ("ECRET", r"AWS_?SECRET(?:_?ACCESS)?_?KEY\W{1,6}[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+])"),
        ("gh", r"\bgh[pousr]_[A-Za-z0-9]{36,}"),
        ("github_pat_", r"\bgithub_pat_[A-Za-z0-9_]{22,}"),
        ("xox", r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}"),  # Slack
        ("hooks.slack.com", r"hooks\.slack\.com/services/T\w+/B\w+/\w{16,}"),
        ("AIza", r"\bAIza[0-9A-Za-z_-]{35}"),  # Google
        ("GOCSPX-", r"\bGOCSPX-[0-9A-Za-z_-]{28}"),
        ("ya29.", r"\bya29\.[0-9A-Za-z_-]{30,}"),
        ("hf_", r"\bhf_[A-Za-z0-9]{30,}"),  # Hugging Face
        ("api_org_", r"\bapi_org_[A-Za-z0-9]{30,}"),
        ("sk-", r"\bsk-[A-Za-z0-9]{20,}|\bsk-(?:proj|ant|svcacct|admin|or)-[A-Za-z0-9_-]{20,}"),
        ("k_live_", r"\b[sr]k_live_[A-Za-z0-9]{20,}"),
        ("eyJ", r"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}"),  # JSON web token
    )
)
URL_PASSWORD = re.compile(
    r"""\b([a-z][a-z0-9+.-]{1,20}://)[^\s/:@"'<>{}$%()\[\],]+:[^\s/@"'<>{}$%()\[\],]+@""", re.IGNORECASE
)
# Python multiplies matrices with @: `q@k.to(x)` is no address. So only known endings, and no call or attribute behind.
EMAIL = re.compile(
    r"\b(?!git@)[A-Za-z0-9][A-Za-z0-9._%+-]*@(?:[A-Za-z0-9-]+\.)+(?:com|org|net|edu|gov|mil|int|info|biz|name|dev|[a-z]{2})"
    r"(?![\w(\[]|[.-]\w)"
)
URL_FIXED, EMAIL_FIXED = r"\1user:password@", "user@example.com"

COMMON_WORDS = (
    "the of and to a in is that for it as with be on by this are or an from at if not which can will was but have has "
    "when you its then than into all each may"
)
FUNCTION_WORDS = frozenset(COMMON_WORDS.split())
WORD = re.compile(r"[A-Za-z]+(?:'[A-Za-z]+)?")
NO_PROSE = re.compile(
    r">>>|^\s*\.\.\s|::|^\s*:\w[^:]*:|^\s*@\w+|^\s*[-=~^*#+]{3,}|^\s*#|\s\|\s|^\s*\||</?[A-Za-z!][^>\n]*>|&\w+;"
    r"|\]\(|!\[|^\s*\$ ",
    re.MULTILINE,
)
BULLET = re.compile(r"\s*(?:[-*+•]|\d+[.)])\s")
LINK = re.compile(r"(?<!!)\[([^\[\]\n]*)\]\([^()\s]*\)")
FENCE = re.compile(r"^\s*(?:```|~~~)")


@dataclass(frozen=True, kw_only=True)
class Document:
    """What a worker hands back for one file or record; `paragraphs` only for prose, which is put together later."""

    part: str  # stories, prose, python, shell, generated, own text, own code
    split: str  # train, val
    record: Text  # cleaned; its text is empty when the document was dropped
    num_bytes: int  # as found
    reason: str | None = None  # why it was dropped
    paragraphs: tuple[str, ...] = ()
    fingerprint: int = 0  # of the text without whitespace
    signature: bytes = b""  # MinHash, empty when near duplicates are not looked for


class Dropped(Exception):
    """A check failed; the message is the drop reason. Never leaves this module."""


def decode(raw: bytes) -> str:
    """UTF-8 without BOM, `\\n` line ends. Raises Dropped("encoding") for other encodings and for NUL."""
    try:
        return normalise(raw.decode("utf-8"))
    except UnicodeDecodeError:
        raise Dropped("encoding") from None


def normalise(text: str) -> str:
    """A text without BOM, with `\\n` line ends. Raises Dropped("encoding") for NUL and lone surrogates."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    if "\0" in text or (not text.isascii() and SURROGATE.search(text)):
        raise Dropped("encoding")
    return text


def check_size(text: str, config: DataConfig) -> None:
    """Raise Dropped("size") outside min_bytes..max_bytes of UTF-8."""
    if not config.min_bytes <= len(text.encode()) <= config.max_bytes:
        raise Dropped("size")


def check_lines(text: str) -> None:
    """Raise Dropped for what is data rather than writing: long lines, few letters and digits, tables of `\\x`
    escapes.
    """
    raw = text.encode()
    lines = raw.rstrip(b"\n").split(b"\n")
    if max(map(len, lines)) > LONGEST_LINE or len(raw) > MEAN_LINE * len(lines):
        raise Dropped("long lines")
    if len(raw) - len(raw.translate(None, LETTERS_AND_DIGITS)) < ALPHANUMERIC * len(raw):
        raise Dropped("few letters")
    if 4 * raw.count(b"\\x") > ESCAPES * len(raw):
        raise Dropped("byte table")


def check_generated(text: str) -> None:
    """Raise Dropped("generated") when one of the first 15 lines says that a program wrote this."""
    head = "\n".join(text.split("\n", HEAD_LINES)[:HEAD_LINES]).lower()
    if any(mark in head for mark in MARKS):
        raise Dropped("generated")


def parse(text: str) -> ast.Module:
    """The syntax tree. Raises Dropped("syntax") where this Python cannot parse the text."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Dropped("syntax") from None


def without_secrets(text: str) -> str:
    """The text with fixed e-mail addresses and URL passwords. Raises Dropped("secret") for keys and tokens."""
    if any(literal in text and pattern.search(text) for literal, pattern in SECRETS):
        raise Dropped("secret")
    if "@" not in text:
        return text
    return EMAIL.sub(EMAIL_FIXED, URL_PASSWORD.sub(URL_FIXED, text))


def paragraphs(text: str) -> tuple[str, ...]:
    """The paragraphs of prose, each on one line: English sentences, no code, tables, directives, HTML or lists."""
    kept, block, fenced = [], [], False
    for line in [*text.expandtabs(4).split("\n"), ""]:
        if FENCE.match(line):
            fenced, block = not fenced, []
        elif fenced:
            continue
        elif line.strip():
            block.append(line)
        elif block:
            if is_prose(block):
                kept.append(" ".join(" ".join(block).split()))
            block = []
    return tuple(kept)


def is_prose(lines: list[str]) -> bool:
    """At least 8 words; 80 % letters and spaces; 18 % function words; ends a sentence; one indentation throughout."""
    if lines[-1].rstrip()[-1] not in ".!?:":
        return False
    # A deeper second line is a definition list ("x : int\n    The ..."), a bare "Args:" its heading.
    indent = len(lines[0]) - len(lines[0].lstrip())
    if any(len(line) - len(line.lstrip()) != indent or BULLET.match(line) for line in lines):
        return False
    if len(lines) > 1 and lines[0].rstrip().endswith(":"):
        return False
    block = "\n".join(lines)
    words = WORD.findall(block)
    letters = sum(map(str.isalpha, block)) + sum(map(str.isspace, block))
    if len(words) < 8 or letters < 0.8 * len(block):
        return False
    if sum(word.lower() in FUNCTION_WORDS for word in words) < 0.18 * len(words):
        return False
    return NO_PROSE.search(block) is None  # last, because it is slow


def docstrings(body: list[ast.stmt]) -> list[str]:
    """The docstrings of all functions and classes in a list of statements, in the order of the source."""
    found = []
    for statement in body:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(ast.get_docstring(statement) or "")
        for name in ("body", "orelse", "handlers", "finalbody", "cases"):
            if inner := getattr(statement, name, None):
                found += docstrings(inner)
    return found


def python_file(found: Found, config: DataConfig, *, code: bool, prose: bool) -> list[Document]:
    """Read a Python file: its code, its docstrings' prose, or both, as asked. Each is one Document."""
    raw = _read(found, config)
    documents = []
    try:
        if isinstance(raw, str):
            raise Dropped(raw)
        text = decode(raw)
        check_size(text, config)
        check_lines(text)
        check_generated(text)
        tree = parse(text)
        text = without_secrets(text)
        spoken = [ast.get_docstring(tree) or "", *docstrings(tree.body)] if prose else []
        spoken = [without_secrets(docstring) for docstring in spoken]
    except Dropped as dropped:
        reason = str(dropped)
        return [_dropped(part, found, reason, raw) for part, wanted in (("python", code), ("prose", prose)) if wanted]
    if code:
        documents.append(_kept("python", split_of(found.package), _record(found, text), len(raw), near=True))
    if prose:
        kept = tuple(p for docstring in spoken for p in paragraphs(docstring))
        documents.append(_prose(found, kept, len(raw)))
    return documents


def readme_file(found: Found, config: DataConfig) -> Document:
    """Read a METADATA file: the prose of its README."""
    raw = _read(found, config)
    try:
        if isinstance(raw, str):
            raise Dropped(raw)
        readme = decode(raw).partition("\n\n")[2]  # behind the header
        text = LINK.sub(r"\1", without_secrets(readme))
    except Dropped as dropped:
        return _dropped("prose", found, str(dropped), raw)
    return _prose(found, paragraphs(text), len(raw))


def shell_file(found: Found, config: DataConfig) -> Document:
    """Read a shell script."""
    raw = _read(found, config)
    try:
        if isinstance(raw, str):
            raise Dropped(raw)
        text = decode(raw)
        check_size(text, config)
        check_lines(text)
        check_generated(text)
        text = without_secrets(text)
    except Dropped as dropped:
        return _dropped("shell", found, str(dropped), raw)
    return _kept("shell", split_of(found.package), _record(found, text), len(raw), near=True)


def own_record(record: Text, split: str, kind: str, config: DataConfig) -> Document:
    """A record of the user's files or of the hub. Text passes encoding, size and secrets; code all checks of its
    suffix.
    """
    num_bytes = len(record.text.encode("utf-8", "surrogatepass"))
    try:
        # What a user brings is the user's to train on; the hub's rows carry their authors' licences.
        if config.source == "hub" and config.licences == "permissive" and not sources.is_permissive(record.licence):
            raise Dropped("licence")
        text = normalise(record.text)
        check_size(text, config)
        if kind == "code":
            check_lines(text)
            check_generated(text)
            if record.path.endswith(".py"):
                parse(text)
        text = without_secrets(text)
    except Dropped as dropped:
        empty = Text(text="", source=record.source, path=record.path, licence=record.licence)
        return Document(part=f"own {kind}", split=split, record=empty, num_bytes=num_bytes, reason=str(dropped))
    cleaned = Text(text=text, source=record.source, path=record.path, licence=record.licence)
    return _kept(f"own {kind}", split, cleaned, num_bytes, near=True)


def made_record(record: Text, part: str, split: str) -> Document:
    """A record of one of our generators: clean by construction, similar by intention, so only equal ones will leave."""
    return _kept(part, split, record, len(record.text.encode()), near=False)


def capped(found: Found, part: str) -> Document:
    """A file whose package has given its share: counted, not read."""
    return _dropped(part, found, "cap", "cap")


def _read(found: Found, config: DataConfig) -> bytes | str:
    """The file's bytes, or the reason why it was not read."""
    if config.licences == "permissive" and not sources.is_permissive(found.licence):
        return "licence"
    try:
        if found.file.stat().st_size > config.max_bytes:
            return "size"
        raw = found.file.read_bytes()
    except OSError:
        if found.sha256 is not None:
            raise DataError(
                f"data: packages: {found.file}, of {found.package}, cannot be read; {packages.MEND}"
            ) from None
        return "unreadable"
    packages.verify(found, raw)
    return raw


def _record(found: Found, text: str) -> Text:
    return Text(text=text, source=found.package, path=found.path, licence=found.licence)


def _dropped(part: str, found: Found, reason: str, raw: bytes | str) -> Document:
    if isinstance(raw, bytes):
        num_bytes = len(raw)
    else:
        try:
            num_bytes = found.file.stat().st_size
        except OSError:
            num_bytes = 0
    split = split_of(found.package)
    return Document(part=part, split=split, record=_record(found, ""), num_bytes=num_bytes, reason=reason)


def _prose(found: Found, kept: tuple[str, ...], num_bytes: int) -> Document:
    split, reason = split_of(found.package), None if kept else "no prose"
    record = _record(found, "")
    return Document(part="prose", split=split, record=record, num_bytes=num_bytes, reason=reason, paragraphs=kept)


def _kept(part: str, split: str, record: Text, num_bytes: int, *, near: bool) -> Document:
    sketch = signature(record.text) if near else b""
    equal = fingerprint(record.text)
    return Document(part=part, split=split, record=record, num_bytes=num_bytes, fingerprint=equal, signature=sketch)
