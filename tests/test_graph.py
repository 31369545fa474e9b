"""The graph on a scratch repository at smoke scale: what an edit reruns, what comes back, what a kill costs.

One repository is built once; each test leaves it as it found it. test_remotes.py tests what a clone gets of it.
"""

import ast
import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import httpx
import pytest
import yaml

from pipeline.evaluation import suites
from pipeline.run import codehash
from tests import checkpoints
from tests.graph import Repository, copy_of_built, ran
from tests.server import serving

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(2400)]
STAGES = yaml.safe_load((Path(__file__).parents[1] / "dvc.yaml").read_text())["stages"]


def evaluated(*models: str) -> tuple[str, ...]:
    """Those of the models that are in the graph, since a wing may have been removed."""
    return tuple(model for model in models if model in STAGES["stage_evaluate"]["matrix"]["model"])


MODELS = ("language", "code", "tools", "lora", "dpo", "kto", "grpo", "distill", "rlhf")
MASKED = evaluated("diffusion", "diffusion_dpo", "diffusion_grpo")
MEMORY = evaluated("memory")
SECOND = evaluated("diffusion_control", "memory_baseline")  # a second model of its stage
ALL = {
    "code_versions",
    "stage_corpus",
    "stage_tasks",
    "stage_overlap",
    "stage_base",
    "stage_tokenizer",
    "stage_encode@text",
    "stage_encode@code",
    *(f"stage_{model}" for model in MODELS),
    *(f"stage_evaluate@{model}" for model in MODELS),
    "stage_reward",
    "stage_evaluate_reward",
    "stage_teach",
    "stage_deploy",
    "stage_report",
    *(f"stage_{model}" for model in (*MASKED, *MEMORY)),
    *(f"stage_evaluate@{model}" for model in (*MASKED, *MEMORY, *SECOND)),
}
ALIGNED = {
    f"{stage}{model}" for model in ("dpo", "kto", "grpo", "distill", "rlhf") for stage in ("stage_", "stage_evaluate@")
} | {"stage_teach"}
AFTER_RLHF = {"stage_rlhf", "stage_deploy", "stage_evaluate@rlhf", "stage_report"}
AFTER_TOOLS = {
    "stage_tools",
    "stage_evaluate@tools",
    "stage_reward",
    "stage_evaluate_reward",
    "stage_deploy",
    "stage_lora",
    "stage_evaluate@lora",
    *ALIGNED,
    *AFTER_RLHF,
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    repository, output = copy_of_built(tmp_path_factory.mktemp("graph") / "repository", tmp_path_factory)
    assert ran(output) == ALL
    return repository


@pytest.fixture
def repository(built: Repository) -> Iterator[Repository]:
    yield built
    built.git("checkout", "-q", ".")
    built.dvc("checkout", "-q", "--force")
    assert built.changed() == set()


def test_every_function_that_a_stage_ran_is_covered_by_its_hash(built: Repository) -> None:
    """What tests/traced recorded in all processes while the graph was built, against what codehash reaches."""
    missing, count = set(), 0
    reached = codehash.closures(
        built.folder, sorted(path.stem for path in (built.folder / "stages").glob("*.py") if path.stem != "__init__")
    )
    statements = cache(lambda file: ast.parse((built.folder / file).read_text()).body)
    for line in {line for one in (built.folder.parent / "ran").iterdir() for line in one.read_text().splitlines()}:
        stage, file, number = line.split("\t")
        module = file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for statement in statements(file):
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                first = min(part.lineno for part in (statement, *statement.decorator_list))
                if first <= int(number) <= (statement.end_lineno or first):
                    count += 1
                    if statement.name not in reached[stage].get(module, ("", []))[1]:
                        missing.add(f"{stage}: {module}.{statement.name}")
    assert not missing, "\n".join(sorted(missing))
    assert count > 5000


def test_a_second_repro_runs_nothing_and_git_sees_no_artefact(repository: Repository) -> None:
    assert repository.repro() == set()
    assert repository.git("status", "--porcelain") == ""


def test_the_outs_are_there_and_models_are_hugging_face_directories(repository: Repository) -> None:
    for model in (*MODELS, "reward", "deploy", *MASKED, *MEMORY, *SECOND):
        names = {p.name for p in (repository.folder / "models" / model).iterdir()}
        assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "lineage.json"} <= names
    page = (repository.folder / "reports/index.html").read_text()
    assert "<svg" in page
    assert not re.search(r"<script|src=|url\(|@import|href=\"[^#]", page)
    for model in MODELS:
        numbers = json.loads((repository.folder / f"metrics/eval/{model}.json").read_text())
        assert numbers["code"]["bpb"] > 0
        assert numbers.keys() - {"settings", "lineage"} == {name.split()[0] for name in suites.purposes()[model]}
    for model in MASKED:
        numbers = json.loads((repository.folder / f"metrics/eval/{model}.json").read_text())
        assert numbers["code"]["bpb_bound"] > 0 and numbers["problems"]["decoding"]["forwards"] > 0
        assert f"<h3>{model}</h3>" in page  # its trace


