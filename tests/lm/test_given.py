"""What generation refuses, in one sentence, before it computes anything."""

import copy
import pickle
import re

import mlx.core as mx
import mlx_lm.models.cache as mlx_lm_cache
import numpy as np
import pytest

import mlx_h2o
from mlx_h2o import batch_generate, generate, load, make_prompt_cache, routing, stream_generate
from mlx_h2o.lm.generate import read_prompt
from mlx_h2o.lm.generation_checks import COUNTS
from mlx_h2o.lm.prompt_cache import fit_bytes, summary
from mlx_h2o.lm.saving import save_prompt_cache
from tiny_models import random_prompt, tiny_llama, tiny_qwen3

KNOWN = 4096
"""Tokens of the embedded model."""


@pytest.fixture(scope="module")
def caches(demo):
    return make_prompt_cache(demo[0], 64, layers="equal")


def refused(call, message):
    with pytest.raises(ValueError) as found:
        call()
    assert message in str(found.value) and re.fullmatch(r"\[[\w.]+\] .*\.", str(found.value))


WRONG_PROMPTS = [
    ([KNOWN], f"has the token id {KNOWN}, expected 0 to {KNOWN - 1}"),
    ([1, -1], "has the token id -1, expected 0 to"),
    (np.array([KNOWN], np.uint64), f"has the token id {KNOWN}"),
    (mx.array([3, KNOWN]), f"has the token id {KNOWN}"),
    ([1, 2**70], f"has the token id {2**70}, expected 0 to {KNOWN - 1}"),
    ([2**70, 1.5], "is object of shape (2,), expected token ids"),
    ([1.5], "is float64 of shape (1,), expected token ids"),
    (mx.array([1.0]), "is float32 of shape (1,)"),
    ([True], "is bool of shape (1,)"),
    (mx.array([[1, 2]]), "is int32 of shape (1, 2)"),
    ([[1], [2, 3]], "is [[1], [2, 3]], expected token ids"),
    ([], "is empty, expected at least one token"),
    (None, "is None, expected token ids"),
    (5, "is 5, expected token ids"),
]


@pytest.mark.parametrize(("prompt", "message"), WRONG_PROMPTS)
def test_tokens_that_are_none(prompt, message, demo, caches):
    refused(lambda: generate(*demo, prompt, prompt_cache=caches), f"[generate] prompt {message}")
    refused(lambda: read_prompt(demo[0], caches, prompt), f"[read_prompt] prompt {message}")
    said = f"[stream_generate] prompt {message}"
    refused(lambda: stream_generate(*demo, prompt, prompt_cache=caches), said)
    said = f"[batch_generate] prompts[1] {message}"
    refused(lambda: batch_generate(*demo, [[1], prompt], [caches, caches]), said)
    assert caches[0].offset == 0


@pytest.mark.parametrize("call", [1, 2, 3])
@pytest.mark.parametrize(("one", "kind"), [(KNOWN, mx.uint32), (-7, mx.int8), (2**40, mx.int64)])
def test_a_token_of_a_sampler_is_refused_when_it_is_read(call, one, kind, demo):
    """The step after it is queued by then, and must not read out of bounds. Nobody reads the token
    of the step after the last."""

    def given(tokens, **more):
        calls, ids = iter(range(1, 99)), mx.array([one], kind)
        more["sampler"] = lambda out: ids if next(calls) == call else mx.argmax(out, axis=-1)
        return {"max_tokens": tokens, **more}

    said = f"the sampler chose the token id {one}, expected 0 to {KNOWN - 1}."
    for draft in (None, demo[0]):
        refused(lambda draft=draft: generate(*demo, [1, 2], **given(5, draft_model=draft)), said)
    refused(lambda: batch_generate(*demo, [[1, 2]], **given(5)), said)
    if before := call - 1:
        expected = generate(*demo, [1, 2], max_tokens=before)
        assert generate(*demo, [1, 2], **given(before)) == expected
        assert batch_generate(*demo, [[1, 2]], **given(before)).texts[0].strip() == expected.strip()


