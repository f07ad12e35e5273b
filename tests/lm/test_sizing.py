"""Budgets in bytes: they are never exceeded, and one more row would not fit."""

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mlx_h2o
from mlx_h2o import H2OConfig, cli
from mlx_h2o.commands.options import FEW_ROWS, CacheSettings
from mlx_h2o.lm.layers import probe
from mlx_h2o.lm.outline import Outline, total_bytes
from mlx_h2o.lm.probing import BITS
from mlx_h2o.lm.prompt_cache import fit_bytes
from mlx_h2o.lm.routing import context_length
from mlx_h2o.lm.sizing import FREE, UNMEASURED, fewest_bits, fewest_rows, most_rows, parsed_bytes
from mlx_h2o.policies import H2O
from models import tiny
from tiny_models import random_prompt, tiny_gemma3, tiny_qwen3, tiny_tokenizer


@pytest.fixture(scope="module")
def model() -> Any:
    found = tiny_qwen3(head_dim=64)
    found.args.max_position_embeddings = 200
    return found


def held(model: Any, config: H2OConfig, tokens: int) -> int:
    """The most bytes that the caches hold after a prompt and in this many steps."""
    caches = mlx_h2o.make_prompt_cache(model, config)
    rows, most = config.max_kv_size or 1, 0
    with mlx_h2o.routing(model):
        for length in (rows + 9, *[1] * tokens):
            mx.eval(model(mx.ones((1, length), mx.int32), cache=caches))
            most = max(most, sum(cache.nbytes for cache in caches))
    return most


@pytest.mark.slow
@pytest.mark.matrix(3)
@pytest.mark.parametrize("settings", [
    {"kv_bits": None}, {"policy": "h2o-ema", "kv_bits": None},
    {"policy": "h2o-ema", "kv_bits": None, "speculative": 3}, {"policy": "h2o", "kv_bits": 4},
    {"policy": "snapkv", "kv_bits": 8, "v_bits": 4}, {"kv_bits": 8, "light_bits": 4},
    {"policy": "window", "kv_bits": None, "evict_every": 1},
], ids=str)  # fmt: skip
def test_the_bytes_are_met(model, settings):
    limit = 120_000
    found = fit_bytes(model, limit, **settings)
    assert found.nbytes <= limit < found.peak_nbytes
    assert held(model, found.config, 2 * found.config.group + 8) == found.nbytes
    more = found.config.scaled(found.config.max_kv_size + 1)
    assert held(model, more, 2 * more.group + 8) > limit


@pytest.mark.slow
@pytest.mark.matrix(1)
@pytest.mark.parametrize("settings", [
    {"policy": "h2o-ema", "kv_bits": None}, {"kv_bits": 4}, {"kv_bits": 8, "light_bits": 4},
], ids=str)  # fmt: skip
def test_a_draft_models_caches_are_in_the_budget(model, settings):
    """While both write, and one row more in each would be too much."""
    draft, limit = tiny_qwen3(layers=1, head_dim=64, seed=1), 120_000
    given = settings | {"draft_model": draft, "speculative": 3}
    found = fit_bytes(model, limit, **given)
    assert found.draft_nbytes == found.nbytes // 3  # it has one layer, the model two
    assert f"bytes, {found.draft_nbytes:,} of them the draft model's, at most" in str(found)
    caches = mlx_h2o.make_prompt_cache(model, max_kv_bytes=limit, **given)
    for cache, model_of in zip(caches, (model, model, draft), strict=True):
        assert cache.config == found.config.with_budget(context_size=context_length(model_of))
    rows = found.config.max_kv_size
    responses = mlx_h2o.stream_generate(
        model, tiny_tokenizer(), random_prompt(rows + 50), max_tokens=found.config.group + 20,
        prompt_cache=caches, draft_model=draft, num_draft_tokens=3,
    )  # fmt: skip
    most = max(sum(cache.nbytes for cache in caches) for _ in responses)
    assert 0.9 * limit < most <= found.nbytes <= limit
    more = found.config.scaled(rows + 1)
    assert sum(held(one, more, 2 * more.group + 8) for one in (model, draft)) > limit


