"""How llama.cpp's server reports its drafts: two sums in the `timings` of the last event of an
answer, and by counters with the names of vLLM's (`tools/server/server-task.cpp` and
`server-context.cpp`). Its own interface says the ids of tokens, which its OpenAI interface lacks.
"""

from __future__ import annotations

from typing import Any

from magicdec.records.acceptance import ReportedCounts
from magicdec.systems.servers.counters import COUNTER, Counters, drafts_counted
from magicdec.systems.servers.server_format import (
    NOTHING,
    AskedText,
    ScoredToken,
    ServerApi,
    ServerEvent,
    ServerFormat,
    cached_tokens,
    count_in,
    part_of,
)

PREFIX = "llamacpp:"


def read(event: ServerEvent) -> ReportedCounts | None:
    """`timings.draft_n` and `draft_n_accepted`, which are left out if nothing was drafted. How many
    verifications judged them is not said."""
    timings = part_of(event, "timings")
    if timings is None or "predicted_n" not in timings:
        return None
    if "draft_n" not in timings:
        return NOTHING
    return ReportedCounts(count_in(timings, "draft_n"), count_in(timings, "draft_n_accepted"))


def counted_drafts(counted: Counters, num_tokens: int) -> ReportedCounts:
    """Raises ValueError for a server of a version that counts no drafts."""
    counts = drafts_counted(PREFIX, counted)
    if counts is None:
        raise ValueError("this version of llama.cpp counts no drafts")
    return counts


LLAMA_CPP = ServerFormat(read, PREFIX, f"{PREFIX}tokens_predicted{COUNTER}", counted_drafts)


def body_of(asked: AskedText) -> dict[str, Any]:
    """Log-probabilities are those before temperature, `top_k` and `top_p`."""
    prompt = asked.prompt if isinstance(asked.prompt, str) else list(asked.prompt)
    body: dict[str, Any] = {"prompt": prompt, "n_predict": asked.max_tokens}
    body |= {"stream": True, "return_tokens": True, "cache_prompt": asked.keeps_prompt}
    body |= asked.sampling.fields()
    if asked.sampling.seed is not None:
        body |= {"seed": asked.sampling.seed}
    if asked.num_logprobs:
        body |= {"n_probs": asked.num_logprobs}
    return body | {"ignore_eos": asked.ignores_eos}


def scores_of(event: ServerEvent) -> list[ScoredToken]:
    """`completion_probabilities` of new tokens. The last event of a stream, which has none,
    repeats those of all."""
    if not event.get("tokens"):
        return []
    return [
        ScoredToken(
            int(place["id"]),
            {int(top["id"]): float(top["logprob"]) for top in place["top_logprobs"]}
            | {int(place["id"]): float(place["logprob"])},
        )
        for place in event.get("completion_probabilities") or ()
    ]


def tokenize_body(model: str | None, text: str) -> dict[str, Any]:
    return {"content": text, "add_special": False}


def as_openai(event: ServerEvent, num_before: int) -> ServerEvent:
    """An event of `/completion`, whose `tokens` are new ones. A token that ends inside a character
    has no event; how many tokens there are so far tells of it."""
    tokens = event.get("tokens")
    predicted = event.get("tokens_predicted")
    choice = {"text": event.get("content"), "token_ids": tokens}
    if isinstance(tokens, list) and isinstance(predicted, int):
        choice["num_lost"] = max(0, predicted - num_before - len(tokens))
    timings = part_of(event, "timings") or {}
    usage = {"completion_tokens": event.get("tokens_predicted")}
    usage |= cached_tokens(timings.get("cache_n"))
    return {"choices": [choice], "usage": usage, "timings": event.get("timings")}


COMPLETION = ServerApi(
    "/completion",
    body_of,
    as_openai,
    scores_of,
    tokenize_body,
    whole=lambda body: body | {"stream": False},
    is_at_root=True,
    is_last=lambda event: event.get("stop") is True,
)
