"""What a peer is: a decoder of a fixed batch, driven from outside one command at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

CHUNK = 512  # prompt tokens of a row taken in one forward


class Peer(ABC):
    """A model loaded in `dtype`, with room for `max_tokens` cached tokens in each of `batch` rows.

    B rows; token ids are plain lists. Libraries are imported in methods, not at the top: a peer
    lives in an environment that need not have the others.
    """

    can_verify = False

    @abstractmethod
    def __init__(self, model: str, dtype: str, threads: int, max_tokens: int, batch: int) -> None:
        """Load what lies in directory `model` ("float32" or "bfloat16", `threads` of CPU)."""

    @staticmethod
    def export(model: Path, directory: Path) -> None:
        """Write what this peer loads, to `directory`, from transformers' checkpoint in `model`.
        Only of a peer whose entry in `PEERS` has packages of its own."""
        raise NotImplementedError

    @abstractmethod
    def version(self) -> str:
        """Of the library, with what was compiled into it where it tells."""

    @abstractmethod
    def prefill(self, prompts: list[list[int]]) -> None:
        """Forget everything, take B prompts of equal length and emit the first token of each."""

    @abstractmethod
    def step(self) -> None:
        """One more greedy token, at least, for every row."""

    @abstractmethod
    def tokens(self) -> list[list[int]]:
        """Emitted since the prefill, a list a row."""

    def verify(self, drafts: list[list[int]]) -> list[list[int]]:
        """Greedy ids after the newest token and after each of `drafts` [B, T - 1], in one forward
        of T tokens a row, which is then forgotten: [B, T]. Only where `can_verify`."""
        raise NotImplementedError

    def generate(self, prompts: list[list[int]], num_new: int) -> None:
        """`num_new` tokens a row, prefill included."""
        self.prefill(prompts)
        while min(map(len, self.tokens())) < num_new:
            self.step()
