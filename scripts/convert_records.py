"""Converts a file of records of schema version 3 to the one that this program reads.

    python scripts/convert_records.py OLD.jsonl NEW.jsonl

A run becomes the passes `static` and `static+draft`; of one that the gate has made, the latter
alone. Modes have their names of now. The prompts of a batch count as equally long, since version 3
has the sum of their lengths. Metrics are computed anew: the times of requests begin with the
prefill that the passes share. What version 3 says of the steps of a served mode without their times
is left out: their median, stalls, and the throughput without stalls. A file that ends in .gz is
compressed.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from magicdec.bench.recording import MeasuredParts
from magicdec.config.run_config import split_draft
from magicdec.config.setting import declared
from magicdec.names import BASELINE, RECORDS, SPECULATIVE, load_named
from magicdec.output.writing import to_json
from magicdec.records.acceptance import ReportedCounts
from magicdec.records.computing import (
    Beside,
    acceptances_by_group,
    pass_metrics,
    ratios,
    times_by_turn,
)
from magicdec.records.pass_record import (
    GroupRecord,
    PassRecord,
    RequestRecord,
    reference_of,
)
from magicdec.records.reading import parse_line
from magicdec.records.record import SCHEMA_VERSION, Status, commands_of, records_of_type
from magicdec.systems.modes import Pass
from magicdec.systems.options import ServeOptions

OLD = SCHEMA_VERSION - 1
PLAIN_PASS = "static"
DRAFTING_PASS = "static+draft"
STATUSES = {
    "ok": Status.VERIFIED,
    "ok_with_ties": Status.VERIFIED_WITH_TIES,
    "diverged": Status.MISMATCH,
    "differs": Status.UNVERIFIED,
    "unchecked": Status.UNVERIFIED,
    "failed": Status.FAILED,
}
ITL = ("mean_itl_ms", "p50_itl_ms", "p90_itl_ms", "p99_itl_ms")
RENAMED_OF_REQUESTS = {"draft_keys": "num_draft_kv_read"}
AHEAD = "async"  # the mode whose drafts do not follow the newest token
LEFT_OUT_OF_REQUESTS = ("num_prefix_tokens",)
# The parts of a pass that `details` has taken the place of, with the `kind` of each.
DETAILS = {"ring": "mdi_llm", "speculation": "pipeinfer", "server": "servers"}
# Keys of `config.workload` that every served pass has, beside the settings of its system.
PASS_KEYS = ("dataset", "prompt_format", "seed", "mode", "draft")


def converted(raw: dict[str, Any]) -> list[Any]:
    """The records of a line of version 3. Raises ValueError for another version."""
    if raw.get("schema_version") != OLD:
        raise ValueError(f"schema_version is {raw.get('schema_version')}, not {OLD}")
    raw["schema_version"] = SCHEMA_VERSION
    if raw["kind"] == "run":
        return list(passes_of_run(raw))
    if raw["kind"] == "serving":
        return [pass_of_serving(raw)]
    return [parse_line(json.dumps(raw), load_named(RECORDS, raw["kind"]))]


def pass_of(values: dict[str, Any]) -> PassRecord:
    """The record of these values, checked as one that is read."""
    record: PassRecord = parse_line(to_json(values), PassRecord)
    return record


def passes_of_run(raw: dict[str, Any]) -> Iterator[PassRecord]:
    """The baseline and the requested strategy of a run."""
    shared = {name: raw.get(name) for name in ("schema_version", "environment", "workload")}
    shared |= {"kind": "pass", "memory": raw.get("memory"), "margin": raw.get("margin")}
    strategy = raw["config"]["decoding"]["strategy"]
    if raw["status"] == "failed" or raw.get("samples") is None:
        name = DRAFTING_PASS if strategy != BASELINE else PLAIN_PASS
        failed = {"status": Status.FAILED, "requests": [], "groups": [], "error": raw["error"]}
        yield pass_of(shared | failed | {"name": name, "config": raw["config"]})
        return
    samples = {name: SimpleNamespace(**values) for name, values in raw["samples"].items()}
    prefill = SimpleNamespace(**raw["prefill_samples"])
    is_random = is_random_of(raw["workload"])
    correctness = raw["correctness"]
    is_compared = correctness.get("reference") is not None
    plain: MeasuredParts | None = None
    for name, pass_samples in samples.items():
        is_drafting = name != BASELINE
        has_counts = is_drafting and not is_random and pass_samples.num_accepted is not None
        lens = prompt_lens(pass_samples, prefill)
        parts = MeasuredParts(
            requests_of(pass_samples, prefill, lens, has_counts),
            groups_of(pass_samples, prefill, has_counts),
        )
        found = correctness | ({"reference": PLAIN_PASS} if is_compared else {})
        num_differing = None
        if is_compared:
            theirs = parts if plain is None else plain
            pairs = zip(parts.requests, theirs.requests, strict=True)
            num_differing = sum(one.output_hash != other.output_hash for one, other in pairs)
        if is_compared and not is_drafting:
            found = identical(correctness)
        status = STATUSES[raw["status"]] if is_compared and is_drafting else Status.VERIFIED
        status = status if is_compared else Status.UNVERIFIED
        beside = Beside(
            is_drafting=is_drafting,
            is_random=is_random,
            bandwidth=raw["environment"].get("read_bandwidth_bytes_per_s"),
            categories=raw["workload"].get("categories"),
            warmup_calibration_ms=pass_samples.warmup_calibration_ms,
            reference=plain,
        )
        is_sealed = raw.get("seal") is not None
        values = {
            "status": status,
            "name": DRAFTING_PASS if is_drafting else PLAIN_PASS,
            "config": raw["config"] if is_drafting else without_drafts(raw["config"]),
            "reference": PLAIN_PASS if len(samples) > 1 else None,
            "num_differing": num_differing,
            "correctness": found,
            **measured(parts, beside, status),
        }
        record = pass_of(shared | plain_values(values))
        plain = plain or parts
        if is_drafting or not is_sealed:
            yield sealed(record) if is_sealed else record


def measured(parts: MeasuredParts, beside: Beside, status: Status) -> dict[str, Any]:
    """The requests, the groups and what follows from them."""
    passed = status is not Status.MISMATCH
    by_group = acceptances_by_group(parts.requests) if passed and not beside.is_random else {}
    return {
        "metrics": pass_metrics(parts, beside) if passed else None,
        "requests": list(parts.requests),
        "groups": list(parts.groups),
        "times_by_turn": times_by_turn(parts.requests) if passed else None,
        **by_group,
    }


def plain_values(values: dict[str, Any]) -> dict[str, Any]:
    """Values with dataclasses as dictionaries."""

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(item) for item in value]
        return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value

    return {name: plain(value) for name, value in values.items()}


def sealed(record: PassRecord) -> PassRecord:
    return replace(record, seal="")  # its line gets the one of its content


def is_random_of(workload: Mapping[str, Any]) -> bool:
    draft = workload.get("draft")
    return bool(workload["random_weights"] or (draft and draft["random_weights"]))


def identical(correctness: Mapping[str, Any]) -> dict[str, Any]:
    """The comparison of a pass with itself."""
    return {
        "reference": PLAIN_PASS,
        "identical": True,
        "num_tokens": correctness["num_tokens"],
        "num_excused": 0,
        "num_diverged": 0,
    }


def without_drafts(config: dict[str, Any]) -> dict[str, Any]:
    decoding = config["decoding"] | {"strategy": BASELINE, "drafter": None}
    return config | {"decoding": decoding, "draft": None}


def prompt_lens(samples: Any, prefill: Any) -> list[int]:
    """The lengths of the prompts, as if those of a batch were equally long."""
    lens = []
    for tokens, num_tokens in zip(samples.sequence_tokens, prefill.num_tokens, strict=True):
        count = len(tokens)
        lens += [num_tokens // count + (row < num_tokens % count) for row in range(count)]
    return lens


def pass_of_serving(raw: dict[str, Any]) -> PassRecord:
    """The pass of a served mode."""
    old = raw.get("metrics")
    status = STATUSES[raw["status"]]
    requests = [request_of_serving(request) for request in raw["requests"]]
    if raw["config"]["workload"]["mode"] != AHEAD:
        requests = [replace(request, per_step_position=None) for request in requests]
    config = config_of_serving(raw["config"], raw["name"])
    groups = []
    if requests:
        groups = [group_of_serving(raw, old or {}, len(requests))]
    values: dict[str, Any] = {
        name: raw.get(name)
        for name in (
            "schema_version",
            "environment",
            "workload",
            "name",
            "reference",
            "num_differing",
            "correctness",
            "error",
            "margin",
        )
    }
    if status is not Status.FAILED and values["correctness"] is None:
        values["correctness"] = {"num_tokens": sum(r.output_len for r in requests)}
    values |= {"kind": "pass", "status": status, "config": config}
    for part in (values, values["correctness"] or {}):
        for key in ("name", "reference"):
            if part.get(key) is not None:
                part[key] = Pass.named(part[key]).full_name
    values |= {"requests": requests, "groups": groups}
    if old is not None:
        beside = Beside(
            is_drafting=config["decoding"]["drafter"] is not None,
            is_random=is_random_of(raw["workload"]),
            goodput=config["workload"].get("goodput") or {},
            categories=raw["workload"].get("categories"),
            reported_total=reported_total(raw, old),
        )
        parts = MeasuredParts(requests, groups)
        values |= measured(parts, beside, status)
        values["metrics"] = replace(values["metrics"], **{name: old.get(name) for name in ITL})
    for name, kind in DETAILS.items():
        if raw.get(name) is not None:
            values["details"] = raw[name] | {"kind": kind}
            if raw.get("occupancy") is not None:
                values["details"]["occupancy"] = raw["occupancy"]
    record = pass_of(plain_values(values))
    return record if raw.get("seal") is None else sealed(record)


def request_of_serving(raw: dict[str, Any]) -> RequestRecord:
    values = {RENAMED_OF_REQUESTS.get(name, name): value for name, value in raw.items()}
    num_found = values.get("num_prefix_tokens")
    for name in LEFT_OUT_OF_REQUESTS:
        values.pop(name, None)
    if num_found is not None:
        values["num_looked_up_tokens"] = values["prompt_len"] * len(values["joined_ms"])
    return RequestRecord(**values)


def group_of_serving(
    raw: Mapping[str, Any], metrics: Mapping[str, Any], num_requests: int
) -> GroupRecord:
    peak = metrics.get("peak_memory_bytes")
    num_steps = metrics.get("num_steps")
    mean_in_flight = metrics.get("mean_in_flight")
    num_in_flight = None
    if mean_in_flight is not None and num_steps is not None:
        num_in_flight = round(mean_in_flight * num_steps)
    return GroupRecord(
        num_requests=num_requests,
        num_steps=num_steps,
        num_in_flight=num_in_flight,
        step_ms=[],
        draft_ms=[],
        verify_ms=[],
        decode_ms=[],
        peak_memory_bytes=None if peak is None else [peak],
        threads=raw["threads"],
    )


def config_of_serving(config: dict[str, Any], name: str) -> dict[str, Any]:
    """The config of a pass, which says what drafts also where stages draft nothing themselves, and
    the flags of its own system alone."""
    is_drafting = "draft" in config
    decoding = config["decoding"]
    if is_drafting:
        drafter, _ = split_draft(config["workload"]["draft"])
        decoding = decoding | {"strategy": SPECULATIVE, "drafter": drafter}
    serving_pass = Pass.named(name)
    declared_names = {*PASS_KEYS, *declared(ServeOptions)}
    declared_names |= serving_pass.system.own_settings
    flags = {key: value for key, value in config["workload"].items() if key in declared_names}
    flags |= {"mode": serving_pass.mode}
    flags |= {"modes": [Pass.named(mode).name for mode in flags["modes"]]}
    return config | {"decoding": decoding, "workload": flags}


def reported_total(raw: Mapping[str, Any], metrics: Mapping[str, Any]) -> ReportedCounts | None:
    """What a server's counters say of the whole pass, which version 3 has in its metrics alone."""
    server = raw.get("server")
    if server is None or "counters" not in (server["source"] or ""):
        return None
    histogram = metrics.get("acceptance_histogram")
    has_emitted = metrics.get("mean_emitted_tokens") is not None  # steps may draft nothing
    num_later = sum(request["output_len"] - 1 for request in raw["requests"])
    return ReportedCounts(
        drafted=metrics.get("num_draft_tokens"),
        accepted=metrics.get("num_accepted_draft_tokens"),
        verifications=metrics.get("num_spec_steps"),
        emitted=num_later if has_emitted else None,
        histogram=None if histogram is None else tuple(histogram),
    )


