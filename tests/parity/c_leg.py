"""The C leg: the package on the operations of the C library, through cffi."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from back_ends import registered
from golden.build import Case
from mlx_h2o.operations.composed import folding, turbo
from mlx_h2o.operations.requests import AttentionRequest, AttentionResult, Parts, StoredRows
from mlx_h2o.operations.resolved import Operations

try:
    import c_api
except ModuleNotFoundError as error:
    if error.name != "cffi":
        raise
    c_api = None

from parity import judge
from parity.legs import PackageLeg
from parity.outcome import Outcome


class CBackend(Operations):
    """The C operations as a back end of the package, so that its cache can run on them.

    The C interface has no cache: in a trace the steps are Python's, the operations C's. ``backend``
    is the one of C; "" leaves the choice to it.
    """

    def __init__(self, library: Any, name: str, backend: str) -> None:
        self.library, self.name, self.backend = library, name, backend

    def _called(self, op: str, **given: Any) -> dict[str, Any]:
        with self.library.using(self.backend):
            found = self.library.call(op, **given)
            return {
                name: tuple(map(self.library.mlx, one))
                if isinstance(one, tuple)
                else self.library.mlx(one)
                for name, one in found.items()
            }

    def attend(self, request: AttentionRequest) -> AttentionResult:
        """Dense or packed rows."""
        given = _asked(request)
        asked = ("scores", "lse", "skipped")
        given["without"] = [one for one in asked if not getattr(request, f"return_{one}")]
        if request.is_packed:
            for side, rows in (("k", request.keys), ("v", request.values)):
                names = (f"{side}_{part}" for part in "wsb")
                given |= dict(zip(names, _parts(rows), strict=False))
        else:
            given |= {"keys": request.keys, "values": request.values}
        op = c_api.QUANTIZED if request.is_packed else c_api.ATTENTION
        return AttentionResult(**self._called(op, **given))

    def accumulate(
        self, request: AttentionRequest, importance: mx.array, decay: float | None
    ) -> tuple[mx.array, mx.array]:
        rows = request.row_count  # C takes no importance of others
        out, new = self._called(
            "attention_and_accumulate",
            keys=_parts(request.keys),
            values=_parts(request.values),
            importance=importance[:, :, :rows],
            **_kind(decay),
            **_asked(request),
        ).values()
        return out, mx.concatenate([new, importance[:, :, rows:]], axis=2)

    def prefill_scores(
        self, request: AttentionRequest, importance: mx.array | None, decay: float | None
    ) -> mx.array:
        given = {"keys": request.keys, "importance": importance} | _kind(decay)
        given["counted_queries"] = request.queries.shape[2]
        return self._called("prefill_scores", **given, **_asked(request))["res"]

    def keep_indices(
        self, scores: mx.array, positions: mx.array, *, recent_start=None, **given: int
    ) -> mx.array:
        given |= {"scores": scores, "positions": positions}
        one_for_all = isinstance(recent_start, int)
        given["recent_start"] = np.array(recent_start, np.int32) if one_for_all else recent_start
        return self._called("keep_indices", **given)["res"]

    def accumulate_scores(self, importance: mx.array, scores: mx.array, **given: Any) -> mx.array:
        given |= {"importance": importance, "scores": scores}
        return self._called("accumulate_scores", **given)["res"]

    def key_diversity(self, keys: mx.array) -> mx.array:
        return self._called("key_diversity", keys=keys)["res"]

    def fold(self, *rows: mx.array, share: float = 1.0) -> folding.Folded:
        names = ("keys", "values", "bias", "mass", "weights", "eligible", "kept")
        found = self._called("fold", share=share, **dict(zip(names, rows, strict=True)))
        return folding.Folded(*found.values())

    def quantize_append(
        self, keys: Any, values: Any, new_keys, new_values, slots, **packing: int
    ) -> list[mx.array]:
        new = {"key_rows": new_keys, "value_rows": new_values, "slots": slots}
        found = self._called("quantize_append", keys=keys, values=values, **new, **packing)
        return [part for side in found.values() for part in side]

    def encode_rows(self, rows: mx.array, bits: int, seed: int) -> Parts:
        given = {"bits": bits, "of_values": seed == turbo.VALUES}
        words, norms = self._called("encode_rows", rows=rows, **given).values()
        return words, norms

    def decode_rows(
        self, words: mx.array, norms: mx.array, bits: int, seed: int, dtype: mx.Dtype
    ) -> mx.array:
        given = {"bits": bits, "of_values": seed == turbo.VALUES}
        return self._called("decode_rows", words=words, norms=norms, **given)["res"].astype(dtype)


def _asked(request: AttentionRequest) -> dict[str, Any]:
    """Queries, scale, mask, sinks, row_bias and packing, by C's names."""
    asked: dict[str, Any] = {
        "queries": request.queries,
        "scale": request.scale,
        "mask": "causal" if request.causal else _narrow(request.mask),
        "sinks": request.sinks,
    }
    if request.row_bias is not None:
        asked["row_bias"] = request.row_bias[:, :, : request.row_count]  # no bias of others
    if request.is_packed:
        names = ("bits", "v_bits", "group_size", "sparse_v_threshold")
        asked |= {name: getattr(request, name) for name in names}
    return asked


