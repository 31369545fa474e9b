"""The models that are served: loaded from their directories, each with an engine of its own.

    models/rlhf      -> kind causal: chat and completions
    models/diffusion -> kind diffusion: chat
    models/reward    -> kind reward: /score

A model's name is its folder's. Not here: which files a directory may hold
(`export/huggingface.py`, `check`).

What Prometheus reads at /metrics: vLLM's names under `stagecoach:`, so that dashboards made for it need another prefix
alone.

Counters of requests are kept here; what the engines count (rows, queue, tokens, drafts) is read from them when asked.
"""

import ctypes
import platform
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pipeline.diffusion import files
from pipeline.export import huggingface, inference
from pipeline.generation.constrain import Grammars
from pipeline.model import checkpoint
from pipeline.model.config import read_config
from pipeline.model.heads import RewardModel
from pipeline.model.transformer import Transformer
from pipeline.run.errors import ConfigError, ModelError
from pipeline.serve.canvas_engine import CanvasEngine
from pipeline.serve.engine import Engine
from pipeline.serve.loop import Loop
from pipeline.serve.onnx_engine import Export
from pipeline.serve.options import Weights
from pipeline.serve.protocol import ApiFault
from pipeline.text import chat
from pipeline.text.tokenizer import Tokenizer

JUDGE = "ForSequenceClassification"
KEPT_BYTES = 8 * 2**20  # of a model's compiled grammars: each may grow by its lexer's states, 20 MiB at the most


@dataclass
class Served:
    """A model that answers."""

    id: str
    kind: str  # causal, diffusion, reward
    stage: str  # that made it
    tokenizer: Tokenizer
    parameters: int
    context: int
    rows: int  # of the embedding: ids that the model knows
    fingerprint: str  # of the weights
    weights: str  # native, int8, onnx fp32, onnx int4
    engine: Loop | None = None  # of a model that writes
    judge: RewardModel | None = None  # of a reward model
    _grammars: Grammars | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def grammars(self) -> Grammars:
        """Compiled grammars over its vocabulary; made when first asked for."""
        with self.lock:
            if self._grammars is None:
                self._grammars = Grammars(self.tokenizer, self.rows, KEPT_BYTES)
            return self._grammars

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest token."""
        return max(map(len, self.tokenizer.token_bytes))

    def refuse_endless(self, text: str, param: str) -> None:
        """Raises ApiFault 400 for a text that is longer than the context in the longest tokens, before it is
        encoded.
        """
        if len(text) > self.context * self.longest:
            least = len(text) // self.longest
            raise ApiFault(
                400,
                f"This model's maximum context length is {self.context} tokens, the prompt has at least {least};"
                " shorten it",
                param=param,
                code="context_length_exceeded",
            )

    def card(self, feedback: bool) -> dict[str, Any]:
        """The object of /v1/models."""
        meta = {
            "kind": self.kind,
            "context": self.context,
            "parameters": self.parameters,
            "stage": self.stage,
            "weights": self.weights,
            "feedback": feedback and self.kind == "causal",
        }
        return {"id": self.id, "object": "model", "created": 0, "owned_by": "stagecoach", "meta": meta}

    @torch.no_grad()
    def score(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> float:
        """The reward of a conversation's last answer. Raises ApiFault for what does not fit."""
        assert self.judge is not None
        ids = chat.render(self.tokenizer, messages, tools).ids
        ids = ids[: len(ids) - ids[::-1].index(self.tokenizer.turn_end)]  # the end of the last turn counts
        if len(ids) > self.context:
            raise ApiFault(
                400,
                f"the conversation has {len(ids)} tokens, the model's context is {self.context}",
                param="conversations",
                code="context_length_exceeded",
            )
        with self.lock:
            return float(self.judge(torch.tensor([ids]))[0, -1])


