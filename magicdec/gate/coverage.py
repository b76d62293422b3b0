"""Whether the gate has measured what it must: a case for each baseline of its file, or with
`--quick` for each method in it, and for each case a record of its own.

Compares what was to be measured with what came back, whatever happened in between. Must not know
how cases are chosen, nor which process runs which case.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from magicdec.gate.measuring import Result
from magicdec.records.comparison.compare import REGRESSION, Comparison, case_failed, match
from magicdec.records.comparison.conditions import describe, method_of
from magicdec.records.record import RunRecord

NOT_RUN = "the case failed: the baseline file has it, and it was not run"


def failures(cases: Sequence[RunRecord], results: Sequence[Result]) -> list[Comparison]:
    """The cases of these baselines that have no record of their own."""
    assert len(results) == len(cases), f"{len(results)} results of {len(cases)} cases"
    failed = []
    for baseline, result in zip(cases, results, strict=True):
        if isinstance(result, str):
            failed.append(case_failed(baseline, result))
        elif _is_of_another(result, baseline, cases):
            error = f"its result is the record of another case, {describe(result)}"
            failed.append(case_failed(baseline, error))
    return failed


def _is_of_another(record: RunRecord, baseline: RunRecord, cases: Sequence[RunRecord]) -> bool:
    """Whether a record can be compared with baselines, but not with that of its case. One that can
    be compared with none is refused by the comparison."""
    matches = match(record, cases)
    return not isinstance(matches, Comparison) and all(m.old is not baseline for m in matches)


def not_run(
    baselines: Sequence[RunRecord], cases: Sequence[RunRecord], is_quick: bool
) -> list[Comparison]:
    """The baselines of the file that are not among the cases; with `--quick` the methods, each of
    which needs a single case."""
    names: Collection[str]
    if is_quick:
        names = {method_of(b) for b in baselines} - {method_of(case) for case in cases}
    else:
        names = Counter(map(describe, baselines)) - Counter(map(describe, cases))
    return [Comparison(name, REGRESSION, NOT_RUN) for name in sorted(names)]
