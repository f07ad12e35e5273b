"""The golden cases on a C library: which of them fail, and how."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

import reference
from c_api import OPERATIONS, CError, Library

FILE = Path(__file__).parent / "golden" / "cases.safetensors"


def cases() -> tuple[list[dict[str, Any]], dict[str, mx.array]]:
    """The cases that the C interface serves, and the tensors of all."""
    tensors, metadata = mx.load(str(FILE), return_metadata=True)
    return [c for c in json.loads(metadata["cases"]) if c["op"] in OPERATIONS], tensors


def failures(library: Library) -> list[str]:
    """The cases with an output that is missing, or off by more than its tolerance."""
    found, tensors = cases()
    return [case["name"] for case in found if not _passes(library, case, tensors)]


def _passes(library: Library, case: dict[str, Any], tensors: dict[str, mx.array]) -> bool:
    start = case["name"] + "/"
    mine = {name.removeprefix(start): a for name, a in tensors.items() if name.startswith(start)}
    expected = {
        name.removesuffix("64"): mine.pop(name)
        for name in list(mine)
        if name.endswith("64") or name in ("keep", "evict")
    }
    try:
        results = library.run_case(case, mine)
    except CError:
        return False
    if case["op"] == "keep":
        return all(np.array_equal(results[name], np.array(expected[name])) for name in expected)
    allowed = case["tolerance"]
    names = [name for name in ("out", "scores", "lse") if name != "lse" or case["return_lse"]]
    return list(results) == names and all(
        reference.error_ratio(reference.worst_error(results[n], expected[n]), allowed[n]) <= 1
        for n in names
    )
