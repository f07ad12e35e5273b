#!/usr/bin/env python3
"""Write the measured tables of the README and the documents from the committed results, or check.

python tools/tables.py            # writes every page
python tools/tables.py --check    # fails if a page shows anything but its result

A table stands between "<!-- table: NAME -->" and "<!-- end of table -->", for a NAME of TABLES.
"""

import importlib
import json
import math
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

Rows = list[list[str]]


def demo(result: dict[str, Any]) -> str:
    """Caches on one text, as ``python -m mlx_h2o.demo`` wrote them; and their settings."""
    arms, settings = result["arms"], result["settings"]
    whole = arms[0]["kv_bytes"]
    rows = [
        ["KV cache, KB", *(f"{arm['kv_bytes'] / 1e3:.0f}" for arm in arms)],
        ["of the full cache's", *(f"1/{whole / arm['kv_bytes']:.0f}" for arm in arms)],
        ["perplexity", *(f"{arm['perplexity']:.2f}" for arm in arms)],
        ["same top token", *(f"{arm['top1_agreement']:.1%}" for arm in arms)],
    ]
    if result["recall_counts"]:
        recalled = (f"{sum(a['facts_recalled'])} of {len(a['facts_recalled'])}" for a in arms)
        rows.append(["facts recalled", *recalled])
    rows += [
        ["tokens/s", *(f"{median(arm['tokens_per_second']):.0f}" for arm in arms)],
        ["peak reading, MB", *(f"{arm['peak_prefill_bytes'] / 1e6:.1f}" for arm in arms)],
        ["peak writing, MB", *(f"{arm['peak_decode_bytes'] / 1e6:.1f}" for arm in arms)],
    ]
    table = _markdown(["", *(arm["name"] for arm in arms)], rows)
    return (
        f"{table}\n\n{settings['tokens']} tokens; speeds are medians, the caches taking turns. The "
        "KV cache counts rows of 16\nbits; peaks are as computed, in 32, with the model."
    )


def policies(result: dict[str, Any]) -> str:
    """Every policy at three budgets."""
    return str(_benchmark("policy_statistics").table(result))


def sparse_v(result: dict[str, Any]) -> str:
    """What each threshold drops, and what 1e-6 skips."""
    benchmark = _benchmark("sparse_v")
    return f"{benchmark.summary(result)}\n\n{benchmark.table(result, threshold=1e-6)}"


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
    return _markdown(head, rows)


def process_bytes(result: dict[str, Any]) -> str:
    """Megabytes that a process needs."""
    head = ["cache", "stored"]
    peaks = [(when, which) for when in ("reading", "writing") for which in ("mlx", "process")]
    head += [f"{when}, {'MLX' if which == 'mlx' else which}" for when, which in peaks]
    rows = []
    for name, one in result["processes"]["arms"].items():
        numbers = [one["bytes"], *(one[when][f"{which}_peak"] for when, which in peaks)]
        rows.append([name, *(f"{number / 1e6:.1f}" for number in numbers)])
    return _markdown(head, rows)


def precision(result: dict[str, Any]) -> str:
    """Perplexity of fewer bits, beside an evicting cache of dense rows."""
    found, rows = result["budgets"], []
    for name in next(iter(found.values())):
        rows.append([name])
        for of in (one[name] for one in found.values()):
            low, high = of["percent_to_dense_from"], of["percent_to_dense_to"]
            rows[-1] += [f"{of['perplexity']:.2f}", f"{of['percent_to_dense']:+.2f}"]
            rows[-1].append(f"{low:+.2f} to {high:+.2f}")
    head = ["cache"]
    for budget in found:
        head += [f"{budget} rows: perplexity", "to dense, %", "between"]
    return _markdown(head, rows)


def decode_step(result: dict[str, Any]) -> str:
    """Speed of decoding as a multiple of RotatingKVCache's."""
    runs = result["runs"]
    rows = []
    for name in runs[0]["arms"]:
        if name == "rotating":
            continue
        rows.append([name])
        for arm in (run["arms"].get(name) for run in runs):
            ratio = arm["ratio_to_rotating"] if arm else None
            rows[-1].append(_spread(ratio) if ratio else "-")
    models = [
        f"{run['model']}, {run['parameters'] / 1e6:.1f}M parameters, {run['repeats']} turns"
        for run in runs
    ]
    return _markdown(["cache or policy", *models], rows)


