"""What the operations on a cache's rows refuse, and that the native module refuses it alike."""

from __future__ import annotations

import mlx.core as mx
import pytest

from back_ends import NATIVE
from mlx_h2o import fast

ROWS = (1, 2, 5)


@pytest.mark.parametrize(
    ("importance", "scores", "decay", "text"),
    [
        (ROWS, (1, 4, 5), 0.9, "scores are float32 (1, 4, 5), expected float32 [B, Hq, Lq, N]"),
        (ROWS, (1, 4, 0, 5), 0.9, "scores are float32 (1, 4, 0, 5), expected"),
        (ROWS, (1, 3, 1, 5), 0.9, "scores are float32 (1, 3, 1, 5), expected"),
        (
            ROWS,
            (1, 4, 129, 5),
            0.9,
            "scores are float32 (1, 4, 129, 5), expected float32 [B, Hq, Lq, N] = (1, Hq, Lq, 5), "
            "every size at least 1, Hq a multiple of H = 2, Lq at most 128.",
        ),
        (ROWS, (1, 4, 1, 6), 0.9, "scores are float32 (1, 4, 1, 6), expected"),
        ((2, 5), (1, 4, 1, 5), 0.9, "importance is float32 (2, 5), expected"),
        ((1, 0, 5), (1, 4, 1, 5), 0.9, "importance is float32 (1, 0, 5), expected"),
        (ROWS, (1, 4, 1, 5), 1.0, "decay is 1.0, expected at least 0 and below 1."),
        (ROWS, (1, 4, 1, 5), float("nan"), "decay is nan, expected a finite number."),
    ],
)
def test_accumulate_scores_says_what_it_found_and_expected(importance, scores, decay, text):
    with pytest.raises(ValueError) as caught:
        fast.accumulate_scores(mx.zeros(importance), mx.zeros(scores), decay=decay)
    assert str(caught.value).startswith("[accumulate_scores] " + text)


@pytest.mark.parametrize(
    ("queries", "importance", "text"),
    [
        (
            (1, 4, 1, 7),
            ROWS,
            "keys are float32 (1, 2, 5, 8), expected float32 [B, Hkv, N, D] = (1, ",
        ),
        ((1, 4, 129, 8), ROWS, "queries are float32 (1, 4, 129, 8), expected"),
        (
            (1, 4, 1, 8),
            (1, 4, 5),
            "importance is float32 (1, 4, 5), expected float32 [B, Hkv, N] = ",
        ),
        ((1, 4, 1, 8), (1, 2, 6), "importance is float32 (1, 2, 6), expected"),
    ],
)
def test_attention_and_accumulate_says_what_it_found_and_expected(queries, importance, text):
    keys = mx.zeros((*ROWS, 8))
    with pytest.raises(ValueError) as caught:
        fast.attention_and_accumulate(
            mx.zeros(queries), keys, keys, mx.zeros(importance), scale=1.0, decay=0.9
        )
    assert str(caught.value).startswith("[attention_and_accumulate] " + text)


@pytest.mark.parametrize("keys", [mx.zeros((2, 3)), mx.zeros((1, 2, 0, 4)), mx.zeros((1,) * 4) > 0])
def test_key_diversity_says_what_it_found_and_expected(keys):
    with pytest.raises(ValueError, match=r"^\[key_diversity\] keys are .*, expected float32"):
        fast.key_diversity(keys)


@NATIVE
def test_the_native_module_refuses_on_its_own():
    """C and C++ callers come without Python's checks."""
    from mlx_h2o import _core

    k, v, c = mx.zeros((*ROWS, 8)), mx.zeros((*ROWS, 4)), mx.zeros(ROWS)
    p, q = mx.zeros(ROWS, mx.int32), mx.zeros((1, 2, 1, 8))
    for scores, decay in (((1, 3, 1, 5), 0.9), ((1, 4, 5), 0.9), ((1, 4, 1, 5), 1.5)):
        with pytest.raises(ValueError, match=r"^\[accumulate_scores\] .* expected "):
            _core.accumulate_scores(c, mx.zeros(scores), decay=decay)
    with pytest.raises(ValueError, match=r"^\[attention_and_accumulate\] .* expected "):
        _core.attention_and_accumulate(q, k, v, mx.zeros((1, 1, 5)), scale=1.0, decay=0.9)
    with pytest.raises(ValueError, match=r"^\[key_diversity\] .* expected "):
        _core.key_diversity(p)
