"""Settings of an evicting cache: how many rows it keeps, in which format, and by which policy."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, TypeVar, cast

from . import policies
from .errors import SettingError, check, check_bool, check_int, check_known, check_share
from .operations.arguments import AFFINE_BITS, CODE_BITS, GROUP_SIZES

__all__ = ["HANDED", "KV_FORMATS", "PRESETS", "Affine", "Budget", "Codes", "Dense", "H2OConfig"]
__all__ += ["Mixed", "SettingError", "setting_names"]

HANDED = ("packed", "arrays", "latents", "grouped", "fused")
"""Forms in which a model gets quantised rows: "arrays" for one that computes with the keys first;
"latents" for latent attention (MLA), where the rotary part of a key stays dense. Arrays too for
attention other than mlx_lm's function: "grouped" for a softmax with an axis of the query heads of
each KV head, also in the masks of batches; "fused" for any other."""

KV_FORMATS: dict[str, tuple[int, int]] = {f"turbo{bits}": (bits, bits) for bits in CODE_BITS} | {
    f"turbo{k}v{v}": (k, v) for k in (0, 8, *CODE_BITS) for v in CODE_BITS if k != v
}
"""Bits of keys and values. Keys of 0 bits are unquantised; those of 8 have scales and biases."""

# Share of the budget given to heavy hitters (AtomGradient 2026, sec. 4.1 and table 4: 128, 64 and
# 32 of 256 rows). The sinks do not scale with the budget; the recent window takes the rest.
PRESETS = {"heavy": 1 / 2, "balanced": 1 / 4, "recent": 1 / 8}

DENSE_SIZE = 32
"""Newest rows that mixed precision leaves unquantised."""

DENSE_UNBOUNDED = 8
"""Newest rows that an unbounded cache leaves unquantised if values have at most 4 bits."""

PACKED_TOGETHER = 32
"""Rows that an unbounded cache quantises at a time, if its newest rows stay unquantised."""

_T = TypeVar("_T")


def _check_int(name: str, value: object, least: int, *, optional: bool = False) -> None:
    if value is not None or not optional:
        check_int("H2OConfig", name, value, least)


def _check_bounded(name: str, size: int | None) -> None:
    wanted = "a {} too: an unbounded cache keeps all rows alike"
    check(not size, name, size, wanted, "max_kv_size")


@dataclass(frozen=True)
class Budget:
    """The number of rows that each KV head keeps, and which of them are never evicted.

    H2OConfig fills in the sizes that are not given, so that
    ``protected + heavy_size + recent_size == max_kv_size`` unless the cache is unbounded.

    Args:
        max_kv_size: maximum number of rows in each KV head, at least 1. While a chunk of a prompt
            is read, its rows are held as well. AtomGradient 2026 recommends a quarter of the
            context (sec. 5.3). None: unbounded, no row is ever evicted.
        sink_size: positions ``0 .. sink_size - 1`` are never evicted; less than ``max_kv_size``.
        heavy_size: rows kept by rank. None: half of the budget, or less if the other sizes leave
            less; for the policy "h2o" all but the protected and the recent rows.
        recent_size: the newest rows, never evicted. If None, or if the three sizes do not fill the
            budget: the rows that remain; for the policy "h2o" a quarter of the budget, at least
            32 rows and at most half.
        evict_every: rows evicted at a time, at most ``heavy_size + 1``. A full cache holds between
            ``max_kv_size - evict_every + 1`` and ``max_kv_size`` rows, and ranks them once every
            ``evict_every`` tokens. None: 1/32 of the budget, at least 1; more would cost recall.
        prefix_size: like ``sink_size``, for a text that many prompts begin with, such as a system
            prompt; less than ``max_kv_size``. Its rows are not ranked, and sequences with the same
            first tokens can share them (:func:`mlx_h2o.batch_generate`).
        context_size: the model's trained context in tokens. Rows further back than this from the
            newest token are evicted first, whatever their rank, except sinks: the model has not
            learned to attend so far. None: ``make_prompt_cache`` takes it from the model; in other
            caches, and with 0, only the policy decides.
        speculative: tokens that a draft model may propose at a time. The last ``speculative + 1``
            rows are then provisional: they count towards the budget, are never evicted, and
            ``trim`` removes them exactly, even after evictions. 0: a cache can be trimmed until
            its first eviction.
        preallocate: allocate all rows with the first, so that decoding does not allocate or copy
            buffers: True for ``max_kv_size`` rows, or a number of rows, which an unbounded cache
            needs. On Linux with the native back end, memory is taken page by page as rows are
            written, and unused pages are returned; elsewhere all of it is taken at once. Files do
            not store this setting.
        rows_at: budgets for shorter texts, which ``make_prompt_cache`` sets when KV heads have
            unequal budgets: pairs ``(tokens, rows)`` in ascending order; ``rows`` applies until
            ``tokens`` tokens have been seen, and ``max_kv_size`` after the last pair. Not with
            mixed precision or ``preallocate``.

    Raises:
        SettingError: a value out of range, or sizes beyond the budget.
    """

    max_kv_size: int | None = 256
    sink_size: int = 4
    heavy_size: int | None = None
    recent_size: int | None = None
    evict_every: int | None = None
    prefix_size: int = 0
    context_size: int | None = None
    speculative: int = 0
    preallocate: bool | int = False
    rows_at: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for name in ("sink_size", "prefix_size", "speculative"):
            _check_int(name, getattr(self, name), 0)
        for name in ("max_kv_size", "evict_every"):
            _check_int(name, getattr(self, name), 1, optional=True)
        for name in ("heavy_size", "recent_size", "context_size"):
            _check_int(name, getattr(self, name), 0, optional=True)
        if not isinstance(self.preallocate, bool):
            _check_int("preallocate", self.preallocate, 0)
        self._check_rows_at()
        if self.max_kv_size is None:
            wanted = "a number of rows in an unbounded cache"
            check(self.preallocate is not True, "preallocate", self.preallocate, wanted)
            for name in ("heavy_size", "recent_size"):
                _check_bounded(name, getattr(self, name))
        else:
            self._check_sum(self.max_kv_size)

    def _check_rows_at(self) -> None:
        given, plain = self.rows_at, False
        least = self.protected + (self.speculative + 2 if self.speculative else 1)
        with contextlib.suppress(TypeError, ValueError):  # no pairs of numbers
            given = tuple((tokens, rows) for tokens, rows in given)  # JSON has lists
            plain = all(type(n) is int and n >= least for pair in given for n in pair)
        plain = plain and isinstance(self.rows_at, list | tuple)
        right = plain and [pair[0] for pair in given] == sorted({pair[0] for pair in given})
        wanted = f"pairs of tokens, ascending, and rows, at least {least} with {{}} and {{}}"
        check(right, "rows_at", given or self.rows_at, wanted, self._first, "speculative")
        object.__setattr__(self, "rows_at", given)
        alone = not given or not (self.preallocate or self.max_kv_size is None)
        check(alone, "rows_at", given, "none with {} or an unbounded cache", "preallocate")

    def _check_sum(self, rows: int) -> None:
        first, heavy, recent = self.protected, self.heavy_size or 0, self.recent_size or 0
        wanted = f"fewer than {{}} = {rows}: no row could ever be evicted"
        check(first < rows, self._first, first, wanted, "max_kv_size")
        least = first + heavy + recent
        wanted = f"at least {{}} + {{}} + {{}} = {first} + {heavy} + {recent} = {least}"
        names = self._first, "heavy_size", "recent_size"
        check(least <= rows, "max_kv_size", rows, wanted, *names)
        least, wanted = first + self.speculative + 2, "at least {} + {} + 2 = "
        served = not self.speculative or least <= rows
        check(served, "max_kv_size", rows, f"{wanted}{least}", self._first, "speculative")

    def filled(self, policy: policies.Policy, share: float | None = None) -> Budget:
        """The same budget, with defaults for the sizes and the group that were not given; ``share``
        is a preset's share of heavy rows."""
        if self.max_kv_size is None:
            return self
        left = self.max_kv_size - self.protected - (self.recent_size or 0)
        heavy = self.heavy_size
        if heavy is None:
            # At least one recent row, which gives the newest row time to be scored.
            spare = left if self.recent_size is not None else left - 1
            recent = policy.recent_rows(self._shared_out) if share is None else None
            if recent is None:
                heavy = int(self._shared_out * (share or PRESETS["heavy"]))
            else:
                heavy = left - (recent if self.recent_size is None else 0)
            heavy = max(0, min(heavy, spare))
        rest = self.max_kv_size - self.protected - heavy
        every = self.evict_every or self._usual_group
        return replace(self, heavy_size=heavy, recent_size=rest, evict_every=every)

    def scaled(self, rows: int, policy: policies.Policy) -> Budget:
        """The same budget with another number of rows: defaults follow it, and a chosen number of
        heavy rows keeps its share."""
        heavy = None
        if self.max_kv_size is not None and self.heavy_size is not None:
            usual = replace(self, heavy_size=None, recent_size=None).filled(policy)
            if usual.heavy_size != self.heavy_size:
                share = self.heavy_size * rows // self.max_kv_size
                heavy = max(0, min(share, rows - self.protected - 1))
        chosen = self.max_kv_size is None or self.evict_every != self._usual_group
        every = self.evict_every if chosen else None
        sizes: dict[str, Any] = {"max_kv_size": rows, "heavy_size": heavy, "recent_size": None}
        return replace(self, **sizes, evict_every=every, rows_at=())

    @property
    def protected(self) -> int:
        """The first positions, which are never evicted: sinks, or the prefix that they begin."""
        return max(self.sink_size, self.prefix_size)

    @property
    def _first(self) -> str:
        return "prefix_size" if self.prefix_size > self.sink_size else "sink_size"

    @property
    def _shared_out(self) -> int:
        """The rows of the budget without the prefix, by which shares of it are counted."""
        return cast(int, self.max_kv_size) - max(0, self.prefix_size - self.sink_size)

    @property
    def _usual_group(self) -> int:
        return max(1, self._shared_out // 32)


class Format:
    """How rows are stored. These values stand for settings that a format does not have."""

    kv_bits: int | None = None
    v_bits: int | None = None
    light_bits: int | None = None
    dense_size: int | None = 0
    kv_format: str | None = None
    kv_frame: bool = False
    kv_group_size: int = 64
    sparse_v: float = 0.0

    def __post_init__(self) -> None:
        _check_int("dense_size", self.dense_size, 0, optional=True)
        check_bool("kv_frame", self.kv_frame)
        check_known("kv_group_size", self.kv_group_size, GROUP_SIZES)
        check_share("sparse_v", self.sparse_v)


@dataclass(frozen=True)
class Dense(Format):
    """Unquantised rows."""


@dataclass(frozen=True)
class Affine(Format):
    """Quantised rows with scales and biases, as in ``mx.quantize``.

    Args:
        kv_bits: bits of each element of keys and values: 2, 3, 4, 5, 6 or 8.
        v_bits: bits of the values, if they differ from those of the keys.
        dense_size: number of newest rows left unquantised, less than ``recent_size``. Most of the
            loss of low bits comes from the newest 8 rows (docs/internals/measured.md). None: 8 in
            an unbounded cache whose values have at most 4 bits, else 0; also 0 with ``preallocate``
            and for latents.
        kv_frame: store keys relative to the centre of the first keys of their head, and rotate
            keys and values, so that they lose far less (docs/design.md). False: quantise rows as
            they are, like mlx_lm. Latents (MLA) are never centred or rotated.
        kv_group_size: elements that share a scale and a bias: 32, 64 or 128. Rows whose size is not
            a multiple use 32.
        sparse_v: threshold of sparse V, below 1: attention skips the values of quantised rows
            whose weight is below it (Turney 2026). The paper uses 1e-6. 0: none are skipped.
    """

    kv_bits: int = 8
    v_bits: int | None = None
    dense_size: int | None = field(default=None, compare=False)  # H2OConfig.dense_rows counts
    kv_frame: bool = True
    kv_group_size: int = 64
    sparse_v: float = 0.0

    def __post_init__(self) -> None:
        check_known("kv_bits", self.kv_bits, AFFINE_BITS)
        if self.v_bits is not None:
            check_known("v_bits", self.v_bits, AFFINE_BITS)
        super().__post_init__()


@dataclass(frozen=True)
class Mixed(Format):
    """Mixed precision: affine rows of ``kv_bits``, the lower-ranked half of ``light_bits``.

    Args:
        kv_bits: bits of the higher-ranked half: 4 or 8.
        light_bits: bits of the lower-ranked half: 2 or 4, less than ``kv_bits``.
        dense_size: number of newest rows left unquantised, less than ``recent_size``. With 0, the
            rows of the recent window have ``light_bits`` and all others ``kv_bits`` (AtomGradient
            2026, sec. 4.8), and up to ``evict_every`` of the newest are not quantised yet. None:
            32, or fewer if the recent window is smaller.
        kv_frame, kv_group_size, sparse_v: as in :class:`Affine`.
    """

    kv_bits: int = 8
    light_bits: int = 4
    dense_size: int | None = None
    kv_frame: bool = True
    kv_group_size: int = 64
    sparse_v: float = 0.0

    def __post_init__(self) -> None:
        check_known("light_bits", self.light_bits, (2, 4))
        right = self.kv_bits in (4, 8) and self.light_bits < self.kv_bits
        check(right, "kv_bits", self.kv_bits, "4 or 8, and more than {}", "light_bits")
        super().__post_init__()


@dataclass(frozen=True)
class Codes(Format):
    """Rows as codes of rotated vectors (TurboQuant). Row sizes must be powers of two from 32 on.

    Args:
        kv_format: "turbo2", "turbo3" or "turbo4", named by the bits of a code. Keys and values may
            differ, as in "turbo4v3"; "turbo8v3" has keys of 8 bits with scales and biases,
            "turbo0v3" unquantised keys.
        kv_group_size, sparse_v: as in :class:`Affine`.
    """

    kv_format: str
    kv_group_size: int = 64
    sparse_v: float = 0.0

    def __post_init__(self) -> None:
        known = f"one of: {', '.join(KV_FORMATS)}"
        check(self.kv_format in [*KV_FORMATS], "kv_format", self.kv_format, known)
        super().__post_init__()


@dataclass(frozen=True)
class H2OConfig:
    """Settings of :class:`mlx_h2o.H2OKVCache`.

    Args:
        budget: how many rows to keep, and which of them are never evicted.
        format: ``Dense()``, ``Affine(bits)``, ``Mixed(bits, light_bits)`` or ``Codes(name)``.
        policy: ranks the other rows: one of :mod:`mlx_h2o.policies`, with its settings.
        kv_handed: the form in which the model gets quantised rows, one of ``HANDED``;
            ``make_prompt_cache`` sets it.

    Raises:
        SettingError: (a ValueError) a format that does not go with the budget.
    """

    budget: Budget = Budget()
    format: Format = Dense()
    policy: policies.Policy = field(default_factory=policies.KeyDiff)
    kv_handed: str = field(default="packed", kw_only=True)
    dense_rows: int = field(init=False)
    """The newest rows that are not quantised: ``dense_size``, or what None stands for."""

    max_kv_size = cached_property[int | None](attrgetter("budget.max_kv_size"))
    recent_size = cached_property[int | None](attrgetter("budget.recent_size"))
    prefix_size = cached_property[int](attrgetter("budget.prefix_size"))
    protected = cached_property[int](attrgetter("budget.protected"))
    context_size = cached_property[int | None](attrgetter("budget.context_size"))
    speculative = cached_property[int](attrgetter("budget.speculative"))
    preallocate = cached_property[bool | int](attrgetter("budget.preallocate"))
    rows_at = cached_property[tuple[tuple[int, int], ...]](attrgetter("budget.rows_at"))
    kv_bits = cached_property[int | None](attrgetter("format.kv_bits"))
    v_bits = cached_property[int | None](attrgetter("format.v_bits"))
    light_bits = cached_property[int | None](attrgetter("format.light_bits"))
    kv_format = cached_property[str | None](attrgetter("format.kv_format"))
    kv_group_size = cached_property[int](attrgetter("format.kv_group_size"))
    sparse_v = cached_property[float](attrgetter("format.sparse_v"))

    def __post_init__(self) -> None:
        parts: dict[str, Any] = {"budget": Budget, "format": Format, "policy": policies.Policy}
        for name, kind in parts.items():
            part = getattr(self, name)
            check(isinstance(part, kind), name, part, f"a {name}, or H2OConfig.of(...)")
        check_known("kv_handed", self.kv_handed, HANDED)
        for name in ("kv_format", "light_bits", "dense_size"):
            found = getattr(self.format, name)
            served = self.kv_handed != "latents" or not found
            check(served, name, found, "{} alone for latent attention", "kv_bits")
        object.__setattr__(self, "budget", self.budget.filled(self.policy))
        object.__setattr__(self, "dense_rows", self._newest_rows())
        if self.mixed:
            self._check_mixed("dense_size" if self.light_bits is None else "light_bits")

    def _newest_rows(self) -> int:
        if self.format.dense_size is not None:
            return self.format.dense_size
        if self.light_bits is not None:
            return min(DENSE_SIZE, (self.recent_size or 0) - 1)
        served = not self.preallocate and self.kv_handed != "latents"
        few = (self.v_bits or self.kv_bits or 8) <= 4
        return DENSE_UNBOUNDED if few and served and self.max_kv_size is None else 0

    def _check_mixed(self, name: str) -> None:
        for other in ("preallocate", "rows_at"):
            found = getattr(self, other)
            check(not found, other, found, "none with {}: rows of one precision", name)
        if self.recent_size is None:
            _check_bounded("light_bits", self.light_bits)
            return
        recent = self.recent_size
        right = recent > 1 or self.format.dense_size is not None
        wanted = "at least 2 with {}: fewer rows are dense; or {} 0"
        check(right, "recent_size", recent, wanted, "light_bits", "dense_size")
        most = max(0, recent - 1)
        wanted = f"0 to {most}: fewer than {{}} = {recent}"
        check(self.dense_rows <= most, "dense_size", self.dense_rows, wanted, "recent_size")

    @classmethod
    def of(cls, **given: Any) -> H2OConfig:
        """An H2OConfig from settings by name, as :func:`mlx_h2o.make_prompt_cache` takes them and
        files store them: arguments of the budget, the format and the policy, and ``policy``.

        ``kv_format`` selects codes, ``light_bits`` mixed precision, and ``kv_bits`` affine rows.
        Settings of other policies are checked and ignored.

        Raises:
            ValueError: an unknown name, or a SettingError for a value that is refused.
        """
        if unknown := sorted(given.keys() - _DEFAULTS.keys()):
            known = ", ".join(setting_names())
            raise ValueError(f"[H2OConfig] unknown settings {unknown}, expected some of: {known}.")
        own = {n: one for n, one in given.items() if one is not None or _DEFAULTS[n] is not None}
        tuned = {name: _made(policies.known(name), own) for name in policies.names()}
        policy = tuned[policies.known(own.get("policy", policies.KeyDiff.name)).name]
        form = own.get("kv_handed", "packed")
        return cls(_made(Budget, own), _format(own), policy, kv_handed=form)

    @classmethod
    def preset(cls, name: str, max_kv_size: int = 256, **settings: Any) -> H2OConfig:
        """A published preset: the policy "h2o-ema" and a split of the budget, scaled to its size.

        At 256 rows, "heavy" has 4 sinks, 128 heavy and 124 recent rows; "balanced" 4, 64 and 188;
        "recent" 4, 32 and 220 (AtomGradient 2026, sec. 4.1). Further settings, including
        ``policy``, are those of :meth:`of` and override the preset.

        Raises:
            SettingError: (a ValueError) an unknown name, or as in :meth:`of`.
        """
        wanted = f"one of: {', '.join(PRESETS)}"
        check(name in [*PRESETS], "name", name, wanted, operation="H2OConfig.preset")
        _check_int("max_kv_size", max_kv_size, 1)
        made = cls.of(max_kv_size=max_kv_size, **({"policy": "h2o-ema"} | settings))
        if settings.get("heavy_size") is not None:
            return made
        free = replace(made.budget, heavy_size=None, recent_size=settings.get("recent_size"))
        return replace(made, budget=free.filled(made.policy, PRESETS[name]))

    def named(self) -> dict[str, Any]:
        """All settings by the names that :meth:`of` takes, as files store them."""
        own = vars(self.budget) | vars(self.format) | vars(self.policy)
        if isinstance(self.format, Affine):
            own["dense_size"] = self.dense_rows
        return _DEFAULTS | own | {"policy": self.policy.name, "kv_handed": self.kv_handed}

    def with_budget(self, **changes: Any) -> H2OConfig:
        """The same, with other settings of the budget."""
        return replace(self, budget=replace(self.budget, **changes))

    def scaled(self, rows: int) -> H2OConfig:
        """The same, with another number of rows and what follows it; see :meth:`Budget.scaled`."""
        return replace(self, budget=self.budget.scaled(rows, self.policy))

    @property
    def packs(self) -> bool:
        """Whether rows are quantised."""
        return not isinstance(self.format, Dense)

    @property
    def framed(self) -> bool:
        """Whether rows are kept in a frame of their head (``kv_frame``)."""
        return self.format.kv_frame and self.kv_handed != "latents"

    @cached_property
    def mixed(self) -> bool:
        """Whether rows are kept in more than one precision."""
        return isinstance(self.format, Mixed) or self.dense_rows > 0

    @cached_property
    def group(self) -> int:
        """Rows evicted together, or in an unbounded cache quantised together: ``evict_every``, or
        fewer if that would evict protected rows."""
        if self.max_kv_size is None:
            return PACKED_TOGETHER
        return max(1, min(self.budget.evict_every or 1, (self.budget.heavy_size or 0) + 1))

    @property
    def folds(self) -> bool:
        """Whether evicted rows are folded into others: if the policy folds, except with mixed
        precision and latent attention."""
        return self.policy.folds and not self.mixed and self.kv_handed != "latents"

    @cached_property
    def reach(self) -> int:
        """The newest tokens that ``trim`` can always remove: none without speculation."""
        return self.speculative + 1 if self.speculative else 0


_PARTS: tuple[Any, ...] = (Budget, Affine, Codes, Mixed, *map(policies.known, policies.names()))
_DEFAULTS: dict[str, Any] = {one.name: one.default for part in _PARTS for one in fields(part)}
_DEFAULTS |= dict.fromkeys(("kv_bits", "v_bits", "light_bits", "dense_size", "kv_format"))
_DEFAULTS |= {"policy": policies.KeyDiff.name, "kv_handed": "packed"}


def setting_names() -> tuple[str, ...]:
    """Names of the settings that a user may give, one by one."""
    return tuple(name for name in _DEFAULTS if name != "kv_handed")


def _made(part: type[_T], given: dict[str, Any]) -> _T:
    names = {one.name for one in fields(cast(Any, part))}
    return part(**{name: value for name, value in given.items() if name in names})


def _format(given: dict[str, Any]) -> Format:
    _made(Affine, {name: given[name] for name in given.keys() & {"kv_frame", "kv_group_size"}})
    kind: type[Format] = Affine
    wanted = "{} too", "kv_bits"
    if "kv_format" in given:
        kind, wanted = Codes, ("none with {}", "kv_format")
    elif "kv_bits" not in given:
        kind = Dense
    elif "light_bits" in given:
        kind, wanted = Mixed, ("none with {}", "light_bits")
    for name in ("kv_bits", "v_bits", "light_bits", "dense_size", "sparse_v"):
        found = given.get(name)
        off = found is None or (type(found) in (int, float) and not found)
        check(off or name in kind.__annotations__, name, found, *wanted)
    return _made(kind, given)
