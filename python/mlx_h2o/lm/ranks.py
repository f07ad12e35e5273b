"""A model whose heads are dealt out over processes, its ranks: each has caches of its own heads.

All ranks compute the same, but for their heads, and have to agree on what depends on all of them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import mlx.core as mx
import numpy as np
from mlx.nn.layers import distributed
from mlx_lm.utils import sharded_load

from .routing import int_setting, modules_of

_T = TypeVar("_T")
Sampler = Callable[[mx.array], mx.array]


@dataclass(frozen=True)
class Ranks:
    """The processes of a group, as one of them sees it; what all of them have to call is said."""

    size: int = 1  # how many there are; 1 is a model that is whole
    rank: int = 0  # which of them this is
    group: Any = None  # MLX's; None: there is one process
    _last: list[mx.array] = field(default_factory=list, compare=False, repr=False)

    @classmethod
    def of(cls, group: Any) -> Ranks:
        """Those of one of MLX's groups."""
        return cls(group.size(), group.rank(), group) if group.size() > 1 else ALONE

    def __str__(self) -> str:
        """What follows the bytes of one of them; empty where there is one."""
        return f", in each of {self.size} processes" if self.size > 1 else ""

    def own(self, heads: Sequence[_T]) -> Sequence[_T]:
        """What belongs to the KV heads of this rank, of what belongs to each head of the model."""
        if len(heads) % self.size:
            raise ValueError(
                f"[make_prompt_cache] found {len(heads)} KV heads, expected as many for each of "
                f"{self.size} processes."
            )
        each = len(heads) // self.size
        return heads[self.rank * each : (self.rank + 1) * each]

    def sums(self, numbers: mx.array) -> mx.array:
        """Of the numbers of all ranks; all call it."""
        return self._with(mx.distributed.all_sum, numbers)

    def largest(self, numbers: mx.array) -> mx.array:
        """Of the numbers of all ranks; all call it."""
        return self._with(mx.distributed.all_max, numbers)

    def least(self, *numbers: int) -> list[int]:
        """The least of each that any rank has; all call it."""
        found = self._with(mx.distributed.all_min, mx.array(numbers, mx.int64))
        return cast(list[int], found.tolist())

    def told(self, what: _T) -> _T:
        """What the first rank tells the others; all call it."""
        if self.group is None:
            return what
        own = np.frombuffer(pickle.dumps(what) if self.rank == 0 else b"", np.uint8)
        size = cast(int, self.sums(mx.array(len(own))).item())
        data = self.sums(mx.array(own) if len(own) else mx.zeros(size, mx.uint8))
        return what if self.rank == 0 else cast(_T, pickle.loads(bytes(cast(Any, data))))

    def flag(self, wave: bool) -> mx.array:
        """Whether the first rank waves; all call it, and none waits before it is read."""
        own = mx.array(wave and self.rank == 0, mx.int32)
        found = mx.distributed.all_sum(own, group=self.group)
        mx.async_eval(found)
        return found

    def agreed(self, sample: Sampler) -> Sampler:
        """A sampler that takes what the first rank chooses; all call it, in the same order. The
        last bits of their logits may differ."""

        def choose(logprobs: mx.array) -> mx.array:
            # Those of other ranks wait as well, and for the last: messages keep their order.
            own = mx.depends([sample(logprobs) * int(self.rank == 0)], self._last)
            self._last[:] = [mx.distributed.all_sum(own[0], group=self.group)]
            return self._last[0]

        return sample if self.group is None else choose

    def _with(self, reduce: Any, numbers: mx.array) -> mx.array:
        if self.group is None:
            return numbers
        found: mx.array = reduce(numbers, group=self.group, stream=mx.cpu)
        mx.eval(found)
        return found


ALONE = Ranks()
"""A model that is whole."""


def ranks_of(model: Any) -> Ranks:
    """The ranks over which the heads of an mlx_lm model are dealt out, by its ``shard``."""
    # What puts together the outputs of heads, of which each rank has some.
    summed = distributed.ShardedToAllLinear, distributed.QuantizedShardedToAllLinear
    groups = (one.group for one in modules_of(model) if isinstance(one, summed))
    return next((Ranks.of(group) for group in groups), ALONE)


def dealt_out(group: Any, folder: str, **given: Any) -> tuple[Any, ...]:
    """A model and its tokenizer as of mlx_lm's ``sharded_load``.

    Raises ValueError where mlx_lm cannot deal out its heads, or they do not divide by the processes
    of the group.
    """
    found: tuple[Any, ...] = sharded_load(folder, tensor_group=group, **given)
    heads, size = int_setting(found[0], "num_attention_heads") or 0, group.size()
    names = "n_heads", "n_kv_heads", "num_attention_heads", "num_key_value_heads"
    own = (getattr(one, name, 1) for one in modules_of(found[0]) for name in names)
    if heads % size or 0 in own:
        of_keys = int_setting(found[0], "num_key_value_heads") or heads
        raise ValueError(
            f"it has {heads} heads and {of_keys} KV heads, which {size} processes do not divide"
        )
    return found
