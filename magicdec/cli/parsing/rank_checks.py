"""Whether a model can be divided among as many ranks as `--nproc` asks for, found before any of
them starts: a hundred ranks would take minutes to say that they are too many.

Must not know how ranks are started. Imports torch when a check is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from magicdec.config.run_config import RunConfig
from magicdec.config.sections import flag_of
from magicdec.distributed.layer_split import FLAG, count_stages
from magicdec.distributed.stages import make_grid
from magicdec.distributed.tensor_parallel import Shard


def check_heads(config: RunConfig, nproc: int) -> None:
    """Raises ValueError for more ranks than the target has attention heads, which they share."""
    from magicdec.model.checkpoint.source import find_model

    model = find_model(flag_of(config.model, "model"), config.model.model).config
    with _named(nproc):
        Shard(0, nproc).heads(model.num_heads, model.num_kv_heads)


def check_stages(config: RunConfig, layer_split: str | None, nproc: int) -> None:
    """Raises ValueError if the ranks cannot be stages with these layers (`magicdec recurrent`)."""
    from magicdec.model.checkpoint.source import find_model
    from magicdec.pipeline.prepare import check_split

    source = find_model(flag_of(config.model, "model"), config.model.model, is_part=True)
    with _named(nproc):
        grid = make_grid(f"{FLAG} {layer_split}", count_stages(layer_split, nproc), nproc)
        check_split(layer_split, grid, source)
        Shard(0, grid.tensor_parallel).heads(source.config.num_heads, source.config.num_kv_heads)


def check_roles(config: RunConfig, layer_split: str | None, nproc: int) -> None:
    """Raises ValueError if the ranks cannot have these layers and the draft (`magicdec
    pipeline`)."""
    from magicdec.model.checkpoint.source import find_model
    from magicdec.pipelined_run.layout import make_layout

    source = find_model(flag_of(config.model, "model"), config.model.model, is_part=True)
    with _named(nproc):
        layout = make_layout(layer_split, nproc, source.config.num_layers)
        Shard(0, layout.tensor_parallel).heads(source.config.num_heads, source.config.num_kv_heads)


@contextmanager
def _named(nproc: int) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        named = "" if str(error).startswith("--") else f"--nproc {nproc}: "
        raise ValueError(f"{named}{error}") from None
