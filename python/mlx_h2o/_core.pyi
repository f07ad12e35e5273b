import collections.abc

import mlx.core as mx

built_for_mlx: str

def simd_target() -> str: ...
def simd_targets() -> list[str]: ...
def threads() -> int: ...
def set_threads(count: int) -> None: ...
def buffer_address(array: mx.array) -> int: ...
def ndim(array: mx.array) -> int: ...
def scaled_dot_product_attention_with_scores(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    causal: bool = False,
    mask: mx.array | None = None,
    sinks: mx.array | None = None,
    return_lse: bool = False,
    stream: mx.Stream | mx.ThreadLocalStream | mx.Device | mx.DeviceType | None = None,
) -> list[mx.array]: ...
def keep_indices(
    scores: mx.array,
    positions: mx.array,
    *,
    keep: int,
    sink_size: int = 0,
    recent_start: int | mx.array | None = None,
    stream: mx.Stream | mx.ThreadLocalStream | mx.Device | mx.DeviceType | None = None,
) -> mx.array: ...
def evict_indices(
    scores: mx.array,
    positions: mx.array,
    *,
    count: int = 1,
    sink_size: int = 0,
    recent_start: int | mx.array | None = None,
    stream: mx.Stream | mx.ThreadLocalStream | mx.Device | mx.DeviceType | None = None,
) -> mx.array: ...
def scaled_dot_product_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    causal: bool = False,
    mask: mx.array | None = None,
    sinks: mx.array | None = None,
    stream: mx.Stream | mx.ThreadLocalStream | mx.Device | mx.DeviceType | None = None,
) -> mx.array: ...
def attention(
    queries: mx.array,
    keys: collections.abc.Sequence[mx.array],
    values: collections.abc.Sequence[mx.array],
    *,
    scale: float,
    causal: bool = False,
    mask: mx.array | None = None,
    sinks: mx.array | None = None,
    probes: mx.array | None = None,
    importance: mx.array | None = None,
    decay: float = 0.0,
    sparse_threshold: float = 0.0,
    bits: int = 8,
    value_bits: int = 8,
    group_size: int = 64,
    return_scores: bool = False,
    return_lse: bool = False,
    return_skipped: bool = False,
    stream: mx.Stream | mx.ThreadLocalStream | mx.Device | mx.DeviceType | None = None,
) -> list[mx.array]: ...
def plain_read(arrays: collections.abc.Sequence[mx.array]) -> int: ...
def attention_and_accumulate(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    importance: mx.array,
    *,
    scale: float,
    decay: float,
    causal: bool = False,
    mask: mx.array | None = None,
    sinks: mx.array | None = None,
    stream: mx.Stream | mx.ThreadLocalStream | mx.Device | mx.DeviceType | None = None,
) -> list[mx.array]: ...
def accumulate_scores(
    importance: mx.array,
    scores: mx.array,
    *,
    decay: float,
    stream: mx.Stream | mx.ThreadLocalStream | mx.Device | mx.DeviceType | None = None,
) -> mx.array: ...
def prefill_scores(
    queries: mx.array,
    keys: mx.array,
    *,
    scale: float,
    causal: bool = False,
    mask: mx.array | None = None,
    sinks: mx.array | None = None,
    decay: float | None = None,
    importance: mx.array | None = None,
    stream: mx.Stream | mx.ThreadLocalStream | mx.Device | mx.DeviceType | None = None,
) -> mx.array: ...
def key_diversity(
    keys: mx.array,
    *,
    stream: mx.Stream | mx.ThreadLocalStream | mx.Device | mx.DeviceType | None = None,
) -> mx.array: ...
def replace_worst(
    keys: collections.abc.Sequence[mx.array],
    values: collections.abc.Sequence[mx.array],
    importance: mx.array,
    positions: mx.array,
    new_keys: mx.array,
    new_values: mx.array,
    *,
    position: int | mx.array,
    sink_size: int = 0,
    recent_start: int | mx.array | None = None,
    ranked_by: str = "importance",
    ranks: mx.array | None = None,
    bits: int = 8,
    group_size: int = 64,
    value_bits: int = 8,
    stream: mx.Stream | mx.ThreadLocalStream | mx.Device | mx.DeviceType | None = None,
) -> list[mx.array]: ...
def append_rows(
    buffers: collections.abc.Sequence[mx.array],
    rows: collections.abc.Sequence[mx.array],
    start: int,
    *,
    stream: mx.Stream | mx.ThreadLocalStream | mx.Device | mx.DeviceType | None = None,
) -> list[mx.array]: ...
def compact_rows(
    buffer: mx.array,
    kept: mx.array,
    lines: collections.abc.Sequence[int],
    start: int = 0,
    tail: int = 0,
    *,
    stream: mx.Stream | mx.ThreadLocalStream | mx.Device | mx.DeviceType | None = None,
) -> mx.array: ...
def merge_segments(
    outs: collections.abc.Sequence[mx.array],
    lses: collections.abc.Sequence[mx.array],
    *,
    stream: mx.Stream | mx.ThreadLocalStream | mx.Device | mx.DeviceType | None = None,
) -> list[mx.array]: ...
def segment_rows(
    tiers: collections.abc.Sequence[mx.array],
    newest: mx.array,
    bits: collections.abc.Sequence[int],
    group_size: int,
    slots: mx.array | None = None,
    to: int = 0,
    *,
    stream: mx.Stream | mx.ThreadLocalStream | mx.Device | mx.DeviceType | None = None,
) -> list[mx.array]: ...
def quantize_append(
    keys: collections.abc.Sequence[mx.array],
    values: collections.abc.Sequence[mx.array],
    new_keys: mx.array,
    new_values: mx.array,
    slots: mx.array,
    *,
    bits: int,
    group_size: int,
    value_bits: int,
    stream: mx.Stream | mx.ThreadLocalStream | mx.Device | mx.DeviceType | None = None,
) -> list[mx.array]: ...
