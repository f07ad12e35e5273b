"""Runs the Metal text of the kernels on the CPU, as MLX itself generates it.

    with registered("emulator", EmulatorBackend()), use_backend("emulator"):

The modules, in the order of a call: ``text`` asks MLX for the text, ``build`` compiles it with
the shims of metal/shims, ``memory`` holds its buffers between guard pages, ``kernel`` joins them
under the call contract of ``mx.fast.metal_kernel``, ``backend`` is the back end.
docs/internals/kernels.md says what the emulator can find and what it cannot.
"""

from emulator.backend import EmulatorBackend
from emulator.build import BuildError, compiler
from emulator.kernel import KernelError, Run, metal_kernel

__all__ = ["BuildError", "EmulatorBackend", "KernelError", "Run", "compiler", "metal_kernel"]
