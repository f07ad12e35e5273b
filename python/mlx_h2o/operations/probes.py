"""Attention with probes: queries of a KV head that are scored against the keys, and no more.

Re-exported by ``fast``.
"""

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from mlx_h2o.operations import arguments
from mlx_h2o.operations.backends import resolve
from mlx_h2o.operations.requests import AttentionRequest
from mlx_h2o.operations.validate import StreamLike, attention_request, dtype_name
from mlx_h2o.operations.validate_quantized import quantized_attention_request

WITH_PROBES = "scaled_dot_product_attention_with_probes"

# Words, scales and biases, as mx.quantize gives them.
Packed = Sequence[mx.array]


def scaled_dot_product_attention_with_probes(
    q: mx.array,
    k: mx.array | Packed,
    v: mx.array | Packed,
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
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
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
    request = _request(
        q, k, v, scale, bits, group_size, v_bits, mask, sinks, sparse_v_threshold, stream
    )
    _check_probes(arguments.array(WITH_PROBES, "probes", probes), request)
    operations = resolve(request.stream, op=WITH_PROBES)
    request = replace(request, probes=probes)
    out, scores, lse, _, found = operations.serve_attention(request, WITH_PROBES)
    assert scores is not None and lse is not None and found is not None
    return out, scores, lse, found


def _request(
    q: mx.array,
    k: mx.array | Packed,
    v: mx.array | Packed,
    scale: float,
    bits: int,
    group_size: int,
    v_bits: int | None,
    mask: mx.array | str | None,
    sinks: mx.array | None,
    sparse_v_threshold: float,
    stream: StreamLike,
) -> AttentionRequest:
    op = WITH_PROBES
    keys, values = _packed("keys", k), _packed("values", v)
    if keys is not None and values is not None:
        return quantized_attention_request(
            q,
            keys,
            values,
            scale=scale,
            bits=bits,
            group_size=group_size,
            v_bits=v_bits,
            mask=mask,
            sinks=sinks,
            sparse_v_threshold=sparse_v_threshold,
            return_lse=True,
            stream=stream,
            op=op,
        )
    if keys is not None or values is not None:
        packed, dense = ("keys", "values") if values is None else ("values", "keys")
        raise ValueError(f"[{op}] {packed} are packed and {dense} are not, expected both or none.")
    if arguments.number(op, "sparse_v_threshold", sparse_v_threshold) != 0:
        raise ValueError(
            f"[{op}] sparse_v_threshold is {sparse_v_threshold}, "
            "expected 0 for keys and values that are not packed."
        )
    return attention_request(
        q,
        arguments.array(op, "keys", k),
        arguments.array(op, "values", v),
        scale=scale,
        mask=mask,
        sinks=sinks,
        return_lse=True,
        stream=stream,
        op=op,
    )


def _packed(name: str, rows: mx.array | Packed) -> tuple[mx.array, mx.array, mx.array] | None:
    """The three arrays of packed rows; None of an array."""
    if not isinstance(rows, (tuple, list)):
        return None
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
