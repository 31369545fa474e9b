"""How fast a run is and how well it uses the machine. These numbers go to MLflow and `speed.json` only: they are no result.

`mfu`, model FLOPs utilisation (Chowdhery et al. 2022, arXiv:2204.02311, appendix B): training FLOPs of the tokens, as
`ModelConfig.flops_per_token` counts them, over what the device could do: by its data sheet where it stands in `device.DATA_SHEET`, and
as `mfu_measured` by a large matrix product in the run's precision, timed after the run.
"""

from typing import Any

from pipeline import device
from pipeline.tracking import say


def headline(run: Any) -> str:
    """What is about to be trained, on what, in how many steps; `run` is a fit.Run."""
    size = sum(p.numel() for p in run.plain.parameters())
    precision = f"{run.hardware.device.type} {run.hardware.precision}"
    return (
        f"{run.job.name}: {size / 1e6:.2f} M parameters, {run.steps} steps of {run.config.rows} rows of at most "
        f"{run.config.row_length} tokens (micro-batch {run.micro_batch}), {precision}, "
        f"{run.ranks.world} process{'es' if run.ranks.world > 1 else ''}{_iterations(run)}"
    )


def _iterations(run: Any) -> str:
    """What Muon's iterations add to the arithmetic of a step."""
    per_token: Any = getattr(run.plain, "flops_per_token", None)
    flops = run.optimizers.iteration_flops()
    if not flops or per_token is None:
        return ""
    share = flops / (run.config.rows * run.config.row_length * per_token(run.config.row_length))
    return f"; Muon's iterations add {100 * share:.1f} % to the arithmetic of a step"


def report(run: Any, seconds: float, steps: int, targets: int) -> None:
    """Tokens per second, utilisation and memory of the `steps` that this call of fit has made."""
    if not steps:
        return
    tokens, where = run.seen, run.hardware.device
    per_token: Any = getattr(run.plain, "flops_per_token", None)
    flops = tokens * per_token(run.config.row_length) / seconds if per_token else 0.0
    values: dict[str, Any] = {
        "tokens_per_second": tokens / seconds, "targets_per_second": targets / seconds,
        "samples_per_second": steps * run.config.rows / seconds, "step_seconds": seconds / steps,
        "gflops": flops / 1e9, "memory_gb": device.peak_memory(where) / 1e9,
    }  # fmt: skip
    values |= utilisation(flops / run.ranks.world, run.hardware) | device.describe(run.job.runtime.precision)
    run.job.tracker.speed.update(values)
    share = f", {100 * values['mfu_measured']:.0f} % of a matrix product's" if "mfu_measured" in values else ""
    say(f"{run.job.name}: {tokens / seconds:,.0f} tokens/s, {flops / 1e9:,.0f} GFLOP/s{share}")


def utilisation(flops: float, hardware: device.Hardware) -> dict[str, float]:
    """`mfu` where the data sheet is known, `mfu_measured`, and the GPU's own `gpu_utilisation`; empty without `flops` per second."""
    if not flops:
        return {}
    found = {"mfu_measured": flops / (1e9 * device.matmul_gflops(hardware.precision))}
    if (sheet := device.data_sheet_flops(hardware.device)) is not None:
        found["mfu"] = flops / sheet
    if (busy := device.gpu_utilisation(hardware.device)) is not None:
        found["gpu_utilisation"] = busy
    return found
