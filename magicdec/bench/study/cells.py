"""Cells: the resolved and checked runs of a study, with refusals, and keys that find them among
records. Every rank makes the same cells.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from magicdec.config.run_config import RunConfig
from magicdec.distributed.groups import Launch
from magicdec.output.files import MOST_LINE_BYTES, open_regular
from magicdec.records.pass_record import PassRecord
from magicdec.records.reading import read_records
from magicdec.setup.model_plan import max_tokens
from magicdec.setup.prepare import Prepared, ResolvedRun, SetupCache, complete, find
from magicdec.systems.shared_prefill import prefill_key


@dataclass(frozen=True)
class StudyCell:
    """One run of a study. `prepared` is None if it was refused."""

    resolved: ResolvedRun
    name: str
    prepared: Prepared | None = None
    refusal: str = ""

    @cached_property
    def key(self) -> str:
        return config_key(self.resolved.config.to_dict())

    @cached_property
    def prompts_key(self) -> object:
        """A key that cells share if they can share a prefill. With a sliding window, a draft's
        choice depends on the length of a row."""
        config = self.resolved.config
        window = self.resolved.source.config.narrowest_window
        return prefill_key(config), None if window is None else max_tokens(config)

    @property
    def model_key(self) -> object:
        """A key that cells share if their target is loaded once."""
        model = self.resolved.config.model
        parallel = self.resolved.config.parallel
        kind = model.dtype, model.target_dtype, model.linear, model.elementwise
        return model.model, kind, parallel.rank_group, parallel.threads


def config_key(config: dict[str, Any]) -> str:
    """A key of a resolved config, without output, reasons of choices and nulls, which an older
    record may lack."""
    sections: dict[str, Any] = {}
    for name, section in config.items():
        if name == "output" or section is None:
            continue
        values = {k: v for k, v in section.items() if not k.endswith("_reason") and v is not None}
        sections[name] = values
    return json.dumps(sections, sort_keys=True)


def make_cells(configs: Iterable[RunConfig], launch: Launch) -> list[StudyCell]:
    """The distinct cells. Raises ValueError if one has no resolved config, for example without its
    model."""
    cache = SetupCache()
    cells = dict[str, StudyCell]()
    for config in configs:
        resolved = find(config, launch, cache)
        try:
            # Each rank checks alone: the ranks of a study agree on all refusals at once.
            prepared = complete(resolved, cache, lambda launch, check: check())
            refusal = ""
            resolved = replace(resolved, config=prepared.config)  # with the batches that it has
        except ValueError as error:
            prepared = None
            refusal = " ".join(str(error).split())
        cell = StudyCell(resolved, name_of(config), prepared, refusal)
        cells.setdefault(cell.key, cell)
    return list(cells.values())


def name_of(config: RunConfig) -> str:
    """A run's name from the user's words, as `auto` may differ on another machine."""
    sections = asdict(config) | {"output": None}
    text = json.dumps(sections, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def results_in(path: Path) -> list[PassRecord]:
    """The passes of a results file that runs were asked for, in its order, without those that
    others are compared with; empty without a file or a whole first line. Raises ValueError for a
    file of something else."""
    if not path.is_file():
        return []
    with open_regular(path) as file:
        if not file.readline(MOST_LINE_BYTES).endswith(b"\n"):
            return []
    return [record for record in read_records(path, PassRecord) if not record.is_reference]
