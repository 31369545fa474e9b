"""The page in front of a real masked-diffusion model: its canvas grows step by step and is replayed, and it chats like
other models.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pipeline.diffusion import files
from pipeline.text.tokenizer import Tokenizer
from tests.browser import opened, say, until
from tests.server import Running, random_model, save_models, serving

pytestmark = [pytest.mark.browser, pytest.mark.full]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Tokenizer) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("denoising")
    save_models(folder, byte_tokenizer)
    model = files.from_causal(random_model(byte_tokenizer), byte_tokenizer)
    files.save(folder / "masked", model, byte_tokenizer, {})
    with serving([folder / "nano", folder / "masked"], log=folder / "log") as running:
        yield running


def frames(server: Running, text: str, **more: Any) -> list[dict[str, Any]]:
    """What the server itself streams."""
    body = {
        "model": "masked",
        "messages": [{"role": "user", "content": text}],
        "stream": True,
        "stream_options": {"include_denoising": True},
    } | more
    lines = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).text.splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return [chunk["denoising"] for chunk in chunks if "denoising" in chunk]


def test_a_canvas_is_drawn_as_the_server_uncovers_it_and_replayed(browser: Any, server: Running) -> None:
    shown = frames(server, "Add", temperature=0.7, top_p=0.95, seed=0, max_completion_tokens=24)
    with opened(browser, server.url) as page:
        page.get_by_role("tab", name="Denoise").click()
        assert page.locator("#diffusion select").first.input_value() == "masked"
        page.locator("#diffusion").get_by_label("Prompt").fill("Add")
        page.keyboard.press("Control+Enter")
        last = shown[-1]
        page.locator("#diffusion .facts").get_by_text(f"Step {last['step']} of {last['steps']}").wait_for()
        until(page, "count => document.querySelectorAll('#diffusion .piece').length === count", len(last["tokens"]))
        page.get_by_role("button", name="Play").wait_for(state="visible")
        for at in (0, len(shown) // 2, len(shown) - 1):
            page.get_by_role("slider").fill(str(at))
            masked = shown[at]["tokens"].count(None)
            until(page, "count => document.querySelectorAll('#diffusion .masked').length === count", masked)
            ids = page.locator("#diffusion .piece[title]").evaluate_all(
                "all => all.map((one) => Number(one.title.slice(3)))"
            )
            assert ids == [token for token in shown[at]["tokens"] if token is not None]
        page.get_by_role("slider").fill("0")
        page.get_by_role("button", name="Play").click()
        page.locator("#diffusion .facts").get_by_text(f"Step {last['step']} of").wait_for()


def test_it_chats_as_a_causal_model_does(browser: Any, server: Running) -> None:
    with opened(browser, server.url, settings={"model": "masked"}) as page:
        say(page, "Hello")
        body = {
            "model": "masked",
            "messages": [{"role": "user", "content": "Hello"}],
            "temperature": 0.7,
            "top_p": 0.95,
            "seed": 0,
            "max_completion_tokens": 24,
        }
        told = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()["choices"][0]["message"][
            "content"
        ]
        shown = page.locator("article.assistant").last.text_content() or ""
        assert told.split()[0] in shown
