"""The Metal path of the C interface on a recording device: its launches match Python's."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import pytest

import c_api_build
from back_ends import registered
from c_api import ATTENTION, CODES, CError, Library
from emulator.backend import Launched, Recorder
from emulator.cases import CHUNK, CHUNKS, Case, check_chunk
from mlx_h2o.operations import requests
from mlx_h2o.operations.gpu import kernels, launch
from parity import runner
from parity.c_leg import CBackend
from parity.legs import EmulatorLeg, PackageLeg

Record = dict[str, list[str]]


@pytest.fixture(scope="module")
def metal(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Library:
    """The H2O part on the fake Metal device."""
    declared = "const char* fake_metal_record(void); int fake_metal_kernels_made(void);"
    return c_api_build.faked(tmp_path_factory, "fake_metal", declared=declared)


def recorded(library: Library) -> Record:
    """What the fake Metal device was given since the last call."""
    text = library.ffi.string(library.c.fake_metal_record()).decode()
    found: Record = defaultdict(list)
    for line in text.split("\x1e")[:-1]:
        key, value = line.split("\x1f")
        found[key].append(value)
    return found


def code(value: Any) -> str:
    """A dtype or a number, as the record has them."""
    named = isinstance(value, mx.Dtype)
    return str(CODES[str(value).removeprefix("mlx.core.")] if named else int(value))


def words(numbers: Iterable[Any]) -> str:
    return " ".join(map(code, numbers))


def planned(launched: Launched) -> Record:
    """The same record of what the Python package launches."""
    record: Record = defaultdict(list)
    for each, inputs in launched:
        outputs = zip(each.output_shapes, each.output_dtypes, strict=True)
        lines = {
            "name": [each.kernel.name],
            "inputs": [" ".join(each.kernel.inputs)],
            "outputs": [" ".join(each.kernel.outputs)],
            "source": [each.kernel.source],
            "header": [kernels.HEADER],
            "switches": ["0 0"],
            "grid": [words(each.grid)],
            "threadgroup": [words(each.threadgroup)],
            "input": [words(array.shape) for array in inputs],
            "output": [f"{words(shape)}:{code(dtype)}" for shape, dtype in outputs],
        }
        lines |= {f"template {name}": [code(value)] for name, value in each.template}
        for key, values in lines.items():
            record[key] += values
    return record


@pytest.mark.slow
def test_launches_are_those_of_the_python_package(metal: Library) -> None:
    """Every parity case that the kernels serve: each kernel, with every flag on and off."""
    assert metal.backend_status("metal") == (True, "")
    recorder, backend = Recorder(), CBackend(metal, "c-metal", "")
    python, c = EmulatorLeg(), PackageLeg("c-metal")
    before, names = metal.c.fake_metal_kernels_made(), set()
    with registered("emulator", recorder), registered("c-metal", backend):
        for case in runner.all_cases(0):
            if case.fields["op"] in ("trace", "fold"):  # those no kernel serves
                continue
            recorder.launched.clear()
            if python.outcome(case).refused:
                continue
            c.outcome(case)
            expected = planned(recorder.launched)
            assert recorded(metal) == expected, case.name
            names |= {*expected["name"]}
    assert len(names) > 100 and metal.c.fake_metal_kernels_made() - before == len(names)


@pytest.mark.parametrize("case", CHUNKS, ids=str)
def test_mlx_serves_a_chunk(metal: Library, case: Case) -> None:
    recorded(metal)
    check_chunk(case.request(), CBackend(metal, "c-metal", "metal").attend)
    assert recorded(metal) == {}


MORE = {"scores": True}, {"lse": True}, {"mask": "add-f32"}, {"kv_format": "turbo3"}


@pytest.mark.parametrize("more", [*MORE, {"bits": (8, 8), "sparse": 1e-3}], ids=str)
def test_mlx_serves_no_more_than_the_output(metal: Library, more: dict[str, Any]) -> None:
    request = Case(**CHUNK | more).request()
    with pytest.raises(CError, match="decode kernels take up to 8 queries, found Lq = 150"):
        CBackend(metal, "c-metal", "metal").attend(request)


REFUSED = {
    "decode kernels take up to 8 queries, found Lq = 9": (9, 32, 32),
    "the kernels take head sizes that are multiples of 32 up to 576, found D = 40": (1, 40, 32),
    "the kernels take head sizes that are multiples of 32 up to 576, found Dv = 608": (1, 32, 608),
}


@pytest.mark.parametrize("text", REFUSED)
def test_metal_refuses_in_the_words_of_the_python_package(metal: Library, text: str) -> None:
    length, d, dv = REFUSED[text]
    arrays = [mx.zeros(shape) for shape in ((1, 1, length, d), (1, 1, 9, d), (1, 1, 9, dv))]
    request = requests.attention_request(*arrays, scale=1.0)
    assert launch.refuses(request) == text
    recorded(metal)
    with pytest.raises(CError) as caught, metal.using("metal"):
        metal.attention(*arrays, scale=1.0)
    assert str(caught.value) == f"[{ATTENTION}] back end 'metal' cannot serve this call: {text}"
    metal.attention(*arrays, scale=1.0)
    assert recorded(metal) == {}  # unnamed, it was composed
