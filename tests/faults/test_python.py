"""Faults of the Python package, one for each promise of the docs: its own tests notice them.

A fault replaces a name where it is used by ``wrap`` of the original.
"""

import importlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest

import mlx_h2o
from cache_courses import Course
from caches.test_cache_against_reference import live
from caches.test_cache_mixed import (
    test_the_light_rows_are_those_of_lower_rank_when_they_leave as light,
)
from caches.test_cache_scores import (
    test_an_update_without_scores_is_an_error_at_the_next as unscored,
)
from caches.test_folding import test_a_long_chunk_reads_and_scores_a_row_of_n_as_n as long_chunk
from caches.test_folding import test_no_token_is_lost as none_lost
from caches.test_folding import test_rows_are_dropped_where_that_is_asked_for as rows_dropped
from caches.test_frame import NOTICES
from emulator.row_cases import rows_with_ties
from golden.build import Case, keep_case
from lm.test_budgets import test_models_that_share_a_mask_read_each_layers_own as shared_mask
from lm.test_given import KNOWN
from lm.test_given import test_tokens_that_are_none as no_tokens
from lm.test_head_groups import test_each_group_is_a_cache_of_its_heads as by_hand
from mlx_h2o import load_prompt_cache, save_prompt_cache
from mlx_h2o.operations import backends
from parity.calls import attention_case
from parity.decode_cases import decode_case
from parity.judge import judge
from parity.legs import PackageLeg
from parity.row_cases import accumulate_case, prefill_case


@dataclass(frozen=True)
class Fault:
    """``place``, "module:name" or "module:Class.name" below mlx_h2o, becomes ``wrap`` of it."""

    what: str
    place: str
    wrap: Callable[[Any], Any]
    check: Callable[[], object]


# What faults do


