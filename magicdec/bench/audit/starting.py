"""The arms of a comparison: servers that run already, or that a command starts here, on the
loopback, and that are ended again. Imports no torch."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from ipaddress import ip_address
from shutil import which
from tempfile import TemporaryFile
from typing import BinaryIO
from urllib.parse import urlsplit

from magicdec.bench.audit.pays import ARMS, DRAFTS, PLAIN
from magicdec.config.masking import masked
from magicdec.systems.servers.connection import MODELS_BYTES, OPENAI_PATH, Connection
from magicdec.systems.servers.declaration import parse_url
from magicdec.systems.servers.http_client import SHOWN_CHARACTERS

LOOPBACK = "127.0.0.1"
PORT = "{port}"  # in a command, whose place the port takes
POLL_S = 0.1
ASKING_S = 5.0  # for the list of models, while a server starts
DYING_S = 1.0  # from the end of a connection to that of the process
GRACE_S = 10.0  # from SIGTERM to SIGKILL
NUM_LINES = 3  # the last ones of what a command wrote
LAST_BYTES = 4096
Connect = Callable[[str, str], Connection]
"""Makes a connection to a URL, which an option named."""


@dataclass(frozen=True)
class Arm:
    """A server at a `url`, or the words of a command that starts it."""

    name: str
    url: str | None = None
    words: tuple[str, ...] = ()

    @classmethod
    def of(cls, text: str) -> Arm:
        """The arm that NAME=URL_OR_COMMAND names. Raises ValueError for another text."""
        name, _, value = text.partition("=")
        if name not in ARMS or not value.strip():
            raise ValueError(
                f"{masked(text)} is no arm; give NAME=URL or NAME=COMMAND, with a NAME of "
                f"{', '.join(ARMS)}"
            )
        if value.startswith(("http://", "https://")):
            return cls(name, parse_url(value))
        try:
            words = shlex.split(value)
        except ValueError as error:
            raise ValueError(f"{masked(text)}: {error}; mend the command") from None
        if not any(PORT in word for word in words):
            raise ValueError(
                f"{masked(text)}: the command has no {PORT}, in whose place the port of its server "
                f"comes; add it, such as --port {PORT}"
            )
        return cls(name, None, tuple(words))

    @property
    def option(self) -> str:
        return f"--arm {self.name}"

    @property
    def is_here(self) -> bool:
        """Whether its server is on this machine, as far as its URL says."""
        host = "localhost" if self.url is None else urlsplit(self.url).hostname or ""
        try:
            return host == "localhost" or ip_address(host).is_loopback
        except ValueError:
            return False

    def check(self) -> None:
        """Raises ValueError for a program that is not there."""
        if self.url is None and which(self.words[0]) is None:
            raise ValueError(
                f"{self.option}={self.words[0]}: there is no such program; no shell reads the "
                "command, and env NAME=VALUE before it sets a variable"
            )


def parse_arms(words: str | Sequence[str]) -> list[str]:
    """The texts of arms. Raises ValueError if one is none, or if they cannot be compared."""
    texts = [words] if isinstance(words, str) else [*words]
    arms = [Arm.of(text) for text in texts]
    names = [arm.name for arm in arms]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"names {twice} twice; name each once")
    for needed in (PLAIN, DRAFTS):
        if needed not in names:
            raise ValueError(f"lacks {needed}; give {needed}=URL or {needed}=COMMAND too")
    urls = [arm.url for arm in arms if arm.url is not None]
    if len({*urls}) < len(urls):
        raise ValueError("has one server for several arms; give each its own")
    return texts


@contextmanager
def opened(arm: Arm, connect: Connect, ready_s: float) -> Iterator[Connection]:
    """A connection to the server of an arm, which answers. A server that a command starts is ended
    with the block. Raises ValueError, one line, if it does not answer within `ready_s` seconds; if
    it ends, the line has what the command wrote last."""
    if arm.url is not None:
        yield connect(arm.url, arm.option)
        return
    port = free_port()
    with (
        TemporaryFile() as output,
        started(arm, [word.replace(PORT, str(port)) for word in arm.words], output) as process,
    ):
        connection = connect(f"http://{LOOPBACK}:{port}{OPENAI_PATH}", arm.option)
        is_ready = False
        try:
            wait_for(connection, process, ready_s)
            is_ready = True
            yield connection
        except ValueError as error:
            with suppress(subprocess.TimeoutExpired):
                process.wait(DYING_S)
            code = process.returncode
            if is_ready and code is None:
                raise
            ended = "" if code is None else f"; its command ended with {code}"
            lines = last_lines(output)
            wrote = f"; it wrote last: {connection.shown(lines)}" if lines else ""
            raise ValueError(f"{error}{ended}{wrote}") from None


def free_port() -> int:
    with socket.socket() as found:
        found.bind((LOOPBACK, 0))
        return int(found.getsockname()[1])


@contextmanager
def started(arm: Arm, words: Sequence[str], output: BinaryIO) -> Iterator[subprocess.Popen[bytes]]:
    """The process of a command in a group of its own, which is ended with the block."""
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise ValueError(f"{arm.option}={words[0]}: {error.strerror}") from None
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all others of its group, which it leads. Ctrl-C meanwhile ends them at
    once."""
    has_members = True
    try:
        send(process, signal.SIGTERM)
        deadline_s = time.monotonic() + GRACE_S
        while has_members and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
            process.poll()
            has_members = send(process, 0)
    finally:
        if has_members:
            send(process, signal.SIGKILL)
        process.wait()


def send(process: subprocess.Popen[bytes], number: int) -> bool:
    """Send a signal to the group of a process; 0 is none. Returns whether the group has anyone."""
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):  # the latter of ended ones, on some systems
        return False
    return True


def wait_for(connection: Connection, process: subprocess.Popen[bytes], ready_s: float) -> None:
    """Wait until a server lists its models. Raises ValueError if its process ends, or in vain."""
    asking = replace(connection, silence_s=ASKING_S, total_s=ASKING_S)
    deadline_s = time.monotonic() + ready_s
    while True:
        try:
            asking.text(asking.server, "/models", MODELS_BYTES)
            return
        except ValueError as error:
            if process.poll() is not None:
                raise ValueError(f"{connection.option} does not start") from None
            if time.monotonic() >= deadline_s:
                reason = f"{connection.option} is not ready after {ready_s:g} s: {error}"
                raise ValueError(reason) from None
        time.sleep(POLL_S)


def last_lines(output: BinaryIO) -> str:
    """The last lines that a command wrote, as one line."""
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - LAST_BYTES))
    lines = output.read().decode(errors="replace").splitlines()
    texts = [line.strip() for line in lines if line.strip()]
    return " | ".join(texts[-NUM_LINES:])[-SHOWN_CHARACTERS:]
