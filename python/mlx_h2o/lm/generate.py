"""mlx_lm's loading and generation, with caches that evict."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import add
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx.nn.layers.base import Module
from mlx.utils import tree_map
from mlx_lm.generate import BatchResponse, GenerationResponse
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..caches.cache import PROMPT_CHUNK
from ..config import H2OConfig
from ..demo import DEMO, model_path
from .drafting import DRAFTED
from .prompt_cache import evicting_caches, make_prompt_cache, summary
from .routing import routing, routing_for
from .sharing import LEAST_SHARED, common_tokens, lasting_tokens, read_once, unshared_because

__all__ = ["batch_generate", "generate", "load", "make_prompt_cache", "stream_generate", "summary"]

_NO_LIMIT = int(1e30)
"""Of the tokens in a text, as transformers writes it."""

_PROCESSORS = "logits_processors"
"""What they look at is the whole prompt, of which mlx_lm sees no more than is not read yet."""

_BESIDE = ("budgets", "layers", "length", "max_kv_bytes")
"""What :func:`make_prompt_cache` takes beside the settings."""


def load(path_or_hf_repo: str, *args: Any, **kwargs: Any) -> Any:
    """``mlx_lm.load``, where "demo" is the model in this package.

    If MLX computes on the CPU, float16 weights become float32, because float16 arithmetic is
    several times slower there. The other arguments and the result are mlx_lm's:
    ``(model, tokenizer)``, and the config with ``return_config=True``.

    Raises:
        ValueError: there is no such directory, no model in it, or none of this name on the hub.
    """
    check_path(path_or_hf_repo)
    if path_or_hf_repo == DEMO:
        path_or_hf_repo = str(model_path())
    local = Path(path_or_hf_repo).is_dir()
    try:
        loaded = mlx_lm.load(path_or_hf_repo, *args, **kwargs)
    except OSError as error:
        if local:
            raise
        raise ValueError(
            f"[load] {path_or_hf_repo} is not a directory, and could not be fetched from the hub: "
            f"{error}"
        ) from error
    # Or transformers warns of every longer text, which a bounded cache is for.
    getattr(loaded[1], "_tokenizer", loaded[1]).model_max_length = _NO_LIMIT
    if mx.default_device().type == mx.DeviceType.cpu:
        loaded[0].update(tree_map(_upcast, loaded[0].parameters()))
    return loaded


def check_path(name: str) -> None:
    """Raises ValueError for what can only be a directory, and holds no model of mlx_lm."""
    if name == DEMO:
        return
    if Path(name).is_dir():
        if not (Path(name) / "config.json").exists():
            raise ValueError(f"[load] {name} has no config.json, expected a model of mlx_lm.")
    elif _is_path(name):
        raise ValueError(
            f"[load] {name} is not a directory, expected one that holds a model, a name on the "
            f'hub, or "{DEMO}".'
        )


def _is_path(name: str) -> bool:
    """Whether it cannot be a name on the hub, which is ``name`` or ``owner/name``."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1


def stream_generate(
    model: Module,
    tokenizer: Any,
    prompt: str | mx.array | Sequence[int],
    max_tokens: int = 256,
    **kwargs: Any,
) -> Iterator[GenerationResponse]:
    """``mlx_lm.stream_generate`` with evicting caches.

    Args:
        model: an mlx_lm model.
        tokenizer: its tokenizer.
        prompt: text or token ids.
        max_tokens: tokens to generate, -1 for no limit.
        kwargs: mlx_lm's own arguments; ``budgets``, ``layers``, ``length``, ``max_kv_bytes`` and
            settings of H2OConfig as in :func:`make_prompt_cache`, where None means the default; or
            ``prompt_cache``, caches of :func:`make_prompt_cache`, which are updated in place and
            have their own settings.
            With ``draft_model`` both models get caches, for ``num_draft_tokens`` (2) at a time, and
            ``max_kv_bytes`` covers both; a ``prompt_cache`` then holds those of the model followed
            by those of the draft model.

    Yields:
        mlx_lm's GenerationResponse, a piece of text each.

    Raises:
        ValueError: settings out of range or together with ``prompt_cache``; with a draft model,
            caches whose ``speculative`` is below the number of drafts; a ``quantized_kv_start``
            above 0; an unsupported model.
    """
    seen = tokens_ahead(tokenizer, prompt, max_tokens)
    kwargs["prompt_cache"] = _caches("stream_generate", model, kwargs, seen)
    return _stream(model, tokenizer, prompt, max_tokens, kwargs)


