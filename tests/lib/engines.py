"""An engine in this process, and requests that collect their answers."""

import functools
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from mlx_lm.tokenizer_utils import TokenizerWrapper

import mlx_h2o
from mlx_h2o.lm.prompt_cache import make_prompt_cache
from mlx_h2o.serving.engine import Engine
from mlx_h2o.serving.memory import Memory
from mlx_h2o.serving.request import Event, Request
from mlx_h2o.serving.snapshots import Snapshots
from tiny_models import random_prompt, tiny_qwen3, tiny_tokenizer

TEXT = random_prompt(18)
SAID = "It was a dark night, and the wind was in the trees. The captain looked at the sea and"


@functools.cache
def tiny() -> tuple[Any, Any]:
    """A model with random weights, and a tokenizer of words."""
    return tiny_qwen3(), TokenizerWrapper(tiny_tokenizer())


def fail(*args: Any, **given: Any) -> Any:
    raise RuntimeError("it fails")


@functools.cache
def demo() -> tuple[Any, Any]:
    """The model in the package, and its tokenizer."""
    return mlx_h2o.load("demo")


@contextmanager
def engine_of(
    models: list[Any] | None = None, tokenizer: Any = None, *, limits: dict[str, Any] | None = None,
    memory: int = 4 << 30, kept: int = 1 << 28, store: Any = None, **settings: Any,
) -> Iterator[Engine]:  # fmt: skip
    """An engine whose caches have these settings; unbounded by default."""
    models = models or [tiny()[0]]
    given = {"max_kv_size": None, "layers": "equal"} | settings

    def fresh() -> list[Any]:
        return [one for model in models for one in make_prompt_cache(model, **given)]

    limits = {"decode": 32, "prompts": 8, "step": 512} if limits is None else limits
    fits = Memory(models, fresh, memory, **limits)
    engine = Engine(tokenizer or tiny()[1], fits, Snapshots(kept), store)
    try:
        yield engine
    finally:
        assert engine.close(60)


def memory_for(engine: Engine, nbytes: int) -> int:
    """The memory of an engine like this one that has ``nbytes`` for caches."""
    own = engine.memory
    others = own.limit - own.limit // 16 - own.free  # a 16th is for freed buffers
    return (others + nbytes) * 16 // 15 + 16


class Asked:
    """A request and its outcome."""

    def __init__(self, engine: Engine, prompt: str | list[int], **given: Any) -> None:
        self.engine, self.events = engine, []
        self._told: queue.Queue[Event] = queue.Queue()
        tokens = engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        self.request = Request(list(tokens), self._told.put, **({"max_tokens": 12} | given))

    def submit(self) -> Self:
        self.engine.check(self.request)
        self.engine.submit([self.request])
        return self

    def next(self) -> Event:
        self.events.append(self._told.get(timeout=60))
        return self.events[-1]

    def wait(self) -> Self:
        while True:
            event = self.next()
            if event.error is not None or event.finish is not None:
                return self

    @property
    def text(self) -> str:
        return "".join(text for event in self.events for _, text in event.segments)

    @property
    def answer(self) -> list[int]:
        assert self.error is None, self.error
        return self.request.answer

    @property
    def finish(self) -> str | None:
        return self.events[-1].finish

    @property
    def error(self) -> Exception | None:
        return self.events[-1].error


def submit(engine: Engine, prompt: str | list[int], **given: Any) -> Asked:
    return Asked(engine, prompt, **given).submit()


def ask(engine: Engine, prompt: str | list[int], **given: Any) -> Asked:
    return submit(engine, prompt, **given).wait()
