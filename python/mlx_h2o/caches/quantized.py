"""The evicting KV cache whose rows are quantised."""

from __future__ import annotations

from ..config import Affine, H2OConfig
from .cache import H2OKVCache


class QuantizedH2OKVCache(H2OKVCache):
    """An :class:`H2OKVCache` whose rows are quantised once, when they come (``config.kv_bits``).

    Rows are evicted, moved, saved and copied as they are packed; only those that others are folded
    into are quantised again. Up to 8 tokens at a time, updates return packed rows (words, scales
    and biases of the keys, and of the values), which the fused kernels read within
    ``mlx_h2o.routing``; for longer chunks arrays. ``keys`` and ``values`` are packed.

    In mixed precision (``config.light_bits``, ``config.dense_size``) the newest rows stay as they
    come, and older ones are quantised once, when they leave those. Updates then return arrays,
    which are computed only where attention does not read the rows as they are stored.

    Outside of ``mlx_h2o.routing`` mlx_lm's own attention reads the rows as of its QuantizedKVCache,
    unfused; values of other bits than the keys it refuses.

    Args:
        config: the settings; None for the defaults with 8 bits.
        name: what error messages call this cache, such as "qwen3 layer 3".

    Raises:
        ValueError: ``config.kv_bits`` is None; at the first update, rows whose size neither
            ``kv_group_size`` nor 32 divides.
    """

    _quantized = True

    def __init__(self, config: H2OConfig | None = None, *, name: str = "") -> None:
        super().__init__(H2OConfig(format=Affine()) if config is None else config, name=name)


H2OKVCache._packed = QuantizedH2OKVCache


def evicting_cache(config: H2OConfig, *, name: str = "") -> H2OKVCache:
    """An empty cache of the class that ``config`` asks for."""
    cls = H2OKVCache if config.kv_bits is None else QuantizedH2OKVCache
    return cls(config, name=name)
