"""Converts a file of records of schema version 2 to the one that this program reads.

    python scripts/convert_records.py OLD.jsonl NEW.jsonl

The metrics of acceptance have vLLM's names since version 3, and more of them, which are computed
from the samples of each run. Records of served modes lose what they said of acceptance, which had
another definition in each mode. The draft length is `gamma` in `config.decoding`; in the samples it
is `padded_gamma`, beside the drafts of each row, `num_drafted`. The keys of draft trees are left
out unless the drafts were a tree. A file that ends in .gz is compressed.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

from magicdec.names import RECORDS, load_named
from magicdec.records.acceptance import acceptance_of
from magicdec.records.reading import parse_line

OLD = 2
RENAMED = {
    "acceptance_rate": "draft_acceptance_rate",
    "acceptance_length": "mean_acceptance_length",
    "acceptance_rate_interval": "draft_acceptance_rate_interval",
    "acceptance_length_interval": "mean_acceptance_length_interval",
}

RENAMED_SAMPLES = {"num_drafted": "padded_gamma", "num_proposed": "num_drafted"}
OF_TREES = ("tree", "tree_nodes")


def renamed(values: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in values.items()}


def converted_config(config: dict[str, Any]) -> dict[str, Any]:
    decoding = config.get("decoding")
    if not isinstance(decoding, dict):
        return config
    kept = {k: v for k, v in decoding.items() if k not in OF_TREES or v is not None}
    return config | {"decoding": renamed(kept, {"num_draft_tokens": "gamma"})}


# The parts of a pass that `details` has taken the place of, with the `kind` of each.
DETAILS = {"ring": "mdi_llm", "speculation": "pipeinfer", "server": "servers"}


def with_details(raw: dict[str, Any]) -> dict[str, Any]:
    """A serving record whose `ring`, `speculation`, `server` and `occupancy` are its `details`, and
    whose modes have their names of now."""
    from magicdec.systems.modes import RENAMED, Pass

    old: dict[str, Any] = {name: raw.get(name) for name in (*DETAILS, "occupancy")}
    new = {key: value for key, value in raw.items() if key not in old}
    parts = [(kind, old[name]) for name, kind in DETAILS.items() if old[name] is not None]
    new["details"] = None
    if parts and raw["metrics"] is not None:
        ((kind, part),) = parts
        shares = {} if old["occupancy"] is None else {"occupancy": old["occupancy"]}
        new["details"] = {"kind": kind} | shares | part
    workload = new["config"]["workload"]
    if workload["mode"] in RENAMED:
        workload["mode"] = Pass.named(workload["mode"]).mode
    workload["modes"] = [Pass.named(name).name for name in workload["modes"]]
    for part in (new, new.get("correctness") or {}):
        for key in ("name", "reference"):
            if part.get(key) is not None:
                part[key] = Pass.named(part[key]).full_name
    return new


def converted(line: str) -> str:
    """A line of the new version. Raises ValueError for a line of another version than the old."""
    raw = json.loads(line)
    if raw.get("schema_version") != OLD:
        raise ValueError(f"schema_version is {raw.get('schema_version')}, not {OLD}")
    raw["schema_version"] = OLD + 1
    for part in ("metrics", "baseline_metrics"):
        metrics = raw.get(part)
        if isinstance(metrics, dict):
            raw[part] = renamed(metrics, RENAMED)
    if isinstance(raw.get("config"), dict):
        raw["config"] = converted_config(raw["config"])
    if raw["kind"] == "run" and isinstance(raw.get("samples"), dict):
        passes = raw["samples"].items()
        raw["samples"] = {name: renamed(samples, RENAMED_SAMPLES) for name, samples in passes}
    record: Any = parse_line(json.dumps(raw), load_named(RECORDS, raw["kind"]))
    if raw["kind"] == "run" and record.metrics is not None and record.samples is not None:
        samples = record.samples[record.config["decoding"]["strategy"]].restored()
        if record.metrics.draft_acceptance_rate is not None:
            for key, value in acceptance_of(samples).items():
                object.__setattr__(record.metrics, key, value)
    text: str = record.to_json()
    return text


def read(path: Path) -> str:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()


def main(old: Path, new: Path) -> None:
    lines = []
    for number, line in enumerate(read(old).splitlines(), 1):
        try:
            lines += [converted(line)] if line.strip() else []
        except ValueError as error:
            raise SystemExit(f"{old}:{number}: {error}; leave this line out") from None
    data = "".join(f"{line}\n" for line in lines).encode()
    new.write_bytes(gzip.compress(data, mtime=0) if new.suffix == ".gz" else data)
    print(f"{len(lines)} records of version {OLD + 1} written to {new}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
