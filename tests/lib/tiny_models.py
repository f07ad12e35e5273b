"""Tiny random models of mlx_lm's own classes, and the greedy tokens of stock mlx_lm."""

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.generate import generate_step
from mlx_lm.models import gemma3_text, llama, qwen3
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

VOCABULARY = 64
SMALL = {"intermediate_size": 48, "rms_norm_eps": 1e-6, "vocab_size": VOCABULARY}


def tiny_qwen3(
    *, layers: int = 2, heads: int = 4, kv_heads: int = 2, head_dim: int = 16, seed: int = 7
):
    """A float32 Qwen3 with large random weights, so that attention is not flat."""
    mx.random.seed(seed)
    args = qwen3.ModelArgs(
        model_type="qwen3", hidden_size=32, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head_dim, max_position_embeddings=8192,
        rope_theta=10000.0, tie_word_embeddings=True, **SMALL,
    )  # fmt: skip
    return spread(qwen3.Model(args))


def tiny_llama(*, heads: int = 4, kv_heads: int = 4, width: int = 32, seed: int = 8):
    """A float32 Llama of two layers, whose ``make_cache`` ignores max_kv_size."""
    mx.random.seed(seed)
    args = llama.ModelArgs(
        model_type="llama", hidden_size=width, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=kv_heads, **SMALL,
    )  # fmt: skip
    return spread(llama.Model(args))


def tiny_gemma3(
    *, layers: int = 3, heads: int = 2, head_dim: int = 16, window: int = 8, pattern: int = 3
):
    """A Gemma 3 with sliding windows in all layers except every ``pattern``-th."""
    mx.random.seed(1)
    args = gemma3_text.ModelArgs(
        model_type="gemma3_text", hidden_size=32, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=1, head_dim=head_dim,
        sliding_window=window, sliding_window_pattern=pattern, **SMALL,
    )  # fmt: skip
    model = gemma3_text.Model(args)
    mx.eval(model.parameters())
    return model


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Words "t0" to "t63"; no token ends a text."""
    words = WordLevel({f"t{token}": token for token in range(VOCABULARY)}, unk_token="t0")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def spread(model):
    """The model with large weights, so that attention is not flat."""
    model.update(tree_map(lambda w: 3 * w if w.ndim == 2 else w, model.parameters()))
    mx.eval(model.parameters())
    return model


def random_prompt(length: int, *, seed: int = 3) -> list[int]:
    """Random token ids for the tiny models."""
    return mx.random.randint(1, VOCABULARY, (length,), key=mx.random.key(seed)).tolist()


def stock_tokens(model, prompt: list[int], count: int) -> list[int]:
    """What mlx_lm itself generates greedily after ``prompt``."""
    return [int(t) for t, _ in generate_step(mx.array(prompt), model, max_tokens=count)]
