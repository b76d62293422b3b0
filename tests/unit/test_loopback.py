"""What ranks of one host listen on, and what they send each other: no other host reaches their
store or their groups, and nothing of it is a pickle, which would run what it holds."""

import ast
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import ROOT

from magicdec.distributed import shared_memory, start
from magicdec.distributed.loopback import LOOPBACK, serve_store
from magicdec.distributed.rendezvous import LoopbackRendezvous
from magicdec.distributed.shared_memory import Segment, open_segment

LISTENS = "0A"  # of /proc/net/tcp


def addresses(port: int) -> Iterator[str]:
    """The addresses on which this host listens at a port, in the words of the kernel."""
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, _, hexadecimal = local.partition(":")
            if state == LISTENS and int(hexadecimal, 16) == port:
                yield address


def test_the_store_of_one_host_is_no_other_hosts() -> None:
    loopback = f"{int.from_bytes(socket.inet_aton(LOOPBACK), 'little'):08X}"
    assert list(addresses(serve_store().port)) == [loopback]
    handler = LoopbackRendezvous("run")
    info = handler.next_rendezvous()
    place = info.bootstrap_store_info
    assert place is not None and place.master_addr == LOOPBACK and handler.use_agent_store
    assert (info.rank, info.world_size) == (0, 1)
    assert list(addresses(place.master_port)) == [loopback]
    info.store.set("key", "value")
    assert info.store.get("key") == b"value"


def test_gloo_of_one_host_listens_on_its_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(start.VARIABLE, "")
    monkeypatch.delenv(start.VARIABLE)
    start.use_interface_towards(LOOPBACK)
    name = start.os.environ[start.VARIABLE]
    assert name in [interface for _, interface in socket.if_nameindex()] and name.startswith("lo")


def test_ranks_send_no_pickles() -> None:
    """`pickle` is imported where a checkpoint's is recognised, to refuse it."""
    users = set()
    for path in (ROOT / "magicdec").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import) and any(a.name == "pickle" for a in node.names):
                users.add(path.name)
            if isinstance(node, ast.Attribute) and re.search(
                "(gather|cast|scatter)_object", node.attr
            ):
                users.add(path.name)
    assert users == {"weight_files.py"}


def test_only_a_segment_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever file the other rank has named."""
    monkeypatch.setattr(shared_memory, "DIRECTORY", tmp_path)
    segment = Segment(4096)
    memory = open_segment(*segment.place, 4096)
    memory[:3] = b"abc"
    assert open_segment(*segment.place, 4096)[:3] == b"abc"
    segment.close()
    with (tmp_path / "other").open("w") as other, pytest.raises(AssertionError, match="no segment"):
        open_segment(segment.place[0], other.fileno(), 4096)


def test_all_ranks_say_that_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that makes the segment, and those that wait for its place."""
    told: list[list[int]] = []

    def broadcast(x: torch.Tensor, src: int, group: object) -> None:
        if told:
            x.copy_(torch.tensor(told[0]))
        told.append(x.tolist())

    def no_room(file: int, offset: int, num_bytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_memory.dist, "broadcast", broadcast)
    monkeypatch.setattr(shared_memory.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(shared_memory.os, "posix_fallocate", no_room)
    for is_owner in (True, False):
        with pytest.raises(ValueError, match=r"no room for 1.0 MB: No space left on device; make"):
            shared_memory.map_segment(1_000_000, 0, None, is_owner)
