"""Our caches on one architecture of each kind; ``nox -s models`` tries every one."""

import re

import mlx.core as mx
import pytest

from mlx_h2o import make_prompt_cache, routing
from mlx_h2o.lm.models import _PADDED
from models import table, tiny
from models.check import Verdict, check

SERVED = {
    "llama": (4, 4),
    "gpt_oss": (2, 4),  # sinks, and sliding windows in every other layer
    "deepseek_v3": (4, 4),  # latents, and additive masks for every head
    "longcat_flash": (4, 4),  # two caches a layer
    "qwen3_next": (1, 4),  # linear attention beside
    "gemma3n": (1, 2),  # layers that share their rows
    "falcon_h1": (4, 4),  # a recurrence beside attention in every layer
}


@pytest.mark.slow
@pytest.mark.matrix(1)
@pytest.mark.parametrize("name", SERVED)
def test_what_is_served_keeps_its_promises(name):
    verdict = check(name)
    assert (verdict.evicting, verdict.layers) == SERVED[name]
    assert not verdict.refused
    assert not table.broken([verdict])
    assert not verdict.h2o
    assert not verdict.keydiff
    assert not verdict.quantised


def test_a_model_without_scores_is_refused_by_routing():
    model = tiny.build("gemma2")
    with pytest.raises(ValueError, match=r"\[routing\] gemma2 does not call"), routing(model):
        pytest.fail("entered")


@pytest.mark.slow
def test_a_model_without_scores_serves_the_policies_that_need_none():
    verdict = check("gemma2")
    assert "scores cannot be had" in verdict.h2o
    assert not verdict.keydiff
    assert not verdict.quantised


def test_a_model_that_reads_slots_is_refused_before_it_runs():
    assert "by their slot" in check("phi3small").refused


def reads_padding(model) -> bool:
    """Whether a sequence that is read beside a longer one goes on otherwise than alone."""
    short, long, caches = [7, 5, 9, 4], [*range(3, 20)], make_prompt_cache(model, max_kv_size=None)
    both = [one.merge([one, one]) for one in caches]
    model(mx.array([short]), cache=caches)
    wanted = model(mx.array([[2]]), cache=caches)[0]
    for one in both:
        one.prepare(lengths=[4, 17], right_padding=[13, 0])
    model(mx.array([short + [0] * 13, long]), cache=both)
    for one in both:
        one.finalize()
    found = model(mx.array([[2], [2]]), cache=both)[0]
    return bool(mx.abs(found - wanted).max() > 2e-5 * (wanted.max() - wanted.min()))


@pytest.mark.slow
def test_models_that_take_padding_for_text_are_known():
    found = set()
    for name in tiny.architectures():
        try:
            padded = reads_padding(tiny.build(name))
        except (tiny.NotBuiltError, AttributeError, RuntimeError, ValueError) as error:
            padded = "length-1 arrays" in str(error)  # as mlx_lm's gpt_bigcode says
        found |= {name} if padded else set()
    assert found == {*_PADDED.split()}


def test_a_model_without_plain_caches_is_said():
    assert check("mamba").absent == "no layer has a plain KVCache"


def test_every_model_file_is_in_the_table():
    names = tiny.architectures()
    assert len(names) > 100
    committed = (table.PAGE).read_text(encoding="utf-8")
    shown = {*re.findall(r"`([^`]+)`|^\| ([^|]+) \|", committed.partition(table.START)[2], re.M)}
    assert not {*names} - {name for pair in shown for name in pair}


def test_a_broken_promise_is_told_from_a_refusal():
    verdicts = [
        Verdict("one", h2o="broken: 3 rows, expected at most 2"),
        Verdict("two", h2o="[routing] two does not call it, so: expected another"),
    ]
    assert table.broken(verdicts) == ["one: h2o: broken: 3 rows, expected at most 2"]
    assert "| two | partly | two does not call it, so |" in table.table(verdicts, "1")
