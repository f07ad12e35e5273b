"""An HTTP server for one model: answers in batches, caches within a budget, nothing read twice.

``text`` and ``sampling`` know one answer, ``snapshots`` and ``disk`` what was ``kept`` of others,
``memory`` what fits; ``engine`` and ``lanes`` run the model for each ``request``; ``schema``,
``answers``, ``guard`` and ``http`` speak with clients.
"""
