"""Keys of the stages that train by next-token prediction or from pairs: each reaches what it is said to change."""

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.learning.pair_losses import PairLoss
from pipeline.learning.settings import FitConfig, FullTraining, PairConfig
from pipeline.model import checkpoint
from pipeline.model.config import ModelConfig
from pipeline.model.initialization import induction_heads, relate_variants
from pipeline.model.lora import AdaptedLinear, AdapterConfig
from pipeline.model.transformer import Transformer
from pipeline.run.device import generator
from pipeline.run.errors import ModelError
from stages import code, dpo, language, lora, tools
from tests import corpora
from tests.handed import Handed, handed
from tests.loop import job
from tests.settings import flat
from tests.workspace import Workspace

SHAPE = ModelConfig(
    vocab_size=corpora.TOKENIZER.vocab_size,
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
CODE = [f"x{n} = {n}\n" * 2 for n in range(160)]
TEXT = [f"The {n} boats. " * 3 for n in range(160)]


def fitting(**changes: Any) -> FitConfig:
    values: dict[str, Any] = {"steps": 1, "tokens_per_step": 256, "context": 64, "learning_rate": 1e-3}
    return flat(FitConfig, **(values | changes))


# language


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token folders of code and of text, code/tokens and text/tokens, with their tokenizer."""
    folder = tmp_path_factory.mktemp("corpora")
    for name, documents in (("code", CODE), ("text", TEXT)):
        corpora.write_corpus(folder / name, documents[10:], documents[:10])
    return folder


def fresh(tokens: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Handed:
    """What stage language hands to `fit`; its model directory is `folder`/model."""
    found = handed(language, monkeypatch)
    values: dict[str, Any] = {"induction_heads": False, "model": SHAPE, "fit": fitting()}
    language.run(
        language.Params(**(values | changes)),
        job(folder / "work/key"),
        base=tokens / "scratch",
        tokenizer=tokens / "text/tokenizer",
        tokens=tokens / "text/tokens",
        out=folder / "model",
    )
    return found


def test_induction_heads_stand_in_the_weights_that_training_begins_with_only_where_they_are_asked_for(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = generator("language", "weights", 1)
    expected = Transformer(SHAPE, draws)
    plain = fresh(tokens, tmp_path / "plain", monkeypatch, induction_heads=False).model
    torch.testing.assert_close(plain.state_dict(), expected.state_dict(), rtol=0, atol=0)
    assert plain.model.layers[0].mlp.down_proj.weight.any()

    relate_variants(expected, corpora.TOKENIZER.token_bytes, draws)
    induction_heads(expected, draws)
    copying = fresh(tokens, tmp_path / "copying", monkeypatch, induction_heads=True).model
    torch.testing.assert_close(copying.state_dict(), expected.state_dict(), rtol=0, atol=0)
    assert not copying.model.layers[0].mlp.down_proj.weight.any()


def test_language_trains_the_shape_of_the_model_file_on_rows_of_its_context(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = replace(SHAPE, layers=3, d_ff=64)
    settings = fitting(context=32, tokens_per_step=96)
    found = fresh(tokens, tmp_path, monkeypatch, model=shape, fit=settings)
    assert found.from_scratch and found.model.config == shape and found.config == settings
    assert found.stream.batch(0, 32, found.stream.rows(0, 32)).input_ids.shape == (3, 32)


# code


def mixed(tokens: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Handed:
    """What stage code hands to `fit`; its model directory is `folder`/model."""
    base, found = folder / "base", handed(code, monkeypatch)
    checkpoint.save(base, Transformer(SHAPE, torch.Generator().manual_seed(0)), corpora.TOKENIZER, {})
    values: dict[str, Any] = {"fim_rate": 0.0, "code_weight": 1, "text_weight": 1, "fit": fitting()}
    code.run(
        code.Params(**(values | changes)),
        job(folder / "work/key"),
        base=base,
        code=tokens / "code/tokens",
        text=tokens / "text/tokens",
        out=folder / "model",
    )
    return found


def rows(found: Handed, steps: int = 10) -> list[tuple[list[int], int]]:
    """The rows of the first steps, each with its number of documents or pieces."""
    batches = (found.stream.batch(step, 64, found.stream.rows(step, 64)) for step in range(steps))
    return [
        (row, len(set(pieces) - {-1}))
        for batch in batches
        for row, pieces in zip(batch.input_ids.tolist(), batch.documents.tolist(), strict=True)
    ]


def is_text(row: list[int]) -> bool:
    return "boats" in corpora.TOKENIZER.decode(row)


@pytest.mark.parametrize(("weights", "share"), [((3, 1), 0.25), ((1, 1), 0.5), ((1, 3), 0.75), ((1, 0), 0.0)])
def test_code_and_text_stand_in_the_batches_by_their_weights(
    weights: tuple[int, int], share: float, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = mixed(tokens, tmp_path, monkeypatch, code_weight=weights[0], text_weight=weights[1])
    read = rows(found)
    assert len(read) == 40
    assert sum(is_text(row) for row, _ in read) == share * len(read)


def test_without_weight_the_text_is_not_even_opened(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "corpora").mkdir()
    (tmp_path / "corpora/code").symlink_to(tokens / "code")
    found = mixed(tmp_path / "corpora", tmp_path, monkeypatch, text_weight=0)
    alone = corpora.stream(tokens / "code/tokens", cache=tmp_path / "cache")
    assert found.stream.fingerprint == alone.fingerprint
    with pytest.raises(ValueError, match="text_weight >= 0"):
        code.Params(fim_rate=0.5, code_weight=1, text_weight=-1, fit=fitting())


@pytest.mark.parametrize(("rate", "low", "high"), [(0.0, 0.0, 0.0), (0.5, 0.4, 0.6), (1.0, 0.95, 1.0)])
def test_a_share_of_the_pieces_of_code_and_none_of_text_is_to_be_filled_in(
    rate: float, low: float, high: float, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = rows(mixed(tokens, tmp_path, monkeypatch, fim_rate=rate), steps=40)
    gap = corpora.TOKENIZER.fim_middle
    told = [row for row, _ in read if is_text(row)]
    assert told and not any(gap in row for row in told)
    written = [(row.count(gap), pieces) for row, pieces in read if not is_text(row)]
    gaps, pieces = (sum(column) for column in zip(*written, strict=True))
    assert pieces > 100
    assert low <= gaps / pieces <= high


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [language, code], ids=lambda stage: stage.__name__)
def test_weights_are_published_in_the_precision_that_is_asked_for(
    stage: ModuleType, precision: str, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fresh if stage is language else mixed
    made(tokens, tmp_path, monkeypatch, full=FullTraining(save_precision=precision))
    written = load_file(tmp_path / "model/model.safetensors")
    assert {value.dtype for value in written.values()} == {checkpoint.DTYPES[precision]}


@pytest.mark.parametrize("stage", [language, code], ids=lambda stage: stage.__name__)
def test_dropout_is_given_to_the_model(
    stage: ModuleType, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fresh if stage is language else mixed
    assert made(tokens, tmp_path, monkeypatch, full=FullTraining(dropout=0.25)).model.dropout == 0.25


# tools, lora

DIALOGUES: dict[str, Any] = {"steps": 1, "tokens_per_step": 256, "context": 128, "learning_rate": 1e-3}


MIXED: dict[str, Any] = {"rehearse_from": 0.5, "dialogue_weight": 2, "text_weight": 1, "code_weight": 1}


def tuned(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, rehearsal: Path = Path("data/none"), **changes: Any
) -> Handed:
    """What stage tools hands to `fit`."""
    found = handed(tools, monkeypatch)
    tools.run(
        flat(tools.Params, **(DIALOGUES | MIXED | changes)),
        job(workspace.folder / "work/key"),
        base=Path("models/code"),
        dialogues=Path("data/dialogues"),
        text=rehearsal / "text",
        code=rehearsal / "code",
        out=Path("models/out"),
    )
    return found


def rehearsed(workspace: Workspace) -> Path:
    """Tokens of code and of text, with the workspace's tokenizer."""
    for name, documents in (("code", CODE), ("text", TEXT)):
        corpora.write_corpus(workspace.folder / name, documents[10:], documents[:10], workspace.tokenizer)
        (workspace.folder / name / "tokens").rename(workspace.folder / "data/tokens" / name)
    return Path("data/tokens")


def adapted(
    workspace: Workspace,
    monkeypatch: pytest.MonkeyPatch,
    adapter: AdapterConfig,
    roles: tuple[str, ...] = (),
    **changes: Any,
) -> Handed:
    """What stage lora hands to `fit`; `seen` holds its adapted layers, by name."""
    found = handed(lora, monkeypatch, lambda given: adapters(given.model))
    params = flat(lora.Params, trained_roles=roles, adapter=adapter, **(DIALOGUES | changes))
    lora.run(
        params,
        job(workspace.folder / "work/key"),
        base=Path("models/code"),
        dialogues=Path("data/dialogues"),
        out=Path("models/out"),
    )
    return found


def adapters(model: torch.nn.Module) -> dict[str, AdaptedLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, AdaptedLinear)}


