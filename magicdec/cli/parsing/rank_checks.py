"""Whether a model can be divided among as many ranks as `--nproc` asks for, found before any of
them starts: a hundred ranks would take minutes to say that they are too many.

Imports torch when a check is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from magicdec.config.run_config import RunConfig
from magicdec.config.sections import flag_of
from magicdec.distributed.layer_split import FLAG, count_stages
from magicdec.distributed.stages import make_grid
from magicdec.distributed.tensor_parallel import Shard

if TYPE_CHECKING:
    from magicdec.model.checkpoint.source import ModelSource


def check_heads(config: RunConfig, nproc: int) -> None:
    """Raises ValueError for more ranks than the target has attention heads, which they share."""
    with _checked_source(config, nproc, is_part=False) as source:
        Shard(0, nproc).heads(source.config.num_heads, source.config.num_kv_heads)


def check_stages(config: RunConfig, layer_split: str | None, nproc: int) -> None:
    """Raises ValueError if the ranks cannot be stages with these layers (`magicdec recurrent`)."""
    from magicdec.pipeline.prepare import check_split

    with _checked_source(config, nproc) as source:
        grid = make_grid(f"{FLAG} {layer_split}", count_stages(layer_split, nproc), nproc)
        check_split(layer_split, grid, source)
        Shard(0, grid.tensor_parallel).heads(source.config.num_heads, source.config.num_kv_heads)


def check_roles(config: RunConfig, layer_split: str | None, nproc: int) -> None:
    """Raises ValueError if the ranks cannot have these layers and the draft (`magicdec
    pipeline`)."""
    from magicdec.pipelined_run.layout import make_layout

    with _checked_source(config, nproc) as source:
        make_layout(layer_split, nproc, source.config.num_layers)


@contextmanager
def _checked_source(config: RunConfig, nproc: int, is_part: bool = True) -> Iterator[ModelSource]:
    """The target's source, within which errors name `--nproc` if they name no flag."""
    from magicdec.model.checkpoint.source import find_model

    source = find_model(flag_of(config.model, "model"), config.model.model, is_part=is_part)
    try:
        yield source
    except ValueError as error:
        flag = "" if str(error).startswith("--") else f"--nproc {nproc}: "
        raise ValueError(f"{flag}{error}") from None
