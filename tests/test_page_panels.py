"""The page's other panels against the real server: compare, tokens, fill-in, template; denoising from a recorded
stream.
"""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pipeline.text import chat
from pipeline.text.tokenizer import Tokenizer
from tests.browser import chunk, opened, recorded, say, until
from tests.server import Running, save_models, serving

pytestmark = [pytest.mark.browser, pytest.mark.full]
SAMPLED = {"temperature": 0.7, "top_p": 0.95, "seed": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Tokenizer) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("panels")
    with serving(
        save_models(folder, byte_tokenizer), "--feedback", str(folder / "feedback.jsonl"), log=folder / "log"
    ) as running:
        yield running


def asked(server: Running, route: str, **body: Any) -> dict[str, Any]:
    """The server's own answer."""
    response = httpx.post(server.url + route, json={"model": "nano"} | body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def answer_tokens(server: Running, **more: Any) -> list[dict[str, Any]]:
    """The tokens of the answer to Hello, as the page asks for it."""
    body = SAMPLED | {
        "messages": [{"role": "user", "content": "Hello"}],
        "max_completion_tokens": 24,
        "logprobs": True,
        "top_logprobs": 10,
        "return_token_ids": True,
    }
    return asked(server, "/v1/chat/completions", **(body | more))["choices"][0]["logprobs"]["content"]


def visible(text: str) -> str:
    """A token as tokens.js shows it."""
    text = text.replace("\n", "⏎").replace("\t", "⇥")
    return re.sub(r"^ +| +$", lambda found: "␣" * len(found[0]), text) or "∅"


def to(page: Any, tab: str) -> None:
    page.get_by_role("tab", name=tab).click()


def compare(page: Any, text: str = "Hello") -> None:
    to(page, "Compare")
    page.get_by_label("Prompt for both").fill(text)
    page.keyboard.press("Control+Enter")
    page.locator(".outcome").get_by_text(re.compile("They diverge|Both answers")).wait_for()


# compare


def test_two_checkpoints_part_at_the_first_token_that_differs(page: Any, server: Running) -> None:
    compare(page)
    first, second = answer_tokens(server), answer_tokens(server, model="other")
    place = next(n for n, (one, other) in enumerate(zip(first, second, strict=False)) if one["id"] != other["id"])
    assert page.locator(".outcome").inner_text() == f"They diverge at token {place + 1}."
    marks = [mark.text_content() for mark in page.locator("#compare mark").all()]
    assert marks == [first[place]["token"], second[place]["token"]]
    shown = [page.get_by_label(f"Answer {name}").text_content() for name in "AB"]
    whole = [b"".join(bytes(token["bytes"]) for token in tokens) for tokens in (first, second)]
    cuts = [
        (sum(len(token["bytes"]) for token in tokens[:place]), len(tokens[place]["bytes"]))
        for tokens in (first, second)
    ]
    parts = [
        (text[:start], text[start : start + size], text[start + size :])
        for text, (start, size) in zip(whole, cuts, strict=True)
    ]
    assert shown == ["".join(part.decode("utf-8", "replace") for part in three) for three in parts]


def test_one_checkpoint_with_one_seed_says_the_same_and_with_two_parts(page: Any, server: Running) -> None:
    page.get_by_label("Model B").evaluate("select => { select.value = 'nano' }")
    compare(page)
    assert page.locator(".outcome").inner_text() == "Both answers are the same."
    assert page.locator("#compare mark").count() == 0 and page.get_by_role("button", name="Tie").count() == 0
    page.get_by_label("Seed B").fill("5")
    page.get_by_role("button", name="Ask both").click()
    page.locator(".outcome").get_by_text("They diverge").wait_for()
    tokens = answer_tokens(server, seed=5)
    assert (page.get_by_label("Answer B").text_content() or "").startswith(tokens[0]["token"])


def test_the_better_side_is_posted_and_a_tie_is_not(page: Any, server: Running) -> None:
    file = server.log.parent / "feedback.jsonl"
    before = file.read_text().splitlines()
    compare(page, "Which?")
    page.get_by_role("button", name="Tie").click()
    assert "nothing stored" in page.locator(".outcome").inner_text() and file.read_text().splitlines() == before
    compare(page, "Which one?")
    page.get_by_role("button", name="B is better").click()
    page.locator(".outcome").get_by_text("B is better: stored").wait_for()
    stored = json.loads(file.read_text().splitlines()[-1])
    sides = [
        asked(
            server,
            "/v1/chat/completions",
            model=model,
            messages=[{"role": "user", "content": "Which one?"}],
            max_completion_tokens=24,
            **SAMPLED,
        )["choices"][0]["message"]["content"]
        for model in ("nano", "other")
    ]
    assert (stored["rejected"][0]["content"], stored["chosen"][0]["content"]) == (sides[0], sides[1])
    assert len(file.read_text().splitlines()) == len(before) + 1


def test_both_sides_have_the_judges_rewards(page: Any, server: Running) -> None:
    compare(page)
    for name, model in (("A", "nano"), ("B", "other")):
        asking = [{"role": "user", "content": "Hello"}]
        found = asked(server, "/v1/chat/completions", model=model, messages=asking, max_completion_tokens=24, **SAMPLED)
        messages = [*asking, found["choices"][0]["message"]]
        reward = asked(server, "/score", model="judge", conversations=[{"messages": messages}])["data"][0]["reward"]
        assert f"reward {reward:,.2f}" in page.get_by_role("region", name=f"Side {name}").inner_text()


# tokens


def test_the_heat_map_holds_each_tokens_probability_and_its_alternatives(page: Any, server: Running) -> None:
    say(page, "Hello")
    page.get_by_role("button", name="Tokens").click()
    tokens = answer_tokens(server)
    shown = page.locator(".heat .token")
    assert shown.all_text_contents() == [visible(token["token"]) for token in tokens]
    doubts = shown.evaluate_all("all => all.map((one) => parseInt(one.style.getPropertyValue('--doubt')))")
    assert doubts == [math.floor(100 * (1 - math.exp(token["logprob"])) + 0.5) for token in tokens]
    shown.nth(3).click()
    rows = page.locator(".detail tbody tr")
    assert rows.locator("td:nth-child(3)").all_inner_texts() == [
        str(other["id"]) for other in tokens[3]["top_logprobs"]
    ]
    assert rows.count() == 10
    mean = sum(token["logprob"] for token in tokens) / len(tokens)
    assert f"perplexity {math.exp(-mean):,.2f}" in page.locator("#tokens .facts").inner_text()


def test_the_keyboard_walks_the_tokens_and_another_is_continued_by_ids(page: Any, server: Running) -> None:
    say(page, "Hello")
    page.get_by_role("button", name="Tokens").click()
    tokens = answer_tokens(server)
    page.get_by_role("listbox").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft", "End", "Home", "ArrowDown", "ArrowDown"):
        page.keyboard.press(key)
    assert page.locator(".token[aria-selected=true]").get_attribute("data-place") == "2"
    sent: list[dict[str, Any]] = []
    page.on(
        "request",
        lambda request: sent.append(request.post_data_json) if request.url.endswith("/v1/completions") else None,
    )
    other = next(other for other in tokens[2]["top_logprobs"] if other["id"] != tokens[2]["id"])
    row = page.locator(".detail tbody tr", has=page.get_by_role("cell", name=str(other["id"]), exact=True))
    row.get_by_role("button").focus()
    page.keyboard.press("Enter")
    page.get_by_text("more tokens.").wait_for()
    prompt = asked(server, "/apply-template", messages=[{"role": "user", "content": "Hello"}])["tokens"]
    ids = [*prompt, tokens[0]["id"], tokens[1]["id"], other["id"]]
    assert sent[0]["prompt"] == ids
    found = asked(server, "/v1/completions", prompt=ids, max_tokens=24, return_token_ids=True, logprobs=1, **SAMPLED)[
        "choices"
    ][0]
    expected = [tokens[0]["token"], tokens[1]["token"], other["token"], *found["logprobs"]["tokens"]]
    assert page.locator(".heat .token").all_text_contents() == [visible(text) for text in expected]
    assert page.locator(".token.forced").get_attribute("data-place") == "2"


def test_a_text_is_continued_and_branched_again(page: Any, server: Running) -> None:
    to(page, "Tokens")
    page.get_by_label("Text to continue").fill("def add")
    page.keyboard.press("Control+Enter")
    page.get_by_text("more tokens.").wait_for()
    found = asked(
        server, "/v1/completions", prompt="def add", max_tokens=24, logprobs=10, return_token_ids=True, **SAMPLED
    )["choices"][0]
    shown = page.locator(".heat .token")
    assert shown.all_text_contents() == [visible(text) for text in found["logprobs"]["tokens"]]
    shown.first.click()
    names = page.locator(".detail tbody tr td:first-child").all_inner_texts()
    top = sorted(found["logprobs"]["top_logprobs"][0].items(), key=lambda pair: -pair[1])
    assert names == [visible(text) for text, _ in top]
    place = next(
        n
        for n, (text, _) in enumerate(top)
        if len(text) == 1 and text.isascii() and text != found["logprobs"]["tokens"][0]
    )
    page.locator(".detail tbody tr").nth(place).get_by_role("button").click()
    page.locator(".token.forced").wait_for()
    assert shown.first.text_content() == visible(top[place][0])


# fill-in


def test_the_middle_is_the_servers_and_is_accepted(page: Any, server: Running) -> None:
    to(page, "Fill in")
    page.get_by_label("Prefix").fill("def add(left, right):\n    ")
    page.get_by_label("Suffix").fill("\nprint(add(1, 2))")
    page.get_by_role("button", name="Fill in").click()
    page.locator("#fim .facts").get_by_text("tok/s").wait_for()
    found = asked(
        server,
        "/v1/completions",
        prompt="def add(left, right):\n    ",
        suffix="\nprint(add(1, 2))",
        max_tokens=24,
        **SAMPLED,
    )["choices"][0]["text"]
    assert page.get_by_label("Insertion").text_content() == found != ""
    page.get_by_role("button", name="Accept").click()
    assert page.get_by_label("Prefix").input_value() == "def add(left, right):\n    " + found
    assert (
        page.get_by_label("Insertion").text_content() == "" and page.get_by_role("button", name="Discard").is_disabled()
    )


# template


def test_the_template_is_what_the_model_reads_with_its_specials(page: Any, byte_tokenizer: Tokenizer) -> None:
    page.get_by_label("System prompt").fill("Be brief.")
    say(page, "Hello\nthere")
    to(page, "Template")
    page.locator(".piece.special").first.wait_for()
    messages = page.evaluate(
        "(() => { const held = document.getElementById('chat').conversation; return held.messages(held.path().at(-1),"
        " 'Be brief.'); })()"
    )
    ids = chat.render(byte_tokenizer, messages, generation_prompt=True).ids
    pieces = page.locator("#template .piece")
    assert pieces.locator("sub").all_text_contents() == [str(id_) for id_ in ids]
    controls = set(byte_tokenizer.control_ids.values())
    special = pieces.evaluate_all("all => all.map((one) => one.classList.contains('special'))")
    assert special == [id_ in controls for id_ in ids] and any(special)
    box = page.locator("#template .pieces")
    assert "bordered" in (box.get_attribute("class") or "")
    page.get_by_label("token borders").uncheck()
    page.get_by_label("ids", exact=True).check()
    assert box.get_attribute("class") == "pieces numbered" and pieces.locator("sub").first.is_visible()


def test_a_text_is_cut_as_the_tokenizer_cuts_it_and_its_controls_are_text(page: Any, byte_tokenizer: Tokenizer) -> None:
    to(page, "Template")
    page.get_by_label("Show").select_option("A text")
    text = "It wasn't the rope <tool_call>\n"
    page.get_by_label("Text", exact=True).fill(text)
    page.locator("#template .piece").first.wait_for()
    assert page.locator("#template .piece sub").all_text_contents() == [str(id_) for id_ in byte_tokenizer.encode(text)]
    assert page.locator("#template .special").count() == 0


# denoising, drawn from a stream whose every step is known; the texts of the ids are the server's. For a real stream
# see test_diffusion_page.py


def test_denoising_is_drawn_step_by_step_and_replayed(browser: Any, server: Running, byte_tokenizer: Tokenizer) -> None:
    ids = byte_tokenizer.encode("def add")
    mask: list[int | None] = [None] * len(ids)
    steps = [mask, [ids[0], *mask[1:]], [ids[0], *mask[1:-1], ids[-1]], ids]
    frames = [
        {"choices": [], "denoising": {"step": n, "steps": 3, "offset": 0, "tokens": tokens}}
        for n, tokens in enumerate(steps)
    ]
    with opened(browser, server.url) as page:
        assert page.get_by_role("tab", name="Denoise").count() == 0
        card = {
            "id": "dream",
            "object": "model",
            "meta": {"kind": "diffusion", "context": 64, "parameters": 1, "stage": "diffusion", "feedback": False},
        }
        page.route("**/v1/models", lambda route: route.fulfill(json={"data": [card]}))
        page.route(
            "**/detokenize",
            lambda route: route.continue_(post_data=json.dumps(route.request.post_data_json | {"model": "nano"})),
        )
        recorded(
            page, chunk({"role": "assistant", "content": ""}), *frames, chunk({"content": "def add"}), chunk({}, "stop")
        )
        sent: list[dict[str, Any]] = []
        page.on(
            "request",
            lambda request: sent.append(request.post_data_json) if "chat/completions" in request.url else None,
        )
        page.reload()
        to(page, "Denoise")
        page.locator("#diffusion").get_by_label("Prompt").fill("Add")
        page.keyboard.press("Control+Enter")
        cells = page.locator("#diffusion .piece")
        whole = [visible(byte_tokenizer.decode([id_])) for id_ in ids]
        page.locator("#diffusion .facts").get_by_text(f"Step 3 of 3: {len(ids)} of {len(ids)} tokens").wait_for()
        until(page, "whole => document.querySelector('#diffusion .pieces').textContent === whole", "".join(whole))
        assert sent[0]["stream_options"]["include_denoising"] is True and "logprobs" not in sent[0]
        slider = page.get_by_role("slider")
        slider.focus()
        slider.press("Home")
        assert cells.all_text_contents() == ["···"] * len(ids) and page.locator("#diffusion .masked").count() == len(
            ids
        )
        slider.press("ArrowRight")
        page.locator("#diffusion .new").get_by_text(whole[0], exact=True).wait_for()
        assert cells.all_text_contents() == [whole[0], *["···"] * (len(ids) - 1)]
        page.get_by_role("button", name="Play").click()
        page.locator("#diffusion .facts").get_by_text("Step 3 of 3").wait_for()
        assert slider.input_value() == "3"
