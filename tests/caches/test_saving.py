"""Prompt caches in files: what is restored, what is refused, and that nothing is done by halves."""

import json
import sys

import mlx.core as mx
import mlx_lm.models.cache as mlx_lm_cache
import numpy as np
import pytest

from cache_checks import filled, same_states
from mlx_h2o import H2OKVCache, generate, make_prompt_cache, routing
from mlx_h2o.caches.handed_out import EachLayersMask
from mlx_h2o.lm.files import UNKNOWN, write_checksum
from mlx_h2o.lm.models import fingerprint
from mlx_h2o.lm.saving import FORMAT, load_prompt_cache, save_prompt_cache
from tiny_models import random_prompt, tiny_llama, tiny_qwen3, tiny_tokenizer

pytestmark = [pytest.mark.downstream, pytest.mark.usefixtures("mlx_lm_stays_as_it_is")]

POLICIES = ("h2o-ema", "window", "keydiff")


@pytest.fixture
def model():
    return tiny_qwen3()


@pytest.fixture
def saved(model, tmp_path):
    """A file of caches that have evicted, and the caches."""
    caches = make_prompt_cache(model, 16)
    generate(model, tiny_tokenizer(), random_prompt(30), max_tokens=8, prompt_cache=caches)
    file = tmp_path / "cache.safetensors"
    save_prompt_cache(file, caches, {"note": "hello"}, model=model)
    return file, caches


def refused(file, said, **given) -> None:
    """Check that a file is not loaded, and that the error says why."""
    with pytest.raises(ValueError, match=said):
        load_prompt_cache(file, **given)


def test_what_was_saved_comes_back(model, saved):
    file, caches = saved
    loaded, metadata = load_prompt_cache(file, return_metadata=True, model=model)
    assert metadata == {"note": "hello"}
    same_states(loaded, caches)
    prompt = random_prompt(5, seed=1)
    texts = [
        generate(model, tiny_tokenizer(), prompt, max_tokens=20, prompt_cache=found)
        for found in (caches, loaded)
    ]
    assert texts[0] == texts[1]


def test_caches_of_other_kinds_are_saved_beside_ours(tmp_path):
    cache, _ = filled()
    other = mlx_lm_cache.RotatingKVCache(max_size=8)
    other.update_and_fetch(mx.ones((1, 1, 3, 4)), mx.ones((1, 1, 3, 4)))
    pair = mlx_lm_cache.CacheList(H2OKVCache.from_state(cache.state), mlx_lm_cache.KVCache())
    pair[1].update_and_fetch(mx.ones((1, 1, 3, 4)), mx.ones((1, 1, 3, 4)))
    file = tmp_path / "mixed.safetensors"
    save_prompt_cache(file, [cache, other, pair])
    loaded = load_prompt_cache(file)
    assert [type(one).__name__ for one in loaded] == ["H2OKVCache", "RotatingKVCache", "CacheList"]
    same_states([loaded[2][0]], [cache])
    assert loaded[2][1].offset == 3


def test_mlx_lm_refuses_our_files_by_the_name_of_the_class(model, saved):
    with routing(model), pytest.raises(KeyError, match="H2OKVCache"):
        mlx_lm_cache.load_prompt_cache(str(saved[0]))


def test_a_file_without_caches_that_evict_is_left_to_mlx_lm(tmp_path):
    cache = mlx_lm_cache.KVCache()
    cache.update_and_fetch(mx.ones((1, 1, 3, 4)), mx.ones((1, 1, 3, 4)))
    file = str(tmp_path / "theirs.safetensors")
    mlx_lm_cache.save_prompt_cache(file, [cache], {"a": "b"})
    refused(file, "holds no cache that evicts")


# Files that are not what they should be


@pytest.mark.matrix(3)
@pytest.mark.parametrize("left", [0, 7, 8, 100, -1, -1000])
def test_truncated_files_are_refused(saved, left):
    file, _ = saved
    whole = file.read_bytes()
    message = r"^\[load_prompt_cache\] .*cache.safetensors is damaged or no safetensors file"
    for damaged in (whole[:left], whole + b"\0"):
        file.write_bytes(damaged)
        refused(file, message)


@pytest.mark.parametrize("part", range(8))
def test_any_flipped_bit_is_noticed(saved, part):
    file, caches = saved
    whole = file.read_bytes()
    entry = whole.index(b'"0.mlx_h2o"')
    named = range(entry, whole.index(b"checksum", entry) + len("checksum"))
    for place in range(part, len(whole), 8 * 37):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        file.write_bytes(damaged)
        if place not in named:  # else it is a file that mlx_lm wrote, or one without a checksum
            refused(file, r"^\[load_prompt_cache\]")
    file.write_bytes(whole)
    same_states(caches, load_prompt_cache(file))


