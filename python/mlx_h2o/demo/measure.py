"""Run one arm of the demo and measure it."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

import mlx_h2o
from mlx_h2o import evaluate
from mlx_h2o.demo.arms import Arm
from mlx_h2o.demo.facts import PlantedText, Question

__all__ = ["ArmResult", "Reporter", "Settings", "measure"]

REPEATS = 3


@dataclass(frozen=True)
class Settings:
    """What all arms share: the budget in rows, tokens per prefill chunk, tokens to generate."""

    max_kv_size: int = 256
    chunk: int = 128
    generate: int = 64


@dataclass(frozen=True)
class ArmResult:
    """What one arm cost and what it kept.

    Peaks are in bytes and include the model's weights; tokens_per_second is one figure per repeat.
    """

    name: str
    generated: str
    tokens_per_second: tuple[float, ...]
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
    """Read the text in chunks, ask for the facts, generate on; then feed it token by token.

    The last token of the text is left to the generation, so that a question begins with it.
    """
    cache = arm.make_cache()
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
        generated, speed = _generate(
            model,
            tokenizer,
            cache,
            last,
            settings.generate,
            lambda segment: reporter.text(arm.name, segment),
        )
    forced = evaluate.teacher_forced(
        model,
        arm.make_cache(),
        text.tokens,
        first=settings.max_kv_size,
        chunk=settings.chunk,
        progress=reporter.stage(arm.name, "perplexity"),
    )
    kept, evicted = evaluate.kv_bytes(cache), evaluate.evicted_rows(cache) // len(cache)
    # Once is a short stretch on a machine that does other things too: the table shows the median.
    speeds = [speed]
    for _ in range(REPEATS - 1):
        again = copy.deepcopy(cache)
        speeds.append(_generate(model, tokenizer, again, last, settings.generate, _ignore)[1])
    return ArmResult(
        name=arm.name,
        generated=generated,
        tokens_per_second=tuple(speeds),
        kv_bytes=kept,
        peak_prefill=reading.bytes,
        peak_decode=writing.bytes,
        evicted_rows_per_layer=evicted,
        facts_recalled=recalled,
        forced=forced,
    )


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
