"""An emulated kernel, called like the object that ``mx.fast.metal_kernel`` returns."""

import ctypes
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from emulator import build, text
from emulator.memory import InputBuffer, OutputBuffer
from emulator.text import MetalText

SCHEDULES = ("forward", "reverse", "random")

_metal_kernel = mx.fast.metal_kernel

# A launch handles the signals of memory faults, which are the process's.
_one_launch = threading.Lock()


class KernelError(Exception):
    """The emulator caught the kernel at something that a GPU would not forgive."""


@dataclass(frozen=True)
class Run:
    """How a kernel is run: order of threads, CPU threads, macros for the shims.

    ``reads``, if given, is where the number of bytes goes that are read of each input, each byte
    counted once for all threads; of several passes, what all of them read.
    """

    schedule: str = "forward"
    seed: int = 1
    workers: int = field(default_factory=lambda: min(2, os.cpu_count() or 1))
    defines: tuple[str, ...] = ()
    reads: dict[str, int] | None = None


class Buffers:
    """The memory of one launch, found by the names of the generated parameters."""

    def __init__(self, inputs: dict[str, InputBuffer], outputs: dict[str, OutputBuffer]) -> None:
        self.inputs, self.outputs = inputs, outputs
        # What MLX adds to the parameters where the text names it.
        self._extras: dict[str, np.ndarray] = {}
        for name, buffer in inputs.items():
            self._extras[f"{name}_shape"] = np.array(buffer.shape, np.int32)
            self._extras[f"{name}_strides"] = np.array(buffer.strides, np.int64)
            self._extras[f"{name}_ndim"] = np.array(len(buffer.shape), np.int32)

    def address(self, name: str) -> int:
        """Where the parameter of that name points."""
        if name in self._extras:
            return int(self._extras[name].ctypes.data)
        return (self.inputs.get(name) or self.outputs[name]).address

    def damaged(self) -> list[str]:
        """Names of the buffers whose surroundings, or whose input data, were written."""
        every = (*self.inputs.items(), *self.outputs.items())
        return [name for name, buffer in every if not buffer.intact()]

    def seen_address(self, name: str) -> int:
        """Where reads of the parameter of that name are noted; 0 where they are not."""
        return self.inputs[name].seen_address if name in self.inputs else 0


@dataclass(frozen=True)
class EmulatedKernel:
    """The arguments of ``mx.fast.metal_kernel``, and a way to run them."""

    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    source: str
    header: str
    run: Run

    def text(self, inputs: Sequence[mx.array], *, kernel: object = "", **call: object) -> MetalText:
        """What MLX generates for a call, or a launch of this kernel; the arguments are theirs."""
        made = _metal_kernel(
            name=self.name, input_names=list(self.input_names),
            output_names=list(self.output_names), source=self.source, header=self.header,
            ensure_row_contiguous=False,
        )  # fmt: skip
        return text.generate(lambda *arrays: made(inputs=list(arrays), **call), inputs)

    def __call__(
        self, inputs: Sequence[mx.array], *, stream: object = None, **call: Any
    ) -> list[mx.array]:
        """Run the kernel, at once whatever the stream; raises KernelError where it misbehaves."""
        generated = self.text(inputs, **call)
        outputs = map(OutputBuffer, call["output_shapes"], call["output_dtypes"])
        buffers = Buffers(
            {name: InputBuffer(a) for name, a in zip(self.input_names, inputs, strict=True)},
            dict(zip(self.output_names, outputs, strict=True)),
        )
        self._launch(generated, buffers, (*call["grid"], *call["threadgroup"]))
        if damaged := buffers.damaged():
            raise KernelError(f"{self.name} wrote outside its outputs, at {', '.join(damaged)}")
        return [output.array() for output in buffers.outputs.values()]

    def _launch(self, generated: MetalText, buffers: Buffers, sizes: tuple[int, ...]) -> None:
        counted = frozenset(self.input_names if self.run.reads is not None else ())
        made = build.compile_text(generated, self.run.defines, counted)
        library = ctypes.CDLL(str(made))
        names = generated.buffer_names()
        addresses = [buffers.address(name) for name in names]
        if self.run.reads is not None:
            addresses += [buffers.seen_address(name) for name in names]
        error = ctypes.create_string_buffer(build.ERROR_BYTES)
        with _one_launch:
            status = library.h2o_emulate(
                (ctypes.c_void_p * len(addresses))(*addresses),
                (ctypes.c_uint * 6)(*sizes),
                SCHEDULES.index(self.run.schedule),
                ctypes.c_ulong(self.run.seed),
                self.run.workers,
                error,
            )
        if status:
            raise KernelError(error.value.decode())
        if self.run.reads is not None:
            for name, buffer in buffers.inputs.items():
                self.run.reads[name] = self.run.reads.get(name, 0) + int(buffer.seen.sum())


def metal_kernel(
    name: str, input_names: Sequence[str], output_names: Sequence[str], source: str,
    header: str = "", ensure_row_contiguous: bool = True, run: Run | None = None,
) -> EmulatedKernel:  # fmt: skip
    """Stands in for ``mx.fast.metal_kernel``; ``ensure_row_contiguous`` must be off."""
    if ensure_row_contiguous:
        raise ValueError("the emulator passes strides on; it makes no contiguous copies")
    return EmulatedKernel(
        name, tuple(input_names), tuple(output_names), source, header, run or Run()
    )
