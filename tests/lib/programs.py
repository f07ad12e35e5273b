"""Run programs to their end, and say which are missing."""

import os
import subprocess
from typing import Any, NoReturn


def ended(
    *command: object, environment: dict[str, str] | None = None, **given: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program; returns its status and output. ``environment`` is added to this one's."""
    given |= {"env": {**os.environ, **(environment or {})}, "capture_output": True, "text": True}
    return subprocess.run([*map(str, command)], check=False, **given)


def run(*command: object, **given: Any) -> str:
    """Output of a command that must succeed; arguments as of ``ended``."""
    done = ended(*command, **given)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def missing(reason: str) -> NoReturn:
    """Skip a test because something is missing; in CI it fails."""
    import pytest  # not at the top: the parity runner does not need it

    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason}; with CI=true this is an error")
    pytest.skip(reason)
