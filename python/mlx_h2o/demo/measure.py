"""Run one arm of the demo and measure it."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

import mlx_h2o
from mlx_h2o import evaluate
from mlx_h2o.demo.arms import Arm
from mlx_h2o.evaluation.facts import PlantedText, Question

__all__ = ["ArmResult", "Reporter", "Settings", "measure", "speeds"]

REPEATS = 5
STEP = 8
"""Tokens fed at a time where predictions count."""


@dataclass(frozen=True)
class Settings:
    """What all arms share: the model's name, the first token whose prediction counts, the tokens of
    a prefill chunk, and how many tokens to generate."""

    model: str
    first: int
    chunk: int = 128
    generate: int = 64


@dataclass(frozen=True)
class ArmResult:
    """What one arm cost and what it kept.

    kv_bytes: of the text, for rows of 16 bits an element. Peaks are in bytes, as computed, and
    include the model's weights.
    """

    name: str
    generated: str
    kv_bytes: int
    peak_prefill: int
    peak_decode: int
    evicted_rows_per_layer: int
    facts_recalled: tuple[bool, ...]
    forced: evaluate.TeacherForced


class Reporter(Protocol):
    """Is told what goes on."""

    def stage(self, arm: str, stage: str) -> evaluate.Progress: ...

    def text(self, arm: str, segment: str) -> None: ...


def measure(
    model: Any,
    tokenizer: Any,
    arm: Arm,
    text: PlantedText,
    settings: Settings,
    reporter: Reporter,
) -> ArmResult:
    """Read the text in chunks, ask for the facts, generate on; then read it by few tokens.

    The last token of the text is left to the generation, so that a question begins with it.
    """
    cache = arm.make()
    with evaluate.peak_memory() as reading:
        evaluate.prefill(
            model,
            cache,
            text.tokens[:-1],
            chunk=settings.chunk,
            progress=reporter.stage(arm.name, "reading"),
        )
    last = text.tokens[-1:]
    questions = [
        Question((*last, *question.prompt), question.answer) for question in text.questions
    ]
    recalled = evaluate.recall(model, cache, questions)
    with evaluate.peak_memory() as writing:
        generated, _ = _generate(
            model,
            tokenizer,
            cache,
            last,
            settings.generate,
            lambda segment: reporter.text(arm.name, segment),
        )
    forced = evaluate.teacher_forced(
        model,
        arm.make(),
        text.tokens,
        first=settings.first,
        step=STEP,
        chunk=settings.chunk,
        progress=reporter.stage(arm.name, "perplexity"),
    )
    return ArmResult(
        name=arm.name,
        generated=generated,
        kv_bytes=arm.nbytes,
        peak_prefill=reading.bytes,
        peak_decode=writing.bytes,
        evicted_rows_per_layer=evaluate.evicted_rows(cache) // len(cache),
        facts_recalled=recalled,
        forced=forced,
    )


def speeds(
    model: Any,
    tokenizer: Any,
    arms: Sequence[Arm],
    text: PlantedText,
    settings: Settings,
    reporter: Reporter,
) -> dict[str, tuple[float, ...]]:
    """Tokens per second when generating on from the text: `REPEATS` figures per arm, by its name.

    The arms take turns, so that whatever else the machine does falls on all of them.
    """
    caches = {arm.name: arm.make() for arm in arms}
    for cache in caches.values():
        evaluate.prefill(model, cache, text.tokens[:-1], chunk=settings.chunk)
    found: dict[str, list[float]] = {name: [] for name in caches}
    progress = reporter.stage("all", "speed")
    for repeat in range(REPEATS):
        for name, cache in caches.items():
            again = copy.deepcopy(cache)
            last = text.tokens[-1:]
            _, speed = _generate(model, tokenizer, again, last, settings.generate, _ignore)
            found[name].append(speed)
        progress(repeat + 1, REPEATS)
    return {name: tuple(figures) for name, figures in found.items()}


def _ignore(segment: str) -> None:
    """Show nothing."""


def _generate(
    model: Any,
    tokenizer: Any,
    cache: list[Any],
    prompt: tuple[int, ...],
    count: int,
    show: Callable[[str], None],
) -> tuple[str, float]:
    """Generate through mlx_lm: the text, and tokens per second.

    Sampled, with one seed for all arms: decoded greedily, the small model repeats itself.
    """
    from mlx_lm.sample_utils import make_sampler

    segments = []
    speed = 0.0
    mx.random.seed(0)
    options: dict[str, Any] = {
        "max_tokens": count,
        "sampler": make_sampler(temp=0.7),
        "prompt_cache": cache,
    }
    for response in mlx_h2o.stream_generate(model, tokenizer, list(prompt), **options):
        segments.append(response.text)
        speed = response.generation_tps
        show(response.text)
    return "".join(segments), speed
