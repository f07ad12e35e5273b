"""What the operations on a cache's rows refuse, and that the native module refuses it alike."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_h2o import fast
from mlx_h2o.operations import native

ROWS = (1, 2, 5)


def replace(**given):
    arrays = {
        "keys": mx.zeros((*ROWS, 8)),
        "values": mx.zeros((*ROWS, 4)),
        "importance": mx.zeros(ROWS),
        "positions": mx.zeros(ROWS, mx.int32),
        "new_keys": mx.zeros((1, 2, 1, 8)),
        "new_values": mx.zeros((1, 2, 1, 4)),
    }
    numbers = {"position": 5, **given}
    arrays.update((name, numbers.pop(name)) for name in list(numbers) if name in arrays)
    return fast.replace_worst(*arrays.values(), **numbers)


REPLACE = {
    "values are int32 (1, 2, 5, 4), expected float32": {"values": mx.zeros((*ROWS, 4), mx.int32)},
    "keys are float32 (2, 5, 8), expected": {"keys": mx.zeros((2, 5, 8))},
    "keys are float32 (1, 2, 0, 8), expected": {"keys": mx.zeros((1, 2, 0, 8))},
    "keys and values have shapes (1, 2, 5, 8) and (1, 2, 6, 4), expected the same [B, H, N].": {
        "values": mx.zeros((1, 2, 6, 4))
    },
    "importance are float16 (1, 2, 5), expected float32 [B, H, N] = (1, 2, 5).": {
        "importance": mx.zeros(ROWS, mx.float16)
    },
    "positions are int32 (1, 2, 4), expected int32 [B, H, N] = (1, 2, 5).": {
        "positions": mx.zeros((1, 2, 4), mx.int32)
    },
    "new keys are float32 (1, 2, 2, 8), expected float32 (1, 2, 1, 8) as the keys.": {
        "new_keys": mx.zeros((1, 2, 2, 8))
    },
    "new values are float16 (1, 2, 1, 4), expected float32 (1, 2, 1, 4) as the values.": {
        "new_values": mx.zeros((1, 2, 1, 4), mx.float16)
    },
    "position is -1, expected 0 to 2**30 - 1.": {"position": -1},
    "sink_size is -1, expected 0 or more.": {"sink_size": -1},
    "ranks are float32 (1, 2), expected float32 [B, H, N] = (1, 2, 5).": {
        "ranks": mx.zeros((1, 2))
    },
    "ranks are 'oldest', expected an array, None or one of": {"ranks": "oldest"},
}


@pytest.mark.parametrize("text", REPLACE)
def test_replace_worst_says_what_it_found_and_expected(text):
    with pytest.raises(ValueError) as caught:
        replace(**REPLACE[text])
    assert str(caught.value).startswith("[replace_worst] " + text)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"keys": [1.0]}, "keys must be an mlx.core.array, found list"),
        ({"importance": None}, "importance must be an mlx.core.array, found NoneType"),
        ({"ranks": 3}, "ranks must be an mlx.core.array, found int"),
        ({"position": 1.0}, "position must be an integer, found float"),
        ({"recent_start": "1"}, "recent_start must be an integer, found str"),
        ({"stream": "cpu"}, "stream must be None"),
    ],
)
def test_replace_worst_refuses_other_types(given, text):
    with pytest.raises(TypeError) as caught:
        replace(**given)
    assert str(caught.value).startswith("[replace_worst] " + text)


@pytest.mark.parametrize(
    ("importance", "scores", "decay", "text"),
    [
        (ROWS, (1, 4, 5), 0.9, "scores are float32 (1, 4, 5), expected float32 [B, Hq, Lq, N]"),
        (ROWS, (1, 4, 0, 5), 0.9, "scores are float32 (1, 4, 0, 5), expected"),
        (ROWS, (1, 3, 1, 5), 0.9, "scores have 3 heads, expected a multiple of the 2 heads"),
        (ROWS, (1, 4, 129, 5), 0.9, "found 129 queries, expected at most 128."),
        (ROWS, (1, 4, 1, 6), 0.9, "importance is float32 (1, 2, 5), expected float32 [B, H, N]"),
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
        ((1, 4, 1, 7), ROWS, "queries and keys have head sizes 7 and 8, expected the same."),
        ((1, 4, 129, 8), ROWS, "found 129 queries, expected at most 128."),
        ((1, 4, 1, 8), (1, 4, 5), "importance has 4 heads, expected 2 as the keys."),
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


@pytest.mark.skipif(bool(native.unavailable_reason()), reason="no native back end")
def test_the_native_module_refuses_on_its_own():
    """C and C++ callers come without Python's checks."""
    from mlx_h2o import _core

    k, v, c = mx.zeros((*ROWS, 8)), mx.zeros((*ROWS, 4)), mx.zeros(ROWS)
    p, nk, nv = mx.zeros(ROWS, mx.int32), mx.zeros((1, 2, 1, 8)), mx.zeros((1, 2, 1, 4))
    good = [[k], [v], c, p, nk, nv]
    mx.eval(_core.replace_worst(*good, position=5))
    for index, bad in enumerate([[v], [k[:, :1]], p, c, nv, nk]):
        arguments = [*good[:index], bad, *good[index + 1 :]]
        with pytest.raises(ValueError, match=r"^\[replace_worst\] .* expected "):
            _core.replace_worst(*arguments, position=5)
    for given in (
        {"position": mx.zeros((2,), mx.int32)},
        {"position": mx.zeros((1,))},
        {"position": 5, "recent_start": mx.zeros((1, 1), mx.int32)},
        {"position": 5, "sink_size": -1},
        {"position": 5, "ranked_by": "array"},
        {"position": 5, "ranks": c},
        {"position": 5, "ranked_by": "oldest"},
        {"position": 5, "ranked_by": "array", "ranks": p},
        {"position": 5, "bits": 7},
        {"position": 5, "group_size": 48},
    ):
        with pytest.raises(ValueError, match=r"^\[replace_worst\] .* expected "):
            _core.replace_worst(*good, **given)
    for scores, decay in (((1, 3, 1, 5), 0.9), ((1, 4, 5), 0.9), ((1, 4, 1, 5), 1.5)):
        with pytest.raises(ValueError, match=r"^\[accumulate_scores\] .* expected "):
            _core.accumulate_scores(c, mx.zeros(scores), decay=decay)
    with pytest.raises(ValueError, match=r"^\[attention_and_accumulate\] .* expected "):
        _core.attention_and_accumulate(nk, k, v, mx.zeros((1, 1, 5)), scale=1.0, decay=0.9)
    with pytest.raises(ValueError, match=r"^\[key_diversity\] .* expected "):
        _core.key_diversity(p)
