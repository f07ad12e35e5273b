"""The Metal path of the C interface on a device that records: its launches are Python's."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import pytest

import c_api_build
import c_api_operations
from c_api import CODES, CError, Library
from mlx_h2o.config import KV_FORMATS
from mlx_h2o.operations import requests
from mlx_h2o.operations.composed import buffers, turbo
from mlx_h2o.operations.gpu import kernels, launch, launch_prefill, launch_rows
from mlx_h2o.operations.gpu.launches import LaunchPlan

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
MASKS = {
    "none": lambda rows: None,
    "causal": lambda rows: "causal",
    "bool": lambda rows: mx.ones((3, rows), mx.bool_),
    "additive": lambda rows: mx.zeros((2, 1, 1, rows), mx.bfloat16),
}
# Both sides of the boundary of two passes, and where the number of blocks grows.
ROWS = (40, 1023, 1024, 2048)

Record = dict[str, list[str]]


@pytest.fixture(scope="module")
def metal(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Library:
    """The H2O part on the fake Metal device."""
    directory = tmp_path_factory.mktemp("metal")
    objects = c_api_build.whole(tmp_path_factory)
    fake = c_api_build.compile_one(c_api_build.FAKES / "fake_metal.cpp", directory / "fake.o")
    built = c_api_build.link(directory, "metal", [fake, *objects])
    built.ffi.cdef("const char* fake_metal_record(void); int fake_metal_kernels_made(void);")
    return built


def recorded(library: Library) -> Record:
    """What the fake Metal device was given since the last call."""
    text = library.ffi.string(library.c.fake_metal_record()).decode()
    found: Record = defaultdict(list)
    for line in text.split("\x1e")[:-1]:
        key, value = line.split("\x1f")
        found[key].append(value)
    return found


def code(dtype: mx.Dtype) -> int:
    return CODES[str(dtype).removeprefix("mlx.core.")]


def words(numbers: Iterable[Any]) -> str:
    return " ".join(str(int(number)) for number in numbers)


def planned(*plans: LaunchPlan) -> Record:
    """The same record of launches that the Python package plans."""
    record: Record = defaultdict(list)
    for plan in plans:
        _add(record, plan)
    return record


def _add(record: Record, plan: LaunchPlan) -> None:
    made: dict[str, mx.array] = dict(plan.given)
    for each in plan.passes:
        shapes = zip(each.output_shapes, each.output_dtypes, strict=True)
        outputs = [f"{words(shape)}:{code(dtype)}" for shape, dtype in shapes]
        lines = {
            "name": [each.kernel.name],
            "inputs": [" ".join(each.kernel.inputs)],
            "outputs": [" ".join(each.kernel.outputs)],
            "source": [each.kernel.source],
            "header": [kernels.HEADER],
            "switches": ["0 0"],
            "grid": [words(each.grid)],
            "threadgroup": [words(each.threadgroup)],
            "input": [words(array.shape) for array in each.inputs(made)],
            "output": outputs,
        }
        for name, value in each.template:
            number = code(value) if isinstance(value, mx.Dtype) else int(value)
            lines[f"template {name}"] = [str(number)]
        for key, values in lines.items():
            record[key] += values
        shaped = zip(each.kernel.outputs, each.output_shapes, strict=True)
        made |= {name: mx.zeros(shape) for name, shape in shaped}


def handle(library: Library, argument: Any) -> Any:
    """Arrays, alone or packed, as handles; anything else as it is."""
    if isinstance(argument, tuple):
        return tuple(handle(library, each) for each in argument)
    return library.array(argument) if isinstance(argument, mx.array) else argument


@pytest.mark.slow
def test_dense_launches_are_those_of_the_python_package(metal: Library) -> None:
    assert metal.backend_status("metal") == (True, "")
    sizes = itertools.cycle(((32, 32), (128, 128), (192, 128), (512, 512), (576, 512)))
    flags = ((False, False, False), (True, False, True), (True, True, False))
    before, cases = metal.c.fake_metal_kernels_made(), 0
    names = set()
    for rows, mask_of, dtype, (with_sinks, return_lse, with_bias) in itertools.product(
        ROWS, MASKS.values(), DTYPES, flags
    ):
        d, dv = next(sizes)
        cases += 1
        shapes = ((2, 4, 3, d), (2, 2, rows, d), (2, 2, rows, dv))
        arrays = [mx.zeros(shape, dtype) for shape in shapes]
        mask, sinks = mask_of(rows), mx.zeros((4,), mx.float16) if with_sinks else None
        given = {"mask": mask, "sinks": sinks}
        given["row_bias"] = mx.zeros((2, 2, rows)) if with_bias else None
        more = {"scale": 0.25, "return_lse": return_lse}
        request = requests.attention_request(*arrays, **given, **more)
        results = metal.attention(
            *(metal.array(array) for array in arrays),
            **{name: handle(metal, array) for name, array in given.items()}, **more,
        )  # fmt: skip
        expected = planned(launch.plan(request))
        names |= set(expected["name"])
        assert recorded(metal) == expected
        assert metal.numpy(results["scores"]).shape == (2, 4, 3, rows)
        assert metal.numpy(results["out"]).shape[-1] == dv
    assert cases == 144 and metal.c.fake_metal_kernels_made() - before == len(names)
    # Sinks, biases and masks in one pass and in the first of two; lse where it is written.
    assert len(names) == 9 + 9 + 2


PACKED = [(*bits, group) for bits in ((8, None), (4, 8), (6, 3)) for group in (32, 64)]


def packed(rows: int, d: int, bits: int, group: int, dtype: mx.Dtype) -> tuple[mx.array, ...]:
    return tuple(mx.quantize(mx.zeros((2, 2, rows, d), dtype), group_size=group, bits=bits))


@pytest.mark.parametrize("rows", ROWS)
def test_packed_launches_are_those_of_the_python_package(metal: Library, rows: int) -> None:
    for index, (mask_of, (bits, v_bits, group)) in enumerate(
        itertools.product(MASKS.values(), PACKED)
    ):
        dtype, sparse = DTYPES[index % 3], (0.0, 1e-6)[index % 2]
        q, mask = mx.zeros((2, 4, 3, 128), dtype), mask_of(rows)
        scales = DTYPES[(index + 1) % 3]
        keys = packed(rows, 128, bits, group, scales)
        values = packed(rows, 64, v_bits or bits, group, scales)
        sinks = mx.zeros((4,)) if index % 4 else None
        bias = mx.zeros((2, 2, rows)) if index % 3 else None
        more = {"bits": bits, "v_bits": v_bits, "group_size": group, "scale": 0.25}
        more |= {"sparse_v_threshold": sparse, "return_skipped": index % 4 < 2}
        request = requests.attention_request(
            q, keys, values, mask=mask, sinks=sinks, row_bias=bias,
            return_lse=bool(index % 2), **more,
        )  # fmt: skip
        c_api_operations.quantized_attention(
            metal, *handle(metal, (q, keys, values)), mask=handle(metal, mask),
            sinks=handle(metal, sinks), row_bias=handle(metal, bias), return_lse=bool(index % 2),
            **more,
        )  # fmt: skip
        assert recorded(metal) == planned(launch.plan(request))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_launches_over_codes_are_those_of_the_python_package(
    metal: Library, rows: int, kv_format: str
) -> None:
    index, widths = list(KV_FORMATS).index(kv_format), KV_FORMATS[kv_format]
    dtype, sparse = DTYPES[index % 3], (0.0, 1e-6)[index % 2]
    sides = []
    for bits, size, seed in zip(widths, (128, 64), (turbo.KEYS, turbo.VALUES), strict=True):
        dense = mx.zeros((2, 2, rows, size), dtype)
        of = {0: (dense,), 8: mx.quantize(dense, group_size=32, bits=8)}
        sides.append(tuple(of.get(bits) or turbo.encode_rows(dense, bits, seed)))
    given = [(*parts, None, None)[:3] for parts in sides]
    more = {"bits": widths[0] or 8, "v_bits": widths[1], "group_size": 32, "scale": 0.25}
    more |= {"sparse_v_threshold": sparse, "return_skipped": index % 3 == 0}
    q = mx.zeros((2, 4, 3, 128), dtype)
    request = requests.attention_request(q, *given, mask="causal", return_lse=True, **more)
    found = c_api_operations.quantized_attention(
        metal, *handle(metal, (q, *sides)), mask="causal", return_lse=True, **more
    )
    assert recorded(metal) == planned(launch.plan(request))
    assert metal.numpy(found["out"]).shape == (2, 4, 3, 64)


def test_row_launches_are_those_of_the_python_package(metal: Library) -> None:
    importance, positions = mx.zeros((2, 3, 300)), mx.zeros((2, 3, 300), mx.int32)
    scores = mx.zeros((2, 6, 4, 300))
    c_api_operations.accumulate_scores(metal, *handle(metal, (importance, scores)), decay=0.9)
    expected = launch_rows.accumulate_scores(importance, scores, 0.9)
    assert recorded(metal) == planned(expected)

    rows, zones = handle(metal, (importance, positions)), {"sink_size": 4, "recent_start": 200}
    kept = metal.keep_indices(*rows, 280, **zones)
    expected = launch_rows.keep_rows(importance, positions, 280, **zones)
    assert recorded(metal) == planned(expected)
    assert metal.numpy(kept).shape == (2, 3, 280)


@pytest.mark.parametrize("kind", ["ema", "mass"])
@pytest.mark.parametrize("mask", MASKS)
def test_prefill_launches_are_those_of_the_python_package(
    metal: Library, kind: str, mask: str
) -> None:
    length = 150 if mask in ("none", "causal") else 3
    for index, dtype in enumerate(DTYPES):
        q, k = mx.zeros((2, 4, length, 64), dtype), mx.zeros((2, 2, 170, 64), dtype)
        given, sinks = MASKS[mask](170), mx.zeros((4,)) if index else None
        before = mx.zeros((2, 2, 170)) if index == 1 and kind == "ema" else None
        counted = 128 if index else 2
        found = c_api_operations.prefill_scores(
            metal, *handle(metal, (q, k)), scale=0.5, mask=handle(metal, given),
            sinks=handle(metal, sinks), kind=kind, importance=handle(metal, before), decay=0.9,
            counted=counted,
        )  # fmt: skip
        assert metal.numpy(found).shape == (2, 2, 170)
        # Only the queries that count are handed to the kernels.
        last = counted if kind == "ema" else length
        some = given[:, :, -last:] if isinstance(given, mx.array) and given.ndim == 4 else given
        some = given[-last:] if isinstance(given, mx.array) and given.ndim == 2 else some
        request = requests.attention_request(
            q[:, :, -last:], k, k, scale=0.5, mask=some, sinks=sinks
        )
        plan = launch_prefill.plan(request, before, 0.9 if kind == "ema" else None)
        assert recorded(metal) == planned(plan)


def test_rows_become_codes_by_the_launches_of_the_python_package(metal: Library) -> None:
    """Keys with scales and biases have MLX's own packing beside them."""
    for dtype, kv_format in zip(DTYPES, ("turbo3", "turbo8v4", "turbo0v2"), strict=True):
        bits, v_bits = KV_FORMATS[kv_format]
        new = mx.zeros((2, 2, 3, 64), dtype), mx.zeros((2, 2, 3, 128), dtype)
        plans, stored = [], []
        for rows, width, seed in zip(new, (bits, v_bits), (turbo.KEYS, turbo.VALUES), strict=True):
            parts = {0: 1, 8: 3}.get(width, 2)
            whole = mx.repeat(rows, 3, axis=2)
            stored.append(tuple(buffers.packed(whole, parts, width, 32, seed)))
            if parts == 2:
                plans.append(launch_rows.encode_rows(rows, width, seed))
        slots = mx.zeros((2, 2, 3), mx.uint32)
        found = c_api_operations.quantize_append(
            metal, *handle(metal, (*stored, *new, slots)), bits=bits or 8, group_size=32,
            v_bits=v_bits,
        )  # fmt: skip
        assert recorded(metal) == planned(*plans)
        shapes = [[metal.numpy(part).shape for part in side] for side in found]
        assert shapes == [[part.shape for part in side] for side in stored]


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
    handles = [metal.array(array) for array in arrays]
    with pytest.raises(CError) as caught, metal.using("metal"):
        metal.attention(*handles, scale=1.0)
    op = "scaled_dot_product_attention_with_scores"
    assert str(caught.value) == f"[{op}] back end 'metal' cannot serve this call: {text}"
    metal.attention(*handles, scale=1.0)
    assert recorded(metal) == {}  # unnamed, it was composed
