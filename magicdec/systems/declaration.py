"""SystemDeclaration: what a system says of itself, so that no command, record or table needs to
know it: its paper, its modes, its settings, and what it measures beside requests. Imports no torch.

A new system is a folder with a declaration, a line in `names.SYSTEMS`, and a `System`
(`systems/system.py`) that serves in its modes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Self

from magicdec.config.run_config import RunConfig
from magicdec.config.setting import declared

if TYPE_CHECKING:
    from magicdec.model.checkpoint.source import ModelSource
    from magicdec.systems.modes import Pass
    from magicdec.systems.options import ServeOptions

WITH_DRAFT = "+draft"  # behind the name of a mode that can do without a draft
SAMPLING_CHOICES = ("temperature", "repetition_penalty", "presence_penalty")


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
    """A way to serve requests. `text` says it in a few words."""

    ranks: Ranks
    drafts: Drafts
    text: str
    settings: tuple[str, ...] = ()  # of its system, which only modes that name them use
    is_default: bool = True  # `serve` has it without --modes, if the ranks can have it
    is_draft_default: bool = False  # and with a draft also drafting, where it may
    is_coupled: bool = False  # a draft shares the random numbers of its target, and runs ahead
    is_judged_by_time: bool = False  # which drafts are judged follows from measured times
    is_in_gate: bool = False  # the gate serves in it, drafting


@dataclass(frozen=True)
class SystemSettings:
    """The base of the settings of a system: a section of settings, as those of `config/sections.py`
    are, with what follows from them. `load` are the settings of serving, which all systems share,
    and `passes` those of the system."""

    @property
    def emulates(self) -> bool:
        """Whether its ranks sleep in place of computing, without weights."""
        return False

    @property
    def num_instances(self) -> int:
        """How often each of its modes serves, as with each of several servers; 0 if there is
        nothing that could serve."""
        return 1

    def settled(self, load: ServeOptions, passes: Sequence[Pass]) -> Self:
        """The settings with every default that follows from the load."""
        return self

    def rows(self, load: ServeOptions, world_size: int) -> int:
        """The requests that it serves at once."""
        raise NotImplementedError

    def instance_of(self, serving_pass: Pass, world_size: int) -> Hashable:
        """What passes have in common that one `System` can serve."""
        return serving_pass.server

    def check(
        self, load: ServeOptions, passes: Sequence[Pass], config: RunConfig, world_size: int
    ) -> None:
        """Raises ValueError, one line naming the flag, for what no model makes possible."""

    def check_model(
        self, load: ServeOptions, passes: Sequence[Pass], source: ModelSource, world_size: int
    ) -> None:
        """Raises ValueError, one line naming the flag, if the ranks cannot divide the model."""

    def describe(self) -> dict[str, Any]:
        """The settings as they are recorded."""
        kind: type = type(self)
        return {name: getattr(self, name) for name in declared(kind)}


@dataclass(frozen=True)
class SystemDeclaration:
    """What a system says of itself. `paper` is its arXiv number. `system` is the place of the
    `System` that serves in its `modes`, and `details` that of the `Details` of its records; both
    are loaded where they are needed."""

    name: str
    modes: dict[str, Mode]
    system: str
    settings: type[SystemSettings] = SystemSettings
    details: str = ""
    paper: str | None = None
    page: str = ""  # in docs/
    uses: frozenset[str] = frozenset()  # settings of a run that only some systems use
    draft_settings: frozenset[str] = frozenset()  # its settings that only drafting uses
    drafts_follow: tuple[str, ...] = ()  # its settings on which its drafts depend
    renamed_modes: dict[str, str] = field(default_factory=dict)  # earlier names, still accepted

    @property
    def own_settings(self) -> frozenset[str]:
        kind: type = self.settings
        return frozenset(declared(kind))

    @property
    def has_stages(self) -> bool:
        return any(mode.ranks is Ranks.STAGES for mode in self.modes.values())

    def uses_setting(self, name: str, serving_pass: Pass) -> bool:
        """Whether one of its passes uses a setting of its own."""
        is_of_modes = any(name in mode.settings for mode in self.modes.values())
        if is_of_modes and name not in serving_pass.declared.settings:
            return False
        return serving_pass.is_drafting or name not in self.draft_settings


def refuse_sampling(config: RunConfig, reason: str) -> None:
    """Raises ValueError unless tokens are chosen greedily and without penalties."""
    for name in SAMPLING_CHOICES:
        value = getattr(config.sampling, name)
        if value != getattr(type(config.sampling), name):
            raise ValueError(f"--{name} {value:g} does nothing with {reason}; leave it out")
