"""Arbitrary arguments, settings and files: an error that says why, or the right result.

A few examples of each here; ``nox -s fuzz -- SECONDS`` continues until the time is over.
"""

import functools
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from mlx_h2o import H2OConfig, H2OKVCache, fast, load_prompt_cache, save_prompt_cache, use_backend
from mlx_h2o.caches.cache import evicting_cache
from mlx_h2o.operations.backends import backends
from sizes import examples

pytestmark = pytest.mark.examples

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
few = settings(max_examples=examples(400), deadline=None)


class Draw:
    """Sizes that go together, and arrays of them; now and then one that does not."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.batch, self.heads, self.group = (self.number(1, 3) for _ in range(3))
        self.queries = self.number(1, 12)
        self.rows = self.queries + self.number(0, 40)
        self.width = self.one_of(64, 32, 128, 16, 33)
        self.dtype = self.one_of(*DTYPES)
        self.random = np.random.default_rng(self.number(0, 10**6))
        self.wild = False
        """Whether a number is unusual: results are then not compared."""
        self.distinct = True
        """Whether rows have positions of their own; of equal ones any may go."""

    def one_of(self, *values: Any) -> Any:
        return self.data.draw(st.sampled_from(values))

    def number(self, least: int, most: int) -> int:
        return self.data.draw(st.integers(least, most))

    def rarely(self, times: int = 16) -> bool:
        return self.number(1, times) == times

    def array(self, *shape: int, dtype: mx.Dtype | None = None) -> Any:
        given_shape = list(shape)
        if self.rarely(24):
            axis = self.number(0, len(shape) - 1)
            change = self.number(0, 3)
            if change == 0:
                given_shape[axis] = self.number(0, 3)
            elif change == 1:
                del given_shape[axis]
            elif change == 2:
                given_shape.insert(axis, self.number(0, 2))
            else:
                return self.one_of(None, "rows", 3)
        found = self.random.standard_normal(given_shape)
        if self.rarely(12) and found.size:
            self.wild = True
            number = self.one_of(math.inf, -math.inf, math.nan, 1e30, 1e-40)
            found.flat[self.number(0, found.size - 1)] = number
        array = mx.array(found.astype(np.float32))
        if self.rarely(6) and array.ndim > 1:  # rows that do not lie as their shape says
            array = mx.contiguous(array.swapaxes(-1, -2)).swapaxes(-1, -2)
        if self.rarely(24):
            dtype = self.one_of(mx.float32, mx.float16, mx.int32, mx.uint32, mx.bool_)
        return array.astype(dtype or self.dtype)

    def positions(self) -> Any:
        """Distinct in each head; some below 0 where there are no rows."""
        if self.rarely(24):
            self.distinct = False
            return self.array(self.batch, self.heads, self.rows)
        ordered = np.arange(self.rows) - (self.number(0, 4) if self.rarely(4) else 0)
        drawn = np.tile(ordered, (self.batch, self.heads, 1))
        if self.rarely(2):
            drawn = self.random.permuted(drawn, axis=2)
        return mx.array(drawn.astype(np.int32))

    def maybe(self, make: Callable[[], Any]) -> Any:
        return make() if self.rarely(3) else None

    def attention(self) -> dict[str, Any]:
        heads = self.heads * self.group
        kind = self.number(0, 5)
        mask: Any = None
        if kind == 1:
            mask = self.one_of("causal", "causal", "", "none", "array")
        elif kind == 2:
            mask = self.array(self.batch, heads, self.queries, self.rows)
        elif kind == 3:
            seen = self.random.random((self.queries, self.rows)) < 0.8
            seen[:, 0] |= not self.rarely(3)
            mask = mx.array(seen)
        return {
            "scale": self.one_of(0.125, 1.0, -0.5, 0.0, *([math.nan] if self.rarely(8) else [])),
            "mask": mask,
            "sinks": self.maybe(lambda: self.array(heads)),
            "row_bias": self.maybe(
                lambda: self.array(self.batch, self.heads, self.rows, dtype=mx.float32)
            ),
            "return_lse": self.rarely(2),
        }

    def q(self) -> Any:
        return self.array(self.batch, self.heads * self.group, self.queries, self.width)

    def kv(self) -> Any:
        return self.array(self.batch, self.heads, self.rows, self.width)


def dense(draw: Draw) -> Callable[[], Any]:
    arrays = draw.q(), draw.kv(), draw.kv()
    return functools.partial(
        fast.scaled_dot_product_attention_with_scores, *arrays, **draw.attention()
    )


def quantised(draw: Draw) -> Callable[[], Any]:
    bits, group = draw.one_of(8, 4, 3, 2), draw.one_of(32, 64)
    assume(draw.width % group == 0)
    rows = [draw.random.standard_normal((draw.batch, draw.heads, draw.rows, draw.width))] * 2
    packed = [
        list(mx.quantize(mx.array(one.astype(np.float32)).astype(draw.dtype), group, bits))
        for one in rows
    ]
    if draw.rarely(12):
        packed[draw.number(0, 1)][draw.number(0, 2)] = draw.kv()
    said = draw.attention() | {
        "bits": draw.one_of(bits, bits, bits, 5, 0, -1) if draw.rarely(6) else bits,
        "group_size": draw.one_of(group, 16, 0, 128) if draw.rarely(6) else group,
        "sparse_v_threshold": draw.one_of(0.0, 0.0, 1e-4, 1.5, -1.0, math.nan),
    }
    operation = fast.scaled_dot_product_attention_quantized_with_scores
    return functools.partial(operation, draw.q(), *packed[0], *packed[1], **said)


def selection(draw: Draw) -> Callable[[], Any]:
    shape = draw.batch, draw.heads, draw.rows
    scores = draw.array(*shape, dtype=mx.float32)
    positions = draw.positions()
    zones = {"sink_size": draw.number(-1, 6), "recent_start": draw.maybe(lambda: draw.rows - 3)}
    keep = draw.number(-1, draw.rows + 1)
    return functools.partial(fast.keep_indices, scores, positions, keep=keep, **zones)


def prefill(draw: Draw) -> Callable[[], Any]:
    said = draw.attention()
    return functools.partial(
        fast.prefill_scores, draw.q(), draw.kv(), scale=said["scale"], mask=said["mask"],
        sinks=said["sinks"], kind="else" if draw.rarely() else draw.one_of("ema", "mass"),
        importance=draw.maybe(
            lambda: draw.array(draw.batch, draw.heads, draw.rows, dtype=mx.float32)
        ),
        decay=draw.one_of(1.0, -0.1) if draw.rarely() else draw.one_of(0.95, 0.0),
        queries=draw.one_of(0, -4) if draw.rarely() else draw.one_of(8, 1, 32),
    )  # fmt: skip


def tried(call: Callable[[], Any], speaker: str = "[") -> tuple[Any, str]:
    """The result of a call, and the line of its error, which begins like this."""
    try:
        return call(), ""
    except (ValueError, TypeError) as error:
        said = str(error)
    assert said.startswith(speaker) and "\n" not in said, said
    return None, said


def arrays(found: Any) -> list[mx.array]:
    given = list(found) if type(found) is tuple else [found]
    mx.eval(given)
    return given


def near(one: mx.array, other: mx.array, dtype: mx.Dtype) -> bool:
    """Whether arrays of size 1 are the same but for rounding: eight units of the coarsest of their
    dtype and the one of what they were computed from."""
    most = 8 * max(float(mx.finfo(kind).eps) for kind in (one.dtype, dtype)) + 1e-4
    same = mx.logical_or(one == other, mx.logical_and(mx.isnan(one), mx.isnan(other)))
    apart = mx.abs(one.astype(mx.float32) - other.astype(mx.float32))
    return bool(mx.logical_or(same, apart <= most).all())


@pytest.mark.skipif(not backends()["native"].available, reason="compares with native")
@pytest.mark.parametrize("make", [dense, quantised, selection, prefill])
def test_any_arguments_are_refused_or_served_alike(make):
    @few
    @given(data=st.data())
    def compare(data):
        draw = Draw(data)
        call = make(draw)
        found, said = [], []
        for backend in ("native", "composed"):
            with use_backend(backend):
                result, error = tried(call)
                found.append([] if error else arrays(result))
            said.append(error)
        assert bool(said[0]) == bool(said[1]), said
        native, composed = found
        kinds = [[(one.shape, one.dtype) for one in result] for result in found]
        assert kinds[0] == kinds[1]
        for one, other in zip(native, composed, strict=True):
            if make is selection:
                assert mx.array_equal(one, other) or not draw.distinct
            elif not draw.wild:
                assert near(one, other, draw.dtype), (one, other)

    compare()


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 12), st.sampled_from([2, 3, 4, 8, 32, 64, 128]),
    st.integers(-(2**70), 2**70), st.floats(allow_nan=True), st.text(max_size=3),
    st.sampled_from(["h2o-ema", "keydiff", "window", "h2o", "mix", "turbo3", "turbo8v3", "arrays"]),
)  # fmt: skip
NAMES = sorted(H2OConfig().named())


@few
@given(
    changed=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4), length=st.integers(1, 9)
)
def test_any_settings_are_refused_or_kept_to(changed, length):
    config, refused = tried(lambda: H2OConfig.of(**({"max_kv_size": 24} | changed)), "[H2OConfig]")
    if refused:
        return
    most = config.max_kv_size
    assume((most or 0) <= 4096 and config.kv_handed != "latents" and not config.preallocate)
    cache = evicting_cache(config)
    seen = 0
    for count in (length, 1, 30, *[1] * 12):
        _, refused = tried(functools.partial(step, cache, count, 64))
        if refused:
            return
        seen += count
        assert cache.offset == seen
        assert most is None or count > 1 or cache.size() <= max(most, length + 31)
    cache.flush()
    assert most is None or cache.size() <= most


def step(cache: H2OKVCache, count: int, width: int) -> None:
    rows, queries = (mx.random.normal((1, heads, count, width)) for heads in (2, 4))
    keys, values = cache.update_and_fetch(rows, rows)
    mx.eval(cache.attend(queries, keys, values, scale=0.1, mask=None), cache.state[:2])


@functools.cache
def written() -> tuple[bytes, H2OKVCache]:
    cache = evicting_cache(
        H2OConfig.of(max_kv_size=12, kv_bits=8, kv_group_size=32, policy="h2o-ema")
    )
    for count in (9, 1, 7, 1):
        step(cache, count, 32)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cache.safetensors"
        save_prompt_cache(file, [cache])
        return file.read_bytes(), cache


def leaves(cache: H2OKVCache) -> list[Any]:
    flat: Any = tree_flatten(cache.state)
    return [one.tolist() if isinstance(one, mx.array) else one for _, one in flat]


@few
@given(data=st.data())
def test_any_file_is_refused_or_the_one_that_was_written(data):
    before, cache = written()
    whole = bytearray(before)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(whole) - 1))
        kind = data.draw(st.sampled_from(["flip", "put", "cut", "more"]))
        if kind == "flip":
            whole[place] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "put":
            part = data.draw(st.binary(max_size=9))
            whole[place : place + len(part)] = part
        elif kind == "cut":
            del whole[place : place + data.draw(st.integers(1, 80))]
        else:
            whole[place:place] = data.draw(st.binary(max_size=80))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cache.safetensors"
        file.write_bytes(whole)
        found, refused = tried(lambda: load_prompt_cache(file), "[load_prompt_cache]")
    # Without its entry a file is one of mlx_lm's, and nobody knows of a checksum.
    named = b'"0.mlx_h2o"' in whole and rb"\"checksum\": " in whole
    assert refused or not named or leaves(found[0]) == leaves(cache)
