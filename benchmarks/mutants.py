"""Mutants: single wrong lines in losses, loop, graph, intervals, resume, masks and jail, and the tests that kill them.

    python benchmarks/mutants.py [--only losses loop graph ...] [--numbers 3 17]

For each mutant, a file is changed in a copy of the tree, the listed tests run until one fails, and the file is
restored. Prints the test that killed the mutant, or SURVIVED, and writes benchmarks/results/mutants.json; mutants
that were not run keep their rows. Exits with 1 if a mutant survived, or if the listed tests fail without any mutant.

Not guaranteed: that the list is complete, or that a survivor would not be killed by tests that are not listed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"
COPIED = (
    "benchmarks",
    "build",
    "conf",
    "docs",
    "feedback",
    "pipeline",
    "stages",
    "tests",
    "dvc.yaml",
    "params.yaml",
    "pyproject.toml",
)
LIMIT = 300  # seconds after which a mutant counts as killed: an endless loop is not a pass
LEARNING, SANDBOX, BATCHES = "pipeline/learning", "pipeline/sandbox", "pipeline/batches"


@dataclass(frozen=True)
class Mutant:
    """One wrong change and the tests that should catch it."""

    subject: str  # losses, loop, graph, ...
    file: str
    old: str  # occurs exactly once in the file
    new: str
    tests: str  # files in tests/ to run with pytest, separated by spaces


def _of(subject: str, file: str, tests: str, *changes: tuple[str, str]) -> list[Mutant]:
    """Mutants of one file that the same tests should kill."""
    return [Mutant(subject, file, old, new, tests) for old, new in changes]


MUTANTS = [
    *_of(
        "losses",
        f"{LEARNING}/pair_losses.py",
        "test_objectives_pairs.py",
        ("else chosen - rejected - margin", "else chosen - rejected + margin"),
        ("centered = (chosen + rejected).square()", "centered = (chosen - rejected).square()"),
        ("(x.difference_per_token - 1 / (2 * c.beta))", "(x.difference_per_token - 1 / c.beta)"),
        ("/ (1 - 2 * c.label_smoothing)", "/ (1 - c.label_smoothing)"),
        ("+ 1 - torch.sigmoid(c.beta * x.difference)", "+ 1 - torch.sigmoid(c.beta * x.rejected)"),
        ("likelihoods.clamp(min=LEAST_LIKELY)", "likelihoods"),
    ),
    *_of(
        "losses",
        f"{LEARNING}/policy_losses.py",
        "test_objectives_policy_by_hand.py test_objectives_policy.py",
        (
            "torch.maximum(-advantages * ratio, -advantages * clipped)",
            "torch.minimum(-advantages * ratio, -advantages * clipped)",
        ),
        ("0.5 * torch.maximum(free, bound)", "0.5 * free"),
        ("torch.expm1(q) - q", "torch.expm1(-q) + q"),
        ("gamma * lam * next_advantage", "lam * next_advantage"),
        ("centered = (values - chosen.mean()) * mask", "centered = (values - values.mean()) * mask"),
        ("/ (num - 1).clamp(min=1)).sqrt()", "/ num.clamp(min=1)).sqrt()"),
        ("weight = 1 / lengths[row_of]\n    per", "weight = 1 / lengths.float().mean()\n    per"),
    ),
    *_of(
        "losses",
        "pipeline/diffusion/training.py",
        "test_diffusion_rollouts.py test_diffusion_batches.py test_diffusion_losses.py",
        ("-(logprobs * weights).sum()", "-logprobs.sum()"),
    ),
    *_of("losses", f"{LEARNING}/losses.py", "test_objectives.py", ("alpha=-1)", "alpha=1)")),
    *_of(
        "loop",
        f"{LEARNING}/fit.py",
        "test_fit.py test_fit_options.py",
        ("t.coefficient * t.sum * (", "t.sum * ("),
        ("self.course.index, micro, self.ranks.rank)", "self.course.index, 0, self.ranks.rank)"),
        ("self.model.train(False)", "self.model.train(True)"),
        ("self.course.index, micro, self", "0, micro, self"),  # one dropout mask for every step
    ),
    *_of(
        "loop", f"{LEARNING}/update.py", "test_window.py", ("sum(c * s / self.counts[per]", "sum(s / self.counts[per]")
    ),
    *_of(
        "loop",
        f"{LEARNING}/settings.py",
        "test_schedule.py",
        ("return (step + 1) / warmup", "return step / warmup"),
        ("(step - steps + decay + 1) / decay", "(step - steps + decay) / decay"),
    ),
    *_of("loop", f"{LEARNING}/update.py", "test_averages.py", ("1 - decay)", "decay)")),
    *_of(
        "loop",
        f"{LEARNING}/update.py",
        "test_verdict.py",
        ("course.lowest + RISEN else 0", "course.lowest + RISEN else course.risen"),
        ("IN_ROW, WITHIN, IN_ALL = 3, 1000, 10", "IN_ROW, WITHIN, IN_ALL = 4, 1000, 10"),
    ),
    *_of(
        "loop",
        f"{LEARNING}/processes.py",
        "test_ranks.py test_fit_options.py",
        ("if limit > 0 and math.isfinite(norm):", "if limit > 0:"),
    ),
    *_of(
        "loop",
        f"{LEARNING}/update.py",
        "test_verdict.py test_fit.py",
        ("if value < self.anchor - threshold:", "if value < self.anchor:"),
        ("if value < self.best:", "if value <= self.best:"),
    ),
    *_of(
        "resume",
        f"{LEARNING}/states.py",
        "test_fit.py test_fit_options.py",
        ('"window": window.state()', '"window": LoggingWindow().state()'),
        ('self.averages.restore(averages, state.meta["averaged"])', "self.averages.restore(averages, 0)"),
        ('state.meta["fingerprint"] != self.fingerprint', 'state.meta["fingerprint"] is None'),
    ),
    *_of("resume", f"{LEARNING}/fit.py", "test_fit_options.py", ('self.scaler.load_state(rest["scaler"])', "pass")),
    *_of(
        "resume",
        f"{LEARNING}/states.py",
        "test_states.py",
        ("if sha256(path) != hash_:", "if not hash_:"),
        ("[:-keep]", "[: -keep - 1]"),
        ("reverse=True):\n        wrong", "reverse=False):\n        wrong"),
    ),
    *_of(
        "graph",
        "dvc.yaml",
        "test_wiring.py",
        ("      - data/benchmarks\n      - build/code/corpus.txt", "      - build/code/corpus.txt"),
        ("      - feedback\n", ""),
        ("    outs:\n      - models/reward\n", "    outs:\n"),
    ),
    *_of("intervals", "pipeline/evaluation/intervals.py", "test_intervals.py", ("(0.025, 0.975)", "(0.05, 0.95)")),
    *_of("resume", f"{LEARNING}/update.py", "test_verdict.py", ("if self.step >= first)", "if self.step > first)")),
    *_of(
        "resume",
        f"{LEARNING}/update.py",
        "test_verdict.py",
        ("index + 1 - course.index", "index - course.index"),
        ("e <= course.step - BACK", "e < course.step - BACK"),
    ),
    *_of(
        "masks",
        f"{BATCHES}/batch.py",
        "test_corpus_stream.py test_dialogue_stream.py test_preferences.py test_scoring.py",
        ("(documents[:, 1:] == documents[:, :-1]) & trained[:, 1:]", "trained[:, 1:]"),
        ("np.where(trained[:, 1:], tokens[:, 1:], IGNORED)", "np.where(trained[:, :-1], tokens[:, 1:], IGNORED)"),
        ("return column - np.maximum.accumulate(", "return column - 0 * np.maximum.accumulate("),
    ),
    *_of(
        "masks",
        f"{BATCHES}/packing.py",
        "test_packing.py",
        ("continues=starts + context < ends", "continues=starts + context <= ends"),
        ("np.maximum(offsets[:-1] - 1, 0)", "np.maximum(offsets[:-1], 0)"),
    ),
    *_of(
        "masks",
        f"{BATCHES}/packing.py",
        "test_packing.py",
        ('("order", self.seed, int(epoch))', '("order", self.seed, 0)'),
    ),
    *_of(
        "masks",
        "pipeline/diffusion/masks.py",
        "test_diffusion_masks.py",
        ("return (1 - LEAST) * t + LEAST", "return t"),
        ('kind="stable")[:k]', 'kind="stable")[: k - 1]'),
        ("Coupled(t, first, ~first)", "Coupled(t, first, numbers[1:] >= 1 - t)"),
        ("blocks[:, None] > blocks[None]", "blocks[:, None] >= blocks[None]"),
    ),
    *_of("masks", "pipeline/text/chat.py", "test_chat.py", ("[part.trained] * len(new)", "[True] * len(new)")),
    *_of(
        "jail",
        f"{SANDBOX}/kernel.py",
        "test_jail.py",
        ("(LOAD, 0, 0, 36), *_one_of((0,)), forbidden]", "*_one_of((0,)), forbidden]"),
        ("CLONE_OF_THREADS = (0x003D0F00, 0x007D0F00)", "CLONE_OF_THREADS = (0x003D0F00, 0x007D0F00, 0x003D0B00)"),
        (
            "(JUMP_EQ, 1, 0, machine.audit), (RETURN, 0, 0, KILL)",
            "(JUMP_EQ, 1, 0, machine.audit), (RETURN, 0, 0, ALLOW)",
        ),
        ("0x40000000), (RETURN, 0, 0, KILL)", "0x40000000), (RETURN, 0, 0, ALLOW)"),
    ),
    *_of(
        "jail",
        f"{SANDBOX}/judge.py",
        "test_judge.py",
        ("failure, passed = results[0], 0", "failure, passed = results[0], passed"),
        ('(("n", report.nonce), ("i", number), ("v", value))', '(("n", _), ("i", number), ("v", value))'),
        ("answers = answers[: report.given - 1]", "answers = answers[: report.given]"),
        ("c if c.isprintable() else", "c if c else"),
    ),
    *_of("jail", f"{SANDBOX}/messages.py", "test_judge.py", ("if value.hex() != content:", "if not content:")),
    *_of(
        "jail",
        f"{SANDBOX}/kernel.py",
        "test_self_test.py test_sandbox_limits.py test_jail.py",
        ("        prctl(PR_SET_NO_NEW_PRIVS, 1)", "        pass"),
        ("else min(value, hard)", "else hard"),
    ),
]
MUTANTS = [mutant for mutant in MUTANTS if (ROOT / mutant.file).parent.is_dir()]  # a wing may have been removed


def copied(folder: Path) -> Path:
    """A copy of everything the tests need, without compiled files."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy2(source, folder / name)
    return folder


