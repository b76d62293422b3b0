"""A JSON file of nodes in the grammar of MDI-LLM, as one launch of torchrun for each node.

    {"nodes": {"starter": NODE, "secondary": [NODE, ...]}}
    NODE = {"addr": "10.0.0.1", "communication": {"port": 8088, "starter_addr": "10.0.0.1"},
            "inference": {"port_in": 5088, "port_out": 5089}, "device": "cuda:0"}

`starter_addr` (in a secondary) and `device` may be left out. The order of `secondary` is the order
of the ring. Owns the grammar and its refusals. Imports no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEYS = {
    "": ("nodes",),
    "nodes": ("starter", "secondary"),
    "node": ("addr", "communication", "inference", "device"),
    "communication": ("port", "starter_addr"),
    "inference": ("port_in", "port_out"),
}
DEVICE = re.compile(r"cpu|cuda(:\d+)?")
MAX_PORT = 65535


@dataclass(frozen=True)
class Node:
    """A process of the ring. `port` is that of the control plane, where the ranks meet if this is
    the starter. `device` is None where the file names none."""

    addr: str
    port: int
    device: str | None


@dataclass(frozen=True)
class Ring:
    """The nodes in ring order, the starter first. `ignored` are the keys that mean nothing here."""

    nodes: tuple[Node, ...]
    ignored: tuple[str, ...]


def read_nodes(path: Path) -> Ring:
    """Raises ValueError that names the file and the key (or the line, if it is no JSON)."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_key_twice)
        return _Reader().ring(content)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: cannot be read ({error})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: no JSON ({error.msg})") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def launch_words(ring: Ring, index: int) -> list[str]:
    """The words that launch node `index` on its host, up to the program: torchrun as rank `index`,
    with the starter's control port as the place where the ranks meet."""
    starter, device = ring.nodes[0], ring.nodes[index].device or ""
    _, _, number = device.partition(":")
    return [
        *([f"CUDA_VISIBLE_DEVICES={number}"] if number else []),
        *("torchrun", "--nnodes", str(len(ring.nodes)), "--nproc-per-node", "1"),
        *("--node-rank", str(index), "--master-addr", starter.addr),
        *("--master-port", str(starter.port)),
    ]


def device_of(ring: Ring) -> str | None:
    """The `--device` of all nodes; None if the file names none."""
    device = ring.nodes[0].device
    return device.partition(":")[0] if device else None


class _Reader:
    """Reads the content of one file. Remembers which addresses are taken, and by which key."""

    def __init__(self) -> None:
        self.taken: dict[tuple[str, int], str] = {}
        self.ignored: list[str] = []

    def ring(self, content: Any) -> Ring:
        whole = self._object(content, "", KEYS[""])
        nodes = self._object(_required(whole, "", "nodes"), "nodes", KEYS["nodes"])
        starter, secondary = (_required(nodes, "nodes", name) for name in KEYS["nodes"])
        if isinstance(starter, list):
            raise ValueError("nodes.starter is a list; a ring has one starter, which is an object")
        if not isinstance(secondary, list):
            raise ValueError(f"nodes.secondary is {_shown(secondary)}; it must be a list of nodes")
        first = self._node(starter, "nodes.starter", None)
        others = [
            self._node(node, f"nodes.secondary[{index}]", first.addr)
            for index, node in enumerate(secondary)
        ]
        ring = (first, *others)
        _check_devices(ring)
        return Ring(ring, tuple(self.ignored))

    def _node(self, value: Any, key: str, starter: str | None) -> Node:
        node = self._object(value, key, KEYS["node"])
        addr = _required(node, key, "addr")
        if not isinstance(addr, str) or not addr.strip():
            raise ValueError(f"{key}.addr is {_shown(addr)}; it must be an address, as in 10.0.0.1")
        control, data = (
            self._object(_required(node, key, name), f"{key}.{name}", KEYS[name])
            for name in ("communication", "inference")
        )
        port = self._port(control, f"{key}.communication", "port", addr)
        for name in KEYS["inference"]:
            self._port(data, f"{key}.inference", name, addr)
        starter_addr = control.get("starter_addr", starter)
        if starter is not None and starter_addr != starter:
            raise ValueError(
                f"{key}.communication.starter_addr is {starter_addr}, but the starter is {starter}"
            )
        device = node.get("device")
        if device is not None and not (isinstance(device, str) and DEVICE.fullmatch(device)):
            raise ValueError(f"{key}.device is {_shown(device)}; choose from cpu, cuda, cuda:N")
        return Node(addr, port, device)

    def _object(self, value: Any, key: str, keys: tuple[str, ...]) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            raise ValueError(
                f"{key or 'the file'} is {_shown(value)}; it must be an object with {keys[0]}"
            )
        self.ignored += [f"{key}.{name}".strip(".") for name in value if name not in keys]
        return value

    def _port(self, parent: Mapping[str, Any], key: str, name: str, addr: str) -> int:
        port, whole = _required(parent, key, name), f"{key}.{name}"
        if not isinstance(port, int) or isinstance(port, bool) or not 0 < port <= MAX_PORT:
            raise ValueError(f"{whole} is {_shown(port)}; it must be a port, 1 to {MAX_PORT}")
        first = self.taken.setdefault((addr, port), whole)
        if first != whole:
            raise ValueError(f"{whole}: {addr}:{port} is the address of {first} already")
        return port


def _check_devices(nodes: tuple[Node, ...]) -> None:
    kinds = {(node.device or "").partition(":")[0] for node in nodes}
    if len(kinds) > 1:
        listing = ", ".join(kind or "none" for kind in sorted(kinds))
        raise ValueError(f"device: the nodes name {listing}; all ranks of a run use one kind")


def _required(parent: Mapping[str, Any], key: str, name: str) -> Any:
    if name not in parent:
        raise ValueError(f"{key}.{name}".strip(".") + " is missing")
    return parent[name]


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f"the key {key} is given twice in one object")
        table[key] = value
    return table


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 40 else f"{text[:36]}..."
