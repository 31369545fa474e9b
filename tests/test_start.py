"""From a user's checkpoint through the stages base, tokenizer, encode, language and code, in a separate working
directory.

What DVC reruns is in test_graph.py.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pipeline.model import checkpoint
from pipeline.text.tokenizer import Tokenizer
from tests import checkpoints
from tests.conftest import ROOT
from tests.workspace import Ended, command

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.oracle]
pytest.importorskip("transformers")
TRAINING = {
    "steps": 3,
    "tokens_per_step": 256,
    "context": 128,
    "optimizer": "adamw",
    "learning_rate": 1e-4,
    "warmup_steps": 0,
    "eval_steps": 100,
    "eval_tokens": 512,
}
Stage = Callable[..., Ended]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with both corpora, and a checkpoint outside it."""
    home = tmp_path / "home"
    home.mkdir()
    for name in ("conf", "stages", "pipeline"):
        (home / name).symlink_to(ROOT / name)
    (home / "params.yaml").write_text(
        "seed: 1\ndata_seed: 1\nmodel: nano\nscale: smoke\ndata: machine\nlanguage: {base: scratch}\n"
    )
    documents = [
        path.read_text(encoding="utf-8")[:2000] for path in sorted((ROOT / "pipeline/ingest").glob("[a-z]*.py"))
    ]
    (home / "models/scratch").mkdir(parents=True)
    for corpus, first in (("text", 0), ("code", 1)):
        (home / "data/raw" / corpus).mkdir(parents=True)
        for split, texts in (("train", documents[first:-4:2]), ("val", documents[-4 + first :: 2])):
            columns = {
                "text": texts,
                "source": ["s"] * len(texts),
                "path": [f"{split}/{n}" for n in range(len(texts))],
                "license": ["MIT"] * len(texts),
            }
            pq.write_table(pa.table(columns), home / f"data/raw/{corpus}/{split}-0.parquet")
    monkeypatch.chdir(home)
    monkeypatch.setenv("STAGECOACH_WORK", str(home / ".work"))
    return tmp_path / "base"


def run(stage: str, *argv: str, **changes: Any) -> Ended:
    """Run a stage with its training keys, `changes`, and the keys that all runs share."""
    values = (TRAINING if stage in ("language", "code") else {}) | changes
    settings = [f"{stage}.{key}={json.dumps(value)}" for key, value in values.items()]
    return command(stage, [*argv, *settings, "runtime.precision=fp32", "runtime.workers=1"])


def begin(folder: Path) -> None:
    """Import the checkpoint, and go from it to the language model."""
    ended = run("base", f"base.folder={folder}")
    assert ended.code == 0, ended.said
    through("language.base=base")


def key(stage: str) -> str:
    return json.loads(Path(f"metrics/{stage}.json").read_text())["lineage"]["key"]


def through(*base: str) -> None:
    """Run the stages up to the language model."""
    for stage, argv in (("tokenizer", base), ("encode", ("text",)), ("language", base)):
        ended = run(stage, *argv)
        assert ended.code == 0, f"{stage}: {ended.said}"


@pytest.mark.parametrize("shape", ["qwen2", "llama"])
def test_a_checkpoint_goes_through_the_stages_and_comes_out_in_transformers(shape: str, folder: Path) -> None:
    import transformers

    checkpoints.write(folder, shape)
    begin(folder)
    assert run("encode", "code").code == 0 and run("code").code == 0
    model, tokenizer = checkpoint.load(Path("models/code"))
    assert model.config.family == shape and model.config.layers == 2  # nano has four
    assert tokenizer.hash == Tokenizer.load(Path("data/tokenizer")).hash
    meta = json.loads(Path("data/tokens/text/meta.json").read_text())
    assert (meta["tokenizer"], meta["dtype"]) == (tokenizer.hash, "uint16")
    first = pq.read_table("data/raw/text/train-0.parquet")["text"][0].as_py()
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    kept = theirs(first.replace("<", "("), add_special_tokens=False)["input_ids"]
    assert tokenizer.encode(first.replace("<", "(")) == kept
    shards, offsets = np.fromfile("data/tokens/text/train.bin", "<u2"), np.fromfile("data/tokens/text/train.idx", "<u8")
    assert shards[: offsets[1]].tolist() == [*tokenizer.encode(first), tokenizer.end_of_text]
    language = checkpoint.load(Path("models/language"))[0]
    before = checkpoints.write(folder.parent / "again", shape).state_dict()
    for name, now in language.state_dict().items():  # only three steps away from where it started
        rows = slice(500) if name.startswith(("model.embed", "lm_head")) else slice(None)
        assert 0 < float((now[rows] - before[name][rows]).abs().max()) < 2e-3, name
    saved = transformers.AutoModelForCausalLM.from_pretrained("models/code", dtype=torch.float32).eval()
    ids = torch.tensor([tokenizer.encode(first)[:100]])
    with torch.no_grad():
        assert float((saved(ids).logits - model.train(False)(ids)).abs().max()) <= 1e-5
    assert transformers.AutoTokenizer.from_pretrained("models/code")(first.replace("<", "("))["input_ids"] == kept
    lineage = json.loads(Path("models/language/lineage.json").read_text())
    assert lineage["inputs"].keys() == {"data/tokenizer", "data/tokens/text", "models/base"}


def test_other_weights_train_anew_and_from_scratch_the_checkpoint_concerns_nobody(folder: Path) -> None:
    checkpoints.write(folder, "qwen3")
    through()
    scratch = {stage: key(stage) for stage in ("tokenizer", "language")}
    assert checkpoint.load(Path("models/language"))[0].config.layers == 4
    begin(folder)
    first = {stage: key(stage) for stage in scratch}
    assert all(first[stage] != scratch[stage] for stage in scratch)
    tokenizer = Path("data/tokenizer/tokenizer.json").read_bytes()
    checkpoints.write(folder, "qwen3", initializer_range=0.05)
    begin(folder)
    assert key("language") != first["language"]
    assert Path("data/tokenizer/tokenizer.json").read_bytes() == tokenizer  # so nothing is encoded again
    through()
    assert {stage: key(stage) for stage in scratch} == scratch


def test_a_checkpoint_that_cannot_be_continued_stops_its_stage_and_leaves_nothing(folder: Path) -> None:
    checkpoints.write(folder, "llama")
    checkpoints.edit(folder / "config.json", rope_scaling={"rope_type": "llama3", "factor": 8.0})
    ended = run("base", f"base.folder={folder}")
    assert ended.code == 2 and "stage_base: config.json: rope_type = 'llama3' is not supported" in ended.said
    ended = run("base", "base.folder=Qwen/Qwen3-0.6B")
    assert ended.code == 2 and "set base.hub=Qwen/Qwen3-0.6B" in ended.said
    assert not Path("models/base").exists()


def test_a_tokenizer_that_was_not_taken_from_the_checkpoint_stops_the_stage(folder: Path) -> None:
    checkpoints.write(folder, "qwen3")
    assert run("tokenizer").code == 0 and run("encode", "text").code == 0
    assert run("base", f"base.folder={folder}").code == 0
    ended = run("language", "language.base=base")
    assert ended.code == 2 and "models/base and data/tokenizer have different tokenizers" in ended.said
    assert not Path("models/language").exists()
