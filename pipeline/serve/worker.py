"""The server's worker process: compiles schemas and renders Markdown, each job in a child process with hard limits.

    python -m pipeline.serve.worker DESCRIPTOR MODEL ...        started by workshop.py

DESCRIPTOR is a socket. Each byte on it is the index of a model and comes with the socket of a job. The process forks
for each job: the child reads the job (JSON up to the end of the stream), runs it and writes its answer (JSON). A child
gets SECONDS of CPU time, WALL_SECONDS of wall time, and BYTES of memory more than it started with. The kernel kills a
child that exceeds a limit, and `workshop.py` sees the end of the stream. So nothing outlives its job, and this process,
which only forks, stays small.

    {"kind": "tools" | "schema", ...}   -> {"text": grammar, "free": bool, "plan": ids} | {"refused": [code, message]}
    {"kind": "render", "markdown": ...} -> {"html": ...} | {"refused": ...}             any: {"failed": traceback}

A schema is also refused if it would cost the server too much later. The server compiles the grammar again, which takes
as long as it did here, and queries it for each token (`rehearse`). Only this process searches for the plan, a
grammar's shortest output.

Markdown may come from a model, a person or an imported file, and is made safe for the page:

    render(markdown) -> HTML with only the tags in TAGS, pygments' classes on code, and no active content
    style_sheet()    -> the colors of those classes, light and dark: pipeline/serve/page/code.css

There are three layers of defense, each of which stops most attacks. The parser (markdown-it: CommonMark, tables,
strikethrough) supports neither raw HTML nor images, and makes only http and https links. pygments colors code with
classes, never with styles. Finally, nh3 (ammonia) keeps only allow-listed tags, attributes and classes: no id, no name,
no style, no event handler, no form, and nothing that loads automatically.

Not guaranteed: a sandbox (a job is data and runs no code); identical HTML across versions of these packages; colors on
a busy machine (`COLOUR_SECONDS`); harmless link targets.
"""

import gc
import json
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import cache, partial
from html import escape
from pathlib import Path

import nh3
import numpy as np
import psutil
from llguidance import LLMatcher
from markdown_it import MarkdownIt
from markdown_it.token import Token
from pygments import format as format_tokens
from pygments.formatters import HtmlFormatter
from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.styles import get_style_by_name
from pygments.token import STANDARD_TYPES

from pipeline.generation import grammars
from pipeline.generation.grammars import Closer, Compiler, LexerState, bits
from pipeline.generation.schemas import SchemaError
from pipeline.run.errors import InputError
from pipeline.run.processes import die_with_parent
from pipeline.run.types import JsonObject
from pipeline.text.tokenizer import Tokenizer

SECONDS = {"tools": 2.0, "schema": 2.0, "render": 3.0}  # CPU time
WALL_SECONDS = 15.0
BYTES = 256 * 2**20
NICENESS = 10  # the engines have priority
BUILD_SECONDS = 0.25  # CPU time that compiling may take in the server
HELD_BYTES = 32 * 2**20  # memory that a compiled grammar may take in the server
TOKENS, TOKEN_SECONDS = 32, 0.01  # tokens in a rehearsal, and the mean time allowed for each
MOST_CHARACTERS = 50_000  # parsing is quadratic in the number of unclosed brackets: 4 s for this many
MOST_COLOURED = 20_000  # characters in a code fence; a single lexer match on this many takes under a second
COLOUR_SECONDS = 0.5  # for all fences together: some inputs take a lexer minutes (a C# method of spaces, 150 s)
LIGHT, DARK = "xcode", "one-dark"  # all colors have a contrast of at least 4.5 against the page's code background
TAGS = {
    "a",
    "blockquote",
    "br",
    "code",
    "em",
    "h1",
    "h2",
    "h3",
    "h4",
    "h5",
    "h6",
    "hr",
    "li",
    "ol",
    "p",
    "pre",
    "s",
    "span",
    "strong",
    "table",
    "tbody",
    "td",
    "th",
    "thead",
    "tr",
    "ul",
}
# fence name -> pygments lexer. ini and console are left out: a single match can take half a minute
LANGUAGES = {
    "bash": "bash",
    "c": "c",
    "c++": "cpp",
    "cpp": "cpp",
    "css": "css",
    "diff": "diff",
    "go": "go",
    "html": "html",
    "java": "java",
    "javascript": "javascript",
    "js": "javascript",
    "json": "json",
    "lua": "lua",
    "make": "make",
    "makefile": "make",
    "py": "python",
    "pycon": "pycon",
    "python": "python",
    "python3": "python",
    "rs": "rust",
    "ruby": "ruby",
    "rust": "rust",
    "sh": "bash",
    "shell": "bash",
    "sql": "sql",
    "toml": "toml",
    "ts": "typescript",
    "typescript": "typescript",
    "yaml": "yaml",
    "yml": "yaml",
}


