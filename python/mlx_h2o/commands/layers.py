"""`mlx_h2o layers`: which KV heads of a model retrieve, and the rows of each, as a file."""

import argparse
import json

from ..lm.files import write_text
from ..lm.generate import load
from ..lm.layers import probe
from ..lm.prompt_cache import budgets_of, make_prompt_cache
from ..lm.ranks import Ranks
from .flags import ROWS, add_flags
from .options import CacheSettings
from .parsing import OneLineParser


def parser() -> OneLineParser:
    found = OneLineParser(
        "Find the KV heads of a model that retrieve, by reading random tokens twice, and show the "
        "rows of each. The file is for --budgets.",
    )
    add_flags(found, "model output", model=...)
    rows, stay = map(found.add_argument_group, ("rows of the KV cache", "which rows stay"))
    add_flags(rows, "max-kv-size", max_kv_size=(int, argparse.SUPPRESS, "ROWS", ROWS))
    add_flags(stay, "sink-size context-size")
    return found


def run(args: argparse.Namespace, settings: CacheSettings, ranks: Ranks) -> None:
    """Probe a model, print the result, and write the rows of each head."""
    model, _ = load(args.model)
    rows = budgets_of(make_prompt_cache(model, settings.config))
    found = probe(model)
    if found.reason:
        print(f"The same rows for every KV head: the model {found.reason}.")
    for layer, (many, gives) in enumerate(zip(rows, found.gives, strict=False)):
        own = ", ".join(f"{one:,}" for one in (many if isinstance(many, list) else [many]))
        said = ", ".join(f"{one:.3f}" for one in gives)
        print(f"layer {layer:3}: {own} rows a head; retrieval {said}")
    if args.output is not None:
        write_text(args.output, json.dumps({"budgets": rows}) + "\n")
        print(f"wrote {args.output}")
