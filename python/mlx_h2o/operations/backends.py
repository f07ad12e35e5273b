"""Which implementation serves a call: Metal, CUDA, native CPU, or the composition of MLX ops.

A back end is an object (usually a module) with ``name``, ``unavailable_reason() -> str``,
``refuses(request) -> str`` (both empty when there is nothing in the way) and
``attention(request)``; it may bring ``keep_indices(request)`` and ``evict_indices(request)``,
which otherwise are the composed ones, and ``quantized_attention(request)``, without which it
cannot serve quantised attention, and ``attention_with_probes(request)``, without which the keys
are read a second time. ``attention`` gives (out, scores, lse), ``quantized_attention`` (out,
scores, lse, skipped), with None where the request does not ask for one; with probes it is ((out,
scores, lse), scores of the probes), dense or packed.

Unnamed, the best back end that can serve the call runs; a back end that was named, by
``use_backend`` or the environment variable MLX_H2O_BACKEND, either serves the call or raises
ValueError.
"""

import contextlib
import contextvars
import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, cast

import mlx.core as mx

from mlx_h2o.operations import composed
from mlx_h2o.operations.validate import (
    ATTENTION,
    AttentionRequest,
    RetentionRequest,
    StreamLike,
    runs_on_gpu,
)
from mlx_h2o.operations.validate_quantized import QUANTIZED_ATTENTION, QuantizedAttentionRequest

ENVIRONMENT = "MLX_H2O_BACKEND"

AttentionResult = tuple[mx.array, mx.array | None, mx.array | None]
QuantizedAttentionResult = tuple[mx.array, mx.array | None, mx.array | None, mx.array | None]


class Backend(Protocol):
    """What the dispatch asks of a back end; retention operations are optional."""

    @property
    def name(self) -> str: ...

    def unavailable_reason(self) -> str: ...

    def refuses(self, request: AttentionRequest) -> str: ...

    def attention(self, request: AttentionRequest) -> AttentionResult: ...


class QuantizedBackend(Protocol):
    """What the dispatch asks of a back end that serves quantised attention too."""

    def quantized_attention(
        self, request: QuantizedAttentionRequest
    ) -> QuantizedAttentionResult: ...


@dataclass(frozen=True)
class BackendStatus:
    """State of one back end on this machine.

    ``reason`` says why it is not available and is empty where it is; ``default`` marks the one
    that serves a call on the default device when it can.
    """

    name: str
    available: bool
    reason: str
    default: bool


# In the order of preference. Composed is the last of both devices.
_GPU = ("metal", "cuda")
_CPU = ("native",)
_BUILT_IN = (*_GPU, *_CPU, "composed")
_PREFERRED_ON_GPU = (*_GPU, "composed")
_PREFERRED_ON_CPU = (*_CPU, "composed")

_registered: dict[str, Backend] = {"composed": composed}
_missing: dict[str, str] = {}
_current: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "mlx_h2o_backend", default=None
)


def _load(name: str) -> Backend | None:
    """The back end, or None where its module cannot be imported (``_missing`` says why)."""
    if name not in _registered and name not in _missing:
        try:
            module = importlib.import_module(f".{name}", __package__)
        except ImportError as error:
            _missing[name] = f"{__package__}.{name} cannot be imported: {error}"
        else:
            _registered[name] = cast(Backend, module)
    return _registered.get(name)


def _names() -> tuple[str, ...]:
    return (*_BUILT_IN, *(name for name in _registered if name not in _BUILT_IN))


def _unavailable(name: str) -> str:
    backend = _load(name)
    return _missing[name] if backend is None else backend.unavailable_reason()


def _known(name: str, where: str) -> str:
    if name not in _names():
        raise ValueError(f"[use_backend] {where} {name!r}, expected one of {', '.join(_names())}.")
    return name


def named() -> str | None:
    """The back end that was named for this context, else by the environment, else None.

    Raises ValueError where the environment names one that does not exist.
    """
    name = _current.get()
    if name is not None:
        return name
    from_environment = os.environ.get(ENVIRONMENT)
    if not from_environment:
        return None
    return _known(from_environment, f"{ENVIRONMENT} names the back end")


def _preferred(gpu: bool) -> tuple[str, ...]:
    return _PREFERRED_ON_GPU if gpu else _PREFERRED_ON_CPU


