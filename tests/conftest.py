"""Shared fixtures: a tiny model, a tokenizer of little more than bytes, the repository as working directory."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:  # torch takes seconds to import; the tests that need it import it themselves
    from collections.abc import Iterator

    import openai

    from pipeline.model.transformer import Transformer
    from pipeline.text.tokenizer import Tokenizer
    from tests.server import Running
    from tests.workspace import Workspace

settings.register_profile("same", derandomize=True)  # the same cases each time: a red run is one that can be repeated
settings.load_profile("same")
os.environ.setdefault("STAGECOACH_MLFLOW", "off")  # tests of MLflow switch it on; the rest need not wait for it
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = Path(__file__).parents[1]
NEED_THE_GRAPH = {f"test_{name}.py" for name in ("extending", "remotes", "tutorial")}
SENTENCES = (
    "The pilot asked the girl which way the ferry would go, and the girl told the pilot.\n",
    "def add(left, right):\n    return left + right\n",
    "It wasn't the rope that was wet; it was the deck.\n",
)


@pytest.hookimpl(trylast=True)  # when those of other groups are gone
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The order of files for `--dist loadfile --no-loadscope-reorder`, of which each process takes the next: so none ends long after another.

    First the file that builds the graph for all, then those of many tests; the others that need the graph wait for it in the middle.
    """
    count = Counter(item.path for item in items)
    files = sorted(count, key=lambda path: (path.name != "test_graph.py", -count[path], path.name))
    waiting = [path for path in files if path.name in NEED_THE_GRAPH]
    others = [path for path in files if path not in waiting]
    middle = len(others) // 2
    place = {path: number for number, path in enumerate([*others[:middle], *waiting, *others[middle:]])}
    items.sort(key=lambda item: place[item.path])


@pytest.fixture
def in_repository(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work from the repository's root, as `dvc repro` does."""
    monkeypatch.chdir(ROOT)
    return ROOT


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    """320 ids: the control tokens, the bytes, a few merges."""
    from pipeline.text.tokenizer import Tokenizer

    return Tokenizer.train(iter(SENTENCES), 320)


@pytest.fixture
def tiny_model(byte_tokenizer: Tokenizer) -> Transformer:
    """2 layers of width 32 with weights so large that its greedy text varies, in evaluation mode."""
    import torch

    from pipeline.model.config import ModelConfig
    from pipeline.model.transformer import Transformer

    config = ModelConfig(
        vocab_size=byte_tokenizer.vocab_size, width=32, layers=2, heads=2, kv_heads=1, head_dim=16, d_ff=48,
        max_context=256, rope_theta=1e4, tied=True,
    )  # fmt: skip
    model = Transformer(config, torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.2)
    return model.train(False)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """An empty folder for a user's files."""
    folder = tmp_path / "own"
    folder.mkdir()
    return folder


@pytest.fixture
def workspace(
    tmp_path: Path, byte_tokenizer: Tokenizer, tiny_model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> Workspace:
    """The stages of alignment on tiny models and data, in a working directory of their own."""
    from tests import workspace

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STAGECOACH_WORK", str(tmp_path / ".work"))
    return workspace.make(tmp_path, byte_tokenizer, tiny_model)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Tokenizer) -> Iterator[Running]:
    """The HTTP server with untrained models: `nano` and `other`, which chat, and `judge`, which scores."""
    from tests.server import save_models, serving

    folder = tmp_path_factory.mktemp("served")
    with serving(save_models(folder, byte_tokenizer), log=folder / "log") as running:
        yield running


@pytest.fixture(scope="session")
def client(server: Running) -> openai.OpenAI:
    """OpenAI's own client of that server; it does not try again."""
    import openai

    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium; tests are skipped where there is none. While it is open this thread has a running event loop."""
    from tests.browser import browsing

    with browsing() as found:
        yield found


@pytest.fixture
def page(browser: Any, server: Running) -> Iterator[Any]:
    """The page of the server, also of a module's own, in a fresh profile."""
    from tests.browser import opened

    with opened(browser, server.url) as found:
        yield found


@pytest.fixture
def masked(
    tmp_path: Path, byte_tokenizer: Tokenizer, tiny_model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> Workspace:
    """A workspace with what the stages of masked diffusion read, and the working directory in it."""
    from tests import masked_workspace

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STAGECOACH_WORK", str(tmp_path / ".work"))
    return masked_workspace.make(tmp_path, byte_tokenizer, tiny_model)
