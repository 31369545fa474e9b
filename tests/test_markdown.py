"""What people and models write is shown but never executed: another parser holds the HTML to an allow-list."""

import re
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from pygments.styles import get_style_by_name
from pygments.token import STANDARD_TYPES

from pipeline.run.errors import InputError
from pipeline.serve import worker
from pipeline.serve.worker import LANGUAGES, MOST_CHARACTERS, MOST_COLOURED, TAGS, render, style_sheet
from tests.xss import CORPUS

PAGE = Path(worker.__file__).parent / "page"
REL = "noopener noreferrer nofollow"


class Read(HTMLParser):
    """Elements, their attributes and the text between them, as Python's own parser reads them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def fault(html: str) -> str | None:
    """The first thing in the HTML that is not on the list."""
    for tag, attributes in Read(html).elements:
        if tag not in TAGS:
            return f"<{tag}>"
        for name, value in attributes.items():
            allowed = {
                "a": {"href": re.compile(r"https?://.*", re.S), "rel": re.compile(REL)},
                "code": {"class": re.compile("(language-[a-z]+)?")},
                "span": {"class": re.compile("[a-z][a-z0-9]{0,2}")},
                "ol": {"start": re.compile("[0-9]+")},
            }.get(tag, {})
            if name not in allowed or not allowed[name].fullmatch(value or ""):
                return f"<{tag} {name}={value!r}>"
    return None


@pytest.mark.parametrize(
    ("html", "found"),
    [
        ("<img src=x>", "<img>"),
        ("<p onclick=x>", "<p onclick='x'>"),
        ("<a href='javascript:x'>", "<a href='javascript:x'>"),
        ("<p style='color:red'>", "<p style='color:red'>"),
        (f"<a href='http://x' rel='{REL}'><em>x</em></a>", None),
    ],
)
def test_the_judge_of_these_tests_tells_good_from_bad(html: str, found: str | None) -> None:
    assert fault(html) == found


def test_every_attack_comes_out_as_text_or_a_plain_link() -> None:
    assert len(CORPUS) >= 60 and len(set(CORPUS)) == len(CORPUS)
    assert {attack: found for attack in CORPUS if (found := fault(render(attack)))} == {}


def test_attacks_inside_other_markdown_stay_inert() -> None:
    frames = (
        "> {}",
        "- {}",
        "**{}**",
        "[{}](http://a.b)",
        "# {}",
        "|a|\n|-|\n|{}|",
        "```python\n{}\n```",
        "`{}`",
        "~~{}~~",
        "text\n{}",
    )
    wrapped = [frame.format(attack) for frame in frames for attack in CORPUS]
    assert {text: found for text in wrapped if (found := fault(render(text)))} == {}


def test_the_last_wall_holds_without_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parser that lets everything through: raw HTML, any link."""
    open_parser = worker.MarkdownIt("commonmark", {"html": True})
    open_parser.validateLink = lambda url: True  # type: ignore[method-assign]
    monkeypatch.setattr(worker, "_parser", lambda: open_parser)
    assert "<img" in open_parser.render("<img src=x onerror=pwned()>")
    assert {attack: found for attack in CORPUS if (found := fault(render(attack)))} == {}


def test_no_text_of_an_attack_is_lost() -> None:
    assert Read(render("a <script>pwned()</script> <b>c</b>")).text.strip() == "a <script>pwned()</script> <b>c</b>"


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("# A *b*", "<h1>A <em>b</em></h1>"),
        ("a\n\nb", "<p>a</p>\n<p>b</p>"),
        ("- a\n- b", "<ul>\n<li>a</li>\n<li>b</li>\n</ul>"),
        ("3. a", '<ol start="3">\n<li>a</li>\n</ol>'),
        ("~~a~~ **b** `<c>`", "<p><s>a</s> <strong>b</strong> <code>&lt;c&gt;</code></p>"),
        ("[a](https://b.c 'title')", f'<p><a href="https://b.c" rel="{REL}">a</a></p>'),
        ("[a](/b) [c](#d) [e](ftp://f)", "<p>[a](/b) [c](#d) [e](ftp://f)</p>"),
        ("![a](http://b.c/d.png)", f'<p>!<a href="http://b.c/d.png" rel="{REL}">a</a></p>'),
        (
            "|a|\n|-|\n|b|",
            "<table>\n<thead>\n<tr>\n<th>a</th>\n</tr>\n</thead>\n<tbody>\n<tr>\n<td>b</td>\n</tr>\n</tbody>\n</table>",
        ),
        ("```\na < b\n```", "<pre><code>a &lt; b\n</code></pre>"),
        ("```cobol\na\n```", "<pre><code>a\n</code></pre>"),
        (
            "```py\nx = 1",
            (
                '<pre><code class="language-python"><span class="n">x</span> <span class="o">=</span> <span'
                ' class="mi">1</span>\n</code></pre>'
            ),
        ),
        ("", ""),
    ],
)
def test_markdown_becomes_this_html(text: str, html: str) -> None:
    assert render(text).strip() == html


