"""What ranks that differ have counted: memory and bytes are sums over them, and of what all of them
count alike there is one number."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from synthetic_records import Batch, parts_of

from magicdec.bench.runner import AllRanks, OneRank
from magicdec.hardware.threads import RankThreads
from magicdec.records.computing import Beside, pass_metrics
from magicdec.setup import memory_sampler
from magicdec.setup.memory_sampler import MemoryTaken, MemoryWatch

CPU = torch.device("cpu")


def gathering(*others: Any) -> Any:
    """A group whose other ranks have these values."""
    return SimpleNamespace(all_gather_values=lambda ours, kind: [ours, *others])


def test_the_memory_of_a_run_is_the_sum_over_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is loaded, and at the largest since; a later reading may be smaller."""
    readings = iter((100, 700, 500))
    monkeypatch.setattr(memory_sampler, "reset_peak_memory", lambda device: True)
    monkeypatch.setattr(memory_sampler, "peak_memory_bytes", lambda device: next(readings))
    watch = MemoryWatch(CPU)
    watch.note()
    watch.note()
    taken = watch.measured(gathering((30, 50), (1, 9)))
    assert (taken.process, taken.peak) == (100 + 30 + 1, 700 + 50 + 9)


def test_the_counts_of_a_batch_are_of_each_rank() -> None:
    """The ranks of this run read and hold other bytes; the drafts' tokens are the same on all that
    draft, and 0 on a rank that does not. The second batch needs most."""
    batches = []
    for first, second in (((300, 20), (40, 60)), ((300, 90), (40, 10))):
        ranks = [
            OneRank(RankThreads(rank, 2, 2, 2), peak, True, 5, peak, read, tokens, rows)
            for rank, ((read, peak), tokens, rows) in enumerate(((first, 0, 0), (second, 77, 7)))
        ]
        found = AllRanks.of("static+draft", ranks)
        assert found.memory == MemoryTaken(5 + 5, first[1] + second[1])
        batches.append(
            Batch(
                rows=[[(4, 1, 2)]],
                step_ms=[1.0],
                bytes_read=found.bytes_read,
                peak_memory_bytes=found.peaks,
                draft_kv_tokens=found.draft_kv_tokens,
                draft_rows=found.draft_rows,
            )
        )
    assert [batch.bytes_read for batch in batches] == [[300, 40], [300, 40]]
    assert [batch.peak_memory_bytes for batch in batches] == [[20, 60], [90, 10]]
    assert [(batch.draft_kv_tokens, batch.draft_rows) for batch in batches] == [(77, 7), (77, 7)]
    metrics = pass_metrics(parts_of(batches), Beside(is_drafting=True, bandwidth=1e9))
    assert metrics.bytes_read == 680 and metrics.kv_tokens_read == 77 / 7
    assert metrics.peak_memory_bytes == 90 + 10, "of the batch with the largest sum"
