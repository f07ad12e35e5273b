"""The number of threads, and the native back end under threads, streams and forks of Python."""

import subprocess
import sys
import threading

import mlx.core as mx
import numpy as np
import pytest

import mlx_h2o
from back_ends import NATIVE
from mlx_h2o import fast, use_backend
from mlx_h2o.operations.native import module as native_module
from programs import ended

pytestmark = NATIVE


@pytest.fixture(autouse=True)
def default_threads():
    yield
    mlx_h2o.set_threads(None)


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return ended(sys.executable, "-c", program, environment=environment, timeout=100)


def attend(seed: int, stream: mx.Stream | None = None) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    q = mx.array(rng.standard_normal((1, 8, 1, 32)).astype(np.float32))
    k, v = (mx.array(rng.standard_normal((1, 4, 700, 32)).astype(np.float32)) for _ in "kv")
    importance = mx.full((1, 4, 700), mx.nan)
    mx.eval(q, k, v, importance)
    with use_backend("native"):
        results = fast.attention_and_accumulate(
            q, k, v, importance, scale=0.2, decay=0.9, stream=stream
        )
        ranks = fast.key_diversity(k, stream=stream)
        chunk = fast.prefill_scores(mx.repeat(q, 9, axis=2), k, scale=0.2, stream=stream)
        mx.eval(results, ranks, chunk)
    return [np.array(array) for array in (*results, ranks, chunk)]


def test_the_number_is_what_was_set():
    default = mlx_h2o.threads()
    assert default >= 1
    for count in (1, 3, 256):
        mlx_h2o.set_threads(count)
        assert mlx_h2o.threads() == count
    mlx_h2o.set_threads(np.int64(2))
    assert mlx_h2o.threads() == 2
    mlx_h2o.set_threads(None)
    assert mlx_h2o.threads() == default


@pytest.mark.parametrize("count", [0, -1, 257])
def test_a_number_outside_is_refused(count):
    with pytest.raises(ValueError, match=rf"^\[set_threads\] count is {count}, expected 1 to 256"):
        mlx_h2o.set_threads(count)


@pytest.mark.parametrize("count", [True, 1.0, "2"])
def test_what_is_no_integer_is_refused(count):
    with pytest.raises(TypeError, match=r"^\[set_threads\] count must be an integer, found"):
        mlx_h2o.set_threads(count)


def test_without_the_extension_there_is_one_thread(monkeypatch):
    monkeypatch.setattr(native_module, "extension", lambda: (None, ""))
    mlx_h2o.set_threads(4)
    assert mlx_h2o.threads() == 1


def test_the_default_is_the_affinity():
    program = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
        "import mlx_h2o; print(mlx_h2o.threads())"
    )
    assert run(program, MLX_H2O_THREADS="").stdout.strip() == "1"


def test_the_environment_sets_the_default():
    program = (
        "import mlx_h2o; print(mlx_h2o.threads()); mlx_h2o.set_threads(2); "
        "print(mlx_h2o.threads()); mlx_h2o.set_threads(None); print(mlx_h2o.threads())"
    )
    assert run(program, MLX_H2O_THREADS="3").stdout.split() == ["3", "2", "3"]


@pytest.mark.parametrize("text", ["0", "many", "3x", "257", "-1"])
def test_an_environment_that_says_no_number_makes_the_back_end_unavailable(text):
    program = (
        "import mlx_h2o; status = mlx_h2o.backends(); "
        "print(status['composed'].default, status['native'].reason)"
    )
    result = run(program, MLX_H2O_THREADS=text)
    assert result.stdout.startswith(
        f'True [mlx_h2o] MLX_H2O_THREADS is "{text}", expected a number from 1 to 256'
    ), result.stdout + result.stderr


def test_every_number_of_threads_gives_the_same_bits():
    mlx_h2o.set_threads(1)
    expected = attend(0)
    for count in (2, 3, 7):
        mlx_h2o.set_threads(count)
        for found, one in zip(attend(0), expected, strict=True):
            np.testing.assert_array_equal(found, one)


def test_streams_and_python_threads_at_the_same_time():
    mlx_h2o.set_threads(1)
    expected = {seed: attend(seed) for seed in range(4)}
    mlx_h2o.set_threads(3)
    wrong: list[str] = []

    def many(seed: int) -> None:
        try:
            stream = mx.new_thread_local_stream(mx.cpu) if _THREAD_LOCAL else mx.new_stream(mx.cpu)
            with mx.stream(stream):
                for _ in range(25):
                    for found, one in zip(attend(seed), expected[seed], strict=True):
                        np.testing.assert_array_equal(found, one)
        except Exception as error:  # a thread's exception would be lost
            wrong.append(repr(error))

    callers = [threading.Thread(target=many, args=(seed,)) for seed in expected]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert wrong == []
    assert not any(caller.is_alive() for caller in callers)


_THREAD_LOCAL = hasattr(mx, "new_thread_local_stream")

FORK = """
import os, signal
import numpy as np
import mlx.core as mx
import mlx_h2o
from mlx_h2o import fast
mlx_h2o.set_threads(3)
{before}
child = os.fork()
stream = mx.new_stream(mx.cpu)
with mx.stream(stream):
    signal.alarm(50)
    keys = mx.array(np.random.default_rng(0).standard_normal((4, 8, 300, 32)).astype(np.float32))
    ranks = fast.key_diversity(keys)
    mx.eval(ranks)
    # In one write: the two processes share the pipe.
    os.write(1, f"{{np.abs(np.array(ranks)).sum():.3f}}\\n".encode())
if child:
    print(os.waitpid(child, 0)[1])
"""

USES_THE_POOL = """
keys = mx.ones((4, 8, 300, 32))
mx.eval(fast.key_diversity(keys))
mx.synchronize()
"""


@pytest.mark.slow
@pytest.mark.parametrize("before", ["", USES_THE_POOL], ids=["unused", "used"])
def test_a_forked_child_has_threads_of_its_own(before):
    """MLX's streams do not survive a fork; a new one, with our threads, works in the child."""
    result = run(FORK.format(before=before))
    one, other, status = result.stdout.split()
    assert one == other, result.stdout + result.stderr
    assert (status, result.returncode) == ("0", 0), result.stdout + result.stderr


@pytest.mark.slow
def test_the_process_ends_while_a_stream_still_works():
    program = (
        "import mlx.core as mx; import mlx_h2o; from mlx_h2o import fast; mlx_h2o.set_threads(3)\n"
        "keys = mx.random.normal((4, 8, 5000, 64)); mx.eval(keys)\n"
        "mx.async_eval([fast.key_diversity(keys * i) for i in range(20)])\n"
    )
    for _ in range(3):
        result = run(program)
        assert (result.returncode, result.stderr) == (0, "")
