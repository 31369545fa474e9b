"""What a memory buys: facts learned and code ability kept, vs. other ways to spend the same weights or FLOPs.

    python benchmarks/memory.py models/code data [--steps 400] [--seeds 0 1 2] [--work DIR] [--only memory] [--out FILE]

All contenders are trained by `fit` on the same batches and with the same settings as stage memory at scale `demo`:
`memory` (ours); `wider` (a parallel SwiGLU), `lora` and `product_keys` (memory_product_keys.py), each once with as many
trainable weights as the memory and once with as many FLOPs per token; and memories of 256, 1,024 and 4,096 rows. For
each, the best of three rates is chosen on the validation wordings (first seed), among those that raise bits per byte of
code by at most 1%; the reported numbers are for the test set, which played no part in this. Each run is a file in
--work, so an interrupted benchmark resumes, and two processes can share the work (`--only`). Intervals: 95%, over
questions, for the mean over seeds. Every row has the trainable weights, FLOPs and bytes read per token, and the forward
pass's speed relative to the base.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch

from benchmarks.memory_product_keys import ProductKeys, ProductKeysConfig
from pipeline.evaluation.intervals import paired_difference
from pipeline.learning import footprint
from pipeline.learning.fit import Watchers, fit
from pipeline.learning.pretraining import plain_loss
from pipeline.memory import files, measure, training
from pipeline.memory.config import MemoryConfig
from pipeline.memory.files import WiderConfig
from pipeline.memory.model import Memory, Reading
from pipeline.memory.training import Choices
from pipeline.model import checkpoint, lora
from pipeline.model.config import ModelConfig
from pipeline.model.lora import AdapterConfig
from pipeline.model.transformer import Transformer
from pipeline.run import device
from pipeline.run.config import Settings, resolve
from pipeline.run.tracking import Tracker, write_json
from pipeline.run.workdir import Job, StopRequest
from pipeline.text.tokenizer import Tokenizer
from stages import memory as stage

MOST_LOST = 0.01  # largest accepted relative increase in bits per byte of code
RATES = {"muon": (3e-3, 6e-3, 1.2e-2), "adamw": (1.5e-3, 3e-3, 6e-3)}
ROWS = (256, 1024, 4096)
ROUNDS, SECONDS = 7, 0.5  # for timing
PASS = 2048  # tokens in a timed forward pass


@dataclass(frozen=True)
class Contender:
    """An addition to the base model, and its cost."""

    name: str
    config: Any  # MemoryConfig, WiderConfig, AdapterConfig or ProductKeysConfig
    parameters: int
    flops: int  # of matrix products, per token
    numbers_read: int  # weights and rows, per token
    optimizer: str = "muon"
    adapter: AdapterConfig | None = None  # additional adapters in the base


def contenders(
    config: MemoryConfig, shape: ModelConfig, adapter: AdapterConfig | None = None, sizes: Iterable[int] = ROWS
) -> dict[str, Contender]:
    """The memory, alternatives with as many weights (`wider`) or FLOPs (`wider, equal FLOPs`), and memories of other
    sizes.

    If an `adapter` is given, all except `lora` have it too, and `lora` is as large as the memory plus the adapter.
    """
    extra = 0 if adapter is None else lora_weights(shape, adapter)
    ours = of_memory("memory", config, shape)
    found = [ours]
    for suffix, target, cost in ((None, ours.parameters, "parameters"), (", equal FLOPs", ours.flops, "flops")):
        for make in (of_wider, of_lora, of_product_keys):
            more = extra * (2 if cost == "flops" else 1) if make is of_lora else 0
            found.append(closest(partial(make, suffix or "", config, shape), target + more, cost))
    for rows in sizes:
        if rows != config.rows:
            found.append(of_memory(f"memory, {rows} rows", replace(config, rows=rows), shape))
    return {one.name: beside_adapter(one, adapter, extra) for one in found}


def beside_adapter(one: Contender, adapter: AdapterConfig | None, extra: int) -> Contender:
    """The contender plus adapters with `extra` weights; a pure adapter is unchanged."""
    if adapter is None or isinstance(one.config, AdapterConfig):
        return one
    return replace(
        one,
        adapter=adapter,
        parameters=one.parameters + extra,
        flops=one.flops + 2 * extra,
        numbers_read=one.numbers_read + extra,
    )


def lora_weights(shape: ModelConfig, adapter: AdapterConfig) -> int:
    """The number of weights in an adapter."""
    sizes = (sum(footprint.projections(shape)[name]) for name in adapter.modules)
    return shape.layers * adapter.rank * sum(sizes)


def closest(make: Callable[[int], Contender | None], target: int, cost: str) -> Contender:
    """Of the contenders of sizes 1, 2, ..., the one whose cost is closest to `target`."""
    best: Contender | None = None
    for size in range(1, 4096):
        one = make(size)
        if one is None:
            continue
        if best is None or abs(getattr(one, cost) - target) < abs(getattr(best, cost) - target):
            best = one
        if getattr(one, cost) > 2 * target:
            break
    assert best is not None
    return best


def of_memory(name: str, config: MemoryConfig, shape: ModelConfig) -> Contender:
    """Our memory. Its cost excludes projecting the bank's keys and values, which is done once for many tokens, and the
    router, which runs once per unit.
    """
    memory = Memory(config, replace(shape, memory=config))
    inner, outer = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    rows, layers = (config.shared + config.top_k) * config.chapter_rows, len(config.placed(shape.layers))
    matrices = (3 if config.gated else 2) * shape.width * inner
    each = 2 * matrices + 4 * rows * inner
    return Contender(
        name, config, memory.num_parameters(), layers * each, layers * (matrices + shape.width + 2 * rows * outer)
    )


def of_wider(suffix: str, config: MemoryConfig, shape: ModelConfig, size: int) -> Contender:
    """A SwiGLU of width 4 * `size` after each layer that would read the memory."""
    wider = WiderConfig(width=4 * size, layers=tuple(config.placed(shape.layers)))
    weights = len(wider.layers) * (3 * wider.width * shape.width + shape.width)
    return Contender(f"wider{suffix}", wider, weights, 2 * weights, weights)


def of_lora(suffix: str, config: MemoryConfig, shape: ModelConfig, size: int) -> Contender | None:
    """Adapters of rank `size` on all matrices, at their cost in training; once merged, they cost nothing."""
    adapter = AdapterConfig(rank=size, alpha=2.0 * size, targets=("all-linear",))
    weights = lora_weights(shape, adapter)
    return Contender(f"lora{suffix}", adapter, weights, 2 * weights, weights)


def of_product_keys(suffix: str, config: MemoryConfig, shape: ModelConfig, size: int) -> Contender | None:
    """A product-key memory with `size` half-keys per table and query halves of 16 numbers."""
    if size < 8:
        return None
    keys = ProductKeysConfig(layers=tuple(config.placed(shape.layers)), keys=size, half=16, top_k=min(32, size))
    return Contender(
        f"product_keys{suffix}",
        keys,
        keys.parameters(shape.width),
        keys.flops(shape.width),
        keys.numbers_read(shape.width),
        "adamw",
    )


def attached(model: Transformer, one: Contender, seed: int) -> None:
    """Attach a contender to the frozen base; only the contender is trained."""
    generator = device.generator("memory", seed)
    adapter = one.config if isinstance(one.config, AdapterConfig) else one.adapter
    if adapter is not None:
        lora.attach(model, adapter, device.generator("adapter", seed))
    if isinstance(one.config, ProductKeysConfig):
        model.requires_grad_(False)
        model.attach(ProductKeys(one.config, model.config, generator))
    elif not isinstance(one.config, AdapterConfig):
        files.attach(model, one.config, generator)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or name.startswith(files.PREFIX))


@dataclass
class Workshop:
    """Runs and caches the experiments."""

    base: Path
    data: Path
    params: stage.Params
    runtime: Any
    work: Path

    def key(self, one: Contender, seed: int, rate: float) -> str:
        """A string of everything that a run's result depends on."""
        params = self.params
        told = [
            type(one.config).__name__,
            asdict(one.config),
            one.adapter and asdict(one.adapter),
            one.optimizer,
            rate,
            seed,
            asdict(params.fit),
            asdict(params.router),
            params.facts_weight,
            params.code_weight,
            params.questions,
        ]
        return json.dumps(told, sort_keys=True)

    def run(self, one: Contender, seed: int, rate: float) -> dict[str, Any]:
        """Train a contender, or load the result of an earlier run."""
        settings = self.params.fit
        path = self.work / f"{device.stable_hash('memory', self.key(one, seed, rate)):016x}.json"
        if path.is_file():
            return json.loads(path.read_text())
        model, tokenizer = checkpoint.load(self.base)
        attached(model, one, seed)
        weights = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert weights == one.parameters, (one.name, weights, one.parameters)
        fixed = settings.learning_rates  # for the router, and for additional adapters
        rates = {"bank": rate, "router": fixed.get("router", rate)} if isinstance(one.config, MemoryConfig) else {}
        if one.adapter is not None:
            rates["lora"] = fixed.get("lora", rate)
        config = replace(
            settings,
            optimizer=one.optimizer,
            learning_rate=rate,
            learning_rates=rates,
            eval_steps=10**6,
            validation=replace(settings.validation, publish="last"),
        )
        shape = one.config if isinstance(one.config, MemoryConfig) else self.params.memory
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            job = Job(
                stage="memory",
                item=None,
                key="k",
                seed=seed,
                folder=Path(folder),
                workers=1,
                runtime=self.runtime,
                tracker=Tracker("memory", Path(folder), {}, {}, quiet=True),
                lineage={},
                stop=StopRequest(),
            )
            stream = stage.streams(
                replace(self.params, memory=shape), job, self.data / "facts", self.data / "tokens/code", tokenizer
            )
            choices = Choices()
            loss = (
                partial(training.memory_loss, choices=choices, weights=self.params.router)
                if isinstance(one.config, MemoryConfig)
                else plain_loss
            )
            fit(model, stream.both, loss, config, job, watchers=Watchers(micro=choices.begin, gradients_at=1))
        found = measured(model, tokenizer, stream.code, self.data / "facts", self.params.questions)
        found |= {"name": one.name, "rate": rate, "seed": seed, "seconds": time.perf_counter() - began}
        print(
            f"{one.name} seed {seed} rate {rate}: val {statistics.mean(found['val']):.3f} test"
            f" {statistics.mean(found['test']):.3f} code {found['code_bpb']:.4f}, {found['seconds']:.0f} s",
            file=sys.stderr,
            flush=True,
        )
        write_json(path, found)
        return found


