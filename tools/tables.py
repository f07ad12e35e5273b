#!/usr/bin/env python3
"""Write the measured tables of the README and the documents from the committed results, or check.

python tools/tables.py            # writes every page
python tools/tables.py --check    # fails if a page shows anything but its result

A table is between "<!-- table: NAME -->" and "<!-- end of table -->", for a NAME of TABLES or
COMPUTED.
"""

import importlib
import json
import re
import sys
import textwrap
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

from mlx_h2o.commands import plan
from mlx_h2o.evaluation import report
from mlx_h2o.evaluation.environment import environment_line
from mlx_h2o.evaluation.report import markdown, spread_text
from mlx_h2o.hardware import tables as hardware

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

Rows = list[list[str]]


def sparse_v(result: dict[str, Any]) -> str:
    """What each threshold drops at worst, and what 1e-6 skips of each sample of 8 bits."""
    columns = {
        "threshold": "{threshold:.0e}", "pairs": "{pairs_below:.1%}",
        "rows": "{rows_skipped_exact:.1%}", "worst dropped mass": "{worst_dropped_mass:.1e}",
        "worst error": "{worst_error:.1e}", "mean error": "{mean_error:.1e}",
    }  # fmt: skip
    found: dict[float, list[tuple[float, float]]] = {}
    samples = []
    for source in result["sources"]:
        for one in source["thresholds"]:
            error = one["worst_error"] / source["worst_error_of_packing"]
            found.setdefault(one["threshold"], []).append((error, one["worst_dropped_mass"]))
            if (source["bits"], one["threshold"]) == (8, 1e-6):
                cells = (form.format(**one) for form in columns.values())
                samples.append([source["source"], *cells])
    worst = {threshold: map(max, zip(*each, strict=True)) for threshold, each in found.items()}
    rows = [[f"{tau:.0e}", f"{error:.2g}", f"{mass:.1e}"] for tau, (error, mass) in worst.items()]
    head = ["threshold", "worst error, in parts of what packing itself errs", "worst dropped mass"]
    return f"{markdown(head, rows)}\n\n{markdown(['sample', *columns], samples)}"


def layer_bytes(result: dict[str, Any]) -> str:
    """Bytes of one layer."""
    rows = [
        [
            name,
            f"{one['bytes']:,}",
            f"{one['compression']:.1f}",
            f"{one['compression_of_codes_alone']:.1f}",
            one["stated"].rstrip("x") or "-",
        ]
        for name, one in result["one_layer_2048_to_256"].items()
    ]
    head = ["cache", "bytes", "smaller by", "codes or numbers alone", "the paper says"]
    return markdown(head, rows)


def process_bytes(result: dict[str, Any]) -> str:
    """Megabytes that a process uses."""
    head = ["cache", "stored"]
    peaks = [(when, which) for when in ("reading", "writing") for which in ("mlx", "process")]
    head += [f"{when}, {'MLX' if which == 'mlx' else which}" for when, which in peaks]
    rows = []
    for name, one in result["processes"]["arms"].items():
        numbers = [one["bytes"], *(one[when][f"{which}_peak"] for when, which in peaks)]
        rows.append([name, *(f"{number / 1e6:.1f}" for number in numbers)])
    return markdown(head, rows)


def decode_step(result: dict[str, Any]) -> str:
    """Speed of decoding as a multiple of RotatingKVCache's, and time as one of keydiff's."""
    runs, head = result["runs"], ["cache or policy"]
    rows = [[name] for name in runs[0]["arms"] if name != "rotating"]
    for run in runs:
        model = f"{run['model']}, {run['parameters'] / 1e6:.1f}M parameters, {run['repeats']} turns"
        head += [model, "time, keydiff's = 1"]
        for row in rows:
            arm = run["arms"][row[0]]
            spreads = arm["ratio_to_rotating"], arm["time_of"].get("keydiff")
            row += [spread_text(one) if one else "-" for one in spreads]
    return markdown(head, rows)