class RowStep(NamedTuple):
    """What a step did for one row."""

    drafted: int
    accepted: int
    emitted: int
    digest: tuple[str, int] | None


def requests_of(
    samples: Any, prefill: Any, prompt_lens: Sequence[int], has_drafts: bool
) -> list[RequestRecord]:
    """The requests of all batches, in order."""
    requests = list[RequestRecord]()
    for batch, lengths in enumerate(samples.sequence_tokens):
        steps = steps_by_row(samples, batch, lengths) if has_drafts else None
        begin_ms = prefill.prefill_ms[batch] + samples.begin_ms[batch]
        begin_ms += (samples.calibration_ms or [0.0] * (batch + 1))[batch]
        for row, num_later in enumerate(lengths):
            number = len(requests)
            first_ms = prefill.ttft_ms[batch][row]
            later_ms = begin_ms + samples.sequence_ms[batch][row]
            scores = samples.answer_scores
            requests.append(
                RequestRecord(
                    arrival_ms=0.0,
                    joined_ms=[0.0],
                    preempted_ms=[],
                    prefilled_ms=[first_ms],
                    first_token_ms=first_ms,
                    finished_ms=later_ms if num_later else first_ms,
                    prompt_len=prompt_lens[number],
                    output_len=num_later + 1,
                    output_hash=samples.output_hashes[number],
                    answer_score=None if scores is None else scores[number],
                    **(drafts_of(steps[row]) if steps is not None else {}),
                )
            )
    return requests


