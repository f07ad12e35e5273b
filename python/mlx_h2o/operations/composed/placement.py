"""Where a composition of MLX operations runs."""

import contextlib
from typing import Any

import mlx.core as mx

from mlx_h2o.operations.arguments import StreamLike

_ANYWHERE = contextlib.nullcontext()


def placed(stream: StreamLike) -> contextlib.AbstractContextManager[Any]:
    """Everything inside runs on ``stream``, or where it would run anyway if that is None."""
    return _ANYWHERE if stream is None else mx.stream(stream)
