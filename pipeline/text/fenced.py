"""Code in an answer: finding the fenced block, and whether it parses.

An answer's code is the one fenced Python block that ends it; for judging, a lone block anywhere counts, else a bare answer
that parses and defines something. Nothing here runs code.
"""

import ast
import re
import warnings

# A fence of three or more backticks on its own line, its language, and the same fence closing it.
FENCE = re.compile(
    r"^(?P<fence>`{3,})[ \t]*(?P<language>[\w+-]*)[ \t]*\n(?P<code>.*?)^(?P=fence)[ \t]*$", re.DOTALL | re.MULTILINE
)
PYTHON = ("python", "py", "python3", "")
MAX_SOURCE = 65_536  # characters; longer answers are not parsed


def extract(answer: str) -> str | None:
    """The code to judge: the only fenced Python block, else a bare answer that is Python with a definition; or None.

    Bare code is what a model writes before it has learnt to chat; a definition is asked for because "no" parses too.
    """
    blocks = [match for match in FENCE.finditer(answer) if match["language"].lower() in PYTHON]
    if len(blocks) == 1:
        return blocks[0]["code"]
    module = tree(answer) if not blocks and "```" not in answer else None
    defines = module is not None and any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in module.body)
    return answer if defines else None


def formatted(answer: str) -> bool:
    """Whether the answer holds exactly one fenced block, Python's, and ends with it."""
    blocks = list(FENCE.finditer(answer))
    if len(blocks) != 1 or blocks[0]["language"].lower() not in ("python", "py", "python3"):
        return False
    block = blocks[0]
    outside = answer[: block.start()] + answer[block.end() :]
    return "```" not in outside and not answer[block.end() :].strip()


def tree(source: str) -> ast.Module | None:
    """The syntax tree, or None where the source does not parse (or is too long, or too deep for the parser)."""
    if len(source) > MAX_SOURCE:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of the candidate's strings, no concern of ours
        try:
            return ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
