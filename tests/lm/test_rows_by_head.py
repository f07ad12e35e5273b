"""KV heads that retrieve: how they are found, how many rows they get, and when all get the same."""

import json
import math
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3

import mlx_h2o
from fetched_models import loaded
from mlx_h2o import H2OConfig, blas, cli, make_prompt_cache
from mlx_h2o.lm import layers, probing
from mlx_h2o.lm.layers import FLOOR, parts_of_mean, probe, shares
from mlx_h2o.lm.prompt_cache import budgets_of, fit_bytes, summary
from mlx_h2o.lm.routing import evicting_caches
from models import tiny
from readings import prefill
from tiny_models import tiny_qwen3

FOUND = 4  # of the six layers of the demo model, the one whose two KV heads retrieve


@pytest.fixture(scope="module", autouse=True)
def _remembered(tmp_path_factory):
    """Probes of these tests are remembered, but not those of others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLX_H2O_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(layers, "_known", {})
        yield


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Nothing is remembered."""
    monkeypatch.setenv("MLX_H2O_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(layers, "_known", {})
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def demo():
    return mlx_h2o.load("demo")[0]


def by_head(rows, heads: int = 2) -> list[list[int]]:
    return [one if isinstance(one, list) else [one] * heads for one in rows]


def total(rows, heads: int = 2) -> int:
    return sum(map(sum, by_head(rows, heads)))


def shared(given, rows, **more):
    """For each layer its rows, or a list with those of each head."""
    found = shares(parts_of_mean(given), rows, **more)
    return [layer[0] if len({*layer}) == 1 else layer for layer in found]


@drawn(
    given=st.lists(
        st.lists(st.floats(0, 1, width=32), min_size=1, max_size=8), min_size=1, max_size=20
    ),
    least=st.integers(1, 50), more=st.integers(0, 400), fixed=st.integers(0, 40),
    most=st.none() | st.integers(1, 900),
)  # fmt: skip
@settings(deadline=None)
def test_shares_keep_total_floor_and_order(given, least, more, fixed, most):
    rows = max(least, fixed + 1) + more
    parts = parts_of_mean(given)
    found = shares(parts, rows, least=least, most=most, fixed=fixed)
    assert [*map(len, found)] == [*map(len, given)]
    flat = [one for layer in found for one in layer]
    assert sum(flat) <= rows * len(flat)
    assert most is not None or rows * len(flat) - sum(flat) < 2 * len(flat)
    floor = max(least, fixed + int(FLOOR * (rows - fixed)) - 1)
    assert min(flat) >= min(rows, floor)
    longer = shares(parts, rows, least=least, most=most and 2 * most, fixed=fixed)
    for own, later in zip(found, longer, strict=True):
        assert all(a <= max(b, most or b) + 1 for a, b in zip(later, own, strict=True) if b < rows)
    assert max(flat) <= max(rows, most or max(flat))
    for gives, own in zip(given, found, strict=True):
        assert len({*own}) <= 2
        if len({*own}) == 2:  # in the order of what they give
            wide = [gain for gain, many in zip(gives, own, strict=True) if many == max(own)]
            others = [gain for gain, many in zip(gives, own, strict=True) if many == min(own)]
            assert min(wide) >= max(others)


@pytest.mark.parametrize(
    ("given", "rows"),
    [
        ([[0.5]], [100]),
        ([[0.0, 0.0]] * 4, [100] * 4),  # nothing retrieves
        ([[0.3], [0.02]], [155, 45]),  # what all get, and all that is left
        ([[0.4], [0.1]], [118, 82]),  # both retrieve, by the roots of what they give
        ([[0.4, 0.0], [0.0, 0.0]], [[265, 45], 45]),
        ([[0.3, 0.0, 0.3], [0.02, 0.02, 0.02]], [[210, 45, 210], 45]),
        ([[0.4, 0.3], [0.0, 0.0]], [155, 45]),  # near enough
    ],
)
def test_shares(given, rows):
    found = shared(given, 100)
    assert [type(one) for one in found] == [type(one) for one in rows]
    heads = max(map(len, given))
    np.testing.assert_allclose(by_head(found, heads), by_head(rows, heads), atol=1)


def test_no_head_gets_more_than_a_text_fills_or_less_than_settings_need():
    given = [[0.4, 0.0], [0.0, 0.0]]
    # What a text does not fill is for the others.
    assert shared(given, 100, most=160) == [[160, 80], 80]
    assert shared(given, 100, most=80) == [100, 100]
    assert shared([[0.4, 0.3], [0.0, 0.0]], 100, most=160) == [155, 45]  # near enough
    assert shared(given, 100, least=70) == [[190, 70], 70]
    assert shared(given, 100, fixed=50) == [[182, 72], 72]


def test_the_demo_model_has_a_layer_that_retrieves(demo):
    gives = probe(demo).gives
    assert [len(layer) for layer in gives] == [2] * 6 and probe(demo).reason == ""
    others = [one for layer in (*gives[:FOUND], *gives[FOUND + 1 :]) for one in layer]
    assert min(gives[FOUND]) > max(others) and max(gives[FOUND]) > 2 * max(others)
    rows = budgets_of(make_prompt_cache(demo, 100))
    assert total(rows) <= 1200 and max(map(max, by_head(rows))) == max(by_head(rows)[FOUND])
    assert min(map(min, by_head(rows))) >= 45


def test_what_a_head_gives_is_the_change_of_its_layers_output(demo):
    """By hand: without the first copy, one layer and head after another."""
    count, ends = layers.TOKENS, min(1000, demo.args.vocab_size // 8)
    once = np.random.default_rng(0).integers(ends, demo.args.vocab_size - ends, count)
    tokens = mx.array(np.tile(once, 2))[None]
    row, query = np.arange(2 * count), np.arange(2 * count)[:, None]
    causal = row <= query
    other = (np.abs(row - (query - count)) > probing.AROUND) | (query < count)
    x = demo.model.embed_tokens(tokens)
    for place, (layer, gives) in enumerate(zip(demo.layers, probe(demo).gives, strict=True)):
        if place not in (0, FOUND):
            x = layer(x, "causal")
            continue
        heads = layer.self_attn.n_kv_heads
        group = layer.self_attn.n_heads // heads
        mask = np.broadcast_to(causal, (1, heads * group, *causal.shape))
        whole = np.array(layer(x, mx.array(mask)), np.float64)[0, count + 8 :]
        for head in range(heads):
            own = mask.copy()
            own[:, head * group : (head + 1) * group] = causal & other
            out = np.array(layer(x, mx.array(own)), np.float64)[0, count + 8 :]
            change = np.linalg.norm(out - whole, axis=1) / np.linalg.norm(whole, axis=1)
            assert gives[head] == pytest.approx(change.mean(), rel=1e-2, abs=1e-4)
        x = layer(x, "causal")


def test_a_model_is_probed_once_and_files_remember_it(demo, folder, monkeypatch, caplog):
    calls, made, original = [], [], layers.gives

    def counted(*given):
        """It makes again what it made once."""
        calls.append(1)
        if not made:
            made.append(original(*given))
        return made[0]

    monkeypatch.setattr(layers, "gives", counted)
    monkeypatch.setattr(blas, "slow_blas", lambda: "install another BLAS")
    blas.say_slow_blas.cache_clear()
    first = probe(demo)
    again = mlx_h2o.load("demo")[0]  # another object of the same weights
    assert probe(demo) is first and probe(again) == first and len(calls) == 1
    (file,) = folder.rglob("*.json")
    kept, texts = json.loads(file.read_text()), ["", "[]", "[" * 10**5, '{"errors": []}']
    wrong = [[0.1]], [["a"]] * 6, None, [0.1] * 6, [[]] * 6, [[-1.0]] * 6, [[math.inf]] * 6
    texts += [json.dumps(one) for one in ({"format": 2}, *(kept | {"gives": one} for one in wrong))]
    for number, text in enumerate(texts, 2):
        file.write_text(text)
        layers._known.clear()
        assert probe(demo) == first and len(calls) == number
    layers._known.clear()
    assert probe(demo) == first
    said = "Probing once which heads of qwen3 retrieve; it takes a while"
    # Each time that it was, and not what was remembered; what is slow is said once.
    assert caplog.messages == [said, "install another BLAS", *[said] * 12]


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc").is_dir(), reason="needs /proc")
@pytest.mark.parametrize("name", ["/proc/no/such/folder", "~no-such-user/folder"])
def test_a_folder_that_cannot_be_written_is_no_error(demo, folder, monkeypatch, name):
    monkeypatch.setenv("MLX_H2O_CACHE", name)
    assert len(probe(demo).gives) == 6


def test_a_probe_leaves_everything_as_it_was(demo, folder):
    mx.random.seed(3)
    expected = np.array(mx.random.uniform(shape=(4,)))
    function, call = qwen3.scaled_dot_product_attention, type(demo.layers[0]).__call__
    weights = {name: np.array(one) for name, one in tree_flatten(demo.parameters())}
    mx.random.seed(3)
    probe(demo)
    np.testing.assert_array_equal(np.array(mx.random.uniform(shape=(4,))), expected)
    assert qwen3.scaled_dot_product_attention is function
    assert type(demo.layers[0]).__call__ is call
    for name, one in tree_flatten(demo.parameters()):
        np.testing.assert_array_equal(np.array(one), weights[name])


def test_a_model_without_retrieving_layers_has_equal_rows():
    model = tiny_qwen3(layers=8)
    assert probe(model).gives == ((0.0, 0.0),) * 8
    assert budgets_of(make_prompt_cache(model, 40)) == [40] * 8
    for name in ("talkie", "gemma4_text", "gptj", "plamo3", "gemma3n"):  # take or give more
        assert probe(tiny.build(name)).gives


@pytest.mark.parametrize(("name", "reason"), [
    ("plamo2", "does not call mlx_lm's attention"), ("gemma2", "does not call mlx_lm's attention"),
    ("phi", "computes with the keys between its caches and attention"),
    ("deepseek_v3", "computes with the keys between its caches and attention"),
    ("falcon_h1", "has lists of caches in the place of some that grow"),
])  # fmt: skip
def test_models_that_hide_their_attention_have_equal_rows(name, reason):
    model = tiny.build(name)
    assert reason in probe(model).reason
    caches = make_prompt_cache(model, 40, policy="keydiff")
    assert {*budgets_of(caches)} == {40}
    assert f"the same rows for every KV head: the model {reason}" in summary(caches, model)


def test_a_summary_says_how_rows_are_shared_out(demo):
    caches = make_prompt_cache(demo, 100)
    rows = [one for layer in by_head(budgets_of(caches)) for one in layer]
    assert f"{min(rows)} to {max(rows)} rows by KV head" in summary(caches, demo)
    assert "KV head" not in summary(make_prompt_cache(demo, 100, layers="equal"), demo)


def test_where_there_is_nothing_to_probe_for(demo, folder, monkeypatch):
    monkeypatch.setattr(layers, "_probed", Mock(side_effect=AssertionError("probed")))
    assert budgets_of(make_prompt_cache(demo, 40, layers="equal")) == [40] * 6
    assert budgets_of(make_prompt_cache(demo, budgets=[40] * 6)) == [40] * 6
    assert budgets_of(make_prompt_cache(demo, H2OConfig.of(max_kv_size=None))) == [None] * 6
    assert fit_bytes(demo, "300KB", layers="equal", kv_bits=8).config.max_kv_size > 40
    with pytest.raises(ValueError, match="layers is 'some', expected one of: probe, equal"):
        make_prompt_cache(demo, 40, layers="some")


@pytest.mark.parametrize(
    "given",
    [
        {"sink_size": 30}, {"prefix_size": 50}, {"heavy_size": 20, "recent_size": 20},
        {"kv_bits": 8, "light_bits": 4, "dense_size": 20}, {"speculative": 20},
        {"kv_format": "turbo3"}, {"evict_every": 7}, {"policy": "h2o"},
    ],
)  # fmt: skip
def test_other_settings_hold_in_every_layer(demo, given):
    config = H2OConfig.of(max_kv_size=60, **given)
    caches = make_prompt_cache(demo, config)
    assert total(budgets_of(caches)) <= 720 and len({*map(str, budgets_of(caches))}) > 1
    for cache in evicting_caches(caches):
        assert cache.config.protected == config.protected
        assert cache.config.speculative == config.speculative
        assert cache.config.dense_rows == config.dense_rows
        if "heavy_size" in given:
            shares = (one.budget.heavy_size / one.max_kv_size for one in (cache.config, config))
            assert next(shares) <= next(shares) + 0.05
            continue
        names = ("max_kv_size", "sink_size", "prefix_size", "policy")
        usual = H2OConfig.of(**{name: cache.config.named()[name] for name in names})
        assert cache.config.budget.heavy_size == usual.budget.heavy_size
    text = mlx_h2o.load("demo")[1].encode("The ship was lost at sea. " * 20)[:150]
    with mlx_h2o.routing(demo):
        prefill(demo, caches, text, chunk=48)
        prefill(demo, caches, text[:4])
    for cache in evicting_caches(caches):
        later = [rows for tokens, rows in cache.config.rows_at if tokens >= cache.offset]
        rows = [*later, cache.config.max_kv_size][0]
        recent = cache.config.recent_size * rows // cache.config.max_kv_size
        newest = np.sort(np.array(cache.positions), axis=2)[..., -recent:]
        assert (newest == np.arange(cache.offset - recent, cache.offset)).all()
        assert cache.size() <= rows


def test_rows_of_short_texts_stay_in_a_batch_with_long_ones(demo):
    tokenizer, caches = mlx_h2o.load("demo")[1], make_prompt_cache(demo, 60)
    text = tokenizer.encode("The ship was lost at sea. " * 20)

    def held(*prompts):
        given = demo, tokenizer, prompts, [caches] * len(prompts), 4
        found = mlx_h2o.batch_generate(*given, return_prompt_caches=True).caches
        return [[one.positions.tolist() for one in evicting_caches(own)] for own in found]

    assert held(text[:70], text[:140]) == [*held(text[:70]), *held(text[:140])]


def test_the_fewest_rows_that_settings_allow(demo):
    """Where the mean is hardly more than what they need, heads are nearly equal."""
    rows = by_head(budgets_of(make_prompt_cache(demo, 24, sink_size=20)))
    assert min(map(min, rows)) >= 21 and sum(map(sum, rows)) <= 288
    assert budgets_of(make_prompt_cache(demo, 22, speculative=16)) == [22] * 6


@pytest.mark.parametrize(("limit", "policy"), [(300_000, "keydiff"), (211_000, "h2o-ema")])
def test_bytes_count_the_rows_of_every_layer(demo, limit, policy):
    """While a text grows too, and shares of short texts lose less to rounding."""
    found = fit_bytes(demo, limit, policy=policy, kv_bits=None)
    caches = make_prompt_cache(demo, found.config)
    tokens, held = mlx_h2o.load("demo")[1].encode("The ship was lost at sea. " * 30)[:175], []
    with mlx_h2o.routing(demo):
        for one in tokens:
            prefill(demo, caches, [one])
            held.append(sum(cache.nbytes for cache in caches))
    assert 0.999 * found.nbytes < max(held) <= found.nbytes <= limit
    equal = fit_bytes(demo, limit, policy=policy, kv_bits=None, layers="equal")
    assert 0.9 < found.config.max_kv_size / equal.config.max_kv_size <= 1.1


def test_a_draft_model_has_a_probe_of_its_own(demo):
    caches = make_prompt_cache(demo, 60, draft_model=tiny_qwen3(), speculative=2)
    assert budgets_of(caches[6:]) == [60, 60] and budgets_of(caches[:6]) != [60] * 6


def test_the_command_writes_what_budgets_read(demo, tmp_path, capsys):
    file = tmp_path / "rows.json"
    assert cli.main(f"layers --model demo --max-kv-size 100 --output {file}".split()) == 0
    said = capsys.readouterr().out
    rows = json.loads(file.read_text())["budgets"]
    budget: dict[str, Any] = {"max_kv_size": 100}
    assert rows == budgets_of(make_prompt_cache(demo, **budget))
    own = ", ".join(map(str, dict.fromkeys(by_head(rows)[FOUND])))
    assert said.count(f"layer   {FOUND}: {own} rows a head; retrieval 0.") == 1
    made = [make_prompt_cache(demo, policy="h2o", **one) for one in ({"budgets": file}, budget)]
    assert budgets_of(made[0]) == rows
    folds = [[one.config.folds for one in evicting_caches(caches)] for caches in made]
    assert folds[0] == folds[1] and {*folds[0]} == {True, False}


def test_layers_that_grow_among_windows():
    """Only they are probed, and only they share rows: in equal parts those that retrieve."""
    model = tiny.build("gemma3")
    found = probe(model)
    caches = make_prompt_cache(model, 40)
    assert len(found.gives) == len(list(evicting_caches(caches))) < len(caches)
    assert shares(parts_of_mean([[0.13], [0.57], [0.04]], True), 100) == [[140], [140], [20]]
    assert not fit_bytes(model, "20KB", kv_bits=8, kv_group_size=32).config.folds


@pytest.mark.real
def test_the_heads_of_a_real_model():
    """The heads whose far rows matter most, of 90; and no layer has three levels."""
    model = loaded("smollm2-135m-instruct")[0]
    found = enumerate(probe(model).gives)
    gives = {(layer, n): one for layer, own in found for n, one in enumerate(own)}
    best = sorted(gives, key=lambda place: -gives[place])
    known = {(17, 1), (18, 2), (23, 0), (23, 2), (20, 1), (20, 2), (14, 1), (15, 2), (8, 0)}
    assert len(known & {*best[:10]}) >= 8
    rows = by_head(budgets_of(make_prompt_cache(model, 128)), 3)
    assert sum(map(sum, rows)) <= 90 * 128 and min(map(min, rows)) >= 50
    assert all(rows[layer][head] > 200 for layer, head in known & {*best[:8]})


@pytest.mark.parametrize("given", [{"kv_bits": 8}, {"policy": "h2o", "kv_bits": 6, "v_bits": 5}])
def test_a_text_that_grows_takes_rows_from_heads_that_do_not_retrieve(demo, given):
    """However long it is: as many rows as the mean, and all of a short text."""
    caches = make_prompt_cache(demo, 64, **given)
    each = list(evicting_caches(caches))
    narrow, *_, wide = sorted(each, key=lambda one: one.config.max_kv_size)
    tokens = mlx_h2o.load("demo")[1].encode("The ship was lost at sea. " * 60)[:330]
    sizes = {}
    with mlx_h2o.routing(demo):
        for size in (60, *[30] * 9):
            prefill(demo, caches, tokens[:size], chunk=30)
            rows = sum(one.size() * one.positions.shape[1] for one in each)
            assert rows <= 12 * min(64, wide.offset)
            sizes[wide.offset] = wide.size(), narrow.size()
    assert sizes[60] == (60, 60) and sizes[90][0] == 90 > sizes[90][1]
    later = [few for _, few in sizes.values()][1:]
    assert later == sorted(later, reverse=True)
    copied = [type(one).from_state(one.state) for one in caches]
    assert budgets_of(copied) == budgets_of(caches)
    for one, other in zip(evicting_caches(copied), each, strict=True):
        assert one.config == other.config
