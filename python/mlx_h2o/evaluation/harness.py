"""The model ``mlx_h2o`` of lm-evaluation-harness: mlx_lm's own wrapper, with caches that evict.

The harness does not find models of other packages. ``python -m mlx_h2o.evaluation.harness`` is its
command with this model: ``--model mlx_h2o --model_args pretrained=NAME,max_kv_bytes=100MB``.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import Any, cast

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
    from mlx_lm import evaluate as mlx_lm_evaluate
except ImportError as _missing:
    if __name__ != "__main__":
        raise
    sys.exit(f"{_missing}, expected pip install 'mlx-h2o[eval]'")

from ..caches.cache import PROMPT_CHUNK
from ..errors import check_int
from ..lm.generate import batch_generate, load, made_by
from ..lm.prompt_cache import make_prompt_cache

_upstream: Any = mlx_lm_evaluate


@register_model("mlx_h2o")
class MLXH2O(cast(Any, _upstream.MLXLM)):  # type: ignore[misc]
    """mlx_lm's wrapper, with evicting caches, and attention that serves them."""

    def __init__(
        self,
        pretrained: str,
        batch_size: int | str = 8,
        device: Any = None,
        max_batch_size: Any = None,
        **settings: Any,
    ) -> None:
        cast(Any, LM).__init__(self)
        settings = {n: None if one in ("none", "None") else one for n, one in settings.items()}
        self._step = int(settings.pop("prefill_step_size", PROMPT_CHUNK))
        check_int("mlx_h2o", "prefill_step_size", self._step)
        self._model, self.tokenizer = load(pretrained)
        # Raises on wrong settings before tasks are read.
        self._caches = make_prompt_cache(self._model, **settings)
        self._batch_size = int(batch_size) if str(batch_size).isdecimal() else 8
        self._max_tokens = None
        self.use_chat_template = self.tokenizer.chat_template is not None

    def _process_prompt(self, prompt: Sequence[int]) -> Any:
        with made_by(self._model, self._caches):
            return super()._process_prompt(prompt, self._step)

    def _score_fn(self, inputs: Any, cache: list[Any] | None = None) -> Any:
        with made_by(self._model, self._caches):
            return super()._score_fn(inputs, cache, self._step)

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        texts = self._tokenize([one.args[0] for one in requests])
        # One by one: mlx_lm's batches hold rows at the same places. One token predicts nothing.
        return [float(self._score_fn([one])[0].sum().item()) if one[1:] else 0.0 for one in texts]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        prompts = self._tokenize([one.args[0] for one in requests])
        options = [one.args[1] for one in requests]
        made = batch_generate(
            self._model,
            self.tokenizer,
            [list(tokens) for tokens in prompts],
            [copy.deepcopy(self._caches) for _ in prompts],
            [one.get("max_gen_toks", _upstream.DEFAULT_MAX_TOKENS) for one in options],
            prefill_batch_size=self._batch_size,
            completion_batch_size=self._batch_size,
            prefill_step_size=self._step,
        )
        texts = made.texts
        for at, option in enumerate(options):
            until = option["until"]  # a text, or a list, which may be empty
            for stop in [until] if isinstance(until, str) else until:
                texts[at] = texts[at].partition(stop)[0]
        if self.tokenizer.has_thinking:
            texts = [_upstream._lstrip(text, self.tokenizer.think_end) for text in texts]
        return texts


if __name__ == "__main__":
    cli_evaluate()
