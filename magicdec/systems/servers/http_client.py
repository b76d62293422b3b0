"""An HTTP client that limits the bytes and the time of answers, with its credentials."""

from __future__ import annotations

import io
import os
import socket
import time
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import unquote, urlsplit

from magicdec.config.masking import HIDDEN, masked

SHOWN_CHARACTERS = 200  # of what a server has sent, in an error


class LimitReached(Exception):
    """An answer that is too large or too slow. Its text is a sentence without the subject."""


class AnswerLimits:
    """The limits of one answer: `total_s` seconds, `silence_s` seconds between two signs of
    progress, and `num_bytes` bytes with its headers."""

    def __init__(self, silence_s: float, total_s: float, num_bytes: int) -> None:
        self.silence_s = silence_s
        self.total_s = total_s
        self.num_bytes = num_bytes
        self.num_read = 0
        self.total_end_s = time.monotonic() + total_s
        self.progress()

    def progress(self) -> None:
        """Note that useful data has arrived."""
        self.silence_end_s = time.monotonic() + self.silence_s

    def left_s(self) -> float:
        """Seconds until the first time limit. Raises LimitReached after it."""
        now = time.monotonic()
        if now >= self.total_end_s:
            raise LimitReached(f"has not ended an answer in {self.total_s:g} s")
        if now >= self.silence_end_s:
            raise LimitReached(f"has sent nothing of use for {self.silence_s:g} s")
        return min(self.total_end_s, self.silence_end_s) - now

    def count(self, num_bytes: int) -> None:
        """Note bytes that have arrived. Raises LimitReached if they are too many."""
        self.num_read += num_bytes
        if self.num_read > self.num_bytes:
            raise LimitReached(f"has sent more than the {self.num_bytes} bytes that it may need")


class LimitedReader(io.RawIOBase):
    def __init__(self, connected: socket.socket, limits: AnswerLimits) -> None:
        self.connected = connected
        self.limits = limits

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            self.connected.settimeout(self.limits.left_s())
            try:
                count = self.connected.recv_into(buffer)
            except TimeoutError:
                continue  # the limits say which one it was
            self.limits.count(count)
            return count


class LimitedSocket:
    """A connected socket for `http.client`, which closes it before the last answer is read. `close`
    is ignored; whoever connected the socket closes it."""

    def __init__(self, connected: socket.socket, limits: AnswerLimits) -> None:
        self.connected = connected
        self.limits = limits

    def sendall(self, data: bytes) -> None:
        self.connected.settimeout(self.limits.left_s())
        self.connected.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(LimitedReader(self.connected, self.limits))

    def close(self) -> None:
        """Leave it open."""


@dataclass(frozen=True)
class Server:
    """An HTTP server at a base URL. Every request carries `key`, or the user and password of the
    URL; `str` hides them."""

    url: str
    key: str | None = None

    def __str__(self) -> str:
        return masked(self.url)

    def shown(self, sent: object) -> str:
        """What the server has sent as one short line for a message, without credentials that it
        repeats."""
        text = sent if isinstance(sent, str) else repr(sent)
        for secret in self._secrets():
            text = text.replace(secret, HIDDEN)
        text = "".join(letter if letter.isprintable() else " " for letter in text)
        return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."

    def _secrets(self) -> list[str]:
        url = urlsplit(self.url)
        found = [self.key, url.password, unquote(url.password or ""), url.query]
        return [secret for secret in (*found, self._basic().partition(" ")[2]) if secret]

    def _basic(self) -> str:
        url = urlsplit(self.url)
        if url.username is None:
            return ""
        pair = f"{unquote(url.username)}:{unquote(url.password or '')}"
        return f"Basic {b64encode(pair.encode()).decode()}"

    def _headers(self) -> dict[str, str]:
        authorization = self._basic() if self.key is None else f"Bearer {self.key}"
        headers = {"Content-Type": "application/json"}
        return headers | {"Authorization": authorization} if authorization else headers

    @contextmanager
    def ask(self, path: str, body: bytes | None, limits: AnswerLimits) -> Iterator[HTTPResponse]:
        """The answer to a GET of `path` below the URL, or to a POST of `body`. Raises LimitReached,
        OSError and HTTPException, also while it is read."""
        url = urlsplit(self.url)
        kind = HTTPSConnection if url.scheme == "https" else HTTPConnection
        connection = kind(url.hostname or "", url.port, timeout=limits.left_s())
        connection.connect()
        connected = connection.sock
        connection.sock = LimitedSocket(connected, limits)
        query = f"?{url.query}" if url.query else ""
        target = f"{url.path.rstrip('/')}{path}{query}"
        try:
            method = "GET" if body is None else "POST"
            connection.request(method, target, body, self._headers())
            yield connection.getresponse()
        finally:
            connected.close()


def read_key(name: str, environment: Mapping[str, str] = os.environ) -> str:
    """The key in the environment variable `name`. Raises ValueError, which never shows the key, if
    there is none that a header can carry."""
    key = environment.get(name, "").strip()
    if not key:
        raise ValueError(
            f"--endpoint_key_env {name}: there is no such environment variable, or it "
            "is empty; export it with the key"
        )
    if not (key.isascii() and key.isprintable()):
        raise ValueError(
            f"--endpoint_key_env {name}: its value is no key, which has printable "
            "ASCII letters only"
        )
    return key
