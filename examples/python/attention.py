"""One decode step of attention that returns its scores too, and the rows that a policy keeps."""

import mlx.core as mx

from mlx_h2o import fast

queries = mx.random.normal((1, 16, 1, 128))  # [B, Hq, Lq, D]
keys = mx.random.normal((1, 8, 1024, 128))  # [B, Hkv, N, D]
values = mx.random.normal((1, 8, 1024, 128))
out, scores = fast.scaled_dot_product_attention_with_scores(queries, keys, values, scale=128**-0.5)
per_row = mx.abs(scores).reshape(1, 8, 2, 1024).mean(axis=2)  # the mean over the group's queries
positions = mx.broadcast_to(mx.arange(1024, dtype=mx.int32), (1, 8, 1024))
kept = fast.keep_indices(per_row, positions, keep=256, sink_size=4, recent_start=1024 - 124)
print("output", out.shape, "scores", scores.shape, "kept", kept.shape)