def backends() -> dict[str, BackendStatus]:
    """Every back end, the preferred first: is it available, why not, is it the default."""
    reasons = {name: _unavailable(name) for name in _names()}
    default = named() or next(n for n in _preferred(runs_on_gpu(None)) if not reasons[n])
    return {
        name: BackendStatus(name, not reason, reason, name == default)
        for name, reason in reasons.items()
    }


@contextlib.contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Name the back end of all calls made inside the ``with`` block (per context, as contextvars).

    ``None`` returns to the automatic choice, or to MLX_H2O_BACKEND where it is set.

    Raises:
        ValueError: ``name`` is not a back end, or it is not available here; a call inside the
            block raises ValueError where the named back end cannot serve it.
    """
    if name is not None:
        get(name)
    token = _current.set(name)
    try:
        yield
    finally:
        _current.reset(token)


def register(name: str, backend: Backend) -> Callable[[], None]:
    """Add a back end under a new name, for tests and experiments; returns its removal.

    It serves only calls that name it. Raises ValueError where the name is taken.
    """
    if name in _names():
        raise ValueError(f"[register] back end {name!r} exists already.")
    _registered[name] = backend

    def remove() -> None:
        _registered.pop(name, None)

    return remove


def get(name: str, *, op: str = "use_backend") -> Backend:
    """The back end of this name. Raises ValueError where it is unknown or not available here."""
    reason = _unavailable(_known(name, "unknown back end"))
    if reason:
        raise ValueError(f"[{op}] back end {name!r} is not available: {reason}")
    return _registered[name]


def for_attention(request: AttentionRequest, *, op: str = ATTENTION) -> Backend:
    """The back end that serves this request.

    Raises ValueError where one was named and it cannot.
    """
    name = named()
    if name is not None:
        backend = get(name, op=op)
        reason = backend.refuses(request)
        if reason:
            raise ValueError(f"[{op}] back end {name!r} cannot serve this call: {reason}")
        return backend
    for candidate in _preferred(runs_on_gpu(request.stream)):
        if not _unavailable(candidate) and not _registered[candidate].refuses(request):
            return _registered[candidate]
    raise AssertionError("composed refused a valid request")


def for_quantized_attention(
    request: QuantizedAttentionRequest, *, op: str = QUANTIZED_ATTENTION
) -> QuantizedBackend:
    """The back end that serves this request. Raises ValueError where a named one cannot."""
    name = named()
    if name is not None:
        get(name, op=op)
    for candidate in (name,) if name is not None else _preferred(runs_on_gpu(request.stream)):
        if _unavailable(candidate):
            continue
        reason = _refuses_quantized(_registered[candidate], request)
        if not reason:
            return cast(QuantizedBackend, _registered[candidate])
        if candidate == name:
            raise ValueError(f"[{op}] back end {name!r} cannot serve this call: {reason}")
    raise AssertionError("composed refused a valid request")


def _refuses_quantized(backend: Backend, request: QuantizedAttentionRequest) -> str:
    if not hasattr(backend, "quantized_attention"):
        return "it has no quantised attention"
    # Such a back end takes both kinds of request here.
    refuses = cast(Callable[[QuantizedAttentionRequest], str], backend.refuses)
    return refuses(request)


def operation_of(op: str, stream: StreamLike) -> Callable[..., Any] | None:
    """The function by which a back end serves an operation on a cache's rows.

    It is called with the operation's validated request. None: no back end that serves calls on
    this stream brings one, and the composition does. Raises ValueError where a back end was
    named and it is not available.
    """
    name = named()
    if name is not None:
        candidates: tuple[str, ...] = (name,)
        get(name, op=op)
    else:
        candidates = _preferred(runs_on_gpu(stream))
    for candidate in candidates:
        if not _unavailable(candidate):
            function = getattr(_registered[candidate], op, None)
            if function is not None:
                return cast(Callable[..., Any], function)
    return None


def for_retention(op: str, request: RetentionRequest) -> Callable[[RetentionRequest], mx.array]:
    """The function that serves ``keep_indices`` or ``evict_indices`` for this request."""
    function = operation_of(op, request.stream) or getattr(composed, op)
    return cast(Callable[[RetentionRequest], mx.array], function)
