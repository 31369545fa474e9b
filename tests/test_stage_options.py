"""What a stage itself does with its keys: shares and weights of its data, precision of what it publishes, noise on embeddings."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline import checkpoint
from pipeline.learning.settings import AdaptConfig, FitConfig, TuneConfig
from pipeline.model.config import ModelConfig
from pipeline.model.lora import AdapterConfig
from pipeline.model.source import Start
from pipeline.model.transformer import Transformer
from pipeline.work import Job
from stages import code, language, lora, tokenizer, tools
from tests.corpora import TOKENIZER, documents, write_corpus
from tests.test_fit import job
from tests.workspace import Workspace

TRAINING: dict[str, Any] = {
    "steps": 1,
    "tokens_per_step": 256,
    "context": 128,
    "learning_rate": 1e-3,
    "eval_tokens": 64,
}

ONE_ROW: dict[str, Any] = TRAINING | {"tokens_per_step": 128}


@dataclass(frozen=True)
class Ended:
    """A stage's published weights and its job."""

    weights: dict[str, torch.Tensor]
    job: Job


def shape() -> ModelConfig:
    """Of a tiny model for the tokenizer of the corpora."""
    return ModelConfig(vocab_size=TOKENIZER.vocab_size, width=32, layers=2, heads=2, kv_heads=1, head_dim=16, d_ff=48,
                       max_context=128, rope_theta=1e4, tied=True)  # fmt: skip


def trained_language(folder: Path, tokens: Path, **changes: Any) -> Ended:
    """Stage language on a corpus, from scratch."""
    at_work = job(folder / "work", logging_steps=1)
    params = language.Params(base=Start(), induction_heads=False, model=shape(), fit=FitConfig(**(TRAINING | changes)))
    language.run(params, at_work, tokenizer=tokens.parent / "tokenizer", tokens=tokens, out=folder / "language")
    return Ended(load_file(folder / "language/model.safetensors"), at_work)


def trained_code(folder: Path, tokens: Path, base: Path, **changes: Any) -> Ended:
    """Stage code on the same corpus."""
    at_work = job(folder / "work", logging_steps=1)
    params = code.Params(fim_rate=0.0, code_weight=1, text_weight=0, fit=FitConfig(**(TRAINING | changes)))
    code.run(params, at_work, base=base, code=tokens, text=tokens, out=folder / "code")
    return Ended(load_file(folder / "code/model.safetensors"), at_work)


def tuned(workspace: Workspace, name: str, **changes: Any) -> Ended:
    """Stage tools on the workspace's dialogues."""
    at_work, out = job(workspace.folder / name / "work", logging_steps=1), workspace.folder / name / "tools"
    params = tools.Params(fit=TuneConfig(**(TRAINING | changes)))
    tools.run(params, at_work, base=Path("models/code"), dialogues=Path("data/dialogues"), out=out)
    return Ended(load_file(out / "model.safetensors"), at_work)


def adapted(workspace: Workspace, name: str, **changes: Any) -> Ended:
    """Stage lora on the workspace's dialogues."""
    at_work, out = job(workspace.folder / name / "work", logging_steps=1), workspace.folder / name / "lora"
    params = lora.Params(adapter=AdapterConfig(rank=2, alpha=4.0), fit=AdaptConfig(**(TRAINING | changes)))
    lora.run(params, at_work, base=Path("models/code"), dialogues=Path("data/dialogues"), out=out)
    return Ended(load_file(out / "model.safetensors"), at_work)


def assert_rounded(whole: Ended, rounded: Ended) -> None:
    """Two equal runs, of which the second saved in bf16."""
    assert {tensor.dtype for tensor in whole.weights.values()} == {torch.float32}
    assert {tensor.dtype for tensor in rounded.weights.values()} == {torch.bfloat16}
    for name, tensor in whole.weights.items():
        assert torch.equal(tensor.bfloat16(), rounded.weights[name]), name


def test_language_and_code_publish_in_save_precision(tmp_path: Path) -> None:
    tokens = write_corpus(tmp_path / "corpus", documents(40), documents(6, first=1000))
    whole = trained_language(tmp_path / "whole", tokens)
    assert_rounded(whole, trained_language(tmp_path / "half", tokens, save_precision="bf16"))
    base = tmp_path / "whole/language"
    continued = trained_code(tmp_path / "whole", tokens, base)
    assert_rounded(continued, trained_code(tmp_path / "half", tokens, base, save_precision="bf16"))


