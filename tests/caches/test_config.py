"""H2OConfig: presets, resolution of sizes, errors."""

from __future__ import annotations

import dataclasses

import pytest

from mlx_h2o import Affine, Budget, Codes, Dense, H2OConfig, Mixed, SettingError, policies

MIXED = {"kv_bits": 8, "light_bits": 4}
CODES = {"kv_format": "turbo3"}
PRESETS = [("heavy", 4, 128, 124), ("balanced", 4, 64, 188), ("recent", 4, 32, 220)]


@pytest.mark.parametrize(("name", "sink", "heavy", "recent"), PRESETS)
def test_presets_are_those_of_the_paper(name, sink, heavy, recent):
    config = H2OConfig.preset(name)
    sizes = (config.budget.sink_size, config.budget.heavy_size, config.recent_size)
    assert sizes == (sink, heavy, recent)
    assert (config.max_kv_size, config.policy.name) == (256, "h2o-ema")
    other = H2OConfig.preset(name, 1024, policy="window")
    assert (other.budget.heavy_size, other.policy.name) == (4 * heavy, "window")


def test_the_default_has_the_sizes_of_the_heavy_preset():
    assert H2OConfig() == H2OConfig.preset("heavy", policy="keydiff")
    assert policies.H2OEma().decay == 0.95
    assert H2OConfig.of(max_kv_size=64) == H2OConfig.preset("heavy", 64, policy="keydiff")


@pytest.mark.parametrize("max_kv_size", [5, 6, 7, 8, 9, 31, 32, 33, 255, 257, 4096])
def test_sizes_fill_the_budget(max_kv_size):
    for config in (H2OConfig.preset(name, max_kv_size) for name, *_ in PRESETS):
        assert config.protected + config.budget.heavy_size + config.recent_size == max_kv_size
        assert config.recent_size >= 1


def test_recent_grows_to_fill():
    assert H2OConfig.of(max_kv_size=64, heavy_size=10, recent_size=10).recent_size == 50


def test_what_is_not_given_adapts():
    assert H2OConfig.of(max_kv_size=64, recent_size=50).budget.heavy_size == 10
    assert H2OConfig.of(max_kv_size=64, heavy_size=60).recent_size == 0
    assert H2OConfig.of(max_kv_size=1, sink_size=0).recent_size == 1


