"""Whole cache traces: run one through the Python cache, and compare two runs of it."""

import contextlib
import functools

import mlx.core as mx
import numpy as np

import reference
import reference_ranks
from cache_folded import MADE
from golden.build import Case
from mlx_h2o import H2OKVCache, load_prompt_cache
from mlx_h2o.caches.attention import DECODE_QUERIES
from mlx_h2o.caches.cache import evicting_cache
from mlx_h2o.operations import requests
from mlx_h2o.operations.backends import use_backend
from mlx_h2o.operations.requests import AttentionRequest
from mlx_h2o.operations.resolved import COMPOSED, Operations
from parity.outcome import Outcome, Verdict, failed
from parity.trace_reference import config_of, ranks

# Rows of a trace without a budget, at most; unused ones are padding.
UNBOUNDED = 512
# Two candidates whose C differ by less than this, relative, are one choice to rounding.
NEAR = 1e-5


def run_python(case: Case, backend: Operations) -> Outcome:
    """The trace on H2OKVCache, every attention by ``backend`` where it can serve it.

    The caller names the back end too, so that selection runs on it.
    """
    return followed(case, backend)[1]


def followed(case: Case, backend: Operations) -> tuple[H2OKVCache, Outcome]:
    """The cache at the end of the trace too; it begins with that of the case's file, if any."""
    fields, tensors = case.fields, case.tensors
    if "load" in fields:
        (cache,) = load_prompt_cache(fields["load"])
    else:
        cache = evicting_cache(config_of(case))
    start, steps = 0, []
    for index, length in enumerate([*fields["prefill"], *[1] * fields["steps"]]):
        step = index - len(fields["prefill"])
        part = slice(start, start + length)
        start += length
        q, k, v = (tensors[name][:, :, part] for name in ("queries", "keys", "values"))
        keys, values = cache.update_and_fetch(k, v)
        mask = "causal" if length > 1 else None
        if fields.get("routed"):
            out = _routed(case, backend, cache, q, keys, values, mask)
        else:
            out, scores = _attended(case, backend, q, keys, values, mask)
            if step >= 0 and fields["replay"]:
                scores = _recorded_at(tensors["recorded"][step], cache.positions)
            cache.update_scores(scores)
        if step >= 0:
            steps.append(_snapshot(cache, out))
    columns = zip(("positions", "scores", "out"), zip(*steps, strict=True), strict=True)
    return cache, Outcome({name: np.stack(rows) for name, rows in columns})


def _routed(case, backend, cache, q, keys, values, mask) -> mx.array:
    """As the attention that models are routed to: the cache's own, or a chunk and its scores."""
    scale = case.fields["scale"]
    if q.shape[2] <= DECODE_QUERIES:
        return cache.attend(q, keys, values, scale=scale, mask=mask)
    refused = cache.row_bias is not None and backend.refuses(_request(case, q, keys, values, mask))
    with use_backend("composed") if refused else contextlib.nullcontext():
        return cache.attend(
            q, keys, values, scale=scale, mask=mask,
            stock=lambda: _attended(case, backend, q, keys, values, mask)[0],
        )  # fmt: skip


def _attended(case, backend, q, keys, values, mask) -> tuple[mx.array, mx.array]:
    """Attention over dense rows, or over packed ones where the cache hands those out."""
    request = _request(case, q, keys, values, mask)
    chosen = COMPOSED if backend.refuses(request) else backend
    return chosen.attend(request)[:2]


def _request(case, q, keys, values, mask) -> AttentionRequest:
    options = {"scale": case.fields["scale"], "mask": mask}
    if isinstance(keys, tuple):
        names = {"bits": "kv_bits", "v_bits": "v_bits", "group_size": "kv_group_size"}
        options |= {name: case.fields[field] for name, field in names.items()}
    return requests.attention_request(q, keys, values, **options)


def _recorded_at(recorded: mx.array, positions: mx.array) -> mx.array:
    """Recorded scores [B, Hq, T] in the order of the slots: [B, Hq, 1, N]."""
    group = recorded.shape[1] // positions.shape[1]
    slots = mx.repeat(positions, group, axis=1)
    return mx.take_along_axis(recorded, slots, axis=-1)[:, :, None]


