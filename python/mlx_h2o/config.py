"""Settings of an evicting cache, checked once, when they are made."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, fields, replace
from typing import Any, cast

from . import policies
from .operations.arguments import BITS, GROUP_SIZES
from .operations.composed import turbo

__all__ = ["HANDED", "KV_FORMATS", "PRESETS", "H2OConfig", "check_int"]

HANDED = ("packed", "arrays", "latents", "grouped", "fused")

KV_FORMATS: dict[str, tuple[int, int]] = {f"turbo{bits}": (bits, bits) for bits in turbo.BITS} | {
    f"turbo{k}v{v}": (k, v) for k in (0, 8, *turbo.BITS) for v in turbo.BITS if k != v
}
"""Bits of keys and values; keys of 0 bits stay as they come, those of 8 have scales and biases."""

# Share of the budget given to heavy hitters (AtomGradient 2026, sec. 4.1 and table 4: 128, 64 and
# 32 of 256 rows). The sinks do not scale with the budget; the recent window takes what is left.
PRESETS = {"heavy": 1 / 2, "balanced": 1 / 4, "recent": 1 / 8}

LARGEST = 2**30
"""Rows, with room for a chunk more: sizes of MLX's arrays have 31 bits."""

DENSE_SIZE = 32
"""Newest rows that mixed precision leaves as they come."""


