"""Chat templates of the shape that families of models have, in a few lines each, and answers.

They name the special tokens, and put system prompt, tools, calls and thoughts where the families
do; what the real templates say beside that is left out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import llama

from mlx_h2o.demo import model_path


@dataclass(frozen=True)
class Family:
    """One that people run.

    special: its special tokens, the last of which ends an answer.
    template: of its chats.
    holds: parts of a prompt of the messages below, in order.
    answer: what such a model writes.
    content, reasoning: what of that a client is told.
    calls: whether tools are served, and the answer calls one.
    thinks: whether the prompt itself begins a thought.
    """

    special: tuple[str, ...]
    template: str
    holds: tuple[str, ...]
    answer: str
    content: str = "It rains."
    reasoning: str = ""
    calls: bool = False
    thinks: bool = False


_TOOLS = (
    "{% if tools %}<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>"
    "{% endif %}"
)
_CALLS = (
    "{% for tool_call in m.tool_calls or [] %}{% set tool_call = tool_call.function %}\n"
    '<tool_call>\n{"name": "{{ tool_call.name }}", "arguments": '
    "{{ tool_call.arguments | tojson }}}\n</tool_call>{% endfor %}"
)
_THOUGHT = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.first and m.role == 'system' %}"
    + _TOOLS + "{% endif %}" + _THOUGHT + "{{ m.content }}" + _CALLS + "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)  # fmt: skip
_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
_USER, _HELPER = "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"
_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
_ARGUMENTS = '{"city": "Bonn"}'

FAMILIES = {
    "llama3": Family(
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>"
        "\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}"
        "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        ("<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>",
         "user<|end_header_id|>\n\nRain?<|eot_id|><|start_header_id|>assistant<|end_header_id|>"),
        "It rains.<|eot_id|>",
    ),
    "qwen2.5": Family(
        ("<|im_start|>", "<|endoftext|>", "<|im_end|>"), _CHATML,
        ("<|im_start|>system\n<tools>", "Be brief.<|im_end|>", "Rain?<|im_end|>", _ARGUMENTS,
         "<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>assistant\n"),
        f"It rains.{_CALL}<|im_end|>", calls=True,
    ),
    "qwen3": Family(
        ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_start|>", "<|im_end|>"),
        _CHATML,
        ("<tools>", "Rain?<|im_end|>", "<think>\nA tool.\n</think>", _ARGUMENTS),
        f"<think>\nLet me see.</think>It rains.{_CALL}<|im_end|>",
        reasoning="\nLet me see.", calls=True,
    ),
    "qwen3-coder": Family(
        ("<tool_call>", "</tool_call>", "<|im_start|>", "<|im_end|>"),
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}" + _TOOLS +
        "{% for one in m.tool_calls or [] %}\n<tool_call>\n<function={{ one.function.name }}>"
        "{% for name, value in one.function.arguments.items() %}\n<parameter={{ name }}>\n"
        "{{ value }}\n</parameter>{% endfor %}\n</function>\n</tool_call>{% endfor %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        ("<tools>", "Rain?", "<parameter=city>\nBonn\n</parameter>", "sunny"),
        "It rains.<tool_call>\n<function=weather>\n<parameter=city>\nBonn\n</parameter>\n"
        "</function>\n</tool_call><|im_end|>", calls=True,
    ),
    "gemma3": Family(
        ("<bos>", "<start_of_turn>", "<end_of_turn>"),
        "<bos>{% set first = messages[0].content ~ '\n\n' if messages[0].role == 'system' "
        "else '' %}"
        "{% for m in messages if m.role != 'system' %}<start_of_turn>"
        "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ first if loop.first else '' }}"
        "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        ("<bos><start_of_turn>user\nBe brief.\n\nRain?<end_of_turn>", "<start_of_turn>model\n"),
        "It rains.<end_of_turn>",
    ),
    "mistral": Family(
        ("<s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]",
         "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>"),
        "<s>{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
        "{% for m in messages %}{% if m.tool_calls %}[TOOL_CALLS][{% for one in m.tool_calls %}"
        "{{ one.function | tojson }}{% endfor %}]</s>{% elif m.role == 'tool' %}[TOOL_RESULTS]"
        "{{ m.content }}[/TOOL_RESULTS]{% elif m.role == 'assistant' %}{{ m.content }}</s>"
        "{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}",
        ("<s>[AVAILABLE_TOOLS]", "Rain?[/INST]", "[TOOL_CALLS]", _ARGUMENTS, "sunny"),
        'It rains.[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Bonn"}}]</s>', calls=True,
    ),
    "phi4": Family(
        ("<|im_start|>", "<|im_sep|>", "<|im_end|>"),
        "{% for m in messages %}<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}",
        ("<|im_start|>system<|im_sep|>Be brief.<|im_end|>", "Rain?", "assistant<|im_sep|>"),
        "It rains.<|im_end|>",
    ),
    "smollm2": Family(
        ("<|im_start|>", "<|im_end|>"),
        "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\n"
        "You help.<|im_end|>\n{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        ("<|im_start|>system\nBe brief.<|im_end|>", "Rain?<|im_end|>\n<|im_start|>assistant\n"),
        "It rains.<|im_end|>",
    ),
    "smollm3": Family(
        ("<think>", "</think>", "<|im_start|>", "<|im_end|>"),
        "{% if enable_thinking is not defined or enable_thinking %}{% set mode = '/think' %}"
        "{% else %}{% set mode = '/no_think' %}{% endif %}<|im_start|>system\nMode: {{ mode }}\n"
        "<|im_end|>\n" + _CHATML,
        ("Mode: /think", "<tools>", "Rain?", "<think>\nA tool.\n</think>", "sunny"),
        f"<think>\nLet me see.</think>It rains.{_CALL}<|im_end|>",
        reasoning="\nLet me see.", calls=True,
    ),
    "gpt-oss": Family(
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"),
        "<|start|>system<|message|>Valid channels: analysis, final.<|end|>{% for m in messages %}"
        "<|start|>{{ 'developer' if m.role == 'system' else m.role }}"
        "{{ '<|channel|>final' if m.role == 'assistant' else '' }}<|message|>{{ m.content }}"
        "<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        ("<|start|>developer<|message|>Be brief.<|end|>", "Rain?<|end|><|start|>assistant"),
        "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>final"
        "<|message|>It rains.<|return|>", reasoning="Let me see.",
    ),
    "glm": Family(
        ("[gMASK]", "<sop>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>",
         "</arg_key>", "<arg_value>", "</arg_value>", "<|system|>", "<|assistant|>",
         "<|observation|>", "<|user|>"),
        "[gMASK]<sop>{% for m in messages %}{{ {'tool': '<|observation|>'}.get(m.role, "
        "'<|' ~ m.role ~ '|>') }}\n{% if loop.first %}" + _TOOLS + "{% endif %}"
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>\n{% endif %}"
        "{{ m.content }}{% for one in m.tool_calls or [] %}\n<tool_call>{{ one.function.name }}\n"
        "{% for name, value in one.function.arguments.items() %}<arg_key>{{ name }}</arg_key>\n"
        "<arg_value>{{ value }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
        ("[gMASK]<sop><|system|>\n<tools>", "<|user|>\nRain?", "<think>A tool.</think>",
         "<arg_value>Bonn</arg_value>", "<|observation|>\nsunny<|assistant|>\n"),
        "<think>Let me see.</think>It rains.<tool_call>weather\n<arg_key>city</arg_key>\n"
        "<arg_value>Bonn</arg_value>\n</tool_call><|user|>", reasoning="Let me see.", calls=True,
    ),
    "deepseek": Family(
        ("<begin>", "<think>", "</think>", _USER, _HELPER, _END),
        "<begin>{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
        "{% for m in messages %}{% if m.role == 'user' %}" + _USER + "{{ m.content }}"
        "{% elif m.role == 'assistant' %}" + _HELPER + "{{ m.content }}" + _END +
        "{% endif %}{% endfor %}{% if add_generation_prompt %}" + _HELPER + "<think>\n{% endif %}",
        (f"<begin>Be brief.{_USER}Rain?", f"{_HELPER}<think>\n"),
        f"Let me see.</think>It rains.{_END}", reasoning="Let me see.", thinks=True,
    ),
}  # fmt: skip


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
    model = llama.Model(llama.ModelArgs(**args))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(args | {"eos_token_id": args["vocab_size"] - 1}))
    return str(folder)
