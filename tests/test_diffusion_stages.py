"""The stages of masked diffusion, run for real on tiny models: what they publish, how they resume, what they refuse."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.diffusion import files
from pipeline.ingest import records
from pipeline.learning import fit
from pipeline.model import checkpoint
from pipeline.run.errors import ModelError
from tests.diffusion_workspace import STAGES, arguments
from tests.diffusion_workspace import masked_workspace as masked_workspace
from tests.stopping import Stopped, hooked, killed
from tests.workspace import Ended, Workspace, command, pair

pytestmark = pytest.mark.slow  # nearly all train; the ones not marked `full` are one per kind of stage

SAVING: dict[str, Any] = {"runtime.save_steps": 1}


def run(stage: str, **changes: Any) -> Ended:
    return command(stage, arguments(stage, changes))


def finished(masked: Workspace, stage: str, **changes: Any) -> tuple[dict[str, str], str]:
    ended = run(stage, **changes)
    assert ended.code == 0, ended.said
    wanted = [stage, "diffusion_control"] if stage == "diffusion" else [stage]
    told = {
        path: digest
        for path, digest in masked.published().items()
        if any(f"/{name}/" in path or f"/{name}." in path for name in wanted)
    }
    assert any(path.endswith("model.safetensors") for path in told)
    return told, ended.said


def test_diffusion_publishes_a_masked_model_and_a_causal_control(masked: Workspace) -> None:
    _, said = finished(masked, "diffusion")
    model, tokenizer = files.load(Path("models/diffusion"))
    assert model.traits == files.traits(tokenizer, shift=True)
    control, _ = checkpoint.load(Path("models/diffusion_control"))
    base = masked.weights("code")
    for own in (model.trunk, control):
        assert any(not torch.equal(p, base[name]) for name, p in own.named_parameters())
    for phase in ("adapt", "sft", "control_adapt", "control_sft"):
        assert f"diffusion@{phase}: " in said
    numbers = masked.numbers("diffusion")
    assert numbers["adapt"]["steps"] == numbers["sft"]["steps"] == 3 == numbers["control_sft"]["steps"]
    curve = masked.curve("diffusion")
    assert [int(row["step"]) for row in curve] == sorted({int(row["step"]) for row in curve})
    assert int(curve[-1]["step"]) == 12 and curve[-1]["control/loss"] and not curve[-1]["loss"]
    assert {row["phase"] for row in curve} == {"adapt", "sft", "control_adapt", "control_sft"}


@pytest.mark.full
def test_the_control_reads_the_same_windows_and_examples(masked: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[Any]] = {}
    original = fit.Run.batches

    def batches(self: Any, step: int, index: int) -> Any:
        rows, made = original(self, step, index)
        given = made[0].noised.tokens if hasattr(made[0], "noised") else made[0].input_ids
        seen.setdefault(self.job.name, []).append((rows.tolist(), given))
        return rows, made

    monkeypatch.setattr(fit.Run, "batches", batches)
    finished(masked, "diffusion")
    for own, theirs in (("adapt", "control_adapt"), ("sft", "control_sft")):
        for (rows, tokens), (others, ids) in zip(seen[f"diffusion@{own}"], seen[f"diffusion@{theirs}"], strict=True):
            assert rows == others
            for one, other in zip(tokens.tolist(), ids.tolist(), strict=True):
                text = [token for token in other if token != masked.tokenizer.pad]
                assert one[: len(text)] == text


@pytest.mark.full
def test_the_control_ends_after_its_own_steps(masked: Workspace) -> None:
    finished(masked, "diffusion", control_steps=2)
    numbers = masked.numbers("diffusion")
    assert numbers["adapt"]["steps"] == numbers["sft"]["steps"] == 3
    assert numbers["control_adapt"]["steps"] == numbers["control_sft"]["steps"] == 2
    assert int(masked.curve("diffusion")[-1]["step"]) == 10


@pytest.mark.parametrize(
    ("changes", "phases"),
    [({"adapt_steps": 0}, {"sft", "control_sft"}), ({"sft_epochs": 0}, {"adapt", "control_adapt"})],
)
@pytest.mark.full
def test_either_part_may_be_left_out(masked: Workspace, changes: dict[str, Any], phases: set[str]) -> None:
    finished(masked, "diffusion", **changes)
    assert {row["phase"] for row in masked.curve("diffusion")} == phases


@pytest.mark.full
def test_from_scratch_nothing_is_shifted_and_blocks_stand_in_the_configuration(masked: Workspace) -> None:
    finished(masked, "diffusion", init="scratch", block_size=32)
    model, _ = files.load(Path("models/diffusion"))
    assert not model.traits.shift and model.traits.block_size == 32
    for stage in ("diffusion_dpo", "diffusion_grpo"):
        ended = run(stage)
        assert ended.code == 2 and "is a block-diffusion model (block_size 32)" in ended.said


def test_dpo_and_grpo_publish_masked_models_that_moved(masked: Workspace) -> None:
    base, _ = files.load(Path("models/diffusion"))
    before = dict(base.named_parameters())
    for stage in ("diffusion_dpo", "diffusion_grpo"):
        finished(masked, stage)
        model, _ = files.load(Path("models") / stage)
        assert model.traits == base.traits
        assert any(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    told = masked.numbers("diffusion_dpo")["test"]
    assert told["n"] == 6 and {"accuracy", "likelihood", "likelihood_before", "margin"} <= told.keys()
    curve = masked.curve("diffusion_grpo")
    assert any(row.get("coupled/variance") for row in curve) and any(row.get("kl") for row in curve)
    assert any(row["kl_held_out"] for row in curve) and not any("held_out_variance" in name for name in curve[0])
    variance = masked.numbers("diffusion_grpo")["held_out_variance"]
    assert 0 < variance["coupled"] < variance["apart"]
    assert Path("metrics/samples/diffusion_grpo.jsonl").read_text()


@pytest.mark.parametrize("stage", ["diffusion_dpo", "diffusion_grpo"])
@pytest.mark.full
def test_an_adapter_trains_alone_and_is_merged(masked: Workspace, stage: str) -> None:
    more = {"ref_sync": 0} if stage == "diffusion_grpo" else {}
    finished(masked, stage, adapter={"rank": 2, "alpha": 4}, **more)
    assert "merge_difference" in masked.numbers(stage)
    files.load(Path("models") / stage)


# -- resume ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("last", [5, *(pytest.param(last, marks=pytest.mark.full) for last in (1, 3, 7, 9, 11))])
def test_diffusion_stopped_in_any_phase_publishes_what_an_uninterrupted_run_does(masked: Workspace, last: int) -> None:
    whole, _ = finished(masked, "diffusion", **SAVING)
    done = 0

    def step(_: int) -> None:
        nonlocal done
        if done == last:
            raise Stopped
        done += 1

    with hooked(step), pytest.raises(Stopped):
        run("diffusion", **SAVING | {"runtime.fresh": True})
    again, said = finished(masked, "diffusion", **SAVING)
    assert "resumed at step" in said and again == whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "last"),
    [
        ("diffusion", "2"),
        ("diffusion_dpo", "1"),
        ("diffusion_dpo", "3"),
        ("diffusion_grpo", "2"),
        ("diffusion_grpo", "3"),
    ],
)
@pytest.mark.full
def test_a_killed_stage_publishes_what_an_uninterrupted_one_does(masked: Workspace, stage: str, last: str) -> None:
    """Killed by SIGKILL. The reference of diffusion_grpo follows its policy, so it is part of the state."""
    whole, _ = finished(masked, stage, **SAVING)
    killed(int(last), stage, arguments(stage, SAVING | {"runtime.fresh": True}))
    again, said = finished(masked, stage, **SAVING)
    assert "resumed at step" in said and again == whole


@pytest.mark.slow
@pytest.mark.full
def test_two_processes_see_the_same_masks_and_learn_the_same(masked: Workspace) -> None:
    """DDP over gloo: the losses of every step are within 1e-5 of those of one process."""
    alone: dict[str, list[float]] = {}
    for world in ("", "2"):
        for stage in STAGES:
            line = [
                sys.executable,
                "-m",
                f"stages.{stage}",
                *arguments(stage, {"runtime.fresh": True, "runtime.logging_steps": 1}),
            ]
            environment = os.environ | {"STAGECOACH_MLFLOW": "off"} | ({"STAGECOACH_LAUNCH": world} if world else {})
            done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stderr[-4000:]
            told = [
                float(row["loss"] or row.get("control/loss") or "nan")
                for row in masked.curve(stage)
                if row["loss"] or row.get("control/loss")
            ]
            if world:
                assert told == pytest.approx(alone[stage], abs=1e-5)
            else:
                alone[stage] = told
                assert len(told) >= 2


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["diffusion_dpo", "diffusion_grpo"])
@pytest.mark.full
def test_a_causal_model_is_refused_where_a_masked_one_is_needed(masked: Workspace, stage: str) -> None:
    model, tokenizer = checkpoint.load(Path("models/code"))
    checkpoint.save(Path("models/diffusion"), model, tokenizer, {})
    ended = run(stage)
    assert ended.code == 2
    assert "models/diffusion: expected a masked-diffusion model, found a causal one" in ended.said
    assert "dvc repro stage_diffusion" in ended.said


@pytest.mark.full
def test_a_masked_model_is_refused_where_a_causal_one_is_needed(masked: Workspace) -> None:
    model, tokenizer = files.load(Path("models/diffusion"))
    files.save(Path("models/code"), model, tokenizer, {})
    ended = command("lora", ["lora.base=code", "lora.dialogues=dialogues"])
    assert ended.code == 2 and "models/code: expected a causal model, found a masked-diffusion one" in ended.said


@pytest.mark.parametrize(
    ("stage", "changes", "message"),
    [
        ("diffusion_dpo", {"eval_draws": 0}, "eval_draws: expected at least 1 masked pass, got 0"),
        ("diffusion_dpo", {"diffusion_steps": 0}, "diffusion_steps: expected at least 1 masked pass, got 0"),
        ("diffusion_dpo", {"timesteps": "even"}, "timesteps: expected one of stratified, independent, got 'even'"),
        ("diffusion_dpo", {"dpo_reduction": "max"}, "dpo_reduction: expected one of sum, mean"),
        ("diffusion_dpo", {"beta": 0.0}, "expected beta > 0"),
        ("diffusion_dpo", {"kinds": ["poems"]}, "expected pairs of the kinds poems, found story"),
        ("diffusion_dpo", {"adapter": {"rank": 2, "alpha": 4, "dropout": 0.1}}, "adapter.dropout: expected 0"),
        ("diffusion_dpo", {"max_length": 300}, "max_length: expected at most 256, the model's context, got 300"),
        ("diffusion_grpo", {"denoising_steps": 0}, "steps: expected 1 to 24, the length of the canvas, got 0"),
        ("diffusion_grpo", {"denoising_steps": 25}, "steps: expected 1 to 24, the length of the canvas, got 25"),
        ("diffusion_grpo", {"max_new_tokens": 200}, "the model's context, got 260"),
        (
            "diffusion_grpo",
            {"samples": 1},
            "samples: expected at least 2, got 1; each problem's completions are compared",
        ),
        ("diffusion_grpo", {"estimator": "best"}, "estimator: expected one of normalized, released"),
        ("diffusion_grpo", {"advantage": "best"}, "advantage: expected one of loo, mean"),
        ("diffusion_grpo", {"t_scope": "row"}, "t_scope: expected one of sample, batch"),
        (
            "diffusion_grpo",
            {"difficulty": "odd"},
            "difficulty: expected `frontier`, `all` or a problem group (easy), got 'odd'",
        ),
        ("diffusion_grpo", {"ref_sync": 2, "beta": 0.0}, "ref_sync: expected 0 with an adapter"),
        ("diffusion", {"init": "model"}, "init: expected one of base, scratch"),
        ("diffusion", {"block_size": 32}, "block_size: expected 0 with `init: base`"),
        (
            "diffusion",
            {"init": "scratch", "block_size": 36},
            "block_size: expected a divisor of max_new_tokens (96), got 36",
        ),
        ("diffusion", {"sft_norm": "row"}, "sft_norm: expected one of answer, tokens, batch"),
        ("diffusion", {"t_scope": "row"}, "t_scope: expected one of sample, batch"),
        ("diffusion", {"token_weight": "flat"}, "token_weight: expected one of elbo, cart"),
        ("diffusion", {"anneal_fraction": 1.5}, "anneal_fraction: expected 0 to 1"),
        (
            "diffusion",
            {"adapt_steps": 0, "sft_epochs": 0},
            "adapt_steps, sft_epochs: expected at least 0 each, and more than 0 for at least one of them",
        ),
        ("diffusion", {"max_new_tokens": 32}, "problems with an answer do not fit; at most a tenth may be dropped"),
        ("diffusion", {"max_new_tokens": 192}, "the model's context, got 272"),
        ("diffusion", {"cart_p": 1.0}, "cart_p: expected a share between 0 and 1"),
    ],
)
@pytest.mark.full
def test_what_cannot_be_is_refused_with_value_and_remedy(
    masked: Workspace, stage: str, changes: dict[str, Any], message: str
) -> None:
    ended = run(stage, **changes)
    assert ended.code == 2 and message in ended.said, ended.said
    assert not Path(f"metrics/{stage}.json").exists() and not Path(f"models/{stage}_x").exists()


@pytest.mark.full
def test_pairs_whose_answers_are_empty_are_counted_or_stop_the_stage(masked: Workspace) -> None:
    path = Path("data/preferences/train.jsonl")
    rows = list(records.read(path, records.Pair))
    empty = replace(pair(900), chosen=[{"role": "assistant", "content": " "}])
    records.write(path, [*rows, empty])
    finished(masked, "diffusion_dpo")
    assert masked.numbers("diffusion_dpo")["dropped"]["train"] == {"empty answer": 1}
    records.write(path, [*rows, *(replace(empty, id=str(900 + n)) for n in range(6))])
    ended = run("diffusion_dpo")
    assert ended.code == 2 and "6 empty answer" in ended.said


@pytest.mark.full
def test_a_problem_whose_answer_is_empty_is_named(masked: Workspace) -> None:
    rows = list(records.read(Path("data/problems/train.jsonl"), records.Problem))
    records.write(Path("data/problems/train.jsonl"), [*rows, replace(rows[0], id="blank", answer="  ")])
    ended = run("diffusion")
    assert ended.code == 2 and "problem blank: its answer is empty" in ended.said


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_directory_says_which_ids_are_what_and_comes_back(masked: Workspace) -> None:
    values = json.loads(Path("models/diffusion/config.json").read_text())
    tokenizer = masked.tokenizer
    assert values["model_type"] == "stagecoach_mdm" and values["shift"] is True
    assert (values["mask_token_id"], values["fill_token_id"]) == (tokenizer.mask, tokenizer.turn_end)
    assert values["banned_ids"] == [tokenizer.pad, tokenizer.mask]
    assert not Path("models/diffusion/generation_config.json").exists()
    model, _ = files.load(Path("models/diffusion"))
    files.save(Path("again"), model, tokenizer, {})
    for name in ("config.json", "model.safetensors"):
        assert Path("again", name).read_bytes() == Path("models/diffusion", name).read_bytes()
    frozen = files.load_frozen(Path("again"))
    assert not frozen.training and not any(p.requires_grad for p in frozen.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask_token_id": None}, "missing keys: mask_token_id"),
        ({"mask_token_id": 400}, "expected ids below 320"),
        ({"mask_token_id": 40}, "mask_token_id 40 is not a special token of the tokenizer"),
        ({"banned_ids": [900]}, "expected ids below 320"),
    ],
)
@pytest.mark.full
def test_a_directory_without_a_mask_that_its_tokenizer_knows_is_refused(
    masked: Workspace, change: dict[str, Any], message: str
) -> None:
    path = Path("models/diffusion/config.json")
    values = json.loads(path.read_text()) | change
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    with pytest.raises(ModelError, match=message):
        files.load(Path("models/diffusion"))


@pytest.mark.full
def test_the_mask_starts_as_the_mean_embedding(masked: Workspace) -> None:
    causal, tokenizer = checkpoint.load(Path("models/code"))
    table = causal.model.embed_tokens.weight.detach().clone()
    model = files.from_causal(causal, tokenizer)
    torch.testing.assert_close(model.trunk.model.embed_tokens.weight[tokenizer.mask], table.mean(0))
    assert torch.equal(causal.model.embed_tokens.weight, table)  # the causal model keeps its own
