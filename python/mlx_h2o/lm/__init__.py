"""mlx_lm's side: models and their caches, attention routed, generation, files, budgets."""
