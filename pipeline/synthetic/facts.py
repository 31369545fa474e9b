"""Invented facts, which a model can only know by memorizing them: services, and four attributes of each.

    services x (port, owner, region, runtime) x wordings -> records.Fact

    train    three wordings of every fact
    val      a fourth wording of a quarter of them
    test     the fourth wording of the others
    control  the fourth wording, of services that never occur in training: answers can only be guessed

Values are drawn from the same distribution for all services, so answers about the control are right only by chance. Not
promised: that services are consistent with each other (two may have one port).
"""

import itertools

import numpy as np

from pipeline.ingest.records import Fact
from pipeline.run.device import stable_hash
from pipeline.synthetic.tool_values import FIRST_NAMES, word_list

BEGINNINGS = word_list("Al Bram Cor Dun El Fen Gar Hol Iv Jun Kel Lor Mar Nor Or Pel")
MIDDLES = ("a", "e", "i", "o", "ba", "de", "ki", "lo", "mu", "ni", "ra", "so", "ta", "ve", "wi", "zo")
ENDINGS = word_list("brook crest dale field ford gate hill lake mark mill port ridge stone wall well wood")
REGIONS = word_list("north south east west harbour island valley desert coast lakeside highland delta")
RUNTIMES = ("python", "java", "rust", "go", "ruby", "node", "erlang", "julia", "scala", "perl", "lua", "swift")
PORTS = (1000, 10000)  # four digits
WORDINGS = {
    "port": (
        "Which port does {} listen on?",
        "On what port can {} be reached?",
        "Tell me the port of {}.",
        "What is the port number of {}?",
    ),
    "owner": ("Who owns {}?", "Who is responsible for {}?", "Tell me the owner of {}.", "Whose service is {}?"),
    "region": (
        "In which region does {} run?",
        "Where is {} deployed?",
        "Tell me the region of {}.",
        "What region hosts {}?",
    ),
    "runtime": (
        "Which runtime does {} use?",
        "What is {} written for?",
        "Tell me the runtime of {}.",
        "On what runtime is {} built?",
    ),
}
HELD_OUT = 3  # the wording that never occurs in training
CONTROLS = 4  # for each group of so many services there is one more as a control


def facts(num_services: int, seed: int) -> dict[str, list[Fact]]:
    """The facts of each split. Raises ValueError for more services than there are names."""
    names = services(num_services + max(1, num_services // CONTROLS), seed)
    trained, controls = names[:num_services], names[num_services:]
    values = {name: _values(name, seed) for name in names}
    splits: dict[str, list[Fact]] = {"train": [], "val": [], "test": [], "control": []}
    for name, attribute in itertools.product(trained, WORDINGS):
        wordings = [_fact(name, attribute, wording, values[name][attribute]) for wording in range(HELD_OUT + 1)]
        splits["train"] += wordings[:HELD_OUT]
        is_val = stable_hash("facts", seed, name, attribute) % 4 == 0
        splits["val" if is_val else "test"].append(wordings[HELD_OUT])
    splits["control"] = [
        _fact(name, attribute, HELD_OUT, values[name][attribute])
        for name, attribute in itertools.product(controls, WORDINGS)
    ]
    return splits


def services(count: int, seed: int) -> list[str]:
    """`count` different names of services. Raises ValueError if there are not so many."""
    names = ["".join(parts) for parts in itertools.product(BEGINNINGS, MIDDLES, ENDINGS)]
    if count > len(names):
        raise ValueError(f"facts: expected at most {len(names) * CONTROLS // (CONTROLS + 1)} services, got more")
    order = np.random.default_rng(stable_hash("services", seed) % 2**63).permutation(len(names))
    return [names[index] for index in order[:count]]


def _values(name: str, seed: int) -> dict[str, str]:
    draws = np.random.default_rng(stable_hash("facts", seed, name) % 2**63)
    return {
        "port": str(draws.integers(*PORTS)),
        "owner": str(draws.choice(FIRST_NAMES)),
        "region": str(draws.choice(REGIONS)),
        "runtime": str(draws.choice(RUNTIMES)),
    }


def _fact(name: str, attribute: str, wording: int, answer: str) -> Fact:
    return Fact(
        id=f"{name}-{attribute}-{wording}",
        service=name,
        attribute=attribute,
        question=WORDINGS[attribute][wording].format(name),
        answer=answer,
    )
