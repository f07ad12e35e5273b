"""What the operations refuse, word for word where a person will read it."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

from mlx_h2o import fast

OP = "scaled_dot_product_attention_with_scores"
Q, K, V = (1, 4, 2, 32), (1, 2, 5, 32), (1, 2, 5, 24)


def attend(q=Q, k=K, v=V, *, dtypes=(mx.float32,) * 3, scale=0.5, **more):
    arrays = [
        mx.zeros(shape, dtype) if isinstance(shape, tuple) else shape
        for shape, dtype in zip((q, k, v), dtypes, strict=True)
    ]
    return fast.scaled_dot_product_attention_with_scores(*arrays, scale=scale, **more)


FREE = "every size at least 1"
OF_HEADS = "[B, Hkv, N, D] = (1, Hkv, N, 32), every size at least 1, Hkv a divisor of Hq = "
OF_VALUES = f"expected float32 [B, Hkv, N, Dv] = (1, 2, 5, Dv), {FREE}"
SHAPES = {
    "queries are float32 (4, 2, 32), expected float32, float16 or bfloat16 [B, Hq, Lq, D], "
    f"{FREE}.": {"q": (4, 2, 32)},
    "keys are float32 (1, 1, 2, 5, 32), expected float32 " + f"{OF_HEADS}4.": {
        "k": (1, 1, 2, 5, 32)
    },
    "values are float32 (24,), expected float32 [B, Hkv, N, Dv] = (1, 2, 5, Dv), " + f"{FREE}.": {
        "v": (24,)
    },
    "queries are float32 (1, 4, 0, 32), expected float32, float16 or bfloat16 [B, Hq, Lq, D], "
    f"{FREE}.": {"q": (1, 4, 0, 32)},
    f"keys are float32 (1, 2, 0, 32), expected float32 {OF_HEADS}4.": {
        "k": (1, 2, 0, 32),
        "v": (1, 2, 0, 24),
    },
    "queries are float32 (0, 4, 2, 32), expected float32, float16 or bfloat16 [B, Hq, Lq, D], "
    f"{FREE}.": {"q": (0, 4, 2, 32), "k": (0, 2, 5, 32), "v": (0, 2, 5, 24)},
    f"values are float32 (1, 2, 5, 0), expected float32 [B, Hkv, N, Dv] = (1, 2, 5, Dv), {FREE}.": {
        "v": (1, 2, 5, 0)
    },
    "keys are float32 (1, 2, 5, 32), expected float32 [B, Hkv, N, D] = (2, Hkv, N, 32), "
    f"{FREE}, Hkv a divisor of Hq = 4.": {"q": (2, 4, 2, 32)},
    f"values are float32 (3, 2, 5, 24), {OF_VALUES}.": {"v": (3, 2, 5, 24)},
    "keys are float32 (1, 2, 5, 32), expected float32 [B, Hkv, N, D] = (1, Hkv, N, 16), "
    f"{FREE}, Hkv a divisor of Hq = 4.": {"q": (1, 4, 2, 16)},
    f"values are float32 (1, 1, 5, 24), {OF_VALUES}.": {"v": (1, 1, 5, 24)},
    f"values are float32 (1, 2, 6, 24), {OF_VALUES}.": {"v": (1, 2, 6, 24)},
    f"keys are float32 (1, 2, 5, 32), expected float32 {OF_HEADS}3.": {"q": (1, 3, 2, 32)},
    f"keys are float32 (1, 2, 5, 32), expected float32 {OF_HEADS}1.": {"q": (1, 1, 2, 32)},
}


@pytest.mark.parametrize(("text", "shapes"), SHAPES.items())
def test_shapes(text: str, shapes: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(ValueError) as caught:
        attend(**shapes)
    assert str(caught.value) == f"[{OP}] {text}"


@pytest.mark.parametrize("dtype", [mx.int32, mx.uint32, mx.bool_, mx.complex64])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_dtypes_that_are_not_served(dtype: mx.Dtype, place: int) -> None:
    dtypes = [mx.float32] * 3
    dtypes[place] = dtype
    name, found = ("queries", "keys", "values")[place], str(dtype).removeprefix("mlx.core.")
    with pytest.raises(ValueError) as caught:
        attend(dtypes=dtypes)
    expected = "float32, float16 or bfloat16" if place == 0 else "float32"
    assert str(caught.value).startswith(f"[{OP}] {name} are {found} (")
    assert f"), expected {expected} [B, H" in str(caught.value)


def test_dtypes_that_differ() -> None:
    with pytest.raises(ValueError) as caught:
        attend(dtypes=(mx.float32, mx.float16, mx.float16))
    assert str(caught.value) == (
        f"[{OP}] keys are float16 (1, 2, 5, 32), expected float32 {OF_HEADS}4."
    )


@pytest.mark.parametrize("shape", [(6,), (3, 5), (3, 2, 5), (2, 1, 1, 5), (1, 1, 4, 2, 5), (5, 2)])
@pytest.mark.parametrize("dtype", [mx.bool_, mx.float32])
def test_mask_that_does_not_broadcast(shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    with pytest.raises(ValueError) as caught:
        attend(mask=mx.zeros(shape, dtype))
    assert str(caught.value) == (
        f"[{OP}] mask is {str(dtype).removeprefix('mlx.core.')} {shape}, expected bool, float32, "
        "float16 or bfloat16 that broadcasts to [B, Hq, Lq, N] = (1, 4, 2, 5)."
    )


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 5), (4, 1, 1), (1, 4, 2, 5)])
def test_masks_that_broadcast(shape: tuple[int, ...]) -> None:
    _, scores = attend(mask=mx.ones(shape, mx.bool_))
    assert scores.shape == (1, 4, 2, 5)


def test_mask_of_another_kind() -> None:
    with pytest.raises(ValueError) as caught:
        attend(mask=mx.zeros((5,), mx.int32))
    assert str(caught.value) == (
        f"[{OP}] mask is int32 (5,), expected bool, float32, float16 or bfloat16 that broadcasts "
        "to [B, Hq, Lq, N] = (1, 4, 2, 5)."
    )
    for word in ("", "Causal", "array"):
        with pytest.raises(ValueError, match="expected 'causal', an array or None"):
            attend(mask=word)
    for other in (True, 0, np.ones(5, bool), [True] * 5):
        with pytest.raises(TypeError, match="mask must be an mlx.core.array"):
            attend(mask=other)


def test_sinks() -> None:
    for shape in ((3,), (4, 1), (), (1, 4)):
        with pytest.raises(ValueError) as caught:
            attend(sinks=mx.zeros(shape))
        assert str(caught.value) == (
            f"[{OP}] sinks are float32 {shape}, expected float32, float16 or bfloat16 [Hq] = (4,)."
        )
    with pytest.raises(ValueError, match=r"sinks are int32 \(4,\), expected float32, float16 or"):
        attend(sinks=mx.zeros((4,), mx.int32))
    with pytest.raises(TypeError, match="sinks must be an mlx.core.array, found list"):
        attend(sinks=[0.0] * 4)


def test_row_bias() -> None:
    for shape in ((1, 4, 5), (2, 2, 5), (1, 2, 6), (1, 2, 4), (2, 5), (1, 2, 1, 5), ()):
        with pytest.raises(ValueError) as caught:
            attend(row_bias=mx.zeros(shape))
        assert str(caught.value) == (
            f"[{OP}] row_bias is float32 {shape}, expected float32 [B, Hkv, N] = (1, 2, 5)."
        )
    with pytest.raises(ValueError, match=r"row_bias is float16 \(1, 2, 5\), expected float32"):
        attend(row_bias=mx.zeros((1, 2, 5), mx.float16))
    with pytest.raises(TypeError, match="row_bias must be an mlx.core.array, found ndarray"):
        attend(row_bias=np.zeros((1, 2, 5), np.float32))


def test_row_bias_of_other_operations() -> None:
    q, rows, wrong = mx.zeros((1, 4, 1, 64)), mx.zeros((1, 2, 5, 64)), mx.zeros((1, 4, 5))
    packed = mx.quantize(rows, bits=8)
    calls = {
        "scaled_dot_product_attention_quantized_with_scores": (q, *packed, *packed),
        "attention_and_accumulate": (q, rows, rows, mx.zeros((1, 2, 5))),
    }
    for op, given in calls.items():
        more = {"decay": 0.9} if op == "attention_and_accumulate" else {}
        with pytest.raises(ValueError) as caught:
            getattr(fast, op)(*given, scale=1.0, row_bias=wrong, **more)
        assert str(caught.value) == (
            f"[{op}] row_bias is float32 (1, 4, 5), expected float32 [B, Hkv, N] = (1, 2, 5)."
        )


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, 1e39, 10**400, np.float32("nan")])
def test_scale_that_is_not_finite(scale: float) -> None:
    with pytest.raises(ValueError, match=rf"^\[{OP}\] scale is -?(nan|inf|1e\+39), expected a fin"):
        attend(scale=scale)


@pytest.mark.parametrize("scale", [None, "1", True, 1j, mx.array(1.0), np.ones(1)])
def test_scale_that_is_not_a_number(scale: object) -> None:
    with pytest.raises(TypeError, match=rf"^\[{OP}\] scale must be a number, found"):
        attend(scale=scale)


@pytest.mark.parametrize("other", [np.zeros(Q, np.float32), [[1.0]], 1.0, None, "q"])
@pytest.mark.parametrize("place", ["q", "k", "v"])
def test_what_is_not_an_array(place: str, other: object) -> None:
    name = {"q": "queries", "k": "keys", "v": "values"}[place]
    with pytest.raises(TypeError) as caught:
        attend(**{place: [other] if isinstance(other, tuple) else other})
    assert str(caught.value) == (
        f"[{OP}] {name} must be an mlx.core.array, found {type(other).__name__}."
    )


@pytest.mark.parametrize("stream", ["cpu", 0, True])
def test_stream_of_another_kind(stream: object) -> None:
    with pytest.raises(TypeError, match=rf"^\[{OP}\] stream must be None, an mlx.core.Stream"):
        attend(stream=stream)


# Selection

ROWS = (1, 2, 6)


def select(scores=ROWS, positions=ROWS, *, dtypes=(mx.float32, mx.int32), **more):
    arrays = [
        mx.zeros(shape, dtype) if isinstance(shape, tuple) else shape
        for shape, dtype in zip((scores, positions), dtypes, strict=True)
    ]
    return fast.keep_indices(*arrays, **more)


def test_selection_of_wrong_rows() -> None:
    cases = {
        f"scores are float32 (2, 6), expected float32 [B, H, N], {FREE}.": {"scores": (2, 6)},
        "positions are int32 (1, 1, 2, 6), expected int32 [B, H, N] = (1, 2, 6).": {
            "positions": (1, 1, 2, 6)
        },
        "positions are int32 (1, 2, 7), expected int32 [B, H, N] = (1, 2, 6).": {
            "positions": (1, 2, 7)
        },
        f"scores are float32 (1, 2, 0), expected float32 [B, H, N], {FREE}.": {
            "scores": (1, 2, 0),
            "positions": (1, 2, 0),
        },
        f"scores are float16 (1, 2, 6), expected float32 [B, H, N], {FREE}.": {
            "dtypes": (mx.float16, mx.int32)
        },
        "positions are uint32 (1, 2, 6), expected int32 [B, H, N] = (1, 2, 6).": {
            "dtypes": (mx.float32, mx.uint32)
        },
    }
    for text, wrong in cases.items():
        with pytest.raises(ValueError) as caught:
            select(**wrong, keep=1)
        assert str(caught.value) == f"[keep_indices] {text}"
    with pytest.raises(TypeError, match="scores must be an mlx.core.array, found ndarray"):
        select(scores=np.zeros(ROWS, np.float32), keep=1)


def test_selection_of_wrong_counts() -> None:
    for wrong in (0, -1, 7, 10**30):
        with pytest.raises(ValueError) as caught:
            select(keep=wrong)
        assert str(caught.value) == (
            f"[keep_indices] keep is {wrong}, expected at least 1 and at most N = 6."
        )
    for other in (1.0, None, True, "1"):
        with pytest.raises(TypeError, match=r"^\[keep_indices\] keep must be an integer, found"):
            select(keep=other)


def test_selection_of_wrong_zones() -> None:
    with pytest.raises(ValueError) as caught:
        select(keep=1, sink_size=-1)
    assert str(caught.value) == "[keep_indices] sink_size is -1, expected at least 0."
    with pytest.raises(TypeError, match="sink_size must be an integer, found float"):
        select(keep=1, sink_size=4.0)
    with pytest.raises(TypeError, match="recent_start must be an integer, found str"):
        select(keep=1, recent_start="3")
    with pytest.raises(TypeError, match="stream must be None"):
        select(keep=1, stream="gpu")


@pytest.mark.parametrize("far", [2**31, 2**40, 10**30])
def test_zones_beyond_every_position(far: int) -> None:
    positions = mx.broadcast_to(mx.arange(6, dtype=mx.int32), ROWS)
    scores = mx.broadcast_to(mx.arange(6, dtype=mx.float32), ROWS)
    kept = fast.keep_indices(scores, positions, keep=2, recent_start=far)
    assert kept.tolist() == [[[4, 5], [4, 5]]]
    kept = fast.keep_indices(scores, positions, keep=2, recent_start=-far)
    assert kept.tolist() == [[[0, 1], [0, 1]]]
    kept = fast.keep_indices(scores, positions, keep=2, sink_size=far)
    assert kept.tolist() == [[[0, 1], [0, 1]]]
