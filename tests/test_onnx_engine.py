"""The engine on onnxruntime-genai says what it says on torch; what the runtime cannot do is not pretended.

Its decoder is tested everywhere, on generators that a slow model stands behind; the runtime itself where the extra
`onnx` is installed.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from pipeline.export import huggingface, onnx
from pipeline.generation.sampling import Sampling
from pipeline.model.transformer import Transformer
from pipeline.run.errors import ConfigError, ModelError
from pipeline.serve import onnx_engine
from pipeline.serve.__main__ import parse
from pipeline.serve.engine import Engine, Lengths, RowDecoder, Slot, take_row
from pipeline.serve.models import load
from pipeline.serve.onnx_engine import Export, OnnxDecoder
from pipeline.text.tokenizer import Tokenizer
from tests.server import random_model, serving
from tests.test_engine import WARM, Plan, alone, ask, finished, in_time, prompt
from tests.test_onnx import extra
from tests.test_prefixes import busy

# everywhere


class Slow:
    """A generator that reads its whole text anew for each piece; `pieces` are those it was given: (begin, count)."""

    def __init__(self, model: Transformer) -> None:
        self.model, self.held, self.pieces = model, list[int](), list[tuple[int, int]]()

    def append_tokens(self, ids: np.ndarray) -> None:
        assert ids.dtype == np.int32
        self.pieces.append((len(self.held), len(ids)))
        self.held += ids.tolist()

    def rewind_to(self, length: int) -> None:
        assert length < len(self.held)
        del self.held[length:]

    def token_count(self) -> int:
        return len(self.held)

    def get_sequence(self, number: int) -> np.ndarray:
        return np.array([self.held][number])

    @torch.no_grad()
    def get_output(self, name: str) -> np.ndarray:
        assert name == "logits"
        return self.model(torch.tensor([self.held]))[:, -self.pieces[-1][1] :].numpy()

    def get_logits(self) -> np.ndarray:
        return self.get_output("logits")[:, -1:]


def slow(model: Transformer, kind: str, rows: int) -> OnnxDecoder:
    config = model.config
    export: Any = SimpleNamespace(
        context=config.max_context, vocabulary=config.vocab_size, kind=kind, generator=lambda: Slow(model)
    )
    return OnnxDecoder(export, rows)


@pytest.mark.parametrize("kind", ["fp32", "int4"])
def test_rows_hold_their_own_texts_and_are_cut_before_they_go_on(tiny_model: Transformer, kind: str) -> None:
    """Random pieces and cuts of three rows, beside our own decoder."""
    draw = np.random.default_rng(0)
    ours, theirs = RowDecoder(tiny_model, 3), slow(tiny_model, kind, 3)
    for _ in range(60):
        rows = [row for row in range(3) if draw.random() < 0.6 and ours.cache.own[row] < 200]
        if not rows:
            continue
        for row in rows:
            if draw.random() < 0.3:
                length = int(draw.integers(0, ours.cache.own[row] + 1))
                ours.rewind(row, length)
                theirs.rewind(row, length)
        pieces = [draw.integers(20, 320, draw.choice([1, 1, 2, 9])).tolist() for _ in rows]
        wanted = [int(draw.integers(0, len(piece) + 1)) for piece in pieces]
        expected, found = ours.advance(rows, pieces, wanted), theirs.advance(rows, pieces, wanted)
        assert found.shape == expected.shape == (sum(wanted), 320) and theirs.cache.own == ours.cache.own
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("kind", "read"), [("fp32", [(0, 5), (5, 1), (6, 1), (7, 3)]), ("int4", [(0, 5), (4, 2), (5, 2), (7, 3)])]
)
def test_int4_reads_a_token_with_the_one_before_it(
    tiny_model: Transformer, kind: str, read: list[tuple[int, int]]
) -> None:
    decoder = slow(tiny_model, kind, 1)
    for count in (5, 1, 1, 3):
        decoder.advance([0], [prompt(count, count)], [1])
    assert decoder.generators[0].pieces == read
    decoder.rewind(0, 0)
    decoder.advance([0], [[9]], [1])  # before the first there is none
    assert decoder.generators[0].pieces[-1] == (0, 1) and decoder.generators[0].held == [9]


def test_a_row_that_would_outgrow_the_context_changes_none(tiny_model: Transformer) -> None:
    decoder = slow(tiny_model, "fp32", 2)
    decoder.advance([0, 1], [prompt(1, 3), prompt(2, 250)], [0, 0])
    with pytest.raises(ValueError, match="a row of 257 tokens is longer than the model's context of 256"):
        decoder.advance([0, 1], [prompt(1, 1), prompt(2, 7)], [1, 1])
    assert decoder.cache.own == [3, 250] and [row.token_count() for row in decoder.generators] == [3, 250]


def test_what_another_program_holds_is_cut_and_never_copied() -> None:
    text = list(range(100))
    slots = [Slot(held=text[:60], ticket=busy()), Slot(held=text[:20], used=4), Slot(held=[9] * 50, used=1)]
    assert take_row(slots, rows := Lengths([60, 20, 50]), [*text[:40], 63, 63], "") == (1, 20)
    assert rows.own == [60, 20, 50]
    assert take_row(slots, rows, [5, *text], "") == (2, 0) and rows.own == [60, 20, 0]


CONFIG = {
    "model": {
        "vocab_size": 320,
        "context_length": 256,
        "eos_token_id": [3, 0],
        "type": "qwen3",
        "decoder": {
            "filename": "model.onnx",
            "num_hidden_layers": 2,
            "session_options": {"log_id": "x", "provider_options": []},
        },
    },
}


def written(folder: Path, change: dict[str, Any]) -> Path:
    """An export with that change, `a.b: value`, of what the builder writes; its graph is empty."""
    config = json.loads(json.dumps(CONFIG))
    for path, value in change.items():
        *parents, name = path.split(".")
        block = config
        for parent in parents:
            block = block[parent]
        block[name] = value
    folder.mkdir()
    for name in onnx_engine.FILES:
        (folder / name).write_text("")
    (folder / "genai_config.json").write_text(json.dumps(config))
    return folder


SESSION = "model.decoder.session_options"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({f"{SESSION}.custom_ops_library": "/tmp/evil.so"}, "custom_ops_library may name code"),
        ({f"{SESSION}.provider_options": [{"cuda": {}}]}, "provider_options may name code"),
        ({"model.decoder.filename": "/etc/passwd"}, "filename may name code"),
        ({"model.vision": {"filename": "x"}}, "vision may name code"),
        (
            {"model.vocab_size": 321},
            r"expected vocabulary, context and layers \(320, 256, 2\) .* found \(321, 256, 2\)",
        ),
        ({"model.context_length": 2048}, "found .320, 2048, 2."),
        ({"model.decoder.num_hidden_layers": 3}, "found .320, 256, 3."),
        ({"model.decoder": {}}, "expected what stage_deploy writes"),
        ({SESSION: 3}, "expected what stage_deploy writes"),
    ],
)
def test_an_export_of_another_model_or_one_that_names_code_is_refused(
    tiny_model: Transformer, tmp_path: Path, change: dict[str, Any], words: str | None
) -> None:
    folder = written(tmp_path / "onnx", change)
    with pytest.raises(ModelError, match=words) if words else nullcontext():
        onnx_engine.check(folder, tiny_model.config)


def test_without_the_package_or_the_export_the_way_out_is_told(
    tiny_model: Transformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_engine, "PACKAGE", "json")
    with pytest.raises(ConfigError, match=r"set deploy\.onnx to fp32 or int4 and run dvc repro stage_deploy"):
        Export(tmp_path / "onnx", tiny_model.config)
    monkeypatch.setattr(onnx_engine, "PACKAGE", "surely_not_installed")
    with pytest.raises(ConfigError, match=r"pip install 'stagecoach\[onnx\]'"):
        Export(written(tmp_path / "onnx", {}), tiny_model.config)


def test_weights_are_chosen_by_the_export(capsys: pytest.CaptureFixture[str]) -> None:
    assert (parse(["--weights", "int8"]).engine, parse(["--engine", "onnx"]).weights) == ("torch", None)
    with pytest.raises(SystemExit):
        parse(["--engine", "onnx", "--weights", "int8"])
    assert "--weights is for --engine torch" in capsys.readouterr().err


# in the runtime


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Tokenizer) -> dict[str, Path]:
    """Two deployed models: in fp32 the weights of `tiny_model`; in int4 a wider one, where kernels do round
    differently.
    """
    tiny, found = random_model(byte_tokenizer, context=256), {}
    wide = replace(tiny.config, width=256, heads=4, kv_heads=2, head_dim=64, d_ff=512)
    models = {"fp32": tiny, "int4": Transformer(wide, torch.Generator().manual_seed(0)).train(False)}
    for kind, model in models.items():
        found[kind] = tmp_path_factory.mktemp("deployed") / kind
        huggingface.export(model, byte_tokenizer, {}, found[kind])
        onnx.build(found[kind], found[kind] / "onnx", kind=kind)
        huggingface.seal(found[kind])
    return found


@pytest.fixture(scope="module")
def exports(folders: dict[str, Path], byte_tokenizer: Tokenizer) -> dict[str, Export]:
    config = random_model(byte_tokenizer, context=256).config
    return {kind: Export(folder / "onnx", config) for kind, folder in folders.items()}


@pytest.fixture
def running(tiny_model: Transformer, exports: dict[str, Export]) -> Iterator[Engine]:
    with Engine(tiny_model, rows=2, decoder=exports["fp32"].decoder) as engine:
        yield engine


@extra
@pytest.mark.parametrize("drafts", [False, True])
def test_every_request_hears_what_the_torch_engine_says(
    tiny_model: Transformer, exports: dict[str, Export], drafts: bool
) -> None:
    """60 requests, greedy and warm, two rows at a time, some that begin alike, some that repeat themselves."""
    assert (exports["fp32"].kind, exports["int4"].kind) == ("fp32", "int4")
    engine = Engine(tiny_model, rows=2, queue=60, drafts=drafts, decoder=exports["fp32"].decoder)
    ways = [Sampling(24), WARM, Sampling(9, temperature=1.3, top_k=40), Sampling(1)]
    cases = [(prompt(n // 6, 1 + 7 * n % 90) * (1 + n % 2), ways[n % 4], n // 2) for n in range(60)]
    heard = [ask(engine, ids, way, seed)[0] for ids, way, seed in cases]
    finished(engine, *heard)
    for (ids, way, seed), one in zip(cases, heard, strict=True):
        assert one.ids == alone(tiny_model, ids, way, seed)
    stats = engine.stats()
    assert stats.cached_tokens > 200 and (stats.accepted_tokens > 0) == drafts, stats


@extra
def test_logprobs_are_the_model_s_own_over_chunks_and_what_a_row_holds(
    tiny_model: Transformer, exports: dict[str, Export], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.serve.engine.CHUNK", 64)
    engine = Engine(tiny_model, rows=2, decoder=exports["fp32"].decoder)
    first, texts = prompt(1, 200), []
    second = [*first[:150], *prompt(3, 20)]
    for ids, cached in ((first, 0), (second, 150), (second, 169)):
        finished(engine, heard := ask(engine, ids, top=5)[0])
        assert heard.end is not None and heard.end.cached_tokens == cached
        texts.append((ids, heard))
    for ids, heard in texts:
        with torch.no_grad():
            whole = tiny_model(torch.tensor([ids + heard.ids]))[0].log_softmax(-1)
        for place, said in enumerate(heard.said):
            row = whole[len(ids) - 1 + place]
            assert said.logprob == pytest.approx(float(row[said.token]), abs=1e-4)  # the export's gate is 1e-3
            assert [token for token, _ in said.top] == row.topk(5).indices.tolist()
            assert [value for _, value in said.top] == pytest.approx(row.topk(5).values.tolist(), abs=1e-4)


@extra
@pytest.mark.parametrize("kind", onnx.KINDS)
def test_a_text_is_the_same_however_its_beginning_was_read(
    tiny_model: Transformer, exports: dict[str, Export], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From an answer that its row said, beside neighbours, in chunks, with drafts: the very same in int4, in fp32 up
    to rounding.
    """
    near = 0.0 if kind == "int4" else 1e-5
    one, other, drafting = (
        Engine(tiny_model, rows=rows, drafts=rows == 1, decoder=exports[kind].decoder) for rows in (2, 3, 1)
    )
    finished(one, before := ask(one, prompt(4, 40))[0])
    ids = [*prompt(4, 40), *before.ids, *prompt(4, 40)]
    heard = [ask(engine, ids, seed=1)[0] for engine in (one, other, drafting)]
    finished(one, heard[0])
    finished(other, heard[1], *(ask(other, prompt(n, 30), seed=n)[0] for n in (1, 2)))
    monkeypatch.setattr("pipeline.serve.engine.CHUNK", 13)
    finished(drafting, heard[2])
    assert [told.end.cached_tokens if told.end else None for told in heard] == [63, 0, 0]
    assert drafting.stats().drafted_tokens > 0
    expected = [said.logprob for said in heard[1].said]
    for told in heard:
        assert told.ids == heard[1].ids
        assert [said.logprob for said in told.said] == pytest.approx(expected, abs=near, rel=0)