def killer(tree: Path, tests: str) -> str:
    """The first test that fails in `tree`; empty if all pass. Raises RuntimeError if no test could run."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow and not browser and not gpu and not oracle",
    ]
    command += ["--tb=no", *(f"tests/{name}" for name in tests.split())]
    world = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    try:
        ended = subprocess.run(command, cwd=tree, env=world, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return f"no end within {LIMIT} s"
    told = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if ended.returncode == 0:
        return ""
    if not told:
        raise RuntimeError(f"pytest exited with {ended.returncode} and names no test:\n{ended.stdout}\n{ended.stderr}")
    return told[0].split(" ", 1)[1].split(" - ")[0]


def killed_by(tree: Path, mutant: Mutant) -> str:
    """The test that kills a mutant in `tree`, which is restored afterward; empty if it survives."""
    path = tree / mutant.file
    right = path.read_text()
    assert right.count(mutant.old) == 1, f"{mutant.file}: {mutant.old!r} occurs {right.count(mutant.old)} times"
    path.write_text(right.replace(mutant.old, mutant.new))
    try:
        return killer(tree, mutant.tests)
    finally:
        path.write_text(right)


def key_of(mutant: Mutant) -> str:
    """The key of a mutant's row in the results."""
    return f"{mutant.file}: {mutant.old} -> {mutant.new}"


