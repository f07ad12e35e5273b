"""What an eviction policy costs: perplexity, agreement, recall, bytes.

Functions take (model, cache, tokens): an mlx_lm model, a list of caches, one per layer, and token
ids. The caches may be of any kind: mlx_lm's own (`KVCache`, `RotatingKVCache`) or this package's,
whose attention is routed as needed. :mod:`mlx_h2o.evaluation` compares many at equal bytes.
"""

from .evaluation.reading import (
    Fact,
    Peak,
    Progress,
    TeacherForced,
    evicted_rows,
    kv_bytes,
    peak_memory,
    perplexity,
    prefill,
    recall,
    teacher_forced,
    top1_agreement,
)

__all__ = [
    "Fact",
    "Peak",
    "Progress",
    "TeacherForced",
    "evicted_rows",
    "kv_bytes",
    "peak_memory",
    "perplexity",
    "prefill",
    "recall",
    "teacher_forced",
    "top1_agreement",
]