def test_a_stage_concerns_what_is_made_from_it(repository: Repository) -> None:
    """A dry run lists the whole path; `dvc status` lists only what has changed already."""
    repository.edit("params.yaml", "tools:\n  steps:", "tools:\n  steps: 13")
    assert ran(repository.dvc("repro", "--dry", "--force-downstream")) == AFTER_TOOLS
    repository.git("checkout", "-q", "params.yaml")
    repository.edit("params.yaml", "lora:\n  steps:", "lora:\n  steps: 3")
    assert ran(repository.dvc("repro", "--dry", "--force-downstream")) == {
        "stage_lora",
        "stage_evaluate@lora",
        "stage_report",
    }


def test_an_edit_of_one_block_reruns_its_stage_and_what_follows_and_comes_back_from_the_run_cache(
    repository: Repository,
) -> None:
    """By the launcher, as `make` does."""
    before, make = repository.sha("rlhf"), ("python", "-m", "pipeline.tools.launch", "spine")
    repository.edit("params.yaml", "rlhf:\n  iterations:", "rlhf:\n  iterations: 1")
    assert ran(repository.run(*make).stdout) == AFTER_RLHF
    assert repository.sha("rlhf") != before
    repository.git("checkout", "-q", "params.yaml")
    assert ran(repository.run(*make).stdout) == set()
    assert repository.sha("rlhf") == before


def test_the_selected_model_file_concerns_language_and_another_one_nobody(repository: Repository) -> None:
    repository.edit("conf/model/tiny.yaml", "layers: 4", "layers: 5")
    assert repository.changed() == set()
    repository.edit("conf/model/nano.yaml", "layers: 4", "layers: 3")
    assert repository.changed() == {"stage_language"}


