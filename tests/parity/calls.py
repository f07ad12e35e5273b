"""Attention calls of every kind: random inputs, and their rows dequantised."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

import reference
import reference_turbo
from golden.build import (
    DTYPES,
    Case,
    additive_mask,
    bool_mask,
    generator,
    normal,
    row_bias,
    with_slack,
)
from mlx_h2o.config import KV_FORMATS
from mlx_h2o.operations.composed import turbo
from parity.operations import dense_rows

PARTS = {1: ("",), 2: ("_words", "_norms"), 3: ("_words", "_scales", "_biases")}
"""How the arrays of stored rows are named, by their number, after the name of a side."""


@dataclass(frozen=True)
class Call:
    """One call. ``mask`` is "", "causal", "bool", "add-f32" and its like for an additive one, or a
    function of the generator that makes one; ``sinks`` a dtype, or numbers.

    ``bits`` of keys and values pack them in groups of ``group``, with scales of a dtype ``scales``
    (that of the queries where it is empty), and ``kv_format`` as codes of rotated rows. The
    ``slack`` rows behind keys and values are NaN. ``empty``: the mask is of every head, and the
    first query sees nothing. ``bias``: of rows, or a function that makes one.
    """

    dtype: str = "f32"
    sizes: tuple[int, int] = (64, 64)
    batch: int = 1
    heads: tuple[int, int] = (2, 1)
    queries: int = 1
    rows: int = 33
    mask: Any = ""
    sinks: Any = ""
    lse: bool = True
    scores: bool = True
    slack: int = 0
    bits: tuple[int, int] | None = None
    kv_format: str = ""
    group: int = 64
    scales: str = ""
    sparse: float = 0.0
    skipped: bool = False
    bias: Any = False
    scale: float | None = None
    empty: bool = False

    def made(
        self, rng: np.random.Generator
    ) -> tuple[dict[str, Any], dict[str, mx.array], list[Any], dict[str, Any]]:
        """Fields and tensors of a case; keys and values as they dequantise; and scale, mask, sinks
        and bias as the reference takes them."""
        (heads, kv_heads), kind = self.heads, DTYPES[self.dtype]
        scale = self.sizes[0] ** -0.5 if self.scale is None else self.scale
        bits = KV_FORMATS[self.kv_format] if self.kv_format else self.bits
        shape_of_queries = (self.batch, heads, self.queries, self.sizes[0])
        tensors, live = {"queries": normal(rng, shape_of_queries, kind)}, []
        for (side, seed), size, width in zip(
            reference_turbo.SEEDS.items(), self.sizes, bits or (0, 0), strict=True
        ):
            rows = (self.batch, kv_heads, self.rows, size)
            parts: tuple[mx.array, ...] = (normal(rng, rows, kind),)
            if self.kv_format and 0 < width < 8:
                parts = turbo.encode_rows(*parts, width, seed)
            elif width:
                wide = parts[0].astype(DTYPES[self.scales or self.dtype])
                parts = tuple(mx.quantize(wide, group_size=self.group, bits=width))
            dense = dense_rows(parts, bits=width, group_size=self.group, side=side)
            live.append(parts[0] if len(parts) == 1 else dense)
            for end, part in zip(PARTS[len(parts)], parts, strict=True):
                tensors[f"{side}{end}"] = with_slack(part, self.slack)
        given: dict[str, Any] = {"scale": float(np.float32(scale)), "mask": self.mask or None}
        shape: dict[str, Any] = {"shape": (self.queries, self.rows)}
        if self.empty:
            whole = (self.batch, heads, self.queries, self.rows)
            shape = {"shape": whole, "empty": (0, 0, 0)}
        if callable(self.mask):
            given["mask"] = tensors["mask"] = self.mask(rng)
        elif self.mask == "bool":
            given["mask"] = tensors["mask"] = bool_mask(rng, **shape)
        elif self.mask.startswith("add-"):
            shape |= {"dtype": DTYPES[self.mask[4:]], "masked": (-np.inf,)}
            given["mask"] = tensors["mask"] = additive_mask(rng, **shape)
        if self.sinks:
            if isinstance(self.sinks, str):
                sinks = normal(rng, (heads,), DTYPES[self.sinks])
            else:
                sinks = mx.array(self.sinks, mx.float32).astype(kind)
            given["sinks"] = tensors["sinks"] = sinks
        if self.bias:
            draw = self.bias if callable(self.bias) else row_bias
            given["row_bias"] = tensors["row_bias"] = draw(rng, (self.batch, kv_heads, self.rows))
        fields = {
            "scale": given["scale"],
            "mask": "array" if "mask" in tensors else self.mask,
            "bits": bits and (bits[0] or 8, bits[1]),
            "kv_format": self.kv_format,
            "group_size": self.group,
            "sparse_v_threshold": self.sparse,
            "return_lse": self.lse,
            "return_skipped": self.skipped,
            "slack": self.slack,
        }
        return fields, tensors, live, given


def drawn_case(
    fields: dict[str, Any],
    tensors: dict[str, mx.array],
    expected: dict[str, np.ndarray],
    tolerance: dict[str, float],
) -> Case:
    wanted = {f"{key}64": mx.array(array.astype(np.float32)) for key, array in expected.items()}
    return Case(fields | {"tolerance": tolerance}, tensors | wanted)


def attention_case(
    name: str, *, rows: int = 20, sizes: tuple[int, int] = (32, 32), seed: int = 0, **given: Any
) -> Case:
    """One case of a ``Call`` with dense rows and scores, as the golden vectors have it."""
    call = Call(rows=rows, sizes=sizes, **given)
    fields, tensors, live, arguments = call.made(generator(name, seed))
    inputs = (tensors["queries"], *live)
    expected = reference.attention(*inputs, **arguments)
    allowed = reference.tolerances(*inputs, **arguments, expected=expected)
    kept = {key: fields[key] for key in ("scale", "mask", "return_lse", "slack")}
    return drawn_case(
        {"name": name, "op": "attention"} | kept,
        tensors,
        expected._asdict(),
        {key: float(f"{bound:.4g}") for key, bound in allowed._asdict().items()},
    )
