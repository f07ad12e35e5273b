"""Compiles CUDA text with NVRTC from PyPI's wheels, and reads what the result needs.

No GPU and no CUDA toolkit: `pip install nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-crt
nvidia-cuda-cccl`, all of one CUDA release, 13.x.
"""

import ctypes
import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import mlx.core as mx

from mlx_h2o.operations.gpu import cuda
from mlx_h2o.operations.gpu.launches import Launch

# What MLX puts before every custom kernel; kernels do not use the rest of its header.
MLX_UTILS = """
#include <cuda/std/array>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
namespace mlx::core::cu {
using Shape = cuda::std::array<int32_t, 10>;
using Strides = cuda::std::array<int64_t, 10>;
}
"""
MLX_UTILS_NAME = "mlx/backend/cuda/device/utils.cuh"

TYPES = {
    mx.float32: "float", mx.float16: "__half", mx.bfloat16: "__nv_bfloat16", mx.bool_: "bool",
    mx.uint32: "uint32_t", mx.int32: "int32_t",
}  # fmt: skip


def function_name(launch: Launch) -> str:
    """A name for the function of a launch, from the kernel's name and template arguments."""
    words = (str(value).removeprefix("mlx.core.") for _, value in launch.template)
    return "_".join(("custom_kernel", launch.kernel.name, *words))


def generated_header(launch: Launch) -> str:
    """The text before a function in what MLX generates for cuda_kernel."""
    own = cuda.BACKEND.header(launch.threadgroup[0])
    return f'#include "{MLX_UTILS_NAME}"\n#include <cooperative_groups.h>\n{own}'


def generated_function(launch: Launch, inputs: list[mx.array]) -> str:
    """The function as MLX 0.32 writes it; only a CUDA build of MLX could write it itself."""
    kernel = launch.kernel
    parameters = []
    for name, array in zip(kernel.inputs, inputs, strict=True):
        parameters.append(f"const {TYPES[array.dtype]}* {name}")
        for what, kind in (("shape", "Shape"), ("strides", "Strides"), ("ndim", "int")):
            if f"{name}_{what}" in kernel.source:
                parameters.append(f"const __grid_constant__ {kind} {name}_{what}")
    for name, dtype in zip(kernel.outputs, launch.output_dtypes, strict=True):
        parameters.append(f"{TYPES[dtype]}* {name}")
    constants = []
    for name, value in launch.template:
        if isinstance(value, mx.Dtype):
            constants.append(f"  using {name} = {TYPES[value]};\n")
        else:
            kind = "bool" if isinstance(value, bool) else "int"
            constants.append(f"  constexpr {kind} {name} = {str(value).lower()};\n")
    return (
        "namespace mlx::core::cu {\nnamespace cg = cooperative_groups;\n"
        f"__global__ void {function_name(launch)}(\n    {', '.join(parameters)}) {{\n"
        f"{''.join(constants)}{kernel.source}\n}}\n}}\n"
    )


@dataclass(frozen=True)
class Resources:
    """What one thread of a compiled kernel needs."""

    registers: int
    stack: int  # bytes of local memory: arrays that found no registers, or spills


def compile_cuda(text: str, architecture: str) -> dict[str, Resources]:
    """Compile, as MLX does, and return the resources of each kernel by its name in the binary.

    Raises RuntimeError with the compiler's log if it refuses the text or warns.
    """
    nvrtc, program = _library(), ctypes.c_void_p()
    source, *header = (one.encode("ascii") for one in (text, MLX_UTILS, MLX_UTILS_NAME))
    given = source, b"kernel.cu", 1, *map(ctypes.c_char_p * 1, header)
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), *given))
    try:
        options = [b"--device-as-default-execution-space", f"-arch={architecture}".encode()]
        options.append(b"--ptxas-options=--verbose")
        include = toolkit() / "include"
        options += [f"--include-path={path}".encode() for path in (include / "cccl", include)]
        status = nvrtc.nvrtcCompileProgram(
            program, len(options), (ctypes.c_char_p * len(options))(*options)
        )
        size = ctypes.c_size_t()
        _check(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
        log = ctypes.create_string_buffer(size.value)
        _check(nvrtc.nvrtcGetProgramLog(program, log))
        message = log.value.decode().rstrip("\n")
        if status or "warning" in message:
            raise RuntimeError(message[:8000])
        return resources(message)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def resources(log: str) -> dict[str, Resources]:
    """Registers and stack of each kernel, from what the assembler says of them."""
    found = re.findall(
        r"entry function '(\w+)'.*?(\d+) bytes stack frame.*?Used (\d+) registers", log, re.DOTALL
    )
    return {name: Resources(int(registers), int(stack)) for name, stack, registers in found}


@cache
def toolkit() -> Path:
    """The folder of the wheels' headers and libraries; FileNotFoundError without them."""
    spec = importlib.util.find_spec("nvidia")
    for place in spec.submodule_search_locations or () if spec else ():
        path = Path(place) / "cu13"
        needed = ("include/cuda_fp16.h", "include/crt", "include/cccl/cuda/std/array", "lib")
        if all((path / part).exists() for part in needed) and any(path.glob("lib/libnvrtc.so*")):
            return path
    raise FileNotFoundError(
        "no NVRTC: pip install nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-crt "
        "nvidia-cuda-cccl (all of CUDA 13)"
    )


@cache
def _library() -> ctypes.CDLL:
    # NVRTC loads its second library by name alone, so it must have been loaded already.
    for pattern in ("libnvrtc-builtins.so*", "libnvrtc.so*"):
        library = ctypes.CDLL(str(min((toolkit() / "lib").glob(pattern))))
    return library


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"NVRTC failed with status {status}")