def test_noise_of_the_embeddings_is_as_large_as_it_was_asked_for(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = AdapterConfig(rank=2, alpha=4.0)
    for alpha in (0.0, 5.0):
        assert tuned(workspace, monkeypatch, neftune_alpha=alpha).model.neftune_alpha == alpha
        assert adapted(workspace, monkeypatch, adapter, neftune_alpha=alpha).model.neftune_alpha == alpha


def test_what_was_learned_before_is_rehearsed_in_the_last_steps_by_weight(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"steps": 20, "context": 64, "tokens_per_step": 256, "rehearse_from": 0.6}
    found = tuned(workspace, monkeypatch, rehearsed(workspace), **settings)
    batches = [found.stream.batch(step, 64, found.stream.rows(step, 64)) for step in range(20)]
    read = [[workspace.tokenizer.decode(row) for row in batch.input_ids.tolist()] for batch in batches]
    spoken, text, code_rows = ([sum(word in row for row in rows) for rows in read] for word in ("Way", "boats", " = "))
    assert (spoken[:12], text[:12], code_rows[:12]) == ([4] * 12, [0] * 12, [0] * 12)
    assert (spoken[12:], text[12:], code_rows[12:]) == ([2] * 8, [1] * 8, [1] * 8)
    last = batches[-1]
    for row, targets, documents in zip(last.input_ids, last.targets, last.documents, strict=True):
        if "boats" in workspace.tokenizer.decode(row.tolist()):  # a corpus is learned whole; of a dialogue, its answers
            assert int((targets >= 0).sum()) == int((documents >= 0).sum()) - len(documents[documents >= 0].unique())
    told = "".join(workspace.tokenizer.decode(batch.input_ids[0].tolist()) for batch in found.stream.evaluation(2048))
    assert "Way" in told and "boats" in told and " = " in told


def test_dialogues_alone_are_read_without_corpora_or_without_weight(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = tuned(workspace, monkeypatch).stream.fingerprint
    folder = rehearsed(workspace)
    assert tuned(workspace, monkeypatch, folder, text_weight=0, code_weight=0).stream.fingerprint == alone
    assert tuned(workspace, monkeypatch, folder, text_weight=0).stream.fingerprint != alone
    first: dict[str, Any] = {"rehearse_from": 1.5}
    second: dict[str, Any] = {"dialogue_weight": 0}
    for change, said in ((first, "rehearse_from"), (second, "dialogue_weight >= 1")):
        with pytest.raises(ValueError, match=said):
            tuned(workspace, monkeypatch, **change)


def test_corpora_that_cannot_be_rehearsed_are_named(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A corpus that does not fill a batch ends no run; one with another tokenizer is an error that says what to set."""
    alone, folder = tuned(workspace, monkeypatch).stream.fingerprint, rehearsed(workspace)
    for name in ("code", "text"):
        path = folder / name / "meta.json"
        meta = json.loads(path.read_text())
        meta["splits"]["train"]["tokens"] = 255
        path.write_text(json.dumps(meta))
    assert tuned(workspace, monkeypatch, folder).stream.fingerprint == alone
    assert "data/tokens/text is not rehearsed: its 255 tokens do not fill a batch" in capsys.readouterr().err
    meta["splits"]["train"]["tokens"], meta["tokenizer"] = 4000, "another"
    path.write_text(json.dumps(meta))
    with pytest.raises(ModelError, match=r"a different tokenizer than that of the model code; set toy\.rehearse=none"):
        tuned(workspace, monkeypatch, folder)


def test_tools_reads_rows_of_its_context_and_publishes_in_its_precision(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tuned(workspace, monkeypatch, context=64, tokens_per_step=192, save_precision="bf16", dropout=0.25)
    assert found.model.dropout == 0.25
    assert found.stream.batch(0, 64, found.stream.rows(0, 64)).input_ids.shape == (3, 64)
    assert {value.dtype for value in load_file("models/out/model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    "adapter",
    [
        AdapterConfig(rank=3, alpha=12.0, targets=("q_proj",)),
        AdapterConfig(rank=2, alpha=4.0, targets=("all-linear",), dropout=0.25, rslora=True, dora=True),
    ],
    ids=["q", "all"],
)
def test_the_adapter_is_attached_as_its_block_says(
    adapter: AdapterConfig, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = adapted(workspace, monkeypatch, adapter).seen
    assert {name.rpartition(".")[2] for name in found} == {*adapter.modules}
    assert {layer.config for layer in found.values()} == {adapter}
    assert {len(layer.lora_A.weight) for layer in found.values()} == {adapter.rank}


def test_control_tokens_named_by_role_join_those_named_by_id(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = AdapterConfig(rank=2, alpha=4.0, trained_tokens=(70,))
    found = adapted(workspace, monkeypatch, adapter, ("turn_start",)).seen
    assert {layer.config.trained_tokens for layer in found.values()} == {(70, workspace.tokenizer.turn_start)}


# dpo

PAIRS: dict[str, Any] = {"steps": 1, "pairs": 4, "max_prompt": 60, "max_length": 120, "learning_rate": 1e-3}


def preferring(workspace: Workspace, monkeypatch: pytest.MonkeyPatch, pairs: int = 4, **changes: Any) -> Handed:
    """What stage dpo hands to `fit`; `seen` holds the loss of the first batch, by term, and the adapted layers."""

    def look(given: Handed) -> Any:
        first = given.stream.batch(0, 240, given.stream.rows(0, 240))
        terms = given.loss(given.model, first).terms
        return {term.name: float(term.sum.detach()) / pairs * term.coefficient for term in terms}, adapters(given.model)

    found = handed(dpo, monkeypatch, look)
    settings: dict[str, Any] = PAIRS | {"pairs": pairs}
    values: dict[str, Any] = {"precompute_reference": False, "fit": flat(PairConfig, **settings)}
    params = dpo.Params(**(values | changes))
    dpo.run(
        params,
        job(workspace.folder / "work/key"),
        base=Path("models/tools"),
        pairs=Path("data/preferences"),
        out=Path("models/out"),
    )
    return found


@pytest.mark.parametrize(
    ("loss", "expected"),
    [(PairLoss(), 0.693147), (PairLoss(loss="ipo", beta=0.5), 1.0), (PairLoss(loss="ipo", beta=0.25), 4.0)],
)
def test_the_loss_and_its_beta_are_those_of_the_block(
    loss: PairLoss, expected: float, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a policy that equals its reference: ln 2, or 1 / (4 beta^2)."""
    terms, _ = preferring(workspace, monkeypatch, loss=loss).seen
    assert list(terms.values()) == [pytest.approx(expected, rel=1e-4)]


def test_a_loss_that_reads_no_reference_is_given_none(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    free, _ = preferring(workspace, monkeypatch, loss=PairLoss(reference_free=True), precompute_reference=True).seen
    assert list(free.values()) != [pytest.approx(0.693147, rel=1e-3)]
    assert len(preferring(workspace, monkeypatch, loss=PairLoss(nll_weight=0.2)).seen[0]) == 2


@pytest.mark.parametrize("before", [True, False])
def test_the_reference_s_sums_are_computed_before_training_where_that_is_asked_for(
    before: bool, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = preferring(workspace, monkeypatch, precompute_reference=before)
    assert {name: len(sums) for name, sums in found.stream.references.items()} == (
        {"train": 20, "val": 4} if before else {}
    )
    assert list(found.seen[0].values()) == [pytest.approx(0.693147, rel=1e-4)]


def test_dpo_trains_an_adapter_alone_where_it_has_one_and_takes_its_pairs_a_step(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = AdapterConfig(rank=2, alpha=4.0)
    for given, pairs in ((None, 4), (adapter, 6)):
        found = preferring(workspace, monkeypatch, pairs, adapter=given)
        assert {layer.config for layer in found.seen[1].values()} == ({given} if given else set())
        assert len(found.stream.rows(0, 240)) == pairs
