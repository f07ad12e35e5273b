"""How a leg of the package runs a case of each operation.

A back end without its own function for an operation shows "n/a", also in C and Swift: its column
would only repeat another one.
"""

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import numpy as np

import reference
import reference_turbo
from golden.build import Case
from mlx_h2o import fast
from mlx_h2o.operations import requests
from mlx_h2o.operations.backends import resolve
from mlx_h2o.operations.requests import AttentionRequest
from mlx_h2o.operations.resolved import Operations
from parity.outcome import Outcome

DECODE = ("quantized", "without_scores")

# Functions of a back end, any of which makes it serve an operation itself; attention and selection
# every one has.
FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    "quantized": ("attend",),
    "without_scores": ("attend",),
    "accumulate": ("accumulate_scores",),
    "attend": ("accumulate", "accumulate_scores"),
    "append": ("quantize_append",),
    "codes": ("encode_rows",),
    "prefill": ("prefill_scores",),
    "fold": ("fold",),
}


def absent(case: Case, backend: Operations, name: str) -> str:
    """Why the back end has no part in the case's operation; empty if it has, or is composed."""
    op = case.fields["op"]
    functions = FUNCTIONS.get(op, ())
    if name == "composed" or not functions or any(_has_own(backend, f) for f in functions):
        return ""
    return f"it has no {op!r} of its own"


def _has_own(backend: Operations, function: str) -> bool:
    own = getattr(type(backend), function) is not getattr(Operations, function)
    return own or function in vars(backend)


def run(case: Case) -> Outcome:
    """The case on the package, by the back end that is named."""
    return Outcome(_RUN[case.fields["op"]](case))


def request(case: Case) -> AttentionRequest:
    """The validated call of a case of decode attention; scores are left out where not expected."""
    fields, asked = case.fields, options(case)
    for name in ("scores", "lse"):
        asked[f"return_{name}"] = name in fields["tolerance"] and fields.get(f"return_{name}", True)
    if fields.get("bits"):
        asked |= _packing(case) | {"return_skipped": fields["return_skipped"]}
    return requests.attention_request(*map(_held, inputs(case)), **asked)


def inputs(case: Case) -> tuple[Any, ...]:
    """Queries, keys and values; without the slack, whose rows are behind the views."""
    return (case.tensors["queries"], *(_rows(case, name) for name in ("keys", "values")))


def _held(rows: Any) -> Any:
    return tuple(part for part in rows if part is not None) if isinstance(rows, tuple) else rows


def _rows(case: Case, name: str) -> Any:
    """Keys or values without their slack; packed ones as (words, scales, biases), or as
    (words, norms, None), beside which keys may be (keys, None, None)."""
    if name in case.tensors:
        rows = _live(case, case.tensors[name])
        return (rows, None, None) if case.fields.get("kv_format") else rows
    if f"{name}_norms" in case.tensors:
        return (*(_live(case, case.tensors[f"{name}_{part}"]) for part in ("words", "norms")), None)
    parts = ("words", "scales", "biases")
    return tuple(_live(case, case.tensors[f"{name}_{part}"]) for part in parts)


def _live(case: Case, array: mx.array) -> mx.array:
    return array[:, :, : array.shape[2] - case.fields["slack"]]


def options(case: Case) -> dict[str, Any]:
    """scale, mask, sinks and row_bias as the operation takes them."""
    mask = case.tensors["mask"] if case.fields["mask"] == "array" else case.fields["mask"] or None
    given = {"scale": case.fields["scale"], "mask": mask, "sinks": case.tensors.get("sinks")}
    # Not every operation has one.
    return given | {name: case.tensors[name] for name in ("row_bias",) if name in case.tensors}


def _packing(case: Case) -> dict[str, Any]:
    fields = case.fields
    return {
        "bits": fields["bits"][0],
        "v_bits": fields["bits"][1],
        "group_size": fields["group_size"],
        "sparse_v_threshold": fields["sparse_v_threshold"],
    }


def zones(case: Case) -> dict[str, Any]:
    """keep, sink_size and recent_start of a selection case."""
    start = case.tensors.get("recent_start", case.fields["recent_start"])
    names = ("keep", "sink_size")
    return {name: case.fields[name] for name in names} | {"recent_start": start}


def _named(names: str, found: Any) -> dict[str, np.ndarray]:
    return {
        name: reference.float64(array)
        for name, array in zip(names.split(), found, strict=False)
        if array is not None
    }


def _attention(case: Case) -> dict[str, np.ndarray]:
    found = fast.scaled_dot_product_attention_with_scores(
        *inputs(case), **options(case), return_lse=case.fields["return_lse"]
    )
    return _named("out scores lse", found)


def _keep(case: Case) -> dict[str, np.ndarray]:
    rows = (case.tensors["scores"], case.tensors["positions"])
    return {"keep": np.array(fast.keep_indices(*rows, **zones(case)))}


