"""All that touches mlx_lm: models and their caches, routing, generation, files, budgets."""
