"""Take the README's pictures from the run in the working tree.

    python docs/pictures.py      reports/index.html -> docs/report.png, the page before models/tools -> docs/page.png

The page shows the first held-out request that the model answers correctly, and a story. Needs Chromium and the
extra dev.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.browser import browsing, opened, say  # noqa: E402
from tests.server import serving  # noqa: E402

STORY = "Tell a story that begins: Anna was a beetle in a narrow house beside the cottage."
SETTINGS = {"model": "tools", "temperature": 0, "max_tokens": 200}
SIZE: dict[str, Any] = {"width": 1200, "height": 1000}


def main() -> None:
    """Take both screenshots."""
    rows = (json.loads(line) for line in (ROOT / "metrics/eval/tools.jsonl").read_text("utf-8").splitlines())
    asked = next(row["prompt"] for row in rows if row["suite"] == "requests" and row["right"])
    with (
        tempfile.TemporaryDirectory() as folder,
        serving([ROOT / "models/tools"], log=Path(folder) / "log") as server,
        browsing() as browser,
    ):
        page = browser.new_page(viewport=SIZE)
        page.goto((ROOT / "reports/index.html").as_uri())
        page.screenshot(path=ROOT / "docs/report.png")
        with opened(browser, server.url, settings=SETTINGS, viewport=SIZE) as chat:
            for text in (asked, STORY):
                say(chat, text)
            chat.screenshot(path=ROOT / "docs/page.png")


if __name__ == "__main__":
    main()