def generate(
    model: Module,
    tokenizer: Any,
    prompt: str | list[int],
    verbose: bool = False,
    **kwargs: Any,
) -> str:
    """``mlx_lm.generate`` with evicting caches: the whole text at once.

    Arguments and errors are those of :func:`stream_generate`; ``verbose`` prints the text and
    the timings as they come.
    """
    seen = tokens_ahead(tokenizer, prompt, kwargs.get("max_tokens", 256))
    kwargs["prompt_cache"] = _caches("generate", model, kwargs, seen)
    with _routed(model, kwargs["prompt_cache"], kwargs.get("draft_model")):
        # mlx_lm returns None where it is verbose and nothing was generated.
        return mlx_lm.generate(model, tokenizer, prompt, verbose=verbose, **kwargs) or ""


def batch_generate(
    model: Module,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    prompt_caches: Sequence[list[Any]] | None = None,
    max_tokens: int | list[int] = 128,
    *,
    share_prefix: bool | None = None,
    **kwargs: Any,
) -> BatchResponse:
    """``mlx_lm.batch_generate`` with evicting caches, one set per sequence.

    Args:
        model: an mlx_lm model.
        tokenizer: its tokenizer.
        prompts: token ids of each prompt; the lengths may differ.
        prompt_caches: for each prompt the caches of :func:`make_prompt_cache`, all with the same
            settings. They are not changed; ``return_prompt_caches=True`` returns what they became.
        max_tokens: tokens to generate, for all prompts or for each.
        share_prefix: read the tokens that all prompts begin with once, and share their rows, as
            far as they are never evicted: the first ``prefix_size`` of a bounded cache, all of an
            unbounded one. None: if there are several prompts, at least 32 such tokens, and nothing
            prevents it. Answers are the same, except for rounding.
        kwargs: mlx_lm's own arguments, and those of :func:`make_prompt_cache` without
            ``prompt_caches``.

    Raises:
        ValueError: no prompts, an empty one, a number of caches other than that of the prompts,
            ``share_prefix=True`` if it is impossible, or as in :func:`stream_generate`.
    """
    if kwargs.get("draft_model") is not None:
        raise ValueError(
            "[batch_generate] draft_model is given, expected None: there is no speculative "
            "decoding of batches."
        )
    if len(prompts) == 0:
        raise ValueError("[batch_generate] found no prompts, expected at least one.")
    if prompt_caches is None:
        limits = max_tokens if isinstance(max_tokens, list) else [max_tokens] * len(prompts)
        seen = max(map(add, map(len, prompts), limits))  # one number: settings must be the same
        caches = [_caches("batch_generate", model, dict(kwargs), seen) for _ in prompts]
    else:
        caches = [
            _caches("batch_generate", model, {**kwargs, "prompt_cache": one})
            for one in prompt_caches
        ]
    if len(caches) != len(prompts):
        raise ValueError(
            f"[batch_generate] found {len(caches)} prompt caches, expected {len(prompts)}, one for "
            "each prompt."
        )
    for name in (*H2OConfig.setting_names(), *_BESIDE):
        kwargs.pop(name, None)
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    shared, begun, own = 0, time.perf_counter(), list(prompts)
    if share_prefix is not False and (share_prefix or len(prompts) > 1):
        given = {"prompt_caches": prompt_caches, "logits_processors": kwargs.get(_PROCESSORS)}
        shared = _shared_tokens(model, caches[0], prompts, given, wanted=bool(share_prefix))
    if shared:
        step = kwargs.get("prefill_step_size", PROMPT_CHUNK)
        read_once(model, caches[0], prompts[0][:shared], step)
        caches = [caches[0], *(copy.deepcopy(caches[0]) for _ in prompts[1:])]
        own = [prompt[shared:] for prompt in prompts]
    seconds = time.perf_counter() - begun
    with _routed(model, caches[0]):
        run: Any = mlx_lm.batch_generate
        response: BatchResponse = run(
            model, tokenizer, own, prompt_caches=caches, max_tokens=max_tokens, **kwargs
        )
    if shared:  # which mlx_lm has not seen
        response.stats.prompt_tokens += shared
        response.stats.prompt_time += seconds
    return response