def prefix_sharing(result: dict[str, Any]) -> str:
    """Bytes, memory and time of a batch, with one copy of what its prompts begin with and with as
    many as there are sequences."""
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
    table = _markdown([*head, "step, ms", "answers as alone"], rows)
    names = ("seconds_to_first_tokens", "milliseconds_per_step")
    first, step = (_spread(result[f"ratio_of_{name}"]) for name in names)
    said = (
        f"{result['sequences']} sequences, a prefix of {result['prefix_tokens']:,} tokens, "
        f"{result['max_kv_size']:,} rows each, "
        f"{result['model']['parameters'] / 1e6:.1f}M parameters, "
        f"medians of {result['repeats']} processes. Unshared is {first} times shared's time to the "
        f"first tokens, and {step} times its step (min / median / max of the rounds)."
    )
    return f"{table}\n\n{textwrap.fill(said, width=100, break_on_hyphens=False)}"


def host_time(result: dict[str, Any]) -> str:
    """Python time of a step as a multiple of RotatingKVCache's, at first and now."""
    before, after = result["before"]["backends"], result["after"]["backends"]
    rows = []
    for name in after["native"]:
        if name == "rotating":
            continue
        rows.append([name])
        for backend, arms in after.items():
            pair = [arms_of.get(name) for arms_of in (before.get(backend, {}), arms)]
            medians = [f"{one['times_rotating']['median']:.1f}" if one else "-" for one in pair]
            rows[-1] += [" / ".join(medians), f"{arms[name]['calls']:.0f}"]
    head = ["cache"]
    for backend in after:
        head += [f"{backend}: before / now", "calls"]
    return _markdown(head, rows)


def quality(result: dict[str, Any]) -> str:
    """Strategies by their bytes: what is lost, and recall, with intervals of the difference to the
    full cache; as `mlx_h2o evaluate --output` wrote them."""
    of = {(one["strategy"], one["measure"]): one for one in result["summary"]}
    arms = result["strategies"]
    whole = next(arm["bytes"] for arm in arms if arm["name"] == "full")
    windows = [arm for arm in arms if arm["name"].startswith("rotating")]
    ways = {"recall": "recalled"}
    for name, values in (("reading", ("token", "chunk")), ("wording", WORDINGS)):
        values = [value for value in values if value in result["settings"][f"{name}s"]]
        if len(values) > 1:
            ways |= {f"recall by {name} {value}": WAYS[value] for value in values}
    rows = []
    for arm in sorted(arms, key=lambda one: -one["bytes"]):
        name = arm["name"]
        lost = of[name, "loss"]["to"].get("full", {"mean": 0.0})
        between = f" ({lost['low']:+.3f} to {lost['high']:+.3f})" if "low" in lost else ""
        of_them = [one for one in windows if 0.95 < one["bytes"] / arm["bytes"] < 1.15]
        share = "-"
        if of_them:
            window = of[of_them[0]["name"], "loss"]["to"]["full"]["mean"]
            share = f"{lost['mean'] / window:.2f}"
        recall = [of[name, way]["value"] for way in ways]
        rows.append(
            [
                _called(name),
                f"{arm['bytes']:,}",
                f"1/{whole / arm['bytes']:.0f}",
                f"{lost['mean']:+.3f}{between}",
                share,
                *(f"{value:.0%}" for value in recall),
            ]
        )
    head = ["cache", "bytes", "of the full cache's", "loss, nats", "of the window's"]
    return f"{_markdown([*head, *ways.values()], rows)}\n\n{_documents(result)}"


WORDINGS = ("secret", "is")
WAYS = {"token": "by token", "chunk": "by chunk", "secret": "digits", "is": "words"}
"""Of reading a text, and of facts."""


def _documents(result: dict[str, Any]) -> str:
    """What was read and asked."""
    settings = result["settings"]
    readings = {("chunk",): f", read in chunks of {settings['chunk']}", ("chunk", "token"): ""}
    texts = len({one["source"] for one in result["documents"]})
    (needles,) = settings["needles"]
    said = (
        f"{len(result['documents'])} documents of {settings['length']} tokens, of {texts} books; "
        f"{needles} facts in each, of which {len(settings['depths'])} are asked for, with "
        f"{settings['seeds']} seeds{readings[tuple(settings['readings'])]}. Intervals of 95 % are "
        "of the difference to the full cache, paired by document."
    )
    return textwrap.fill(said, width=100, break_on_hyphens=False)