def test_more_than_the_budget_is_an_error():
    with pytest.raises(ValueError, match=r"^\[H2OConfig\] max_kv_size is 256.*4 \+ 128 \+ 125 "):
        H2OConfig.of(heavy_size=128, recent_size=125)
    with pytest.raises(ValueError, match="max_kv_size is 64.* sink_size .* = 4 \\+ 61 \\+ 0 = 65"):
        H2OConfig.of(max_kv_size=64, heavy_size=61)
    with pytest.raises(ValueError, match="sink_size is 4.*fewer than max_kv_size = 4"):
        H2OConfig.of(max_kv_size=4)


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
        ({"fold": None}, "fold is None, expected a bool"),
        ({"random_seed": -1}, "random_seed is -1, expected an int of at least 0"),
        ({"random_seed": 2**64}, f"random_seed is {2**64}, expected at most {2**64 - 1}"),
        ({"speculative": -1}, "speculative is -1, expected an int"),
        ({"context_size": -1}, "context_size is -1, expected an int of at least 0"),
        ({"context_size": 2.5}, "context_size is 2.5, expected an int"),
        ({"context_size": True}, "context_size is True, expected an int"),
        ({"kv_frame": 1}, "kv_frame is 1, expected a bool"),
        ({"kv_bits": 8, "kv_frame": None}, "kv_frame is None, expected a bool"),
        ({"kv_bits": 7}, "kv_bits is 7, expected one of"),
        ({"kv_bits": 8, "sparse_v": 1}, "sparse_v is 1, expected a number of at least 0, below 1"),
        ({"kv_bits": 8, "sparse_v": -1e-6}, "sparse_v is -1e-06, expected a number"),
        ({"kv_bits": 8, "sparse_v": float("nan")}, "sparse_v is nan"),
        ({"kv_bits": 8, "sparse_v": "1e-6"}, "sparse_v is '1e-6'"),
        ({"kv_bits": 8, "sparse_v": None}, "sparse_v is None"),
        ({"kv_bits": 8, "sparse_v": False}, "sparse_v is False"),
        ({"sparse_v": 1e-6}, "sparse_v is 1e-06, expected kv_bits too"),
        (
            {"max_kv_size": 9, "sink_size": 4, "speculative": 4},
            "max_kv_size is 9, expected at least sink_size + speculative + 2 = 10.",
        ),
        ({"max_kv_size": None, "heavy_size": 3}, "heavy_size is 3, expected a max_kv_size too"),
        ({"max_kv_size": None, "recent_size": 3}, "recent_size is 3, expected a max_kv_size too"),
        ({"max_kv_size": None, "kv_bits": 8, "light_bits": 4}, "light_bits is 4, expected a max"),
        (
            {"kv_bits": 8, "light_bits": 4, "recent_size": 1, "heavy_size": 251},
            "recent_size is 1, expected at least 2 with light_bits",
        ),
        (
            {"max_kv_size": None, "preallocate": True},
            "preallocate is True, expected a number of rows",
        ),
        ({"preallocate": -1}, "preallocate is -1"),
        ({"preallocate": "all"}, "preallocate is 'all'"),
        (MIXED | {"preallocate": True}, "preallocate is True, expected none with light_bits"),
        (MIXED | {"light_bits": 3}, "light_bits is 3, expected one of"),
        (MIXED | {"kv_bits": 6}, "kv_bits is 6, expected 4 or 8, and more than light_bits"),
        (MIXED | {"kv_bits": 4}, "kv_bits is 4, expected 4 or 8, and more than light_bits"),
        (MIXED | {"v_bits": 4}, "v_bits is 4, expected none with light_bits"),
        (MIXED | {"kv_bits": None}, "light_bits is 4, expected kv_bits too"),
        ({"dense_size": 4}, "dense_size is 4, expected kv_bits too"),
        ({"kv_bits": 8, "dense_size": -1}, "dense_size is -1"),
        (
            {"kv_bits": 8, "dense_size": 64, "recent_size": 64, "heavy_size": 188},
            "dense_size is 64, expected 0 to 63: fewer than recent_size = 64",
        ),
        ({"kv_bits": True}, "kv_bits is True"),
        ({"v_bits": 4}, "v_bits is 4, expected kv_bits too"),
        ({"kv_bits": 8, "v_bits": 1}, "v_bits is 1"),
        ({"kv_group_size": 48}, "kv_group_size is 48, expected one of (32, 64, 128)"),
        ({"kv_bits": 8, "kv_group_size": 48}, "kv_group_size is 48, expected one of"),
        ({"kv_format": "turbo5"}, "kv_format is 'turbo5', expected one of: turbo2, turbo3"),
        (CODES | {"kv_bits": 4}, "kv_bits is 4, expected none with kv_format"),
        (CODES | {"light_bits": 2}, "light_bits is 2, expected none with kv_format"),
        (CODES | {"dense_size": 4}, "dense_size is 4, expected none with kv_format"),
        (CODES | {"kv_handed": "latents"}, "expected kv_bits for latent attention"),
        ({"diversity": 1.5}, "diversity is 1.5, expected a number from 0 to 1"),
        ({"nosuch": 1}, "unknown settings ['nosuch'], expected some of: max_kv_size, "),
    ],
)
def test_errors_say_what_was_found_and_expected(settings, text):
    with pytest.raises(ValueError, match=r"^\[H2OConfig\]") as error:
        H2OConfig.of(**settings)
    assert text in str(error.value)


