"""The C leg: the same calls through the C library, by cffi."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from golden.build import Case
from mlx_h2o.operations.backends import get, register, use_backend
from mlx_h2o.operations.composed import folding
from mlx_h2o.operations.requests import (
    AttentionRequest,
    AttentionResult,
    Packed,
    PackedRows,
    StoredRows,
)

try:
    import c_api
    import c_api_operations
except ModuleNotFoundError as error:
    if error.name != "cffi":
        raise
    c_api = None

from parity import operations, traces
from parity.legs import Leg
from parity.outcome import Outcome

LIBRARY = "libmlxh2oc.*"

#: Cases that the package runs, with its operations those of C.
FOLLOWED = ("attend",)


class CBackend:
    """The C operations as a back end of the package, so that its cache can run on them.

    The C interface has no cache: in a trace the steps are Python's, the operations C's.
    """

    def __init__(self, library, name: str, backend: str) -> None:
        self.library, self.name, self.backend = library, name, backend

    def unavailable_reason(self) -> str:
        return ""

    def refuses(self, request: AttentionRequest) -> str:
        return ""

    def attention(self, request: AttentionRequest) -> AttentionResult:
        """Dense or packed rows."""
        queries = self.library.array(request.queries)
        sides = [self._rows(_parts(side)) for side in (request.keys, request.values)]
        asked = self._asked(request) | {"return_lse": request.return_lse}
        with self.library.using(self.backend):
            if request.is_packed:
                asked["return_skipped"] = request.return_skipped
                found = c_api_operations.quantized_attention(self.library, queries, *sides, **asked)
            else:
                found = self.library.attention(queries, *sides, **asked)
            arrays = {name: mx.array(self.library.numpy(a)) for name, a in found.items()}
        arrays["out"] = arrays["out"].astype(request.queries.dtype)
        return AttentionResult(**arrays)

    def attention_and_accumulate(
        self, request: AttentionRequest, before: mx.array, decay: float | None
    ) -> tuple[mx.array, mx.array]:
        array, rows = self.library.array, request.keys.shape[2]  # C takes no importance of others
        with self.library.using(self.backend):
            found = c_api_operations.attention_and_accumulate(
                self.library,
                array(request.queries),
                *(self._rows(_parts(side)) for side in (request.keys, request.values)),
                array(before[:, :, :rows]),
                kind="mass" if decay is None else "ema",
                decay=decay or 0.0,
                **self._asked(request),
            )
            out, importance = (mx.array(self.library.numpy(a)) for a in found.values())
        importance = mx.concatenate([importance, before[:, :, rows:]], axis=2)
        return out.astype(request.queries.dtype), importance

    def _asked(self, request: AttentionRequest) -> dict[str, Any]:
        """scale, mask, sinks, row_bias and packing, as the C operations take them."""
        array = self.library.array
        asked: dict[str, Any] = {
            "scale": request.scale,
            "mask": "causal" if request.causal else request.mask,
            "sinks": None if request.sinks is None else array(request.sinks),
        }
        if isinstance(asked["mask"], mx.array):
            asked["mask"] = array(asked["mask"])
        if request.row_bias is not None:
            rows = request.keys.shape[2]  # C takes no bias of others
            asked["row_bias"] = array(request.row_bias[:, :, :rows])
        if request.is_packed:
            asked |= request.packing | {"sparse_v_threshold": request.sparse_v_threshold}
        return asked

    def keep_indices(
        self,
        scores: mx.array,
        positions: mx.array,
        *,
        keep: int,
        sink_size=0,
        recent_start=None,
        stream=None,
    ) -> mx.array:
        rows = map(self.library.array, (scores, positions))
        with self.library.using(self.backend):
            zones = (sink_size, self._of_sequences(recent_start))
            return mx.array(self.library.numpy(self.library.keep_indices(*rows, keep, *zones)))

    def accumulate_scores(
        self, importance: mx.array, scores: mx.array, *, decay: float, masked=True, stream=None
    ) -> mx.array:
        given = map(self.library.array, (importance, scores))
        with self.library.using(self.backend):
            found = c_api_operations.accumulate_scores(
                self.library, *given, decay=decay, masked=masked
            )
            return mx.array(self.library.numpy(found))

    def key_diversity(self, keys: mx.array, stream=None) -> mx.array:
        with self.library.using(self.backend):
            found = c_api_operations.key_diversity(self.library, self.library.array(keys))
            return mx.array(self.library.numpy(found))

    def fold(self, *rows: mx.array, share: float = 1.0) -> folding.Folded:
        with self.library.using(self.backend):
            found = c_api_operations.fold(self.library, *map(self.library.array, rows), share=share)
            made = folding.Folded(*(mx.array(self.library.numpy(a)) for a in found.values()))
        dtype = rows[0].dtype
        return made._replace(keys=made.keys.astype(dtype), values=made.values.astype(dtype))

    def _of_sequences(self, value: int | mx.array | None) -> Any:
        return self.library.array(value) if isinstance(value, mx.array) else value

    def _rows(self, rows: mx.array | Packed) -> Any:
        if isinstance(rows, tuple):
            return tuple(map(self.library.array, rows))
        return self.library.array(rows)

    def quantize_append(
        self, keys: Any, values: Any, *, new_keys, new_values, slots, stream=None, **packing: int
    ) -> list[mx.array]:
        sides, new = tuple(map(self._rows, (keys, values))), (new_keys, new_values, slots)
        with self.library.using(self.backend):
            found = c_api_operations.quantize_append(
                self.library, *sides, *map(self.library.array, new), **packing
            )
            parts = [mx.array(self.library.numpy(part)) for side in found for part in side]
        stored = (*keys, *values)
        return [part.astype(like.dtype) for part, like in zip(parts, stored, strict=True)]


def _parts(rows: StoredRows) -> Any:
    return rows.parts if isinstance(rows, PackedRows) else rows


class CLeg(Leg):
    """libmlxh2oc with one of its back ends named."""

    def __init__(self, name: str, backend: str, build: Path) -> None:
        self.name, self.trace_of, self.build = name, backend, build
        self.library = None

    def not_run(self) -> str:
        if c_api is None:
            return "cffi is not installed"
        built = sorted(self.build.glob(f"**/{LIBRARY}"), key=lambda path: path.stat().st_mtime)
        named = os.environ.get(c_api.ENVIRONMENT)
        path = Path(named) if named else built[-1] if built else c_api.library_path()
        if path is None or not path.is_file():
            return f"{path or LIBRARY} not found"
        self.library = c_api.load(path)
        available, reason = self.library.backend_status(self.trace_of)
        return "" if available else f"back end {self.trace_of!r} is not available: {reason}"

    def absent(self, case: Case) -> str:
        """What the package's back end of this name serves, the C one has to serve too."""
        if case.fields["op"] == "without_scores":
            return "no public call asks for it"
        return operations.absent(case, get(self.trace_of), self.trace_of)

    def versions(self) -> dict[str, str]:
        text = c_api.Handle(self.library, "mlx_string")
        self.library.check(self.library.c.mlx_version(text.pointer))
        found = self.library.ffi.string(self.library.c.mlx_string_data(text.value)).decode()
        return {"mlx": found, "back end": self.trace_of}

    def outcome(self, case: Case) -> Outcome:
        op = case.fields["op"]
        if op == "trace" or op in FOLLOWED:
            remove = register(self.name, CBackend(self.library, self.name, self.trace_of))
            run = traces.run_python if op == "trace" else operations.run
            try:
                with use_backend(self.name):
                    return run(case, get(self.name))
            finally:
                remove()
        with self.library.using(self.trace_of):
            if op in c_api_operations.RUN:
                return Outcome(c_api_operations.run_case(self.library, case.fields, case.tensors))
            found = self.library.run_case(case.fields, _inputs(case))
        return Outcome({name: np.asarray(array) for name, array in found.items()})


def _inputs(case: Case) -> dict[str, mx.array]:
    names = ("queries", "keys", "values", "mask", "sinks", "row_bias", "scores", "positions")
    names += ("recent_start",)
    return {name: case.tensors[name] for name in names if name in case.tensors}
