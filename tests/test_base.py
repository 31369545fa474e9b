"""Training that starts from a user's checkpoint: Qwen2, Qwen3, LLaMA, from a folder and the hub.

What DVC reruns in the graph is tested in test_graph.py.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.model import checkpoint
from pipeline.model.config import BaseConfig
from pipeline.run.errors import ModelError
from tests import checkpoints
from tests.bases import causal_given, take_in, trained
from tests.hubserver import REVISION, HubServer
from tests.workspace import TRAINING, Workspace, command

SFT = TRAINING | {"steps": 4, "tokens_per_step": 256, "context": 128, "eval_tokens": 64, "learning_rate": 1e-2}
SFT |= {"rehearse": "none"}


@pytest.mark.oracle
@pytest.mark.parametrize(
    "shape", ["qwen2", *(pytest.param(shape, marks=pytest.mark.full) for shape in ("qwen3", "llama"))]
)
def test_a_causal_checkpoint_is_fine_tuned_and_aligned_with_no_stage_before(
    shape: str, workspace: Workspace, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The folder has no corpus, no tokenizer of ours, and neither models/language nor models/code of its shape."""
    import transformers

    causal_given(tmp_path_factory.mktemp("given") / shape, shape)
    ended = command("tools", [f"tools.{k}={json.dumps(v)}" for k, v in SFT.items()] + ["tools.base=base"])
    assert ended.code == 0, ended.said
    for stage in ("lora", "reward", "dpo", "kto", "grpo"):
        trained(workspace, stage)
    trained(workspace, "dpo", adapter={"rank": 2, "alpha": 4})
    base = checkpoint.load(Path("models/base"))[0].state_dict()
    for stage in ("tools", "lora", "dpo", "kto", "grpo"):
        model, tokenizer = checkpoint.load(Path(f"models/{stage}"))
        assert model.config.family == shape
        moved = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, base[name])]
        assert moved, stage
    ids = torch.tensor([tokenizer.encode("def f(x):\n    return x\n")])
    theirs = transformers.AutoModelForCausalLM.from_pretrained("models/grpo", dtype=torch.float32).eval()
    with torch.no_grad():
        assert float((theirs(ids).logits - model.train(False)(ids)).abs().max()) <= 1e-4


def test_the_weights_keep_their_numbers_and_their_precision(
    workspace: Workspace, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("given") / "qwen3"
    pytest.importorskip("transformers")
    checkpoints.write(folder, "qwen3")
    state = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    assert take_in(folder).code == 0
    taken = load_file("models/base/model.safetensors")
    assert {tensor.dtype for tensor in taken.values()} == {torch.bfloat16}
    for name, tensor in state.items():
        assert torch.equal(taken[name][: len(tensor)][:500], tensor[:500]), name
    again = workspace.folder / "again"
    Path("models/base").rename(again)  # one of our own is copied, with its tokenizer
    assert take_in(again).code == 0
    assert {n: t for n, t in load_file("models/base/model.safetensors").items() if not torch.equal(t, taken[n])} == {}
    assert Path("models/base/tokenizer.json").read_bytes() == (again / "tokenizer.json").read_bytes()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    """A hub with `me/base`, to which huggingface_hub is directed."""
    pytest.importorskip("transformers")
    from huggingface_hub import constants

    home = tmp_path_factory.mktemp("hub")
    checkpoints.write(home / "base", "qwen3-untied")
    server = HubServer()
    server.files["me/base"] = {path.name: path.read_bytes() for path in (home / "base").iterdir()}
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    url = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    yield server
    server.shutdown()
    server.server_close()


def test_a_model_of_the_hub_is_taken_in_at_its_commit_which_the_lineage_names(
    workspace: Workspace, hub: HubServer
) -> None:
    ended = take_in(hub="me/base")
    assert ended.code == 0 and f"me/base: revision {REVISION}" in ended.said
    assert json.loads(Path("models/base/lineage.json").read_text())["base"] == f"me/base@{REVISION}"
    assert set(hub.gets) == {"config.json", "tokenizer.json", "model.safetensors"}
    for stage in ("lora", "dpo", "kto", "grpo"):
        trained(workspace, stage)


def edited(folder: Path, fault: str) -> None:
    """Put a fault into a checkpoint."""
    if fault == "architecture":
        checkpoints.edit(folder / "config.json", model_type="mixtral", architectures=["MixtralForCausalLM"])
    elif fault == "infinity":
        state = {name: tensor.half() for name, tensor in load_file(folder / "model.safetensors").items()}
        state["model.norm.weight"][3] = torch.inf
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    elif fault == "integers":
        state = load_file(folder / "model.safetensors")
        state["model.norm.weight"] = state["model.norm.weight"].to(torch.int8)
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    elif fault == "pickles":
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    elif fault == "adapter":
        (folder / "config.json").unlink()
        (folder / "adapter_config.json").write_text("{}")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("architecture", "mixtral"),
        ("infinity", "model.norm.weight (float16) contains non-finite values (1 of 64)"),
        ("integers", "model.norm.weight is torch.int8; expected weights in float32, bfloat16 or float16"),
        ("pickles", "model.safetensors is missing; expected safetensors (a .bin checkpoint must be converted first)"),
        ("adapter", "a peft adapter; merge it into its model first"),
    ],
)
def test_a_checkpoint_that_cannot_be_begun_from_is_refused_and_nothing_is_written(
    fault: str, message: str, workspace: Workspace, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("given") / "qwen3"
    checkpoints.write(folder, "qwen3")
    edited(folder, fault)
    ended = take_in(folder)
    assert ended.code == 2 and message in ended.said, ended.said
    assert not Path("models/base").exists()


def test_a_stage_says_what_to_do_without_a_checkpoint(workspace: Workspace) -> None:
    Path("data/pretrained").mkdir()
    assert take_in().code == 0  # a graph in which no stage asks for it
    ended = command("dpo", ["dpo.base=base"])
    assert ended.code == 2 and "dvc exp run -S base.hub=owner/name@revision" in ended.said
    assert "models/bass does not exist" in command("dpo", ["dpo.base=bass"]).said


def test_tokens_of_another_vocabulary_are_refused_with_the_key_that_helps(
    coded: Workspace, tmp_path_factory: pytest.TempPathFactory
) -> None:
    causal_given(tmp_path_factory.mktemp("given") / "qwen2", "qwen2")
    Path("data/tokens/text").symlink_to(Path("data/tokens/code").absolute())
    ended = command("code", ["code.base=base"])
    assert ended.code == 2 and "tokenizers differ" in ended.said and "language.base=base" in ended.said


def test_keys_that_do_not_fit_are_refused_with_what_is_expected(tmp_path: Path) -> None:
    for wrong in ("name", "a/b@", "a/b c", "https://a/b"):
        with pytest.raises(ValueError, match="hub: expected owner/name or owner/name@revision"):
            BaseConfig(hub=wrong)
    for right in ("Qwen/Qwen3-0.6B", "a/b@main", f"a/b@{REVISION}", "a/b@refs/pr/1"):
        assert BaseConfig(hub=right).inputs() == {}
    assert BaseConfig(folder=str(tmp_path)).inputs() == {"folder": str(tmp_path)}
    with pytest.raises(
        ModelError,
        match=r"base\.folder: expected a model directory, but .*gone is not one\. Give the path to a model directory",
    ):
        BaseConfig(folder=str(tmp_path / "gone")).inputs()
    with pytest.raises(ModelError, match=r"For a model on the hub, set base\.hub=Qwen/Qwen3-8B"):
        BaseConfig(folder="Qwen/Qwen3-8B").inputs()
