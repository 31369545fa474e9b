"""Headless Chromium on a real server's page: how tests use it, and what all of them check.

`opened` fails a test whose page broke its content security policy, threw an error, or asked another host for anything.
"""

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# What a test starts with: short answers with a known seed.
SETTINGS = {
    "model": "nano",
    "temperature": 0.7,
    "top_p": 0.95,
    "top_k": 0,
    "max_tokens": 24,
    "seed": 0,
    "stop": "",
    "system": "",
    "tools": "",
    "tool_choice": "auto",
}
WATCH = """
window.violations = [];
document.addEventListener('securitypolicyviolation', (event) =>
  violations.push(`${event.violatedDirective} ${event.blockedURI}`));
window.pwned = () => violations.push('a script of an attack ran');
"""


@contextmanager
def browsing() -> Iterator[Any]:
    """A browser; the test is skipped where there is none."""
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine (apt install chromium)")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


@contextmanager
def opened(
    browser: Any,
    url: str,
    *,
    path: str = "/",
    settings: dict[str, Any] | None = None,
    quiet: bool = True,
    **context: Any,
) -> Iterator[Any]:
    """The page in a fresh profile. `settings` override SETTINGS; `quiet` also fails on console errors."""
    held = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, "accept_downloads": True} | context)
    held.grant_permissions(["clipboard-read", "clipboard-write"], origin=url)
    held.set_default_timeout(20_000)
    text = json.dumps(json.dumps(SETTINGS | (settings or {})))
    held.add_init_script(
        f"{WATCH}\nif (!localStorage['stagecoach-settings']) localStorage['stagecoach-settings'] = {text};"
    )
    page = held.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(f"error: {error}"))
    page.on(
        "console", lambda one: faults.append(f"{one.text} {one.location}") if quiet and one.type == "error" else None
    )
    page.on("request", lambda request: faults.append(request.url) if foreign(request.url, url) else None)
    page.goto(url + path)
    page.locator("#model option").first.wait_for(state="attached")
    try:
        yield page
        violations = page.evaluate("window.violations")
        assert not violations, f"the content security policy was broken: {violations}"
        assert not faults, f"errors or requests to other hosts: {faults}"
    finally:
        held.close()


def foreign(asked: str, own: str) -> bool:
    """Whether a request goes to another host."""
    parts = urlsplit(asked)
    return parts.scheme not in ("data", "blob") and parts.netloc != urlsplit(own).netloc


def until(page: Any, expression: str, given: Any = None) -> None:
    """Wait until a JavaScript expression holds. Playwright's own wait runs `eval` in the page, which its policy
    forbids.
    """
    deadline = time.monotonic() + 20
    while not page.evaluate(expression, given):
        assert time.monotonic() < deadline, f"20 seconds without {expression}"
        page.wait_for_timeout(20)


def say(page: Any, text: str) -> None:
    """Send a message in the chat and wait for the answer's end."""
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    idle(page)


def idle(page: Any) -> None:
    """Wait until no answer is being generated."""
    page.locator(".log[aria-busy=false]").wait_for()
    page.locator("article.assistant .actions").last.wait_for()


def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
    """One chunk of a chat's stream."""
    return {
        "id": "c",
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}],
    } | more


def stream(*chunks: dict[str, Any]) -> str:
    """A recorded stream."""
    return "".join(f"data: {json.dumps(one)}\n\n" for one in chunks) + "data: [DONE]\n\n"


def recorded(page: Any, *chunks: dict[str, Any]) -> None:
    """Answer every chat from now on with this stream instead of the model's."""
    page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=stream(*chunks))
    )


def answered(page: Any, text: str) -> None:
    """Answer every chat from now on with this text."""
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    recorded(
        page,
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": text}),
        chunk({}, "stop"),
        {"choices": [], "usage": usage},
    )


def download(page: Any, folder: Path) -> Path:
    """The file that Export downloads."""
    with page.expect_download() as found:
        page.get_by_role("button", name="Export").click()
    path = folder / "conversation.json"
    found.value.save_as(path)
    return path