def drafts_of(steps: Sequence[RowStep]) -> dict[str, Any]:
    """The counts of the verifications of a request; none without one."""
    if not steps:
        return {}
    accepted = [step.accepted for step in steps]
    digests = [step.digest for step in steps if step.digest is not None]
    is_logged = len(digests) == len(steps)
    return {
        "num_draft_tokens": sum(step.drafted for step in steps),
        "num_accepted_draft_tokens": sum(accepted),
        "num_spec_steps": len(steps),
        "acceptance_histogram": [accepted.count(n) for n in range(max(accepted) + 1)],
        "per_step_drafted": [step.drafted for step in steps],
        "per_step_accepted": accepted,
        "per_step_emitted": [step.emitted for step in steps],
        "draft_hashes": [hashed for hashed, _ in digests] if is_logged else None,
        "num_draft_kv_read": [num_read for _, num_read in digests] if is_logged else None,
    }


def steps_by_row(samples: Any, batch: int, lengths: Sequence[int]) -> list[list[RowStep]]:
    """The verifications of each row of a batch. A step has counts for the rows that have not yet
    emitted all of their tokens, in order."""
    left = list(lengths)
    found: list[list[RowStep]] = [[] for _ in lengths]
    for step, emitted in enumerate(samples.num_emitted[batch]):
        longest = samples.padded_gamma[batch][step]
        proposed = samples.num_drafted[batch][step] if samples.num_drafted else []
        accepted = samples.num_accepted[batch][step]
        running = [i for i, tokens in enumerate(left) if tokens > 0]
        for row, (i, tokens) in enumerate(zip(running, emitted, strict=False)):
            left[i] -= tokens
            drafted = proposed[row] if row < len(proposed) else longest
            if row < len(accepted) and drafted:
                digest = digest_of(samples, batch, step, row)
                counts = drafted, min(accepted[row], drafted), tokens
                found[i].append(RowStep(*counts, digest))
    return found


