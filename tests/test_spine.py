"""The spine at smoke scale, as `make` builds it, and what later edits cost. test_graph.py tests the whole graph, in
`make test-all`.

One repository is built once by the launcher; each test leaves it as it found it, so the next starts from a graph that
is up to date.
"""

import json
import shutil
from collections.abc import Iterator

import pytest

from tests.graph import Repository, ran

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
SPINE = ["python", "-m", "pipeline.tools.launch", "-j", "2", "spine"]
MODELS = ("language", "code", "tools", "reward", "rlhf", "deploy")
AFTER_RLHF = {"stage_rlhf", "stage_deploy", "stage_evaluate@rlhf", "stage_report"}


def launched(repository: Repository) -> set[str]:
    """Build the spine and return the stages whose commands ran."""
    output = repository.run(*SPINE).stdout
    assert output.count("dvc push") <= 1 and output.count("git add dvc.lock") <= 1  # DVC says it after each stage
    return ran(output)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    repository = Repository.copy_of_ours(tmp_path_factory.mktemp("spine") / "repository")
    built = launched(repository)
    assert {*AFTER_RLHF, "stage_corpus", "stage_deploy", "stage_evaluate@tools"} <= built
    assert not {"stage_dpo", "stage_grpo", "stage_lora", "stage_diffusion", "stage_memory"} & built
    repository.commit("built")
    yield repository
    shutil.rmtree(repository.folder)


def test_the_models_the_numbers_and_the_page_of_the_spine_are_there(built: Repository) -> None:
    for model in MODELS:
        names = {path.name for path in (built.folder / "models" / model).iterdir()}
        assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "lineage.json"} <= names
    numbers = json.loads((built.folder / "metrics/eval/rlhf.json").read_text())
    assert numbers["problems"]["n"] > 0
    assert "<svg" in (built.folder / "reports/index.html").read_text()
    assert built.git("status", "--porcelain") == ""


def test_a_comment_a_docstring_and_the_server_train_nothing(built: Repository) -> None:
    built.edit("pipeline/model/layers.py", '"""', '"""Another word. ')
    (built.folder / "pipeline/model/transformer.py").open("a").write("\n# a comment\n")
    (built.folder / "pipeline/serve/chat.py").open("a").write("\nPORT = 1\n")
    assert launched(built) <= {"code_versions"}
    built.git("checkout", "-q", ".")


def test_a_constant_in_the_model_concerns_every_stage_that_uses_it(built: Repository) -> None:
    built.edit("pipeline/model/transformer.py", "EVEN_ROWS = 128", "EVEN_ROWS = 64")
    assert built.repro("code_versions") == {"code_versions"}
    assert {"stage_language", "stage_code", "stage_tools", "stage_deploy"} <= built.changed()
    assert not {"stage_corpus", "stage_tokenizer", "stage_encode@text"} & built.changed()
    built.git("checkout", "-q", ".")
