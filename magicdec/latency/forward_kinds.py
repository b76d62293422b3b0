"""The forwards that `magicdec latency` times: a decode step, verifications, drafts, at fixed cache
lengths, started by the host or recorded.

Owns what one of them is and how it is undone. Must not know how it is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from magicdec.config.sections import KVSection
from magicdec.decoding.choosing import Choosing
from magicdec.decoding.device_batch import DeviceBatch
from magicdec.decoding.reader import Reader, make_reader
from magicdec.decoding.recorded import record
from magicdec.decoding.strategy import Recorder, choose
from magicdec.kv.device_rows import Rows
from magicdec.latency.grid import Grid
from magicdec.latency.rows import Cell
from magicdec.request import Batch
from magicdec.runner import ForwardCounts, ModelRunner, Watch


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
    recorder: Recorder | None = None,
) -> Iterator[Forward]:
    """Decode, verify by T, drafts in the order of the grid; recorded, if there is a recorder. A
    policy that watches verification has forwards of its own: a verify forward that also tells where
    its attention went, and a draft's first forward after it, which chooses what all drafts of the
    step read."""
    readers = [(kv, make_reader(runner, kv)) for kv in grid.drafts]
    watches = {kv.policy: r.watch for kv, r in reversed(readers) if r.watch is not None}
    for T in grid.new_tokens:
        cell = Cell("decode" if T == 1 else "verify", runner.num_rows, context, T)
        yield target_forward(runner, batch, cell, None, recorder)
        for policy, watch in watches.items() if T > 1 else ():
            watched = Cell(cell.phase, cell.B, context, T, kv_policy=policy)
            yield target_forward(runner, batch, watched, watch, recorder)
    for kv, reader in readers:
        reader.begin(batch)
        if reader.watch is not None:
            yield draft_forward(reader, batch, kv, context, "first_draft", recorder)
        yield draft_forward(reader, batch, kv, context, "draft", recorder)


def new_ids(runner: ModelRunner, T: int) -> Tensor:
    """Random tokens [B, T], the same on every rank."""
    generator = torch.Generator().manual_seed(T)
    shape = runner.num_rows, T
    ids = torch.randint(runner.model.config.vocab_size, shape, generator=generator)
    return ids.to(runner.device)


def target_forward(
    runner: ModelRunner,
    batch: Batch,
    cell: Cell,
    watch: Watch | None = None,
    recorder: Recorder | None = None,
) -> Forward:
    """The target over its full cache."""
    ids, held = new_ids(runner, cell.T), list(runner.cache.lengths)
    rows = rows_of(batch, runner, recorder)

    def run() -> Tensor:
        return choose(runner, runner.forward(ids, rows, watch=watch), Choosing())

    again = run if recorder is None else recorded(run, runner, recorder)
    return Forward(cell, again, lambda: runner.truncate(batch.rows, held))


def draft_forward(
    reader: Reader,
    batch: Batch,
    kv: KVSection,
    context: int,
    phase: str = "draft",
    recorder: Recorder | None = None,
) -> Forward:
    """One draft forward over what the reader has chosen; a `first_draft` finds a verification just
    ended, and chooses."""
    runner, held = reader.runner, reader.lengths(batch.rows)
    ids, rows = new_ids(runner, 1), rows_of(batch, runner, recorder)
    settled = held if recorder is None else reader.lengths(rows)
    budget = None if kv.budget == -1 else kv.budget
    cell = Cell(phase, runner.num_rows, context, 1, budget, kv.policy)

    def run() -> Tensor:
        # A choice is made for lengths that have not been seen before.
        is_new = phase == "first_draft" and recorder is not None
        lengths = reader.lengths(rows) if is_new else settled
        return choose(runner, reader.forward(ids, rows, lengths), Choosing())

    forward = Forward(cell, run, lambda: reader.rewind(batch.rows, held))
    if recorder is not None:
        # What a recorded verification saw lies in memory that recordings share: taken over now.
        reader.commit(batch.rows, held)
        forward.run = recorded(run, runner, recorder)
    elif phase == "first_draft":
        forward.prepare = lambda: reader.commit(batch.rows, held)
    return forward


def rows_of(batch: Batch, runner: ModelRunner, recorder: Recorder | None) -> Rows:
    """The rows of `batch`, whose lengths a recorded forward finds on the device."""
    if recorder is None:
        return batch.rows
    return DeviceBatch.of(batch, 1, runner.model.config.vocab_size, runner.device).rows


@torch.inference_mode()
def recorded(
    run: Callable[[], Tensor], runner: ModelRunner, recorder: Recorder
) -> Callable[[], Tensor]:
    runner.counts.begin_on_device(runner.device)
    return record(recorder, run, [runner.cache.seq_lens], [runner.counts])
