"""What a launch of a kernel is, and several that serve one request; nothing here runs anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_h2o.operations.arguments import StreamLike
from mlx_h2o.operations.gpu import kernels
from mlx_h2o.operations.gpu.kernels import Kernel

LANES = 32  # threads of a simdgroup

TemplateArgument = int | bool | mx.Dtype
Triple = tuple[int, int, int]


@dataclass(eq=False)
class Launch:
    """One launch: what ``mx.fast.metal_kernel`` and its kernel object are called with, but for the
    buffers."""

    kernel: Kernel
    template: list[tuple[str, TemplateArgument]]
    grid: Triple
    threadgroup: Triple
    output_shapes: list[tuple[int, ...]]
    output_dtypes: list[mx.Dtype]

    @cached_property
    def call(self) -> dict[str, Any]:
        """The arguments of the kernel object, but for the inputs and the stream."""
        return {name: value for name, value in vars(self).items() if name != "kernel"}


Made = tuple[str, tuple[int, ...], mx.Dtype]
"""Name, shape and dtype of what a kernel may make."""


def launch_of(
    name: str,
    grid: Triple,
    threads: int,
    made: Iterable[Made],
    flags: frozenset[str] = frozenset(),
    **arguments: TemplateArgument,
) -> Launch:
    """The launch of a kernel, which takes by name what it wants of all that is there."""
    kernel = kernels.kernel_for(name, flags)
    results = {one: (shape, dtype) for one, shape, dtype in made}
    return Launch(
        kernel=kernel,
        template=[(one, arguments[one]) for one in kernel.template],
        grid=grid,
        threadgroup=(threads, 1, 1),
        output_shapes=[results[one][0] for one in kernel.outputs],
        output_dtypes=[results[one][1] for one in kernel.outputs],
    )


class LaunchPlan(NamedTuple):
    """The launches that serve a request, in order; a later one takes what the earlier made.

    ``given`` are the buffers that come with the request, by name, and None for what does not.
    """

    passes: tuple[Launch, ...]
    given: Mapping[str, mx.array | None]

    def outputs(
        self, execute: Callable[..., list[mx.array]], stream: StreamLike
    ) -> dict[str, mx.array]:
        """``execute`` each launch on ``stream``: what was given and what was made, by name."""
        there: dict[str, Any] = {**self.given}
        for launch in self.passes:
            outputs = execute(launch, [there[name] for name in launch.kernel.inputs], stream)
            there |= zip(launch.kernel.outputs, outputs, strict=True)
        return there


@lru_cache(maxsize=64)
def params(*numbers: float, dtype: mx.Dtype = mx.float32) -> mx.array:
    """The scalars of a kernel: one short array, the same for all layers of a model."""
    return mx.array(numbers, dtype)
