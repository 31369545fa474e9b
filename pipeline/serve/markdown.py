"""Markdown to clean HTML: what a model, a person or an imported file wrote becomes something a page may show.

    render(markdown) -> HTML of the tags in TAGS, with pygments' classes on code and nothing else that could act
    style_sheet()    -> the colours of those classes, light and dark: pipeline/serve/page/code.css

Three walls, each enough for most attacks. The parser (markdown-it: CommonMark, tables, strikethrough) knows neither raw
HTML nor images, and makes links of http and https alone. Code is coloured by pygments with classes, never with styles.
Last, nh3 (ammonia) keeps an allow-list of tags, attributes and classes, whatever came before: there is no id, no name,
no style, no event, no form, and nothing that loads by itself.

Not promised: the same HTML from one version of these packages to the next; colours on a busy machine
(`COLOUR_SECONDS`); that a link's target is harmless.
"""

import time
from collections.abc import Sequence
from functools import cache
from html import escape
from typing import Any

import nh3
from markdown_it import MarkdownIt
from markdown_it.token import Token
from pygments import format as format_tokens
from pygments.formatters import HtmlFormatter
from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.styles import get_style_by_name
from pygments.token import STANDARD_TYPES

from pipeline.run.errors import InputError

MOST_CHARACTERS = 50_000  # the parser's time grows with the square of brackets that nothing closes: 4 s here
MOST_COLOURED = 20_000  # characters of a fence; one match of a lexer on so many takes under a second
COLOUR_SECONDS = 0.5  # for all fences together: lexers have inputs that take minutes (a C# method of spaces, 150 s)
LIGHT, DARK = "xcode", "one-dark"  # each of their colours has a contrast of 4.5 to the page's ground of code
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
# What a fence may be called -> pygments' lexer. ini and console are left out: one match of theirs can take half a
# minute.
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


def render(markdown: str) -> str:
    """Clean HTML of a Markdown text. Raises InputError for more than MOST_CHARACTERS.

    Links carry rel="noopener noreferrer nofollow"; a fence is `<pre><code class="language-...">`, coloured where its
    language is one of LANGUAGES and time allows. Halves of characters (lone surrogates) become question marks. Never
    more than a few seconds, whatever the text (a test holds the known worst).
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
    """Only an absolute address of the web becomes a link."""
    return url.lower().startswith(("http://", "https://"))


def _fence(_renderer: Any, tokens: Sequence[Token], place: int, _options: Any, env: dict[str, float]) -> str:
    """One fence as HTML, coloured where it can be."""
    token = tokens[place]
    words = token.info.split()
    language = LANGUAGES.get(words[0].lower()) if words else None
    if language is None or len(token.content) > MOST_COLOURED:
        return f"<pre><code>{escape(token.content)}</code></pre>\n"
    body = _coloured(token.content, language, env["until"])
    return f'<pre><code class="language-{language}">{body}</code></pre>\n'


def _coloured(code: str, language: str, until: float) -> str:
    """The code as spans with pygments' classes; the plain code when its time is over."""
    pieces: list[tuple[Any, str]] = []
    for kind, text in _lexer(language).get_tokens(code):
        if time.monotonic() > until:
            return escape(code)
        pieces.append((kind, text))
    return format_tokens(pieces, HtmlFormatter(nowrap=True))


@cache
def _lexer(language: str) -> Lexer:
    return get_lexer_by_name(language, stripnl=False, ensurenl=False)


def style_sheet() -> str:
    """CSS of pygments' classes in LIGHT and DARK, by `light-dark()`: the page's color-scheme chooses."""
    rules: dict[str, list[str]] = {}
    for kind, name in STANDARD_TYPES.items():
        light, dark = (get_style_by_name(style).style_for_token(kind) for style in (LIGHT, DARK))
        rule = ""
        if name and (light["color"] or dark["color"]):
            rule += "color: light-dark({}, {});".format(
                *(f"#{s['color']}" if s["color"] else "currentcolor" for s in (light, dark))
            )
        if name and light["bold"]:
            rule += " font-weight: 600;"
        if name and light["italic"]:
            rule += " font-style: italic;"
        if rule:
            rules.setdefault(rule.strip(), []).append(f"code .{name}")
    lines = [f"{', '.join(names)} {{ {rule} }}" for rule, names in rules.items()]
    return (
        "\n".join(
            ["/* pygments' colours; written by pipeline.serve.markdown.style_sheet, which a test holds */", *lines]
        )
        + "\n"
    )
