"""What is measured: jobs, each of which measures one arm on some documents."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache as stock_cache

from .documents import Document
from .facts import WORDINGS, Fact, PlantedText, Tokenizer, draw, insert
from .reading import Forced, Progress, forced, read, recall
from .skipping import skipped

__all__ = ["READINGS", "TASKS", "Job", "Settings", "jobs"]

TASKS = ("ppl", "needle", "skips")
READINGS = ("chunk", "token")


@dataclass(frozen=True)
class Settings:
    """What all arms share.

    documents: windows of the text, at most.
    length: tokens of each.
    prompt: tokens that are read at once before the rest is read one by one.
    chunk: tokens that are read at once where documents are read in chunks.
    seeds: how many.
    batch: documents that are read side by side; None: as many as take little memory.
    lengths: several, in the place of `length`.
    depths: where in the document facts stand that are asked for, from 0 to 1.
    needles: how many facts a document has.
    wordings: of WORDINGS.
    readings: "chunk" and "token": how documents with facts are read.

    Raises ValueError, of one line, naming what is out of range.
    """

    documents: int = 8
    length: int = 2048
    prompt: int = 32
    chunk: int = 128
    seeds: int = 3
    batch: int | None = None
    lengths: tuple[int, ...] = ()
    depths: tuple[float, ...] = (0.1, 0.5, 0.9)
    needles: tuple[int, ...] = (1, 4)
    wordings: tuple[str, ...] = tuple(WORDINGS)
    readings: tuple[str, ...] = READINGS[:1]

    def __post_init__(self) -> None:
        for name in ("documents", "prompt", "chunk", "seeds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.batch is not None and self.batch < 1:
            raise ValueError(f"batch is {self.batch}, expected at least 1")
        for length in (self.length, *self.lengths):
            if length < self.prompt + 2:
                least = self.prompt + 2
                raise ValueError(f"length is {length}, expected at least prompt + 2 = {least}")
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise ValueError(f"a depth is {depth}, expected 0 to 1")
        for count in self.needles:
            if count < 1:
                raise ValueError(f"needles is {count}, expected at least 1")
        for name, known in (("wordings", tuple(WORDINGS)), ("readings", READINGS)):
            for one in getattr(self, name):
                if one not in known:
                    raise ValueError(f"{name}: {one!r} is none of {', '.join(known)}")


Figures = dict[str, list[float]]
"""By measure, one figure per document of the job."""

Look = Callable[[list[Any]], None]
"""Is shown the caches after each step of a text."""


@dataclass(frozen=True)
class Job:
    """One thing to measure, of every arm.

    case: what tells it from others: the task, and settings of it.
    documents: the indices of its documents.
    every_seed: whether every arm is measured with this seed, or only arms that draw at random.
    measure: the figures of caches that a function makes, one per document; what it is given
        besides looks at them.
    text: the tokens of the first document, as it is read; empty where it is not to be recorded.
    facts: those in it, as text.
    """

    case: dict[str, Any]
    documents: tuple[int, ...]
    seed: int
    every_seed: bool
    measure: Callable[[Callable[[], list[Any]], Look | None], Figures]
    text: tuple[int, ...]
    facts: tuple[str, ...] = ()


def jobs(
    model: Any,
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    groups: Sequence[tuple[int, ...]],
    tasks: Sequence[str],
    settings: Settings,
) -> Iterator[Job]:
    """All jobs, in order. A job's texts are made when they are first needed.

    Raises ValueError where facts do not fit, or the tokenizer has too few words for them.
    """
    for group in groups:
        for length in settings.lengths or (settings.length,):
            texts = [documents[index].tokens[:length] for index in group]
            for task in [one for one in _READ_ALONE if one in tasks]:
                reader = _READ_ALONE[task](model, mx.array(texts), settings)
                for seed in range(settings.seeds):
                    case = {"task": task, "length": len(texts[0])}
                    shown = texts[0] if task == "ppl" else ()
                    yield Job(case, group, seed, seed == 0, reader.measure, shown)
        if "needle" in tasks:
            yield from _needles(model, tokenizer, documents, group, settings)


class _Perplexity:
    """Documents read token by token behind a prompt; the full cache is the reference."""

    def __init__(self, model: Any, tokens: mx.array, settings: Settings) -> None:
        self._model, self._tokens, self._settings = model, tokens, settings

    def measure(self, make: Callable[[], list[Any]], look: Look | None) -> Figures:
        found = self._run(make(), look, reference=self._full)
        same = (found.top1 == self._full.top1).astype(mx.float32)
        figures = {"loss": found.losses, "kld": found.divergences, "top1": same}
        return {name: _means(values) for name, values in figures.items() if values is not None}

    @cached_property
    def _full(self) -> Forced:
        return self._run(stock_cache(self._model), None, keep=True)

    def _run(self, caches: list[Any], look: Look | None, **how: Any) -> Forced:
        prompt = self._settings.prompt
        return forced(
            self._model,
            caches,
            self._tokens,
            first=prompt,
            chunk=prompt,
            progress=_showing(caches, look),
            **how,
        )


class _Skips:
    """Documents read in chunks, and their last tokens one by one."""

    def __init__(self, model: Any, tokens: mx.array, settings: Settings) -> None:
        self._model, self._tokens, self._settings = model, tokens, settings

    def measure(self, make: Callable[[], list[Any]], look: Look | None) -> Figures:
        return skipped(self._model, make(), self._tokens, self._settings.chunk)


_READ_ALONE: dict[str, Callable[..., Any]] = {"ppl": _Perplexity, "skips": _Skips}
"""By task: what reads documents as they are."""


def _showing(caches: list[Any], look: Look | None) -> Progress | None:
    return None if look is None else lambda done, total: look(caches)


def _means(values: mx.array) -> list[float]:
    means: Any = values.mean(axis=1).tolist()
    return [float(mean) for mean in means]


def _needles(
    model: Any,
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    group: tuple[int, ...],
    settings: Settings,
) -> Iterator[Job]:
    """Documents with facts, whose questions come when the document has been read.

    In a document with n facts those at the depths are asked for, n at a time; where n is more than
    the depths, the others stand anywhere and are there to be mistaken for them.
    """
    for seed in range(settings.seeds):
        for length in settings.lengths or (settings.length,):
            for count in settings.needles:
                for wording in settings.wordings:
                    for start in range(0, len(settings.depths), count):
                        depths = settings.depths[start : start + count]
                        planted = [
                            _planted(
                                tokenizer, documents[index].tokens[:length], count, depths, wording,
                                random.Random(f"{seed} {index} {length} {count} {wording} {start}"),
                            )
                            for index in group
                        ]  # fmt: skip
                        for reading in settings.readings:
                            case = {
                                "task": "needle",
                                "length": length,
                                "needles": count,
                                "wording": wording,
                                "reading": reading,
                                "depths": list(depths),
                            }
                            reader = _Needle(model, planted, depths, reading, settings)
                            first = planted[0]
                            yield Job(
                                case, group, seed, True, reader.measure, first.tokens, first.facts
                            )


def _planted(
    tokenizer: Tokenizer,
    body: Sequence[int],
    count: int,
    depths: Sequence[float],
    wording: str,
    chance: random.Random,
) -> PlantedText:
    """A text as long as `body`, of which only the facts at the depths are asked for."""
    facts = draw(tokenizer, wording, count, chance)
    left = len(body) - sum(len(fact.tokens) for fact in facts)
    if left < 2 * count:
        raise ValueError(
            f"{count} facts in the wording {wording!r} do not fit in {len(body)} tokens"
        )
    places: list[tuple[float, Fact, bool]] = [
        (depth, fact, True) for depth, fact in zip(depths, facts, strict=False)
    ]
    places += [(chance.random(), fact, False) for fact in facts[len(depths) :]]
    places.sort(key=lambda one: one[0])
    whole = insert(
        tokenizer,
        body[:left],
        [fact for _, fact, _ in places],
        [int(depth * (left - 1)) for depth, _, _ in places],
    )
    asked = [fact.question for _, fact, wanted in places if wanted]
    order = sorted(range(len(depths)), key=lambda index: depths[index])
    in_order = dict(zip(order, asked, strict=True))
    questions = tuple(in_order[index] for index in range(len(depths)))
    return PlantedText(whole.tokens, questions, whole.facts, whole.last_fact)


class _Needle:
    """Documents with facts, and a way to read them."""

    def __init__(
        self,
        model: Any,
        planted: Sequence[PlantedText],
        depths: Sequence[float],
        reading: str,
        settings: Settings,
    ) -> None:
        self._model, self._planted, self._depths = model, planted, depths
        self._reading, self._settings = reading, settings

    def measure(self, make: Callable[[], list[Any]], look: Look | None) -> Figures:
        tokens = mx.array([text.tokens for text in self._planted])
        caches, settings = make(), self._settings
        progress = _showing(caches, look)
        first = settings.prompt if self._reading == "token" else tokens.shape[1] - 1
        chunk = settings.prompt if self._reading == "token" else settings.chunk
        read(self._model, caches, tokens[:, :first], chunk, progress)
        if first < tokens.shape[1] - 1:
            read(self._model, caches, tokens[:, first:-1], 1, progress)
        questions = [text.questions for text in self._planted]
        right = recall(self._model, caches, tokens[:, -1:], questions)
        return {
            f"depth {depth:g}": [float(one) for one in of_texts]
            for depth, of_texts in zip(self._depths, right, strict=True)
        }
