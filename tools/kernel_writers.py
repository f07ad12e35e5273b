"""Write the table of kernels as a Python module and a C header."""

from __future__ import annotations

from kernel_source import Buffer, KernelTable, Segment, own_flags

NOTICE = "Generated from metal/ by tools/package_kernels.py; do not edit."


def python_module(table: KernelTable) -> str:
    """`python/mlx_h2o/_kernel_text.py`: constants that `operations/gpu/kernels.py` reads."""

    def pairs(items: list[tuple[str, str]], indent: int) -> str:
        return "".join(f"{' ' * indent}({first}, {second}),\n" for first, second in items)

    def buffers(items: tuple[Buffer, ...]) -> str:
        return pairs([(_quoted(item.name), _quoted(item.condition)) for item in items], 8)

    def joined(segments: tuple[Segment, ...]) -> str:
        return _python_text("".join(segment.text for segment in segments))

    parts = [f'"""{NOTICE}"""\n\nPairs = tuple[tuple[str, str], ...]\n']
    own: dict[str, tuple[str, ...]] = {}
    parts.append("\n# Of each kernel its family, and what is always on in it.\n")
    parts.append("KERNELS: dict[str, tuple[str, frozenset[str]]] = {\n")
    for family in table.families:
        for kernel, always in family.kernels.items():
            own[kernel] = own_flags(table, family, kernel)
            on = f"frozenset({_quoted(' '.join(always))}.split())"
            parts.append(f"    {_quoted(kernel)}: ({_quoted(family.name)}, {on}),\n")
    parts.append("}\n\n# The other flags that matter to each kernel.\n")
    parts.append("OWN_FLAGS: dict[str, tuple[str, ...]] = {\n")
    for kernel, names in own.items():
        parts.append(f"    {_quoted(kernel)}: tuple({_quoted(' '.join(names))}.split()),\n")
    parts.append("}\n")
    for constant, side in (
        ("TEMPLATE", "template"),
        ("INPUTS", "inputs"),
        ("OUTPUTS", "outputs"),
    ):
        parts.append(f"\n# Name and condition, in order.\n{constant}: dict[str, Pairs] = {{\n")
        for family in table.families:
            parts.append(f"    {_quoted(family.name)}: (\n{buffers(getattr(family, side))}    ),\n")
        parts.append("}\n")
    parts.append(f"\nHEADER = {joined(table.header)}\n")
    parts.append(f"\nCUDA_SHIM = {joined(table.cuda_shim)}\n")
    parts.append("\n# Text and condition, in order.\nSEGMENTS: dict[str, Pairs] = {\n")
    for family in table.families:
        body = pairs([(_python_text(s.text), _quoted(s.condition)) for s in family.segments], 8)
        parts.append(f"    {_quoted(family.name)}: (\n{body}    ),\n")
    parts.append("}\n")
    return "".join(parts)


def c_header(table: KernelTable) -> str:
    """`mlx-c/h2o/kernel_text.h`: static tables for one source file to include."""

    def segments(name: str, items: tuple[Segment, ...]) -> str:
        body = "".join(f"    {{{_quoted(s.condition)},\n{_c_text(s.text)}}},\n" for s in items)
        return f"static const mlx_h2o_kernel_segment {name}[] = {{\n{body}}};\n"

    def buffers(name: str, items: tuple[Buffer, ...]) -> str:
        body = "".join(f"    {{{_quoted(b.name)}, {_quoted(b.condition)}}},\n" for b in items)
        return f"static const mlx_h2o_kernel_buffer {name}[] = {{\n{body}}};\n"

    def count(name: str) -> str:
        return f"sizeof({name}) / sizeof({name}[0])"

    parts = [_C_TYPES]
    parts.append(segments("mlx_h2o_kernel_header", table.header))
    for family in table.families:
        prefix = f"mlx_h2o_{family.name}"
        parts.append(buffers(f"{prefix}_template", family.template))
        parts.append(buffers(f"{prefix}_inputs", family.inputs))
        parts.append(buffers(f"{prefix}_outputs", family.outputs))
        parts.append(segments(f"{prefix}_segments", family.segments))
        tables = [f"{prefix}_{table}" for table in ("template", "inputs", "outputs", "segments")]
        fields = "".join(f"    {name},\n    {count(name)},\n" for name in tables)
        for kernel, on in family.kernels.items():
            words = (on, own_flags(table, family, kernel))
            flags = "".join(f"    {_quoted(' '.join(each))},\n" for each in words)
            parts.append(
                f"static const mlx_h2o_kernel_text mlx_h2o_{kernel}_text = {{\n"
                f"    {_quoted(kernel)},\n{flags}{fields}}};\n"
            )
    parts.append("#endif\n")
    return f"/* {NOTICE} */\n/* clang-format off */\n" + "\n".join(parts)


_C_TYPES = """#ifndef MLX_H2O_KERNEL_TEXT_H
#define MLX_H2O_KERNEL_TEXT_H

#include <stddef.h>

/* Text, or a buffer, that exists when its condition holds: flags and traits
   separated by spaces, all of which must be on, or off where there is a "!". */
typedef struct {
    const char* condition;
    const char* text;
} mlx_h2o_kernel_segment;

typedef struct {
    const char* name;
    const char* condition;
} mlx_h2o_kernel_buffer;

/* `always_on` are its traits, and some flags, separated by spaces; `own_flags`
   are the other flags that matter to it. */
typedef struct {
    const char* name;
    const char* always_on;
    const char* own_flags;
    const mlx_h2o_kernel_buffer* template_arguments;
    size_t template_count;
    const mlx_h2o_kernel_buffer* inputs;
    size_t input_count;
    const mlx_h2o_kernel_buffer* outputs;
    size_t output_count;
    const mlx_h2o_kernel_segment* segments;
    size_t segment_count;
} mlx_h2o_kernel_text;
"""


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _python_text(text: str) -> str:
    assert '"""' not in text and not text.endswith('"')
    return f'r"""{text}"""' if "\\" in text else f'"""{text}"""'


def _c_text(text: str) -> str:
    return "\n".join(f'     {_quoted(line)[:-1]}\\n"' for line in text.splitlines())
