"""Attention with probes: queries of a KV head that are scored against the keys, and no more.

Re-exported by ``fast``.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import mlx.core as mx

from mlx_h2o.operations import arguments
from mlx_h2o.operations.backends import attended
from mlx_h2o.operations.requests import AttentionRequest, Packed
from mlx_h2o.operations.validate import StreamLike, attention_request, dtype_name

WITH_PROBES = "scaled_dot_product_attention_with_probes"


def scaled_dot_product_attention_with_probes(
    q: mx.array,
    k: mx.array | Sequence[mx.array],
    v: mx.array | Sequence[mx.array],
    probes: mx.array,
    *,
    scale: float,
    bits: int = 8,
    group_size: int = 64,
    v_bits: int | None = None,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
    sparse_v_threshold: float = 0.0,
    stream: StreamLike = None,
) -> tuple[mx.array, ...]:
    """Attention with its scores, and the scores of further queries in the same read of the keys.

    A probe is a query that belongs to a KV head and takes no part in the output; such as the mean
    of the keys, to rank rows by their likeness to it. The keys are read once for
    queries and probes.

    Args:
        q: queries [B, Hq, Lq, D], as in the operations without probes.
        k: keys [B, Hkv, N, D], or their (words, scales, biases).
        v: values [B, Hkv, N, Dv], or their (words, scales, biases); packed where the keys are.
        probes: [B, Hkv, E, D], the dtype of the queries; E is 1 or more.
        scale: finite factor of the products, of the queries and of the probes.
        bits: of packed keys, and of packed values unless ``v_bits`` is given.
        group_size: of packed keys and values.
        v_bits: bits of packed values.
        mask: None, ``"causal"`` or an array. It does not apply to probes.
        sinks: learned logits [Hq]. They do not apply to probes.
        sparse_v_threshold: as for packed rows without probes; they must be packed.
        stream: stream or device to run on.

    Returns:
        ``(out, scores, lse, probe_scores)``: the first three as the operations without probes give
        them; ``probe_scores``, float32 [B, Hkv, E, N], are ``scale * probe.k`` of every key.

    Raises:
        ValueError: as the operations without probes; probes of the wrong shape or dtype; keys
            packed and values not, or the other way round; a threshold for rows that are not packed.
        TypeError: an argument that is not an array, a tuple or list of arrays, a number or a stream
            where one is expected.
    """
    op, keys, values = WITH_PROBES, _packed("keys", k), _packed("values", v)
    if isinstance(keys, tuple) != isinstance(values, tuple):
        names = ("keys", "values") if isinstance(keys, tuple) else ("values", "keys")
        raise ValueError(
            f"[{op}] {names[0]} are packed and {names[1]} are not, expected both or none."
        )
    sparse = sparse_v_threshold
    if not isinstance(keys, tuple) and arguments.number(op, "sparse_v_threshold", sparse) != 0:
        raise ValueError(
            f"[{op}] sparse_v_threshold is {sparse}, "
            "expected 0 for keys and values that are not packed."
        )
    request = attention_request(
        q, keys, values, scale=scale, packed=isinstance(keys, tuple), mask=mask, sinks=sinks,
        bits=bits, group_size=group_size, v_bits=v_bits, sparse_v_threshold=sparse,
        return_lse=True, stream=stream, op=op,
    )  # fmt: skip
    _check_probes(arguments.array(op, "probes", probes), request)
    return attended(replace(request, probes=probes), op)


def _packed(name: str, rows: mx.array | Sequence[mx.array]) -> mx.array | Packed:
    """The three arrays of packed rows, or the array."""
    if not isinstance(rows, (tuple, list)):
        return cast(mx.array, rows)
    if len(rows) != 3:
        raise ValueError(
            f"[{WITH_PROBES}] {name} are {len(rows)} arrays, expected 3: words, scales and biases."
        )
    return (rows[0], rows[1], rows[2])


def _check_probes(probes: mx.array, request: AttentionRequest) -> None:
    op, wanted = WITH_PROBES, request.keys.shape
    if probes.ndim != 4:
        raise ValueError(f"[{op}] probes have {probes.ndim} dimensions, expected 4 [B, Hkv, E, D].")
    found = probes.shape
    if (found[0], found[1], found[3]) != (wanted[0], wanted[1], wanted[3]) or not found[2]:
        raise ValueError(
            f"[{op}] probes have shape {found}, expected [B, Hkv, E, D] = "
            f"({wanted[0]}, {wanted[1]}, E, {wanted[3]}) with E of at least 1."
        )
    if probes.dtype != request.queries.dtype:
        raise ValueError(
            f"[{op}] probes are {dtype_name(probes.dtype)}, "
            f"expected the dtype of the queries, {dtype_name(request.queries.dtype)}."
        )
