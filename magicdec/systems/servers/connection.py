"""A connection to another program's server: JSON that it is sent and answers, whole or streamed,
within limits of bytes and time. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

from magicdec.systems.servers.http_client import AnswerLimits, LimitReached, Server
from magicdec.systems.servers.server_format import ServerApi, ServerEvent

# Bytes that an answer may have: for the list of models, for what frames a stream, for each token of
# the prompt, which a server may repeat as ids, and for each token that was asked for.
MODELS_BYTES = 4 << 20
METRICS_BYTES = 32 << 20
STREAM_BYTES = 1 << 20
PROMPT_BYTES = 32
TOKEN_BYTES = 1 << 14
OTHER_FIELDS = (b":", b"event:", b"id:", b"retry:")  # of a stream of events, beside its data
OPENAI_PATH = "/v1"  # the end of the URL of OpenAI's interface
NOT_FOUND = 404
CONTENT_ERRORS = (400, 415, 422, 500, 501)  # the statuses of servers that cannot take a prompt


class Refused(ValueError):
    """What a server says that does not do what it was asked for."""


@dataclass
class Connection:
    """`url` is of OpenAI's interface, and `flag` named it. An answer may take `total_s` seconds and
    be silent for `silence_s`. Every method raises ValueError, one line naming the server, if it
    fails or exceeds the limits; `Refused` if it does not do what it was asked for."""

    url: str
    api: ServerApi
    silence_s: float
    total_s: float
    key: str | None = None
    option: str = "--endpoint"

    @property
    def server(self) -> Server:
        return Server(self.url, self.key)

    @property
    def root(self) -> Server:
        """The whole server, below which OpenAI's interface is at `url`."""
        return Server(without_openai(self.url), self.key)

    @property
    def flag(self) -> str:
        return f"{self.option} {self.server}"

    def shown(self, sent: object) -> str:
        return self.server.shown(sent)

    def limits(self, num_bytes: int) -> AnswerLimits:
        return AnswerLimits(self.silence_s, self.total_s, num_bytes)

    def find_model(self, name: str | None) -> str | None:
        """The model of that name, or the first one. Raises ValueError if the server lacks it."""
        sent = self.text(self.server, "/models", MODELS_BYTES)
        served = self.parts(self.read_object("/models", sent), "data")
        names = [str(model["id"]) for model in served if "id" in model]
        found = name or next(iter(names), None)
        if found not in names:
            choices = ", ".join(names) or "no model"
            raise ValueError(f"--endpoint_model {found} is not served there; choose from {choices}")
        return found

    def events(self, limits: AnswerLimits, body: dict[str, Any]) -> Generator[ServerEvent]:
        """The JSON objects that the server streams."""
        path = self.api.path
        server = self.root if self.api.is_at_root else self.server
        with self.asked(server, path, limits, json.dumps(body).encode()) as response:
            for line in response:
                sent = line.strip().removeprefix(b"data:").strip()
                if sent == b"[DONE]":
                    return
                if sent and not sent.startswith(OTHER_FIELDS):
                    event = self.read_object(path, sent)
                    if event.get("error"):
                        reason = self.shown(event["error"])
                        raise Refused(f"{self.flag} ends an answer with: {reason}")
                    yield event
                    if self.api.is_last(event):
                        return
            raise ValueError(f"{self.flag} ends in the middle of an answer")

    def post(self, server: Server, path: str, body: object, num_bytes: int) -> dict[str, Any]:
        """The object that the server answers."""
        data = json.dumps(body).encode()
        with self.asked(server, path, self.limits(num_bytes), data) as response:
            return self.read_object(path, response.read())

    def text(self, server: Server, path: str, num_bytes: int, option: str = "") -> bytes:
        with self.asked(server, path, self.limits(num_bytes), option=option) as response:
            return response.read()

    def parts(self, answer: dict[str, Any], name: str) -> list[dict[str, Any]]:
        parts = answer.get(name) or []
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise ValueError(
                f"{self.flag} sends {name} that are no list of objects: {self.shown(parts)}"
            )
        return parts

    def read_object(self, path: str, text: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(text.decode(errors="replace"))
        except (ValueError, RecursionError) as error:  # a number of many digits, many brackets
            raise ValueError(f"{self.flag} answers {path} with no JSON: {error}") from None
        if not isinstance(answer, dict):
            raise ValueError(f"{self.flag} answers {path} with no object: {self.shown(answer)}")
        return answer

    @contextmanager
    def asked(
        self,
        server: Server,
        path: str,
        limits: AnswerLimits,
        data: bytes | None = None,
        option: str = "",
    ) -> Iterator[HTTPResponse]:
        """The answer of a server, whose errors are raised also while it is read. `option` named it,
        if it was another one than that of the connection."""
        flag = f"{option or self.option} {server}"
        try:
            with server.ask(path, data, limits) as response:
                if response.status != 200:
                    text = server.shown(response.read(TOKEN_BYTES).decode(errors="replace"))
                    place = f" {path}" if path else ""
                    line = f"{flag} answers{place} with {response.status}: {text}"
                    is_elsewhere = server == self.server and lacks_openai(server.url)
                    if response.status == NOT_FOUND and is_elsewhere:
                        line += f"; the URL of OpenAI's interface ends in {OPENAI_PATH}"
                    refuses = response.status in CONTENT_ERRORS
                    raise Refused(line) if refuses else ValueError(line)
                yield response
        except LimitReached as error:
            raise ValueError(f"{flag} {error}") from None
        except (OSError, HTTPException) as error:
            raise ValueError(f"{flag}: {server.shown(str(error))}") from None


def lacks_openai(url: str) -> bool:
    return not urlsplit(url).path.rstrip("/").endswith(OPENAI_PATH)


def without_openai(url: str) -> str:
    """The URL of the whole server, whose interface of OpenAI's is at `url`."""
    parts = urlsplit(url)
    return parts._replace(path=parts.path.rstrip("/").removesuffix(OPENAI_PATH)).geturl()


def is_same_server(url: str, other: str) -> bool:
    """Whether both have one host and port, so that one may have the key of the other."""
    return urlsplit(url)[:2] == urlsplit(other)[:2]
