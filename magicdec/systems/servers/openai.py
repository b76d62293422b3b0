"""OpenAI's interface for streamed completions, as vLLM, llama.cpp, SGLang and others have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from magicdec.systems.servers.server_format import (
    AskedText,
    ScoredToken,
    ServerApi,
    ServerEvent,
    TextScoring,
    part_of,
)

TOKEN_ID = "token_id:"  # before the id, in the place of a token's text


def body_of(asked: AskedText) -> dict[str, Any]:
    """With fields of vLLM's beside OpenAI's: token ids, and no early end."""
    prompt = asked.prompt if isinstance(asked.prompt, str) else list(asked.prompt)
    body: dict[str, Any] = {"model": asked.model, "prompt": prompt}
    body |= {"max_tokens": asked.max_tokens, "stream": True} | asked.sampling.fields()
    body |= {"return_token_ids": True, "stream_options": {"include_usage": True}}
    if asked.sampling.seed is not None:
        body |= {"seed": asked.sampling.seed}
    if asked.num_logprobs:
        body |= {"logprobs": asked.num_logprobs, "return_tokens_as_token_ids": True}
    if asked.salt is not None:
        body |= {"cache_salt": asked.salt}
    return body | (
        {"ignore_eos": True, "min_tokens": asked.max_tokens} if asked.ignores_eos else {}
    )


def scores_of(event: ServerEvent) -> list[ScoredToken]:
    """`logprobs` of completions, whose tokens are named by their ids."""
    found = list[ScoredToken]()
    for choice in event.get("choices") or ():
        part = part_of(choice, "logprobs")
        if part is None:
            continue
        tops = part["top_logprobs"] or [{}] * len(part["tokens"])
        for token, own, top in zip(part["tokens"], part["token_logprobs"], tops, strict=True):
            known = {_id_of(text): float(value) for text, value in top.items()}
            found.append(ScoredToken(_id_of(token), known | {_id_of(token): float(own)}))
    return found


def _id_of(token: str) -> int:
    if not token.startswith(TOKEN_ID):
        raise ValueError(f"a token {token!r} without its id")
    return int(token.removeprefix(TOKEN_ID))


def scoring_body(
    model: str | None, ids: Sequence[int], first: int, num_logprobs: int
) -> dict[str, Any]:
    """vLLM scores the whole prompt, and reads no KV that it had of it."""
    body: dict[str, Any] = {"model": model, "prompt": list(ids), "max_tokens": 1}
    return body | {"temperature": 0, "prompt_logprobs": num_logprobs}


def scored_text(answer: ServerEvent, ids: Sequence[int], first: int) -> list[ScoredToken]:
    """`prompt_logprobs`: for each token after the first an object by token id."""
    places: Sequence[Mapping[str, Any]] = answer["choices"][0]["prompt_logprobs"]
    if len(places) != len(ids):
        raise ValueError(f"prompt_logprobs of {len(places)} tokens, not of {len(ids)}")
    return [
        ScoredToken(ids[i], {int(key): float(entry["logprob"]) for key, entry in places[i].items()})
        for i in range(first, len(ids))
    ]


def tokenize_body(model: str | None, text: str) -> dict[str, Any]:
    return {"model": model, "prompt": text, "add_special_tokens": False}


OPENAI = ServerApi(
    "/completions",
    body_of,
    lambda event, num_before: event,
    scores_of,
    tokenize_body,
    TextScoring(scoring_body, scored_text),
)
