"""An evaluation from end to end: bytes, tasks, statistics, continuing from results, tables."""

import json
import math
import random
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

import mlx_h2o
from mlx_h2o.blas import slow_blas
from mlx_h2o.demo import text as demo_text
from mlx_h2o.evaluation import arms, facts, questions, reading, report
from mlx_h2o.evaluation.questions import Settings
from mlx_h2o.evaluation.run import evaluate as evaluation
from mlx_h2o.evaluation.speed import timed
from mlx_h2o.evaluation.statistics import in_turns, paired, ratios
from mlx_h2o.lm.routing import evicting_caches, routing_for
from mlx_h2o.policies import H2O, Random
from models.tiny import build
from readings import losses
from tiny_models import random_prompt, stock_tokens, tiny_gemma3, tiny_qwen3, tiny_tokenizer

SETTINGS = Settings(documents=2, length=72, lengths=(200,), facts=4, writing=24)
TEXT = " ".join(f"t{token}" for token in random_prompt(1100))
QUARTER = (Fraction(1, 4),)
FOUR = {"kv_bits": 4, "kv_group_size": 32}
KEYDIFF = arms.Arm("keydiff rows", settings={"policy": "keydiff", "kv_bits": None})
FEW = (arms.ARMS["full"], arms.ARMS["window"], arms.ARMS["kv8"], KEYDIFF)


@pytest.fixture(scope="module")
def tiny():
    return tiny_qwen3(head_dim=32), tiny_tokenizer()


def evaluated(demo, chosen=FEW, **more):
    how = {"settings": SETTINGS, "shares": QUARTER, "model_name": "tiny"} | more
    return evaluation(*demo, [("one", TEXT)], chosen, **how)


def figures(result, arm, task="loss"):
    (found,) = [one for one in result["records"] if (one["arm"], one["task"]) == (arm, task)]
    return found["figures"]


def test_a_text_that_is_too_short_is_told_before_anything_is_measured(tiny):
    said, more = [], {"tasks": ("loss", "facts"), "settings": replace(SETTINGS, lengths=(4000,))}
    with pytest.raises(ValueError, match="one has 1,100 tokens, expected at least 8,000"):
        evaluated(tiny, watch=lambda *what: said.append(what), **more)
    assert not said


# Bytes


