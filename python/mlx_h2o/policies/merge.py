"""merge: rows that would go become part of the rows that are most like them."""

from __future__ import annotations

from .keydiff import KeyDiff


class Merge(KeyDiff):
    """The pair of rows whose merger changes attention least becomes one row.

    Its key and value are means weighted by how much attention each row is likely to get, more the
    less its key is like the mean key; what it accumulates is ``ln n`` of the n rows in it, which
    attention adds to its logit. So it needs attention of ours, and no scores.
    """

    name = "merge"
    merges = True
