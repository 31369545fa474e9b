"""The page's chat against the real server: streamed, stopped, branched, kept, exported, with tools, rewards and
choices.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipeline.model import checkpoint
from pipeline.text.tokenizer import Tokenizer
from tests.browser import SETTINGS, answered, download, idle, opened, say, until
from tests.server import Running, random_model, save_models, serving

pytestmark = [pytest.mark.browser, pytest.mark.full]
EXAMPLE = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
            "required": ["city"],
        },
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Tokenizer) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("page")
    checkpoint.save(folder / "endless", random_model(byte_tokenizer, context=16_384, layers=4), byte_tokenizer, {})
    models = [*save_models(folder, byte_tokenizer), folder / "endless"]
    with serving(models, "--feedback", str(folder / "feedback.jsonl"), log=folder / "log") as running:
        yield running


def answer_of(server: Running, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """What the server itself answers with the page's settings."""
    body = {
        "model": "nano",
        "messages": messages,
        "temperature": 0.7,
        "top_p": 0.95,
        "max_completion_tokens": 24,
        "seed": 0,
    }
    return httpx.post(f"{server.url}/v1/chat/completions", json=body | more, timeout=60).json()


def texts(page: Any) -> list[str]:
    """The texts of the chat's messages, whatever Markdown makes of them."""
    return page.evaluate("document.getElementById('chat').conversation.path().map((turn) => turn.message.content)")


def facts(page: Any) -> str:
    return page.locator("article.assistant .facts").last.inner_text()


def endless(page: Any) -> None:
    """From now on, the real server's answers never end by themselves, which the page itself cannot ask for."""
    page.route(
        "**/v1/chat/completions",
        lambda route: route.continue_(post_data=json.dumps(route.request.post_data_json | {"ignore_eos": True})),
    )


def test_the_answer_is_the_servers_and_its_counts_are_shown(page: Any, server: Running) -> None:
    say(page, "Hello")
    found = answer_of(server, [{"role": "user", "content": "Hello"}])
    assert texts(page) == ["Hello", found["choices"][0]["message"]["content"]]
    said, asked = (found["usage"][name] for name in ("completion_tokens", "prompt_tokens"))
    assert facts(page).startswith(f"nano · seed 0 · {said} tokens · ") and re.search(r"[\d.,]+ tok/s", facts(page))
    assert page.locator(".gauge").inner_text() == f"{said + asked} of 2,048 tokens of context"
    assert page.locator("meter").evaluate("meter => [meter.value, meter.max]") == [said + asked, 2048]


def test_a_question_keeps_its_lines(page: Any) -> None:
    say(page, "f(1) == 2\nf(2) == 4")
    assert page.locator("article.user .text").last.inner_text().strip() == "f(1) == 2\nf(2) == 4"


