"""The engine: answers are the same as alone, and a failing request fails alone."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm import sample_utils
from mlx_lm.generate import BatchGenerator
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from engines import SAID, TEXT, Asked, ask, demo, engine_of, fail, memory_for, submit, tiny
from mlx_h2o import batch_generate
from mlx_h2o.lm.ranks import Ranks
from mlx_h2o.serving.answers import Choice
from mlx_h2o.serving.disk import PromptStore
from mlx_h2o.serving.engine import Engine
from mlx_h2o.serving.request import BusyError, Event
from mlx_h2o.serving.sampling import Sampling
from mlx_h2o.serving.schema import CompletionBody
from mlx_h2o.serving.snapshots import Snapshots
from mlx_h2o.serving.text import TokenLogprob, Writer, logprobs_of, token_text
from models.tiny import build
from tiny_models import random_prompt, stock_tokens, tiny_gemma3, tiny_tokenizer

PROMPTS = (TEXT, random_prompt(3, seed=4), random_prompt(9, seed=5))
WARM = Sampling(temperature=0.8, top_p=0.9, top_k=40, min_p=0.01, seed=5)


def alone(prompt: list[int], count: int = 12) -> list[int]:
    """What mlx_lm's own loop and caches answer, greedily."""
    return stock_tokens(tiny()[0], prompt, count)


def test_answers_of_a_batch_are_those_alone(caplog):
    with engine_of() as engine:
        engine._context = 5  # two prompts are beyond
        for asked in [submit(engine, prompt) for prompt in PROMPTS]:
            asked.wait()
            assert asked.answer == alone(asked.request.tokens) and asked.finish == "length"
    assert engine.counts["finished"] == 3 and engine.counts["answered"] == 36
    assert caplog.text.count("the model was trained on 5: ") == 1


@pytest.mark.parametrize("name", ["jamba", "gpt_bigcode", "nemotron_h"])
def test_models_that_read_padding_answer_in_turn(name):
    model = build(name)
    with engine_of([model]) as engine:
        for asked in [submit(engine, prompt) for prompt in PROMPTS]:
            assert asked.wait().answer == stock_tokens(model, asked.request.tokens, 12)
        assert engine.counts["failed"] == 0
    with pytest.raises(ValueError, match="prompts are of unlike lengths, expected one"):
        batch_generate(model, tiny()[1], list(PROMPTS))


def test_who_comes_at_once_is_read_together(monkeypatch):
    monkeypatch.setattr("mlx_h2o.serving.engine._MOMENT", 60)
    model = Faulty(tiny()[0], times=0)
    with engine_of([model]) as engine:
        engine.expected, model.read = 1, []
        submit(engine, PROMPTS[0])
        time.sleep(0.1)
        engine.expected = 0
        assert ask(engine, PROMPTS[1]).answer == alone(PROMPTS[1])
    assert {*model.read} == {2}


def test_a_seed_answers_alike_alone_and_among_others():
    with engine_of() as engine:
        first = ask(engine, TEXT, sampling=WARM).answer
        others = [submit(engine, prompt, sampling=Sampling(temperature=1.5)) for prompt in PROMPTS]
        again = submit(engine, TEXT, sampling=WARM)
        for one in (*others, again):
            one.wait()
        assert again.answer == first
        assert ask(engine, TEXT, sampling=Sampling(temperature=0.8, seed=6)).answer != first


def test_a_token_that_ends_answers_and_is_none_of_the_models():
    tokenizer = TokenizerWrapper(tiny_tokenizer(), eos_token_ids=[1 << 30])
    with engine_of(tokenizer=tokenizer) as engine:
        taken = Sampling(temperature=1.0, xtc_probability=1.0)
        assert len(ask(engine, TEXT, sampling=taken).answer) == 12


