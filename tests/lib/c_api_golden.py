"""The golden cases on a C library: which of them fail, and how."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

import reference
from c_api import OPERATIONS, CError, Library
from golden.build import Case

FILE = Path(__file__).parents[1] / "golden" / "cases.safetensors"


def cases() -> tuple[list[dict[str, Any]], dict[str, mx.array]]:
    """The cases that the C interface serves, and the tensors of all."""
    tensors, metadata = mx.load(str(FILE), return_metadata=True)
    return [c for c in json.loads(metadata["cases"]) if c["op"] in OPERATIONS], tensors


def failures(library: Library, drawn: Iterable[Case] = ()) -> list[str]:
    """The cases with an output that is missing, or off by more than its tolerance.

    ``drawn``: further cases of attention.
    """
    found, tensors = cases()
    pairs = [(case, _own(case["name"], tensors)) for case in found]
    pairs += [(case.fields, dict(case.tensors)) for case in drawn]
    return [case["name"] for case, mine in pairs if not _passes(library, case, mine)]


def _own(name: str, tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    start = f"{name}/"
    return {key.removeprefix(start): a for key, a in tensors.items() if key.startswith(start)}


def _passes(library: Library, case: dict[str, Any], mine: dict[str, mx.array]) -> bool:
    expected = {
        name.removesuffix("64"): mine.pop(name)
        for name in list(mine)
        if name.endswith("64") or name == "keep"
    }
    try:
        results = library.run_case(case, mine)
    except CError:
        return False
    if case["op"] == "keep":
        return np.array_equal(results["keep"], np.array(expected["keep"]))
    allowed = case["tolerance"]
    names = [name for name in ("out", "scores", "lse") if name != "lse" or case["return_lse"]]
    return list(results) == names and all(
        reference.error_ratio(reference.worst_error(results[n], expected[n]), allowed[n]) <= 1
        for n in names
    )