def prefix_sharing(result: dict[str, Any]) -> str:
    """Bytes, memory and time of a batch, with one shared prefix or with a copy of it for each
    sequence."""
    rows = []
    for arm, found in result["arms"].items():
        middle = {name: of["median"] for name, of in found.items() if name != "answers_as_alone"}
        rows.append(
            [
                arm,
                *(f"{middle[name] / 1e6:.1f}" for name in ("cache_bytes", "pss")),
                f"{middle['pss_since_the_model'] / 1e6:.1f}",
                f"{middle['seconds_to_first_tokens']:.1f}",
                f"{middle['milliseconds_per_step']:.0f}",
                f"{found['answers_as_alone']} of {result['sequences']}",
            ]
        )
    head = ["prefix", "caches, MB", "Pss, MB", "since the model, MB", "first tokens, s"]
    table = markdown([*head, "step, ms", "answers as alone"], rows)
    names = ("seconds_to_first_tokens", "milliseconds_per_step")
    first, step = (spread_text(result[f"ratio_of_{name}"]) for name in names)
    said = (
        f"{result['sequences']} sequences, a prefix of {result['prefix_tokens']:,} tokens, "
        f"{result['max_kv_size']:,} rows each, "
        f"{result['model']['parameters'] / 1e6:.1f}M parameters, "
        f"medians of {result['repeats']} processes. Unshared is {first} times shared's time to the "
        f"first tokens, and {step} times its step (min / median / max of the rounds)."
    )
    return f"{table}\n\n{textwrap.fill(said, width=100, break_on_hyphens=False)}"


def host_time(result: dict[str, Any]) -> str:
    """Python time of a step as a multiple of mlx_lm's corresponding cache, at first and now."""

    def median(arm: dict[str, Any]) -> float:
        return float((arm.get("times_rotating") or arm["times_batch"])["median"])

    before, after = result["before"]["backends"], result["after"]["backends"]
    rows = []
    for name in after["native"]:
        if name in ("rotating", "ragged mlx_lm"):
            continue
        rows.append([name])
        for backend, arms in after.items():
            pair = [arms_of.get(name) for arms_of in (before.get(backend, {}), arms)]
            medians = [f"{median(one):.1f}" if one else "-" for one in pair]
            rows[-1] += [" / ".join(medians), f"{arms[name]['calls']:.0f}"]
    head = ["cache"]
    for backend in after:
        head += [f"{backend}: before / now", "calls"]
    return markdown(head, rows)


def row_bias(result: dict[str, Any]) -> str:
    """Time of attention with a row bias as a multiple of that without."""
    runs = [run for run in result["runs"] if "bias" in run["case"]]
    said = "bias on / off, "
    head = ["rows", *(name.removeprefix(said) + " threads" for name in runs[0]["ratios"])]
    rows = [[f"{run['rows']:,}", *map(spread_text, run["ratios"].values())] for run in runs]
    return markdown([one.replace(", 1 threads", ", 1 thread") for one in head], rows)


def codes(result: dict[str, Any]) -> str:
    """Bytes, error of attention on the demo model, and time, of codes and of affine rows."""
    (title, errors), *_ = result["errors"].items()
    times = result["times"]
    head = [f"rows, {title}", "bytes", "error", *(f"time, threads: {count}" for count in times)]
    table = []
    for name, one in sorted(errors.items(), key=lambda item: -item[1]["bytes"]):
        ratios = [arms[name]["ratio_to_float16"] for arms in times.values()]
        spreads = [spread_text(ratio) for ratio in ratios]
        table.append([name, f"{one['bytes']:.0f}", f"{one['error']:.4f}", *spreads])
    return markdown(head, table)


