"""Quality against bytes as inline SVG, with the line of what nothing smaller is better than."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from .strategies import known_names

__all__ = ["fronts"]

_PANELS = {
    "loss": ("loss above the full cache, nats", False),
    "recall": ("facts recalled", True),
}
"""By measure: what its axis says, and whether more is better."""
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#6a51a3", "#8c564b")
_WIDTH, _HEIGHT = 620, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 20, 16, 44


@dataclass(frozen=True)
class _Point:
    """low and high: the ends of the interval, or NaN."""

    name: str
    nbytes: int
    y: float
    low: float
    high: float
    control: bool
    said: str

    @property
    def family(self) -> str:
        """What is drawn in one colour."""
        head = self.name.split(":")[0]
        return "kv8, kv4" if head.startswith("kv") and head in known_names() else head


def fronts(result: Mapping[str, Any]) -> str:
    """One drawing per measure, and the legend; empty where nothing of it was measured."""
    drawn = []
    families: dict[str, str] = {}
    for measure, (axis, most) in _PANELS.items():
        points = _points(result, measure)
        for point in points:
            families.setdefault(point.family, _COLOURS[len(families) % len(_COLOURS)])
        if points:
            drawn.append(_panel(points, axis, most, families))
    legend = "".join(
        f'<span><i style="background:{colour}"></i>{escape(name)}</span>'
        for name, colour in families.items()
    )
    legend += '<span><i class="hollow"></i>a control</span><span><b></b>nothing smaller is better'
    return f'<div class="fronts">{"".join(drawn)}</div><p class="legend">{legend}</span></p>'


def _points(result: Mapping[str, Any], measure: str) -> list[_Point]:
    arms = {arm["name"]: arm for arm in result["strategies"]}
    found = []
    for line in result["summary"]:
        if line["measure"] != measure:
            continue
        arm = arms[line["strategy"]]
        y, low, high = line["value"], math.nan, math.nan
        said = f"{y:.0%} recalled"
        if measure == "loss":
            to = line["to"].get("full")
            if to is None and arm["name"] != "full":
                continue
            y = 0.0 if to is None else to["mean"]
            said = f"{y:+.4f} nats"
            if to is not None and to["low"] is not None:
                low, high = to["low"], to["high"]
                said += f" [{low:+.4f}, {high:+.4f}]"
        control = bool(arm["control"])
        found.append(_Point(arm["name"], arm["bytes"], y, low, high, control, said))
    return found


def _panel(points: Sequence[_Point], axis: str, most: bool, families: Mapping[str, str]) -> str:
    low, high = (math.log10(f(point.nbytes for point in points)) for f in (min, max))
    margin = 0.06 * max(high - low, 0.3)
    low, high = low - margin, high + margin
    ends = [end for p in points for end in (p.y, p.low, p.high) if not math.isnan(end)]
    bottom, top = (0.0, 1.0) if most else (min(0.0, *ends), max(ends))
    pad = 0.05 * max(top - bottom, 1e-6)
    bottom, top = bottom - pad, top + pad

    def x_of(nbytes: float) -> float:
        return _LEFT + (math.log10(nbytes) - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    def y_of(value: float) -> float:
        return _TOP + (top - value) / (top - bottom) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{axis} by bytes">']
    floor = _HEIGHT - _BOTTOM
    for tick in _ticks(bottom, top):
        y, said = y_of(tick), f"{tick:.0%}" if most else f"{tick:g}"
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{said}</text>')
    for nbytes in _sizes(10**low, 10**high):
        x = x_of(nbytes)
        parts.append(f'<path class="grid" d="M{x:.1f} {_TOP}V{floor}"/>')
        parts.append(f'<text x="{x:.1f}" y="{floor + 16}" text-anchor="middle">{_size(nbytes)}')
        parts.append("</text>")
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">bytes held</text>')
    parts.append(f'<text class="axis" transform="translate(13 {floor})rotate(-90)">{axis}</text>')
    front = _front(points, most)
    line = "".join(
        f"{'H' if n else 'M'}{x_of(p.nbytes):.1f}{'V' if n else ' '}{y_of(p.y):.1f}"
        for n, p in enumerate(front)
    )
    parts.append(f'<path class="front" d="{line}"/>')
    parts += _labels(front, x_of, y_of)
    for point in points:
        parts.append(_mark(point, x_of(point.nbytes), y_of, families[point.family]))
    return "".join([*parts, "</svg>"])


def _mark(point: _Point, x: float, y_of: Any, colour: str) -> str:
    """A point with its interval, which says under the pointer what it is."""
    y, fill = y_of(point.y), "#fff" if point.control else colour
    said = escape(f"{point.name}: {point.nbytes:,} bytes, {point.said}")
    found = f'<g stroke="{colour}" stroke-width="1.5"><title>{said}</title>'
    if not math.isnan(point.low):
        found += f'<path d="M{x:.1f} {y_of(point.low):.1f}V{y_of(point.high):.1f}"/>'
    return f'{found}<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{fill}"/></g>'


def _labels(front: Sequence[_Point], x_of: Any, y_of: Any) -> list[str]:
    """Names of the points, above or below them, where there is no other name."""
    found, taken = [], list[tuple[float, float, float]]()
    for point in front:
        name, x = point.name, x_of(point.nbytes)
        width = 6.2 * len(name)
        left = min(max(x - width / 2, _LEFT + 2), _WIDTH - width - 2)
        for y in (y_of(point.y) + offset for offset in (-9, 18, -22, 31, -35, 44)):
            inside = 10 < y < _HEIGHT - _BOTTOM
            over = (abs(y - other) < 13 and left < end and start < left + width
                    for start, end, other in taken)  # fmt: skip
            if inside and not any(over):
                taken.append((left, left + width, y))
                text = f'<text class="name" x="{left:.1f}" y="{y:.1f}">{escape(name)}</text>'
                found.append(text)
                break
    return found


def _front(points: Sequence[_Point], most: bool) -> list[_Point]:
    """Those that nothing of as few bytes or fewer is better than, by bytes."""
    sign = -1 if most else 1
    found: list[_Point] = []
    for point in sorted(points, key=lambda one: (one.nbytes, sign * one.y)):
        if not found or sign * point.y < sign * found[-1].y:
            found.append(point)
    return found


def _ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * n for n in (1, 2, 2.5, 5, 10) if power * n >= rough)
    return [round(n * step, 10) for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _sizes(low: float, high: float) -> list[float]:
    """Round numbers of bytes, four to eight of them where the range is not tiny."""
    steps: tuple[float, ...] = (1, 2, 5) if high / low > 3 else (1, 1.5, 2, 3, 4, 5, 6, 8)
    if high / low > 1e4:
        steps = (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [s * 10**p for p in powers for s in steps if low <= s * 10**p <= high]


def _size(nbytes: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:g} {unit}"
    return f"{nbytes:g} B"
