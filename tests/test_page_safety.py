"""Nothing shown can act, nothing is sent to another host, and everybody can use the page, by eye, keyboard or phone."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.text.tokenizer import Tokenizer
from tests.accessibility import FINDINGS
from tests.browser import answered, chunk, opened, recorded, say, until
from tests.server import Running, save_models, serving
from tests.xss import CORPUS

pytestmark = [pytest.mark.browser, pytest.mark.full]
KEY = "a-key-of-more-than-sixteen-characters"
TABS = ("Chat", "Compare", "Tokens", "Fill in", "Template")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Tokenizer) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("safety")
    with serving(
        save_models(folder, byte_tokenizer)[:2], log=folder / "log"
    ) as running:  # no judge: these texts are too long for it
        yield running


def inert(page: Any, place: str) -> None:
    """Assert that nothing under `place` could act: no active element, no handler, no style, and only web links."""
    found = page.evaluate(
        """(place) => [...document.querySelectorAll(`${place}, ${place} *`)].flatMap((one) => {
        const bad = ['SCRIPT', 'IFRAME', 'OBJECT', 'EMBED', 'IMG', 'SVG', 'STYLE', 'LINK', 'META',
            'BASE', 'FORM', 'VIDEO', 'AUDIO', 'INPUT'];
        const marks = [...one.attributes].filter(({ name, value }) =>
            name.startsWith('on') || (name === 'style' && !/^--[a-z]+: [0-9.]+%;$/.test(value)) || name === 'srcdoc'
            || (name === 'href' && !/^https?:/.test(value)));
        return [...(bad.includes(one.tagName.toUpperCase()) ? [one.outerHTML] : []),
            ...marks.map(({ name }) => `${name} of ${one.outerHTML}`)];
    })""",
        place,
    )
    assert found == []


def shown(page: Any) -> None:
    """Wait until every text is rendered, hover over the last one, and check that nothing could act."""
    until(page, "!document.querySelector('.log article .text.plain:not(:empty)')")
    page.locator(".log article").last.hover()
    inert(page, ".log .text")


@pytest.mark.parametrize(
    ("markup", "directive"),
    [("<b style='color:red'>x</b>", "style-src"), ("<img src='data:,' onerror=pwned()>", "script-src")],
)
def test_the_watch_of_these_tests_sees_a_violation(browser: Any, server: Running, markup: str, directive: str) -> None:
    with pytest.raises(AssertionError, match=directive):
        smuggle(browser, server, markup)


def smuggle(browser: Any, server: Running, markup: str) -> None:
    with opened(browser, server.url, quiet=False) as page:
        page.evaluate("(markup) => document.body.insertAdjacentHTML('beforeend', markup)", markup)
        until(page, "violations.length > 0")


def test_what_a_model_says_is_inert(page: Any) -> None:
    for number in range(0, len(CORPUS), 25):
        answered(page, "\n\n".join(CORPUS[number : number + 25]))
        say(page, "Go on")
    shown(page)
    assert page.locator("article.assistant").count() == -(-len(CORPUS) // 25)


def test_each_attack_alone_is_inert_while_it_streams_and_afterwards(page: Any) -> None:
    for attack in CORPUS:
        answered(page, attack)
        page.get_by_role("button", name="New", exact=True).click()
        say(page, "Go on")
        inert(page, ".log .text")
    shown(page)


def test_pasted_markdown_is_inert(page: Any) -> None:
    answered(page, "No.")
    for number in range(0, len(CORPUS), 25):
        page.get_by_role("button", name="New", exact=True).click()
        say(page, "\n\n".join(CORPUS[number : number + 25]))
        shown(page)


def test_an_imported_file_is_inert(page: Any, tmp_path: Path) -> None:
    """In each of its texts: titles, contents, names and arguments of calls, results, ids, metas, tools."""
    for number in range(0, len(CORPUS), 10):
        texts = CORPUS[number : number + 10]
        joined = "\n".join(texts)
        call = {"id": joined, "type": "function", "function": {"name": joined, "arguments": joined}}
        messages = [
            {"role": "user", "content": joined},
            {"role": "assistant", "content": joined, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": joined, "name": joined, "content": joined},
            {"role": "assistant", "content": joined, "tool_calls": [call]},
        ]
        meta = {
            "model": joined,
            "finish": joined,
            "error": joined,
            "seed": joined,
            "html": joined,
            "__proto__": {"polluted": True},
        }
        turns = [
            {
                "id": f"{n} {joined}",
                "parent": f"{n - 1} {joined}" if n else "root",
                "message": message,
                "meta": meta,
                "onclick": "pwned()",
            }
            for n, message in enumerate(messages)
        ]
        tools = [{"type": "function", "function": {"name": joined}}]
        file = tmp_path / "attack.json"
        file.write_text(
            json.dumps(
                {"title": joined, "messages": messages, "turns": turns, "tools": tools, "__proto__": {"polluted": True}}
            )
        )
        page.locator("#import-file").set_input_files(file)
        page.get_by_text("Imported.").wait_for()
        page.locator("article").nth(3).wait_for()
        inert(page, ".log .text")
        inert(page, ".log .calls .card h3")
        inert(page, ".conversations")
        inert(page, "#tools-check")
        page.locator("#status").evaluate("status => status.textContent = ''")
    assert page.evaluate("({}).polluted === undefined && document.querySelectorAll('article').length") == 4


def test_names_and_arguments_of_calls_are_inert(page: Any) -> None:
    for number in range(0, len(CORPUS), 25):
        calls = [
            {"index": n, "id": attack, "type": "function", "function": {"name": attack, "arguments": attack}}
            for n, attack in enumerate(CORPUS[number : number + 25])
        ]
        recorded(
            page, chunk({"role": "assistant", "content": ""}), chunk({"tool_calls": calls}), chunk({}, "tool_calls")
        )
        page.get_by_role("button", name="New", exact=True).click()
        say(page, "Call")
        assert page.locator(".calls .card h3 code").all_text_contents() == [call["function"]["name"] for call in calls]
        inert(page, ".log .calls h3")
        inert(page, ".log .calls pre")


def test_tokens_and_errors_of_the_server_are_inert(browser: Any, server: Running) -> None:
    with opened(browser, server.url, quiet=False) as page:
        entries = [
            {"id": n, "token": attack, "logprob": -1.0, "top_logprobs": [{"id": n, "token": attack, "logprob": -1.0}]}
            for n, attack in enumerate(CORPUS)
        ]
        told = chunk({"content": "x"})
        told["choices"][0]["logprobs"] = {"content": entries}
        recorded(page, chunk({"role": "assistant", "content": ""}), told, chunk({}, "stop"))
        say(page, "Go on")
        page.get_by_role("button", name="Tokens").click()
        for place in range(len(CORPUS)):
            page.get_by_role("listbox").press("ArrowRight")
            assert page.locator(".token[aria-selected=true]").get_attribute("data-place") == str(place)
        inert(page, "#tokens .detail")
        page.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(status=400, json={"error": {"message": "\n".join(CORPUS)}}),
        )
        page.get_by_role("tab", name="Chat").click()
        page.get_by_label("Message", exact=True).fill("again")
        page.keyboard.press("Enter")
        page.get_by_role("alert").get_by_text("<svg onload=pwned()>").wait_for()
        inert(page, "#alert")


def test_without_a_file_for_feedback_a_choice_is_said_not_to_be_kept(page: Any) -> None:
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.url) if request.url.endswith("/preferences") else None)
    page.get_by_role("tab", name="Compare").click()
    page.get_by_label("Prompt for both").fill("Hello")
    page.keyboard.press("Control+Enter")
    page.get_by_role("button", name="B is better").click()
    assert "Not stored: start the server with --feedback" in page.locator(".outcome").inner_text() and sent == []


# everybody


def filled(page: Any) -> None:
    """Put something in every panel."""
    answered(
        page,
        "# A\n\nSome `code`, a [link](http://a.b), and\n\n```python\ndef f(x):  # why\n    return 'x' +"
        " 1\n```\n\n|a|b|\n|-|-|\n|1|2|\n\n> said",
    )
    say(page, "Hello")
    page.unroute_all()
    page.get_by_role("button", name="Regenerate").click()
    page.locator(".log[aria-busy=false] .branches").wait_for()
    page.get_by_role("button", name="Previous branch").click()
    page.get_by_role("button", name="Next branch").click()
    page.get_by_role("button", name="Tokens").click()
    page.get_by_role("listbox").press("ArrowRight")
    page.get_by_role("tab", name="Compare").click()
    page.get_by_label("Prompt for both").fill("Hello")
    page.keyboard.press("Control+Enter")
    page.get_by_role("button", name="Tie").wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 375])
def test_every_panel_is_labeled_readable_and_fits(browser: Any, server: Running, scheme: str, width: int) -> None:
    with opened(browser, server.url, color_scheme=scheme, viewport={"width": width, "height": 800}) as page:
        if width < 1200:
            page.get_by_role("button", name="Settings").click()
        page.get_by_role("button", name="Insert an example").click()
        assert page.evaluate(FINDINGS) == []
        page.get_by_role("button", name="Settings").click()
        filled(page)
        for tab in TABS:
            page.get_by_role("tab", name=tab).click()
            if tab == "Template":
                page.locator(".piece").first.wait_for()
            assert (tab, page.evaluate(FINDINGS)) == (tab, [])
            assert (
                page.evaluate("[document.documentElement.scrollWidth, document.getElementById('panels').scrollWidth]")[
                    0
                ]
                <= width
            ), tab


@pytest.mark.parametrize(
    ("markup", "finding"),
    [
        ("<button></button>", "no name: <button>"),
        ("<input>", "no name: <input>"),
        ("<b id=chat>x</b>", "id twice: chat"),
        ("<p class=faint>faint words</p>", "contrast 1.6"),
        ("<div aria-labelledby=nothing>x</div>", "points nowhere"),
    ],
)
def test_the_judge_of_these_tests_finds_what_is_wrong(browser: Any, server: Running, markup: str, finding: str) -> None:
    with opened(browser, server.url) as page:
        found = page.evaluate(
            """(markup) => {
            document.querySelector('.log').insertAdjacentHTML('beforeend', markup);
            const faint = document.querySelector('.faint');
            if (faint) faint.style.setProperty('color', '#ccc');
            return FINDINGS;
        }""".replace("FINDINGS", FINDINGS),
            markup,
        )  # in one turn of the event loop, since the page redraws its log
        assert any(finding in one for one in found), found


def test_the_theme_follows_the_system_and_the_toggle_overrules_it(browser: Any, server: Running) -> None:
    with opened(browser, server.url, color_scheme="dark") as page:
        ground = "getComputedStyle(document.body).backgroundColor"
        assert page.evaluate(ground) == "rgb(15, 18, 22)"
        page.emulate_media(color_scheme="light")
        until(page, f"{ground} === 'rgb(255, 255, 255)'")
        page.get_by_role("button", name="Switch between light and dark").click()
        assert page.evaluate(ground) == "rgb(15, 18, 22)"
        page.reload()
        assert page.evaluate(ground) == "rgb(15, 18, 22)"


def test_the_keyboard_alone_talks_branches_and_switches_panels(page: Any) -> None:
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    reached = []
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate("document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent")
        )
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid" or reached[-1] is None or page.evaluate("document.activeElement === document.body"), (
            reached[-1]
        )
        if reached[-1] == "Message":
            break
    assert {"Chat", "Settings", "New", "Message"} <= {str(name) for name in reached}
    page.keyboard.type("Hello")
    page.keyboard.press("Enter")
    page.locator("article.assistant .actions").wait_for()
    for name in ("Regenerate", "Previous branch", "Next branch"):
        page.locator(".log[aria-busy=false]").wait_for()
        button = page.get_by_role("button", name=name)
        button.wait_for()
        button.focus()
        page.keyboard.press("Enter")
    assert "2 / 2" in page.locator(".branches").inner_text()
    page.get_by_role("tab", name="Chat").focus()
    for tab in (*TABS[1:], TABS[0]):
        page.keyboard.press("ArrowRight")
        assert page.get_by_role("tab", selected=True).inner_text() == tab
        assert page.locator("[role=tabpanel]:not([hidden])").count() == 1
    page.keyboard.press("End")
    assert page.get_by_role("tab", selected=True).inner_text() == "Template"


def test_a_server_with_a_key_asks_for_it_and_the_page_forgets_it_with_the_tab(
    browser: Any, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    models = save_models(tmp_path, byte_tokenizer)[:1]
    with serving(models, log=tmp_path / "log", environment={"STAGECOACH_API_KEYS": KEY}) as running:
        context = browser.new_context()
        page = context.new_page()
        page.goto(running.url)
        page.get_by_role("alert").get_by_text("This server requires an API key").wait_for()
        if page.locator("#settings").is_hidden():
            page.get_by_role("button", name="Settings").click()
        page.get_by_label("API key").fill(KEY)
        page.get_by_label("API key").press("Tab")
        page.get_by_text("API key accepted.").wait_for()
        page.get_by_label("Tokens at most").fill("4")
        say(page, "Hello")
        assert re.search("nano · seed 0 · [1-4] tokens", page.locator("article.assistant").inner_text())
        assert page.evaluate("JSON.stringify({...localStorage})").find(KEY) < 0
        other = context.new_page()
        other.goto(running.url)
        other.get_by_role("alert").get_by_text("This server requires an API key").wait_for()
        context.close()
