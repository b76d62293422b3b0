"""SpeculationMetrics: what pipelined speculation launched and skipped in a pass, and how the ranks
spent their time. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from magicdec.records.fields import Part, recorded


@dataclass(frozen=True, kw_only=True)
class SpeculationMetrics(Part):
    """Numbers of all requests together. Shares of time are of the time between the first token and
    the last."""

    runs: int = recorded("runs that were launched, prompts included", label="runs")
    speculative_runs: int = recorded("those with drafted tokens", label="with drafts")
    invalid_runs: int = recorded(
        "cancelled, because none of their rows could be right any more", label="invalid"
    )
    skipped_before: int = recorded(
        "runs that a stage skipped before its first layer; summed over the stages",
        label="skipped before a stage",
    )  # fmt: skip
    skipped_inside: int = recorded(
        "runs that a stage stopped between its layers; summed over the stages",
        label="skipped inside",
    )  # fmt: skip
    layers_computed: int = recorded("layers that stages computed for runs", label="layers computed")
    layers_skipped: int = recorded("layers that they skipped", label="layers skipped")
    drafted: int = recorded("tokens that were launched as drafts", label="drafted")
    accepted: int = recorded("committed tokens that had been launched as drafts", label="accepted")
    acceptance_rate: float | None = recorded(
        "`accepted / drafted`", label="acceptance, %", digits=1, scale=100,
        null="if nothing was drafted",
    )  # fmt: skip
    failed_attempts: int = recorded(
        "attempts to draft whose first candidate was less probable than the threshold",
        label="failed attempts",
    )  # fmt: skip
    least_margin: float | None = recorded(
        "by how much the largest of the logits by which a token is chosen exceeds the second, at "
        "the committed token where this is least; rounding can change a token with a small one",
        null="of stages that sleep",
    )  # fmt: skip
    mean_in_flight: float = recorded(
        "runs that are under way; mean over the time", label="runs in flight, mean", digits=2
    )
    most_in_flight: int = recorded("the most of them at one time", label="runs in flight, most")
    num_layers: list[int] = recorded("layers of the target on each rank")
    draft_rank: int | None = recorded(
        "the rank that drafts; of several, the first", null="if no mode drafts"
    )
    draft_ranks: list[int] | None = recorded(
        "all ranks that draft, which share each layer", null="if no mode drafts"
    )
    busy: list[float] = recorded(
        "share of the time in which a rank computes layers or drafts; the rest is idle",
        label="busy by rank, %", scale=100,
    )  # fmt: skip
    idle_s: list[float] = recorded("the rest in seconds, of each rank", "s")
    stage_ms: list[float] = recorded(
        "mean time of a stage for a run of decoded tokens that it did not skip", "ms",
        label="stages, ms", digits=2,
    )  # fmt: skip
    draft_ms: float | None = recorded(
        "mean time of a step of the drafter, on the first of its ranks", "ms",
        label="draft step, ms", digits=2,
        null="if nothing was drafted",
    )  # fmt: skip
    draft_busy: float = recorded(
        "share of the time in which the drafter drafts", label="drafting, %", scale=100
    )
    link_ms: float | None = recorded(
        "mean time from the end of a run of decoded tokens at a stage to its begin at the next, "
        "which was idle",
        "ms", label="link, ms", digits=2, null="with one stage",
    )  # fmt: skip
