"""`magicdec serve` and its short names as one rank reads and prepares them, for tests of one
process: what the ranks tell each other is the same on all of them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from magicdec.bench.prepare import PreparedServing, prepare
from magicdec.cli.serve import COMMANDS, ServeCommand
from magicdec.distributed.groups import Launch

SMALL = ("--prefix_len", "100", "--gen_len", "8", "--device", "cpu")
EXCHANGES = ("magicdec.distributed.groups", "magicdec.systems.stages.auto_split")
Exchange = Callable[..., list[str]]


def parse_as(
    command: str, tmp_path: Path, *words: str, rank: int = 0, world_size: int = 1
) -> ServeCommand:
    launch = Launch(rank, world_size, rank, world_size)
    return COMMANDS[command].parse([*SMALL, "--out", str(tmp_path / "r.jsonl"), *words], launch)


def all_alike(launch: Launch, text: str, topic: str = "") -> list[str]:
    return [text] * launch.world_size


def prepare_as(
    command: str,
    tmp_path: Path,
    *words: str,
    rank: int = 0,
    world_size: int = 1,
    exchange: Exchange = all_alike,
) -> PreparedServing:
    experiment = parse_as(command, tmp_path, *words, rank=rank, world_size=world_size)
    with pytest.MonkeyPatch.context() as patch:
        for module in EXCHANGES:
            patch.setattr(f"{module}.exchange_texts", exchange)
        launch = Launch(rank, world_size, rank, world_size)
        return prepare(experiment.config, experiment.options, launch)
