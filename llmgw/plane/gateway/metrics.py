"""What a gateway counts, and the Prometheus page of one or several gateway processes.

Counting is on the path of every request, so it is additions to plain dictionaries; the client library's
families are made when somebody asks for the page.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

#: Seconds. From a cache hit on a small model to a long prompt on a busy large one.
TTFT_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
DURATION_BOUNDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)

#: The status under which a request counts whose client went away before the answer was whole, as nginx does.
CLIENT_GONE = 499


class Histogram(Struct):
    """Counts per bucket, the last one without a bound."""

    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


def _histogram(bounds: tuple[float, ...]) -> Histogram:
    return Histogram(bounds, [0] * (len(bounds) + 1))


class Metrics(Struct):
    """One process's counts since it started. Keys are the values of the labels."""

    worker: str = ""
    requests: dict[tuple[str, int], int] = {}  # model, status
    first_byte: dict[str, Histogram] = {}  # model
    duration: dict[str, Histogram] = {}
    retries: dict[str, int] = {}
    failures: dict[tuple[str, str], int] = {}  # replica, kind
    tokens: dict[tuple[str, str, str], int] = {}  # model, key, "prompt" or "completion"
    in_flight: dict[str, int] = {}  # replica
    held: dict[str, int] = {}  # model
    connections: int = 0

    def finished(self, model: str, status: int, seconds: float) -> None:
        """A request ended with this status after so many seconds."""
        key = (model, status)
        self.requests[key] = self.requests.get(key, 0) + 1
        histogram = self.duration.get(model)
        if histogram is None:
            histogram = self.duration[model] = _histogram(DURATION_BOUNDS)
        histogram.observe(seconds)

    def answered(self, model: str, seconds: float) -> None:
        """The first byte of an engine's answer came after so many seconds."""
        histogram = self.first_byte.get(model)
        if histogram is None:
            histogram = self.first_byte[model] = _histogram(TTFT_BOUNDS)
        histogram.observe(seconds)

    def failed(self, replica: str, kind: str) -> None:
        self.failures[replica, kind] = self.failures.get((replica, kind), 0) + 1

    def retried(self, model: str) -> None:
        self.retries[model] = self.retries.get(model, 0) + 1

    def used(self, model: str, key: str, prompt: int, completion: int) -> None:
        for kind, count in (("prompt", prompt), ("completion", completion)):
            self.tokens[model, key, kind] = self.tokens.get((model, key, kind), 0) + count


class _Page(Collector):
    """Several processes' counts as metric families. The label `worker` is there where there may be several."""

    def __init__(self, all_metrics: Iterable[Metrics]) -> None:
        self._all = tuple(all_metrics)
        self._labelled = any(metrics.worker for metrics in self._all)

    def _counter(self, name: str, help_: str, labels: tuple[str, ...], pick: str) -> Metric:
        family = CounterMetricFamily(name, help_, labels=(*labels, *self._extra))
        self._fill(family, pick)
        return family

    def _gauge(self, name: str, help_: str, labels: tuple[str, ...], pick: str) -> Metric:
        family = GaugeMetricFamily(name, help_, labels=(*labels, *self._extra))
        self._fill(family, pick)
        return family

    def _fill(self, family: CounterMetricFamily | GaugeMetricFamily, pick: str) -> None:
        for metrics in self._all:
            counts: Mapping[object, int] = getattr(metrics, pick)
            for key, value in counts.items():
                labels = key if isinstance(key, tuple) else (key,)
                family.add_metric([*map(str, labels), *self._worker(metrics)], value)

    def _histogram(self, name: str, help_: str, pick: str) -> Metric:
        family = HistogramMetricFamily(name, help_, labels=("model", *self._extra))
        for metrics in self._all:
            histograms: Mapping[str, Histogram] = getattr(metrics, pick)
            for model, histogram in histograms.items():
                running, buckets = 0, []
                for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
                    running += count
                    buckets.append(("+Inf" if bound == float("inf") else repr(bound), running))
                family.add_metric([model, *self._worker(metrics)], buckets, histogram.total)
        return family

    @property
    def _extra(self) -> tuple[str, ...]:
        return ("worker",) if self._labelled else ()

    def _worker(self, metrics: Metrics) -> tuple[str, ...]:
        return (metrics.worker,) if self._labelled else ()

    def collect(self) -> Iterator[Metric]:
        yield self._counter(
            "llmgw_gateway_requests",
            "Requests by model and status; 499: the client went away before the answer was whole.",
            ("model", "status"),
            "requests",
        )
        yield self._histogram(
            "llmgw_gateway_first_byte_seconds",
            "From a request being read to the first byte of its answer.",
            "first_byte",
        )
        yield self._histogram("llmgw_gateway_duration_seconds", "From a request being read to its end.", "duration")
        yield self._counter("llmgw_gateway_retries", "Tries after a first one that failed.", ("model",), "retries")
        yield self._counter(
            "llmgw_gateway_upstream_failures", "Failures of replicas, by kind.", ("replica", "kind"), "failures"
        )
        yield self._counter(
            "llmgw_gateway_tokens", "Tokens as engines counted them.", ("model", "key", "kind"), "tokens"
        )
        yield self._gauge(
            "llmgw_gateway_in_flight", "Requests that a replica is answering now.", ("replica",), "in_flight"
        )
        yield self._gauge("llmgw_gateway_held", "Requests that wait for a model to be ready.", ("model",), "held")
        connections = GaugeMetricFamily("llmgw_gateway_connections", "Open client connections.", labels=self._extra)
        for metrics in self._all:
            connections.add_metric([*self._worker(metrics)], metrics.connections)
        yield connections


def page(all_metrics: Iterable[Metrics]) -> bytes:
    """The text that Prometheus reads."""
    registry = CollectorRegistry()
    registry.register(_Page(all_metrics))
    return generate_latest(registry)
