"""Rows for the tests of kernels on a cache's rows, and the schedules that these run in."""

import contextlib
from collections.abc import Callable, Iterator

import mlx.core as mx
import numpy as np

from back_ends import registered
from emulator.backend import EmulatorBackend
from emulator.kernel import Run
from mlx_h2o import use_backend

SCHEDULES = (Run(), Run("reverse"), Run("random", seed=1), Run("random", seed=2))
ROWS = (1, 7, 31, 32, 33, 255, 256, 257, 1023, 1024, 1025)


def same_bits(one: mx.array | None, other: mx.array | None) -> bool:
    """The same dtype, shape and bytes, or none of either."""
    if one is None or other is None:
        return one is other
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return bool(mx.array_equal(one.view(mx.uint8), other.view(mx.uint8)))


@contextlib.contextmanager
def named_emulator(backend: EmulatorBackend | None = None) -> Iterator[None]:
    """The emulator is the back end that is named."""
    with registered("emulator", backend or EmulatorBackend()), use_backend("emulator"):
        yield


def on_the_emulator(call: Callable, backend: EmulatorBackend | None = None):
    """The result of ``call()`` with the emulator as the named back end."""
    with named_emulator(backend):
        return call()


def arrays_of(found: object) -> list[mx.array]:
    return [found] if isinstance(found, mx.array) else list(found)


def in_every_schedule(call: Callable):
    """The result of ``call()`` on the emulator, the same bits in every order of the threads."""
    results = [on_the_emulator(call, EmulatorBackend(run)) for run in SCHEDULES]
    for other in results[1:]:
        assert all(map(same_bits, arrays_of(results[0]), arrays_of(other)))
    return results[0]


def rows_with_ties(seed: int, heads: int, rows: int) -> tuple[mx.array, mx.array]:
    """Few different scores, infinities of both signs, both zeros, NaN, and padding."""
    rng = np.random.default_rng([seed, heads, rows])
    worth = np.array([-np.inf, -1.5, -0.0, 0.0, 1e-40, 2.0, np.inf, np.nan], np.float32)
    # Each head lacks some of them, so that every kind of row is the worst of some head.
    chosen = (worth[rng.permutation(8)[: rng.integers(1, 8)]] for _ in range(2 * heads))
    scores = np.stack([rng.choice(some, rows) for some in chosen]).reshape(2, heads, rows)
    positions = np.stack([rng.permutation(3 * rows)[:rows] for _ in range(2 * heads)])
    positions = positions.reshape(2, heads, rows).astype(np.int32)
    padded = rng.random(positions.shape) < 0.1
    padded[:, ::2] = False
    positions[padded] = -rng.integers(1, 5, padded.sum())
    return mx.array(scores), mx.array(positions)
