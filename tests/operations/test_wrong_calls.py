"""What the operations refuse, word for word, because people will read the messages."""

from typing import Any

import pytest

from back_ends import NATIVE
from mlx_h2o import fast
from wrong_calls import ATTENTION, wrong_calls


@pytest.mark.parametrize(("op", "text", "given"), wrong_calls(types=True))
def test_a_wrong_call_says_what_it_found_and_what_it_expected(
    op: str, text: str, given: dict[str, Any]
) -> None:
    with pytest.raises(TypeError if " must be " in text or " are arr" in text else ValueError) as e:
        getattr(fast, op)(**given)
    assert str(e.value).startswith(f"[{op}] {text}")


def in_core(op: str, given: dict[str, Any]) -> None:
    """C++ callers come without Python's checks."""
    from mlx_h2o import _core

    if op == ATTENTION:
        queries, keys, values = (given.pop(name) for name in "qkv")
        _core.attention(queries, [keys], [values], return_scores=True, **given)
    elif op == "quantize_append":
        k, v, *new = (given.pop(name) for name in list(given)[:5])
        numbers = {"bits": 8, "group_size": 64} | given
        numbers.setdefault("v_bits", numbers["bits"])
        _core.quantize_append(list(k), list(v), *new, **numbers)
    else:
        arrays = [given.pop(name) for name in list(given) if name not in NUMBERS]
        getattr(_core, op)(*arrays, **given)


NUMBERS = ("keep", "sink_size", "decay")
OWN = (ATTENTION, "keep_indices", "accumulate_scores", "key_diversity", "quantize_append")


@NATIVE
@pytest.mark.parametrize(("op", "text", "given"), [one for one in wrong_calls() if one[0] in OWN])
def test_the_native_module_has_the_same_words(op: str, text: str, given: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as python:
        getattr(fast, op)(**given)
    with pytest.raises(ValueError) as own:
        in_core(op, dict(given))
    assert str(own.value) == str(python.value)