def test_logits_of_tokens_that_are_none(demo):
    wider = [lambda _, found: mx.pad(found, [(0, 0), (0, 1)], constant_values=99.0)]
    said = f"the sampler chose the token id {KNOWN}, expected 0 to {KNOWN - 1}."
    refused(lambda: generate(*demo, [1, 2], logits_processors=wider), said)
    refused(lambda: batch_generate(*demo, [[1, 2]], logits_processors=wider), said)


def test_texts_and_numbers_for_a_batch(demo):
    said = "prompts[0] is 'a text', expected token ids, such as tokenizer.encode returns"
    refused(lambda: batch_generate(*demo, ["a text"]), said)
    with pytest.raises(ValueError, match="surrogates not allowed"):
        generate(*demo, "half \ud83d of a character")
    said = "found 1 numbers of max_tokens, expected 2, one for each prompt"
    refused(lambda: batch_generate(*demo, [[1], [2]], max_tokens=[3]), said)
    refused(lambda: batch_generate(*demo, [[1]], max_tokens=-1), "max_tokens is -1")


@pytest.mark.parametrize("kind", [list, np.array, mx.array])
def test_tokens_of_every_kind(kind, demo):
    prompt = [5, KNOWN - 1]
    expected = generate(*demo, prompt, max_tokens=2)
    assert generate(*demo, kind(prompt), max_tokens=2) == expected
    assert batch_generate(*demo, [kind(prompt)] * 2, max_tokens=2).texts == [expected] * 2


@pytest.mark.parametrize("value", ["5", -5, 0, True, 2.5, -1.0, None])
def test_numbers_of_tokens(value, demo, caches):
    for call in (generate, stream_generate):
        said = f"max_tokens is {value!r}, expected an int of at least 1, or -1 for no limit"
        refused(lambda call=call: call(*demo, [1], max_tokens=value, prompt_cache=caches), said)
    for limits in (value, [3, value]):
        said = f"[batch_generate] max_tokens is {value!r}, expected an int of at least 1."
        refused(lambda limits=limits: batch_generate(*demo, [[1], [2]], max_tokens=limits), said)


@pytest.mark.parametrize("name", sorted(COUNTS))
@pytest.mark.parametrize("value", [0, -1, "8", True, None])
def test_counts(name, value, demo, caches):
    message = f"{name} is {value!r}, expected an int of at least 1"
    refused(lambda: generate(*demo, [1], prompt_cache=caches, **{name: value}), message)
    refused(lambda: batch_generate(*demo, [[1]], **{name: value}), message)


@pytest.mark.parametrize("draft", [False, True])
def test_without_a_limit(draft, demo):
    """-1 is no limit, with a draft model too."""
    found = stream_generate(*demo, [1, 2], max_tokens=-1, draft_model=demo[0] if draft else None)
    parts = [next(found) for _ in range(7)]
    found.close()
    assert {part.finish_reason for part in parts} == {None}


def test_caches_and_drafts_that_do_not_fit(demo, caches):
    other = make_prompt_cache(tiny_llama(), 64)
    for given, message in (
        (caches[:3], "is 3 caches, expected 6 caches, one for each layer of qwen3"),
        (caches * 2, "is 12 caches, expected 6"),
        ([], "is 0 caches, expected 6"),
        (caches[0], "is a H2OKVCache, expected 6 caches"),
        ([None] * 6, "[0] is None, expected a cache of qwen3 layer 0"),
        (caches[:1] * 6, "[1] is there twice, expected a cache of qwen3 layer 1"),
        (caches[::-1], "[0] is of qwen3 layer 5, expected a cache of qwen3 layer 0"),
        ((other * 6)[:6], "[0] is of llama layer 0, expected a cache of qwen3 layer 0"),
    ):
        for call in (generate, stream_generate):
            said = f"[{call.__name__}] prompt_cache{'' if message[0] == '[' else ' '}{message}"
            refused(lambda call=call, given=given: call(*demo, [1], prompt_cache=given), said)
        refused(lambda given=given: batch_generate(*demo, [[1]], [given]), message)
        refused(lambda given=given: read_prompt(demo[0], given, [1]), message)
    said = "is 6 caches, expected 12 caches, one for each layer of qwen3 and qwen3"
    refused(lambda: generate(*demo, [1], prompt_cache=caches, draft_model=demo[0]), said)
    said = f"tokens, expected {KNOWN} as the model"
    refused(lambda: generate(*demo, [1], draft_model=tiny_qwen3()), said)
    assert caches[0].offset == 0
    assert generate(*demo, [1], max_tokens=2, prompt_cache=mlx_lm_cache.make_prompt_cache(demo[0]))


