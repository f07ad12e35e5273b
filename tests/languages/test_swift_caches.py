"""Caches of the Swift package against Python: drafts, and files in both directions.

`nox -s parity` compares traces of 1,000 steps.
"""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlx_h2o
from benchmark_scripts import script
from golden.build import Case
from mlx_h2o import H2OConfig, H2OKVCache
from mlx_h2o.caches.cache import evicting_cache
from mlx_h2o.config import setting_names
from mlx_h2o.operations.backends import get, use_backend
from parity import traces
from parity.outcome import Outcome
from parity.swift_leg import SwiftLeg

pytestmark = pytest.mark.swift

SIZE, HEADS, QUERY_HEADS = 32, 2, 4
BACKEND = "native"
PACKED = {"kv_bits": 8, "v_bits": 4, "kv_group_size": 32}
ALL_ROWS = PACKED | {"max_kv_size": None, "heavy_size": None, "evict_every": None, "dense_size": 8}
"""An unbounded cache whose newest rows are not quantised."""
CODES = {"kv_format": "turbo4v3", "kv_group_size": 32}
POLICIES = ("h2o", "h2o-ema", "window", "keydiff")
"""Policies that Swift has."""

SETTINGS = (
    *("max_kv_size", "sink_size", "heavy_size", "recent_size", "evict_every", "speculative"),
    *("context_size", "policy", "decay", "kv_bits", "v_bits", "kv_frame", "kv_group_size"),
    *("dense_size", "kv_format", "rows_at", "fold", "prefix_size", "sparse_v"),
)
"""Settings that Swift is told, the last two in files alone."""
SHORTER = [[36, 34], [55, 30], [90, 27], [120, 24]]
"""Rows for texts of up to this many tokens."""
Rounds = Sequence[tuple[int, int]]
"""Tokens that come together, and how many of them go back."""


Leg = Callable[..., dict[str, Outcome]]


@pytest.fixture
def swift(tmp_path: Path) -> Leg:
    """Runs cases in the Swift package, on a back end."""

    def run(cases: Sequence[Case], backend: str = BACKEND) -> dict[str, Outcome]:
        leg = SwiftLeg("swift", backend)
        if leg.not_run():
            pytest.skip(leg.not_run())
        return dict(leg.run(cases, tmp_path))

    return run


def case(name: str, rounds: Rounds, settings: dict[str, Any], **more: Any) -> Case:
    named = H2OConfig.of(**settings).named()
    total = sum(count for count, _ in rounds)
    rng = np.random.default_rng(sum(map(ord, name)))
    shapes = {"queries": QUERY_HEADS, "keys": HEADS, "values": HEADS}
    tensors = {
        side: mx.array(rng.standard_normal((1, heads, total, SIZE)).astype(np.float32))
        for side, heads in shapes.items()
    }
    tensors["values"][:, :1, :1] *= 0.1  # small, as an attention sink's: the centre of its head
    fields = {
        "name": name, "op": "trace", "scale": SIZE**-0.5, "routed": True, "replay": False,
        "rounds": [list(pair) for pair in rounds],
    }  # fmt: skip
    given = {name: named[name] for name in SETTINGS if named[name] is not None}
    return Case(fields | given | more, tensors)


def in_python(case: Case, cache: Any, name: str = BACKEND) -> Outcome:
    """What ``runTrace`` of the Swift package does with rounds."""
    backend, start, steps, outs = get(name), 0, [], []
    with use_backend(name):
        for count, back in case.fields["rounds"]:
            part = slice(start, start + count)
            start += count
            q, k, v = (case.tensors[name][:, :, part] for name in ("queries", "keys", "values"))
            rows = cache.update_and_fetch(k, v)
            mask = "causal" if count > 1 else None
            out = traces._routed(case, backend, cache, q, *rows, mask)
            assert cache.trim(back) == back
            cache.flush()
            outs.append(np.array(out.transpose(2, 0, 1, 3)))
            steps.append(traces._snapshot(cache, out)[:2])
    positions, scores = map(np.stack, zip(*steps, strict=True))
    return Outcome({"positions": positions, "scores": scores, "out": np.concatenate(outs)})


def fresh(case: Case) -> Any:
    config = {name: case.fields.get(name) for name in setting_names()}
    rows = config.pop("max_kv_size")
    given = {name: value for name, value in config.items() if value is not None}
    return evicting_cache(H2OConfig.of(max_kv_size=rows, **given), name=case.fields["name"])


