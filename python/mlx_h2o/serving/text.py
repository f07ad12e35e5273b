"""From tokens to the text of an answer: where it stops, and which part of it is which."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import TextStateMachine, make_text_state_machine

__all__ = ["Stops", "TokenLogprob", "Writer", "logprobs_of", "token_text"]

_KINDS: Any = TextStateMachine
_SPACES = ("\u2581", "\u0120")
"""With which vocabularies write a word that stands behind a space."""


class Stops:
    """Finds the first of some texts in one that comes in pieces, however it is cut."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = tuple(texts)
        self.found = False
        self._held = ""

    def take(self, text: str) -> str:
        """What is certain to lie before the first of the texts, now that ``text`` has come."""
        if self.found:
            return ""
        self._held += text
        starts = ((self._held.find(stop), stop) for stop in self.texts)
        ends = [(start + len(stop), start) for start, stop in starts if start >= 0]
        if ends:
            self.found = True
            return self._held[: min(ends)[1]]
        hidden = max(map(self._may_begin, self.texts), default=0)
        ready = len(self._held) - hidden
        said, self._held = self._held[:ready], self._held[ready:]
        return said

    def rest(self) -> str:
        """What was held back, once nothing more comes."""
        said, self._held = "" if self.found else self._held, ""
        return said

    def _may_begin(self, stop: str) -> int:
        """How many last characters may be the first of this text."""
        most = min(len(stop) - 1, len(self._held))
        return next((n for n in range(most, 0, -1) if self._held.endswith(stop[:n])), 0)


class Writer:
    """The text of one answer in segments: (kind, text), of the kinds normal, reasoning and tool.

    Args:
        tokenizer: of the model.
        stops: texts that end the answer, and are no part of it.
        state: the kind of text with which the answer begins.
        goes_on: whether it goes on with the text of the prompt, so that a first space counts,
            which mlx_lm's detokenizers leave out.
    """

    def __init__(
        self, tokenizer: Any, stops: Sequence[str], state: str = "normal", goes_on: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer
        self._first = goes_on
        self._spaced = False
        self._stops = Stops(stops)
        machine: Any = make_text_state_machine
        self._kinds = machine(tokenizer).make_state(state)

    @property
    def stopped(self) -> bool:
        return self._stops.found

    def take(self, token: int) -> list[tuple[str, str]]:
        """The segments that this token adds."""
        if self._first:
            piece = str(self._tokenizer.convert_ids_to_tokens(token))
            self._spaced, self._first = piece.startswith(_SPACES), False
        self._detokenizer.add_token(token)
        return self._split(self._stops.take(self._segment()))

    def end(self) -> list[tuple[str, str]]:
        """What is left behind the last token."""
        self._detokenizer.finalize()
        text = self._stops.take(self._segment()) + self._stops.rest()
        segments = self._split(text)
        self._kinds, text, kind = _KINDS.flush(self._kinds)
        return [*segments, (kind, text)] if text else segments

    def _segment(self) -> str:
        text = str(self._detokenizer.last_segment)
        if text and self._spaced:
            self._spaced = False
            return text if text.startswith(" ") else f" {text}"
        return text

    def _split(self, text: str) -> list[tuple[str, str]]:
        self._kinds, segments = _KINDS.split(self._kinds, text)
        # An empty one says that a kind begins or ends: one tool call, and another.
        return segments if len(segments) > 1 else [one for one in segments if one[1]]


@dataclass(frozen=True)
class TokenLogprob:
    """A token with its text, the bytes it stands for, and the logarithm of its probability."""

    token: int
    text: str
    data: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


def logprobs_of(tokenizer: Any, token: int, logprobs: mx.array, top: int) -> TokenLogprob:
    """Of a generated token, with the ``top`` likeliest in its place, likeliest first.

    Args:
        logprobs: [V], of all tokens there.
    """
    likely: list[int] = []
    if top:
        places = mx.argpartition(-logprobs, kth=top - 1)[:top]
        likely = places[mx.argsort(-logprobs[places])].tolist()  # type: ignore[assignment]
    values: Any = logprobs[mx.array([token, *likely])].astype(mx.float32).tolist()
    values = [max(value, -9999.0) for value in values]  # JSON has no infinity

    def of(one: int, value: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        text, data = token_text(tokenizer, one)
        return TokenLogprob(one, text, data, value, top)

    others = tuple(of(one, value) for one, value in zip(likely, values[1:], strict=True))
    return of(token, values[0], others)


def token_text(tokenizer: Any, token: int) -> tuple[str, bytes]:
    """A token as text and as bytes, which may be a part of a character."""
    text = tokenizer.decode([token])
    if "\ufffd" not in text:
        return text, text.encode()
    piece = str(tokenizer.convert_ids_to_tokens(token))
    if piece.startswith("<0x") and piece.endswith(">"):
        return text, bytes([int(piece[3:-1], 16)])
    table = _bytes_of_letters()
    whole = all(letter in table for letter in piece)
    return text, bytes(table[letter] for letter in piece) if whole else text.encode()


@functools.cache
def _bytes_of_letters() -> dict[str, int]:
    """The letters that vocabularies of byte pairs write for bytes: themselves where they can be
    seen, and for the others those from U+0100 on."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + n): b for n, b in enumerate(hidden)}
