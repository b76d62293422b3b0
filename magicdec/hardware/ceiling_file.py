"""The hardware ceilings that the cost model uses, and the machine file that `magicdec probe` writes
and `magicdec plan` reads. Imports no torch.

Every rate is per rank, measured while all ranks ran, because the ranks of a host share its memory
bandwidth.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from magicdec.records.writing import to_json, write_text

SCHEMA_VERSION = 2
BY_DTYPE = (
    *("flops_per_s", "layer_overhead_s", "kv_bytes_per_s"),
    *("attention_flops_per_s", "token_overhead_s"),
)
LINK_FIELDS = ("latency_s", "bytes_per_s")
ADDED = ("layer_overhead_s", "token_overhead_s", "latency_s")  # seconds, which may be 0


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
            choices = ", ".join(self.flops_per_s)
            raise ValueError(f"--dtype {dtype} is not in the machine file; choose from {choices}")
        rates = {name: getattr(self, name)[dtype] for name in BY_DTYPE}
        return Hardware(self.read_bytes_per_s, link=self.link, node_link=self.node_link, **rates)

    def save(self, path: Path, flag: str = "--out") -> None:
        """Raises ValueError, naming the flag, where the file cannot be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{flag} {path}: {error.strerror}") from None
        envelope = {"schema_version": SCHEMA_VERSION, "kind": "machine"}
        write_text(flag, path, to_json(envelope | asdict(self), indent=1) + "\n")


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
    rates = {name: {dtype: _rate(name, raw[name][dtype]) for dtype in dtypes} for name in BY_DTYPE}
    link, node_link = (
        raw[name] and Link(*(_rate(field, raw[name][field]) for field in LINK_FIELDS))
        for name in ("link", "node_link")
    )
    return MachineFile(
        description=dict(raw["description"]),
        read_bytes_per_s=_rate("read_bytes_per_s", raw["read_bytes_per_s"]),
        link=link,
        node_link=node_link,
        spreads=dict(raw.get("spreads", {})),
        **rates,
    )


def _rate(field: str, value: Any) -> float:
    """Raises ValueError unless it is positive. What is added to a time may be 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    least = 0 if field in ADDED else math.ulp(0.0)
    if not is_number or not math.isfinite(value) or value < least:
        raise ValueError(f"{field} {value!r} is not a positive number")
    return float(value)
