"""A JSON file of nodes in the grammar of MDI-LLM, as one launch of torchrun for each node.

    {"nodes": {"starter": NODE, "secondary": [NODE, ...]}}
    NODE = {"addr": "10.0.0.1", "communication": {"port": 8088, "starter_addr": "10.0.0.1"},
            "inference": {"port_in": 5088, "port_out": 5089}, "device": "cuda:0"}

`starter_addr` (in a secondary) and `device` may be left out. The order of `secondary` is the order
of the ring. Other keys, and the ports of `inference`, have no meaning here. Imports no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEVICE = re.compile(r"cpu|cuda(:\d+)?")
MAX_PORT = 65535


@dataclass(frozen=True)
class Node:
    """A process of the ring. `port` is that of the control plane, where the ranks meet if this is
    the starter. `device` is None where the file names none."""

    addr: str
    port: int
    device: str | None


def read_nodes(path: Path) -> list[Node]:
    """The nodes in ring order, the starter first. Raises ValueError that names the file and the key
    (or the line, if it is no JSON)."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return _read_ring(content)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: cannot be read ({error})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: no JSON ({error.msg})") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def launch_words(nodes: Sequence[Node], index: int) -> list[str]:
    """The words that launch node `index` on its host, up to the program: torchrun as rank `index`,
    with the starter's control port as the place where the ranks meet."""
    starter, device = nodes[0], nodes[index].device or ""
    _, _, number = device.partition(":")
    return [
        *([f"CUDA_VISIBLE_DEVICES={number}"] if number else []),
        *("torchrun", "--nnodes", str(len(nodes)), "--nproc-per-node", "1"),
        *("--node-rank", str(index), "--master-addr", starter.addr),
        *("--master-port", str(starter.port)),
    ]


def device_of(nodes: Sequence[Node]) -> str | None:
    """The `--device` of all nodes; None if the file names none."""
    device = nodes[0].device
    return device.partition(":")[0] if device else None


def _read_ring(content: Any) -> list[Node]:
    ring = _value(content, "", "nodes")
    secondary = _value(ring, "nodes", "secondary")
    if not isinstance(secondary, list):
        raise ValueError(f"nodes.secondary is {_shown(secondary)}; it must be a list of nodes")
    starter = _read_node(_value(ring, "nodes", "starter"), "nodes.starter", None)
    nodes = [starter]
    for index, node in enumerate(secondary):
        nodes.append(_read_node(node, f"nodes.secondary[{index}]", starter.addr))
    kinds = {(node.device or "").partition(":")[0] for node in nodes}
    if len(kinds) > 1:
        listing = ", ".join(kind or "none" for kind in sorted(kinds))
        raise ValueError(f"device: the nodes name {listing}; all ranks of a run use one kind")
    return nodes


def _read_node(node: Any, key: str, starter_addr: str | None) -> Node:
    addr, control = _value(node, key, "addr"), _value(node, key, "communication")
    if not isinstance(addr, str) or not addr.strip():
        raise ValueError(f"{key}.addr is {_shown(addr)}; it must be an address, as in 10.0.0.1")
    port = _value(control, f"{key}.communication", "port")
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port <= MAX_PORT:
        raise ValueError(
            f"{key}.communication.port is {_shown(port)}; it must be a port, 1 to {MAX_PORT}"
        )
    named_starter = control.get("starter_addr", starter_addr)
    if starter_addr is not None and named_starter != starter_addr:
        raise ValueError(
            f"{key}.communication.starter_addr is {named_starter}, but the starter is "
            f"{starter_addr}"
        )
    device = node.get("device")
    if device is not None and not (isinstance(device, str) and DEVICE.fullmatch(device)):
        raise ValueError(f"{key}.device is {_shown(device)}; choose from cpu, cuda, cuda:N")
    return Node(addr, port, device)


def _value(parent: Any, key: str, name: str) -> Any:
    """What `parent`, which lies at `key`, has by that name."""
    if not isinstance(parent, dict):
        raise ValueError(
            f"{key or 'the file'} is {_shown(parent)}; it must be an object with {name}"
        )
    if name not in parent:
        raise ValueError(f"{key}.{name}".strip(".") + " is missing")
    return parent[name]


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 40 else f"{text[:36]}..."
