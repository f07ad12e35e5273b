"""The back ends of the CPU that run here."""

import pytest

from mlx_h2o.operations.native import module

BACKENDS = ["composed"] if module.unavailable_reason() else ["composed", "native"]
NATIVE = pytest.mark.skipif("native" not in BACKENDS, reason=module.unavailable_reason() or "here")
