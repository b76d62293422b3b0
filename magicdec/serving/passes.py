"""Pass: one way to serve all requests of a command. A command has a pass for each of its batchings,
and one more with the drafter if there is one. Imports no torch.

Must not know how a pass is served.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DRAFTED = "inflight"  # the batching that a drafter is measured under


@dataclass(frozen=True)
class Pass:
    """`mode` is a name of `names.BATCHINGS`."""

    mode: str
    is_drafting: bool = False


def make_passes(modes: Sequence[str], drafts: bool) -> list[Pass]:
    """The passes in their order. The tokens of the first are the reference of the others."""
    return [*map(Pass, modes), *([Pass(DRAFTED, is_drafting=True)] if drafts else [])]
