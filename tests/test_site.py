"""mkdocs.yml and docs/site.py: the documentation as a site."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.full
def test_the_site_builds_without_a_warning_has_the_docstrings_and_asks_no_other_host(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={"NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr[-4000:]
    start = (tmp_path / "site/index.html").read_text()
    assert 'href="tutorial/"' in start and "docs/tutorial.md" not in start
    learning = (tmp_path / "site/api/pipeline.learning/index.html").read_text()
    assert "pipeline.learning.losses" in learning and "cross-entropy" in learning.lower()
    for page in (start, learning):
        fetched = re.findall(
            r'<(?:script|img|link rel="(?:stylesheet|preconnect)")[^>]+(?:src|href)="(https?:[^"]+)', page
        )
        assert fetched == []
