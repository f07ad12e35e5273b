"""Wrong calls of the operations: what is changed in a valid call, and how the error begins.

The messages are Python's, and the native module and C use the same: ``wrong_calls.toml``, and here
calls that only Python can make.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("ascii"))
ARRAY = re.compile(r"(bool|u?int\d+|b?float\d+|complex64)((?: \d+)*)")

ATTENTION = "scaled_dot_product_attention_with_scores"
QUANTIZED = "scaled_dot_product_attention_quantized_with_scores"
OF_C_ALONE = ("fold", "encode_rows", "decode_rows")


def zeros(text: str) -> mx.array:
    """Zeros from a dtype and sizes, such as "float32 1 2 5"."""
    dtype, *sizes = text.split()
    return mx.zeros([*map(int, sizes)], getattr(mx, dtype.replace("bool", "bool_")))


def read(value: Any) -> Any:
    """An argument from its form in the table."""
    if isinstance(value, list):
        return tuple(map(read, value))
    if isinstance(value, str) and ARRAY.fullmatch(value):
        return zeros(value)
    return None if value == "none" else value


def arguments(given: dict[str, Any]) -> dict[str, Any]:
    return {name: read(value) for name, value in given.items()}


PACKED = read(TABLE["right"]["quantize_append"]["quantised_keys"])
_TYPES: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    ATTENTION: (
        ("mask is 'Causal', expected 'causal', an array or None.", {"mask": "Causal"}),
        ("scale is inf, expected", {"scale": 10**400}),
        *((f"{name} must be an mlx.core.array, found {type(other).__name__}.", {place: other})
          for place, name in (("q", "queries"), ("k", "keys"), ("v", "values"))
          for other in (np.zeros((1, 4, 2, 64), np.float32), [[1.0]], PACKED, 1.0, None, "q")),
        *(("mask must be an mlx.core.array", {"mask": m}) for m in (True, 0, [True], np.ones(5))),
        ("sinks must be an mlx.core.array, found list", {"sinks": [0.0] * 4}),
        ("row_bias must be an mlx.core.array, found ndarray", {"row_bias": np.zeros((1, 2, 5))}),
        *(("scale must be a number, found", {"scale": s})
          for s in (None, "1", True, 1j, mx.array(1.0), np.ones(1))),
        *(("stream must be None, an mlx.core.Stream", {"stream": s}) for s in ("cpu", 0, True)),
    ),
    QUANTIZED: (
        ("key scales must be an mlx.core.array, found list.", {"k_s": [1.0]}),
        ("bits must be an integer, found float.", {"bits": 8.0}),
        ("v_bits must be an integer, found str.", {"v_bits": "4"}),
        ("group_size must be an integer, found bool.", {"group_size": True}),
        ("sparse_v_threshold must be a number, found NoneType.", {"sparse_v_threshold": None}),
    ),
    "keep_indices": (
        (f"keep is {10**30}, expected at least 1", {"keep": 10**30}),
        ("scores must be an mlx.core.array, found ndarray", {"scores": np.zeros((1, 2, 5))}),
        *(("keep must be an integer, found", {"keep": n}) for n in (1.0, None, True, "1")),
        ("sink_size must be an integer, found float", {"sink_size": 4.0}),
        ("recent_start is float32 (), expected an integer, or int32 () or [B] = (1,).",
         {"recent_start": zeros("float32")}),
        ("recent_start must be an integer, found str", {"recent_start": "3"}),
        ("stream must be None", {"stream": "gpu"}),
    ),
    "attention_and_accumulate": (("keys and values are arr", {"v": PACKED}),),
    "quantize_append": (
        ("quantised keys must be a tuple of words", {"quantised_keys": PACKED[0]}),
        ("keys must be words, scales and biases, words and norms, or the rows alone, found 4",
         {"quantised_keys": (*PACKED, PACKED[0])}),
        ("bits must be an integer, found float", {"bits": 8.0}),
    ),
    "prefill_scores": tuple(
        (f"{said} must be an mlx.core.array", {name: [1.0]})
        for name, said in (("q", "queries"), ("k", "keys"), ("importance", "importance"),
                           ("sinks", "sinks"))
    ),
}  # fmt: skip


def wrong_calls(
    types: bool = False, of_c_alone: bool = False
) -> list[tuple[str, str, dict[str, Any]]]:
    """The operation, the beginning of its error, and the arguments; with ``types`` also calls with
    types that only Python can pass."""
    found = []
    for op in [op for op in TABLE["right"] if (op in OF_C_ALONE) == of_c_alone]:
        shared = TABLE["wrong"]["shared"] if "scale" in TABLE["right"][op] else []
        calls = [(text, arguments(changes)) for text, changes in (*shared, *TABLE["wrong"][op])]
        calls += _TYPES.get(op, ()) if types else ()
        found += [(op, text, arguments(TABLE["right"][op]) | changes) for text, changes in calls]
    return found
