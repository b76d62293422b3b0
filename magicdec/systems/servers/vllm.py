"""How vLLM reports its drafts: with `--per-request-spec-decode-metrics` in the last event of an
answer (`vllm/entrypoints/generate/base/protocol.py`), and by counters
(`vllm/v1/spec_decode/metrics.py`), as of version 0.32.0.

vLLM counts as we do: a step with scheduled drafts is a verification, and drafts accepted past the
end count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from magicdec.records.acceptance import ReportedCounts
from magicdec.systems.servers.counters import COUNTER, Counters, drafts_counted
from magicdec.systems.servers.server_format import (
    NOTHING,
    ReportedRates,
    ServerEvent,
    ServerFormat,
    count_in,
    counts_in,
    part_of,
    rate_in,
)

PREFIX = "vllm:"


def _report_in(event: ServerEvent) -> Mapping[str, Any] | None:
    metrics = part_of(event, "metrics")
    return None if metrics is None else part_of(metrics, "speculative_decoding")


def read(event: ServerEvent) -> ReportedCounts | None:
    """`metrics.speculative_decoding`, whose single steps only the level `detailed` has."""
    found = _report_in(event)
    if found is None:
        return None
    drafted = counts_in(found, "per_step_drafted")
    accepted = counts_in(found, "per_step_accepted")
    steps = None
    if drafted is not None and accepted is not None:
        if len(drafted) != len(accepted):
            raise ValueError("per_step_drafted and per_step_accepted have not the same length")
        steps = tuple(zip(drafted, accepted, strict=True))
    return ReportedCounts(
        count_in(found, "num_draft_tokens"),
        count_in(found, "num_accepted_draft_tokens"),
        count_in(found, "num_spec_steps"),
        histogram=counts_in(found, "acceptance_histogram"),
        steps=steps,
    )


def read_rates(event: ServerEvent) -> ReportedRates | None:
    found = _report_in(event)
    if found is None:
        return None
    return ReportedRates(
        rate_in(found, "draft_acceptance_rate"), rate_in(found, "mean_acceptance_length")
    )


def counted_drafts(counted: Counters, num_tokens: int) -> ReportedCounts:
    """A server without `--speculative-config` has no counters of drafts."""
    return drafts_counted(PREFIX, counted) or NOTHING


VLLM = ServerFormat(
    read,
    PREFIX,
    f"{PREFIX}generation_tokens{COUNTER}",
    counted_drafts,
    read_rates,
    f"{PREFIX}num_preemptions{COUNTER}",
)
