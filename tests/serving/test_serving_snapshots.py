"""Snapshots: the longest prefix is found, and none claims more than it holds."""

import random
import sys
from contextlib import contextmanager
from unittest.mock import patch

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines import TEXT, ask, demo, engine_of, submit
from engines import tiny as tiny_model
from mlx_h2o import make_prompt_cache
from mlx_h2o.lm.routing import bounds, routing_for
from mlx_h2o.serving.disk import PromptStore
from mlx_h2o.serving.kept import key_of
from mlx_h2o.serving.snapshots import Snapshots, held_tokens, places
from models import tiny
from tiny_models import random_prompt, tiny_gemma3, tiny_qwen3


def read(tokens, **settings):
    model = tiny_model()[0]
    caches = make_prompt_cache(model, **({"max_kv_size": None, "layers": "equal"} | settings))
    with routing_for(model, caches):
        model(mx.array(tokens)[None], cache=caches)
    mx.eval([one.state for one in caches])
    return caches


def test_what_evicted_nothing_serves_every_beginning():
    kept = Snapshots(1 << 30)
    kept.keep(TEXT, read(TEXT))
    for asked, length in ((TEXT, 17), (TEXT[:9], 8), ([*TEXT, 1], 18), ([*TEXT[:5], 63, 1], 5)):
        caches, found = kept.find(asked)
        assert found == length == kept.best(key_of(asked))[0]
        assert set(held_tokens(caches)) == {length}
    assert kept.find([63, *TEXT]) == ([], 0)
    assert held_tokens(kept.find([*TEXT, 1])[0]) == [18, 18]  # the copies were cut, not it


def test_what_evicted_serves_what_goes_on_from_it():
    kept = Snapshots(1 << 30)
    kept.keep(TEXT, read(TEXT, max_kv_size=8, sink_size=1, policy="keydiff"))
    assert kept.best(key_of([*TEXT, 1]))[0] == 18
    assert kept.best(key_of(TEXT))[0] == kept.best(key_of(TEXT[:9]))[0] == 0


@patch("mlx_h2o.serving.snapshots.SHORT", 0)
@pytest.mark.parametrize("more", [{"policy": "h2o"}, {"kv_bits": 8, "light_bits": 4}])
def test_ranks_are_those_of_the_text_alone(more):
    """Of rows that another one begins with too, where ranks are not taken back with its tokens."""
    model, text = tiny_qwen3(head_dim=32), random_prompt(60, seed=1)
    asked = text, text[:40] + random_prompt(30, seed=2), text[:20] + random_prompt(10, seed=3)
    given = {"models": [model], "max_kv_size": 72, "kv_group_size": 32, **more}
    with engine_of(kept=0, **given) as fresh:
        expected = [ask(fresh, prompt, max_tokens=40).answer for prompt in asked]
    with engine_of(**given) as engine:
        assert [ask(engine, prompt, max_tokens=40).answer for prompt in asked] == expected


def test_a_key_never_says_more_than_its_caches():
    kept = Snapshots(1 << 30)
    assert kept.keep([*TEXT, 1, 2], read(TEXT)) == 18
    assert kept.best(key_of([*TEXT, 1, 2, 3]))[0] == 18
    uneven = read(TEXT)
    uneven[1].trim(2)
    kept = Snapshots(1 << 30)
    assert kept.keep(TEXT, uneven) == 16
    assert set(held_tokens(kept.find(TEXT)[0])) == {16}


@patch("mlx_h2o.serving.snapshots.SHORT", 0)
def test_heads_with_few_rows_keep_all_of_a_short_prompt(monkeypatch):
    """Up to the rows of all heads on average, so that one snapshot serves all its beginnings."""
    kept, keep, (model, tokenizer) = [], Snapshots.keep, demo()
    monkeypatch.setattr(Snapshots, "keep", lambda *given: kept.append(keep(*given)) or kept[-1])
    with engine_of([model], tokenizer, max_kv_size=128, layers="probe") as engine:
        assert min(rows for _, rows in bounds(engine.memory.make())) < 100
        ask(engine, [*range(7, 120)], max_tokens=4)
    assert kept == [112, 117]  # and one behind the answer


