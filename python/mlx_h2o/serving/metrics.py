"""The server's metrics for Prometheus."""

from collections.abc import Iterator
from functools import partial

import mlx.core as mx
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from .engine import Engine

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_COUNTERS = {
    "finished": "requests that were completed",
    "failed": "requests that failed while they were answered",
    "left": "requests whose client left",
    "read": "prompt tokens that were read",
    "cached": "prompt tokens that were found in the cache",
    "answered": "tokens of answers",
}


class Metrics:
    """The current counts of an engine, and two histograms."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.registry = engine, CollectorRegistry()
        self.registry.register(self)
        made = partial(Histogram, registry=self.registry, buckets=_SECONDS)
        self.first = made("mlx_h2o_first_token_seconds", "time to the first piece of an answer")
        self.whole = made("mlx_h2o_answer_seconds", "time to the end of an answer")

    def collect(self) -> Iterator[Metric]:
        """The metrics, as prometheus_client collects them."""
        for name, said in _COUNTERS.items():
            yield CounterMetricFamily(f"mlx_h2o_{name}", said, value=self.engine.counts[name])
        for name, said, value in (
            ("running", "requests being answered", self.engine.running),
            ("waiting", "requests waiting", self.engine.waiting),
            ("snapshots", "prompt prefixes that are kept", len(self.engine.snapshots)),
            ("snapshot_bytes", "bytes of these", self.engine.snapshots.nbytes),
            ("memory_bytes", "bytes of all arrays", mx.get_active_memory()),
            ("memory_peak_bytes", "the most bytes so far", mx.get_peak_memory()),
            ("memory_limit_bytes", "the limit of --memory", self.engine.memory.limit),
            ("healthy", "1 while requests can be answered", int(not self.engine.fault)),
        ):
            yield GaugeMetricFamily(f"mlx_h2o_{name}", said, value=value)
