"""A JSON file of nodes in the grammar of MDI-LLM, as one launch of torchrun for each node.

    {"nodes": {"starter": NODE, "secondary": [NODE, ...]}}
    NODE = {"addr": "10.0.0.1", "communication": {"port": 8088, "starter_addr": "10.0.0.1"},
            "inference": {"port_in": 5088, "port_out": 5089}, "device": "cuda:0"}

`starter_addr` (in a secondary) and `device` may be left out. The order of `secondary` is the order
of the ring. Owns the grammar and its refusals. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from magicdec.files import first_error

Port = Annotated[int, Field(ge=1, le=65535)]


class Keys(BaseModel):
    """An object of the file. Keys that mean nothing here are kept, so that they can be named."""

    model_config = ConfigDict(strict=True, extra="allow")

    def unread(self, place: str) -> Iterator[str]:
        """The places of the keys that mean nothing here. `place` is that of this object."""
        yield from (f"{place}{name}" for name in self.model_extra or ())
        for name, value in self:
            for index, each in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(each, Keys):
                    number = f"[{index}]" if isinstance(value, list) else ""
                    yield from each.unread(f"{place}{name}{number}.")


class Control(Keys):
    """`port` is that of the control plane, where the ranks meet if this is the starter's."""

    port: Port
    starter_addr: str | None = None


class Data(Keys):
    port_in: Port
    port_out: Port


class Node(Keys):
    """A process of the ring. `device` is None where the file names none."""

    addr: str = Field(min_length=1)
    communication: Control
    inference: Data
    device: str | None = Field(None, pattern=r"^(cpu|cuda(:\d+)?)$")

    @property
    def kind(self) -> str | None:
        """The device without its number."""
        return self.device and self.device.partition(":")[0]


class Nodes(Keys):
    starter: Node
    secondary: list[Node]


class NodesFile(Keys):
    nodes: Nodes

    @property
    def ring(self) -> list[Node]:
        """The nodes in ring order, the starter first."""
        return [self.nodes.starter, *self.nodes.secondary]


def read_nodes(path: Path) -> NodesFile:
    """Raises ValueError that names the file and the key (or the line, if it is no JSON)."""
    try:
        text = path.read_text(encoding="utf-8")
        file = NodesFile.model_validate(json.loads(text, object_pairs_hook=_no_key_twice))
        _check(file.ring)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: cannot be read ({error})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: no JSON ({error.msg})") from error
    except ValidationError as error:
        raise ValueError(f"{path}: {first_error(error)}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return file


def launch_words(ring: list[Node], index: int) -> list[str]:
    """The words that launch node `index` on its host, up to the program: torchrun as rank `index`,
    with the starter's control port as the place where the ranks meet."""
    starter, device = ring[0], ring[index].device or ""
    _, _, number = device.partition(":")
    return [
        *([f"CUDA_VISIBLE_DEVICES={number}"] if number else []),
        *("torchrun", "--nnodes", str(len(ring)), "--nproc-per-node", "1"),
        *("--node-rank", str(index), "--master-addr", starter.addr),
        *("--master-port", str(starter.communication.port)),
    ]


def _check(ring: list[Node]) -> None:
    """What no object alone can show. Raises ValueError."""
    starter, taken = ring[0].addr, dict[str, str]()
    for number, node in enumerate(ring):
        place = f"nodes.secondary[{number - 1}]" if number else "nodes.starter"
        control = node.communication
        if number and control.starter_addr not in (None, starter):
            raise ValueError(
                f"{place}.communication.starter_addr is {control.starter_addr}, but the starter is "
                f"{starter}"
            )
        for port in (control.port, node.inference.port_in, node.inference.port_out):
            address = f"{node.addr}:{port}"
            if address in taken:
                raise ValueError(f"{place}: {address} is an address of {taken[address]} already")
            taken[address] = place
    if len(kinds := {node.kind for node in ring}) > 1:
        listing = ", ".join(sorted(kind or "none" for kind in kinds))
        raise ValueError(f"device: the nodes name {listing}; all ranks of a run use one kind")


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice} is given twice in one object")
    return table
