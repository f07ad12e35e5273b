"""Profiles: rows shared out over the layers, files, and models that they are not of."""

from __future__ import annotations

import copy
import json
import struct

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

import mlx_h2o
from mlx_h2o import H2OConfig, Profile, batch_generate, generate, make_prompt_cache
from mlx_h2o.lm.profile import fingerprint
from mlx_h2o.lm.prompt_cache import evicting_caches
from tiny_models import random_prompt, tiny_llama, tiny_qwen3, tiny_tokenizer

ROWS, SHARES, TOKENS = (10, 20, 40, 80, 160), (0.125, 0.5, 1.0), 320
FAR = [0.9, 0.8, 0.6, 0.3, 0.1]
NEAR = [0.002, 0.001, 0.0008, 0.0006, 0.0004]


def profile_of(*layers: list[float], model=None, best: int = 1, policy: str = "keydiff") -> Profile:
    """Layers by their losses at the best share; at the others they are twice as high."""
    loss = np.repeat(np.array(layers, np.float32)[:, :, None], len(SHARES), axis=2) * 2
    loss[:, :, best] /= 2
    about = {"model": "tiny", "fingerprint": "0", "policy": policy, "tokens": TOKENS}
    about |= {"sink_size": 4, "recent_size": 4}
    if model is not None:
        about |= {"model": "qwen3", "fingerprint": fingerprint(model)}
    return Profile(loss, ROWS, SHARES, about)


def rows_of(configs: list[H2OConfig]) -> list[int]:
    return [config.max_kv_size for config in configs]


def test_the_layer_that_loses_gets_the_rows():
    found = profile_of(NEAR, FAR, NEAR).share(3 * 40, H2OConfig())
    assert rows_of(found) == [10, 100, 10]
    assert {config.policy for config in found} == {"keydiff"}
    assert [config.recent_size for config in found] == [4, 48, 4]  # half of the free, at least 4


def test_a_layer_whose_best_is_all_recent_is_a_window():
    found = profile_of(NEAR, FAR, best=2).share(80, H2OConfig(kv_bits=8))
    assert {(c.policy, c.heavy_size, c.kv_bits) for c in found} == {("window", 0, 8)}
    assert all(c.recent_size == c.max_kv_size - 4 for c in found)
    # In small layers the least window is all there is, whatever the share.
    found = profile_of(NEAR, FAR, best=0).share(9 + 91, H2OConfig(sink_size=6))
    assert [c.policy for c in found] == ["window", "keydiff"]


def test_each_row_goes_where_it_gains_most():
    little, much = [0.04, 0.0, 0.0, 0.0, 0.0], [1.0, 0.97, 0.96, 0.96, 0.96]
    assert rows_of(profile_of(little, much).share(30, H2OConfig())) == [20, 10]
    assert rows_of(profile_of(little, FAR).share(30, H2OConfig())) == [10, 20]


def test_equal_layers_get_equal_rows_and_so_does_what_is_left():
    assert rows_of(profile_of(FAR, FAR, FAR).share(200, H2OConfig())) == [67, 67, 66]
    assert rows_of(profile_of(FAR, NEAR).share(1001, H2OConfig())) == [501, 500]
    assert rows_of(profile_of([0.0] * 5, [0.0] * 5).share(51, H2OConfig())) == [26, 25]
    assert rows_of(profile_of(FAR, NEAR).share(15, H2OConfig())) == [8, 7]  # below the measured
    assert rows_of(profile_of(NEAR, NEAR, FAR).share(29, H2OConfig())) == [10, 10, 9]


