"""Acceptance records as a golden file of
[InferenceX](https://github.com/SemiAnalysisAI/InferenceX) (`golden_al_distribution/*.yaml`): for
one model, acceptance lengths by draft and by draft tokens of a step. Where InferenceX has thinking
modes, each curve has the name of its draft, such as `self_streaming_llm_65`.

Records of several contexts get a context axis, which InferenceX does not have: in place of a length
by draft tokens, each curve has lengths by draft tokens for each context. Lengths are not rounded.
Intervals stay in the records. `predict/golden.py` reads both. Imports no torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from magicdec.bench.acceptance.record import WHOLE_LOOKUPS, AcceptanceRecord
from magicdec.bench.acceptance.selection import (
    by_context,
    conditions_of,
    first_several,
    lengths_of,
    settings_of,
)
from magicdec.bench.export.export_format import ExportFormat, Row
from magicdec.output.console import printable

SUFFIXES = (".yaml", ".yml")
FLAG = "--format golden"
ALONE = "num_speculative_tokens"  # the keys of InferenceX


def rows_of(number: int, source: str, record: AcceptanceRecord) -> Iterator[Row]:
    if not record.workload.is_random:
        yield {"record": record}


def collect(rows: Iterable[Row]) -> list[AcceptanceRecord]:
    """The records of the rows. Raises ValueError for those that one file cannot tell apart."""
    records = [row["record"] for row in rows]
    drawn = next((record for record in records if not record.has_steps), None)
    if drawn is not None:
        raise ValueError(
            f"{FLAG}: the record of {drawn.draft} is of sampled texts ({drawn.sampling}) whose "
            "drafts were drawn at every position, which does not say what a step of a run accepts; "
            "give records of greedy texts, or of drafts in forks"
        )
    refuse_several(
        map(conditions_of, records), "a file has one model and its texts, and the records"
    )
    for draft, draft_records in by_draft(records).items():
        refuse_several(
            map(settings_of, draft_records),
            f"a curve is named by its draft, and the records of {draft}",
        )
    return records


def refuse_several(conditions: Iterable[dict[str, str]], subject: str) -> None:
    """Raise ValueError, which says what the `subject` is, if a condition has several values."""
    several = first_several(conditions)
    if several is not None:
        noun, names = several
        raise ValueError(
            f"{FLAG}: {subject} are of several {noun}: {', '.join(names)}; give records of one"
        )


def by_draft(records: Iterable[AcceptanceRecord]) -> dict[str, list[AcceptanceRecord]]:
    found = defaultdict(list)
    for record in records:
        found[record.draft].append(record)
    return found


def curve_name(draft: str) -> str:
    """Such as `self:int4_streaming_llm_65`."""
    return draft.replace(" ", "_")


def write(path: Path, records: list[AcceptanceRecord]) -> None:
    path.write_text(text_of(records), encoding="utf-8")


def text_of(records: list[AcceptanceRecord]) -> str:
    """The YAML of records of one model. Without several contexts it is InferenceX's."""
    import yaml

    has_contexts = len({record.context for record in records}) > 1
    curves: dict[str, Any] = {}
    reasons = []
    for draft, draft_records in by_draft(records).items():
        chosen = by_context(draft_records)
        lengths = {context: _lengths(record) for context, record in chosen.items()}
        curves[curve_name(draft)] = lengths if has_contexts else next(iter(lengths.values()))
        reason = draft_records[0].inexact
        reasons += [f"{curve_name(draft)}: {reason}"] if reason else []
        reasons += [WHOLE_LOOKUPS] if draft_records[0].is_judged_whole else []
    workload = records[0].workload
    contexts = _values(record.context for record in records)
    output_len = _values(record.config["workload"]["gen_len"] for record in records)
    temperature = records[0].config["sampling"]["temperature"]
    reasons += [f"sampling: {records[0].sampling}"] if records[0].sampling else []
    keys = "tokens of context, then num_speculative_tokens" if has_contexts else ALONE
    lines = [
        "Acceptance lengths (AL) of the steps of a run over texts, computed from the acceptance at "
        "every position of the model's own continuations by `magicdec acceptance`.",
        f"dataset: {workload.text} | context: {contexts} | temperature: {temperature:g} | "
        f"output_len: {output_len}",
        *reasons,
        f"key = {keys}; value = AL",
    ]
    head = "".join(f"# {printable(' '.join(line.split()))}\n" for line in lines)
    content = {workload.model: curves}
    return head + str(yaml.safe_dump(content, sort_keys=False, allow_unicode=True))


def _values(found: Iterable[int]) -> str:
    return " ".join(map(str, sorted(set(found))))


def _lengths(record: AcceptanceRecord) -> dict[int, float]:
    return {gamma: estimates[0] for gamma, estimates in lengths_of(record).items()}


GOLDEN = ExportFormat(
    rows={"acceptance": rows_of},
    holds="acceptance of models whose weights are not random",
    suffixes=SUFFIXES,
    write=write,
    collect=collect,
)