def _snapshot(cache: H2OKVCache, out: mx.array) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Positions, ascending and padded with -1; C in the same order; the output of the step."""
    positions, scores = np.array(cache.positions), np.array(cache.scores)
    order = np.argsort(positions, axis=-1)
    positions = np.take_along_axis(positions, order, axis=-1).astype(np.int32)
    scores = np.take_along_axis(scores, order, axis=-1)
    most = max([cache.config.max_kv_size or UNBOUNDED, *(n for _, n in cache.config.rows_at)])
    missing = [(0, 0), (0, 0), (0, most - positions.shape[-1])]
    padded = np.pad(positions, missing, constant_values=-1)
    scores = np.pad(scores, missing, constant_values=np.nan)
    return padded, scores, reference.float64(out[:, :, 0])


def judge(case: Case, outcome: Outcome, expected: Outcome, *, exact: bool) -> Verdict:
    """Positions as expected at every step, and outputs right for the rows that were kept.

    Unless ``exact``, a head may part from the expected one where C does not tell its candidates
    apart; the note says where. What follows in that head is then its own affair.
    """
    if outcome.error:
        return failed(outcome.error)
    if expected.error:
        return failed(f"nothing to compare with: {expected.error}")
    for name in ("positions", "out"):
        if name not in outcome.arrays:
            return failed(f"no {name}")
    found, wanted = outcome.arrays["positions"], expected.arrays["positions"]
    if found.shape != wanted.shape:
        return Verdict(False, "wrong", note=f"positions have shape {found.shape}")
    notes = []
    for at in np.ndindex(*found.shape[1:3]):
        differs = (found[:, at[0], at[1]] != wanted[:, at[0], at[1]]).any(axis=-1)
        if differs.any():
            near, note = _divergence(case, expected, outcome, at, int(differs.argmax()))
            if exact or not near:
                return Verdict(False, "parts", note=note)
            notes.append(note)
    note = "; ".join(notes)
    if "scores" in outcome.arrays:
        ratio = _scores_ratio(case, outcome, expected)
        if ratio > 1:
            return Verdict(False, f"{ratio:.2f}", ratio, "the accumulated scores are off")
    ratio = _output_ratio(case, outcome, expected)
    if ratio > 1:
        return Verdict(False, f"{ratio:.2f}", ratio, "the output of a step is off")
    return Verdict(True, f"{ratio:.2f}{' ~' if notes else ''}", ratio, note)


def _divergence(case, expected, outcome, at, step: int) -> tuple[bool, str]:
    """Are the candidates at the first difference equal to rounding; and a line that says so."""
    one, other = (set(o.arrays["positions"][step][at].tolist()) for o in (expected, outcome))
    # What stayed here went there: the rows that the two chose between.
    candidates = sorted(one ^ other)
    where = f"head {at}, step {step}: candidates {candidates}"
    if config_of(case).folds:
        return False, f"{where} of a trace that was drawn until no choice is close"
    if step == 0 or -1 in candidates:
        return False, f"{where}, without a step before to compare C of"
    positions = expected.arrays["positions"][step - 1][at]
    if not set(candidates) <= set(positions.tolist()):
        return False, f"{where} were not all there before"
    scores = expected.arrays["scores"][step - 1][at]
    rows = {int(p): float(s) for p, s in zip(positions, scores, strict=True) if p >= 0}
    by_rank = ranks(case, at, rows)
    of = np.array([by_rank[position] for position in candidates])
    apart = float((of.max() - of.min()) / max(np.abs(of).max(), 1e-30))
    return apart < NEAR, f"{where}, C {of.tolist()}, apart by {apart:.2g} relative"


def _output_ratio(case: Case, outcome: Outcome, expected_run: Outcome) -> float:
    """Worst error of the steps' outputs, given the rows that were kept, over its tolerance.

    What was folded cannot be made anew of the rows that came, nor what came from a file: there the
    outputs of the expected run count, and the rows are float32.
    """
    if config_of(case).folds or "load" in case.fields:
        found, wanted = outcome.arrays["out"], expected_run.arrays["out"]
        largest = float(mx.abs(case.tensors["values"]).max())
        return reference.error_ratio(reference.worst_error(found, wanted), MADE * largest)
    worst = naive = 0.0
    for step, positions in enumerate(outcome.arrays["positions"]):
        # Every head has as many rows as the others, each its own.
        kept = positions[..., positions[0, 0] >= 0].astype(np.int32)
        expected, stock = _output_over(case, step, kept.tobytes(), kept.shape)
        found = outcome.arrays["out"][step][:, :, None]
        worst, naive = max(worst, reference.worst_error(found, expected)), max(naive, stock)
    queries, largest = case.tensors["queries"], float(mx.abs(case.tensors["values"]).max())
    allowed = reference.tolerance(naive, largest, reference.dtype_name(queries))
    return reference.error_ratio(worst, allowed)


@functools.cache
def _output_over(
    case: Case, step: int, kept: bytes, shape: tuple[int, ...]
) -> tuple[np.ndarray, float]:
    """The output of a step over the rows at these positions, and the naive error: legs that kept
    the same rows share them."""
    queries, keys, values = (case.tensors[name] for name in ("queries", "keys", "values"))
    rows = mx.array(np.frombuffer(kept, np.int32).reshape(shape))[..., None]
    query = queries[:, :, sum(case.fields["prefill"]) + step][:, :, None]
    inputs = (query, *(mx.take_along_axis(a, rows, axis=2) for a in (keys, values)))
    expected = reference.attention(*inputs, scale=case.fields["scale"]).out
    stock = reference.naive_attention(*inputs, scale=case.fields["scale"]).out
    return expected, reference.worst_error(stock, expected)


def _scores_ratio(case: Case, outcome: Outcome, expected: Outcome) -> float:
    """Worst relative error of C over NEAR, in the rows that both have."""
    if case.fields["policy"] not in ("h2o-ema", *reference_ranks.WEIGHTS):
        return 0.0
    same = outcome.arrays["positions"] == expected.arrays["positions"]
    found, wanted = (np.where(same, o.arrays["scores"], 0.0) for o in (outcome, expected))
    largest = np.nanmax(np.abs(wanted), initial=0.0)
    return reference.error_ratio(reference.worst_error(found, wanted), NEAR * float(largest))
