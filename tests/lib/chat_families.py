"""Families of chat models that people run (``chat_families.toml``), and small models of them."""

import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from mlx_lm.models import llama
from mlx_lm.utils import save_model

from mlx_h2o.demo import model_path


@dataclass(frozen=True)
class Family:
    """A family of chat models.

    special: its special tokens, the last of which ends an answer.
    template: its chat template.
    holds: parts of a prompt, in order.
    answer: what such a model writes.
    content, reasoning: the parts of the answer that a client gets.
    calls: whether tools are served, and the answer calls one.
    thinks: whether the prompt itself begins a thought.
    """

    special: list[str]
    template: str
    holds: list[str]
    answer: str
    content: str = "It rains."
    reasoning: str = ""
    calls: bool = False
    thinks: bool = False


_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def _whole(text: str) -> str:
    """The text with its named parts inserted."""
    return re.sub(r"@(\w+)", lambda part: _whole(_TABLE["parts"][part[1]]), text)


FAMILIES = {
    name: Family(**given | {key: _whole(given[key]) for key in ("template", "answer")})
    for name, given in _TABLE["families"].items()
}


def saved(family: Family, folder: Path) -> str:
    """A small Llama of random weights with the demo's words, these special tokens and template."""
    texts = json.loads((model_path() / "tokenizer.json").read_text())
    size = 1 + max(texts["model"]["vocab"].values())
    size = max(size, 1 + max((one["id"] for one in texts["added_tokens"]), default=0))
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for place, text in enumerate(family.special):
        said = text.startswith(("<think", "</think", "<tool_c", "</tool_c", "<arg_", "</arg_"))
        texts["added_tokens"].append(
            {"id": size + place, "content": text, "special": not said} | plain
        )
    (folder / "tokenizer.json").write_text(json.dumps(texts))
    settings = json.loads((model_path() / "tokenizer_config.json").read_text())
    settings |= {"eos_token": family.special[-1], "chat_template": family.template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    mx.random.seed(1)
    args = {
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32,
        "num_attention_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": size + len(family.special),
    }  # fmt: skip
    save_model(folder, llama.Model(llama.ModelArgs(**args)))
    (folder / "config.json").write_text(json.dumps(args | {"eos_token_id": args["vocab_size"] - 1}))
    return str(folder)
