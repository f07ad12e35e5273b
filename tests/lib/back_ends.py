"""The back ends of the CPU that run here."""

import pytest

from mlx_h2o.operations import native

BACKENDS = ["composed"] if native.unavailable_reason() else ["composed", "native"]
NATIVE = pytest.mark.skipif("native" not in BACKENDS, reason=native.unavailable_reason() or "here")
