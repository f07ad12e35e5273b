"""What is replaced in mlx_lm is in one table, and what a version of it lacks is said by name."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import mlx_h2o
from mlx_h2o import H2OConfig, cli
from mlx_h2o.lm import upstream
from mlx_h2o.lm.hosting import hosting
from mlx_h2o.lm.routing import routing

pytestmark = pytest.mark.downstream

PACKAGE = Path(mlx_h2o.__file__).parent
PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
NAMES = [(module, name) for module, names in upstream.NAMES.items() for name in names]
HOSTED = [pair for pair in NAMES if pair[1] in ("make_prompt_cache", "load")]


def test_the_installed_version_has_them_all():
    assert upstream.missing() == []


def test_the_versions_are_those_that_are_required():
    major, minor = map(int, upstream.VERSIONS.split("."))
    assert f'"mlx-lm>={major}.{minor},<{major}.{minor + 1}"' in PYPROJECT.read_text()


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_a_missing_name_is_named(module, name, monkeypatch):
    monkeypatch.delattr(importlib.import_module(f"mlx_lm.{module}"), name)
    assert upstream.missing() == [f"mlx_lm.{module}.{name}"]
    with pytest.raises(ValueError, match=rf"has no mlx_lm\.{re.escape(module)}\.{name}, which"):
        upstream.target(module, name, lambda found: found)


def test_a_missing_method_is_named(monkeypatch):
    """Of a class, if one were in the table."""
    names = {"generate": {"BatchGenerator": ("insert", "none")}}
    monkeypatch.setattr(upstream, "NAMES", names)
    with pytest.raises(ValueError, match=r"has no mlx_lm\.generate\.BatchGenerator\.none,"):
        upstream.target("generate", "BatchGenerator", lambda found: found)


@pytest.mark.parametrize(("module", "name"), HOSTED)
def test_no_command_goes_on_without_evicting(module, name, monkeypatch, capsys):
    """A module that makes its caches by another name would make mlx_lm's own."""
    monkeypatch.delattr(importlib.import_module(f"mlx_lm.{module}"), name)
    before = vars(importlib.import_module("mlx_lm.generate")).copy()
    with pytest.raises(ValueError, match=name), hosting(H2OConfig()):
        pass
    assert vars(importlib.import_module("mlx_lm.generate")) == before
    assert cli.main(["generate", "--model", "demo", "-p", "x", "-m", "1"]) == 2
    assert f"has no mlx_lm.{module}.{name}" in capsys.readouterr().err


def test_routing_needs_its_names(monkeypatch):
    monkeypatch.delattr(importlib.import_module("mlx_lm.generate"), "can_trim_prompt_cache")
    with pytest.raises(ValueError, match="can_trim_prompt_cache"), routing():
        pass


def test_nothing_else_is_replaced():
    """But for attention, in the modules of models, and the names of our own classes."""
    making = {
        file.relative_to(PACKAGE).as_posix()
        for file in PACKAGE.rglob("*.py")
        if re.search(r"(?<!class )\bTarget\(", file.read_text("utf-8"))
    }
    assert making == {"lm/upstream.py", "lm/routing.py", "lm/registry.py"}
