"""Gates of alignment, from fine-tuning to reinforcement: what the first step must show before its update.

Each compares a number with what the mathematics says it must be when nothing has been learnt yet. A miss raises GateError
(exit 3) and names the gate, what was expected, what was found, and the likely cause.
"""

from collections.abc import Callable

from pipeline.errors import GateError
from pipeline.streams.batch import IGNORED, Tokens
from pipeline.text import chat
from pipeline.text.tokenizer import Tokenizer

KL = ("objective/kl", "kl/rollout")  # of the first answers from the reference: PPO's, the group methods'


def value(values: dict[str, float], name: str, expected: float, tolerance: float, cause: str) -> None:
    """Raise GateError unless a number of the first step is what the mathematics says; `cause` is the likely fault."""
    found = values.get(name)
    if found is None or not abs(found - expected) <= tolerance:
        shown = "nothing" if found is None else f"{found:.8g}"
        raise GateError(
            f"gate {name}: expected {expected:.8g} within {tolerance:g}, found {shown}. Likely cause: {cause}"
        )


def first_mask(batch: Tokens, tokenizer: Tokenizer) -> None:
    """Raise GateError unless a batch of conversations trains what the assistant says and the ends of its turns, no more.

    What that is is told from the ids alone, so that the mask is compared with something that made it not.
    """
    for ids, targets in zip(batch.input_ids.tolist(), batch.targets.tolist(), strict=True):
        following = [*ids[1:], targets[-1] if targets[-1] >= 0 else tokenizer.pad]
        said = chat.spoken(tokenizer, [ids[0], *following])[1:]
        if [token if mine else IGNORED for token, mine in zip(following, said, strict=True)] != targets:
            expected = tokenizer.decode(
                [token for token, mine in zip(following, said, strict=True) if mine], skip_special=False
            )
            found = tokenizer.decode([token for token in targets if token >= 0], skip_special=False)
            raise GateError(
                f"gate mask: expected the first batch to train what the assistant says: {expected!r:.200}; found {found!r:.200}. "
                "Likely cause: the trained-on mask of text/chat.py, or the shift of streams/batch.py"
            )


def first_reward(expected: float) -> Callable[[dict[str, float]], None]:
    """A fresh head gives 0 to all, so the ranking loss is ln 2 (less with margins)."""

    def check(values: dict[str, float]) -> None:
        name = "ranking" if "ranking" in values else "loss"
        value(values, name, expected, 1e-5, "the reward head does not start at zero, or the margins are read wrongly")

    return check


ROUNDED = 0.2  # nats by which the sums of a batch's answers may differ on average in half precision; another model is off by more than one


def first_dpo(expected: float | None, precision: str, beta: float) -> Callable[[dict[str, float]], None]:
    """The policy equals its reference: the loss is known, and no answer is preferred (strictly).

    In half precision a pass that keeps gradients rounds otherwise than one that does not, and an answer's sum has many terms: 0.04 nats
    were seen in a batch of 16 pairs. Rewards are `beta` times these, and the loss moves by a reward, or by its own size.
    """
    near = 1e-4 if precision == "fp32" else ROUNDED * beta

    def check(values: dict[str, float]) -> None:
        if expected is None:
            return
        cause = "policy and reference differ: other weights, dropout, another dtype, or stale precomputed sums"
        loose = near if precision == "fp32" else near + 0.05 * abs(expected)
        value(values, "preference" if "preference" in values else "loss", expected, loose, cause)
        for name in ("rewards/chosen", "rewards/rejected"):
            value(values, name, 0.0, near, cause)

    return check


def first_policy(ratio: str, divergence: str, clipped: str, precision: str) -> Callable[[dict[str, float]], None]:
    """Nothing has moved since the rollout: ratio 1, no divergence, nothing clipped, sampling agrees with teacher forcing.

    The names are those of the method's metrics. In float32 the divergence from the reference is 0 too, where one is loaded.
    """
    narrow = precision == "fp32"

    def check(values: dict[str, float]) -> None:
        cause = "the sampler and the training pass score answers differently: temperature, masks, positions, dropout"
        name = "sampling/sampling_logp_difference/"
        value(values, name + ("max" if narrow else "mean"), 0.0, 1e-4 if narrow else 2e-2, cause)
        value(values, ratio, 1.0, 1e-4 if narrow else 5e-2, cause)
        value(values, divergence, 0.0, 1e-6 if narrow else 1e-2, cause)
        value(values, clipped, 0.0, 0.0 if narrow else 1e-1, cause)
        for name in KL:  # sampled against teacher-forced, summed over an answer: too coarse a number in half precision
            if narrow and name in values:
                value(values, name, 0.0, 1e-3, "the reference is not what the policy starts from, or scores otherwise")

    return check


def unmoved(before: str, after: str, what: str) -> None:
    """Raise GateError when frozen weights changed during the run."""
    if before != after:
        raise GateError(
            f"{what}: its weights had the hash {before[:16]} at the start and {after[:16]} now; it must stay frozen: "
            "something trains or overwrites it"
        )
