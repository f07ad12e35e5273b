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
    assert (config.max_kv_size, config.policy) == (256, "h2o-ema")
    other = H2OConfig.preset(name, 1024, policy="window")
    assert (other.heavy_size, other.policy) == (4 * heavy, "window")


def test_the_default_has_the_sizes_of_the_heavy_preset():
    assert H2OConfig() == H2OConfig.preset("heavy", policy="keydiff")
    assert H2OConfig().decay == 0.95
    assert H2OConfig(max_kv_size=64) == H2OConfig.preset("heavy", 64, policy="keydiff")


@pytest.mark.parametrize("max_kv_size", [5, 6, 7, 8, 9, 31, 32, 33, 255, 257, 4096])
def test_sizes_fill_the_budget(max_kv_size):
    for config in (H2OConfig.preset(name, max_kv_size) for name, *_ in PRESETS):
        assert config.sink_size + config.heavy_size + config.recent_size == max_kv_size
        assert config.recent_size >= 1


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
            "policy is 'lru', expected one of: h2o, h2o-ema, h2o-sum, window, random, ",
        ),
        ({"shared_heads": 1}, "shared_heads is 1, expected a bool"),
        ({"fold": None}, "fold is None, expected a bool"),
        ({"random_seed": -1}, "random_seed is -1, expected an int of at least 0"),
        ({"kv_bits": 7}, "kv_bits is 7, expected one of"),
        ({"kv_bits": 8, "sparse_v": 1}, "sparse_v is 1, expected a number of at least 0, below 1"),
        ({"kv_bits": 8, "sparse_v": -1e-6}, "sparse_v is -1e-06, expected a number"),
        ({"kv_bits": 8, "sparse_v": float("nan")}, "sparse_v is nan"),
        ({"kv_bits": 8, "sparse_v": "1e-6"}, "sparse_v is '1e-6'"),
        ({"kv_bits": 8, "sparse_v": None}, "sparse_v is None"),
        ({"kv_bits": 8, "sparse_v": False}, "sparse_v is False"),
        ({"sparse_v": 1e-6}, "sparse_v is 1e-06 and kv_bits is None, expected kv_bits too"),
        (
            {"max_kv_size": 9, "sink_size": 4, "speculative": 4},
            "max_kv_size is 9 and speculative 4, expected at least sink_size + speculative + 2 = "
            "10 rows",
        ),
        ({"max_kv_size": None, "heavy_size": 3}, "heavy_size is 3 and max_kv_size None, expected"),
        ({"max_kv_size": None, "recent_size": 3}, "recent_size is 3 and max_kv_size None"),
        ({"max_kv_size": None, "kv_bits": 8, "light_bits": 4}, "light_bits is 4 and max_kv_size N"),
        ({"max_kv_size": None, "kv_bits": 8, "dense_size": 4}, "dense_size is 4 and max_kv_size N"),
        (
            {"kv_bits": 8, "light_bits": 4, "recent_size": 1, "heavy_size": 251},
            "recent_size is 1 with light_bits, expected at least 2",
        ),
    ],
)
def test_errors_say_what_was_found_and_expected(settings, text):
    with pytest.raises(ValueError, match=r"^\[H2OConfig\]") as error:
        H2OConfig(**settings)
    assert text in str(error.value)


def test_a_cache_without_a_budget():
    config = H2OConfig(max_kv_size=None, kv_bits=8, sparse_v=1e-6)
    assert (config.max_kv_size, config.heavy_size, config.recent_size) == (None, None, None)
    assert config.dense_rows == 0
    assert H2OConfig(**dataclasses.asdict(config)) == config  # as files have it
    assert H2OConfig(max_kv_size=None, speculative=4).speculative == 4
    bounded = dataclasses.replace(config, max_kv_size=64)
    assert bounded == H2OConfig(max_kv_size=64, kv_bits=8, sparse_v=1e-6)


def test_mixed_precision_as_published_has_no_dense_rows():
    settings = {"kv_bits": 8, "light_bits": 4}
    assert H2OConfig(**settings, dense_size=0).dense_rows == 0
    assert H2OConfig(**settings, dense_size=0, recent_size=1, heavy_size=251).dense_rows == 0
    assert H2OConfig(**settings).dense_rows == 32


def test_drafts_need_room_beside_the_sinks():
    assert H2OConfig(max_kv_size=10, sink_size=4, speculative=4, evict_every=3).recent_size == 1


def test_unknown_preset():
    with pytest.raises(ValueError, match=r"\[H2OConfig.preset\] name is 'light', expected one of"):
        H2OConfig.preset("light")


def test_settings_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        H2OConfig().decay = 0.5


def test_the_decay_reaches_the_policy():
    assert policies.build(H2OConfig(policy="h2o-ema", decay=0.5)).decay == 0.5
