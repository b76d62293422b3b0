"""Record: the envelope of every record, a JSON line that is appended and never rewritten; and
RunRecord. docs/record.md is made from these classes. Imports no torch.

A record has metrics only if the check of the tokens passed, or if nothing was compared. A failed
run has a record too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from magicdec.output.writing import append_line, seal_of, to_json, with_seal
from magicdec.records.acceptance import AcceptanceMetrics
from magicdec.records.correctness import Correctness
from magicdec.records.drafted import DraftedPass
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
    """The fields of every record. A new kind needs a dataclass that derives from this one, a line
    in `names.RECORDS`, and a function that makes its tables (`TABLES` in
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
    """The envelope of a record that was measured, not predicted."""

    environment: Environment = recorded("the machine, the software and the launch")


class DraftingRecord(Protocol):
    """A record of a pass that may draft, of a run or of a mode of `magicdec serve`, as the gate
    saves and compares it."""

    @property
    def status(self) -> str: ...
    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def environment(self) -> Environment: ...
    @property
    def workload(self) -> WorkloadRecord | None: ...
    @property
    def metrics(self) -> AcceptanceMetrics | None: ...
    @property
    def margin(self) -> float | None: ...
    @property
    def seal(self) -> str | None: ...

    @property
    def mode(self) -> str | None:
        """The mode of `magicdec serve` with its draft; None for a run."""

    @property
    def passed(self) -> bool:
        """Whether its tokens are not known to be wrong."""

    @property
    def is_logged(self) -> bool:
        """Whether the gate has made it, so that it says of each step what was drafted."""

    @property
    def why_other_drafts(self) -> str | None:
        """Why unchanged code may draft other tokens in it; None if only rounding decides."""

    @property
    def are_judged_by_time(self) -> bool:
        """Whether times decide which drafts are judged, so that only drafts at the same place of
        the same text can be compared."""

    @property
    def is_uncompared(self) -> bool:
        """Whether its tokens could have been compared with others, and were not."""

    def config_as_run(self) -> dict[str, Any]:
        """Its config with the sections and keys of a run's."""

    def serving_flags(self) -> dict[str, Any]:
        """The flags of `magicdec serve` on which its drafts depend; none of a run."""

    def drafted_pass(self) -> DraftedPass:
        """What the pass drafted. Raises ValueError if the record does not say it."""

    def to_json(self) -> str: ...


def margin_field() -> Any:
    return recorded(
        "share of the acceptance rate whose loss `magicdec gate` still tolerates; 0: any loss is a "
        "regression",
        "0 to 1",
        null="except in the baselines of the gate",
    )


def seal_field() -> Any:
    return recorded(
        "hash of the rest of the line: the first 16 hexadecimal digits of its SHA-256. A line that "
        "was edited since `magicdec gate` wrote it is refused",
        null="except in the runs of the gate",
    )


def sealed_json(record: Any) -> str:
    """The line of a record. A record with a seal gets the one of its content."""
    line = to_json(replace(record, seal=None))
    return line if record.seal is None else with_seal(line, seal_of(line))


@dataclass(frozen=True, kw_only=True)
class RunRecord(MeasuredRecord):
    """The configuration, correctness and performance of one run."""

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
    margin: float | None = margin_field()
    seal: str | None = seal_field()

    def to_json(self) -> str:
        return sealed_json(self)

    def __post_init__(self) -> None:
        problem = contradiction(self) or missing_key(self.config) or gone_with_trees(self.config)
        assert problem is None, problem

    @property
    def passed(self) -> bool:
        return self.status in PASSED

    @property
    def mode(self) -> None:
        return None

    @property
    def is_logged(self) -> bool:
        samples = (self.samples or {}).get(self.config["decoding"]["strategy"])
        return samples is not None and samples.draft_hashes is not None

    @property
    def why_other_drafts(self) -> None:
        return None

    @property
    def are_judged_by_time(self) -> bool:
        return False

    @property
    def is_uncompared(self) -> bool:
        is_checked = self.correctness is not None and self.correctness.reference is not None
        return not is_checked and is_greedy(self.config)

    def config_as_run(self) -> dict[str, Any]:
        return self.config

    def serving_flags(self) -> dict[str, Any]:
        return {}

    def drafted_pass(self) -> DraftedPass:
        """As `DraftingRecord`, of the requested strategy."""
        if self.metrics is None or self.metrics.draft_acceptance_rate is None:
            raise ValueError("has no draft_acceptance_rate")
        if self.samples is None:
            raise ValueError("has no samples; renew it with `magicdec gate save`")
        return DraftedPass.of_samples(self.samples[self.config["decoding"]["strategy"]].restored())


PLAIN = {"temperature": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0}


def is_greedy(config: Mapping[str, Any]) -> bool:
    """Whether each token is the one with the largest logit."""
    section = config.get("sampling") or {}
    return all(section.get(name, value) == value for name, value in PLAIN.items())


def contradiction(record: RunRecord) -> str | None:
    """The reason why the values of a record exclude each other: metrics need a passed check or no
    comparison, and passes have equal resources."""
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
    """A message with the first of `CONFIG_KEYS` that `config` lacks."""
    for section, keys in CONFIG_KEYS.items():
        values = config.get(section)
        if not isinstance(values, Mapping):
            return f"it has no config.{section}"
        for key in keys:
            if key not in values:
                return f"it has no config.{section}.{key}"
    return None


def gone_with_trees(config: Mapping[str, Any]) -> str | None:
    """A message if an older record drafted a tree, which must not be taken for a chain of `--gamma`
    tokens."""
    tree = config["decoding"].get("tree")
    return None if tree is None else f"it drafted a tree (--tree {tree}), which is gone"


def append_record(path: Path, record: Record) -> None:
    append_line(path, record.to_json())


def append_records(flag: str, path: Path, records: Iterable[Record]) -> None:
    """Appends records. Raises ValueError, naming the flag, if that fails."""
    try:
        append_line(path, "\n".join(record.to_json() for record in records))
    except OSError as error:
        raise ValueError(f"{flag} {path}: {error.strerror}") from None
