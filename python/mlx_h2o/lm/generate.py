"""mlx_lm's loading and generation with evicting caches, also for programs that call mlx_lm."""

import copy
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from functools import partial
from inspect import signature
from operator import add
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx.nn.layers.base import Module
from mlx_lm.generate import BatchResponse, GenerationResponse, generate_step
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..caches.cache import PROMPT_CHUNK
from ..config import H2OConfig
from ..demo import DEMO, model_path
from ..errors import check, check_int
from .files import texts_of
from .generation_checks import COUNTS, Draws, check_caches, check_drafts, checked_tokens, within_all
from .models import by_model, is_padded, stock_caches
from .prompt_cache import NAMES, make_prompt_cache
from .ranks import dealt_out
from .routing import args_of, check_given, context_length, held_tokens, model_name, routing_for
from .sharing import share, shareable


def load(
    path_or_hf_repo: str | Path, *args: Any, group: Any = None, pipeline: bool = False, **more: Any
) -> Any:
    """Load a model and its tokenizer like ``mlx_lm.load``; "demo" is the model in this package.

    If MLX computes on the CPU, float16 weights become float32, because float16 arithmetic is
    several times slower there. The other arguments and the result are mlx_lm's:
    ``(model, tokenizer)``, and the config with ``return_config=True``.

    Args:
        path_or_hf_repo: a directory, a name on the hub, or "demo".
        group: from ``mlx.core.distributed.init()``: split the heads of the model over its
            processes, or with ``pipeline`` its layers. mlx_lm's other arguments are then limited to
            ``tokenizer_config``, ``trust_remote_code`` and ``return_config``.

    Raises:
        ValueError: there is no such directory, the model in it cannot be loaded (a damaged file is
            named), or the hub has no model of this name.
    """
    name = str(path_or_hf_repo) if isinstance(path_or_hf_repo, Path) else path_or_hf_repo
    given = dict(zip([*signature(mlx_lm.load).parameters][1:], args, strict=False)) | more
    with loading(name, given.get("adapter_path")) as folder:
        read = mlx_lm.load if group is None else partial(dealt_out, group, pipeline)
        model, tokenizer, config = read(str(folder), **given | {"return_config": True})
        if tokenizer.get_vocab().keys() <= {*tokenizer.all_special_tokens}:
            raise ValueError("its tokenizer knows no text, expected a file such as tokenizer.json")
    # Without a limit, transformers does not warn of long texts, which bounded caches are for.
    getattr(tokenizer, "_tokenizer", tokenizer).model_max_length = int(1e30)
    widen(model)
    if not given.get("lazy"):
        mx.eval(model.parameters())  # here: only this thread can evaluate its lazy arrays
    if context_length(model) is None:  # some of mlx_lm's models drop it
        args_of(model).max_position_embeddings = context_length(config)
    return (model, tokenizer, config) if given.get("return_config") else (model, tokenizer)


@contextmanager
def loading(name: str, adapters: str | Path | None = None) -> Iterator[Path]:
    """The folder of a model; within the context, an error in loading it, or its adapters, becomes a
    ValueError that names it."""
    check_path(name)
    folder = model_path() if name == DEMO else Path(name)
    for file in folder.glob("model*.safetensors"):
        texts_of(str(file), "load", "file of weights")
    try:
        yield folder
    except Exception as error:  # from mlx_lm, MLX or transformers
        what = f"{folder} with the adapters of {adapters}" if adapters else folder
        said, damaged = f"{what} cannot be loaded: ", [*filter(_damaged, folder.glob("*.json"))]
        why = str(error) if isinstance(error, OSError | RuntimeError | ValueError) else repr(error)
        if damaged:
            said = f"{min(damaged)} is damaged, expected an object in JSON: "
        elif isinstance(error, OSError) and not folder.is_dir():
            said = f"{folder} is not a directory, and could not be fetched from the hub: "
        elif folder.is_dir() and "tokenizer" in why and not any(folder.glob("tokenizer.*")):
            why = "it has no tokenizer, expected a file such as tokenizer.json"
        raise ValueError(f"[load] {said}{why}") from error