def test_the_system_prompt_and_each_sampling_setting_reach_the_server(page: Any) -> None:
    sent: list[dict[str, Any]] = []
    page.on("request", lambda request: sent.append(request.post_data_json) if "chat" in request.url else None)
    values = {"Temperature": "0.25", "Top p": "0.5", "Top k": "7", "Tokens at most": "5", "Seed": "123"}
    for label, value in values.items():
        page.get_by_label(label, exact=True).fill(value)
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Stop strings").fill("one\ntwo")
    page.locator("#model").select_option("other")
    say(page, "Hello")
    expected = {
        "model": "other",
        "temperature": 0.25,
        "top_p": 0.5,
        "top_k": 7,
        "max_completion_tokens": 5,
        "seed": 123,
        "stop": ["one", "two"],
    }
    assert {name: sent[0][name] for name in expected} == expected
    assert sent[0]["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    page.reload()
    assert page.get_by_label("Top k").input_value() == "7" and page.locator("#model").input_value() == "other"


def test_a_number_out_of_its_range_is_not_taken(page: Any) -> None:
    box = page.get_by_label("Temperature", exact=True)
    box.fill("9")
    box.press("Tab")
    assert box.input_value() == "0.7"


def test_text_grows_while_it_is_said_and_stop_frees_the_row(browser: Any, server: Running) -> None:
    with opened(browser, server.url, settings={"model": "endless", "max_tokens": 16_000}) as page:
        endless(page)
        page.get_by_label("Message", exact=True).fill("Go on")
        page.keyboard.press("Enter")
        body = page.locator("article.assistant .text")
        page.get_by_text(re.compile(r"\d+ tokens, [\d,]+ tok/s")).wait_for()
        assert page.locator("article.assistant .actions").is_hidden()
        first = len(body.inner_text())
        assert server.running() == 1
        until(page, "size => document.querySelector('article.assistant .text').innerText.length > size", first)
        page.get_by_role("button", name="Stop").click()
        idle(page)
        assert server.falls_idle()
        count = int(re.search(r"([\d,]+) tokens", facts(page))[1].replace(",", ""))  # type: ignore[index]
        assert "stopped" in facts(page) and 0 < count < 16_000


def test_escape_stops_too(browser: Any, server: Running) -> None:
    with opened(browser, server.url, settings={"model": "endless", "max_tokens": 16_000}) as page:
        endless(page)
        page.get_by_label("Message", exact=True).fill("Go on")
        page.keyboard.press("Enter")
        page.get_by_text(re.compile(r"\d+ tokens, [\d,]+ tok/s")).wait_for()
        page.keyboard.press("Escape")
        idle(page)
        assert "stopped" in facts(page) and server.falls_idle()


def test_regenerating_adds_a_branch_with_the_next_seed(page: Any, server: Running) -> None:
    say(page, "Hello")
    page.get_by_role("button", name="Regenerate").click()
    idle(page)
    answers = [
        answer_of(server, [{"role": "user", "content": "Hello"}], seed=seed)["choices"][0]["message"]["content"]
        for seed in (0, 1)
    ]
    assert answers[0] != answers[1]
    assert texts(page)[1] == answers[1] and page.locator(".branches").inner_text().split() == ["‹", "2", "/", "2", "›"]
    page.get_by_role("button", name="Previous branch").click()
    assert texts(page)[1] == answers[0] and "1 / 2" in page.locator(".branches").inner_text()
    assert page.get_by_role("button", name="Previous branch").is_disabled()


def test_editing_a_question_makes_a_branch_with_its_own_answer(page: Any, server: Running) -> None:
    say(page, "Hello")
    say(page, "And then?")
    before = texts(page)
    page.locator("article.user").first.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit this turn").fill("Goodbye")
    page.get_by_role("button", name="Send as a branch").click()
    idle(page)
    found = answer_of(server, [{"role": "user", "content": "Goodbye"}])
    assert texts(page) == ["Goodbye", found["choices"][0]["message"]["content"]]
    page.get_by_role("button", name="Previous branch").click()
    assert texts(page) == before and len(before) == 4


def test_editing_an_answer_makes_a_branch_that_the_next_question_follows(page: Any, server: Running) -> None:
    say(page, "Hello")
    page.locator("article.assistant").get_by_role("button", name="Edit").click()
    page.get_by_label("Edit this turn").fill("I was never said")
    page.get_by_role("button", name="Save as a branch").click()
    say(page, "Really?")
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "I was never said"},
        {"role": "user", "content": "Really?"},
    ]
    assert texts(page) == [
        "Hello",
        "I was never said",
        "Really?",
        answer_of(server, messages)["choices"][0]["message"]["content"],
    ]


def test_a_reload_restores_the_conversation_with_its_branches(page: Any) -> None:
    say(page, "Hello")
    page.get_by_role("button", name="Regenerate").click()
    idle(page)
    before = texts(page)
    page.reload()
    page.locator("article.assistant").wait_for()
    assert texts(page) == before and "2 / 2" in page.locator(".branches").inner_text()
    page.get_by_role("button", name="New").click()
    assert page.locator("article").count() == 0
    page.get_by_role("button", name="Hello", exact=True).click()
    assert texts(page) == before
    page.get_by_role("button", name="Delete Hello").click()
    page.locator(".conversations li").wait_for(state="detached")
    page.reload()
    page.get_by_text("Chat with your model").wait_for()


