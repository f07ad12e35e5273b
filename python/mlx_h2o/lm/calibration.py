"""What each layer of a model loses with few rows, measured on texts that repeat themselves."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from os import PathLike
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from ..config import H2OConfig
from ..evaluation.facts import draw
from .profile import Profile, fingerprint
from .prompt_cache import evicting_caches, make_prompt_cache
from .routing import model_name, routing_for

SHARES = (1 / 8, 1 / 2, 1.0)
PARTS = (32, 16, 8, 4, 2)
"""The numbers of rows: parts of a document of which one is kept."""

SHORTEST = 320
"""Tokens of a document, of which the fewest rows must exceed the sinks and half a chunk."""

_CHUNKS = 80
"""A document is read in so many chunks. Those rows are seen in the mean that are measured: half a
chunk fewer before it comes, half a chunk more behind it."""

_NOTHING = 1e-4
"""Nats of which it is not tried whether more rows lose fewer."""

_LIKELY = 64
"""Tokens of the vocabulary that an expected loss tells apart."""

_WORDINGS = ("secret", "is")
"""Of the facts in a document that are asked later: layers that recall digits need not be those that
recall words."""

_EACH = 2
"""Facts of each wording."""

_SETTLED = 4
"""First tokens of a repeated passage, which only tell what repeats."""

Progress = Callable[[int, int], None]
"""Called with (measured, to be measured in all)."""

Array = np.ndarray[Any, Any]


def calibrate(
    model: Module,
    tokenizer: Any,
    text: str,
    *,
    policy: str = "merge",
    length: int = 640,
    documents: int = 8,
    file: str | PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Measure what each evicting layer loses when it alone keeps few rows.

    The model reads all documents as one batch, once for each layer, 5 numbers of rows (1/32 to 1/2
    of a document) and 3 recent shares of them (1/8, 1/2, and all: a plain window). The loss is that
    of the second half of each document, which repeats passages and facts of the first half:
    repeated tokens make up half of the loss, all others the other half.

    Args:
        model: an mlx_lm model.
        tokenizer: its tokenizer.
        text: any text, from which documents are cut; if it is short, they overlap.
        policy: the policy to measure with.
        length: tokens of a document, at least 320.
        documents: number of documents.
        file: where to write the profile. Until it is complete it is in FILE.partial, from which a
            later call with the same arguments resumes.
        progress: called with the progress.

    Raises:
        ValueError: a text that is too short, sizes out of range, or a model that does not
            support this policy.
        OSError: the file cannot be written.
    """
    if length < SHORTEST or documents < 1:
        raise ValueError(
            f"[calibrate] found {documents} documents of {length} tokens, expected at least 1 of "
            f"at least {SHORTEST}."
        )
    texts, repeated = planted_documents(tokenizer, text, length, documents)
    run = _Run(model, texts, repeated, policy)
    about = run.about() | {"text": hashlib.sha256(text.encode()).hexdigest()[:16]}
    rows = tuple(length // part for part in PARTS)
    partial = None if file is None else f"{os.fspath(file)}.partial"
    profile = None if partial is None else _begun(partial, about)
    if profile is None:
        empty = np.full((run.layers, len(rows), len(SHARES)), np.nan, np.float32)
        profile = Profile(empty, rows, SHARES, about)
    for layer, one, share in _missing(profile):
        if progress is not None:
            progress(int(np.isfinite(profile.loss).sum()), profile.loss.size)
        recent = profile.recent(rows[one], SHARES[share])
        profile.loss[layer, one, share] = run.loss(layer, rows[one], recent)
        if partial is not None:
            profile.save(partial)
    if progress is not None:
        progress(profile.loss.size, profile.loss.size)
    if file is not None and partial is not None:
        profile.save(partial)
        os.replace(partial, file)
    return profile


def planted_documents(
    tokenizer: Any, text: str, length: int, count: int, seed: int = 0
) -> tuple[Array, Array]:
    """Documents [count, length] of a text, in whose second half parts of the first come again.

    These are passages of 16 to 32 tokens, which take turns with as much new text, and at the end
    facts whose values are digits or a word, drawn by the seed.

    Returns:
        The tokens; and where they repeat, but for what tells which passage or line it is.

    Raises:
        ValueError: a text of fewer tokens than a document takes, or a tokenizer of too few words.
    """
    tokens = tokenizer.encode(text, add_special_tokens=False)
    needed = length * 3 // 4  # of the text, at the most
    if len(tokens) < needed:
        raise ValueError(
            f"[calibrate] the text has {len(tokens)} tokens, expected at least {needed} for "
            f"documents of {length}."
        )
    chance = random.Random(seed)
    half, found, repeated = length // 2, [], np.zeros((count, length), bool)
    for line in range(count):
        start = (len(tokens) - needed) * line // max(1, count - 1)
        new = iter(tokens[start : start + needed])
        facts = _facts(tokenizer, chance)
        document: list[int] = []
        for place, (cue, answer) in enumerate(facts, 1):
            room = place * half // len(facts) - len(document) - len(cue) - len(answer)
            document += [*itertools.islice(new, max(0, room)), *cue, *answer]
        end = length - sum(len(cue) + len(answer) for cue, answer in facts)
        while len(document) < end:
            size = chance.randint(16, 32)
            at = chance.randrange(half - size)
            repeated[line, len(document) + _SETTLED : len(document) + size] = True
            document += document[at : at + size]
            document += itertools.islice(new, size)
        del document[end:]
        repeated[line, end:] = False
        for cue, answer in chance.sample(facts, len(facts)):
            document += cue
            repeated[line, len(document) : len(document) + len(answer)] = True
            document += answer
        found.append(document)
    return np.array(found), repeated


def _facts(tokenizer: Any, chance: random.Random) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Facts as tokens, what is asked and the rest, in all wordings by turns."""
    drawn = [draw(tokenizer, wording, _EACH, chance) for wording in _WORDINGS]
    return [
        (fact.question.prompt, fact.tokens[len(fact.question.prompt) :])
        for turn in zip(*drawn, strict=True)
        for fact in turn
    ]


def _missing(profile: Profile) -> Iterator[tuple[int, int, int]]:
    """What is to be measured, while it is; what follows from other runs is filled in."""
    loss = profile.loss
    for layer, one, share in np.ndindex(loss.shape):
        if not np.isnan(loss[layer, one, share]):
            continue
        rows = profile.rows[one]
        sizes = [profile.recent(rows, other) for other in profile.shares[: share + 1]]
        same = sizes.index(sizes[-1])
        if one and loss[layer, one - 1].min() <= _NOTHING:
            loss[layer, one, share] = loss[layer, one - 1, share]
        elif same < share:
            loss[layer, one, share] = loss[layer, one, same]
        else:
            yield layer, one, share


def _begun(partial: str, about: dict[str, Any]) -> Profile | None:
    """What an earlier calibration with the same arguments left; warns of one with others."""
    try:
        found = Profile.load(partial, whole=False)
    except FileNotFoundError:
        return None
    except ValueError:
        found = None
    if found is None or found.about != about:
        warnings.warn(f"{partial} is of other settings: starting anew", stacklevel=3)
        return None
    return found


class _Run:
    """A model that reads documents [B, T], and what it loses when one of its layers has few rows.

    The loss is that of the second half of the documents. It is expected, not observed: the
    divergence from what the model predicts with all rows, of which the likeliest tokens and the
    logarithms of their probabilities are kept. That takes far fewer documents to be known.
    """

    def __init__(self, model: Module, texts: Array, repeated: Array, policy: str) -> None:
        self.model: Any = model
        self.policy = policy
        self.tokens = mx.array(texts)
        self.chunk = texts.shape[1] // _CHUNKS
        self.layers = len(list(evicting_caches(self._caches())))
        half = texts.shape[1] // 2
        again = np.roll(repeated, -1, axis=1)[:, half:-1]  # of the tokens that are predicted
        self.weight = mx.array(
            (again / max(1, again.sum()) + ~again / max(1, (~again).sum())) / (1 + again.any())
        )
        self.expected: list[tuple[mx.array, mx.array]] = []

    def about(self) -> dict[str, Any]:
        """What a profile says of itself."""
        return {
            "model": model_name(self.model),
            "fingerprint": fingerprint(self.model),
            "policy": self.policy,
            "documents": self.tokens.shape[0],
            "tokens": self.tokens.shape[1],
            "sink_size": H2OConfig.sink_size,
            "recent_size": self.chunk,
            "versions": {name: version(name) for name in ("mlx-h2o", "mlx", "mlx-lm")},
        }

    def loss(self, layer: int, rows: int, recent: int) -> float:
        """Nats, where this layer has so many rows, of which so many are the newest."""
        if not self.expected:
            self.expected = [self._likeliest(logits) for logits in self._read(self._caches())]
        less = self.chunk // 2
        heavy = rows - H2OConfig.sink_size - recent
        config = H2OConfig(
            max_kv_size=rows - less,
            heavy_size=heavy,
            recent_size=recent - less,
            policy=self.policy if heavy else "window",
        )
        caches = self._caches()
        for one, cache in enumerate(evicting_caches(caches)):
            cache.take_settings(config if one == layer else cache.config, unequal_budgets=True)
        found = []
        for logits, (index, log) in zip(self._read(caches), self.expected, strict=True):
            other = mx.take_along_axis(_logarithms(logits), index, axis=-1)
            found.append(_divergence(log, other))
            mx.eval(found[-1])
        losses = mx.concatenate(found, axis=1)[:, :-1]
        return float(np.array((self.weight * losses).sum()))

    def _caches(self) -> list[Any]:
        return make_prompt_cache(self.model, H2OConfig(max_kv_size=None, policy="window"))

    def _read(self, caches: list[Any]) -> Iterator[mx.array]:
        """The logits [B, chunk, V] of the second half."""
        length = self.tokens.shape[1]
        with routing_for(self.model, list(evicting_caches(caches))):
            for start, stop in _chunks(length, self.chunk):
                logits = self.model(self.tokens[:, start:stop], cache=caches)
                if start >= length // 2:
                    yield logits
                mx.eval([cache.state for cache in caches])

    @staticmethod
    def _likeliest(logits: mx.array) -> tuple[mx.array, mx.array]:
        logs = _logarithms(logits)
        index = mx.argpartition(-logs, min(_LIKELY, logs.shape[-1] - 1), axis=-1)[..., :_LIKELY]
        found = index, mx.take_along_axis(logs, index, axis=-1)
        mx.eval(found)
        return found


def _chunks(length: int, size: int) -> Iterator[tuple[int, int]]:
    """From and to, such that one begins at the half."""
    half = length // 2
    for first, last in ((0, half), (half, length)):
        yield from ((start, min(start + size, last)) for start in range(first, last, size))


def _logarithms(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _divergence(log: mx.array, other: mx.array) -> mx.array:
    """Of the logarithms of some probabilities, from others of the same tokens: all tokens that are
    not told apart are one."""
    whole, less = mx.exp(log), mx.exp(other)
    rest, left = (mx.maximum(1 - one.sum(axis=-1), 1e-7) for one in (whole, less))
    return (whole * (log - other)).sum(axis=-1) + rest * mx.log(rest / left)
