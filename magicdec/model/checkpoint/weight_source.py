"""The interface through which the loader reads stored weights of any format. Also owns the adapter
for checkpoints whose names lack the model's prefix. Must not know of configs, ranks or devices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from torch import Tensor

from magicdec.model.checkpoint.weight_map import Piece


class WeightSource(Protocol):
    """A source of a model's tensors under their Hugging Face names."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Full shape of every tensor, from headers alone."""
        ...

    def dtypes(self) -> dict[str, str]:
        """torch's name of every tensor's stored type, as "bfloat16", from headers alone."""
        ...

    def read(self, piece: Piece) -> Tensor:
        """A slice of one tensor, on the CPU, in the stored dtype."""
        ...

    def where(self, name: str) -> Path | None:
        """The file that holds or should hold `name`, for messages; None where there is no file."""
        ...


@dataclass(frozen=True)
class BodyWeights:
    """A checkpoint that was saved from the model without its head. Its names lack the prefix
    `body`, as in "transformer.", and are returned with it."""

    source: WeightSource
    body: str

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {self.body + name: shape for name, shape in self.source.shapes().items()}

    def dtypes(self) -> dict[str, str]:
        return {self.body + name: dtype for name, dtype in self.source.dtypes().items()}

    def read(self, piece: Piece) -> Tensor:
        return self.source.read(replace(piece, name=piece.name.removeprefix(self.body)))

    def where(self, name: str) -> Path | None:
        return self.source.where(name.removeprefix(self.body))