def test_a_language_model_begins_with_induction_heads_where_they_are_asked_for() -> None:
    wide = replace(shape(), head_dim=32, width=64)
    params = language.Params(base=Start(), induction_heads=False, model=wide, fit=FitConfig(**TRAINING))
    plain = language.fresh(params, TOKENIZER, seed=1).state_dict()
    theirs = language.fresh(replace(params, induction_heads=True), TOKENIZER, seed=1).state_dict()
    changed = {name for name in plain if not torch.equal(plain[name], theirs[name])}
    assert {f"model.layers.{n}.self_attn.q_proj.weight" for n in (0, 1)} <= changed
    assert "model.layers.0.mlp.up_proj.weight" not in changed


def test_tools_publishes_in_save_precision(workspace: Workspace) -> None:
    assert_rounded(tuned(workspace, "whole"), tuned(workspace, "half", save_precision="bf16"))


@pytest.mark.parametrize("stage", [tuned, adapted])
def test_neftune_alpha_puts_noise_on_what_is_trained_and_on_nothing_else(stage: Any, workspace: Workspace) -> None:
    plain, noisy = stage(workspace, "plain"), stage(workspace, "noisy", neftune_alpha=15.0)
    losses = [[row["loss"] for row in ended.job.tracker.rows if "loss" in row] for ended in (plain, noisy)]
    assert losses[0] != losses[1]  # of the first step, before any update
    assert any(not torch.equal(tensor, noisy.weights[name]) for name, tensor in plain.weights.items())
    still = [stage(workspace, f"still{alpha}", neftune_alpha=alpha, learning_rate=0.0) for alpha in (0.0, 15.0)]
    held_out = [[row["val/loss"] for row in ended.job.tracker.rows if "val/loss" in row] for ended in still]
    assert held_out[0] == held_out[1] != []


# -- shares of the data ------------------------------------------------------------------------------------------------


def mixed(folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> list[tuple[str, bool]]:
    """The first eight rows that stage code trains on: of which corpus each is, and whether it has a gap."""
    streams: list[Any] = []
    monkeypatch.setattr(code, "fit", lambda model, stream, *_: streams.append(stream))
    tokens = {
        name: write_corpus(folder / name, [f"{name} {n} " * 8 for n in range(60)], [name]) for name in ("code", "text")
    }
    checkpoint.save(folder / "base", Transformer(shape(), torch.Generator().manual_seed(0)), TOKENIZER, {})
    params = code.Params(**changes, fit=FitConfig(**ONE_ROW))
    code.run(params, job(folder / "work"), base=folder / "base", **tokens, out=folder / "out")
    (stream,) = streams
    rows = [stream.batch(n, 128, stream.rows(n, 128)).input_ids.flatten().tolist() for n in range(8)]
    return [("code" if "code" in TOKENIZER.decode(row) else "text", TOKENIZER.fim_middle in row) for row in rows]


@pytest.mark.parametrize(("weights", "of_code"), [((3, 1), 6), ((1, 1), 4), ((1, 0), 8)])
def test_the_code_stage_mixes_its_corpora_by_their_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: tuple[int, int], of_code: int
) -> None:
    rows = mixed(tmp_path, monkeypatch, fim_rate=0.0, code_weight=weights[0], text_weight=weights[1])
    assert [name for name, _ in rows].count("code") == of_code


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_the_code_stage_leaves_gaps_in_code_and_none_in_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rate: float
) -> None:
    rows = mixed(tmp_path, monkeypatch, fim_rate=rate, code_weight=1, text_weight=1)
    assert any(gap for name, gap in rows if name == "code") == (rate > 0)
    assert not any(gap for name, gap in rows if name == "text")


@pytest.mark.parametrize(
    ("sample_mb", "text_share", "taken"),
    [(0.04, 0.5, (20, 20)), (0.04, 0.25, (10, 30)), (0.02, 1.0, (20, 0)), (9.0, 0.5, (100, 100))],
)
def test_the_tokenizer_counts_its_merges_on_a_sample_of_that_size_and_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sample_mb: float, text_share: float, taken: tuple[int, int]
) -> None:
    for name in ("text", "code"):
        write_corpus(tmp_path / name, [f"{name}{n:>996}" for n in range(100)], [name])
    read: list[str] = []

    def train(texts: Any, vocab_size: int) -> Any:
        read.extend(texts)
        return TOKENIZER

    monkeypatch.setattr(tokenizer.Tokenizer, "train", train)
    params = tokenizer.Params(vocab_size=512, sample_mb=sample_mb, text_share=text_share, base=Start())
    tokenizer.learnt(params, tmp_path / "text/raw", tmp_path / "code/raw")
    found = [sum(document.startswith(name) for document in read) for name in ("text", "code")]
    assert all(abs(a - b) <= 0.4 * b for a, b in zip(found, taken, strict=True))  # documents of 1 kB, chosen by a hash
