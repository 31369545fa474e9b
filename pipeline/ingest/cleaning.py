"""Clean one document: keep or drop it, and redact what must not be kept. Stateless; `duplicates` compares documents.

    bytes or text -> encoding -> size -> lines -> generated -> syntax -> secrets -> Document, cleaned or with a reason
    Python source -> docstrings -> prose paragraphs; METADATA -> README -> prose paragraphs

The first failed check is the drop reason. Email addresses and passwords in URLs are replaced with placeholders; a
document with a private key or a token is dropped.

Not guaranteed: that every secret is caught. The patterns match the formats in SECRETS, not passwords in prose.
"""

from __future__ import annotations

import ast
import re
import warnings
from dataclasses import dataclass, replace

from pipeline.ingest import sources
from pipeline.ingest.duplicates import fingerprint, signature
from pipeline.ingest.records import Text
from pipeline.ingest.sources import DataConfig, Found, split_of
from pipeline.run.errors import DataError


@dataclass(frozen=True)
class Origin:
    """The row a text comes from."""

    file: str
    line: int
    number: int  # among the accepted rows; one line may contain several rows


@dataclass(frozen=True, kw_only=True)
class Document:
    """A worker's result for one file or record; `paragraphs` is for prose only and joined later by `Selection`."""

    part: str  # stories, prose, python, shell, generated, own text, own code
    split: str  # train, val
    record: Text  # cleaned; its text is empty if the document was dropped
    num_bytes: int  # before cleaning
    reason: str | None = None  # why it was dropped
    paragraphs: tuple[str, ...] = ()
    fingerprint: int = 0  # hash of the text without whitespace
    signature: bytes = b""  # MinHash; empty: no near-duplicate search
    origin: Origin | None = None  # for rows of user files; a long row yields several documents


@dataclass(frozen=True, kw_only=True)
class SuppliedText:
    """A text from the user's files or the hub, before cleaning."""

    part: str
    split: str
    record: Text
    origin: Origin | None = None
    foreign: bool = False  # from the hub, under its author's license


class Dropped(Exception):
    """A check failed; the message is the drop reason."""


def python_file(file: Found, config: DataConfig, *, code: bool, prose: bool) -> list[Document]:
    """Read a Python file: its code, its docstring prose, or both, as one Document each."""
    raw = _read_bytes(file, config)
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
        texts = [ast.get_docstring(tree) or "", *docstrings(tree.body)] if prose else []
        texts = [without_secrets(docstring) for docstring in texts]
    except Dropped as dropped:
        reason = str(dropped)
        return [
            _dropped_document(part, file, reason, raw)
            for part, wanted in (("python", code), ("prose", prose))
            if wanted
        ]
    if code:
        documents.append(
            _clean_document("python", split_of(file.package), _text_record(file, text), len(raw), near=True)
        )
    if prose:
        prose_paragraphs = tuple(p for docstring in texts for p in paragraphs(docstring))
        documents.append(_prose_document(file, prose_paragraphs, len(raw)))
    return documents


def readme_file(file: Found, config: DataConfig) -> Document:
    """Read a METADATA file: the prose of its README."""
    raw = _read_bytes(file, config)
    try:
        if isinstance(raw, str):
            raise Dropped(raw)
        readme = decode(raw).partition("\n\n")[2]  # after the header
        text = LINK.sub(r"\1", without_secrets(readme))
    except Dropped as dropped:
        return _dropped_document("prose", file, str(dropped), raw)
    return _prose_document(file, paragraphs(text), len(raw))


def shell_file(file: Found, config: DataConfig) -> Document:
    """Read a shell script."""
    raw = _read_bytes(file, config)
    try:
        if isinstance(raw, str):
            raise Dropped(raw)
        text = decode(raw)
        check_size(text, config)
        check_lines(text)
        check_generated(text)
        text = without_secrets(text)
    except Dropped as dropped:
        return _dropped_document("shell", file, str(dropped), raw)
    return _clean_document("shell", split_of(file.package), _text_record(file, text), len(raw), near=True)


