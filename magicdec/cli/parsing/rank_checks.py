"""Whether a model can be divided among as many ranks as `--nproc` asks for, found before any of
them starts: a hundred ranks would take minutes to say that they are too many.

Must not know how ranks are started. Imports torch when a check is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from magicdec.config.run_config import RunConfig
from magicdec.config.sections import flag_of
from magicdec.distributed.tensor_parallel import Shard
from magicdec.serving.modes import RING, SPECULATIVE
from magicdec.serving.options import ServeOptions


def check_heads(config: RunConfig, nproc: int) -> None:
    """Raises ValueError for more ranks than the target has attention heads, which they share."""
    from magicdec.model.checkpoint.source import find_model

    model = find_model(flag_of(config.model, "model"), config.model.model).config
    with _named(nproc):
        Shard(0, nproc).heads(model.num_heads, model.num_kv_heads)


def check_nproc(config: RunConfig, options: ServeOptions, nproc: int) -> None:
    """Raises ValueError if the ranks cannot divide the model as the modes of `magicdec serve`
    need."""
    from magicdec.model.checkpoint.source import find_model
    from magicdec.pipelined_run.layout import make_layout, read_split
    from magicdec.serving.configs import check_split

    flag, name, split = flag_of(config.model, "model"), config.model.model, options.layer_split
    if any(options.is_on_all(each, nproc) for each in options.passes):
        check_heads(config, nproc)
    if options.of_system(RING):
        source = find_model(flag, name, is_part=True)
        with _named(nproc):
            grid = options.grid(nproc)
            check_split(read_split(split).stages, grid, source)
            model = source.config
            Shard(0, grid.tensor_parallel).heads(model.num_heads, model.num_kv_heads)
    if options.of_system(SPECULATIVE):
        source = find_model(flag, name, is_part=True)
        with _named(nproc):
            make_layout(split, nproc, source.config.num_layers)


@contextmanager
def _named(nproc: int) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        named = "" if str(error).startswith("--") else f"--nproc {nproc}: "
        raise ValueError(f"{named}{error}") from None
