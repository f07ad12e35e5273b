"""What each layer of a model loses when it alone keeps few rows, and rows shared out by that."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from .. import policies
from ..config import H2OConfig
from ..demo import DEMO, model_path
from .routing import model_name
from .safetensors import read_header

FORMAT = 1
_ENTRY = "mlx_h2o_profile"
_ARRAYS = {"loss": "F32", "rows": "I32", "shares": "F32"}
_ABOUT = {"model": str, "fingerprint": str, "policy": str, "tokens": int, "sink_size": int,
          "recent_size": int}  # fmt: skip
_ELEMENTS = 16


@dataclass(frozen=True)
class Profile:
    """The losses of a model's evicting layers, in order.

    Attributes:
        loss: float32 [layers, rows, shares], nats per token above the full cache while all other
            layers keep all rows. NaN where a calibration has not come to it.
        rows: how many rows the layer had, ascending.
        shares: what part of them but the sinks was the recent window, ascending; 1: all of it.
        about: what it was made with: "model" and its "fingerprint", "policy", "tokens" of each
            document, "sink_size", versions, and what the text was.
        path: the file that it is of, for messages.
    """

    loss: np.ndarray[Any, np.dtype[np.float32]]
    rows: tuple[int, ...]
    shares: tuple[float, ...]
    about: dict[str, Any]
    path: str = field(default="profile", compare=False)

    @property
    def policy(self) -> str:
        """The policy that it was measured with, which its rows are for."""
        return str(self.about["policy"])

    def save(self, path: str | PathLike[str]) -> None:
        """Write it to this file, whole or not at all. Raises OSError where that cannot be."""
        folder, name = os.path.split(os.fspath(path))
        beside = os.path.join(folder, f".{name}.{uuid.uuid4().hex}.safetensors")
        arrays = {
            "loss": mx.array(self.loss),
            "rows": mx.array(self.rows, mx.int32),
            "shares": mx.array(self.shares, mx.float32),
        }
        try:
            Path(beside).touch()  # OSError where MLX would raise something else
            mx.save_safetensors(
                beside, arrays, {_ENTRY: json.dumps({"format": FORMAT} | self.about)}
            )
            os.replace(beside, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(beside)

    @classmethod
    def load(cls, path: str | PathLike[str], *, whole: bool = True) -> Profile:
        """The profile that a file holds; with ``whole=False`` one that is not measured to its end.

        "demo" is that of the demo model, which comes with the package.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it holds no profile, a damaged one, one of a later format, or, unless
                ``whole`` is False, an unfinished one.
        """
        path = os.fspath(path)
        if path == DEMO:
            path = str(model_path() / "profile.safetensors")
        header = read_header(path, "Profile.load", "profile")
        about = _about(path, header.pop("__metadata__", None))
        if {name: entry.get("dtype") for name, entry in header.items()} != _ARRAYS:
            raise _unfit(path, f"holds the arrays {sorted(header)}, expected {sorted(_ARRAYS)}")
        try:
            arrays: Any = mx.load(path, format="safetensors")
        except (RuntimeError, ValueError) as error:
            raise _unfit(path, f"cannot be read: {error}") from error
        loss, rows, shares = (np.array(arrays[name]) for name in _ARRAYS)
        fits = loss.ndim == 3 and loss.shape[1:] == (*rows.shape, *shares.shape) and loss.size
        if not fits:
            found = f"{loss.shape}, {rows.shape} and {shares.shape}"
            raise _unfit(path, f"holds loss, rows and shares of shapes {found}")
        if np.isinf(loss).any() or (whole and np.isnan(loss).any()):
            raise _unfit(path, "has no number for some layers: expected a finished calibration")
        if not (_ascends([0, *rows, about["tokens"]]) and _ascends([0, *shares, 1 + 1e-6])):
            raise _unfit(path, f"has rows {rows.tolist()} and shares {shares.tolist()}")
        sizes = tuple(rows.tolist()), tuple(shares.tolist())
        return cls(loss, *sizes, about, path)

    def check(self, model: Module, layers: int) -> None:
        """Raises ValueError unless it is of this model, of so many layers that evict."""
        found = self.about["model"], self.about["fingerprint"], len(self.loss)
        expected = model_name(model), fingerprint(model), layers
        if found != expected:
            said = ["{} ({}) with {} evicting layers".format(*of) for of in (found, expected)]
            raise ValueError(
                f"[profile] {self.path} is of the model {said[0]}, expected {said[1]}."
            )

    def recent(self, rows: int, share: float, sinks: int | None = None) -> int:
        """The recent window of so many rows at this share: no smaller than was measured."""
        free = rows - (self.about["sink_size"] if sinks is None else sinks)
        return int(min(free, max(self.about["recent_size"], round(share * free))))

    def share(self, total_rows: int, config: H2OConfig) -> list[H2OConfig]:
        """Settings of each layer, whose rows are ``total_rows`` together, per head.

        Every layer first gets the fewest rows that were measured, or an equal share where that is
        less. Each next row goes where it lowers the sum of the losses most, along the lower convex
        hull of what was measured; a layer that holds a whole document loses nothing. Rows beyond
        that go evenly. A layer whose best recent share is all becomes a window.

        Args:
            total_rows: at least what ``config`` demands of each layer.
            config: the other settings; its sizes and its policy are not used.

        Raises:
            ValueError: too few rows.
        """
        count, recent = len(self.loss), _least_recent(config)
        least = config.protected + max(recent, config.speculative + 2 if config.speculative else 1)
        if total_rows < count * least:
            raise ValueError(
                f"[profile] found {total_rows} rows for {count} layers, expected at least {least} "
                "for each."
            )
        least = max(least, min(self.rows[0], total_rows // count))  # fewer were not measured
        given = np.full(count, least)
        left = total_rows - count * least
        layers = range(count) if total_rows >= count * self.rows[0] else ()
        steps = [(*step, layer) for layer in layers for step in self._steps(layer, least)]
        for gain in sorted({step[0] for step in steps}, reverse=True):
            wanted = np.zeros(count, int)
            for _, rows, layer in (step for step in steps if step[0] == gain):
                wanted[layer] += rows
            given += _parts(min(left, wanted.sum()), wanted)
            left = total_rows - given.sum()
        given += _parts(left, np.ones(count, int))
        return [self._config(layer, int(rows), config) for layer, rows in enumerate(given)]

    def _steps(self, layer: int, least: int) -> Iterator[tuple[float, int]]:
        """What a row gains, and how many rows gain that, from ``least`` on: the hull's edges."""
        best = np.maximum(self.loss[layer].min(axis=1), 0).tolist()
        points = [*zip(self.rows, best, strict=True), (self.about["tokens"], 0.0)]
        here, start = points[0], least  # below the first point as behind it
        while here != points[-1]:
            edges = [((here[1] - loss) / (rows - here[0]), rows, loss) for rows, loss in points
                     if rows > here[0]]  # fmt: skip
            gain, *there = max(edges)
            here = (there[0], there[1])
            if here[0] > start:
                yield max(gain, 0.0), here[0] - start
                start = here[0]

    def _config(self, layer: int, rows: int, config: H2OConfig) -> H2OConfig:
        near = min(range(len(self.rows)), key=lambda n: abs(math.log(rows / self.rows[n])))
        share = self.shares[int(self.loss[layer, near].argmin())]
        free = rows - config.protected
        recent = max(self.recent(rows, share, config.protected), _least_recent(config))
        sized = replace(config, policy=self.policy).with_budget(rows, free - recent)
        return sized if recent < free else replace(sized, policy="window")


