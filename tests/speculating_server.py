"""A server on the loopback that decodes a made-up language model with speculation, written from the
definitions, and answers as vLLM, SGLang or llama.cpp do; and faults that can be planted in it.
Holds no tests itself. As a program it serves on a port, with settings as JSON, until it is ended.

The model's logits follow from the last three tokens of its cache and the position. Everything that
a fault can break is there: a cache that is truncated after a rejection, positions, the rule by
which drafts are accepted, counts, and state that is kept between requests.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

VOCABULARY = 60
ORDER = 3  # tokens of the cache that a logit depends on
GAMMA = 4
SCALE = 2.2  # of the logits
RIGHT = 0.8  # share of places at which the draft model has the target's likeliest token
NOISE = 0.004  # of what it says of a place when others are served too
POLL_S = 0.01
PATIENCE_S = 30.0
MEETING_S = 0.5
FEW_SCORES = 5
MANY_BYTES = 8192  # that a client does not read before it is given them
CANCELLATION = "draft state lost at a cancellation"
Logits = np.ndarray[Any, np.dtype[np.float64]]

GREEDY_FAULTS = (
    "stale KV after a rejection",
    "position off by one",
    "lenient acceptance",
    "draft in place of the bonus token",
    "mixed rows",
    "wrong scores of texts",
)
SAMPLING_FAULTS = (
    "drafts accepted by the likeliest token",
    "temperature lost",
    "top-k after acceptance",
)
COUNTER_FAULTS = (
    "double counts",
    "drafts counted that were not judged",
    "bonus tokens counted as accepted",
    "counters of cancelled drafts",
    "accepted tokens a step in place of a rate",
    "acceptance length without the bonus token",
)
STATE_FAULTS = (
    "draft state lost at a hit",
    CANCELLATION,
    "draft decays",
    "more drafts than the head was trained for",
)
PREEMPTION_FAULTS = (
    "stale KV after a preemption",
    "draft state lost at a preemption",
)
FAULTS = (
    *GREEDY_FAULTS,
    *SAMPLING_FAULTS,
    *COUNTER_FAULTS,
    *STATE_FAULTS,
    *PREEMPTION_FAULTS,
)


@dataclass
class Step:
    """Tokens that a decode step emits, and its drafts."""

    tokens: list[int]
    num_drafted: int
    num_accepted: int


@dataclass
class Asked:
    prompt: list[int]
    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    seed: int = 0
    num_logprobs: int = 0
    is_cached: bool = True


def look_up(text: Sequence[int]) -> list[int]:
    """What followed the last tokens where they came last; nothing if they never did."""
    end = [*text[-ORDER:]]
    starts = range(len(text) - ORDER - 1, -1, -1)
    found = next((i for i in starts if [*text[i : i + ORDER]] == end), None)
    return [] if found is None else [*text[found + ORDER : found + ORDER + GAMMA]]


@dataclass
class SpeculatingServer:
    """`fault` is one of `FAULTS`; `speculates` without it decodes token by token. `lacks` names
    what it does not do: scores, many scores at a place, texts, ids, counts. Where the requests
    together need the KV of more tokens than `room`, the newest one loses its KV, and continues when
    it fits again."""

    fault: str = ""
    speculates: bool = True
    looks_up: bool = False  # in place of a draft model
    lacks: tuple[str, ...] = ()
    fails_after: int | None = None  # requests, after which it answers garbage with status 200
    sharpness: float = SCALE
    step_s: float = 0.0  # that a decode step takes
    draft_s: float = 0.0  # that it takes more with drafts
    room: int | None = None
    prefix: str = "vllm:"  # of its counters
    dies_after: int | None = None  # requests, of a program
    address: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    positions: Counter[int] = field(default_factory=Counter)
    known: set[tuple[int, ...]] = field(default_factory=set)  # prompts whose KV it has
    num_open: int = 0
    num_served: int = 0
    was_cancelled: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    held: dict[int, int] = field(default_factory=dict)  # tokens in the KV of each request
    num_entered: int = 0
    has_room: threading.Condition = field(default_factory=threading.Condition)
    tables: dict[tuple[int, ...], Logits] = field(default_factory=dict)
    lucks: dict[tuple[int, ...], float] = field(default_factory=dict)

    # The model.

    def logits(self, cache: Sequence[int], position: int) -> Logits:
        key = (*cache[-ORDER:], position % 2)
        if key not in self.tables:
            self.tables[key] = np.random.default_rng([7, *key]).normal(size=VOCABULARY)
        return self.sharpness * self.tables[key]

    def logprobs(self, ids: Sequence[int], salt: int = 0) -> Logits:
        """Log-probabilities after `ids`, with the noise of a forward among others."""
        logits = self.logits(ids, len(ids))
        if self.num_open > 1:
            seed = [11, salt, len(ids), *ids[-ORDER:]]
            logits = logits + NOISE * np.random.default_rng(seed).normal(size=VOCABULARY)
        return np.asarray(logits - np.log(np.exp(logits).sum()))

    def distribution(self, logits: Logits, asked: Asked, is_draft: bool = False) -> Logits:
        temperature = 1.0 if self.fault == "temperature lost" and is_draft else asked.temperature
        scaled = logits / temperature
        if asked.top_k and not (is_draft and self.fault == "top-k after acceptance"):
            scaled = np.where(scaled >= np.sort(scaled)[-asked.top_k], scaled, -np.inf)
        weights = np.exp(scaled - scaled.max())
        return np.asarray(weights / weights.sum())

    # Decoding.

    def decode(self, asked: Asked) -> Iterator[Step]:
        """The steps of an answer; the first has the token of the prompt's forward."""
        number = self.enter(len(asked.prompt))
        try:
            yield from self.decode_with_kv(asked, number)
        finally:
            self.leave(number)

    def decode_with_kv(self, asked: Asked, number: int) -> Iterator[Step]:
        random = np.random.default_rng([asked.seed, 3, *asked.prompt[-ORDER:]])
        is_hit = asked.is_cached and tuple(asked.prompt) in self.known
        self.known.add(tuple(asked.prompt))
        is_lost = self.fault == "draft state lost at a hit" and is_hit
        is_mixed = self.fault == "mixed rows" and asked.is_cached and asked.max_tokens > 1
        is_mixed = is_mixed and self.meets_others()
        cache = list(asked.prompt)
        first = self.choose(self.logits(cache, len(cache)), asked, random)
        output = [first]
        yield Step([first], 0, 0)
        shift = 0
        while len(output) < asked.max_tokens:
            cache.append(output[-1])
            time.sleep(self.step_s + self.draft_s * self.speculates)
            if not self.speculates:
                token = self.choose(self.logits(cache, len(cache)), asked, random)
                output.append(token)
                yield Step([token], 0, 0)
                continue
            if self.is_preempted(number, len(cache)):
                is_lost = self.fault == "draft state lost at a preemption"
                if self.fault == "stale KV after a preemption":
                    cache[-1] = cache[-2]
            draft = self.draft(cache, is_lost)
            logits = [
                self.logits([*cache, *draft[:n]], len(cache) + n + shift)
                for n in range(len(draft) + 1)
            ]
            if is_mixed and len(output) % 7 == 3:
                logits = logits[::-1]
            count, token = self.judge(draft, logits, asked, random)
            if self.fault == "position off by one" and 0 < count < len(draft):
                shift = 1
            new = [*draft[:count], token]
            cache += draft[:count]
            if self.fault == "stale KV after a rejection" and count < len(draft):
                cache[-1] = draft[count]
            new = new[: asked.max_tokens - len(output)]
            output += new
            yield Step(new, len(draft), count)

    # The room for KV.

    def enter(self, size: int) -> int:
        """Take the KV of a prompt as soon as there is room. Returns a number for its request."""
        with self.has_room:
            self.has_room.wait_for(lambda: self.fits(size), PATIENCE_S)
            self.num_entered += 1
            self.held[self.num_entered] = size
            return self.num_entered

    def fits(self, size: int) -> bool:
        return self.room is None or sum(self.held.values()) + size <= self.room

    def is_preempted(self, number: int, size: int) -> bool:
        """Whether a request, whose text has grown to so many tokens, lost its KV and waited."""
        with self.has_room:
            self.held[number] = 0
            if self.fits(size) or number < max(self.held) or len(self.held) == 1:
                self.held[number] = size
                return False
            del self.held[number]
            self.counts["preemptions"] += 1
            self.has_room.notify_all()
            self.has_room.wait_for(lambda: self.fits(size), PATIENCE_S)
            self.held[number] = size
            return True

    def leave(self, number: int) -> None:
        with self.has_room:
            del self.held[number]
            self.has_room.notify_all()

    def meets_others(self) -> bool:
        """Whether another request is open, or is soon."""
        end_s = time.monotonic() + MEETING_S
        while self.num_open < 2 and time.monotonic() < end_s:
            time.sleep(POLL_S)
        return self.num_open > 1

    def choose(self, logits: Logits, asked: Asked, random: np.random.Generator) -> int:
        if asked.temperature == 0:
            return int(np.argmax(logits))
        return int(random.choice(VOCABULARY, p=self.distribution(logits, asked)))

    def draft(self, cache: Sequence[int], is_lost: bool) -> list[int]:
        if self.looks_up:
            return look_up(cache)
        found = list[int]()
        is_lost |= self.fault == CANCELLATION and self.was_cancelled
        chance = RIGHT
        if self.fault == "draft decays":
            chance *= 0.98**self.num_served
        for n in range(GAMMA):
            text = [*cache, *found]
            likely = np.argsort(-self.logits(text, len(text)))
            luck = self.luck(text)
            is_wrong = is_lost or luck > chance
            is_wrong |= n > 1 and self.fault == "more drafts than the head was trained for"
            rank = 1 + int(1000 * luck) % 4  # a wrong draft is likely, too
            found.append(int(likely[rank if is_wrong else 0]))
        return found

    def luck(self, text: Sequence[int]) -> float:
        """A number between 0 and 1 that follows from the last tokens."""
        key = tuple(text[-ORDER:])
        if key not in self.lucks:
            self.lucks[key] = float(np.random.default_rng([5, *key]).random())
        return self.lucks[key]

    def judge(
        self, draft: list[int], logits: list[Logits], asked: Asked, random: np.random.Generator
    ) -> tuple[int, int]:
        """How many drafts are accepted, and the token after them. A draft is certain of its tokens,
        so that it is accepted with the target's probability and else excluded (arXiv 2211.17192,
        section 2.3)."""
        for n, token in enumerate(draft):
            if asked.temperature == 0:
                best = int(np.argmax(logits[n]))
                is_near = logits[n][best] - logits[n][token] < 0.8
                if token == best or (self.fault == "lenient acceptance" and is_near):
                    continue
                return n, best
            likely = int(np.argmax(logits[n])) == token
            probabilities = self.distribution(logits[n], asked, is_draft=True)
            if self.fault == "drafts accepted by the likeliest token" and likely:
                continue
            if random.random() < probabilities[token]:
                continue
            rest = self.distribution(logits[n], asked)
            rest[token] = 0
            return n, int(random.choice(VOCABULARY, p=rest / rest.sum()))
        if self.fault == "draft in place of the bonus token":
            return len(draft), draft[-1]
        return len(draft), self.choose(logits[-1], asked, random)

    # Counts.

    def reported(self, steps: Sequence[Step]) -> dict[str, Any] | None:
        """What an answer says of its drafts, with their rates; None if nothing was drafted."""
        judged = [step for step in steps if step.num_drafted]
        drafted = sum(step.num_drafted for step in judged)
        accepted = sum(step.num_accepted for step in judged)
        if self.fault == "double counts":
            accepted, drafted = 2 * accepted, 2 * drafted
        if self.fault == "bonus tokens counted as accepted":
            accepted += len(judged)
        if self.fault == "drafts counted that were not judged":
            drafted += 3 * GAMMA * len(judged) + GAMMA
        if not drafted:
            return None
        rate = accepted / drafted
        length = 1 + accepted / max(1, len(judged))
        if self.fault == "accepted tokens a step in place of a rate":
            rate = accepted / len(judged)
        if self.fault == "acceptance length without the bonus token":
            length -= 1
        counts = {"verified": len(judged), "drafted": drafted, "accepted": accepted}
        return counts | {"rate": rate, "length": length}

    def count(self, steps: Sequence[Step]) -> None:
        judged = [step for step in steps if step.num_drafted]
        self.counts["tokens"] += sum(len(step.tokens) for step in steps)
        self.counts["verified"] += len(judged)
        self.counts["drafted"] += sum(step.num_drafted for step in judged)
        self.counts["accepted"] += sum(step.num_accepted for step in judged)
        if self.fault == "counters of cancelled drafts":
            self.counts["drafted"] += GAMMA * len(judged)

    def metrics(self) -> str:
        name = f"{self.prefix}spec_decode_num"
        lines = [
            f"{self.prefix}generation_tokens_total {self.counts['tokens']}",
            f"{self.prefix}num_preemptions_total {self.counts['preemptions']}",
        ]
        if self.speculates:
            lines += [
                f"{name}_drafts_total {self.counts['verified']}",
                f"{name}_draft_tokens_total {self.counts['drafted']}",
                f"{name}_accepted_tokens_total {self.counts['accepted']}",
            ]
        return "\n".join(lines)

    # Serving.

    def start(self, port: int = 0) -> None:
        ours = self

        class Handler(SpeculatingHandler):
            server_of = ours

        self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, args=(POLL_S,), daemon=True).start()
        self.address = f"http://127.0.0.1:{self.http.server_port}"

    def stop(self) -> None:
        self.http.shutdown()
        self.http.server_close()


