"""The served models, each loaded from its directory with its own engine, and their metrics.

    models/rlhf          -> kind causal: chat and completions
    models/lora/adapter  -> kind causal, served with its base: `tools:lora`
    models/reward        -> kind reward: /score
    models/diffusion     -> a kind provided by a wing: chat

A model is named after its folder. An adapter's name is its base's name, a colon, and its folder's name (or the parent
folder's, if the folder is called `adapter`). All adapters of a base share its weights; each has its own engine and
cache. Not here: which files a directory may contain (`export/huggingface.py`, `check`).

Prometheus metrics use vLLM's names with the prefix `stagecoach:`, so vLLM dashboards only need a different prefix.
Requests are counted here; the engines' counts (rows, queue, tokens, drafts) are collected on each scrape.
"""

import ctypes
import json
import platform
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Protocol

import torch
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pipeline import wings
from pipeline.export import huggingface, inference
from pipeline.generation.constrain import Grammars
from pipeline.model import checkpoint, lora
from pipeline.model.heads import RewardModel
from pipeline.model.transformer import Transformer
from pipeline.run import device
from pipeline.run.errors import ConfigError, ModelError
from pipeline.run.types import JsonObject
from pipeline.serve.engine import Engine
from pipeline.serve.guard import Weights
from pipeline.serve.loop import Loop, Stats
from pipeline.serve.protocol import ApiFault, invalid
from pipeline.text import chat
from pipeline.text.tokenizer import Tokenizer

REWARD_ARCHITECTURE = "ForSequenceClassification"
GRAMMAR_CACHE_BYTES = 8 * 2**20  # per model: each grammar may grow by its lexer's states, 20 MiB at most
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)  # buckets of the histograms


@dataclass
class Served:
    """A loaded model."""

    id: str
    kind: str  # causal, reward, or a wing's
    stage: str  # the stage that built it
    tokenizer: Tokenizer
    parameters: int
    context: int
    vocab_size: int  # rows of the embedding
    fingerprint: str  # a hash of the weights
    weights: Weights
    engine: Loop | None = None  # only for generative models
    reward_model: RewardModel | None = None
    _grammars: Grammars | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def grammars(self) -> Grammars:
        """The compiled grammars for the model's vocabulary; created on first use."""
        with self.lock:
            if self._grammars is None:
                self._grammars = Grammars(self.tokenizer, self.vocab_size, GRAMMAR_CACHE_BYTES)
            return self._grammars

    @cached_property
    def longest_token(self) -> int:
        return max(map(len, self.tokenizer.token_bytes))

    def refuse_overlong(self, text: str, param: str) -> None:
        """Raise ApiFault 400, before encoding, if a text would exceed the context even with the longest tokens."""
        if len(text) > self.context * self.longest_token:
            least = len(text) // self.longest_token
            raise invalid(
                param,
                f"This model's maximum context length is {self.context} tokens, but the prompt has at least {least};"
                " shorten it",
                "context_length_exceeded",
            )

    def card(self, feedback: bool) -> JsonObject:
        """The model's object in /v1/models."""
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
    def score(self, messages: list[JsonObject], tools: list[JsonObject]) -> float:
        """The reward of a conversation's last answer. Raises ApiFault if the conversation does not fit the context."""
        assert self.reward_model is not None
        ids = chat.render(self.tokenizer, messages, tools).ids
        ids = ids[: len(ids) - ids[::-1].index(self.tokenizer.turn_end)]  # the reward is read at the end of the turn
        if len(ids) > self.context:
            raise invalid(
                "conversations",
                f"the conversation has {len(ids)} tokens, but the model's context is {self.context}",
                "context_length_exceeded",
            )
        with self.lock:
            where = self.reward_model.score.weight.device
            return float(self.reward_model(torch.tensor([ids], device=where))[0, -1])


class OwnKind(Protocol):
    """A wing's `serving`: a kind of model that generates entire canvases; see `loop.Denoised`."""

    KIND: str

    def opens(self, folder: Path) -> bool:
        """Whether a directory contains a model of this kind."""
        ...

    def load(self, folder: Path, name: str, stage: str, *, rows: int, queue: int) -> Served:
        """Load a directory; creates the engine without starting it."""
        ...


def own_kinds() -> list[OwnKind]:
    """The kinds provided by the wings."""
    return [offer() for offer in wings.each("serving")]


