"""The command line: check values as they are parsed, and report a mistake in one line."""

import argparse
import difflib
import json
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ..errors import LARGEST, SettingError
from ..lm.files import check_writable
from ..lm.sizing import parsed_bytes

_SAID = {n: n for n in ("diversity", "fold", "kv_frame", "kv_handed", "prefix_size", "rows_at")}
_SAID["speculative"] = "--num-draft-tokens"
"""What messages call settings that have no flag of their name."""


class _Help(argparse.HelpFormatter):
    """Shows defaults, unless there is none, it is 0 or 1 (off), or the text shows it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        said, usual = action.help or "", action.default
        known = type(usual) in (int, float, str) and usual not in (0, 1, argparse.SUPPRESS)
        return f"{said} (default: %(default)s)" if known and "(default" not in said else said


class Shows(argparse.Action):
    """Prints the text that ``const`` makes of the parser, and ends the command."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print(self.const(parser).rstrip())
        parser.exit()


class OneLineParser(argparse.ArgumentParser):
    """The parser of a command. A mistake prints one line, and ends the command with status 2.

    ``first`` are the flags, without dashes, that --help explains. It lists the others by group, and
    --help-all explains all of them.
    """

    def __init__(self, description: str, first: str = "", **given: Any) -> None:
        usual: dict[str, Any] = {"usage": "%(prog)s [options]"}
        usual["formatter_class"] = partial(_Help, max_help_position=30)
        super().__init__(description=description, **usual | given)
        self._first = [f"--{name}" for name in first.split()]
        every, said = argparse.ArgumentParser.format_help, "explain every flag"
        said = said if first else argparse.SUPPRESS  # --help does so itself
        self.add_argument("--help-all", action=Shows, nargs=0, const=every, help=said)

    def format_help(self) -> str:
        if not self._first:
            return super().format_help()
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        known = self._option_string_actions
        formatter.add_arguments([known[name] for name in self._first])
        lines = [f"{formatter.format_help()}\nOther flags, which --help-all explains:"]
        for group in self._action_groups:
            every = [one for one in group._group_actions if one.help != argparse.SUPPRESS]
            names = [next(n for n in one.option_strings if n.startswith("--")) for one in every]
            names = [name for name in names if name not in (*self._first, "--help-all")]
            if names:
                given: dict[str, Any] = {"width": 79, "subsequent_indent": " " * 24}
                given["initial_indent"] = f"  {group.title:21} "
                lines.append(textwrap.fill(" ".join(names), break_on_hyphens=False, **given))
        return "\n".join(lines) + "\n"

    def error(self, message: str) -> NoReturn:
        said, unknown, rest = message.partition("unrecognized arguments: ")
        if unknown and not said:
            typed = rest.partition(" ")[0].partition("=")[0].replace("_", "-")
            like = difflib.get_close_matches(typed, self._option_string_actions, 1)
            message += f", expected {like[0] if like else 'known flags; quote values with spaces'}"
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())} (see --help)\n")


def told(error: Exception) -> str:
    """The message of an error in one line, with settings by the names of their flags."""
    if isinstance(error, SettingError):
        return error.told(lambda n: _SAID.get(n, f"--{n.replace('_', '-')}"))
    operation, end, rest = " ".join(str(error).split()).partition("] ")
    return rest if end and operation.startswith("[") else operation + end + rest


def checked(reading: Callable[[str], Any], check: Callable[[Any], Any]) -> Callable[[str], Any]:
    """A type of argparse: the value of ``reading``, unless ``check`` raises an error for it."""

    def read(text: str) -> Any:
        found = reading(text)
        try:
            check(found)
        except (OSError, TypeError, ValueError) as error:
            raise argparse.ArgumentTypeError(told(error)) from error
        return found

    read.__name__ = reading.__name__
    return read


def number(
    least: float, most: float = LARGEST, kind: type = int, also: int | None = None
) -> Callable[[str], Any]:
    """A type of argparse: a number of this kind and range, or ``also``."""

    def check(found: float) -> None:
        if not least <= found <= most and found != also:
            more = "" if also is None else f", or {also}"
            raise ValueError(f"{found} is out of range, expected {least} to {most}{more}")

    return checked(kind, check)


def nbytes(text: str, none: str | None = None) -> int:
    """A type of argparse: a number of bytes, such as 300MB; 0 if the text is ``none``."""
    return 0 if text == none else parsed_bytes(checked(str, parsed_bytes)(text))


def row_count(text: str) -> int | None:
    """A type of argparse: a number of rows; "none" is None."""
    try:
        return None if text.lower() == "none" else int(text)
    except ValueError:
        said = f"{text!r} is not a number of rows, expected e.g. 2048, or none: no limit"
        raise argparse.ArgumentTypeError(said) from None


def json_object(text: str) -> dict[str, Any]:
    """A type of argparse: an object in JSON."""
    try:
        found = json.loads(text)
    except (RecursionError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not a JSON object")
    return found


new_file = checked(Path, check_writable)
"""A type of argparse: a file that can be written."""
