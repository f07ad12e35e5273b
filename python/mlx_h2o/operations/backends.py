"""Which implementation serves a call: Metal, CUDA, native CPU, or the composition of MLX ops.

By default the best back end that can serve the call runs. A back end requested by name, with
``use_backend`` or the environment variable MLX_H2O_BACKEND, either serves the call or raises
ValueError.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx

from mlx_h2o.operations import native
from mlx_h2o.operations.arguments import runs_on_gpu
from mlx_h2o.operations.gpu import cuda, metal
from mlx_h2o.operations.resolved import (
    COMPOSED,
    ENVIRONMENT,
    Operations,
    current,
    from_environment,
    named,
)


@dataclass(frozen=True)
class BackendStatus:
    """State of one back end on this machine.

    ``reason`` is why it is unavailable, empty if it is available. ``default`` marks the back end
    that serves calls on the default device whenever it can. ``advice`` is how to get a faster one,
    if this machine could have it.
    """

    name: str
    available: bool
    reason: str
    default: bool
    advice: str = ""


_every: tuple[Operations, ...] = metal.BACKEND, cuda.BACKEND, native.BACKEND, COMPOSED
_registered = {backend.name: backend for backend in _every}
# In order of preference; composed is the last on both devices.
_ON_GPU, _ON_CPU = ("metal", "cuda", "composed"), ("native", "composed")


def _known(name: str) -> Operations:
    if name not in _registered:
        by_environment = current.get(None) is None and name == from_environment()
        said = f"{ENVIRONMENT} names the" if by_environment else "unknown"
        known = ", ".join(_registered)
        raise ValueError(f"[use_backend] {said} back end {name!r}, expected one of {known}.")
    return _registered[name]


def _preferred(gpu: bool) -> Operations:
    """The back end that was named, available or not; else the best available one."""
    wanted = named()
    if wanted is not None:
        return _known(wanted)
    served = (_registered[name] for name in (_ON_GPU if gpu else _ON_CPU))
    return next(backend for backend in served if not backend.unavailable_reason())


def backends() -> dict[str, BackendStatus]:
    """The status of every back end, preferred ones first."""
    found, better, preferred = {}, True, _preferred(runs_on_gpu())
    for name, backend in _registered.items():
        default, reason = backend is preferred, backend.unavailable_reason()
        better = better and not default
        advice = backend.advice() if better and reason else ""
        found[name] = BackendStatus(name, not reason, reason, default, advice)
    return found


@contextlib.contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Select the back end for all calls inside the ``with`` block (a context variable).

    ``None`` restores the automatic choice, or MLX_H2O_BACKEND if it is set.

    Raises:
        ValueError: ``name`` is not a back end, or is not available on this machine. A call inside
            the block raises ValueError if the selected back end cannot serve it.
    """
    if name is not None:
        get(name)
    token = current.set(name)
    try:
        yield
    finally:
        current.reset(token)


def get(name: str, *, op: str = "use_backend") -> Operations:
    """The back end of this name. Raises ValueError if it is unknown or not available here."""
    return _ready(_known(name), op)


_latest: tuple[tuple[str | None, mx.Device] | None, Operations] = (None, COMPOSED)


def resolve(*, op: str = "resolve") -> Operations:
    """The back end for the device that a call would run on.

    Cheap if nothing has changed since the last call. Call it in every step, since ``use_backend``
    and MLX's default device may change. Errors begin with ``op``.

    Raises:
        ValueError: a back end was named but is not available.
    """
    global _latest
    asked = current.get(None), mx.default_device()
    latest, operations = _latest
    if latest != asked:
        operations = _ready(_preferred(runs_on_gpu()), op)
        _latest = asked, operations
    return operations


def _ready(backend: Operations, op: str) -> Operations:
    reason = backend.unavailable_reason()
    if reason:
        raise ValueError(f"[{op}] back end {backend.name!r} is not available: {reason}")
    backend.ready()
    return backend


def forget() -> None:
    """Forget the choice and the environment variable, so that tests can change them."""
    global _latest
    _latest = None, COMPOSED
    from_environment.cache_clear()
