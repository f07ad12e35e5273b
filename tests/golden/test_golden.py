"""The committed golden vectors match what their generator makes."""

import json
from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from golden.build import Case
from golden.cases import golden_cases
from golden.make import FILE, VERSION, read

COMMITTED = {case.name: case for case in read()}
EXPECTED = {"out64", "scores64", "lse64"}
LARGEST = 3_500_000  # bytes; it is in every clone


@cache
def generated() -> dict[str, Case]:
    return {case.name: case for case in golden_cases()}


def test_the_file_is_small_and_versioned() -> None:
    assert FILE.stat().st_size < LARGEST
    _, metadata = mx.load(str(FILE), return_metadata=True)
    assert metadata["version"] == VERSION
    assert len(json.loads(metadata["cases"])) == len(COMMITTED)


def test_the_same_cases_in_the_same_order() -> None:
    assert list(COMMITTED) == list(generated())


@pytest.mark.parametrize("name", COMMITTED)
def test_the_same_content(name: str) -> None:
    committed, made_now = COMMITTED[name], generated()[name]
    assert committed.tensors.keys() == made_now.tensors.keys()
    for key, array in committed.tensors.items():
        other = made_now.tensors[key]
        assert (array.dtype, array.shape) == (other.dtype, other.shape), key
        found, made = (np.array(a.astype(mx.float32)) for a in (array, other))
        if key in EXPECTED:
            # NumPy sums in an order that depends on the machine.
            np.testing.assert_allclose(found, made, rtol=1e-6, atol=1e-9, err_msg=key)
        else:
            np.testing.assert_array_equal(found, made, err_msg=key)
    fields, others = dict(committed.fields), dict(made_now.fields)
    bounds, made_bounds = fields.pop("tolerance", {}), others.pop("tolerance", {})
    assert fields == others
    for key, bound in bounds.items():
        # The error of stock MLX, on which a tolerance rests, differs between machines.
        assert made_bounds[key] / 4 <= bound <= made_bounds[key] * 4, key


SELECTION = [case for case in COMMITTED.values() if case.fields["op"] == "keep"]


@pytest.mark.parametrize("case", SELECTION, ids=lambda case: case.name)
def test_selection_depends_on_no_rounding(case: Case) -> None:
    """Scores of a selection case are equal, special, or apart by far more than any error."""
    for head in np.array(case.tensors["scores"]).reshape(-1, case.tensors["scores"].shape[-1]):
        gaps = np.diff(np.unique(head[np.isfinite(head)]))
        assert (gaps > 1e-3).all()


def test_slack_rows_are_poison() -> None:
    slack = [case for case in COMMITTED.values() if case.fields.get("slack")]
    assert slack
    for case in slack:
        for key in ("keys", "values"):
            behind = case.tensors[key][:, :, -case.fields["slack"] :]
            assert mx.isnan(behind).all()