def _kind(decay: float | None) -> dict[str, Any]:
    return {"kind": "mass" if decay is None else "ema", "decay": decay or 0.0}


def _narrow(mask: mx.array | None) -> mx.array | None:
    """A mask as it was before it was broadcast, which C has to do too."""
    if mask is None:
        return None
    bits = mask.view(mx.uint16) if mask.dtype == mx.bfloat16 else mask
    steps = np.asarray(bits).strides
    narrow = mask[tuple(slice(0, 1 if step == 0 else None) for step in steps)]
    first = next((axis for axis, count in enumerate(narrow.shape) if count > 1), 3)
    return narrow.reshape(narrow.shape[first:])


def _parts(rows: StoredRows) -> tuple[mx.array, ...]:
    return rows if isinstance(rows, tuple) else (rows,)


class CLeg(PackageLeg):
    """libmlxh2oc with one of its back ends named, which has to serve what the package's does."""

    def __init__(self, name: str, backend: str, build: Path | None = None) -> None:
        super().__init__(name)
        self.trace_of, self.build = backend, build
        self.library: Any = None

    def not_run(self) -> str:
        if c_api is None:
            return "cffi is not installed"
        path = c_api.library_path(self.build)
        if path is None or not path.is_file():
            return f"{path or 'libmlxh2oc'} not found"
        self.library = c_api.load(path)
        available, reason = self.library.backend_status(self.trace_of)
        return "" if available else f"back end {self.trace_of!r} is not available: {reason}"

    def versions(self) -> dict[str, str]:
        text = c_api.Handle(self.library, "mlx_string")
        self.library.check(self.library.c.mlx_version(text.pointer))
        found = self.library.ffi.string(self.library.c.mlx_string_data(text.value)).decode()
        return {"mlx": found, "back end": self.trace_of}

    def run(self, cases: Iterable[Case], directory: Path) -> Iterator[tuple[str, Outcome]]:
        with registered(self.name, CBackend(self.library, self.name, self.trace_of)):
            yield from super().run(cases, directory)


def failures(library: Any, cases: Iterable[Case], backend: str = "composed") -> list[str]:
    """The cases that a back end of this library fails, and why; traces need a cache, which the C
    interface has not."""
    leg = CLeg("c-library", backend)
    leg.library = library
    by_name = {case.name: case for case in cases if case.fields["op"] != "trace"}
    found = (
        (name, judge.judge(by_name[name], one)) for name, one in leg.run(by_name.values(), Path())
    )
    return [f"{name}: {verdict.note}" for name, verdict in found if not verdict.ok]