def main() -> int:
    """Run the chosen mutants and write the table."""
    parser = argparse.ArgumentParser(description="Which test kills which mutant.")
    parser.add_argument("--only", nargs="+", choices=sorted({m.subject for m in MUTANTS}), help="only these subjects")
    parser.add_argument("--numbers", nargs="+", type=int, help="only these mutants, by index")
    arguments = parser.parse_args()
    chosen = [
        (number, mutant)
        for number, mutant in enumerate(MUTANTS)
        if (not arguments.only or mutant.subject in arguments.only)
        and (not arguments.numbers or number in arguments.numbers)
    ]
    rows = {row["mutant"]: row for row in json.loads(RESULTS.read_text())} if RESULTS.exists() else {}
    survivors = 0
    with tempfile.TemporaryDirectory() as name:
        tree = copied(Path(name))
        healthy: set[str] = set()
        for number, mutant in chosen:
            if mutant.tests not in healthy and (broken := killer(tree, mutant.tests)):
                sys.exit(f"{broken} fails without any mutant: fix it first")
            healthy.add(mutant.tests)
            killed = killed_by(tree, mutant)
            survivors += not killed
            sys.stdout.write(f"{number:2} {mutant.subject:6} {killed or 'SURVIVED'}   {key_of(mutant)!r}\n")
            sys.stdout.flush()
            rows[key_of(mutant)] = {"mutant": key_of(mutant), "subject": mutant.subject, "killed_by": killed or None}
            listed = [rows[key_of(m)] for m in MUTANTS if key_of(m) in rows]
            RESULTS.write_text(json.dumps(listed, indent=1) + "\n")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
