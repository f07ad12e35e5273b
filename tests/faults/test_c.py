"""Faults in the compositions of the C interface: a golden or a random case fails for each."""

from functools import partial
from pathlib import Path

import pytest

import c_api
import c_api_build
from faults.text import Edit, table
from golden.build import row_bias
from golden.make import read
from parity.c_leg import failures
from parity.calls import attention_case
from parity.decode_cases import decode_case
from parity.fold_cases import fold_case
from parity.row_cases import append_case

FAULTS = table("c")


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    c_api.required()
    return c_api_build.objects(tmp_path_factory)


CASES = [
    *read(),
    # Of the golden cases none has a bias of rows.
    attention_case(
        "bias", heads=(4, 2), queries=3, rows=33, bias=partial(row_bias, nan=True), mask="causal"
    ),
    fold_case("folded", going=9),
    fold_case("some unscored", going=6, unscored=0.2),
    append_case("codes", kv_format="turbo3", count=2),
    decode_case("attention over codes", kv_format="turbo3"),
    decode_case("a chunk", mask="causal", queries=150, rows=170, scores=False, lse=False),
]


def failing(folder: Path, units: list[Path]) -> list[str]:
    return failures(c_api_build.link(folder, "h2o", units), CASES)


def test_the_unchanged_sources_pass(objects: list[Path], tmp_path: Path) -> None:
    assert failing(tmp_path, objects) == []


@pytest.mark.parametrize("edit", FAULTS.values(), ids=FAULTS)
def test_a_fault_is_caught(objects: list[Path], tmp_path: Path, edit: Edit) -> None:
    file, text = edit.apply_to(sorted(c_api_build.SOURCES.glob("*.cpp")))
    (changed := tmp_path / file.name).write_text(text, "utf-8")
    units = {unit.stem: unit for unit in objects}
    units[file.stem] = c_api_build.compile_one(changed, tmp_path / f"{file.stem}.o")
    assert failing(tmp_path, sorted(units.values())) != []
