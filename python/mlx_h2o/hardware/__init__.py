"""Checks and timings of the package on this machine: `python -m mlx_h2o.hardware`."""