def main() -> None:
    """Fork for each job until the server closes the socket."""
    control, folders = socket.socket(fileno=int(sys.argv[1])), [Path(name) for name in sys.argv[2:]]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server stops this process
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads do not survive a fork
    compilers: dict[int, Compiler] = {}
    render("```python\n1\n```")
    gc.freeze()
    while True:
        number, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not number:
            return
        model = number[0]
        if model < len(folders) and model not in compilers:
            compilers[model] = Compiler(Tokenizer.load(folders[model]))
        if os.fork() == 0:
            control.close()
            _serve_job(socket.socket(fileno=descriptors[0]), partial(compilers.__getitem__, model), os.getppid())
        os.close(descriptors[0])


def _serve_job(connection: socket.socket, compiler: Callable[[], Compiler], parent: int) -> None:
    """Read a job, run it, write its answer, and exit the child process."""
    code = 1
    try:
        _set_limits(parent)
        with connection.makefile("rb") as stream:
            job = json.load(stream)
        signal.setitimer(signal.ITIMER_PROF, SECONDS[job["kind"]])
        answer = json.dumps(run_job(job, compiler)).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.sendall(answer)
        code = 0
    finally:
        os._exit(code)


def _set_limits(parent: int) -> None:
    """Have the kernel kill this process if it exceeds its limits."""
    die_with_parent(parent)
    os.nice(NICENESS)
    most = psutil.Process().memory_info().vms + BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)


def run_job(job: JsonObject, compiler: Callable[[], Compiler]) -> JsonObject:
    """Run a job and return its answer; `compiler()` returns the compiler for the job's model. Raises MemoryError."""
    try:
        if job["kind"] == "render":
            return {"html": render(job["markdown"])}
        if job["kind"] == "tools":
            tokenizer = compiler().tokenizer
            written = grammars.tool_calls(tokenizer, job["tools"], choice=job["choice"], parallel=job["parallel"])
        else:
            written = grammars.json_schema(job["schema"])
        return {"text": written.text, "free": written.free, "plan": compiled(compiler(), written.text)}
    except SchemaError as error:
        return {"refused": [error.code, str(error)]}
    except InputError as error:
        return {"refused": ["invalid_value", str(error)]}
    except MemoryError:
        raise
    except Exception:
        return {"failed": traceback.format_exc()}


def compiled(compiler: Compiler, text: str) -> tuple[int, ...]:
    """The shortest output of a grammar. Raises SchemaError if the grammar would cost the server too much."""
    memory, began = psutil.Process().memory_info().rss, time.process_time()
    matcher = compiler.matcher(text)
    seconds = time.process_time() - began
    plan = compiler.shortest(matcher)
    token_seconds = rehearse(compiler.closer, matcher, plan)
    if seconds > BUILD_SECONDS or token_seconds > TOKEN_SECONDS:
        raise SchemaError("schema_too_slow", "the schema takes too long to compile or to follow; simplify it")
    if psutil.Process().memory_info().rss - memory > HELD_BYTES:
        raise SchemaError("schema_too_large", "the schema takes too much memory to compile; simplify it")
    return plan


