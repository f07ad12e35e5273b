"""The C operations on packed rows and on a cache's rows: results."""

import functools
import re
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import c_api
from c_api import CError, Library
from c_api_headers import ROOT
from golden.build import Case
from mlx_h2o import fast, use_backend
from parity.c_leg import failures
from parity.decode_cases import decode_cases
from parity.fold_cases import fold_cases
from parity.operations import FUNCTIONS
from parity.row_cases import row_cases
from parity.step_cases import step_cases


@functools.cache
def served() -> tuple[Case, ...]:
    """Drawn anew, of every operation but those of the golden cases."""
    families = (row_cases, fold_cases, decode_cases, step_cases)
    return tuple(case for family in families for case in family(1))


@pytest.mark.slow
@pytest.mark.parametrize("backend", c_api.BACKENDS)
def test_cases_against_the_reference(library: Library, backend: str) -> None:
    with c_api.named(library, backend):
        assert failures(library, served(), backend) == []


@functools.cache
def declared() -> frozenset[str]:
    """The functions of the headers that are operations."""
    folder = ROOT / "mlx-c" / "h2o" / "include" / "mlx_h2o" / "c"
    texts = [(folder / f"{name}.h").read_text() for name in ("attention", "rows", "selection")]
    return frozenset(re.findall(r"^int mlx_h2o_(\w+)\(", "\n".join(texts), re.M))


def test_swift_and_its_parity_leg_have_every_operation() -> None:
    """An operation of C that Swift does not call, or that its leg leaves out, fails here."""
    folder = ROOT / "swift" / "Sources"
    swift = "\n".join(path.read_text() for path in (folder / "MLXH2O").glob("*.swift"))
    assert all(f"mlx_h2o_{name}(" in swift for name in declared())
    parity_main = (folder / "mlx-h2o-parity" / "main.swift").read_text()
    assert [op for op in FUNCTIONS if f'"{op}": run' not in parity_main] == []


@pytest.mark.slow
def test_every_operation_has_a_parity_case(library: Library, monkeypatch) -> None:
    """A function that is declared, and that no case of the C legs calls, fails here."""
    assert len(declared()) >= 11
    called: set[str] = set()
    real = library.call
    monkeypatch.setattr(library, "call", lambda op, **given: (called.add(op), real(op, **given))[1])
    assert failures(library, {case.fields["op"]: case for case in served()}.values()) == []
    assert declared() - called == {"key_diversity"}  # in traces


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("backend", c_api.BACKENDS)
def test_results_are_those_of_the_python_package(library: Library, backend: str) -> None:
    """A key of zeros, and a chunk of which only the last queries count."""
    q, keys = mx.array(normal(1, 2, 6, 9, 24)), mx.array(normal(0, 2, 3, 50, 24))
    keys[0, 0, 3] = 0
    chunk: dict[str, Any] = {"scale": 0.2, "mask": "causal"}
    with c_api.named(library, backend), use_backend(backend):
        found = library.call("key_diversity", keys=keys)["res"]
        scored = library.call("prefill_scores", queries=q, keys=keys, counted_queries=4, **chunk)
        pairs = (
            (library.mlx(found), fast.key_diversity(keys)),
            (library.mlx(scored["res"]), fast.prefill_scores(q, keys, queries=4, **chunk)),
        )
        for one, other in pairs:
            assert mx.allclose(one, other, atol=1e-6)
    assert pairs[0][0][0, 0, 3] == 0


def test_a_result_may_take_the_place_of_its_input(library: Library) -> None:
    """Written in place: the buffer of the keys stays where it is over many rows."""
    with c_api.named(library, "native"):
        keys, values = (library.vector(library.array(normal(i, 1, 2, 64, 32))) for i in range(2))
        addresses, written = set(), []
        for step in range(26):
            written.append(normal(step, 1, 2, 1, 32))
            row = library.array(written[-1])
            slots = library.array(np.full((1, 2, 1), step), "uint32")
            v_bits = {"value": 0, "has_value": False}
            status = library.c.mlx_h2o_quantize_append(
                keys.pointer, values.pointer, keys.value, values.value, row.value, row.value,
                slots.value, 8, 64, v_bits, library.stream.value,
            )  # fmt: skip
            library.check(status)
            (item,) = library.items(keys)
            library.check(library.c.mlx_array_eval(item.value))
            addresses.add(
                int(library.ffi.cast("intptr_t", library.c.mlx_array_data_float32(item.value)))
            )
        assert len(addresses) == 1
        found = library.numpy(item)[:, :, :26]
        np.testing.assert_array_equal(found, np.concatenate(written, axis=2))


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