@pytest.mark.parametrize(
    ("name", "value"), [("top_p", 0.6), ("top_k", 7), ("min_p", 0.2), ("xtc_probability", 1.0)]
)
def test_filters_leave_what_mlx_lm_leaves(name, value):
    logprobs = mx.random.normal((3, 50), key=mx.random.key(2)) * 3
    logprobs -= mx.logsumexp(logprobs, axis=-1, keepdims=True)
    spared = [int(mx.argmax(logprobs[0]).item())]
    found = Sampling(**{name: value})._filtered(logprobs, mx.random.key(0), spared)
    if name == "xtc_probability":
        rows = [sample_utils.apply_xtc(row[None], 1.0, 0.1, spared) for row in logprobs]
        expected = mx.concatenate(rows)
    else:
        expected = getattr(sample_utils, f"apply_{name}")(logprobs, value)
    assert mx.array_equal(mx.isinf(found), mx.isinf(expected))
    bare = Sampling(**{name: value})._filtered(logprobs, mx.random.key(0), [])
    assert (mx.isinf(bare) >= mx.isinf(expected)).all()
    assert (mx.isinf(bare) > mx.isinf(expected)).any().item() == (name == "xtc_probability")


# Failures


class Faulty:
    """A model whose call fails where a row of the batch ends with this token."""

    def __init__(self, model, token=None, times=10**9):
        self.model, self.token, self.times = model, token, times
        self.read: list[int] = []

    def __getattr__(self, name):
        return getattr(self.model, name)

    def __call__(self, tokens, **given):
        self.read.append(len(tokens))
        if self.times and (self.token is None or self.token in tokens.reshape(-1).tolist()):
            self.times -= 1
            raise RuntimeError("the model fails")
        return self.model(tokens, **given)


def check_others_finish(engine, wrong, comes_first=False):
    """The neighbours of a request that fails, those that join behind it, and the next."""
    before = [Asked(engine, prompt, max_tokens=24) for prompt in PROMPTS[:2]]
    together = [wrong, *before] if comes_first else before
    engine.submit([engine.check(one.request) for one in together])
    before[0].next()
    failing = wrong if comes_first else wrong.submit()
    behind = submit(engine, PROMPTS[2], max_tokens=24)
    assert "fails" in str(failing.wait().error)
    for one in (*before, behind):
        assert one.wait().answer == alone(one.request.tokens, 24)
    assert len(ask(engine, TEXT, sampling=WARM).answer) == 12 and engine.fault == ""
    assert engine.counts["failed"] == 1


FAILING: dict[str, tuple[type, str, Callable[..., bool], dict[str, Any]]] = {
    "sampler": (Sampling, "_filtered", lambda own, *_: own.seed == 13,
                {"sampling": Sampling(temperature=1.0, seed=13)}),
    "detokenizer": (Writer, "take", lambda own, _: bool(own.stops), {"stops": ["none"]}),
    "cache": (Snapshots, "find", lambda _, tokens: tokens == [63, *TEXT], {"prompt": [63, *TEXT]}),
}  # fmt: skip
"""For each, its function, whether a call is for the request, and what it asks for."""


@pytest.mark.parametrize("what", FAILING)
def test_what_fails_for_one_request_fails_it_alone(what, monkeypatch):
    owner, name, meant, asked = FAILING[what]
    original = vars(owner)[name]
    monkeypatch.setattr(owner, name, lambda *args: fail() if meant(*args) else original(*args))
    with engine_of() as engine:
        check_others_finish(engine, Asked(engine, **({"prompt": TEXT} | asked)))


def test_a_processor_that_fails(monkeypatch):
    monkeypatch.setattr("mlx_h2o.serving.request.make_logits_processors", lambda **given: [fail])
    with engine_of() as engine:
        check_others_finish(engine, Asked(engine, TEXT, penalties={"repetition_penalty": 1.1}))


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("place", ["prompt", "answer", "answer of the first"])
def test_a_model_that_fails_with_one_request(place, drafts):
    model = tiny()[0]
    common = {0} | {one for prompt in PROMPTS for one in [*prompt, *alone(prompt, 24)]}
    if place == "prompt":
        token = min(set(range(64)) - common)
        tokens = [token, *TEXT]
    else:  # one that only this answer has
        prompts = (random_prompt(5, seed=n) for n in range(50))
        found = ((one, set(alone(one, 30)[2:]) - common - {*one}) for one in prompts)
        tokens, token = next((one, min(own)) for one, own in found if own)
    models = [Faulty(model, token), *([model] if drafts else [])]
    with engine_of(models, speculative=drafts) as engine:
        check_others_finish(engine, Asked(engine, tokens, max_tokens=40), "first" in place)