def rehearse(closer: Closer, matcher: LLMatcher, plan: tuple[int, ...]) -> float:
    """Generate an answer from random allowed tokens; returns the mean CPU time per token, in seconds."""
    state, lexer, rest, rng = matcher.deep_copy(), LexerState(), list(plan), np.random.default_rng(0)
    began = time.process_time()
    for num_generated in range(TOKENS):
        allowed = bits(state.compute_bitmask()).copy()
        allowed[closer.ends] = False
        choices = np.flatnonzero(allowed)
        if not len(choices) or state.is_error():
            break
        token = int(rng.choice(choices))
        next_rest = closer.follow(state, lexer, rest, token, TOKENS * 8 - num_generated)
        if next_rest is None:
            if not rest:
                break
            token, next_rest = rest[0], rest[1:]
        state.consume_token(token)
        rest, lexer = next_rest, lexer.after(closer.step(token))
    return (time.process_time() - began) / TOKENS


def render(markdown: str) -> str:
    """Render Markdown as sanitized HTML. Raises InputError for more than MOST_CHARACTERS characters.

    Links get rel="noopener noreferrer nofollow". A fence becomes `<pre><code class="language-...">`, colored if its
    language is one of LANGUAGES and time allows. Lone surrogates become question marks. Takes at most a few seconds for
    any text (a test covers the worst known cases).
    """
    if len(markdown) > MOST_CHARACTERS:
        raise InputError(f"expected at most {MOST_CHARACTERS} characters of Markdown, found {len(markdown)}")
    html = _parser().render(markdown.encode("utf-8", "replace").decode(), {"until": time.monotonic() + COLOUR_SECONDS})
    return _cleaner().clean(html)


@cache
def _parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"]).disable("image")
    parser.validateLink = _is_web  # type: ignore[method-assign]
    parser.add_render_rule("fence", _fence)
    return parser


@cache
def _cleaner() -> nh3.Cleaner:
    return nh3.Cleaner(
        tags=TAGS,
        clean_content_tags={"script", "style"},
        attributes={"*": set(), "a": {"href"}, "ol": {"start"}},
        allowed_classes={
            "span": {name for name in STANDARD_TYPES.values() if name},
            "code": {f"language-{lexer}" for lexer in LANGUAGES.values()},
        },
        link_rel="noopener noreferrer nofollow",
        url_schemes={"http", "https"},
        url_relative="deny",
    )


def _is_web(url: str) -> bool:
    """Whether an address becomes a link: only absolute http and https URLs do."""
    return url.lower().startswith(("http://", "https://"))


def _fence(_renderer: object, tokens: Sequence[Token], index: int, _options: object, env: dict[str, float]) -> str:
    """One fence as HTML, colored if possible."""
    token = tokens[index]
    words = token.info.split()
    language = LANGUAGES.get(words[0].lower()) if words else None
    if language is None or len(token.content) > MOST_COLOURED:
        return f"<pre><code>{escape(token.content)}</code></pre>\n"
    body = _color(token.content, language, env["until"])
    return f'<pre><code class="language-{language}">{body}</code></pre>\n'


def _color(code: str, language: str, until: float) -> str:
    """The code as spans with pygments' classes, or plain code once the time `until` has passed."""
    pieces = []
    for kind, text in _lexer(language).get_tokens(code):
        if time.monotonic() > until:
            return escape(code)
        pieces.append((kind, text))
    return format_tokens(pieces, HtmlFormatter(nowrap=True))


@cache
def _lexer(language: str) -> Lexer:
    return get_lexer_by_name(language, stripnl=False, ensurenl=False)


def style_sheet() -> str:
    """CSS for pygments' classes in LIGHT and DARK; `light-dark()` follows the page's color-scheme."""
    rules: dict[str, list[str]] = {}
    for kind, name in STANDARD_TYPES.items():
        light, dark = (get_style_by_name(style).style_for_token(kind) for style in (LIGHT, DARK))
        rule = ""
        if name and (light["color"] or dark["color"]):
            rule += "color: light-dark({}, {});".format(
                *(f"#{style['color']}" if style["color"] else "currentcolor" for style in (light, dark))
            )
        if name and light["bold"]:
            rule += " font-weight: 600;"
        if name and light["italic"]:
            rule += " font-style: italic;"
        if rule:
            rules.setdefault(rule.strip(), []).append(f"code .{name}")
    lines = [f"{', '.join(names)} {{ {rule} }}" for rule, names in rules.items()]
    return (
        "\n".join(["/* pygments' colors, written by pipeline.serve.worker.style_sheet, checked by a test */", *lines])
        + "\n"
    )


if __name__ == "__main__":
    main()
