"""Where seeded faults are put: the place is found, or its absence is an error."""

from __future__ import annotations

import pytest

from faults.text import Edit, PlaceError

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
