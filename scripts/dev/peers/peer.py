"""The interface of a peer: a decoder of a fixed batch that performs one command at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

CHUNK = 512  # prompt tokens per row and forward


class Peer(ABC):
    """A model loaded in `dtype`, with room for `max_tokens` cached tokens in each of `batch` rows.

    B rows; token ids are plain lists. Libraries are imported in methods, because the environment of
    a peer need not have the libraries of the others.
    """

    can_verify = False
    can_score = False

    @abstractmethod
    def __init__(self, model: str, dtype: str, threads: int, max_tokens: int, batch: int) -> None:
        """Load the model in directory `model`, in dtype "float32" or "bfloat16", on `threads` CPU
        threads."""

    @staticmethod
    def export(model: Path, directory: Path) -> None:
        """Convert transformers' checkpoint in `model` to this peer's format in `directory`. Needed
        only for peers whose entry in `PEERS` has `modules`."""
        raise NotImplementedError

    @abstractmethod
    def version(self) -> str:
        """The library's name and version, with its compiled features if it reports them."""

    @abstractmethod
    def prefill(self, prompts: list[list[int]]) -> None:
        """Discard all state, prefill B prompts of equal length and emit the first token of each."""

    @abstractmethod
    def step(self) -> None:
        """Emit at least one more greedy token in each row."""

    @abstractmethod
    def tokens(self) -> list[list[int]]:
        """The tokens emitted since the prefill, one list per row."""

    def verify(self, drafts: list[list[int]]) -> list[list[int]]:
        """Greedy ids [B, T] after the last token and after each of `drafts` [B, T - 1], computed in
        one forward of T tokens per row, which is then undone. Only if `can_verify`."""
        raise NotImplementedError

    def score(self, texts: list[list[int]]) -> list[list[float]]:
        """Natural logarithms of the probabilities [B, S - 1] of all tokens of B texts of equal
        length S but the first ones, each after those before it. The tokens are cached and computed
        as those of prompts, in chunks. Discards all state. Only if `can_score`."""
        raise NotImplementedError

    def generate(self, prompts: list[list[int]], num_new: int) -> None:
        """Prefill `prompts` and emit at least `num_new` tokens per row."""
        self.prefill(prompts)
        while min(map(len, self.tokens())) < num_new:
            self.step()


def log_probs_of(logits: Any, following: Any) -> Any:
    """float32 [B, T] of the token ids `following` [B, T], in torch, by `logits` [B, T, vocabulary]
    of any dtype."""
    import torch

    return torch.log_softmax(logits.float(), -1).gather(-1, following[..., None])[..., 0]
