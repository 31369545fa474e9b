"""How a masked-diffusion model is measured: bounds on held-out text, problems on canvases, quality against passes."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.diffusion import files, measure, report, sampling
from pipeline.diffusion.measure import CanvasSettings, CanvasSubject, ways
from pipeline.diffusion.model import Denoiser, Noised
from pipeline.diffusion.sampling import CanvasStep, EncodedPrompt, Generation
from pipeline.diffusion.training import enumerated, masked_logprobs
from pipeline.evaluation.likelihood import windows
from pipeline.ingest.records import Text
from pipeline.model.transformer import Transformer
from pipeline.report.metrics import MetricsRun
from pipeline.run import device
from pipeline.run.config import Runtime
from pipeline.sandbox.judge import SandboxConfig
from pipeline.text.tokenizer import Tokenizer
from stages import evaluate
from tests.judges import ReturnJudge
from tests.judges import problem as judged_problem
from tests.suites import FEW


@pytest.fixture
def denoiser(tiny_model: Transformer, byte_tokenizer: Tokenizer) -> Denoiser:
    return files.from_causal(tiny_model, byte_tokenizer).train(False)


@pytest.fixture
def subject(denoiser: Denoiser, byte_tokenizer: Tokenizer) -> CanvasSubject:
    settings = CanvasSettings(canvas=16, canvas_block=8, canvas_problems=4, elbo_draws=4)
    return CanvasSubject(denoiser.trunk, byte_tokenizer, FEW, 1, denoiser=denoiser, canvas=settings)


def exact(model: Denoiser, tokenizer: Tokenizer, text: str) -> float:
    """The exact -ELBO of a short text, from all its masks."""
    ids = [tokenizer.end_of_text, *tokenizer.encode(text)]
    tokens, length = torch.tensor([ids]), len(ids) - 1

    def score(mask: tuple[bool, ...]) -> list[float]:
        masks = torch.tensor([[False, *mask]])
        every = torch.tensor([[False] + [True] * length])
        places = torch.arange(length + 1)[None]
        one = Noised(tokens, masks, torch.zeros_like(tokens, dtype=torch.int32), places, asked=every)
        return masked_logprobs(model, one).tolist()

    with torch.no_grad():
        return -enumerated(score, length, "k")


def test_a_bound_is_the_enumerated_one_but_for_its_draws(denoiser: Denoiser, byte_tokenizer: Tokenizer) -> None:
    text = "x = 1"
    found = measure.bounds(denoiser, byte_tokenizer, [text] * 40, context=64, draws=16)
    told, wanted = [one.nats for one in found.documents], exact(denoiser, byte_tokenizer, text)
    assert len({round(nats, 6) for nats in told}) == 40  # each document has masks of its own
    assert abs(np.mean(told) - wanted) < 4 * np.std(told) / math.sqrt(40)
    assert all(one.tokens == len(byte_tokenizer.encode(text)) and one.bytes == 5 for one in found.documents)


def test_every_token_of_a_long_document_is_scored_once_and_what_was_read_stays_clean(byte_tokenizer: Tokenizer) -> None:
    ids = byte_tokenizer.encode("value = 3\n" * 12)
    cut = list(windows(0, ids, byte_tokenizer.end_of_text, 16))
    batch = measure.drawn_windows(cut, list(range(len(cut))), 64)
    assert int(batch.lengths.sum()) == len(ids)
    ever = torch.stack([one.masks for one in batch.inputs]).any(0)
    for row, window in enumerate(cut):
        assert ever[row].nonzero().flatten().tolist() == list(range(1 + window.scored, 1 + len(window.targets)))
        assert batch.inputs[0].tokens[row, 1 : 1 + len(window.targets)].tolist() == window.targets


def test_a_context_that_cannot_be_is_refused(denoiser: Denoiser, byte_tokenizer: Tokenizer) -> None:
    for context in (7, 0, 4096):
        with pytest.raises(ValueError, match="context: expected an even number from 2 to 256"):
            measure.bounds(denoiser, byte_tokenizer, ["a"], context=context, draws=1)


def test_documents_give_bits_per_byte_with_an_interval(subject: CanvasSubject) -> None:
    texts = [Text(text=f"x = {n}\n" * 3, source="s", path=str(n), license="") for n in range(6)]
    numbers = measure.documents(subject, texts).numbers
    assert numbers["documents"] == 6 and numbers["bpb_bound_low"] <= numbers["bpb_bound"] <= numbers["bpb_bound_high"]


def test_a_completion_is_a_canvas_up_to_its_end(subject: CanvasSubject) -> None:
    prompts = {"a": [20, 21, 22], "b": [30, 31], "long": [20] * 250}
    found = subject.complete("problems", prompts, tokens=4, temperature=0.0)
    assert found.keys() == {"a", "b"} and len(subject.generations) == 2
    for one, told in zip(found.values(), subject.generations, strict=True):
        assert one.ids == told.ids and len(told.canvas) == 16 and told.forwards <= 16
    hot = subject.complete("problems", prompts, tokens=4, temperature=1.0, sample=1)
    assert hot != subject.complete("problems", prompts, tokens=4, temperature=1.0, sample=2)
    assert hot == subject.complete("problems", prompts, tokens=4, temperature=1.0, sample=1)


def test_problems_are_answered_by_threshold_in_blocks_with_a_cache_or_a_token_a_pass(subject: CanvasSubject) -> None:
    assert subject.way == ways(16, 8)["threshold 0.99, dual cache"]
    plain = replace(subject, canvas=replace(subject.canvas, canvas_threshold=None))
    assert plain.way == ways(16, 8)["1 a step"]
    prompts = {"a": [20, 21, 22]}
    plain.complete("problems", prompts, tokens=4, temperature=0.0)
    assert [one.forwards for one in plain.generations] == [16]
    low = replace(subject, canvas=replace(subject.canvas, canvas_threshold=1e-9), generations=[], known={})
    low.complete("problems", prompts, tokens=4, temperature=0.0)
    assert [one.forwards for one in low.generations] == [2]  # one pass per block: every token is likely enough


def test_each_run_measures_some_points_of_the_curve_of_which_one_is_the_way_that_answers(
    subject: CanvasSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def denoise(model: Any, prompts: Any, settings: Any, seeds: Any) -> list[Generation]:
        asked.extend(settings for _ in prompts[:1])
        return [Generation([], [], "stop", 1, [CanvasStep([], [])]) for _ in prompts]

    monkeypatch.setattr(measure, "denoise", denoise)
    judge: Any = ReturnJudge()
    problems = [judged_problem("1")]
    subject.complete("problems", {"1": measure.suites.user(subject.tokenizer, "?")}, tokens=4, temperature=0.0)
    assert asked == [subject.way]
    numbers = measure.quality(subject, problems, judge, measure.CURVE).numbers
    assert tuple(numbers) == measure.CURVE and set(measure.CURVE) <= set(ways(16, 8))
    assert asked.count(subject.way) == 1 and len(asked) == len(measure.CURVE)


def test_a_greedy_answer_is_written_once(subject: CanvasSubject, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = {"a": [20, 21, 22]}
    first = subject.complete("problems", prompts, tokens=4, temperature=0.0)
    monkeypatch.setattr(measure, "denoise", lambda _, asked, *rest: [1 / 0 for _ in asked])
    again = subject.generate("quality", prompts, ways(16, 8)["threshold 0.99, dual cache"])
    assert again["a"].ids == first["a"].ids
    with pytest.raises(ZeroDivisionError):
        subject.complete("problems", prompts, tokens=4, temperature=0.5)


@pytest.mark.parametrize(("name", "curve"), [("diffusion", True), ("diffusion_grpo", False)])
def test_only_the_models_that_are_named_are_measured_against_passes(
    name: str, curve: bool, subject: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.save(tmp_path / name, subject.denoiser, subject.tokenizer, {})
    monkeypatch.setattr(evaluate, "held_out", lambda corpus: [])
    monkeypatch.setattr(evaluate, "clean_items", lambda folder, kind, overlap: [])
    own = evaluate.WingSettings(**asdict(subject.canvas))
    params = evaluate.Params(settings=subject.settings, wings=own, sandbox=SandboxConfig())
    job = SimpleNamespace(seed=1, workers=1, runtime=Runtime())
    data = dict.fromkeys(("text", "code", "dialogues", "problems", "facts", "overlap", "benchmarks"), tmp_path)
    plan, used = evaluate.measurements(params, job, tmp_path / name, device.hardware("fp32"), **data)  # type: ignore[arg-type]
    assert ("quality" in plan) == curve
    assert used == asdict(FEW) | {"samples": 1} | asdict(subject.canvas)


def test_quality_is_measured_against_passes_beside_one_token_a_step(
    subject: CanvasSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here, every answer with fewer steps fails; thresholds lose nothing."""
    right = subject.tokenizer.encode("```python\ndef add(a, b):\n    return a + b\n```")

    def denoise(model: Any, prompts: Any, settings: Any, seeds: Any) -> list[Generation]:
        good = settings.steps == settings.length
        return [Generation(right if good else [], [], "stop", settings.steps, [CanvasStep([], [])]) for _ in prompts]

    monkeypatch.setattr(measure, "denoise", denoise)
    judge: Any = ReturnJudge()
    numbers = measure.quality(subject, [judged_problem(str(n)) for n in range(6)], judge).numbers
    assert list(numbers) == list(ways(16, 8))
    assert numbers["1 a step"]["pass_at_1"] == 1 and numbers["1 a step"]["n"] == 4
    assert (
        numbers["4 a step"]["pass_at_1"] == 0
        and numbers["4 a step"]["gain"] == -1
        and numbers["4 a step"]["forwards"] == 4
    )
    rows = [row for row in evaluate.curve_rows({"quality": numbers}) if row["curve"] == "quality: 2 a step"]
    assert rows == [
        {
            "step": 8.0,
            "curve": "quality: 2 a step",
            "value": 0.0,
            "low": numbers["2 a step"]["pass_at_1_low"],
            "high": numbers["2 a step"]["pass_at_1_high"],
        }
    ]
    (figure,) = report.figures(MetricsRun({}, {}, {"diffusion": {"quality": numbers}, "tools": {}}))
    assert figure["title"].endswith("diffusion") and len(figure["rows"]) == len(numbers)