def _shared_tokens(
    model: Module,
    caches: Sequence[Any],
    prompts: Sequence[Sequence[int]],
    given: Mapping[str, Any],
    wanted: bool,
) -> int:
    """How many first tokens the prompts share in such caches; raises ValueError where that is
    ``wanted`` and cannot be, as with what is ``given``."""
    names = [name for name, value in given.items() if value]
    reason = f"{names[0]} is given" if names else unshared_because(model, caches)
    common, lasting = common_tokens(prompts), lasting_tokens(caches)
    found = common if lasting is None else min(common, lasting)
    if not reason and found < LEAST_SHARED:
        kept = "all" if lasting is None else f"the first {lasting}"
        reason = (
            f"the prompts begin with the same {common} tokens, of which {kept} are never evicted "
            f"(prefix_size): less than {LEAST_SHARED}"
        )
    if reason and wanted:
        raise ValueError(
            f"[batch_generate] share_prefix is True, and {reason}: expected share_prefix=False."
        )
    return 0 if reason else found


def _stream(
    model: Module, tokenizer: Any, prompt: Any, max_tokens: int, kwargs: dict[str, Any]
) -> Iterator[GenerationResponse]:
    with _routed(model, kwargs["prompt_cache"], kwargs.get("draft_model")):
        yield from mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens, **kwargs)


def tokens_ahead(tokenizer: Any, prompt: Any, max_tokens: int) -> int | None:
    """How many tokens new caches will see, if that is known."""
    if max_tokens < 0:
        return None
    return max_tokens + len(tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)


def _caches(
    operation: str, model: Module, kwargs: dict[str, Any], seen: int | None = None
) -> list[Any]:
    """Take our settings out of ``kwargs`` and make the caches, for so many tokens unless they say
    another number, or unless the caller brings some."""
    draft = kwargs.get("draft_model")
    start = kwargs.pop("quantized_kv_start", 0)
    if start:
        raise ValueError(
            f"[{operation}] quantized_kv_start is {start}, expected 0: rows are quantised from "
            "the first on."
        )
    names = (*H2OConfig.setting_names(), *_BESIDE)
    settings = {name: kwargs.pop(name) for name in names if name in kwargs}
    given = {name: value for name, value in settings.items() if value is not None}
    prompt_cache = kwargs.pop("prompt_cache", None)
    if prompt_cache is None:
        if draft is not None:
            given = _with_speculation(given, kwargs.get("num_draft_tokens", DRAFTED))
        return make_prompt_cache(model, draft_model=draft, **{"length": seen, **given})
    if given:
        raise ValueError(
            f"[{operation}] found prompt_cache and the settings {sorted(given)}, expected one or "
            "the other: caches bring their own settings."
        )
    return prompt_cache  # type: ignore[no-any-return]


def _with_speculation(given: dict[str, Any], drafted: int) -> dict[str, Any]:
    """The settings, with room for the drafts that mlx_lm will make at a time."""
    config = given.get("max_kv_size")
    if not isinstance(config, H2OConfig):
        return {"speculative": drafted} | given
    if config.speculative:
        return given
    return given | {"max_kv_size": replace(config, speculative=drafted)}


@contextmanager
def _routed(model: Any, caches: Sequence[Any], draft_model: Any = None) -> Iterator[None]:
    if draft_model is None:
        with routing_for(model, list(evicting_caches(caches))):
            yield
    else:
        with routing(model), routing(draft_model):
            yield


def _upcast(weight: Any) -> Any:
    is_half = isinstance(weight, mx.array) and weight.dtype == mx.float16
    return weight.astype(mx.float32) if is_half else weight