def test_caches_of_heads_apart_fit(demo):
    """Caches within groups and lists have the name of their layer too."""
    made = make_prompt_cache(demo[0], 32, budgets=[[40, 20], 30, 30, 30, 30, 30])
    assert all(generate(*demo, [1, 2], max_tokens=2, prompt_cache=made) for _ in range(2))


@pytest.mark.parametrize("given", ["demo", None, 5])
def test_what_is_no_model(given, demo, caches):
    said = f"found {given!r}, expected a model, such as load returns"
    refused(lambda: make_prompt_cache(given), said)
    refused(lambda: fit_bytes(given, "1MB"), said)
    refused(lambda: generate(given, demo[1], [1], prompt_cache=caches), said)
    refused(lambda: batch_generate(given, demo[1], [[1]], [caches]), said)
    if given is not None:
        refused(lambda: routing(given), said)
        refused(lambda: save_prompt_cache("unwritten", caches, model=given), said)
        refused(lambda: make_prompt_cache(demo[0], draft_model=given), said)
    if given != "demo":
        refused(lambda: load(given), f"[load] found {given!r}, expected a directory")


@pytest.mark.parametrize("length", [0, "5", 1.5])
def test_lengths(length, demo):
    said = f"length is {length!r}, expected an int of at least 1"
    refused(lambda: make_prompt_cache(demo[0], length=length), said)
    refused(lambda: fit_bytes(demo[0], "1MB", length=length), said)


def test_budgets_and_numbers_of_rows_that_are_none(demo, tmp_path):
    refused(lambda: make_prompt_cache(demo[0], budgets=5), "found 5 as budgets, expected one")
    file = tmp_path / "budgets.json"
    file.write_bytes(b"\xff\xfe")
    for path in (file, "", tmp_path, tmp_path / "none"):
        said = f"budgets are {str(path)!r}, expected a JSON file: "
        refused(lambda path=path: make_prompt_cache(demo[0], budgets=path), said)
    said = f"max_kv_size is {10**30}, expected at most"  # which arrays can have
    refused(lambda: make_prompt_cache(demo[0], 10**30), said)


@pytest.mark.slow
def test_more_bytes_than_any_rows_have(demo):
    assert fit_bytes(demo[0], 10**26, layers="equal").config.max_kv_size == 2**30


def test_settings_that_no_file_could_keep():
    of = mlx_h2o.H2OConfig.of
    for given in (np.int64(8), mx.array(8), [8]):
        refused(lambda given=given: of(kv_bits=given), "expected one of (2, 3, 4, 5")
    refused(lambda: of(max_kv_size=mx.array(8)), "expected an int of at least 1")
    refused(lambda: mlx_h2o.H2OKVCache(256), "[H2OKVCache] config is 256, expected an H2OConfig")


# No limit


@pytest.mark.parametrize("settings", [{}, {"kv_bits": 8}, {"preallocate": 500}])
def test_none_is_no_limit(settings, demo):
    """As in mlx_lm; what is not given is the default."""
    made = make_prompt_cache(demo[0], max_kv_size=None, **settings)
    with routing(demo[0]):
        for _ in range(3):
            mx.eval(demo[0](mx.array([random_prompt(100)]), cache=made))
    assert {one.size() for one in made} == {300}
    assert summary(made).startswith("0 of 6 layers evict, 300 rows, 0 evicted")
    (default,) = {one.config.max_kv_size for one in make_prompt_cache(demo[0], layers="equal")}
    assert default == 256
    given = {"max_kv_size": None, "return_prompt_caches": True, **settings}
    ((cache, *_),) = batch_generate(*demo, [random_prompt(300)], max_tokens=2, **given).caches
    assert (cache.size(), cache.config.max_kv_size) == (302, None)


