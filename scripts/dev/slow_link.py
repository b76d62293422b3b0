"""Links of a given rate and delay between network namespaces, in user space, for
`scripts/dev/netns_ring.sh` where the kernel has no netem.

    python scripts/dev/slow_link.py forward --hosts 3 --rate 1gbit --delay 1ms
    NETNS_RING_PROGRAM=scripts/dev/slow_link.py \\
        scripts/dev/netns_ring.sh --hosts 2 --rate 1gbit --delay 1ms -- measure

`forward` makes a TAP device for each host, tap0, tap1 and so on, which can be moved into a
namespace, and passes frames between them like a switch until it is ended. A frame occupies the link
of the host that sends it for its bits over the rate, and arrives `--delay` after that; nothing is
ever dropped. TCP hands over frames of up to 64 kB here, each of which arrives as a whole. At its
end it prints how late frames were passed on, because it was not woken in time.

`measure`, on two or more hosts under torchrun, prints the round trip of a byte and the throughput
of one TCP connection between the first two.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import heapq
import os
import re
import select
import signal
import socket
import statistics
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

# linux/if_tun.h and linux/prctl.h
TUNSETIFF = 0x400454CA
TUNSETOFFLOAD = 0x400454D0
IFF_TAP = 0x0002
IFF_NO_PI = 0x1000
IFF_VNET_HDR = 0x4000
TUN_F_CSUM = 0x01
TUN_F_TSO4 = 0x02
TUN_F_TSO6 = 0x04
PR_SET_TIMERSLACK = 29
VNET_HDR = 10  # bytes of struct virtio_net_hdr before each frame: checksums and segments to come
LARGEST = VNET_HDR + 14 + 65536
UNITS = {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3, "s": 1.0, "ms": 1e-3, "us": 1e-6}
RATES = tuple(UNITS)[:3]
DELAYS = tuple(UNITS)[3:]

PORT = 29500
ROUNDS = 200
WARM_ROUNDS = 20
MEASURED_BYTES = 1 << 25
BLOCK = 1 << 16


def number_of(text: str, units: Sequence[str]) -> float:
    """The number of bits a second or of seconds, as tc spells it, such as 100mbit or 1ms."""
    parts = re.fullmatch(rf"(\d+(?:\.\d+)?)({'|'.join(units)})", text)
    if parts is None or not float(parts[1]):
        raise argparse.ArgumentTypeError(f"{text}: choose a number above 0 and {', '.join(units)}")
    return float(parts[1]) * UNITS[parts[2]]


def open_tap(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6)
    return device


@dataclass
class Switch:
    """Passes frames between `taps`. Times are those of `time.monotonic`."""

    taps: list[int]
    bits_per_s: float
    delay_s: float
    hosts: dict[bytes, int] = field(default_factory=dict)  # the place in `taps`, by MAC address
    frames: list[tuple[float, int, int, bytes]] = field(default_factory=list)  # a heap, by due time
    late_s: list[float] = field(default_factory=list)

    def run(self) -> None:
        free_s = [0.0] * len(self.taps)  # when the link of a host is free again
        places = {tap: place for place, tap in enumerate(self.taps)}
        count = 0
        while True:
            wait_s = max(0.0, self.frames[0][0] - time.monotonic()) if self.frames else None
            readable, _, _ = select.select(self.taps, (), (), wait_s)
            for tap in readable:
                place = places[tap]
                with contextlib.suppress(BlockingIOError):  # all of its frames are read
                    while True:
                        frame = os.read(tap, LARGEST)
                        bits = 8 * (len(frame) - VNET_HDR)
                        free_s[place] = (
                            max(free_s[place], time.monotonic()) + bits / self.bits_per_s
                        )
                        count += 1
                        entry = (free_s[place] + self.delay_s, count, place, frame)
                        heapq.heappush(self.frames, entry)
            while self.frames and (late_s := time.monotonic() - self.frames[0][0]) >= 0:
                _, _, place, frame = heapq.heappop(self.frames)
                self.late_s.append(late_s)
                self.pass_on(place, frame)

    def pass_on(self, place: int, frame: bytes) -> None:
        """To the host of the frame's address, or to all others if none has sent from there."""
        to = frame[VNET_HDR : VNET_HDR + 6]
        source = frame[VNET_HDR + 6 : VNET_HDR + 12]
        self.hosts[source] = place
        others = [
            place_of_host for place_of_host in range(len(self.taps)) if place_of_host != place
        ]
        for host in [self.hosts[to]] if to in self.hosts else others:
            with contextlib.suppress(OSError):  # that host's device is down
                os.write(self.taps[host], frame)

    def describe(self) -> str:
        cuts = statistics.quantiles([0.0, 0.0, *self.late_s], n=100)
        median = 1e6 * cuts[49]
        high = 1e6 * cuts[98]
        return f"{len(self.late_s)} frames, {median:.0f} us late in the median, {high:.0f} at 99 %"


def forward(options: argparse.Namespace) -> None:
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1)  # ns; 50 us otherwise
    taps = [open_tap(f"tap{host}") for host in range(options.hosts)]
    switch = Switch(taps, options.rate, options.delay)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    print("ready", flush=True)
    try:
        switch.run()
    finally:
        print(f"links: {switch.describe()}", file=sys.stderr)


def measure() -> None:
    if os.environ["RANK"] == "0":
        with socket.create_server(("", PORT)) as server:
            answer(server.accept()[0])
    elif os.environ["RANK"] == "1":
        ask(connect(os.environ["MASTER_ADDR"]))


def connect(address: str) -> socket.socket:
    deadline = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection((address, PORT))
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def answer(peer: socket.socket) -> None:
    """Each byte comes back; then a byte comes back for all of MEASURED_BYTES."""
    with peer:
        for _ in range(WARM_ROUNDS + ROUNDS):
            peer.sendall(peer.recv(1))
        for _ in range(2):
            left = MEASURED_BYTES
            while left:
                left -= len(peer.recv(min(left, BLOCK)))
            peer.sendall(b"-")


def ask(peer: socket.socket) -> None:
    with peer:
        trips = []
        for _ in range(WARM_ROUNDS + ROUNDS):
            begun_s = time.monotonic()
            peer.sendall(b"-")
            peer.recv(1)
            trips.append(time.monotonic() - begun_s)
        for _ in range(2):  # the first one opens TCP's window
            begun_s = time.monotonic()
            peer.sendall(bytes(MEASURED_BYTES))
            peer.recv(1)
            seconds = time.monotonic() - begun_s
    cuts = statistics.quantiles(trips[WARM_ROUNDS:], n=10)
    print(f"round trip {1e3 * cuts[4]:.3f} ms ({1e3 * cuts[0]:.3f}-{1e3 * cuts[8]:.3f})")
    print(f"throughput {8e-6 * MEASURED_BYTES / seconds:.1f} Mbit/s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    flags = commands.add_parser("forward")
    flags.add_argument("--hosts", type=int, required=True, metavar="N")
    flags.add_argument(
        "--rate", type=partial(number_of, units=RATES), required=True, metavar="RATE"
    )
    flags.add_argument(
        "--delay", type=partial(number_of, units=DELAYS), required=True, metavar="TIME"
    )
    commands.add_parser("measure")
    options = parser.parse_args()
    forward(options) if options.command == "forward" else measure()


if __name__ == "__main__":
    main()
