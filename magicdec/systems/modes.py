"""The table of the modes of `magicdec serve`. Imports no torch. A new mode is a line of `MODES` and
a `System` that serves in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from string import digits

from magicdec.names import SEQUENTIAL

BATCHING = "magicdec.systems.flover.system:Flover"
RING = "magicdec.systems.mdi_llm.system:MDILLM"
SPECULATIVE = "magicdec.systems.pipeinfer.system:PipeInfer"
ENDPOINT = "magicdec.systems.servers.system:Servers"
WITH_DRAFT = "+draft"
AT_ONCE = " at once"  # behind the concurrency of a pass


class Ranks(Enum):
    """The ranks that compute in a mode; the others wait."""

    FIRST = "first"  # with the threads of all ranks of its host, or all as --batch_ranks says
    ALL = "all"
    STAGES = "stages"
    NONE = "none"  # another program computes


class Drafts(Enum):
    NEVER = "never"
    MAYBE = "maybe"  # with the suffix +draft
    ALWAYS = "always"


@dataclass(frozen=True)
class Mode:
    """A way to serve requests, by the class `system`."""

    system: str
    ranks: Ranks
    drafts: Drafts
    text: str


MODES = {
    SEQUENTIAL: Mode(BATCHING, Ranks.FIRST, Drafts.MAYBE, "one request after the other"),
    "static": Mode(BATCHING, Ranks.FIRST, Drafts.MAYBE, "whole batches"),
    "dynamic": Mode(BATCHING, Ranks.FIRST, Drafts.MAYBE, "batches that wait a limited time"),
    "inflight": Mode(BATCHING, Ranks.FIRST, Drafts.MAYBE, "requests join a running batch"),
    "tensor_parallel": Mode(
        BATCHING, Ranks.ALL, Drafts.MAYBE, "the same on all ranks, which share every layer"
    ),
    "ring": Mode(RING, Ranks.STAGES, Drafts.MAYBE, "requests circulate through stages of layers"),
    "iterative": Mode(SPECULATIVE, Ranks.STAGES, Drafts.NEVER, "stages decode token by token"),
    "sync": Mode(SPECULATIVE, Ranks.STAGES, Drafts.ALWAYS, "stages verify one batch of drafts"),
    "async": Mode(SPECULATIVE, Ranks.STAGES, Drafts.ALWAYS, "drafts run ahead of the stages"),
    "endpoint": Mode(ENDPOINT, Ranks.NONE, Drafts.NEVER, "the server at --endpoint"),
}
# What `--modes` can name.
NAMES = (
    *MODES,
    *(f"{name}{WITH_DRAFT}" for name, mode in MODES.items() if mode.drafts is Drafts.MAYBE),
)


@dataclass(frozen=True)
class Pass:
    """All requests, served once in one mode. `server` numbers the servers of `--endpoint`. At most
    `concurrency` requests are in flight; None if they arrive at times of their own."""

    mode: str
    is_drafting: bool
    server: int = 0
    concurrency: int | None = None

    @classmethod
    def named(cls, name: str) -> Pass:
        """The pass of a `name`, or of a `full_name`."""
        name, _, at_once = name.partition(", ")
        concurrency = int(at_once.removesuffix(AT_ONCE)) if at_once else None
        numbered = name.removesuffix(WITH_DRAFT)
        mode = numbered.rstrip(digits)
        number = numbered.removeprefix(mode)
        is_drafting = numbered != name or MODES[mode].drafts is Drafts.ALWAYS
        return cls(mode, is_drafting, int(number) - 1 if number else 0, concurrency)

    @property
    def full_name(self) -> str:
        """Its name in tables and records, which no other pass of its command has."""
        if self.concurrency is None:
            return self.name
        return f"{self.name}, {self.concurrency}{AT_ONCE}"

    @property
    def name(self) -> str:
        """As `--modes` names it."""
        if self.server:
            return f"{self.mode}{self.server + 1}"
        is_chosen = self.is_drafting and MODES[self.mode].drafts is Drafts.MAYBE
        return f"{self.mode}{WITH_DRAFT}" if is_chosen else self.mode

    @property
    def drafts_ahead(self) -> bool:
        """Whether it drafts while a target verifies, in place of in turns."""
        return self.is_drafting and self.system == SPECULATIVE

    @property
    def drafts_in_turns(self) -> bool:
        return self.is_drafting and not self.drafts_ahead

    @property
    def system(self) -> str:
        return MODES[self.mode].system

    @property
    def ranks(self) -> Ranks:
        return MODES[self.mode].ranks

    def __str__(self) -> str:
        return self.name


def default_names(modes: Sequence[str], world_size: int, has_draft: bool) -> list[str]:
    """The names of those `modes` that run on `world_size` ranks, with a draft or without one."""
    names = []
    for name in modes:
        mode = MODES[name]
        if mode.ranks is Ranks.ALL and world_size == 1:
            continue
        if mode.drafts is not Drafts.ALWAYS or has_draft:
            names.append(name)
    return names
