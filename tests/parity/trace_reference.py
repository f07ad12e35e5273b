"""Whole traces on the float64 reference cache."""

import numpy as np

import reference
import reference_ranks
from golden.build import Case
from mlx_h2o import H2OConfig
from reference_cache import ReferenceCache, Row

SETTINGS = ("max_kv_size", "sink_size", "heavy_size", "recent_size", "policy", "decay")
OPTIONAL = ("kv_bits", "v_bits", "kv_group_size", "context_size", "fold")


def config_of(case: Case) -> H2OConfig:
    """The settings of a trace case."""
    others = {name: case.fields[name] for name in OPTIONAL if name in case.fields}
    others["kv_frame"] = False  # packed rows go to the operations as they are
    others["evict_every"] = case.fields.get("evict_every", 1)
    return H2OConfig.of(**{name: case.fields[name] for name in SETTINGS}, **others)


def run_reference(case: Case) -> dict[str, np.ndarray]:
    """``positions``, ``scores`` (C) and ``out`` of each step, as the legs give them."""
    return follow(case)[0]


def follow(case: Case) -> tuple[dict[str, np.ndarray], bool]:
    """The same, and whether float32 may fold rows into others."""
    inputs = {name: reference.float64(array) for name, array in case.tensors.items()}
    batch, heads = inputs["keys"].shape[:2]
    sequences = [ReferenceCache(config_of(case), heads) for _ in range(batch)]
    start, steps, unsure = 0, [], False
    for index, length in enumerate([*case.fields["prefill"], *[1] * case.fields["steps"]]):
        step = index - len(case.fields["prefill"])
        part = slice(start, start + length)
        start += length
        outs: list[np.ndarray] = []
        for b, cache in enumerate(sequences):
            q, k, v = (inputs[name][b, :, part] for name in ("queries", "keys", "values"))
            cache.update(k, v)
            unsure |= cache.close
            if step >= 0 and case.fields["replay"]:
                cache.absorb(inputs["recorded"][step][b, :, None])
            else:
                outs.append(cache.attend(q, case.fields["scale"])[:, -1])
        if step >= 0:
            steps.append((*_snapshot(sequences), np.array(outs)))
    columns = zip(("positions", "scores", "out"), zip(*steps, strict=True), strict=True)
    return {name: np.stack(column) for name, column in columns}, unsure


def _snapshot(sequences: list[ReferenceCache]) -> tuple[np.ndarray, np.ndarray]:
    budget = sequences[0].config.max_kv_size
    shape = (len(sequences), len(sequences[0].heads), budget)
    positions, scores = np.full(shape, -1, np.int32), np.full(shape, np.nan)
    for b, cache in enumerate(sequences):
        for h, rows in enumerate(cache.heads):
            positions[b, h, : len(rows)] = [row.position for row in rows]
            scores[b, h, : len(rows)] = cache.scores()[h]
    return positions, scores


def ranks(case: Case, head: tuple[int, ...], scores: dict[int, float]) -> dict[int, float]:
    """What the policy ranks the rows of one head by; ``scores`` is C by position."""
    keys, values = (reference.float64(case.tensors[name])[head] for name in ("keys", "values"))
    rows = [Row(position, keys[position], values[position], c) for position, c in scores.items()]
    config = config_of(case)
    end = max(scores) + 1
    found = reference_ranks.ranks(
        config, head[1], rows, len(rows) - config.group, end - config.recent_size, end
    )
    return dict(zip(scores, found, strict=True))
