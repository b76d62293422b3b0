"""Speculation: drafts for the samples of a ring, on the first stage, and their judgement.

Owns the order of the drafter's calls, and what is counted of drafts. Drafters and judgement are
those of the engine (`decoding.steps`). A row is a row of the stage's cache. All ranks of the first
stage make the same calls in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from magicdec.config.resolved import ResolvedConfig
from magicdec.decoding.steps import ANY_NUMBER
from magicdec.device_batch import DeviceBatch
from magicdec.distributed.groups import Group, ParallelGroups
from magicdec.drafting.drafter import Drafter, DraftSetup, make_drafter
from magicdec.hardware.environment import wait_for_stream
from magicdec.kv.cache import BatchRows, Lengths
from magicdec.pipeline.metrics import DraftCounts
from magicdec.request import Batch, Request, StepOutput
from magicdec.runner import ModelRunner
from magicdec.sampling.metadata import SamplingMetadata
from magicdec.sampling.model_tokens import Proposal, judge
from magicdec.setup.loading import LoadedModels, make_draft
from magicdec.setup.prepare import Prepared


@dataclass(frozen=True)
class Draft:
    """What is verified of some rows: `tokens`, int64 [B, 1 + K], are the newest token and K
    drafts of each."""

    tokens: Tensor
    proposal: Proposal
    sampling: SamplingMetadata


class Speculation:
    """`drafter` drafts `num_draft_tokens` for each row of a message. `runner` is the stage's."""

    def __init__(self, runner: ModelRunner, drafter: Drafter, num_draft_tokens: int) -> None:
        self.runner, self.drafter = runner, drafter
        self.num_draft_tokens, self.counts = num_draft_tokens, DraftCounts()
        of_draft = () if drafter.draft_kv is None else (drafter.draft_kv.runner,)
        self._vocab_size = max(r.model.config.vocab_size for r in (runner, *of_draft))
        self._known: dict[int, Request] = {}  # by row; they share the lists of their output tokens

    def admit(self, requests: Sequence[Request], rows: Sequence[int]) -> None:
        """The prompts of `requests` are in the cache, and their first tokens are known."""
        in_rows = [replace(r, row=row) for r, row in zip(requests, rows, strict=True)]
        self._known |= zip(rows, in_rows, strict=True)
        with self._timed():
            self.drafter.admit(in_rows)

    @torch.inference_mode()
    def draft(self, rows: Sequence[int]) -> Draft:
        """Drafts for `rows`, whose committed tokens alone are in the cache."""
        batch, count = Batch(tuple(self._known[row] for row in rows)), self.num_draft_tokens
        with self._timed():
            on_device = DeviceBatch.of(batch, self._vocab_size, self.runner.device)
            pending = self.drafter.prepare(batch.requests, count, ANY_NUMBER)
            proposal = self.drafter.propose(on_device, count, pending)
        self.counts.num_messages += 1
        tokens = torch.cat([on_device.newest[:, -1:], proposal.ids], dim=1)
        return Draft(tokens, proposal, on_device.sampling)

    @torch.inference_mode()
    def judge(self, draft: Draft, logits: Tensor) -> StepOutput:
        """The tokens that each row emits, from this rank's logits [B, 1 + K, V]."""
        judgement = judge(self.runner, draft.sampling, draft.proposal, logits)
        counts, emitted = judgement.accepted.tolist(), judgement.ids.tolist()
        num_drafted = draft.proposal.ids.shape[1]
        self.counts.num_verified += len(counts)
        self.counts.num_drafted += num_drafted * len(counts)
        self.counts.num_accepted += sum(counts)
        tokens = [of_row[: n + 1] for of_row, n in zip(emitted, counts, strict=True)]
        return StepOutput(tokens, num_drafted, counts)

    def commit(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """The first `lengths` tokens of `rows` are committed. All after them is forgotten."""
        device = self.runner.device
        self.drafter.commit(BatchRows.of(rows, device), Lengths.of(lengths, device))

    def release(self, rows: Sequence[int]) -> None:
        """The samples in `rows` have ended."""
        self.drafter.release([row for row in rows if self._known.pop(row, None) is not None])

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begin_s = time.perf_counter()
        yield
        wait_for_stream(self.runner.device)
        self.counts.draft_s += time.perf_counter() - begin_s


def num_drafts_of(config: ResolvedConfig) -> int:
    """Draft tokens of each row of a message that decodes."""
    return 0 if config.decoding.drafter is None else config.decoding.most_draft_tokens


def make_speculation(
    run: Prepared, runner: ModelRunner, groups: ParallelGroups, models: LoadedModels
) -> Speculation:
    """The drafter of `run` on the first stage, whose `runner` and `groups` are given. A draft model
    is on its first rank alone."""
    config = run.config
    assert config.decoding.drafter is not None, "the run drafts"
    groups = replace(groups, draft=Group((0,), 0) if groups.rank == 0 else None)
    draft = make_draft(run, groups, runner.max_tokens, models)
    setup = DraftSetup(runner, config.decoding, config.kv, draft)
    return Speculation(runner, make_drafter(config.decoding.drafter, setup), num_drafts_of(config))
