"""Markdown to clean HTML: text of a model, a person or an imported file, made safe for the page.

    render(markdown) -> HTML of the tags in TAGS, with pygments' classes on code and no active content
    style_sheet()    -> the colors of those classes, light and dark: pipeline/serve/page/code.css

Three layers of defense, each enough for most attacks. The parser (markdown-it: CommonMark, tables, strikethrough)
supports neither raw HTML nor images, and makes only http and https links. pygments colors code with classes, never with
styles. Last, nh3 (ammonia) keeps only the tags, attributes and classes of an allow-list: no id, no name, no style, no
event handler, no form, and nothing that loads by itself.

Not promised: the same HTML from one version of these packages to the next; colors on a busy machine (`COLOUR_SECONDS`);
that a link's target is harmless.
"""

import time
from collections.abc import Sequence
from functools import cache
from html import escape

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

MOST_CHARACTERS = 50_000  # the parser's time grows with the square of the unclosed brackets: 4 s for so many
MOST_COLOURED = 20_000  # characters of a fence; one match of a lexer on so many takes under a second
COLOUR_SECONDS = 0.5  # for all fences together: lexers have inputs that take minutes (a C# method of spaces, 150 s)
LIGHT, DARK = "xcode", "one-dark"  # each of their colors has a contrast of 4.5 to the page's background of code
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
# the name of a fence -> pygments' lexer. ini and console are left out: one match of theirs can take half a minute
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

    Links carry rel="noopener noreferrer nofollow". A fence is `<pre><code class="language-...">`, colored where its
    language is one of LANGUAGES and time allows. Lone surrogates become question marks. Takes at most a few seconds,
    whatever the text (a test has the worst known cases).
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
    """Whether an address becomes a link: only an absolute one of the web does."""
    return url.lower().startswith(("http://", "https://"))


def _fence(_renderer: object, tokens: Sequence[Token], index: int, _options: object, env: dict[str, float]) -> str:
    """One fence as HTML, colored where it can be."""
    token = tokens[index]
    words = token.info.split()
    language = LANGUAGES.get(words[0].lower()) if words else None
    if language is None or len(token.content) > MOST_COLOURED:
        return f"<pre><code>{escape(token.content)}</code></pre>\n"
    body = _color(token.content, language, env["until"])
    return f'<pre><code class="language-{language}">{body}</code></pre>\n'


def _color(code: str, language: str, until: float) -> str:
    """The code as spans with pygments' classes; the plain code when the time `until` has passed."""
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
        "\n".join(
            ["/* pygments' colours; written by pipeline.serve.markdown.style_sheet, which a test holds */", *lines]
        )
        + "\n"
    )
