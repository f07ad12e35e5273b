"""What we replace in mlx_lm, and which names we use: fails if a new version changes them."""

import ast
import tomllib
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

import mlx_h2o
from mlx_h2o.lm import probing
from mlx_h2o.lm.routing import NAME, routing_for
from routing_checks import SETTINGS, everything_of_mlx_lm, replaced_since
from tiny_models import random_prompt, tiny_qwen3, tiny_tokenizer

pytestmark = [pytest.mark.downstream, pytest.mark.usefixtures("mlx_lm_stays_as_it_is")]

PACKAGE = Path(mlx_h2o.__file__).parent


def methods(model: object) -> list[object]:
    """The classes that a model is made of."""
    classes = {base for one in model.modules() for base in type(one).__mro__}
    return [dict(vars(cls)) for cls in sorted(classes, key=repr)]


def test_one_name_is_replaced_and_in_the_modules_of_the_model_alone():
    model, tokenizer = tiny_qwen3(), tiny_tokenizer()
    before, classes = everything_of_mlx_lm(), methods(model)
    seen = []

    def look(logits: mx.array) -> mx.array:
        seen.append((replaced_since(before), methods(model) == classes))
        return mx.argmax(logits, axis=-1)

    given = {"max_tokens": 2, "sampler": look, "max_kv_size": 16, **SETTINGS}
    mlx_h2o.generate(model, tokenizer, random_prompt(20), **given)
    mlx_h2o.generate(model, tokenizer, random_prompt(20), draft_model=tiny_qwen3(layers=1), **given)
    mlx_h2o.batch_generate(model, tokenizer, [random_prompt(20), random_prompt(9)], **given)
    assert len(seen) > 6
    assert all(found == ({("mlx_lm.models.qwen3", NAME)}, True) for found in seen)
    assert not replaced_since(before)


def test_the_probe_replaces_no_more(monkeypatch):
    """It gives the layers of the model that it looks at classes of their own, for a while."""
    model, other = tiny_qwen3(), tiny_qwen3()
    before, classes = everything_of_mlx_lm(), methods(other)
    seen, original = [], probing._packing_errors

    def look(*given: object) -> mx.array:
        seen.append((replaced_since(before), methods(other) == classes))
        return original(*given)

    monkeypatch.setattr(probing, "_packing_errors", look)
    kinds = [type(layer) for layer in model.layers]
    assert not isinstance(probing.gives(model, 60, 24), str)
    assert seen == [({("mlx_lm.models.qwen3", NAME)}, True)] * 2
    assert [type(layer) for layer in model.layers] == kinds


def test_eviction_in_a_context_replaces_no_more():
    model = tiny_qwen3()
    before = everything_of_mlx_lm()
    with routing_for(model, make_prompt_cache(model)):  # mlx_lm's own caches
        assert not replaced_since(before)
    with mlx_h2o.evicting(model, max_kv_size=20):
        assert replaced_since(before) == {("mlx_lm.models.qwen3", NAME)}
    assert not replaced_since(before)


def used(file: Path) -> set[str]:
    """Names of mlx_lm in a file, without the package's own."""
    tree = ast.parse(file.read_text("utf-8"))
    modules: dict[str, str] = {}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "mlx_lm":
                    modules[alias.asname or "mlx_lm"] = "mlx_lm"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mlx_lm"):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if name == "mlx_lm.models.cache":
                    modules[alias.asname or alias.name] = name
                else:
                    found.add(name)
    dotted = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            parts = ast.unparse(node).split(".")
            if parts[0] in modules and all(part.isidentifier() for part in parts):
                dotted.add(".".join([modules[parts[0]], *parts[1:]]))
    parts_of = {name for name in dotted if any(other.startswith(f"{name}.") for other in dotted)}
    return {name.removeprefix("mlx_lm.") for name in found | dotted - parts_of}


def test_what_is_used_of_mlx_lm():
    serving = {*(PACKAGE / "serving").rglob("*.py")}
    others = {*PACKAGE.rglob("*.py")} - serving
    known = tomllib.loads(Path(__file__).with_name("used_of_mlx_lm.toml").read_text("ascii"))
    elsewhere = set().union(*map(used, others))
    assert elsewhere == {*known["elsewhere"]}
    assert set().union(*map(used, serving)) - elsewhere == {*known["serving"]}
