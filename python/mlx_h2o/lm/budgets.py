"""A budget for each layer, or each of its KV heads: of a list, or of a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, cast

from ..config import H2OConfig

_Own = int | H2OConfig
Budgets = Sequence[_Own | Sequence[_Own]] | str | PathLike[str]
"""Per evicting layer: ``max_kv_size``, or all settings, or a list of these, one for each KV head;
or a file that holds them."""


def layer_configs(
    config: H2OConfig, budgets: Budgets, layers: int
) -> list[H2OConfig | list[H2OConfig]]:
    """The settings of each evicting layer, or of each of its KV heads.

    Raises:
        ValueError: not one budget for each layer, an invalid budget, or a file without any.
    """
    given: Any = read(budgets) if isinstance(budgets, str | PathLike) else budgets
    count = len(given) if isinstance(given, list | tuple) else f"{given!r} as"
    if count != layers:
        raise ValueError(
            f"[make_prompt_cache] found {count} budgets, expected one for each of the {layers} "
            "layers that evict."
        )
    return [
        [_config(config, budget) for budget in own]
        if isinstance(own, list | tuple) and own
        else _config(config, own)
        for own in given
    ]


def _config(config: H2OConfig, budget: Any) -> H2OConfig:
    if isinstance(budget, H2OConfig):
        return budget
    if isinstance(budget, int) and not isinstance(budget, bool):
        return config.scaled(budget)
    raise ValueError(
        f"[make_prompt_cache] a budget is {budget!r}, expected an int, an H2OConfig, or a list of "
        "these, one for each KV head."
    )


def read(path: str | PathLike[str]) -> Sequence[Any]:
    """The budgets of a file; raises ValueError where it has none, or OSError."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:  # also of text that is no UTF-8
        raise ValueError(f"[make_prompt_cache] {path!s:.200} is not JSON: {error}.") from error
    if not isinstance(found, dict) or not isinstance(found.get("budgets"), list):
        raise ValueError(
            f"[make_prompt_cache] {path} holds {type(found).__name__}, expected an object with a "
            'list under "budgets".'
        )
    return cast(list[Any], found["budgets"])