class SpeculatingHandler(BaseHTTPRequestHandler):
    server_of: SpeculatingServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""

    @property
    def ours(self) -> SpeculatingServer:
        return self.server_of

    def send(self, body: object, status: int = 200) -> None:
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self.send(self.ours.metrics())
        elif self.path == "/v1/models":
            self.send({"data": [{"id": "toy"}]})
        else:
            self.send("no such page", 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ours = self.ours
        if self.path == "/tokenize":
            text = body.get("prompt", body.get("content"))
            self.send({"tokens": [ord(letter) % VOCABULARY for letter in text]})
            return
        forms = {
            "/v1/completions": self.as_vllm,
            "/generate": self.as_sglang,
            "/completion": self.as_llama_cpp,
        }
        with ours.lock:
            ours.num_open += 1
            ours.num_served += 1
        if ours.fails_after is not None and ours.num_served > ours.fails_after:
            self.send("garbage")
            return
        if ours.num_served == ours.dies_after:
            print("out of memory", flush=True)
            os._exit(3)
        try:
            forms[self.path](body)
        except (BrokenPipeError, ConnectionResetError):
            ours.was_cancelled = True
        finally:
            with ours.lock:
                ours.num_open -= 1

    def stream(self, events: Iterator[dict[str, Any] | str]) -> None:
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        for event in events:
            text = event if isinstance(event, str) else json.dumps(event)
            if self.ours.fault == CANCELLATION:
                self.wfile.write(f": {'x' * MANY_BYTES}\n\n".encode())
            self.wfile.write(f"data: {text}\n\n".encode())
            self.wfile.flush()
        if self.ours.fault == CANCELLATION:
            self.await_close()
        self.close_connection = True

    def await_close(self) -> None:
        """Until the client closes. One that has not read all resets the connection."""
        self.connection.settimeout(PATIENCE_S)
        try:
            self.connection.recv(1)
        except ConnectionResetError:
            self.ours.was_cancelled = True

    def steps_of(self, asked: Asked, taken: list[Step]) -> Iterator[tuple[Step, list[Logits]]]:
        """The steps of an answer, each with the log-probabilities of its tokens."""
        ours = self.ours
        output = list[int]()
        for step in ours.decode(asked):
            taken.append(step)
            logprobs = [
                ours.logprobs([*asked.prompt, *output, *step.tokens[:n]])
                for n in range(len(step.tokens))
            ]
            output += step.tokens
            yield step, logprobs
        with ours.lock:
            ours.count(taken)

    # vLLM

    def as_vllm(self, body: dict[str, Any]) -> None:
        ours = self.ours
        prompt = body["prompt"]
        asked = Asked(
            prompt,
            body["max_tokens"],
            body["temperature"],
            max(0, body.get("top_k", 0)),
            body.get("seed", 0),
            self.most_scores(body.get("logprobs", 0)),
            "cache_salt" not in body,
        )
        if "logprobs" in body and "scores" in ours.lacks:
            self.send({"error": "no logprobs here"}, 400)
            return
        if (count := body.get("prompt_logprobs")) is not None:
            if {"scores", "texts"} & {*ours.lacks}:
                self.send({"error": "no prompt_logprobs here"}, 400)
                return
            self.send(
                {"choices": [{"prompt_logprobs": self.scored(prompt, self.most_scores(count))}]}
            )
            return
        self.stream(self.vllm_events(asked))

    def most_scores(self, count: int) -> int:
        """Of how many tokens it says log-probabilities where it is asked for so many."""
        return min(count, FEW_SCORES) if "many scores" in self.ours.lacks else count

    def scored(self, ids: list[int], count: int) -> list[dict[str, Any] | None]:
        found: list[dict[str, Any] | None] = [None]
        is_wrong = self.ours.fault == "wrong scores of texts" and sum(ids) % 2
        for n in range(1, len(ids)):
            logprobs = self.ours.logprobs(ids[: n - 1 if is_wrong else n], salt=1)
            top = {*np.argsort(-logprobs)[:count].tolist(), ids[n]}
            found.append({str(token): {"logprob": float(logprobs[token])} for token in top})
        return found

    def vllm_events(self, asked: Asked) -> Iterator[dict[str, Any] | str]:
        taken = list[Step]()
        for step, logprobs in self.steps_of(asked, taken):
            choice: dict[str, Any] = {"text": "x"}
            choice |= {} if "ids" in self.ours.lacks else {"token_ids": step.tokens}
            if asked.num_logprobs:
                tops = [np.argsort(-logits)[: asked.num_logprobs].tolist() for logits in logprobs]
                pairs = list(zip(step.tokens, logprobs, strict=True))
                choice["logprobs"] = {
                    "tokens": [f"token_id:{token}" for token in step.tokens],
                    "token_logprobs": [float(logits[token]) for token, logits in pairs],
                    "top_logprobs": [
                        {f"token_id:{token}": float(logits[token]) for token in top}
                        for top, logits in zip(tops, logprobs, strict=True)
                    ],
                }
            yield {"choices": [choice]}
        count = sum(len(step.tokens) for step in taken)
        last: dict[str, Any] = {"choices": [], "usage": {"completion_tokens": count}}
        found = self.ours.reported(taken)
        if found is not None and "counts" not in self.ours.lacks:
            last["metrics"] = {
                "speculative_decoding": {
                    "num_draft_tokens": found["drafted"],
                    "num_accepted_draft_tokens": found["accepted"],
                    "num_spec_steps": found["verified"],
                    "draft_acceptance_rate": found["rate"],
                    "mean_acceptance_length": found["length"],
                }
            }
        yield last
        yield "[DONE]"

    # SGLang

    def as_sglang(self, body: dict[str, Any]) -> None:
        ids = body["input_ids"]
        sampling = body["sampling_params"]
        count = body.get("top_logprobs_num", 0)
        if not body.get("stream"):
            scored = [
                (ids[n], self.ours.logprobs(ids[:n], salt=1))
                for n in range(max(1, body["logprob_start_len"]), len(ids))
            ]
            tops = [
                [self.entry(logits, t) for t in self.top(logits, count)] for _, logits in scored
            ]
            info = {
                "input_token_logprobs": [[None, ids[0], None]]
                + [self.entry(logits, token) for token, logits in scored],
                "input_top_logprobs": [None, *tops],
            }
            self.send({"text": "", "meta_info": info})
            return
        asked = Asked(
            ids,
            sampling["max_new_tokens"],
            sampling["temperature"],
            max(0, sampling.get("top_k", 0)),
            sampling.get("sampling_seed", 0),
            count,
        )
        self.stream(self.sglang_events(asked))

    def entry(self, logits: Logits, token: int) -> list[Any]:
        return [float(logits[token]), token, None]

    def top(self, logits: Logits, count: int) -> list[int]:
        return [int(token) for token in np.argsort(-logits)[:count]]

    def sglang_events(self, asked: Asked) -> Iterator[dict[str, Any] | str]:
        taken = list[Step]()
        output = list[int]()
        for step, logprobs in self.steps_of(asked, taken):
            output += step.tokens
            info: dict[str, Any] = {"completion_tokens": len(output), "finish_reason": None}
            if asked.num_logprobs:
                pairs = list(zip(step.tokens, logprobs, strict=True))
                info["output_token_logprobs"] = [self.entry(logprobs, t) for t, logprobs in pairs]
                info["output_top_logprobs"] = [
                    [self.entry(logits, t) for t in self.top(logits, asked.num_logprobs)]
                    for logits in logprobs
                ]
            yield {"text": "", "output_ids": [*output], "meta_info": info}
        info = {"completion_tokens": len(output), "finish_reason": {"type": "length"}}
        if (found := self.ours.reported(taken)) is not None:
            info |= {
                "spec_verify_ct": found["verified"],
                "spec_num_correct_drafts": found["accepted"],
                "spec_num_proposed_drafts": found["drafted"],
                "spec_accept_rate": found["rate"],
                "spec_accept_length": len(output) / found["verified"],
            }
        yield {"text": "", "output_ids": output, "meta_info": info}
        yield "[DONE]"

    # llama.cpp

    def as_llama_cpp(self, body: dict[str, Any]) -> None:
        asked = Asked(
            body["prompt"],
            body["n_predict"],
            body["temperature"],
            max(0, body.get("top_k", 0)),
            body.get("seed", 0),
            body.get("n_probs", 0),
            body["cache_prompt"],
        )
        events = list(self.llama_cpp_events(asked))
        if not body["stream"]:
            parts = events[:-1]
            whole = {"tokens": [t for part in parts for t in part["tokens"]]}
            key = "completion_probabilities"
            whole[key] = [place for part in parts for place in part.get(key, ())]
            self.send(events[-1] | whole)
            return
        if "events" in self.ours.lacks:  # of tokens that end inside a character
            events = [event for event in events[:-1] if sum(event["tokens"]) % 7] + events[-1:]
        self.stream(iter(events))

    def llama_cpp_events(self, asked: Asked) -> Iterator[dict[str, Any]]:
        """One event a token; log-probabilities only of tokens from a step without drafts."""
        taken = list[Step]()
        for step, logprobs in self.steps_of(asked, taken):
            for token, logits in zip(step.tokens, logprobs, strict=True):
                event: dict[str, Any] = {"content": "x", "tokens": [token], "stop": False}
                if asked.num_logprobs and not step.num_drafted:
                    tops = self.top(logits, asked.num_logprobs)
                    event["completion_probabilities"] = [
                        {
                            "id": token,
                            "logprob": float(logits[token]),
                            "top_logprobs": [
                                {"id": top, "logprob": float(logits[top])} for top in tops
                            ],
                        }
                    ]
                yield event
        count = sum(len(step.tokens) for step in taken)
        timings: dict[str, Any] = {"predicted_n": count, "cache_n": 0}
        if (found := self.ours.reported(taken)) is not None:
            timings |= {"draft_n": found["drafted"], "draft_n_accepted": found["accepted"]}
        last = {"content": "", "tokens": [], "stop": True, "tokens_predicted": count}
        yield last | {"timings": timings}


if __name__ == "__main__":
    SpeculatingServer(**json.loads(sys.argv[2])).start(int(sys.argv[1]))
    threading.Event().wait()
