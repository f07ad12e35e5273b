"""Cases of folded rows, drawn until no choice is close, so that all legs must agree."""

import itertools
from collections.abc import Iterator

import mlx.core as mx
import numpy as np

import reference
import reference_folding
from cache_folded import MADE
from golden.build import DTYPES, Case, generator
from parity.calls import drawn_case

SUMMED = 2.0**-23
"""A mass is a sum of float32 numbers: one rounding of it."""


def fold_cases(seed: int) -> Iterator[Case]:
    """Lengths astride vectors of rows, groups of one row and of many, and rows of every kind."""
    for index, rows in enumerate((2, 31, 32, 33, 65)):
        dtype = [*DTYPES][index % 3]
        yield fold_case(f"fold-rows-{rows}-{dtype}", rows=rows, dtype=dtype, seed=seed)
    for going in (2, 9, 39):
        yield fold_case(f"fold-{going}-rows", going=going, seed=seed)
    yield fold_case("fold-some-unscored", going=9, unscored=0.3, seed=seed)
    yield fold_case("fold-into-few", going=12, eligible=0.1, seed=seed)
    yield fold_case("fold-into-none", going=3, eligible=0.0, seed=seed)
    for going in (1, 2, 9):
        yield fold_case(f"fold-the-nearer-half-of-{going}", going=going, share=0.5, seed=seed)
    yield fold_case("fold-a-third-unscored", going=9, unscored=0.4, share=0.3, seed=seed)
    yield fold_case("fold-without-weights", going=9, weightless=0.6, seed=seed)
    yield fold_case("fold-beside-infinite-rows", going=9, infinite=True, seed=seed)


def fold_case(
    name: str, *, rows: int = 40, going: int = 1, dtype: str = "f32", eligible: float = 0.7,
    unscored: float = 0.0, weightless: float = 0.0, share: float = 1.0, infinite: bool = False,
    seed: int = 0,
) -> Case:  # fmt: skip
    """``going`` rows of two heads of two sequences are folded; then shares of the rows: those that
    others may be folded into, those without a rank, and those with a weight of 0; and one of each
    head whose value is ``infinite``."""
    shape = (2, 2, rows)
    for attempt in itertools.count():
        rng = generator(f"{name}-{attempt}", seed)
        drawn = {
            "keys": rng.standard_normal((*shape, 32)) * rng.uniform(0.5, 1.5, (*shape, 1)),
            "values": rng.standard_normal((*shape, 24)),
        }
        tensors = {
            part: mx.array(array.astype(np.float32)).astype(DTYPES[dtype])
            for part, array in drawn.items()
        }
        weights = rng.uniform(0.1, 2, shape) * (rng.random(shape) >= weightless)
        weights = np.where(rng.random(shape) < unscored, np.nan, weights)
        beside = {
            "bias": np.log(rng.integers(1, 6, shape)),
            "mass": np.where(np.isnan(weights), np.nan, rng.uniform(0, 9, shape)),
            "weights": weights,
        }
        tensors |= {part: mx.array(array.astype(np.float32)) for part, array in beside.items()}
        tensors["eligible"] = mx.array(rng.random(shape) < eligible)
        order = rng.permuted(np.broadcast_to(np.arange(rows), shape), axis=2)
        tensors["kept"] = mx.array(np.sort(order[:, :, going:], axis=2).astype(np.uint32))
        if infinite:
            at = tensors["kept"][:, :, :1, None]
            tensors["values"] = mx.put_along_axis(tensors["values"], at, mx.array(mx.inf), axis=2)
        expected = _expected(tensors, share)
        if expected is not None:
            rounding = 0.0 if dtype == "f32" else reference.ULP[str(DTYPES[dtype])[9:]]
            allowed = {"into": 0.0}
            for part in ("keys", "values", "bias", "mass"):
                narrow = rounding if part in ("keys", "values") else 0.0
                greatest = float(np.nanmax(np.abs(expected[part])))
                allowed[part] = MADE + (narrow + SUMMED * (part == "mass")) * greatest
            return drawn_case(
                {"name": name, "op": "fold", "share": share}, tensors, expected, allowed
            )
    raise AssertionError("unreachable")


def _expected(tensors: dict[str, mx.array], share: float) -> dict[str, np.ndarray] | None:
    """What becomes of the rows, or None where a choice was close."""
    parts = ("keys", "values", "bias", "mass", "weights")
    keys, values, bias, mass, weights = (reference.float64(tensors[part]) for part in parts)
    eligible, kept = np.array(tensors["eligible"]), np.array(tensors["kept"])
    names = ("into", *parts[:4])
    columns: dict[str, list] = {name: [] for name in names}
    batch, heads = bias.shape[:2]
    for at in np.ndindex(batch, heads):
        into, close = reference_folding.targets(
            keys[at], values[at], weights[at], eligible[at], kept[at].tolist(), share
        )
        if close:
            return None
        slots = [into[slot] for slot in sorted(into)]
        groups = [{slot} | {one for one, other in into.items() if other == slot} for slot in slots]
        columns["into"].append(slots)
        for name, array in (("keys", keys[at]), ("values", values[at])):
            rows = [reference_folding.folded(array, weights[at], into, slot) for slot in slots]
            columns[name].append(rows)
        counts = np.exp(bias[at])
        columns["bias"].append([np.log(counts[sorted(group)].sum()) for group in groups])
        columns["mass"].append([mass[at][sorted(group)].sum() for group in groups])
    arrays = {name: np.array(column) for name, column in columns.items()}
    return {name: array.reshape(batch, heads, *array.shape[1:]) for name, array in arrays.items()}
