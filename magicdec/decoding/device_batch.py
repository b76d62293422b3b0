"""DeviceBatch: the requests of a batch as the device knows them, for steps that are recorded once
and replayed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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

    @classmethod
    def of(cls, batch: Batch, max_tail: int, device: torch.device) -> DeviceBatch:
        index = upload(batch.rows, device)
        rows = DeviceRows(tuple(batch.rows), index, torch.ones_like(index).bool(), max_tail)
        return cls(batch.requests, rows, index.new_zeros(len(index), NEWEST))

    def load(self, batch: Batch) -> None:
        """Take the newest tokens of `batch`, some or all of the requests, as the host knows them;
        no other row is active."""
        device, known = self.newest.device, {r.row: last_tokens(r, NEWEST) for r in batch.requests}
        numbers = self.rows.numbers
        self.rows.active.copy_(upload([row in known for row in numbers], device, torch.bool))
        tokens = [known.get(row, [0] * NEWEST) for row in numbers]
        self.newest.copy_(upload(tokens, device))


def last_tokens(request: Request, count: int) -> list[int]:
    """The last `count` tokens of prompt and output."""
    of_prompt = count - len(request.output_ids)
    if of_prompt <= 0:
        return request.output_ids[-count:]
    return [*request.prompt_ids[-of_prompt:], *request.output_ids]
