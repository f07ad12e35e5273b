"""What bounded caches cost on a model and a text of one's own, at equal bytes.

`mlx_h2o evaluate` is the command. A strategy (:mod:`.strategies`) becomes an arm of a model
(:mod:`.arms`); tasks (:mod:`.tasks`) read documents (:mod:`.documents`), some with planted facts
(:mod:`.facts`); :mod:`.run` measures every arm on the same tokens in the same chunks; and
:mod:`.summary` and :mod:`.output` compare and write down.
"""
