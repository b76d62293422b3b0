"""DeviceBatch: the requests of a batch as the device knows them, for steps that are recorded once
and replayed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from magicdec.decoding.choosing import Choosing
from magicdec.kv.device_rows import DeviceRows, upload
from magicdec.request import Batch, Request

NEWEST = 2  # tokens that a draft model may have missed after a step, the newest and one drafted


@dataclass(frozen=True)
class DeviceBatch:
    """Stands in for a `Batch` where nothing may be read by the host. The requests are those it
    began with; what they emitted since is not looked at."""

    requests: tuple[Request, ...]
    rows: DeviceRows
    newest: Tensor  # int64 [B, NEWEST]: the last tokens of prompt and output
    choosing: Choosing

    @classmethod
    def of(cls, batch: Batch, max_tail: int, vocab_size: int, device: torch.device) -> DeviceBatch:
        """`vocab_size`: the largest of the models that choose its tokens."""
        index = upload(batch.rows, device)
        rows = DeviceRows(tuple(batch.rows), index, torch.ones_like(index).bool(), max_tail)
        choosing = Choosing.of(batch.requests, vocab_size, device)
        return cls(batch.requests, rows, index.new_zeros(len(index), NEWEST), choosing)

    def load(self, batch: Batch) -> None:
        """Take the newest tokens of `batch`, some or all of the requests, and what these have
        emitted, as the host knows it; no other row is active."""
        device, known = self.newest.device, {r.row: r for r in batch.requests}
        requests = [known.get(row) for row in self.rows.numbers]
        self.rows.active.copy_(upload([r is not None for r in requests], device, torch.bool))
        tokens = [[0] * NEWEST if r is None else last_tokens(r, NEWEST) for r in requests]
        self.newest.copy_(upload(tokens, device))
        self.choosing.load(requests)


def last_tokens(request: Request, count: int) -> list[int]:
    """The last `count` tokens of prompt and output."""
    of_prompt = count - len(request.output_ids)
    if of_prompt <= 0:
        return request.output_ids[-count:]
    return [*request.prompt_ids[-of_prompt:], *request.output_ids]
