"""How much of a prompt is read again after a conversation was edited: our server and mlx_lm's.

    python benchmarks/reread.py --json benchmarks/results/reread.json

Models with random weights: full attention (ours with a bounded cache), sliding windows, and
convolutions, whose caches can never be trimmed. A conversation of 2,700 tokens is answered, then
edited and asked again. mlx_lm's server is represented by its ``LRUPromptCache``, into which it puts
the system message, the prompt and the answer; ours by its engine. Results are the tokens of the
second prompt that were not in a cache, and seconds to the first token of its answer: the median of
five turns each, always from the caches kept after the first answer.
"""

from __future__ import annotations

import copy
import queue
import statistics
import time
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import mlx_h2o
from lib import common
from mlx_h2o.evaluation.statistics import in_turns
from mlx_h2o.serving.engine import Engine
from mlx_h2o.serving.memory import Memory
from mlx_h2o.serving.request import Request
from mlx_h2o.serving.snapshots import Snapshots

MARK, VOCABULARY, STEP, ANSWER = 1, 512, 512, 120
SHAPE = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": VOCABULARY, "intermediate_size": 128, "head_dim": 16,
    "max_position_embeddings": 8192, "rope_theta": 1e4,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "full attention": {},
    "sliding windows": {
        "model_type": "gemma3_text", "sliding_window": 128, "sliding_window_pattern": 4,
    },
    "convolutions": {
        "model_type": "lfm2", "norm_eps": 1e-6, "conv_bias": False, "conv_L_cache": 3,
        "block_dim": 64, "block_ff_dim": 128, "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention"] * 2,
    },
}  # fmt: skip


def conversation() -> list[list[int]]:
    """A system message, a short message, two long ones and a last one."""
    rng = np.random.default_rng(5)
    return [[MARK, *rng.integers(2, VOCABULARY, n).tolist()] for n in (300, 120, 600, 80, 1600)]


def edits(answer: list[int]) -> dict[str, tuple[list[int], int]]:
    """By name: the next prompt, and how many of its first tokens are unchanged."""
    parts = conversation()
    whole = [token for part in parts for token in part]
    new = [token + 1 if token > 1 else token for token in whole]
    second = 301 + 60
    more = [MARK, *range(2, 60)]
    return {
        "last sentence changed": ([*whole[:-12], *new[-12:]], len(whole) - 12),
        "second message edited": ([*whole[:second], 3, 3, *whole[second:]], second),
        "regenerated": (whole, len(whole)),
        "answer cut": ([*whole, *answer[:60], *more], len(whole) + 60),
        "answer replaced": ([*whole, 5, 6, 7, *more], len(whole)),
        "date in the system message": ([*whole[:40], 4, 4, *whole[42:]], 40),
        "a tool's result appended": ([*whole, *answer, *more], len(whole) + len(answer)),
    }