def fingerprint(model: Any) -> str:
    """Of a model's weights: SHA-256 of the name, the shape, the kind and at most 16 elements of
    each, evenly spread, in order of the names.

    Floats count as float32, whatever they are stored in: ``load`` widens them on a CPU.
    """
    found = hashlib.sha256()
    for name, array in sorted(cast(Any, tree_flatten)(model.parameters())):
        real = mx.issubdtype(array.dtype, mx.floating)
        kind = "float" if real else str(array.dtype)
        some = array.reshape(-1)[:: max(1, array.size // _ELEMENTS)][:_ELEMENTS]
        found.update(repr((name, array.shape, kind)).encode())
        found.update(np.array(some.astype(mx.float32) if real else some).tobytes())
    return found.hexdigest()[:32]


def _least_recent(config: H2OConfig) -> int:
    """Recent rows that there must be."""
    if config.dense_size:
        return config.dense_size + 1
    return 2 if config.light_bits is not None and config.dense_size is None else 1


def _parts(rows: int, weights: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """``rows`` in proportion to the weights, whole ones, the earlier ahead where they do not
    divide."""
    ends = np.cumsum(weights) * rows
    total = max(1, weights.sum())
    return np.diff(-(-ends // total), prepend=0)


def _about(path: str, metadata: Any) -> dict[str, Any]:
    """What a file says of its profile, whose values are of the right types."""
    try:
        about = json.loads(metadata[_ENTRY])
        format_ = about.pop("format")
        fits = all(type(about[name]) is kind for name, kind in _ABOUT.items())
    except (AttributeError, KeyError, TypeError, ValueError):
        raise _unfit(path, "is no profile: it does not say of what it is") from None
    if format_ != FORMAT:
        raise _unfit(path, f"has format {format_!r}, expected {FORMAT}, or another mlx_h2o")
    if not fits or about["policy"] not in policies.names():
        raise _unfit(path, f"says {about}, expected {', '.join(_ABOUT)}")
    return cast(dict[str, Any], about)


def _ascends(numbers: Sequence[float]) -> bool:
    return all(low < high for low, high in itertools.pairwise(numbers))


def _unfit(path: str, problem: str) -> ValueError:
    return ValueError(f"[Profile.load] {path} {problem}.")
