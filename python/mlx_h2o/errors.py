"""Errors about settings, as data: each caller names settings in its own way."""

from collections.abc import Callable, Container

LARGEST = 2**30
"""Most rows, with room for another chunk: sizes of MLX's arrays have 31 bits."""


class SettingError(ValueError):
    """A setting that is out of range or conflicts with others.

    Args:
        name: the setting.
        found: its value.
        expected: what was expected, in words, with ``{}`` for each of the ``others``.
        others: other settings that the message names.
        operation: the operation that refuses the setting.
    """

    def __init__(
        self, name: str, found: object, expected: str, *others: str, operation: str = "H2OConfig"
    ) -> None:
        super().__init__(name, found, expected, *others)
        self.name, self.found, self.operation = name, found, operation
        self._expected, self._others = expected, others

    def told(self, say: Callable[[str], str] = str) -> str:
        """The message; ``say`` turns the name of a setting into, for example, that of its flag."""
        expected = self._expected.format(*map(say, self._others))
        return f"{say(self.name)} is {self.found!r}, expected {expected}."

    def __str__(self) -> str:
        return f"[{self.operation}] {self.told()}"


def check(
    right: bool, name: str, found: object, expected: str, *others: str, operation: str = "H2OConfig"
) -> None:
    """Raises SettingError unless ``right``."""
    if not right:
        raise SettingError(name, found, expected, *others, operation=operation)


def check_bool(name: str, value: object) -> None:
    """Raises SettingError unless ``value`` is a bool."""
    check(isinstance(value, bool), name, value, "a bool")


def check_int(
    operation: str, name: str, value: object, least: int = 1, *, most: int = LARGEST, more: str = ""
) -> None:
    """Raises SettingError unless it is an int in this range; ``more`` says what else is allowed."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        expected = f"an int of at least {least}{more}"
    elif value > most:
        expected = f"at most {most}"
    else:
        return
    raise SettingError(name, value, expected, operation=operation)


def check_share(name: str, value: object, *, whole: bool = False) -> None:
    """Raises SettingError unless it is a number from 0 to below 1; or 1 itself, if ``whole``."""
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else -1
    expected = "a number from 0 to 1" if whole else "a number of at least 0, below 1"
    check(0 <= number < 1 or (whole and number == 1), name, value, expected)


def check_known(name: str, value: object, known: Container[object]) -> None:
    """Raises SettingError unless ``known`` contains ``value``, an int or a text."""
    check(type(value) in (int, str) and value in known, name, value, f"one of {known}")
