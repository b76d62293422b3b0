"""OpenAI's interface for streamed completions, as vLLM, llama.cpp, SGLang and others have it."""

from __future__ import annotations

from typing import Any

from magicdec.systems.servers.server_format import AskedText, ServerApi


def body_of(asked: AskedText) -> dict[str, Any]:
    """With fields of vLLM's beside OpenAI's: token ids, and no early end."""
    prompt = asked.prompt if isinstance(asked.prompt, str) else list(asked.prompt)
    body: dict[str, Any] = {"model": asked.model, "prompt": prompt}
    body |= {"max_tokens": asked.max_tokens, "temperature": 0, "stream": True}
    body |= {"return_token_ids": True, "stream_options": {"include_usage": True}}
    return body | (
        {"ignore_eos": True, "min_tokens": asked.max_tokens} if asked.ignores_eos else {}
    )


OPENAI = ServerApi("/completions", body_of, lambda event, num_before: event)
