"""The measurements as Markdown, for the documents."""

from typing import Any

from ..evaluation.report import markdown, spread_text


def hardware_table(result: dict[str, Any]) -> str:
    """Parity, speed, sparse V and growing caches."""
    parity, speed, sparse = (result[name] for name in ("parity", "speed", "sparse_v"))
    count = sum(one["cases"] for one in parity["operations"].values())
    return "\n\n".join([
        f"{count} cases on back end {parity['backend']}, {len(parity['failed'])} failed. Errors "
        "are parts of what is allowed.",
        markdown(
            ["operation", "cases", "worst error"],
            [(f"`{name}`", one["cases"], f"{one['worst']:.2f}")
             for name, one in parity["operations"].items()],
        ),
        f"{result['model']}, {speed['weights'] / 1e6:,.0f} MB of weights"
        f"{', random' if result['random'] else ''}. Ours keep a quarter of the rows. Speeds are "
        "tokens a second, and multiples of mlx_lm's: min / median / max.",
        markdown(
            ["tokens", "cache", "prefill", "times mlx_lm's", "decode", "times mlx_lm's", "MB",
             "peak MB"],
            [(f"{int(length):,}", name, f"{one['prefill']:,.1f}",
              spread_text(one["prefill_to_mlx_lm"]), f"{one['decode']:,.1f}",
              spread_text(one["decode_to_mlx_lm"]), _mb(one["cache"]), _mb(one["peak"]))
             for length, arms in speed["lengths"].items() for name, one in arms.items()],
        ),
        f"Sparse V at {sparse['threshold']:.0e}, {sparse['rows']:,} rows of 8 bits: "
        f"{sparse['skipped']:.1%} of the values left out, {spread_text(sparse['speed'])} times as "
        "fast.",
        markdown(
            ["room for rows", "MB at an eighth", "at half", "at all rows", "peak",
             "times mlx_lm's time"],
            [(name, *map(_mb, one["bytes"].values()), _mb(one["peak"]),
              spread_text(one["time_to_mlx_lm"])) for name, one in result["growth"].items()],
        ),
    ])  # fmt: skip


def _mb(count: int) -> str:
    return f"{count / 1e6:,.1f}"
