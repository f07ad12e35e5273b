#!/usr/bin/env python3
"""Write the embedded demo model: `books-5m` as a small mlx-lm model directory.

    python tools/make_demo_model.py SOURCE                # writes python/mlx_h2o/demo/model
    python tools/make_demo_model.py SOURCE --measure DIR  # perplexity and recall of both

The weights are stored in float16, half the size, and used in float32 (`mlx_h2o.load("demo")`
upcasts them): MLX's CPU back end is many times slower in float16. `--measure` shows what the
rounding costs; MODEL_CARD.md quotes it.
"""

import argparse
import json
import math
import re
import shutil
import sys
from pathlib import Path

import mlx.core as mx

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "python" / "mlx_h2o" / "demo" / "model"
WRITTEN_BY_HAND = ("LICENSE", "MODEL_CARD.md")

WINDOW = 1024
WINDOWS_PER_BOOK = 4  # of the 20,000 characters read of each book


def convert(source: Path, target: Path) -> None:
    """Write weights (float16), configuration and tokenizer of `source` to `target`."""
    missing = [name for name in WRITTEN_BY_HAND if not (target / name).is_file()]
    if missing:
        raise SystemExit(f"{target} lacks {', '.join(missing)}: these are written by hand")
    weights = mx.load(str(source / "model.safetensors"))
    halves = {name: weights[name].astype(mx.float16) for name in sorted(weights)}
    overflow = [name for name, value in halves.items() if not mx.all(mx.isfinite(value)).item()]
    if overflow:
        raise SystemExit(f"not representable in float16: {', '.join(overflow)}")
    mx.save_safetensors(str(target / "model.safetensors"), halves, metadata={"format": "mlx"})
    config = json.loads((source / "config.json").read_text())
    config["torch_dtype"] = "float16"
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / name, target / name)
        (target / name).chmod(0o644)


def measure(model_dir: Path, books: Path) -> tuple[float, float]:
    """Perplexity over `books` in windows of 1024 tokens, and recall of planted facts, full cache.

    Recall is the share of facts answered in full, 8 planted in 900 tokens of each book.
    """
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model, load_tokenizer

    from mlx_h2o.evaluation import reading
    from mlx_h2o.evaluation.questions import Settings, planted_texts

    model, _ = load_model(model_dir)
    model.set_dtype(mx.float32)
    tokenizer = load_tokenizer(model_dir)
    total, count, recalled, asked = 0.0, 0, 0, 0
    for seed, book in enumerate(sorted(books.glob("*.txt"))):
        text = re.sub(r"[ \t]+", " ", book.read_text(errors="ignore")[50_000:70_000])
        tokens = tokenizer.encode(text, add_special_tokens=False)
        for start in range(0, WINDOW * WINDOWS_PER_BOOK, WINDOW):
            window = mx.array(tokens[start : start + WINDOW + 1])
            logits = model(window[None, :-1])[0]
            chosen = mx.take_along_axis(logits, window[1:, None], axis=-1)[:, 0]
            losses = mx.logsumexp(logits, axis=-1) - chosen
            total += losses.sum().item()
            count += losses.size
        settings = Settings(documents=1, facts=8, wordings=("secret",), seed=seed)
        (planted,) = planted_texts(tokenizer, [(book.name, text)], 900, settings)
        cache = make_prompt_cache(model)
        reading.read(model, cache, mx.array([planted.text]), 128)
        for prompt, answer in planted.asked:
            right = reading.answers(model, cache, mx.array([prompt]), mx.array([answer]))
            recalled, asked = recalled + bool(right.all().item()), asked + 1
    return math.exp(total / count), recalled / asked


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, metavar="SOURCE", help="the model in float32")
    parser.add_argument("--target", type=Path, default=TARGET)
    parser.add_argument("--measure", type=Path, metavar="DIR", help="held-out books (*.txt)")
    arguments = parser.parse_args()
    if arguments.measure is None:
        convert(arguments.source, arguments.target)
        return 0
    for name, directory in (("float32", arguments.source), ("float16, upcast", arguments.target)):
        perplexity, recall = measure(directory, arguments.measure)
        print(f"{name}: perplexity {perplexity:.3f}, facts recalled {recall:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
