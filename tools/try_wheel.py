"""Whether an installed wheel works: its native part is there, and the demo model writes text."""

import sys

import mlx_h2o
from mlx_h2o.cli import main

if __name__ == "__main__":
    if why := mlx_h2o.backends()["native"].reason:
        sys.exit(f"the wheel has no native back end: {why}")
    flags = ("--model", "demo", "--prompt", "The ship was", "--max-kv-size", "64")
    sys.exit(main(["generate", *flags]))
