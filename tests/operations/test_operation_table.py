"""The table of operations against what Python, C and Swift declare and document."""

import inspect
import re
import tomllib
from typing import Any

import pytest

from mlx_h2o import fast
from paths import ROOT

OPERATIONS = tomllib.loads((ROOT / "metal" / "operations.toml").read_text("ascii"))
LAYOUT = re.compile(r"\[.*\]")


def arguments(op: str) -> dict[str, dict[str, Any]]:
    return {name: given for name, given in OPERATIONS[op].items() if name != "sizes"}


def layout(given: dict[str, Any]) -> str:
    """The sizes that a document shows; of rows in parts it shows those of the parts."""
    text = given.get("array", given.get("mask", given.get("rows", "")))
    found = LAYOUT.search(text)
    return found[0] if found else ""


def test_python_serves_the_table() -> None:
    assert {*fast.__all__} | {"fold", "encode_rows", "decode_rows"} == OPERATIONS.keys()


@pytest.mark.parametrize("op", fast.__all__)
def test_python_has_the_arguments_and_defaults(op: str) -> None:
    own = inspect.signature(getattr(fast, op)).parameters
    expected: dict[str, Any] = {}
    for name, given in arguments(op).items():
        for each in given.get("python", name).split(", "):
            expected[each] = given.get("default")
    others = {"stream", "masked", "return_lse", "return_skipped"}
    assert own.keys() - others == expected.keys()
    for name, default in expected.items():
        found = own[name].default
        assert default == (None if found is inspect.Parameter.empty else repr(found)), name


@pytest.mark.parametrize("op", fast.__all__)
def test_python_documents_the_sizes(op: str) -> None:
    text = inspect.getdoc(getattr(fast, op)) or ""
    if "Args:" not in text:
        assert "Arguments and errors are those of" in text
        return
    for name, given in arguments(op).items():
        for each in given.get("python", name).split(", "):
            (line,) = re.findall(rf"^    {each}: (.*(?:\n     +.*)*)", text, re.MULTILINE)
            shown = "" if "rows" in given else layout(given)
            assert shown in line or "in the dense operation" in line or "as in ``" in line, each
            if "one_of" in given:
                last = str(given["one_of"][-1])
                assert last in line or "bits" in each, each


def c_parameters(op: str) -> list[str]:
    headers = sorted((ROOT / "mlx-c/h2o/include/mlx_h2o/c").glob("*.h"))
    text = "\n".join(header.read_text("utf-8") for header in headers)
    (found,) = re.findall(rf"^int mlx_h2o_{op}\(([^;]*)\);", text, re.MULTILINE)
    return re.findall(r"(\w+)\s*(?:/\*[^*]*\*/)?\s*(?:,|$)", found)


C_NAMES = {
    "mask": ("mask_mode", "mask_arr"),
    "new_keys": ("key_rows",),
    "new_values": ("value_rows",),
}


@pytest.mark.parametrize("op", OPERATIONS)
def test_c_has_the_arguments(op: str) -> None:
    own = c_parameters(op)
    for name, given in arguments(op).items():
        expected: tuple[str, ...] = C_NAMES.get(name, (name,))
        if "quantized" in op and "rows" in given:
            expected = tuple(given["python"].split(", "))
        if op == "decode_rows" and name == "rows":
            expected = ("words", "norms")
        assert {*expected} <= {*own}, name


def camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(word.capitalize() for word in others)


def swift_function(op: str) -> tuple[str, str]:
    """The documentation of a function, and what stands between its parentheses."""
    files = sorted((ROOT / "swift/Sources/MLXH2O").glob("*.swift"))
    text = "\n".join(file.read_text("utf-8") for file in files)
    pattern = (
        rf"((?:^ *///.*\n)+) *public (?:static )?func {camel(op)}(?:<[^>]*>)?\(([^{{]*?)\) throws"
    )
    (found,) = re.findall(pattern, text, re.MULTILINE)
    return found


@pytest.mark.parametrize("op", OPERATIONS)
def test_swift_has_the_labels_defaults_and_documents(op: str) -> None:
    document, parameters = swift_function(op)
    for name, given in arguments(op).items():
        label = "valueBits" if name == "v_bits" else camel(name)
        found = re.search(rf"\b{label}: ([^,=]+?)(?: = ([^,]+?))?(?:,|$)", parameters)
        assert found, label
        default = {"None": "nil", "0.0": "0", "1.0": "1"}.get(given.get("default", ""))
        default = default or given.get("default")
        if "mask" not in given and default and label not in ("kind", "countedQueries"):
            assert found[2].strip() == default, label
        if op != "decode_rows":  # which refers to another function
            (words,) = re.findall(rf"(?:- |Parameter ){label}: (.*(?:\n *///     .*)*)", document)
            assert layout(given) in words or "mask" in given, label
