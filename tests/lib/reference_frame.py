"""The slow reference of a frame: the centre and the rotation of the rows of a head.

Written from docs/design.md, in float64; shares no code with the package. ``kept`` and ``restored``
do the same in float32 by MLX's own operation, for tests that need every bit.
"""

import mlx.core as mx
import numpy as np

FIRST = 64
GROUP = 32


def centre(rows: np.ndarray) -> np.ndarray:
    """[..., 1, D], from the first keys [..., L, D]: rounded from MLX's sum, which is checked, since
    a float64 sum may round differently."""
    first = rows[..., :FIRST, :]
    found = mx.mean(mx.array(first).astype(mx.float32), axis=-2, keepdims=True)
    mean = first.astype(np.float64).mean(axis=-2, keepdims=True)
    np.testing.assert_allclose(np.array(found), mean, rtol=1e-6, atol=1e-6)
    return np.array(found.astype(mx.bfloat16).astype(mx.float32))


def centres(keys: np.ndarray, values: np.ndarray) -> list[np.ndarray]:
    """The centres of keys [..., L, D] and of values [..., L, Dv]: of these the first one, if its
    norm is less than half of the mean norm of the first ones, else 0."""
    norms = np.linalg.norm(values[..., :FIRST, :].astype(np.float64), axis=-1, keepdims=True)
    small = norms[..., :1, :] < norms.mean(axis=-2, keepdims=True) / 2
    sink = np.array(mx.array(values[..., :1, :]).astype(mx.bfloat16).astype(mx.float32))
    return [centre(keys), np.where(small, sink, 0)]


def matrix(size: int) -> np.ndarray:
    """The rotation of stored rows of ``size`` elements, its own inverse: float64."""
    block = np.ones((1, 1))
    while size % (2 * len(block)) == 0:
        block = np.block([[block, block], [block, -block]])
    return np.kron(np.eye(size // len(block)), block / np.sqrt(len(block)))


def padded(rows: np.ndarray) -> np.ndarray:
    """The rows padded with zeros to whole groups."""
    missing = -rows.shape[-1] % GROUP
    return np.concatenate([rows, np.zeros((*rows.shape[:-1], missing), rows.dtype)], axis=-1)


def kept(rows: np.ndarray, around: np.ndarray) -> np.ndarray:
    """Stored form of rows whose size is a power of two, float32."""
    return np.array(mx.hadamard_transform(mx.array(rows) - mx.array(around)))


def restored(rows: np.ndarray, around: np.ndarray) -> np.ndarray:
    """The inverse of ``kept``."""
    if rows.size == 0:  # MLX refuses empty arrays
        return rows
    return np.array(mx.hadamard_transform(mx.array(rows)) + mx.array(around))
