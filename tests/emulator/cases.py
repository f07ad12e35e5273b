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
import reference_turbo
from emulator.backend import EmulatorBackend
from emulator.kernel import Run
from golden.build import row_bias
from mlx_h2o.config import KV_FORMATS
from mlx_h2o.operations.composed import turbo
from mlx_h2o.operations.requests import (
    AttentionRequest,
    AttentionResult,
    StoredRows,
    are_codes,
    attention_request,
)

DTYPES = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}


@dataclass(frozen=True)
class Case:
    """One call. ``mask`` is "", "causal", "bool", or "add-f32" and its like for an additive one.

    ``bits`` of keys and values make it a quantised one, in groups of ``group``, with scales of
    the dtype ``scales`` (that of the queries where it is empty), and ``kv_format`` one of codes.
    ``bias``: with a bias of rows, a slice of what has the slack of the rows too.
    """

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
    blocks: int | None = None
    bits: tuple[int, int] | None = None
    kv_format: str = ""
    group: int = 64
    scales: str = ""
    sparse: float = 0.0
    skipped: bool = False
    bias: bool = False

    def __str__(self) -> str:
        changed = {name: value for name, value in vars(self).items() if value != vars(Case())[name]}
        return ",".join(f"{name}={value}" for name, value in changed.items()) or "plain"

    def backend(self, run: Run | None = None) -> EmulatorBackend:
        """The emulator, with the launch that the case asks for."""
        return EmulatorBackend(run or Run(), simdgroups=self.simdgroups, blocks=self.blocks)

    def request(self) -> AttentionRequest:
        """The call, with data that depends on the case alone."""
        rng = np.random.default_rng(list(str(self).encode()))
        shape = (self.batch, self.heads[0], self.queries, self.rows)
        dtype = DTYPES[self.dtype]

        def normal(*shape: int) -> mx.array:
            return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)

        def cached(size: int) -> mx.array:
            return normal(self.batch, self.heads[1], self.rows + self.slack, size)

        def live(rows: mx.array) -> mx.array:
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
        queries = normal(self.batch, self.heads[0], self.queries, self.sizes[0])
        rows = [cached(size) for size in self.sizes]
        options = {
            "scale": self.sizes[0] ** -0.5,
            "mask": mask,
            "sinks": sinks,
            "return_scores": self.scores,
            "return_lse": self.lse,
        }
        if self.bias:
            shape = (self.batch, self.heads[1], self.rows + self.slack)
            options["row_bias"] = row_bias(rng, shape)[:, :, : self.rows]
        bits = KV_FORMATS[self.kv_format] if self.kv_format else self.bits
        if bits is None:
            return attention_request(queries, *map(live, rows), **options)
        scales = DTYPES[self.scales or self.dtype]
        packed = []
        for each, width, seed in zip(rows, bits, (turbo.KEYS, turbo.VALUES), strict=True):
            # Whole buffers are packed, and the live rows are a slice of them.
            if width == 0:
                packed.append((live(each), None, None))
            elif self.kv_format and width < 8:
                packed.append((*map(live, turbo.encode_rows(each, width, seed)), None))
            else:
                parts = mx.quantize(each.astype(scales), group_size=self.group, bits=width)
                packed.append(tuple(map(live, parts)))
        return attention_request(
            queries,
            *packed,
            bits=bits[0] or 8,
            v_bits=bits[1],
            group_size=self.group,
            sparse_v_threshold=self.sparse,
            return_skipped=self.skipped,
            **options,
        )


def _visible(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """About two thirds true; the first query of the first head sees nothing."""
    visible = rng.random(shape) < 0.66
    visible[0, 0, 0] = False
    return visible


def dequantized(rows: StoredRows, side: str = "") -> mx.array:
    """The rows as float32, by the reference's own reading of the format; ``side`` of codes."""
    if isinstance(rows, mx.array):
        return rows.astype(mx.float32)
    if are_codes(rows):
        dense = reference_turbo.rows(*rows.parts, bits=rows.bits, side=side)
        return mx.array(dense.astype(np.float32))
    dense = reference.dequantized(*rows.parts, bits=rows.bits, group_size=rows.group_size)
    return mx.array(dense.astype(np.float32))


def errors(request: AttentionRequest, result: AttentionResult) -> dict[str, float]:
    """Error of each output as a share of its tolerance: at most 1 is right.

    With sparse V, rows whose weight is about the threshold may be skipped or not: so much more may
    the output differ, and so many more or fewer rows may have been skipped.
    """
    mask = "causal" if request.causal else request.mask
    arrays = (request.queries, request.keys, request.values)
    sparse = 0.0
    if request.is_packed:
        sparse = request.sparse_v_threshold
        both = dequantized(request.keys, "keys"), dequantized(request.values, "values")
        arrays = (request.queries, *both)
    options = {"scale": request.scale, "mask": mask, "sinks": request.sinks}
    if request.row_bias is not None:
        options["row_bias"] = request.row_bias[:, :, : arrays[1].shape[2]]
    expected = reference.attention(*arrays, **options)
    allowed = reference.tolerances(*arrays, **options, expected=expected)
    if sparse:
        expected = reference.attention(*arrays, **options, sparse_v_threshold=sparse)
        below, above = _edges(sparse)
        more = reference.dropped_mass(expected, above, below) * float(mx.abs(arrays[2]).max())
        allowed = allowed._replace(out=allowed.out + more)
    found_errors = {
        name: reference.error_ratio(
            reference.worst_error(found, getattr(expected, name)), getattr(allowed, name)
        )
        for name, found in zip(("out", "scores", "lse"), result[:3], strict=True)
        if found is not None
    }
    if len(result) > 3 and result[3] is not None:
        found_errors["skipped"] = 0.0 if _skips(expected, result[3], sparse) else math.inf
    return found_errors


def _edges(threshold: float) -> tuple[float, float]:
    """Weights that are surely on one side of the threshold, or on the other."""
    return threshold * (1 - 1e-4), threshold * (1 + 1e-4)


def _skips(expected: reference.Attention, found: mx.array, threshold: float) -> bool:
    """Whether the number of skipped rows is that of the definition."""
    least, most = (reference.skipped(expected, edge) for edge in _edges(threshold))
    share, rows = reference.float64(found), expected.scores.shape[-1]
    counted = np.abs(share * rows - np.round(share * rows)).max() < 1e-3
    return bool(counted and (least - 1e-6 <= share).all() and (share <= most + 1e-6).all())


def compile_all(work: Iterable[tuple[EmulatorBackend, AttentionRequest]]) -> None:
    """Compile the kernels of these requests side by side, each text once."""
    steps: list[Callable[[], object]] = [backend.compile(request) for backend, request in work]
    with ThreadPoolExecutor(max_workers=min(2, os.cpu_count() or 1)) as pool:
        for done in [pool.submit(step) for step in steps]:
            done.result()
