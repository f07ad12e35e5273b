"""The tokenizer that a GGUF file describes, as tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers import processors as after

__all__ = ["write_tokenizer"]

_NORMAL, _CONTROL = 1, 3
"""Token types: made by merging others, and special tokens that text cannot spell."""

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""What a word is in Qwen2's tokenizer (its tokenizer.json)."""

_WORDS = {
    "smollm": [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ],
    "qwen2": [
        pre_tokenizers.Split(Regex(_QWEN2), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}
"""How byte-level tokenizers split a text into words, each digit being one."""

_SPACE = "\u2581"
"""How SentencePiece writes a space."""


def write_tokenizer(about: Mapping[str, Any], folder: Path) -> None:
    """Write both files. ``about`` is the file's metadata.

    Raises ValueError for kinds other than SmolLM's and Qwen2's byte-level BPE and SentencePiece.
    """
    told = {name[15:]: each for name, each in about.items() if name.startswith("tokenizer.ggml.")}
    tokens, kind = told["tokens"], (told["model"], told.get("pre", "default"))
    if kind[0] == "gpt2" and kind[1] in _WORDS:
        made = _byte_level(tokens, told["merges"], _WORDS[kind[1]])
    elif kind[0] == "llama":
        unknown = tokens[told["unknown_token_id"]]
        made = _sentence_piece(tokens, told["token_type"], told["scores"], unknown)
    else:
        raise ValueError(
            f"[write_tokenizer] a tokenizer of {kind}, expected SmolLM's, Qwen2's or Gemma's"
        )
    bos, eos = (tokens[told[f"{name}_token_id"]] for name in ("bos", "eos"))
    made.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, type_ in zip(tokens, told["token_type"], strict=True)
            if type_ == _CONTROL
        ]
    )
    if told.get("add_bos_token", kind[0] == "llama"):
        special = [(bos, told["bos_token_id"])]
        made.post_processor = after.TemplateProcessing(single=f"{bos} $A", special_tokens=special)
    made.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "clean_up_tokenization_spaces": False,
    }
    if "tokenizer.chat_template" in about:
        config["chat_template"] = about["tokenizer.chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def _byte_level(tokens: list[str], merges: list[str], words: list[Any]) -> Tokenizer:
    """GPT-2's tokenizer, but with words of its own kind."""
    pairs = [tuple(merge.split(" ")) for merge in merges]
    made = Tokenizer(models.BPE(_numbered(tokens), pairs))
    made.pre_tokenizer = pre_tokenizers.Sequence(words)
    made.decoder = decoders.ByteLevel()
    return made


def _sentence_piece(
    tokens: list[str], types: list[int], scores: list[float], unknown: str
) -> Tokenizer:
    """BPE whose merges the file does not list: two pieces merge if their concatenation is a piece,
    the one with the best score first."""
    numbered = _numbered(tokens)
    splits = []
    for number, (token, type_) in enumerate(zip(tokens, types, strict=True)):
        if type_ != _NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = numbered.get(token[:cut]), numbered.get(token[cut:])
            if left is not None and right is not None:
                splits.append((-scores[number], left, right))
    pairs = [(tokens[left], tokens[right]) for _, left, right in sorted(splits)]
    made = Tokenizer(
        models.BPE(numbered, pairs, byte_fallback=True, fuse_unk=True, unk_token=unknown)
    )
    made.normalizer = normalizers.Replace(" ", _SPACE)
    made.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return made


def _numbered(tokens: list[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}