class Stock:
    """mlx_lm's caches and the store of its server."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.restore([])

    def keep(self) -> Any:
        return list(self.put)

    def restore(self, kept: list[tuple[list[int], list[Any]]]) -> None:
        """Replace the kept caches by these."""
        self.kept, self.put = cache.LRUPromptCache(), []
        for tokens, caches in kept:
            self.insert(tokens, caches)

    def insert(self, tokens: list[int], caches: list[Any]) -> None:
        self.put.append((tokens, caches))
        self.kept.insert_cache("model", tokens, caches)

    def ask(self, tokens: list[int], marks: list[int], count: int) -> tuple[list[int], int, float]:
        begun = time.perf_counter()
        caches, rest = self.kept.fetch_nearest_cache("model", tokens)
        caches = caches or cache.make_prompt_cache(self.model)
        read, at = len(rest), len(tokens) - len(rest)
        for place in [one for one in marks if at < one] + [len(tokens) - 1]:
            while at < place:
                chunk = tokens[at : min(place, at + STEP)]
                self.model(mx.array(chunk)[None], cache=caches)
                mx.eval([one.state for one in caches])
                at += len(chunk)
            self.insert(tokens[:place], copy.deepcopy(caches))
        answer, token, first = [], tokens[-1], 0.0
        for _ in range(count):
            token = int(self.model(mx.array([[token]]), cache=caches)[0, -1].argmax())
            answer.append(token)
            first = first or time.perf_counter() - begun
        self.insert([*tokens, *answer[:-1]], caches)
        return answer, read, first


class Ours:
    """Our engine, with bounded caches for full attention."""

    def __init__(self, model: Any, **settings: Any) -> None:
        words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(VOCABULARY)}, "w0"))
        plain = PreTrainedTokenizerFast(tokenizer_object=words, additional_special_tokens=["w1"])

        def make() -> list[Any]:
            return mlx_h2o.make_prompt_cache(model, layers="equal", **settings)

        memory = Memory([model], make, 8 << 30, step=STEP, prompts=1, decode=4)
        tokenizer = TokenizerWrapper(plain, eos_token_ids=[0])
        self.engine = Engine(tokenizer, memory, Snapshots(1 << 28))

    def keep(self) -> Any:
        self.ask([2], [], 1)  # then the previous answer has been kept
        kept = [*self.engine.snapshots]  # at once: the engine keeps this answer too
        return [(np.frombuffer(one.key, ">u4"), copy.deepcopy(one.content)) for one in kept]

    def restore(self, kept: Any) -> None:
        self.engine.snapshots = Snapshots(1 << 28)
        for tokens, caches in kept:
            self.engine.snapshots.keep(tokens, copy.deepcopy(caches))

    def ask(self, tokens: list[int], marks: list[int], count: int) -> tuple[list[int], int, float]:
        told: queue.Queue[Any] = queue.Queue()
        request = Request(tokens, told.put, max_tokens=count, top_logprobs=0)
        begun, first, event = time.perf_counter(), 0.0, None
        self.engine.submit([request])
        while event is None or (event.finish is None and event.error is None):
            event = told.get()
            first = first or time.perf_counter() - begun
        return request.answer, len(tokens) - (request.cached or 0), first


def measure(kind: str, repeats: int) -> list[dict[str, Any]]:
    """Results for each edit of the conversation, with models of this kind."""
    stock, ours = (common.random_model(**SHAPE | KINDS[kind]) for _ in range(2))
    mx.eval(stock.parameters(), ours.parameters())
    bounded = 256 if kind == "full attention" else None
    arms: dict[str, Any] = {"stock": Stock(stock), "ours": Ours(ours, max_kv_size=bounded)}
    whole = [token for part in conversation() for token in part]
    answers = {arm: one.ask(whole, [301], ANSWER)[0] for arm, one in arms.items()}
    kept = {arm: one.keep() for arm, one in arms.items()}
    rows = []
    for name in edits([2] * ANSWER):
        row: dict[str, Any] = {"model": kind, "edit": name}

        def turn(arm: str, name: str = name, row: dict[str, Any] = row) -> float:
            arms[arm].restore(kept[arm])
            prompt, same = edits(answers[arm])[name]
            _, read, first = arms[arm].ask(prompt, [301], 1)
            row |= {"new": len(prompt) - same, f"{arm}_read": read}
            return first

        seconds = in_turns({arm: partial(turn, arm) for arm in arms}, repeats)
        row |= {f"{arm}_seconds": round(statistics.median(seconds[arm]), 4) for arm in seconds}
        common.show(f"{kind}, {name}", row)
        rows.append(row)
    arms["ours"].engine.close(10)
    return rows


def main() -> None:
    args = common.arguments(__doc__, repeats=5)
    rows = [row for kind in KINDS for row in measure(kind, args.repeats)]
    tokens = sum(map(len, conversation()))
    common.save(args.json, {"prompt_tokens": tokens, "repeats": args.repeats, "rows": rows})


if __name__ == "__main__":
    main()
