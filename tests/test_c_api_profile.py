"""Rows shared out by a profile in C, and the fingerprint of weights: what Python says."""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

import c_api
import profile_data
from c_api import CError, Handle, Library
from mlx_h2o import H2OConfig, Profile
from mlx_h2o.lm.profile import fingerprint
from sizes import examples
from test_c_api_config import fill, read
from tiny_models import tiny_llama, tiny_qwen3

NAMES = ("max_kv_size", "sink_size", "heavy_size", "recent_size", "policy", "evict_every", "decay")


@pytest.fixture(scope="module")
def library() -> Library:
    return c_api.required()


def struct(library: Library, profile: Profile) -> tuple[Any, Any]:
    """The C struct, and what must live as long."""
    ffi, found = library.ffi, library.ffi.new("mlx_h2o_profile*")
    kept = [
        ffi.new("float[]", profile.loss.ravel().tolist()),
        ffi.new("int[]", list(profile.rows)),
        ffi.new("float[]", list(profile.shares)),
        ffi.new("char[]", profile.policy.encode()),
    ]
    found.loss, found.rows, found.shares, found.policy = kept
    found.layers, found.row_count, found.share_count = profile.loss.shape
    found.tokens, found.recent_size = profile.about["tokens"], profile.about["recent_size"]
    return found, kept


def share(library: Library, profile: Profile, total: int, given: dict[str, Any]) -> list[Any]:
    config, policy = fill(library, given)
    of, kept = struct(library, profile)
    places = library.ffi.new("mlx_h2o_config[]", len(profile.loss))
    library.check(library.c.mlx_h2o_profile_share(places, of[0], total, config[0]))
    del kept, policy
    return [read(library, library.ffi.addressof(places, n)) for n in range(len(profile.loss))]


def test_the_committed_files_are_what_python_says_today():
    saved = Profile.load(profile_data.FOLDER / "profile.safetensors")
    np.testing.assert_array_equal(saved.loss, profile_data.profile().loss)
    assert saved.about == profile_data.profile().about
    text = (profile_data.FOLDER / "shares.json").read_text("utf-8")
    assert json.loads(text) == profile_data.shares()
    policies = {one["policy"] for shared in profile_data.shares() for one in shared["layers"]}
    assert policies == {"merge", "window"}


@pytest.mark.parametrize("shared", profile_data.shares(), ids=lambda one: str(one["total_rows"]))
def test_rows_are_shared_as_in_python(library, shared):
    found = share(library, profile_data.profile(), shared["total_rows"], shared["settings"])
    assert [{name: one[name] for name in shared["layers"][0]} for one in found] == shared["layers"]


@pytest.mark.examples
@given(
    losses=st.lists(
        st.lists(st.floats(-0.5, 3, width=16), min_size=12, max_size=12), min_size=1, max_size=6
    ),
    more=st.integers(0, 1500),
    sinks=st.integers(0, 12),
    recent=st.integers(0, 12),
)
@settings(max_examples=examples(300), deadline=None)
def test_any_profile_shares_as_in_python(library, losses, more, sinks, recent):
    of = profile_data.profile()
    loss = np.array(losses, np.float32).reshape(-1, 4, 3)
    profile = Profile(loss, of.rows, of.shares, of.about | {"recent_size": recent})
    total = (sinks + 1) * len(loss) + more
    expected = profile.share(total, H2OConfig(sink_size=sinks))
    found = share(library, profile, total, {"sink_size": sinks})
    assert [[one[name] for name in NAMES] for one in found] == [
        [getattr(one, name) for name in NAMES] for one in expected
    ]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"loss": None}, "loss, rows or shares are NULL, expected numbers."),
        ({"layers": 0}, "found 0 layers, 4 numbers of rows and 3 shares, expected at least 1"),
        ({"loss": np.nan}, "there is no number for some layers, expected a finished calibration."),
        ({"loss": np.inf}, "there is no number for some layers"),
        (
            {"tokens": 160},
            "rows hold 160.0, expected numbers that ascend, above 0 and below 160.0.",
        ),
        ({"rows": 30}, "rows hold 30.0, expected numbers that ascend"),
        ({"shares": 0.0}, "shares hold 0.0, expected numbers that ascend"),
        ({"policy": None}, "policy is '', expected one of: h2o, "),
    ],
)
def test_what_is_no_profile_is_refused(library, change, text):
    of, kept = struct(library, profile_data.profile())
    ((name, value),) = change.items()
    if value is None:
        setattr(of, name, library.ffi.NULL)
    elif name in ("loss", "rows", "shares"):
        kept[("loss", "rows", "shares").index(name)][0] = value
    else:
        setattr(of, name, value)
    places = library.ffi.new("mlx_h2o_config[]", 5)
    with pytest.raises(CError, match=r"^\[profile\] ") as caught:
        library.check(library.c.mlx_h2o_profile_check(of[0]))
    assert text in str(caught.value)
    with pytest.raises(CError) as again:
        given = library.c.mlx_h2o_config_new()
        library.check(library.c.mlx_h2o_profile_share(places, of[0], 600, given))
    assert str(again.value) == str(caught.value)
    assert all(place.max_kv_size == 0 for place in places)


def test_settings_that_do_not_fit_are_refused(library):
    of = profile_data.profile()
    with pytest.raises(ValueError) as expected:
        of.share(24, H2OConfig())
    with pytest.raises(CError) as found:
        share(library, of, 24, {})
    assert str(found.value) == str(expected.value)
    with pytest.raises(CError, match=r"\[profile\] sink_size is -1, expected 0 or more\."):
        share(library, of, 600, {"sink_size": -1})
    with pytest.raises(CError, match=r"\[H2OConfig\] decay is 1"):
        share(library, of, 600, {"decay": 1.0})
    with pytest.raises(CError, match=r"\[profile\] res is NULL"):
        profile, kept = struct(library, of)
        given = library.c.mlx_h2o_config_new()
        library.check(library.c.mlx_h2o_profile_share(library.ffi.NULL, profile[0], 600, given))
    del kept


def fingerprint_in_c(library: Library, parameters: dict[str, mx.array]) -> str:
    c, ffi = library.c, library.ffi
    parameter_map = Handle(library, "mlx_map_string_to_array", c.mlx_map_string_to_array_new())
    for name, array in parameters.items():
        handle = library.array(array)
        library.check(
            c.mlx_map_string_to_array_insert(parameter_map.value, name.encode(), handle.value)
        )
    text = Handle(library, "mlx_string")
    library.check(c.mlx_h2o_fingerprint(text.pointer, parameter_map.value, library.stream.value))
    return ffi.string(c.mlx_string_data(text.value)).decode()


def test_a_fingerprint_is_pythons(library):
    assert (
        fingerprint_in_c(library, profile_data.weights())
        == (profile_data.profile().about["fingerprint"])
    )
    for model in (tiny_qwen3(), tiny_llama()):
        parameters = dict(tree_flatten(model.parameters()))
        assert fingerprint_in_c(library, parameters) == fingerprint(model)
        halves = {name: array.astype(mx.float16) for name, array in parameters.items()}
        wide = {name: array.astype(mx.float32) for name, array in halves.items()}
        assert fingerprint_in_c(library, halves) == fingerprint_in_c(library, wide)
    with pytest.raises(CError, match=r"^\[fingerprint\] a parameter is called a'b, expected print"):
        fingerprint_in_c(library, {"a'b": mx.zeros(2)})
