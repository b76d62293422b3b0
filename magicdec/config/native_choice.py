"""What `--native_steps` means: whether a whole forward is one call of a C++ library. Imports no
torch itself, but reading the capabilities of a backend does.

Must not know how the library computes nor how a model is built.
"""

from __future__ import annotations

from dataclasses import dataclass

from magicdec.config.capabilities import capabilities_of
from magicdec.config.choice import Choice, How, asked_for
from magicdec.names import ELEMENTWISE_BESIDE_PACKED


@dataclass(frozen=True)
class StepParts:
    """What computes the parts of a forward. `collectives` is None for one rank."""

    device: str
    backend: Choice
    linear: str
    elementwise: str
    collectives: str | None

    def obstacle(self) -> str | None:
        """Why a forward of these parts cannot be one native call; None if it can."""
        if self.device != "cpu":
            return f"--device {self.device}"
        obstacles = {
            f"--attention {self.backend.name}": not self._is_native_attention,
            f"--linear {self.linear}": self.linear != "packed",
            f"--elementwise {self.elementwise}": self.elementwise != ELEMENTWISE_BESIDE_PACKED,
            f"--collectives {self.collectives}": self.collectives not in (None, "shared_memory"),
        }
        return next((part for part, is_not in obstacles.items() if is_not), None)

    @property
    def _is_native_attention(self) -> bool:
        return capabilities_of(self.backend.name).is_part_of_native_steps


def choose_native_steps(asked: str, parts: StepParts, layer_obstacle: str | None) -> Choice:
    """`layer_obstacle` says what in the model's layers the library does not compute. Raises
    ValueError if the user asked for native steps that are not possible."""
    obstacle = parts.obstacle() or layer_obstacle
    if asked == "on" and obstacle:
        raise ValueError(f"--native_steps on: not possible with {obstacle}; choose from auto, off")
    if asked != "auto":
        return asked_for(asked)
    if obstacle:
        return Choice("off", f"auto: off, {obstacle}", How.SECOND_BEST)
    return Choice("on", "auto: on")
