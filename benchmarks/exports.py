"""Do other programs reproduce our model from the exports of `stage_deploy`? Repeats the stage's parity check in each.

    python benchmarks/exports.py [models/deploy] [--json FILE]

One row per program: whether it tokenizes a probe of over 20,000 tokens and renders conversations as we do, how far its
log-probabilities are from ours (on the probe's tokens), and how many of 64 greedy tokens match. Runs whatever is
installed: transformers (4 or 5), llama-cpp-python (built from source), the onnx extra. The rest is marked "not run".
The first row is our own model in float64, which shows the rounding error of float32; no float32 program can be expected
to do better.

Not covered: speed (`benchmarks/serving.py`), and the different rounding of accelerator kernels.
"""

import argparse
import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
from torch import Tensor

from pipeline.export import gguf, huggingface, onnx, smoke
from pipeline.model.heads import RewardModel
from pipeline.model.transformer import Transformer
from pipeline.run.errors import StagecoachError
from pipeline.text import chat
from pipeline.text.tokenizer import Tokenizer
from tests import probes

NOT_TRIED = ("vLLM", "MLX", "Ollama")  # the model card has commands for these three; nothing here runs them
HEADINGS = ("program", "tokens", "templates", "largest difference", "mean divergence", "perplexity", "greedy")


