"""TileChoices: which tile multiplies fastest on a GPU. It is measured at the first product of a
kind, in the warm-up before steps are captured, and kept in a file for this card, torch and Triton,
so that the same command runs the same kernels again.

Ranks choose for themselves: they add up what they have multiplied, so that all have the same sums.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import cache
from pathlib import Path

import torch

from magicdec.kernels.build import library_folder, write_whole
from magicdec.kernels.gpu_clock import seconds_on_gpu
from magicdec.model.linear.tiles import Tile

SAMPLES = 7
CALLS = 5  # of a sample


class TileChoices:
    """The tiles that are kept in the file `path`, by the kind of a product."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._kept = self._read()

    def choose(
        self, kind: str, tiles: Sequence[Tile], time: Callable[[Tile], float] | None
    ) -> Tile:
        """The one of `tiles` that is kept for this kind of product; else the one that has the least
        `time`, or the first one where nothing can be measured."""
        kept = self._kept.get(kind)
        found = next((tile for tile in tiles if [*astuple(tile)] == kept), None)
        if found is not None:
            return found
        if time is None:
            return tiles[0]
        fastest = min(tiles, key=time)
        # Another rank may have written meanwhile.
        self._kept = {**self._read(), **self._kept, kind: [*astuple(fastest)]}
        text = json.dumps(self._kept, indent=1, sort_keys=True)
        write_whole(self.path, lambda partial: partial.write_text(text + "\n"))
        return fastest

    def _read(self) -> dict[str, list[int]]:
        """What the file holds; nothing if it is not there, or was cut off."""
        try:
            found = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


@cache
def choices_on(device: torch.device) -> TileChoices:
    from triton import __version__ as kernel_compiler

    made = f"{torch.cuda.get_device_name(device)} {torch.__version__} {kernel_compiler}"
    name = "-".join(re.findall(r"[A-Za-z0-9.]+", made))
    return TileChoices(library_folder() / f"tiles-{name}.json")


def median_seconds(call: Callable[[], object]) -> float:
    """Median seconds of a call on a GPU, after one that compiles."""
    call()
    return statistics.median(seconds_on_gpu(call, CALLS) for _ in range(SAMPLES))
