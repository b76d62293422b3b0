"""DeviceBatch: the requests of a decoding step as the device knows them.

Owns the tensors that live from step to step: rows, newest tokens, and what tokens are sampled by.
Steps bring them up to date on the device; the host loads them anew when the batch has changed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from magicdec.kv.cache import BatchRows, upload
from magicdec.request import Batch, Request
from magicdec.sampling.metadata import SamplingMetadata

NEWEST = 2  # tokens that a draft model may lack after a step: the newest one and one draft


@dataclass(frozen=True)
class DeviceBatch:
    """`requests` as they were when the batch was made: what they have emitted since is in the
    tensors, not there."""

    requests: tuple[Request, ...]
    rows: BatchRows
    newest: Tensor  # int64 [B, NEWEST]: the last tokens of prompt and output
    sampling: SamplingMetadata

    @classmethod
    def of(
        cls,
        batch: Batch,
        vocab_size: int,
        device: torch.device,
        max_tail: int | None = None,
    ) -> DeviceBatch:
        """`vocab_size`: the largest of the models that choose its tokens. `max_tail`: for steps
        that are captured, see `BatchRows`."""
        rows = BatchRows.of(batch.rows, device, max_tail)
        newest = upload([last_tokens(r, NEWEST) for r in batch.requests], device)
        return cls(
            batch.requests, rows, newest, SamplingMetadata.of(batch.requests, vocab_size, device)
        )

    def load(self, batch: Batch) -> None:
        """Take the newest tokens and the outputs of `batch`, some or all of the requests, from the
        host. Only the rows of `batch` are active from now on."""
        device, known = self.newest.device, {r.row: r for r in batch.requests}
        requests = [known.get(row) for row in self.rows.numbers]
        self.rows.active.copy_(upload([int(r is not None) for r in requests], device))
        tokens = [[0] * NEWEST if r is None else last_tokens(r, NEWEST) for r in requests]
        self.newest.copy_(upload(tokens, device))
        self.sampling.load(requests)


def last_tokens(request: Request, count: int) -> list[int]:
    """The last `count` tokens of prompt and output; short texts are padded in front."""
    of_prompt = count - len(request.output_ids)
    if of_prompt <= 0:
        return request.output_ids[-count:]
    tokens = [*request.prompt_ids[-of_prompt:], *request.output_ids]
    return [0] * (count - len(tokens)) + tokens