def measured(model: Transformer, tokenizer: Tokenizer, code: Iterable[Any], facts: Path, most: int) -> dict[str, Any]:
    """Which questions of each split are answered correctly, and bits per byte of code."""
    model.train(False)
    found: dict[str, Any] = {
        kind: (
            measure.recall(model, tokenizer, measure.questions(facts / f"{kind}.jsonl", tokenizer, most))
            .right.astype(int)
            .tolist()
        )
        for kind in ("val", "test", "control")
    }
    known = measure.questions(facts / "train.jsonl", tokenizer, 10**6)[:: max(1, 1536 // most)]
    found["trained_wordings"] = float(measure.recall(model, tokenizer, known).right.mean())
    with torch.no_grad():
        found["code_bpb"] = training.bits_per_byte(model, list(code), lambda batch: Reading(trained=batch.targets >= 0))
    return found


def clock(base: Path, one: Contender) -> float:
    """Tokens/s of the forward pass relative to the base, the median of interleaved rounds."""
    plain, _ = checkpoint.load(base)
    beside, _ = checkpoint.load(base)
    attached(beside, one, 0)
    ids = torch.randint(0, plain.config.vocab_size, (PASS // 256, 256), generator=torch.Generator().manual_seed(0))

    def speed(model: Transformer) -> float:
        passes, began = 0, time.perf_counter()
        with torch.no_grad(), device.hardware("bf16").autocast():
            while (taken := time.perf_counter() - began) < SECONDS or not passes:
                model(ids)
                passes += 1
        return passes / taken

    for model in (plain, beside):
        speed(model.train(False))
    return statistics.median([speed(beside) / speed(plain) for _ in range(ROUNDS)])


def best_rate(shop: Workshop, one: Contender, seed: int, code_bpb: float) -> float:
    """The rate with the most facts in the validation wording (on a tie, the lowest) among those that raise the base's
    `code_bpb` by at most MOST_LOST; if there are none, the rate that raises it least."""
    runs = {rate: shop.run(one, seed, rate) for rate in RATES[one.optimizer]}
    kept = {rate: run for rate, run in runs.items() if run["code_bpb"] <= (1 + MOST_LOST) * code_bpb}
    if not kept:
        return min(runs, key=lambda rate: runs[rate]["code_bpb"])
    return max(kept, key=lambda rate: (statistics.mean(kept[rate]["val"]), -rate))


def told(
    shop: Workshop, one: Contender, runs: list[dict[str, Any]], others: dict[str, list[float]], shape: ModelConfig
) -> dict[str, Any]:
    """One row of the table."""
    own = means(runs, "test")
    base = shape.flops_per_token(shop.params.fit.context) / 3  # of a forward pass
    row: dict[str, Any] = {
        "name": one.name,
        "optimizer": one.optimizer,
        "rate": runs[0]["rate"],
        "seeds": [r["seed"] for r in runs],
        "parameters": one.parameters,
        "flops_per_token": one.flops,
        "flops_share_of_base": one.flops / base,
        "bytes_read_per_token": 4 * one.numbers_read,
        "facts": statistics.mean(own),
        "facts_by_seed": [statistics.mean(r["test"]) for r in runs],
        "control": statistics.mean(means(runs, "control")),
        "trained_wordings": statistics.mean(r["trained_wordings"] for r in runs),
        "code_bpb": statistics.mean(r["code_bpb"] for r in runs),
        "tokens_per_second_of_base": clock(shop.base, one),
    }
    for name, values in others.items():
        moved = paired_difference((own, None), (values, None), generator=device.generator("bench", 0))
        row[f"{name}_over_it"] = {"value": moved.value, "low": moved.low, "high": moved.high}
    return row


def means(runs: list[dict[str, Any]], kind: str) -> list[float]:
    """For each question, the share of seeds that answered it correctly."""
    return [statistics.mean(values) for values in zip(*(run[kind] for run in runs), strict=True)]


def main(given: list[str]) -> int:
    """Train what is missing and print the table as JSON; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("base", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=None, help="train only names with these prefixes; print no table")
    parser.add_argument(
        "--rate",
        action="append",
        default=[],
        help="memory=0.012: use this rate, found on another base, instead of searching",
    )
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS), help="other memory sizes to train")
    parser.add_argument("--without", nargs="*", default=[], help="names to leave out of the table")
    parser.add_argument("--work", type=Path, default=Path(".work/memory_benchmark"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*", default=[], help="keys of the `memory` block, as memory.key=value")
    arguments = parser.parse_intermixed_args(given)
    torch.set_num_threads(1)
    params, runtime = resolve(
        stage.Params,
        Settings(ROOT, [f"memory.steps={arguments.steps}", "runtime.save_steps=1000000", *arguments.overrides]),
        "memory",
    )
    shop = Workshop(arguments.base, arguments.data, params, replace(runtime, save_minutes=1e6), arguments.work)
    arguments.work.mkdir(parents=True, exist_ok=True)
    model, tokenizer = checkpoint.load(arguments.base)
    code = stage.streams(
        params, quiet_job(shop), arguments.data / "facts", arguments.data / "tokens/code", tokenizer
    ).code
    base = measured(model, tokenizer, code, arguments.data / "facts", params.questions)
    given_rates = {name: float(rate) for name, _, rate in (text.partition("=") for text in arguments.rate)}
    known, rates = contenders(params.memory, model.config, params.adapter, arguments.rows), dict(given_rates)
    known = {name: one for name, one in known.items() if name not in arguments.without}
    if arguments.only:
        known = {name: one for name, one in known.items() if any(name.startswith(word) for word in arguments.only)}
    runs: dict[str, list[dict[str, Any]]] = {}
    for name, one in known.items():
        kind = name.split(",")[0]
        leader = one if kind == name else contenders(params.memory, model.config, params.adapter)[kind]
        rates[kind] = rates.get(kind) or best_rate(shop, leader, arguments.seeds[0], base["code_bpb"])
        runs[name] = [shop.run(one, seed, rates[kind]) for seed in arguments.seeds]
    if arguments.only:
        return 0
    others = {"memory": means(runs["memory"], "test")}
    rows = [
        {
            "name": "base",
            "facts": statistics.mean(base["test"]),
            "control": statistics.mean(base["control"]),
            "code_bpb": base["code_bpb"],
        }
    ]
    rows += [told(shop, one, runs[name], others, model.config) for name, one in known.items()]
    result = {
        "steps": arguments.steps,
        "rates_given": given_rates,
        "config": asdict(params.memory),
        "questions": len(base["test"]),
        "rows": rows,
    }
    text = json.dumps(result, indent=1)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    print(text)
    return 0


def quiet_job(shop: Workshop) -> Job:
    """A job used only for its folder."""
    return Job(
        stage="memory",
        item=None,
        key="k",
        seed=0,
        folder=shop.work / "job",
        workers=1,
        runtime=shop.runtime,
        tracker=Tracker("memory", shop.work, {}, {}, quiet=True),
        lineage={},
        stop=StopRequest(),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
