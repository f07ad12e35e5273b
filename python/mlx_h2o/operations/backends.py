"""Which implementation serves a call: Metal, CUDA, native CPU, or the composition of MLX ops.

A back end is an object or a module with ``name``, ``unavailable_reason() -> str``,
``refuses(request) -> str`` (both empty when there is nothing in the way) and
``attention(request)``, for rows that are packed or not. It may bring functions of the other
operations (``resolved``), of the same arguments; else the composed ones serve.

Unnamed, the best back end that can serve the call runs; a back end that was named, by
``use_backend`` or the environment variable MLX_H2O_BACKEND, either serves the call or raises
ValueError. The variable is read once.
"""

import contextlib
import contextvars
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import cast

import mlx.core as mx

from mlx_h2o.operations import composed, native
from mlx_h2o.operations.arguments import StreamLike, device_of, runs_on_gpu
from mlx_h2o.operations.gpu import cuda, metal
from mlx_h2o.operations.resolved import Backend, Operations

ENVIRONMENT = "MLX_H2O_BACKEND"


@dataclass(frozen=True)
class BackendStatus:
    """State of one back end on this machine.

    ``reason`` says why it is unavailable, and is empty if it is available; ``default`` marks the
    one that serves calls on the default device whenever it can; ``advice`` says how to have a
    better one, where this machine could.
    """

    name: str
    available: bool
    reason: str
    default: bool
    advice: str = ""


_registered: dict[str, Backend] = {
    "metal": metal.BACKEND,
    "cuda": cuda.BACKEND,
    "native": cast(Backend, native),
    "composed": composed,
}
# In the order of preference. Composed is the last of both devices.
_ON_GPU, _ON_CPU = ("metal", "cuda", "composed"), ("native", "composed")
_current: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "mlx_h2o_backend", default=None
)


def _known(name: str, where: str) -> str:
    if name not in _registered:
        known = ", ".join(_registered)
        raise ValueError(f"[use_backend] {where} {name!r}, expected one of {known}.")
    return name


@cache
def _from_environment() -> str | None:
    name = os.environ.get(ENVIRONMENT)
    return _known(name, f"{ENVIRONMENT} names the back end") if name else None


def named() -> str | None:
    """The back end that was named for this context, else by the environment, else None.

    Raises ValueError where the environment names one that does not exist.
    """
    name = _current.get()
    return _from_environment() if name is None else name


def backends() -> dict[str, BackendStatus]:
    """Every back end, preferred ones first: whether it is available, why not, and the default."""
    reasons = {name: backend.unavailable_reason() for name, backend in _registered.items()}
    preferred = _ON_GPU if runs_on_gpu(None) else _ON_CPU
    default = named() or next(name for name in preferred if not reasons[name])
    found, better = {}, True
    for name, reason in reasons.items():
        better = better and name != default
        advice = getattr(_registered[name], "advice", str)() if better and reason else ""
        found[name] = BackendStatus(name, not reason, reason, name == default, advice)
    return found


@contextlib.contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Select the back end of all calls inside the ``with`` block (per context, as contextvars).

    ``None`` restores the automatic choice, or MLX_H2O_BACKEND if it is set.

    Raises:
        ValueError: ``name`` is not a back end, or it is not available here; a call inside the
            block raises ValueError if the selected back end cannot serve it.
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
    if name in _registered:
        raise ValueError(f"[register] back end {name!r} exists already.")
    _registered[name] = backend

    def remove() -> None:
        _registered.pop(name, None)
        forget()

    return remove


def get(name: str, *, op: str = "use_backend") -> Backend:
    """The back end of this name. Raises ValueError where it is unknown or not available here."""
    backend = _registered[_known(name, "unknown back end")]
    reason = backend.unavailable_reason()
    if reason:
        raise ValueError(f"[{op}] back end {name!r} is not available: {reason}")
    return backend


_latest: tuple[str | None, mx.Device | None, Operations | None] = (None, None, None)
_resolved: dict[tuple[str | None, bool], Operations] = {}


def resolve(stream: StreamLike = None, *, op: str = "resolve") -> Operations:
    """The operations as they are served on ``stream``, or where a call without one would run.

    Cheap where nothing has changed since the last call; to be asked for in every step, since
    ``use_backend`` and MLX's default device may change. ``op`` introduces errors.

    Raises:
        ValueError: a back end was named and it is not available.
    """
    global _latest
    name = _current.get()
    device = mx.default_device() if stream is None else device_of(stream)
    latest_name, latest_device, operations = _latest
    if operations is not None and name == latest_name and device == latest_device:
        return operations
    wanted, gpu = named(), bool(device.type == mx.DeviceType.gpu)
    found = _resolved.get((wanted, gpu))
    if found is None:
        found = _resolved[wanted, gpu] = _operations(wanted, gpu, op)
    _latest = (name, device, found)
    return found


def _operations(wanted: str | None, gpu: bool, op: str) -> Operations:
    if wanted is not None:
        candidates = [get(wanted, op=op)]
    else:
        served = [_registered[name] for name in (_ON_GPU if gpu else _ON_CPU)]
        candidates = [backend for backend in served if not backend.unavailable_reason()]
    make = getattr(candidates[0], "Operations", Operations)
    return cast(Operations, make(wanted, candidates))


def forget() -> None:
    """Look at the environment and at the machine again, for tests."""
    global _latest
    _latest = (None, None, None)
    _resolved.clear()
    _from_environment.cache_clear()
