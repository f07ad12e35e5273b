"""What the C operations on packed rows and on the rows of a cache refuse: Python's own words."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

import c_api_operations as operations
from c_api import CError, Library
from mlx_h2o import fast

Q, ROWS = (1, 4, 2, 64), (1, 2, 5, 64)


def zeros(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.zeros(shape, dtype)


def pack(*shape: int, bits: int = 8, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, ...]:
    return tuple(mx.quantize(mx.zeros(shape, dtype), bits=bits, group_size=64))


def codes(bits: int) -> tuple[mx.array, ...]:
    """Words and norms of so many bits."""
    return zeros(1, 2, 5, 2 * bits, dtype=mx.uint32), zeros(1, 2, 5, 1)


def quantized_call(**changes: Any) -> dict[str, Any]:
    given = {"q": zeros(*Q), "k": pack(*ROWS), "v": pack(*ROWS), "scale": 1.0}
    return given | changes


WRONG_QUANTIZED: dict[str, dict[str, Any]] = {
    "three dimensions": {"q": zeros(4, 2, 64)},
    "no queries": {"q": zeros(1, 4, 0, 64)},
    "integer queries": {"q": zeros(*Q, dtype=mx.int32)},
    "bits": {"bits": 7},
    "value bits": {"v_bits": 16},
    "group size": {"group_size": 48},
    "other bits": {"bits": 4},
    "a group that does not divide": {"group_size": 128},
    "words of another dtype": {"k": (zeros(1, 2, 5, 16), *pack(*ROWS)[1:])},
    "scales of two dtypes": {"v": (*pack(*ROWS)[:2], zeros(1, 2, 5, 1, dtype=mx.float16))},
    "integer scales": {"k": (pack(*ROWS)[0], *[zeros(1, 2, 5, 1, dtype=mx.int32)] * 2)},
    "flat words": {"k": (zeros(5, 16, dtype=mx.uint32), *pack(*ROWS)[1:])},
    "no rows": {"k": tuple(part[:, :, :0] for part in pack(*ROWS))},
    "scales of other rows": {"v": (pack(*ROWS)[0], *[zeros(1, 2, 6, 1)] * 2)},
    "batches": {"q": zeros(2, 4, 2, 64)},
    "head sizes": {"q": zeros(1, 4, 2, 128)},
    "heads of k and v": {"v": pack(1, 1, 5, 64)},
    "lengths of k and v": {"v": pack(1, 2, 6, 64)},
    "head ratio": {"q": zeros(1, 3, 2, 64)},
    "scales of k and v": {"v": pack(*ROWS, dtype=mx.float16)},
    "infinite scale": {"scale": math.inf},
    "threshold of one": {"sparse_v_threshold": 1.0},
    "negative threshold": {"sparse_v_threshold": -0.5},
    "threshold that is not a number": {"sparse_v_threshold": math.nan},
    "mask of another length": {"mask": zeros(2, 6)},
    "sinks of other heads": {"sinks": zeros(3)},
    "row bias of query heads": {"row_bias": zeros(1, 4, 5)},
}


def same_words(python: Callable[[], object], c: Callable[[], object]) -> str:
    with pytest.raises(ValueError) as expected:
        python()
    with pytest.raises(CError) as found:
        c()
    assert str(found.value) == str(expected.value)
    return str(found.value)


def handles(library: Library, argument: Any) -> Any:
    if isinstance(argument, tuple):
        return tuple(handles(library, each) for each in argument)
    return library.array(argument) if isinstance(argument, mx.array) else argument


@pytest.mark.parametrize("wrong", WRONG_QUANTIZED.values(), ids=WRONG_QUANTIZED)
def test_quantized_attention_refuses_with_the_words_of_the_python_package(
    library: Library, wrong: dict[str, Any]
) -> None:
    given = quantized_call(**wrong)
    q, k, v = (given.pop(name) for name in "qkv")
    same_words(
        lambda: fast.scaled_dot_product_attention_quantized_with_scores(q, *k, *v, **given),
        lambda: operations.quantized_attention(
            library, *handles(library, (q, k, v)),
            **{name: handles(library, value) for name, value in given.items()},
        ),
    )  # fmt: skip


WRONG_ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "flat scores": ("accumulate_scores", {"scores": zeros(4, 1, 5)}),
    "half scores": ("accumulate_scores", {"scores": zeros(1, 4, 1, 5, dtype=mx.float16)}),
    "no scores": ("accumulate_scores", {"scores": zeros(1, 4, 0, 5)}),
    "scores of other rows": ("accumulate_scores", {"scores": zeros(1, 4, 1, 6)}),
    "scores of other heads": ("accumulate_scores", {"scores": zeros(1, 3, 1, 5)}),
    "too many queries": ("accumulate_scores", {"scores": zeros(1, 4, 129, 5)}),
    "a decay of one": ("accumulate_scores", {"decay": 1.0}),
    "a decay that is not a number": ("accumulate_scores", {"decay": math.nan}),
    "half importance": ("accumulate_scores", {"importance": zeros(1, 2, 5, dtype=mx.float16)}),
    "flat keys": ("key_diversity", {"keys": zeros(2, 5, 64)}),
    "integer keys": ("key_diversity", {"keys": zeros(*ROWS, dtype=mx.int32)}),
    "importance of others": ("attention_and_accumulate", {"importance": zeros(1, 3, 5)}),
    "row bias of other rows": ("attention_and_accumulate", {"row_bias": zeros(1, 2, 4)}),
    "integer row bias": (
        "attention_and_accumulate", {"row_bias": zeros(1, 2, 5, dtype=mx.int32)},
    ),
    "a threshold of dense rows": ("attention_and_accumulate", {"sparse_v_threshold": 0.5}),
    "append bits": ("quantize_append", {"bits": 1}),
    "append value bits": ("quantize_append", {"v_bits": 7}),
    "append group": ("quantize_append", {"group_size": 16}),
    "integer new rows": ("quantize_append", {"new_keys": zeros(1, 2, 3, 64, dtype=mx.int32)}),
    "new rows that differ": ("quantize_append", {"new_values": zeros(1, 2, 4, 64)}),
    "a width that no group divides": ("quantize_append", {"new_keys": zeros(1, 2, 3, 48)}),
    "other words": ("quantize_append", {"packed_keys": pack(*ROWS, bits=4)}),
    "other scales": ("quantize_append", {"packed_values": pack(*ROWS, dtype=mx.float16)}),
    "fewer values": ("quantize_append", {"packed_values": pack(1, 2, 4, 64)}),
    "codes of many bits": ("quantize_append", {"packed_keys": codes(5), "bits": 5}),
    "codes of other words": ("quantize_append", {"packed_values": codes(3), "bits": 4}),
    "norms of halves": (
        "quantize_append",
        {"packed_keys": (codes(3)[0], zeros(1, 2, 5, 1, dtype=mx.float16)), "bits": 3},
    ),
    "rows of another dtype": (
        "quantize_append", {"packed_keys": (zeros(*ROWS, dtype=mx.float16),)}
    ),
    "codes of rows of 48": (
        "quantize_append",
        {"packed_keys": codes(3), "new_keys": zeros(1, 2, 3, 48), "bits": 3},
    ),
    "integer slots": ("quantize_append", {"slots": zeros(1, 2, 3, dtype=mx.int32)}),
    "slots of other rows": ("quantize_append", {"slots": zeros(1, 2, 2, dtype=mx.uint32)}),
    "a kind": ("prefill_scores", {"kind": "max"}),
    "keys of another dtype": ("prefill_scores", {"keys": zeros(*ROWS, dtype=mx.float16)}),
    "integer chunk": ("prefill_scores", {"q": zeros(*Q, dtype=mx.int32)}),
    "a chunk of other heads": ("prefill_scores", {"q": zeros(1, 3, 2, 64)}),
    "no counted queries": ("prefill_scores", {"counted": 0}),
    "a decay below zero": ("prefill_scores", {"decay": -0.5}),
    "importance with mass": ("prefill_scores", {"kind": "mass", "importance": zeros(1, 2, 5)}),
    "importance of rows": ("prefill_scores", {"importance": zeros(1, 2, 6)}),
    "importance in half": ("prefill_scores", {"importance": zeros(1, 2, 5, dtype=mx.float16)}),
    "a mask of others": ("prefill_scores", {"mask": zeros(3, 5)}),
}  # fmt: skip

RIGHT: dict[str, dict[str, Any]] = {
    "accumulate_scores": {
        "importance": zeros(1, 2, 5), "scores": zeros(1, 4, 1, 5), "decay": 0.5,
    },
    "key_diversity": {"keys": zeros(*ROWS)},
    "attention_and_accumulate": {
        "q": zeros(*Q), "k": zeros(*ROWS), "v": zeros(*ROWS), "importance": zeros(1, 2, 5),
        "scale": 1.0, "decay": 0.5,
    },
    "quantize_append": {
        "packed_keys": pack(*ROWS), "packed_values": pack(*ROWS), "new_keys": zeros(1, 2, 3, 64),
        "new_values": zeros(1, 2, 3, 64), "slots": zeros(1, 2, 3, dtype=mx.uint32),
    },
    "prefill_scores": {"q": zeros(*Q), "keys": zeros(*ROWS), "scale": 1.0},
}  # fmt: skip


def split(given: dict[str, Any], keywords: set[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    more = {name: value for name, value in given.items() if name in keywords}
    return tuple(value for name, value in given.items() if name not in keywords), more


KEYWORDS = {"decay", "bits", "v_bits", "group_size", "scale",
            "kind", "counted", "mask", "sparse_v_threshold", "row_bias"}  # fmt: skip


@pytest.mark.parametrize(("op", "wrong"), WRONG_ROWS.values(), ids=WRONG_ROWS)
def test_row_operations_refuse_with_the_words_of_the_python_package(
    library: Library, op: str, wrong: dict[str, Any]
) -> None:
    more_of = {"prefill_scores": {"importance"}}
    keywords = KEYWORDS | more_of.get(op, set())
    arrays, more = split(RIGHT[op] | wrong, keywords)
    renamed = {"queries" if name == "counted" else name: value for name, value in more.items()}
    same_words(
        lambda: getattr(fast, op)(*arrays, **renamed),
        lambda: getattr(operations, op)(
            library, *handles(library, arrays),
            **{name: handles(library, value) for name, value in more.items()},
        ),
    )  # fmt: skip


@pytest.mark.parametrize("wrong", [mx.zeros((3,), mx.int32), mx.zeros((), mx.float32)])
def test_one_number_per_sequence(library: Library, wrong: mx.array) -> None:
    rows = [library.array(zeros(1, 2, 5, dtype=dtype)) for dtype in (mx.float32, mx.int32)]
    with pytest.raises(CError) as caught:
        library.keep_indices(*rows, 2, 0, library.array(wrong))
    found = f"{str(wrong.dtype).removeprefix('mlx.core.')} {wrong.shape}"
    assert str(caught.value) == (
        f"[keep_indices] recent_start is {found}, expected int32 () or [B] = (1,)."
    )


WRONG_FOLDS: dict[str, tuple[dict[str, Any], str]] = {
    "flat keys": (
        {"keys": zeros(2, 5, 64)},
        "keys are float32 (2, 5, 64), expected float32, float16 or bfloat16 [B, H, N, D], every "
        "size at least 1.",
    ),
    "values of other rows": (
        {"values": zeros(1, 2, 6, 64)},
        "values are float32 (1, 2, 6, 64), expected float32 [B, H, N, Dv] = (1, 2, 5, Dv), every "
        "size at least 1.",
    ),
    "values of another dtype": (
        {"values": zeros(*ROWS, dtype=mx.float16)},
        "values are float16 (1, 2, 5, 64), expected float32 [B, H, N, Dv] = (1, 2, 5, Dv), every "
        "size at least 1.",
    ),
    "half a bias": (
        {"bias": zeros(1, 2, 5, dtype=mx.float16)},
        "bias is float16 (1, 2, 5), expected float32 [B, H, N] = (1, 2, 5).",
    ),
    "masses of other rows": (
        {"mass": zeros(1, 2, 4)},
        "mass is float32 (1, 2, 4), expected float32 [B, H, N] = (1, 2, 5).",
    ),
    "numbers for eligible": (
        {"eligible": zeros(1, 2, 5)},
        "eligible is float32 (1, 2, 5), expected bool [B, H, N] = (1, 2, 5).",
    ),
    "all rows": (
        {"kept": zeros(1, 2, 5, dtype=mx.uint32)},
        "kept is uint32 (1, 2, 5), expected uint32 [B, H, K] = (1, 2, K), every size at least 1, K "
        "below N = 5.",
    ),
    "signed slots": (
        {"kept": zeros(1, 2, 4, dtype=mx.int32)},
        "kept is int32 (1, 2, 4), expected uint32 [B, H, K] = (1, 2, K), every size at least 1, K "
        "below N = 5.",
    ),
}


@pytest.mark.parametrize(("wrong", "text"), WRONG_FOLDS.values(), ids=WRONG_FOLDS)
def test_folds_are_refused(library: Library, wrong: dict[str, Any], text: str) -> None:
    right = {"keys": zeros(*ROWS), "values": zeros(*ROWS)}
    right |= {name: zeros(1, 2, 5) for name in ("bias", "mass", "weights")}
    right |= {"eligible": zeros(1, 2, 5) > 0, "kept": zeros(1, 2, 4, dtype=mx.uint32)}
    with pytest.raises(CError) as caught:
        operations.fold(library, *(handles(library, it) for it in (right | wrong).values()))
    assert str(caught.value) == f"[fold] {text}"


WITHOUT_CODES: dict[str, tuple[mx.array, int, str]] = {
    "rows of 48": (
        zeros(1, 2, 5, 48), 3,
        "rows have 48 elements, expected a power of two from 32 to 1024.",
    ),
    "5 bits": (
        zeros(*ROWS), 5,
        "bits is 5, expected one of (2, 3, 4).",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("rows", "bits", "text"), WITHOUT_CODES.values(), ids=WITHOUT_CODES)
def test_rows_without_codes_are_refused(
    library: Library, rows: mx.array, bits: int, text: str
) -> None:
    with pytest.raises(CError) as caught:
        operations.encode_rows(library, library.array(rows), bits=bits, of_values=False)
    assert str(caught.value) == f"[encode_rows] {text}"


def test_codes_that_do_not_fit_are_refused(library: Library) -> None:
    words, norms = (library.array(part) for part in codes(3))
    with pytest.raises(
        CError, match=r"^\[decode_rows\] rows have 6 words per row and codes of 4 bits"
    ):
        operations.decode_rows(library, words, norms, bits=4, of_values=True)


ERRORS = ("last_error", "keep_error")


def declared(library: Library) -> list[str]:
    return [name for name in dir(library.c) if name.startswith("mlx_h2o_")]


def nothing(library: Library, kind: Any) -> Any:
    """Zero, NULL or an empty handle of a C type."""
    ffi = library.ffi
    return ffi.NULL if kind.kind == "pointer" else ffi.new(ffi.getctype(kind, "*"))[0]


@pytest.mark.parametrize("places", [False, True])
def test_empty_arguments_are_refused_by_name(library: Library, places: bool) -> None:
    """With NULL in every place, and with places for the results and nothing else."""
    names = [
        name
        for name in declared(library)
        if not name.startswith(
            tuple(f"mlx_h2o_{word}" for word in ("config", "set", "backend", "threads", *ERRORS))
        )
    ]
    assert len(names) >= 10
    for name in names:
        function = getattr(library.c, name)
        kinds = library.ffi.typeof(function).args
        given = [nothing(library, kind) for kind in kinds]
        kept = []
        for index, kind in enumerate(kinds):
            if places and kind.kind == "pointer" and "mlx_" in kind.cname:
                kept.append(library.ffi.new(kind))
                given[index] = kept[-1]
        assert function(*given) == 1
        (text,) = library.messages
        library.messages.clear()
        assert text.startswith(f"[{name.removeprefix('mlx_h2o_')}] ")
        assert ("is NULL, expected a place" in text) != places
        assert not any(place[0].ctx for place in kept)