def bars(*results: dict[str, Any]) -> str:
    """What was asked for, and what merged rows reach, on each model."""
    statistics = _benchmark("quality_statistics")
    reached = {(True, True): "both", (False, False): "neither"}
    reached |= {(True, False): "recall", (False, True): "loss"}
    rows = []
    for part, (least, most) in statistics.ASKED.items():
        for model, result in zip(MODELS, results, strict=True):
            name = statistics.at_bytes(result, part, _merged(part))
            recall, loss = statistics.asked(result, part, name)
            bars = [str(recall), f"{least:.0%}", str(loss), f"{most:.0%}"]
            rows.append(
                [f"1/{part}", model, *bars, reached[recall.value >= least, loss.value <= most]]
            )
    head = ["of the bytes", "merged rows", "recall, of the full cache's", "at least"]
    return _markdown([*head, "loss, of the window's", "at most", "reached"], rows)


def _called(strategy: str) -> str:
    """A strategy without its bytes, which have a column."""
    return ":".join(part for part in strategy.split(":") if not part.startswith("bytes="))


def _measured(result: dict[str, Any]) -> dict[tuple[str, str], float]:
    """What a run of evaluate found, by strategy and measure."""
    return {(one["strategy"], one["measure"]): one["value"] for one in result["summary"]}


def long_text(result: dict[str, Any]) -> str:
    """The loss of each part of a long text, and what the caches hold at its end.

    "To the window" is of all parts but the first, with twice the standard error of their
    differences.
    """
    rows = []
    windows = {
        one["model"]: one for one in result["runs"] if one["strategy"].startswith("rotating")
    }
    for run in result["runs"]:
        points = run["points"]
        pairs = zip(points[1:], windows[run["model"]]["points"][1:], strict=True)
        apart = [one["loss"] - other["loss"] for one, other in pairs]
        error = 2 * stdev(apart) / len(apart) ** 0.5
        behind = f"{mean(apart):+.3f} ± {error:.3f}" if any(apart) else "-"
        losses = [f"{points[at]['loss']:.2f}" for at in (0, 1, 3, 6, -1)]
        nbytes = {point["bytes"] for point in points}
        last = points[-1]
        held = f"{min(nbytes):,}" if len(nbytes) == 1 else f"{min(nbytes):,} to {max(nbytes):,}"
        longest = "-" if not last["longest_key"] else f"{last['longest_key']:.0f}"
        bias = "-" if not last["greatest_bias"] else f"{last['greatest_bias']:.1f}"
        name = f"{run['model']}: {_called(run['strategy'])}"
        rows.append([name, *losses, behind, held, longest, bias])
    ends = [f"to {result['runs'][0]['points'][at]['tokens']:,}" for at in (0, 1, 3, 6, -1)]
    return _markdown(
        ["cache", *ends, "to the window", "bytes", "longest key", "greatest bias"], rows
    )


BITS = {3: 5, 10: 4, 40: 4}
"""Of merged rows, where a cache holds one part in so many of the full one's bytes."""

MODELS = ("demo model", "Llama")


def preallocation(result: dict[str, Any]) -> str:
    """Megabytes in memory by tokens, and the slowest appends."""
    arms = result["arms"]
    points = list(arms["grows"]["resident"])
    head = ["room", *(f"{int(point):,} tokens" for point in points), "peak", "slowest appends"]
    rows = [
        [
            name,
            *(f"{one['resident'][point] / 1e6:.1f}" for point in points),
            f"{one['peak'] / 1e6:.1f}",
            "{:.2f} ({:.2f} to {:.2f})".format(*(one["slowest_of_grows"][i] for i in (1, 0, 2))),
        ]
        for name, one in arms.items()
    ]
    return _markdown(head, rows)


def row_bias(result: dict[str, Any]) -> str:
    """Time of attention with a bias of rows as a multiple of that without."""
    runs = [run for run in result["runs"] if "bias" in run["case"]]
    said = "bias on / off, "
    head = ["rows", *(name.removeprefix(said) + " threads" for name in runs[0]["ratios"])]
    rows = [[f"{run['rows']:,}", *map(_spread, run["ratios"].values())] for run in runs]
    return _markdown([one.replace(", 1 threads", ", 1 thread") for one in head], rows)


def codes(result: dict[str, Any]) -> str:
    """Bytes, error of attention on the demo model, and time, of codes and of affine rows."""
    (title, errors), *_ = result["errors"].items()
    times = result["times"]
    head = [f"rows, {title}", "bytes", "error", *(f"time, threads: {count}" for count in times)]
    table = []
    for name, one in sorted(errors.items(), key=lambda item: -item[1]["bytes"]):
        ratios = [arms[name]["ratio_to_float16"] for arms in times.values()]
        spreads = [_spread(ratio) for ratio in ratios]
        table.append([name, f"{one['bytes']:.0f}", f"{one['error']:.4f}", *spreads])
    return _markdown(head, table)


