"""The C interface: results, laziness, back ends, threads."""

import sys
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest

import c_api
from c_api import CError, Library
from golden.make import read
from parity.c_leg import failures
from paths import IMPORTS
from programs import ended


def inputs(seed: int = 0, *, batch=2, heads=(4, 2), queries=3, rows=37, sizes=(40, 24)):
    rng = np.random.default_rng(seed)
    shapes = (
        (batch, heads[0], queries, sizes[0]),
        (batch, heads[1], rows, sizes[0]),
        (batch, heads[1], rows, sizes[1]),
    )
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("backend", c_api.BACKENDS)
def test_golden_cases(library: Library, backend: str) -> None:
    with c_api.named(library, backend):
        assert failures(library, read(), backend) == []


def test_results_replace_what_their_handles_held(library: Library) -> None:
    arrays = [library.array(a) for a in inputs()]
    first = library.attention(*arrays, scale=1.0)
    place = first["out"].pointer
    arguments = (*(a.value for a in arrays), 0.5, b"", *[library.nothing] * 3)
    library.check(
        library.c.mlx_h2o_scaled_dot_product_attention_with_scores(
            place, first["scores"].pointer, library.ffi.NULL, *arguments, library.stream.value
        )
    )
    second = library.attention(*arrays, scale=0.5)
    assert np.array_equal(library.numpy(first["out"]), library.numpy(second["out"]))
    assert np.array_equal(library.numpy(first["scores"]), library.numpy(second["scores"]))


def test_nothing_is_computed_before_it_is_asked_for(library: Library) -> None:
    results = library.attention(*map(library.array, inputs()), scale=1.0)
    available = library.ffi.new("bool*")
    for handle in results.values():
        library.check(library.c._mlx_array_is_available(available, handle.value))
        assert not available[0]
    library.check(library.c.mlx_array_eval(results["out"].value))
    library.check(library.c._mlx_array_is_available(available, results["out"].value))
    assert available[0]


def test_back_ends_say_whether_they_can_run(library: Library) -> None:
    assert library.backend_status("composed") == (True, "")
    assert library.backend_status("cuda") == (False, "the C interface launches no CUDA kernels")
    available, reason = library.backend_status("metal")
    assert available == mx.metal.is_available()
    assert reason == ("" if available else "MLX has no Metal device on this machine")
    library.check(library.c.mlx_h2o_backend_status(b"composed", library.ffi.NULL, library.ffi.NULL))


def test_the_environment_names_a_back_end(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = [library.array(a) for a in inputs()]
    monkeypatch.setenv("MLX_H2O_BACKEND", "cuda")
    with pytest.raises(CError, match="back end 'cuda' is not available"):
        library.attention(*arrays, scale=1.0)
    with library.using("composed"):
        library.attention(*arrays, scale=1.0)
    monkeypatch.setenv("MLX_H2O_BACKEND", "fast")
    with pytest.raises(CError, match="MLX_H2O_BACKEND names the back end 'fast', expected one of"):
        library.attention(*arrays, scale=1.0)


def test_an_unknown_simd_target_makes_native_unavailable(library: Library) -> None:
    available, reason = library.backend_status("native")
    if not available:
        c_api.missing(reason)
    program = (
        "import c_api, numpy as np; library = c_api.required();"
        "print(*library.backend_status('native'));"
        "rows = library.array(np.zeros((1, 1, 4, 8), np.float32));"
        "library.attention(rows, rows, rows, scale=1.0);"
        "library.check(library.c.mlx_h2o_set_backend(b'native'))"
    )
    own = {"MLX_H2O_SIMD": "mmx", "PYTHONPATH": IMPORTS}
    done = ended(sys.executable, "-c", program, environment=own)
    assert done.stdout.startswith("False ") and "MLX_H2O_SIMD" in done.stdout
    assert "[use_backend] back end 'native' is not available: " in done.stderr


def test_a_back_end_is_named_for_one_thread(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_H2O_BACKEND", "cuda")
    arrays = [library.array(a) for a in inputs()]
    with library.using("composed"), ThreadPoolExecutor(1) as other:
        with pytest.raises(CError, match="back end 'cuda' is not available"):
            other.submit(library.attention, *arrays, scale=1.0).result()
        library.attention(*arrays, scale=1.0)
