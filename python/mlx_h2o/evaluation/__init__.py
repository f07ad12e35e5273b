"""What bounded caches cost on a model and texts of one's own, at equal bytes.

`mlx_h2o evaluate` is the command, and the demo one of its settings. Arms (:mod:`.arms`) are kinds
of caches, sized to the same bytes; tasks (:mod:`.tasks`) read texts, some with questions
(:mod:`.questions`), through them (:mod:`.reading`); :mod:`.run` measures every arm on the same
tokens and keeps what it has; :mod:`.report` compares and writes down; and :mod:`.speed` times
caches in turns, for the demo, `mlx_h2o.hardware` and the benchmarks.
"""
