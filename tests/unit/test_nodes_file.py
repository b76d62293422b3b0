"""Files of nodes in the grammar of MDI-LLM."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from magicdec.cli.front.nodes import lines_of
from magicdec.distributed.nodes_file import read_nodes
from magicdec.distributed.start import interface_towards


def node(host: int, **more: Any) -> dict[str, Any]:
    addr = f"10.0.0.{host}"
    return {
        "addr": addr,
        "communication": {"port": 8088, "starter_addr": "10.0.0.1"} if host > 1 else {"port": 8088},
        "inference": {"port_in": 5088, "port_out": 5089},
        **more,
    }


RING = {"nodes": {"starter": node(1), "secondary": [node(2), node(3)]}}


def written(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "nodes.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_the_order_of_the_list_is_the_order_of_the_ring(tmp_path: Path) -> None:
    ring = read_nodes(written(tmp_path, RING)).ring
    assert [node.addr for node in ring] == [f"10.0.0.{host}" for host in (1, 2, 3)]
    lines = lines_of(ring, ["recurrent", "--n_samples", "3"])
    assert lines[4] == "# on 10.0.0.3: secondary 1"
    assert lines[5] == (
        "torchrun --nnodes 3 --nproc-per-node 1 --node-rank 2 --master-addr 10.0.0.1 "
        "--master-port 8088 -m magicdec recurrent --n_samples 3"
    )


def test_a_ring_of_one_node(tmp_path: Path) -> None:
    ring = read_nodes(written(tmp_path, {"nodes": {"starter": node(1), "secondary": []}})).ring
    assert len(lines_of(ring, ["recurrent"])) == 2


def test_nodes_of_one_host_with_a_gpu_each(tmp_path: Path) -> None:
    starter = node(1, device="cuda:0")
    other = node(1, device="cuda:1", communication={"port": 8089})
    other["inference"] = {"port_in": 5090, "port_out": 5091}
    ring = read_nodes(written(tmp_path, {"nodes": {"starter": starter, "secondary": [other]}})).ring
    lines = lines_of(ring, ["recurrent"])
    assert lines[3].startswith("CUDA_VISIBLE_DEVICES=1 torchrun ")
    assert lines[3].endswith("recurrent --device cuda")


def test_keys_without_a_meaning_are_said(tmp_path: Path) -> None:
    content = {"nodes": {**RING["nodes"], "intermediate": []}, "comment": "mine"}
    content["nodes"]["secondary"] = [node(2), node(3, name="last")]
    unread = list(read_nodes(written(tmp_path, content)).unread(""))
    assert unread == ["comment", "nodes.intermediate", "nodes.secondary[1].name"]


def change(*keys: Any, to: Any = None) -> Callable[[dict[str, Any]], None]:
    """Sets what lies at `keys`, or deletes it if `to` is None."""

    def apply(content: dict[str, Any]) -> None:
        for key in keys[:-1]:
            content = content[key]
        if to is None:
            del content[keys[-1]]
        else:
            content[keys[-1]] = to

    return apply


@pytest.mark.parametrize(
    ("apply", "message"),
    [
        (change("nodes"), "nodes is missing"),
        (change("nodes", "starter"), "nodes.starter is missing"),
        (change("nodes", "secondary"), "nodes.secondary is missing"),
        (change("nodes", "secondary", 1, "addr"), r"nodes.secondary\[1\].addr is missing"),
        (
            change("nodes", "starter", "inference", "port_in"),
            "nodes.starter.inference.port_in is missing",
        ),
        (change("nodes", "starter", "communication"), "nodes.starter.communication is missing"),
        (change("nodes", "starter", to=[1]), r"nodes.starter is \[1\]; it must be a valid dict"),
        (change("nodes", "secondary", to={}), "nodes.secondary is {}; it must be a valid list"),
        (
            change("nodes", "starter", "communication", "port", to=0),
            "port is 0; it must be greater",
        ),
        (change("nodes", "starter", "communication", "port", to="80"), 'port is "80"'),
        (change("nodes", "starter", "device", to="mps"), 'device is "mps"; it must .*cpu.cuda'),
        (change("nodes", "starter", "device", to="cpu"), "the nodes name cpu, none"),
        (
            change("nodes", "secondary", 1, "addr", to="10.0.0.2"),
            "10.0.0.2:8088 is an address of nodes.secondary",
        ),
        (
            change("nodes", "secondary", 0, "communication", "starter_addr", to="10.0.0.9"),
            "starter_addr is 10.0.0.9, but the starter is 10.0.0.1",
        ),
    ],
)
def test_a_wrong_file_is_refused_by_key(
    tmp_path: Path, apply: Callable[[dict[str, Any]], None], message: str
) -> None:
    content = copy.deepcopy(RING)
    apply(content)
    with pytest.raises(ValueError, match=rf"nodes\.json: .*{message}"):
        read_nodes(written(tmp_path, content))


def test_what_is_no_json_is_refused_by_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nodes\.json, line 2: no JSON"):
        read_nodes(written(tmp_path, '{"nodes":\n}'))
    with pytest.raises(ValueError, match="the key starter is given twice"):
        read_nodes(written(tmp_path, '{"nodes": {"starter": 1, "starter": 2}}'))
    with pytest.raises(ValueError, match=r"none\.json: cannot be read \(No such file"):
        read_nodes(tmp_path / "none.json")


def test_the_interface_towards_a_host() -> None:
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("no-such-host.invalid") is None