def test_other_files_are_refused(tmp_path):
    text = tmp_path / "text.safetensors"
    text.write_text("no arrays in here, only a few words that are longer than a header")
    refused(text, "is damaged or no safetensors file")
    mx.save_safetensors(str(text), {"weight": mx.ones(3)})
    refused(text, "is not a prompt cache")
    (tmp_path / "device.safetensors").symlink_to("/dev/zero")
    refused(tmp_path / "device.safetensors", r"device\.safetensors is .* a device or a pipe")
    with pytest.raises(FileNotFoundError):
        load_prompt_cache(tmp_path / "missing.safetensors")


def rewritten(file, change):
    """The same arrays with other texts, and a checksum that fits."""
    arrays, texts = mx.load(str(file), return_metadata=True)
    mx.eval(arrays)
    change(texts)
    entry = texts.get("0.mlx_h2o", "")
    checked = '"checksum"' in entry
    if checked:
        texts["0.mlx_h2o"] = json.dumps(json.loads(entry) | {"checksum": UNKNOWN})
    mx.save_safetensors(str(file), arrays, texts)
    if checked:
        write_checksum(file)


def test_files_of_a_later_format_are_refused(saved):
    file, _ = saved
    about = json.dumps({"format": FORMAT + 1, "version": "9.0"})
    rewritten(file, lambda texts: texts.update({"0.mlx_h2o": about}))
    refused(file, f"has format {FORMAT + 1}, written by mlx_h2o 9.0: expected at most {FORMAT}")
    rewritten(file, lambda texts: texts.update({"0.mlx_h2o": "{"}))
    refused(file, "has a damaged entry 'mlx_h2o'")


def unequal_caches(model):
    caches = make_prompt_cache(model, budgets=[12, 30])
    generate(model, tiny_tokenizer(), random_prompt(40), max_tokens=3, prompt_cache=caches)
    return caches


def each_has_its_own_mask(caches) -> None:
    for cache in caches:
        assert cache.unequal_budgets
        masks = cache.make_mask(5, return_array=True), cache.merge([cache]).make_mask(1)
        assert {type(mask) for mask in masks} == {EachLayersMask}


def test_unequal_budgets_are_still_known_after_saving(model, tmp_path):
    caches = unequal_caches(model)
    file = tmp_path / "cache.safetensors"
    save_prompt_cache(file, caches, model=model)
    loaded = load_prompt_cache(file, model=model)
    same_states(loaded, caches)
    each_has_its_own_mask(loaded)
    empty = make_prompt_cache(model, budgets=[12, 30])
    each_has_its_own_mask([cache.to_quantized(32, 8) for cache in empty])
    mlx_lm_cache.save_prompt_cache(str(file), caches)
    each_has_its_own_mask(load_prompt_cache(str(file)))


def test_a_file_that_does_not_say_that_budgets_are_unequal(model, tmp_path):
    file = tmp_path / "unequal.safetensors"
    unequal = unequal_caches(model)
    for cache in unequal:  # as it was written before there was the mark
        cache.unequal_budgets = False
    save_prompt_cache(file, unequal)
    each_has_its_own_mask(load_prompt_cache(file))


@pytest.mark.parametrize(
    "settings", [{"prefix_size": 8}, {"context_size": 0}, {"context_size": 40}]
)
def test_settings_of_the_budget_come_back(settings, model, tmp_path):
    caches = make_prompt_cache(model, 32, **settings)
    save_prompt_cache(tmp_path / "file.safetensors", caches)
    loaded = load_prompt_cache(tmp_path / "file.safetensors")
    assert loaded[0].config == caches[0].config and not loaded[0].unequal_budgets


def test_unknown_classes_are_refused(saved):
    file, _ = saved
    rewritten(file, lambda texts: texts.update({"1.0": "TurboKVCache"}))
    refused(file, "holds a 'TurboKVCache', expected caches of mlx_lm and")
    rewritten(file, lambda texts: texts.update({"1.0": "KVCache"}))
    refused(file, "cannot be read: ")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"temperature": 3}, "temperature"),
        ({"turbo_guard": 1}, "turbo_guard is 1, expected 0: this setting of earlier versions is"),
        ({"turbo_guard": 0}, ""),
        ({"shared_heads": True}, "shared_heads is True, expected False: this setting of earlier"),
        ({"shared_heads": False}, ""),
    ],
)
def test_settings_of_another_version(saved, monkeypatch, settings, said):
    """Unknown settings are refused, except those that changed nothing."""
    file, caches = saved
    state = caches[0].state
    given = json.dumps(json.loads(state[-1]) | settings)
    monkeypatch.setattr(H2OKVCache, "state", property(lambda self: (*state[:-1], given)))
    save_prompt_cache(file, caches)
    monkeypatch.undo()
    if not said:
        assert load_prompt_cache(file)[0].config == caches[0].config
        return
    refused(file, f"cannot be read: .*{said}")


