"""The text that MLX generates for a kernel call, without a Metal device.

Exporting a function records the kernel's primitive, including its text, but runs nothing.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class Parameter:
    """One parameter of the generated function: ``attribute`` is what stands in [[...]]."""

    type: str
    name: str
    attribute: str


@dataclass(frozen=True)
class MetalText:
    """``text`` is C++ but for the address spaces; ``function`` names what is launched, and
    ``generated`` is what MLX gives to Metal behind its own header."""

    text: str
    function: str
    parameters: tuple[Parameter, ...]
    generated: str = ""

    def buffer_names(self) -> list[str]:
        """Names of the parameters that are buffers, in the order of their indices."""
        return [p.name for p in self.parameters if p.attribute.startswith("buffer(")]


def generate(call: Callable[..., list[mx.array]], inputs: Sequence[mx.array]) -> MetalText:
    """The text for ``call(*inputs)``, which makes one call of a metal_kernel object."""
    found: list[str] = []

    def note(entry: dict) -> None:
        if entry.get("name") == "CustomKernel":
            found.append(entry["arguments"][1])

    # Text and signature depend on shapes and dtypes only; no data is needed.
    stand_ins = [mx.zeros(array.shape, array.dtype) for array in inputs]
    mx.export_function(note, call, *stand_ins)
    if len(found) != 1:
        raise RuntimeError(f"the export recorded {len(found)} kernels, expected one")
    return parse(found[0])


def parse(generated: str) -> MetalText:
    """Take the explicit instantiation off, which is not C++, and read the parameters."""
    text, mark, instantiation = generated.partition("\ntemplate [[host_name(")
    signature = re.search(r"\[\[kernel\]\] void (\w+)\(\n(.*?)\) \{\n", text, re.DOTALL)
    if signature is None:
        raise RuntimeError("MLX's generated text has no kernel function")
    function = signature[1]
    if mark:
        instance = re.search(r"decltype\((.*?)\) ", instantiation, re.DOTALL)
        if instance is None:
            raise RuntimeError("MLX's generated text instantiates nothing")
        function = instance[1]
    pattern = re.compile(r"\s*(.*?)\s*(\w+) \[\[(.*)\]\]")
    parameters = []
    for line in signature[2].split(",\n"):
        match = pattern.fullmatch(line)
        if match is None:
            raise RuntimeError(f"MLX's generated text has a parameter {line!r}")
        parameters.append(Parameter(*match.groups()))
    return MetalText(text, function, tuple(parameters), generated)