@pytest.mark.slow
def test_both_models_of_a_command_share_the_bytes(capsys):
    model, draft = tiny_qwen3(), tiny_qwen3(layers=1)
    sized = {"max_kv_bytes": 40_000, "speculative": 3, "kv_group_size": 32}
    caches = CacheSettings(sized).fitted(model, draft).caches(model, draft)
    expected = fit_bytes(model, draft_model=draft, **sized)
    configs = [cache.config.with_budget(context_size=None) for cache in caches]
    assert configs == [expected.config] * 3
    assert capsys.readouterr().err == f"KV cache: {expected}\n"


def test_bytes_of_few_rows_are_said_to_be_of_no_use(capsys):
    model = tiny_qwen3()
    for size, few in ((5_000, True), (60_000, False)):
        asked = {"max_kv_bytes": size, "kv_group_size": 32, "layers": "equal"}
        assert (CacheSettings(asked).fitted(model).config.max_kv_size < FEW_ROWS) == few
        assert ("rows a head are too few to be useful" in capsys.readouterr().err) == few


def test_rows_stay_as_they_come_where_the_whole_context_fits(model):
    context = model.args.max_position_embeddings
    dense = held(model, H2OConfig.of(max_kv_size=context), 3)
    assert fit_bytes(model, dense).config.kv_bits is None
    assert fit_bytes(model, dense).config.max_kv_size == context
    assert fit_bytes(model, dense - 1).config.kv_bits is not None
    assert fit_bytes(model, dense - 1, kv_bits=None).config.kv_bits is None


def test_bits_are_the_fewest_that_change_little():
    steps = [2.0**-bits for bits in BITS]
    small, large = ([factor * step for step in steps] for factor in (1.2, 0.5))
    assert fewest_bits([small, large]) == (5, 4)
    assert fewest_bits([[1.0] * len(BITS), small]) == (8, 5)
    assert fewest_bits(()) == UNMEASURED


