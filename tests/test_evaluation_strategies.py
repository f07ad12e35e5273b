"""Strategies: the language, bytes that are never exceeded, and the arms that stand beside."""

from __future__ import annotations

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

import mlx_h2o
from mlx_h2o import evaluate, policies
from mlx_h2o.evaluation.arms import Footprint, resolve, with_controls
from mlx_h2o.evaluation.strategies import known_names, parse
from mlx_h2o.lm.sizing import parsed_bytes
from tiny_models import random_prompt, tiny_llama, tiny_qwen3


@pytest.fixture(scope="module")
def footprint():
    return Footprint(tiny_qwen3(head_dim=64))


@given(
    name=st.sampled_from(policies.names()),
    rows=st.integers(32, 4096) | st.none(),
    bits=st.sampled_from([None, (4, None), (8, 4)]),
    given_settings=st.dictionaries(
        st.sampled_from([("sink", "sink_size"), ("every", "evict_every")]), st.integers(1, 8)
    ),
)
def test_what_is_written_is_what_is_set(name, rows, bits, given_settings):
    parts = [name, str(rows or "none")]
    if bits is not None:
        parts.append(f"kv{bits[0]}" + (f"/{bits[1]}" if bits[1] else ""))
    parts += [f"{short}={value}" for (short, _), value in given_settings.items()]
    found = parse(":".join(parts))
    assert (found.kind, found.policy, found.rows, found.nbytes) == ("ours", name, rows, None)
    config = found.config(found.rows)
    assert (config.kv_bits, config.v_bits) == (bits or (None, None))
    assert all(getattr(config, long) == value for (_, long), value in given_settings.items())
    assert parse(found.name) == found  # one spelling, which is read as the same


@given(size=st.integers(1, 2**40))
def test_bytes_are_read_as_people_write_them(size):
    assert parsed_bytes(str(size)) == size
    assert parsed_bytes(f"{size} kB") == 1000 * size
    assert parsed_bytes(f"{size}MiB") == 2**20 * size
    assert parse(f"h2o:bytes={size}MB").nbytes == 10**6 * size
    assert parse(f"h2o:{size}MB") == parse(f"h2o:bytes={size}MB")


def test_a_format_of_rows_is_a_part_of_its_own():
    found = parse("h2o:none:turbo8v3:guard=2")
    assert found.name == "h2o:none:turbo8v3:guard=2"
    config = found.config(found.rows)
    assert (config.kv_format, config.turbo_guard, config.kv_bits) == ("turbo8v3", 2, None)
    assert parse("keydiff:bytes=300KB:kv_format=turbo3") == parse("keydiff:300KB:turbo3")


def test_fractions_of_units():
    assert parsed_bytes("1.5MB") == 1_500_000
    assert parsed_bytes(".5 KiB") == 512


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(text=st.text(max_size=20))
def test_any_other_text_is_refused_in_one_line(text):
    name, *_ = text.strip().split(":")
    if name.strip() not in known_names():
        with pytest.raises(ValueError, match="strategy") as error:
            parse(text)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("best:64", "'best' is unknown, expected one of: full, rotating, kv2"),
        ("kv7", "'kv7' is unknown"),
        ("kv4:64", "whole text"),
        ("rotating:4", "at least 5"),
        ("rotating:64:kv4", "no other settings"),
        ("keydiff:64:bytes=1MB", "one of them"),
        ("keydiff:0", "0 rows"),
        ("keydiff:64:64", "rows are given already"),
        ("keydiff:64:kv4:kv_bits=8", "kv_bits is given twice"),
        ("keydiff:64:best=1", "'best' is no setting"),
        ("keydiff:64:sink=four", "expected a number"),
        ("keydiff:64:sink=64", "sink_size is 64"),
        ("keydiff:bytes=many", "is no number of bytes"),
        ("keydiff:bytes=0", "is no number of bytes"),
        ("keydiff:fast", "expected rows, a size"),
        ("keydiff:64:turbo3:kv4", "'turbo3' and kv_bits 4, expected one of them"),
        ("keydiff:64:turbo5", "expected rows, a size, kvBITS, a format"),
        ("keydiff:64:guard=1", "turbo_guard is 1 and kv_format None"),
        ("", "'' is unknown"),
    ],
)
def test_mistakes_name_the_text(text, said):
    with pytest.raises(ValueError, match="strategy") as error:
        parse(text)
    assert repr(text) in str(error.value) and said in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["keydiff", "h2o:kv4", "h2o-ema:kv8:light=4", "rotating"])
@settings(deadline=None, max_examples=4)
@given(nbytes=st.integers(30_000, 200_000))
def test_bytes_are_never_exceeded_and_one_row_more_would(footprint, name, nbytes):
    head, *rest = name.split(":")
    arm = resolve(footprint, parse(":".join([head, f"bytes={nbytes}", *rest])), 5000)
    assert arm.nbytes <= nbytes
    more = resolve(footprint, parse(":".join([head, str(arm.rows + 1), *rest])), 5000)
    assert more.nbytes > nbytes