def own_record(row: SuppliedText, kind: str, config: DataConfig) -> Document:
    """Clean a record from the user's files or the hub. Text gets the encoding, size and secret checks; code gets all
    checks, but the syntax check only for `.py` files.
    """
    record = row.record
    num_bytes = len(record.text.encode("utf-8", "surrogatepass"))
    try:
        # Users may train on their own data; hub rows carry their authors' licenses.
        if row.foreign and config.licenses == "permissive" and not sources.is_permissive(record.license):
            raise Dropped("license")
        text = normalize(record.text)
        check_size(text, config)
        if kind == "code":
            check_lines(text)
            check_generated(text)
            if record.path.endswith(".py"):
                parse(text)
        text = without_secrets(text)
    except Dropped as dropped:
        empty, reason = replace(record, text=""), str(dropped)
        return Document(
            part=row.part, split=row.split, record=empty, num_bytes=num_bytes, reason=reason, origin=row.origin
        )
    document = _clean_document(row.part, row.split, replace(record, text=text), num_bytes, near=True)
    return replace(document, origin=row.origin)


def made_record(record: Text, part: str, split: str) -> Document:
    """A generated record: clean by construction and similar on purpose, so only exact duplicates are dropped later."""
    return _clean_document(part, split, record, len(record.text.encode()), near=False)


def capped_file(file: Found, part: str) -> Document:
    """A file whose package has reached its cap: counted but not read."""
    return _dropped_document(part, file, "cap", "cap")


def _read_bytes(file: Found, config: DataConfig) -> bytes | str:
    """The file's bytes, or the reason it was not read."""
    if config.licenses == "permissive" and not sources.is_permissive(file.license):
        return "license"
    try:
        if file.file.stat().st_size > config.max_bytes:
            return "size"
        raw = file.file.read_bytes()
    except OSError:
        if file.sha256 is not None:
            raise DataError(
                f"data: packages: {file.file} (from {file.package}) cannot be read. {sources.REMEDY}"
            ) from None
        return "unreadable"
    sources.verify(file, raw)
    return raw


def _text_record(file: Found, text: str) -> Text:
    return Text(text=text, source=file.package, path=file.path, license=file.license)


def _dropped_document(part: str, file: Found, reason: str, raw: bytes | str) -> Document:
    if isinstance(raw, bytes):
        num_bytes = len(raw)
    else:
        try:
            num_bytes = file.file.stat().st_size
        except OSError:
            num_bytes = 0
    split = split_of(file.package)
    return Document(part=part, split=split, record=_text_record(file, ""), num_bytes=num_bytes, reason=reason)


def _prose_document(file: Found, prose: tuple[str, ...], num_bytes: int) -> Document:
    split, reason = split_of(file.package), None if prose else "no prose"
    record = _text_record(file, "")
    return Document(part="prose", split=split, record=record, num_bytes=num_bytes, reason=reason, paragraphs=prose)


def _clean_document(part: str, split: str, record: Text, num_bytes: int, *, near: bool) -> Document:
    sketch = signature(record.text) if near else b""
    equal = fingerprint(record.text)
    return Document(part=part, split=split, record=record, num_bytes=num_bytes, fingerprint=equal, signature=sketch)


# --- checks ----------------------------------------------------------------------------------------------------------


MAX_LINE, MAX_MEAN_LINE = 1000, 100  # bytes
MIN_ALPHANUMERIC, MAX_ESCAPES = 0.25, 0.05  # shares of the bytes
HEAD_LINES = 15
GENERATED_MARKS = ("generated", "do not edit")
SURROGATE = re.compile("[\ud800-\udfff]")
LETTERS_AND_DIGITS = bytes(b for b in range(256) if b >= 128 or chr(b).isalnum())


def decode(raw: bytes) -> str:
    """Decode UTF-8, strip the BOM, use `\\n` line endings. Raises Dropped("encoding") for other encodings and NUL."""
    try:
        return normalize(raw.decode("utf-8"))
    except UnicodeDecodeError:
        raise Dropped("encoding") from None