def test_bits_follow_what_the_model_shows():
    model = mlx_h2o.load("demo")[0]
    keys, values = fewest_bits(errors := probe(model).errors)
    for side, bits in zip(errors, (keys, values), strict=True):
        assert side[BITS.index(bits)] <= FREE < side[BITS.index(bits) - 1]
    full = 300_000
    many, few = fit_bytes(model, full, length=500), fit_bytes(model, full // 4, length=1500)
    assert (many.config.kv_bits, many.config.v_bits) == (keys, values)
    assert few.config.kv_bits < keys and few.config.v_bits < values
    assert few.config.max_kv_size * 5 < 1500 <= many.config.max_kv_size * 15
    assert "(the fewest that cost nothing)" in str(many)
    assert "less than a fifth of the tokens stay" in str(few)
    assert "in 6 bits (more, since over half" in str(fit_bytes(model, full, length=400))
    assert fit_bytes(model, full, kv_bits=4).config.v_bits is None


def test_bytes_that_are_left_over_go_into_bits():
    model = mlx_h2o.load("demo")[0]
    more, most = fit_bytes(model, 900_000, length=500), fit_bytes(model, 2_000_000, length=500)
    bits = fewest_bits(probe(model).errors)
    assert more.config.kv_bits > bits[0] and more.config.v_bits > bits[1]
    assert (most.config.kv_bits, most.config.v_bits) == (8, 8)
    assert more.config.max_kv_size >= 500 and more.nbytes <= 900_000
    assert "(the most that hold every token)" in str(more)
    assert fit_bytes(model, 20_000_000, length=500).config.kv_bits is None


@pytest.mark.parametrize("name", ["plamo3", "falcon_h1", "deepseek_v3", "gemma3", "openelm"])
def test_an_outline_counts_what_the_graph_of_the_model_keeps(name):
    """Of a model that names no settings, lists of caches, latent attention, windows, layers of
    several widths."""
    special = {"num_kv_heads": [2, 4, 2, 1]} if name == "openelm" else {}
    model, counts, found = tiny.build(name, **special), (17, 1, 9), []
    made = [mlx_h2o.make_prompt_cache(model, 16, layers="equal", policy="h2o") for _ in "ab"]
    with mlx_h2o.routing(model):
        for count in counts:
            model(mx.zeros((1, count), mx.int32), cache=made[0])
            found.append(total_bytes(made[0]))
    assert found == [total_bytes(filled) for filled in Outline(model).fed(made[1], *counts)]


@pytest.mark.parametrize(("name", "folds"), [("llama4", True), ("baichuan_m1", False)])
def test_windows_are_counted_once_they_are_full(name, folds):
    """Of more rows than the caches: those that are cut in chunks, and those in lists."""
    model = tiny.build(name)
    *_, full = Outline(model).fed(mlx_h2o.make_prompt_cache(model, 10), 300, 1, 1)
    found = fit_bytes(model, total_bytes(full) + 99, kv_bits=None)
    assert found.config.max_kv_size == 10 and found.nbytes >= total_bytes(full)
    assert fit_bytes(model, 500_000, kv_bits=8, kv_group_size=32).config.folds is folds


def test_rows_that_cannot_be_quantised_stay_as_they_come():
    model = tiny_qwen3(head_dim=16)
    assert fit_bytes(model, 30_000, kv_frame=False).config.kv_bits is None
    with pytest.raises(ValueError, match="expected multiples of 32"):
        fit_bytes(model, 30_000, kv_bits=4, kv_frame=False)


def test_many_rows_of_mixed_precision_are_counted_in_few_steps(model, monkeypatch):
    fed, feed = [], Outline.__call__
    monkeypatch.setattr(Outline, "__call__", lambda *its: fed.append(feed(*its)))
    fit_bytes(model, "100MB", kv_bits=8, light_bits=4, layers="equal")
    assert 0 < len(fed) < 50


def test_make_prompt_cache_takes_bytes(model):
    caches = mlx_h2o.make_prompt_cache(model, max_kv_bytes="0.1MB", policy="window")
    expected = fit_bytes(model, 100_000, policy="window").config
    assert caches[0].config == expected.with_budget(context_size=context_length(model))
    assert caches[0].config.policy.name == "window"
    ahead = fit_bytes(model, 100_000, policy="window", preallocate=True)  # the same rows
    assert ahead.config == expected.with_budget(preallocate=True)
    line = str(fit_bytes(model, 20_000))
    assert "rows a head by h2o, in " in line and "bytes" in line


@given(
    start=st.integers(0, 500), slope=st.integers(1, 300), step=st.integers(1, 9),
    first=st.integers(6, 40), limit=st.integers(1, 10**6),
)  # fmt: skip
def test_the_search_finds_the_last_budget_that_fits(start, slope, step, first, limit):
    def measure(rows: int) -> int:
        if rows < first:
            raise ValueError("too few rows")
        return start + slope * (-(-rows // step) * step)

    if measure(first) > limit:
        with pytest.raises(ValueError, match=f"expected at least .*: {first} rows a head"):
            most_rows(measure, first, limit)
        return
    rows = most_rows(measure, first, limit)
    assert measure(rows) <= limit < measure(rows + 1)
    assert fewest_rows(measure, 100) == first and fewest_rows(measure, first - 1) == first - 1


def test_the_command_says_what_it_picked(capsys):
    arguments = ["--model", "demo", "--prompt", "The ship", "--max-tokens", "2"]
    packed, dense = ("0.02 MB", "by h2o, in 8 bits"), ("0.4 MB", "by keydiff, unquantised:")
    for tokens, (size, bits) in ((2, packed), (2, dense), (30, dense)):  # all fit
        arguments[-1] = str(tokens)
        assert cli.main(["generate", *arguments, "--max-kv-bytes", size]) == 0
        assert f"rows a head {bits}" in capsys.readouterr().err
    arguments[-1] = "2"
    sizes = "--max-kv-bytes", "1MB", "--recent-size", "300", "--preallocate"  # of no 256 rows
    assert cli.main(["generate", *arguments, *sizes]) == 0
    assert "rows a head by h2o, in 8 bits" in (said := capsys.readouterr()).err
    assert int(said.out.partition(" evicted, ")[2].partition(" bytes")[0].replace(",", "")) < 1e6
    assert str(CacheSettings({"budgets": "a.json"})).startswith("KV cache: rows by layer as in a")


def test_bytes_as_people_write_them():
    found = [parsed_bytes(text) for text in ("300MB", "1.5 GB", "64MiB", "4096", "2k", 77)]
    assert found == [300_000_000, 1_500_000_000, 2**26, 4096, 2000, 77]


@pytest.mark.parametrize("given", ["", "MB", "-3MB", "3 EB", "3.MB", 0, -1, True, 2.5, "9" * 400])
def test_what_is_no_number_of_bytes(given):
    said = r"^\[fit_bytes\] .* is not a size in bytes, expected e.g. 300MB"
    with pytest.raises(ValueError, match=said):
        parsed_bytes(given)


def test_what_is_refused(model):
    with pytest.raises(ValueError, match=r"^\[Outline\] the model makes a LayerCache, expected"):
        fit_bytes(tiny.build("deepseek_v41"), "1MB")
    for some, least in (({}, 5), ({"kv_bits": 8, "dense_size": 90, "policy": "h2o"}, 364)):
        said = rf"max_kv_bytes is 100, expected at least [\d,]+: {least} rows"  # 1/4 is recent
        with pytest.raises(ValueError, match=said):
            fit_bytes(model, 100, **some)
    with pytest.raises(ValueError, match="beside max_kv_size or budgets"):
        mlx_h2o.make_prompt_cache(model, 64, max_kv_bytes="1MB")
    with pytest.raises(ValueError, match="unknown settings"):
        fit_bytes(model, "1MB", polcy="h2o-ema")


def test_beside_windows_rows_are_dropped_worth_more_than_bits_and_few_are_recent():
    model = tiny_gemma3(head_dim=64)
    found = fit_bytes(model, 20_000, length=400)
    rows, budget = found.config.max_kv_size, found.config.budget
    assert found.config.policy == H2O(fold=False) and budget.recent_size == (rows - 4) // 5
    assert 80 < rows < 200 and "in 4 bits (few, since less than half of the tokens" in str(found)
    assert fit_bytes(model, 20_000, kv_bits=8, heavy_size=9).config.budget.heavy_size == 9


@pytest.mark.slow
def test_quantised_rows_fold_unless_something_else_is_said(model):
    for some in ({}, {"kv_bits": 8}, {"kv_bits": 8, "light_bits": 4}):
        assert fit_bytes(model, 20_000, **some).config.policy.name == "h2o", some
    assert fit_bytes(model, 20_000, kv_bits=None).config.policy.name == "keydiff"
    assert fit_bytes(model, 20_000, policy="window").config.policy.name == "window"
    assert fit_bytes(tiny.build("deepseek_v3"), 20_000, kv_bits=4).config.policy.name == "h2o"


@pytest.mark.parametrize(("settings", "expected"), [
    ({"max_position_embeddings": 64}, 64), ({"text_config": {"max_position_embeddings": 64}}, 64),
    ({"text_config": SimpleNamespace(max_position_embeddings=64)}, 64), ({}, None),
    ({"text_config": None, "max_position_embeddings": None}, None),
    ({"max_position_embeddings": 0, "model_max_length": 2**40, "n_positions": 64}, 64),
    ({"text_config": SimpleNamespace()}, None),
])  # fmt: skip
def test_the_context_is_where_a_model_has_it(settings, expected):
    assert context_length(SimpleNamespace(args=SimpleNamespace(**settings))) == expected
    assert context_length(settings) == expected
