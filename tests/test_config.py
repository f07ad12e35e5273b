"""H2OConfig: presets, resolution of sizes, errors."""

from __future__ import annotations

import dataclasses

import pytest

from mlx_h2o import H2OConfig, policies

PRESETS = [("heavy", 4, 128, 124), ("balanced", 4, 64, 188), ("recent", 4, 32, 220)]


@pytest.mark.parametrize(("name", "sink", "heavy", "recent"), PRESETS)
def test_presets_are_those_of_the_paper(name, sink, heavy, recent):
    config = H2OConfig.preset(name)
    sizes = (config.sink_size, config.heavy_size, config.recent_size)
    assert sizes == (sink, heavy, recent)
    assert config.max_kv_size == 256
    assert H2OConfig.preset(name, 1024, policy="window").heavy_size == 4 * heavy


def test_the_default_is_the_heavy_preset():
    assert H2OConfig() == H2OConfig.preset("heavy")
    assert H2OConfig().policy == "keydiff"
    assert H2OConfig().decay == 0.95
    assert H2OConfig(max_kv_size=64) == H2OConfig.preset("heavy", 64)


@pytest.mark.parametrize("max_kv_size", [5, 6, 7, 8, 9, 31, 32, 33, 255, 257, 4096])
@pytest.mark.parametrize("name", ["heavy", "balanced", "recent"])
def test_sizes_fill_the_budget(name, max_kv_size):
    config = H2OConfig(max_kv_size=max_kv_size)
    assert config.sink_size + config.heavy_size + config.recent_size == max_kv_size
    assert config.recent_size >= 1
    scaled = H2OConfig.preset(name, max_kv_size)
    assert scaled.sink_size + scaled.heavy_size + scaled.recent_size == max_kv_size
    assert scaled == config or name != "heavy"


def test_recent_grows_to_fill():
    assert H2OConfig(max_kv_size=64, heavy_size=10, recent_size=10).recent_size == 50


def test_what_is_not_given_adapts():
    assert H2OConfig(max_kv_size=64, recent_size=50).heavy_size == 10
    assert H2OConfig(max_kv_size=64, heavy_size=60).recent_size == 0
    assert H2OConfig(max_kv_size=1, sink_size=0).recent_size == 1


def test_more_than_the_budget_is_an_error():
    with pytest.raises(ValueError, match=r"^\[H2OConfig\] .*4 \+ 128 \+ 125 = 257.*256"):
        H2OConfig(heavy_size=128, recent_size=125)
    with pytest.raises(ValueError, match="4 \\+ 61 \\+ 0 = 65.*at most max_kv_size = 64"):
        H2OConfig(max_kv_size=64, heavy_size=61)
    with pytest.raises(ValueError, match="sink_size is 4.*fewer than max_kv_size = 4"):
        H2OConfig(max_kv_size=4)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_kv_size": 0}, "max_kv_size is 0, expected an int of at least 1"),
        ({"max_kv_size": 2.5}, "max_kv_size is 2.5"),
        ({"max_kv_size": True}, "max_kv_size is True"),
        ({"sink_size": -1}, "sink_size is -1"),
        ({"heavy_size": -1}, "heavy_size is -1"),
        ({"recent_size": "8"}, "recent_size is '8'"),
        ({"evict_every": 0}, "evict_every is 0"),
        ({"decay": 1.0}, "decay is 1.0"),
        ({"decay": -0.1}, "decay is -0.1"),
        ({"decay": float("nan")}, "decay is nan"),
        ({"decay": None}, "decay is None"),
        (
            {"policy": "lru"},
            "policy is 'lru', expected one of: h2o, h2o-sum, window, random, keydiff, ",
        ),
        ({"shared_heads": 1}, "shared_heads is 1, expected a bool"),
        ({"random_seed": -1}, "random_seed is -1, expected an int of at least 0"),
        ({"kv_bits": 7}, "kv_bits is 7, expected one of"),
    ],
)
def test_errors_say_what_was_found_and_expected(settings, text):
    with pytest.raises(ValueError, match=r"^\[H2OConfig\]") as error:
        H2OConfig(**settings)
    assert text in str(error.value)


def test_unknown_preset():
    with pytest.raises(ValueError, match=r"\[H2OConfig.preset\] name is 'light', expected one of"):
        H2OConfig.preset("light")


def test_settings_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        H2OConfig().decay = 0.5


def test_policies_are_known_by_name():
    assert {"h2o", "window", "keydiff"} < set(policies.names())
    for name in policies.names():
        policy = policies.build(H2OConfig(policy=name))
        assert policy.name == name
    assert policies.build(H2OConfig(policy="h2o", decay=0.5)).decay == 0.5
