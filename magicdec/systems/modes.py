"""The modes of `magicdec serve`, which the systems of `names.SYSTEMS` declare, and Pass: all
requests, served once in one of them. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from string import digits
from typing import Any

from magicdec.names import SYSTEMS as PLACES
from magicdec.names import load_object
from magicdec.systems.declaration import WITH_DRAFT, Drafts, Mode, Ranks, SystemDeclaration

AT_ONCE = " at once"  # behind the concurrency of a pass
SYSTEMS: dict[str, SystemDeclaration] = {name: load_object(at) for name, at in PLACES.items()}
MODES: dict[str, Mode] = {
    name: mode for system in SYSTEMS.values() for name, mode in system.modes.items()
}
SYSTEM_OF = {name: system for system in SYSTEMS.values() for name in system.modes}
RENAMED = {old: new for system in SYSTEMS.values() for old, new in system.renamed_modes.items()}


def _default_names() -> Iterator[str]:
    for name, mode in MODES.items():
        if mode.is_default:
            yield name
        if mode.is_draft_default:
            yield f"{name}{WITH_DRAFT}"


# What `--modes` can name.
NAMES = (
    *MODES,
    *(f"{name}{WITH_DRAFT}" for name, mode in MODES.items() if mode.drafts is Drafts.MAYBE),
)
# What `serve` has without `--modes`, as far as ranks and drafts make it possible.
DEFAULT_NAMES = tuple(_default_names())


def parse_names(words: str | Sequence[str]) -> Any:
    """Names of modes, those of earlier versions as they are called now."""
    texts = [words] if isinstance(words, str) else words
    return [RENAMED.get(word, word) for word in texts]


@dataclass(frozen=True)
class Pass:
    """All requests, served once in one mode. `server` numbers the servers of a mode that several
    serve in. At most `concurrency` requests are in flight; None if they arrive at times of their
    own."""

    mode: str
    is_drafting: bool
    server: int = 0
    concurrency: int | None = None

    @classmethod
    def named(cls, name: str) -> Pass:
        """The pass of a `name`, or of a `full_name`, also in words of earlier versions."""
        name, _, at_once = name.partition(", ")
        concurrency = int(at_once.removesuffix(AT_ONCE)) if at_once else None
        name = RENAMED.get(name, name)
        numbered = name.removesuffix(WITH_DRAFT)
        mode = numbered if numbered in MODES else numbered.rstrip(digits)
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
        is_chosen = self.is_drafting and self.declared.drafts is Drafts.MAYBE
        return f"{self.mode}{WITH_DRAFT}" if is_chosen else self.mode

    @property
    def drafts_ahead(self) -> bool:
        """Whether it drafts beside a target that verifies, in place of in turns."""
        return self.is_drafting and self.declared.is_coupled

    @property
    def drafts_in_turns(self) -> bool:
        return self.is_drafting and not self.drafts_ahead

    @property
    def declared(self) -> Mode:
        return MODES[self.mode]

    @property
    def system(self) -> SystemDeclaration:
        return SYSTEM_OF[self.mode]

    @property
    def ranks(self) -> Ranks:
        return self.declared.ranks

    def __str__(self) -> str:
        return self.name


# The passes of `magicdec run`, in whole batches of prompts that are prefilled once.
PLAIN = Pass("static", False)
DRAFTING = Pass("static", True)
