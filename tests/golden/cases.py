"""The golden cases, and further ones that the parity runner draws at random."""

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from golden import build
from golden.build import (
    Case,
    additive_mask,
    bool_mask,
    generator,
    keep_case,
    row_bias,
    shuffled_positions,
    spread_scores,
    trace_case,
)
from parity.calls import attention_case
from parity.trace_reference import run_reference

BOUNDARIES = (1, 31, 32, 33, 1023, 1024, 1025)
DTYPES = tuple(build.DTYPES)
SIZES = (
    (32, 32), (64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (512, 512), (192, 128),
    (64, 128), (576, 512), (576, 576),
)  # fmt: skip
ODD_SIZES = ((8, 8), (80, 80), (40, 24))
LOWEST = float(np.finfo(np.float32).min)


def _sizes() -> Iterator[Case]:
    for (d, dv), dtype in itertools.product(SIZES, DTYPES):
        yield attention_case(f"size-{d}-{dv}-{dtype}", dtype=dtype, rows=5, sizes=(d, dv))
    for (d, dv), dtype in zip(ODD_SIZES, DTYPES, strict=True):
        yield attention_case(f"size-{d}-{dv}-{dtype}", dtype=dtype, rows=35, sizes=(d, dv))


def _rows() -> Iterator[Case]:
    for rows, dtype in itertools.product(BOUNDARIES, DTYPES):
        if rows > 33 and dtype != ("bf16" if rows == 1024 else "f16"):
            continue  # the runner draws the others afresh: they are too large for the file
        yield attention_case(f"rows-{rows}-{dtype}", dtype=dtype, rows=rows, heads=(2, 1))


def _queries() -> Iterator[Case]:
    groups = (1, 2, 4, 8, 16, 3, 6, 5)
    for index, group in enumerate(groups):
        queries = index + 1
        for mask in ("", "causal"):
            yield attention_case(
                f"queries-{queries}-group-{group}{'-' if mask else ''}{mask}",
                dtype=DTYPES[(index + bool(mask)) % 3],
                heads=(2 * group if group < 8 else group, 2 if group < 8 else 1),
                queries=queries,
                rows=21,
                mask=mask,
                batch=1 + (index == 1),
            )
    for dtype in DTYPES:
        yield attention_case(
            f"causal-more-queries-than-rows-{dtype}", dtype=dtype, queries=8, rows=5, mask="causal"
        )
        yield attention_case(
            f"group-16-queries-8-{dtype}", dtype=dtype, heads=(16, 1), queries=8, rows=3
        )


def _bool_masks() -> Iterator[Case]:
    shapes = {
        "row": (33,), "one": (1, 1, 1, 33), "query": (1, 1, 3, 33), "head": (4, 1, 33),
        "batch": (2, 1, 3, 33), "full": (2, 4, 3, 33),
    }  # fmt: skip
    case = partial(attention_case, queries=3, rows=33)
    for index, (kind, shape) in enumerate(shapes.items()):
        dtype = DTYPES[index % 3]
        wide = {"heads": (4, 2 if kind == "full" else 1), "batch": 2 if len(shape) == 4 else 1}
        mask = partial(bool_mask, shape=shape)
        yield case(f"bool-{kind}-{dtype}", dtype=dtype, mask=mask, **wide)
    for dtype in DTYPES:
        full = partial(bool_mask, shape=(4, 3, 33), empty=(2, 1))
        yield case(f"bool-masked-query-{dtype}", dtype=dtype, mask=full, heads=(4, 2))
        sinks = (0.5, -1, 2, -np.inf)
        yield case(
            f"bool-masked-query-sinks-{dtype}", dtype=dtype, mask=full, heads=(4, 1), sinks=sinks
        )
    nothing = partial(bool_mask, shape=(3, 33), empty=(slice(None),))
    yield case("bool-all-masked-f32", mask=nothing)
    yield case("bool-all-masked-sinks-f16", dtype="f16", mask=nothing, sinks=(0.5, 1))


def _additive_masks() -> Iterator[Case]:
    case = partial(attention_case, heads=(4, 1), queries=3, rows=33)
    kinds = build.DTYPES
    shapes = {"row": (33,), "query": (3, 33), "head": (4, 1, 33), "full": (4, 3, 33)}
    for (dtype, kind), (of, shape) in itertools.product(kinds.items(), shapes.items()):
        mask = partial(additive_mask, shape=shape, dtype=kind)
        heads = (4, 2 if of == "full" else 1)
        yield case(f"additive-{of}-{dtype}", dtype=dtype, mask=mask, heads=heads)
    for dtype, kind in kinds.items():
        lowest = float(mx.finfo(kind).min)
        for name, value in (("lowest", lowest), ("infinite", -np.inf)):
            mask = partial(additive_mask, shape=(1, 3, 33), dtype=kind, masked=(value,))
            yield case(f"additive-{name}-{dtype}", dtype=dtype, mask=mask)
        full = partial(additive_mask, shape=(4, 3, 33), dtype=kind, masked=(-np.inf, lowest))
        empty = partial(full, empty=(3, 2))
        yield case(f"additive-masked-query-{dtype}", dtype=dtype, mask=empty)
        sinks = (0.25, -np.inf, 3, 0.5)
        yield case(f"additive-masked-query-sinks-{dtype}", dtype=dtype, mask=empty, sinks=sinks)
        yield case(f"additive-nan-{dtype}", dtype=dtype, mask=partial(full, nan=(2, 0, 17)))
        yield case(f"additive-nan-first-{dtype}", dtype=dtype, mask=partial(full, nan=(0, 1, 0)))
    # The rule is finfo.min / 2: the value itself masks, the next one above it does not.
    edge = partial(
        additive_mask, shape=(3, 33), dtype=mx.float16, masked=(-32752.0, -32736.0, -65504.0)
    )
    yield case("additive-threshold-f16", dtype="f16", mask=edge)
    wide = partial(additive_mask, shape=(3, 33), dtype=mx.float32, masked=(LOWEST, -1e9))
    yield case("additive-float32-on-f16", dtype="f16", mask=wide)
    yield case("additive-float32-on-bf16", dtype="bf16", mask=wide)


def _others() -> Iterator[Case]:
    for dtype in DTYPES:
        case = partial(attention_case, dtype=dtype, heads=(4, 2))
        yield case(f"sinks-{dtype}", sinks=(0.5, -1.5, 3, 8))
        yield case(f"sinks-infinite-{dtype}", sinks=(-np.inf, 0, -np.inf, 1), queries=2)
        yield case(f"sinks-causal-{dtype}", sinks=(0.5, -1.5, 3, 8), queries=4, mask="causal")
        yield case(f"slack-{dtype}", slack=7, rows=17, batch=2)
        yield case(f"slack-causal-{dtype}", slack=31, rows=17, queries=3, mask="causal")
        yield case(f"no-lse-{dtype}", lse=False)
        yield case(f"large-logits-{dtype}", scale=8.0, rows=34)
        yield case(f"negative-scale-{dtype}", scale=-0.5)
        yield case(f"zero-scale-{dtype}", scale=0.0)
    yield attention_case("batch-3-heads-9-3-f32", batch=3, heads=(9, 3), rows=10)


def _keep() -> Iterator[Case]:
    for rows in BOUNDARIES:
        name = f"keep-rows-{rows}"
        rng, shape = generator(name), (1, 2, rows)
        keep = max(1, rows - rows // 4)
        scores, positions = spread_scores(rng, shape), shuffled_positions(rng, shape)
        yield keep_case(name, scores, positions, keep=keep)
        if rows > 1:
            zones = {"sink_size": 4, "recent_start": 2 * rows - rows // 2}
            yield keep_case(f"{name}-zones", scores, positions, keep=keep, **zones)
    rows, shape = 64, (2, 3, 64)
    rng = generator("keep")
    positions = shuffled_positions(rng, shape)
    spread = spread_scores(rng, shape)
    zones = {"sink_size": 6, "recent_start": 100}
    case = partial(keep_case, positions=positions, keep=40)
    yield case("keep-all", spread, keep=rows)
    yield case("keep-one", spread, keep=1, **zones)
    yield case("keep-ties", rng.integers(0, 3, shape) / 4.0, **zones)
    yield case("keep-all-equal", np.full(shape, 0.5), **zones)
    yield case("keep-zeros-of-both-signs", np.where(rng.random(shape) < 0.5, -0.0, 0.0))
    special = np.where(rng.random(shape) < 0.3, np.nan, spread)
    yield case("keep-nan", special, **zones)
    yield case("keep-all-nan", np.full(shape, np.nan), **zones)
    special = np.where(rng.random(shape) < 0.3, np.inf, spread)
    yield case("keep-plus-infinity", special, **zones)
    yield case("keep-minus-infinity", np.where(np.isinf(special), -np.inf, special), **zones)
    mixed = rng.choice([np.nan, np.inf, -np.inf, 0.5, 1.5], shape)
    padded = np.where(rng.random(shape) < 0.25, -1, positions)
    yield case("keep-padding", spread, positions=padded, **zones)
    yield case("keep-everything-odd", mixed, positions=padded, **zones)
    yield case("keep-more-protected", spread, keep=10, sink_size=40, recent_start=60)
    yield case("keep-all-protected", spread, sink_size=1000)
    yield case("keep-negative-recent-start", spread, positions=padded, recent_start=-5)
    yield case("keep-negative-sign-of-nan", np.where(np.isnan(special), special, -np.nan))


def _followed_traces() -> Iterator[Case]:
    """Traces with the rows that the reference has at their end."""
    for case in _traces():
        case.tensors["kept"] = mx.array(run_reference(case)["positions"][-1])
        yield case


def _traces() -> Iterator[Case]:
    for policy in ("h2o-ema", "window", "keydiff"):
        yield trace_case(f"trace-{policy}", policy=policy)
    h2o = partial(trace_case, policy="h2o", routed=True, steps=60)
    folds = {"dtype": "f32", "prefill": (40, 24, 9), "zones": (2, 16, 14), "evict_every": 3}
    yield h2o("trace-h2o-folds", **folds)
    yield h2o("trace-h2o-drops", fold=False, heads=(2, 1), prefill=(24, 8), zones=(2, 16, 6))
    yield trace_case(
        "trace-h2o-replay",
        policy="h2o-ema",
        replay=True,
        heads=(2, 1),
        prefill=(16, 16),
        steps=160,  # the scores of 300 would double the file; the runner draws such a case
        zones=(4, 28, 32),
    )


def golden_cases() -> list[Case]:
    """The cases of the committed file, in its order."""
    attention = (_sizes(), _rows(), _queries(), _bool_masks(), _additive_masks(), _others())
    cases = list(itertools.chain(*attention, _keep(), _followed_traces()))
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    return cases


def fresh_traces(seed: int) -> list[Case]:
    """Traces drawn by the runner: batches, long and short prefill, a replay, quantised rows."""
    case = partial(trace_case, seed=seed)
    return [
        case(f"trace-{seed}-h2o-batch", policy="h2o-ema", batch=2, dtype="f32"),
        case(f"trace-{seed}-h2o-bf16", policy="h2o-ema", dtype="bf16", prefill=(150,)),
        case(f"trace-{seed}-h2o-replay", policy="h2o-ema", replay=True, heads=(4, 2)),
        case(f"trace-{seed}-keydiff-short", policy="keydiff", prefill=(5,), zones=(1, 40, 23)),
        case(f"trace-{seed}-h2o-8.8", policy="h2o-ema", bits=(8, 8), dtype="f32"),
        case(f"trace-{seed}-h2o-8.4", policy="h2o-ema", bits=(8, 4), prefill=(7, 40), steps=150),
        case(f"trace-{seed}-keydiff-8.8", policy="keydiff", bits=(8, 8), dtype="f32", steps=150),
    ]


def boundary_cases() -> Iterator[Case]:
    """Shapes astride every boundary, too large for the file, drawn afresh by the runner."""
    for index, (rows, dtype) in enumerate(itertools.product(BOUNDARIES, DTYPES)):
        given: dict[str, Any] = {"dtype": dtype, "rows": rows, "heads": (8, 2), "slack": index % 3}
        given |= {"queries": 1 + index % 4, "sizes": SIZES[index % 7]}
        mask = "causal" if index % 2 else ""
        yield attention_case(f"boundary-{rows}-{dtype}", mask=mask, **given)


def random_cases(seed: int, count: int = 24) -> list[Case]:
    """Attention and selection cases of shapes and options drawn from ``seed``; every second has
    sizes that no GPU serves."""
    rng, cases = np.random.default_rng(seed), []

    def below(least: int, end: int) -> int:
        return int(rng.integers(least, end))

    for index in range(count):
        kv_heads, group = below(1, 4), int(rng.choice([1, 2, 3, 4, 8]))
        batch, queries, rows = below(1, 3), below(1, 9), below(1, 80)
        dtype, nan = str(rng.choice(DTYPES)), rng.random() < 0.5
        full = (batch, kv_heads * group, queries, rows)
        shape = (*(n if rng.random() < 0.6 else 1 for n in full[:-1]), rows)
        added = partial(additive_mask, dtype=build.DTYPES[dtype], masked=(-np.inf,))
        masks = ("", "causal", partial(bool_mask, shape=shape), partial(added, shape=shape))
        sizes = tuple(below(1, 130) if index % 2 else 32 * below(1, 7) for _ in "kv")
        case = partial(attention_case, heads=(kv_heads * group, kv_heads), batch=batch, rows=rows)
        case = partial(case, queries=queries, dtype=dtype, sizes=sizes, mask=masks[below(0, 4)])
        cases.append(
            case(
                f"random-{seed}-{index}-{dtype}",
                sinks=tuple(rng.standard_normal(kv_heads * group)) if rng.random() < 0.4 else None,
                bias=partial(row_bias, nan=nan) if rng.random() < 0.4 else None,
                slack=int(rng.choice([0, 1, 9])),
                seed=seed,
            )
        )
        select = (batch, kv_heads, rows + 1)
        scores = rng.choice([np.nan, np.inf, -np.inf, *np.arange(32) / 8], select)
        positions = np.where(rng.random(select) < 0.1, -1, shuffled_positions(rng, select))
        zones: dict[str, Any] = {"keep": below(1, rows + 2), "sink_size": below(0, 6)}
        zones["recent_start"] = below(0, 2 * rows + 2) if rng.random() < 0.6 else None
        cases.append(keep_case(f"random-{seed}-{index}-keep", scores, positions, **zones))
    return cases