def test_a_model_that_fails_once_costs_nobody_an_answer():
    model = Faulty(tiny()[0], times=0)
    with engine_of([model]) as engine:
        asked = [submit(engine, prompt, max_tokens=24) for prompt in PROMPTS]
        warm = submit(engine, TEXT, sampling=WARM, max_tokens=24)
        assert all(asked[0].next() for _ in range(3))
        model.times = 1
        for one, prompt in zip(asked, PROMPTS, strict=True):
            assert one.wait().answer == alone(prompt, 24)
        assert warm.wait().answer == ask(engine, TEXT, sampling=WARM, max_tokens=24).answer
        assert engine.counts["failed"] == 0 and model.times == 0


def test_a_model_that_always_fails_is_told():
    model = Faulty(tiny()[0], times=0)
    with engine_of([model]) as engine:
        model.times = 3
        assert all(ask(engine, TEXT).error for _ in range(3))
        assert "fails" in engine.fault and engine.counts["read"] == 0
        assert ask(engine, TEXT).answer == alone(TEXT)
        assert engine.fault == ""
        model.token, model.times = alone(TEXT, 1)[0], 9  # the first token needs no second step
        assert [one.error is None for one in ask(engine, TEXT).events] == [True, False]


def test_an_answer_that_cannot_be_taken_out_of_its_batch_ends(monkeypatch):
    with engine_of() as engine:
        text = ask(engine, TEXT).text
        monkeypatch.setattr(BatchGenerator, "remove", fail)
        assert ask(engine, TEXT, stops=[text[9:12]]).finish == "stop"
        assert ask(engine, TEXT).text == text and engine.fault == ""


@pytest.mark.parametrize(("ranks", "owner", "name"), [(1, Engine, "_let_join"), (2, Ranks, "told")])
def test_an_engine_that_cannot_begin_or_lost_a_rank_takes_no_more(ranks, owner, name, monkeypatch):
    monkeypatch.setattr("mlx_h2o.serving.engine.ranks_of", lambda _: Ranks(ranks))
    monkeypatch.setattr(owner, name, fail)
    late: list[Any] = []
    with engine_of() as engine:
        busy = partial(pytest.raises, BusyError, submit, engine, TEXT)
        monkeypatch.setattr(engine.snapshots, "shrink", lambda _: late.append(busy()))
        assert "fails" in str(ask(engine, TEXT).error)
    assert len(late) == 1 and str(engine.error) == "it fails"


# Requests that come and go


def test_who_leaves_is_taken_out_within_a_token():
    with engine_of() as engine:
        gone = submit(engine, TEXT, max_tokens=100_000)
        gone.next()
        engine.leave([gone.request])
        begun = time.monotonic()
        while engine.running and time.monotonic() - begun < 5:
            time.sleep(0.01)
        made = len(gone.request.answer)
        assert engine.running == 0 and engine.counts["left"] == 1
        assert ask(engine, TEXT).answer == alone(TEXT)
        assert len(gone.request.answer) == made and engine.close(0)  # with nothing to lose


def test_who_leaves_when_the_answer_ends_is_counted():
    with engine_of() as engine:
        both = [Asked(engine, random_prompt(9, seed=n), max_tokens=1).request for n in (1, 2)]
        both[0].sink = lambda _: engine.leave(both[1:])
        engine.submit([engine.check(one) for one in both])
    assert engine.counts["finished"] + engine.counts["left"] == 2


def test_more_than_the_queue_holds_is_refused():
    with engine_of(limits={"decode": 1, "prompts": 1, "queue": 2, "step": 64}) as engine:
        running = submit(engine, TEXT, max_tokens=200)
        running.next()
        waiting = [submit(engine, TEXT) for _ in range(2)]
        with pytest.raises(BusyError, match="2 requests wait already"):
            submit(engine, TEXT)
        assert [len(one.wait().answer) for one in (running, *waiting)] == [200, 12, 12]


