"""Faults in the compositions of the C interface: a golden or a drawn case fails for each."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

import c_api
import c_api_build
import c_api_golden
import c_api_operations
from faults.text import Edit
from golden.build import attention_case, row_bias
from parity import judge
from parity.decode_cases import decode_case
from parity.fold_cases import fold_case
from parity.outcome import Outcome
from parity.row_cases import append_case

FAULTS = {
    "causal is off by one": Edit(
        "masked_pairs",
        "range(r.rows - r.length, r.rows, ",
        "range(r.rows - r.length + 1, r.rows + 1, ",
    ),
    "a bias of rows is left out": Edit("logits", "of_heads(logits + own)", "of_heads(logits)"),
    "the lowest finite bias does not mask its row": Edit(
        "logits", "mlx_less_equal, number(-FLT_MAX)", "mlx_less, number(-FLT_MAX)"
    ),
    "a fully masked query gives NaN": Edit(
        "softmax", "nothing.where(number(0), peak)", "nothing.where(number(-INFINITY), peak)"
    ),
    "the sink is left out": Edit("softmax", "if (!sinks.empty())", "if (false)"),
    "the lse leaves out the largest logit": Edit(
        "attention",
        "parts.peak + parts.total.then(mlx_log)",
        "parts.peak.at_least(parts.total.then(mlx_log))",
    ),
    "a KV head serves heads that lie apart": Edit(
        "attention",
        "{r.batch, r.heads, r.length, r.value_size}",
        "{r.batch, r.length, r.heads, r.value_size}",
    ),
    "lowest finite values do not mask": Edit(
        "",
        "request.mask_threshold = mask_threshold(",
        "request.mask_threshold = 4 * mask_threshold(",
    ),
    "ties keep the higher position": Edit(
        "retention_key", "upper.then(mlx_bitwise_or, place", "upper.then(mlx_subtract, place"
    ),
    "sinks reach one row further": Edit(
        "retention_key", "integer(r.sink_size)", "integer(r.sink_size + 1)"
    ),
    "recent rows begin one later": Edit(
        "retention_key", "mlx_greater_equal, per_sequence", "mlx_greater, per_sequence"
    ),
    "what was never scored ranks with what was": Edit(
        "retention_key",
        "where(integer(unscored), integer(scored))",
        "where(integer(scored), integer(scored))",
    ),
    "rows are kept in the order of their rank": Edit(
        "keep_indices", ".then(mlx_sort_axis, -1).as(MLX_UINT32)", ".as(MLX_UINT32)"
    ),
    "rows are folded into any that stays": Edit(
        "composed::fold", "stays.then(mlx_logical_and, r.eligible)", "stays"
    ),
    "rows weigh alike in a mean": Edit(
        "composed::fold",
        "summed(here * at_slots(every, going))",
        "summed(at_slots(every, going))",
    ),
    "masses do not add up": Edit(
        "composed::fold", "added(Value(r.mass, s))", "at_slots(Value(r.mass, s), into)"
    ),
    "a row is not divided by its norm": Edit(
        "composed::encode_rows", "rows / lengths.at_least(number(least_coded_norm))", "rows"
    ),
    "a norm is that of the row": Edit(
        "composed::encode_rows", "lengths / lengths_of(coded)", "lengths / lengths_of(lengths)"
    ),
    "bits of a code follow each other from the highest": Edit(
        "composed::encode_rows",
        "range(0, bits, MLX_UINT32, s)",
        "call(mlx_subtract, scalar(bits - 1u, MLX_UINT32), range(0, bits, MLX_UINT32, s), s)",
    ),
    "values become the codes of keys": Edit(
        "as_stored", "r.new_values, Side::values", "r.new_values, Side::keys"
    ),
    "queries have the signs of values": Edit(
        "", "rotated(scaled, Side::keys)", "rotated(scaled, Side::values)"
    ),
    "outputs have the signs of keys": Edit(
        "attention", "Side::values); result.out =", "Side::keys);\n  result.out ="
    ),
}


# Drawn: of the golden cases none has a bias of rows.
BIASED = attention_case(
    "bias", heads=(4, 2), queries=3, rows=33, bias=partial(row_bias, nan=True), mask="causal"
)


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    c_api.required()
    return c_api_build.objects(tmp_path_factory)


DRAWN = (
    fold_case("folded", going=9),
    fold_case("some unscored", going=6, unscored=0.2),
    append_case("codes", kv_format="turbo3", count=2),
    decode_case("attention over codes", kv_format="turbo3"),
)


def failures(folder: Path, units: list[Path]) -> list[str]:
    with (library := c_api_build.link(folder, "h2o", units)).using("composed"):
        results = (c_api_operations.run_case(library, it.fields, it.tensors) for it in DRAWN)
        pairs = zip(DRAWN, map(Outcome, results), strict=True)
        drawn = [case.name for case, found in pairs if not judge.judge(case, found).ok]
        return [*c_api_golden.failures(library, [BIASED]), *drawn]


def test_the_unchanged_sources_pass(objects: list[Path], tmp_path: Path) -> None:
    assert failures(tmp_path, objects) == []


@pytest.mark.parametrize("edit", FAULTS.values(), ids=FAULTS)
def test_a_fault_is_caught(objects: list[Path], tmp_path: Path, edit: Edit) -> None:
    file, text = edit.apply_to(sorted(c_api_build.SOURCES.glob("*.cpp")))
    (changed := tmp_path / file.name).write_text(text, "utf-8")
    units = {unit.stem: unit for unit in objects}
    units[file.stem] = c_api_build.compile_one(changed, tmp_path / f"{file.stem}.o")
    assert failures(tmp_path, sorted(units.values())) != []
