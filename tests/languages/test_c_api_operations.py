"""The C operations on packed rows and the rows of a cache: results."""

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
from parity import judge
from parity.c_leg import FOLLOWED
from parity.decode_cases import decode_cases
from parity.fold_cases import fold_cases
from parity.operations import FUNCTIONS
from parity.outcome import Outcome
from parity.row_cases import row_cases


@functools.cache
def served() -> tuple[Case, ...]:
    drawn = itertools.chain(row_cases(1), fold_cases(1), decode_cases(1))
    return tuple(case for case in drawn if case.fields["op"] in operations.RUN)


@pytest.mark.slow
@pytest.mark.parametrize("backend", c_api.BACKENDS)
@pytest.mark.parametrize("op", operations.RUN)
def test_cases_against_the_reference(library: Library, backend: str, op: str) -> None:
    cases = [case for case in served() if case.fields["op"] == op]
    assert len(cases) >= 8
    with c_api.named(library, backend):
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
    assert all(f"{name}(" in swift for name in declared())
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
        "mlx_h2o_keep_indices",
    }
    assert declared() - called == elsewhere


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("backend", c_api.BACKENDS)
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
    with c_api.named(library, backend):
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


@pytest.mark.parametrize("backend", c_api.BACKENDS)
def test_key_diversity_is_that_of_the_python_package(library: Library, backend: str) -> None:
    keys = normal(0, 2, 3, 50, 24)
    keys[0, 0, 3] = 0
    with c_api.named(library, backend), use_backend(backend):
        found = library.numpy(operations.key_diversity(library, library.array(keys)))
        expected = np.array(fast.key_diversity(mx.array(keys)))
    assert np.allclose(found, expected, atol=1e-6) and found[0, 0, 3] == 0


def test_a_result_may_take_the_place_of_its_input(library: Library) -> None:
    """Written in place: the buffer of the keys stays where it is over many rows."""
    with c_api.named(library, "native"):
        places = [library.array(normal(i, 1, 2, 64, 32)) for i in range(2)]
        keys, values = (operations.vector(library, rows) for rows in places)
        del places
        addresses, written = set(), []
        for step in range(26):
            written.append(normal(step, 1, 2, 1, 32))
            row = library.array(written[-1])
            slots = library.array(np.full((1, 2, 1), step), "uint32")
            status = library.c.mlx_h2o_quantize_append(
                keys.pointer, values.pointer, keys.value, values.value, row.value, row.value,
                slots.value, 8, 64, operations.optional(library, None), library.stream.value,
            )  # fmt: skip
            library.check(status)
            (item,) = operations.items(library, keys)
            library.check(library.c.mlx_array_eval(item.value))
            addresses.add(
                int(library.ffi.cast("intptr_t", library.c.mlx_array_data_float32(item.value)))
            )
        assert len(addresses) == 1
        found = library.numpy(item)[:, :, :26]
        np.testing.assert_array_equal(found, np.concatenate(written, axis=2))


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
