"""This package's version, and the versions of MLX and mlx-lm that it was tested with."""

import os
import re
from importlib import metadata

ANY_VERSION = "MLX_H2O_ANY_VERSION"
# From the first release up to, but not including, the second; as in pyproject.toml.
TESTED = {"mlx": ("0.32.3", "0.33"), "mlx-lm": ("0.32", "0.33")}


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def check_versions() -> None:
    """Raise ImportError for releases that were not tested, unless MLX_H2O_ANY_VERSION is set."""
    for name, (first, end) in TESTED.items():
        found = _installed(name)
        if not found or os.environ.get(ANY_VERSION):
            continue
        if not _numbers(first) <= _numbers(found) < _numbers(end):
            # On Linux, MLX's back end is an extra package, which must have the same version.
            parts = [part for part in ("cuda-13", "cuda-12", "cpu") if _installed(f"mlx-{part}")]
            extra = f"[{parts[0].replace('-', '')}]" if parts and name == "mlx" else ""
            raise ImportError(
                f"mlx_h2o {__version__} was tested with {name} from {first} to below {end}, found "
                f"{found}: pip install '{name}{extra}>={first},<{end}' (to try this one all the "
                f"same, set {ANY_VERSION}=1)"
            )


__version__ = _installed("mlx-h2o") or "0.0.0"  # sources that are not installed
