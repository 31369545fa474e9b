"""`python -m pipeline.tools.plan`: what it prints, and its messages for a wrong key, name or value."""

from pathlib import Path

import pytest
import torch

from pipeline.learning import footprint
from pipeline.run import device
from pipeline.tools import plan


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = plan.main(list(argv))
    found = capsys.readouterr()
    return code, found.err if code else found.out


def test_the_table_has_every_strategy_every_part_and_every_card(
    in_repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = printed(capsys, "model=7b", "model.vocab_size=32000", "context=2048", "device=cuda", "precision=bf16")
    assert code == 0
    assert "7,208,219,648 parameters" in text
    for name in ("one device", "DDP (8)", "FSDP2 (8)", "LoRA", "GRPO, LoRA", "masked diffusion", "PPO, four models"):
        assert text.count(f"\n{name}  ") == 2, name
    for head in (*plan.PARTS, "total", "this machine", "16 GB", "24 GB", "40 GB", "80 GB"):
        assert head in text, head


def test_its_numbers_are_those_of_the_arithmetic(in_repository: Path) -> None:
    config = plan.configured(["model=large", "model.vocab_size=32000", "gradient_checkpointing=full"])
    work = plan.work_of(config, "cuda", "bf16")
    for strategy, bytes_each in (("one", 16), ("ddp", 20), ("fsdp2", 2)):
        found = plan.plan(config, strategy, work, 1)
        states = found.weights + found.gradients + found.optimizer
        whole = 8 * (sum(r * c * n for (r, c), n in footprint.matrices(config.model).items()) / 32 + 32_000 * 1600)
        assert states == pytest.approx(bytes_each * 1_362_028_096 + (whole if strategy == "fsdp2" else 0))
    assert plan.plan(config, "lora", work, 1).total < plan.plan(config, "one", work, 1).total / 2


def test_answers_keep_their_logits_and_rows_of_tokens_do_not(in_repository: Path) -> None:
    config = plan.configured(["model=nano", "model.vocab_size=32000", "context=2048"])
    work = plan.work_of(config, "cuda", "bf16")
    logits = {name: plan.plan(config, name, work, 8).logits for name in ("one", "lora", "dpo", "ppo")}
    width, part = config.model.width, 2**23 // 32_000  # positions whose gradient is computed at once
    assert logits["dpo"] == logits["ppo"] == 2 * 32_000 * (8 * 2048 + part) + (2 + 8) * 32_000 * width
    width, most = config.model.width, 2**23 // 32_000 * 32_000
    assert logits["lora"] == 6 * most + 6 * width * 8 * 2048  # a frozen head has no gradient
    assert logits["one"] == logits["lora"] + 8 * 32_000 * width


def test_large_does_not_train_in_full_on_16_gb_but_does_on_40(in_repository: Path) -> None:
    config = plan.configured(["model=large", "gradient_checkpointing=full"])
    work = plan.work_of(config, "cuda", "bf16")
    assert plan.rows_in(config, "one", work, 16e9) == "-"
    assert int(plan.rows_in(config, "one", work, 40e9)) >= 1


def test_the_machine_has_its_own_column(
    in_repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "total_memory", lambda where: 3 * 10**9)
    code, text = printed(capsys, "model=medium", "strategy=one", "precision=fp32", "device=cpu", "context=256")
    row = text.splitlines()[-1].split()
    assert code == 0 and "this machine, 3 GB" in text
    config = plan.configured(["model=medium", "context=256"])
    rows, here = row[2], torch.device("cpu").type
    assert rows == plan.rows_in(config, "one", plan.work_of(config, here, "fp32"), 3e9)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["contxt=3"], r"unknown key 'contxt' \(did you mean 'context'\?\); valid keys: base_weights, context, device"),
        (["language.steps=3"], "unknown key 'language.steps'.*valid keys"),
        (["model=8b"], "model: no file .*8b.yaml.*options: 7b, large, medium"),
        (["model.depth=3"], "model: unknown key 'depth'.*valid keys: .*layers"),
        (["7b"], "expected key=value"),
        (["strategy=zero"], "strategy: expected one of one, ddp, fsdp2, lora, dpo, dpo_lora, grpo, .*got 'zero'"),
        (["context=one"], 'plan.context: expected int or none, got "one"'),
        (["context=9999"], "context: expected 1 to 2048 .the model's limit., got 9999"),
        (["processes=0"], "micro_batch, processes, samples: expected at least 1 each"),
        (["targets=[qkv]"], r"adapter.targets: expected names from q_proj"),
    ],
)
def test_a_wrong_word_is_answered_with_the_valid_ones(
    in_repository: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    import re

    code, text = printed(capsys, *argv)
    assert code == 2
    assert re.search(message, text), text


def test_what_users_want_fits_by_plan(in_repository: Path) -> None:
    """3B with an adapter (SFT, DPO, Diffusion-DPO) on 16 GB, 7B on 24, GRPO of 7B on 80, or in full on eight of those.
    The base is in bf16.
    """
    for model, strategy, card in (
        ("xlarge", "lora", 16),
        ("xlarge", "dpo_lora", 16),
        ("xlarge", "diffusion_dpo_lora", 16),
        ("7b", "lora", 24),
        ("7b", "grpo_lora", 80),
        ("7b", "grpo_fsdp2", 80),
    ):
        config = plan.configured([f"model={model}", "gradient_checkpointing=full"])
        work = plan.work_of(config, "cuda", "bf16")
        assert int(plan.rows_in(config, strategy, work, card * 1e9)) >= 1, (model, strategy)
    wide = plan.configured(["model=7b", "gradient_checkpointing=full", "base_weights=fp32"])
    assert plan.rows_in(wide, "lora", plan.work_of(wide, "cuda", "bf16"), 24e9) == "-"


def test_sampling_holds_keys_and_values_of_the_rows_that_are_decoded_together(in_repository: Path) -> None:
    config = plan.configured(["model=nano", "context=1000", "samples=20", "model.max_context=2048"])
    model, work = config.model, plan.work_of(config, "cuda", "bf16")
    row = 2 * 4 * model.layers * model.kv_heads * model.head_dim * 1000
    assert plan.sampling_bytes(model, work, 20) == plan.plan(config, "grpo", work, 1).sampling == 20 * row
    assert plan.sampling_bytes(model, work, 10**6) == 512 * row
    assert plan.plan(config, "dpo", work, 1).sampling == 0


def test_sharded_grpo_has_reference_and_copy_whole_on_each_process(in_repository: Path) -> None:
    for narrow, size in (("fp32", 4), ("bf16", 2)):
        config = plan.configured(["model=7b", "model.vocab_size=32000", f"base_weights={narrow}"])
        work = plan.work_of(config, "cuda", "bf16")
        sharded, grpo = (plan.plan(config, strategy, work, 1) for strategy in ("fsdp2", "grpo_fsdp2"))
        table = 32_000 * config.model.width  # the embedding, which is looked up, stays float32
        matrices = config.model.matmul_parameters
        assert (grpo.weights - sharded.weights) / 2 == pytest.approx(size * matrices + 4 * table, rel=1e-3)
        assert grpo.optimizer == sharded.optimizer


def test_nf4_stores_half_a_byte_a_weight(in_repository: Path) -> None:
    found = {}
    for base in ("bf16", "nf4"):
        config = plan.configured(["model=7b", f"base_weights={base}", "gradient_checkpointing=full"])
        found[base] = plan.plan(config, "lora", plan.work_of(config, "cuda", "bf16"), 1).weights
    matrices = sum(rows * columns * n for (rows, columns), n in footprint.matrices(config.model).items())
    assert (found["bf16"] - found["nf4"]) / matrices == pytest.approx(2 - 0.51587, abs=1e-5)
    assert plan.rows_in(config, "lora", plan.work_of(config, "cuda", "bf16"), 16e9) != "-"  # QLoRA of 7B on 16 GB
