"""The results of one process of a group with small models, as JSON: run by tests/lm/test_ranks.py.

    python ranks_program.py FILE [FOLDER]

With the folder of a model on disk, its results with that model instead.
"""

import json
import os
import sys
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models import qwen2

import mlx_h2o
from mlx_h2o import demo, fit_bytes
from mlx_h2o.lm import layers
from mlx_h2o.lm.models import fingerprint
from mlx_h2o.lm.ranks import ranks_of
from mlx_h2o.lm.routing import evicting_caches
from tiny_models import SMALL, random_prompt, spread, tiny_llama, tiny_qwen3, tiny_tokenizer

HEADS = {"heads": 8, "kv_heads": 4}
COUNT = 12
PIPELINE = "qwen2 by layer"
SETTINGS: dict[str, dict[str, Any]] = {
    "window": {"policy": "window"},
    "keydiff": {"policy": "keydiff"},
    "h2o": {"policy": "h2o", "fold": False},
    "folded": {"policy": "h2o", "fold": True},
    "packed": {"policy": "h2o", "kv_bits": 8, "kv_group_size": 32},
    "codes": {"policy": "h2o", "kv_format": "turbo4"},
}


def tiny_qwen2(layers: int = 2) -> Any:
    mx.random.seed(9)
    sizes = {"hidden_size": 256, "num_hidden_layers": layers, "tie_word_embeddings": True}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    return spread(qwen2.Model(qwen2.ModelArgs(model_type="qwen2", **sizes, **heads, **SMALL)))


MODELS = {
    "llama": lambda: tiny_llama(width=256, **HEADS),
    "qwen2": tiny_qwen2,
    "qwen3": lambda: tiny_qwen3(head_dim=32, **HEADS),
    PIPELINE: lambda: tiny_qwen2(5),
}


def kept(caches: list[Any]) -> list[Any]:
    """Positions of the rows of each KV head of this process, for each layer, in order."""
    found = []
    for cache in caches:
        each = [one.positions[0].tolist() for one in evicting_caches([cache])]
        heads = chain(*getattr(cache, "heads", [range(len(each[0]))]))
        rows = dict(zip(heads, chain(*each), strict=True))
        found.append([rows[head] for head in sorted(rows)])
    return found


def answered(model: Any, sampler: Any = None, **settings: Any) -> dict[str, Any]:
    """Tokens generated after a prompt, and the rows that stay."""
    caches = mlx_h2o.make_prompt_cache(model, **({"max_kv_size": 40} | settings))
    given: Any = {"prompt_cache": caches, "sampler": sampler}
    stream = mlx_h2o.stream_generate(model, tiny_tokenizer(), random_prompt(100), COUNT, **given)
    return {"tokens": [one.token for one in stream], "kept": kept(caches)}


def batch(model: Any) -> list[str]:
    prompts = [random_prompt(length, seed=length) for length in (30, 70, 55)]
    given = {"max_tokens": 8, "max_kv_size": 40}
    return mlx_h2o.batch_generate(model, tiny_tokenizer(), prompts, **given).texts


def main(group: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, make in MODELS.items():
        model, own = make(), found.setdefault(name, {})
        if group is not None:
            (model.model.pipeline if name == PIPELINE else model.shard)(group)
        ranks = ranks_of(model)
        own["probe"] = asdict(layers.probe(model))
        layers._known.clear()
        if ranks.rank == 0:  # the others find the file of their own part
            Path(os.environ["MLX_H2O_CACHE"], "layers", f"{fingerprint(model)}.json").unlink()
        own["probed again"] = asdict(layers.probe(model))
        for settings, given in SETTINGS.items():
            own[settings] = answered(model, **given)
        own["batch"] = {"texts": batch(model)}
        # The share of the process that needs most.
        every, most = model.args.num_hidden_layers, -ranks.least(-len(model.layers))[0]
        share = 40_000 * most // (every * ranks.heads.size)
        own["bytes"] = {"settings": asdict(fit_bytes(model, share, length=400).config)}
        # Ranks with other logits must take the tokens that the first rank chooses.
        chooses = ranks.agreed(partial(mx.argmin if ranks.rank else mx.argmax, axis=-1))
        own["agreed"] = answered(model, chooses)
        # In each layer only one process holds heads that retrieve.
        uneven = (((0.9, 0.0, 0.0, 0.0), (0.0, 0.0, 0.5, 0.5)) * every)[:every]
        layers._known[id(model)] = layers.Probe(uneven)
        own["by head"] = answered(model, policy="h2o")
    return found


def of_folder(folder: str, group: Any) -> dict[str, Any]:
    """Tokens that a real model writes after a text, with caches of four kinds."""
    model, tokenizer = mlx_h2o.load(folder, group=group)
    tokens, found = tokenizer.encode(demo.text())[:100], {}
    for name in ("window", "keydiff", "h2o", "packed"):
        given = {"max_kv_size": 40, "layers": "equal"} | SETTINGS[name]
        stream = mlx_h2o.stream_generate(model, tokenizer, tokens, COUNT, **given)
        found[name] = [one.token for one in stream]
    return found


if __name__ == "__main__":
    started = mx.distributed.init(backend="ring") if "MLX_RANK" in os.environ else None
    result = of_folder(sys.argv[2], started) if len(sys.argv) > 2 else main(started)
    with open(sys.argv[1], "w") as file:
        json.dump(result, file)
