"""A model whose heads are split over processes (ranks); each rank has caches of its own heads.

All ranks run the same steps on their own heads, and must agree where all heads matter.
"""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import mlx.core as mx
import numpy as np
from mlx.nn.layers import distributed
from mlx_lm.utils import sharded_load

from .routing import int_setting

_T = TypeVar("_T")
Sampler = Callable[[mx.array], mx.array]


@dataclass(frozen=True)
class Ranks:
    """The processes of a group, as one of them sees it. Methods that all must call say so."""

    size: int = 1  # number of processes; 1: the model is not split
    rank: int = 0  # the number of this process
    group: Any = None  # MLX's group; None: there is one process

    @classmethod
    def of(cls, group: Any) -> "Ranks":
        """The ranks of one of MLX's groups."""
        return cls(group.size(), group.rank(), group) if group.size() > 1 else ALONE

    def __str__(self) -> str:
        """Words that follow the bytes of one process; empty if there is only one."""
        return f", in each of {self.size} processes" if self.size > 1 else ""

    def own(self, heads: Sequence[_T]) -> Sequence[_T]:
        """This rank's part of a sequence with one item for each KV head of the model."""
        if len(heads) % self.size:
            said = f"{len(heads)} KV heads, expected as many for each of {self.size} processes."
            raise ValueError(f"[make_prompt_cache] found {said}")
        each = len(heads) // self.size
        return heads[self.rank * each : (self.rank + 1) * each]

    def sums(self, numbers: mx.array) -> mx.array:
        """The sums over all ranks; all must call it."""
        return self._with(mx.distributed.all_sum, numbers)

    def least(self, *numbers: int) -> list[int]:
        """The minimum of each number over all ranks; all must call it."""
        if self.group is None:  # numbers may exceed 64 bits
            return [*numbers]
        found = self._with(mx.distributed.all_min, mx.array(numbers, mx.int64))
        return cast(list[int], found.tolist())

    def told(self, what: _T) -> _T:
        """Send ``what`` of the first rank to all; all must call it."""
        if self.group is None:
            return what
        own = np.frombuffer(pickle.dumps(what) if self.rank == 0 else b"", np.uint8)
        size = cast(int, self.sums(mx.array(len(own))).item())
        data = self.sums(mx.array(own) if len(own) else mx.zeros(size, mx.uint8))
        return what if self.rank == 0 else cast(_T, pickle.loads(bytes(cast(Any, data))))

    def flag(self, wave: bool) -> mx.array:
        """Whether the first rank waves; all must call it, and nothing blocks until it is read."""
        own = mx.array(wave and self.rank == 0, mx.int32)
        found = mx.distributed.all_sum(own, group=self.group)
        mx.async_eval(found)
        return found

    def agreed(self, sample: Sampler, drawn: list[mx.array] | None = None) -> Sampler:
        """A sampler that returns the first rank's choice, since the last bits of logits may differ
        between ranks; all must call it, in the same order. Choice and logprobs become ``drawn``."""
        last = list[mx.array]() if drawn is None else drawn

        def choose(logprobs: mx.array) -> mx.array:
            found = sample(logprobs)
            if self.group is not None:  # a chain of reductions, so that all run them in this order
                own = mx.depends([found * int(self.rank == 0)], last[:1])
                found = mx.distributed.all_sum(own[0], group=self.group)
            last[:] = found, logprobs
            return found

        return sample if self.group is None and drawn is None else choose

    def _with(self, reduce: Any, numbers: mx.array) -> mx.array:
        if self.group is None:
            return numbers
        found: mx.array = reduce(numbers, group=self.group, stream=mx.cpu)
        mx.eval(found)
        return found


ALONE = Ranks()
"""For a model that is not split."""


def ranks_of(model: Any) -> Ranks:
    """The ranks over which ``shard`` has split the heads of an mlx_lm model."""
    # These layers sum the outputs of the heads of all ranks.
    summed = distributed.ShardedToAllLinear, distributed.QuantizedShardedToAllLinear
    groups = (one.group for one in model.modules() if isinstance(one, summed))
    return next((Ranks.of(group) for group in groups), ALONE)


def dealt_out(group: Any, folder: str, **given: Any) -> tuple[Any, ...]:
    """A model and its tokenizer from mlx_lm's ``sharded_load``.

    Raises ValueError if mlx_lm cannot split its heads, or the processes of the group do not divide
    them evenly.
    """
    found: tuple[Any, ...] = sharded_load(folder, tensor_group=group, **given)
    heads, size = int_setting(found[0], "num_attention_heads") or 0, group.size()
    names = "n_heads", "n_kv_heads", "num_attention_heads", "num_key_value_heads"
    own = (getattr(one, name, 1) for one in found[0].modules() for name in names)
    if heads % size or 0 in own:
        of_keys = int_setting(found[0], "num_key_value_heads") or heads
        said = f"it has {heads} heads and {of_keys} KV heads"
        raise ValueError(f"{said}, which {size} processes do not divide")
    return found
