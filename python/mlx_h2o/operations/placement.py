"""Where a composition of MLX operations runs."""

import contextlib
from collections.abc import Iterator

import mlx.core as mx

from mlx_h2o.operations.arguments import StreamLike


@contextlib.contextmanager
def placed(stream: StreamLike) -> Iterator[None]:
    """Everything inside runs on ``stream``, or where it would run anyway if that is None."""
    if stream is None:
        yield
    else:
        with mx.stream(stream):
            yield
