"""Runs cases one after the other in one process of one rank. Cases with the same prompts share one
prefill; all share the models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from magicdec.config.run_config import RunConfig
from magicdec.console import make_progress
from magicdec.distributed.groups import Launch
from magicdec.records.record import RunRecord
from magicdec.run.resident import Resident, Room, prefill_key
from magicdec.run.run import execute_in
from magicdec.setup.prepare import Prepared, prepare
from magicdec.setup.session import session_of

Case = tuple[int, RunConfig]


def run_cases(cases: Sequence[Case]) -> Iterator[tuple[int, RunRecord | str]]:
    """The number of each case with its record, or with the message of its error."""
    prepared: dict[object, list[tuple[int, Prepared]]] = {}
    for number, config in cases:
        try:
            config.check(world_size=1)
            found = prepare(config, Launch(0, 1, 0, 1))
        except ValueError as error:
            yield number, str(error)
        except Exception as error:  # such as a value of another type, in a file that was edited
            yield number, f"{type(error).__name__}: {error}"
        else:
            prepared.setdefault(repr(prefill_key(found.config)), []).append((number, found))
    for group in prepared.values():
        yield from run_group(group)


def run_group(group: Sequence[tuple[int, Prepared]]) -> Iterator[tuple[int, RunRecord | str]]:
    """The same for cases that share their prompts."""
    progress = make_progress(False)
    room = Room.of([prepared.config for _, prepared in group], is_kept=True)
    resident: Resident | None = None
    for number, prepared in group:
        with session_of(prepared) as session:
            resident = resident or Resident(session.device, progress)
            resident.models.drop_others(group[0][1].source, prepared.draft_source)
            try:
                yield number, execute_in(session, prepared, progress, resident, room).record
            except Exception as error:  # so that it costs this case only
                yield number, f"{type(error).__name__}: {error}"
                resident = None
