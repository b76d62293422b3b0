"""Endpoint: requests served by another program, an OpenAI-compatible server that streams
completions. It gets the prompts as token ids, or as text if it takes no ids.

A server that says the ids of its tokens (as vLLM does if `return_token_ids` is true) is compared
like every mode. Tokens of other servers are counted but not known.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from queue import SimpleQueue
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import torch

from magicdec.config.run_config import RunConfig
from magicdec.console import Progress
from magicdec.memory.model_plan import ModelPlan
from magicdec.request import Request
from magicdec.serving.batching import of_first_rank_alone
from magicdec.serving.modes import Pass
from magicdec.serving.record import UNKNOWN
from magicdec.serving.system import Extras, System, Watch
from magicdec.setup.prepare import SetupCache

BODY_CHARACTERS = 200  # of an answer that is shown in an error
OTHER_FIELDS = (b":", b"event:", b"id:", b"retry:")  # of a stream of events, beside its data


class Endpoint(System):
    """Every request is sent when it arrives, by a thread of the first rank that waits for its
    tokens. How many are served together is the server's business."""

    is_external = True
    computes = False

    def prepare(self, run_config: RunConfig, cache: SetupCache) -> None:
        workload = self.options.batch_of(run_config.workload, self.options.rows)
        models = self.find(run_config, workload, cache)
        self.run = self.complete(of_first_rank_alone(models), cache)
        self.model = self.options.endpoint_model
        if self.launch.rank == 0:
            served = self._parts(next(self._events("/models")), "data")
            names = [str(each["id"]) for each in served if "id" in each]
            self.model = self.model or next(iter(names), None)
            if self.model not in names:
                choices = ", ".join(names) or "no model"
                raise ValueError(
                    f"--endpoint_model {self.model} is not served there; choose from {choices}"
                )

    def model_plans(self, each: Pass, rank: int) -> list[ModelPlan]:
        return []

    def open(self, each: Pass, device: torch.device, progress: Progress) -> None:
        """The server is there already."""

    def warm_up_rows(self, each: Pass) -> int:
        return self.options.rows

    def serve(self, each: Pass, requests: Sequence[Request], watch: Watch) -> Extras:
        ended = SimpleQueue[Exception | None]()
        for request in requests if self.launch.rank == 0 else ():
            # A daemon, so that a command that ends does not wait for the other answers.
            Thread(target=self._serve_one, args=(request, watch, ended), daemon=True).start()
        for _ in requests if self.launch.rank == 0 else ():
            if (error := ended.get()) is not None:
                raise error
        return Extras()

    def _serve_one(
        self, request: Request, watch: Watch, ended: SimpleQueue[Exception | None]
    ) -> None:
        problem: Exception | None = None
        try:
            time.sleep(max(0.0, request.arrived_s - self.now()))
            watch.counts.moves[request.request_id].joined_s.append(self.now())
            self._stream(request, watch)
        except Exception as error:  # `serve` raises it
            problem = error
        ended.put(problem)

    def _stream(self, request: Request, watch: Watch) -> None:
        """Send the request and read its tokens. Raises ValueError for another number of tokens than
        was asked for."""
        most, said = request.sampling.max_new_tokens, None
        ignores_eos = self.run.config.decoding.ignore_eos
        for event in self._events("/completions", self._body(request)):
            if isinstance(usage := event.get("usage"), dict):
                said = usage.get("completion_tokens")
            for choice in self._parts(event, "choices"):
                tokens = choice.get("token_ids") or [UNKNOWN] * bool(choice.get("text"))
                if not isinstance(tokens, list) or {type(token) for token in tokens} - {int}:
                    raise ValueError(f"{self._flag} sends token_ids that are no ids: {tokens!r}")
                request.append(tokens, self.now())
                watch.tokens(len(tokens))
        output, times = request.output_ids, request.token_times_s
        count = said if UNKNOWN in output and isinstance(said, int) else len(output)
        if not output or not 0 < count <= most or (ignores_eos and count < most):
            raise ValueError(
                f"{self._flag}: request {request.request_id} has {count} tokens, not "
                f"{'' if ignores_eos else '1 to '}{most} as it was asked for"
            )
        # A part of a text may be several tokens, or be none of its own.
        lacking = count - len(output)
        output += [UNKNOWN] * lacking
        times += times[-1:] * lacking
        del output[count:], times[count - 1 : -1]
        request.finished_s = times[-1]

    def _body(self, request: Request) -> dict[str, Any]:
        ids, most = list(request.prompt_ids), request.sampling.max_new_tokens
        as_text = self.options.endpoint_prompts == "text"
        prompt = self.run.tokenizer.decode(ids) if as_text else ids
        body: dict[str, Any] = {"model": self.model, "prompt": prompt}
        body |= {"max_tokens": most, "temperature": 0, "stream": True, "return_token_ids": True}
        if self.run.config.decoding.ignore_eos:
            body |= {"ignore_eos": True, "min_tokens": most}
        return body | {"stream_options": {"include_usage": True}}

    def _parts(self, answer: dict[str, Any], name: str) -> list[dict[str, Any]]:
        """The objects of the list `name`, if there is one. Raises ValueError for others."""
        parts = answer.get(name) or []
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise ValueError(f"{self._flag} sends {name} that are no list of objects: {parts!r}")
        return parts

    def _object(self, path: str, text: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(text.decode(errors="replace"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{self._flag} answers {path} with no JSON: {error}") from None
        if not isinstance(answer, dict):
            raise ValueError(f"{self._flag} answers {path} with no object: {answer!r}")
        return answer

    @property
    def _flag(self) -> str:
        return f"--endpoint {self.options.endpoint}"

    def _events(self, path: str, body: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        """The JSON object that the server answers, or with a `body` those that it streams. Raises
        ValueError, one line naming the server, if it is down, refuses, stalls or stops early."""
        url, limit_s = urlsplit(self.options.endpoint or ""), self.options.endpoint_timeout_s
        kind = HTTPSConnection if url.scheme == "https" else HTTPConnection
        connection = kind(url.netloc, timeout=limit_s)
        try:
            data = None if body is None else json.dumps(body)
            headers = {"Content-Type": "application/json"}
            method = "GET" if body is None else "POST"
            connection.request(method, url.path.rstrip("/") + path, data, headers)
            response = connection.getresponse()
            if response.status != 200:
                text = response.read(BODY_CHARACTERS).decode(errors="replace")
                raise ValueError(f"{self._flag} answers {path} with {response.status}: {text}")
            if body is None:
                yield self._object(path, response.read())
                return
            for line in response:
                sent = line.strip().removeprefix(b"data:").strip()
                if sent == b"[DONE]":
                    return
                if sent and not sent.startswith(OTHER_FIELDS):
                    event = self._object(path, sent)
                    if event.get("error"):
                        raise ValueError(f"{self._flag} ends an answer with: {event['error']}")
                    yield event
            raise ValueError(f"{self._flag} ends in the middle of an answer")
        except TimeoutError:
            raise ValueError(f"{self._flag} has sent nothing for {limit_s:g} s") from None
        except (OSError, HTTPException) as error:
            raise ValueError(f"{self._flag}: {error}") from None
        finally:
            connection.close()

    def close(self) -> None:
        """It took nothing."""
