"""System: serves requests in one or several modes on the ranks of a command. Also the requests with
their arrivals.

A system checks its settings before any process group exists (`prepare`), states what its ranks will
hold (`model_plans`), loads that (`open`), serves in each pass (`serve`), and frees the memory
(`close`). All ranks call these methods together, also ranks that wait.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from magicdec.config.choices.collectives import Transport
from magicdec.config.resolve import Placement
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import SamplingSection, WorkloadSection
from magicdec.distributed.groups import Launch
from magicdec.engine.scheduler import StepCounts
from magicdec.hardware.threads import ThreadCount
from magicdec.hardware.timing import RealClock
from magicdec.output.console import Progress
from magicdec.records.acceptance import Verifications
from magicdec.runner.request import Request, StepOutput, Turn
from magicdec.runner.sampling.sampling import make_params
from magicdec.runner.step_plan import StepPlan
from magicdec.setup.memory_check import MemoryBudget, add_up
from magicdec.setup.memory_plan import MemoryPlan, plan_of
from magicdec.setup.model_plan import ModelPlan
from magicdec.setup.prepare import Prepared, ResolvedRun, SetupCache, complete, find
from magicdec.systems.modes import Pass
from magicdec.systems.options import ServeOptions
from magicdec.systems.stages.spans import Span
from magicdec.workload.conversations import Conversation
from magicdec.workload.request_shapes import RequestShape

if TYPE_CHECKING:
    from magicdec.speculation.steps.witness import Witness
    from magicdec.systems.pipeinfer.metrics import SpeculationMetrics
    from magicdec.systems.ring.metrics import RingMetrics
    from magicdec.systems.servers.report import ServerReport

WARM_UP_TOKENS = 3


def ignore_tokens(num_tokens: int) -> None:
    """Nobody counts the tokens."""


class TimedStep(NamedTuple):
    """A step of a pass, and its prompt tokens, draft tokens of the row with the most, and rows."""

    ms: float
    kind: tuple[int, int, int]


@dataclass
class PassObserver:
    """The observer of a pass: counts of steps, verifications, decode steps with their times, and
    computing threads. It calls `advance` with each step's number of tokens."""

    counts: StepCounts = field(default_factory=StepCounts)
    advance: Callable[[int], None] = ignore_tokens
    threads: ThreadCount = field(default_factory=ThreadCount)
    verifications: Verifications = field(default_factory=Verifications)
    is_measured: bool = False
    is_logged: bool = False  # steps say what was drafted and read, where the system can
    is_timed: bool = False  # `steps` are kept
    steps: list[TimedStep] = field(default_factory=list)
    _prompt_tokens: int = 0  # that the step which is executed prefills

    def watch(self, plan: StepPlan) -> None:
        """A step begins now."""
        self.counts.watch(plan)
        self._prompt_tokens = sum(part.stop - part.start for part in plan.parts)

    def observe(self, request_ids: Sequence[int], output: StepOutput, seconds: float) -> None:
        self.verifications.observe(request_ids, output)
        if self.is_timed:
            kind = self._prompt_tokens, output.padded_gamma, len(request_ids)
            self.steps.append(TimedStep(1e3 * seconds, kind))
        self.advance(output.num_tokens)


@dataclass(frozen=True)
class PassTrace:
    """The spans of stages or ranks, named by `rows`, by the clock of the first rank. Spans are
    numbered by message or run: `requests` has the known request ids of a number, `prompts` the
    numbers that prefill. `clock_error_s` bounds the error of a time."""

    rows: Sequence[str]
    spans: Sequence[Sequence[Span]]
    requests: Mapping[int, Sequence[int]] = field(default_factory=dict)
    prompts: frozenset[int] = frozenset()
    clock_error_s: float = 0.0


@dataclass(frozen=True)
class StepShape:
    """The forwards that decode in a pass: their rows, and the new tokens of a row."""

    rows: int
    tokens: int


@dataclass(frozen=True)
class Extras:
    """Measurements of a system beside the times of requests: those of stages on the first rank,
    and `witness`, which has kept steps, on each rank that computes whole ones."""

    ring: RingMetrics | None = None
    speculation: SpeculationMetrics | None = None
    trace: PassTrace | None = None
    witness: Witness | None = None
    server: ServerReport | None = None  # of another program


