"""Setting: what one line of a published table measured, and how this project measures and predicts
the same.

Each system whose tables are reproduced has a subclass in a file of its own, which `tables.py`
names. This file must not know any system.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

DEMO = "demo"  # the packaged model


@dataclass(frozen=True)
class Finding:
    """A number as text with its 95 % interval, if it has one; or the reason why there is none."""

    value: str = ""
    why_not: str = ""
    interval: str = ""

    def __post_init__(self) -> None:
        assert bool(self.value) != bool(self.why_not), "one of the two"


@dataclass(frozen=True)
class Setting(ABC):
    """What was measured. The fields of a subclass are the first columns of its tables: text, empty
    where nothing is published."""

    @property
    @abstractmethod
    def num_gpus(self) -> int:
        """GPUs that its command needs; 0 if it runs without one."""

    @property
    def num_hosts(self) -> int:
        """Hosts that its command needs. `magicdec reproduce` starts runs on one."""
        return 1

    @property
    @abstractmethod
    def needs(self) -> str:
        """The hardware that its command needs, such as `8 A100 GPUs`."""

    @abstractmethod
    def command(self) -> list[str]:
        """The arguments of `magicdec` that measure it, without `--out`."""

    @abstractmethod
    def at_demo_size(self) -> Setting:
        """The same for the packaged models on a small machine without a GPU."""

    @abstractmethod
    def predict(self, folder: Path) -> Finding:
        """What the project's models of cost predict for it. `folder` holds the published tables."""

    @abstractmethod
    def read(self, records: Path) -> Finding:
        """Its number in the file that its command wrote."""
