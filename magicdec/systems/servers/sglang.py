"""How SGLang reports its drafts: by `meta_info` in the last event of an answer of its own
interface `/generate`, which its OpenAI interface lacks
(`sglang/srt/managers/tokenizer_manager_components/spec_decoding_meta.py`), and by a counter of
verifications (`sglang/srt/observability/metrics_collector.py`)."""

from __future__ import annotations

from typing import Any

from magicdec.records.acceptance import ReportedCounts
from magicdec.systems.servers.counters import COUNTER, Counters
from magicdec.systems.servers.server_format import (
    NOTHING,
    AskedText,
    ServerApi,
    ServerEvent,
    ServerFormat,
    cached_tokens,
    count_in,
    counts_in,
    part_of,
)

PREFIX = "sglang:"
# The names of three generations, the newest first.
ACCEPTED = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
PROPOSED = ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
HISTOGRAM = ("spec_correct_drafts_histogram", "spec_accept_histogram")


def read(event: ServerEvent) -> ReportedCounts | None:
    """Counts in `meta_info`, without the rates that SGLang makes of them: its `spec_accept_length`
    is completion tokens / verifications, with the token of the prompt and without tokens past the
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


def counted_drafts(counted: Counters, num_tokens: int) -> ReportedCounts:
    """Verifications alone: SGLang counts neither drafts nor accepted ones. A counter appears when
    it first counts."""
    verified = counted.count(f"{PREFIX}spec_verify_calls{COUNTER}")
    return ReportedCounts(verifications=verified, emitted=num_tokens) if verified else NOTHING


SGLANG = ServerFormat(read, PREFIX, f"{PREFIX}generation_tokens{COUNTER}", counted_drafts)


def body_of(asked: AskedText) -> dict[str, Any]:
    sampling: dict[str, Any] = {"max_new_tokens": asked.max_tokens, "temperature": 0}
    sampling |= {"ignore_eos": asked.ignores_eos}
    body: dict[str, Any] = {"sampling_params": sampling, "stream": True}
    is_text = isinstance(asked.prompt, str)
    return body | ({"text": asked.prompt} if is_text else {"input_ids": list(asked.prompt)})


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


GENERATE = ServerApi("/generate", body_of, as_openai, is_at_root=True)