def load(
    folders: Sequence[Path], *, rows: int, queue: int, weights: Weights | None, rollouts: bool = False
) -> list[Served]:
    """Load model directories; creates their engines without starting them. `weights`: if None, chosen by model size.
    `rollouts`: the engine serves a policy in training; see `Engine`.

    Raises ConfigError if two models share a name, InputError if the rows do not fit in memory, and ModelError.
    """
    folders, adapters = [f for f in folders if not is_adapter(f)], [f for f in folders if is_adapter(f)]
    names = [folder.resolve().name for folder in folders]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"two models are called {twice!r}; a model is named after its folder")
    served = []
    for folder, name in zip(folders, names, strict=True):
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder}: expected a model directory with config.json; build one with dvc repro")
        huggingface.check(folder)
        lineage = checkpoint.lineage(folder)
        stage = str(lineage.get("model", name)) if lineage else "elsewhere"
        if REWARD_ARCHITECTURE in (folder / "config.json").read_text(encoding="utf-8"):
            served.append(_load_reward(folder, name, stage))
        elif own := next((own for own in own_kinds() if own.opens(folder)), None):
            served.append(own.load(folder, name, stage, rows=rows, queue=queue))
        else:
            served.append(_load_causal(folder, name, stage, rows, queue, weights, rollouts))
    if rollouts and not (served and isinstance(served[0].engine, Engine)):
        raise ConfigError("--rollouts: expected a causal model as the policy")
    bases = {model.id: (model, folder) for model, folder in zip(served, folders, strict=True)}
    for folder in adapters:
        served.append(_load_adapter(folder, bases, rows, queue))
    if twice := next((a.id for a in served if sum(b.id == a.id for b in served) > 1), None):
        raise ConfigError(f"two adapters are called {twice!r}; an adapter is named after its folder")
    _trim_heap()
    return served


def is_adapter(folder: Path) -> bool:
    """Whether a directory contains an adapter in peft's format."""
    return (folder / "adapter_config.json").is_file()


def _load_adapter(folder: Path, bases: dict[str, tuple[Served, Path]], rows: int, queue: int) -> Served:
    """Load an adapter, sharing the weights of its served base. Raises ConfigError if its base is not served, and
    ModelError.
    """
    path = folder / "adapter_config.json"
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
        base_name = Path(str(written["base_model_name_or_path"])).name
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(
            f"{folder / 'adapter_config.json'}: expected the JSON of a LoRA adapter ({error!r})"
        ) from error
    base, base_folder = bases.get(base_name, (None, folder))
    if base is None or not isinstance(base.engine, Engine):
        raise ConfigError(
            f"{folder} is an adapter of {base_name!r}, which is not served; served: {', '.join(bases) or 'nothing'}."
            f" Name that model too: python -m pipeline.serve models/{base_name} {folder}"
        )
    shared = base.engine.model
    assert isinstance(shared, inference.Fused)
    model, tokenizer = checkpoint.load(base_folder)
    lora.import_peft(folder, model)
    whole = folder.resolve()
    name = f"{base.id}:{whole.parent.name if whole.name == 'adapter' else whole.name}"
    served = _describe(model, tokenizer, name, "causal", base.stage, base.weights)
    model = model if base.weights == "int8" else device.placed(model)
    served.engine = Engine(inference.with_adapter(shared, model), rows=rows, queue=queue)
    return served


