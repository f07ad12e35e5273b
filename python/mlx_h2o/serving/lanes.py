"""Sequences that take turns, for draft models and for caches that cannot be batched."""

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step, speculative_generate_step

from ..lm.generate import read
from ..lm.generation_checks import within_all
from ..lm.models import by_model


class Lanes:
    """The part of mlx_lm's BatchGenerator that the engine uses, but without batching: a turn
    advances one sequence by a chunk of its prompt or by a token.

    Args:
        models: the model, and a draft model if there is one, whose caches follow the model's.
        step, drafts: tokens per chunk, and per draft.
    """

    def __init__(self, models: Sequence[Any], step: int, drafts: int) -> None:
        self._models, self._step, self._drafts = models, step, drafts
        self._cut = within_all(models)
        self._lanes: dict[int, tuple[list[Any], Any]] = {}  # caches, and the generator of turns
        self._numbers = itertools.count(1)

    def insert_segments(self, segments: list[Any], **given: list[Any]) -> list[int]:
        """Add one sequence; each argument is a list of one."""
        own: dict[str, Any] = {name: one for name, (one,) in given.items()}
        uid = next(self._numbers)
        self._lanes[uid] = own["caches"], self._turns(uid, segments[0], own)
        return [uid]

    def next(self) -> tuple[list[Any], list[Any]]:
        """Advance every sequence; returns the chunks that were prefilled, and the new tokens."""
        found: tuple[list[Any], list[Any]] = [], []
        for _, turns in self._lanes.values():
            turn = next(turns)
            found[hasattr(turn, "token")].append(turn)
        return found

    def extract_cache(self, uids: Sequence[int]) -> dict[int, Any]:
        """Copies of the caches of each sequence, in a tuple as mlx_lm's."""
        return {uid: (copy.deepcopy(self._lanes[uid][0]),) for uid in uids}

    def remove(self, uids: Sequence[int], return_prompt_caches: bool = False) -> dict[int, Any]:
        """Take sequences out, without drafted tokens that are not part of the answer."""
        gone = {uid: self._lanes.pop(uid) for uid in uids}
        for _, turns in gone.values():
            turns.close()
        return gone

    def close(self) -> None:
        for uid in list(self._lanes):
            with contextlib.suppress(Exception):  # caches may be torn
                self.remove([uid])

    def _turns(self, uid: int, segments: list[list[int]], own: dict[str, Any]) -> Iterator[Any]:
        *parts, last = segments
        pairs = by_model(self._models, own["caches"])
        for part in (*parts, last[:-1]):
            for start in range(0, len(part), self._step):
                chunk = part[start : start + self._step]
                for model, caches in pairs:
                    read(model, caches, mx.array([chunk]), len(chunk))
                whole = start + len(chunk) == len(part)
                yield SimpleNamespace(uid=uid, end_of_segment=whole, end_of_prompt=False)
        before = mx.array([*itertools.chain(own["all_tokens"], *segments)][:-1], mx.uint32)

        def of_all(process: Callable[..., mx.array], tokens: mx.array, logits: mx.array) -> Any:
            return process(mx.concatenate([before, tokens.astype(mx.uint32)]), logits)

        model, *drafting = self._models
        processors = [*self._cut, *(partial(of_all, one) for one in own["logits_processors"])]
        given = {"max_tokens": own["max_tokens"], "sampler": own["samplers"]}
        given |= {"logits_processors": processors, "prompt_cache": own["caches"]}
        if drafting:
            given |= {"draft_model": drafting[0], "num_draft_tokens": self._drafts}
        steps: Any = speculative_generate_step if drafting else generate_step
        answer = steps(mx.array(last[-1:]), model, **given)
        with contextlib.closing(answer):
            for token, logprobs, *_ in answer:
                yield SimpleNamespace(uid=uid, token=int(token), logprobs=logprobs)
