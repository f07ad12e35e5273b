"""Attention calls for the emulator's tests, and the comparison with the float64 reference."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

import reference
from emulator.backend import EmulatorBackend
from mlx_h2o.launch import AttentionResult
from mlx_h2o.validate import AttentionRequest, attention_request

DTYPES = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}


@dataclass(frozen=True)
class Case:
    """One call. ``mask`` is "", "causal", "bool", or "add-f32" and its like for an additive one."""

    dtype: str = "f32"
    sizes: tuple[int, int] = (64, 64)
    batch: int = 1
    heads: tuple[int, int] = (2, 1)
    queries: int = 1
    rows: int = 33
    mask: str = ""
    sinks: str = ""
    lse: bool = True
    scores: bool = True
    slack: int = 0
    simdgroups: int | None = None

    def __str__(self) -> str:
        changed = {name: value for name, value in vars(self).items() if value != vars(Case())[name]}
        return ",".join(f"{name}={value}" for name, value in changed.items()) or "plain"

    def request(self) -> AttentionRequest:
        """The call, with data that depends on the case alone."""
        rng = np.random.default_rng(list(str(self).encode()))
        shape = (self.batch, self.heads[0], self.queries, self.rows)
        dtype = DTYPES[self.dtype]

        def normal(*shape: int) -> mx.array:
            return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)

        def cached(size: int) -> mx.array:
            rows = normal(self.batch, self.heads[1], self.rows + self.slack, size)
            return rows[:, :, : self.rows]

        mask: mx.array | str | None = self.mask or None
        if self.mask == "bool":
            mask = mx.array(_visible(rng, shape))
        elif self.mask.startswith("add-"):
            bias = rng.standard_normal(shape).astype(np.float32)
            wide = mx.where(mx.array(_visible(rng, shape)), mx.array(bias), -math.inf)
            mask = wide.astype(DTYPES[self.mask[4:]])
        sinks = None
        if self.sinks:
            sinks = mx.array(rng.standard_normal(self.heads[0]).astype(np.float32))
            sinks = sinks.astype(DTYPES[self.sinks])
        return attention_request(
            normal(self.batch, self.heads[0], self.queries, self.sizes[0]),
            cached(self.sizes[0]),
            cached(self.sizes[1]),
            scale=self.sizes[0] ** -0.5,
            mask=mask,
            sinks=sinks,
            return_scores=self.scores,
            return_lse=self.lse,
        )


def _visible(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """About two thirds true; the first query of the first head sees nothing."""
    visible = rng.random(shape) < 0.66
    visible[0, 0, 0] = False
    return visible


def errors(request: AttentionRequest, result: AttentionResult) -> dict[str, float]:
    """Error of each output as a share of its tolerance: at most 1 is right."""
    mask = "causal" if request.causal else request.mask
    arrays = (request.queries, request.keys, request.values)
    options = {"scale": request.scale, "mask": mask, "sinks": request.sinks}
    expected = reference.attention(*arrays, **options)
    allowed = reference.tolerances(*arrays, **options, expected=expected)
    return {
        name: reference.error_ratio(
            reference.worst_error(found, getattr(expected, name)), getattr(allowed, name)
        )
        for name, found in zip(("out", "scores", "lse"), result, strict=True)
        if found is not None
    }


def compile_all(work: Iterable[tuple[EmulatorBackend, AttentionRequest]]) -> None:
    """Compile the kernels of these requests side by side, each text once."""
    steps: list[Callable[[], object]] = [backend.compile(request) for backend, request in work]
    with ThreadPoolExecutor(max_workers=min(2, os.cpu_count() or 1)) as pool:
        for done in [pool.submit(step) for step in steps]:
            done.result()
