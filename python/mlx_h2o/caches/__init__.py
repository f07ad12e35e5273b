"""The caches: a table of rows under a budget, for one sequence and for many."""
