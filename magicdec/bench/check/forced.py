"""ForcedSteps: known outputs, served once more in the steps of a pass, so that their logits are
rounded as in that pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from magicdec.kv.cache import upload
from magicdec.runner.forward_batch import ForwardBatch
from magicdec.runner.model_runner import ModelRunner, gather_vocab
from magicdec.runner.request import Batch, StepOutput


class ForcedSteps:
    """A decoding strategy that emits given outputs, up to `num_tokens` in a step, and notes the
    gaps between two tokens after each.

    `outputs` are by request id. The tokens are those of `pairs` [N, 2] of each request, for the N
    outputs after its first, or by default the two best."""

    def __init__(
        self,
        runner: ModelRunner,
        outputs: Mapping[int, Sequence[int]],
        num_tokens: int,
        pairs: Mapping[int, Tensor] | None,
    ) -> None:
        self.runner = runner
        self.outputs = outputs
        self.num_tokens = num_tokens
        self.pairs = pairs
        self._found: dict[int, list[tuple[Tensor, Tensor]]] = {number: [] for number in outputs}

    def admit(self, batch: Batch) -> None:
        """Needs nothing."""

    def release(self, rows: Sequence[int]) -> None:
        """Holds nothing of a row."""

    @torch.inference_mode()
    def step(self, batch: Batch) -> StepOutput:
        texts = [self.outputs[number] for number in batch.ids]
        befores = [len(request.output_ids) for request in batch.requests]
        counts = [
            min(self.num_tokens, len(text) - before)
            for text, before in zip(texts, befores, strict=True)
        ]
        ids = [
            padded(text[before - 1 : before - 1 + self.num_tokens], self.num_tokens)
            for text, before in zip(texts, befores, strict=True)
        ]
        runner = self.runner
        logits = runner.forward(ForwardBatch(upload(ids, runner.device), batch.rows))
        whole = gather_vocab(logits, runner.vocab_places, runner.group)
        places = zip(batch.ids, befores, counts, strict=True)
        for place, (number, before, count) in enumerate(places):
            self._note(number, before - 1, whole[place, :count])
        return StepOutput(
            [
                list(text[before : before + count])
                for text, before, count in zip(texts, befores, counts, strict=True)
            ]
        )

    def _note(self, number: int, first: int, logits: Tensor) -> None:
        """Notes the gaps in logits [n, V], those after output token `first` and later ones."""
        if self.pairs is None:
            pairs = logits.topk(2).indices
        else:
            pairs = self.pairs[number][first : first + len(logits)].to(logits.device)
        self._found[number].append((pairs, gap(logits, pairs)))

    def found(self, number: int) -> tuple[Tensor, Tensor]:
        """The pairs [N, 2] and the gaps float64 [N] of a request, which has ended."""
        noted = self._found[number]
        if not noted:
            return torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, dtype=torch.float64)
        pairs, gaps = zip(*noted, strict=True)
        return torch.cat(pairs), torch.cat(gaps)


def padded(ids: Sequence[int], length: int) -> list[int]:
    return [*ids, *[0] * (length - len(ids))]


def gap(logits: Tensor, pairs: Tensor) -> Tensor:
    """Float64 gaps between pairs [..., 2] of tokens in logits [..., V]; 0 for NaN, about which the
    wider model's shortfall decides."""
    best, second = logits.gather(-1, pairs).double().unbind(-1)
    return (best - second).nan_to_num(nan=0.0)
