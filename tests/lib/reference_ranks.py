"""How each policy accumulates scores and ranks rows: NumPy, float64, one head at a time.

Written from docs/design.md; shares no code with the package. Rows are in order of position; scores
[heads of the group, L, N] are logits, -inf where masked.
"""

import numpy as np

import reference
from reference_folding import for_good

WEIGHTS = ("h2o", "h2o-sum", "snapkv", "tova", "value-aware", "mix")
"""Policies whose ``C`` accumulates attention weights."""


def seen(config, scores: np.ndarray) -> np.ndarray:
    """What the policy accumulates: the logits, or their softmax."""
    if config.policy.name not in WEIGHTS:
        return scores
    with np.errstate(invalid="ignore"):
        exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    exponentials = np.nan_to_num(exponentials)
    total = exponentials.sum(axis=-1, keepdims=True)
    return np.divide(exponentials, total, out=np.zeros_like(exponentials), where=total > 0)


def take_in(config, before: np.ndarray, given: np.ndarray) -> np.ndarray:
    """The new C [N] of a head, from the result of ``seen``, [heads of the group, L, N]."""
    if config.policy.name == "h2o-ema":
        decay = config.policy.decay
        return reference.accumulate(before[None, None], given[None], decay=decay)[0, 0]
    if config.policy.name not in WEIGHTS:
        return before
    if config.policy.name == "tova":
        return given[:, -1].mean(axis=0)
    if config.policy.name == "snapkv":
        return _snapkv(before, given.mean(axis=0))
    some = given[:, :: -max(1, given.shape[1] // 512)]  # of a long chunk, at equal distances
    return np.nan_to_num(before) + some.sum(axis=(0, 1)) * (given.shape[1] / some.shape[1])


def _snapkv(before: np.ndarray, weights: np.ndarray) -> np.ndarray:
    if len(weights) >= 32:
        votes = weights[-32:].mean(axis=0)
        return np.array([votes[max(0, i - 3) : i + 4].max() for i in range(len(votes))])
    for weight in weights:
        before = np.where(np.isnan(before), weight, 31 / 32 * before + 1 / 32 * weight)
    return before


def ranks(config, head: int, rows: list, keep: int, recent_start: int, offset: int) -> np.ndarray:
    """The ranks [N] of a head's rows after ``offset`` tokens; the ``keep`` highest stay."""
    scores = np.array([row.score for row in rows])
    if config.policy.name in ("h2o-ema", "h2o-sum", "tova", "snapkv"):
        return scores
    if config.policy.name == "window":
        return np.array([row.position for row in rows], np.float64)
    if config.policy.name == "random":
        return np.array([_hash(config.policy.random_seed, head, row.position) for row in rows])
    if config.policy.name == "h2o":
        age = offset - np.array([row.position for row in rows])
        return _h2o(config, scores / np.sqrt(age), rows, keep, recent_start)
    if config.policy.name == "keydiff":
        return _key_diversity(rows)
    if config.policy.name == "value-aware":
        return scores * np.array([np.abs(row.value).sum() for row in rows])
    assert config.policy.name == "mix"
    return 4 * _places(_key_diversity(rows)) + _places(scores) + 0 * scores


def _h2o(config, mass: np.ndarray, rows: list, keep: int, recent_start: int) -> np.ndarray:
    """Aged mass times value norm, over the greatest, plus 2 for the most diverse unprotected
    rows; without folding, a row counts as diverse as the best of itself and the next two."""
    heavy = mass * np.array([np.linalg.norm(row.value) for row in rows])
    found = heavy / max(np.nan_to_num(heavy).max(initial=0), 1e-9)
    stays = [row.position < for_good(config) or row.position >= recent_start for row in rows]
    free = [place for place, protected in enumerate(stays) if not protected]
    diverse = int(config.policy.diversity * max(0, keep - sum(stays)))
    if diverse:
        own, behind = _key_diversity(rows), 1 if config.policy.fold else 3
        apart = [own[place : place + behind].max() for place in range(len(own))]
        best = sorted(free, key=lambda place: (-apart[place], rows[place].position))[:diverse]
        found[best] += 2
    return found


def _key_diversity(rows: list) -> np.ndarray:
    keys = np.array([row.key for row in rows], np.float64)
    return reference.key_diversity(keys[None, None])[0, 0]


def _places(values: np.ndarray) -> np.ndarray:
    """Places 0 to N - 1; NaN is least, and among equals the later row."""
    order = sorted(range(len(values)), key=lambda i: (np.nan_to_num(values[i], nan=-np.inf), -i))
    places = np.empty(len(values))
    places[order] = np.arange(len(values))
    return places


def _hash(seed: int, head: int, position: int) -> float:
    return (_mixed(_mixed(_mixed(seed) ^ head) ^ position) >> 8) / 2**24


def _mixed(bits: int) -> int:
    bits = (bits + 0x9E3779B9) % 2**32
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B % 2**32
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35 % 2**32
    return bits ^ (bits >> 16)
