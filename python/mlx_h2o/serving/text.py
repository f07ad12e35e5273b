"""Turn tokens into text: find where it stops, and what is reasoning or a tool call."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx_lm.generate import TextStateMachine, make_text_state_machine
from transformers.convert_slow_tokenizer import bytes_to_unicode

_MACHINE: Any = TextStateMachine
_MARKS = "<|channel|>", "<|message|>"
_THINKS = ("<|channel|>analysis<|message|>", "reasoning")
_SAYS = [(mark, "normal") for mark in ("<|channel|>final<|message|>", "<|start|>assistant")]
_HARMONY = _MACHINE({"normal": [_THINKS, *_SAYS], "reasoning": [("<|end|>", "normal")]})
"""For models that write in channels, such as gpt-oss; mlx_lm does not tell channels apart."""
_SPACE = "\u2581"  # stands for a space in some vocabularies
_LETTERS: Any = bytes_to_unicode  # of byte-level BPE
_BYTES: dict[str, int] = {letter: byte for byte, letter in _LETTERS().items()}


@functools.lru_cache(4)  # shared by all choices of a request
def _until(stops: tuple[str, ...]) -> Any:
    """The initial state of a machine that ends at the first of these texts."""
    return _MACHINE({"text": [(stop, None) for stop in stops]}).make_state("text")


class Writer:
    """The text of one answer in segments: (kind, text), of the kinds normal, reasoning and tool.

    Args:
        tokenizer: the model's.
        stops: texts that end the answer, and are not part of it.
        state: the kind of text with which the answer begins.
        goes_on: whether it continues the text of the prompt, so that a leading space counts;
            mlx_lm's detokenizers drop one at the beginning of a text.
    """

    def __init__(
        self, tokenizer: Any, stops: Sequence[str], state: str = "normal", goes_on: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer
        if goes_on and (before := tokenizer.convert_tokens_to_ids("a")) is not None:
            self._detokenizer.add_token(before)
            _ = self._detokenizer.last_segment  # is not part of the answer
        self.stops = tuple(stops)
        self._text = _until(self.stops)
        machine: Any = make_text_state_machine(tokenizer)
        if not tokenizer.has_thinking:  # as far as mlx_lm knows
            channels = tokenizer.convert_tokens_to_ids([*_MARKS])
            if {None, tokenizer.unk_token_id}.isdisjoint(channels):
                machine = _HARMONY
        self._kinds = machine.make_state(state)

    @property
    def stopped(self) -> bool:
        """Whether a stop has come; text after it is dropped."""
        return self._text[0] is None

    def take(self, token: int) -> list[tuple[str, str]]:
        """The segments that this token adds."""
        if token < len(self._tokenizer):  # or it is padding of the embedding table, without text
            self._detokenizer.add_token(token)
        return self._split(self._before_stop(self._detokenizer.last_segment))

    def end(self) -> list[tuple[str, str]]:
        """The segments that remain after the last token."""
        self._detokenizer.finalize()
        text = self._before_stop(self._detokenizer.last_segment)
        if not self.stopped:
            text += _MACHINE.flush(self._text)[1]
        segments = self._split(text)
        self._kinds, text, kind = _MACHINE.flush(self._kinds)
        return [*segments, (kind, text)] if text else segments

    def _before_stop(self, text: str) -> str:
        """The text that certainly precedes the first stop."""
        if self.stopped:
            return ""
        self._text, segments = _MACHINE.split(self._text, text)
        return str(segments[0][1])

    def _split(self, text: str) -> list[tuple[str, str]]:
        self._kinds, segments = _MACHINE.split(self._kinds, text)
        # An empty segment marks where a kind begins or ends, as between two tool calls.
        return segments if len(segments) > 1 else [one for one in segments if one[1]]


@dataclass(frozen=True)
class TokenLogprob:
    """A token with its text, the bytes it stands for, and the logarithm of its probability."""

    token: int
    text: str
    data: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()

    @property
    def name(self) -> str:
        """Its text, or its bytes if it is a part of a character, as in OpenAI's API."""
        whole = self.text.encode() == self.data
        return self.text if whole else "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.data)


def logprobs_of(tokenizer: Any, token: int, logprobs: mx.array, top: int) -> TokenLogprob:
    """The logprob of a generated token, and the ``top`` likeliest at its position, in order.

    Args:
        logprobs: [V], of all tokens at this position.
    """
    likely: list[int] = []
    if top:
        places = mx.argpartition(-logprobs, kth=top - 1)[:top]
        likely = places[mx.argsort(-logprobs[places])].tolist()  # type: ignore[assignment]
    values: Any = logprobs[mx.array([token, *likely])].astype(mx.float32).tolist()
    values = [value if value > -9999 else -9999.0 for value in values]  # JSON has no inf and NaN
    both = zip([token, *likely], values, strict=True)
    told = [TokenLogprob(one, *token_text(tokenizer, one), value) for one, value in both]
    return replace(told[0], top=tuple(told[1:]))


def token_text(tokenizer: Any, token: int) -> tuple[str, bytes]:
    """A token as text and as bytes, which may be a part of a character."""
    text, piece = tokenizer.decode([token]), str(tokenizer.convert_ids_to_tokens(token))
    if piece.startswith(_SPACE):  # some decoders drop the first one
        text = piece.replace(_SPACE, " ")
    if "\ufffd" not in text:
        return text, text.encode()
    if piece.startswith("<0x") and piece.endswith(">"):
        return text, bytes([int(piece[3:-1], 16)])
    whole = all(letter in _BYTES for letter in piece)
    return text, bytes(_BYTES[letter] for letter in piece) if whole else text.encode()