def digest_of(samples: Any, batch: int, step: int, row: int) -> tuple[str, int] | None:
    if samples.draft_hashes is None:
        return None
    return samples.draft_hashes[batch][step][row], samples.draft_keys[batch][step][row]


def groups_of(samples: Any, prefill: Any, has_drafts: bool) -> list[GroupRecord]:
    """The groups, one a batch. Phases of steps stand in one list for all batches."""
    groups = list[GroupRecord]()
    phases = {name: iter(getattr(samples, name)) for name in ("draft_ms", "verify_ms", "decode_ms")}
    for batch, step_ms in enumerate(samples.step_ms):
        gammas = [0] * len(step_ms)
        if samples.padded_gamma is not None:
            gammas = samples.padded_gamma[batch]
        rows = None
        if samples.num_emitted is not None:
            rows = [len(tokens) for tokens in samples.num_emitted[batch]]
        num_drafting = sum(gamma > 0 for gamma in gammas)
        num_plain = len(step_ms) - num_drafting
        is_unknown = samples.padded_gamma is None and samples.num_emitted is None
        if is_unknown and batch == 0:  # with random weights: all in the first
            num_drafting = len(samples.draft_ms)
            num_plain = len(samples.decode_ms)
        calibration = samples.calibration_ms
        draft_prefill = samples.draft_prefill_ms
        groups.append(
            GroupRecord(
                num_requests=len(samples.sequence_tokens[batch]),
                prefill_ms=prefill.prefill_ms[batch],
                begin_ms=samples.begin_ms[batch],
                calibration_ms=None if calibration is None else calibration[batch],
                draft_prefill_ms=None if draft_prefill is None else draft_prefill[batch],
                num_steps=len(step_ms),
                step_ms=step_ms,
                step_forwards=None if not samples.num_forwards else samples.num_forwards[batch],
                step_max_gamma=gammas if has_drafts else None,
                step_rows=rows,
                draft_ms=taken(phases["draft_ms"], num_drafting),
                verify_ms=taken(phases["verify_ms"], num_drafting),
                decode_ms=taken(phases["decode_ms"], num_plain),
                bytes_read=samples.bytes_read[batch],
                draft_kv_tokens=samples.draft_kv_tokens[batch],
                draft_rows=samples.draft_rows[batch],
                peak_memory_bytes=samples.peak_memory_bytes[batch],
                threads=samples.threads[batch],
            )
        )
    return groups


