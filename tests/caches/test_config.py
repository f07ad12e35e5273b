"""H2OConfig: presets, resolution of sizes, errors."""

import dataclasses
import json
from pathlib import Path

import pytest

from mlx_h2o import Affine, Budget, Codes, Dense, H2OConfig, Mixed, SettingError, policies

WRONG = json.loads(Path(__file__).with_name("wrong_settings.json").read_text("ascii"))
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


@pytest.mark.parametrize(("settings", "text"), WRONG)
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


def test_values_of_few_bits_leave_the_newest_rows_of_a_cache_without_a_limit():
    few = {"max_kv_size": None, "kv_bits": 8, "v_bits": 4}
    same, none = (H2OConfig.of(**few, dense_size=size) for size in (8, 0))
    assert H2OConfig.of(**few) == same != none
    assert H2OConfig.of(max_kv_size=None, kv_bits=3).named()["dense_size"] == 8
    changes = {"v_bits": 5}, {"v_bits": None}, {"max_kv_size": 64}, {"preallocate": 64}
    for change in (*changes, {"kv_handed": "latents"}):
        assert not H2OConfig.of(**few | change).mixed
    with pytest.raises(ValueError, match="preallocate is 64, expected none with dense_size"):
        H2OConfig.of(**few, dense_size=8, preallocate=64)


def test_drafts_need_room_beside_the_sinks():
    assert H2OConfig.of(max_kv_size=10, sink_size=4, speculative=4, evict_every=3).recent_size == 1


def test_unknown_preset():
    for name in ("light", ["heavy"]):
        with pytest.raises(ValueError, match=r"^\[H2OConfig.preset\] name is .*, expected one of"):
            H2OConfig.preset(name)


def test_settings_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        H2OConfig().budget.sink_size = 8


def test_the_decay_reaches_the_policy():
    assert H2OConfig.of(policy="h2o-ema", decay=0.5).policy.decay == 0.5


MADE = {
    "dense": (H2OConfig(Budget(64)), {"max_kv_size": 64}),
    "affine": (H2OConfig(format=Affine(4, v_bits=8, kv_frame=False)),
               {"kv_bits": 4, "v_bits": 8, "kv_frame": False}),
    "newest rows": (H2OConfig(format=Affine(dense_size=8)), {"kv_bits": 8, "dense_size": 8}),
    "mixed": (H2OConfig(format=Mixed(8, 2)), {"kv_bits": 8, "light_bits": 2}),
    "codes": (H2OConfig(format=Codes("turbo3")), {"kv_format": "turbo3"}),
    "h2o": (H2OConfig(policy=policies.H2O(diversity=0.25, fold=False)),
            {"policy": "h2o", "diversity": 0.25, "fold": False}),
    "average": (H2OConfig(policy=policies.H2OEma(0.5)), {"policy": "h2o-ema", "decay": 0.5}),
    "a sample": (H2OConfig(policy=policies.Random(2**64 - 1)),
                 {"policy": "random", "random_seed": 2**64 - 1}),
    "of another policy": (H2OConfig(), {"decay": 0.5, "fold": False, "kv_group_size": 32}),
}  # fmt: skip


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
