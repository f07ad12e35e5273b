"""A long text in a fixed number of bytes: do loss, bytes and merged rows stay as they are?

    python benchmarks/long_text.py --models demo DIR --texts BOOK.txt \\
        --strategies rotating:bytes=196608 merge:bytes=196608:kv4 \\
        merge:bytes=196608:kv4:context=0 --json benchmarks/results/long_text.json

Each strategy reads the same 20,000 tokens, 8 at a time. After each segment stand the mean loss of
its tokens, the bytes, the longest key and value, and the greatest bias of a row, which is ln n of
the n rows in it. Strategies are those of `mlx_h2o evaluate`. `context=0`: rows beyond the trained
context do not go first. Runs that the result has of the same texts stay, but for those done again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.losses import cross_entropy
from tqdm import tqdm

import mlx_h2o
from mlx_h2o.evaluation.arms import Footprint, resolve
from mlx_h2o.evaluation.environment import environment
from mlx_h2o.evaluation.strategies import parse
from mlx_h2o.lm.prompt_cache import evicting_caches
from mlx_h2o.lm.routing import routing_for

CHUNK = 8


def lengths(caches: list[Any]) -> dict[str, float]:
    """The longest key and value of all layers, and the greatest bias of a row."""
    found = {"longest_key": 0.0, "longest_value": 0.0, "greatest_bias": 0.0}
    for cache in evicting_caches(caches):
        for name, rows in zip(("key", "value"), cache.keys_and_values(), strict=True):
            if not isinstance(rows, mx.array):
                bits = cache.config.v_bits if name == "value" else None
                rows = mx.dequantize(
                    *rows,
                    group_size=rows[0].shape[-1] * 32 // cache.config.kv_bits // rows[1].shape[-1],
                    bits=bits or cache.config.kv_bits,
                )
            longest = mx.max(mx.linalg.norm(rows.astype(mx.float32), axis=-1)).item()
            found[f"longest_{name}"] = max(found[f"longest_{name}"], longest)
        if cache.row_bias is not None:
            found["greatest_bias"] = max(found["greatest_bias"], mx.max(cache.row_bias).item())
    return {name: round(value, 4) for name, value in found.items()}


def measure(
    model: Any, footprint: Footprint, strategy: str, tokens: mx.array, segment: int
) -> dict[str, Any]:
    """What the strategy loses in each segment of the text, and what it holds after it."""
    arm = resolve(footprint, parse(strategy), tokens.size - 1)
    caches = arm.make(0)
    points = []
    with (
        routing_for(model, [*evicting_caches(caches)]),
        tqdm(total=tokens.size - 1, desc=strategy, disable=None) as bar,
    ):
        for start in range(0, tokens.size - 1, segment):
            stop = min(start + segment, tokens.size - 1)
            losses = []
            for at in range(start, stop, CHUNK):
                end = min(at + CHUNK, stop)
                logits = model(tokens[None, at:end], cache=caches)
                losses.append(cross_entropy(logits[0], tokens[at + 1 : end + 1]))
                mx.eval(losses[-1], [cache.state for cache in caches])
                bar.update(end - at)
            points.append(
                {
                    "tokens": stop,
                    "loss": round(mx.mean(mx.concatenate(losses)).item(), 4),
                    "bytes": sum(cache.nbytes for cache in caches),
                    **lengths(caches),
                }
            )
    return {"strategy": strategy, "rows": arm.rows, "points": points}


def _earlier(path: Path | None, texts: list[str]) -> list[dict[str, Any]]:
    """The runs of a result that is there already, if they are of the same texts, read alike."""
    found = json.loads(path.read_text("utf-8")) if path and path.exists() else {}
    same = found.get("texts") == texts and found.get("chunk") == CHUNK
    return list(found["runs"]) if same else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", required=True, help='folders, or "demo"')
    parser.add_argument("--texts", nargs="+", type=Path, required=True, help="read one by one")
    parser.add_argument("--strategies", nargs="+", required=True)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--segment", type=int, default=2_000)
    parser.add_argument("--json", type=Path, help="write the result here")
    arguments = parser.parse_args()
    texts = [path.name for path in arguments.texts]
    runs = _earlier(arguments.json, texts)
    for name in arguments.models:
        model, tokenizer = mlx_h2o.load(name)
        text = "\n".join(path.read_text("utf-8") for path in arguments.texts)
        # Front matter is not the text.
        words = tokenizer.encode(text[5_000 : 5_000 + 8 * arguments.tokens])
        tokens = mx.array(words[: arguments.tokens + 1])
        footprint = Footprint(model)
        for strategy in arguments.strategies:
            given = strategy.replace("{model}", Path(name).name)
            run = measure(model, footprint, given, tokens, arguments.segment)
            key = Path(name).name, run["strategy"]
            runs = [one for one in runs if (one["model"], one["strategy"]) != key]
            runs.append({"model": Path(name).name, **run})
            if arguments.json:
                result = {"environment": environment(), "texts": texts, "chunk": CHUNK}
                arguments.json.write_text(json.dumps(result | {"runs": runs}, indent=1) + "\n")
            losses = ", ".join(f"{point['loss']:.3f}" for point in run["points"])
            print(f"{Path(name).name} {given}: {losses}; {run['points'][-1]}", flush=True)


if __name__ == "__main__":
    main()
