"""What merged rows could gain from better masses and from another metric.

    python benchmarks/merging_masses.py --model demo benchmarks/yardsticks/llama --corpora DIR \
        --json benchmarks/results/merging_masses.json

`policy="merge"` guesses the attention that a row will get from its key, and takes all directions of
keys as equal. Both could be calibrated: a probe of keys and values for the mass, the second moment
of queries for the metric. Before either is built, this measures what it could give:

- caches: the package's own.
- merge: the same rule here, in plain MLX.
- rows once, tokens once: a row made of n counts once or n times in the mean key, and not sqrt(n).
- attention: the mass of a row is the attention that later tokens pay it with the full cache, those
  of the questions included. Masses of rows that merge add. No probe of this knows more.
- repetition: the mass is the greatest weight that a row gets when the text is read once more, which
  a probe can be trained on without questions.
- queries: keys are compared in the metric of the second moment of queries, of the same texts.
- repetition and queries.

All have as many rows, and so bytes, in every layer. Documents are those of benchmarks/policies.py,
read token by token behind a prompt; the loss is that of the tokens after the budget is full.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np
import policy_documents
from mlx_lm.models.cache import make_prompt_cache
from policy_readings import PROMPT, mean_loss
from policy_statistics import paired

import mlx_h2o
from mlx_h2o.evaluation import reading
from mlx_h2o.evaluation.environment import blas, environment
from mlx_h2o.operations import merging
from mlx_h2o.operations.buffers import gathered
from mlx_h2o.operations.compaction import compact_rows
from mlx_h2o.operations.composed_cache import diversity

ARMS = {
    "merge": ("", False, 0.5),
    "rows once": ("", False, 0.0),
    "tokens once": ("", False, 1.0),
    "attention": ("attention", False, 0.5),
    "repetition": ("repetition", False, 0.5),
    "queries": ("", True, 0.5),
    "repetition and queries": ("repetition", True, 0.5),
}
"""Which masses are known, whether the metric is, and the power of n in the mean key."""

LEAST = 1e-7
"""Of a mass: no row is worth nothing."""

Attend = Callable[..., mx.array]


@dataclass(frozen=True)
class Known:
    """What the full cache's attention says of one layer.

    masses: by name, of each row, float32 [B, Hkv, T].
    metric: [Hkv, D, D], so that |k @ metric|^2 is the mean square of a key's logits.
    """

    masses: dict[str, mx.array]
    metric: mx.array


class Rows:
    """A layer's cache, which merges rows by what is known of the layer."""

    state = ()

    def __init__(self, config: Any, known: Known, mass: str, metric: bool, power: float) -> None:
        self.config, self.power = config, power
        self.mass = known.masses.get(mass)
        self.metric = known.metric if metric else None
        self.offset = 0
        self.columns: dict[str, mx.array] = {}

    def make_mask(self, length: int, **_: Any) -> str | None:
        return "causal" if length > 1 else None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.columns and self.columns["keys"].shape[2] == self.config.max_kv_size:
            self.merge()
        place = mx.arange(self.offset, self.offset + keys.shape[2])
        new = {
            "keys": keys,
            "values": values,
            "bias": mx.zeros(keys.shape[:3]),
            "positions": mx.broadcast_to(place, keys.shape[:3]),
        }
        if self.mass is not None:  # of questions there is none: they are recent
            last = self.mass.shape[2] - 1
            new["mass"] = self.mass[:, :, mx.minimum(place, last)]
        old = self.columns or {name: rows[:, :, :0] for name, rows in new.items()}
        self.columns = {
            name: mx.concatenate([old[name], rows], axis=2) for name, rows in new.items()
        }
        self.offset += keys.shape[2]
        return self.columns["keys"], self.columns["values"]

    def attend(self, queries: mx.array, attend: Attend, **given: Any) -> mx.array:
        if queries.shape[2] == 1:
            bias = self.columns["bias"]
            given["mask"] = mx.repeat(bias, queries.shape[1] // bias.shape[1], axis=1)[:, :, None]
        return attend(queries, self.columns["keys"], self.columns["values"], **given)

    def merge(self) -> None:
        names = ("keys", "values", "bias", "positions")
        old = [self.columns[name] for name in names]
        rows = old[0].shape[2]
        with mock.patch.multiple(merging, **self.instead()):
            kept, into, *new = merging.mergers(
                *old,
                keep=rows - self.config.group,
                sink_size=self.config.sink_size,
                recent_start=self.offset + 1 - self.config.recent_size,
            )
        changed = dict(zip(names, new, strict=True))
        if "mass" in self.columns:
            going, mass = merging.others(kept, rows), self.columns["mass"]
            meets = (into[..., None] == into[..., None, :]) & (into != going)[..., None, :]
            added = meets.astype(mx.float32) @ gathered(mass, going)[..., None]
            changed["mass"] = gathered(mass, into) + added.squeeze(-1)
        for name, after in changed.items():
            before = self.columns[name]
            slots = into[..., None] if before.ndim == 4 else into
            after = after.astype(before.dtype)
            changed[name] = mx.put_along_axis(before, slots, after, axis=2)
        lines = range(len(kept))
        together = compact_rows([*changed.values()], kept, lines)  # a pair depends on their order
        staying = (column[:, :, : kept.shape[2]] for column in together)
        self.columns = dict(zip(changed, staying, strict=True))

    def instead(self) -> dict[str, Any]:
        """What is known, in the place of the guesses of the definition."""
        found: dict[str, Any] = {"masses": merging.masses, "features": merging.features}
        if self.power != 0.5:
            found["masses"] = lambda keys, counts: (
                counts * mx.exp(merging.SHARPNESS * diversity(keys, counts**self.power))
            )
        if self.mass is not None:
            found["masses"] = lambda keys, counts: mx.maximum(self.columns["mass"], LEAST)
        if self.metric is not None:
            plain = merging.features

            def features(keys: mx.array, values: mx.array) -> mx.array:
                logits = keys.astype(mx.float32) @ self.metric
                return mx.concatenate([logits, plain(keys, values)[..., keys.shape[3] :]], axis=3)

            found["features"] = features
        return found


@contextmanager
def attending(model: Any, instead: Callable[..., mx.array]) -> Iterator[None]:
    """The model attends with ``instead``, which is given the function that it stands for."""
    module = importlib.import_module(type(model).__module__)
    name = "scaled_dot_product_attention"
    attend = functools.partial(instead, getattr(module, name))
    with mock.patch.object(module, name, attend):
        yield


def through_rows(
    original: Attend, queries: mx.array, keys: mx.array, values: mx.array, cache: Any, **given: Any
) -> mx.array:
    def attend(*rows: mx.array, scale: float, mask: Any) -> mx.array:
        return original(*rows, cache=None, scale=scale, mask=mask)

    return cache.attend(queries, attend, **given)


def looked_at(model: Any, tokens: mx.array, look: Callable[..., Any]) -> list[Any]:
    """What ``look`` sees of the queries and keys of each layer, when tokens [B, T] are read."""
    found: list[Any] = []

    def noted(original: Attend, queries: mx.array, keys: mx.array, *rest: Any, **given: Any) -> Any:
        batch, _, total, size = queries.shape
        grouped = queries.astype(mx.float32).reshape(batch, keys.shape[1], -1, total, size)
        found.append(look(given["scale"] * grouped, keys.astype(mx.float32)))
        return original(queries, keys, *rest, **given)

    with attending(model, noted):
        mx.eval(model(tokens))
    return found


def of_weights(judge: Callable[[mx.array], mx.array]) -> Callable[..., mx.array]:
    """Looks at the weights [Hkv, groups, T, T] of one text after the other."""

    def look(grouped: mx.array, keys: mx.array) -> mx.array:
        place, found = mx.arange(keys.shape[2]), []
        for one, of_one in zip(grouped, keys, strict=True):
            logits = one @ of_one[:, None].swapaxes(2, 3)
            weights = mx.softmax(mx.where(place[:, None] >= place, logits, -mx.inf), axis=-1)
            found.append(judge(weights))
            mx.eval(found)
        return mx.stack(found)

    return look


def mean_later(weights: mx.array) -> mx.array:
    """The mean weight that a row gets from later queries."""
    place = mx.arange(weights.shape[3])
    later = mx.where(place[:, None] > place, weights, 0).mean(axis=1).sum(axis=1)
    return later / mx.maximum(len(place) - 1 - place, 1)


def most_repeated(weights: mx.array) -> mx.array:
    """The greatest weight that a row of the first half gets from the second half."""
    half = weights.shape[3] // 2
    return weights[:, :, half:, :half].max(axis=(1, 2))


def moments(grouped: mx.array, keys: mx.array) -> mx.array:
    """A root of the second moment of logits."""
    size = keys.shape[3]
    queries = np.array(grouped.swapaxes(0, 1).reshape(keys.shape[1], -1, size), np.float64)
    found = queries.swapaxes(1, 2) @ queries / queries.shape[1]
    return mx.array(np.linalg.cholesky(found + 1e-8 * np.eye(size)).astype(np.float32))


def measured(model: Any, caches: list[Any], tokens: mx.array, documents: list[Any]) -> Any:
    """Losses of the tokens [B, N], and the share of its facts that each document recalls."""
    found = reading.forced(model, caches, tokens, first=PROMPT, chunk=PROMPT).losses
    questions = [document.planted.questions for document in documents]
    right = reading.recall(model, caches, tokens[:, -1:], questions)
    return found, [sum(of_text) / len(of_text) for of_text in zip(*right, strict=True)]


def of_model(name: str, args: argparse.Namespace) -> dict[str, Any]:
    model, tokenizer = mlx_h2o.load(name)
    documents = policy_documents.documents(
        tokenizer, args.corpora, length=args.length, facts=args.facts, count=args.documents
    )
    tokens = mx.array([document.planted.tokens for document in documents])
    asked = [
        [token for one in document.planted.questions for token in (*one.prompt, *one.answer)]
        for document in documents
    ]
    with_questions = mx.concatenate([tokens, mx.array(asked)], axis=1)
    masses = {
        "attention": looked_at(model, with_questions, of_weights(mean_later)),
        "repetition": looked_at(
            model, mx.concatenate([tokens, tokens], axis=1), of_weights(most_repeated)
        ),
    }
    layers = [
        Known({name: of_layer[at] for name, of_layer in masses.items()}, metric)
        for at, metric in enumerate(looked_at(model, with_questions, moments))
    ]
    losses, recall = measured(model, make_prompt_cache(model), tokens, documents)
    result: dict[str, Any] = {"model": Path(name).name, "rows": {}}
    for rows in args.budgets:
        figures = {"full": {"loss": mean_loss(losses, rows), "recall": recall}}
        for arm in ("window", "caches", *ARMS):
            start = time.perf_counter()
            policy = "window" if arm == "window" else "merge"
            caches = mlx_h2o.make_prompt_cache(model, rows, policy=policy)
            if arm in ARMS:
                caches = [
                    Rows(cache.config, known, *ARMS[arm])
                    for cache, known in zip(caches, layers, strict=True)
                ]
            routed = attending(model, through_rows) if arm in ARMS else mlx_h2o.routing(model)
            with routed:
                of_arm, recalled = measured(model, caches, tokens, documents)
            figures[arm] = {"loss": mean_loss(of_arm, rows), "recall": recalled}
            print(result["model"], rows, arm, f"{time.perf_counter() - start:.0f} s", flush=True)
        result["rows"][str(rows)] = {
            "figures": figures,
            "to_merge": {
                arm: {
                    what: asdict(paired(figures[arm][what], figures["merge"][what]))
                    for what in ("loss", "recall")
                }
                for arm in figures
            },
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=["demo"], help="folders, or %(default)s")
    parser.add_argument("--corpora", type=Path, help="a folder with books_eval/*.txt")
    parser.add_argument("--documents", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--length", type=int, default=640, help="tokens (default: %(default)s)")
    parser.add_argument("--facts", type=int, default=4, help="per document (default: %(default)s)")
    parser.add_argument("--budgets", type=int, nargs="+", default=[64])
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    result = {
        "environment": {**environment(), "blas": blas()},
        "documents": args.documents,
        "length": args.length,
        "facts_per_document": args.facts,
        "models": [of_model(name, args) for name in args.model],
    }
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    for one in result["models"]:
        for rows, found in one["rows"].items():
            for arm, figures in found["figures"].items():
                to = found["to_merge"][arm]
                said = [
                    f"{what} {np.mean(figures[what]):.4f} ({to[what]['mean']:+.4f}, "
                    f"{to[what]['low']:+.4f} to {to[what]['high']:+.4f})"
                    for what in ("loss", "recall")
                ]
                print(one["model"], rows, arm, *said)


if __name__ == "__main__":
    main()
