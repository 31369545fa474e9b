"""`--engine onnx` beside llama.cpp at the same number of bits: tokens decoded per second for one user, in turns, on a
CPU.

    python benchmarks/onnx_engine.py [--model models/deploy] [--rounds 5] [--tokens 32] [--threads 1]

Without --model: random weights of a Qwen3 shape with 82 M parameters. A time is that of a whole greedy answer to a
prompt of 16 tokens: ours through the engine, without drafts; llama.cpp's through llama-cpp-python, by its own cache
(f16) and the largest logit. q4_0 is llama.cpp's own rounding of all matrices; like the export's int4 it has a scale for
32 weights. Printed are the median and the quartiles of the rounds, and of the ratio within each round. Our torch
engine's int8 stands beside q8_0, without a goal.

Goal: int4 and fp32 at least 0.9 times llama.cpp. What is not installed reads "not run". llama.cpp repacks weights for
the widest instructions that the machine announces and dies where they are refused (AMX on virtual machines); it is not
asked without, which would make it slow: build it for what the machine has (CMAKE_ARGS="-DGGML_NATIVE=OFF
-DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON").
"""

import argparse
import ctypes
import importlib
import importlib.util
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np
import torch

from benchmarks.engine import SHORT, Answer, ours, random_ids, served, told, weights
from pipeline.export import gguf, huggingface, onnx
from pipeline.model import checkpoint
from pipeline.model.config import ModelConfig
from pipeline.model.transformer import Transformer
from pipeline.run import device
from pipeline.run.errors import StagecoachError
from pipeline.serve.engine import Engine
from pipeline.serve.onnx_engine import Export
from pipeline.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Pair:
    """One of ours and llama.cpp's file of as many bits."""

    ours: str
    theirs: str
    goal: float | None  # of ours divided by theirs


PAIRS = (Pair("onnx int4", "q4_0", 0.9), Pair("onnx fp32", "f32", 0.9), Pair("torch int8", "q8_0", None))


def export_engine(folder: Path, kind: str, config: ModelConfig, model: Transformer) -> Answer:
    """Our engine on a fresh export of the model directory. Raises StagecoachError without the extra."""
    onnx.build(folder, folder / kind, kind=kind)
    return ours(Engine(model, rows=1, drafts=False, decoder=Export(folder / kind, config).decoder))


def library() -> Any:
    """llama-cpp-python, silent."""
    importlib.import_module("llama_cpp._logger").set_verbose(False)
    return importlib.import_module("llama_cpp")


def opened(path: Path, threads: int) -> Any:
    """A model of llama.cpp, as it opens it by itself."""
    return library().Llama(str(path), n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)


def theirs(model: Any) -> Answer:
    """Greedy answers by llama.cpp, one prompt after another."""
    llama = library()

    def most_likely() -> int:
        return int(np.ctypeslib.as_array(llama.llama_get_logits_ith(model._ctx.ctx, -1), (model.n_vocab(),)).argmax())

    def answer(prompts: list[list[int]], tokens: int) -> float:
        begin = time.perf_counter()
        for ids in prompts:
            model.reset()
            given = ids
            for _ in range(tokens):
                model.eval(given)
                given = [most_likely()]
        return time.perf_counter() - begin

    return answer


def quantized(source: Path, path: Path) -> None:
    """Write a file of f32 anew with every matrix in q4_0."""
    llama = library()
    options = llama.llama_model_quantize_default_params()
    options.ftype, options.pure = llama.LLAMA_FTYPE_MOSTLY_Q4_0, True
    failed = llama.llama_model_quantize(str(source).encode(), str(path).encode(), ctypes.byref(options))
    assert not failed, f"llama.cpp cannot quantise {source}"


def directory(arguments: argparse.Namespace, folder: Path) -> None:
    """Write the model that is measured as a Hugging Face directory."""
    if arguments.model is not None:
        model, tokenizer = checkpoint.load(arguments.model)
    else:  # the tokens need no meaning: a few merges do
        model, tokenizer = weights(None), Tokenizer.train(iter(["The pilot asked the girl which way.\n"]), 320)
    huggingface.export(model, tokenizer, {}, folder)


def sides(folder: Path, arguments: argparse.Namespace, stack: ExitStack) -> dict[str, Answer | str]:
    """Each side ready to answer, or why it is not run."""
    model, tokenizer = checkpoint.load(folder)
    found: dict[str, Answer | str] = {}
    for kind in onnx.KINDS:
        try:
            found[f"onnx {kind}"] = export_engine(folder, kind, model.config, model)
        except StagecoachError as error:
            found[f"onnx {kind}"] = str(error)
    found["torch int8"] = ours(served("int8", folder, rows=1))
    if importlib.util.find_spec("llama_cpp") is None:
        return found | dict.fromkeys((pair.theirs for pair in PAIRS), "llama-cpp-python is not installed")
    serialized = (folder / "tokenizer.json").read_text(encoding="utf-8")
    for kind in ("f32", "q8_0"):
        gguf.write(folder / f"{kind}.gguf", model, tokenizer, serialized, kind=kind, name="benchmark")
    quantized(folder / "f32.gguf", folder / "q4_0.gguf")
    for kind in ("f32", "q8_0", "q4_0"):
        path = folder / f"{kind}.gguf"
        command = [sys.executable, __file__, "--try", str(path), "--threads", str(arguments.threads)]
        sys.stdout.write(f"{kind}: {path.stat().st_size / 1e6:.0f} MB\n")
        if subprocess.run(command, capture_output=True).returncode != 0:
            found[kind] = "llama.cpp dies of its repacked weights here, see this file's head"
        else:
            found[kind] = theirs(stack.enter_context(closing(opened(path, arguments.threads))))
    return found


def verdict(pair: Pair, rates: dict[str, list[float]], given: dict[str, Answer | str]) -> str:
    """What a pair shows."""
    if reason := next((side for side in (given[pair.ours], given[pair.theirs]) if isinstance(side, str)), None):
        return f"not run: {reason}"
    ratios = [own / other for own, other in zip(rates[pair.ours], rates[pair.theirs], strict=True)]
    middle = statistics.median(ratios)
    goal = "no goal" if pair.goal is None else f"goal {pair.goal}: {'met' if middle >= pair.goal else 'missed'}"
    return f"{told(rates[pair.ours])} against {told(rates[pair.theirs])} tokens/s, x {told(ratios, 2)}, {goal}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="a causal model's directory; random weights without")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--try", dest="tried", type=Path, help="only read a few tokens by this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.tried:
        with closing(opened(arguments.tried, arguments.threads)) as model:
            model.eval([5] * SHORT)
        return
    device.keep_freed_memory()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        directory(arguments, folder := Path(name))
        config = checkpoint.load(folder)[0].config
        given = sides(folder, arguments, stack)
        ready: dict[str, Callable[[list[list[int]], int], float]] = {
            name: side for name, side in given.items() if not isinstance(side, str)
        }
        rates: dict[str, list[float]] = {name: [] for name in ready}
        for turn in range(-1, arguments.rounds):  # the first one warms up
            prompt = random_ids(turn + 1, SHORT, config.vocab_size)
            for name, answer in ready.items():
                rate = arguments.tokens / answer([prompt], arguments.tokens)
                if turn >= 0:
                    rates[name].append(rate)
        sys.stdout.write(f"one user, {arguments.threads} threads, {device.cpu_name()}\n")
        for pair in PAIRS:
            sys.stdout.write(f"  {pair.ours:10} / {pair.theirs:4}  {verdict(pair, rates, given)}\n")


if __name__ == "__main__":
    main()
