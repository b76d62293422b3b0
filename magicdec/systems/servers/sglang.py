"""How SGLang reports its drafts: by `meta_info` in the last event of an answer of its own
interface `/generate`, which its OpenAI interface lacks
(`sglang/srt/managers/tokenizer_manager_components/spec_decoding_meta.py`), and by a counter of
verifications (`sglang/srt/observability/metrics_collector.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from magicdec.records.acceptance import ReportedCounts
from magicdec.systems.servers.counters import COUNTER, Counters
from magicdec.systems.servers.server_format import (
    NOTHING,
    AskedText,
    ReportedRates,
    ScoredToken,
    ServerApi,
    ServerEvent,
    ServerFormat,
    TextScoring,
    cached_tokens,
    count_in,
    counts_in,
    part_of,
    rate_in,
)

PREFIX = "sglang:"
# The names of three generations, the newest first.
ACCEPTED = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
PROPOSED = ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
HISTOGRAM = ("spec_correct_drafts_histogram", "spec_accept_histogram")


def read(event: ServerEvent) -> ReportedCounts | None:
    """Counts in `meta_info`. Of the rates that SGLang makes of them, `spec_accept_length` is
    completion tokens / verifications, with the token of the prompt and without tokens past the
    end. Every decode step verifies, so that these emit all tokens but the first."""
    info = part_of(event, "meta_info")
    if info is None or not info.get("finish_reason"):
        return None
    if not info.get("spec_verify_ct"):
        return NOTHING
    return ReportedCounts(
        count_in(info, *PROPOSED),
        count_in(info, *ACCEPTED),
        count_in(info, "spec_verify_ct"),
        max(0, count_in(info, "completion_tokens") - 1),
        counts_in(info, *HISTOGRAM),
    )


def read_rates(event: ServerEvent) -> ReportedRates | None:
    info = part_of(event, "meta_info")
    if info is None or not info.get("spec_verify_ct"):
        return None
    return ReportedRates(rate_in(info, "spec_accept_rate"), rate_in(info, "spec_accept_length"))


def counted_drafts(counted: Counters, num_tokens: int) -> ReportedCounts:
    """Verifications alone: SGLang counts neither drafts nor accepted ones. A counter appears when
    it first counts."""
    verified = counted.count(f"{PREFIX}spec_verify_calls{COUNTER}")
    return ReportedCounts(verifications=verified, emitted=num_tokens) if verified else NOTHING


SGLANG = ServerFormat(
    read,
    PREFIX,
    f"{PREFIX}generation_tokens{COUNTER}",
    counted_drafts,
    read_rates,
    f"{PREFIX}num_retracted_requests{COUNTER}",
)


def body_of(asked: AskedText) -> dict[str, Any]:
    sampling: dict[str, Any] = {"max_new_tokens": asked.max_tokens} | asked.sampling.fields()
    sampling |= {"ignore_eos": asked.ignores_eos}
    if asked.sampling.seed is not None:
        sampling |= {"sampling_seed": asked.sampling.seed}
    body: dict[str, Any] = {"sampling_params": sampling, "stream": True}
    if asked.salt is not None:
        body |= {"extra_key": asked.salt}
    if asked.num_logprobs:
        body |= {"return_logprob": True, "top_logprobs_num": asked.num_logprobs}
    is_text = isinstance(asked.prompt, str)
    return body | ({"text": asked.prompt} if is_text else {"input_ids": list(asked.prompt)})


def scores_of(event: ServerEvent) -> list[ScoredToken]:
    """`output_token_logprobs` of the event."""
    info = part_of(event, "meta_info") or {}
    return _scored(info.get("output_token_logprobs"), info.get("output_top_logprobs"))


def _scored(tokens: Any, tops: Any) -> list[ScoredToken]:
    """Entries [log-probability, id, text], of tokens and of the likeliest ones at their places."""
    if not tokens:
        return []
    tops = tops or [None] * len(tokens)
    return [
        ScoredToken(
            int(own[1]),
            {int(entry[1]): float(entry[0]) for entry in top or ()} | {int(own[1]): float(own[0])},
        )
        for own, top in zip(tokens, tops, strict=True)
    ]


def scoring_body(
    model: str | None, ids: Sequence[int], first: int, num_logprobs: int
) -> dict[str, Any]:
    """The first token that is said has no log-probability, so that it is the one before `first`."""
    body: dict[str, Any] = {"input_ids": list(ids), "return_logprob": True}
    body |= {"logprob_start_len": max(0, first - 1), "top_logprobs_num": num_logprobs}
    return body | {"sampling_params": {"max_new_tokens": 1, "temperature": 0}}


def scored_text(answer: ServerEvent, ids: Sequence[int], first: int) -> list[ScoredToken]:
    info = answer["meta_info"]
    count = len(ids) - first
    tokens = info["input_token_logprobs"][-count:]
    found = _scored(tokens, info["input_top_logprobs"][-count:])
    if [scored.token_id for scored in found] != list(ids[first:]):
        raise ValueError("input_token_logprobs of other tokens than those that were sent")
    return found


def tokenize_body(model: str | None, text: str) -> dict[str, Any]:
    return {"model": model, "prompt": text, "add_special_tokens": False}


def as_openai(event: ServerEvent, num_before: int) -> ServerEvent:
    """An event of `/generate`. Its ids are all so far, or with `--incremental-streaming-output` new
    ones; how many there are so far tells which."""
    info = part_of(event, "meta_info") or {}
    count = info.get("completion_tokens")
    ids = event.get("output_ids")
    if isinstance(ids, list) and len(ids) == count:
        ids = ids[num_before:]
    usage = {"completion_tokens": count} | cached_tokens(info.get("cached_tokens"))
    choice = {"text": event.get("text"), "token_ids": ids}
    return {"choices": [choice], "usage": usage, "meta_info": info}


GENERATE = ServerApi(
    "/generate",
    body_of,
    as_openai,
    scores_of,
    tokenize_body,
    TextScoring(scoring_body, scored_text),
    is_at_root=True,
)
