"""Codes of rotated rows, written from docs/design.md in NumPy and float64, without our code."""

from functools import cache

import mlx.core as mx
import numpy as np

import reference

SEEDS = {"keys": 42, "values": 43}

MERGED = {
    (64, 3): (0.03040, 0.09368, 0.16599, 0.26375),
    (128, 2): (0.03998, 0.13302),
    (128, 3): (0.02156, 0.06648, 0.11801, 0.18829),
    (128, 4): (0.01108, 0.03351, 0.05679, 0.08158, 0.10882, 0.14024, 0.17934, 0.23639),
}
"""The upper half of levels that mlx-swift-lm ships, by size and bits."""


@cache
def levels(size: int, bits: int) -> np.ndarray:
    """The levels, from sums over a fine grid: 100 Lloyd steps from the middles of equal shares."""
    grid = np.linspace(-1, 1, 2**19 + 1)
    weights = (1 - grid**2) ** ((size - 3) / 2)

    def integral(values: np.ndarray) -> np.ndarray:
        return np.append(0, np.cumsum((values[1:] + values[:-1]) / 2)) * (grid[1] - grid[0])

    mass, moment = integral(weights), integral(weights * grid)
    shares = (np.arange(2**bits) + 0.5) / 2**bits
    some = slice(*np.searchsorted(mass, [1e-12 * mass[-1], (1 - 1e-12) * mass[-1]]))
    found = np.interp(shares * mass[-1], mass[some], grid[some])
    for _ in range(100):
        edges = np.concatenate([[-1], (found[1:] + found[:-1]) / 2, [1]])
        found = np.diff(np.interp(edges, grid, moment)) / np.diff(np.interp(edges, grid, mass))
    return found


@cache
def rotation(size: int, seed: int) -> np.ndarray:
    """The matrix that turns a row into a direction."""
    matrix = np.ones((1, 1))
    while matrix.shape[0] < size:
        matrix = np.kron(np.array([[1, 1], [1, -1]]), matrix)
    draw = np.array(mx.random.uniform(shape=[size], key=mx.random.key(seed)))
    return matrix * np.where(draw > 0.5, 1, -1) / np.sqrt(size)


def unpacked(words, bits: int) -> np.ndarray:
    """Codes [..., d] of words, bit by bit."""
    words = np.array(words)
    stream = [(words >> np.uint32(place)) & np.uint32(1) for place in range(32)]
    stream = np.stack(stream, axis=-1).reshape(*words.shape[:-1], -1, bits)
    return stream @ 2 ** np.arange(bits)


def rows(words, norms, *, bits: int, side: str) -> np.ndarray:
    """The rows [..., d] that words and norms stand for, float64."""
    codes = unpacked(words, bits)
    size = codes.shape[-1]
    return levels(size, bits)[codes] @ rotation(size, SEEDS[side]) * reference.float64(norms)


def stored(given, *, bits: int, side: str) -> np.ndarray:
    """The rows that the codes of ``given`` rows stand for, float64."""
    norms, directions = _polar(given, side)
    size = directions.shape[-1]
    coded = levels(size, bits)[np.searchsorted(_between(size, bits), directions)]
    return coded @ rotation(size, SEEDS[side]) * norms / _lengths(coded)


def flips(given, *, bits: int, side: str) -> float:
    """How far a row may be off ``stored`` if float32 takes the next code of two elements."""
    norms, directions = _polar(given, side)
    size = directions.shape[-1]
    gap = np.diff(levels(size, bits)).max() / np.sqrt(size)
    return float(norms.max() * (2 * gap + 4 * reference.ULP["float32"]))


def check_packed(words, norms, given, *, bits: int, side: str) -> None:
    """Check words and norms of the ``given`` rows. A code may be the next one if, for float32, an
    element lies at the midpoint of two levels. Norms match the codes."""
    exact, directions = _polar(given, side)
    between, off = _between(directions.shape[-1], bits), 2e-6
    low, high = (np.searchsorted(between, directions + sign * off) for sign in (-1, 1))
    codes = unpacked(words, bits)
    assert ((low <= codes) & (codes <= high)).all()
    assert (low == high).mean() > 0.99
    coded = levels(directions.shape[-1], bits)[codes]
    np.testing.assert_allclose(reference.float64(norms), exact / _lengths(coded), rtol=2e-6)


def _polar(given, side: str) -> tuple[np.ndarray, np.ndarray]:
    """Norms [..., 1] and rotated directions of rows [..., d], float64."""
    given = reference.float64(given)
    norms = _lengths(given)
    return norms, given / np.maximum(norms, 1e-8) @ rotation(given.shape[-1], SEEDS[side]).T


def _lengths(rows: np.ndarray) -> np.ndarray:
    return np.linalg.norm(rows, axis=-1, keepdims=True)


def _between(size: int, bits: int) -> np.ndarray:
    """The midpoints of neighbouring levels."""
    return levels(size, bits)[1:] / 2 + levels(size, bits)[:-1] / 2
