"""Routing contexts: counted, and closed by exceptions, garbage collection and threads alike."""

import gc
import linecache
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from mlx_h2o import routing
from mlx_h2o.lm.routing import NAME, replaced
from routing_checks import base, llama, patched, qwen3, stream
from tiny_models import tiny_llama, tiny_qwen3

pytestmark = pytest.mark.usefixtures("mlx_lm_stays_as_it_is")

attention = base.scaled_dot_product_attention


def test_contexts_are_counted():
    one, other = tiny_qwen3(), tiny_llama()
    with routing(one):
        with routing(one), routing(other):
            assert patched(qwen3)
            assert patched(llama)
        assert patched(qwen3)
        assert not patched(llama)
    assert not patched(qwen3)


def test_an_exception_closes_the_context():
    with pytest.raises(KeyError, match="inside"), routing():
        raise KeyError("inside")
    assert not patched(qwen3)


def test_contexts_may_close_in_any_order():
    first, second = routing(tiny_qwen3()), routing()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert patched(qwen3)
    second.__exit__(None, None, None)
    assert not patched(qwen3)


def test_what_others_replaced_meanwhile_is_left_to_them():
    model = tiny_qwen3()
    original = qwen3.scaled_dot_product_attention

    def theirs(*args, **kwargs):
        return None

    with routing(model):
        qwen3.scaled_dot_product_attention = theirs
    assert qwen3.scaled_dot_product_attention is theirs
    qwen3.scaled_dot_product_attention = original


def test_an_abandoned_generator_closes_its_context():
    responses = stream(tiny_qwen3())
    next(responses)
    assert patched(qwen3)
    del responses
    gc.collect()
    assert not patched(qwen3)


def test_a_generator_that_was_never_started_replaces_nothing():
    responses = stream(tiny_qwen3())
    assert not patched(qwen3)
    del responses


@pytest.mark.slow
def test_interleaved_generators_do_not_disturb_each_other():
    model, other = tiny_qwen3(), tiny_llama()
    alone = [[r.token for r in stream(m, 40)] for m in (model, other)]
    one, two = stream(model, 40), stream(other, 40)
    found = [[], []]
    for first, second in zip(one, two, strict=True):
        found[0].append(first.token)
        found[1].append(second.token)
    assert found == alone


def test_the_collector_may_close_a_context_while_another_opens():
    """Left while the same thread holds the lock: no deadlock, nothing lost."""
    left = replaced([first := {NAME: attention}])
    left.__enter__()
    assert first[NAME].__wrapped__ is attention

    class Closing(dict):
        def __setitem__(self, name, value):
            if hasattr(value, "__wrapped__"):
                left.__exit__(None, None, None)  # as if the collector ran just here
            super().__setitem__(name, value)

    with replaced([second := Closing({NAME: attention})]):
        assert first == {NAME: attention} and second[NAME].__wrapped__ is attention
    assert second == {NAME: attention}


@pytest.mark.matrix(20)
@pytest.mark.parametrize("after", range(1, 60))
def test_ctrl_c_at_any_step_leaves_nothing(after):
    """Ctrl-C while opening or closing, as the line of this number begins."""
    namespaces = [{NAME: attention}, {NAME: (other := lambda: None)}]
    lines = 0

    def press(frame, event, argument):
        nonlocal lines
        if frame.f_globals.get("__name__") == replaced.__module__ and event == "line":
            # Python looks for signals behind calls: not between a block's end and its exit.
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            lines += "with _lock" not in line
            if lines == after and "with _lock" not in line:
                raise KeyboardInterrupt
        return press

    before = sys.gettrace()
    sys.settrace(press)
    try:
        with replaced(namespaces):
            pass
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    with replaced([{NAME: attention}]):  # what was interrupted is done now
        pass
    assert namespaces == [{NAME: attention}, {NAME: other}]


@pytest.mark.slow
def test_many_threads_open_and_close():
    model = tiny_qwen3()
    original = qwen3.scaled_dot_product_attention

    def work(_):
        for _ in range(50):
            with routing(model):
                assert patched(qwen3)

    with ThreadPoolExecutor(8) as pool:
        assert len([*pool.map(work, range(8), timeout=120)]) == 8
    assert qwen3.scaled_dot_product_attention is original