class System(ABC):
    """A way to serve requests. `run` has this rank's config, models and prompts."""

    run: Prepared
    is_external = False  # another program computes, whose tokens may be rounded otherwise
    layers: Sequence[range] = ()  # of each stage of a ring, or of each rank
    layer_split: str | None = None  # as `--layer_split` would name the layers of the stages
    split: str = ""  # what `--layer_split auto` chose, in one line
    transport: Transport | None = None  # of messages between stages
    are_steps_timed = False  # steps take their time alone, and do not wait for each other
    ranks_of_layer: int = 1  # the ranks that share a layer, whose sums are rounded by their number

    def __init__(self, options: ServeOptions, passes: Sequence[Pass], launch: Launch) -> None:
        self.options = options
        self.passes = passes
        self.launch = launch
        self.has_drafts = any(each.is_drafting for each in passes)

    @abstractmethod
    def prepare(self, run_config: RunConfig, cache: SetupCache) -> None:
        """Make the run: find and check what the passes need. Raises ValueError, one line naming the
        flag, for errors of the user."""

    def find(
        self,
        run_config: RunConfig,
        workload: WorkloadSection,
        cache: SetupCache,
        placement: Placement = Placement(),
    ) -> ResolvedRun:
        """The models for such a batch, as by `setup.prepare.find`; without a draft model if no pass
        drafts."""
        config = run_config if self.has_drafts else run_config.without_drafts()
        models = find(replace(config, workload=workload), self.launch, cache, placement)
        most = models.source.config.max_length
        name = config.model.model
        self.options.check_lengths(most, f"--model {name}")
        return models

    def complete(self, models: ResolvedRun, cache: SetupCache) -> Prepared:
        """The run with a prompt for each request, before any memory plan or agreement of ranks."""
        count = len(self.options.shapes), self.options.counted_by
        return complete(models, cache, lambda launch, check: "", count)

    @property
    def names(self) -> str:
        return " ".join(dict.fromkeys(each.name for each in self.passes))

    @abstractmethod
    def model_plans(self, each: Pass, rank: int) -> list[ModelPlan]:
        """The models that a rank holds in a pass, which `open` loads."""

    def plan(self, each: Pass, ranks: Sequence[int]) -> MemoryPlan:
        """The memory that `ranks` take together in a pass."""
        return add_up([plan_of(self.model_plans(each, rank)) for rank in ranks])

    def advice(self, each: Pass, room: MemoryBudget) -> str:
        """A way out for a pass that does not fit into `room`."""
        return "serve fewer or shorter requests at a time"

    def config_of(self, each: Pass) -> dict[str, Any]:
        config = self.run.config
        return (config if each.is_drafting else config.without_drafts()).to_dict()

    @abstractmethod
    def open(self, each: Pass, device: torch.device, progress: Progress) -> None:
        """Load this rank's models for a pass and connect it, keeping what an earlier pass opened if
        it fits."""

    @abstractmethod
    def warm_up_rows(self, each: Pass) -> int:
        """The number of requests that a pass serves at once."""

    @abstractmethod
    def step_shape(self, each: Pass) -> StepShape:
        """The largest forwards that decode in a pass."""

    def is_watched(self, each: Pass) -> bool:
        """Whether logits of the steps of a pass are kept, for its verdict."""
        return False

    @property
    @abstractmethod
    def computes(self) -> bool:
        """Whether this rank computes in the passes, of which one is open; otherwise it waits."""

    @property
    def expected_threads(self) -> int:
        """The CPU threads with which this rank computes in the passes; 0 if it waits."""
        return self.run.config.parallel.threads if self.computes else 0

    @abstractmethod
    def serve(self, each: Pass, requests: Sequence[Request], observer: PassObserver) -> Extras:
        """Serve all requests, each from its arrival on. Only the first rank's get their tokens.
        Raises ValueError, before the first step, if a request can never be served."""

    def now(self) -> float:
        """The time by the clock of arrivals. All ranks that compute must call it equally often."""
        return RealClock().now()

    @abstractmethod
    def close(self) -> None:
        """Free all that `open` took."""


def make_requests(
    prompts: Sequence[tuple[int, ...]],
    shapes: Sequence[RequestShape],
    begin_s: float,
    sampling: SamplingSection,
    end_ids: tuple[int, ...] = (),
    is_coupled: bool = False,
    conversations: Sequence[Conversation] | None = None,
) -> list[Request]:
    """The requests, the first of which arrives at `begin_s`; with `conversations` those of all
    turns of each. A request ends early with a token of `end_ids`. Its random numbers depend on its
    number, so that they are equal in every pass; `sampling.coupled` explains `is_coupled`."""
    requests = list[Request]()
    for i, (prompt, shape) in enumerate(zip(prompts[: len(shapes)], shapes, strict=True)):
        talk = None if conversations is None else conversations[i]
        previous = None
        for turn in range(1 if talk is None else len(talk.turns)):
            number = len(requests)
            params = make_params(sampling, shape.output_len, end_ids, number, is_coupled)
            request = Request(number, prompt[: shape.prompt_len] if turn == 0 else (), params)
            request.arrived_s = begin_s + shape.arrival_ms / 1e3
            if talk is not None:
                request.turn = Turn(i, turn + 1, previous, talk.prompt_after)
            previous = request
            requests.append(request)
    return requests


def shortened(shapes: Sequence[RequestShape], chunk: int) -> list[RequestShape]:
    """The shapes of warm-up requests: at most `chunk` prompt tokens and few output tokens."""
    return [
        RequestShape(0.0, min(chunk, shape.prompt_len), min(WARM_UP_TOKENS, shape.output_len))
        for shape in shapes
    ]
