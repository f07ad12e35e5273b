"""A GGUF file of a Llama, a Qwen2 or a Gemma 3 as a folder of mlx_lm: `gguf_to_mlx.py FILE FOLDER`.

Weights become float32, because MLX on a CPU multiplies by packed weights at a seventh of the speed.
Only one tensor at a time is in memory.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from gguf_tokenizer import write_tokenizer

__all__ = ["convert", "metadata"]

_ROWS = 8192
"""Rows of a tensor that are dequantised at a time."""

_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS = {
    "llama": {"ffn_norm": "post_attention_layernorm"},
    "qwen2": {"ffn_norm": "post_attention_layernorm"},
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
_WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}


class Array(NamedTuple):
    """An array to write, which is made only when it is due, in parts along the first axis."""

    name: str
    shape: tuple[int, ...]
    parts: Callable[[], Iterator[np.ndarray]]


def convert(source: Path, folder: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer's files into an empty folder.

    Raises ValueError for other architectures.
    """
    reader = GGUFReader(source)
    about = metadata(reader)
    architecture = about["general.architecture"]
    if architecture not in _NORMS:
        raise ValueError(f"[convert] {source} is a {architecture}, expected one of {[*_NORMS]}")
    arrays = [_array(tensor, about) for tensor in reader.tensors]
    with (folder / "model.safetensors").open("wb") as file:
        _write(file, arrays)
    config = _config(about, {array.name for array in arrays})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    write_tokenizer(about, folder)


def metadata(reader: GGUFReader) -> dict[str, Any]:
    """The metadata of the file, by name."""
    return {name: field.contents() for name, field in reader.fields.items()}


def _array(tensor: ReaderTensor, about: Mapping[str, Any]) -> Array:
    architecture = about["general.architecture"]
    shape = tuple(int(size) for size in reversed(tensor.shape))
    heads = {
        "attn_q": about[f"{architecture}.attention.head_count"],
        "attn_k": about[f"{architecture}.attention.head_count_kv"],
    }.get(tensor.name.split(".")[-2] if architecture == "llama" else "")

    def parts() -> Iterator[np.ndarray]:
        step = len(tensor.data) if heads is not None else _ROWS
        for start in range(0, len(tensor.data), step):
            rows = dequantize(tensor.data[start : start + step], tensor.tensor_type)
            if heads is not None:
                rows = _halves(rows, heads)
            # Gemma's RMSNorm multiplies by 1 + weight.
            yield rows - 1 if architecture == "gemma3" and len(shape) == 1 else rows

    return Array(_name(tensor.name, architecture), shape, parts)


def _name(name: str, architecture: str) -> str:
    """mlx_lm's name of a tensor."""
    *block, part, suffix = name.split(".")
    if not block:
        return f"{_WHOLE[part]}.{suffix}"
    return f"model.layers.{block[1]}.{(_PARTS | _NORMS[architecture])[part]}.{suffix}"


def _halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of query or key weights; the file interleaves the two halves of each head."""
    split = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(rows.shape)


def _write(file: BinaryIO, arrays: Sequence[Array]) -> None:
    """The arrays in the format safetensors: the header's length, the header, the bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for array in arrays:
        start = end
        end += 4 * int(np.prod(array.shape))
        header[array.name] = {
            "dtype": "F32",
            "shape": array.shape,
            "data_offsets": (start, end),
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for array in arrays:
        for part in array.parts():
            file.write(np.ascontiguousarray(part, dtype=np.float32).tobytes())


def _config(about: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    """The content of config.json, as in transformers."""
    architecture = about["general.architecture"]

    def of(name: str, default: Any = None) -> Any:
        return about.get(f"{architecture}.{name}", default)

    heads, width = of("attention.head_count"), of("embedding_length")
    size = of("attention.key_length", width // heads)
    config = {
        "torch_dtype": "float32",
        "hidden_size": width,
        "num_hidden_layers": of("block_count"),
        "intermediate_size": of("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": of("attention.head_count_kv"),
        "head_dim": size,
        "rms_norm_eps": of("attention.layer_norm_rms_epsilon"),
        "rope_theta": of("rope.freq_base"),
        "max_position_embeddings": of("context_length"),
        "vocab_size": len(about["tokenizer.ggml.tokens"]),
        "bos_token_id": about["tokenizer.ggml.bos_token_id"],
        "eos_token_id": about["tokenizer.ggml.eos_token_id"],
        "tie_word_embeddings": not any(name.startswith("lm_head") for name in names),
    }
    if architecture != "gemma3":
        name = f"{architecture.capitalize()}ForCausalLM"
        return {"model_type": architecture, "architectures": [name], **config}
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        **config,
        "query_pre_attn_scalar": size,
        "rope_local_base_freq": 10000.0,
        "sliding_window": of("attention.sliding_window"),
        "sliding_window_pattern": 6,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    convert(given.file, given.folder)
