"""The C operations on packed rows, probes and the rows of a cache: results."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import c_api
import c_api_operations as operations
from c_api import CError, Library
from c_api_headers import ROOT
from golden.build import Case
from mlx_h2o import fast, use_backend
from mlx_h2o.operations import folding
from mlx_h2o.operations.backends import resolve
from parity import judge
from parity.c_leg import FOLLOWED
from parity.decode_cases import decode_cases
from parity.fold_cases import fold_cases
from parity.operations import FUNCTIONS
from parity.outcome import Outcome
from parity.row_cases import row_cases

BACKENDS = ("composed", "native")
SELECTION = {"mlx_h2o_keep_indices", "mlx_h2o_evict_indices"}


@pytest.fixture(scope="module")
def library() -> Library:
    return c_api.required()


def named(library: Library, backend: str):
    """Name a back end of this build; one that it lacks skips the test, or fails it in CI."""
    available, reason = library.backend_status(backend)
    if not available:
        c_api.missing(reason)
    return library.using(backend)


@functools.cache
def served() -> tuple[Case, ...]:
    drawn = itertools.chain(row_cases(1), fold_cases(1), decode_cases(1))
    return tuple(case for case in drawn if case.fields["op"] in operations.RUN)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", operations.RUN)
def test_cases_against_the_reference(library: Library, backend: str, op: str) -> None:
    cases = [case for case in served() if case.fields["op"] == op]
    assert len(cases) >= 8
    with named(library, backend):
        for case in cases:
            found = operations.run_case(library, case.fields, case.tensors)
            verdict = judge.judge(case, Outcome(found))
            assert verdict.ok, f"{case.name}: {verdict.note}"


@functools.cache
def declared() -> frozenset[str]:
    """The functions of the headers that are operations."""
    folder = ROOT / "mlx-c" / "h2o" / "include" / "mlx_h2o" / "c"
    texts = [(folder / f"{name}.h").read_text() for name in ("attention", "rows", "selection")]
    return frozenset(re.findall(r"^int (mlx_h2o_\w+)\(", "\n".join(texts), re.M))


def test_swift_and_both_parity_legs_have_every_operation() -> None:
    """An operation of C that Swift does not call, or that a leg leaves out, fails here."""
    folder = ROOT / "swift" / "Sources"
    swift = "\n".join(path.read_text() for path in (folder / "MLXH2O").glob("*.swift"))
    assert {name for name in declared() if f"{name}(" not in swift} <= SELECTION
    assert all(re.search(rf"select\({name},", swift) for name in SELECTION)
    parity_main = (folder / "mlx-h2o-parity" / "main.swift").read_text()
    for op in FUNCTIONS:
        if op != "without_scores":  # no public call asks for it
            assert op in (*operations.RUN, *FOLLOWED) and f'"{op}": run' in parity_main, op


@pytest.mark.slow
def test_every_operation_has_a_parity_case(library: Library, monkeypatch) -> None:
    """A function that is declared, and that no case of the C legs calls, fails here."""
    assert len(declared()) >= 11
    called: set[str] = set()

    class Noting:
        def __getattr__(self, name: str) -> Any:
            called.add(name)
            return getattr(real, name)

    real = library.c
    monkeypatch.setattr(library, "c", Noting())
    firsts = {case.fields["op"]: case for case in served()}
    for case in firsts.values():
        operations.run_case(library, case.fields, case.tensors)
    # Served by other cases: golden ones, and traces.
    elsewhere = {
        "mlx_h2o_scaled_dot_product_attention_with_scores",
        "mlx_h2o_key_diversity",
        "mlx_h2o_attention_and_accumulate",
    } | SELECTION
    assert declared() - called == elsewhere


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", [None, "causal", "array"])
def test_attention_and_accumulate_is_one_after_the_other(
    library: Library, backend: str, mask: str | None
) -> None:
    q, k, v = (
        library.array(normal(i, *s)) for i, s in enumerate([(2, 4, 3, 40)] + [(2, 2, 9, 40)] * 2)
    )
    before = normal(4, 2, 2, 9)
    before[..., ::2] = np.nan
    importance = library.array(np.abs(before))
    given = library.array(normal(5, 3, 9) > 0) if mask == "array" else mask
    with named(library, backend):
        attended = library.attention(q, k, v, scale=0.2, mask=given)
        expected = operations.accumulate_scores(library, importance, attended["scores"], decay=0.9)
        found = operations.attention_and_accumulate(
            library, q, k, v, importance, scale=0.2, decay=0.9, mask=given
        )
        near = {"rtol": 1e-5, "atol": 1e-6}
        out, old = library.numpy(found["out"]), library.numpy(attended["out"])
        assert np.allclose(out, old, **near)
        importance = library.numpy(found["importance"])
        assert np.allclose(importance, library.numpy(expected), equal_nan=True, **near)


@pytest.mark.parametrize("backend", BACKENDS)
def test_key_diversity_is_that_of_the_python_package(library: Library, backend: str) -> None:
    keys = normal(0, 2, 3, 50, 24)
    keys[0, 0, 3] = 0
    with named(library, backend), use_backend(backend):
        found = library.numpy(operations.key_diversity(library, library.array(keys)))
        expected = np.array(fast.key_diversity(mx.array(keys)))
    assert np.allclose(found, expected, atol=1e-6) and found[0, 0, 3] == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ranks", [None, "age", "key_diversity"])
def test_packed_rows_are_replaced_where_they_lie(
    library: Library, backend: str, ranks: str | None
) -> None:
    dense = [mx.array(normal(i, 2, 2, 20, d)) for i, d in enumerate((64, 32))]
    new = [mx.array(normal(i + 4, 2, 2, 1, d)) for i, d in enumerate((64, 32))]
    importance = np.abs(normal(9, 2, 2, 20))
    positions = np.stack([np.random.default_rng(i).permutation(40)[:20] for i in range(4)])
    positions = positions.reshape(2, 2, 20).astype(np.int32)
    bits = {"bits": 8, "v_bits": 4, "group_size": 32}
    stored = [
        mx.quantize(rows, bits=b, group_size=32) for rows, b in zip(dense, (8, 4), strict=True)
    ]
    fresh = [mx.quantize(rows, bits=b, group_size=32) for rows, b in zip(new, (8, 4), strict=True)]
    zones = {"sink_size": 2, "recent_start": 36}
    with named(library, backend):
        rows = [tuple(map(library.array, side)) for side in stored]
        per_row = library.array(importance), library.array(positions, "int32")
        by: Any = importance
        if ranks == "age":
            by = (positions - 50).astype(np.float32)
        elif ranks == "key_diversity":
            dequantized = np.array(mx.dequantize(*stored[0], bits=8, group_size=32))
            by = library.numpy(operations.key_diversity(library, library.array(dequantized)))
        worst = library.numpy(library.select("evict", library.array(by), per_row[1], 1, **zones))
        found = operations.replace_worst(
            library, *rows, *per_row, *map(library.array, new), position=50, ranks=ranks,
            **zones, **bits,
        )  # fmt: skip
        for name, side, row in zip(("keys", "values"), stored, fresh, strict=True):
            for part, old, one in zip(found[name], side, row, strict=True):
                expected = np.array(old).copy()
                for at in np.ndindex(2, 2):
                    expected[(*at, worst[at][0])] = np.array(one)[at][0]
                assert np.array_equal(library.numpy(part), expected)
        expected = positions.copy()
        np.put_along_axis(expected, worst.astype(np.int64), 50, axis=2)
        assert np.array_equal(library.numpy(found["positions"]), expected)
        scores = library.numpy(found["importance"])
        assert np.isnan(np.take_along_axis(scores, worst.astype(np.int64), axis=2)).all()
        assert np.isnan(scores).sum() == 4


def test_a_result_may_take_the_place_of_its_input(library: Library) -> None:
    """Written in place: the buffer of the keys stays where it is over many replacements."""
    with named(library, "native"):
        places = [library.array(normal(i, 1, 2, 64, 32)) for i in range(2)]
        keys, values = (operations.vector(library, rows) for rows in places)
        importance = library.array(np.abs(normal(3, 1, 2, 64)))
        positions = library.array(np.tile(np.arange(64), (1, 2, 1)), "int32")
        del places
        addresses = set()
        for position in range(64, 90):
            row = library.array(normal(position, 1, 2, 1, 32))
            place = library.of_sequences(position)
            status = library.c.mlx_h2o_replace_worst(
                keys.pointer, values.pointer, importance.pointer, positions.pointer, keys.value,
                values.value, importance.value, positions.value, row.value, row.value,
                place.value, 0, library.nothing, b"age", library.nothing, 8, 64,
                operations.optional(library, None), library.stream.value,
            )  # fmt: skip
            library.check(status)
            (item,) = operations.items(library, keys)
            library.check(library.c.mlx_array_eval(item.value))
            addresses.add(
                int(library.ffi.cast("intptr_t", library.c.mlx_array_data_float32(item.value)))
            )
        assert len(addresses) == 1
        kept = sorted(library.numpy(positions)[0, 0].tolist())
        assert kept == list(range(26, 90))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("keep", [1, 1090])
def test_folded_rows_are_those_of_the_python_package(
    library: Library, backend: str, keep: int
) -> None:
    rng = np.random.default_rng(3)
    keys, values = normal(1, 1, 2, 1100, 16), normal(2, 1, 2, 1100, 8)
    bias, mass, weights = (rng.random((3, 1, 2, 1100)) + 0.1).astype(np.float32)
    slots = rng.permuted(np.broadcast_to(np.arange(1100), (1, 2, 1100)), axis=2)
    kept = np.sort(slots[:, :, :keep], axis=2).astype(np.uint32)
    given = keys, values, bias, mass, weights, bias > 0.2, kept
    with named(library, backend), use_backend(backend):
        found = operations.fold(library, *map(library.array, given))
        expected = resolve().function(folding.fold)(*map(mx.array, given))
        for made, wanted in zip(found.values(), expected, strict=True):
            np.testing.assert_array_equal(library.numpy(made), np.array(wanted))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("packed", [False, True])
def test_a_step_of_two_sequences_is_that_of_the_python_package(
    library: Library, backend: str, packed: bool
) -> None:
    """A step of a full cache, in which each sequence has a clock of its own."""
    q = mx.array(normal(0, 2, 4, 1, 64))
    rows: list[Any] = [mx.array(normal(i, 2, 2, 30, 64)) for i in (1, 2)]
    if packed:
        rows = [tuple(mx.quantize(side, bits=8, group_size=32)) for side in rows]
    new = [mx.array(normal(i, 2, 2, 1, 64)) for i in (3, 4)]
    importance = mx.array(np.abs(normal(5, 2, 2, 30)))
    order = [np.random.default_rng(i).permutation(30) for i in range(4)]
    positions = mx.array(np.stack(order).reshape(2, 2, 30)).astype(mx.int32)
    bits = {"bits": 8, "group_size": 32}
    clocks = {"position": mx.array([30, 41]), "recent_start": mx.array([26, 5])}
    averaged = {"scale": 0.125, "decay": 0.9} | bits
    with use_backend("composed"):
        _, c = fast.attention_and_accumulate(q, *rows, importance, **averaged)
        expected = fast.replace_worst(*rows, c, positions, *new, sink_size=2, **clocks, **bits)
    with named(library, backend):
        h_rows, h_new = ([handles(library, each) for each in side] for side in (rows, new))
        h_q, h_i, h_p = (library.array(each) for each in (q, importance, positions))
        found = operations.attention_and_accumulate(library, h_q, *h_rows, h_i, **averaged)
        h_clocks = {name: library.array(each) for name, each in clocks.items()}
        replaced = operations.replace_worst(
            library, *h_rows, found["importance"], h_p, *h_new, sink_size=2, **h_clocks, **bits
        )
        sides = [rows_of if packed else (rows_of,) for rows_of in expected[:2]]
        pairs = [
            *((replaced["keys"], sides[0]), (replaced["values"], sides[1])),
            ([replaced[name] for name in ("importance", "positions")], expected[2:]),
        ]
        for made, wanted in pairs:
            for one, other in zip(made, wanted, strict=True):
                assert np.allclose(
                    library.numpy(one), np.array(other), rtol=1e-5, atol=1e-5, equal_nan=True
                )


def handles(library: Library, rows: Any) -> Any:
    if isinstance(rows, tuple):
        return tuple(library.array(part) for part in rows)
    return library.array(rows)


def test_threads_are_set_for_the_process(library: Library) -> None:
    found = library.ffi.new("int*")
    library.check(library.c.mlx_h2o_set_threads(3))
    library.check(library.c.mlx_h2o_threads(found))
    assert found[0] == 3
    library.check(library.c.mlx_h2o_set_threads(0))
    library.check(library.c.mlx_h2o_threads(found))
    assert found[0] >= 1
    with pytest.raises(CError, match=r"^\[set_threads\] .* 257"):
        library.check(library.c.mlx_h2o_set_threads(257))
    with pytest.raises(CError, match=r"^\[threads\] res is NULL"):
        library.check(library.c.mlx_h2o_threads(library.ffi.NULL))
