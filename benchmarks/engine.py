"""The server's engine vs. `transformers.generate`: same weights, prompts, lengths and threads, greedy, interleaved.

    python benchmarks/engine.py [--model models/deploy] [--rounds 5] [--tokens 64] [--rows 1 2 4 8] [--threads 1]
    [--only NAME]

Without --model: random weights of a Qwen3 shape with 82 M parameters. Prints, with median and quartiles over rounds:
decoded tokens per second at each number of rows (complete answers to prompts of 16 tokens; MBU is the share of the
measured memory bandwidth needed to read weights, keys and values once per step); the ratio of each of our settings to
the better of transformers' two dtypes, round by round; prefill tokens per second on a prompt of 1,024 tokens; the time
to the first token when that prompt is cached, as a share of the uncached time; the speed on repetitive text with and
without drafts; and the resident memory of each side in a fresh process.

Goals: int8 with one row is at least twice as fast as transformers; the first token of a cached prompt takes at most 5%
of the uncached time.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import psutil
import torch

from pipeline.export.inference import for_serving
from pipeline.generation.sampling import Sampling
from pipeline.model import checkpoint
from pipeline.model.config import ModelConfig
from pipeline.model.transformer import Transformer
from pipeline.run import device
from pipeline.serve.engine import Engine, Event, SampledToken
from pipeline.serve.engine import GenerationRequest as Request

SHAPE = ModelConfig(
    vocab_size=8192,
    width=768,
    layers=12,
    heads=12,
    kv_heads=4,
    head_dim=64,
    d_ff=2048,
    max_context=2048,
    rope_theta=1e4,
    tied=True,
)
OURS, THEIRS = ("int8", "bf16", "float32"), ("hf bf16", "hf float32")
SHORT, LONG = 16, 1024  # prompt tokens
Answer = Callable[[list[list[int]], int], float]  # prompts, tokens of each answer -> seconds


def weights(path: Path | None) -> Transformer:
    """The model in a directory, or a random one."""
    if path is not None:
        return checkpoint.load_frozen(path)
    return Transformer(SHAPE, torch.Generator().manual_seed(0)).train(False).requires_grad_(False)


def served(name: str, path: Path | None, *, drafts: bool = False, rows: int = 8) -> Engine:
    """Our engine, without starting its thread."""
    model = weights(path)
    served = for_serving(model.bfloat16() if name == "bf16" else model, "int8" if name == "int8" else "native")
    return Engine(served, rows=rows, drafts=drafts)


def ours(engine: Engine) -> Answer:
    """A function that returns the seconds until all answers of our engine are done."""

    def answer(prompts: list[list[int]], tokens: int) -> float:
        said: list[Event] = []
        begin = time.perf_counter()
        for number, ids in enumerate(prompts):
            engine.submit(
                Request(ids=ids, sampling=Sampling(tokens), seed=0, listener=said.append, owner=f"{number} {len(ids)}")
            )
        while engine.waiting or engine.busy:
            engine.step()
        seconds = time.perf_counter() - begin
        assert sum(isinstance(event, SampledToken) for event in said) == tokens * len(prompts)
        return seconds

    return answer


def theirs(name: str, path: Path | None) -> Answer:
    """A function that times `transformers.generate` on all prompts at once; with equal lengths, nothing is padded."""
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    own = weights(path)
    model = Qwen3ForCausalLM(Qwen3Config(**own.config.to_hf()))
    model.load_state_dict(own.state_dict() | {"lm_head.weight": own.model.embed_tokens.table})
    model = model.to(torch.bfloat16 if name == "hf bf16" else torch.float32).train(False)

    @torch.no_grad()
    def answer(prompts: list[list[int]], tokens: int) -> float:
        ids = torch.tensor(prompts)
        config = GenerationConfig(max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)
        begin = time.perf_counter()
        made = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config, disable_compile=True
        )
        seconds = time.perf_counter() - begin
        assert made.shape[1] == ids.shape[1] + tokens
        return seconds

    return answer


def bandwidth() -> float:
    """Read bandwidth of the threads in bytes per second: the best of several sums over 256 MiB."""
    block = torch.ones(2**26)
    seconds = []
    for _ in range(8):
        begin = time.perf_counter()
        block.sum()
        seconds.append(time.perf_counter() - begin)
    return block.nbytes / min(seconds)


def bytes_a_step(engine: Engine, rows: int, length: int) -> int:
    """Minimum bytes read by one step: the weights of all matrix products, and `length` keys and values per row."""
    config, size = engine.model.config, engine.decoder.cache.keys[0].element_size()
    held = engine.model.state_dict(keep_vars=True)
    matrices = sum(tensor.nbytes for name, tensor in held.items() if tensor.ndim == 2 and "embed_tokens" not in name)
    return matrices + rows * length * 2 * config.layers * config.kv_heads * config.head_dim * size


def told(values: list[float], digits: int = 1) -> str:
    """Format values as `median (first quartile-third quartile)`."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def random_ids(seed: int, length: int, vocabulary: int) -> list[int]:
    """A prompt of random token ids."""
    return torch.randint(0, vocabulary, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def decoding(sides: dict[str, Answer], engines: dict[str, Engine], arguments: argparse.Namespace) -> None:
    """Print tokens per second at each number of rows."""
    speed, vocabulary = bandwidth(), engines["int8"].model.config.vocab_size
    sys.stdout.write(f"\ndecoding, tokens/s; bandwidth {speed / 1e9:.1f} GB/s\n")
    for rows in arguments.rows:
        rates: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(-1, arguments.rounds):  # the first round is a warm-up
            prompts = [random_ids(1000 * turn + row, SHORT, vocabulary) for row in range(rows)]
            for name, answer in sides.items():
                rate = rows * arguments.tokens / answer(prompts, arguments.tokens)
                if turn >= 0:
                    rates[name].append(rate)
        best = [max(pair) for pair in zip(*(rates[name] for name in THEIRS))]
        for name, values in rates.items():
            line = f"  {rows} rows  {name:11} {told(values):24}"
            if name in OURS:
                read = bytes_a_step(engines[name], rows, SHORT + arguments.tokens // 2)
                ratios = [own / other for own, other in zip(values, best)]
                line += (
                    f"  x transformers {told(ratios, 2):20}  MBU {statistics.median(values) / rows * read / speed:.0%}"
                )
            sys.stdout.write(line + "\n")
            sys.stdout.flush()


def reading(sides: dict[str, Answer], engines: dict[str, Engine], arguments: argparse.Namespace) -> None:
    """Print prefill tokens per second on a long prompt, and the time to the first token when the prompt is cached."""
    vocabulary = engines["int8"].model.config.vocab_size
    long = min(LONG, engines["int8"].context - 2)
    sys.stdout.write(
        f"\nprompt of {long} tokens: prefill, tokens/s; if cached, time to first token, % of uncached time\n"
    )
    cold: dict[str, list[float]] = {name: [] for name in sides}
    known: dict[str, list[float]] = {name: [] for name in OURS}
    for turn in range(-1, arguments.rounds):
        ids = random_ids(10**6 + turn, long, vocabulary)
        for name, answer in sides.items():
            seconds = answer([ids], 1)
            again = answer([ids], 1) if name in OURS else 0.0
            if turn >= 0:
                cold[name].append(seconds)
                if name in OURS:
                    known[name].append(again)
    for name, values in cold.items():
        line = f"  {name:11} {told([long / seconds for seconds in values], 0):24}"
        if name in OURS:
            share = [100 * again / seconds for again, seconds in zip(known[name], values)]
            line += f"  {1000 * statistics.median(known[name]):.1f} ms, {told(share, 2)}%"
        sys.stdout.write(line + "\n")


def drafting(arguments: argparse.Namespace) -> None:
    """Print tokens per second on repetitive text, with and without drafts."""
    sys.stdout.write("\ndrafts, tokens/s of one row on repetitive text\n")
    for name in OURS:
        pair = [served(name, arguments.model, drafts=drafts, rows=1) for drafts in (False, True)]
        ids = random_ids(7, 24, pair[0].model.config.vocab_size) * 4
        rates: list[list[float]] = [[], []]
        for turn in range(-1, arguments.rounds):
            for engine, own in zip(pair, rates):
                rate = 2 * arguments.tokens / ours(engine)([ids], 2 * arguments.tokens)
                if turn >= 0:
                    own.append(rate)
        stats = pair[1].stats()
        ratio = [on / off for off, on in zip(*rates)]
        sys.stdout.write(
            f"  {name:11} off {told(rates[0])}  on {told(rates[1])}  x {told(ratio, 2)}; of {stats.generated_tokens}"
            f" tokens, {stats.accepted_tokens} from drafts ({stats.drafted_tokens} drafted)\n"
        )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="a causal model directory (default: random weights)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--only", choices=[*OURS, *THEIRS], help="generate one answer, then print the process's memory in MiB"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.only:
        side = (
            theirs(arguments.only, arguments.model)
            if arguments.only in THEIRS
            else ours(served(arguments.only, arguments.model))
        )
        side([[1] * SHORT], arguments.tokens)
        sys.stdout.write(f"{psutil.Process().memory_info().rss / 2**20:.0f}\n")
        return
    device.keep_freed_memory()
    engines = {name: served(name, arguments.model) for name in OURS}
    sides = {name: ours(engine) for name, engine in engines.items()}
    sides |= {name: theirs(name, arguments.model) for name in THEIRS}
    parameters = next(iter(engines.values())).model.num_parameters()
    sys.stdout.write(f"{parameters / 1e6:.1f} M parameters, {arguments.threads} threads, {device.cpu_name()}\n")
    decoding(sides, engines, arguments)
    reading(sides, engines, arguments)
    drafting(arguments)
    sys.stdout.write("\nresident memory of a fresh process after one answer, MiB\n")
    for name in (*OURS, *THEIRS):
        command = [sys.executable, __file__, *sys.argv[1:], "--only", name]
        done = subprocess.run(command, check=True, text=True, capture_output=True)
        sys.stdout.write(f"  {name:11} {done.stdout.split()[-1]}\n")


if __name__ == "__main__":
    main()