@given(
    st.integers(2, 3000), st.lists(st.integers(1, 2998), max_size=6), st.integers(0, 2999),
    st.one_of(st.just(sys.maxsize), st.integers(0, 3000)),
)  # fmt: skip
def test_places_are_new_and_leave_something_to_read(count, marks, start, lasting):
    tokens = [int(place in marks) for place in range(count)]
    found = places(tokens, frozenset([1]), min(start, count - 1), lasting)
    assert found == sorted(set(found)) and all(start < place < count for place in found)
    assert len(found) <= 48
    if start < count - 1:
        assert found[-1] == count - 1


def test_places_follow_the_ends_of_messages():
    tokens = [1, *[0] * 99, 1, *[0] * 5, 1, *[0] * 1600, 1, *[0] * 40]
    found = places(tokens, frozenset([1]), 0, 0)
    assert {100, 1707, len(tokens) - 1} <= set(found) and 106 not in found
    assert {1707 - 32, 1707 - 64, 1707 - 1024} <= set(found)
    found = [places([0] * count, frozenset(), 0, 0) for count in (150, 200)]
    assert found == [[149], [71, 135, 167, 199]]  # a short one is read in one step


# Read again


def read_again(engine, first, second):
    ask(engine, first)
    before = engine.counts["read"]
    ask(engine, second)
    return engine.counts["read"] - before


