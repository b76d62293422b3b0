"""DecodeSteps: the draft and the verification of a decoding step. Without drafts the verification
is plain decoding.

It owns the state that stays on the device, and the host's copy of lengths. The host reads the
device once a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from magicdec.kv.cache import BatchRows, Lengths, upload
from magicdec.runner.device_batch import DeviceBatch
from magicdec.runner.forward_batch import EnqueuedForward, ForwardBatch
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.request import Batch, NotFinite, Request
from magicdec.runner.sampling.model_tokens import AcceptanceRule, Proposal, judge
from magicdec.runner.sampling.verification import Verdicts
from magicdec.speculation.drafter import Drafter, DraftShape
from magicdec.speculation.steps.logits_recorder import JudgedStep, StepRecorder
from magicdec.speculation.steps.strategy import Phase


@dataclass(frozen=True)
class PendingVerification:
    """A verification of rows that held `before`, whose forwards may be enqueued."""

    proposal: Proposal
    before: Lengths
    forwards: Sequence[EnqueuedForward]
    places: Tensor | None = None  # int64 [B, K+1], if there are several forwards: see `judge`

    def logits(self) -> Tensor:
        outs = [forward.out for forward in self.forwards if forward.out is not None]
        assert len(outs) == len(self.forwards), "the forwards have been computed"
        if self.places is None:
            return outs[0]
        return torch.cat([out.flatten(0, 1) for out in outs]).unsqueeze(0)

    def logits_of(self, places: Sequence[int]) -> Tensor:
        """Logits [R, K+1, V] of the rows at `places`, maybe a view."""
        logits = self.logits()
        if self.places is not None:
            return logits[0, self.places[list(places)]]
        return logits if len(places) == logits.shape[0] else logits[list(places)]


class DecodeSteps:
    """Draft and verification of batches. The host knows all cached lengths between calls. With
    `is_in_flight` the first step that needs a batch loads it."""

    def __init__(
        self,
        runner: ModelRunner,
        drafter: Drafter,
        phase: Phase,
        is_in_flight: bool = False,
        logits_recorder: StepRecorder | None = None,
        rule: AcceptanceRule | None = None,
    ) -> None:
        self.runner = runner
        self.rule = rule
        self.keeps_drafts = rule is None or rule.keeps_drafts
        self.drafter = drafter
        self.logits_recorder = logits_recorder
        self.phase = phase
        self.is_in_flight = is_in_flight
        self._runners: list[ModelRunner] = []
        self._batch: DeviceBatch
        self._shown: tuple[Request, ...] = ()

    @torch.inference_mode()
    def admit(self, batch: Batch, draft_lengths: Sequence[int]) -> None:
        """Prepare for steps of `batch`, all running requests, with `draft_lengths` drafts."""
        self._find_runners(draft_lengths)
        if self.is_in_flight:
            self._shown = ()
        else:
            self._load(batch)

    def padded_gamma(self, gamma: int) -> int:
        return gamma

    @property
    def reads_experts(self) -> bool:
        """Whether what a verification reads depends on its tokens."""
        return self.runner.model.config.experts is not None

    def release(self, rows: Sequence[int]) -> None:
        self.drafter.release(rows)

    def decode(self, batch: Batch) -> list[list[int]]:
        return self.verify(batch, None).ids

    @torch.inference_mode()
    def draft(self, batch: Batch, gamma: int) -> Proposal:
        """A proposal of `gamma` a row, valid until the next draft."""
        with self.phase("draft"):
            self._show(batch)
            return self._drafted(batch, gamma)

    @torch.inference_mode()
    def draft_given(self, batch: Batch, given: Tensor) -> Proposal:
        """The proposal whose sampled drafts are `given` [B, K], with the distributions that they
        would have been drawn from."""
        with self.phase("draft"):
            self._load(batch)
            sampling = replace(self._batch.sampling, given=given)
            self._batch = replace(self._batch, sampling=sampling)
            self._shown = ()
            return self._drafted(batch, given.shape[1])

    @torch.inference_mode()
    def verify(self, batch: Batch, proposal: Proposal | None) -> Verdicts:
        """The verdicts of a batch. Ragged proposals (`Proposal.counts`) need `can_join`."""
        with self.phase("decode" if proposal is None else "verify"):
            return self._judged(batch, proposal)

    @property
    def can_join(self) -> bool:
        """Whether rows with different numbers of drafts share one reading of the weights.
        Observed attention needs equal numbers."""
        return self.runner.executor is not None and not self.drafter.observers

    @torch.inference_mode()
    def undo(self, batch: Batch, lengths: Sequence[int]) -> None:
        """Truncate rows to earlier `lengths`. Their requests have emitted nothing since."""
        device = self.runner.device
        self.runner.truncate(batch.rows, lengths)
        self.drafter.commit(BatchRows.of(batch.rows, device), Lengths.of(lengths, device))
        self._batch.load(batch)

    def _find_runners(self, draft_lengths: Sequence[int]) -> None:
        """A drafter may have made a new runner since the last call."""
        draft_kv = self.drafter.draft_kv
        self._lengths = self.drafter.lengths(draft_lengths)
        self._most = max(self._lengths)
        self._runners = [self.runner]
        if draft_kv is not None and draft_kv.runner is not self.runner:
            self._runners.append(draft_kv.runner)
        self._vocab_size = max(r.model.config.vocab_size for r in self._runners)

    def _drafted(self, batch: Batch, gamma: int) -> Proposal:
        pending = self.drafter.prepare(batch.requests, gamma)
        return self.drafter.propose(self._batch, DraftShape(gamma, pending))

    def _judged(self, batch: Batch, proposal: Proposal | None) -> Verdicts:
        """Verify, and read the result: the step's only read."""
        self._show(batch)
        verification = self._begin(proposal)
        self.runner.execute()
        if any(runner.has_flaws for runner in self._runners):
            self._batch.sampling.spoil()
            if self._batch.sampling.flaws is None:
                raise NotFinite.after(*self._flawed(verification))
        proposal = verification.proposal
        verdicts = self._read(self._finish(verification), proposal.ids.shape[1])
        recorder = self.logits_recorder
        if recorder is not None and (places := recorder.wants(batch.rows)):
            logits = verification.logits_of(places)
            recorder.keep(JudgedStep(batch.requests, proposal, verdicts, places, logits))
        return verdicts

    def _flawed(self, verification: PendingVerification) -> tuple[int, int]:
        """A request with logits that are not finite, and its number of output tokens. For a
        flawed draft, any request of its batch."""
        rows = set[int]()
        for forward in verification.forwards:
            assert forward.out is not None, "it has been computed"
            is_wrong = ~forward.out.isfinite().flatten(1).all(dim=1)
            rows |= {forward.rows.numbers[place] for place in is_wrong.nonzero().flatten().tolist()}
        found = next((r for r in self._shown if r.row in rows), self._shown[0])
        return found.request_id, len(found.output_ids)

    def _read(self, result: Tensor, draft_width: int) -> Verdicts:
        lines = result.tolist()
        results = [lines[place] for place in self._places]
        first = 0
        if self._batch.sampling.flaws is not None:
            first = 1
            for request, line in zip(self._shown, results, strict=True):
                self._batch.sampling.check(request, line)
        for i, runner in enumerate(self._runners, first):
            runner.cache.set_host_lengths(self._rows, [row[i] for row in results])
        return Verdicts.read(results, first + len(self._runners), draft_width)

    def _begin(self, proposal: Proposal | None) -> PendingVerification:
        runner = self.runner
        rows = self._batch.rows
        last = self._batch.newest[:, -1:]
        before = runner.cache.lengths_of(rows)
        if proposal is None:
            forward = runner.enqueue(ForwardBatch(last, rows))
            return PendingVerification(Proposal(last[:, :0]), before, [forward])
        tokens = torch.cat([last, proposal.ids], dim=1)
        if proposal.counts is not None:
            forwards, places = self._begin_ragged(proposal.counts, tokens)
            return PendingVerification(proposal, before, forwards, places)
        batch = ForwardBatch(tokens, rows, observers=self.drafter.observers)
        forward = runner.enqueue(batch)
        return PendingVerification(proposal, before, [forward])

    def _begin_ragged(
        self, counts: Sequence[int], tokens: Tensor
    ) -> tuple[list[EnqueuedForward], Tensor]:
        """A forward for each number of drafts, all computed in one native call, and the `places`
        of their logits."""
        rows = self._batch.rows.numbers
        starts = [0] * len(counts)
        num_tokens = 0
        forwards = list[EnqueuedForward]()
        for count in sorted(set(counts)):
            members = [place for place, own_count in enumerate(counts) if own_count == count]
            new_tokens = tokens[members, : 1 + count]
            member_batch = ForwardBatch(new_tokens, [rows[place] for place in members])
            forwards.append(self.runner.enqueue(member_batch))
            for place in members:
                starts[place] = num_tokens
                num_tokens = num_tokens + 1 + count
        places = [
            [start + min(k, count) for k in range(tokens.shape[1])]
            for start, count in zip(starts, counts, strict=True)
        ]
        return forwards, upload(places, tokens.device)

    def _finish(self, verification: PendingVerification, tells_drafter: bool = True) -> Tensor:
        """int64 [B, any]: the row's flaw, if noted (`SamplingMetadata.check`), the length of each
        cache, and the columns of its judgement."""
        batch = self._batch
        runner = self.runner
        proposal = verification.proposal
        before = verification.before
        rows = batch.rows
        last = batch.newest[:, -1:]
        judgement = judge(
            runner, batch.sampling, proposal, verification.logits(), verification.places
        )
        if self.rule is not None and proposal.ids.shape[1] > 0:
            judgement = self.rule.judge(
                proposal, judgement, batch.sampling, batch.newest, before.tensor
            )
        accepted = judgement.accepted
        ids = judgement.ids
        kept = accepted if self.keeps_drafts else torch.zeros_like(accepted)
        emitted = kept + 1
        batch.sampling.take(ids, emitted, rows.active)
        # The newest token and the drafts that are kept stay cached. The last emitted token is not
        # cached yet.
        bounds = tuple([bound + ids.shape[1] for bound in before.bounds])
        new_lengths = Lengths(before.tensor + emitted, bounds)
        if proposal.ids.shape[1] > 0:
            runner.truncate(rows, new_lengths)
        places = torch.stack([kept, emitted], dim=1)
        batch.newest.copy_(torch.cat([last, ids], dim=1).gather(1, places))
        if tells_drafter:
            self.drafter.commit(rows, new_lengths)
        lengths = [r.cache.seq_lens[rows.index].unsqueeze(1) for r in self._runners]
        columns = [*lengths, *judgement.columns]
        is_noted = batch.sampling.flaws is not None
        return batch.sampling.with_flaws(columns) if is_noted else torch.cat(columns, dim=1)

    def _show(self, batch: Batch) -> None:
        if batch.requests != self._shown:
            self._load(batch)

    def _load(self, batch: Batch) -> None:
        has_flaws = not all(runner.finds_flaws for runner in self._runners)
        device = self.runner.device
        on_device = DeviceBatch.of(batch, self._vocab_size, device, has_flaws=has_flaws)
        self._set_batch(on_device, batch)

    def _set_batch(self, device_batch: DeviceBatch, batch: Batch) -> None:
        place_of = {row: place for place, row in enumerate(device_batch.rows.numbers)}
        self._batch = device_batch
        self._shown = batch.requests
        self._rows = batch.rows
        self._places = [place_of[row] for row in self._rows]
        self._place_index = upload(self._places, self.runner.device)