def sparse_v_quality(*results: dict[str, Any]) -> str:
    """By model, format and threshold: what is lost, what is recalled, and what is skipped."""
    runs = [run for result in results for run in result["runs"]]
    contexts = list(next(iter(runs[0]["skipped_by_layer"].values())))
    rows = []
    for run in runs:
        for form, thresholds in run["formats"].items():
            for tau, one in thresholds.items():
                more = one["loss_to_0"]
                lost = "-" if tau == "0" else "{:+.1e} ({:+.1e} to {:+.1e})".format(
                    *(more[name] for name in ("mean", "low", "high"))
                )  # fmt: skip
                skips = [run["skipped_by_layer"][form][context].get(tau) for context in contexts]
                shares = [
                    "-" if skip is None else _shares([min(skip), median(skip), max(skip)])
                    for skip in skips
                ]
                perplexity = f"{math.exp(one['loss']):.2f}"
                figures = [perplexity, lost, f"{one['kld']:.5f}", f"{one['recall']:.0%}"]
                rows.append([f"{run['model']}, {form}", tau, *figures, *shares])
    head = ["rows", "threshold", "perplexity", "loss to 0, nats", "divergence", "recalled"]
    return _markdown([*head, *(f"skipped at {int(one):,}" for one in contexts)], rows)


def sparse_v_speed(result: dict[str, Any]) -> str:
    """Tokens per second with sparse V as a multiple of those without."""
    rows = []
    for run in result["runs"]:
        deviation = f", deviation {run['deviation']}" if "deviation" in run else ""
        rates = run["tokens_per_second"]
        skipped = run["skipped_by_layer"]
        rows.append(
            [
                f"{run['model']}{deviation}",
                f"{run['rows']:,}",
                run["format"],
                _shares([min(skipped), median(skipped), max(skipped)]),
                f"{rates['off']:.1f}",
                f"{rates['on']:.1f}",
                _spread(run["speed_with_to_without"]),
            ]
        )
    head = ["model", "rows", "format", "pairs skipped", "tokens/s, off", "on", "on to off"]
    return _markdown(head, rows)


def _shares(of: list[float]) -> str:
    return " / ".join(f"{one:.1%}" for one in of)


def _change(of: dict[str, float]) -> str:
    return "{mean:+.4f} ({low:+.4f} to {high:+.4f})".format(**of)


def formats(result: dict[str, Any]) -> str:
    """Formats by their bytes, as `mlx_h2o evaluate --output` wrote them."""
    values = {(one["strategy"], one["measure"]): one for one in result["summary"]}
    whole = next(arm["bytes"] for arm in result["strategies"] if arm["name"] == "full")
    rows = []
    for arm in sorted(result["strategies"], key=lambda one: -one["bytes"]):
        name = arm["name"]
        loss = values[name, "loss"]["to"].get("full")
        said = "-" if loss is None else _change(loss)
        rows.append(
            [
                _called(name),
                f"{arm['bytes']:,}",
                f"{whole / arm['bytes']:.1f}",
                said,
                f"{values[name, 'kld']['value']:.4f}",
                f"{values[name, 'recall']['value']:.0%}",
            ]
        )
    head = ["cache", "bytes", "smaller by", "loss to full, nats", "divergence", "recalled"]
    return _markdown(head, rows)


def scales_of_keys(result: dict[str, Any]) -> str:
    """What scales of key dimensions change of the divergence that codes cause."""
    rows = []
    for run in result["runs"]:
        for bits, arms in run["to_none"].items():
            plain = run["divergence"][bits]["none"]
            found = (_change(arm) for arm in arms.values())
            rows.append([run["model"], bits, f"{sum(plain) / len(plain):.4f}", *found])
    head = ["model", "bits", "without scales", *result["runs"][0]["to_none"]["4"]]
    return _markdown(head, rows)


def restart(result: dict[str, Any]) -> str:
    """What a prompt on disk saves behind a restart."""
    rows = []
    for name in ("with", "without"):
        spread = _spread(result[name]["seconds"])
        rows.append([f"{name} `--cache-dir`", str(result[name]["cached_tokens"]), spread])
    table = _markdown(["server", "cached tokens", "first piece of text, s"], rows)
    same = "the same" if result["same_text"] else "other"
    said = f"A prompt of {result['prompt_tokens']:,} tokens and a budget of {result['max_kv_size']}"
    return f"{table}\n\n{said} rows; both answer with {same} text."


