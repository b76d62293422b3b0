"""The forwards that `magicdec latency` times: a decode step, verifications, drafts, at fixed cache
lengths, started by the host or captured and replayed.

Owns what one of them is and how it is undone. Must not know how it is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from magicdec.config.sections import KVSection
from magicdec.decoding.recorder import Eager, Recorder, Work, record
from magicdec.drafting.draft_kv import DraftKV
from magicdec.drafting.policies.policy import make_draft_kv
from magicdec.kv.cache import BatchRows
from magicdec.kv.forward_counts import ForwardCounts
from magicdec.latency.rows import Cell, Grid
from magicdec.request import Batch
from magicdec.runner import ModelRunner
from magicdec.sampling.metadata import SamplingMetadata
from magicdec.sampling.model_tokens import greedy_tokens


@dataclass
class Forward:
    """A forward that can be repeated: `run` takes it up to the chosen tokens, `undo` puts the
    length of the cache back. `prepare` and `undo` are not timed."""

    cell: Cell
    run: Callable[[], Tensor]
    undo: Callable[[], None]
    prepare: Callable[[], None] = lambda: None
    seconds: list[float] = field(default_factory=list)
    counts: ForwardCounts | None = None  # of one forward, the same each time


def make_forwards(
    runner: ModelRunner,
    batch: Batch,
    grid: Grid,
    context: int,
    recorder: Recorder = Eager(),
) -> Iterator[Forward]:
    """Decode, verify by T, drafts, in the order of the grid. A policy that needs attention weights
    has forwards of its own: a verify forward that also returns them, and a draft's first forward
    after it, which chooses what all drafts of the step read."""
    drafts = [(kv, make_draft_kv(runner, kv)) for kv in grid.drafts]
    watching = {kv.policy: draft_kv for kv, draft_kv in reversed(drafts) if watches(draft_kv)}
    for T in grid.new_tokens:
        cell = Cell("decode" if T == 1 else "verify", runner.num_rows, context, T)
        yield target_forward(runner, batch, cell, None, recorder)
        for policy, draft_kv in watching.items() if T > 1 else ():
            watched = Cell(cell.phase, cell.B, context, T, kv_policy=policy)
            yield target_forward(runner, batch, watched, draft_kv, recorder)
    for kv, draft_kv in drafts:
        draft_kv.admit(batch.requests)
        if watches(draft_kv):
            yield draft_forward(draft_kv, batch, kv, context, "first_draft", recorder)
        yield draft_forward(draft_kv, batch, kv, context, "draft", recorder)


def watches(draft_kv: DraftKV) -> bool:
    """Whether the choice of a policy follows from what a verification shows."""
    return draft_kv.watch is not None or draft_kv.watch_queries is not None


def new_ids(runner: ModelRunner, T: int) -> Tensor:
    """Random tokens [B, T], the same on every rank."""
    generator = torch.Generator().manual_seed(T)
    shape = runner.num_rows, T
    ids = torch.randint(runner.model.config.vocab_size, shape, generator=generator)
    return ids.to(runner.device)


def target_forward(
    runner: ModelRunner, batch: Batch, cell: Cell, watching: DraftKV | None, recorder: Recorder
) -> Forward:
    """The target over its full cache; `watching` is shown its attention."""
    ids, held = new_ids(runner, cell.T), list(runner.cache.lengths)
    rows = rows_of(batch, runner, recorder)
    watch = None if watching is None else watching.watch
    watch_queries = None if watching is None else watching.watch_queries

    def run() -> Tensor:
        logits = runner.forward(ids, rows, watch=watch, watch_queries=watch_queries)
        return greedy_tokens(runner, logits, SamplingMetadata())

    return Forward(
        cell,
        repeatable(run, runner, recorder),
        lambda: runner.truncate(batch.rows, held),
    )


def draft_forward(
    draft_kv: DraftKV,
    batch: Batch,
    kv: KVSection,
    context: int,
    phase: str,
    recorder: Recorder,
) -> Forward:
    """One draft forward over what the policy has chosen. A `first_draft` comes after a verification
    and makes the choice."""
    runner = draft_kv.runner
    ids, rows = new_ids(runner, 1), rows_of(batch, runner, recorder)
    host_rows = BatchRows.of(batch.rows, runner.device)
    held, committed = draft_kv.lengths(host_rows), draft_kv.lengths(rows)
    budget = None if kv.budget == -1 else kv.budget
    cell = Cell(phase, runner.num_rows, context, 1, budget, kv.policy)

    def run() -> Tensor:
        # The choice belongs to the lengths that it was made for: new ones make a new choice.
        is_new = phase == "first_draft" and recorder.captures
        lengths = draft_kv.lengths(rows) if is_new else committed
        logits = draft_kv.forward(ids, rows, lengths)
        return greedy_tokens(runner, logits, SamplingMetadata())

    # What a captured verification showed lies in memory that captures share: it is copied now.
    draft_kv.commit(host_rows, held)
    forward = Forward(
        cell, repeatable(run, runner, recorder), lambda: draft_kv.rewind(host_rows, held)
    )
    if phase == "first_draft" and not recorder.captures:
        forward.prepare = lambda: draft_kv.commit(host_rows, held)
    return forward


def rows_of(batch: Batch, runner: ModelRunner, recorder: Recorder) -> BatchRows:
    """The rows of `batch`, whose lengths a captured forward finds on the device."""
    return BatchRows.of(batch.rows, runner.device, max_tail=1 if recorder.captures else None)


@torch.inference_mode()
def repeatable(run: Callable[[], Tensor], runner: ModelRunner, recorder: Recorder) -> Work:
    return record(recorder, run, [runner.cache.seq_lens], [runner.counts])
