"""Checks that a model divides among the ranks of `--nproc` before any of them starts: a hundred
ranks would take minutes to refuse. A check imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from magicdec.config.run_config import RunConfig
from magicdec.config.sections import flag_of
from magicdec.distributed.tensor_parallel import Shard

if TYPE_CHECKING:
    from magicdec.model.checkpoint.source import ModelSource
    from magicdec.systems.options import ServeOptions


def check_heads(config: RunConfig, nproc: int) -> None:
    """Raises ValueError for more ranks than the target has attention heads."""
    with _checked_source(config, nproc) as source:
        Shard(0, nproc).heads(source.config.num_heads, source.config.num_kv_heads)


def check_nproc(config: RunConfig, options: ServeOptions, nproc: int) -> None:
    """Raises ValueError if the ranks cannot divide the model as the modes of `magicdec serve`
    need."""
    with _checked_source(config, nproc) as source:
        # Stages say more of the ranks that a model can have.
        systems = sorted(options.named_systems, key=lambda system: not system.has_stages)
        for system in systems:
            settings = options.systems[system.name]
            settings.check_model(options, options.passes_of(system), source, nproc)


@contextmanager
def _checked_source(config: RunConfig, nproc: int) -> Iterator[ModelSource]:
    """A context with the target's source, in which errors name `--nproc` if they name no flag."""
    from magicdec.model.checkpoint.source import find_model

    source = find_model(flag_of(config.model, "model"), config.model.model)
    try:
        yield source
    except ValueError as error:
        flag = "" if str(error).startswith("--") else f"--nproc {nproc}: "
        raise ValueError(f"{flag}{error}") from None
