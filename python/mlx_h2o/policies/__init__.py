"""Eviction policies: each ranks the stored rows, and the cache keeps those ranked highest.

A policy is one short file with a class that derives from :class:`Policy`, and an entry in the
table below. docs/internals/extending.md shows how to add one.
"""

from ..errors import check
from .base import Policy, Rows
from .h2o import H2O
from .h2o_ema import H2OEma
from .h2o_sum import H2OSum
from .keydiff import KeyDiff
from .mix import Mix
from .random import Random
from .snapkv import SnapKV
from .tova import Tova
from .value_aware import ValueAware
from .window import Window

__all__ = ["H2O", "H2OEma", "H2OSum", "KeyDiff", "Mix", "Policy", "Random", "Rows", "SnapKV"]
__all__ += ["Tova", "ValueAware", "Window", "known", "names"]

_POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (H2O, H2OEma, H2OSum, Window, Random, KeyDiff, SnapKV, Tova, ValueAware, Mix)
}


def names() -> tuple[str, ...]:
    """Names of the policies, as used in flags and files."""
    return tuple(_POLICIES)


def known(name: str) -> type[Policy]:
    """The class of the policy with this name; raises SettingError if there is none."""
    check(name in names(), "policy", name, f"one of: {', '.join(names())}")
    return _POLICIES[name]
