"""Setting: what one line of a published table measured, and how this project measures and predicts
the same; and the tables that `magicdec reproduce` knows.

Each system whose tables are reproduced has a subclass in a file of its own. A new table is a line
in `TABLES` and a file in `results/paper/`. `Setting` must not know any system.
"""

from __future__ import annotations

import csv
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

S = TypeVar("S", bound="Setting")
DEMO = "demo"  # the packaged model
HUB = {
    "llama-2-7b-32k": "togethercomputer/LLaMA-2-7B-32K",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
    "tinyllama-1.1b": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "gpt-j-6b": "EleutherAI/gpt-j-6b",
    "llama-13b": "huggyllama/llama-13b",
    "llama-33b": "huggyllama/llama-30b",
    "llama-65b": "huggyllama/llama-65b",
    "gpt2-large": "openai-community/gpt2-large",
    "gpt2-xl": "openai-community/gpt2-xl",
    "dolphin-70b": "cognitivecomputations/dolphin-2.2-70b",
    "tinyllama-openorca-1.1b": "jeff31415/TinyLlama-1.1B-1T-OpenOrca",
    "orca-2-7b": "microsoft/Orca-2-7b",
    "goliath-120b": "alpindale/goliath-120b",
    "xwin-7b": "Xwin-LM/Xwin-LM-7B-V0.2",
    "xwin-13b": "Xwin-LM/Xwin-LM-13B-V0.2",
    "falcon-180b": "tiiuae/falcon-180B",
    "falcon-7b": "tiiuae/falcon-7b",
    "falcon-40b": "tiiuae/falcon-40b",
}


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
    """What was measured: the texts of the first columns of a table, empty where nothing is
    published. `COLUMNS` names them, and each is an attribute of a setting."""

    values: tuple[str, ...]

    COLUMNS: ClassVar[tuple[str, ...]]
    NEEDED: ClassVar[tuple[str, ...]] = ()  # passes whose metrics it reads; empty: the last one
    ON_GPUS: ClassVar[bool] = False  # of one host; otherwise it runs on hosts

    @classmethod
    def of(cls: type[S], row: Mapping[str, str]) -> S:
        """The setting of a row of a table."""
        return cls(tuple(row[name] for name in cls.COLUMNS))

    def __getattr__(self, name: str) -> str:
        if name not in type(self).COLUMNS:
            raise AttributeError(name)
        return self.values[self.COLUMNS.index(name)]

    def to_dict(self) -> dict[str, str]:
        return dict(zip(self.COLUMNS, self.values, strict=True))

    def but(self: S, **values: str) -> S:
        """The setting with other values in these columns."""
        return self.of(self.to_dict() | values)

    @property
    def is_demo(self) -> bool:
        return self.model == DEMO

    @property
    @abstractmethod
    def size(self) -> tuple[str, str]:
        """The number of GPUs or hosts, empty if it is not published, and what they are."""

    @property
    def num_gpus(self) -> int:
        """GPUs that its command needs; 0 if it runs without one."""
        return int(self.size[0] or 1) if self.ON_GPUS and not self.is_demo else 0

    @property
    def num_hosts(self) -> int:
        """Hosts that its command needs. `magicdec reproduce` starts runs on one."""
        return 1 if self.ON_GPUS or self.is_demo else int(self.size[0])

    @property
    def needs(self) -> str:
        """The hardware that its command needs, such as `8 A100 GPUs`."""
        return "a run" if self.is_demo else " ".join(self.size).lstrip()

    @abstractmethod
    def command(self) -> list[str]:
        """The arguments of `magicdec` that measure it, without `--out`."""

    @abstractmethod
    def at_demo_size(self) -> Setting:
        """The same for the packaged models on a small machine without a GPU."""

    @abstractmethod
    def predict(self, folder: Path) -> Finding:
        """What the project's models of cost predict for it. `folder` holds the published tables."""

    def read(self, records: Path) -> Finding:
        """Its number in the file that its command wrote."""
        lines = records.read_text(encoding="utf-8").splitlines()
        passes = {record.get("name"): record["metrics"] for record in map(json.loads, lines)}
        if None in [passes[name] for name in self.NEEDED or [*passes][-1:]]:
            return Finding(why_not="the tokens of its run were wrong")
        return self.number(passes)

    @abstractmethod
    def number(self, passes: dict[str, Any]) -> Finding:
        """The number of the metrics of each pass, by its name; a run is one pass."""


def hub_name(model: str) -> str:
    """What a published model is called on the Hub; others keep their names."""
    return HUB.get(model, model)


def published(folder: Path, table: str, **values: str) -> list[dict[str, str]]:
    """The rows of a table that have a published number and these values in their columns."""
    with (folder / f"{table}.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [row for row in rows if row["published"] and values.items() <= row.items()]


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