@dataclass(frozen=True)
class H2OConfig:
    """Settings of :class:`mlx_h2o.H2OKVCache`.

    Sizes that are not given are resolved here: after construction
    ``protected + heavy_size + recent_size == max_kv_size`` unless the cache is unbounded.

    Args:
        max_kv_size: maximum number of rows in each KV head, at least 1; while a chunk of a prompt
            is read, the chunk more. AtomGradient 2026 recommends a quarter of the context (sec.
            5.3). None: unbounded, no row is ever evicted.
        sink_size: positions ``0 .. sink_size - 1`` are never evicted; fewer than ``max_kv_size``.
        heavy_size: rows kept by rank. None: half of the budget, or what the other two leave; for
            the policy "h2o" all but the recent rows.
        recent_size: the newest rows, never evicted. None, or if the three sizes do not fill the
            budget: what the other two leave; for the policy "h2o" a quarter of the budget, at
            least 32 rows, at most half.
        policy: name of the policy that ranks rows, one of :func:`mlx_h2o.policies.names`.
        diversity: for the policy "h2o", the share of the rows kept by rank that are kept for the
            diversity of their keys, 0 to 1; the others for their attention mass.
        fold: rows that go are folded into others, if the policy folds ("h2o"). False: dropped.
        decay: ``a`` of the moving average ``C = a*C + (1-a)*|s|`` of the policy "h2o-ema", at least
            0 and below 1.
        evict_every: rows evicted at a time, at most ``heavy_size + 1``: a full cache holds between
            ``max_kv_size - evict_every + 1`` and ``max_kv_size`` rows, and ranks them once in
            ``evict_every`` tokens. None: 1/32 of the budget, at least 1; more would cost recall.
        shared_heads: all KV heads of a layer keep the same positions, by their mean rank; else
            each head chooses independently.
        random_seed: seed of the policy "random".
        speculative: tokens that a draft model may propose at a time. The last ``speculative + 1``
            rows are then provisional: they count in the budget, are never evicted, and ``trim``
            takes them back exactly, also after evictions. 0: a cache can be trimmed until its
            first eviction.
        kv_bits: bits of each element of keys and values: 2, 3, 4, 5, 6 or 8. None: unquantised.
        v_bits: bits of the values, if they differ from those of the keys.
        kv_frame: rows of ``kv_bits`` are kept relative to the centre of the first keys of their
            head, and rotated, at which they lose far less (docs/design.md). False: quantised
            as they are, as mlx_lm does. Latents (MLA) and ``kv_format`` are never kept so.
        kv_group_size: elements that share a scale and a bias: 32, 64 or 128. Rows whose size is not
            a multiple use 32.
        light_bits: mixed precision: 2 or 4, bits of the lower-ranked half of the packed rows;
            ``kv_bits``, then 4 or 8, are those of the upper half. None: all packed rows have the
            same bits.
        dense_size: the newest rows, left unquantised; fewer than ``recent_size``. With
            ``light_bits`` and 0, the rows of the recent window have ``light_bits`` and all others
            ``kv_bits`` (AtomGradient 2026, sec. 4.8), and up to ``evict_every`` of the newest wait
            unquantised. None: 32 with ``light_bits``, or what a smaller recent window allows;
            else 0.
        kv_handed: the form in which a model gets quantised rows, chosen by ``make_prompt_cache``:
            "packed"; "arrays" for one that computes with the keys first; "latents" for latent
            attention (MLA), where the rotary part of a key stays dense. Arrays too for attention
            other than mlx_lm's function: "grouped" for a softmax with an axis of the query heads of
            each KV head, also in the masks of batches (gemma2); "fused" for any other.
        kv_format: instead of ``kv_bits``, rows as codes of rotated vectors (TurboQuant): "turbo2",
            "turbo3" or "turbo4", by the bits of a code. Keys and values may differ: "turbo4v3";
            "turbo8v3" has keys of 8 bits with scales and biases, "turbo0v3" unquantised keys. The
            elements of a row must be a power of two, at least 32.
        sparse_v: threshold of sparse V, below 1: attention skips the values of quantised rows
            whose weight is below it (Turney 2026). The paper uses 1e-6. 0: none are skipped.
        preallocate: allocate all rows with the first, so that decoding allocates and copies
            nothing for them: True for ``max_kv_size`` rows, or a number of rows, which an unbounded
            cache needs. On Linux with the native back end, memory is taken page by page as rows are
            written, and unused pages are given back; elsewhere all of it is taken at once. Files do
            not store this setting.
        prefix_size: like ``sink_size``, for a text that many prompts begin with, such as a system
            prompt; fewer than ``max_kv_size``. Its rows are not ranked, and sequences with the same
            first tokens can share them (:func:`mlx_h2o.batch_generate`).
        context_size: tokens that the model was trained for. Rows further back than this from the
            newest token are evicted first, whatever their rank, except sinks: attention has learned
            nothing at such distances. None: ``make_prompt_cache`` takes it from the model; in other
            caches, and with 0, only the policy decides.
        rows_at: budgets for shorter texts, as ``make_prompt_cache`` shares rows out over KV heads:
            pairs of tokens, ascending, and the rows while no more of them have been seen. Behind
            the last, and where there are none, ``max_kv_size`` rows. Of one precision, and without
            ``preallocate``.

    Raises:
        ValueError: a value out of range, an unknown policy, or sizes beyond the budget.
    """

    max_kv_size: int | None = 256
    sink_size: int = 4
    heavy_size: int | None = None
    recent_size: int | None = None
    policy: str = "keydiff"
    diversity: float = 0.5
    fold: bool = True
    decay: float = 0.95
    evict_every: int | None = None
    shared_heads: bool = False
    random_seed: int = 0
    speculative: int = 0
    kv_bits: int | None = None
    v_bits: int | None = None
    kv_frame: bool = True
    kv_group_size: int = 64
    light_bits: int | None = None
    dense_size: int | None = None
    kv_handed: str = "packed"
    sparse_v: float = 0.0
    kv_format: str | None = None
    preallocate: bool | int = False
    prefix_size: int = 0
    context_size: int | None = None
    rows_at: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for name in ("sink_size", "prefix_size", "speculative"):
            _check_int(name, getattr(self, name), 0)
        check_int("H2OConfig", "random_seed", self.random_seed, 0, most=2**64 - 1)
        for name in ("max_kv_size", "evict_every", "heavy_size", "recent_size", "dense_size"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), int(name in ("max_kv_size", "evict_every")))
        if self.context_size is not None:
            _check_int("context_size", self.context_size, 0)
        for name in ("decay", "sparse_v"):
            _check_share(name, getattr(self, name))
        if self.diversity != 1:
            _check_share("diversity", self.diversity)
        if not isinstance(self.preallocate, bool):
            _check_int("preallocate", self.preallocate, 0)
        for name in ("shared_heads", "kv_frame", "fold"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"[H2OConfig] {name} is {getattr(self, name)!r}, expected a bool.")
        if self.policy not in policies.names():
            known = ", ".join(policies.names())
            raise ValueError(f"[H2OConfig] policy is {self.policy!r}, expected one of: {known}.")
        self._check_quantisation()
        if self.preallocate and self.mixed:
            raise ValueError(
                f"[H2OConfig] preallocate is {self.preallocate} with mixed precision, expected "
                "rows of one precision."
            )
        self._check_rows_at()
        if self.evict_every is None and self.max_kv_size is not None:
            object.__setattr__(self, "evict_every", self._group_of(self.max_kv_size))
        if self.max_kv_size is None:
            self._check_unbounded()
            return
        for name in ("sink_size", "prefix_size"):
            if getattr(self, name) >= self.max_kv_size:
                raise ValueError(
                    f"[H2OConfig] {name} is {getattr(self, name)}, expected fewer than "
                    f"max_kv_size = {self.max_kv_size}: no row could ever be evicted."
                )
        self._resolve_sizes(self.max_kv_size)
        self._check_dense_rows()
        least = self.protected + self.speculative + 2
        if self.speculative and self.max_kv_size < least:
            raise ValueError(
                f"[H2OConfig] max_kv_size is {self.max_kv_size} and speculative "
                f"{self.speculative}, expected at least {self._said} + speculative + 2 = {least} "
                "rows."
            )

    def _check_rows_at(self) -> None:
        given, plain = self.rows_at, False
        with contextlib.suppress(TypeError, ValueError):  # pairs of something else, or none at all
            given = tuple((tokens, rows) for tokens, rows in given)  # JSON has lists
            plain = all(type(n) is int and n > self.protected for pair in given for n in pair)
        if not plain or [pair[0] for pair in given] != sorted({pair[0] for pair in given}):
            raise ValueError(
                f"[H2OConfig] rows_at is {given!r}, expected pairs of tokens, ascending, and rows, "
                f"more than {self._said} = {self.protected}."
            )
        object.__setattr__(self, "rows_at", given)
        if given and (self.mixed or self.preallocate or self.max_kv_size is None):
            raise ValueError(
                f"[H2OConfig] rows_at has {len(given)} pairs, expected none with mixed precision, "
                "preallocate or an unbounded cache."
            )

    def _check_quantisation(self) -> None:
        for name, known in (
            ("kv_bits", (None, *BITS)),
            ("v_bits", (None, *BITS)),
            ("kv_group_size", GROUP_SIZES),
            ("light_bits", (None, 2, 4)),
            ("kv_handed", HANDED),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or value not in known:
                raise ValueError(f"[H2OConfig] {name} is {value!r}, expected one of {known}.")
        self._check_format()
        for name in ("v_bits", "light_bits", "dense_size", "sparse_v"):
            served = name == "sparse_v" and self.kv_format is not None
            if getattr(self, name) and self.kv_bits is None and not served:
                raise ValueError(
                    f"[H2OConfig] {name} is {getattr(self, name)} and kv_bits is None, expected "
                    "kv_bits too."
                )
        if self.light_bits is None:
            return
        if self.kv_bits not in (4, 8) or self.light_bits >= self.kv_bits:
            raise ValueError(
                f"[H2OConfig] light_bits is {self.light_bits} and kv_bits {self.kv_bits}, "
                "expected kv_bits of 4 or 8, and fewer light_bits."
            )
        if self.v_bits is not None:
            raise ValueError(
                f"[H2OConfig] light_bits is {self.light_bits} and v_bits {self.v_bits}, expected "
                "one of them."
            )

    def _check_format(self) -> None:
        if self.kv_format is None:
            return
        if self.kv_format not in KV_FORMATS:
            raise ValueError(
                f"[H2OConfig] kv_format is {self.kv_format!r}, expected one of: "
                f"{', '.join(KV_FORMATS)}."
            )
        if self.kv_bits is not None or self.kv_handed == "latents":
            other = "for latent attention" if self.kv_bits is None else f"kv_bits {self.kv_bits}"
            raise ValueError(
                f"[H2OConfig] kv_format is {self.kv_format!r} and {other}, expected one of them."
            )

    def _check_unbounded(self) -> None:
        """Nothing that only an eviction, or a budget, gives a meaning to."""
        if self.preallocate is True:
            raise ValueError(
                "[H2OConfig] preallocate is True and max_kv_size None, expected a number of rows."
            )
        for name in ("heavy_size", "recent_size", "light_bits", "dense_size"):
            if getattr(self, name):
                raise ValueError(
                    f"[H2OConfig] {name} is {getattr(self, name)} and max_kv_size None, expected a "
                    "max_kv_size too: an unbounded cache keeps all rows alike."
                )

    def _resolve_sizes(self, rows: int) -> None:
        left = rows - self.protected - (self.recent_size or 0)
        heavy = self.heavy_size
        if heavy is None:
            # At least one recent row, which gives the newest row time to be scored.
            spare = left if self.recent_size is not None else left - 1
            shared = self._shared_out(rows)
            recent = policies.known(self.policy).recent_rows(shared)
            if recent is None:
                heavy = int(shared * PRESETS["heavy"])
            else:
                heavy = left - (recent if self.recent_size is None else 0)
            heavy = max(0, min(heavy, spare))
        if left < heavy:
            raise ValueError(
                f"[H2OConfig] {self._said} + heavy_size + recent_size is {self.protected} + "
                f"{heavy} + {self.recent_size or 0} = "
                f"{self.protected + heavy + (self.recent_size or 0)}, "
                f"expected at most max_kv_size = {rows}."
            )
        object.__setattr__(self, "heavy_size", heavy)
        object.__setattr__(self, "recent_size", rows - self.protected - heavy)

    @property
    def protected(self) -> int:
        """The first positions, which are never evicted: sinks, or the prefix that they begin."""
        return max(self.sink_size, self.prefix_size)

    @property
    def _said(self) -> str:
        return "prefix_size" if self.prefix_size > self.sink_size else "sink_size"

    def _shared_out(self, rows: int) -> int:
        """Of a budget, what does not go to a prefix: shares of it are of these rows."""
        return rows - max(0, self.prefix_size - self.sink_size)

    def _group_of(self, max_kv_size: int | None) -> int | None:
        """Rows that leave together where nobody says how many."""
        return None if max_kv_size is None else max(1, self._shared_out(max_kv_size) // 32)

    @property
    def packs(self) -> bool:
        """Whether rows are quantised."""
        return self.kv_bits is not None or self.kv_format is not None

    @property
    def framed(self) -> bool:
        """Whether rows are kept in a frame of their head (``kv_frame``)."""
        return self.kv_frame and self.kv_bits is not None and self.kv_handed != "latents"

    @property
    def dense_rows(self) -> int:
        """The newest rows that are not quantised: ``dense_size``, or what None stands for."""
        if self.dense_size is not None or self.light_bits is None:
            return self.dense_size or 0
        return min(DENSE_SIZE, cast(int, self.recent_size) - 1)

    @property
    def mixed(self) -> bool:
        """Whether rows are kept in more than one precision."""
        return self.light_bits is not None or self.dense_rows > 0

    @property
    def group(self) -> int:
        """Rows that leave together: ``evict_every``, as far as no protected row would have to."""
        return max(1, min(self.evict_every or 1, (self.heavy_size or 0) + 1))

    @property
    def folds(self) -> bool:
        """Whether rows that go are folded into others: by ``fold`` and the policy, where all rows
        are of one precision and keys and values are rows of their own (not those of latent
        attention)."""
        alike = not self.mixed and self.kv_handed != "latents"
        return self.fold and policies.known(self.policy).folds and alike

    @property
    def reach(self) -> int:
        """The newest tokens that ``trim`` takes back without a trace: none without speculation."""
        return self.speculative + 1 if self.speculative else 0

    def _check_dense_rows(self) -> None:
        recent = cast(int, self.recent_size)
        if self.light_bits is not None and self.dense_size is None and recent < 2:
            raise ValueError(
                f"[H2OConfig] recent_size is {recent} with light_bits, expected at least 2: fewer "
                "rows are dense; or dense_size=0."
            )
        most = max(0, recent - 1)
        if self.dense_rows > most:
            raise ValueError(
                f"[H2OConfig] dense_size is {self.dense_size}, expected 0 to {most}: fewer "
                f"than recent_size = {recent}."
            )

    def with_budget(self, max_kv_size: int, heavy_size: int | None = None) -> H2OConfig:
        """The same settings for another budget; what was not chosen follows it."""
        same = self.evict_every == self._group_of(self.max_kv_size)
        group = None if same else self.evict_every
        return replace(
            self,
            max_kv_size=max_kv_size,
            heavy_size=heavy_size,
            recent_size=None,
            evict_every=group,
            rows_at=(),
        )

    @classmethod
    def preset(cls, name: str, max_kv_size: int = 256, **settings: Any) -> H2OConfig:
        """What was published: the policy "h2o-ema", and splits of the budget in scale.

        At 256 rows: "heavy" 4 sinks, 128 heavy, 124 recent; "balanced" 4, 64, 188; "recent"
        4, 32, 220 (AtomGradient 2026, sec. 4.1). Further settings, ``policy`` among them, are
        passed to the constructor and win over the preset.

        Raises:
            ValueError: unknown name, or as the constructor.
        """
        if name not in PRESETS:
            known = ", ".join(PRESETS)
            raise ValueError(f"[H2OConfig.preset] name is {name!r}, expected one of: {known}.")
        _check_int("max_kv_size", max_kv_size, 1)
        if settings.get("heavy_size") is None:
            sinks = settings.get("sink_size", cls.sink_size)
            beyond = max(0, settings.get("prefix_size", 0) - sinks)  # of the budget for the prefix
            rows = max_kv_size - beyond
            settings["heavy_size"] = max(0, min(int(rows * PRESETS[name]), rows - sinks - 1))
        return cls(max_kv_size=max_kv_size, **({"policy": "h2o-ema"} | settings))

    @classmethod
    def setting_names(cls) -> tuple[str, ...]:
        """Names of all settings, for callers that split them from other keyword arguments."""
        return tuple(field.name for field in fields(cls))


def check_int(
    operation: str, name: str, value: object, least: int = 1, *, most: int = LARGEST, more: str = ""
) -> None:
    """Raises ValueError where it is no int of this range; ``more`` says what else is expected."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        expected = f"an int of at least {least}{more}"
    elif value > most:
        expected = f"at most {most}"
    else:
        return
    raise ValueError(f"[{operation}] {name} is {value!r}, expected {expected}.")


_check_int = functools.partial(check_int, "H2OConfig")


def _check_share(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(
            f"[H2OConfig] {name} is {value!r}, expected a number of at least 0, below 1."
        )
