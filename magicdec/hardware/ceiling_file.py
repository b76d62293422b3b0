"""The hardware ceilings that the cost model uses, and the machine file that `magicdec probe` writes
and `magicdec plan` reads. Imports no torch.

Every rate is per rank, measured while all ranks ran, because the ranks of a host share its memory
bandwidth. Must not know of models.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from magicdec.records.writing import VERSIONS, write_file

SCHEMA_VERSION = VERSIONS["machine"]


@dataclass(frozen=True)
class Link:
    """One level of the network between ranks."""

    latency_s: float  # time of a small all-reduce, for which bandwidth does not matter
    bytes_per_s: float

    def all_reduce_s(self, num_bytes: float, num_ends: int) -> float:
        """Seconds of a ring all-reduce. Each of the `num_ends` sends and receives nearly twice the
        message."""
        return self.latency_s + 2 * (num_ends - 1) / num_ends * num_bytes / self.bytes_per_s


@dataclass(frozen=True)
class Hardware:
    """Ceilings of one rank in one dtype. `link` connects the ranks of a node and `node_link`
    connects nodes; None if unknown."""

    read_bytes_per_s: float
    flops_per_s: float
    layer_overhead_s: float = 0.0  # fixed cost of a layer per forward: launches, Python
    kv_bytes_per_s: float | None = None  # attention over a long cache; None: read_bytes_per_s
    link: Link | None = None
    node_link: Link | None = None
    attention_flops_per_s: float | None = None  # over a long cache; None: flops_per_s
    token_overhead_s: float = 0.0  # cost of a layer per new token after the first

    def all_reduce_s(self, num_bytes: float, num_ranks: int, num_nodes: int) -> float:
        """Seconds of an all-reduce over `num_ranks`, first within each node, then between nodes."""
        per_node, seconds = num_ranks // num_nodes, 0.0
        if per_node > 1:
            assert self.link is not None, "checked with the flags"
            seconds += self.link.all_reduce_s(num_bytes, per_node)
        if num_nodes > 1:
            assert self.node_link is not None, "checked with the flags"
            seconds += self.node_link.all_reduce_s(num_bytes, num_nodes)
        return seconds


@dataclass(frozen=True)
class MachineFile:
    """The measurements of a probe, by dtype, and a description of the machine. Stored as JSON."""

    description: dict[str, Any]  # machine, software and launch; for readers, not used by `plan`
    read_bytes_per_s: float
    flops_per_s: dict[str, float]
    layer_overhead_s: dict[str, float]
    kv_bytes_per_s: dict[str, float]
    link: Link | None
    node_link: Link | None
    attention_flops_per_s: dict[str, float]
    token_overhead_s: dict[str, float]
    # Of each measurement, slowest over fastest repetition minus 1; for readers, as `description`.
    spreads: dict[str, float] = field(default_factory=dict)

    def hardware(self, dtype: str) -> Hardware:
        """The ceilings in `dtype`. Raises ValueError if the probe did not measure that dtype."""
        if dtype not in self.flops_per_s:
            known = ", ".join(self.flops_per_s)
            raise ValueError(f"--dtype {dtype} is not in the machine file; choose from {known}")
        return Hardware(
            self.read_bytes_per_s,
            self.flops_per_s[dtype],
            self.layer_overhead_s[dtype],
            self.kv_bytes_per_s[dtype],
            self.link,
            self.node_link,
            self.attention_flops_per_s[dtype],
            self.token_overhead_s[dtype],
        )

    def save(self, path: Path, flag: str = "--out") -> None:
        """Raises ValueError, naming the flag, where the file cannot be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{flag} {path}: {error.strerror}") from None
        write_file(flag, path, "machine", self)


def load_machine(path: Path) -> MachineFile:
    """The machine file at `path`. Raises ValueError naming the file and the faulty field."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not JSON ({error})"
        raise ValueError(f"--machine {path}: {reason}; `magicdec probe` writes one") from None
    try:
        return _parse(raw)
    except (KeyError, TypeError, AttributeError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else "a field has a wrong type"
        raise ValueError(f"--machine {path}: not a machine file; {what}") from None
    except ValueError as error:
        raise ValueError(f"--machine {path}: {error}") from None


def _parse(raw: dict[str, Any]) -> MachineFile:
    if raw["schema_version"] != SCHEMA_VERSION:
        raise ValueError(
            f"schema_version is {raw['schema_version']}, this program reads {SCHEMA_VERSION}"
        )
    dtypes = list(raw["flops_per_s"])

    def rates(field: str, zero_too: bool = False) -> dict[str, float]:
        return {dtype: _positive(field, raw[field][dtype], zero_too) for dtype in dtypes}

    return MachineFile(
        dict(raw["description"]),
        _positive("read_bytes_per_s", raw["read_bytes_per_s"]),
        rates("flops_per_s"),
        rates("layer_overhead_s", zero_too=True),
        rates("kv_bytes_per_s"),
        _parse_link(raw["link"]),
        _parse_link(raw["node_link"]),
        rates("attention_flops_per_s"),
        rates("token_overhead_s", zero_too=True),
        dict(raw.get("spreads", {})),
    )


def _parse_link(raw: dict[str, Any] | None) -> Link | None:
    if raw is None:
        return None
    return Link(
        _positive("latency_s", raw["latency_s"], zero_too=True),
        _positive("bytes_per_s", raw["bytes_per_s"]),
    )


def _positive(field: str, value: Any, zero_too: bool = False) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0 or (value == 0 and not zero_too):
        raise ValueError(f"{field} {value!r} is not a positive number")
    return float(value)
