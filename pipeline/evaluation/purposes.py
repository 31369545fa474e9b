"""Which suites a causal model is measured by: those that say something about what it is for.

A model that learnt conversations has left stories and drills behind, and one that only read documents answers no questions: measuring
every model by everything took longer than many a stage trains. A model that is not named here, one of a person's own stage, is measured
by everything; so are all with `evaluate.every_suite`. What a comparison or a claim of the report reads must stand in both of its models
(tests/test_purposes.py). A suite that is left out is absent from metrics/eval/<model>.json, never 0.
"""

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")

READS = ("text", "stories", "stories_held_out", "drills", "transcripts", "stories sampled", "code")
ANSWERS = ("code", "problems", "tools", "answers")
SUITES: dict[str, tuple[str, ...]] = {
    "language": READS,
    "code": (
        "text",
        "code",
        "code gaps",
        "problems",
        "tools",
        "facts",
    ),  # problems, tools, facts: what others begin from
    "tools": ("stories sampled", "code gaps", *ANSWERS),
    "lora": ANSWERS,
    "dpo": ANSWERS,
    "grpo": ANSWERS,
    "rlhf": ANSWERS,
    "diffusion_control": ("code", "problems"),  # beside the masked model
    "memory": ("text", "code", "facts"),
    "memory_baseline": ("text", "code", "facts"),
}


def of(model: str, plan: Mapping[str, T]) -> dict[str, T]:
    """The part of a plan that a model of this name is measured by, in the plan's order."""
    wanted = SUITES.get(model)
    return {name: suite for name, suite in plan.items() if wanted is None or name in wanted}
