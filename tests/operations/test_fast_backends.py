"""The choice of a back end, and what importing the package does."""

import contextlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import pytest

import mlx_h2o
from back_ends import registered
from mlx_h2o import backends, fast, use_backend
from mlx_h2o.operations import composed, requests
from mlx_h2o.operations.backends import ENVIRONMENT, forget, get, named, resolve
from mlx_h2o.operations.resolved import COMPOSED, Operations
from programs import ended

PACKAGE = Path(mlx_h2o.__file__).parents[1]


class Recorder(Operations):
    """A back end that notes its calls and computes with the composed one."""

    name = "recorder"

    def __init__(self, *, refusal: str = "", missing: str = "") -> None:
        self.refusal, self.missing = refusal, missing
        self.calls = 0

    def unavailable_reason(self) -> str:
        return self.missing

    def refuses(self, request: requests.AttentionRequest) -> str:
        return self.refusal

    def attend(self, request: requests.AttentionRequest):
        self.calls += 1
        return super().attend(request)


@pytest.fixture(autouse=True)
def _environment_is_read_again():
    forget()
    yield
    forget()


@pytest.fixture
def recording():
    with contextlib.ExitStack() as there:

        def add(**settings: str) -> Recorder:
            backend = Recorder(**settings)
            there.enter_context(registered("recorder", backend))
            return backend

        yield add


def attend(rows: int = 5):
    q, k = mx.zeros((1, 2, 1, 32)), mx.zeros((1, 1, rows, 32))
    return fast.scaled_dot_product_attention_with_scores(q, k, k, scale=1.0)


def test_backends_says_what_runs_and_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    forget()
    found = backends()
    assert list(found)[:4] == ["metal", "cuda", "native", "composed"]
    assert found["composed"].available
    assert sum(status.default for status in found.values()) == 1
    for name, status in found.items():
        assert status.name == name
        assert status.available == (status.reason == "")
        assert status.available or not status.default
        assert not status.advice or not status.available


@pytest.mark.skipif(mx.default_device().type != mx.DeviceType.cpu, reason="of CPUs")
def test_the_advice_is_for_what_is_better() -> None:
    ask = "import mlx_h2o; print([each.advice[:20] for each in mlx_h2o.backends().values()])"
    told = ["", "", "install the Linux wh", ""]
    assert python("sys.modules['mlx_h2o._core'] = None\n" + ask).stdout == f"{told}\n"


def test_a_named_back_end_serves(recording) -> None:
    recorder = recording()
    attend()
    assert recorder.calls == 0, "a registered back end serves only calls that name it"
    with use_backend("recorder"):
        attend()
        with use_backend(None):
            attend()
        with use_backend("composed"):
            attend()
        attend()
    attend()
    assert recorder.calls == 2


def test_a_named_back_end_refuses_what_it_cannot(recording) -> None:
    recording(refusal="N is odd")
    refusal = "back end 'recorder' cannot serve this call: N is odd"
    said = rf"^\[scaled_dot_product_attention_with_scores\] {refusal}$"
    with use_backend("recorder"), pytest.raises(ValueError, match=said):
        attend()


def test_a_back_end_that_is_not_available(recording, monkeypatch: pytest.MonkeyPatch) -> None:
    recording(missing="no such device")
    refusal = "back end 'recorder' is not available: no such device"
    with pytest.raises(ValueError, match=rf"^\[use_backend\] {refusal}"), use_backend("recorder"):
        pass
    monkeypatch.setenv(ENVIRONMENT, "recorder")
    forget()
    with pytest.raises(ValueError, match=rf"^\[scaled_dot_.*\] {refusal}"):
        attend()
    scores, positions = mx.zeros((1, 1, 4)), mx.zeros((1, 1, 4), mx.int32)
    with pytest.raises(ValueError, match=rf"^\[keep_indices\] {refusal}"):
        fast.keep_indices(scores, positions, keep=1)


def test_metal_and_cuda_refuse_on_a_machine_without_them() -> None:
    unavailable = [name for name in ("metal", "cuda") if not backends()[name].available]
    assert unavailable, "no machine has both"
    for name in unavailable:
        with pytest.raises(ValueError, match="is not available: "), use_backend(name):
            pass


@pytest.mark.parametrize("name", ["", "Metal", "gpu", "emulator2"])
def test_an_unknown_back_end(name: str) -> None:
    said = r"^\[use_backend\] unknown back end .*, expected one of met"
    with pytest.raises(ValueError, match=said), use_backend(name):
        pass


