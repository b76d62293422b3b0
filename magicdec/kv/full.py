"""FullKV: every committed token is visible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from magicdec.config.sections import KVSection


@dataclass(frozen=True)
class FullKV:
    """The target's own policy; as a draft's policy it makes self-speculation accept everything."""

    reader: ClassVar[str] = "view"

    @classmethod
    def build(cls, kv: KVSection) -> FullKV:
        return cls()

    def ranges(self, committed: Tensor) -> Tensor:
        return torch.stack([torch.zeros_like(committed), committed], dim=1).unsqueeze(1)

    def num_visible(self, committed: int) -> int:
        return committed

    def most_visible(self, committed: int) -> int:
        return committed
