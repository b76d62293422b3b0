"""MtpPathDrafter: drafts of pipelined speculation by a head for multi-token prediction
(DeepSeek-V3, arXiv 2412.19437, section 2.2), from hidden states that the last stage sends home.

Slots are those of `speculation/head_drafter.py`. A slot whose following token is committed has the
target's state; those of drafted tokens go on from the head's own output, and are computed anew
once the text before them has grown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from magicdec.config.sections import KVSection
from magicdec.kv.cache import BatchRows, Lengths, upload
from magicdec.model.draft_head import DraftHead
from magicdec.runner.forward_batch import ForwardBatch
from magicdec.runner.observers.hidden_states import ReceivedStates
from magicdec.runner.sampling.coupled import CoupledSampling
from magicdec.speculation.drafter import DraftModel
from magicdec.speculation.policies.policy import make_draft_kv
from magicdec.systems.pipeinfer.messages import Candidate, RunLaunch
from magicdec.systems.pipeinfer.path_drafter import (
    DraftRequest,
    PathDrafter,
    best_candidates,
    num_known,
)


@dataclass
class HeldSlots:
    """The slots of a lane: those of the first `num_committed` tokens of a text of `num_prompt`
    tokens and an output, the last of these tokens without one, then one for each of the drafted
    `tokens`. `candidates[i]` follows the first i of these, and `outputs[i]` is what the head made
    of the slot before it."""

    request: int = 0
    num_prompt: int = 0
    num_committed: int = 1
    tokens: list[int] = field(default_factory=list)
    candidates: list[Candidate] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)

    @property
    def num_true(self) -> int:
        return self.num_committed - 1

    def cut(self, count: int) -> None:
        """Keep the first `count` drafted tokens."""
        del self.tokens[count:]
        del self.candidates[count + 1 :]
        del self.outputs[count + 1 :]


class MtpPathDrafter(PathDrafter):
    """A drafter with a head, whose cache has a row per lane. `states` are the target's, which it
    keeps as they come (`keep_states`)."""

    def __init__(
        self,
        draft: DraftModel,
        kv: KVSection,
        states: ReceivedStates,
        sampling: CoupledSampling,
    ) -> None:
        assert draft.runner is not None, "this rank drafts"
        head = draft.runner.model
        assert isinstance(head, DraftHead), "checked before the run"
        self.head = head
        self.runner = draft.runner
        self.kv = make_draft_kv(draft.runner, kv)
        self.prefill_chunk = draft.prefill_chunk
        self.states = states
        self.sampling = sampling
        self.held = [HeldSlots() for _ in range(draft.runner.num_rows)]

    @torch.inference_mode()
    def keep_states(self, launch: RunLaunch, states: Tensor) -> None:
        """Keep the target's states [1, T, hidden] of the rows of a run. Those of wrong drafts are
        overwritten before anyone reads them, since results come home in the order of launches."""
        device = self.runner.device
        positions = upload([launch.positions], device)
        ids = upload([launch.tokens], device)
        self.states.write(upload([launch.lane], device), positions, ids, states.unsqueeze(0))

    @torch.inference_mode()
    def propose(self, step: DraftRequest, text: list[int]) -> Candidate | None:
        """The candidate. The cache keeps what lies on the path."""
        if step.kept == 0:
            self.runner.release(step.lane)
            self.runner.allocate(step.lane)
            self.held[step.lane] = HeldSlots(step.request, len(text))
        if step.path is None:
            return None
        held = self.held[step.lane]
        if len(text) != held.num_committed:
            self._fill(step.lane, held, text)
        known = num_known(step.path, held.tokens)
        held.cut(known)
        self._rewind(step.lane, held.num_true + known)
        for token in step.path[known:]:
            x = self.head.pair(upload([[token]], self.runner.device), held.outputs[-1])
            held.tokens.append(token)
            self._learn(step.lane, held, text, x)
        return held.candidates[-1]

    def _fill(self, lane: int, held: HeldSlots, text: Sequence[int]) -> None:
        """The slots whose following tokens are committed, from the target's states, in place of
        those of drafts. The last of them tells the first candidate."""
        device = self.runner.device
        rows = BatchRows.of([lane], device)
        first = held.num_true
        held.num_committed = len(text)
        held.tokens.clear()
        held.candidates.clear()
        held.outputs.clear()
        self._rewind(lane, first)
        stop = held.num_true
        for start in range(first, stop, self.prefill_chunk):
            end = min(start + self.prefill_chunk, stop)
            positions = torch.arange(start, end, device=device).unsqueeze(0)
            states = self.states.states_at(rows.index, positions)
            following = upload([text[start + 1 : end + 1]], device)
            x = self.head.pair(following, self.head.reduced(states))
            if end == stop:
                self._learn(lane, held, text, x)
            else:
                self._forward(lane, x, num_outputs=0)

    def _forward(self, lane: int, x: Tensor, num_outputs: int) -> Tensor:
        """The head's output of the last `num_outputs` of the slots `x`, which follow the row's."""
        rows = BatchRows.of([lane], self.runner.device)
        held = self.kv.lengths(rows)
        visible = self.kv.select(rows, held)
        return self.runner.forward(
            ForwardBatch(x, rows, visible, committed=held, num_outputs=num_outputs)
        )

    def _learn(self, lane: int, held: HeldSlots, text: Sequence[int], x: Tensor) -> None:
        """Compute slots, and add what the last of them says."""
        logits, output = self.head.read_out(self._forward(lane, x, num_outputs=1))
        held.outputs.append(output)
        following = [len(text) + len(held.tokens)]
        written = [[*text[held.num_prompt :], *held.tokens]]
        prompt = text[: held.num_prompt]
        held.candidates += best_candidates(
            self.sampling, logits[0], held.request, prompt, written, following
        )

    def _rewind(self, lane: int, length: int) -> None:
        device = self.runner.device
        self.kv.rewind(BatchRows.of([lane], device), Lengths.of([length], device))