def test_a_checkpoint_to_start_from_is_followed_by_its_contents(repository: Repository, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    checkpoints.write(tmp_path / "base", "qwen3")
    repository.edit("params.yaml", "base: scratch", "base: base")
    repository.edit("params.yaml", "folder: data/pretrained", f"folder: {tmp_path / 'base'}")
    before = repository.sha("language")
    assert repository.repro("stage_language") == {
        "stage_base",
        "stage_tokenizer",
        "stage_encode@text",
        "stage_language",
    }
    assert repository.sha("language") != before
    assert not {"stage_base", "stage_tokenizer", "stage_language"} & repository.changed()
    checkpoints.write(tmp_path / "base", "qwen3", initializer_range=0.05)
    changed = repository.changed()
    assert "stage_base" in changed and not {"stage_tokenizer", "stage_language"} & changed
    assert repository.repro("stage_language") == {"stage_base", "stage_tokenizer", "stage_language"}


def test_fine_tuning_a_checkpoint_builds_nothing_before_it(repository: Repository, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    checkpoints.write(tmp_path / "base", "qwen2", max_position_embeddings=2048)
    own = "base: base\n  rehearse: none"
    repository.edit("params.yaml", "base: code\n  rehearse: tokens", own)
    repository.edit("params.yaml", "folder: data/pretrained", f"folder: {tmp_path / 'base'}")
    repository.edit("conf/scale/smoke.yaml", "code:\n  steps: ", "code:\n  steps: 1")
    assert repository.repro("stage_dpo") == {"stage_base", "stage_tools", "stage_dpo"}
    assert repository.repro("stage_dpo") == set()
    checkpoints.write(tmp_path / "base", "qwen3", max_position_embeddings=2048)
    assert repository.repro("stage_dpo") == {"stage_base", "stage_tools", "stage_dpo"}
    assert "stage_code" in repository.changed()  # on another branch, so it was not rebuilt


def test_another_seed_trains_on_the_data_of_before_and_another_data_seed_makes_new_data(repository: Repository) -> None:
    """The data keep their digests, so both runs are measured on the same items; see tests/test_seeds.py for the
    whole graph.
    """
    before = {model: repository.sha(model) for model in ("language", "tools")}
    inputs = repository.inputs("tools")
    repository.edit("params.yaml", "\nseed: 42 ", "\nseed: 1 ")
    assert repository.repro("stage_evaluate@language", "stage_tools") == {
        "stage_language",
        "stage_evaluate@language",
        "stage_code",
        "stage_tools",
    }
    assert all(repository.sha(model) != sha for model, sha in before.items())
    changed = {path for path, digest in repository.inputs("tools").items() if inputs[path] != digest}
    assert changed == {"models/code"}
    repository.git("checkout", "-q", "params.yaml", "dvc.lock")
    repository.dvc("checkout", "-q", "--force")
    repository.edit("params.yaml", "data_seed: 42", "data_seed: 1")
    assert {"stage_corpus", "stage_tasks"} <= repository.changed()
    assert ran(repository.dvc("repro", "--dry", "--force-downstream")) == ALL - {"code_versions", "stage_base"}


def test_a_block_of_the_scale_file_concerns_its_stage_alone(repository: Repository) -> None:
    repository.edit("conf/scale/smoke.yaml", "tools:\n  steps: 12", "tools:\n  steps: 13")
    assert repository.changed() == {"stage_tools"}
    repository.edit("conf/scale/demo.yaml", "tools:\n  steps: ", "tools:\n  steps: 1")
    assert repository.changed() == {"stage_tools"}


def test_runtime_and_the_number_of_processes_change_nothing(repository: Repository) -> None:
    repository.edit("params.yaml", "save_steps: 500", "save_steps: 7")
    assert repository.repro(STAGECOACH_LAUNCH="2") == set()


def test_a_stage_runs_alone_without_dvc(repository: Repository) -> None:
    done = repository.run("python", "-m", "stages.code", "code.steps=3")
    assert "3 steps" in done.stdout
    assert repository.changed() >= {"stage_code"}


def test_help_explains_the_stage_and_its_keys(repository: Repository) -> None:
    text = repository.run("python", "-m", "stages.language", "--help").stdout
    for piece in ("pretrain a transformer", "language.learning_rate = ", "conf/scale/smoke.yaml", "models/language"):
        assert piece in text


def test_an_experiment_with_another_model_runs_and_the_old_one_is_restored(repository: Repository) -> None:
    before = repository.sha("deploy")
    repository.dvc(
        "exp",
        "run",
        "-S",
        "model=tiny",
        "-S",
        "language.steps=2",
        "-S",
        "code.steps=2",
        "-S",
        "tools.steps=2",
        "-S",
        "deploy.model=tools",
        "stage_deploy",
    )
    assert repository.sha("deploy") != before
    shown = repository.dvc("exp", "show", "--md")
    assert "tiny" in shown
    repository.git("checkout", "-q", ".")
    assert repository.repro() == set()
    assert repository.sha("deploy") == before


def test_set_and_unset_leaves_no_trace_in_params_yaml(repository: Repository) -> None:
    text = (repository.folder / "params.yaml").read_text()
    repository.dvc("exp", "run", "-S", "tools.learning_rate=1e-4", "stage_tools")
    repository.dvc("exp", "run", "-S", "tools.learning_rate=null", "stage_tools")
    assert (repository.folder / "params.yaml").read_text() == text


def test_kill_9_of_everything_resumes_to_the_same_bits(repository: Repository, built: Repository) -> None:
    """Three random moments in each training stage; the newest state is truncated before one of the resumes."""
    chance = random.Random(5)
    for stage in ("language", "code", "tools"):
        whole = f"{stage}:\n  steps: 30"
        repository.edit("params.yaml", f"{stage}:\n  steps:", whole)
        repository.edit("params.yaml", "save_steps: ", "save_steps: 3 # ")
        target = f"stage_{stage}"
        env = {"STAGECOACH_WORK": str(repository.folder / ".work-killed")}
        for attempt in range(3):
            with repository.started("dvc", "repro", target, **env) as process:
                wait_for_state(repository.folder / ".work-killed", stage, chance.randrange(1, 4), process)
            if attempt == 1:
                newest = sorted(
                    (repository.folder / ".work-killed" / stage).glob("*/step-????????/weights.safetensors")
                )[-1]
                newest.write_bytes(newest.read_bytes()[:1000])
        repository.repro(target, **env)
        resumed = repository.sha(stage)
        repository.run("python", "-m", f"stages.{stage}", STAGECOACH_WORK=str(repository.folder / ".work-whole"))
        assert repository.sha(stage) == resumed, stage
        repository.git("checkout", "-q", "params.yaml", "dvc.lock")
        repository.dvc("checkout", "-q", "--force")


def wait_for_state(work: Path, stage: str, more: int, process: "subprocess.Popen[str]") -> None:
    """Wait until the stage has saved `more` further states, or has ended."""
    before = {p.name for p in work.glob(f"{stage}/*/step-????????")}
    start = time.monotonic()
    while time.monotonic() - start < 600:
        now = {p.name for p in work.glob(f"{stage}/*/step-????????")} - before
        if len(now) >= more or process.poll() is not None:
            return
        time.sleep(0.02)
    pytest.fail("no state was saved in ten minutes")


def test_a_preference_given_on_the_page_trains_the_models_that_learn_from_pairs(
    repository: Repository, tmp_path: Path
) -> None:
    """The model is served from where the graph was built, as with `make serve`. The next repro of DPO has the pair, and
    the tools model stays as it was.
    """
    choice = {
        "model": "tools",
        "prompt": [{"role": "user", "content": "Which of two answers do people like?"}],
        "chosen": [{"role": "assistant", "content": "This one."}],
        "rejected": [{"role": "assistant", "content": "That one."}],
    }
    models, feedback = [repository.folder / "models/tools"], "feedback/preferences.jsonl"
    with serving(models, "--feedback", feedback, log=tmp_path / "log", folder=repository.folder) as running:
        assert httpx.post(f"{running.url}/preferences", json=choice).status_code == 201
    before = repository.sha("tools"), repository.sha("dpo")
    assert repository.repro("stage_dpo") == {"stage_tasks", "stage_dpo"}
    pairs = [json.loads(line) for line in (repository.folder / "data/preferences/train.jsonl").read_text().splitlines()]
    assert [(p["prompt"], p["chosen"], p["rejected"]) for p in pairs if p["source"] == "feedback"] == [
        (choice["prompt"], choice["chosen"], choice["rejected"])
    ]
    assert repository.sha("tools") == before[0] and repository.sha("dpo") != before[1]
    assert {"stage_reward"} <= repository.changed()
    repository.git("checkout", "-q", ".")
    repository.dvc("checkout", "-q", "--force")


def test_killing_dvc_alone_takes_the_trainer_with_it(repository: Repository) -> None:
    """It takes two seconds on a quiet machine; the bound leaves room for one evaluation. Debian's sh does not exec the
    command.
    """
    repository.edit("params.yaml", "tools:\n  steps:", "tools:\n  steps: 4000")
    with repository.started("dvc", "repro", "stage_tools", SHELL="/bin/sh") as process:
        wait_for_state(repository.folder / ".work", "tools", 1, process)
        trainer = trainer_of(process)
        os.kill(process.pid, signal.SIGKILL)
        start = time.monotonic()
        while alive(trainer) and time.monotonic() - start < 300:
            time.sleep(0.05)
        assert not alive(trainer), "the trainer went on without dvc"


def trainer_of(process: "subprocess.Popen[str]") -> int:
    import psutil

    children = psutil.Process(process.pid).children(recursive=True)
    return next(child.pid for child in children if "stages.tools" in child.cmdline())


def alive(pid: int) -> bool:
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_parallel_stages_leave_a_clean_status(repository: Repository) -> None:
    repository.edit("params.yaml", "lora:\n  steps:", "lora:\n  steps: 2")
    repository.edit("params.yaml", "dpo:\n  loss:\n  beta:", "dpo:\n  loss:\n  beta: 0.2")
    repository.run("python", "-m", "pipeline.tools.launch", "-j", "2")
    assert repository.changed() == set()


def test_two_processes_see_the_same_rows_and_losses(repository: Repository, tmp_path: Path) -> None:
    curves = []
    for launch in ("", "2"):
        work = str(tmp_path / f"work{launch}")
        repository.run(
            "python",
            "-m",
            "stages.language",
            "runtime.precision=fp32",
            "runtime.logging_steps=1",
            STAGECOACH_LAUNCH=launch,
            STAGECOACH_WORK=work,
            ACCELERATE_USE_CPU="true",
            OMP_NUM_THREADS="1",
        )
        rows = (repository.folder / "metrics/language.csv").read_text().splitlines()
        column = rows[0].split(",").index("loss")
        curves.append([float(row.split(",")[column]) for row in rows[1:]])
    assert len(curves[0]) == 12
    assert curves[0] == pytest.approx(curves[1], abs=1e-4)


@pytest.mark.parametrize(
    ("command", "code", "text"),
    [
        (["stages.language", "language.stepz=3"], 2, "unknown key 'stepz' (did you mean 'steps'?)"),
        (["stages.language", "model=nanno"], 2, "did you mean 'nano'?"),
        (["stages.language", "language.learning_rate=high"], 2, 'expected float, got "high"'),
        (["stages.deploy", "deploy.model=nothing"], 2, "models/nothing does not exist"),
        (["stages.evaluate"], 2, "usage: python -m stages.evaluate MODEL [key=value ...]; got []"),
        (
            ["stages.language", "language.tokens_per_step=1000000000", "language.context=1000"],
            2,
            "too few tokens for one batch",
        ),
        (["pipeline.run.config", "scale=huge"], 2, "options: cluster, demo, gpu, smoke"),
    ],
)
def test_bad_input_exits_with_two_and_no_traceback(
    repository: Repository, command: list[str], code: int, text: str
) -> None:
    done = repository.run("python", "-m", *command, check=False)
    assert done.returncode == code, done.stdout
    assert text in done.stdout
    assert "Traceback" not in done.stdout


def test_a_base_model_with_another_tokenizer_is_refused(repository: Repository) -> None:
    path = repository.folder / "data/tokenizer/tokenizer.json"
    text = path.read_text()
    path.unlink()
    path.write_text(text.replace('"<|unused_0|>"', '"<|unused_z|>"'))
    done = repository.run("python", "-m", "stages.language", check=False)
    assert done.returncode == 2
    assert "tokenizer" in done.stdout
    assert "stage_encode" in done.stdout


def test_a_second_run_of_one_key_waits_and_exports(repository: Repository) -> None:
    first = repository.start("python", "-m", "stages.tools", "tools.steps=15")
    second = repository.start("python", "-m", "stages.tools", "tools.steps=15")
    outputs = [process.communicate()[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0]
    assert sum("already computed" in output for output in outputs) == 1
