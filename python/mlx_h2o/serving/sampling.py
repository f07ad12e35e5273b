"""Sampling with random keys of the request's own, so that its batch changes nothing."""

import hashlib
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import greedy_sampler

from ..lm.ranks import Sampler


def spared_tokens(tokenizer: Any, vocabulary: int) -> list[int]:
    """Tokens that xtc never removes: newline and end of sequence, if the model has them."""
    found = *tokenizer.encode("\n"), *tokenizer.eos_token_ids
    return [token for token in found if 0 <= token < vocabulary]


@dataclass(frozen=True)
class Sampling:
    """temperature: 0 takes the likeliest token. top_p, top_k, min_p, xtc_probability and
    xtc_threshold: as in mlx_lm; 1, 0, 0 and 0 turn them off. seed: 0 to 2^64 - 1."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    seed: int = 0

    def sampler(self, places: Iterator[int], spared: list[int]) -> Sampler:
        """A sampler that chooses tokens by their log probabilities [N, V].

        Args:
            places: the position of each choice in the answer; it and the seed make the random key.
            spared: tokens that xtc never removes.
        """
        if self.temperature == 0:
            return greedy_sampler

        def sample(logprobs: mx.array) -> mx.array:
            state = hashlib.blake2b(struct.pack("<QQ", self.seed, next(places)), digest_size=16)
            one, other = mx.array(struct.unpack("<4I", state.digest()), mx.uint32).reshape(2, 2)
            kept = self._filtered(logprobs.astype(mx.float32), other, spared)
            # Dividing by a temperature below this could overflow float32.
            return mx.random.categorical(kept / max(self.temperature, 1e-5), key=one)

        return sample

    def _filtered(self, logprobs: mx.array, key: mx.array, spared: list[int]) -> mx.array:
        # As mlx_lm does, but not compiled: MLX would compile for each value, seconds on a CPU.
        if self.top_p < 1:
            rising = mx.sort(logprobs, axis=-1)
            above = mx.cumsum(mx.exp(rising), axis=-1, reverse=True, inclusive=False)
            gone = mx.minimum((above >= self.top_p).sum(-1, keepdims=True), logprobs.shape[-1] - 1)
            least = mx.take_along_axis(rising, gone, axis=-1)
            logprobs = mx.where(logprobs < least, -math.inf, logprobs)
        if self.min_p > 0:
            least = logprobs.max(axis=-1, keepdims=True) + math.log(self.min_p)
            logprobs = mx.where(logprobs < least, -math.inf, logprobs)
        if self.xtc_probability > 0:
            probs = mx.softmax(logprobs, axis=-1)
            likely = mx.where(probs > self.xtc_threshold, probs, math.inf)
            taken = probs > likely.min(axis=-1, keepdims=True)
            taken[..., mx.array(spared, mx.int32)] = False
            taken &= mx.random.uniform(key=key) < self.xtc_probability
            logprobs = mx.where(taken, -math.inf, logprobs)
        if self.top_k > 0:
            least = mx.sort(logprobs, axis=-1)[..., -self.top_k, None]
            logprobs = mx.where(logprobs < least, -math.inf, logprobs)
        return logprobs
