"""From what clients send to tokens."""

from __future__ import annotations

from typing import Any

from .schema import ChatBody

__all__ = ["of_chat"]

PLAIN = (
    "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""For models without a chat template."""


def of_chat(tokenizer: Any, body: ChatBody, settings: dict[str, Any]) -> tuple[list[int], str]:
    """The tokens of a chat, and the kind of text with which its answer begins.

    Args:
        settings: of the chat template, where the request has no others.

    Raises:
        ValueError: tools that the model does not know, or messages that its template refuses.
    """
    messages = [message.for_template() for message in body.messages]
    for message in messages:
        if message["role"] == "developer":
            message["role"] = "system"
        if "reasoning" in message:
            message["reasoning_content"] = message["reasoning"]
    tools = body.tools_given
    if tools and not tokenizer.has_tool_calling:
        raise ValueError("tools is given, and the chat template of this model knows no tools.")
    given = settings | body.chat_template_kwargs
    if not tokenizer.has_chat_template:
        given["chat_template"] = PLAIN
    if tools and body.tool_choice == "auto":
        given["tools"] = tools
    try:
        made = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **given)
    except Exception as error:  # of templates, which are programs of others
        raise ValueError(f"messages do not suit the model's chat template: {error}.") from error
    tokens: list[int] = list(made)
    return tokens, tokenizer.response_initial_state or _first_kind(tokenizer, tokens)


def _first_kind(tokenizer: Any, tokens: list[int]) -> str:
    if not tokenizer.has_thinking:
        return "normal"
    begun = tokenizer.rfind_think_start(tokens) > tokenizer.rfind_think_end(tokens)
    return "reasoning" if begun else "normal"