def throughput(result: dict[str, Any]) -> str:
    """Answers of our server as a multiple of those of mlx_lm's, and the memory of 64 clients."""
    rows = [
        [
            clients,
            arm,
            spread_text(one["tokens_per_second_to_mlx_lm"]),
            spread_text(one["first_token_to_mlx_lm"]),
            str(one["without_answer"]),
        ]
        for clients, arms in result["speeds"].items()
        for arm, one in arms.items()
    ]
    head = ["clients", "server", "tokens a second", "time to the first token", "not answered"]
    peaks = ", ".join(
        f"{one['peak'] / 1e6:,.0f} MB ({backend}; kept prompts {one['snapshots'] / 1e6:,.0f})"
        for backend, one in result["peaks"].items()
    )
    most = next(iter(result["peaks"].values()))["memory"] / 1e6
    rounds = ", ".join(map(str, result["rounds"]))
    said = f"{result['model']} model, {rounds} rounds. The most that MLX held for 64 clients with "
    said += f"--memory {most:,.0f} MB: {peaks}."
    return f"{markdown(head, rows)}\n\n{textwrap.fill(said, width=100, break_on_hyphens=False)}"


def reread(result: dict[str, Any]) -> str:
    """Tokens of an edited conversation that are read again, by mlx_lm's server and by ours."""
    rows = [
        [
            one["model"],
            one["edit"],
            *(f"{one[name]:,}" for name in ("new", "stock_read", "ours_read")),
            *(f"{one[name]:.2f} s" for name in ("stock_seconds", "ours_seconds")),
        ]
        for one in result["rows"]
    ]
    head = ["from there on", "mlx_lm", "ours", "first token, mlx_lm", "ours"]
    table = markdown(["model", "what changed", *head], rows)
    said = f"A conversation of {result['prompt_tokens']:,} tokens. To the first token: median of "
    loads = result.get("load_of_the_machine") or result["load_average_before_and_after"]
    said += f"{result['repeats']}, while the machine's load was {min(loads)} to {max(loads)}."
    return f"{table}\n\n{textwrap.fill(said, width=100, break_on_hyphens=False)}"


def real_models(result: dict[str, Any]) -> str:
    """All arms: losses, then recall and texts; and what a reader must know."""
    tables = [report.table(result, tasks=("loss", "chunks"))]
    tasks = ("facts", "turns", "ruler", "writing")
    if any(one["task"] in tasks for one in result["records"]):
        tables.append(report.table(result, tasks=tasks))
    tables.append("\n".join(f"- {note}" for note in report.notes(result)))
    return "\n\n".join(tables)


def what_bytes_buy(*results: dict[str, Any]) -> str:
    """A few arms of all models side by side: the loss, and facts in texts of 1,000 tokens."""
    found: dict[tuple[str, str], list[str]] = {}
    for result in results:
        records = [one for one in result["records"] if one["tokens"] <= 1000]
        _, lines = report.rows({**result, "records": records}, FRONT, ("loss", "facts"))
        for share, cache, loss, *_, facts in lines:
            if share != "1/2":
                found.setdefault((share, cache), []).extend((loss, facts))
    head = [f"{one['model']}: {what}" for one in results for what in ("loss", "facts")]
    rows = [[*key, *cells] for key, cells in found.items()]
    return markdown(["of the bytes", "cache", *head], rows)


def facts_of(*results: dict[str, Any]) -> str:
    """Facts recalled in all results together, as shares of what the full cache recalls."""
    arms: dict[str, dict[str, list[float]]] = {}
    for result in results:
        for one in result["records"]:
            if (one["task"], one["tokens"], one["arm"]) in (
                ("facts", 1000, "full"),
                ("facts", 1000, "ours"),
            ):
                arms.setdefault(one["share"] or "1", {}).setdefault(one["arm"], []).extend(
                    one["figures"]["tokens"]
                )
    full = arms.pop("1")["full"]
    rows = [
        [share, str(len(found["ours"])), f"{sum(found['ours']) / sum(full):.3f}"]
        for share, found in arms.items()
        if len(found["ours"]) == len(full)
    ]
    return markdown(["of the bytes", "questions", "of the full cache's"], sorted(rows, key=_share))


def _share(row: list[str]) -> float:
    return -float(Fraction(row[0]))


FRONT = ("full", "window", "kv8", "kv4", "keydiff", "ours")
"""Arms that the README shows."""

REAL = tuple(
    f"real_{name}.json" for name in ("smollm2-135m-instruct", "gemma3-270m", "smollm2-135m-biased")
)

