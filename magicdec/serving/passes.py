"""Pass: one way to serve all requests of a command. A command has a pass for each of its batchings,
and one more with the drafter if there is one. Imports no torch.

Must not know how a pass is served.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from magicdec.names import COMPACTION, COMPACTIONS

DRAFTED = "inflight"  # the batching that a drafter is measured under


@dataclass(frozen=True)
class Pass:
    """`mode` is a name of `names.BATCHINGS`, and `compaction` one of `names.COMPACTIONS`."""

    mode: str
    is_drafting: bool = False
    compaction: str = COMPACTION

    @property
    def name(self) -> str:
        """What is shown while it is served."""
        name = f"{self.mode} with drafts" if self.is_drafting else self.mode
        return name if self.compaction == COMPACTION else f"{name}, {self.compaction}"


def make_passes(
    modes: Sequence[str], drafts: bool, compactions: Sequence[str] = (COMPACTION,)
) -> list[Pass]:
    """The passes in their order. The tokens of the first are the reference of the others. In
    flight, requests are served under each of the `compactions`; all else takes the first."""
    passes = [
        Pass(mode, compaction=compaction)
        for mode in modes
        for compaction in (compactions if mode == DRAFTED else compactions[:1])
    ]
    drafted = Pass(DRAFTED, is_drafting=True, compaction=compactions[0])
    return [*passes, *([drafted] if drafts else [])]


def check_compactions(names: Sequence[str], modes: Sequence[str]) -> None:
    """Raises ValueError for a compaction that is not known, named twice or of no effect."""
    for name in names:
        if name not in COMPACTIONS:
            raise ValueError(
                f"--compaction {name} is not known; choose from {', '.join(COMPACTIONS)}"
            )
        if names.count(name) > 1:
            raise ValueError(f"--compaction names {name} twice; name each once")
    if len(names) > 1 and DRAFTED not in modes:
        raise ValueError(
            f"--compaction {' '.join(names)}: several are compared under {DRAFTED}, which --modes "
            "lacks; name one"
        )
