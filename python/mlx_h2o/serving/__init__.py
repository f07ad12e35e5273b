"""An HTTP server for one model: answers in batches, caches within a budget, nothing read twice.

``text`` and ``sampling`` know one answer, ``snapshots`` and ``disk`` what was read before,
``memory`` what fits; ``engine`` runs the model; ``schema``, ``prompts``, ``answers``, ``guard`` and
``http`` speak with clients.
"""
