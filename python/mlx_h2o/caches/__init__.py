"""The caches: rows under a budget, scored, evicted, taken back, in batches, in lockstep."""