def load(
    folders: Sequence[Path], *, rows: int, queue: int, weights: Weights | None, onnx: bool = False
) -> list[Served]:
    """Load model directories; engines are made, not started. `weights`: None for what pays; `onnx`: the export is run.

    Raises ConfigError for two of one name or no export, ModelError, InputError for more rows than the memory holds.
    """
    names = [folder.resolve().name for folder in folders]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"two models are called {twice!r}; a model's name is its folder's")
    loaded = [_load(folder, name, rows, queue, weights, onnx) for folder, name in zip(folders, names, strict=True)]
    _give_back()
    return loaded


def never_said(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Control tokens that no assistant says."""
    return (
        tokenizer.pad,
        tokenizer.turn_start,
        tokenizer.mask,
        tokenizer.fim_prefix,
        tokenizer.fim_middle,
        tokenizer.fim_suffix,
        tokenizer.fim_pad,
        tokenizer.tool_response,
        tokenizer.tool_response_end,
    )


def _give_back() -> None:
    """What loading and fusing freed, to the system: glibc would keep it, 230 of 680 MiB for an int8 model of 82 M
    parameters.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def _load(folder: Path, name: str, rows: int, queue: int, weights: Weights | None, onnx: bool) -> Served:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder}: expected a model directory with config.json; build one with dvc repro")
    huggingface.check(folder)
    lineage = checkpoint.lineage(folder)
    stage = str(lineage.get("model", name)) if lineage else "elsewhere"
    if JUDGE in (folder / "config.json").read_text(encoding="utf-8"):
        judge, tokenizer = checkpoint.load_reward(folder)
        judge.train(False).requires_grad_(False)
        return Served(
            name,
            "reward",
            stage,
            tokenizer,
            judge.num_parameters(),
            judge.config.max_context,
            judge.config.vocab_size,
            _fingerprint(judge),
            "native",
            judge=judge,
        )
    if read_config(folder).attention != "causal":
        masked, tokenizer = files.load(folder)
        masked.train(False).requires_grad_(False)
        silent = {*masked.traits.banned, *never_said(tokenizer)}
        masked.traits = replace(masked.traits, banned=tuple(sorted(silent)))
        return Served(
            name,
            "diffusion",
            stage,
            tokenizer,
            masked.trunk.num_parameters(),
            masked.config.max_context,
            masked.config.vocab_size,
            _fingerprint(masked.trunk),
            "native",
            engine=CanvasEngine(masked, rows=rows, queue=queue),
        )
    model, tokenizer = checkpoint.load(folder)
    model.train(False).requires_grad_(False)
    if onnx:
        export = Export(folder / "onnx", model.config)
        held, fingerprint = f"onnx {export.kind}", f"fp_{export.fingerprint[:12]}"
        shape = model.to("meta", torch.float32)  # keys and values are float32 there; our own weights are let go
        engine = Engine(shape, rows=rows, queue=queue, decoder=export.decoder)
    else:
        form: Weights = weights or ("int8" if inference.pays(model) else "native")
        held, fingerprint = form, _fingerprint(model)
        engine = Engine(inference.for_serving(model, form), rows=rows, queue=queue)
    return Served(
        name,
        "causal",
        stage,
        tokenizer,
        model.num_parameters(),
        model.config.max_context,
        model.config.vocab_size,
        fingerprint,
        held,
        engine=engine,
    )


def _fingerprint(model: Transformer | RewardModel) -> str:
    return f"fp_{checkpoint.weights_digest(model)[:12]}"


class Catalogue:
    """The served models by name."""

    def __init__(self, served: Sequence[Served]) -> None:
        self.served = {one.id: one for one in served}

    def find(self, name: str, *kinds: str) -> Served:
        """The model of that name. Raises ApiFault: 404 for an unknown one, 400 for one of another kind."""
        if name not in self.served:
            raise ApiFault(
                404,
                f"no model is called {name[:80]!r}; served: {', '.join(self.served)}",
                param="model",
                code="model_not_found",
            )
        found = self.served[name]
        if kinds and found.kind not in kinds:
            have = [one.id for one in self.served.values() if one.kind in kinds]
            raise ApiFault(
                400,
                f"{name!r} is a {found.kind} model, expected a {' or '.join(kinds)} one:"
                f" {', '.join(have) or 'none is served'}",
                param="model",
                code="wrong_kind",
            )
        return found

    def engine(self, name: str) -> tuple[Served, Engine]:
        """A causal model and its engine. Raises as `find`."""
        found = self.find(name, "causal")
        assert isinstance(found.engine, Engine)
        return found, found.engine

    def writer(self, name: str) -> tuple[Served, Loop]:
        """A causal or masked-diffusion model and its engine. Raises as `find`."""
        found = self.find(name, "causal", "diffusion")
        assert found.engine is not None
        return found, found.engine