def test_a_cache_without_a_budget():
    config = H2OConfig.of(max_kv_size=None, kv_bits=8, sparse_v=1e-6)
    assert (config.max_kv_size, config.budget.heavy_size, config.recent_size) == (None, None, None)
    assert config.dense_rows == 0
    assert H2OConfig.of(**config.named()) == config  # as files have it
    assert H2OConfig.of(max_kv_size=None, speculative=4).speculative == 4
    bounded = config.with_budget(max_kv_size=64)
    assert bounded == H2OConfig.of(max_kv_size=64, kv_bits=8, sparse_v=1e-6)


def test_mixed_precision_as_published_has_no_dense_rows():
    settings = {"kv_bits": 8, "light_bits": 4}
    assert H2OConfig.of(**settings, dense_size=0).dense_rows == 0
    assert H2OConfig.of(**settings, dense_size=0, recent_size=1, heavy_size=251).dense_rows == 0
    assert H2OConfig.of(**settings).dense_rows == 32
    assert H2OConfig.of(**settings, max_kv_size=16).dense_rows == 3
    assert H2OConfig.of(kv_bits=8, v_bits=4).dense_rows == 0


def test_drafts_need_room_beside_the_sinks():
    assert H2OConfig.of(max_kv_size=10, sink_size=4, speculative=4, evict_every=3).recent_size == 1


def test_unknown_preset():
    with pytest.raises(ValueError, match=r"\[H2OConfig.preset\] name is 'light', expected one of"):
        H2OConfig.preset("light")


def test_settings_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        H2OConfig().budget.sink_size = 8


def test_the_decay_reaches_the_policy():
    assert H2OConfig.of(policy="h2o-ema", decay=0.5).policy.decay == 0.5


MADE = {
    "dense": (H2OConfig(Budget(64)), {"max_kv_size": 64}),
    "affine": (
        H2OConfig(format=Affine(4, v_bits=8, kv_frame=False)),
        {"kv_bits": 4, "v_bits": 8, "kv_frame": False},
    ),
    "newest rows": (H2OConfig(format=Affine(dense_size=8)), {"kv_bits": 8, "dense_size": 8}),
    "mixed": (H2OConfig(format=Mixed(8, 2)), {"kv_bits": 8, "light_bits": 2}),
    "codes": (H2OConfig(format=Codes("turbo3")), {"kv_format": "turbo3"}),
    "h2o": (
        H2OConfig(policy=policies.H2O(diversity=0.25, fold=False)),
        {"policy": "h2o", "diversity": 0.25, "fold": False},
    ),
    "average": (H2OConfig(policy=policies.H2OEma(0.5)), {"policy": "h2o-ema", "decay": 0.5}),
    "a sample": (
        H2OConfig(policy=policies.Random(2**64 - 1)),
        {"policy": "random", "random_seed": 2**64 - 1},
    ),
    "of another policy": (H2OConfig(), {"decay": 0.5, "fold": False, "kv_group_size": 32}),
}


@pytest.mark.parametrize("kind", MADE)
def test_names_make_the_same_values(kind):
    config, named = MADE[kind]
    assert H2OConfig.of(**named) == config == H2OConfig.of(**config.named())
    assert hash(H2OConfig.of(**named)) == hash(config)
    assert isinstance(config.format, Dense) is not config.packs


@pytest.mark.parametrize(("place", "part"), [*enumerate(("budget", "format", "policy"))])
def test_another_value_in_the_place_of_a_part(place, part):
    given = [Budget(), Dense(), policies.Window()]
    given[place] = 64
    with pytest.raises(SettingError, match=f"{part} is 64, expected a {part}, or H2OConfig.of"):
        H2OConfig(*given)


def test_an_error_names_settings_as_it_is_asked_to():
    with pytest.raises(SettingError) as raised:
        Budget(8, heavy_size=9)
    error = raised.value
    assert (error.name, error.found, error.operation) == ("max_kv_size", 8, "H2OConfig")
    told = error.told(str.upper)
    sizes = "SINK_SIZE + HEAVY_SIZE + RECENT_SIZE = 4 + 9 + 0 = 13"
    assert told == f"MAX_KV_SIZE is 8, expected at least {sizes}."
    assert str(error).startswith("[H2OConfig] max_kv_size is 8, expected at least sink_size + ")
