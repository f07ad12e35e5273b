"""What the server tells Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import mlx.core as mx
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from .engine import Engine

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_COUNTERS = {
    "finished": "requests answered to their end",
    "failed": "requests that failed while they were answered",
    "left": "requests whose client left",
    "read": "tokens of prompts that were read",
    "cached": "tokens of prompts that were read before",
    "answered": "tokens of answers",
}


class Metrics:
    """Numbers of an engine, as they are when somebody asks, and two histograms."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.registry = engine, CollectorRegistry()
        self.registry.register(self)
        made = partial(Histogram, registry=self.registry, buckets=_SECONDS)
        self.first = made("mlx_h2o_first_token_seconds", "until the first piece of an answer")
        self.whole = made("mlx_h2o_answer_seconds", "until the end of an answer")

    def collect(self) -> Iterator[Metric]:
        """As prometheus_client asks for it."""
        for name, said in _COUNTERS.items():
            yield CounterMetricFamily(f"mlx_h2o_{name}", said, value=self.engine.counts[name])
        for name, said, value in (
            ("running", "requests that are answered now", self.engine.running),
            ("waiting", "requests that wait", self.engine.waiting),
            ("snapshots", "beginnings of prompts that are kept", len(self.engine.snapshots)),
            ("snapshot_bytes", "of these", self.engine.snapshots.nbytes),
            ("memory_bytes", "of all arrays", mx.get_active_memory()),
            ("memory_peak_bytes", "the most there were", mx.get_peak_memory()),
            ("memory_limit_bytes", "what --memory allows", self.engine.memory.limit),
            ("healthy", "1 while requests can be answered", int(not self.engine.fault)),
        ):
            yield GaugeMetricFamily(f"mlx_h2o_{name}", said, value=value)
