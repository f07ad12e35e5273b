"""The packaged kernel text, resolved for a set of flags.

Flags change the text and the buffers of a kernel, so they are resolved here, before MLX sees
the text: MLX declares every output and passes the source on as it is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from mlx_h2o import _kernel_text

HEADER = _kernel_text.HEADER
CUDA_SHIM = _kernel_text.CUDA_SHIM
FLAGS = _kernel_text.FLAGS


@dataclass(frozen=True)
class Kernel:
    """One kernel as MLX takes it: names of the buffers in order, and the body."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    template: tuple[str, ...]
    source: str

    def __hash__(self) -> int:
        return hash(self.name)  # in every step


@cache
def flags_of(kernel: str) -> tuple[str, ...]:
    """The flags that make a difference to this kernel, in the order of the table."""
    pairs = (*_kernel_text.INPUTS[kernel], *_kernel_text.OUTPUTS[kernel])
    conditions = [condition for _, condition in pairs]
    conditions += [condition for condition, _ in _kernel_text.SEGMENTS[kernel]]
    terms = {term.lstrip("!") for condition in conditions for term in condition.split()}
    return tuple(flag for flag in FLAGS if flag in terms)


@cache
def resolve(kernel: str, flags: frozenset[str]) -> Kernel:
    """The kernel for these flags. Those that are on and matter to it are part of its name."""

    def chosen(pairs: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
        return tuple(item for item, condition in pairs if _holds(condition, flags))

    return Kernel(
        name="_".join(("h2o", kernel, *(flag for flag in flags_of(kernel) if flag in flags))),
        inputs=chosen(_kernel_text.INPUTS[kernel]),
        outputs=chosen(_kernel_text.OUTPUTS[kernel]),
        template=tuple(dict.fromkeys(chosen(_kernel_text.TEMPLATE[kernel]))),
        source="".join(
            text for condition, text in _kernel_text.SEGMENTS[kernel] if _holds(condition, flags)
        ),
    )


def compiled(
    compiler: Callable[..., Any], kernel: Kernel, header: str
) -> Callable[..., list[mx.array]]:
    """The kernel as ``mx.fast.metal_kernel`` or ``mx.fast.cuda_kernel`` makes it."""
    # Row contiguity is not asked for: that would copy a sliced cache on every step.
    made: Callable[..., list[mx.array]] = compiler(
        name=kernel.name,
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=kernel.source,
        header=header,
        ensure_row_contiguous=False,
    )
    return made


def _holds(condition: str, flags: frozenset[str]) -> bool:
    """Whether every flag of the condition is on, and every one written with a "!" off."""
    return all((term.lstrip("!") in flags) != term.startswith("!") for term in condition.split())