@pytest.mark.parametrize(
    ("changes", "later"), [({"canvas_threshold": None}, None), ({"canvas_cache": "none"}, None), ({}, 9)]
)
def test_how_it_decodes_and_what_an_answer_costs_stand_beside_the_problems(
    subject: CanvasSubject, changes: dict[str, Any], later: int | None
) -> None:
    """`later`: how many places a pass computes unless it is a block's first; None means all of them."""
    subject = replace(subject, canvas=replace(subject.canvas, **changes))
    problems = [judged_problem(str(n)) for n in range(2)]
    subject.complete("problems", {"a": [20, 21]}, tokens=4, temperature=0.0)
    told = measure.with_orders(measure.SuiteResult(), subject, problems).numbers["decoding"]
    passes = subject.generations[0].forwards
    assert told["forwards"] == passes and 0 <= told["local_ar_1"] <= 1 and 0 <= told["global_ar_4"] <= 1
    assert passes == 16 if changes.get("canvas_threshold", 1) is None else 2 <= passes <= 16
    config = subject.denoiser.config
    length = len(measure.suites.user(subject.tokenizer, "?")) + 16
    first = passes if later is None else 2
    places = first * length + (passes - first) * (later or 0)
    a_place = 2 * config.matmul_parameters + 4 * config.layers * config.heads * config.head_dim * length
    assert told["flops_per_answer"] == places * a_place