def _quantized(case: Case) -> dict[str, np.ndarray]:
    asked = {name: case.fields[name] for name in ("return_lse", "return_skipped")}
    found = fast.scaled_dot_product_attention_quantized_with_scores(
        case.tensors["queries"], *_rows(case, "keys"), *_rows(case, "values"),
        **options(case), **_packing(case), **asked,
    )  # fmt: skip
    more = [name.removeprefix("return_") for name, is_asked in asked.items() if is_asked]
    return _named(" ".join(["out scores", *more]), found)


def _without_scores(case: Case) -> dict[str, np.ndarray]:
    """No public call of Python asks for this; the package's own attention does."""
    found = resolve().serving(asked := request(case)).attend(asked)
    if found[1] is not None:
        raise AssertionError("scores were made that nobody asked for")
    return _named("out scores lse skipped", found)


def _accumulate(case: Case) -> dict[str, np.ndarray]:
    given = (case.tensors["importance"], case.tensors["scores"])
    return _named("importance", [fast.accumulate_scores(*given, decay=case.fields["decay"])])


def _append(case: Case) -> dict[str, np.ndarray]:
    """The rows that were written, and all others, as they dequantise: back ends may round apart."""
    fields, tensors = case.fields, case.tensors
    stored = [
        tuple(part for part in _rows(case, name) if part is not None) for name in ("keys", "values")
    ]
    found = fast.quantize_append(
        *stored, tensors["new_keys"], tensors["new_values"], tensors["slots"],
        bits=fields["bits"][0], v_bits=fields["bits"][1], group_size=fields["group_size"],
    )  # fmt: skip
    return written_rows(fields, tensors["slots"], found)


def written_rows(fields: Mapping[str, Any], slots: Any, stored: Any) -> dict[str, np.ndarray]:
    """Keys and values as they dequantise, in place of those at the slots 0, and these; ``stored``
    are both, as ``dense_rows`` takes them."""
    arrays: dict[str, np.ndarray] = {}
    for name, rows, bits in zip(("keys", "values"), stored, fields["bits"] or (8, 8), strict=True):
        dense = dense_rows(rows, bits=bits, group_size=fields["group_size"], side=name)
        written, others = split(dense, np.array(slots))
        # Expectations are kept as float32, and other rows are to be the same.
        arrays |= {f"new_{name}": written, f"other_{name}": others.astype(np.float32)}
    return arrays


def dense_rows(rows: Any, *, bits: int, group_size: int, side: str) -> np.ndarray:
    """What stored rows stand for, float64: words, scales and biases, words and norms, or an array,
    which may stand in a tuple too."""
    if not isinstance(rows, tuple) or len(rows) == 1:
        return reference.float64(rows[0] if isinstance(rows, tuple) else rows)
    if len(rows) == 2:
        return reference_turbo.rows(*rows, bits=bits, side=side)
    return reference.dequantized(*rows, bits=bits, group_size=group_size)


def _codes(case: Case) -> dict[str, np.ndarray]:
    """What the codes of rows stand for."""
    bits, seed = case.fields["bits"][0], reference_turbo.SEEDS[case.fields["kind"]]
    parts = resolve().encode_rows(case.tensors["rows"], bits, seed)
    return _named("rows", [resolve().decode_rows(*parts, bits, seed, mx.float32)])


def _attend(case: Case) -> dict[str, np.ndarray]:
    fields, tensors = case.fields, case.tensors
    found = fast.attention_and_accumulate(
        tensors["queries"], _rows(case, "keys"), _rows(case, "values"), tensors["importance"],
        **options(case), **(_packing(case) if fields["bits"] else {}), decay=fields["decay"],
        kind=fields["kind"],
    )  # fmt: skip
    return _named("out importance", found)


def split(rows: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows [B, H, N, D] at the slots [B, H, L], and in place those that are not (else 0)."""
    at = slots.astype(np.int64)[..., None]
    others = rows.copy()
    np.put_along_axis(others, at, 0.0, axis=2)
    return np.take_along_axis(rows, at, axis=2), others


def _prefill(case: Case) -> dict[str, np.ndarray]:
    fields = case.fields
    found = fast.prefill_scores(
        case.tensors["queries"], case.tensors["keys"], **options(case), kind=fields["kind"],
        importance=case.tensors.get("importance"), decay=fields["decay"],
        queries=fields["queries"],
    )  # fmt: skip
    return _named("importance", [found])


def _fold(case: Case) -> dict[str, np.ndarray]:
    names = ("keys", "values", "bias", "mass", "weights", "eligible", "kept")
    found = resolve().fold(*(case.tensors[name] for name in names), share=case.fields["share"])
    return _named("into keys values bias mass", found)


_RUN: dict[str, Callable[[Case], dict[str, np.ndarray]]] = {
    "attention": _attention, "keep": _keep, "quantized": _quantized,
    "without_scores": _without_scores, "accumulate": _accumulate, "attend": _attend,
    "append": _append, "codes": _codes, "prefill": _prefill, "fold": _fold,
}  # fmt: skip
