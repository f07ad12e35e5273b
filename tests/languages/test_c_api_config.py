"""The settings in C: the same values as in Python's H2OConfig, and the same error messages."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from c_api import CError, Library
from mlx_h2o import H2OConfig
from sizes import examples

POLICIES = ("h2o", "h2o-ema", "window", "keydiff")
"""Policies of every language."""

SIZES = ("heavy_size", "recent_size", "evict_every")
PLAIN = ("max_kv_size", "sink_size", "speculative")
SHARES = ("diversity", "decay")
BITS = ("kv_bits", "v_bits")


def fill(library: Library, values: dict[str, Any]) -> tuple[Any, Any]:
    """A C struct with the defaults and ``values``, and what must live as long."""
    config = library.ffi.new("mlx_h2o_config*", library.c.mlx_h2o_config_new())
    policy = None
    parts = (config.budget, config.format, config.policy)
    for name, value in values.items():
        if name == "policy":
            config.policy.name = policy = library.ffi.new("char[]", value.encode())
            continue
        (part,) = (one for one in parts if hasattr(one, name))
        if name in (*SIZES, *BITS):
            setattr(part, name, {"value": value or 0, "has_value": value is not None})
        else:
            setattr(part, name, value or 0)
    return config, policy


def read(library: Library, config: Any) -> dict[str, Any]:
    found = {name: getattr(config.budget, name) for name in PLAIN}
    for name in SIZES:
        optional = getattr(config.budget, name)
        found[name] = optional.value if optional.has_value else None
    found["policy"] = library.ffi.string(config.policy.name).decode()
    return found


def outcome_of_c(library: Library, values: dict[str, Any]) -> Any:
    config, policy = fill(library, values)
    before = read(library, config)
    try:
        library.check(library.c.mlx_h2o_config_resolve(config))
    except CError as error:
        assert read(library, config) == before, "a refused struct was changed"
        return str(error)
    result = read(library, config)
    del policy  # the struct pointed to it until here
    return result


def outcome_of_python(make: Callable[..., H2OConfig], *given: Any, **values: Any) -> Any:
    try:
        config = make(*given, **values)
    except ValueError as error:
        return str(error)
    return {name: config.named()[name] for name in (*PLAIN, *SIZES, "policy")}


def test_the_defaults_are_pythons(library):
    assert outcome_of_c(library, {}) == outcome_of_python(H2OConfig.of)


INTS = st.integers(-3, 300) | st.sampled_from([2**31 - 1, -(2**31)])


@pytest.mark.examples
@given(
    values=st.fixed_dictionaries(
        {},
        optional={
            **dict.fromkeys(PLAIN, INTS),
            **dict.fromkeys(SIZES, st.none() | INTS),
            "context_size": st.none() | st.integers(-1, 9),
            "policy": st.sampled_from(POLICIES),
            **dict.fromkeys(SHARES, st.sampled_from([0.0, 0.5, 0.75, 1.0, 1.5, -0.25])),
            **dict.fromkeys(BITS, st.none() | st.integers(1, 9)),
            "kv_group_size": st.sampled_from([32, 64, 48]),
        },
    )
)
@example(values={"decay": 1.0})
@example(values={"kv_bits": 4, "v_bits": 8, "kv_group_size": 32})
@example(values={"kv_bits": 4, "v_bits": 7})
@example(values={"kv_bits": 4, "kv_group_size": 48})
@example(values={"max_kv_size": 9, "speculative": 4})
@example(values={"policy": "h2o"})
@example(values={"policy": "h2o", "max_kv_size": 100})
@example(values={"policy": "h2o", "max_kv_size": 20})
@example(values={"recent_size": 2**30 + 1})
@settings(max_examples=examples(400), deadline=None)
def test_any_settings_come_out_as_in_python(library, values):
    assert outcome_of_c(library, values) == outcome_of_python(H2OConfig.of, **values)


@pytest.mark.parametrize("name", ["", "lru", "%s%n", "snapkv"])
def test_other_policies_are_refused_by_name(library, name):
    known = ", ".join(POLICIES)
    text = f"[H2OConfig] policy is '{name}', expected one of: {known}."
    assert outcome_of_c(library, {"policy": name}) == text


def test_sizes_beyond_the_budget_are_named(library):
    text = outcome_of_c(library, {"max_kv_size": 64, "heavy_size": 40, "recent_size": 30})
    assert text == (
        "[H2OConfig] max_kv_size is 64, expected at least sink_size + heavy_size + recent_size = "
        "4 + 40 + 30 = 74."
    )


@pytest.mark.parametrize("name", ["heavy", "balanced", "recent", "light", ""])
@pytest.mark.parametrize("budget", [256, 64, 6, 5, 4, 0])
def test_presets_are_pythons(library, name, budget):
    config = library.ffi.new("mlx_h2o_config*")
    try:
        library.check(library.c.mlx_h2o_config_preset(config, name.encode(), budget))
        found: Any = read(library, config)
    except CError as error:
        found = str(error)
    assert found == outcome_of_python(H2OConfig.preset, name, budget)


def test_no_place_is_an_error(library):
    null = library.ffi.NULL
    with pytest.raises(CError, match=r"\[H2OConfig\] config is NULL"):
        library.check(library.c.mlx_h2o_config_resolve(null))
    with pytest.raises(CError, match=r"\[H2OConfig.preset\] res is NULL"):
        library.check(library.c.mlx_h2o_config_preset(null, b"heavy", 256))
    with pytest.raises(CError, match=r"name is '', expected one of: heavy, balanced, recent\."):
        config = library.ffi.new("mlx_h2o_config*")
        library.check(library.c.mlx_h2o_config_preset(config, null, 256))
