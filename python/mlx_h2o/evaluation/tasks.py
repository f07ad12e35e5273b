"""Tasks for every arm, on the same tokens in the same chunks.

loss: texts read token by token after a prompt: the loss, the divergence from the full cache, and
    how often both have the same most likely token.
chunks: the same, with the texts read in chunks.
facts: facts in four wordings, planted in texts of several lengths and asked for after the text.
ruler: samples of RULER (Hsieh et al. 2024), from a file with one JSON object a line, of `input`
    and `outputs`.
turns: a chat of two turns; after the second, questions ask for facts of the first.
writing: texts that the model continues by itself: whether it repeats itself, and the full cache's
    loss on them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from typing import Any, TypeVar, cast

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache as stock_cache

from ..lm.generate import read
from ..lm.generation_checks import vocabulary
from ..lm.routing import routing_for
from .arms import PROMPT
from .facts import Tokens
from .questions import Asked, Settings, chats, planted_texts, samples, windows
from .reading import CHUNK, Forced, Progress, answers, forced
from .speed import Make

_T = TypeVar("_T")

MOST_SIDE_BY_SIDE = 8
MOST_LOGITS = 2**28
"""Logits of texts read side by side, in one step."""

Figures = dict[str, list[float]]
"""By measure: one figure for each text, or for each question."""


@dataclass(frozen=True)
class Case:
    """One thing to measure."""

    task: str  # of TASKS
    tokens: int  # how long its texts are; arms are sized for that
    measure: Callable[[Make, Progress], Figures]  # with caches that a function makes
    full: Callable[[], Figures] | None = None  # figures of the full cache, if already known


def cases(
    model: Any,
    tokenizer: Any,
    texts: Sequence[tuple[str, str]],
    tasks: Sequence[str],
    settings: Settings,
) -> Iterator[Case]:
    """All cases of the tasks, in order.

    Raises ValueError if the texts are too short, or facts do not fit.
    """
    count, length = settings.documents, settings.length
    if "loss" in tasks or "chunks" in tasks:
        losses = _Losses(model, windows(tokenizer, texts, count=count, length=length))
        for task, step in (("loss", settings.step), ("chunks", CHUNK)):
            if task in tasks:
                yield Case(task, length, partial(losses.measured, step), losses.full)
    asking = ("facts", settings.lengths, planted_texts), ("turns", settings.lengths[:1], chats)
    for task, lengths, make in asking:
        for of in lengths if task in tasks else ():
            yield Case(task, of, partial(_answered, model, make(tokenizer, texts, of, settings)))
    if "ruler" in tasks:
        if settings.ruler is None:
            raise ValueError("ruler needs a file of RULER's samples")
        asked = samples(tokenizer, settings.ruler, count)
        longest = max(len(sample.text) + len(sample.asked[0][0]) for sample in asked)
        yield Case("ruler", longest, partial(_answered, model, asked))
    if "writing" in tasks:
        starts = windows(tokenizer, texts, count=count, length=CHUNK)
        measure = partial(_written, model, starts, settings)
        yield Case("writing", CHUNK + settings.writing, measure)


TASKS = ("loss", "chunks", "facts", "turns", "ruler", "writing")


class _Losses:
    """Texts predicted token by token. The full cache, which reads them once, is the reference."""

    def __init__(self, model: Any, texts: Sequence[Tokens]) -> None:
        self._model = model
        most = max(1, MOST_LOGITS // (CHUNK * vocabulary(model)))
        self._groups = [mx.array(group) for group in _side_by_side(texts, len, most)]

    def measured(self, step: int, make: Make, progress: Progress) -> Figures:
        found: Figures = {"loss": [], "kl": [], "top1": []}
        for tokens, full in zip(self._groups, self._reference, strict=True):
            given: Any = {"first": PROMPT, "step": step, "reference": full, "progress": progress}
            caches = make()
            with routing_for(self._model, caches):
                run = forced(self._model, caches, tokens, **given)
            same = (run.top1 == full.top1).astype(mx.float32)
            for name, values in (("loss", run.losses), ("kl", run.divergences), ("top1", same)):
                found[name] += _floats(cast(mx.array, values).mean(axis=1))
        return found

    def full(self) -> Figures:
        losses = [loss for run in self._reference for loss in _floats(run.losses.mean(axis=1))]
        return {"loss": losses, "kl": [0.0] * len(losses), "top1": [1.0] * len(losses)}

    @cached_property
    def _reference(self) -> list[Forced]:
        """Read in chunks: with the full cache, predictions are the same as token by token."""
        given: Any = {"first": PROMPT, "step": CHUNK, "keep": True}
        return [forced(self._model, stock_cache(self._model), one, **given) for one in self._groups]


def _answered(model: Any, texts: Sequence[Asked], make: Make, progress: Progress) -> Figures:
    """Ask questions after texts read in chunks: for each question, the share of the answer's tokens
    that are right, and whether all are."""
    found: Figures = {"tokens": [], "whole": []}
    done, total = 0, sum(len(text.asked) for text in texts)
    for group in _side_by_side(texts, _shape):
        caches = make()
        with routing_for(model, caches):
            read(model, caches, mx.array([text.text for text in group]), CHUNK)
            for question in zip(*(text.asked for text in group), strict=True):
                prompts, wanted = (mx.array(part) for part in zip(*question, strict=True))
                right = answers(model, caches, prompts, wanted)
                shares = _floats(right.astype(mx.float32).mean(axis=1))
                found["tokens"] += shares
                found["whole"] += [float(share == 1) for share in shares]
                done += len(group)
                progress(done, total)
    return found


def _written(
    model: Any, starts: Sequence[Tokens], settings: Settings, make: Make, progress: Progress
) -> Figures:
    """Let the model continue texts side by side, sampled at a temperature of 1 with one seed for
    all arms.

    Measures the last quarter of each continuation: the share of distinct runs of 4 tokens, and the
    loss of the full cache; also the bytes at the end, relative to their peak.
    """
    count = settings.writing
    mx.random.seed(settings.seed)
    caches = make()
    texts = [mx.array([*starts])]
    nbytes = []
    with routing_for(model, caches):
        logits = read(model, caches, texts[0], CHUNK)
        for place in range(count):
            texts.append(mx.random.categorical(logits)[:, None])
            logits = model(texts[-1], cache=caches)[:, -1]
            mx.eval(logits)
            if place % 256 == 255 or place == count - 1:
                nbytes.append(sum(int(cache.nbytes) for cache in caches))
                progress(place + 1, count)
    found: Figures = {"distinct": [], "loss": [], "bytes": [nbytes[-1] / max(nbytes)] * len(starts)}
    for tokens in mx.concatenate(texts, axis=1)[:, None]:
        first = tokens.shape[1] - max(4, count // 4)
        last = cast(list[int], tokens[0, first:].tolist())
        runs = list(zip(*(last[at:] for at in range(4)), strict=False))
        judged = forced(model, stock_cache(model), tokens, first=first, step=CHUNK)
        found["distinct"].append(len(set(runs)) / len(runs))
        found["loss"] += _floats(judged.losses.mean(axis=1))
    return found


def _floats(values: mx.array) -> list[float]:
    return cast(list[float], values.tolist())


def _shape(text: Asked) -> tuple[Any, ...]:
    return len(text.text), *((len(prompt), len(answer)) for prompt, answer in text.asked)


def _side_by_side(
    texts: Sequence[_T], shape: Callable[[_T], object], most: int = MOST_SIDE_BY_SIDE
) -> Iterator[list[_T]]:
    """Groups of texts to read together: neighbours of the same shape, a few at a time."""
    size = min(most, MOST_SIDE_BY_SIDE)
    for _, alike in groupby(texts, shape):
        group = list(alike)
        yield from (group[at : at + size] for at in range(0, len(group), size))