def normalize(text: str) -> str:
    """Strip the BOM and use `\\n` line endings. Raises Dropped("encoding") for NUL and lone surrogates."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    if "\0" in text or (not text.isascii() and SURROGATE.search(text)):
        raise Dropped("encoding")
    return text


def check_size(text: str, config: DataConfig) -> None:
    """Raise Dropped("size") unless the text has `min_bytes` to `max_bytes` bytes in UTF-8."""
    if not config.min_bytes <= len(text.encode()) <= config.max_bytes:
        raise Dropped("size")


def check_lines(text: str) -> None:
    """Raise Dropped for text that looks like data: long lines, few letters and digits, tables of `\\x` escapes."""
    raw = text.encode()
    lines = raw.rstrip(b"\n").split(b"\n")
    if max(map(len, lines)) > MAX_LINE or len(raw) > MAX_MEAN_LINE * len(lines):
        raise Dropped("long lines")
    if len(raw) - len(raw.translate(None, LETTERS_AND_DIGITS)) < MIN_ALPHANUMERIC * len(raw):
        raise Dropped("few letters")
    if 4 * raw.count(b"\\x") > MAX_ESCAPES * len(raw):
        raise Dropped("byte table")


def check_generated(text: str) -> None:
    """Raise Dropped("generated") if one of the first 15 lines marks the file as generated."""
    head = "\n".join(text.split("\n", HEAD_LINES)[:HEAD_LINES]).lower()
    if any(mark in head for mark in GENERATED_MARKS):
        raise Dropped("generated")


def parse(text: str) -> ast.Module:
    """The syntax tree. Raises Dropped("syntax") if this Python version cannot parse the text."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Dropped("syntax") from None


# --- secrets ---------------------------------------------------------------------------------------------------------


# Each pattern comes with a literal that every match contains: looking for the literal first is a hundred times faster.
SECRETS = tuple(
    (literal, re.compile(pattern))
    for literal, pattern in (
        ("PRIVATE KEY", r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----"),
        ("AKIA", r"\bAKIA[0-9A-Z]{16}\b"),  # AWS: long-lived key ids; then temporary ones and secret keys
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
# Python's @ multiplies matrices: `q@k.to(x)` is not an address. An address must end in a known TLD that is not followed
# by a call or an attribute.
EMAIL = re.compile(
    r"\b(?!git@)[A-Za-z0-9][A-Za-z0-9._%+-]*@(?:[A-Za-z0-9-]+\.)+"
    r"(?:com|org|net|edu|gov|mil|int|info|biz|name|dev|[a-z]{2})"
    r"(?![\w(\[]|[.-]\w)"
)
URL_FIXED, EMAIL_FIXED = r"\1user:password@", "user@example.com"


def without_secrets(text: str) -> str:
    """Replace email addresses and URL passwords with placeholders. Raises Dropped("secret") for keys and tokens."""
    if any(literal in text and pattern.search(text) for literal, pattern in SECRETS):
        raise Dropped("secret")
    if "@" not in text:
        return text
    return EMAIL.sub(EMAIL_FIXED, URL_PASSWORD.sub(URL_FIXED, text))


# --- prose -----------------------------------------------------------------------------------------------------------


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


def paragraphs(text: str) -> tuple[str, ...]:
    """The prose paragraphs, one line each: English sentences, no code, tables, directives, HTML or lists."""
    prose, block, fenced = [], [], False
    for line in [*text.expandtabs(4).split("\n"), ""]:
        if FENCE.match(line):
            fenced, block = not fenced, []
        elif fenced:
            continue
        elif line.strip():
            block.append(line)
        elif block:
            if is_prose(block):
                prose.append(" ".join(" ".join(block).split()))
            block = []
    return tuple(prose)


def is_prose(lines: list[str]) -> bool:
    """Whether a block has at least 8 words, 80% letters and spaces, 18% function words, sentence-final punctuation and
    uniform indentation.
    """
    if lines[-1].rstrip()[-1] not in ".!?:":
        return False
    # A more deeply indented second line is a definition list ("x : int\n    The ..."); a bare "Args:" is its heading.
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
    """The docstrings of all functions and classes in a list of statements, in source order."""
    texts = []
    for statement in body:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            texts.append(ast.get_docstring(statement) or "")
        for name in ("body", "orelse", "handlers", "finalbody", "cases"):
            if inner := getattr(statement, name, None):
                texts += docstrings(inner)
    return texts