def _damaged(file: Path) -> bool:
    """Whether a file of settings holds no JSON object."""
    with suppress(ValueError):
        return not isinstance(json.loads(file.read_bytes()), dict)
    return True


def check_path(name: str) -> None:
    """Raises ValueError for an empty name, and for a path that holds no mlx_lm model."""
    if not isinstance(name, str) or not name:
        raise ValueError(f'[load] found {name!r}, expected a directory, a name, or "{DEMO}".')
    folder = Path(name)
    is_path = folder.is_file() or name.startswith(("/", ".", "~")) or name.count("/") > 1
    if name != DEMO and folder.is_dir() and not (folder / "config.json").exists():
        raise ValueError(f"[load] {name} has no config.json, expected a model of mlx_lm.")
    if name != DEMO and is_path and not folder.is_dir():
        raise ValueError(f"[load] {name} is not a directory, expected one that holds a model.")


def stream_generate(
    model: Module, tokenizer: Any, prompt: str | mx.array | Sequence[int], max_tokens: int = 256,
    **kwargs: Any,
) -> Iterator[GenerationResponse]:  # fmt: skip
    """Generate text piece by piece like ``mlx_lm.stream_generate``, with evicting caches.

    Args:
        model: an mlx_lm model.
        tokenizer: its tokenizer.
        prompt: text or token ids.
        max_tokens: maximum number of tokens to generate, at least 1, or -1 for no limit.
        kwargs: mlx_lm's own arguments, and one of the following. Cache settings: ``budgets``,
            ``layers``, ``length``, ``max_kv_bytes`` and settings of H2OConfig as in
            :func:`make_prompt_cache`; None means the default, and for ``max_kv_size`` no limit.
            Or ``prompt_cache``: caches from :func:`make_prompt_cache`, which are updated in place.
            With ``draft_model`` both models get caches, for ``num_draft_tokens`` (2) at a time, and
            ``max_kv_bytes`` covers both; ``prompt_cache`` then holds the caches of the model
            followed by those of the draft model.

    Yields:
        mlx_lm's GenerationResponse for each piece of text.

    Raises:
        ValueError: settings or numbers out of range; settings together with ``prompt_cache``;
            an empty prompt; token ids outside the vocabulary, in it or from a ``sampler``; not
            exactly one cache for each layer; a draft model with a different vocabulary, or caches
            whose ``speculative`` is below the number of drafts; a ``quantized_kv_start`` above 0;
            an unsupported model.
    """
    kwargs["max_tokens"] = max_tokens
    return _stream("stream_generate", model, tokenizer, prompt, kwargs)


def generate(
    model: Module, tokenizer: Any, prompt: str | list[int], verbose: bool = False, **kwargs: Any
) -> str:
    """Generate text like ``mlx_lm.generate``, with evicting caches, and return it whole.

    Arguments and errors are those of :func:`stream_generate`; ``verbose`` prints the text and
    the timings during generation.
    """
    say: Callable[..., None] = partial(print, flush=True) if verbose else lambda *_, **__: None
    pieces, text = _stream("generate", model, tokenizer, prompt, kwargs), ""
    say("=" * 10)
    for last in pieces:
        say(last.text, end="")
        text += last.text
    say("\n" + "=" * 10)
    if not text:
        say("No text generated for this prompt")
        return text
    say(f"Prompt: {last.prompt_tokens} tokens, {last.prompt_tps:.3f} tokens-per-sec")
    say(f"Generation: {last.generation_tokens} tokens, {last.generation_tps:.3f} tokens-per-sec")
    say(f"Peak memory: {last.peak_memory:.3f} GB")
    return text


