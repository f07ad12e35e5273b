"""mlx_lm's speculative decoding: only with caches that can take back what is rejected."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..caches.cache import H2OKVCache
from .replacements import Target
from .upstream import target

DRAFTED = 2
"""Tokens that mlx_lm drafts at a time where it is not told."""


def targets() -> list[Target]:
    """What to replace in mlx_lm so that its loop refuses at its start, not in the middle."""
    return [
        target("generate", "speculative_generate_step", _checking_speculation),
        target("generate", "can_trim_prompt_cache", _checking_trimming),
    ]


def _checking_speculation(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def speculative_generate_step(*args: Any, **kwargs: Any) -> Any:
        _check(kwargs.get("prompt_cache"), kwargs.get("num_draft_tokens", DRAFTED))
        return original(*args, **kwargs)

    return speculative_generate_step


def _checking_trimming(original: Callable[..., bool]) -> Callable[..., bool]:
    """For those who hold the speculative loop itself: it asks this first, by name."""

    @functools.wraps(original)
    def can_trim_prompt_cache(cache: Any) -> bool:
        _check(cache, 1)
        return original(cache)

    return can_trim_prompt_cache


def _check(caches: Any, drafted: int) -> None:
    for cache in _ours(caches or ()):
        allowed = cache.config.speculative
        if allowed < drafted:
            raise ValueError(
                f"[speculative_generate_step] the prompt cache holds a {type(cache).__name__} with "
                f"speculative={allowed}, whose evicted rows cannot come back when {drafted} drafts "
                f"are rejected: expected caches made with speculative={drafted} or more."
            )


def _ours(caches: Sequence[Any]) -> Iterator[H2OKVCache]:
    for cache in caches:
        if isinstance(cache, H2OKVCache):
            yield cache
        else:
            yield from _ours(getattr(cache, "caches", ()))
