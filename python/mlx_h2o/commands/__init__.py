"""Subcommands of `mlx_h2o`: each module has a `parser()` of its flags and a `run()`."""
