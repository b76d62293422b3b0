"""The lines of Flover's published tables: requests that arrive over time, served in flight by
`magicdec inflight`.

Owns what a line means, and what arrivals alone predict. Must not know the tables' files, but for
the one that holds the published times of lone requests.

Source: Flover (Yao et al. 2023, arXiv 2305.13484) and the figures of its repository.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from magicdec.reproduce.setting import DEMO, Finding, Setting, hub_name, published

CONSTANT_TABLE = "flover_constant"
POISSON_LONE_S = 5.8  # published beside the table: a lone request
SPEEDUP = "speedup_over_instances"
# A quantity of the tables: the metric of a record, and the digits that are written.
METRICS = {"makespan_s": 2, "mean_in_flight": 1, "num_steps": 0}
SHRINK_INTERVAL, SHRINK_OUTPUT = 100, 8


class FloverSetting(Setting):
    """`arrival` is a process of `--arrival` with its mean time in ms. Requests have `prompt_len`
    tokens and emit `output_len`; all of them may be in flight together."""

    COLUMNS = ("model", "hardware", "ranks", "num_requests", "arrival", "prompt_len", "output_len",
               "quantity")  # fmt: skip
    ON_GPUS = True

    @property
    def size(self) -> tuple[str, str]:
        return self.ranks, f"{self.hardware} GPUs"

    def command(self) -> list[str]:
        words = ["inflight", "--model", hub_name(self.model), "--nproc", self.ranks]
        words += ["--num_requests", self.num_requests, "--arrival", self.arrival]
        words += ["--prefix_len", self.prompt_len, "--gen_len", self.output_len]
        return [*words, "--B", self.num_requests, "--modes", "inflight", "--dataset", "demo"]

    def at_demo_size(self) -> FloverSetting:
        """Outputs an eighth as long, and arrivals a hundred times as fast, on one rank."""
        process, _, mean_ms = self.arrival.partition(":")
        return self.but(
            model=DEMO, hardware="CPU", ranks="1",
            arrival=f"{process}:{float(mean_ms) / SHRINK_INTERVAL:g}",
            output_len=str(int(self.output_len) // SHRINK_OUTPUT),
        )  # fmt: skip

    def read(self, records: Path) -> Finding:
        if self.quantity == SPEEDUP:
            return Finding(why_not="there is no baseline of concurrent instances here")
        return super().read(records)

    def number(self, passes: dict[str, Any]) -> Finding:
        (*_, metrics) = passes.values()
        return Finding(f"{metrics[self.quantity]:.{METRICS[self.quantity]}f}")

    def predict(self, folder: Path) -> Finding:
        """What arrivals alone give, if requests never slow each other down: each takes as long as a
        lone one, `lone` seconds."""
        count, mean_s = int(self.num_requests), float(self.arrival.partition(":")[2]) / 1e3
        if self.quantity == SPEEDUP:
            return Finding(why_not="there is no model of concurrent instances here")
        if self.arrival.startswith("constant"):
            if count == 1:
                return Finding(why_not="it is what the other lines are predicted from")
            place = {"model": self.model, "num_requests": "1", "quantity": "makespan_s"}
            lone = float(published(folder, CONSTANT_TABLE, **place)[0]["published"])
            return Finding(f"{lone + (count - 1) * mean_s:.2f}")
        lone = POISSON_LONE_S
        # Between two arrivals something runs for the shorter of the gap and `lone`.
        busy_s = lone + (count - 1) * mean_s * (1 - math.exp(-lone / mean_s))
        if self.quantity == "mean_in_flight":
            return Finding(f"{count * lone / busy_s:.1f}")
        tokens = int(self.prompt_len) + int(self.output_len)  # published steps count the prompt too
        return Finding(f"{tokens * busy_s / lone:.0f}")