@settings(deadline=None)
@drawn(
    losses=st.lists(
        st.lists(st.floats(-0.5, 3, width=16), min_size=5, max_size=5), min_size=1, max_size=6
    ),
    more=st.integers(0, 900),
    sinks=st.integers(0, 12),
    speculative=st.integers(0, 4),
)
def test_shares_are_whole_and_least_and_convex(losses, more, sinks, speculative):
    config = H2OConfig(sink_size=sinks, speculative=speculative)
    least = sinks + (speculative + 2 if speculative else 1)
    profile = profile_of(*losses)
    total = least * len(losses) + more
    found = profile.share(total, config)
    assert sum(rows_of(found)) == total
    assert min(rows_of(found)) >= least
    assert all(c.sink_size + c.heavy_size + c.recent_size == c.max_kv_size for c in found)
    steps = [list(profile._steps(layer, least)) for layer in range(len(losses))]
    for edges, one in zip(steps, rows_of(found), strict=True):
        gains = [gain for gain, _ in edges]
        assert gains == sorted(gains, reverse=True) and min(gains) >= 0
        assert least + sum(rows for _, rows in edges) == TOKENS
        assert one >= min(ROWS[0], total // len(losses))
    further = rows_of(profile.share(total + 1, config))  # takes from a layer what rounding does
    assert all(b >= a - 1 for a, b in zip(rows_of(found), further, strict=True))


def test_the_hull_lies_below_what_was_measured():
    """A point above the line of its neighbours does not count."""
    steps = list(profile_of([1.0, 1.0, 0.25, 0.25, 0.04])._steps(0, 10))
    assert [rows for _, rows in steps] == [30, 120, 160]
    assert [gain for gain, _ in steps] == pytest.approx([0.75 / 30, 0.21 / 120, 0.04 / 160])


@pytest.mark.parametrize(
    ("total", "given", "least"),
    [
        (9, {}, 5),
        (17, {"speculative": 3}, 9),
        (20, {"kv_bits": 8, "dense_size": 6}, 11),
        (11, {"kv_bits": 8, "light_bits": 4}, 6),
    ],
)
def test_too_few_rows_are_refused(total, given, least):
    profile = profile_of(NEAR, FAR)
    with pytest.raises(ValueError, match=rf"found {total} rows for 2 layers, .* at least {least} "):
        profile.share(total, H2OConfig(max_kv_size=64, **given))
    assert sum(rows_of(profile.share(2 * least, H2OConfig(max_kv_size=64, **given)))) == 2 * least


def test_a_file_is_what_was_written(tmp_path):
    profile = profile_of(NEAR, FAR)
    file = tmp_path / "profile.bin"
    profile.save(file)
    found = Profile.load(file)
    np.testing.assert_array_equal(found.loss, profile.loss)
    assert (found.rows, found.shares, found.about) == (ROWS, SHARES, profile.about)
    assert [path.name for path in tmp_path.iterdir()] == ["profile.bin"]
    with pytest.raises(OSError):
        profile.save(tmp_path / "none" / "profile.bin")


def test_an_unfinished_file_is_only_read_to_go_on(tmp_path):
    profile = profile_of(NEAR, FAR)
    profile.loss[1, 3, 2] = np.nan
    profile.save(tmp_path / "file")
    with pytest.raises(ValueError, match="expected a finished calibration"):
        Profile.load(tmp_path / "file")
    assert np.isnan(Profile.load(tmp_path / "file", whole=False).loss).sum() == 1


def rewritten(file, arrays=None, about=None, entry="mlx_h2o_profile"):
    profile = profile_of(NEAR, FAR)
    found = {
        "loss": mx.array(profile.loss),
        "rows": mx.array(ROWS, mx.int32),
        "shares": mx.array(SHARES, mx.float32),
    }
    given = {"format": 1} | profile.about | (about or {})
    text = json.dumps({name: value for name, value in given.items() if value is not None})
    beside = file.with_suffix(".safetensors")
    arrays = {k: v for k, v in (found | (arrays or {})).items() if v is not None}
    mx.save_safetensors(str(beside), arrays, {entry: text})
    beside.rename(file)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"entry": "other"}, "is no profile"),
        ({"about": {"format": 2}}, "has format 2, expected 1"),
        ({"about": {"format": None}}, "is no profile"),
        ({"about": {"policy": "best"}}, "says .*best"),
        ({"about": {"policy": None}}, "is no profile"),
        ({"about": {"tokens": "many"}}, "says .*many"),
        ({"about": {"tokens": 160}}, "has rows"),
        ({"arrays": {"rows": mx.array([10, 20, 20, 80, 160], mx.int32)}}, "has rows"),
        ({"arrays": {"rows": mx.array([0, 20, 40, 80, 160], mx.int32)}}, "has rows"),
        ({"arrays": {"shares": mx.array([0.1, 0.5, 1.5])}}, "shares"),
        ({"arrays": {"shares": mx.array([0.1, mx.nan, 1.0])}}, "shares"),
        ({"arrays": {"rows": mx.array(ROWS, mx.float32)}}, "holds the arrays"),
        ({"arrays": {"shares": None}}, "holds the arrays"),
        ({"arrays": {"more": mx.array(1.0)}}, "holds the arrays"),
        ({"arrays": {"loss": mx.zeros((2, 5, 2))}}, "of shapes"),
        ({"arrays": {"loss": mx.zeros((0, 5, 3))}}, "of shapes"),
        ({"arrays": {"loss": mx.zeros((5, 3))}}, "of shapes"),
        ({"arrays": {"loss": mx.full((2, 5, 3), mx.inf)}}, "has no number"),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path, change, text):
    rewritten(tmp_path / "file")
    Profile.load(tmp_path / "file")
    rewritten(tmp_path / "file", **change)
    with pytest.raises(ValueError, match=rf"^\[Profile.load\] .*{text}"):
        Profile.load(tmp_path / "file")


def test_damaged_files_are_refused(tmp_path):
    file = tmp_path / "file"
    with pytest.raises(FileNotFoundError):
        Profile.load(file)
    profile_of(NEAR).save(file)
    whole = file.read_bytes()
    header = struct.pack("<Q", 2) + b"[]"
    longer = whole.replace(b"[1,5,3]", b"[7,5,3]")
    nameless = whole.replace(b'"dtype":"F32"', b'"dtyp_":"F32"')
    assert len({whole, longer, nameless}) == 3
    for content in (whole[:-3], whole[:40], b"", b"{}", header, longer, nameless):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"^\[Profile.load\]"):
            Profile.load(file)


