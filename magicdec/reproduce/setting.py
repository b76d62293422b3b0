"""Setting: what one line of a published table measured, and how this project measures and predicts
the same; and the tables that `magicdec reproduce` knows.

Each system whose tables are reproduced has a subclass in a file of its own. A new table is a line
in `TABLES` and a file in `results/paper/`. `Setting` must not know any system.
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


MAGICDEC = "magicdec.reproduce.magicdec_setting:MagicDecSetting"
FLOVER = "magicdec.reproduce.flover_setting:FloverSetting"
MDI_LLM = "magicdec.reproduce.mdi_llm_setting:MDILLMSetting"
PIPEINFER = "magicdec.reproduce.pipeinfer_setting:PipeInferSetting"
# (what the table shows, the class of its lines, which is imported only then)
TABLES = {
    "magicdec_acceptance": (
        "acceptance of Llama-3.1-8B by prefix length",
        MAGICDEC,
    ),
    "magicdec_speedups_a100": ("speedups on 8 A100", MAGICDEC),
    "magicdec_speedups_h100": ("speedups on 8 H100", MAGICDEC),
    "magicdec_speedups_h100_early": ("speedups on H100, from an early draft", MAGICDEC),
    "magicdec_speedups_budget512": ("speedups by batch size at KV budget 512", MAGICDEC),
    "magicdec_throughput_latency": ("throughput against time per token on 8 A100", MAGICDEC),
    "flover_constant": ("Flover: requests in flight, one every 500 ms", FLOVER),
    "flover_poisson": ("Flover: 32 requests in flight, Poisson arrivals", FLOVER),
    "mdi_llm_generation_time": ("MDI-LLM: samples that circulate through 1 to 3 boards", MDI_LLM),
    "pipeinfer_speedups": ("PipeInfer: asynchronous over synchronous speculation", PIPEINFER),
}