def test_caches_of_another_model_are_refused(saved, tmp_path):
    file, caches = saved
    refused(file, "is of the model qwen3, expected llama", model=tiny_llama())
    refused(file, "holds 2 layers, expected 3 as qwen3 has", model=tiny_qwen3(layers=3))
    refused(file, "qwen3 model with num_attention_heads = 4, expected 8", model=tiny_qwen3(heads=8))
    other = tiny_qwen3()
    other.args.rope_theta *= 2
    refused(file, "is of a qwen3 model with rope_theta = ", model=other)
    unknown = tmp_path / "unknown.safetensors"
    other.set_dtype(mx.float16)
    save_prompt_cache(unknown, caches, model=other)
    other.set_dtype(mx.float32)  # the same numbers, and rows of another kind
    refused(unknown, 'dtypes = .*float16"], expected .*float32"]', model=other)
    save_prompt_cache(unknown, caches)  # only the names of the caches tell
    assert len(load_prompt_cache(unknown, model=tiny_qwen3(heads=8))) == 2
    refused(unknown, "is of the model qwen3, expected llama", model=tiny_llama())


def test_files_of_earlier_versions_say_less_of_their_model(model, saved):
    """Its fingerprint alone, and before that 16 digits of the shapes of its weights."""
    file, caches = saved
    for told in ("0123456789abcdef", fingerprint(model), "0" * 32):
        about = {"format": FORMAT, "model": "qwen3", "fingerprint": told}
        rewritten(file, lambda texts, about=about: texts.update({"0.mlx_h2o": json.dumps(about)}))
        if told != "0" * 32:
            assert len(load_prompt_cache(file, model=model)) == len(caches)
    refused(file, 'fingerprint of weights = "0', model=model)


# Saving


@pytest.mark.parametrize(
    ("caches", "metadata", "text"),
    [
        ([], {}, "found no caches, expected one per layer"),
        (np.int64(3), {}, "found a int64 for caches, expected one per layer"),
        ([H2OKVCache()], {"a": 1}, r"metadata holds \['a'\], expected texts"),
        ([H2OKVCache()], {"a.b": "c"}, r"metadata holds \['a.b'\]"),
        ([H2OKVCache()], {"mlx_h2o": "c"}, r"metadata holds \['mlx_h2o'\]"),
        ([H2OKVCache(), 3], {}, "layer 1 is a int, expected a cache with a state"),
    ],
)
def test_what_cannot_be_saved_is_refused(caches, metadata, text, tmp_path):
    with pytest.raises(ValueError, match=rf"^\[save_prompt_cache\] .*{text}"):
        save_prompt_cache(tmp_path / "cache.safetensors", caches, metadata)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_leaves_the_old_file(saved, monkeypatch):
    file, caches = saved
    before = file.read_bytes()

    def fails(name, *_):
        with open(name, "wb") as half:
            half.write(before[:100])
        raise OSError("no space left")

    monkeypatch.setattr(sys.modules["mlx.core"], "save_safetensors", fails)
    with pytest.raises(OSError, match="no space left"):
        save_prompt_cache(file, caches)
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]


def test_names_of_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("", f"{tmp_path}/", b""):
        with pytest.raises(IsADirectoryError):
            save_prompt_cache(folder, [H2OKVCache()])
        with pytest.raises((FileNotFoundError, IsADirectoryError)):
            load_prompt_cache(folder)
    (link := tmp_path / "a.safetensors").symlink_to("b.safetensors")
    save_prompt_cache(bytes(tmp_path / "a"), [H2OKVCache()])
    assert link.is_symlink() and len(load_prompt_cache(b"b")) == 1
    assert len([*tmp_path.iterdir()]) == 2


def test_a_loaded_cache_outlives_its_file(saved):
    file, caches = saved
    loaded = load_prompt_cache(file)
    save_prompt_cache(file, [H2OKVCache()])
    same_states(loaded, caches)
