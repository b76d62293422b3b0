"""Which records of one table differ in acceptance by no more than the noise. Imports no torch.

Records are compared that decoded the same prompts of the same model, prompt by prompt, each with
the one that accepted most.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from magicdec.records.comparison.change import change_of, pair_of
from magicdec.records.record import RunRecord
from magicdec.records.table import method

MOST_RECORDS = 100  # of a table; a longer one is for programs, and is not compared


class Noted:
    """Passes records on, and keeps them if they are few."""

    def __init__(self, records: Iterable[RunRecord]) -> None:
        self._records = iter(records)
        self.few: list[RunRecord] = []

    def __iter__(self) -> Iterator[RunRecord]:
        self.few = list(islice(self._records, MOST_RECORDS + 1))
        yield from self.few
        if len(self.few) > MOST_RECORDS:
            self.few = []
            yield from self._records


def noise_lines(records: Sequence[RunRecord]) -> list[str]:
    """A line for each set of records with the same prompts and gamma in which some differ from the
    best by no more than the noise."""
    sets: dict[object, list[RunRecord]] = {}
    for record in records:
        if record.workload is not None and _rate(record) is not None:
            decoding, dtype = record.config["decoding"], record.config["model"]["dtype"]
            gamma = decoding.get("tree") or decoding["num_draft_tokens"]
            key = record.workload.sha256, record.workload.model_sha256, gamma, dtype
            sets.setdefault(key, []).append(record)
    return [line for same in sets.values() if len(same) > 1 and (line := _line(same))]


def _line(records: list[RunRecord]) -> str:
    best = max(records, key=lambda record: _rate(record) or 0.0)
    alike = [r for r in records if r is not best and _is_noise(r, best)]
    if not alike:
        return ""
    names = "; ".join(dict.fromkeys(method(record) for record in alike))
    assert best.workload is not None
    return (
        f"acceptance inside the noise of the best ({method(best)}: {_rate(best):.3f}), over "
        f"{best.workload.num_prompts} prompts: {names}"
    )


def _is_noise(record: RunRecord, best: RunRecord) -> bool:
    """Whether the interval of the change holds 0. Records without samples are not compared."""
    try:
        return change_of([pair_of(record, best)]).is_noise
    except ValueError:
        return False


def _rate(record: RunRecord) -> float | None:
    return None if record.metrics is None else record.metrics.acceptance_rate