def test_settings_that_cannot_be_are_refused() -> None:
    both: list[dict[str, Any]] = [{"canvas": 20, "canvas_block": 8}, {"elbo_draws": 0}]
    for wrong in both:
        with pytest.raises(ValueError, match="`canvas_block` must divide `canvas`"):
            CanvasSettings(**wrong)
    with pytest.raises(ValueError, match="canvas_threshold: expected more than 0 and at most 1, or `none`, got 0"):
        CanvasSettings(canvas_threshold=0)
    with pytest.raises(ValueError, match="canvas_cache: expected one of none, prefix, dual, got 'both'"):
        CanvasSettings(canvas_cache="both")


# -- traces ------------------------------------------------------------------------------------------------------------


def test_a_trace_tells_every_step_and_is_the_same_each_time(
    denoiser: Denoiser, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    asked = [EncodedPrompt(str(n), f"q{n}", [20 + n, 21]) for n in range(10)]
    paths = [tmp_path / "a/trace.json", tmp_path / "b/trace.json"]
    sampling.write(paths, denoiser, byte_tokenizer, asked, length=12)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    told = json.loads(paths[0].read_text())
    assert len(told["prompts"]) == 8 and told["settings"]["length"] == 12
    for one in told["prompts"]:
        assert one["forwards"] == len(one["steps"]) == 12
        places = [place for step in one["steps"] for place, *_ in step["committed"]]
        assert sorted(places) == list(range(12))
        for step in one["steps"]:
            for place, id_, text, sure in step["committed"]:
                assert (
                    one["canvas"][place] == text == byte_tokenizer.decode([id_], skip_special=False) and 0 <= sure <= 1
                )


def test_the_page_shows_each_token_with_its_step_and_moments_between() -> None:
    one = {
        "id": "p",
        "prompt": "?",
        "canvas": ["a", "\n", "b", "<end>", "<end>"],
        "length": 3,
        "forwards": 5,
        "steps": [
            {"committed": [[1, 5, "\n", 0.9]], "remasked": []},
            {"committed": [[0, 6, "x", 0.5]], "remasked": []},
            {"committed": [[2, 7, "b", 0.8]], "remasked": [0]},
            {"committed": [[0, 8, "a", 0.7]], "remasked": []},
            {"committed": [[3, 9, "<end>", 1.0], [4, 9, "<end>", 1.0]], "remasked": []},
        ],
    }
    shown = report.canvas(one)
    assert [(token["text"], token["step"], token["line"]) for token in shown["tokens"]] == [
        ("a", 4, False),
        ("⏎", 1, True),
        ("b", 3, False),
        ("<end>", 5, False),
    ]
    assert [frame["text"] for frame in shown["frames"]] == ["░\n░░", "x\n░░", "a\nb░", "a\nb<end>"]
    assert report.frame(one, 3)["text"] == "░\nb░"  # a remasked token shows as masked
    assert replace(CanvasSettings(), canvas=64).canvas == 64
