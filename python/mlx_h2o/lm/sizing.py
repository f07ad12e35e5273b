"""Find how many rows, of how many bits, fit into a number of bytes."""

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from ..config import H2OConfig
from ..errors import SettingError
from .probing import BITS

FREE = 0.04
"""Relative change of attention's output up to which packing loses nothing that can be measured:
docs/internals/quality.md."""
UNMEASURED = 8, 5
"""Bits of keys and of values if the errors of a model cannot be measured."""
SCARCE, PLENTY = 5, 2
"""Rows are worth more than bits if fewer than one in 5 tokens stay, less if more than one in 2. In
a model with sliding windows they are worth more up to there."""
RECENT = 5
"""One row in so many is recent in a model with sliding windows, which hold recent tokens too."""
SOME = 1000
"""Tokens of a text if its length is not known."""
_EVENLY = 8
"""Guesses by interpolation, as if all rows took the same bytes, before halving."""


@dataclass(frozen=True)
class Sizing:
    """Settings whose caches fit into a number of bytes; ``str()`` is a summary in one line."""

    config: H2OConfig
    nbytes: int  # of the caches of all layers, for one sequence, once they are full
    peak_nbytes: int  # while 2,048 tokens of a prompt are read: a layer that reads holds them too
    draft_nbytes: int = 0  # the part of nbytes that a draft model's caches take
    why: str = ""  # why rows have these bits, if fit_bytes chose them

    def __str__(self) -> str:
        why = f" ({self.why})" if self.why else ""
        drafts = f", {self.draft_nbytes:,} of them the draft model's" if self.draft_nbytes else ""
        most = f"at most {self.peak_nbytes:,} while a prompt is read"
        return f"{described(self.config)}{why}: {self.nbytes:,} bytes{drafts}, {most}"


def described(config: H2OConfig, rows: str = "") -> str:
    """The rows, policy and bits of settings, in words; ``rows`` replaces the words for rows."""
    bits = "unquantised" if config.kv_bits is None else f"in {config.kv_bits} bits"
    if config.kv_format is not None:
        bits = f"as {config.kv_format}"
    if config.v_bits not in (None, config.kv_bits):
        bits += f" (values {config.v_bits})"
    if config.max_kv_size is None:
        return f"no limit, {bits}"
    return f"{rows or f'{config.max_kv_size:,} rows a head'} by {config.policy.name}, {bits}"


def parsed_bytes(given: int | str) -> int:
    """A number of bytes, or one as people write it: 300MB, 1.5 GB, 64MiB, 4096.

    Raises ValueError for anything else, for less than a byte, and for more than any machine has.
    """
    size = given if isinstance(given, int) and not isinstance(given, bool) else 0
    form = r"\s*(\d+(?:\.\d+)?|\.\d+)\s*(?:([KMGT])(I?))?B?\s*"
    if isinstance(given, str) and (found := re.fullmatch(form, given.upper())):
        number, unit, binary = found.groups("")
        size = int(Decimal(number) * (1024 if binary else 1000) ** "_KMGT".index(unit or "_"))
    if not 1 <= size <= 10**30:  # as a float, more could be infinite
        said = f"{given!r} is not a size in bytes, expected e.g. 300MB or 64MiB."
        raise ValueError(f"[fit_bytes] {said}")
    return size


def fewest_bits(errors: Sequence[Sequence[float]]) -> tuple[int, int]:
    """Bits of keys and of values: the fewest at which packing costs nothing that can be measured.
    ``errors`` are those of a :class:`mlx_h2o.lm.probing.Probe`; empty if unknown."""

    def fewest(side: Sequence[float]) -> int:
        return next((bits for bits, one in zip(BITS, side, strict=True) if one <= FREE), BITS[-1])

    return (fewest(errors[0]), fewest(errors[1])) if errors else UNMEASURED


def fewest_rows(made: Callable[[int], Any], most: int) -> int:
    """The fewest rows for which ``made`` raises no ValueError; ``most`` if there are no fewer."""
    return bisect_left(range(most), True, lo=1, key=lambda rows: measured(made, rows) != math.inf)


def most_rows(measure: Callable[[int], int], least: int, limit: int) -> int:
    """The most rows that take at most ``limit`` bytes.

    Args:
        measure: bytes of full caches of this many rows; raises ValueError if the settings do not
            allow them.
        least: the fewest rows that they allow.
        limit: bytes.

    Raises ValueError if the fewest rows take more, or the settings allow no number of rows.
    """
    below: float = measure(least)
    if below > limit:
        wanted = f"at least {below:,}: {least} rows a head"
        raise SettingError("max_kv_bytes", limit, wanted, operation="fit_bytes")
    low, high, each, turns = least, math.inf, below / least, 0
    while low + 1 < high:
        # Bytes are nearly linear in rows; where they are not, halving still comes to an end.
        turns += 1
        evenly, halfway = low + (limit - below) / each, min(2 * low, (low + high) / 2)
        rows = max(low + 1, int(min(evenly if turns <= _EVENLY else halfway, high - 1)))
        held = measured(measure, rows)
        each = (held - below) / (rows - low) or each
        low, below, high = (rows, held, high) if held <= limit else (low, below, rows)
    return low


def measured(measure: Callable[[int], int], rows: int) -> float:
    """Bytes of this many rows; infinite if the model or the other settings do not allow them."""
    try:
        return measure(rows)
    except ValueError:
        return math.inf