def test_no_limit_beside_another(demo, caches):
    said = "found max_kv_bytes = '1MB' beside max_kv_size or budgets"
    refused(lambda: make_prompt_cache(demo[0], None, max_kv_bytes="1MB"), said)
    # What mlx_lm's callers pass on is not a setting beside caches.
    assert generate(*demo, [1], max_tokens=1, prompt_cache=caches, max_kv_size=None) is not None


# Copies


@pytest.mark.parametrize("budgets", [None, [[20, 10]] + [20] * 5])
def test_a_copy_has_rows_of_its_own(budgets, demo):
    model = demo[0]
    made = make_prompt_cache(model, 24, budgets=budgets, layers="equal")
    with routing(model):
        mx.eval(model(mx.array([random_prompt(30)]), cache=made))
        before = [np.array(part) for part in made[1].state if isinstance(part, mx.array)]
        copies = [copy.copy(one) for one in made]
        mx.eval(model(mx.array([random_prompt(40)]), cache=copies))
    after = [np.array(part) for part in made[1].state if isinstance(part, mx.array)]
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
    assert (made[0].offset, copies[0].offset) == (30, 70)
    refused(lambda: pickle.dumps(made), "expected mlx_h2o.save_prompt_cache to keep it")


@pytest.mark.parametrize("n", [1.5, "x", None])
def test_what_no_number_of_tokens_is_taken_back(n, demo):
    refused(lambda: make_prompt_cache(demo[0])[0].trim(n), f"n is {n!r}, expected an int")


# Files


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b'{"a": ', b"[1]", b"\xff"])
def test_settings_of_a_model_that_are_damaged(name, content, folder):
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"\[load\] {folder / name} is damaged, expected an obj"):
        load(str(folder))


def test_a_path_is_a_name_too(folder):
    for one in (folder, str(folder)):
        assert len(load(one, lazy=True)) == 2


def test_weights_that_are_damaged(folder):
    (file,) = folder.glob("model*.safetensors")
    whole = file.read_bytes()
    said = "is damaged or no safetensors file, expected a file of weights"
    for length in (len(whole) - 1, 100, 0):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=rf"\[load\] {re.escape(str(file))} {said}"):
            load(str(folder))


def test_a_tokenizer_that_is_missing(folder, monkeypatch):
    for file in folder.glob("tokenizer*"):
        file.unlink()
    for _ in range(2):  # transformers makes one without words, or raises an error
        with pytest.raises(ValueError, match=f"{folder} cannot be loaded: it has no tokenizer,"):
            load(folder)
        monkeypatch.setattr("mlx_lm.load", lambda *_, **__: {}["tokenizer"])


def test_settings_that_are_of_no_model(folder):
    for text, said in (("{}", "model_type"), ('{"model_type": "none"}', "none not supported")):
        (folder / "config.json").write_text(text)
        with pytest.raises(ValueError, match=rf"\[load\] {folder} cannot be loaded: .*{said}"):
            load(str(folder))
    (folder / "config.json").rename(folder / "adapter_config.json")
    with pytest.raises(ValueError, match=f"with the adapters of {folder} cannot be loaded: "):
        load("demo", adapter_path=folder)


def test_a_file_that_cannot_be_written_is_named(caches, tmp_path):
    missing, taken = tmp_path / "none" / "a.safetensors", tmp_path / "folder.safetensors"
    taken.mkdir()
    for path, said in ((missing, "No such file"), (taken, "Is a directory")):
        with pytest.raises(OSError, match=rf"{said}.*{re.escape(str(path))}'$"):
            save_prompt_cache(path, caches)
    save_prompt_cache(tmp_path / "a", caches)
    assert (tmp_path / "a.safetensors").stat().st_mode & 0o777 == 0o600
    assert {file.name for file in tmp_path.iterdir()} == {"a.safetensors", "folder.safetensors"}