@extra
def test_a_cancelled_request_frees_its_row_and_the_next_is_well(
    tiny_model: Transformer, exports: dict[str, Export]
) -> None:
    engine = Engine(tiny_model, rows=1, decoder=exports["fp32"].decoder)
    first, ticket = ask(engine, prompt(1, 30))
    second = ask(engine, [*prompt(1, 25), *prompt(2, 9)])[0]
    for _ in range(3):
        engine.step()
    ticket.cancel()
    engine.step()
    assert first.end is not None and (first.end.reason, len(first.said)) == ("cancelled", 3)
    assert len(second.said) == 1  # the row was free before that step
    finished(engine, second)
    assert second.end is not None and second.end.cached_tokens == 25
    assert second.ids == alone(tiny_model, [*prompt(1, 25), *prompt(2, 9)], WARM, 0)


@extra
def test_constraints_biases_and_stop_tokens_are_the_engine_s(
    tiny_model: Transformer, exports: dict[str, Export]
) -> None:
    engines = [Engine(tiny_model, rows=3), Engine(tiny_model, rows=3, decoder=exports["fp32"].decoder)]
    ids, among = prompt(3, 9), [40, 50, 60, 70]
    stop = alone(tiny_model, ids, WARM, 0)[7]
    ours, theirs = (
        [
            ask(engine, ids, constraint=Plan(among, say={5: 99}))[0],
            ask(engine, ids, Sampling(3), bias={77: 100.0})[0],
            ask(engine, ids, stop=(stop,))[0],
        ]
        for engine in engines
    )
    finished(engines[0], *ours)
    finished(engines[1], *theirs)
    assert [one.ids for one in theirs] == [one.ids for one in ours]
    assert set(theirs[0].ids) <= {*among, 99} and theirs[1].ids == [77] * 3 and len(theirs[2].ids) <= 7
    for one, other in zip(ours, theirs, strict=True):
        assert one.end == other.end
        assert [said.logprob for said in other.said] == pytest.approx([said.logprob for said in one.said], abs=1e-4)


