"""The packaged kernel text, resolved for a kernel and a set of flags.

Flags, and the traits that tell the kernels of a family apart, change the text and the buffers of a
kernel. They are resolved here, because MLX declares every output and passes the source on
unchanged.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import mlx.core as mx

from mlx_h2o import _kernel_text

HEADER = _kernel_text.HEADER
CUDA_SHIM = _kernel_text.CUDA_SHIM
OWN_FLAGS = _kernel_text.OWN_FLAGS


class Kernel(NamedTuple):
    """One kernel as MLX takes it: names of the buffers in order, and the body."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    template: tuple[str, ...]
    source: str


@cache
def kernel_for(kernel: str, flags: frozenset[str]) -> Kernel:
    """The kernel for these flags; its name contains the flags that are on and matter to it."""
    family, always_on = _kernel_text.KERNELS[kernel]
    on = flags | always_on

    def chosen(pairs: _kernel_text.Pairs) -> tuple[str, ...]:
        return tuple(item for item, condition in pairs if _holds(condition, on))

    return Kernel(
        name="_".join(("h2o", kernel, *(flag for flag in OWN_FLAGS[kernel] if flag in flags))),
        inputs=chosen(_kernel_text.INPUTS[family]),
        outputs=chosen(_kernel_text.OUTPUTS[family]),
        template=tuple(dict.fromkeys(chosen(_kernel_text.TEMPLATE[family]))),
        source="".join(chosen(_kernel_text.SEGMENTS[family])),
    )


@cache
def compiled(
    backend: str, kernel: Kernel, header: Callable[[int], str], threads: int
) -> Callable[..., list[mx.array]]:
    """The kernel, compiled by MLX for this back end, to run with so many threads."""
    # Row contiguity is not asked for: that would copy a sliced cache on every step.
    made: Callable[..., list[mx.array]] = getattr(mx.fast, f"{backend}_kernel")(
        name=kernel.name,
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=kernel.source,
        header=header(threads),
        ensure_row_contiguous=False,
    )
    return made


def _holds(condition: str, flags: frozenset[str]) -> bool:
    """Whether every term of the condition is on, and every one written with a "!" off."""
    return all((term.lstrip("!") in flags) != term.startswith("!") for term in condition.split())
