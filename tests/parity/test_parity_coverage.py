"""Every kernel and both settings of every flag have a parity case on the emulator leg."""

import tomllib
from collections import defaultdict
from collections.abc import Iterator

import mlx.core as mx
import pytest

from emulator.backend import Recorder
from emulator.row_cases import named_emulator
from mlx_h2o.operations.gpu import kernels
from parity import runner
from parity.legs import EmulatorLeg
from paths import ROOT

TABLE = ROOT / "metal" / "variants.toml"
VARIANTS = tomllib.loads(TABLE.read_text("ascii"))
KERNELS = {name for family in VARIANTS["families"].values() for name in family["kernels"]}
DECODE = VARIANTS["families"]["sdpa_vector"]["kernels"]
WITH_KEYS = {name for name, traits in DECODE.items() if "keys" in traits}
QUANTIZED = {name for name, traits in DECODE.items() if "quantized" in traits}

# Flags that are on, and template arguments by name.
Launches = list[tuple[frozenset[str], dict[str, object]]]


def told_apart(kernel: kernels.Kernel) -> tuple[str, frozenset[str]]:
    """The kernel of the table, and the flags that are on; its name says both."""
    name = max((one for one in KERNELS if f"{kernel.name}_".startswith(f"h2o_{one}_")), key=len)
    on = kernel.name.removeprefix(f"h2o_{name}")
    flags = frozenset(flag for flag in kernels.OWN_FLAGS[name] if f"_{flag}" in on)
    assert kernels.kernel_for(name, flags) == kernel
    return name, flags


@pytest.fixture(scope="module")
def launched() -> Iterator[dict[str, Launches]]:
    """What the emulator leg launches in all cases but traces, by kernel; nothing is run."""
    found: dict[str, Launches] = defaultdict(list)
    with named_emulator(recorder := Recorder()):
        leg = EmulatorLeg()
        for case in runner.all_cases(0):
            if case.fields["op"] != "trace" and not leg.absent(case):
                leg.outcome(case)
        for each, _ in recorder.launched:
            name, flags = told_apart(each.kernel)
            found[name].append((flags, dict(each.template)))
        yield found


def test_the_table_is_the_one_that_is_packaged() -> None:
    assert kernels.OWN_FLAGS.keys() == KERNELS
    assert {flag for own in kernels.OWN_FLAGS.values() for flag in own} == {*VARIANTS["flags"]}


def check(kernel: str, launched: Launches) -> None:
    assert launched, f"no parity case launches {kernel}"
    for flag in kernels.OWN_FLAGS[kernel]:
        sides = {flag in flags for flags, _ in launched}
        assert len(sides) == 2, (
            f"no parity case launches {kernel} with {flag} {sides ^ {True, False}}"
        )


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("kernel", sorted(KERNELS))
def test_every_kernel_has_a_case_with_each_flag_on_and_off(kernel: str, launched) -> None:
    check(kernel, launched[kernel])


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_new_kernel_or_flag_without_a_case_fails(launched) -> None:
    with pytest.raises(AssertionError, match="no parity case launches new_kernel"):
        check("new_kernel", launched["new_kernel"])
    some = [each for each in launched["sdpa_vector"] if "sinks" not in each[0]]
    with pytest.raises(AssertionError, match="sdpa_vector with sinks {True}"):
        check("sdpa_vector", some)


def values(launched: Launches, argument: str) -> set[object]:
    return {template[argument] for _, template in launched if argument in template}


@pytest.mark.slow
@pytest.mark.parametrize("kernel", sorted(WITH_KEYS))
def test_decode_cases_have_every_dtype_and_both_kinds_of_causal(kernel: str, launched) -> None:
    assert values(launched[kernel], "CAUSAL") == {False, True}
    assert values(launched[kernel], "T") == {mx.float32, mx.float16, mx.bfloat16}


@pytest.mark.slow
@pytest.mark.parametrize("kernel", sorted(QUANTIZED))
def test_packed_cases_have_bits_apart_and_every_group(kernel: str, launched) -> None:
    assert values(launched[kernel], "G") == {32, 64, 128}
    assert values(launched[kernel], "S") == {mx.float32, mx.float16, mx.bfloat16}
    of_keys_and_values = {"KB": "keys", "VB": "values"}
    names = [name for name, side in of_keys_and_values.items() if side in DECODE[kernel]]
    found = {tuple(map(template.get, names)) for _, template in launched[kernel]}
    for bits in ((8, 8), (4, 4), (8, 4), (4, 8)):
        both = dict(zip(of_keys_and_values, bits, strict=True))
        assert tuple(both[name] for name in names) in found