def front(*results: dict[str, Any]) -> str:
    """What the same bytes buy, on each model: loss above the full cache's, and recall."""
    statistics = _benchmark("quality_statistics")
    rows = [["all", "full"], ["", "mlx_lm's, 4 bits"]]
    for part in BITS:
        rows.append([f"1/{part}", "window of mlx_lm"])
        rows.append(["", f"merged rows, {BITS[part]} bits"])
    for result in results:
        values = _measured(result)
        names = ["full", "kv4"]
        for part in BITS:
            names.append(statistics.at_bytes(result, part, "rotating"))
            names.append(statistics.at_bytes(result, part, _merged(part)))
        for row, name in zip(rows, names, strict=True):
            lost = values[name, "loss"] - values["full", "loss"]
            row += [f"{lost:+.3f}", f"{values[name, 'recall']:.0%}"]
    head = ["of the bytes", "cache"]
    for model in MODELS:
        head += [f"{model}: loss, nats", "recalled"]
    return _markdown(head, rows)


def _merged(part: int) -> str:
    return rf"merge:\d+:kv{BITS[part]}:"


# The name of a table, the result that it shows, and who writes it.
TABLES: dict[str, tuple[str | tuple[str, ...], Callable[..., str]]] = {
    "bytes": (("quality_demo.json", "quality_llama.json"), front),
    "demo": ("demo.json", demo),
    "policies": ("policies.json", policies),
    "policies of a second model": ("policies_llama.json", policies),
    "sparse V": ("sparse_v.json", sparse_v),
    "bytes of a layer": ("cache_bytes.json", layer_bytes),
    "bytes of a process": ("cache_bytes.json", process_bytes),
    "precision": ("mixed_precision.json", precision),
    "quality by bytes": ("quality_demo.json", quality),
    "quality by bytes of a second model": ("quality_llama.json", quality),
    "what was asked for": (("quality_demo.json", "quality_llama.json"), bars),
    "long text": ("long_text.json", long_text),
    "room for rows": ("preallocation.json", preallocation),
    "row bias": ("native_attention.json", row_bias),
    "codes": ("turbo.json", codes),
    "restart": ("restart.json", restart),
    "sparse V in generation": (("sparse_v_demo.json", "sparse_v_llama.json"), sparse_v_quality),
    "speed of sparse V": ("sparse_v_speed.json", sparse_v_speed),
    "scales of keys": ("turbo_keys.json", scales_of_keys),
    "formats": ("formats_demo.json", formats),
    "formats on a second model": ("formats_llama.json", formats),
    "decode step": ("decode_step.json", decode_step),
    "shared prefix": ("prefix_sharing.json", prefix_sharing),
    "host time": ("host_time.json", host_time),
}

_MARKED = re.compile(r"(<!-- table: ([^\n]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def rewritten(page: Path, text: str) -> str:
    """The text of ``page`` with each table of TABLES, and below it machine and versions."""

    def table(found: re.Match[str]) -> str:
        if found[2] not in TABLES:
            return found[0]  # nox -s models writes its own
        named, write = TABLES[found[2]]
        files = (named,) if isinstance(named, str) else named
        results = [json.loads((RESULTS / file).read_text(encoding="utf-8")) for file in files]
        up = "../" * (len(page.relative_to(ROOT).parts) - 1)
        environment = results[0].get("after", results[0])["environment"]
        links = ", ".join(f"[result]({up}benchmarks/results/{file})" for file in files)
        said = f"{_environment(environment)} ({links})."
        lines = textwrap.wrap(said, width=100, break_on_hyphens=False, break_long_words=False)
        return "\n".join([f"{found[1]}{write(*results)}", "", *lines, found[3]])

    return _MARKED.sub(table, text)


def shown(text: str) -> list[str]:
    """Names of the tables that ``text`` shows."""
    return [found[2] for found in _MARKED.finditer(text)]


def _environment(machine: dict[str, str]) -> str:
    said = (
        f"{machine['machine']}, {machine['cores']} cores, {machine['system']}, "
        f"Python {machine['python']}, MLX {machine['mlx']}, mlx-lm {machine['mlx_lm']}, "
        f"back end {machine['backend']}"
    )
    return f"{said}, {machine['blas']}" if "blas" in machine else said


def _benchmark(name: str) -> Any:
    folder = str(ROOT / "benchmarks")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)


def _spread(of: dict[str, float]) -> str:
    return " / ".join(f"{of[name]:.2f}" for name in ("min", "median", "max"))


def _markdown(head: list[str], rows: Rows) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join(
        [lines[0].replace("|  |", "| |"), f"|---|{'---:|' * (len(head) - 1)}", *lines[1:]]
    )


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