def read(model: Any, caches: list[Any], tokens: mx.array, chunk: int) -> mx.array:
    """Prefill tokens [B, T] in chunks; returns the last logits [B, V], not yet evaluated. The
    caller must route the model."""
    logits: mx.array
    for start in range(0, tokens.shape[1], chunk):
        logits = model(tokens[:, start : start + chunk], cache=caches)[:, -1]
        mx.eval([cache.state for cache in caches])
    return logits


def read_prompt(
    model: Module, caches: list[Any], tokens: Sequence[int], step: int = PROMPT_CHUNK,
    watch: Callable[[int, int], None] | None = None,
) -> None:  # fmt: skip
    """Read a prompt into caches as generation does, without generating.

    Args:
        model: an mlx_lm model.
        caches: from :func:`make_prompt_cache`; updated in place.
        tokens: token ids.
        step: tokens to read at a time.
        watch: called with the number of tokens read so far and the total.

    Raises:
        ValueError: no tokens, or tokens outside the vocabulary; not exactly one cache for each
            layer.
    """
    ids = checked_tokens("read_prompt", "prompt", tokens, [model])
    check_caches("read_prompt", caches, [model])
    given: dict[str, Any] = {"prefill_step_size": step, "prompt_progress_callback": watch}
    with routing_for(model, caches):
        for _ in generate_step(mx.array(ids), model, max_tokens=0, prompt_cache=caches, **given):
            pass


def batch_generate(
    model: Module, tokenizer: Any, prompts: Sequence[list[int]],
    prompt_caches: Sequence[list[Any]] | None = None, max_tokens: int | list[int] = 128, *,
    share_prefix: bool = True, **kwargs: Any,
) -> BatchResponse:  # fmt: skip
    """Generate for several prompts like ``mlx_lm.batch_generate``, with evicting caches.

    Args:
        model: an mlx_lm model.
        tokenizer: its tokenizer.
        prompts: token ids of each prompt; the lengths may differ.
        prompt_caches: for each prompt, caches from :func:`make_prompt_cache`, all with the same
            settings. They are not changed; ``return_prompt_caches=True`` returns updated copies.
        max_tokens: maximum tokens to generate, at least 1: a number for all prompts, or a list.
        share_prefix: if possible, read the common prefix of all prompts once and share its rows.
            Only rows that are never evicted are shared: the first ``prefix_size`` of a bounded
            cache, all of an unbounded one, at least 32. Answers are the same, except for rounding.
        kwargs: mlx_lm's own arguments, and without ``prompt_caches`` those of
            :func:`make_prompt_cache`.

    Raises:
        ValueError: no prompts, or texts instead of token ids; not exactly one list of caches, or
            one of ``max_tokens``, for each prompt; or as in :func:`stream_generate`.
    """
    op = "batch_generate"
    if kwargs.pop("draft_model", None) is not None:
        said = "draft_model is given, expected None: there is no speculative decoding of batches."
        raise ValueError(f"[{op}] {said}")
    own = [checked_tokens(op, f"prompts[{n}]", one, [model]) for n, one in enumerate(prompts)]
    limits: Any = max_tokens if isinstance(max_tokens, list) else [max_tokens] * len(own)
    for limit in limits:
        check_int(op, "max_tokens", limit)
    if not own:
        raise ValueError(f"[{op}] found no prompts, expected at least one.")
    brought = own if prompt_caches is None else prompt_caches
    for name, found in (("numbers of max_tokens", limits), ("prompt caches", brought)):
        if len(found) != len(own):
            said = f"found {len(found)} {name}, expected {len(own)}, one for each prompt."
            raise ValueError(f"[{op}] {said}")
    # One length for all of them, since their settings must be the same.
    seen = max(map(add, map(len, own), limits)) if prompt_caches is None else None
    settings = _taken(op, [model], kwargs)
    if is_padded(model) and len({*map(len, own)}) > 1:
        said = f"prompts are of unlike lengths, expected one: {model_name(model)}"
        raise ValueError(f"[{op}] {said} takes what fills up the shorter ones for text.")
    caches = [_caches(op, [model], settings, one, seen) for one in prompt_caches or (None,)]
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    shared, begun = 0, time.perf_counter()
    # Logits processors need the whole prompt; mlx_lm would show them only the unshared rest.
    if share_prefix and len(own) > 1 and not (prompt_caches or kwargs.get("logits_processors")):
        shared = shareable(model, caches[0], own)
    if shared:
        step = kwargs.get("prefill_step_size", PROMPT_CHUNK)
        with routing_for(model, caches[0]):
            # Chunks end where they would without sharing.
            read(model, caches[0], mx.array([own[0][:shared]]), step)
        share(caches[0])
        own = [prompt[shared:] for prompt in own]
    if prompt_caches is None:
        caches += [copy.deepcopy(caches[0]) for _ in own[1:]]
    seconds = time.perf_counter() - begun
    kwargs["sampler"] = Draws(op, kwargs, [model])
    with routing_for(model, caches[0]):
        response: BatchResponse = mlx_lm.batch_generate(
            model, tokenizer, own, prompt_caches=caches, max_tokens=limits, **kwargs
        )
    kwargs["sampler"].check(1)  # nobody reads the tokens of the step after the last
    if shared:  # mlx_lm has not seen these tokens
        response.stats.prompt_tokens += shared
        response.stats.prompt_time += seconds
    return response


