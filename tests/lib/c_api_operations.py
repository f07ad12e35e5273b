"""Calls of the C operations on packed rows and the rows of a cache, and parity cases.

Rows are handles of arrays, or tuples: words, scales and biases, or words and norms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from c_api import Handle, Library
from parity.operations import written_rows

Rows = Handle | tuple[Handle, ...]


def vector(library: Library, rows: Rows) -> Handle:
    """The mlx_vector_array of dense or packed rows."""
    handle = Handle(library, "mlx_vector_array", library.c.mlx_vector_array_new())
    for part in rows if isinstance(rows, tuple) else (rows,):
        library.check(library.c.mlx_vector_array_append_value(handle.value, part.value))
    return handle


def items(library: Library, handle: Handle) -> tuple[Handle, ...]:
    """The arrays of an mlx_vector_array."""
    found = tuple(
        Handle(library, "mlx_array") for _ in range(library.c.mlx_vector_array_size(handle.value))
    )
    for index, item in enumerate(found):
        library.check(library.c.mlx_vector_array_get(item.pointer, handle.value, index))
    return found


def optional(library: Library, number: int | None) -> dict[str, Any]:
    return {"value": number or 0, "has_value": number is not None}


def _value(library: Library, handle: Handle | None) -> Any:
    return library.nothing if handle is None else handle.value


def _mask(library: Library, mask: Handle | str | None) -> tuple[bytes, Any]:
    mode = "" if mask is None else mask if isinstance(mask, str) else "array"
    return mode.encode(), _value(library, mask if isinstance(mask, Handle) else None)


def _places(library: Library, names: Sequence[str], wanted: Sequence[bool]) -> dict[str, Handle]:
    pairs = zip(names, wanted, strict=True)
    return {name: Handle(library, "mlx_array") for name, asked in pairs if asked}


def _pointers(library: Library, names: Sequence[str], places: dict[str, Handle]) -> list[Any]:
    null = library.ffi.NULL
    return [places[name].pointer if name in places else null for name in names]


def quantized_attention(
    library: Library,
    queries: Handle,
    keys: Rows,
    values: Rows,
    *,
    scale: float,
    bits: int = 8,
    group_size: int = 64,
    v_bits: int | None = None,
    mask: Handle | str | None = None,
    sinks: Handle | None = None,
    row_bias: Handle | None = None,
    sparse_v_threshold: float = 0.0,
    return_lse: bool = True,
    return_skipped: bool = False,
) -> dict[str, Handle]:
    names = ("out", "scores", "lse", "skipped")
    places = _places(library, names, (True, True, return_lse, return_skipped))
    rows = []
    for side in (keys, values):  # of codes or dense keys the other places are empty
        parts = side if isinstance(side, tuple) else (side,)
        rows += [*(part.value for part in parts), *[library.nothing] * (3 - len(parts))]
    library.check(
        library.c.mlx_h2o_scaled_dot_product_attention_quantized_with_scores(
            *_pointers(library, names, places), queries.value, *rows, scale, bits, group_size,
            optional(library, v_bits), *_mask(library, mask), _value(library, sinks),
            _value(library, row_bias), sparse_v_threshold, library.stream.value,
        )
    )  # fmt: skip
    return places


def accumulate_scores(
    library: Library, importance: Handle, scores: Handle, *, decay: float, masked: bool = True
) -> Handle:
    place = Handle(library, "mlx_array")
    arrays = (importance.value, scores.value)
    stream = library.stream.value
    library.check(
        library.c.mlx_h2o_accumulate_scores(place.pointer, *arrays, decay, masked, stream)
    )
    return place


def attention_and_accumulate(
    library: Library,
    queries: Handle,
    keys: Rows,
    values: Rows,
    importance: Handle,
    *,
    scale: float,
    kind: str = "ema",
    decay: float,
    mask: Handle | str | None = None,
    sinks: Handle | None = None,
    row_bias: Handle | None = None,
    bits: int = 8,
    group_size: int = 64,
    v_bits: int | None = None,
    sparse_v_threshold: float = 0.0,
) -> dict[str, Handle]:
    """out and importance."""
    names = ("out", "importance")
    places = _places(library, names, (True, True))
    rows = [vector(library, side) for side in (keys, values)]
    library.check(
        library.c.mlx_h2o_attention_and_accumulate(
            *_pointers(library, names, places), queries.value, *(each.value for each in rows),
            importance.value, scale, kind.encode(), decay, *_mask(library, mask),
            _value(library, sinks), _value(library, row_bias), bits, group_size,
            optional(library, v_bits), sparse_v_threshold, library.stream.value,
        )
    )  # fmt: skip
    return places


def key_diversity(library: Library, keys: Handle) -> Handle:
    place = Handle(library, "mlx_array")
    library.check(library.c.mlx_h2o_key_diversity(place.pointer, keys.value, library.stream.value))
    return place


FOLDED = ("into", "keys", "values", "bias", "mass")


def fold(library: Library, *rows: Handle, share: float = 1.0) -> dict[str, Handle]:
    """Of keys, values, bias, mass, weights, eligible and kept."""
    places = _places(library, FOLDED, (True,) * 5)
    given = [handle.value for handle in rows]
    library.check(
        library.c.mlx_h2o_fold(
            *_pointers(library, FOLDED, places), *given, share, library.stream.value
        )
    )
    return places


def quantize_append(
    library: Library,
    keys: Rows,
    values: Rows,
    new_keys: Handle,
    new_values: Handle,
    slots: Handle,
    *,
    bits: int = 8,
    group_size: int = 64,
    v_bits: int | None = None,
) -> tuple[tuple[Handle, ...], tuple[Handle, ...]]:
    places = [
        Handle(library, "mlx_vector_array", library.c.mlx_vector_array_new()) for _ in range(2)
    ]
    rows = [vector(library, side) for side in (keys, values)]
    library.check(
        library.c.mlx_h2o_quantize_append(
            *(each.pointer for each in (*places,)), *(each.value for each in rows),
            new_keys.value, new_values.value, slots.value, bits, group_size,
            optional(library, v_bits), library.stream.value,
        )
    )  # fmt: skip
    return items(library, places[0]), items(library, places[1])


def encode_rows(
    library: Library, rows: Handle, *, bits: int, of_values: bool
) -> tuple[Handle, Handle]:
    words, norms = Handle(library, "mlx_array"), Handle(library, "mlx_array")
    library.check(
        library.c.mlx_h2o_encode_rows(
            words.pointer, norms.pointer, rows.value, bits, of_values, library.stream.value
        )
    )
    return words, norms


def decode_rows(
    library: Library, words: Handle, norms: Handle, *, bits: int, of_values: bool
) -> Handle:
    place = Handle(library, "mlx_array")
    library.check(
        library.c.mlx_h2o_decode_rows(
            place.pointer, words.value, norms.value, bits, of_values, library.stream.value
        )
    )
    return place


def prefill_scores(
    library: Library,
    queries: Handle,
    keys: Handle,
    *,
    scale: float,
    mask: Handle | str | None = None,
    sinks: Handle | None = None,
    row_bias: Handle | None = None,
    kind: str = "ema",
    importance: Handle | None = None,
    decay: float = 0.95,
    counted: int = 128,
) -> Handle:
    place = Handle(library, "mlx_array")
    library.check(
        library.c.mlx_h2o_prefill_scores(
            place.pointer, queries.value, keys.value, scale, *_mask(library, mask),
            _value(library, sinks), _value(library, row_bias), kind.encode(),
            _value(library, importance), decay, counted, library.stream.value,
        )
    )  # fmt: skip
    return place


class _Case:
    """The inputs of a parity case as handles."""

    def __init__(self, library: Library, fields: dict[str, Any], tensors: dict[str, Any]) -> None:
        self.library, self.fields = library, fields
        given = {name: array for name, array in tensors.items() if not name.endswith("64")}
        self.handles = {name: library.array(array) for name, array in given.items()}

    def rows(self, name: str) -> Any:
        """Keys or values without their slack."""
        if name in self.handles:
            return self._live(self.handles[name])
        coded = f"{name}_norms" in self.handles
        parts = ("words", "norms") if coded else ("words", "scales", "biases")
        return tuple(self._live(self.handles[f"{name}_{part}"]) for part in parts)

    def _live(self, handle: Handle) -> Handle:
        slack = self.fields.get("slack", 0)
        rows = self.library.c.mlx_array_dim(handle.value, 2) - slack
        return self.library.first_rows(handle, rows) if slack else handle

    def attention(self) -> dict[str, Any]:
        mask = self.fields["mask"]
        given = {
            "scale": self.fields["scale"],
            "mask": self.handles["mask"] if mask == "array" else mask or None,
            "sinks": self.handles.get("sinks"),
        }
        return given | {name: self.handles[name] for name in ("row_bias",) if name in self.handles}

    def packing(self) -> dict[str, Any]:
        names = ("bits", "v_bits")
        pair = dict(zip(names, self.fields["bits"], strict=True)) if self.fields["bits"] else {}
        return pair | {"group_size": self.fields["group_size"]}

    def numpy(self, found: dict[str, Handle]) -> dict[str, np.ndarray]:
        return {name: self.library.numpy(a).astype(np.float64) for name, a in found.items()}


def _run_quantized(case: _Case) -> dict[str, np.ndarray]:
    found = quantized_attention(
        case.library, case.handles["queries"], case.rows("keys"), case.rows("values"),
        **case.attention(), **case.packing(),
        sparse_v_threshold=case.fields["sparse_v_threshold"],
        return_lse=case.fields["return_lse"], return_skipped="skipped" in case.fields["tolerance"],
    )  # fmt: skip
    return case.numpy(found)


def _run_accumulate(case: _Case) -> dict[str, np.ndarray]:
    given = (case.handles["importance"], case.handles["scores"])
    found = accumulate_scores(case.library, *given, decay=case.fields["decay"])
    return case.numpy({"importance": found})


def _run_append(case: _Case) -> dict[str, np.ndarray]:
    names = ("new_keys", "new_values", "slots")
    found = quantize_append(
        case.library, case.rows("keys"), case.rows("values"), *(case.handles[n] for n in names),
        **case.packing(),
    )  # fmt: skip
    rows = [tuple(map(case.library.numpy, packed)) for packed in found]
    return written_rows(case.fields, case.library.numpy(case.handles["slots"]), rows)


def _run_codes(case: _Case) -> dict[str, np.ndarray]:
    options = {"bits": case.fields["bits"][0], "of_values": case.fields["kind"] == "values"}
    parts = encode_rows(case.library, case.handles["rows"], **options)
    return case.numpy({"rows": decode_rows(case.library, *parts, **options)})


def _run_prefill(case: _Case) -> dict[str, np.ndarray]:
    fields = case.fields
    found = prefill_scores(
        case.library, case.handles["queries"], case.handles["keys"], **case.attention(),
        kind=fields["kind"], importance=case.handles.get("importance"), decay=fields["decay"],
        counted=fields["queries"],
    )  # fmt: skip
    return case.numpy({"importance": found})


def _run_fold(case: _Case) -> dict[str, np.ndarray]:
    names = ("keys", "values", "bias", "mass", "weights", "eligible", "kept")
    return case.numpy(
        fold(case.library, *(case.handles[name] for name in names), share=case.fields["share"])
    )


#: What runs a parity case of each operation beyond attention and selection.
RUN: dict[str, Callable[[_Case], dict[str, np.ndarray]]] = {
    "quantized": _run_quantized,
    "accumulate": _run_accumulate,
    "append": _run_append,
    "codes": _run_codes,
    "prefill": _run_prefill,
    "fold": _run_fold,
}


def run_case(
    library: Library, fields: dict[str, Any], tensors: dict[str, Any]
) -> dict[str, np.ndarray]:
    """One case on the library; an error of its raises CError."""
    return RUN[fields["op"]](_Case(library, fields, tensors))
