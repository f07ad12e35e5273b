"""Presets: every one is a set of strategies that a model can run, scaled to its context."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import qwen3

import mlx_h2o
from mlx_h2o import cli, demo, fast
from mlx_h2o.evaluation import output, tables, tasks
from mlx_h2o.evaluation.arms import Footprint, resolve
from mlx_h2o.evaluation.presets import PRESETS
from mlx_h2o.evaluation.run import evaluate
from mlx_h2o.evaluation.strategies import parse
from mlx_h2o.evaluation.summary import summaries
from tiny_models import random_prompt, tiny_qwen3, tiny_tokenizer


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("tokens", [64, 700, 40_000])
def test_strategies_are_those_of_the_table_or_in_proportion(name, tokens):
    preset, footprint = PRESETS[name], Footprint(tiny_qwen3(head_dim=64))
    settings = preset.settings(tokens)
    tasks.Settings(**settings)
    lengths = settings.get("lengths", (settings["length"],))
    assert max(lengths) <= max(tokens, 40) and list(lengths) == sorted(lengths, reverse=True)
    if tokens >= preset.lengths[0]:
        assert lengths == preset.lengths
    arms = [resolve(footprint, parse(text), lengths[0]) for text in preset.texts(tokens)]
    assert arms[0].name == "full" and len(arms) > 2
    if tokens >= preset.lengths[0]:  # the sizes of the table, as they stand in the braces
        assert len(arms) == len(preset.strategies)
        sizes = {arm.rows for arm in arms if arm.rows is not None}
        assert sizes <= {128, 256, 512, 1024, 2048}


def test_the_paper_splits():
    found = [parse(text).config(256) for text in PRESETS["table4"].texts(512)[2:]]
    splits = [(one.sink_size, one.heavy_size, one.recent_size, one.policy) for one in found]
    assert splits == [(4, 32, 220, "h2o"), (4, 64, 188, "h2o"), (4, 128, 124, "h2o")]


@pytest.mark.slow
def test_lengths_are_measured_each():
    text = " ".join(f"t{token}" for token in random_prompt(100))
    preset = PRESETS["table8"]
    settings = tasks.Settings(**preset.settings(96), prompt=8, seeds=1)
    assert settings.lengths == (96, 48, 40)
    found = evaluate(
        tiny_qwen3(), tiny_tokenizer(), [("one", text)], [parse(t) for t in preset.texts(96)],
        settings=settings, controls=False,
    )  # fmt: skip
    measured = summaries(found)
    lines = {(one.arm.name, one.measure): one for one in measured}
    by_length = [
        lines["h2o:8:layers=equal", f"loss by length {length}"] for length in settings.lengths
    ]
    assert len({one.value for one in by_length}) == 3
    mean = sum(one.value for one in by_length) / 3
    assert lines["h2o:8:layers=equal", "loss"].value == pytest.approx(mean)
    result = output.as_json(found, measured, "command")
    ((said, rows),) = tables.divisions(result).items()
    assert "by length" in said and rows[0] == ["cache", "96", "48", "40"]
    more = math.exp(by_length[0].differences["full"].mean) - 1
    assert rows[-1][1] == f"{math.exp(by_length[0].value):.2f} ({more:+.1%})"


def test_the_pairs_that_are_skipped():
    """Of every layer, by the definition: a weight below the threshold at the end of a text."""
    model, tokenizer, threshold = tiny_qwen3(head_dim=32), tiny_tokenizer(), 1e-3
    prompt = random_prompt(120)
    found = evaluate(
        model, tokenizer, [("one", " ".join(f"t{token}" for token in prompt))],
        [parse("full"), parse(f"keydiff:none:kv8:group=32:sparse_v={threshold}")],
        tasks=PRESETS["sparse-v-skips"].tasks, controls=False,
        settings=tasks.Settings(documents=1, lengths=(100, 60), prompt=8, chunk=32),
    )  # fmt: skip
    (measured,) = (
        one["figures"]
        for one in found.records
        if one["case"]["length"] == 100 and one["strategy"] != "full"
    )
    start = found.setting["documents"][0]["start"]
    caches = mlx_h2o.make_prompt_cache(model, 128, kv_bits=8, kv_group_size=32)
    expected = shares_below(model, caches, prompt[start : start + 100], threshold)
    assert [values for (values,) in measured.values()] == pytest.approx(expected, abs=1e-3)
    assert 0.02 < min(expected) < max(expected) < 0.98
    result = output.as_json(found, summaries(found), "command")
    head, full, sparse = tables.table(result)
    assert head[3:] == [f"skipped at {n} tokens: min / median / max" for n in (100, 60)]
    assert full[3:] == ["- / - / -"] * 2
    low, middle, high = (float(one.rstrip("%")) for one in sparse[3].split(" / "))
    assert (low, high) == pytest.approx((100 * min(expected), 100 * max(expected)), abs=0.1)
    assert middle == pytest.approx(50 * sum(expected), abs=0.1)


def test_pairs_are_skipped_of_codes_as_of_other_rows():
    """Over the same keys as many, whatever the values; of codes, at the end of the same text."""
    model, tokenizer = tiny_qwen3(head_dim=32), tiny_tokenizer()
    forms = ("kv8:group=32", "turbo8v3:group=32", "turbo0v3", "turbo4")
    found = evaluate(
        model, tokenizer, [("one", " ".join(f"t{token}" for token in random_prompt(120)))],
        [parse(f"keydiff:none:{form}:sparse_v=1e-3") for form in forms],
        tasks=("skips",), controls=False,
        settings=tasks.Settings(documents=1, length=100, prompt=8, chunk=32),
    )  # fmt: skip
    affine, *others = ([share for (share,) in one["figures"].values()] for one in found.records)
    assert others[0][0] == affine[0]
    for shares in others:
        assert shares == pytest.approx(affine, abs=0.1)


def shares_below(model, caches, tokens, threshold):
    """Of each layer, over the last 16 queries, which see what is stored."""
    weights = [[] for _ in caches]

    def noted(queries, keys, values, *, cache, scale, **_):
        out, scores, lse = fast.scaled_dot_product_attention_quantized_with_scores(
            queries, *keys, *values, scale=scale, bits=8, group_size=32, return_lse=True
        )
        weights[caches.index(cache)].append(np.exp(np.array(scores - lse[..., None])))
        return out

    mx.eval(model(mx.array(tokens[:-16])[None], cache=caches))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qwen3, "scaled_dot_product_attention", noted)
        for token in tokens[-16:]:
            mx.eval(model(mx.array([[token]]), cache=caches))
    return [np.mean([(one < threshold).mean() for one in of]) for of in weights]


@pytest.fixture
def flags(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(demo.text()[:2000], encoding="utf-8")
    return ["evaluate", "--model", "demo", "--text", str(file), "--documents", "1"]


@pytest.mark.exhaustive
def test_a_preset_and_more(flags, capsys):
    more = ("--length", "44", "--prompt", "30", "--strategies", "merge:16")
    assert cli.main([*flags, "--preset", "table3", *more]) == 0
    shown = capsys.readouterr().out
    names = [line.split("|")[1].strip() for line in shown.splitlines() if line.startswith("| ")]
    splits = ["h2o:22:heavy=5:layers=equal", "h2o:22:heavy=11:layers=equal"]
    assert names[2:] == ["full", "rotating:22", *splits, "merge:16"]


@pytest.mark.slow
def test_rows_by_layer(flags, capsys):
    more = ("--length", "44", "--prompt", "30")
    assert cli.main([*flags, "--preset", "table14", *more]) == 0
    shown = capsys.readouterr().out
    equal, by_layer = (
        next(line for line in shown.splitlines() if line.startswith(f"| {name} |"))
        for name in ("h2o:22:layers=equal", "h2o:22")
    )
    assert equal.split("|")[2:] != by_layer.split("|")[2:] and "FAILED" not in shown


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--preset table5", "invalid choice: 'table5'"),
        ("--preset table3 --layers equal", "--preset with --layers"),
        ("--preset table3 --kv-bits 4", "--preset with --kv-bits"),
    ],
)
def test_mistakes_with_presets(flags, given, message, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([*flags, *given.split()])
    line = capsys.readouterr().err
    assert end.value.code == 2 and message in line and line.count("\n") == 1
