"""Speed of native attention against plain reads, MLX's own attention and mlx_lm's quantised one.

    python benchmarks/native_attention.py --json benchmarks/results/native_attention.json

With --parts the file keeps the results of other parts. Added results name the machine that they
were measured on.

Decode attention: one query, B=1, Hq=16, Hkv=8, D=128 unless stated. A turn runs one arm over all KV
caches of a case, like a model over its layers: at least 256 MB, more than the processor's caches
hold. "Plain read" only adds up the words of the same keys and values. Ratios compare turns of the
same round.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import quantized_scaled_dot_product_attention

import mlx_h2o
from lib import common
from mlx_h2o import _core
from mlx_h2o.evaluation.statistics import in_turns, ratios, spread
from mlx_h2o.operations.backends import resolve

COLD_BYTES = 256 << 20
HEADS, KV_HEADS, WIDTH = 16, 8, 128
SCALE = WIDTH**-0.5
THRESHOLD = 1e-6
PARTS = ("dense", "packed", "sparse", "bias")
DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}

Layer = tuple[Any, Any]  # keys and values: an array each, or packed words, scales and biases
Run = Callable[..., Any]  # called with queries, keys and values
Compared = list[tuple[str, str, str]]
"""A title and two arms: the time of the first divided by that of the second."""


@dataclass(frozen=True)
class Arm:
    """One way to do the work of a case. A call is one turn and returns seconds per layer."""

    run: Run
    queries: mx.array
    layers: Sequence[Layer]
    threads: int = 1

    def __call__(self) -> float:
        mlx_h2o.set_threads(self.threads)
        start = time.perf_counter()
        mx.eval([self.run(self.queries, *layer) for layer in self.layers])
        return (time.perf_counter() - start) / len(self.layers)


def ours(*rows: Any, **given: Any) -> Any:
    """Makes the same calls with and without scores, so that a ratio compares the kernels."""
    return resolve().attention(*rows, scale=SCALE, **given)[:2]


def plain_read(queries: mx.array, *layer: Any) -> list[mx.array]:
    _core.plain_read(arrays(layer))
    return []


with_scores = partial(ours, return_scores=True)
stock = partial(mx.fast.scaled_dot_product_attention, scale=SCALE, mask=None)
stock_packed = partial(quantized_scaled_dot_product_attention, scale=SCALE, mask=None)


def arrays(layer: Sequence[Any]) -> list[mx.array]:
    return [one for side in layer for one in (side if isinstance(side, tuple) else (side,))]


def size_of(layer: Layer) -> int:
    return sum(array.nbytes for array in arrays(layer))


def random_rows(rows: int, dtype: mx.Dtype) -> mx.array:
    """One random block of 1024 rows, repeated: the time does not depend on the numbers."""
    block = mx.random.normal((1, KV_HEADS, min(rows, 1024), WIDTH)).astype(dtype)
    return mx.contiguous(mx.concatenate([block] * (rows // block.shape[2]), axis=2))


def random_queries(dtype: mx.Dtype = mx.float16) -> mx.array:
    return mx.random.normal((1, HEADS, 1, WIDTH)).astype(dtype)


def dense_layer(rows: int, dtype: mx.Dtype) -> Layer:
    return random_rows(rows, dtype), random_rows(rows, dtype)


def packed_layer(rows: int, bits: int) -> Layer:
    keys, values = (tuple(mx.quantize(one, bits=bits)) for one in dense_layer(rows, mx.float16))
    return keys, values


def heavy_layer(rows: int) -> Layer:
    """8-bit rows, one in ten of which get all the weight from queries of heavy_queries."""
    keys = 0.1 * random_rows(rows, mx.float32)
    first = mx.where(mx.random.uniform(shape=(rows, 1)) < 0.1, 1.0, -1.0)
    keys = mx.concatenate([mx.broadcast_to(first, (*keys.shape[:3], 1)), keys[..., 1:]], axis=-1)
    return tuple(mx.quantize(keys.astype(mx.float16), bits=8)), packed_layer(rows, 8)[1]


def heavy_queries() -> mx.array:
    first = mx.full((1, HEADS, 1, 1), 15.0 / SCALE)
    rest = mx.random.normal((1, HEADS, 1, WIDTH - 1))
    return mx.concatenate([first, rest], axis=-1).astype(mx.float16)


def make_layers(make: Callable[[], Layer]) -> list[Layer]:
    layers: list[Layer] = []
    while not layers or len(layers) * size_of(layers[0]) < COLD_BYTES:
        layers.append(make())
        mx.eval(layers[-1])
    return layers


def few(layers: Sequence[Layer]) -> Sequence[Layer]:
    """About 32 MB of the layers, for a slow arm."""
    return layers[: max(1, (32 << 20) // size_of(layers[0]))]


def case(
    title: str,
    rows: int,
    arms: dict[str, Arm],
    compare: Compared,
    threads: Sequence[int],
    repeats: int,
) -> dict[str, Any]:
    """Figures of the arms with each number of threads."""
    every = {f"{name}, {n}": replace(arm, threads=n) for n in threads for name, arm in arms.items()}
    in_turns(every, 1)  # warms up
    turns = in_turns(every, repeats)
    best = {name: min(found) for name, found in turns.items()}
    found: dict[str, Any] = {}
    for name, own in turns.items():
        speed = size_of(every[name].layers[0]) / best[name] / 1e9
        found[name] = {
            "microseconds": spread([1e6 * seconds for seconds in own], 1),
            "best_gigabytes_per_second": round(speed, 2),
        }
    compared = {}
    for what, *pair in compare:
        for n in threads:
            one, other = (f"{name}, {n}" for name in pair)
            compared[f"{what}, {n}"] = ratios(turns[one], turns[other], 3) | {
                "of_best_times": round(best[one] / best[other], 3)
            }
    return {"case": title, "rows": rows, "caches": "cold", "arms": found, "ratios": compared}


def dense_case(name: str, rows: int, *settings: Any) -> Any:
    layers = make_layers(partial(dense_layer, rows, DTYPES[name]))
    queries = random_queries(DTYPES[name])
    arms = {
        "plain read": Arm(plain_read, queries, layers),
        "ours": Arm(ours, queries, layers),
        "ours with scores": Arm(with_scores, queries, layers),
        "mx.fast": Arm(stock, queries, few(layers)),
    }
    compare = [
        ("share of plain read", "plain read", "ours"),
        ("scores on / off", "ours with scores", "ours"),
        ("mx.fast / ours", "mx.fast", "ours"),
    ]
    return case(f"dense {name}", rows, arms, compare, *settings)


def packed_case(rows: int, *settings: Any) -> Any:
    queries = random_queries()
    dense = make_layers(partial(dense_layer, rows, mx.float16))
    arms, compare = {"float16": Arm(ours, queries, dense)}, []
    for bits in (8, 4):
        layers, own = make_layers(partial(packed_layer, rows, bits)), f"{bits} bits"
        of = {"bits": bits, "v_bits": bits}
        arms |= {
            f"plain read {own}": Arm(plain_read, queries, layers),
            own: Arm(partial(ours, **of), queries, layers),
            f"{own} with scores": Arm(partial(with_scores, **of), queries, layers),
        }
        compare += [
            (f"{own} / float16", own, "float16"),
            (f"share of plain read, {own}", f"plain read {own}", own),
            (f"scores on / off, {own}", f"{own} with scores", own),
        ]
        if rows <= 16384:
            arms[f"mlx_lm {own}"] = Arm(partial(stock_packed, bits=bits), queries, layers[:1])
            compare.append((f"mlx_lm / ours, {own}", f"mlx_lm {own}", own))
    return case("8 and 4 bits, float16", rows, arms, compare, *settings)


def sparse_case(rows: int, *settings: Any) -> Any:
    layers, queries = make_layers(partial(heavy_layer, rows)), heavy_queries()
    sparse = partial(ours, sparse_v_threshold=THRESHOLD)
    arms = {"off": Arm(ours, queries, layers), "on": Arm(sparse, queries, layers)}
    given = {"scale": SCALE, "sparse_v_threshold": THRESHOLD, "return_skipped": True}
    skipped = resolve().attention(queries, *layers[0], **given)[3]
    title = "sparse V, 8 bits, 90 % of the rows below the threshold"
    found = case(title, rows, arms, [("off / on", "off", "on")], *settings)
    return found | {"share_skipped": round(skipped.mean().item(), 4)}


def bias_case(rows: int, *settings: Any) -> Any:
    """The cost of a row bias: reading its array, and one addition per logit."""
    queries = random_queries()
    bias = mx.log(mx.random.randint(1, 9, (1, KV_HEADS, rows)).astype(mx.float32))
    mx.eval(queries, bias)
    arms, compare = {}, []
    for form, make, of in (("float16", dense_layer, mx.float16), ("8 bits", packed_layer, 8)):
        layers = make_layers(partial(make, rows, of))
        arms[form] = Arm(ours, queries, layers)
        arms[f"{form} with bias"] = Arm(partial(ours, row_bias=bias), queries, layers)
        compare.append((f"bias on / off, {form}", f"{form} with bias", form))
    return case("bias of rows, float16 and 8 bits", rows, arms, compare, *settings)


def cases(parts: Sequence[str], *settings: Any) -> Iterator[Any]:
    for name in DTYPES if "dense" in parts else ():
        for rows in (1024, 4096, 16384, 65536):
            yield dense_case(name, rows, *settings)
    for rows in (1024, 4096, 16384, 32768) if "packed" in parts else ():
        yield packed_case(rows, *settings)
    if "sparse" in parts:
        yield sparse_case(32768, *settings)
    for rows in (256, 1024, 4096) if "bias" in parts else ():
        yield bias_case(rows, *settings)


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """``old``, with runs replaced by those of ``new`` for the same cases; new runs say where they
    were measured."""
    cases = {run["case"] for run in new["runs"]}
    kept = [run for run in old["runs"] if run["case"] not in cases]
    where = {name: one for name, one in new.items() if name not in ("runs", "shape")}
    return {**old, "runs": [*kept, *({**run, **where} for run in new["runs"])]}


def main() -> None:
    args = common.arguments(__doc__, threads=(1, 2), repeats=7, parts=PARTS)
    some = args.json and args.json.exists() and set(args.parts) != set(PARTS)
    old = json.loads(args.json.read_text()) if some else None  # fails now, not at the end
    runs: list[Any] = []
    with mlx_h2o.use_backend("native"), mx.stream(mx.cpu):
        for run in cases(args.parts, args.threads, args.repeats):
            runs.append(run)
            print(f"{run['case']}, N={run['rows']}, {run['caches']}")
            for name, found in (*run["arms"].items(), *run["ratios"].items()):
                common.show(name, found)
            mx.clear_cache()
    shape = {"B": 1, "Hq": HEADS, "Hkv": KV_HEADS, "D": WIDTH, "group_size": 64}
    found = common.described({"repeats": args.repeats, "shape": shape, "runs": runs})
    common.write(args.json, found if old is None else merged(old, found))


if __name__ == "__main__":
    main()