def test_requests_wait_for_bytes_and_prompts_give_way(monkeypatch):
    """With room for two at a time, and what was read before in the way."""
    limits_of = {}
    for name in ("memory", "cache", "wired"):
        monkeypatch.setattr(mx, f"set_{name}_limit", partial(limits_of.__setitem__, name))
    limits = {"prompts": 1, "step": 64}
    with engine_of(limits=limits) as engine:
        one = engine.memory.of_request(100)
        memory = memory_for(engine, 2 * one + one // 2)
        with monkeypatch.context() as mac:
            mac.setattr(mx.metal, "is_available", lambda: True)
            mac.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 3 << 30})
            engine.memory.apply()
    assert limits_of == {"memory": 4 << 30, "cache": (4 << 30) // 16, "wired": 3 << 30}
    with engine_of(limits=limits, memory=memory) as engine:
        asked = [Asked(engine, [n, *TEXT * 4], max_tokens=40) for n in range(5)]
        held = []
        for each in asked:
            hear = each.request.sink
            each.request.sink = lambda event, hear=hear: (
                held.append((engine.running, engine.snapshots.nbytes)) or hear(event)
            )
            each.submit()
        assert all(len(each.wait().answer) == 40 for each in asked)
        assert max(held)[0] == 2 and min(nbytes for _, nbytes in held[-40:]) > 0
        assert all(nbytes + running * one <= engine.memory.free for running, nbytes in held)


def test_caches_that_are_being_written_take_memory(monkeypatch, tmp_path):
    disk, write = threading.Event(), PromptStore._write
    monkeypatch.setattr(PromptStore, "_write", lambda *given: disk.wait(60) and write(*given))
    limits = {"prompts": 1, "step": 64}
    with engine_of(limits=limits) as engine:
        memory = memory_for(engine, engine.memory.of_request(100) + 10_000)
    store = PromptStore(tmp_path, 1 << 30, "model")
    with engine_of(limits=limits, memory=memory, store=store) as engine:
        engine.least_on_disk = 8
        ask(engine, TEXT * 4)
        while store.pending < 10_000:
            time.sleep(0.01)
        late = submit(engine, [1, *TEXT * 4])
        time.sleep(0.2)
        assert not engine.running and not late.request.answer
        disk.set()
        assert len(late.wait().answer) == 12
    store.close()
    assert store.pending == 0 and len(list(tmp_path.iterdir())) == 2


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"max_kv_size": 128}, {"max_kv_size": 64, "kv_bits": 8}, {}])
def test_the_peak_stays_below_the_memory(settings):
    """Sixty-four requests of unlike lengths, and room for eight of the longest."""
    limits, (model, tokenizer) = {"prompts": 4, "step": 64}, demo()
    given = {"tokenizer": tokenizer, **settings}
    with engine_of([model], memory=1 << 40, limits=limits, **given) as probe:
        memory = memory_for(probe, 8 * probe.memory.of_request(256))
    weights = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    with engine_of([model], memory=memory, kept=1 << 40, limits=limits, **given) as engine:
        mx.clear_cache()
        others = mx.get_active_memory() - weights
        mx.reset_peak_memory()
        texts = [[n, *range(7, 30)] * (1 + n % 9) for n in range(64)]
        asked = [submit(engine, one, max_tokens=4 + n % 5) for n, one in enumerate(texts)]
        assert all(one.wait().answer for one in asked)
        assert mx.get_peak_memory() - others < memory and len(engine.snapshots)


def test_it_ends_with_answers_or_says_how_many_are_lost(caplog):
    with engine_of() as engine:
        asked = submit(engine, TEXT)
        assert engine.close(60) and asked.wait().answer == alone(TEXT)
        with pytest.raises(BusyError, match="shutting down"):
            submit(engine, TEXT)
    with engine_of() as engine:
        submit(engine, TEXT, max_tokens=100_000).next()
        assert not engine.close(0.05) and "1 requests were not completed" in caplog.text


# Penalties, drafts, prompts that were read


