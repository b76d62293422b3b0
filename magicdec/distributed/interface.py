"""The network interface that leads to another host.

gloo listens on the address that this host's name stands for. On many machines that is a loopback
address, which other hosts cannot reach. With `GLOO_SOCKET_IFNAME` set it listens on that interface
instead. Imports no torch.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct

VARIABLE = "GLOO_SOCKET_IFNAME"
GET_ADDRESS = 0x8915  # SIOCGIFADDR of netdevice(7)
REQUEST_BYTES = 40  # sizeof(struct ifreq)
ADDRESS_AT = 20  # where the IPv4 address lies in it
ANY_PORT = 9


def use_interface_towards(host: str) -> None:
    """Let gloo listen where the ranks of other hosts can reach this one: on the interface that
    leads to `host`, the first rank's. A name that the user has set stays."""
    name = interface_towards(host)
    if name is not None:
        os.environ.setdefault(VARIABLE, name)


def interface_towards(host: str) -> str | None:
    """The interface over which this host sends to `host` (a name or an IPv4 address; nothing is
    sent). None if `host` cannot be resolved or reached, or is reached over no named interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, ANY_PORT))
        except OSError:
            return None
        own = probe.getsockname()[0]
        names = (name for _, name in socket.if_nameindex())
        return next((name for name in names if _address_of(name, probe) == own), None)


def _address_of(name: str, any_socket: socket.socket) -> str | None:
    """The IPv4 address of an interface, or None if it has none."""
    request = struct.pack(f"{REQUEST_BYTES}s", name.encode())
    try:
        answer = fcntl.ioctl(any_socket.fileno(), GET_ADDRESS, request)
    except OSError:
        return None
    return socket.inet_ntoa(answer[ADDRESS_AT : ADDRESS_AT + 4])
