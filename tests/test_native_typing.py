"""The stub of the extension says what the extension says."""

import ast
from pathlib import Path

import pytest

import mlx_h2o
from mlx_h2o.operations import native

STUB = Path(mlx_h2o.__file__).with_name("_core.pyi")

pytestmark = pytest.mark.skipif(
    bool(native.unavailable_reason()), reason=native.unavailable_reason() or "available"
)


def normal(function: ast.FunctionDef) -> str:
    """A signature without its body, defaults as literals, MLX under the stub's name."""
    function.body = [ast.Expr(ast.Constant(...))]
    return ast.unparse(function).replace("mlx.core.", "mx.").replace("'", '"')


def stub_functions() -> dict[str, str]:
    tree = ast.parse(STUB.read_text())
    return {node.name: normal(node) for node in tree.body if isinstance(node, ast.FunctionDef)}


def own_signature(function) -> str:
    """The signature that nanobind keeps, with its defaults in their places."""
    ((text, _, defaults),) = function.__nb_signature__
    for i, default in enumerate(defaults or ()):
        text = text.replace(f"\\{i}", repr(default), 1)
    (node,) = ast.parse(text + ": ...").body
    assert isinstance(node, ast.FunctionDef)
    return normal(node)


def test_the_stub_names_what_the_module_has():
    from mlx_h2o import _core

    tree = ast.parse(STUB.read_text())
    named = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
    named |= {
        n.target.id
        for n in tree.body
        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }
    assert named == {name for name in dir(_core) if not name.startswith("__")}
    assert isinstance(_core.built_for_mlx, str)


@pytest.mark.parametrize("name", stub_functions())
def test_a_function_has_the_signature_of_the_stub(name):
    from mlx_h2o import _core

    assert own_signature(getattr(_core, name)) == stub_functions()[name]