@extra
def test_a_prompt_is_scored_while_the_engine_speaks(running: Engine, tiny_model: Transformer) -> None:
    heard = [ask(running, prompt(n, 30), Sampling(200))[0] for n in range(2)]
    ids = prompt(9, 120)
    scored = ask(running, ids, score=3)[0]
    assert in_time(scored).reason == "length"
    with torch.no_grad():
        expected = tiny_model(torch.tensor([ids]))[0].log_softmax(-1)
    found = [pair for read in scored.read for pair in zip(read.logprobs, read.top, strict=True)]
    assert len(found) == len(ids) - 1
    for place, (logprob, top) in enumerate(found):
        assert logprob == pytest.approx(float(expected[place, ids[place + 1]]), abs=1e-4)
        assert [token for token, _ in top] == expected[place].topk(3).indices.tolist()
    for n, one in enumerate(heard):
        in_time(one)
        assert one.ids == alone(tiny_model, prompt(n, 30), Sampling(200), 0)


@extra
def test_a_dead_engine_serves_again_after_a_restart(
    running: Engine, tiny_model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_time(ask(running, prompt(1, 30))[0])
    monkeypatch.setattr(running.decoder, "advance", lambda *_: 1 / 0)
    assert in_time(ask(running, prompt(1, 30))[0]).reason == "error"
    running._thread.join()
    running.restart()
    again = ask(running, prompt(1, 30))[0]
    assert in_time(again).cached_tokens == 0 and again.ids == alone(tiny_model, prompt(1, 30), WARM, 0)


@extra
def test_a_loaded_export_is_named_and_our_weights_are_let_go(
    folders: dict[str, Path], byte_tokenizer: Tokenizer
) -> None:
    found = {kind: load([folder], rows=2, queue=4, weights=None, onnx=True)[0] for kind, folder in folders.items()}
    ours = load([folders["fp32"]], rows=2, queue=4, weights=None)[0]
    assert [one.weights for one in found.values()] == ["onnx fp32", "onnx int4"]
    assert len({one.fingerprint for one in (ours, *found.values())}) == 3
    assert found["fp32"].parameters == ours.parameters
    for one in found.values():
        assert one.engine is not None
        assert {parameter.device.type for parameter in one.engine.model.parameters()} == {"meta"}


@extra
def test_the_server_answers_by_it(
    folders: dict[str, Path], tiny_model: Transformer, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    text, found = "The pilot asked the girl which way", list[dict[str, Any]]()
    ids = byte_tokenizer.encode(text)
    with serving([folders["fp32"]], "--engine", "onnx", log=tmp_path / "log") as running:
        body = {
            "model": "fp32",
            "prompt": text,
            "max_tokens": 12,
            "seed": 5,
            "ignore_eos": True,
            "echo": True,
            "logprobs": 2,
        }

        def post() -> None:
            found.append(httpx.post(f"{running.url}/v1/completions", json=body, timeout=60).json())

        threads = [threading.Thread(target=post) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        card = httpx.get(f"{running.url}/v1/models/fp32").json()
    assert card["meta"]["weights"] == "onnx fp32"
    with torch.no_grad():
        whole = tiny_model(torch.tensor([ids]))[0].log_softmax(-1)
    expected = [float(whole[place, token]) for place, token in enumerate(ids[1:])]
    for one in found:
        choice = one["choices"][0]
        assert choice["text"].startswith(text) and one["choices"] == found[0]["choices"]
        assert choice["logprobs"]["token_logprobs"][1 : len(ids)] == pytest.approx(expected, abs=1e-3)
        assert len(choice["logprobs"]["token_logprobs"]) == len(ids) + 12
