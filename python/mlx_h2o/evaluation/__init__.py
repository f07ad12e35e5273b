"""Measure what bounded caches cost on a given model and texts, at equal bytes.

`mlx_h2o evaluate` is the command, and the demo is one of its settings. Arms (:mod:`.arms`) are
kinds of caches, sized to the same bytes. Tasks (:mod:`.tasks`) read texts, some with questions
(:mod:`.questions`), through them (:mod:`.reading`). :mod:`.run` measures every arm on the same
tokens and saves the results, :mod:`.report` compares and prints them, and :mod:`.speed` times
caches in turns, for the demo, `mlx_h2o.hardware` and the benchmarks.
"""
