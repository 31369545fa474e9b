"""What Prometheus reads at /metrics: vLLM's names under `stagecoach:`, so that dashboards made for it need another prefix alone.

Counters of requests are kept here; what the engines count (rows, queue, tokens, drafts) is read from them when asked.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pipeline.serve.models import Catalogue

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """The numbers of one server."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.registry = CollectorRegistry()
        label = ["model_name"]
        self.ended = Counter("stagecoach:request_success", "answers that ended, by reason", [*label, "finished_reason"], registry=self.registry)  # fmt: skip
        self.faults = Counter("stagecoach:request_faults", "requests that failed, by status", ["status"], registry=self.registry)  # fmt: skip
        self.broken = Counter("stagecoach:invalid_structures", "calls or objects that did not fit their schema", label, registry=self.registry)  # fmt: skip
        self.first = Histogram("stagecoach:time_to_first_token_seconds", "from the request to its first token", label, buckets=SECONDS, registry=self.registry)  # fmt: skip
        self.between = Histogram("stagecoach:inter_token_latency_seconds", "mean of a request, behind its first token", label, buckets=SECONDS, registry=self.registry)  # fmt: skip
        self.whole = Histogram("stagecoach:e2e_request_latency_seconds", "from the request to its end", label, buckets=SECONDS, registry=self.registry)  # fmt: skip
        self.restarts = Counter("stagecoach:engine_restarts", "engines that died and were started again", label, registry=self.registry)  # fmt: skip
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
        gauges = {"num_requests_running": "rows that speak", "num_requests_waiting": "requests in the queue", "kv_cache_usage_perc": "share of the cache's positions that hold something"}  # fmt: skip
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
                "num_requests_running": stats.running, "num_requests_waiting": stats.waiting, "kv_cache_usage_perc": stats.cache_share,
                "prompt_tokens": stats.prompt_tokens, "generation_tokens": stats.generated_tokens,
                "prefix_cache_queries": stats.prompt_tokens, "prefix_cache_hits": stats.cached_tokens,
                "spec_decode_num_draft_tokens": stats.drafted_tokens, "spec_decode_num_accepted_tokens": stats.accepted_tokens,
                "engine_steps": stats.steps,
            }  # fmt: skip
            for name, value in values.items():
                families[name].add_metric([served.id], value)
        yield from families.values()
