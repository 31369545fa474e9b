"""The block `sandbox` of params.yaml: what a candidate may use and import, and whether it may run without a sandbox.

All of these settings affect verdicts, so DVC tracks them. Where candidates run (`runtime.sandbox.url`) does not, so it
is not tracked.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits for one candidate."""

    cpu_seconds: float = 0.5
    """CPU limit per test, unless the problem sets its own."""
    job_cpu_seconds: float = 10.0
    """CPU limit for all tests of a candidate together."""
    wall_extra_seconds: float = 2.0
    """Wall-clock limit per test: 4 x its CPU limit plus this value."""
    timeouts: int = 3
    """After this many timeouts, the remaining tests count as timed out."""
    memory_mib: int = 256
    """Address space in addition to the server's own."""
    stdout_kib: int = 64
    """Maximum size of stdout; a candidate that writes more is killed."""
    stderr_kib: int = 8
    """Maximum size of stderr; a candidate that writes more is killed."""
    results_kib: int = 4096
    """Maximum total size of a candidate's answers."""
    source_kib: int = 64
    """Maximum size of the candidate's code; longer code is not run."""
    max_tests: int = 256
    """Maximum number of tests per problem; a problem with more is rejected."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"{name}: expected a positive number, got {value}")

    def wall(self, cpu_seconds: float) -> float:
        """The wall-clock limit in seconds for a CPU limit."""
        return 4 * cpu_seconds + self.wall_extra_seconds


@dataclass(frozen=True, kw_only=True)
class SandboxConfig:
    """The block `sandbox` of params.yaml; the keys of `limits` are at its top level."""

    limits: Limits = field(default_factory=Limits)
    preload: tuple[str, ...] = ()
    """Modules that candidates may import in addition to the standard library, such as [numpy]."""
    allow_unsafe: bool = False
    """If there is no sandbox, run with resource limits only, and mark the results."""


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
