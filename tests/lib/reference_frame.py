"""The slow reference of a frame: what rows of a head are kept relative to, and how they turn.

As docs/design.md says, in float64, and sharing no code with the package. ``kept`` and
``restored`` are the same in float32, by MLX's own operation, for those who need every bit.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

FIRST = 64
GROUP = 32


def centre(rows: np.ndarray) -> np.ndarray:
    """[..., 1, D], of the first keys [..., L, D]: rounded from MLX's sum, which is checked, since
    one in float64 may round the other way."""
    first = rows[..., :FIRST, :]
    found = mx.mean(mx.array(first).astype(mx.float32), axis=-2, keepdims=True)
    mean = first.astype(np.float64).mean(axis=-2, keepdims=True)
    np.testing.assert_allclose(np.array(found), mean, rtol=1e-6, atol=1e-6)
    return np.array(found.astype(mx.bfloat16).astype(mx.float32))


def centres(keys: np.ndarray, values: np.ndarray) -> list[np.ndarray]:
    """Those of both; that of values is 0."""
    return [centre(keys), np.zeros_like(values[..., :1, :])]


def matrix(size: int) -> np.ndarray:
    """The rotation of rows that are kept in so many elements, its own inverse: float64."""
    block = np.ones((1, 1))
    while size % (2 * len(block)) == 0:
        block = np.block([[block, block], [block, -block]])
    return np.kron(np.eye(size // len(block)), block / np.sqrt(len(block)))


def padded(rows: np.ndarray) -> np.ndarray:
    """With zeros behind the elements, up to whole groups."""
    missing = -rows.shape[-1] % GROUP
    return np.concatenate([rows, np.zeros((*rows.shape[:-1], missing), rows.dtype)], axis=-1)


def kept(rows: np.ndarray, around: np.ndarray) -> np.ndarray:
    """Rows of a power of two of elements, float32."""
    return np.array(mx.hadamard_transform(mx.array(rows) - mx.array(around)))


def restored(rows: np.ndarray, around: np.ndarray) -> np.ndarray:
    """What ``kept`` gave, as it came."""
    if rows.size == 0:  # MLX refuses none
        return rows
    return np.array(mx.hadamard_transform(mx.array(rows)) + mx.array(around))