def test_an_exported_file_imports_as_the_same_conversation(
    page: Any, browser: Any, server: Running, tmp_path: Path
) -> None:
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Tools (JSON)").fill(json.dumps([EXAMPLE]))
    say(page, "Hello")
    page.get_by_role("button", name="Regenerate").click()
    idle(page)
    file = download(page, tmp_path)
    data = json.loads(file.read_text(encoding="utf-8"))
    assert [message["role"] for message in data["messages"]] == ["system", "user", "assistant"] and data["tools"] == [
        EXAMPLE
    ]
    with opened(browser, server.url) as other:
        other.locator("#import-file").set_input_files(file)
        other.locator("article.assistant").wait_for()
        assert texts(other) == texts(page) and "2 / 2" in other.locator(".branches").inner_text()
        assert other.get_by_label("System prompt").input_value() == "Be brief."
        again = json.loads(download(other, tmp_path).read_text(encoding="utf-8"))
        assert again == data


def test_messages_alone_import_as_a_dialogue_of_the_training_data_has_them(page: Any, tmp_path: Path) -> None:
    call = {"id": "c0", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c0", "content": "Rain"},
    ]
    file = tmp_path / "dialogue.json"
    file.write_text(json.dumps({"messages": messages, "tools": [EXAMPLE]}))
    page.locator("#import-file").set_input_files(file)
    page.locator("article.tool").wait_for()
    assert texts(page) == ["Weather?", "", "Rain"] and page.locator(".calls .card code").inner_text() == "get_weather"
    page.locator("article.tool").get_by_role("button", name="Answer").click()
    idle(page)
    assert len(texts(page)) == 4