def test_penalties_see_the_cached_part():
    penalties = CompletionBody(prompt="a", repetition_penalty=1.5).penalties()
    assert penalties == {"repetition_penalty": 1.5, "repetition_context_size": 1 << 30}
    with engine_of() as engine:
        expected, again = (ask(engine, TEXT, penalties=penalties) for _ in range(2))
        assert expected.request.cached == 0 and again.request.cached > 0
        assert again.answer == expected.answer != alone(TEXT)
        assert {*ask(engine, TEXT, penalties={"logit_bias": {7: 100.0}}).answer} == {7}


@pytest.mark.parametrize("penalties", [{}, {"repetition_penalty": 1.3}])
def test_drafts_change_nothing(penalties):
    """Neither an answer nor, with what was read before, the next one."""
    model = tiny()[0]
    with engine_of() as engine:
        expected = ask(engine, TEXT, max_tokens=24, penalties=penalties).answer
        following = ask(engine, [*TEXT, *expected, 5, 6], penalties=penalties).answer
    with engine_of([model, model], speculative=3) as engine:
        side = [submit(engine, PROMPTS[1], max_tokens=30) for _ in range(2)]
        asked = ask(engine, TEXT, max_tokens=24, penalties=penalties)
        assert asked.answer == expected
        turn = ask(engine, [*asked.request.seen, 5, 6], penalties=penalties)
        assert turn.answer == following
        assert turn.request.cached >= len(asked.request.seen) - 2
        assert all(one.wait().answer == alone(PROMPTS[1], 30) for one in side)


def test_drafts_that_a_model_could_not_take_back_are_refused():
    for model, said in ((tiny_gemma3(window=24), "makes 24 t"), (build("jamba"), "at most 0")):
        pair = [model, build("qwen3", vocab_size=model.args.vocab_size)]
        for both in (pair, pair[::-1]):  # as the model, and as the draft model
            with engine_of(both, speculative=3) as engine, pytest.raises(ValueError, match=said):
                submit(engine, TEXT, max_tokens=6)
    pair[0] = build("iquestloopcoder")
    with engine_of(pair) as engine, pytest.raises(ValueError, match="has 8 caches for 4"):
        submit(engine, TEXT, max_tokens=6)


def test_a_token_that_the_draft_model_does_not_know_is_not_chosen():
    """Models whose tables differ in length: MLX would read beyond the shorter one."""
    known, biased = [token % 40 for token in TEXT], {"logit_bias": {63: 100.0}}
    assert max(alone(known)) >= 40
    with engine_of([tiny()[0], build("qwen3", vocab_size=40)], speculative=3) as engine:
        assert max(ask(engine, known).answer) < 40
        with pytest.raises(ValueError, match="the token 63, expected 0 to 39"):
            submit(engine, known, penalties=biased)


def test_an_answer_is_continued_to_the_letter():
    with engine_of(max_kv_size=24, sink_size=2) as engine:
        first = ask(engine, TEXT)
        again = ask(engine, first.request.seen)
        assert len(again.answer) == 12 and 0 < again.request.cached < len(again.request.tokens)
    with engine_of() as engine:
        first = ask(engine, TEXT)
        assert first.answer + ask(engine, first.request.seen).answer == alone(TEXT, 24)


@pytest.mark.parametrize(("rows", "policy", "before"), [(64, "keydiff", 0), (24, "h2o", 1)])
def test_what_is_kept_waits_for_the_first_token_where_it_can(rows, policy, before, monkeypatch):
    kept, keep = [], Snapshots.keep
    with engine_of(max_kv_size=rows, policy=policy) as engine:
        asked = Asked(engine, TEXT, max_tokens=64)
        monkeypatch.setattr(
            Snapshots, "keep",
            lambda *given: kept.append((len(given[1]), len(asked.request.answer))) or keep(*given),
        )  # fmt: skip
        asked.submit().wait()
        assert kept[0] == (len(TEXT) - 1, 1 - before)
        assert ask(engine, TEXT).request.cached == len(TEXT) - 1


def test_a_long_answer_that_is_cut_goes_on_from_its_middle():
    with engine_of(max_kv_size=24, sink_size=2) as engine:
        first = ask(engine, TEXT, max_tokens=300)
        assert ask(engine, [*TEXT, *first.answer[:280], 3]).request.cached == len(TEXT) + 256


