"""The evicting cache of several sequences, as mlx_lm's continuous batching asks for it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx

from ..config import H2OConfig
from . import saved
from .cache import H2OKVCache
from .quantized import evicting_cache
from .sequences import join, select

_STATE = ("keys", "values", "scores", "positions", "unscored", "name", "lines", "settings")


class BatchH2OKVCache(H2OKVCache):
    """Several sequences of one layer, each of which evicts as it would alone.

    ``H2OKVCache.merge`` makes one, ``extract`` gives a sequence back. The rows of a sequence fill
    the first slots; unused slots behind them, and padding among the tokens that come, are masked,
    never kept where a row could be, and their queries never score.
    """

    _quantized = None
    _in_batch = True

    def __init__(
        self, config: H2OConfig | None = None, batch_size: int = 0, *, name: str = ""
    ) -> None:
        self._configure(config if config is not None else H2OConfig(), name)
        self._hold(None, batch_size)

    @property
    def offset(self) -> Any:
        """int32 [B]: tokens seen by each sequence, less the padding that is still to come."""
        pairs = zip(self._tokens, self._padding, strict=True)
        return mx.array([seen - left for seen, (left, _) in pairs], mx.int32)

    @property
    def _tokens(self) -> list[int]:
        """Of each sequence, those seen."""
        return [0] * self._count if self._table is None else self._table.tokens

    def _check_rows(self, keys: mx.array, values: mx.array) -> None:
        if keys.ndim == 4 and keys.shape[0] != len(self._tokens):
            raise ValueError(
                f"[BatchH2OKVCache.update_and_fetch] keys have shape {keys.shape}, expected B = "
                f"{len(self._tokens)} sequences."
            )
        super()._check_rows(keys, values)

    # Padding

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Announce padding among the tokens to come, before the model is called.

        Args:
            left_padding: tokens of padding that come first; only while the batch is empty.
            lengths: own tokens of each sequence before ``finalize``; what comes then is padding.
            right_padding: how much that is; needs ``lengths``.

        Raises:
            ValueError: numbers other than one per sequence, or padding at a wrong moment.
        """
        op = "[BatchH2OKVCache.prepare]"
        given = {"left_padding": left_padding, "lengths": lengths, "right_padding": right_padding}
        for name, numbers in given.items():
            if numbers is None:
                continue
            if len(numbers) != len(self._tokens) or min(numbers, default=0) < 0:
                raise ValueError(
                    f"{op} {name} is {list(numbers)}, expected {len(self._tokens)} numbers of at "
                    "least 0, one per sequence."
                )
        if left_padding is not None and not self.empty():
            raise ValueError(f"{op} left_padding is given, expected it before the first tokens.")
        if right_padding is not None and max(right_padding, default=0) > 0 and lengths is None:
            raise ValueError(f"{op} right_padding is given without lengths, expected both.")
        self._free = 0
        more = left_padding or [0] * len(self._tokens)
        self._padding = [
            (left + int(more[n]), own if lengths is None else int(lengths[n]))
            for n, (left, own) in enumerate(self._padding)
        ]

    def finalize(self) -> None:
        """End what ``prepare`` announced on the right."""
        self._padding = [(left, None) for left, _ in self._padding]

    # Sequences that join and leave

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> BatchH2OKVCache:
        """The sequences of caches of one sequence each, settings and evictions included.

        Raises ValueError for no caches, settings that differ, another class, or batches; and where
        layers have unequal budgets and the model's attention can be given one mask only.
        """
        _check_mergeable(caches)
        first = caches[0]
        batch = cls(first.config, len(caches), name=first.name)
        batch.unequal_budgets = any(cache.unequal_budgets for cache in caches)
        for cache in caches:
            cache.flush()
        batch._join(caches)
        return batch

    def _join(self, caches: Sequence[H2OKVCache]) -> None:
        """Hold the sequences of these, on the rows that all of them share or on none."""
        prefixes = {one._table and one._table.prefix for one in caches if one._table or one._count}
        if len(prefixes) > 1:
            caches = [one.unshared() for one in caches]
        tables = [one._table.copy() if one._table else one._count for one in caches]
        self._hold(join(tables), sum(one._count for one in caches))

    def extend(self, other: BatchH2OKVCache) -> None:
        """Add the sequences of another batch behind these.

        Raises ValueError for a cache of another kind or with other settings.
        """
        op = "[BatchH2OKVCache.extend]"
        if not isinstance(other, BatchH2OKVCache):
            raise ValueError(f"{op} found a {type(other).__name__}, expected a BatchH2OKVCache.")
        if other.config != self.config:
            raise ValueError(f"{op} {_differing((self.config, other.config))}")
        self.unequal_budgets = self.unequal_budgets or other.unequal_budgets
        self.flush()
        other.flush()
        padding = [*self._padding, *other._padding]
        self._join([self, other])
        self._padding = padding

    def extract(self, index: int) -> H2OKVCache:
        """The cache of one sequence, in arrays of its own.

        Raises ValueError where there is no such sequence.
        """
        self._check_indices("extract", [index])
        self.flush()
        cache = evicting_cache(self.config, name=self.name)
        cache.unequal_budgets = self.unequal_budgets
        if self._table and self._tokens[index]:
            cache._hold(select(self._table, [index]))
        return cache

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep only some sequences, in the order given; none is allowed."""
        found: Any = (
            batch_indices.tolist() if isinstance(batch_indices, mx.array) else batch_indices
        )
        keep = [int(index) for index in found]
        self._check_indices("filter", keep)
        self.flush()
        padding = [self._padding[index] for index in keep]
        some = self._table and any(self._tokens[index] for index in keep)
        self._hold(select(self._table, keep) if self._table and some else None, len(keep))
        self._padding = padding

    def _check_indices(self, operation: str, indices: Sequence[int]) -> None:
        wrong = [index for index in indices if not 0 <= index < len(self._tokens)]
        if wrong:
            raise ValueError(
                f"[BatchH2OKVCache.{operation}] found the indices {wrong}, expected 0 to "
                f"{len(self._tokens) - 1}."
            )

    # State

    @property
    def state(self) -> tuple[Any, ...]:
        """keys, values, scores, positions, unscored, name, lines, settings; the last two JSON.

        With shared rows their keys and values too; the first four are then of the others.
        """
        table = self._at_rest()
        lines = {
            "tokens": self._tokens,
            "rows": [] if table is None else [one.rows for one in table.segments],
            "before": [left for left, _ in self._padding],
            "remaining": [own for _, own in self._padding],
        }
        unscored = table is not None and table.unscored
        given = unscored, self.name, json.dumps(lines), saved.settings_text(self)
        return (*saved.rows_of(table), *given, *saved.shared_of(table))

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        if len(state) - len(_STATE) not in (0, 1):
            raise ValueError(
                f"[BatchH2OKVCache.state] found {len(state)} parts, expected {len(_STATE)}: "
                f"{', '.join(_STATE)}; or those and shared rows."
            )
        unscored, name, lines, settings, *more = state[4:]
        found = json.loads(lines)
        shared = more[0] if more else None
        tokens = list(found["tokens"])
        self._restore(settings, name, tokens, state, unscored, found["rows"], shared)
        self._padding = list(zip(found["before"], found["remaining"], strict=True))


H2OKVCache._batch = BatchH2OKVCache


def _check_mergeable(caches: Sequence[Any]) -> None:
    op = "[BatchH2OKVCache.merge]"
    if not caches:
        raise ValueError(f"{op} found no caches, expected at least one.")
    for cache in caches:
        if not isinstance(cache, H2OKVCache):
            raise ValueError(f"{op} found a {type(cache).__name__}, expected H2OKVCache only.")
        if cache.config.speculative:
            raise ValueError(
                f"{op} speculative is {cache.config.speculative}, expected 0: there is no "
                "speculative decoding of batches."
            )
        held = cache._table.shape[0] if cache._table else cache._count
        if held != 1:
            raise ValueError(f"{op} found a cache of {held} sequences, expected one.")
        if cache.unequal_budgets and cache.config.kv_handed == "fused":
            raise ValueError(
                f"{op} {cache._described()} is of a model whose own attention takes one mask for "
                "all layers, and found unequal budgets: expected one budget for all layers, or one "
                "sequence at a time."
            )
    if any(cache.config != caches[0].config for cache in caches):
        raise ValueError(f"{op} {_differing(cache.config for cache in caches)}")


def _differing(configs: Iterable[H2OConfig]) -> str:
    """What is wrong with settings that are not the same."""
    first, *others = dict.fromkeys(configs)
    return (
        f"found the settings {others[0]} beside {first}, expected the same: a batch has one budget "
        "and one policy."
    )
