"""The system of another program's server that streams completions. Only token ids (which vLLM
sends for `return_token_ids`) are compared; other tokens are counted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch

from magicdec.config.run_config import RunConfig
from magicdec.engine.arrivals import Arrivals
from magicdec.engine.scheduler import StepCounts
from magicdec.names import SERVER_APIS, load_object
from magicdec.output.console import Progress
from magicdec.runner.request import UNKNOWN_ID, Request, StepOutput
from magicdec.setup.model_plan import ModelPlan
from magicdec.setup.prepare import SetupCache
from magicdec.systems.modes import Pass
from magicdec.systems.servers.connection import (
    METRICS_BYTES,
    PROMPT_BYTES,
    STREAM_BYTES,
    TOKEN_BYTES,
    Connection,
    Refused,
    is_same_server,
)
from magicdec.systems.servers.counters import Counters
from magicdec.systems.servers.declaration import NO_URL, ServersSettings
from magicdec.systems.servers.details import (
    CountedPass,
    ServerCounts,
    cached_of,
    conclude,
    count_when_ended,
    form_of,
)
from magicdec.systems.servers.http_client import Server, read_key
from magicdec.systems.servers.server_format import AskedText, ServerApi
from magicdec.systems.system import (
    PassObserver,
    StepShape,
    System,
    SystemDetails,
    on_first_rank,
)

MOST_PARTS = 8  # of a streamed text without ids, for each token that was asked for


class Servers(System):
    """A system that sends every request at its arrival, from a thread of the first rank. The server
    decides how many it serves together, of those that `--concurrency` lets be in flight."""

    settings: ServersSettings
    is_external = True
    computes = False

    def prepare(self, run_config: RunConfig, cache: SetupCache) -> None:
        capacity = self.options.capacity(self.rows)
        models = self.find(run_config, capacity, cache)
        self.run = self.complete(on_first_rank(models), cache)
        number = self.passes[0].server
        self.sends_text = self.settings.server_value("endpoint_prompts", number) == "text"
        self.api: ServerApi = load_object(
            SERVER_APIS[self.settings.server_value("endpoint_api", number)]
        )
        variable = self.settings.endpoint_key_env
        key = None if variable is None else read_key(variable)
        url = (self.settings.endpoint or ("",))[number]
        self.connection = Connection(
            url, self.api, self.settings.endpoint_timeout_s, self.settings.endpoint_total_s, key
        )
        self.model: str | None = self.settings.server_value("endpoint_model", number)
        self.metrics: Server | None = None
        metrics_url = self.settings.server_value("endpoint_metrics", number)
        if metrics_url not in (None, NO_URL):
            self.metrics = Server(metrics_url, key if is_same_server(metrics_url, url) else None)
        self.server_counts = ServerCounts()
        if self.launch.rank == 0:
            self.model = self.connection.find_model(self.model)
            self._check_metrics()
            self._check_prompts()

    def _check_metrics(self) -> None:
        """Raises ValueError if the counters cannot be read, or are those of an unknown program."""
        if (counters := self._counters()) is not None:
            try:
                form_of(counters)
            except ValueError as error:
                raise ValueError(f"--endpoint_metrics {self.metrics} {error}") from None

    def _check_prompts(self) -> None:
        """Raises ValueError if the server refuses a prompt of one token id, before any mode is
        measured. More of a prompt would be in the server's prefix cache."""
        if self.sends_text:
            return
        body = self._body(self.run.workload.prompts[0][:1], 1)
        try:
            for _ in self.connection.events(self.connection.limits(STREAM_BYTES), body):
                pass
        except Refused as error:
            raise ValueError(
                f"{error}; if it takes no token ids, give --endpoint_prompts text"
            ) from None

    def model_plans(self, serving_pass: Pass, rank: int) -> list[ModelPlan]:
        return []

    def open(self, serving_pass: Pass, device: torch.device, progress: Progress) -> None:
        """The server runs already."""

    def step_shape(self, serving_pass: Pass) -> StepShape:
        return StepShape(self.rows, 1)  # as far as is known here

    def serve(
        self, serving_pass: Pass, requests: Sequence[Request], observer: PassObserver
    ) -> SystemDetails:
        ended = SimpleQueue[Exception | None]()
        self.server_counts = ServerCounts()
        is_read = observer.is_measured and self.launch.rank == 0
        before = self._counters() if is_read else None
        arrivals = Arrivals(requests, serving_pass.concurrency)
        for _ in requests if self.launch.rank == 0 else ():
            for request in arrivals.take(len(requests)):
                # An answer ends later than its last token.
                if serving_pass.concurrency is not None or request.previous is not None:
                    request.arrived_s = max(request.arrived_s, self.now())
                # A daemon, so that a command that ends does not wait for the other answers.
                Thread(target=self._serve_one, args=(request, observer, ended), daemon=True).start()
            if (error := ended.get()) is not None:
                raise error
        if not is_read:
            return SystemDetails()
        taken, report = conclude(
            self.server_counts, requests, lambda: self._count(before, requests)
        )
        observer.verifications = taken
        self._take_hits(requests, observer.counts, report.problems)
        return SystemDetails(report)

    def _take_hits(
        self, requests: Sequence[Request], counts: StepCounts, problems: list[str]
    ) -> None:
        """Count what the server says that it had of prompts, as a prefix cache here is counted."""
        try:
            found = cached_of(self.server_counts, requests)
        except ValueError as error:
            problems.append(str(error))
            return
        for request in requests if found else ():
            number = request.request_id
            counts.look_up(number, len(request.prompt_ids), found[number])

    def _count(self, before: Counters | None, requests: Sequence[Request]) -> CountedPass | None:
        """What the server has counted in a pass that has ended; None if its counters are not read.
        Raises ValueError as `count_pass` does."""
        if before is None:
            return None
        return count_when_ended(self._read_counters, before, requests)

    def _counters(self) -> Counters | None:
        """The counters now; None without `--endpoint_metrics`. Raises ValueError."""
        return None if self.metrics is None else self._read_counters()

    def _read_counters(self) -> Counters:
        assert self.metrics is not None, "it has counters"
        sent = self.connection.text(self.metrics, "", METRICS_BYTES, "--endpoint_metrics")
        return Counters.read(sent.decode(errors="replace"))

    def _serve_one(
        self, request: Request, observer: PassObserver, ended: SimpleQueue[Exception | None]
    ) -> None:
        problem: Exception | None = None
        try:
            time.sleep(max(0.0, request.arrived_s - self.now()))
            observer.counts.moves[request.request_id].joined_s.append(self.now())
            self._stream(request, observer)
        except Exception as error:  # `serve` raises it
            problem = error
        ended.put(problem)

    def _stream(self, request: Request, observer: PassObserver) -> None:
        """Send the request and read its tokens.

        Raises ValueError for too few tokens, for too many as soon as they come, and for unknown
        ids.
        """
        most = request.sampling.max_new_tokens
        num_sent = None
        has_ids = False
        ignores_eos = self.run.config.decoding.ignore_eos
        size = PROMPT_BYTES * len(request.prompt_ids) + TOKEN_BYTES * most
        limits = self.connection.limits(STREAM_BYTES + size)
        for sent in self.connection.events(limits, self._body(request.prompt_ids, most)):
            event = self.api.event(sent, len(request.output_ids))
            self.server_counts.observe(request.request_id, event)
            if isinstance(usage := event.get("usage"), dict):
                num_sent = usage.get("completion_tokens")
            for choice in self.connection.parts(event, "choices"):
                ids = choice.get("token_ids")
                has_ids = has_ids or bool(ids)
                # Beside ids a text says nothing: it may be that of tokens that came before.
                is_text = bool(choice.get("text")) and not has_ids
                tokens = ids or [UNKNOWN_ID] * (self._num_new(request, num_sent) if is_text else 0)
                self._check_tokens(request, tokens, has_ids=bool(ids))
                left = most - len(request.output_ids) - len(tokens)
                tokens = [UNKNOWN_ID] * min(choice.get("num_lost", 0), max(0, left)) + tokens
                if tokens:
                    limits.progress()
                request.append(tokens, self.now())
                observer.observe([request.request_id], StepOutput([tokens]), 0.0)
        output = request.output_ids
        times = request.token_times_s
        count = num_sent if UNKNOWN_ID in output and isinstance(num_sent, int) else len(output)
        if not output or not 0 < count <= most or (ignores_eos and count < most):
            raise self._other_number(request, count)
        if self.options.turns > 1 and UNKNOWN_ID in output:
            raise ValueError(
                f"{self.connection.flag} sends an answer without all of its token ids, with which "
                f"a conversation of --turns {self.options.turns} would go on; ask by an "
                "--endpoint_api that sends ids, or leave --turns out"
            )
        # A part of a text may be several tokens, or be none of its own.
        lacking = count - len(output)
        output += [UNKNOWN_ID] * lacking
        times += times[-1:] * lacking
        del output[count:], times[count - 1 : -1]
        request.finished_s = times[-1]

    def _num_new(self, request: Request, num_sent: object) -> int:
        """The tokens of a text without ids: those that the server says to have sent so far, without
        the known ones. One where it says so at the end alone."""
        if not isinstance(num_sent, int):
            return 1
        most = MOST_PARTS * request.sampling.max_new_tokens + 1
        return max(0, min(num_sent, most) - len(request.output_ids))

    def _check_tokens(self, request: Request, tokens: object, has_ids: bool) -> None:
        size = self.run.source.config.vocab_size
        most = request.sampling.max_new_tokens
        if not isinstance(tokens, list) or {type(token) for token in tokens} - {int}:
            shown = self.connection.shown(tokens)
            raise ValueError(f"{self.connection.flag} sends token_ids that are no ids: {shown}")
        count = len(request.output_ids) + len(tokens)
        if count > (most if has_ids else MOST_PARTS * most):
            raise self._other_number(request, count)
        if wrong := [token for token in tokens if not 0 <= token < size] if has_ids else []:
            shown = self.connection.shown(wrong[0])
            raise ValueError(
                f"{self.connection.flag} sends a token id {shown}, but --model "
                f"{self.run.source.name} has the ids 0 to {size - 1}"
            )

    def _other_number(self, request: Request, count: int) -> ValueError:
        asked = "" if self.run.config.decoding.ignore_eos else "1 to "
        return ValueError(
            f"{self.connection.flag}: request {request.request_id} has {count} tokens, not "
            f"{asked}{request.sampling.max_new_tokens} as it was asked for"
        )

    def _body(self, prompt_ids: Sequence[int], most: int) -> dict[str, Any]:
        ids = list(prompt_ids)
        prompt = self.run.tokenizer.decode(ids) if self.sends_text else ids
        return self.api.body(
            AskedText(
                self.model,
                prompt,
                most,
                self.run.config.decoding.ignore_eos,
                keeps_prompt=self.settings.prefix_cache,
            )
        )

    def close(self) -> None:
        """Nothing is open."""
