"""The hardware ceilings of the cost model, and the machine file between `magicdec probe` and
`magicdec plan`. Imports no torch. Rates are per rank while all ranks run, which share a host's
bandwidth."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from magicdec.hardware.other_load import is_busy
from magicdec.output.files import read_bytes
from magicdec.output.writing import to_json, write_text

BY_DTYPE = (
    "flops_per_s",
    "layer_overhead_s",
    "kv_bytes_per_s",
    "attention_flops_per_s",
    "token_overhead_s",
)
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Link:
    """One level of the network between ranks."""

    latency_s: Seconds  # time of a small all-reduce, for which bandwidth does not matter
    bytes_per_s: Rate

    def all_reduce_s(self, num_bytes: float, num_ends: int) -> float:
        """Seconds of a ring all-reduce: `num_ends` ranks send nearly twice the message."""
        return self.latency_s + 2 * (num_ends - 1) / num_ends * num_bytes / self.bytes_per_s


@dataclass(frozen=True)
class Hardware:
    """The ceilings of one rank in one dtype. `link` connects the ranks of a node, `node_link`
    nodes; None if unknown."""

    read_bytes_per_s: float
    flops_per_s: float
    layer_overhead_s: float = 0.0  # fixed cost of a layer per forward: launches, Python
    kv_bytes_per_s: float | None = None  # attention over a long cache; None: read_bytes_per_s
    link: Link | None = None
    node_link: Link | None = None
    attention_flops_per_s: float | None = None  # over a long cache; None: flops_per_s
    token_overhead_s: float = 0.0  # cost of a layer per new token after the first

    def all_reduce_s(self, num_bytes: float, num_ranks: int, num_nodes: int) -> float:
        """Seconds of an all-reduce over `num_ranks`, first within nodes, then between them."""
        per_node = num_ranks // num_nodes
        seconds = 0.0
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

    description: dict[str, Any]  # machine, software and launch, and what other load there was
    read_bytes_per_s: Rate
    flops_per_s: dict[str, Rate]
    layer_overhead_s: dict[str, Seconds]
    kv_bytes_per_s: dict[str, Rate]
    link: Link | None
    node_link: Link | None
    attention_flops_per_s: dict[str, Rate]
    token_overhead_s: dict[str, Seconds]
    # Of each measurement, slowest over fastest repetition minus 1; for readers, as `description`.
    spreads: dict[str, float] = field(default_factory=dict)
    schema_version: Literal[2] = 2
    kind: Literal["machine"] = "machine"

    def hardware(self, dtype: str) -> Hardware:
        """The ceilings in `dtype`. Raises ValueError for a dtype that was not measured."""
        if any(dtype not in getattr(self, name) for name in BY_DTYPE):
            choices = ", ".join(self.flops_per_s)
            raise ValueError(f"--dtype {dtype} is not in the machine file; choose from {choices}")
        rates = {name: getattr(self, name)[dtype] for name in BY_DTYPE}
        return Hardware(self.read_bytes_per_s, link=self.link, node_link=self.node_link, **rates)

    @property
    def busy(self) -> str:
        """The other load during the probe, or an empty text."""
        taken = self.description.get("cores_taken")
        return f"another load took {taken:.0%} of the cores meanwhile" if is_busy(taken) else ""

    def save(self, path: Path, flag: str = "--out") -> None:
        """Write the file. Raises ValueError, naming the flag, if that fails."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{flag} {path}: {error.strerror}") from None
        write_text(flag, path, to_json(asdict(self), indent=1) + "\n")


def load_machine(path: Path) -> MachineFile:
    """The machine file at `path`. Raises ValueError naming the file and the faulty field."""
    try:
        return TypeAdapter(MachineFile).validate_json(read_bytes(path))
    except OSError as error:
        reason = f"{error.strerror}; `magicdec probe` writes one"
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        reason = f"not a machine file of `magicdec probe`; {field}: {first['msg']}"
    raise ValueError(f"--machine {path}: {reason}")


def load_quiet_machine(path: Path, allows_busy: bool) -> MachineFile:
    """As `load_machine`. Raises ValueError for a file probed on a busy host, unless allowed: a plan
    would be of another machine."""
    machine = load_machine(path)
    if machine.busy and not allows_busy:
        raise ValueError(
            f"--machine {path} was probed on a busy host: {machine.busy}; make it again when "
            f"nothing else runs: magicdec probe --out {shlex.quote(str(path))}; or give "
            "--allow_busy_machine"
        )
    return machine