def assert_same(found: Outcome, expected: Outcome) -> None:
    """The same rows after every round; scores and the outputs of all queries to rounding."""
    assert not found.error, found.error
    positions = expected.arrays["positions"]
    assert np.array_equal(found.arrays["positions"], positions)
    for name in ("scores", "out"):
        one, other = found.arrays[name], expected.arrays[name]
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)


def draft_rounds(drafts: int, count: int) -> list[tuple[int, int]]:
    """A prompt, and rounds of a token and ``drafts`` guesses; any number of guesses is wrong."""
    wrong = itertools.cycle([0, drafts, 1, drafts - 1, drafts // 2])
    single = itertools.cycle([(1, 0), (drafts + 1, next(wrong)), (2, 1)])
    rounds = [(23, 0), (9, 0)]
    for place, pair in zip(range(count), single, strict=False):
        rounds.append((drafts + 1, next(wrong)) if place % 3 else pair)
    return rounds


@pytest.mark.slow
def test_drafts_leave_the_rows_of_python(swift: Leg) -> None:
    """Across the budget, every policy, dense and packed: offset and rows after each round."""
    small = {"max_kv_size": 24, "sink_size": 2, "heavy_size": 10, "evict_every": 3}
    cases = [
        case(f"drafts-{policy}-{drafts}-{kind}", draft_rounds(drafts, 40),
             small | bits | {"policy": policy, "speculative": drafts})
        for policy in POLICIES
        for drafts, kind, bits in (
            (2, "dense", {}), (4, "packed", PACKED), (3, "codes", CODES),
            (3, "newest dense", PACKED | {"dense_size": 1}), (4, "all rows", ALL_ROWS),
        )
    ]  # fmt: skip
    found = swift(cases)
    for one in cases:
        cache = fresh(one)
        assert_same(found[one.fields["name"]], in_python(one, cache))
        committed = sum(count - back for count, back in one.fields["rounds"])
        assert cache.offset == committed
        assert cache.evicted == committed - cache.size()
        assert (cache.evicted > 0) == ("max_kv_size" in one.fields)


@pytest.mark.slow
@pytest.mark.parametrize("framed", [True, False])
def test_any_number_of_rows_goes_back_where_none_was_evicted(swift: Leg, framed: bool) -> None:
    """More rows than are unquantised, and than have been since the last were quantised."""
    rounds = [(70, 0), *SINGLE, (3, 2), (1, 5), *SINGLE * 3, (1, 8), (1, 30), (6, 0), (40, 60),
              *SINGLE * 4, (2, 60), *SINGLE]  # fmt: skip
    settings = ALL_ROWS | {"kv_frame": framed}
    cases = [case(f"back-{policy}", rounds, settings | {"policy": policy}) for policy in POLICIES]
    found = swift(cases)
    for one in cases:
        assert_same(found[one.fields["name"]], in_python(one, fresh(one)))


SINGLE = [(1, 0)] * 12
CHUNKS = [
    pair
    for length in (40, 9, 36, 8, 3, 31, *range(1, 9))
    for pair in ((length, 0), *(SINGLE if length > 8 else SINGLE[:1]))
]
"""Below and above the numbers of queries that are served otherwise; tokens alone between them."""


@pytest.mark.slow
@pytest.mark.parametrize("backend", [BACKEND, "composed"])
def test_chunks_leave_the_rows_of_python(swift: Leg, backend: str) -> None:
    """And what attention says of them: every policy, dense and packed, in groups of every kind. The
    names draw the rows: none here folds so near the edge of a code that rounding decides."""
    small = {"max_kv_size": 20, "sink_size": 2, "heavy_size": 9}
    kinds: dict[str, dict[str, Any]] = {
        "dense": {},
        "groups": {"evict_every": 16, "context_size": 0},
        "context": {"evict_every": 4, "context_size": 30},
        "shorter": {"evict_every": 4, "rows_at": SHORTER, "recent_size": 7},
        "packed rows": {"evict_every": 4, **PACKED},
        "packed, unframed": {"evict_every": 4, **PACKED, "kv_frame": False},
        "codes": {"evict_every": 5, **CODES},
        "dropped": {"evict_every": 4, "fold": False, **PACKED},
        "newest dense": {"evict_every": 4, **PACKED, "dense_size": 3},
        "newest dense, unframed": {"evict_every": 1, **PACKED, "dense_size": 5, "kv_frame": False},
        "all rows": ALL_ROWS,
    }
    cases = [
        case(f"chunks-{policy}-{kind}", CHUNKS, small | settings | {"policy": policy})
        for policy, (kind, settings) in itertools.product(POLICIES, kinds.items())
    ]
    found = swift(cases, backend)
    for one in cases:
        cache = fresh(one)
        assert_same(found[one.fields["name"]], in_python(one, cache, backend))
        assert (cache.evicted > 100) == ("max_kv_size" in one.fields)


FILES: dict[str, dict[str, Any]] = {
    "dense": {},
    "rows of shorter texts": {"rows_at": SHORTER} | PACKED,
    "packed": PACKED,
    "packed, without a frame": PACKED | {"kv_frame": False},
    "codes": CODES,
    "codes beside scales": {"kv_format": "turbo8v2", "kv_group_size": 32},
    "codes beside dense keys": {"kv_format": "turbo0v4"},
    "drafts": {"speculative": 3},
    "dropped": {"fold": False},
    "prefix and sparse V": PACKED | {"prefix_size": 9, "sparse_v": 0.04},
    "newest dense": PACKED | {"dense_size": 2, "max_kv_size": 40, "prefix_size": 20},
    "all rows": ALL_ROWS | {"speculative": 2},
}


@pytest.mark.slow
@pytest.mark.matrix(1)
@pytest.mark.parametrize("kind", FILES)
def test_files_go_both_ways(swift: Leg, kind: str, tmp_path: Path) -> None:
    """A file written by one language and continued by the other keeps the rows of one run."""
    cases = []
    for policy in POLICIES:
        settings = {"max_kv_size": 24, "sink_size": 2, "policy": policy, **FILES[kind]}
        before = case(f"before-{policy}", [(30, 0), *[(1, 0)] * 20], settings)
        python, whole = fresh(before), fresh(before)
        in_python(before, python)
        in_python(before, whole)
        given, written = tmp_path / f"{policy}.safetensors", tmp_path / f"{policy}-2.safetensors"
        mlx_h2o.save_prompt_cache(given, [python], {"of": policy})
        after = case(
            f"after-{policy}", [(1, 0)] * 100, settings, load=str(given), save=str(written)
        )
        cases.append((after, whole))
    found = swift([one for one, _ in cases])
    for one, cache in cases:
        assert_same(found[one.fields["name"]], in_python(one, cache))
        (back,) = mlx_h2o.load_prompt_cache(one.fields["save"])
        assert isinstance(back, H2OKVCache)
        assert (back.config, back.name, back.offset) == (cache.config, cache.name, cache.offset)
        last = case(one.fields["name"] + "-again", [(1, 0)] * 100, {"policy": cache.policy.name})
        assert_same(in_python(last, back), in_python(last, cache))


def test_settings_that_swift_lacks_are_refused_by_name(swift: Leg, tmp_path: Path) -> None:
    lacking: dict[str, dict[str, Any]] = {
        "light_bits is 4": {"kv_bits": 8, "light_bits": 4},
        "kv_handed is 'arrays'": {"kv_bits": 8, "kv_handed": "arrays"},
    }
    cases = []
    for place, (said, settings) in enumerate(lacking.items()):
        file, config = tmp_path / f"{place}.safetensors", {"max_kv_size": 24} | settings
        mlx_h2o.save_prompt_cache(file, [evicting_cache(H2OConfig.of(**config))])
        cases.append(case(said, [(1, 0)], {"max_kv_size": 24}, load=str(file)))
    found = swift(cases)
    for said in lacking:
        assert said in found[said].error


@pytest.mark.exhaustive
def test_the_benchmark_of_host_time_runs(tmp_path: Path) -> None:
    """Both languages take their turns, and every arm has a ratio."""
    command = SwiftLeg("swift", BACKEND).executable()
    if command is None:
        pytest.skip("mlx-h2o-parity is not built")
    with script("swift_host_time") as benchmark:
        found = benchmark.measure(command, BACKEND, 1, 1, 2)
    assert set(found) == set(benchmark.ARMS)
    assert all(one["swift_of_python"] > 0 for one in found.values())
