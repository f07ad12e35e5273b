"""Checks that no more keys are read than attention reads: patches that raise where they are."""

from __future__ import annotations

import pytest

from mlx_h2o import fast
from mlx_h2o.stores import quantized_store, store


class SecondReadError(AssertionError):
    """All keys of a layer were asked for, beside attention."""


def forbid_second_reads(monkeypatch: pytest.MonkeyPatch, few: int) -> None:
    """From here on ranks of keys and statistics of more than ``few`` rows raise SecondReadError."""

    def second_read(*_, **__):
        raise SecondReadError

    statistics = fast.key_statistics

    def of_few(keys, **packing):
        rows = (keys[0] if isinstance(keys, tuple) else keys).shape[2]
        return statistics(keys, **packing) if rows <= few else second_read()

    monkeypatch.setattr(fast, "key_diversity", second_read)
    monkeypatch.setattr(fast, "key_statistics", of_few)
    for module, name in ((store, "RowStore"), (quantized_store, "QuantizedRowStore")):
        monkeypatch.setattr(getattr(module, name), "dense", second_read)
        replacement = module.serve_replacement

        def replaced(request, replacement=replacement):
            if request.worst is None and not request.ranks == "importance":  # noqa: SIM201, arrays
                second_read()
            return replacement(request)

        monkeypatch.setattr(module, "serve_replacement", replaced)
