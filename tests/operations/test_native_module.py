"""The extension as a module: when it may be used, its own checks, its life inside MLX's graph."""

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

import native_build
from back_ends import NATIVE
from mlx_h2o import fast, use_backend
from mlx_h2o.operations import native
from mlx_h2o.operations.native import module as native_module
from mlx_h2o.operations.requests import attention_request

OP = "scaled_dot_product_attention_with_scores"


@pytest.fixture
def core():
    if native_module.unavailable_reason():
        pytest.skip(native_module.unavailable_reason())
    from mlx_h2o import _core

    return _core


def make(queries=(1, 2, 1, 8), keys=(1, 1, 5, 8), values=(1, 1, 5, 8), dtype=mx.float32):
    return [mx.zeros(shape, dtype) for shape in (queries, keys, values)]


def test_the_extension_is_there_where_it_can_be_built():
    native_build.need()
    assert native_module.unavailable_reason() == ""


def fake(**changes):
    """A module that fits, but for the changes."""
    fitting = {
        "built_for_mlx": mx.__version__,
        "committed_bytes": lambda array: array.nbytes,
        "simd_target": lambda: "scalar",
        "threads": lambda: 1,
    }
    return SimpleNamespace(**{**fitting, **changes})


def raising(error):
    def function(*_):
        raise error

    return function


def test_an_extension_that_fits_has_no_fault():
    assert native_module.fault_of(fake()) == ""
    release = ".".join(mx.__version__.split(".")[:3])
    assert native_module.fault_of(fake(built_for_mlx=f"{release}.dev7")) == ""


@pytest.mark.parametrize("other", ["0.31.2", mx.__version__.rpartition(".")[0] + ".99"])
def test_an_extension_for_another_mlx_is_not_called(other):
    module = fake(built_for_mlx=other, committed_bytes=raising(AssertionError("called")))
    assert native_module.fault_of(module) == (
        f"the extension was built for MLX {other}, found MLX {mx.__version__}"
    )


def test_an_extension_of_another_nanobind_is_refused():
    reason = native_module.fault_of(
        fake(committed_bytes=raising(TypeError("incompatible function arguments")))
    )
    assert reason.startswith("the extension does not know mlx.core.array")


def test_a_gpu_stream_is_refused(monkeypatch: pytest.MonkeyPatch):
    request = attention_request(*make(), scale=1.0)
    assert native.BACKEND.refuses(request) == ""
    monkeypatch.setattr(native, "runs_on_gpu", lambda: True)
    assert native.BACKEND.refuses(request) == "it runs on CPU streams, found a GPU stream"


def test_a_row_bias_may_have_room_for_more_rows(core):
    q, k, v = make()
    core.attention(q, k, v, scale=1.0, row_bias=mx.zeros((1, 1, 7)))
    with pytest.raises(ValueError, match="row_bias"):
        core.attention(q, k, v, scale=1.0, row_bias=mx.zeros((1, 1, 4)))


def test_a_mask_beside_causal_is_refused(core):
    with pytest.raises(ValueError, match=r'found a mask array and "causal", expected one'):
        q, k, v = make()
        core.attention(q, [k], [v], scale=1.0, causal=True, mask=mx.zeros((5,)))


def attend(q, k, v):
    with use_backend("native"):
        return fast.scaled_dot_product_attention_with_scores(q, k, v, scale=0.5, return_lse=True)


@NATIVE
def test_it_can_be_compiled():
    q, k, v = (mx.random.normal((1, 2, 3, 8)) for _ in range(3))
    compiled = mx.compile(attend)
    for _ in range(2):
        for one, other in zip(compiled(q, k, v), attend(q, k, v), strict=True):
            assert np.array_equal(one, other)
    q = mx.random.normal((1, 2, 7, 8))
    assert compiled(q, k, v)[1].shape == (1, 2, 7, 3)


@NATIVE
def test_vmap_is_refused_clearly():
    arrays = (mx.zeros((2, 1, 1, 1, 8)),) * 3
    with pytest.raises(ValueError, match=rf"\[{OP}\] .* cannot be vmapped"):
        mx.vmap(attend)(*arrays)


@NATIVE
def test_one_output_may_be_dropped_before_the_others_are_read():
    q, k, v = (mx.random.normal((1, 4, 2, 64)) for _ in range(3))
    expected = [np.array(a) for a in attend(q, k, v)]
    for keep in range(3):
        results = list(attend(q * 1, k * 1, v * 1))
        mx.async_eval(*results)
        kept = results[keep]
        del results
        assert np.array_equal(kept, expected[keep])


@NATIVE
def test_memory_is_given_back():
    q, k, v = (mx.random.normal((1, 2, 1, 64)) for _ in range(3))
    mx.eval(q, k, v)
    mx.eval(attend(q, k, v))
    before = mx.get_active_memory()
    for _ in range(200):
        mx.eval(attend(q, k, v))
    mx.synchronize()
    assert mx.get_active_memory() <= before