def never_said(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Control tokens that an assistant must not generate."""
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


def _load_reward(folder: Path, name: str, stage: str) -> Served:
    model, tokenizer = checkpoint.load_reward(folder)
    served = _describe(model, tokenizer, name, "reward", stage, "native")
    served.reward_model = model.to(device.hardware().device)
    return served


def _load_causal(
    folder: Path, name: str, stage: str, rows: int, queue: int, weights: Weights | None, rollouts: bool
) -> Served:
    model, tokenizer = checkpoint.load(folder)
    on_cpu = device.hardware().device.type == "cpu"
    weights = weights or ("int8" if on_cpu and inference.pays(model) and not rollouts else "native")
    served = _describe(model, tokenizer, name, "causal", stage, weights)  # before its weights change
    model = model if weights == "int8" else device.placed(model)  # int8 is for CPUs
    served.engine = Engine(inference.for_serving(model, weights), rows=rows, queue=queue, rollouts=rollouts)
    return served


def update(served: Served, folder: Path) -> None:
    """Switch to the weights of another directory. Answers in progress finish with the old weights.

    Raises ModelError for a different shape or tokenizer, and EngineStopped.
    """
    assert isinstance(served.engine, Engine) and served.engine.rollouts
    huggingface.check(folder)
    model, tokenizer = checkpoint.load(folder)
    checkpoint.same_tokenizer(served.tokenizer, tokenizer, served.id, str(folder))
    if model.config != served.engine.model.config:
        raise ModelError(f"{folder}: expected a model with the shape of {served.id}, found {model.config}")
    model.train(False).requires_grad_(False)
    fingerprint = fingerprint_of(model)  # before its weights change
    with served.lock:  # of two concurrent updates, weights and fingerprint both come from the later one
        served.engine.load(inference.for_serving(device.placed(model), served.weights))
        served.fingerprint = fingerprint
    _trim_heap()


def _describe(
    model: Transformer | RewardModel, tokenizer: Tokenizer, name: str, kind: str, stage: str, weights: Weights
) -> Served:
    """Describe a model prepared for inference, without an engine."""
    model.train(False).requires_grad_(False)
    return Served(
        id=name,
        kind=kind,
        stage=stage,
        tokenizer=tokenizer,
        parameters=model.num_parameters(),
        context=model.config.max_context,
        vocab_size=model.config.vocab_size,
        fingerprint=fingerprint_of(model),
        weights=weights,
    )


def fingerprint_of(model: Transformer | RewardModel) -> str:
    """A hash of the weights."""
    return f"fp_{checkpoint.weights_digest(model)[:12]}"


def _trim_heap() -> None:
    """Return memory to the system after loading and fusing; glibc would keep it (230 of 680 MiB for an int8 model of
    82 M parameters).
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


class Catalog:
    """The served models by name."""

    def __init__(self, served: Sequence[Served]) -> None:
        self.served = {model.id: model for model in served}

    def find(self, name: str, *kinds: str) -> Served:
        """The model with this name. Raises ApiFault: 404 if it is unknown, 400 if it is of a different kind."""
        if name not in self.served:
            raise ApiFault(
                404,
                f"no model is called {name[:80]!r}; served: {', '.join(self.served)}",
                param="model",
                code="model_not_found",
            )
        model = self.served[name]
        if kinds and model.kind not in kinds:
            fitting = [other.id for other in self.served.values() if other.kind in kinds]
            raise invalid(
                "model",
                f"{name!r} is a {model.kind} model, expected a {' or '.join(kinds)} one:"
                f" {', '.join(fitting) or 'none is served'}",
                "wrong_kind",
            )
        return model

    def causal(self, name: str) -> tuple[Served, Engine]:
        """A causal model and its engine. Raises the same errors as `find`."""
        model = self.find(name, "causal")
        assert isinstance(model.engine, Engine)
        return model, model.engine

    def generative(self, name: str) -> tuple[Served, Loop]:
        """A generative model and its engine. Raises the same errors as `find`."""
        model = self.find(name, "causal", *(own.KIND for own in own_kinds()))
        assert model.engine is not None
        return model, model.engine


# -- metrics -----------------------------------------------------------------------------------------------------------


class Metrics:
    """The Prometheus metrics of one server."""

    def __init__(self, catalog: Catalog) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"stagecoach:{name}", text, labels, registry=self.registry)

        def seconds(name: str, text: str) -> Histogram:
            name = f"stagecoach:{name}_seconds"
            return Histogram(name, text, ["model_name"], buckets=SECONDS, registry=self.registry)

        self.answers = counter("request_success", "answers that ended, by reason", "model_name", "finished_reason")
        self.faults = counter("request_faults", "requests that failed, by status", "status")
        self.invalid_structures = counter(
            "invalid_structures", "calls or objects that did not match their schema", "model_name"
        )
        self.first_token_seconds = seconds("time_to_first_token", "from the request to its first token")
        self.inter_token_seconds = seconds("inter_token_latency", "mean time per token of a request, after the first")
        self.request_seconds = seconds("e2e_request_latency", "from the request to its end")
        self.restarts = counter("engine_restarts", "engines that died and were restarted", "model_name")
        self.registry.register(_EngineCollector(catalog))

    def text(self) -> bytes:
        """All metrics in Prometheus text format."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """The engines' own counts."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog

    def collect(self) -> Iterator[Metric]:
        """Current gauges, and counters since the start, labeled by model."""
        stats = {s.id: s.engine.stats() for s in self.catalog.served.values() if s.engine is not None}

        def family(
            kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, text: str, value: Callable[[Stats], float]
        ) -> Metric:
            metric = kind(f"stagecoach:{name}", text, labels=["model_name"])
            for model, own in stats.items():
                metric.add_metric([model], value(own))
            return metric

        gauge, counter = partial(family, GaugeMetricFamily), partial(family, CounterMetricFamily)
        yield gauge("num_requests_running", "rows that are busy", lambda s: s.running)
        yield gauge("num_requests_waiting", "requests in the queue", lambda s: s.waiting)
        yield gauge("kv_cache_usage_perc", "share of the cache's positions in use", lambda s: s.cache_share)
        yield counter("prompt_tokens", "prompt tokens", lambda s: s.prompt_tokens)
        yield counter("generation_tokens", "generated tokens", lambda s: s.generated_tokens)
        yield counter(
            "prefix_cache_queries", "prompt tokens that were looked up in the cache", lambda s: s.prompt_tokens
        )
        yield counter("prefix_cache_hits", "prompt tokens found in the cache", lambda s: s.cached_tokens)
        yield counter("spec_decode_num_draft_tokens", "drafted tokens", lambda s: s.drafted_tokens)
        yield counter("spec_decode_num_accepted_tokens", "accepted draft tokens", lambda s: s.accepted_tokens)
        yield counter("engine_steps", "forward passes", lambda s: s.steps)
