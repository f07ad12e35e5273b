"""Speed of speculative decoding with evicting caches, against mlx_lm's own loop and full caches.

    python benchmarks/speculation.py --json benchmarks/results/speculation.json

Every arm decodes greedily from one prompt, beyond the budget. The draft is either the model itself,
which costs as much as it saves, or a replay of what the model is going to say, which costs nothing
and is nearly always right: the most that any draft can give. The arms take turns of whole rounds
within one process, and the order rotates; a ratio compares a turn with that of plain decoding with
the same kind of cache in the same round, above 1 is faster. ``cache_work`` is what the caches alone
take of it: updates and attention of one layer without a model, one round of a target model and one
of a draft model beside as many plain steps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import benchmark_models as models
import mlx.core as mx
import mlx_lm.generate  # noqa: F401  (found below: mlx_lm.generate may also be its function)
import numpy as np
from mlx_lm.models.cache import KVCache

import mlx_h2o
from mlx_h2o.caches.quantized import evicting_cache
from mlx_h2o.demo import report
from mlx_h2o.evaluation.statistics import spread

ITSELF, REPLAY, PLAIN = "drafts for itself", "replay", "plain"


class Replay:
    """A draft model that has read the answer; its cache only counts."""

    layers: tuple[Any, ...] = ()

    def __init__(self, tokens: list[int], vocabulary: int) -> None:
        self.tokens = mx.array(tokens)
        self.vocabulary = vocabulary

    def __call__(self, given: mx.array, cache: list[Count]) -> mx.array:
        start = cache[0].offset + 1
        cache[0].offset += given.shape[1]
        coming = mx.take(self.tokens, mx.arange(start, start + given.shape[1]))
        return (coming[None, :, None] == mx.arange(self.vocabulary)).astype(mx.float32)


class Count:
    """What a replay remembers: how many tokens it has seen."""

    state: tuple[Any, ...] = ()

    def __init__(self) -> None:
        self.offset = 0

    def is_trimmable(self) -> bool:
        return True

    def trim(self, count: int) -> int:
        self.offset -= count
        return count


class Arm:
    """One kind of cache and of draft, and a generation that goes on as long as it is asked."""

    def __init__(
        self, model: Any, evicts: bool, draft: Any, prompt: list[int], settings: dict[str, Any]
    ) -> None:
        self.model = model
        self.evicts = evicts
        self.draft = draft
        drafted = settings["speculative"] if draft is not None else 0
        caches = self._caches(model, settings | {"speculative": drafted})
        if draft is model:
            caches += self._caches(model, settings)
        elif draft is not None:
            caches += [Count()]
        self.tokens: list[int] = []
        self.rounds = self.accepted = 0
        self.milliseconds: list[float] = []
        self._stream = self._generate(mx.array(prompt), caches, drafted)

    def _caches(self, model: Any, settings: dict[str, Any]) -> list[Any]:
        if self.evicts:
            return mlx_h2o.make_prompt_cache(model, **settings)
        return [KVCache() for _ in model.layers]

    def _generate(
        self, prompt: mx.array, caches: list[Any], drafted: int
    ) -> Iterator[tuple[int, bool]]:
        own = vars(sys.modules["mlx_lm.generate"])
        if self.draft is None:
            for token, _ in own["generate_step"](
                prompt, self.model, prompt_cache=caches, max_tokens=1 << 30
            ):
                yield int(token), False
            return
        for token, _, from_draft in own["speculative_generate_step"](
            prompt,
            self.model,
            self.draft,
            num_draft_tokens=drafted,
            prompt_cache=caches,
            max_tokens=1 << 30,
        ):
            yield int(token), from_draft

    def routed(self) -> contextlib.AbstractContextManager[None]:
        """Only our caches decode within the context: the others run mlx_lm as it is."""
        return mlx_h2o.routing(self.model) if self.evicts else contextlib.nullcontext()

    def take_turn(self, tokens: int, *, counted: bool = True) -> None:
        """Whole rounds, until so many tokens have come."""
        made, last = 0, True
        start = time.perf_counter()
        with self.routed():
            while made < tokens or last:
                token, last = next(self._stream)
                self.tokens.append(token)
                made += 1
                self.accepted += last
                self.rounds += not last
        if counted:
            self.milliseconds.append(1e3 * (time.perf_counter() - start) / made)
        mx.synchronize()


def measure(
    name: str, model: Any, settings: dict[str, Any], prompt: list[int], tokens: int, repeats: int
) -> dict[str, Any]:
    vocabulary, warm = model.args.vocab_size, 3
    needed = len(prompt) + 2 * tokens * (repeats + warm + 2)

    def replay(evicts: bool) -> Replay:
        """Of the same groups of tokens as those of a draft that is always right."""
        first = Arm(model, evicts, model, prompt, settings)
        while len(prompt) + len(first.tokens) < needed:
            first.take_turn(tokens, counted=False)
        return Replay(prompt + first.tokens, vocabulary)

    arms = {}
    for kind, evicts in (("evicting", True), ("full", False)):
        for said, draft in ((PLAIN, None), (ITSELF, model), (REPLAY, replay(evicts))):
            arms[kind, said] = Arm(model, evicts, draft, prompt, settings)
    for arm in arms.values():  # reads the prompt, fills the caches, warms up
        for _ in range(warm):
            arm.take_turn(tokens, counted=False)
    order = list(arms.values())
    for repeat in range(repeats):
        for turn in range(len(order)):
            order[(repeat + turn) % len(order)].take_turn(tokens)
    found = {}
    for (kind, said), arm in arms.items():
        base = arms[kind, PLAIN].milliseconds
        pairs = zip(arm.milliseconds, base, strict=True)
        found[f"{kind}, {said}"] = {
            "milliseconds_per_token": spread(arm.milliseconds),
            "ratio_to_plain": spread([plain / own for own, plain in pairs]),
            "accepted_per_round": round(arm.accepted / arm.rounds, 3) if arm.draft else None,
        }
    return {"model": name, "settings": settings, "tokens_per_turn": tokens, "arms": found}


def cache_work(model: Any, settings: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Milliseconds of one layer's cache and attention: a round, and as many plain steps."""
    args, drafted = model.args, settings["speculative"]
    heads = args.num_attention_heads, args.num_key_value_heads, args.num_key_value_heads
    scale = args.head_dim**-0.5
    rng = np.random.default_rng(0)

    def rows(count: int) -> list[mx.array]:
        shapes = [(1, head, count, args.head_dim) for head in heads]
        return [mx.array(rng.standard_normal(shape).astype(np.float32)) for shape in shapes]

    single, group, long = rows(1), rows(drafted + 1), rows(2 * settings["max_kv_size"])
    mx.eval(single, group, long)
    attention = vars(sys.modules["mlx_lm.models.base"])

    def forward(cache: Any, given: list[mx.array]) -> mx.array:
        mask = cache.make_mask(given[0].shape[2])
        keys, values = cache.update_and_fetch(*given[1:])
        # By the module's name, which routing replaces.
        return attention["scaled_dot_product_attention"](
            given[0], keys, values, cache=cache, scale=scale, mask=mask
        )

    def plain(cache: Any) -> None:
        for _ in range(drafted + 1):
            mx.eval(forward(cache, single))

    def target(cache: Any) -> None:
        mx.eval(forward(cache, group))
        cache.trim(drafted // 2)

    def draft(cache: Any) -> None:
        for _ in range(drafted + 1):
            mx.eval(forward(cache, single))
        cache.trim(drafted // 2)

    given = {name: value for name, value in settings.items() if name != "speculative"}
    kinds = {PLAIN: (plain, 0), "target": (target, drafted), "draft": (draft, drafted)}
    caches, times = {}, {kind: [] for kind in kinds}
    with mlx_h2o.routing():
        for kind, (run, speculative) in kinds.items():
            caches[kind] = evicting_cache(mlx_h2o.H2OConfig.of(**given, speculative=speculative))
            mx.eval(forward(caches[kind], long))
            for _ in range(10):
                run(caches[kind])
        for _ in range(repeats):
            for kind, (run, _) in kinds.items():
                start = time.perf_counter()
                for _ in range(10):
                    run(caches[kind])
                times[kind].append(100 * (time.perf_counter() - start))
    return {
        kind: {
            "milliseconds_per_round": spread(found),
            "ratio_to_plain": spread(
                [own / base for own, base in zip(found, times[PLAIN], strict=True)]
            ),
        }
        for kind, found in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=models.MODELS, default="demo")
    parser.add_argument("--policies", nargs="+", default=["keydiff", "h2o-ema"])
    parser.add_argument("--max-kv-size", type=int, default=256)
    parser.add_argument("--drafted", type=int, default=3, help="tokens per round")
    parser.add_argument("--tokens", type=int, default=16, help="per turn")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the result here")
    arguments = parser.parse_args()
    if arguments.repeats < 5:
        parser.error("expected at least 5 repeats")
    model = models.MODELS[arguments.model]()
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    vocabulary = model.args.vocab_size
    prompt = [(7919 * place) % vocabulary for place in range(arguments.max_kv_size + 40)]
    result: dict[str, Any] = {"environment": report.environment(), "runs": []}
    for policy in arguments.policies:
        settings = {
            "max_kv_size": arguments.max_kv_size,
            "policy": policy,
            "speculative": arguments.drafted,
        }
        run = measure(arguments.model, model, settings, prompt, arguments.tokens, arguments.repeats)
        run["repeats"] = arguments.repeats
        run["cache_work"] = cache_work(model, settings, arguments.repeats)
        result["runs"].append(run)
        print(f"{arguments.model}, {policy}, {arguments.drafted} drafted")
        for name, found in run["arms"].items():
            print(
                f"  {name:28} {found['milliseconds_per_token']['median']:8.2f} ms/token, speed "
                f"{found['ratio_to_plain']['median']:.2f} of plain, accepted "
                f"{found['accepted_per_round']}"
            )
        for name, found in run["cache_work"].items():
            print(
                f"  cache work, {name:16} {found['milliseconds_per_round']['median']:8.3f} ms, "
                f"{found['ratio_to_plain']['median']:.2f} of plain"
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