MADE = {
    "windows": lambda: tiny_gemma3(window=24),  # stock caches: cannot be cut once they are full
    "hybrid": lambda: tiny.build("lfm2"),  # every second layer is a convolution: never
    "chunks": lambda: tiny.build("llama4"),  # chunks of attention: no further than to the last one
}
BUDGETS = {
    "bounded": {"max_kv_size": 64, "policy": "keydiff"},
    "ranked": {"max_kv_size": 2048, "policy": "h2o"},  # without eviction, but not to be cut
}
MARK = 60
"""A token that stands between messages."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bounded", "unbounded", "windows", "hybrid"])
@pytest.mark.parametrize(
    ("edit", "most"),
    [("last sentence", 256), ("second message", 256), ("answer", 48), ("again", 1)],
)
def test_an_edit_is_read_from_the_last_place_before_it(kind, edit, most):
    check_edit(kind, edit, most, 900)


@pytest.mark.parametrize("kind", ["bounded", "hybrid"])
def test_a_last_sentence_is_read_from_the_last_place_before_it(kind):
    check_edit(kind, "last sentence", 64, 300)


def check_edit(kind, edit, most, size):
    first, second, new = edited(edit, size)
    with engine_for(kind) as engine:
        assert new <= read_again(engine, first, second) <= new + most


@pytest.mark.parametrize(
    ("kind", "edit", "most", "files"),
    [
        ("bounded", "last sentence", 96, 9),  # a file for every 64 tokens at most
        ("bounded", "second message", 96, 9),
        ("ranked", "last sentence", 64, 3),  # before the last part of the prompt, at its end,
        ("windows", "last sentence", 64, 3),  # and behind the answer
        ("hybrid", "last sentence", 64, 3),
    ],
)
def test_after_a_restart_an_edit_is_read_from_the_last_file_before_it(
    kind, edit, most, files, tmp_path
):
    first, second, new = edited(edit, 500)
    for prompt, least, most_read in ((first, 504, 504), (second, new, new + most)):
        store = PromptStore(tmp_path, 1 << 30, "model")
        with engine_for(kind, store=store) as engine:
            ask(engine, prompt)
            assert least <= engine.counts["read"] <= most_read
        store.close()
        assert len(list(tmp_path.iterdir())) <= (files if prompt is first else 2 * files)


@contextmanager
def engine_for(kind, **given):
    models, budget = [MADE[kind]()] if kind in MADE else None, BUDGETS.get(kind, {})
    with engine_of(models, limits={"step": 256}, **budget, **given) as engine:
        engine._boundaries, engine.least_on_disk = frozenset([MARK]), 32
        yield engine


def edited(edit, size):
    """A prompt of four messages, one with an edit, and how many tokens come from the edit on."""
    body = [token % 59 + 1 for token in random_prompt(size)]
    messages = [body[:100], body[100:200], body[200:-100], body[-100:]]
    first = [token for message in messages for token in (MARK, *message)]
    if edit == "last sentence":
        return first, [*first[:-12], *[62] * 12], 12
    if edit == "second message":
        return first, [*first[:150], 61, *first[151:]], len(first) - 150
    if edit == "answer":
        return first, [*first, *body[:30]], 30
    return first, first, 1


# Conversations


turns = st.lists(
    st.tuples(
        st.integers(0, 2),  # which conversation
        st.sampled_from(["goes on", "again", "edited", "answer cut", "first message changed"]),
        st.integers(1, 24),
    ),
    min_size=2, max_size=8,
)  # fmt: skip


ON_DISK = ["disk", "windows on disk", "hybrid on disk"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["unbounded", *MADE, "drafts", *ON_DISK])
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(turns, st.randoms(use_true_random=False))
def test_answers_are_those_of_a_fresh_server(kind, tmp_path_factory, said, rng):
    check_conversations(kind, tmp_path_factory.mktemp("kept"), said, rng)


@pytest.mark.parametrize("kind", ["windows", "chunks", "drafts", "disk", "hybrid on disk"])
def test_a_conversation_is_that_of_a_fresh_server(kind, tmp_path):
    changes = ("goes on", "again", "edited", "answer cut", "first message changed")
    said = [(n % 2, change, 5 + n) for n, change in enumerate(changes)]
    check_conversations(kind, tmp_path, said, random.Random(4))


@patch("mlx_h2o.serving.snapshots.SHORT", 0)
def check_conversations(kind, folder, said, rng):
    """With caching, batches, drafts and a restart, token for token."""
    model = MADE.get(kind.split()[0], tiny_qwen3)()
    models = [model, tiny_qwen3()] if kind == "drafts" else [model]
    more = {"speculative": 3} if kind == "drafts" else {}
    prompts: list[list[int]] = [random_prompt(40 + 9 * n, seed=n) for n in range(3)]
    asked: list[tuple[list[int], int]] = []
    found: list[list[int]] = []
    for part in (said[: len(said) // 2], said[len(said) // 2 :]):
        store = PromptStore(folder, 1 << 30, "model") if "disk" in kind else None
        with engine_of(models, limits={"step": 16, "decode": 4}, store=store, **more) as engine:
            engine.least_on_disk = 8
            for which, change, count in part:
                prompt = prompts[which]
                waiting = [(list(prompt), count)]
                if change == "again":
                    waiting.append((list(prompt), count + 3))
                waiting.append((prompts[(which + 1) % 3][:-1], 4))
                together = [submit(engine, tokens, max_tokens=n) for tokens, n in waiting]
                answers = [one.wait().answer for one in together]
                asked += waiting
                found += [list(answer) for answer in answers]
                prompts[which] = changed(prompt, change, answers[0], rng)
        if store is not None:
            store.close()
            assert list(folder.glob("*.safetensors"))
    with engine_of([model], kept=0) as fresh:  # for each: it keeps nothing
        for (tokens, count), answer in zip(asked, found, strict=True):
            expected = ask(fresh, tokens, max_tokens=count)
            assert expected.request.cached == 0
            assert answer == expected.answer


def changed(prompt, change, answer, rng):
    """The prompt of the next turn."""
    if change == "edited":
        at = rng.randrange(len(prompt))
        return [*prompt[:at], *random_prompt(3, seed=at), *prompt[at:]]
    if change == "answer cut":
        return [*prompt, *answer[: len(answer) // 2], 3]
    if change == "first message changed":
        return [7, 8, *prompt[2:], *answer]
    return [*prompt, *answer, *random_prompt(5, seed=len(answer))]
