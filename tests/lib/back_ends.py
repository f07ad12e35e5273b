"""The CPU back ends that run here, and back ends that a test adds."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest

from mlx_h2o.operations import backends
from mlx_h2o.operations.native import module
from mlx_h2o.operations.resolved import Operations

BACKENDS = ["composed"] if module.unavailable_reason() else ["composed", "native"]
NATIVE = pytest.mark.skipif("native" not in BACKENDS, reason=module.unavailable_reason() or "here")


@contextlib.contextmanager
def registered(name: str, backend: Operations) -> Iterator[None]:
    """Register one more back end, for calls that name it."""
    with mock.patch.dict(backends._registered, {name: backend}):
        try:
            yield
        finally:
            backends.forget()
