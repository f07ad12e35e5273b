"""Memory that runs out in Python: the n-th operation of the package raises MemoryError."""

import dis
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import mlx_h2o

PACKAGE = str(Path(mlx_h2o.__file__).parent)

OPERATIONS = ("CALL", "BINARY", "STORE_SUBSCR", "BUILD", "LIST", "FORMAT", "UNPACK")
"""Prefixes of instructions that may allocate."""


class Failing:
    """Makes one operation fail; ``struck`` is set once it has."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.struck = ""
        self._at: dict[CodeType, dict[int, str]] = {}

    def called(self, frame: FrameType, event: str, _: Any) -> Any:
        """Follow what the package calls, instruction by instruction."""
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self.traced

    def traced(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode" and not self.struck:
            code = frame.f_code
            if code not in self._at:
                self._at[code] = {one.offset: one.opname for one in dis.get_instructions(code)}
            if self._at[code].get(frame.f_lasti, "").startswith(OPERATIONS):
                self.left -= 1
                if self.left < 0:
                    place = Path(code.co_filename).name
                    self.struck = f"{place}:{frame.f_lineno} in {code.co_qualname}"
                    raise MemoryError(self.struck)
        return self.traced


@contextmanager
def failing(number: int) -> Iterator[Failing]:
    """Within the context, the operation with this number (from 0) fails, if there are that
    many."""
    found, before = Failing(number), sys.gettrace()
    sys.settrace(found.called)
    try:
        yield found
    finally:
        sys.settrace(before)