def test_the_environment_names_the_process_default(
    recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = recording()
    monkeypatch.setenv(ENVIRONMENT, "recorder")
    forget()
    assert backends()["recorder"].default
    attend()
    with use_backend("composed"):
        attend()
    assert recorder.calls == 1
    monkeypatch.setenv(ENVIRONMENT, "nonsense")
    forget()
    with pytest.raises(ValueError, match=f"{ENVIRONMENT} names the back end 'nonsense', expected"):
        attend()
    monkeypatch.setenv(ENVIRONMENT, "")
    forget()
    attend()


def test_a_name_holds_for_its_thread_and_is_undone_by_an_exception() -> None:
    with pytest.raises(KeyError), use_backend("composed"), ThreadPoolExecutor(1) as pool:
        seen = pool.submit(named).result()
        assert named() == "composed"
        raise KeyError
    assert seen == named()


def test_selection_falls_back_to_composed_where_a_back_end_has_none(recording) -> None:
    recording()
    with use_backend("recorder"):
        assert resolve().keep_indices is composed.keep_indices


def test_what_is_resolved_follows_the_name_and_the_device(recording) -> None:
    recording()
    first = resolve()
    assert resolve() is first
    with use_backend("recorder"):
        named = resolve()
        assert named is not first and named is resolve()
        with mx.stream(mx.cpu):
            assert resolve() is not first
    with use_backend("composed"):
        assert resolve() is COMPOSED
    assert resolve() is first


def test_unnamed_the_composed_back_end_serves_what_others_refuse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    forget()
    q = mx.zeros((1, 2, 1, 32))
    request = requests.attention_request(q, q, q, scale=1.0)
    for name in ("native", "metal", "cuda"):
        if backends()[name].available:
            monkeypatch.setattr(get(name), "refuses", lambda request: "not today")
    assert resolve().serving(request) is COMPOSED


# Importing


def python(code: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.path.insert(0, {str(PACKAGE)!r})\n{code}"
    return ended(sys.executable, "-c", code)


BLOCK = """
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r} or name.startswith({name!r} + "."):
            raise ImportError(f"{{name}} is blocked")
sys.meta_path.insert(0, Blocked())
"""


def test_without_mlx_the_import_says_what_to_install() -> None:
    result = python(BLOCK.format(name="mlx") + "import mlx_h2o")
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: mlx_h2o needs MLX with a back end")
    assert "pip install 'mlx-h2o[cpu]'" in last and "pip install 'mlx-h2o[cuda13]'" in last
    assert "mlx is blocked" in last or "mlx.core is blocked" in last


def test_the_import_leaves_mlx_lm_alone() -> None:
    result = python("import mlx_h2o; print(any(m.split('.')[0] == 'mlx_lm' for m in sys.modules))")
    assert result.stdout.strip() == "False", result.stderr


def test_the_operations_work_without_mlx_lm_and_without_the_native_part() -> None:
    code = (
        BLOCK.format(name="mlx_lm")
        + BLOCK.format(name="mlx_h2o._core")
        + "import mlx_h2o, mlx.core as mx\n"
        "q = mx.ones((1, 2, 1, 32))\n"
        "out, scores = mlx_h2o.fast.scaled_dot_product_attention_with_scores(q, q, q, scale=1.0)\n"
        "mx.eval(out, scores)\n"
        "status = mlx_h2o.backends()['native']\n"
        "print(out.shape, status.available, status.reason)"
    )
    result = python(code)
    assert result.stdout.startswith("(1, 2, 1, 32) False the extension"), result.stderr


def test_public_names() -> None:
    for name in mlx_h2o.__all__:
        assert getattr(mlx_h2o, name) is not None
    assert set(mlx_h2o.__all__) <= set(dir(mlx_h2o))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = mlx_h2o.nonsense


@pytest.mark.slow
def test_functions_are_not_hidden_by_the_modules_of_the_same_name() -> None:
    code = (
        "import mlx_h2o.lm.generate, mlx_h2o.lm.routing, mlx_h2o.operations.backends\n"
        "import mlx_h2o, types\n"
        "names = ('generate', 'routing', 'backends')\n"
        "print([isinstance(getattr(mlx_h2o, n), types.FunctionType) or type(getattr(mlx_h2o, n))"
        " for n in names])"
    )
    result = python(code)
    assert "module" not in result.stdout and result.returncode == 0, result.stdout + result.stderr