def _stream(
    operation: str, model: Module, tokenizer: Any, prompt: Any, kwargs: dict[str, Any]
) -> Iterator[GenerationResponse]:
    """Check the prompt and ``kwargs``, add caches to ``kwargs``, and generate."""
    draft, limit = kwargs.get("draft_model"), kwargs.setdefault("max_tokens", 256)
    if type(limit) is not int or limit != -1:
        check_int(operation, "max_tokens", limit, more=", or -1 for no limit")
    models = [model] if draft is None else [model, draft]
    if limit == -1 and draft is not None:
        kwargs["max_tokens"] = sys.maxsize  # mlx_lm's speculative loop counts up to it
    tokens, embeddings = prompt, kwargs.get("input_embeddings")
    if isinstance(prompt, str):
        prompt.encode()  # raises a ValueError if it has half of a surrogate pair
        tokens = tokenizer.encode(prompt)
    if embeddings is None or len(tokens):
        tokens = checked_tokens(operation, "prompt", tokens, models)
    ahead = tokens_ahead(limit, tokens if embeddings is None else embeddings)
    drafted = 0 if draft is None else kwargs.setdefault("num_draft_tokens", 2)  # as in mlx_lm
    kwargs["sampler"] = Draws(operation, kwargs, models)
    if cut := within_all(models):
        kwargs["logits_processors"] = [*(kwargs.get("logits_processors") or ()), *cut]
    settings, given = _taken(operation, models, kwargs), kwargs.get("prompt_cache")
    kwargs["prompt_cache"] = _caches(operation, models, settings, given, ahead, drafted)
    return _answer(models, tokenizer, prompt if isinstance(prompt, str) else tokens, kwargs)


def tokens_ahead(max_tokens: int, prompt: Any) -> int | None:
    """How many tokens a text will have at most; None if -1 lets its answer go on without end."""
    return None if max_tokens < 0 else max_tokens + len(prompt)


def _answer(
    models: list[Module], tokenizer: Any, prompt: str | list[int], kwargs: dict[str, Any]
) -> Iterator[GenerationResponse]:
    """Generate; the caches then hold every token of the answer."""
    caches, said = kwargs["prompt_cache"], list[int]()
    begun = [(*pair, max(held_tokens(pair[1]), default=0)) for pair in by_model(models, caches)]
    with routing_for(models[0], caches, *models[1:]):
        pieces = mlx_lm.stream_generate(models[0], tokenizer, prompt, **kwargs)
        with suppress(GeneratorExit), closing(pieces):  # a caller that ends may go on from caches
            for piece in pieces:
                kwargs["sampler"].check(2 - len(models))  # one step is ahead, except of drafts
                said.append(piece.token)
                yield piece
        for model, own, start in begun:
            seen = start + piece.prompt_tokens + len(said)
            missing = seen - max(held_tokens(own), default=seen)
            if missing > 0:  # mlx_lm's loop with drafts reads a token only for the next one
                read(model, own, mx.array([said[-missing:]]), missing)


