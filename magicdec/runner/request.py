"""The state of a request, and the data that scheduler and decoding strategy exchange. Imports no
torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from itertools import pairwise

from magicdec.config.sections import SamplingSection
from magicdec.config.setting import check_values

UNKNOWN_ID = -1  # of an output token of which a server sends only the text


class NotFinite(ArithmeticError):
    """Logits are not finite, so that no token follows from them. Its one line says where."""

    @classmethod
    def after(cls, request_id: int, num_output: int) -> NotFinite:
        place = f"output token {num_output}" if num_output else "the prompt"
        return cls(
            f"the logits of request {request_id} after {place} are not finite numbers, so that no "
            "token follows from them"
        )


@contextmanager
def naming(place: str) -> Iterator[None]:
    try:
        yield
    except NotFinite as error:
        raise NotFinite(f"{place}: {error}") from None


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class SamplingParams:
    """The rules by which a request's tokens are chosen and its end is found. Greedy by default.

    Raises:
        ValueError: a value is out of its range; names the flag.
    """

    max_new_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    repetition_penalty: float = 1.0  # 1: off; for tokens in the prompt or the output
    presence_penalty: float = 0.0  # 0: off; for tokens in the output
    seed: int = 0  # determines this request's random numbers
    is_coupled: bool = False  # tokens are chosen with noise that a drafter can share

    def __post_init__(self) -> None:
        check_values(self, SamplingSection)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0

    @property
    def is_plain(self) -> bool:
        """Whether the next token always has the largest logit."""
        return self.is_greedy and not self.has_penalties

    def ends(self, num_output: int, token: int) -> bool:
        return num_output >= self.max_new_tokens or token in self.eos_token_ids


PromptAfter = Callable[[Sequence[Sequence[int]]], tuple[int, ...]]
"""A function that makes the prompt of a turn of the answers to all turns before, by their ids."""


@dataclass(frozen=True)
class Turn:
    """The place of a request in a conversation: its `number`, from 1, in its `branch`, and when it
    comes: once the requests `after` have ended and `wait_s` have gone by, but not before `at_s`
    since `root`, the conversation's first request, arrived. `num_known`: the tokens of its prompt
    that a cache without limits has, where a trace says it."""

    conversation: int
    number: int
    after: tuple[Request, ...]
    prompt_after: PromptAfter
    wait_s: float = 0.0
    at_s: float = 0.0
    root: Request | None = None
    branch: int = 0
    num_known: int | None = None


@dataclass(eq=False)
class Request:
    """A prompt and its output so far, compared by identity. Only the scheduler changes it. A later
    `turn` of a conversation may have no prompt before the turn before has ended."""

    request_id: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    output_ids: list[int] = field(default_factory=list)
    status: RequestStatus = RequestStatus.WAITING
    row: int | None = None  # its row of the KV cache; set at admission
    arrived_s: float = 0.0
    first_token_s: float | None = None
    token_times_s: list[float] = field(default_factory=list)  # when each output token was known
    finished_s: float | None = None
    turn: Turn | None = None  # None: it is asked alone

    @property
    def previous(self) -> Request | None:
        """The request whose answer this one follows."""
        return None if self.turn is None or not self.turn.after else self.turn.after[0]

    @property
    def offset_s(self) -> float:
        """How long after the begin of its conversation it comes, if it follows nothing."""
        return 0.0 if self.turn is None else max(self.turn.wait_s, self.turn.at_s)

    @property
    def is_timed(self) -> bool:
        """Whether it comes at a time after the end of others, and not at it."""
        return self.offset_s > 0

    @property
    def answer_ids(self) -> list[int]:
        """The output as a conversation goes on with it: without a token that ends it, for which
        what follows has its own."""
        output = self.output_ids
        return output[:-1] if output and output[-1] in self.sampling.eos_token_ids else output

    def follow(self, now: float) -> None:
        """Arrive as a turn that follows on others, of which the last has ended now; with the prompt
        that goes on with their answers, unless it is known."""
        turn = self.turn
        assert turn is not None, "it is one of a conversation"
        self.arrived_s = now + turn.wait_s
        if turn.root is not None:
            self.arrived_s = max(self.arrived_s, turn.root.arrived_s + turn.at_s)
        if self.prompt_ids:
            return
        answers = list[Sequence[int]]()
        before = self.previous
        while before is not None:
            answers.append(before.answer_ids)
            before = before.previous
        self.prompt_ids = turn.prompt_after(answers[::-1])

    @property
    def last_token(self) -> int:
        return self.output_ids[-1]

    @cached_property
    def distinct_prompt_ids(self) -> array[int]:
        """The prompt's distinct tokens as an int64 array, which torch converts quickly, for
        penalties."""
        return array("q", sorted(set(self.prompt_ids)))

    @property
    def num_cached(self) -> int:
        """Tokens with committed K and V: all but the newest, the next forward's input."""
        return len(self.prompt_ids) + len(self.output_ids) - (1 if self.output_ids else 0)

    @property
    def cached_ids(self) -> tuple[int, ...]:
        return (*self.prompt_ids, *self.output_ids[:-1]) if self.output_ids else self.prompt_ids

    def append(self, tokens: list[int], time: float) -> list[int]:
        """Append the tokens of a step, up to the request's end. Returns those appended."""
        emitted = self.output_ids
        params = self.sampling
        before = len(emitted)
        for token in tokens:
            emitted.append(token)
            self.token_times_s.append(time)
            if params.ends(len(emitted), token):
                self.status = RequestStatus.FINISHED
                self.finished_s = time
                break
        if self.first_token_s is None and tokens:
            self.first_token_s = time
        return tokens if len(emitted) == before + len(tokens) else emitted[before:]

    def times_ms(self) -> dict[str, float]:
        """The known times in ms: `ttft` from arrival to the first output token; once ended,
        `e2el` from arrival to the last token, and `tpot` from first to last by the tokens after
        the first."""
        times: dict[str, float] = {}
        first_s = self.first_token_s
        if first_s is None:
            return times
        times["ttft"] = 1e3 * (first_s - self.arrived_s)
        last_s = self.finished_s
        if last_s is None:
            return times
        times["e2el"] = 1e3 * (last_s - self.arrived_s)
        num_later = len(self.output_ids) - 1
        if num_later:
            times["tpot"] = 1e3 * (last_s - first_s) / num_later
        return times

    def gaps_ms(self) -> list[float]:
        times = sorted(set(self.token_times_s))
        return [1e3 * (later - earlier) for earlier, later in pairwise(times)]

    def snapshot(self) -> Request:
        times = list(self.token_times_s)
        return replace(self, output_ids=list(self.output_ids), token_times_s=times)


