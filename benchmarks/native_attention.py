"""Speed of the native attention against the memory, MLX's own attention and mlx_lm's quantised one.

    python benchmarks/native_attention.py --json benchmarks/results/native_attention.json

With --parts the file keeps what it has of the others. What is added says itself where it was
measured.

Decode attention, one query, B=1, Hq=16, Hkv=8, D=128 unless said. A turn runs one arm over all the
caches of a case, as a model runs over its layers, and the arms take turns in rotating order. Cold
cases hold at least 256 MB of caches, more than any cache of the processor; warm ones repeat one.
"Plain read" only adds up the words of the same keys and values. Ratios compare turns of one round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import quantized_scaled_dot_product_attention

import mlx_h2o
from mlx_h2o import _core
from mlx_h2o.demo import report
from mlx_h2o.evaluation.statistics import spread
from mlx_h2o.operations import native
from mlx_h2o.operations.requests import attention_request

COLD_BYTES = 256 << 20
HEADS, KV_HEADS, WIDTH = 16, 8, 128
SCALE = WIDTH**-0.5
GROUP = 64
THRESHOLD = 1e-6
PARTS = ("dense", "packed", "sparse", "groups", "bias")
LOAD = "load_average_before_and_after"
DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}

Layer = tuple[Any, Any]  # keys and values: an array each, or packed words, scales and biases
Run = Callable[[mx.array, Layer], Any]


class Arm:
    """One way to do the work of a case. ``calls`` bounds how many layers a turn takes."""

    def __init__(self, name: str, run: Run, threads: int = 1, calls: int | None = None) -> None:
        self.name = name
        self.run = run
        self.threads = threads
        self.calls = calls
        self.seconds: list[float] = []

    def turn(self, queries: mx.array, layers: list[Layer]) -> float:
        mlx_h2o.set_threads(self.threads)
        chosen = layers[: self.calls]
        start = time.perf_counter()
        mx.eval([self.run(queries, layer) for layer in chosen])
        return (time.perf_counter() - start) / len(chosen)


def plain_read(queries: mx.array, layer: Layer) -> list[mx.array]:
    _core.plain_read([array for side in layer for array in arrays(side)])
    return []


def arrays(side: Any) -> list[mx.array]:
    return list(side) if isinstance(side, tuple) else [side]


def dense(scores: bool = False, bias: mx.array | None = None) -> Run:
    """With and without scores by the same calls, so that a ratio compares the kernels."""

    def run(queries: mx.array, layer: Layer) -> Any:
        request = attention_request(
            queries, *layer, scale=SCALE, row_bias=bias, return_scores=scores
        )
        out, found, *_ = native.attention(request)
        return (out, found) if scores else out

    return run


def packed(
    bits: int, scores: bool = False, threshold: float = 0.0, bias: mx.array | None = None
) -> Run:
    def run(queries: mx.array, layer: Layer) -> Any:
        request = attention_request(
            queries,
            *layer,
            scale=SCALE,
            bits=bits,
            group_size=GROUP,
            row_bias=bias,
            sparse_v_threshold=threshold,
            return_scores=scores,
        )
        out, found, *_ = native.attention(request)
        return (out, found) if scores else out

    return run


def stock(queries: mx.array, layer: Layer) -> mx.array:
    return mx.fast.scaled_dot_product_attention(queries, *layer, scale=SCALE, mask=None)


def stock_packed(bits: int) -> Run:
    def run(queries: mx.array, layer: Layer) -> mx.array:
        out: mx.array = quantized_scaled_dot_product_attention(
            queries, *layer, scale=SCALE, mask=None, group_size=GROUP, bits=bits
        )
        return out

    return run


def random_rows(rows: int, dtype: mx.Dtype) -> mx.array:
    """Random in blocks of 1024: what the numbers are does not matter to the time."""
    block = mx.random.normal((1, KV_HEADS, min(rows, 1024), WIDTH)).astype(dtype)
    return mx.contiguous(mx.concatenate([block] * (rows // block.shape[2]), axis=2))


def size_of(layer: Layer) -> int:
    return sum(array.nbytes for side in layer for array in arrays(side))


def make_layers(make: Callable[[], Layer], cold: bool) -> list[Layer]:
    layers = [make()]
    mx.eval(layers)
    count = -(-COLD_BYTES // size_of(layers[0])) if cold else 1
    for _ in range(count - 1):
        layers.append(make())
        mx.eval(layers[-1])
    return layers


def dense_layer(rows: int, dtype: mx.Dtype) -> Layer:
    return random_rows(rows, dtype), random_rows(rows, dtype)


def packed_layer(rows: int, bits: int, dtype: mx.Dtype = mx.float16) -> Layer:
    def pack() -> tuple[mx.array, ...]:
        return tuple(mx.quantize(random_rows(rows, dtype), group_size=GROUP, bits=bits))

    return pack(), pack()


def heavy_layer(rows: int) -> Layer:
    """8-bit rows of which one in ten holds all of the weight, for queries from heavy_queries."""
    keys = 0.1 * random_rows(rows, mx.float32)
    heavy = mx.random.uniform(shape=(rows, 1)) < 0.1
    first = mx.where(heavy, 1.0, -1.0)
    keys = mx.concatenate([mx.broadcast_to(first, (*keys.shape[:3], 1)), keys[..., 1:]], axis=-1)
    pack = tuple(mx.quantize(keys.astype(mx.float16), group_size=GROUP, bits=8))
    return pack, packed_layer(rows, 8)[1]


def heavy_queries() -> mx.array:
    first = mx.full((1, HEADS, 1, 1), 15.0 / SCALE)
    rest = mx.random.normal((1, HEADS, 1, WIDTH - 1))
    return mx.concatenate([first, rest], axis=-1).astype(mx.float16)


class Case:
    """Groups of (arms, queries, layers) that take turns together."""

    def __init__(self, title: str, rows: int, cold: bool) -> None:
        self.title, self.rows, self.cold = title, rows, cold
        self.entries: list[tuple[Arm, mx.array, list[Layer]]] = []

    def add(self, queries: mx.array, layers: list[Layer], *arms: Arm) -> None:
        self.entries += [(arm, queries, layers) for arm in arms]

    def measure(self, repeats: int) -> None:
        for arm, queries, layers in self.entries:
            arm.turn(queries, layers)
        for repeat in range(repeats):
            for turn in range(len(self.entries)):
                arm, queries, layers = self.entries[(repeat + turn) % len(self.entries)]
                # A short turn is repeated, so that the clock and the start do not matter.
                times = 1 if self.cold else 20
                taken = [arm.turn(queries, layers) for _ in range(times)]
                arm.seconds.append(statistics.median(taken))

    def result(self, compare: list[tuple[str, str, str]]) -> dict[str, Any]:
        """``compare`` lists (what, arm, arm): the time of the first over that of the second."""
        by_name = {arm.name: arm for arm, _, _ in self.entries}
        times = {}
        for arm, _, layers in self.entries:
            rate = size_of(layers[0]) / min(arm.seconds) / 1e9
            times[arm.name] = {
                "microseconds": spread([1e6 * s for s in arm.seconds], 1),
                "best_gigabytes_per_second": round(rate, 2),
            }
        ratios = {}
        for what, one, other in compare:
            pairs = zip(by_name[one].seconds, by_name[other].seconds, strict=True)
            ratios[what] = spread([a / b for a, b in pairs], 3)
            best = min(by_name[one].seconds) / min(by_name[other].seconds)
            ratios[what]["of_best_times"] = round(best, 3)
        return {
            "case": self.title,
            "rows": self.rows,
            "caches": "cold" if self.cold else "warm",
            "arms": times,
            "ratios": ratios,
        }


def few(layer: Layer) -> int:
    """Calls of a slow arm per turn: about 32 MB."""
    return max(1, (32 << 20) // size_of(layer))


def dense_case(name: str, rows: int, cold: bool, threads: list[int], repeats: int) -> Any:
    dtype = DTYPES[name]
    case = Case(f"dense {name}", rows, cold)
    layers = make_layers(lambda: dense_layer(rows, dtype), cold)
    queries = mx.random.normal((1, HEADS, 1, WIDTH)).astype(dtype)
    compare = []
    for n in threads:
        arms = [Arm(f"plain read, {n}", plain_read, n), Arm(f"ours, {n}", dense(), n)]
        arms.append(Arm(f"ours with scores, {n}", dense(scores=True), n))
        case.add(queries, layers, *arms)
        compare.append((f"share of plain read, {n}", f"plain read, {n}", f"ours, {n}"))
        compare.append((f"scores on / off, {n}", f"ours with scores, {n}", f"ours, {n}"))
    case.add(queries, layers, Arm("mx.fast", stock, max(threads), few(layers[0])))
    compare += [(f"mx.fast / ours, {n}", "mx.fast", f"ours, {n}") for n in threads]
    case.measure(repeats)
    result = case.result(compare)
    added = HEADS * rows * 4 / size_of(layers[0])
    result["bar_of_scores_on_off"] = round(1.02 + added, 4)
    return result


def packed_case(rows: int, cold: bool, threads: list[int], repeats: int) -> Any:
    case = Case("8 and 4 bits, float16", rows, cold)
    queries = mx.random.normal((1, HEADS, 1, WIDTH)).astype(mx.float16)
    layers = {
        16: make_layers(lambda: dense_layer(rows, mx.float16), cold),
        8: make_layers(lambda: packed_layer(rows, 8), cold),
        4: make_layers(lambda: packed_layer(rows, 4), cold),
    }
    compare = []
    for n in threads:
        case.add(queries, layers[16], Arm(f"float16, {n}", dense(), n))
        for bits in (8, 4):
            case.add(
                queries,
                layers[bits],
                Arm(f"plain read {bits} bits, {n}", plain_read, n),
                Arm(f"{bits} bits, {n}", packed(bits), n),
                Arm(f"{bits} bits with scores, {n}", packed(bits, scores=True), n),
            )
            ours = f"{bits} bits, {n}"
            compare += [
                (f"{bits} bits / float16, {n}", ours, f"float16, {n}"),
                (f"share of plain read, {bits} bits, {n}", f"plain read {bits} bits, {n}", ours),
                (f"scores on / off, {bits} bits, {n}", f"{bits} bits with scores, {n}", ours),
            ]
    if rows <= 16384:
        for bits in (8, 4):
            slow = Arm(f"mlx_lm {bits} bits", stock_packed(bits), max(threads), 1)
            case.add(queries, layers[bits], slow)
            compare += [
                (f"mlx_lm / ours, {bits} bits, {n}", slow.name, f"{bits} bits, {n}")
                for n in threads
            ]
    case.measure(repeats)
    result = case.result(compare)
    for bits in (8, 4):
        added = HEADS * rows * 4 / size_of(layers[bits][0])
        result[f"bar_of_scores_on_off_{bits}_bits"] = round(1.02 + added, 4)
    return result


def sparse_case(rows: int, threads: list[int], repeats: int) -> Any:
    case = Case("sparse V, 8 bits, 90 % of the rows below the threshold", rows, True)
    layers = make_layers(lambda: heavy_layer(rows), True)
    queries = heavy_queries()
    compare = []
    for n in threads:
        off, on = Arm(f"off, {n}", packed(8), n), Arm(f"on, {n}", packed(8, False, THRESHOLD), n)
        case.add(queries, layers, off, on)
        compare.append((f"off / on, {n}", off.name, on.name))
    request = attention_request(
        queries,
        *layers[0],
        scale=SCALE,
        sparse_v_threshold=THRESHOLD,
        return_skipped=True,
    )
    skipped = native.attention(request)[3]
    assert skipped is not None
    case.measure(repeats)
    return {**case.result(compare), "share_skipped": round(skipped.mean().item(), 4)}


def bias_case(rows: int, threads: list[int], repeats: int) -> Any:
    """What a bias of rows costs: its array, and an addition for each logit."""
    case = Case("bias of rows, float16 and 8 bits", rows, True)
    queries = mx.random.normal((1, HEADS, 1, WIDTH)).astype(mx.float16)
    bias = mx.log(mx.random.randint(1, 9, (1, KV_HEADS, rows)).astype(mx.float32))
    mx.eval(queries, bias)
    forms = {
        "float16": (lambda: dense_layer(rows, mx.float16), dense(), dense(bias=bias)),
        "8 bits": (lambda: packed_layer(rows, 8), packed(8), packed(8, bias=bias)),
    }
    compare = []
    for form, (make, without, biased) in forms.items():
        layers = make_layers(make, True)
        for n in threads:
            off, on = Arm(f"{form}, {n}", without, n), Arm(f"{form} with bias, {n}", biased, n)
            case.add(queries, layers, off, on)
            compare.append((f"bias on / off, {form}, {n}", on.name, off.name))
    case.measure(repeats)
    return case.result(compare)


def group_case(name: str, rows: int, threads: list[int], repeats: int) -> Any:
    dtype = DTYPES[name]
    case = Case(f"query heads per KV head, {name}", rows, True)
    layers = make_layers(lambda: dense_layer(rows, dtype), True)
    compare = []
    for n in threads:
        for group in (1, 2, 4, 8, 16):
            queries = mx.random.normal((1, KV_HEADS * group, 1, WIDTH)).astype(dtype)
            case.add(queries, layers, Arm(f"{group}, {n}", dense(), n))
        compare.append((f"8 / 1, {n}", f"8, {n}", f"1, {n}"))
        compare.append((f"16 / 1, {n}", f"16, {n}", f"1, {n}"))
    case.measure(repeats)
    return case.result(compare)


def cases(quick: bool, parts: list[str], *settings: Any) -> Iterator[Any]:
    if "dense" in parts:
        for name in DTYPES:
            for rows in (1024, 4096) if quick else (1024, 4096, 16384, 65536):
                yield dense_case(name, rows, True, *settings)
            if not quick:
                yield dense_case(name, 1024, False, *settings)
    if "packed" in parts:
        for rows in (1024, 4096) if quick else (1024, 4096, 16384, 32768):
            yield packed_case(rows, True, *settings)
        if not quick:
            yield packed_case(1024, False, *settings)
    if "sparse" in parts:
        yield sparse_case(32768, *settings)
    if "bias" in parts:
        for rows in (256, 4096) if quick else (256, 1024, 4096):
            yield bias_case(rows, *settings)
    if "groups" in parts:
        for name in ("float16",) if quick else DTYPES:
            yield group_case(name, 16384, *settings)


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """``old`` with the runs of ``new``, which say where they come from, in the place of those of
    the same cases."""
    cases = {run["case"] for run in new["runs"]}
    kept = [run for run in old["runs"] if run["case"] not in cases]
    where = {name: new[name] for name in ("environment", "repeats", LOAD)}
    return {**old, "runs": [*kept, *({**run, **where} for run in new["runs"])]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="fewer lengths, about a minute")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--json", type=Path, help="write the result here")
    arguments = parser.parse_args()
    if arguments.repeats < 5:
        parser.error("expected at least 5 repeats")
    some = arguments.json and arguments.json.exists() and set(arguments.parts) != set(PARTS)
    old = json.loads(arguments.json.read_text()) if some else None  # fails now, not at the end
    environment = {**report.environment(), "simd": _core.simd_target()}
    load = os.getloadavg()[0]
    runs: list[Any] = []
    with mlx_h2o.use_backend("native"), mx.stream(mx.cpu):
        chosen = arguments.quick, arguments.parts, arguments.threads, arguments.repeats
        for run in cases(*chosen):
            runs.append(run)
            print(f"{run['case']}, N={run['rows']}, {run['caches']}")
            for arm, found in run["arms"].items():
                taken = found["microseconds"]
                print(
                    f"  {arm:26} {taken['min']:10.1f} / {taken['median']:10.1f} / "
                    f"{taken['max']:10.1f} us, {found['best_gigabytes_per_second']:7.2f} GB/s"
                )
            for what, found in run["ratios"].items():
                print(
                    f"  {what:36} {found['min']:8.3f} / {found['median']:8.3f} / "
                    f"{found['max']:8.3f}, best {found['of_best_times']:8.3f}",
                    flush=True,
                )
            mx.clear_cache()
    result = {
        "environment": environment,
        "repeats": arguments.repeats,
        "shape": {"B": 1, "Hq": HEADS, "Hkv": KV_HEADS, "D": WIDTH, "group_size": GROUP},
        LOAD: [round(load, 2), round(os.getloadavg()[0], 2)],
        "runs": runs,
    }
    if arguments.json:
        found = result if old is None else merged(old, result)
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