def _taken(operation: str, models: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Check ``kwargs``, and take the arguments of :func:`make_prompt_cache` out of them. None means
    the default, and for ``max_kv_size`` no limit."""
    check_given(operation, *models)
    for name in kwargs.keys() & COUNTS:
        check_int(operation, name, kwargs[name])
    start, said = kwargs.pop("quantized_kv_start", 0), "0: rows are quantised from the first on"
    check(not start, "quantized_kv_start", start, said, operation=operation)
    found = {name: kwargs.pop(name) for name in kwargs.keys() & {*NAMES, "length"}}
    return {name: one for name, one in found.items() if one is not None or name == "max_kv_size"}


def _caches(
    operation: str, models: list[Module], settings: dict[str, Any], given: list[Any] | None,
    seen: int | None, drafted: int = 0,
) -> list[Any]:  # fmt: skip
    """The caches that were given; or new ones for ``seen`` tokens, unless the settings say another
    length, which can trim ``drafted`` tokens."""
    named = sorted(name for name, one in settings.items() if one is not None)
    if given is not None and named:
        wanted = "expected one or the other: caches bring their own settings."
        raise ValueError(f"[{operation}] found prompt_cache and the settings {named}, {wanted}")
    if given is None:
        if drafted:  # before the models are probed
            check_drafts(operation, stock_caches(models), models[0], seen)
        usual: dict[str, Any] = {"length": seen, "draft_model": models[1] if models[1:] else None}
        config: Any = settings.get("max_kv_size")
        if drafted and not isinstance(config, H2OConfig):
            usual["speculative"] = drafted
        elif drafted and not config.speculative:
            settings["max_kv_size"] = config.with_budget(speculative=drafted)
        given = make_prompt_cache(models[0], **usual | settings)
    check_caches(operation, given, models, drafted)
    if drafted:
        check_drafts(operation, given, models[0], seen)
    return given


def evicting(model: Module, **settings: Any) -> AbstractContextManager[None]:
    """Within the context, mlx_lm's own ``make_prompt_cache(model)`` returns evicting caches.

    Attention is routed as by :func:`routing`; other models are not affected.

    Args:
        model: an mlx_lm model.
        settings: as in :func:`mlx_h2o.make_prompt_cache`, except ``draft_model``.

    Raises:
        ValueError: as in that function, or if such a context is already open for the model.
    """
    if settings.pop("draft_model", None) is not None:
        raise ValueError("[evicting] draft_model is given, expected a context for each model.")
    return made_by(model, make_prompt_cache(model, **settings))


@contextmanager
def made_by(model: Any, caches: list[Any]) -> Iterator[None]:
    """Within the context, the model's ``make_cache`` returns copies of these caches."""
    own = vars(model)
    if isinstance(before := own.get("make_cache"), _Copies):
        raise ValueError(f"[evicting] {model_name(model)} is in one already, expected at most one.")
    with routing_for(model, caches):
        # Set on this model alone, where it shadows the method of its class.
        own["make_cache"] = _Copies(copy.deepcopy, caches)
        try:
            yield
        finally:
            del own["make_cache"]
            if before is not None:
                own["make_cache"] = before


class _Copies(partial[list[Any]]):
    """The ``make_cache`` that :func:`made_by` sets."""


def widen(model: Any) -> None:
    """Convert float16 weights to float32 if MLX computes on the CPU."""
    if mx.default_device().type == mx.DeviceType.cpu:
        model.set_dtype(mx.float32, lambda kind: kind == mx.float16)
