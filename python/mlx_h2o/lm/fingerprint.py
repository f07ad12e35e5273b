"""What tells the weights of a model from those of another."""

from __future__ import annotations

import hashlib
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

_ELEMENTS = 16


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
