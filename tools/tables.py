#!/usr/bin/env python3
"""Write the README's measured table from the committed result of the demo, or check that it is.

nox -s demo -- --json benchmarks/results/demo.json
python tools/readme_table.py            # writes README.md
python tools/readme_table.py --check    # fails if README.md shows anything else
"""

import json
import sys
import textwrap
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULT = ROOT / "benchmarks" / "results" / "demo.json"
BEGIN = "<!-- demo table: tools/readme_table.py -->\n"
END = "<!-- end of demo table -->"


def markdown(result: dict[str, Any]) -> str:
    """The table and the line below it, as Markdown, from what `python -m mlx_h2o.demo` wrote."""
    arms = result["arms"]
    rows: list[tuple[str, list[str]]] = [
        ("tokens/s, generating", [f"{median(arm['tokens_per_second']):.0f}" for arm in arms]),
        ("KV cache, MB", [f"{arm['kv_bytes'] / 1e6:.2f}" for arm in arms]),
        ("peak memory reading, MB", [f"{arm['peak_prefill_bytes'] / 1e6:.1f}" for arm in arms]),
        ("peak memory writing, MB", [f"{arm['peak_decode_bytes'] / 1e6:.1f}" for arm in arms]),
        ("rows evicted per layer", [str(arm["evicted_rows_per_layer"]) for arm in arms]),
        ("perplexity after eviction", [f"{arm['perplexity']:.2f}" for arm in arms]),
        ("same top token as full", [f"{arm['top1_agreement']:.1%}" for arm in arms]),
    ]
    if result["recall_counts"]:
        recalled = [f"{sum(a['facts_recalled'])} of {len(a['facts_recalled'])}" for a in arms]
        rows.append(("planted facts recalled", recalled))
    settings, machine = result["settings"], result["environment"]
    lines = [
        "| | " + " | ".join(arm["name"] for arm in arms) + " |",
        "|---|" + "---:|" * len(arms),
        *(f"| {label} | " + " | ".join(cells) + " |" for label, cells in rows),
        "",
        *textwrap.wrap(
            f"{settings['tokens']} tokens, budget {settings['max_kv_size']} rows; "
            f"{machine['machine']}, {machine['cores']} cores, {machine['system']}, "
            f"Python {machine['python']}, MLX {machine['mlx']}, mlx-lm {machine['mlx_lm']}, "
            f"back end {machine['backend']}; speeds are medians, the caches taking turns "
            "([benchmarks/results/demo.json](benchmarks/results/demo.json)).",
            width=100,
            break_on_hyphens=False,
        ),
    ]
    return "\n".join(lines) + "\n"


def rewritten(readme: str, table: str) -> str:
    """`readme` with `table` between its two markers."""
    before, found, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not found or not end:
        raise SystemExit(f"README.md lacks {BEGIN.strip()} or {END}")
    return before + BEGIN + table + END + after


def main() -> int:
    readme = README.read_text(encoding="utf-8")
    wanted = rewritten(readme, markdown(json.loads(RESULT.read_text(encoding="utf-8"))))
    if "--check" not in sys.argv[1:]:
        README.write_text(wanted, encoding="utf-8")
        return 0
    if readme == wanted:
        return 0
    print("README.md is out of step with its result file: run tools/readme_table.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())
