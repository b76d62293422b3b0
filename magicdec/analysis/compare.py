"""The gate: new records against a baseline file; exit code 1 on a regression or on records that
cannot be compared.

Reads records only. Acceptance is compared, not time: times of two machines say nothing about the
code.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magicdec.bench.record import load_records

Key = tuple[tuple[str, Any], ...]
DEFAULT_TOLERANCE = {"acceptance_rate": 0.03}


@dataclass(frozen=True)
class Comparison:
    """One new record against its baseline. `problem` is None where all is well."""

    name: str
    differences: dict[str, tuple[float, float]]  # metric: baseline, new
    problem: str | None


def measured_thing(record: dict[str, Any]) -> Key:
    """What a record measures: two records of the same thing are meant to be compared."""
    decoding, kv = record["config"]["decoding"], record["config"]["kv"]
    budget = None if kv["policy"] == "full" else kv["budget"]
    sinks = None if kv["policy"] == "full" else kv["num_sink_tokens"]
    return (
        ("strategy", decoding["strategy"]),
        ("drafter", decoding["drafter"]),
        ("policy", kv["policy"]),
        ("budget", budget),
        ("sinks", sinks),
        ("gamma", decoding["num_draft_tokens"]),
    )


def conditions(record: dict[str, Any]) -> dict[str, Any]:
    """What must be equal for the comparison to mean something."""
    return {
        "model": record["workload"]["model"],
        "model fingerprint": record["workload"].get("model_sha256"),
        "draft fingerprint": (record["workload"].get("draft") or {}).get("model_sha256"),
        "workload sha256": record["workload"]["sha256"],
        "dtype": record["config"]["model"]["dtype"],
        "generated tokens": record["config"]["workload"]["gen_len"],
        "ignore_eos": record["config"]["decoding"]["ignore_eos"],
    }


def compare(new: dict[str, Any], baselines: list[dict[str, Any]]) -> Comparison:
    """`new` against the baseline of the same thing under the same conditions; where there is none
    of those, the problem names what differs from the nearest."""
    key = measured_thing(new)
    name = " ".join(f"{k}={v}" for k, v in key if v is not None)
    if new["status"] != "ok":
        return Comparison(
            name, {}, f"the new run {new['status']}: {new.get('error') or 'outputs differ'}"
        )
    ours = conditions(new)
    same = [b for b in baselines if measured_thing(b) == key]
    alike = [b for b in same if b["status"] == "ok" and conditions(b) == ours]
    baseline = next(iter(alike + same), None)
    if baseline is None:
        return Comparison(name, {}, "not comparable: the baseline has no such record")
    if baseline["status"] != "ok":
        return Comparison(name, {}, f"not comparable: the baseline's run {baseline['status']}")
    for condition, value in conditions(baseline).items():
        if ours[condition] != value:
            return Comparison(
                name, {}, f"not comparable: {condition} is {ours[condition]}, was {value}"
            )
    differences, problem = {}, None
    for metric, tolerance in (baseline.get("tolerance") or DEFAULT_TOLERANCE).items():
        before, after = baseline["metrics"].get(metric), new["metrics"].get(metric)
        if before is None or after is None:
            where = "new record" if after is None else "baseline"
            return Comparison(name, {}, f"not comparable: the {where} has no {metric}")
        differences[metric] = (before, after)
        if after < before - tolerance:
            problem = f"regression: {metric} fell by {before - after:.4f}, tolerance {tolerance}"
    return Comparison(name, differences, problem)


def main() -> None:
    """`magicdec compare NEW BASELINE`"""
    parser = argparse.ArgumentParser(
        prog="magicdec compare",
        description="Compare the acceptance of new records with a baseline; exit 1 if it fell.",
    )
    parser.add_argument("new", type=Path, help="records of new runs, JSON lines")
    parser.add_argument(
        "baseline", type=Path, help="committed records (results/baselines/acceptance.jsonl)"
    )
    args = parser.parse_args()
    try:
        new, old = load_records(args.new), load_records(args.baseline)
        if not new:
            raise ValueError(f"{args.new} holds no records")
    except ValueError as error:
        print(f"magicdec compare: {error}", file=sys.stderr)
        sys.exit(2)
    comparisons = [compare(record, old) for record in new]
    for c in comparisons:
        for metric, (before, after) in c.differences.items():
            print(f"{c.name}: {metric} {before:.4f} -> {after:.4f} ({after - before:+.4f})")
        if c.problem:
            print(f"{c.name}: {c.problem}")
    sys.exit(any(c.problem for c in comparisons))