def taken(times: Iterator[float], count: int) -> list[float]:
    """The next of these times; none if they were not measured."""
    return [ms for _, ms in zip(range(count), times, strict=False)]


def read(path: Path) -> str:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()


def with_ratios(records: Sequence[Any]) -> list[Any]:
    """The records, in which served modes have their ratios to the first mode of their command."""
    changed = {}
    for command in commands_of(records_of_type(records, PassRecord)):
        for record in command:
            metrics = record.metrics
            reference = reference_of(record, command)
            if reference is None or metrics is None or metrics.output_throughput is None:
                continue
            found = replace(metrics, **ratios(record, reference))
            changed[id(record)] = replace(record, metrics=found)
    return [changed.get(id(record), record) for record in records]


def main(old: Path, new: Path) -> None:
    records = []
    for number, line in enumerate(read(old).splitlines(), 1):
        try:
            found = converted(json.loads(line)) if line.strip() else []
            records += found
        except ValueError as error:
            raise SystemExit(f"{old}:{number}: {error}; leave this line out") from None
    data = "".join(f"{record.to_json()}\n" for record in with_ratios(records)).encode()
    new.write_bytes(gzip.compress(data, mtime=0) if new.suffix == ".gz" else data)
    print(f"{len(records)} records of version {SCHEMA_VERSION} written to {new}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