@pytest.mark.parametrize("name", LANGUAGES)
def test_a_fence_of_each_language_keeps_its_text(name: str) -> None:
    code = "  \n\tdef f(x): # <b>&amp;\n    return \"x\" + 'y'\n\n"
    read = Read(render(f"```{name} more words\n{code}```\n"))
    assert read.text == code + "\n"
    assert ("code", {"class": f"language-{LANGUAGES[name]}"}) in read.elements


def test_a_long_fence_is_plain_and_too_long_a_text_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "COLOUR_SECONDS", 60.0)
    line = "x = 1\n"
    colored, plain = (render(f"```python\n{line * num}```") for num in (MOST_COLOURED // 6, MOST_COLOURED // 6 + 1))
    assert "<span" in colored and "<span" not in plain and plain.count("x = 1") == MOST_COLOURED // 6 + 1
    assert render("a" * MOST_CHARACTERS)
    with pytest.raises(
        InputError, match=f"at most {MOST_CHARACTERS} characters of Markdown, found {MOST_CHARACTERS + 1}"
    ):
        render("a" * (MOST_CHARACTERS + 1))


def test_fences_after_the_time_is_over_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "COLOUR_SECONDS", -1.0)
    assert render("```python\nx = 1\n```") == '<pre><code class="language-python">x = 1\n</code></pre>\n'


NASTY = {
    "brackets": "[",
    "closed links": "[a](",
    "images": "![[",
    "references": "[a][b",
    "stars": "*_",
    "stars in words": "_a*",
    "quotes": ">",
    "lists": "- ",
    "numbers": "1) ",
    "ticks": "a`",
    "angles": "<a ",
    "entities": "&#x",
    "tables": "a|b\n-|-\n",
    "definitions": "[a]: b 'c\n",
    "rows of brackets": "[" * 100 + "\n",
    "deep items": "* > " * 10 + "a\n",
    "lines": "a\n",
    "strikes": "~~a ",
    "nulls": "\0",
    "rules": "a\n-\n",
    "titles": "[a](b 'c",
    "tabs": "\t",
    "escapes": "\\",
    "comments": "<!--",
    "surrogates": "\ud800",
}


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("piece", NASTY.values(), ids=NASTY)
def test_nasty_markdown_ends(piece: str) -> None:
    began = time.process_time()
    assert fault(render((piece * MOST_CHARACTERS)[:MOST_CHARACTERS])) is None
    assert time.process_time() - began < 15, "2 to 4 s were measured for the worst"


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("language", sorted(set(LANGUAGES.values())))
def test_nasty_code_ends(language: str) -> None:
    """One match of a lexer cannot be interrupted; these inputs took long in lexers that were left out."""
    for piece in ("a::", "A", "::", "=", "a b\n", "a\n ", "/*\n", '\\"', "{", "a.", "]]", "<<A\n", "<?", "(", "a,"):
        began = time.process_time()
        assert fault(render(f"```{language}\n{(piece * MOST_COLOURED)[: MOST_COLOURED - 1]}\n```")) is None
        assert time.process_time() - began < 8, (language, piece)


def test_the_style_sheet_is_what_pygments_gives() -> None:
    assert (PAGE / "code.css").read_text(encoding="utf-8") == style_sheet()


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb, WCAG 2.1."""
    parts = [int(colour.lstrip("#")[n : n + 2], 16) / 255 for n in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colors, WCAG 2.1: black on white has 21."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_every_colour_of_code_is_readable_on_its_ground() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21) and contrast("#777777", "#ffffff") == pytest.approx(
        4.48, abs=0.01
    )
    grounds = re.search(r"--code: light-dark\((#\w{6}), (#\w{6})\)", (PAGE / "page.css").read_text(encoding="utf-8"))
    assert grounds, "page.css names the ground of code"
    for style, ground in zip((worker.LIGHT, worker.DARK), grounds.groups(), strict=True):
        colours = {get_style_by_name(style).style_for_token(kind)["color"] for kind in STANDARD_TYPES} - {None, ""}
        assert len(colours) > 5
        assert {colour: found for colour in colours if (found := contrast(colour, ground)) < 4.5} == {}
