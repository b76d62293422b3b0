"""One rank of a check of channels: messages of every kind around a ring, through gloo or shared
memory, with payloads behind their headers, and apart from them (gloo in the place of NCCL). Started
by test_collectives.py; rank 0 prints OK, or the microseconds of a hop."""

import os
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from magicdec.distributed import shared_memory
from magicdec.distributed.channels.carriers import SharedRing
from magicdec.distributed.channels.connect import Connector
from magicdec.distributed.channels.message import (
    ChannelReceiver,
    ChannelSender,
    Ends,
    Kind,
    Message,
    MessageForm,
)
from magicdec.distributed.groups import read_launch
from magicdec.distributed.layout import StageGrid
from magicdec.distributed.start import close_groups, make_stage_groups
from magicdec.distributed.watching.processes import PeerLost

DEPTH = 6
WIDTH = 24
CAPACITY = 5000
CPU = torch.device("cpu")


def messages() -> list[Message]:
    """Without a payload, small ones, one that is larger than the ring in shared memory, and words
    that do not fit into the header."""
    torch.manual_seed(0)
    made = [Message(Kind.FREE, words=(3, -1)), Message(Kind.VOID, run=2**40, status=-7)]
    made.append(Message(Kind.NUMBERS, words=(4, 5, 6)))
    for shape in ((1, 1), (3, 2), (1, 300), (2, 1)):
        payload = torch.randn(*shape, WIDTH).to(torch.bfloat16)
        words = tuple(range(shape[0] * 2))
        made.append(Message(Kind.HIDDEN, len(made), 1, words, payload))
    return made


def is_same(a: Message, b: Message) -> bool:
    if (a.kind, a.run, a.status, a.words) != (b.kind, b.run, b.status, b.words):
        return False
    if a.payload is None or b.payload is None:
        return a.payload is b.payload
    return torch.equal(a.payload, b.payload) and a.payload.dtype == b.payload.dtype


def check(ends: Ends, is_first: bool, rounds: int = 40) -> None:
    """Several messages are under way before the first is received. Shared memory tells that there
    is none before."""
    sent = messages()
    if is_first:
        assert isinstance(ends.inbound, ChannelReceiver)
        is_shared = isinstance(ends.inbound.reader, SharedRing)
        assert ends.inbound.has_arrived(0.01) == (not is_shared)
    for _ in range(rounds):
        if is_first:
            for message in sent:
                ends.outbound.send(message)
        for message in sent:
            assert ends.inbound.has_arrived(60.0)
            found = ends.inbound.receive()
            assert is_same(found, message), found
            if not is_first:
                ends.outbound.send(found)


def check_large(ends: Ends) -> None:
    """Every rank sends more than its receiver is ready for, and receives only then."""
    large = Message(Kind.HIDDEN, payload=torch.ones(1, 150_000, WIDTH, dtype=torch.bfloat16))
    ends.outbound.send(large)
    assert is_same(ends.inbound.receive(), large)


def check_apart(place: tuple[Any, ...], grid: StageGrid, is_first: bool) -> None:
    """Payloads go by process groups of their own; a message without one sends its header alone."""
    form = place[2]
    ends = Connector(*place, "gloo", depth=DEPTH, capacity=CAPACITY).ring(grid)
    check(ends, is_first, rounds=10)
    assert isinstance(ends.outbound, ChannelSender) and ends.outbound.payloads is not None
    payload_bytes = sum(m.payload.numel() * 2 for m in messages() if m.payload is not None)
    assert ends.outbound.payloads.num_bytes == 10 * payload_bytes
    header_bytes = sum(form.num_bytes(0, len(message.words)) for message in messages())
    count = 10 * len(messages())
    assert ends.outbound.traffic == (count, 10 * (payload_bytes + header_bytes))
    ends.outbound.close()


def serve(ends: Ends) -> None:
    while (message := ends.inbound.receive()).kind is not Kind.END:
        ends.outbound.send(message)
    ends.outbound.send(message)


def main(collectives: str, task: str) -> None:
    launch = read_launch()
    grid = StageGrid(launch.world_size)
    groups = make_stage_groups(launch, grid, CPU, collectives)
    width = 4096 if task == "time" else WIDTH
    form = MessageForm(width, torch.bfloat16, 2)
    capacity = 1 << 22 if task == "time" else CAPACITY
    place = launch, collectives, form, CPU
    ends = Connector(*place, depth=DEPTH, capacity=capacity).ring(grid)
    is_first = groups.stage == 0
    if task == "check":
        check(ends, is_first)
        check(ends, is_first)
        if collectives == "gloo":  # a ring in shared memory holds what it was made for
            check_large(ends)
        check_apart(place, grid, is_first)
    elif task == "time":
        if is_first:
            payload = torch.zeros(1, 1, width, dtype=torch.bfloat16)
            seconds = []
            for _ in range(1000):
                begin_s = time.perf_counter()
                ends.outbound.send(Message(Kind.HIDDEN, payload=payload))
                ends.inbound.receive()
                seconds.append(time.perf_counter() - begin_s)
            print(f"{collectives}: {1e6 * statistics.median(seconds) / launch.world_size:.1f} us")
            ends.outbound.send(Message(Kind.END))
            ends.inbound.receive()
        else:
            serve(ends)
    elif launch.rank == launch.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        try:
            ends.inbound.receive()
        except PeerLost as error:
            print(f"LOST: {error}", file=sys.stderr, flush=True)
            os._exit(3)
    ends.outbound.close()
    if is_first:
        print("OK", flush=True)
    close_groups()


if __name__ == "__main__":
    shared_memory.DIRECTORY = Path(sys.argv[3]) if len(sys.argv) > 3 else shared_memory.DIRECTORY
    main(sys.argv[1], sys.argv[2])
