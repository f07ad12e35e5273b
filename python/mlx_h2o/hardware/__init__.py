"""What this machine makes of the package: `python -m mlx_h2o.hardware`."""