def test_a_fingerprint_is_of_the_weights_whatever_floats_they_are_in():
    model = tiny_qwen3()
    found = fingerprint(model)
    assert found == fingerprint(tiny_qwen3())
    assert len({found, fingerprint(tiny_qwen3(seed=1)), fingerprint(tiny_llama())}) == 3
    half = tiny_qwen3()
    half.set_dtype(mx.bfloat16)
    wide = copy.deepcopy(half)
    wide.set_dtype(mx.float32)
    assert fingerprint(half) == fingerprint(wide) != found


@pytest.fixture(scope="module")
def model():
    return tiny_qwen3()


def test_caches_by_a_profile(model, tmp_path):
    profile = profile_of(NEAR, FAR, model=model)
    profile.save(tmp_path / "file")
    for form in (profile, tmp_path / "file", str(tmp_path / "file")):
        caches = make_prompt_cache(model, 40, profile=form, sink_size=2)
        assert [cache.config.max_kv_size for cache in caches] == [10, 70]
        assert {cache.config.policy for cache in caches} == {"keydiff"}
        assert all(cache.unequal_budgets for cache in caches)
    for config in (H2OConfig(max_kv_size=40), H2OConfig(max_kv_size=40, policy="keydiff")):
        assert rows_of([c.config for c in make_prompt_cache(model, config, profile=profile)]) == [
            10,
            70,
        ]
    assert len(make_prompt_cache(model, profile=profile, policy="keydiff")) == 2


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"budgets": [10, 20]}, "found profile and budgets"),
        ({"policy": "merge"}, "policy is 'merge', expected 'keydiff', of which profile is"),
        ({"max_kv_size": H2OConfig(policy="h2o")}, "policy is 'h2o', expected 'keydiff'"),
        ({"max_kv_size": 4}, "sink_size is 4, expected fewer than max_kv_size = 4"),
        ({"max_kv_size": H2OConfig(max_kv_size=None)}, "max_kv_size None, expected the mean"),
    ],
)
def test_what_does_not_go_with_a_profile(model, given, text):
    profile = profile_of(NEAR, FAR, model=model)
    with pytest.raises(ValueError, match=text):
        make_prompt_cache(model, profile=profile, **given)


def test_a_profile_of_another_model_is_refused(model):
    for other in (tiny_qwen3(seed=1), tiny_llama()):
        with pytest.raises(ValueError, match=r"\[profile\] profile is of the model qwen3 \(.*\) "
                           r"with 2 evicting layers, expected \w+ \(.*\) with 2"):  # fmt: skip
            make_prompt_cache(other, 40, profile=profile_of(NEAR, FAR, model=model))
    with pytest.raises(ValueError, match="with 3 evicting layers, expected .* with 2"):
        make_prompt_cache(model, 40, profile=profile_of(NEAR, FAR, FAR, model=model))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["keydiff", "merge"])
def test_generation_and_batches_by_a_profile(model, policy, tmp_path):
    file = tmp_path / "profile"
    profile_of(NEAR, FAR, model=model, policy=policy).save(file)
    given = {"profile": file, "max_kv_size": 24, "prefill_step_size": 8}
    prompts = [random_prompt(length, seed=length) for length in (60, 3, 33)]
    found = batch_generate(
        model, tiny_tokenizer(), prompts, max_tokens=30, return_token_ids=True,
        return_prompt_caches=True, **given,
    )  # fmt: skip
    for prompt, tokens, caches in zip(prompts, found.token_ids, found.caches, strict=True):
        alone = mlx_h2o.stream_generate(model, tiny_tokenizer(), prompt, max_tokens=30, **given)
        assert tokens == [one.token for one in alone][:30]
        assert [cache.config.policy for cache in caches] == [policy] * 2
        assert [cache.config.max_kv_size for cache in caches] == [10, 38]
        assert all(cache.unequal_budgets for cache in caches)
    assert generate(model, tiny_tokenizer(), prompts[0], max_tokens=3, **given)


def test_a_draft_model_gets_no_share_of_a_profile(model):
    profile = profile_of(NEAR, FAR, model=model)
    given = {"profile": profile, "max_kv_size": 30, "draft_model": tiny_llama()}
    text = generate(model, tiny_tokenizer(), random_prompt(60), max_tokens=5, **given)
    assert len(text.split()) == 5


def test_a_profile_serves_packed_rows(model):
    wide = tiny_qwen3(head_dim=32)
    profile = profile_of(NEAR, FAR, model=wide)
    caches = make_prompt_cache(wide, 40, profile=profile, kv_bits=8, kv_group_size=32)
    generate(wide, tiny_tokenizer(), random_prompt(60), max_tokens=9, prompt_cache=caches)
    assert [cache.size() for cache in evicting_caches(caches)] == [10, 69]