# -- metrics -----------------------------------------------------------------------------------------------------------


SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """The numbers of one server."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.registry = CollectorRegistry()
        label = ["model_name"]
        self.ended = Counter(
            "stagecoach:request_success",
            "answers that ended, by reason",
            [*label, "finished_reason"],
            registry=self.registry,
        )
        self.faults = Counter(
            "stagecoach:request_faults", "requests that failed, by status", ["status"], registry=self.registry
        )
        self.broken = Counter(
            "stagecoach:invalid_structures",
            "calls or objects that did not fit their schema",
            label,
            registry=self.registry,
        )
        self.first = Histogram(
            "stagecoach:time_to_first_token_seconds",
            "from the request to its first token",
            label,
            buckets=SECONDS,
            registry=self.registry,
        )
        self.between = Histogram(
            "stagecoach:inter_token_latency_seconds",
            "mean of a request, behind its first token",
            label,
            buckets=SECONDS,
            registry=self.registry,
        )
        self.whole = Histogram(
            "stagecoach:e2e_request_latency_seconds",
            "from the request to its end",
            label,
            buckets=SECONDS,
            registry=self.registry,
        )
        self.restarts = Counter(
            "stagecoach:engine_restarts", "engines that died and were started again", label, registry=self.registry
        )
        self.registry.register(_Engines(catalogue))

    def text(self) -> bytes:
        """All of them, as Prometheus reads them."""
        return generate_latest(self.registry)


class _Engines(Collector):
    """What the engines count themselves."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue

    def collect(self) -> Iterator[Metric]:
        """Gauges of now and counters since the start, a label for each model."""
        gauges = {
            "num_requests_running": "rows that speak",
            "num_requests_waiting": "requests in the queue",
            "kv_cache_usage_perc": "share of the cache's positions that hold something",
        }
        counters = {
            "prompt_tokens": "tokens of prompts",
            "generation_tokens": "tokens that were said",
            "prefix_cache_queries": "tokens of prompts that were looked for in the cache",
            "prefix_cache_hits": "tokens of prompts that the cache held",
            "spec_decode_num_draft_tokens": "tokens that were drafted",
            "spec_decode_num_accepted_tokens": "drafted tokens that were said",
            "engine_steps": "forward passes",
        }
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {
            name: GaugeMetricFamily(f"stagecoach:{name}", text, labels=["model_name"]) for name, text in gauges.items()
        } | {
            name: CounterMetricFamily(f"stagecoach:{name}", text, labels=["model_name"])
            for name, text in counters.items()
        }
        for served in self.catalogue.served.values():
            if served.engine is None:
                continue
            stats = served.engine.stats()
            values = {
                "num_requests_running": stats.running,
                "num_requests_waiting": stats.waiting,
                "kv_cache_usage_perc": stats.cache_share,
                "prompt_tokens": stats.prompt_tokens,
                "generation_tokens": stats.generated_tokens,
                "prefix_cache_queries": stats.prompt_tokens,
                "prefix_cache_hits": stats.cached_tokens,
                "spec_decode_num_draft_tokens": stats.drafted_tokens,
                "spec_decode_num_accepted_tokens": stats.accepted_tokens,
                "engine_steps": stats.steps,
            }
            for name, value in values.items():
                families[name].add_metric([served.id], value)
        yield from families.values()
