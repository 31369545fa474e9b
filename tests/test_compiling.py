"""Compiled layers: the same numbers as eager ones up to rounding, exact resumes, the same names on disk."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.batches.batch import TokenBatch
from pipeline.generation.sampling import Sampling, generate
from pipeline.learning import losses, performance, states
from pipeline.learning.fit import Watchers, fit
from pipeline.learning.losses import Loss, Term
from pipeline.learning.settings import FitConfig, PairConfig
from pipeline.learning.states import weights_of
from pipeline.model.config import ModelConfig
from pipeline.model.transformer import Transformer
from pipeline.rl.rollout import RolloutConfig
from tests.loop import Windows, config, job
from tests.stopping import Stopped, before

pytestmark = [
    pytest.mark.full,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # dynamo inspects things that warn, and a warning is an error here
    pytest.mark.skipif(bool(performance.lacking(torch.device("cpu"))), reason="no C++ compiler"),
]
SHAPE = ModelConfig(
    vocab_size=64,
    width=32,
    layers=3,
    heads=2,
    kv_heads=1,
    head_dim=16,
    d_ff=48,
    max_context=32,
    rope_theta=1e4,
    tied=True,
)


class Packed(Windows):
    """Rows of two documents each; a curriculum cuts them."""

    def batch(self, step: int, context: int, rows: Any) -> Any:
        made = super().batch(step, context, rows)
        places = torch.arange(made.ids.shape[1]).expand_as(made.ids)
        documents = (places >= 3).to(torch.int32)
        return TokenBatch(made.ids, made.targets, documents, torch.where(places >= 3, places - 3, places), 0)

    def evaluation(self, tokens: int) -> Any:
        for index in (7, 8):
            yield self.batch(index, 8, self.rows(index, 8)[:4])


def train(
    folder: Path, *, compiled: bool, save_steps: int = 500, watchers: Watchers | None = None
) -> tuple[Transformer, Any]:
    def loss(model: Transformer, batch: TokenBatch) -> Loss:
        return Loss([Term("loss", losses.read_out(model, batch, losses.next_token))])

    model, at_work = (
        Transformer(SHAPE, torch.Generator().manual_seed(0)),
        job(folder, compile=compiled, save_steps=save_steps),
    )
    settings = config(steps=6, optimizer="adamw", eps=1e-2, eval_steps=3)
    fit(model, Packed(), loss, settings, at_work, from_scratch=True, watchers=watchers)
    return model, at_work


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        place = tmp_path_factory.mktemp("work")
        patch.setenv("STAGECOACH_WORK", str(place))
        patch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        yield place / "compile"
        torch._dynamo.reset()


def test_compiled_layers_train_as_eager_ones_and_resume_bit_for_bit(tmp_path: Path, cache: Path) -> None:
    eager, _ = train(tmp_path / "eager", compiled=False)
    whole, first = train(tmp_path / "whole", compiled=True)
    assert whole.compiled and not eager.compiled
    assert weights_of(whole).keys() == weights_of(eager).keys()
    for name, weight in weights_of(eager).items():
        torch.testing.assert_close(weights_of(whole)[name], weight, atol=1e-5, rtol=0, msg=name)
    with pytest.raises(Stopped):
        train(tmp_path / "cut", compiled=True, save_steps=1, watchers=before(4))
    state = states.newest(tmp_path / "cut")
    assert state is not None and state.step == 4 and state.meta["compile"] is True
    assert state.weights().names() == dict(eager.named_parameters()).keys()  # they load into an uncompiled model
    again, second = train(tmp_path / "cut", compiled=True)
    assert all(torch.equal(a, b) for a, b in zip(weights_of(whole).values(), weights_of(again).values(), strict=True))
    assert second.tracker.rows == first.tracker.rows
    assert list(cache.iterdir())  # what was compiled is kept between runs


def test_a_resume_without_the_compiler_says_that_it_is_not_exact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, compiled=True)
    train(tmp_path, compiled=False)
    assert (
        "an uninterrupted run bit for bit, because settings changed: {'compile': (True, False)}"
        in capsys.readouterr().err
    )


def test_sampling_never_runs_compiled_layers() -> None:
    traced: list[int] = []

    def counting(graph: Any, inputs: Any) -> Any:
        traced.append(1)
        return graph.forward

    model = Transformer(SHAPE, torch.Generator().manual_seed(0)).train(False)
    plain = generate(model, [[1, 2, 3], [4]], Sampling(6), stop=(), seeds=[0, 1])
    for layer in model.model.layers:
        layer.compile(backend=counting)
    assert generate(model, [[1, 2, 3], [4]], Sampling(6), stop=(), seeds=[0, 1]) == plain
    assert not traced
    model(torch.zeros(1, 4, dtype=torch.int64))
    assert traced


@pytest.mark.parametrize(("even", "counted"), [(True, True), (False, False)])
def test_auto_counts_the_work_of_rows_of_one_length_alone(
    even: bool, counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, Any] = {}
    monkeypatch.setattr(performance, "compiled", lambda model, asked, **given: told.update(given))
    settings = SimpleNamespace(even_rows=even, rows=4, row_length=8)
    runtime = SimpleNamespace(gradient_checkpointing="none", compile="auto")
    toy: Any = SimpleNamespace(runtime=runtime, name="toy")
    performance.prepared(Transformer(SHAPE), toy, settings, 3, None)  # type: ignore[arg-type]
    assert (told["flops"] == 3 * 4 * 8 * SHAPE.flops_per_token(8)) is counted
    assert counted or told["flops"] == 0


def test_policies_and_pairs_have_rows_of_many_lengths() -> None:
    assert FitConfig.even_rows and not PairConfig.even_rows and not RolloutConfig.even_rows
