"""Record: the envelope of every record, one JSON line that is appended and never rewritten; and
RunRecord, the record of a run. Imports no torch. docs/record.md documents the schema and is made
from these classes.

A record can have metrics only if the check of the tokens passed, or if it says that nothing was
compared. A run that failed has a record too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from magicdec.output.writing import append_line, seal_of, to_json, with_seal
from magicdec.records.correctness import Correctness
from magicdec.records.environment import Environment, MemoryRecord
from magicdec.records.fields import RecordPart, recorded
from magicdec.records.performance import Metrics
from magicdec.records.samples import PrefillSamples, SamplesRecord, unequal_threads
from magicdec.records.workload import WorkloadRecord

SCHEMA_VERSION = 3
STATUSES = ("ok", "ok_with_ties", "diverged", "failed")
PASSED = ("ok", "ok_with_ties")
# The keys of `config` that tables and comparisons need in every record.
CONFIG_KEYS = {
    "model": ("model", "dtype", "target_dtype"),
    "parallel": ("device",),
    "kv": ("policy", "budget"),
    "decoding": ("strategy", "drafter", "gamma", "ignore_eos"),
    "workload": ("batch_size", "prefix_len", "gen_len", "num_batches"),
}
WITHOUT_METRICS = "if `diverged` or `failed`"


@dataclass(frozen=True, kw_only=True)
class Record(RecordPart):
    """What every record has. A kind of record is a dataclass that derives from it, a line of
    `names.RECORDS`, and a function that makes tables of its records (`TABLES` of
    `cli/parsing/record_files.py`)."""

    kind: str
    schema_version: Literal[3] = recorded(
        "version of the schema; records of another version are refused", default=SCHEMA_VERSION
    )
    status: str
    config: dict[str, Any] = recorded("the resolved configuration, in which no value is `auto`")

    def to_json(self) -> str:
        return to_json(self)


@dataclass(frozen=True, kw_only=True)
class MeasuredRecord(Record):
    """The envelope of what ran on a machine. What was only predicted has no environment."""

    environment: Environment = recorded("the machine, the software and the launch")


@dataclass(frozen=True, kw_only=True)
class RunRecord(MeasuredRecord):
    """One run: its configuration and environment, whether its tokens were correct, and how fast it
    was."""

    kind: Literal["run"] = recorded("`run`", default="run")
    status: str = recorded(
        "`ok`: the run finished, and all tokens are identical or were not compared; "
        "`ok_with_ties`: some sequences differ, and the rounding of the run explains it; "
        "`diverged`: it does not explain it, or steps or forwards are wrong; `failed`: an error "
        "ended the run",
        choices=STATUSES,
    )
    error: str | None = recorded(
        "type and message of the error that ended the run", null="unless `failed`"
    )
    workload: WorkloadRecord | None = recorded(
        "the prompts and the models", null="if `failed` before they were found"
    )
    correctness: Correctness | None = recorded(
        "the comparison with the baseline's tokens", null="if `failed`"
    )
    metrics: Metrics | None = recorded(
        "performance of the requested strategy", null=WITHOUT_METRICS
    )
    baseline_metrics: Metrics | None = recorded(
        "performance of autoregressive decoding in the same run, on the same prompts, from the "
        "same prefill",
        null=f"{WITHOUT_METRICS}; if the strategy is itself the baseline; with `--no_baseline`",
    )
    samples: dict[str, SamplesRecord] | None = recorded(
        "raw times and counts of each pass that ran, by its name (`autoregressive`, "
        "`speculative`), the baseline first",
        null="if `failed`",
    )
    prefill_samples: PrefillSamples | None = recorded(
        "raw times of prefill, which the passes share", null="if `failed`"
    )
    memory: MemoryRecord | None = recorded(
        "the planned and the measured memory of all ranks together",
        null="if `failed` before it was planned",
    )
    margin: float | None = recorded(
        "share of the acceptance rate whose loss `magicdec gate` still tolerates; 0: any loss is a "
        "regression",
        "0 to 1",
        null="except in the baselines of the gate",
    )
    seal: str | None = recorded(
        "hash of the rest of the line: the first 16 hexadecimal digits of its SHA-256. A line that "
        "was edited since `magicdec gate` wrote it is refused",
        null="except in the runs of the gate",
    )

    def to_json(self) -> str:
        """As `Record.to_json`. A record with a seal gets the one of its content."""
        line = to_json(replace(self, seal=None))
        return line if self.seal is None else with_seal(line, seal_of(line))

    def __post_init__(self) -> None:
        problem = contradiction(self) or missing_key(self.config) or gone_with_trees(self.config)
        assert problem is None, problem

    @property
    def passed(self) -> bool:
        return self.status in PASSED


def contradiction(record: RunRecord) -> str | None:
    """Why the values of a record cannot be in one record; None if they can. No record has metrics
    unless the check of the tokens passed, or the record says that nothing was compared; and its
    passes had equal resources."""
    status = record.status
    correctness = record.correctness
    if status not in STATUSES:
        return f"status is {status}; choose from {', '.join(STATUSES)}"
    if (record.error is not None) != (status == "failed"):
        return "an error belongs to status failed, and only to it"
    by_tokens = None if correctness is None else correctness.status
    if status != "failed" and status != by_tokens:
        return f"status is {status}, which its correctness contradicts"
    has_metrics = (record.metrics, record.baseline_metrics) != (None, None)
    if status not in PASSED and has_metrics:
        return "it has metrics, which exist only where correctness passed"
    if record.workload is None and status != "failed":
        return "it has no workload"
    return unequal_threads(record.samples or {})


def missing_key(config: Mapping[str, Any]) -> str | None:
    """The first key that tables and comparisons need and `config` lacks, as a message."""
    for section, keys in CONFIG_KEYS.items():
        values = config.get(section)
        if not isinstance(values, Mapping):
            return f"it has no config.{section}"
        for key in keys:
            if key not in values:
                return f"it has no config.{section}.{key}"
    return None


def gone_with_trees(config: Mapping[str, Any]) -> str | None:
    """A message if the drafts of an older record were a tree, which no run has any more: it must
    not be taken for a chain of as many tokens as `--gamma` says."""
    tree = config["decoding"].get("tree")
    return None if tree is None else f"it drafted a tree (--tree {tree}), which is gone"


def append_record(path: Path, record: Record) -> None:
    """Append one line, and make sure that it is on disk."""
    append_line(path, record.to_json())


def append_records(flag: str, path: Path, records: Iterable[Record]) -> None:
    """Append a line for each record to the file that a flag names. Raises ValueError, naming the
    flag, if that fails."""
    try:
        append_line(path, "\n".join(record.to_json() for record in records))
    except OSError as error:
        raise ValueError(f"{flag} {path}: {error.strerror}") from None
