"""DeviceBatch: the requests of a decoding step as tensors that steps update on the device. The host
loads them only when the batch has changed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from magicdec.kv.cache import BatchRows, upload
from magicdec.runner.request import Batch, Request
from magicdec.runner.sampling.metadata import SamplingMetadata

NEWEST = 2  # tokens that a draft model may lack after a step: the newest one and the last draft


@dataclass(frozen=True)
class DeviceBatch:
    """The tensors of a batch, current after each step. `requests` may lack the newest tokens."""

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
        has_flaws: bool = True,
    ) -> DeviceBatch:
        """`vocab_size`: the largest of the models that choose tokens. `max_tail`: see
        `BatchRows`. `has_flaws`: see `SamplingMetadata.of`."""
        rows = BatchRows.of(batch.rows, device, max_tail)
        newest = upload([last_tokens(r, NEWEST) for r in batch.requests], device)
        sampling = SamplingMetadata.of(batch.requests, vocab_size, device, has_flaws)
        return cls(batch.requests, rows, newest, sampling)

    def load(self, batch: Batch) -> None:
        """Load the newest tokens of `batch`, a subset of the requests. From now on only its rows
        are active."""
        device = self.newest.device
        request_of = {r.row: r for r in batch.requests}
        requests = [request_of.get(row) for row in self.rows.numbers]
        self.rows.active.copy_(upload([int(r is not None) for r in requests], device))
        tokens = [[0] * NEWEST if r is None else last_tokens(r, NEWEST) for r in requests]
        self.newest.copy_(upload(tokens, device))
        self.sampling.load(requests)


def last_tokens(request: Request, count: int) -> list[int]:
    """The last `count` tokens of prompt and output, padded with zeros in front."""
    num_prompt = count - len(request.output_ids)
    if num_prompt <= 0:
        return request.output_ids[-count:]
    tokens = [*request.prompt_ids[-num_prompt:], *request.output_ids]
    return [0] * (count - len(tokens)) + tokens
