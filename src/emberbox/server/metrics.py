"""What Prometheus may know: counts and times, with labels from short fixed lists.

Never text of a client: a route is one of ours or "other", a status code comes from our own table.
Times are measured where the answer is made, so they hold what a client waits for. What the engine
counts itself is read from the worker when it is asked for.
"""

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from emberbox.server.worker import Delivery, EngineWorker

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS_TO_FIRST = (0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
SECONDS_BETWEEN = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 10)
SECONDS_OF_ALL = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
# Name in EngineStats -> name and meaning here.
GAUGES = {
    "num_running": ("requests_running", "Requests in the engine's current batch"),
    "num_waiting": ("requests_waiting", "Requests that wait for a slot or pages"),
    "pages_used": ("pages_used", "Pages of the cache in use"),
    "pages_total": ("pages_total", "Pages of the cache"),
    "snapshots_used": ("snapshots_used", "Snapshots held for prefixes"),
    "snapshots_total": ("snapshots_total", "Snapshots there is room for"),
}
COUNTERS = {
    "num_preemptions": ("preemptions", "Requests sent back to the queue for want of pages"),
    "prompt_tokens": ("prompt_tokens", "Tokens of admitted prompts"),
    "cached_tokens": ("cached_tokens", "Prompt tokens restored from snapshots"),
    "generated_tokens": ("generated_tokens", "Tokens of replies"),
    "drafted_tokens": ("drafted_tokens", "Tokens proposed as drafts"),
    "accepted_tokens": ("accepted_tokens", "Drafts that were accepted"),
    "steps": ("engine_steps", "Steps of the engine"),
}


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, worker: EngineWorker) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(worker))
        self.http_requests = Counter(
            "emberbox_http_requests",
            "Answers by route and status code; a stream that broke off has 200",
            ("route", "code"),
            registry=self.registry,
        )
        self.finished = Counter(
            "emberbox_replies_finished",
            "Replies that came to an end, by how: stop, length or error",
            ("reason",),
            registry=self.registry,
        )
        self.to_first = self._histogram(
            "time_to_first_token", "Seconds from arrival to the first token", SECONDS_TO_FIRST
        )
        self.between = self._histogram(
            "inter_token_latency", "Seconds between two tokens of a reply", SECONDS_BETWEEN
        )
        self.of_all = self._histogram(
            "request_duration", "Seconds from arrival to the end of a reply", SECONDS_OF_ALL
        )

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, meaning: str, buckets: tuple[float, ...]) -> Histogram:
        name = f"emberbox_{name}_seconds"
        return Histogram(name, meaning, buckets=buckets, registry=self.registry)


class RequestClock:
    """Measures one HTTP request; made when it arrives, told of every delivery."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._arrived_at = time.monotonic()
        self._last_at: dict[int, float] = {}  # choice -> when its last token came

    def saw(self, delivery: Delivery) -> None:
        """Count one delivery, now."""
        event, index, now = delivery.event, delivery.index, time.monotonic()
        if isinstance(event, Exception):
            self._metrics.finished.labels("error").inc()
            return
        if event.token_id is not None:
            last_at = self._last_at.get(index)
            if last_at is None:
                self._metrics.to_first.observe(now - self._arrived_at)
            else:
                self._metrics.between.observe(now - last_at)
            self._last_at[index] = now
        if event.finish is not None:
            self._metrics.finished.labels(event.finish.value).inc()
            self._metrics.of_all.observe(now - self._arrived_at)


class _EngineCollector(Collector):
    """The engine's own numbers as of its last step."""

    def __init__(self, worker: EngineWorker) -> None:
        self._worker = worker

    def collect(self) -> Iterator[Metric]:
        stats = self._worker.stats
        for field, (name, meaning) in GAUGES.items():
            yield GaugeMetricFamily(f"emberbox_{name}", meaning, value=getattr(stats, field))
        for field, (name, meaning) in COUNTERS.items():
            yield CounterMetricFamily(f"emberbox_{name}", meaning, value=getattr(stats, field))
        yield CounterMetricFamily(
            "emberbox_requests_cancelled",
            "Requests whose client went away before their end",
            value=self._worker.num_cancelled,
        )
        yield GaugeMetricFamily(
            "emberbox_engine_up",
            "1 while the engine takes requests",
            value=float(self._worker.is_alive),
        )
