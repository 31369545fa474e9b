"""The licence of harvested text: what a package says about itself, and whether that is permissive.

    distribution metadata -> License-Expression, else classifiers, else License, else "unknown"
    Debian's /usr/share/doc/<package>/copyright -> its License fields, else the common licence it points at

Not promised: legal advice, or that a package's own statement is true for each of its files.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageMetadata

UNKNOWN = "unknown"
LONGEST = 80  # a License field may hold the whole text; only its first line can be a name
PERMISSIVE = re.compile(
    r"^(?:the )?(?:mit(?:-\w+)?\b|x11\b|expat\b|0?bsd\b|(?:[0-9]-clause |new |modified |simplified )bsd\b|isc\b"
    r"|apache\b|asl 2|psf\b|python-2\.0\b|python software foundation|zlib\b|cc0\b)",
    re.IGNORECASE,
)
RESTRICTIVE = re.compile(r"gpl|mpl|mozilla|epl|eclipse|cddl|proprietary|commercial|non-?free|\bnc\b", re.IGNORECASE)
COMMON = re.compile(r"/usr/share/common-licenses/([A-Za-z][A-Za-z0-9.+-]*[A-Za-z0-9+])")
OPERATOR = re.compile(r"\(|\)|\bAND\b|\bOR\b|\bWITH\b")


def of_distribution(metadata: PackageMetadata) -> str:
    """What a Python distribution's METADATA says; several classifiers are joined by AND."""
    expression = metadata["License-Expression"].strip() if "License-Expression" in metadata else ""
    if expression:
        return expression
    classifiers = [
        c.split("::")[-1].strip() for c in metadata.get_all("Classifier") or [] if c.startswith("License ::")
    ]
    named = [c for c in classifiers if c != "OSI Approved"]
    if named:
        return " AND ".join(named)
    stated = next(iter(metadata.get_all("License") or ()), "")
    lines = [line.strip() for line in stated.splitlines() if line.strip()]
    return lines[0] if lines and len(lines[0]) <= LONGEST and lines[0].upper() != "UNKNOWN" else UNKNOWN


def of_debian(copyright_text: str) -> str:
    """What a Debian copyright file says: the first License field (of `Files: *`), else the common licences named."""
    fields = [line.partition(":")[2].strip() for line in copyright_text.splitlines() if line.startswith("License:")]
    named = [name for name in fields if name]
    if named:
        return named[0][:LONGEST]
    common = sorted(set(COMMON.findall(copyright_text)))
    return " AND ".join(common) if common else UNKNOWN


def is_permissive(licence: str) -> bool:
    """Whether MIT, BSD, ISC, Apache, PSF, Zlib or CC0 suffices: all operands of AND, one operand of OR.

    AND binds more tightly than OR, parentheses group, the exception behind WITH only permits more (SPDX 2.3, annex D).
    What cannot be read that way is not permissive.
    """
    tokens = _tokens(licence)
    value, rest = _either(tokens, 0)
    return value and rest == len(tokens)


def _tokens(licence: str) -> list[str]:
    tokens, last = [], 0
    text = licence.replace(" and ", " AND ").replace(" or ", " OR ")
    for match in OPERATOR.finditer(text):
        tokens += [text[last : match.start()].strip(), match.group()]
        last = match.end()
    return [token for token in (*tokens, text[last:].strip()) if token]


def _either(tokens: list[str], at: int) -> tuple[bool, int]:
    value, at = _both(tokens, at)
    while at < len(tokens) and tokens[at] == "OR":
        other, at = _both(tokens, at + 1)
        value = value or other
    return value, at


def _both(tokens: list[str], at: int) -> tuple[bool, int]:
    value, at = _operand(tokens, at)
    while at < len(tokens) and tokens[at] == "AND":
        other, at = _operand(tokens, at + 1)
        value = value and other
    return value, at


def _operand(tokens: list[str], at: int) -> tuple[bool, int]:
    if at >= len(tokens) or tokens[at] in ("AND", "OR", "WITH", ")"):
        return False, at
    if tokens[at] == "(":
        value, at = _either(tokens, at + 1)
        closed = at < len(tokens) and tokens[at] == ")"
        return value and closed, at + closed
    value = bool(PERMISSIVE.match(tokens[at])) and not RESTRICTIVE.search(tokens[at])
    at += 1
    if at + 1 < len(tokens) and tokens[at] == "WITH":
        at += 2
    elif at + 1 < len(tokens) and tokens[at] == "(" and tokens[at + 1] not in ("(", ")"):
        at += 3  # a name with its abbreviation behind it: "BSD License (BSD-3-Clause)"
    return value, at
