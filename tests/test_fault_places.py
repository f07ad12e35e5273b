"""Where seeded faults are put: the place is found, or its absence is an error."""

from __future__ import annotations

import ast

import pytest

from faults.change import (
    Change,
    PlaceError,
    argument,
    assigned,
    called,
    condition,
    constant,
    named,
    operator,
    replaced,
    returned,
    statement,
    subscript,
)
from faults.place import Fault, assert_caught, seeded
from faults.text import Edit
from mlx_h2o import H2OConfig

# Python

SOURCE = '''
def f(self, rows, count):
    """Not a statement."""
    start = self.offset - count
    if rows > start and rows:
        g(rows, count, axis=2)
    total = [row[0] for row in rows if row >= count]
    total[1] = 3
    return start + len(total)
'''


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (returned().becomes("_ * 2"), "return (start + len(total)) * 2"),
        (assigned("start").becomes("self.offset"), "start = self.offset"),
        (argument("g", 1).becomes("_ - 1"), "g(rows, count - 1, axis=2)"),
        (argument("g", "axis").becomes("1"), "g(rows, count, axis=1)"),
        (called("g").swapped(), "g(count, rows, axis=2)"),
        (condition(of="start").becomes("False"), "if False:"),
        (condition(at=2).becomes("not _"), "for row in rows if not row >= count]"),
        (replaced(">", "<="), "if rows <= start and rows:"),
        (replaced("and", "or"), "if rows > start or rows:"),
        (operator("-").swapped(), "start = count - self.offset"),
        (constant(0).becomes("1"), "[row[1] for row"),
        (named("self.offset").becomes("0"), "start = 0 - count"),
        (subscript().becomes("row"), "[row for row in rows"),
        (statement(of="g").dropped(), "        pass"),
        (statement(of="g").becomes("return None"), "            return None"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_change_of_a_function(change: Change, line: str) -> None:
    tree = ast.parse(SOURCE)
    change.apply(tree.body[0])
    assert line in ast.unparse(tree)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (returned(at=2).becomes("1"), r"found 1 times \(lines \[9\]\), expected at least 2 times"),
        (condition().becomes("True"), r"the condition: found 2 times .* expected once"),
        (statement(of="h").dropped(), "the statement of 'h': found 0 times"),
        (replaced("*", "+"), "the operator '\\*': found 0 times"),
    ],
    ids=["at", "twice", "of", "none"],
)
def test_a_place_that_is_not_there_is_an_error(change: Change, error: str) -> None:
    with pytest.raises(PlaceError, match=error):
        change.apply(ast.parse(SOURCE).body[0])


def fault(place: str, change: Change) -> Fault:
    return Fault("wrong on purpose", place, change, lambda: None)


def test_whoever_holds_the_function_or_the_class_runs_the_fault() -> None:
    held, config = H2OConfig.setting_names, H2OConfig(max_kv_size=64)
    before = held(), config.dense_rows
    with seeded(fault("config:H2OConfig.setting_names", returned().becomes("()"))):
        assert held() == H2OConfig.setting_names() == config.setting_names() == ()
    with seeded(fault("config:H2OConfig.dense_rows", condition(of="light_bits").becomes("False"))):
        assert config.dense_rows > 0
    assert (held(), config.dense_rows) == before


@pytest.mark.parametrize(
    ("place", "change", "error"),
    [
        ("no_module:f", returned().becomes("1"), "no_module"),
        ("config:nothing", returned().becomes("1"), "'nothing' is not defined"),
        ("config:H2OConfig.setting_names", returned().becomes("_"), "as it was"),
    ],
)
def test_a_fault_without_a_place_is_an_error(place: str, change: Change, error: str) -> None:
    with (
        pytest.raises(PlaceError, match=f"'wrong on purpose' in {place}: .*{error}"),
        seeded(fault(place, change)),
    ):
        raise AssertionError


def test_a_fault_that_goes_unnoticed_fails_the_test() -> None:
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        assert_caught(fault("config:H2OConfig.setting_names", returned().becomes("7")))


# C++, C, Metal and Swift

TEXT = """
struct Sum {
  explicit Sum(int n) : total_(n), scale_{1} { reset(n); }
  // total_ += 3;
  template <typename T>
  int add(const T& x) const noexcept {
    if (x < 3) { total_ +=  x; }  // fault: added
    return total_ + x;
  }
};
int Other::add(int x) { return x +
    1; }
public func store<T>(_ x: T) throws -> [Int] where T: P { rows.append(x) }
"""


@pytest.mark.parametrize(
    ("edit", "line"),
    [
        (Edit("Sum::add", "x < 3", "x <= 3"), "if (x <= 3) {"),
        (Edit("Sum::add", "total_ += x", "total_ = x"), "{ total_ = x; }"),
        (Edit("Sum::Sum", "reset(n);", ""), "scale_{1} {  }"),
        (Edit("Other::add", "x + 1", "x - 1"), "{ return x - 1; }"),
        (Edit("add", "return total_ ...;", "return ...;"), "return + x;"),
        (Edit("store", "rows.append(x)", "rows"), "where T: P { rows }"),
        (Edit("// fault: added", "x", "2 * x", at=2), "total_ +=  2 * x; }"),
        (Edit("Sum", "x", "y", at=1), "const T& y)"),
        (Edit("", "total_ + x", "x"), "return x;"),
        (Edit("Sum::add", "total_", "all", every=True), "{ all +=  x; }"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_edit_of_a_text(edit: Edit, line: str) -> None:
    assert line in edit.apply(TEXT)


@pytest.mark.parametrize(
    "edit",
    [
        Edit("Sum::add", "x + 1", ""),
        Edit("Nothing", "x", ""),
        Edit("Sum::add", "total_", ""),
        Edit("Sum::add", "total_", "", at=4),
        Edit("Sum", "total_ += 3", ""),  # a comment
        Edit("// fault: nothing", "x", ""),
    ],
    ids=str,
)
def test_tokens_that_are_not_there_once_are_an_error(edit: Edit) -> None:
    with pytest.raises(PlaceError, match="stands there"):
        edit.apply(TEXT)


def test_one_file_must_hold_the_place(tmp_path) -> None:
    for name in ("a.h", "b.h"):
        (tmp_path / name).write_text(TEXT)
    files = sorted(tmp_path.iterdir())
    edit = Edit("Sum::add", "x < 3", "x > 3")
    with pytest.raises(PlaceError, match="expected one file"):
        edit.apply_to(files)
    assert edit.apply_to(files[:1])[0] == files[0]
