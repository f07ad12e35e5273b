"""What bounded caches cost on a model and texts of one's own, at equal bytes.

`mlx_h2o evaluate` is the command. Arms (:mod:`.arms`) are kinds of caches, sized to the same bytes;
tasks (:mod:`.tasks`) read texts (:mod:`.texts`), some with questions (:mod:`.questions`), through
them (:mod:`.reading`); :mod:`.run` measures every arm on the same tokens and keeps what it has; and
:mod:`.report` compares and writes down.
"""
