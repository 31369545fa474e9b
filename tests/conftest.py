"""Shared fixtures: a tiny model, a tokenizer of little more than bytes, the repository as working directory.

The whole run has its own home directory (`away_from_home`). STAGECOACH_REQUIRE=chromium makes a test fail that would be
skipped because Chromium is missing.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:  # torch takes seconds to import; the tests that need it import it themselves
    from collections.abc import Callable, Generator, Iterator

    import openai

    from pipeline.model.transformer import Transformer
    from pipeline.text.tokenizer import Tokenizer
    from tests.server import Running
    from tests.workspace import Workspace

settings.register_profile("same", derandomize=True)  # the same cases each time, so that a failing run can be repeated
settings.load_profile("same")
os.environ.setdefault("STAGECOACH_MLFLOW", "off")  # tests of MLflow switch it on; the rest need not wait for it
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = Path(__file__).parents[1]
BUILD_A_GRAPH = ("test_graph.py", "test_spine.py")
LONG = ("test_launch.py", "test_own_model.py", "test_tutorial.py", "test_wings.py")  # minutes each, with few tests
NEED_THE_GRAPH = {f"test_{name}.py" for name in ("extending", "remotes")}
AT_HOME = {  # where programs keep a user's files, below HOME
    "XDG_CACHE_HOME": ".cache",
    "XDG_CONFIG_HOME": ".config",
    "XDG_DATA_HOME": ".local/share",
    "XDG_STATE_HOME": ".local/state",
    "HF_HOME": ".cache/huggingface",
    "MPLCONFIGDIR": ".config/matplotlib",
    "DVC_SITE_CACHE_DIR": ".cache/dvc",
    "DVC_GLOBAL_CONFIG_DIR": ".config/dvc",
}
# Variables from a user's shell that would change what a test does
NOT_OURS = (
    "MLFLOW_",
    "WANDB_",
    "HF_",
    "HUGGING_FACE_",
    "OPENAI_",
    "AWS_",
    "DVC_",
    "GIT_",
    "STAGECOACH_LAUNCH",
    "STAGECOACH_WORK",
)
# What may be required -> words in a skip's reason when it is missing
REQUIRED = {"chromium": ("Chromium", "playwright")}
SHARED = ("served", "built")  # folders of fixtures that live as long as the run
SENTENCES = (
    "The pilot asked the girl which way the ferry would go, and the girl told the pilot.\n",
    "def add(left, right):\n    return left + right\n",
    "It wasn't the rope that was wet; it was the deck.\n",
)


def pytest_configure(config: pytest.Config) -> None:
    """Set the home before any package is imported; pytest-xdist's workers inherit the controller's."""
    unknown = required() - set(REQUIRED)
    if unknown:
        raise pytest.UsageError(f"STAGECOACH_REQUIRE: expected only {', '.join(REQUIRED)}, got {', '.join(unknown)}")
    if not hasattr(config, "workerinput"):
        config.add_cleanup(away_from_home())


def away_from_home() -> Callable[[], None]:
    """Give this process and its children an empty home, so that no test reads or writes the user's; returns a
    function that removes it.
    """
    home = Path(tempfile.mkdtemp(prefix="stagecoach-home-"))
    for name in [name for name in os.environ if name.startswith(NOT_OURS)]:
        del os.environ[name]
    os.environ["HOME"] = str(home)
    for name, place in AT_HOME.items():
        os.environ[name] = str(home / place)
    (home / ".gitconfig").write_text("[safe]\n\tdirectory = *\n")  # whoever owns the clone
    return lambda: shutil.rmtree(home, ignore_errors=True)


def required() -> set[str]:
    """What the tests may not be skipped for."""
    return {name for name in os.environ.get("STAGECOACH_REQUIRE", "").split(",") if name}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test that is skipped because something required is missing."""
    report = yield
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2]
        lacking = [name for name in sorted(required()) if any(word in reason for word in REQUIRED[name])]
        if lacking:
            report.outcome = "failed"
            report.longrepr = f"STAGECOACH_REQUIRE names {lacking[0]}, and the test was skipped. {reason}"
    return report


@pytest.hookimpl(trylast=True)  # after the tests of other groups are deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files for `--dist loadfile --no-loadscope-reorder`, where each process takes the next one, so that all
    processes end at about the same time.

    First come the files that build a graph, then the long ones, then the rest, those with the most tests first. Other
    files that need the graph go in the middle, when it is likely to exist.
    """
    count = Counter(item.path for item in items)
    files = sorted(
        count, key=lambda path: (path.name not in BUILD_A_GRAPH, path.name not in LONG, -count[path], path.name)
    )
    waiting = [path for path in files if path.name in NEED_THE_GRAPH]
    others = [path for path in files if path not in waiting]
    middle = len(others) // 2
    place = {path: number for number, path in enumerate([*others[:middle], *waiting, *others[middle:]])}
    items.sort(key=lambda item: place[item.path])


@pytest.fixture(scope="module", autouse=True)
def removed_after(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Delete what a file's fixtures wrote once its tests have passed: each copy of a graph takes half a gigabyte."""
    base, failed = tmp_path_factory.getbasetemp(), request.session.testsfailed
    before = set(base.iterdir())
    yield
    if request.session.testsfailed == failed:
        for path in set(base.iterdir()) - before:
            if not path.name.startswith(SHARED):
                shutil.rmtree(path, ignore_errors=True)


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
        vocab_size=byte_tokenizer.vocab_size,
        width=32,
        layers=2,
        heads=2,
        kv_heads=1,
        head_dim=16,
        d_ff=48,
        max_context=256,
        rope_theta=1e4,
        tied=True,
    )
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
    """The alignment stages on tiny models and data, in their own working directory."""
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
    """OpenAI's own client for that server; it does not retry."""
    import openai

    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium; tests are skipped where there is none. While it is open, this thread has a running event
    loop.
    """
    from tests.browser import browsing

    with browsing() as found:
        yield found


@pytest.fixture
def page(browser: Any, server: Running) -> Iterator[Any]:
    """The server's page in a fresh profile; a module may define a `server` of its own."""
    from tests.browser import opened

    with opened(browser, server.url) as found:
        yield found


@pytest.fixture
def coded(
    tmp_path: Path, byte_tokenizer: Tokenizer, tiny_model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> Workspace:
    """A workspace that has code tokens too, as the working directory."""
    from tests import workspace

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STAGECOACH_WORK", str(tmp_path / ".work"))
    made = workspace.make(tmp_path, byte_tokenizer, tiny_model)
    workspace.write_code(tmp_path, byte_tokenizer)
    return made
