"""HeadDrafter: drafts by a head from the target's hidden states: an EAGLE-3 head (Li et al., arXiv
2503.01840, section 3; EAGLE-3.1, arXiv 2605.09992), or one for multi-token prediction (DeepSeek-V3,
arXiv 2412.19437, section 2.2).

The head's slot i is that of the target's token i, and takes token i + 1 too, so that its cache has
one slot for each token that the target has cached. A draft first fills the slots of the tokens that
were committed since the last one, with true states, then goes on from its own output. What it wrote
from its own output is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from magicdec.config.sections import KVSection
from magicdec.kv.cache import BatchRows, Lengths
from magicdec.kv.prefix_cache import CachedText
from magicdec.model.draft_head import DraftHead
from magicdec.runner.device_batch import DeviceBatch
from magicdec.runner.forward_batch import ForwardBatch
from magicdec.runner.model_runner import ModelRunner, gather_vocab, greedy
from magicdec.runner.observers.hidden_states import HiddenStates
from magicdec.runner.request import Request
from magicdec.runner.sampling.metadata import SamplingMetadata
from magicdec.runner.sampling.model_tokens import Proposal, confidence, drawn_draft
from magicdec.runner.sampling.sampling import process
from magicdec.speculation.draft_kv import DraftKV
from magicdec.speculation.drafter import (
    DraftModel,
    DraftSetup,
    DraftShape,
    StandaloneDrafter,
    proposal_of_source,
)

# The logit of a token that is not in the draft vocabulary; finite, because all are checked.
NEVER = -1e30


class HeadDrafter(StandaloneDrafter):
    """A drafter with a head. The slots of drafts are dropped when these are proposed."""

    def __init__(
        self, target: ModelRunner, draft: DraftModel, kv: KVSection, pa: float, max_gamma: int
    ) -> None:
        super().__init__(target, draft, kv, pa, max_gamma)
        # A step commits at most the last of these; few, because each is captured on a GPU.
        self.pending = tuple(sorted({1, 2, max_gamma + 1}))

    @classmethod
    def build(cls, setup: DraftSetup) -> HeadDrafter:
        assert setup.draft is not None, "a run with this drafter has a head"
        decoding = setup.decoding
        return cls(setup.runner, setup.draft, setup.kv, decoding.pa or 0.0, decoding.max_gamma)

    @property
    def head(self) -> DraftHead:
        assert self.draft.runner is not None, "asked on ranks with the head"
        model = self.draft.runner.model
        assert isinstance(model, DraftHead), "checked before the run"
        return model

    @property
    def states(self) -> HiddenStates:
        states = self.target.observer(HiddenStates)
        assert states is not None, "the target keeps them"
        return states

    def admit(self, requests: Sequence[Request]) -> None:
        runner = self.draft.runner
        if self.draft_kv is None or runner is None:
            return
        for request in requests:
            num_shared = self.begin(runner, request)
            assert request.row is not None, "an admitted request has a row"
            self._fill(self.draft_kv, request.row, num_shared, request.num_cached - 1)
            self.keep(runner, request)
        self.draft_kv.admit(requests)

    def entries_of(self, text: Sequence[int]) -> CachedText:
        """A slot for each token but the last, with the one after it."""
        return tuple(pairwise(text))

    def fork(self, forks: Sequence[Request], texts: Sequence[Request]) -> None:
        super().fork(forks, texts)
        if self.draft_kv is not None:
            rows, text_rows = (
                [r.row for r in some if r.row is not None] for some in (forks, texts)
            )
            self.states.fork(rows, text_rows)

    def prepare(self, requests: Sequence[Request], gamma: int) -> int:
        """Fill the slots of rows that lack more than a step commits. Returns how many slots the
        draft fills in each row; those that a row does not lack are filled a second time."""
        kv = self.draft_kv
        if kv is None:
            return 1
        rows = [request.row for request in requests if request.row is not None]
        committed = [self.target.cache.lengths[row] for row in rows]
        filled = kv.lengths(rows).bounds
        most = max(count for count in self.pending if count <= min(committed))
        lacking = [1]
        for row, length, held in zip(rows, committed, filled, strict=True):
            count = length - held
            if count > most:
                self._fill(kv, row, held, length - 1)
                count = 1
            lacking.append(count)
        return min(count for count in self.pending if count >= max(lacking))

    def _fill(self, kv: DraftKV, row: int, first: int, stop: int) -> None:
        """Slots `first` to `stop` - 1 of a row, whose following tokens the target has cached."""
        device = kv.runner.device
        rows = BatchRows.of([row], device)
        for start in range(first, stop, self.draft.prefill_chunk):
            end = min(start + self.draft.prefill_chunk, stop)
            kv.rewind(rows, Lengths.of([start], device))
            positions = torch.arange(start, end, device=device).unsqueeze(0)
            following = self.states.ids_at(rows.index, positions + 1)
            states = self.states.states_at(rows.index, positions)
            x = self.head.pair(following, self.head.reduced(states))
            held = kv.lengths(rows)
            kv.runner.forward(
                ForwardBatch(x, rows, kv.select(rows, held), committed=held, num_outputs=0)
            )

    def propose(self, batch: DeviceBatch, shape: DraftShape) -> Proposal:
        proposal = None
        if self.draft_kv is not None:
            proposal = self._propose(self.draft_kv, batch, shape)
        return proposal_of_source(proposal, batch, shape, self.draft, self.target, self.pa)

    def _propose(self, kv: DraftKV, batch: DeviceBatch, shape: DraftShape) -> Proposal:
        rows = batch.rows
        lengths = self.target.cache.lengths_of(rows)
        filled = lengths.plus(-shape.pending)
        kv.rewind(rows, filled)
        committed = kv.lengths(rows)
        steps = torch.arange(shape.pending, device=kv.runner.device)
        positions = filled.tensor.unsqueeze(1) + steps
        known = self.states.ids_at(rows.index, positions[:, 1:])
        following = torch.cat([known, batch.newest[:, -1:]], dim=1)
        states = self.states.states_at(rows.index, positions)
        state = self.head.reduced(states)
        if batch.sampling.is_greedy and kv.runner.can_chain:
            first = kv.batch(following, rows, committed)
            ids = kv.runner.draft(first, shape.gamma, self.pa, state)
            kv.rewind(rows, lengths)
            return Proposal(ids)
        x = self.head.pair(following, state)
        drafts = batch.newest[:, :0]
        drawn_from = list[Tensor]()
        goes_on = None
        for number in range(shape.gamma):
            logits, state = self.head.read_out(kv.forward(x, rows, committed, num_outputs=1))
            newest, probs = self._token(kv.runner, logits, batch.sampling, drafts)
            drafts = torch.cat([drafts, newest], dim=1)
            drawn_from += [] if probs is None else [probs]
            if self.pa > 0:
                is_sure = confidence(kv.runner, logits) >= self.pa
                goes_on = is_sure if goes_on is None else goes_on & is_sure
                if not goes_on.any():
                    break
            if number + 1 < shape.gamma:
                x = self.head.pair(newest, state)
        kv.rewind(rows, lengths)
        return Proposal(drafts, torch.cat(drawn_from, dim=1) if drawn_from else None)

    def _token(
        self, runner: ModelRunner, logits: Tensor, sampling: SamplingMetadata, drafts: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """As `model_tokens.draft_token`, from logits [B, 1, draft vocabulary of this rank]."""
        head = self.head
        draws = sampling.draws
        if draws is None and sampling.penalties is None:
            ids, sums = greedy(logits, head.head_rows[0], runner.group, sampling.flaws)
            if sums is not None:
                sampling.note_sums(sums)
            return head.target_ids[ids], None
        among = gather_vocab(logits, runner.vocab_places, runner.group).float()
        sampling.note(among)
        whole = among.new_full((*among.shape[:2], self.vocab_size), NEVER)
        whole[..., head.target_ids] = among
        whole = process(whole, sampling.penalties, drafts)
        if draws is None:
            return whole.argmax(dim=-1), None
        return drawn_draft(whole, sampling, drafts)
