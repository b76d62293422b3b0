"""The settings that several systems share: of rows, of prompts beside decoding, and of prefixes.
Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from magicdec.config.sections import WorkloadSection
from magicdec.config.setting import same, setting
from magicdec.runner.step_plan import PREFILL_TOKENS
from magicdec.systems.declaration import SystemSettings

if TYPE_CHECKING:
    from magicdec.systems.options import ServeOptions


@dataclass(frozen=True)
class RowSettings(SystemSettings):
    batch_size: int = same(WorkloadSection, "batch_size")
    n_samples: int | None = setting(
        None,
        "Requests in flight together: rows of a batch, and in a ring a multiple of --B. Default: "
        "--B; in a ring, and in every mode of recurrent but sequential, --B for each stage; enough "
        "for the most of --concurrency.",
        metavar="R",
        least=1,
    )

    def rows(self, load: ServeOptions, world_size: int) -> int:
        return self.n_samples or max(self.batch_size, load.most_in_flight)


@dataclass(frozen=True)
class PrefillSettings(SystemSettings):
    prefill_tokens: int | None = setting(
        None,
        "Prompt tokens that a step prefills at most, beside its decoding. Default: "
        f"{PREFILL_TOKENS}; in a ring, --prefill_chunk for each stage.",
        least=1,
    )


@dataclass(frozen=True)
class PrefixSettings(SystemSettings):
    prefix_cache: bool = setting(
        False,
        "Keep the blocks of texts that have ended until others need them, those used longest ago "
        "first, and let requests whose prompts begin alike share what they have in common.",
    )