def given(**changes: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Called with other arguments of these names; what makes each is given the right one."""
    return lambda original: (
        lambda *args, **named: original(
            *args, **{k: changes[k](v) if k in changes else v for k, v in named.items()}
        )
    )


def asked(**changes: Any) -> Callable[[Any], Any]:
    """Served as if the request had these fields."""

    return lambda original: lambda request, *more: original(replace(request, **changes), *more)


def gives(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns what this makes of the result."""
    return lambda original: lambda *args, **named: change(original(*args, **named))


def nothing(original: Any) -> Any:
    return lambda *args, **named: None


def first(original: Any) -> Any:
    """Returns its first argument, behind self."""
    return lambda own, value, *others: value


# Checks: the operations against the float64 reference


def agree(*cases: Case) -> None:
    """The composed back end gives what the cases expect."""
    for case in cases:
        verdict = judge(case, PackageLeg("composed").outcome(case))
        assert verdict.ok, f"{case.name}: {verdict.note}"


# A mask, sinks and a bias, all at once and each alone.
HIDDEN = {"mask": "bool", "sinks": "f32", "bias": True}
ATTENTION = [
    attention_case("attention", batch=2, heads=(4, 2), queries=5, **some)
    for some in (HIDDEN, *({name: value} for name, value in HIDDEN.items()))
]
ROWS = [np.array(part) for part in rows_with_ties(1, 8, 40)]
ZONES = ({}, {"sink_size": 9, "recent_start": 60})
attention = partial(agree, *ATTENTION)
packed = partial(agree, decode_case("packed", rows=64, bits=(4, 8), sparse=0.02, skipped=True))
selection = partial(agree, *(keep_case("keep", *ROWS, keep=20, **zones) for zones in ZONES))
averages = partial(agree, accumulate_case("average", batch=2, queries=3, decay=0.7))
mass = partial(agree, prefill_case("mass", kind="mass", queries=40, rows=1700, mask="causal"))


# Checks: lives against the slow reference of the cache


def life(kind: str = "alone", drafts: int = 0, policy: str = "h2o-ema", **settings: Any) -> None:
    """All events of the cache's own tests."""
    live("dense", policy, (kind, drafts), 4, **settings)


batch, drafts = partial(life, "ragged"), partial(life, drafts=4)


def shared() -> None:
    """Sequences that begin alike come and go."""
    course = Course(max_kv_size=20, prefix_size=6, evict_every=4)
    course.chunk(9)
    course.chunk(20)
    both = course.share(6, 3)
    both.tokens(7)
    both.filter([2, 0])
    both.tokens(6)
    both.extract(1).tokens(5)


def saved(damage: Callable[[bytes], bytes], said: str) -> None:
    """A file that was damaged is refused, and says why."""
    course = Course()
    course.chunk(5)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cache.safetensors"
        save_prompt_cache(file, [course.cache])
        file.write_bytes(damage(file.read_bytes()))
        with pytest.raises(ValueError, match=said):
            load_prompt_cache(file)


def unknown_token() -> None:
    demo = mlx_h2o.load("demo")
    caches = mlx_h2o.make_prompt_cache(demo[0], 64, layers="equal")
    no_tokens([KNOWN], f"has the token id {KNOWN}", demo, caches)


COMPOSED, EVICTION = "operations.composed", "caches.room:Eviction"
BASE = "operations.resolved:Operations"

FAULTS = (
    # Attention returns its output and its scores.
    Fault("the mask is left out", f"{COMPOSED}:attention", asked(mask=None), attention),
    Fault("sinks are left out", f"{COMPOSED}:attention", asked(sinks=None), attention),
    Fault("a row of n counts as one", f"{COMPOSED}:attention", asked(row_bias=None), attention),
    Fault("queries are not scaled", f"{COMPOSED}:attention", asked(scale=1.0), attention),
    Fault("all values are added", f"{COMPOSED}:attention", asked(sparse_v_threshold=0.0), packed),
    # The other operations.
    Fault("sinks go", f"{BASE}.keep_indices", given(sink_size=lambda size: 0), selection),
    Fault("recent rows go", f"{BASE}.keep_indices",
          given(recent_start=lambda start: None), selection),
    Fault("the average forgets", f"{BASE}.accumulate_scores",
          given(decay=lambda decay: 0.5), averages),
    Fault("the future is seen", f"{BASE}.prefill_scores",
          asked(causal=False), mass),
    # The budget, and which rows go.
    Fault("the recent window is off by one", EVICTION,
          given(recent_size=lambda rows: rows - 1),
          partial(life, policy="random", recent_size=9)),
    Fault("one row more goes", EVICTION, given(stay=lambda stay: stay - 1), life),
    Fault("drafts are ranked", EVICTION, given(tail=lambda tail: 0),
          partial(drafts, policy="keydiff")),
    Fault("rows beyond the context stay", "caches.eviction:Eviction.ranks",
          lambda original: lambda own: own.config.policy.rank(own),
          partial(life, policy="keydiff", context_size=16)),
    Fault("eviction is off, and nobody says so", "policies.base:Policy.needs_attention",
          lambda original: lambda own: False, unscored),
    Fault("a chunk has no scores", "caches.cache:of_chunk",
          lambda original: lambda *asked: ([], None), life),
    Fault("a trim does nothing", "caches.cache:H2OKVCache.trim", nothing, drafts),
    # Folding.
    Fault("rows are dropped", "caches.eviction:fold_rows", nothing, partial(none_lost, "dense", 1)),
    Fault("rows are folded, asked or not", "config:H2OConfig.folds", lambda original: lambda own:
          True, partial(rows_dropped, "dense")),
    Fault("rows forget for how many they stand", "caches.attention:biases", nothing,
          partial(long_chunk, None)),
    # Packed rows in their frame.
    Fault("queries are rotated twice", "caches.attention:merged_attention", lambda original:
          lambda rows, queries, **named: original(rows, mx.hadamard_transform(queries), **named),
          NOTICES["attention"]),
    Fault("rows come back rotated", "caches.frame:Frame.back", first, NOTICES["rows"]),
    Fault("scores lack the centre", "caches.frame:Frame.shift", gives(lambda shift: 0 * shift),
          NOTICES["attention"]),
    Fault("the light rows are the best", "caches.eviction:Eviction.ranks",
          gives(lambda ranks: -ranks), light),
    # Batches, heads and layers.
    Fault("a token sees what follows", "caches.step:Step.mask", nothing, batch),
    Fault("sequences are mixed up", "caches.cache:select", lambda original: lambda table, chosen:
          original(table, chosen[::-1]), batch),
    Fault("heads are mixed up", "caches.heads:HeadGroups.attended_by",
          gives(lambda out: out[:, ::-1]), partial(by_hand, "keydiff", {})),
    Fault("layers have each other's mask", "caches.cache:H2OKVCache.mask_of_update", nothing,
          partial(shared_mask, "qwen3", "h2o")),
    Fault("the shared rows are not read", "caches.attention:shared_rows",
          gives(lambda rows: []), shared),
    # Files, and what generation is given.
    Fault("a damaged file is read", "lm.saving:is_whole", gives(lambda whole: True),
          partial(saved, lambda file: file[:-1] + bytes([file[-1] ^ 1]), "not what was written")),
    Fault("unknown tokens are taken", "lm.generate:checked_tokens",
          lambda original: lambda op, name, tokens, models: tokens, unknown_token),
)  # fmt: skip


NOTICED = (AssertionError, RuntimeError, ValueError, pytest.fail.Exception)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_fault_is_caught(fault: Fault) -> None:
    module, _, path = fault.place.partition(":")
    owner: Any = importlib.import_module(f"mlx_h2o.{module}")
    *classes, name = path.split(".")
    for each in classes:
        owner = getattr(owner, each)
    original = vars(owner)[name]
    if isinstance(original, property):
        faulty: Any = property(fault.wrap(original.fget))
    elif isinstance(original, staticmethod):
        faulty = staticmethod(fault.wrap(original.__func__))
    else:
        faulty = fault.wrap(original)
    fault.check()
    try:
        with mock.patch.object(owner, name, faulty), pytest.raises(NOTICED) as found:
            backends.forget()  # and the functions that were looked up
            fault.check()
    finally:
        backends.forget()
    print(f"{fault.what}: {found.value!r:.120}")
