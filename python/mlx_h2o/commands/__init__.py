"""Subcommands of `mlx_h2o`: each module has a `parser()` and a `run()`."""