@pytest.mark.matrix(14)
@pytest.mark.parametrize("kind", ["", "kv4", "kv8/4", "kv8:light=4"])
@pytest.mark.parametrize("policy", policies.names())
def test_counted_bytes_are_those_of_caches_in_use(policy, kind):
    model = tiny_qwen3(head_dim=64)
    model.set_dtype(mx.float16)
    arm = resolve(Footprint(model), parse(f"{policy}:24:{kind}".strip(":")), 90)
    cache, tokens, most = arm.make(0), random_prompt(90), 0
    with mlx_h2o.routing(model):
        for start in (0, *range(60, 90)):
            model(mx.array([tokens[start : 60 if start == 0 else start + 1]]), cache=cache)
            for layer in cache:
                layer.flush()
            most = max(most, evaluate.kv_bytes(cache))
    assert arm.nbytes == most


def test_stock_caches_are_counted_without_slack(footprint):
    rows = 2 * 2 * 2 * 64 * 2  # layers, keys and values, heads, elements, bytes
    packed = 2 * 2 * 2 * (64 * 4 // 8 + 4)
    assert resolve(footprint, parse("full"), 300).nbytes == 300 * rows
    assert resolve(footprint, parse("kv4"), 300).nbytes == 300 * packed
    assert resolve(footprint, parse("rotating:40"), 300).nbytes == 40 * rows
    assert resolve(footprint, parse("rotating:400"), 300).nbytes == 300 * rows


def test_less_than_the_fewest_rows_is_said(footprint):
    for name in ("keydiff", "rotating"):
        with pytest.raises(
            ValueError, match=r"bytes is 10, expected at least [\d,]+: \d rows a head"
        ):
            resolve(footprint, parse(f"{name}:bytes=10"), 300)
    with pytest.raises(ValueError, match="more than"):
        resolve(footprint, parse("keydiff:bytes=4TB"), 300)


@pytest.mark.slow
@pytest.mark.parametrize("make", [tiny_qwen3, tiny_llama])
def test_a_budget_without_end_is_stock_token_for_token(make):
    model = make()
    tokens = random_prompt(60)
    footprint = Footprint(model)
    stock = evaluate.teacher_forced(model, make_prompt_cache(model), tokens, first=8)
    for name in ("keydiff:none", "h2o-ema:none", "h2o:4096", "rotating:4096", "full"):
        arm = resolve(footprint, parse(name), len(tokens))
        run = evaluate.teacher_forced(model, arm.make(0), tokens, first=8)
        assert run.top1 == stock.top1, name
        assert run.losses == pytest.approx(stock.losses, abs=1e-3)
        assert not arm.evicts


def test_controls_stand_beside_at_the_same_bytes(footprint):
    asked = [resolve(footprint, parse(text), 300) for text in ("keydiff:64", "h2o:kv4:bytes=40KB")]
    arms, missing = with_controls(footprint, asked, 300)
    assert missing == []
    kinds = [arm.strategy.kind for arm in arms]
    assert [kinds.count(kind) for kind in ("full", "rotating", "quantised")] == [1, 2, 2]
    assert arms[0].name == "full" and {"kv8", "kv4"} <= {arm.name for arm in arms}
    assert [arm.name for arm in arms if not arm.control] == [arm.name for arm in asked]
    for arm in asked:
        for kind in ("rotating", "random"):
            near = [o for o in arms if kind in (o.strategy.kind, o.strategy.policy)]
            assert any(0.95 * arm.nbytes <= other.nbytes <= arm.nbytes for other in near)


def test_the_same_control_comes_once(footprint):
    """Nor one for bytes that another is near enough to; a smaller one serves the next."""
    texts = ("keydiff:64", "window:63", "h2o:63", "full", "kv4")
    asked = [resolve(footprint, parse(text), 300) for text in texts]
    found = with_controls(footprint, asked, 300)[0]
    kinds = [arm.strategy.kind for arm in found if arm.control]
    assert sorted(kinds) == ["ours", "quantised", "rotating"]
    few = [
        resolve(footprint, parse(text), 300) for text in ("keydiff:64", "rotating:65", "random:64")
    ]
    assert [arm.name for arm in with_controls(footprint, few, 300)[0] if arm.control] == [
        "full", "kv8", "kv4",
    ]  # fmt: skip


def test_a_seed_is_another_random_choice_unless_it_is_set(footprint):
    free, fixed = (parse(text) for text in ("random:64", "random:64:seed=5"))
    assert free.seeded and not fixed.seeded and not parse("keydiff:64").seeded
    arm = resolve(footprint, free, 300)
    assert [arm.make(seed)[0].config.random_seed for seed in (0, 3)] == [0, 3]
    assert resolve(footprint, fixed, 300).make(3)[0].config.random_seed == 5
