"""Subcommands of `mlx_h2o`: each module has `run(arguments) -> exit status`."""
