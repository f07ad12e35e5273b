"""A model whose heads, or layers, are split over processes (ranks); each has caches of its own.

All ranks run the same steps on their own part, and must agree where all parts matter.
"""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import mlx.core as mx
import numpy as np
from mlx.nn.layers import distributed
from mlx_lm.generate import generation_stream
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
    by_layer: bool = False  # split by layers, of which the first rank has the last
    _summed: list[mx.array] = field(default_factory=list, compare=False)  # the choice made last

    @classmethod
    def of(cls, group: Any, by_layer: bool = False) -> "Ranks":
        """The ranks of one of MLX's groups."""
        return cls(group.size(), group.rank(), group, by_layer) if group.size() > 1 else ALONE

    @property
    def heads(self) -> "Ranks":
        """The ranks over which the heads of each layer are split."""
        return ALONE if self.by_layer else self

    def __str__(self) -> str:
        """Words that follow the bytes of one process; empty if there is only one."""
        which = "the first" if self.by_layer else "each"
        return f", in {which} of {self.size} processes" if self.size > 1 else ""

    def own(self, heads: Sequence[_T]) -> Sequence[_T]:
        """This rank's part of a sequence with one item for each KV head of the model."""
        each, more = divmod(len(heads), self.size)
        if more:
            said = f"{len(heads)} KV heads, expected as many for each of {self.size} processes."
            raise ValueError(f"[make_prompt_cache] found {said}")
        return heads[self.rank * each : (self.rank + 1) * each]

    def gathered(self, own: _T) -> list[_T]:
        """What each rank gives; all must call it."""
        if self.group is None:
            return [own]
        data = pickle.dumps(own)
        padded = np.frombuffer(data.ljust(-self.least(-len(data))[0]), np.uint8)
        every = mx.distributed.all_gather(mx.array(padded), group=self.group, stream=mx.cpu)
        return [pickle.loads(one.tobytes()) for one in np.array(every).reshape(self.size, -1)]

    def of_layers(self, own: Sequence[_T]) -> list[_T]:
        """The items of all layers, in order, given this rank's ``own``; all must call it."""
        parts = reversed(self.gathered(own)) if self.by_layer else [own]
        return [one for part in parts for one in part]

    def least(self, *numbers: int) -> list[int]:
        """The minimum of each number over all ranks; all must call it."""
        if self.group is None:
            return [*numbers]
        mx.synchronize(generation_stream)  # where a step ahead may still exchange something
        own = mx.array(numbers, mx.int64)
        return [*map(int, np.array(mx.distributed.all_min(own, group=self.group, stream=mx.cpu)))]

    def told(self, what: _T) -> _T:
        """Send ``what`` of the first rank to all; all must call it."""
        first = self.gathered(what if self.rank == 0 else None)[0]
        return what if self.rank == 0 else cast(_T, first)

    def flag(self, wave: bool) -> mx.array:
        """Whether the first rank waves; all must call it, and nothing blocks until it is read."""
        own = mx.array(wave and self.rank == 0, mx.int32)
        found = mx.distributed.all_sum(own, group=self.group)
        mx.async_eval(found)
        return found

    def agreed(self, sample: Sampler) -> Sampler:
        """A sampler that returns the first rank's choice, since the last bits of logits may differ
        between ranks; all must call it, in the same order."""

        def choose(logprobs: mx.array) -> mx.array:
            # A chain of reductions, so that all run them in this order.
            own = mx.depends([sample(logprobs) * int(self.rank == 0)], self._summed)
            self._summed[:] = [mx.distributed.all_sum(own[0], group=self.group)]
            return self._summed[0]

        return sample if self.group is None else choose


ALONE = Ranks()
"""For a model that is not split."""


def ranks_of(model: Any) -> Ranks:
    """The ranks over which ``shard`` has split the heads of an mlx_lm model, or ``pipeline`` its
    layers. Raises ValueError for a model that is split both ways."""
    # These layers sum the outputs of the heads of all ranks.
    summed = distributed.ShardedToAllLinear, distributed.QuantizedShardedToAllLinear
    parts = model.modules()
    found = next((Ranks.of(one.group) for one in parts if isinstance(one, summed)), ALONE)
    if all(getattr(one, "pipeline_size", 1) == 1 for one in parts):
        return found
    if found is not ALONE:
        raise ValueError("[load] the model is split by heads and by layers, expected one of them.")
    return Ranks.of(mx.distributed.init(), by_layer=True)


def dealt_out(group: Any, by_layer: bool, folder: str, **given: Any) -> tuple[Any, ...]:
    """A model and its tokenizer from mlx_lm's ``sharded_load``. Raises ValueError if mlx_lm cannot
    split its layers, or its heads, or the processes of the group do not divide the heads evenly."""
    given["pipeline_group" if by_layer else "tensor_group"] = group
    found: tuple[Any, ...] = sharded_load(folder, **given)
    heads, size = int_setting(found[0], "num_attention_heads") or 0, group.size()
    names = "n_heads", "n_kv_heads", "num_attention_heads", "num_key_value_heads"
    own = (getattr(one, name, 1) for one in found[0].modules() for name in names)
    if not by_layer and (heads % size or 0 in own):
        of_keys = int_setting(found[0], "num_key_value_heads") or heads
        said = f"it has {heads} heads and {of_keys} KV heads"
        raise ValueError(f"{said}, which {size} processes do not divide")
    return found