@dataclass
class Moves:
    """Times at which a request joined the running batch and was preempted. When it joined, so many
    of its tokens were looked for in a prefix cache, and each time so many found."""

    joined_s: list[float] = field(default_factory=list)
    preempted_s: list[float] = field(default_factory=list)
    num_looked_up: int = 0
    found: list[int] = field(default_factory=list)
    from_host: list[int] = field(default_factory=list)  # of these, in host memory

    @property
    def num_found(self) -> int:
        return sum(self.found)


@dataclass(frozen=True)
class Batch:
    """The requests of a step, in row order."""

    requests: tuple[Request, ...]

    @cached_property
    def ids(self) -> tuple[int, ...]:
        return tuple([request.request_id for request in self.requests])

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Those of the cache, which requests have as long as they run."""
        rows = tuple([request.row for request in self.requests if request.row is not None])
        assert len(rows) == len(self.requests), "a scheduled request has a row"
        return rows


@dataclass(frozen=True)
class StepOutput:
    """The tokens that a step emitted by request, in order.

    `draft_width`: the largest number of drafts of a request, to which the others are padded. By
    request, `num_drafted`: drafts without padding; `num_accepted`: those accepted; both None
    without drafts."""

    token_ids: list[list[int]]
    draft_width: int = 0
    num_accepted: list[int] | None = None
    num_drafted: list[int] | None = None
    emitted_s: list[float] | None = None  # prefill only: time of each request's first token
    # Of each request, the hash of what was drafted and read, and the number of keys that were read
    # (`DraftLog`); empty in a step without drafts, None if no log is kept.
    digests: list[tuple[str, int]] | None = None
    # Of each request, the draft tokens that were cancelled before any of their run was judged; None
    # where drafts are never cancelled.
    num_cancelled: list[int] | None = None
    # Of each request, the position of its first draft in its text; None where drafts follow the
    # newest token.
    draft_positions: list[int] | None = None
    # Of each request, the tokens of its text before the step, prompt included; None without drafts,
    # and where these do not follow the newest token.
    contexts: list[int] | None = None
    # Of each request, the probabilities that its first 1, 2, ... drafts are accepted; None where
    # drafts are only counted.
    acceptance: list[list[float]] | None = None

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))


Observer = Callable[[Sequence[int], StepOutput, float], None]
"""A function that a system calls after a step with its request ids, its output (appended tokens,
drafts and acceptance), and its time in seconds."""


def ignore_step(request_ids: Sequence[int], output: StepOutput, seconds: float) -> None:
    """The observer of an unobserved pass."""