class Foreign(smoke.ExportProgram, Protocol):
    """A program with its own tokenizer and chat template."""

    def encode(self, text: str) -> list[int]: ...

    def rendered(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str: ...


class Transformers:
    """Hugging Face's model and tokenizer, in float32 and without eager attention."""

    def __init__(self, folder: Path) -> None:
        library: Any = importlib.import_module("transformers")
        self.model = library.AutoModelForCausalLM.from_pretrained(folder).eval()
        self.tokenizer = library.AutoTokenizer.from_pretrained(folder)

    @torch.no_grad()
    def logits(self, ids: list[int]) -> Tensor:
        """Logits (T, V): row t predicts the token after `ids[t]`."""
        return self.model(torch.tensor([ids])).logits[0]

    @torch.no_grad()
    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """Greedy tokens, decoded with its own cache."""
        said, given, cache = [], prompt, None
        for _ in range(count):
            out = self.model(torch.tensor([given]), past_key_values=cache, use_cache=True)
            said.append(int(out.logits[0, -1].argmax()))
            given, cache = said[-1:], out.past_key_values
        return said

    def encode(self, text: str) -> list[int]:
        """Token ids from its own implementation of tokenizer.json."""
        return self.tokenizer(text)["input_ids"]

    def rendered(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        """The prompt as rendered by its own Jinja."""
        return self.tokenizer.apply_chat_template(
            messages, tools=tools or None, tokenize=False, add_generation_prompt=True
        )


class LlamaCpp:
    """llama.cpp, through llama-cpp-python, on one CPU thread; keys and values are in f32 or f16."""

    def __init__(self, path: Path, context: int, *, cache: str = "f32") -> None:
        library: Any = importlib.import_module("llama_cpp")
        kind = {"f32": library.GGML_TYPE_F32, "f16": library.GGML_TYPE_F16}[cache]
        with _weights_as_they_are(library.llama_cpp):
            self.model = library.Llama(
                str(path),
                n_ctx=context,
                logits_all=True,
                type_k=kind,
                type_v=kind,
                n_threads=1,
                n_threads_batch=1,
                verbose=False,
            )

    def logits(self, ids: list[int]) -> Tensor:
        """Logits (T, V): row t predicts the token after `ids[t]`."""
        self.model.reset()
        self.model.eval(ids)
        return torch.from_numpy(np.array(self.model.scores[: len(ids)]))

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """Greedy tokens, decoded with its own cache."""
        self.model.reset()
        said, given = [], prompt
        for _ in range(count):
            self.model.eval(given)
            said.append(int(self.model.scores[self.model.n_tokens - 1].argmax()))
            given = said[-1:]
        return said

    def encode(self, text: str) -> list[int]:
        """Token ids from its own implementation of the file's vocabulary, merges and split, without control tokens."""
        return self.model.tokenize(text.encode(), add_bos=False, special=False)

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of a rendered prompt, with control tokens."""
        return self.model.tokenize(text.encode(), add_bos=False, special=True)

    def rendered(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        """The prompt as rendered from the file's template by the formatter that its chat endpoint uses."""
        formats: Any = importlib.import_module("llama_cpp.llama_chat_format")
        template = self.model.metadata["tokenizer.chat_template"]
        formatter = formats.Jinja2ChatFormatter(template=template, eos_token="", bos_token="")
        return formatter(messages=messages, tools=tools or None).prompt

    def close(self) -> None:
        """Free the model's memory; doing so at interpreter exit is too late."""
        self.model.close()


@contextlib.contextmanager
def _weights_as_they_are(library: Any) -> Iterator[None]:
    """Models opened in this block are not repacked for AMX: virtual machines may advertise AMX but then refuse it."""
    usual = library.llama_model_default_params

    def plain() -> Any:
        parameters = usual()
        parameters.use_extra_bufts = False
        return parameters

    library.llama_model_default_params = plain
    try:
        yield
    finally:
        library.llama_model_default_params = usual


class Genai(onnx.Genai):
    """onnxruntime-genai, with its template."""

    def rendered(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        """The prompt as rendered by its own Jinja."""
        given: dict[str, Any] = {"tools": json.dumps(tools)} if tools else {}
        return self.tokenizer.apply_chat_template(json.dumps(messages), add_generation_prompt=True, **given)


class Exact(smoke.Ours):
    """Our own model in float64; not used for greedy text."""

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """No greedy text: -1 for every token."""
        return [-1] * count


@dataclass(frozen=True)
class Row:
    """The results of one program; `found` is None if it was not run."""

    program: str
    found: smoke.Parity | None = None
    tokens: str = ""
    templates: str = ""
    why_not: str = ""

    def cells(self) -> list[str]:
        """The cells of the program's table row."""
        if self.found is None:
            return [self.program, f"not run: {self.why_not}", *[""] * 5]
        found = self.found
        greedy = f"{found.greedy_equal}/{found.greedy_tokens}" if self.tokens else ""
        if math.isnan(found.divergence):  # a reward model gives no probabilities
            return [self.program, "", "", f"{found.max_difference:.1e}", "", "", ""]
        return [
            self.program,
            self.tokens,
            self.templates,
            f"{found.max_difference:.1e}",
            f"{found.divergence:.1e}",
            f"{found.perplexity:+.3%}",
            greedy,
        ]


@dataclass(frozen=True)
class Subject:
    """An exported causal model."""

    folder: Path
    model: Transformer
    tokenizer: Tokenizer

    def asked(self, label: str, program: Foreign) -> Row:
        """Compare a program with our model."""
        text = probes.long_text()
        ids = self.tokenizer.encode(text)
        theirs = program.encode(text)
        same = "all" if theirs == ids else "differ from " + str(_first_difference(ids, theirs))
        rendered = sum(
            program.rendered(messages, tools) == chat.render_text(messages, tools, generation_prompt=True)
            for messages, tools in probes.CONVERSATIONS
        )
        found = smoke.compare(self.model, program, self.tokenizer.encode(smoke.probe()))
        return Row(label, found, f"{same} of {len(ids):,}", f"{rendered}/{len(probes.CONVERSATIONS)}")

    def exact(self) -> Row:
        """The row that shows the rounding error of float32."""
        ids = self.tokenizer.encode(smoke.probe())
        return Row("ours, float64", smoke.compare(self.model, Exact(deepcopy(self.model).double()), ids))

    def transformers(self) -> Iterator[Row]:
        """The row for the installed transformers version."""
        yield self.asked(f"transformers {importlib.metadata.version('transformers')}", Transformers(self.folder))

    def llama_cpp(self) -> Iterator[Row]:
        """A row for each file type with a float32 cache, and one for f32 with llama.cpp's default f16 cache."""
        version = importlib.metadata.version("llama-cpp-python")
        serialized = (self.folder / "tokenizer.json").read_text(encoding="utf-8")
        with tempfile.TemporaryDirectory() as folder:
            for kind, cache in (("f32", "f32"), ("f32", "f16"), ("f16", "f32"), ("bf16", "f32"), ("q8_0", "f32")):
                path = Path(folder) / f"{kind}.gguf"
                if not path.exists():
                    gguf.write(path, self.model, self.tokenizer, serialized, kind=kind, name="probe")
                program = LlamaCpp(path, self.model.config.max_context, cache=cache)
                yield self.asked(f"llama-cpp-python {version}, {kind}, cache {cache}", program)
                program.close()

    def genai(self) -> Iterator[Row]:
        """A row for each kind of ONNX export."""
        version = importlib.metadata.version("onnxruntime-genai")
        for kind in onnx.KINDS:
            with tempfile.TemporaryDirectory() as folder:
                onnx.build(self.folder, Path(folder), kind=kind)
                yield self.asked(f"onnxruntime-genai {version}, {kind}", Genai(Path(folder)))


def _first_difference(ours: list[int], theirs: list[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))


def rewards(folder: Path, model: RewardModel, tokenizer: Tokenizer) -> list[Row]:
    """Compare transformers with our reward model: the difference in reward at the last token."""
    try:
        library: Any = importlib.import_module("transformers")
    except ImportError:
        return [Row("transformers", why_not="not installed")]
    theirs = library.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    ids, worst = tokenizer.encode(smoke.probe()), 0.0
    with torch.no_grad():
        for first in range(0, len(ids), 128):
            row = torch.tensor([ids[first : first + 128]])
            worst = max(worst, float((theirs(row).logits[0, 0] - model.train(False)(row)[0, -1]).abs()))
    found = smoke.Parity(worst, float("nan"), float("nan"), len(ids), 0, 0)
    return [Row(f"transformers {library.__version__}, rewards", found)]


def measure(folder: Path) -> list[Row]:
    """All rows for an exported directory."""
    model, tokenizer = huggingface.load(folder)
    if isinstance(model, RewardModel):
        return rewards(folder, model, tokenizer)
    subject = Subject(folder, model.train(False), tokenizer)
    rows = [subject.exact()]
    asked: dict[str, Callable[[], Iterator[Row]]] = {
        "transformers": subject.transformers,
        "llama_cpp": subject.llama_cpp,
        "onnxruntime_genai": subject.genai,
    }
    for package, run in asked.items():
        if importlib.util.find_spec(package) is None:
            rows.append(Row(package, why_not="not installed"))
            continue
        try:
            rows += run()
        except StagecoachError as error:
            rows.append(Row(package, why_not=str(error)))
    return rows + [Row(name, why_not="nothing here runs it") for name in NOT_TRIED]


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default="models/deploy", type=Path)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    try:
        rows = measure(arguments.folder)
    except StagecoachError as error:
        parser.error(str(error))
    for cells in (HEADINGS, ["---"] * len(HEADINGS), *(row.cells() for row in rows)):
        print(f"| {' | '.join(cells)} |")
    if arguments.json:
        arguments.json.write_text(
            json.dumps([dict(zip(HEADINGS, row.cells(), strict=True)) for row in rows], indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
