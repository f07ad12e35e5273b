"""Attention calls for the emulator's tests, and the comparison with the float64 reference."""

import math
import operator
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

import reference
from emulator.backend import EmulatorBackend
from emulator.kernel import Run
from emulator.row_cases import SCHEDULES, same_bits
from golden import build as golden
from golden.build import DTYPES
from mlx_h2o.operations import composed
from mlx_h2o.operations.requests import AttentionRequest, AttentionResult
from parity import operations
from parity.calls import Call

__all__ = ["CHUNKS", "DTYPES", "Case", "check_chunk", "check_schedules", "compile_all"]
__all__ += ["dequantized", "errors"]


@dataclass(frozen=True)
class Case(Call):
    """One call, and the launch that it asks for; the first query of a mask sees nothing."""

    empty: bool = True
    simdgroups: int | None = None
    blocks: int | None = None

    def __str__(self) -> str:
        changed = {name: value for name, value in vars(self).items() if value != vars(Case())[name]}
        return ",".join(f"{name}={value}" for name, value in changed.items()) or "plain"

    def backend(self, run: Run | None = None) -> EmulatorBackend:
        """The emulator, with the launch that the case asks for."""
        return EmulatorBackend(run or Run(), simdgroups=self.simdgroups, blocks=self.blocks)

    def request(self) -> AttentionRequest:
        """The call, with data that depends on the case alone; a bias of rows is a slice of what has
        the slack of the rows too."""
        fields, tensors, _, _ = self.made(np.random.default_rng(list(str(self).encode())))
        asked = {"out": 0, "scores": self.scores, "lse": self.lse}
        fields["tolerance"] = {name: 0 for name, is_asked in asked.items() if is_asked}
        request = operations.request(golden.Case(fields, tensors))
        if request.row_bias is not None:
            poison = mx.full((*request.row_bias.shape[:2], self.slack), math.nan)
            wide = mx.concatenate([request.row_bias, poison], axis=2)
            request.row_bias = wide[:, :, : self.rows]
        return request


CHUNK = {"queries": 150, "rows": 170, "heads": (4, 2), "batch": 2, "scores": False, "lse": False}
_MORE = {}, {"bits": (8, 4)}, {"bias": 1}, {"bias": 1, "sinks": "f32", "dtype": "f16"}
CHUNKS = [Case(**CHUNK, mask=mask, **more) for mask in ("", "causal", "bool") for more in _MORE]
"""Whose output MLX's own attention serves on a GPU."""


def check_chunk(
    request: AttentionRequest, attention: Callable[[AttentionRequest], AttentionResult]
) -> None:
    """The output alone, and that of the composition; queries that see nothing may have a mean."""
    found, *others = attention(request)
    assert others == [None] * 4 and found.dtype == request.queries.dtype
    whole = composed.attention(replace(request, return_scores=True)).out
    one, other = (np.array(each.astype(mx.float32)) for each in (found, whole))
    nothing = (other == 0).all(axis=3, keepdims=True)
    assert np.isfinite(one).all() and nothing.mean() < 0.6
    allowed = 1e-5 if found.dtype == mx.float32 else 4e-3
    assert np.abs(np.where(nothing, 0, one - other)).max() < allowed


def check_schedules(case: Case) -> None:
    """The requested results, correct, with the same bits in every schedule."""
    request, backend = case.request(), case.backend()
    result = backend.attend(request)
    asked_for = (True, case.scores, case.lse, case.skipped, False)  # no weights
    assert tuple(each is not None for each in result) == asked_for
    assert max(errors(request, result).values()) <= 1, errors(request, result)
    for run in SCHEDULES[1:]:
        other = replace(backend, run=run).attend(request)
        assert all(map(same_bits, result, other)), run


def dequantized(request: AttentionRequest, side: str) -> mx.array:
    """The "keys" or "values" as float32, by the reference's own reading of the format."""
    rows, bits = getattr(request, side), request.bits if side == "keys" else request.v_bits
    packing = {"bits": bits, "group_size": request.group_size, "side": side}
    return mx.array(operations.dense_rows(rows, **packing).astype(np.float32))


def errors(request: AttentionRequest, result: AttentionResult) -> dict[str, float]:
    """Error of each output as a share of its tolerance: at most 1 is right.

    With sparse V, rows whose weight is about the threshold may be skipped or not: so much more may
    the output differ, and this many more or fewer rows may have been skipped.
    """
    mask = "causal" if request.causal else request.mask
    arrays = (request.queries, request.keys, request.values)
    sparse = 0.0
    if request.is_packed:
        sparse = request.sparse_v_threshold
        both = dequantized(request, "keys"), dequantized(request, "values")
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
    steps = [backend.compile(request) for backend, request in work]
    with ThreadPoolExecutor(max_workers=min(2, os.cpu_count() or 1)) as pool:
        list(pool.map(operator.call, steps))
