"""Block `sandbox` of params.yaml: what a candidate may use and import, and whether it may run without a sandbox.

All of these settings change verdicts, so DVC tracks them. Where candidates run (`runtime.sandbox.url`) changes no
verdict and is not tracked.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one candidate may use."""

    cpu_seconds: float = 0.5
    """Of one test, where the problem does not say."""
    job_cpu_seconds: float = 10.0
    """Of all tests of a candidate together."""
    wall_extra_seconds: float = 2.0
    """A test may last 4 x its CPU limit and this."""
    timeouts: int = 3
    """After so many the rest of the tests time out."""
    memory_mib: int = 256
    """Address space above the server's own."""
    stdout_kib: int = 64
    """What a candidate may write; more ends it."""
    stderr_kib: int = 8
    """The same of its errors."""
    results_kib: int = 4096
    """Of all answers of a candidate."""
    source_kib: int = 64
    """Of the candidate's code; a longer one is not run."""
    max_tests: int = 256
    """Of a problem; one with more is refused."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"{name}: expected a positive number, got {value}")

    def wall(self, cpu_seconds: float) -> float:
        """The wall-clock limit in seconds that goes with a CPU limit."""
        return 4 * cpu_seconds + self.wall_extra_seconds


@dataclass(frozen=True, kw_only=True)
class SandboxConfig:
    """Block `sandbox` of params.yaml; the keys of `limits` are not nested in it."""

    limits: Limits = field(default_factory=Limits)
    preload: tuple[str, ...] = ()
    """Modules that candidates may import besides the standard library's: [numpy]."""
    allow_unsafe: bool = False
    """Where there is no sandbox: run with resource limits only, and mark the results."""


def job_limits(limits: Limits, cpu_seconds: float, job_cpu: float, job_wall: float) -> dict[str, float]:
    """The limits of a job with `job_cpu` and `job_wall` seconds left."""
    return {
        "cpu": cpu_seconds,
        "wall": limits.wall(cpu_seconds),
        "job_cpu": job_cpu,
        "job_wall": job_wall,
        "memory": limits.memory_mib << 20,
        "stdout": limits.stdout_kib << 10,
        "stderr": limits.stderr_kib << 10,
        "results": limits.results_kib << 10,
    }