def test_a_long_conversation_is_rendered_whole(page: Any, tmp_path: Path) -> None:
    """Sixty texts appear at once but are requested one after another, since each client has few places."""
    running: list[str] = []
    most = 0

    def begun(request: Any) -> None:
        nonlocal most
        if request.url.endswith("/render"):
            running.append(request.url)
            most = max(most, len(running))

    page.on("request", begun)
    page.on("requestfinished", lambda request: running.pop() if request.url.endswith("/render") else None)
    messages = [{"role": ("user", "assistant")[n % 2], "content": f"Number **{n}**"} for n in range(60)]
    file = tmp_path / "long.json"
    file.write_text(json.dumps({"messages": messages}))
    page.locator("#import-file").set_input_files(file)
    page.locator("article").nth(59).wait_for()
    until(page, "document.querySelectorAll('.log .text strong').length === 60")
    assert most == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "not valid JSON|Unexpected end"),
        ("[]", "expected a JSON object with messages"),
        ("{}", "expected messages, found none"),
        ('{"messages": [{"role": "robot", "content": ""}]}', "messages.0: expected a role of user, assistant, tool"),
        ('{"messages": [{"role": "user", "content": 5}]}', "messages.0.content: expected a text"),
        (
            '{"turns": [{"id": "a", "parent": "b", "message": {"role": "user", "content": ""}}]}',
            "its parent b does not come before it",
        ),
    ],
)
def test_a_file_that_is_no_conversation_is_refused(page: Any, tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "wrong.json"
    file.write_text(text)
    page.locator("#import-file").set_input_files(file)
    alert = page.get_by_role("alert")
    alert.wait_for()
    assert re.search(f"wrong.json: .*({message})", alert.inner_text()) and page.locator("article").count() == 0


def test_code_is_colored_and_copied_without_the_colours(page: Any) -> None:
    answered(page, "Here:\n\n```python\nx = 1 < 2\n```\n\nDone.")
    say(page, "Code")
    page.locator("pre code.language-python .mi").first.wait_for()
    page.get_by_role("button", name="Copy code").click()
    page.get_by_text("Copied.").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == "x = 1 < 2\n"
    assert page.locator("article.assistant p").all_inner_texts() == ["Here:", "Done."]


def test_finished_blocks_are_told_from_what_still_grows(page: Any) -> None:
    ends = page.evaluate("""async () => {
        const { finished } = await import('/page/markdown.js');
        const texts = ['a', 'a\\n', 'a\\n\\n', 'a\\n\\nb', '```\\na\\n\\nb', '```\\na\\n```', '```\\na\\n```\\n',
            '~~~~\\n~~~\\n\\n~~~~\\nx',
                       'a\\n\\n```js\\nb\\n'];
        return texts.map(finished);
    }""")
    assert ends == [0, 0, 3, 3, 0, 0, 10, 15, 3]


def test_a_calls_card_takes_a_result_and_the_answer_follows_it(browser: Any, server: Running) -> None:
    with opened(
        browser, server.url, settings={"tools": json.dumps([EXAMPLE]), "tool_choice": "required", "max_tokens": 64}
    ) as page:
        say(page, "Weather?")
        card = page.get_by_role("region", name="Call of get_weather").first
        given = json.loads(card.locator("pre").inner_text())
        assert given["city"] in ("Oslo", "Rome")
        page.get_by_label("Calls", exact=False).last.select_option("none")
        sent: list[dict[str, Any]] = []
        page.on(
            "request",
            lambda request: sent.append(request.post_data_json) if "chat/completions" in request.url else None,
        )
        calls = page.locator(".calls .card").count()
        for number in range(calls):
            page.get_by_label("Result of get_weather").nth(number).fill(f'{{"sky": "clear", "n": {number}}}')
        page.get_by_role("button", name=re.compile("^Send results?$")).click()
        idle(page)
        page.locator("article.tool").first.wait_for()
        messages = sent[0]["messages"]
        assert [message["role"] for message in messages] == ["user", "assistant", *["tool"] * calls]
        assert (
            messages[2]["content"] == '{"sky": "clear", "n": 0}'
            and messages[2]["tool_call_id"] == messages[1]["tool_calls"][0]["id"]
        )
        assert page.get_by_role("button", name=re.compile("^Send results?$")).count() == 0
        page.locator("article.tool").first.get_by_role("button", name="Edit").click()
        page.get_by_label("Edit this turn").fill("snow")
        page.get_by_role("button", name="Send as a branch").click()
        idle(page)
        assert [message["content"] for message in sent[1]["messages"][2:]] == [
            "snow",
            *[f'{{"sky": "clear", "n": {n}}}' for n in range(1, calls)],
        ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[{]", "not JSON"),
        ("{}", "expected a list"),
        ('[{"type": "tool"}]', 'tool 1: expected "type": "function"'),
        ('[{"type": "function", "function": {"name": "a b"}}]', "tool 1: expected a name of 1 to 64"),
        (
            '[{"type": "function", "function": {"name": "a", "parameters": []}}]',
            "a: expected a JSON schema as parameters",
        ),
        (json.dumps([EXAMPLE, EXAMPLE]), "tool 2: get_weather appears twice"),
    ],
)
def test_wrong_tools_are_explained_and_never_sent(page: Any, text: str, message: str) -> None:
    area = page.get_by_label("Tools (JSON)")
    area.fill(text)
    assert message in page.locator("#tools-check").inner_text() and area.get_attribute("aria-invalid") == "true"
    page.get_by_label("Message", exact=True).fill("Hello")
    page.keyboard.press("Enter")
    page.get_by_role("alert").wait_for()
    assert message in page.get_by_role("alert").inner_text() and page.locator("article.assistant").count() == 0
    page.get_by_role("button", name="Insert an example").click()
    assert (
        "Tools: get_weather." in page.locator("#tools-check").inner_text()
        and area.get_attribute("aria-invalid") == "false"
    )


def test_an_answer_has_the_reward_that_the_judge_gives(page: Any, server: Running) -> None:
    say(page, "Hello")
    badge = page.locator(".reward")
    badge.wait_for()
    question, said = texts(page)
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": said}]
    found = httpx.post(f"{server.url}/score", json={"model": "judge", "conversations": [{"messages": messages}]}).json()
    assert badge.inner_text() == f"reward {found['data'][0]['reward']:,.2f}"


def test_the_best_of_the_branches_is_stored_as_a_preference(page: Any, server: Running) -> None:
    page.get_by_label("System prompt").fill("Be brief.")
    say(page, "Which is better?")
    page.get_by_role("button", name="Regenerate").click()
    idle(page)
    second = texts(page)[1]
    page.get_by_role("button", name="Previous branch").click()
    first = texts(page)[1]
    page.get_by_role("button", name="Best of these").click()
    page.get_by_text("Stored: ").wait_for()
    stored = [json.loads(line) for line in (server.log.parent / "feedback.jsonl").read_text().splitlines()]
    assert [message["content"] for message in stored[-1]["prompt"]] == ["Be brief.", "Which is better?"]
    assert (stored[-1]["chosen"][0]["content"], stored[-1]["rejected"][0]["content"]) == (first, second)


def test_a_thumb_is_stored_as_a_label_by_mouse_and_by_keyboard_and_stays_pressed(page: Any, server: Running) -> None:
    page.get_by_label("System prompt").fill("Be brief.")
    say(page, "Is it good?")
    good, bad = (page.get_by_role("button", name=f"{name} answer") for name in ("Good", "Bad"))
    assert [button.get_attribute("aria-pressed") for button in (good, bad)] == ["false", "false"]
    good.click()
    page.get_by_text("Stored: ").wait_for()
    path = server.log.parent / "labels.jsonl"
    stored = json.loads(path.read_text().splitlines()[-1])
    assert [message["content"] for message in stored["prompt"]] == ["Be brief.", "Is it good?"]
    assert (stored["answer"][0]["content"], stored["desirable"]) == (texts(page)[1], True)
    page.locator('.verdict [aria-pressed="true"]').wait_for()
    assert page.evaluate("document.activeElement.ariaLabel") == "Good answer"
    count = len(path.read_text().splitlines())
    page.keyboard.press("Enter")
    page.get_by_text("This verdict was stored before.").wait_for()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.get_by_text(f"Stored: {count + 1} ").wait_for()
    assert json.loads(path.read_text().splitlines()[-1])["desirable"] is False
    page.reload()
    page.locator('.verdict [aria-pressed="true"]').wait_for()
    assert [button.get_attribute("aria-pressed") for button in (good, bad)] == ["false", "true"]


def test_what_a_person_wrote_has_no_verdict(page: Any) -> None:
    say(page, "Hello")
    turns = page.locator("article.turn")
    assert turns.nth(0).locator(".verdict").count() == 0 and turns.nth(1).locator(".verdict").count() == 1
    turns.nth(1).get_by_role("button", name="Edit").click()
    page.get_by_label("Edit this turn").fill("Mine.")
    page.get_by_role("button", name="Save as a branch").click()
    page.get_by_text("Mine.").wait_for()
    assert page.locator(".verdict").count() == 0


def test_an_error_of_the_server_is_told_and_the_question_can_be_asked_again(
    page: Any, browser: Any, server: Running
) -> None:
    with opened(browser, server.url, quiet=False) as loud:
        loud.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(status=429, json={"error": {"message": "all rows are busy"}}),
        )
        loud.get_by_label("Message", exact=True).fill("Hello")
        loud.keyboard.press("Enter")
        loud.get_by_role("alert").get_by_text("all rows are busy").wait_for()
        loud.unroute_all()
        loud.get_by_role("button", name="Regenerate").click()
        idle(loud)
        assert texts(loud)[1] and "2 / 2" in loud.locator(".branches").inner_text()
    assert SETTINGS["seed"] == 0