def test_what_many_begin_with_is_read_once():
    """By requests that come at once; none waits for texts that are much longer than its own."""
    long = TEXT * 8
    with engine_of() as engine:
        asked = [submit(engine, [*long, n, n + 1]) for n in range(6)]
        assert all(one.wait().answer for one in asked)
        assert engine.counts["read"] <= len(long) + 6 * 4
        room, give_way = [], engine._give_way
        engine._give_way = lambda *joining: room.extend(joining) or give_way(*joining)
        others = [submit(engine, [*PROMPTS[1] * 30, n, *TEXT * 600]) for n in range(8)]
        assert ask(engine, [*PROMPTS[1] * 30, 9], max_tokens=1).answer
        assert not any(one.request.answer for one in others)
        assert len(room) == 5  # only who joins takes it: half of the long ones, and the short one
        engine.leave([one.request for one in others])


def test_stops_and_logprobs_of_a_model_of_bytes():
    """Whose tokens are parts of words, and of which stops are no whole ones."""
    model, tokenizer = demo()
    warm = Sampling(temperature=1.2, seed=1)
    with engine_of([model], tokenizer) as engine:
        given = {"max_tokens": 30, "goes_on": True}
        text = ask(engine, SAID, **given).text
        stop = text[21:26]
        asked = ask(engine, SAID, stops=[stop, "none of it"], **given)
        assert asked.finish == "stop" and asked.text == text[: text.index(stop)]
        asked = ask(engine, SAID, top_logprobs=5, sampling=warm, **given)
        told = [one for event in asked.events for one in event.logprobs]
    assert [one.token for one in told] == asked.answer
    assert asked.text.encode() == b"".join(one.data for one in told)
    for one in told:
        values = [each.logprob for each in one.top]
        assert len(values) == 5 and values == sorted(values, reverse=True)
        assert all(each.logprob == one.logprob for each in one.top if each.token == one.token)
    assert any(one.token != one.top[0].token for one in told)


def test_a_space_behind_a_wide_character_is_kept():
    model, tokenizer = demo()
    (the,) = tokenizer.encode(" the")
    with engine_of([model], tokenizer) as engine:
        for prompt in ("The sea \u6d77", "The sea \U0001f642", "The sea"):
            given = {"penalties": {"logit_bias": {the: 100.0}}, "max_tokens": 2}
            assert ask(engine, prompt, goes_on=True, **given).text == " the the"
    writer = Writer(tokenizer, (), goes_on=True)
    spaces = [*map(writer.take, tokenizer.encode("   the")), writer.end()]
    assert "".join(text for segments in spaces for _, text in segments) == "   the"


def test_texts_of_tokens():
    """None for tokens beyond the tokenizer's; others have the space that decoders leave out."""
    assert Writer(demo()[1], ()).take(5000) == []
    made = Tokenizer(models.WordLevel({"\u2581the": 0, "sea": 1, "<0x41>": 2}, unk_token="sea"))
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Strip(" ", 1, 0)])
    found = [token_text(PreTrainedTokenizerFast(tokenizer_object=made), token) for token in (0, 1)]
    assert found == [(" the", b" the"), ("sea", b"sea")]


def test_parts_of_a_character_have_names_of_their_own():
    first = TokenLogprob(5, "\ufffd", b"\xe2", -1.0)
    parts = first, replace(first, token=6, data=b"\x9c\x85"), replace(first, token=7)
    event = Event(logprobs=[replace(first, top=parts), parts[1], TokenLogprob(8, "a", b"a", 0.0)])
    choice = Choice(0)
    found = choice.take(event)["logprobs"]
    assert found == choice.whole["logprobs"]
    assert found["tokens"] == ["bytes:\\xe2", "bytes:\\x9c\\x85", "a"]
    assert {*found["top_logprobs"][0]} == {"bytes:\\xe2", "bytes:\\x9c\\x85", "token_id:7"}
    assert found["text_offset"] == [0, 0, 1]


def test_log_probabilities_are_numbers_that_json_has():
    for value in (float("nan"), -float("inf")):
        found = logprobs_of(tiny()[1], 5, mx.full((64,), value), 2)
        assert [found.logprob, *(one.logprob for one in found.top)] == [-9999.0] * 3
