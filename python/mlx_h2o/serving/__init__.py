"""An HTTP server for one model: batched answers, bounded caches, no prefix prefilled twice.

``text`` and ``sampling`` make one answer; ``snapshots`` and ``disk`` keep caches for reuse, both
with ``kept``; ``memory`` plans what fits; ``engine`` and ``lanes`` run the model for each
``request``; ``schema``, ``answers``, ``guard`` and ``http`` talk to clients.
"""