def test_arms_have_the_same_bytes_in_rows_of_16_bits(tiny):
    sizes = arms.Sizes(tiny[0])
    full = sizes.full(400)
    assert full == 400 * 2 * 2 * 2 * 32 * 2  # 2 layers, keys and values, 2 heads of 32
    for arm in (arms.ARMS["window"], KEYDIFF, arms.Arm("4", settings=FOUR)):
        for share in (4, 8):
            assert 0.95 * full / share <= sizes.made(arm, 400, full // share).nbytes <= full / share
    assert sizes.made(arms.ARMS["kv8"], 400, 0).nbytes == full * (8 + 1) / 16  # groups of 32
    caches = sizes.made(KEYDIFF, 400, full // 4).make()
    with routing_for(tiny[0], caches):
        reading.read(tiny[0], caches, mx.array([random_prompt(300)]), 64)
    assert 0.95 * full / 4 <= sum(cache.nbytes for cache in caches) / 2 <= full / 4  # float32


def test_sliding_windows_are_the_same_in_every_arm():
    """Half of the layers have windows of 16: their bytes do not count, and stay."""
    sizes = arms.Sizes(tiny_gemma3(layers=4, heads=4, head_dim=32, window=16, pattern=2))
    full = sizes.full(300)
    assert full == 300 * 2 * 2 * 32 * 2  # 2 layers, keys and values of one head of 32
    made = sizes.made(KEYDIFF, 300, full // 4)
    assert 0.95 * full / 4 <= made.nbytes <= full / 4
    assert [type(cache) for cache in made.make()[::2]] == [RotatingKVCache] * 2


def test_what_grows_in_a_list_of_caches_is_replaced_too():
    sizes = arms.Sizes(build("falcon_h1"))
    full = sizes.full(400)
    assert full == sizes.full(800) / 2  # states beside do not grow, and do not count
    for arm, share in ((arms.ARMS["window"], 4), (arms.ARMS["kv8"], 16 / 9), (KEYDIFF, 4)):
        assert sizes.made(arm, 400, full // 4).nbytes == pytest.approx(full / share, rel=0.1)


def test_a_text_beyond_the_context_of_the_model_is_noted(tiny):
    for made_for, times in ((72, 0), (71, 1)):
        result = evaluated(tiny, FEW[:1]) | {"context": made_for}
        result["settings"]["documents"] = times + 1
        said = "\n".join(report.notes(result))
        assert said.startswith(("1 text a task.", "2 texts a task.")[times])
        assert said.count("The text has 72 tokens, and the model was trained on 71: ") == times


def test_an_arm_that_cannot_be_is_refused_and_said(tiny):
    wrong = arms.Arm("wrong", settings={"policy": "none such"})
    result = evaluated(tiny, [arms.ARMS["full"], wrong])
    (record,) = [one for one in result["records"] if one["arm"] == "wrong"]
    assert "figures" not in record and "policy is 'none such'" in record["refused"]
    assert any("wrong" in note and "none such" in note for note in report.notes(result))
    (_, packed) = evaluated((build("deepseek_v3"), tiny[1]), FEW[::2])["records"]
    assert "swapaxes" in packed["refused"]  # the model cannot read mlx_lm's packed latents
    with pytest.raises(ValueError, match="expected more than 4"):
        arms.Sizes(tiny[0]).made(arms.ARMS["window"], 400, 100)


def test_tokens_that_are_read_at_once_see_each_other(tiny):
    """A full cache gives the same loss; a window of 18 rows another."""
    one, many = (evaluated(tiny, FEW[:2], settings=replace(SETTINGS, step=n)) for n in (1, 40))
    np.testing.assert_allclose(figures(many, "full")["loss"], figures(one, "full")["loss"])
    assert figures(many, "window")["loss"] != figures(one, "window")["loss"]


def test_an_arm_without_folding_drops_rows():
    sizes = arms.Sizes(tiny_qwen3(head_dim=64))
    made = sizes.made(arms.ARMS["no-fold"], 400, 40_000).make()
    assert {one.config.policy for one in evicting_caches(made)} == {H2O(fold=False)}
    drawn = arms.Sizes(tiny_qwen3(head_dim=64), seed=3).made(arms.ARMS["random"], 400, 40_000)
    assert {one.config.policy for one in drawn.make()} == {Random(random_seed=3)}


def test_arms_as_people_write_them(tmp_path):
    assert arms.parsed("full") is arms.ARMS["full"]
    (file := tmp_path / "Rows.json").write_text('{"budgets": [7, 8]}')
    found = arms.parsed(f"mine: policy=window kv_bits=8 kv_frame=False v_bits=none budgets={file}")
    assert found.settings == {  # as the file was
        "policy": "window", "kv_bits": 8, "kv_frame": False, "budgets": [7, 8], "v_bits": None
    }  # fmt: skip
    assert not found.sized and arms.parsed("a: kv_bits=4 recent_size=300").sized  # of any rows
    wrong = ("best", "unknown"), ("a: b", "SETTING=VALUE"), ("full: a=1", "taken")
    for text, said in (*wrong, ("a: budgets=rows", "a: budgets=rows.*expected a JSON file")):
        with pytest.raises(ValueError, match=said):
            arms.parsed(text)


# Losses


def test_texts_side_by_side_are_as_alone_and_full_is_the_reference(tiny):
    result = evaluated(tiny, tasks=("loss", "chunks"))
    model, tokenizer = tiny
    one = arms.Arm("whole", settings={"max_kv_size": None, "policy": "window"})
    same = figures(evaluated(tiny, [one]), "whole")
    assert same["kl"] == pytest.approx([0, 0], abs=1e-5) and same["top1"] == [1, 1]
    assert same["loss"] == pytest.approx(figures(result, "full")["loss"], abs=1e-4)
    assert min(figures(result, KEYDIFF.name)["kl"]) > 1e-3
    nbytes = arms.Sizes(model).full(72) // 4
    caches = arms.Sizes(model).made(KEYDIFF, 72, nbytes)
    texts = questions.windows(tokenizer, [("one", TEXT)], count=2, length=72)
    for text, loss in zip(texts, figures(result, KEYDIFF.name)["loss"], strict=True):
        alone = losses(model, caches.make(), text, first=arms.PROMPT)
        assert loss == pytest.approx(alone.mean(), abs=1e-3)
    # In chunks tokens also see their chunk: here the rest of the text.
    whole = figures(result, "full", "chunks")["loss"]
    assert figures(result, KEYDIFF.name, "chunks")["loss"] != pytest.approx(whole, abs=1e-4)
    assert whole == pytest.approx(figures(result, "full")["loss"], abs=1e-4)


@pytest.mark.parametrize("step", [1, 8, 43, 100])
def test_steps_of_any_length_predict_as_one_forward_pass(tiny, step, monkeypatch):
    monkeypatch.setattr(reading, "CHUNK", 3)
    tokens = mx.array([random_prompt(50), random_prompt(50, seed=9)])
    run = reading.forced(tiny[0], make_prompt_cache(tiny[0]), tokens, first=7, step=step)
    logits = tiny[0](tokens[:, :-1])[:, 6:]
    chosen = mx.take_along_axis(logits, tokens[:, 7:, None], axis=-1)[..., 0]
    assert mx.allclose(run.losses, mx.logsumexp(logits, axis=-1) - chosen, atol=1e-3)
    assert mx.array_equal(run.top1, mx.argmax(logits, axis=-1))


@pytest.mark.slow
def test_divergence_is_that_of_the_whole_distribution(demo):
    model, tokenizer = demo
    tokens = mx.array([tokenizer.encode(demo_text())[:24]])
    full = reading.forced(model, make_prompt_cache(model), tokens, first=8, keep=True)
    cache = make_prompt_cache(model, max_kv_size=10)
    found = reading.forced(model, cache, tokens, first=8, reference=full, keep=True)
    p, q = (np.exp(np.array(run.log_weights, np.float64)[0]) for run in (full, found))
    p, q = p / p.sum(axis=-1, keepdims=True), q / q.sum(axis=-1, keepdims=True)
    expected = (p * np.log(p / q)).sum(axis=-1)
    np.testing.assert_allclose(np.array(found.divergences)[0], expected, atol=2e-3)
    assert expected[-1] > 0.01


# Facts, chats, samples, writing


@pytest.mark.parametrize("wording", facts.WORDINGS)
def test_facts_of_every_wording(demo, wording):
    drawn = facts.draw(demo[1], wording, 3, random.Random(1))
    assert len({tuple(map(len, one)) for one in drawn}) == 1
    for one in drawn:
        places = range(len(one.line) - len(one.answer) + 1)
        assert any(one.line[start : start + len(one.answer)] == one.answer for start in places)
    assert len({one.question for one in drawn}) == 3
    with pytest.raises(ValueError, match="found 0 facts .* too few words for keys"):
        facts.draw(tiny_tokenizer(), wording, 3, random.Random(1))


def test_questions_are_of_every_wording_and_their_answers_stand_in_the_text(demo):
    tokenizer = demo[1]
    settings = Settings(documents=2, facts=8, lengths=(400,))
    for asked in questions.planted_texts(tokenizer, [("one", demo_text())], 400, settings):
        assert len(asked.text) == 399 and len(asked.asked) == 8
        said = tokenizer.decode(list(asked.text))
        prompts = [tokenizer.decode(list(prompt[1:])) for prompt, _ in asked.asked]
        assert all(tokenizer.decode(list(answer)).strip() in said for _, answer in asked.asked)
        for words in (" is", "number of", "password", "magic number"):
            assert sum(words in prompt for prompt in prompts) >= 2, words


def test_what_begins_a_text_begins_each_window_and_counts():
    def encode(text, add_special_tokens=True):
        return [1] * add_special_tokens + [7] * len(text)

    tokenizer = SimpleNamespace(bos_token_id=1, encode=encode)
    found = questions.windows(tokenizer, [("a", "b" * 50)], count=2, length=20)
    assert found == [(1, *[7] * 19)] * 2


def test_a_wrong_token_does_not_count_for_those_behind_it():
    """A model that always answers with the next number, and never goes beyond 3."""

    def model(tokens, cache):
        return mx.eye(8)[mx.minimum(tokens + 1, 3)]

    right = reading.answers(model, [], mx.array([[0], [0]]), mx.array([[1, 2, 3], [1, 4, 3]]))
    assert right.tolist() == [[True, True, True], [True, False, True]]


def test_questions_leave_the_caches_as_they_were(tiny):
    caches = mlx_h2o.make_prompt_cache(tiny[0], 32)
    with routing_for(tiny[0], caches):
        reading.read(tiny[0], caches, mx.array([random_prompt(90)]), 16)
        before = mx.array(caches[0].positions), mx.array(caches[-1].keys)
        reading.answers(tiny[0], caches, mx.array([[5, 6]]), mx.array([[7, 8]]))
    assert caches[0].offset == 90
    assert mx.array_equal(before[0], caches[0].positions)
    assert mx.array_equal(before[1], caches[-1].keys)


@pytest.mark.slow
def test_the_full_cache_recalls_what_a_small_window_does_not(demo):
    settings = Settings(documents=1, lengths=(500,), facts=4)
    given = {"tasks": ("facts",), "shares": [Fraction(1, 16)], "settings": settings}
    result = evaluation(*demo, [("one", demo_text())], FEW[:2], **given)
    full, window = (np.mean(figures(result, arm, "facts")["tokens"]) for arm in ("full", "window"))
    assert full > window + 0.2


def test_a_chat_asks_for_the_first_turn(demo, monkeypatch):
    tokenizer = demo[1]
    settings = Settings(documents=1, facts=4, lengths=(400,))
    (chat,) = questions.chats(tokenizer, [("one", demo_text())], 400, settings)
    first, _, second = tokenizer.decode(list(chat.text)).partition("I have read it.")
    assert first.startswith("User: Read this:") and "And this:" in second
    for _, answer in chat.asked:
        assert tokenizer.decode(list(answer)).strip() in first
    # The end of the second turn begins each question.
    assert all(prompt[:1] == chat.asked[0][0][:1] for prompt, _ in chat.asked)
    monkeypatch.setattr(questions, "_front", lambda tokenizer: (-1,))
    (marked,) = questions.chats(tokenizer, [("one", demo_text())], 400, settings)
    assert marked.text[0] == -1 and -1 not in marked.text[1:]  # what begins a text is there once


def test_samples_of_ruler(demo, tmp_path):
    file = tmp_path / "ruler.jsonl"
    sample = {"input": "One is: 12.\nTwo is: 34.\nWhat is One? One is", "outputs": ["12"]}
    file.write_text(json.dumps(sample) + "\n")
    (found,) = questions.samples(demo[1], str(file), 3)
    ((prompt, answer),) = found.asked
    decode = demo[1].decode
    assert decode(list(found.text)) == "One is: 12.\nTwo is: 34.\n"
    assert (decode(list(prompt)), decode(list(answer))) == ("What is One? One is", " 12")
    merging = SimpleNamespace(encode=lambda text, **_: [*map(ord, text.replace("s 1", "@"))])
    (found,) = questions.samples(merging, str(file), 3)
    assert found.asked[0][1] == tuple(map(ord, " 12"))  # no token of it is in the question's
    for text in ("{}", json.dumps(sample | {"input": "all\n"}), ""):
        file.write_text(text)
        said = "line 1 is not a RULER sample" if text else "has no samples of RULER"
        with pytest.raises(ValueError, match=said):
            questions.samples(demo[1], str(file), 3)


def test_writing_stays_within_its_bytes(tiny):
    result = evaluated(tiny, [arms.ARMS["full"], KEYDIFF], tasks=("writing",))
    again = evaluated(tiny, [KEYDIFF], tasks=("writing",))
    found = figures(result, KEYDIFF.name, "writing")
    assert figures(again, KEYDIFF.name, "writing") == found
    assert 0 < found["distinct"][0] <= 1 and found["bytes"] == [1, 1]
    assert found["loss"] != figures(result, "full", "writing")["loss"]


# Results


def test_intervals_are_those_of_the_pairs():
    one, other = [1.0, 2.0, 3.0, 4.0], [0.5, 1.5, 2.5, 3.5]
    assert paired(one, other) == paired(other, [0, 1, 2, 3])
    assert (paired(one, other).low, paired(one, other).high) == (0.5, 0.5)
    wide = paired([0, 0, 0, 4], [0, 0, 0, 0])
    assert wide.mean == 1 and wide.low == 0 and wide.high >= 2
    even = paired([1, -1] * 200, [0] * 400)  # 95 % of a normal distribution
    assert (even.high - even.low) / 2 * 20 == pytest.approx(1.96, rel=0.06)
    assert math.isnan(paired([1], [2]).low)
    with pytest.raises(ValueError, match="expected as many figures"):
        paired([1, 2], [1])


def test_arms_take_turns_and_each_round_begins_with_another():
    said = []
    arms = {name: lambda name=name: said.append(name) or len(said) for name in "abc"}
    assert in_turns(arms, 2) == {"a": [1, 6], "b": [2, 4], "c": [3, 5]}
    assert "".join(said) == "abcbca"
    assert ratios([2, 9, 4], [1, 3, 1]) == {"min": 2, "median": 3, "max": 4}


def test_speeds_are_of_what_mlx_lm_writes(tiny):
    model, prompt = tiny[0], random_prompt(600)
    makes = {
        "full": lambda: make_prompt_cache(model),
        "ours": lambda: mlx_h2o.make_prompt_cache(model, 32, policy="window", layers="equal"),
    }
    found = timed(model, makes, mx.array(prompt), turns=2, tokens=3)
    assert found["full"].tokens == stock_tokens(model, prompt, 8)
    for one in found.values():
        assert (len(one.prefill), len(one.decode), len(one.tokens)) == (1, 2, 8)
    # Without what the caches of the other kind hold.
    weights = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    assert weights + 600 * 2 * 2 * 2 * 32 * 4 < found["full"].peaks["decode"]
    assert found["ours"].peaks["decode"] < found["full"].peaks["decode"] - 200_000


@pytest.mark.parametrize(
    ("files", "slow"),
    [
        (["mlx_cpu.libs/libblas-bd8a282c.so.3.10.0"], True),
        (["blas/libblas.so.3.11.0", "home/openblas/readme"], True),
        (["openblas-pthread/libblas.so.3"], False),
        (["mlx_cpu.libs/libblas-bd8a282c.so.3", "lib/libmkl_rt.so.2"], False),
        (["x86_64-linux-gnu/libblake3.so.1"], False),
    ],
)
def test_a_slow_blas_is_said(files, slow, tmp_path):
    maps = tmp_path / "maps"
    maps.write_text("".join(f"7f00-7f10 r-xp 00 08:01 42  /usr/{name}\n" for name in files))
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    assert bool(slow_blas(maps)) is (slow and on_cpu)


def test_a_result_is_taken_up_again(tiny, tmp_path):
    file, said = tmp_path / "found.json", []
    first = evaluated(tiny, FEW[:2], file=file, watch=lambda *told: said.append(told))
    assert {name for name, *_ in said} == {"loss 72, full", "loss 72, window at 1/4"}
    said.clear()
    before = json.loads(file.read_text())
    del before["settings"]["wordings"]  # as of files from before there were any
    assert before.pop("arm") == {} and before.pop("fingerprint")
    refused = {"refused": "once", "arm": KEYDIFF.name}  # is tried again
    before["records"].append({**before["records"][1], **refused})
    del before["records"][2]["figures"]
    file.write_text(json.dumps(before))
    again = evaluated(tiny, FEW, file=file, watch=lambda *told: said.append(told[0]))
    assert again["records"][:2] == first["records"] and len(again["records"]) == 4
    assert all("figures" in one for one in again["records"])
    assert not any("full" in one or "window" in one for one in said)
    assert json.loads(file.read_text()) == again
    with pytest.raises(ValueError, match="measurements of another settings"):
        evaluated(tiny, file=file, settings=Settings(documents=1, length=72))
    for name, given in (
        ("arm", (tiny, [arms.Arm(KEYDIFF.name, settings=FOUR)])),
        ("fingerprint", ((tiny_qwen3(head_dim=32, seed=1), tiny[1]),)),
    ):
        with pytest.raises(ValueError, match=f"measurements of another {name}"):
            evaluated(*given, file=file)
    file.write_text(json.dumps(again | {"environment": again["environment"] | {"mlx": "0.1"}}))
    with pytest.raises(ValueError, match="measurements of another environment"):
        evaluated(tiny, file=file)
    edits = {"bytes": "x"}, {"share": "1/0"}, {"arm": []}, {"tokens": "7"}, {"figures": {"loss": 1}}
    records = ([again["records"][0] | edit] for edit in edits)
    edited = (json.dumps(again | {"records": one}).encode() for one in (*records, ["figures"]))
    for wrong in (b"[]", b"\xff", b"[" * 10**5, *edited):
        file.write_bytes(wrong)
        with pytest.raises(ValueError, match="is not a result of evaluate"):
            evaluated(tiny, file=file)


def test_a_table_shows_differences_to_the_full_cache(tiny):
    result = evaluated(tiny)
    lines = [line.split(" | ") for line in report.table(result, against="window").splitlines()]
    head, _, *rows = [[cell.strip("| ") for cell in line] for line in lines]
    assert head == ["of the bytes", "cache", "loss", "to window", "KL", "top 1"]
    assert [row[0] for row in rows] == ["1.00", "0.56", "1/4", "1/4"]
    assert [row[1] for row in rows] == ["full", "kv8", "window", KEYDIFF.name]
    apart = paired(figures(result, KEYDIFF.name)["loss"], figures(result, "full")["loss"])
    assert rows[3][2].startswith(f"{apart.mean:+.3f} [") and rows[3][3].startswith("[")
    assert rows[2][3] == "-" and report.markdown(["a|b"], []).startswith("| a\\|b |\n")
    one = evaluated(tiny, FEW[:2], settings=replace(SETTINGS, documents=1))
    assert float(report.rows(one)[1][1][2])  # one text has no interval
    mean = np.mean(figures(result, "window")["loss"])  # with no full cache to compare with
    assert report.rows(result | {"records": result["records"][1:]})[1][1][2] == f"{mean:.2f}"


def test_a_plot_has_a_point_for_each_arm(tiny, tmp_path):
    pytest.importorskip("altair")
    result = evaluated(tiny)
    report.plot(result, tmp_path / "loss.json")
    drawn = json.loads((tmp_path / "loss.json").read_text())
    parts = [drawn] if "data" in drawn else drawn["layer"]
    (points,) = {json.dumps(one["data"]) for one in parts}
    caches = [one["cache"] for one in json.loads(points)["values"]]
    assert caches == [FEW[at].name for at in (0, 2, 1, 3)]
    report.plot(result, page := tmp_path / "loss.html")
    assert "jsdelivr" not in page.read_text()  # can be read offline
    with pytest.raises(ValueError, match="nothing of the task facts"):
        report.plot(result, tmp_path / "facts.json", "facts")
