"""Run programs to their end."""

from __future__ import annotations

import os
import subprocess
from typing import Any


def ended(
    *command: object, environment: dict[str, str] | None = None, **given: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program; returns its status and output. ``environment`` is added to this one's."""
    given |= {"env": {**os.environ, **(environment or {})}, "capture_output": True, "text": True}
    return subprocess.run([*map(str, command)], check=False, **given)