SEEDS = ("h2o", "3", "4", "7", "8-512", "8-1024", "8-2048", "8-4096", "9", "sparse-v")
"""Tables of benchmarks/seed_tables.py."""


def seeds(*results: dict[str, Any]) -> str:
    """Perplexities of published tables, measured again, beside the published ones."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    rows_of = importlib.import_module("seed_tables").rows_of
    rows = [row for name, one in zip(SEEDS, results, strict=True) for row in rows_of(name, one)]
    return markdown(["source", "tokens", "cache", "perplexity", "change", "theirs"], rows)


# The name of a table, the result that it shows, and the function that writes it.
TABLES: dict[str, tuple[str | tuple[str, ...], Callable[..., str]]] = {
    "bytes": (REAL[:2], what_bytes_buy),
    "SmolLM2": (REAL[0], real_models),
    "Gemma 3": (REAL[1], real_models),
    "Gemma 3, eight at a time": (REAL[1].replace(".json", "-eights.json"), real_models),
    "Gemma 3, ten books": (REAL[1].replace(".json", "-more.json"), real_models),
    "biased keys": (REAL[2], real_models),
    "Qwen2.5-Coder": ("real_qwen2.5-coder-1.5b-instruct.json", real_models),
    "more facts": ((REAL[0], REAL[0].replace(".json", "-more.json")), facts_of),
    "published tables": (tuple(f"seed_{name}.json" for name in SEEDS), seeds),
    "sparse V": ("sparse_v.json", sparse_v),
    "bytes of a layer": ("cache_bytes.json", layer_bytes),
    "bytes of a process": ("cache_bytes.json", process_bytes),
    "row bias": ("native_attention.json", row_bias),
    "codes": ("turbo.json", codes),
    "throughput": ("throughput.json", throughput),
    "reread": ("reread.json", reread),
    "hardware": ("hardware.json", hardware.hardware_table),
    "hardware with a GPU": ("hardware_h100.json", hardware.hardware_table),
    "decode step": ("decode_step.json", decode_step),
    "shared prefix": ("prefix_sharing.json", prefix_sharing),
    "host time": ("host_time.json", host_time),
}

COMPUTED: dict[str, Callable[[], str]] = {"models": plan.model_table}
"""Tables that are not made from a result."""

_MARKED = re.compile(r"(<!-- table: ([^\n]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def rewritten(page: Path, text: str) -> str:
    """The text of ``page`` with its tables written, each followed by machine and versions."""

    def table(found: re.Match[str]) -> str:
        if found[2] in COMPUTED:
            return f"{found[1]}{COMPUTED[found[2]]()}\n{found[3]}"
        if found[2] not in TABLES:
            return found[0]  # nox -s models writes its own
        named, write = TABLES[found[2]]
        files = (named,) if isinstance(named, str) else named
        if not all((RESULTS / file).exists() for file in files):
            return found[0]
        results = [json.loads((RESULTS / file).read_text(encoding="utf-8")) for file in files]
        up = "../" * (len(page.relative_to(ROOT).parts) - 1)
        environment = results[0].get("after", results[0])["environment"]
        links = ", ".join(f"[result]({up}benchmarks/results/{file})" for file in files)
        said = f"{environment_line(environment)} ({links})."
        lines = textwrap.wrap(said, width=100, break_on_hyphens=False, break_long_words=False)
        return "\n".join([f"{found[1]}{write(*results)}", "", *lines, found[3]])

    return _MARKED.sub(table, text)


def shown(text: str) -> list[str]:
    """Names of the tables that ``text`` shows."""
    return [found[2] for found in _MARKED.finditer(text)]


def main() -> int:
    stale = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        wanted = rewritten(page, text)
        if wanted != text:
            stale.append(str(page.relative_to(ROOT)))
            if "--check" not in sys.argv[1:]:
                page.write_text(wanted, encoding="utf-8")
    if stale and "--check" in sys.argv[1:]:
        print(f"out of step with its result: {', '.join(stale)}; run tools/tables.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
