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
from typing import TYPE_CHECKING, Any

import torch

from magicdec.config.capacity import Capacity
from magicdec.config.choices.collectives import Transport
from magicdec.config.resolve import Placement
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import SamplingSection
from magicdec.distributed.groups import Launch
from magicdec.hardware.timing import RealClock
from magicdec.output.console import Progress
from magicdec.runner.request import Request, Turn
from magicdec.runner.sampling.sampling import make_params
from magicdec.setup.memory_check import MemoryBudget, add_up
from magicdec.setup.memory_plan import MemoryPlan, plan_of
from magicdec.setup.model_plan import ModelPlan
from magicdec.setup.prepare import (
    Prepared,
    ResolvedRun,
    SetupCache,
    complete,
    find,
    resolve_run,
)
from magicdec.systems.declaration import SystemSettings
from magicdec.systems.details import Details
from magicdec.systems.modes import Pass
from magicdec.systems.observer import PassObserver
from magicdec.systems.options import ServeOptions
from magicdec.systems.stages.spans import Span
from magicdec.workload.conversations import Conversation
from magicdec.workload.request_shapes import RequestShape

if TYPE_CHECKING:
    from magicdec.runner.model_runner import ModelRunner
    from magicdec.speculation.steps.logits_recorder import LogitsRecorder
    from magicdec.speculation.steps.strategy import DecodingStrategy
    from magicdec.systems.shared_prefill import KeptPrompts

WARM_UP_TOKENS = 3


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
class SystemDetails:
    """What a system measured in a pass beside the times of requests: on the first rank `recorded`,
    the part of the record, and `trace`; and `recorder`, which has kept steps, on each rank that
    computes whole ones."""

    recorded: Details | None = None
    trace: PassTrace | None = None
    recorder: LogitsRecorder | None = None


class System(ABC):
    """A way to serve requests. `run` has this rank's config, models and prompts."""

    run: Prepared
    is_external = False  # another program computes, whose tokens may be rounded otherwise
    layers: Sequence[range] = ()  # of each stage of a ring, or of each rank
    layer_split: str | None = None  # as `--layer_split` would name the layers of the stages
    split: str = ""  # what `--layer_split auto` chose, in one line
    transport: Transport | None = None  # of messages between stages
    stays_open = False  # beside other systems: what it holds is shared
    keeps_prompts = False  # `keep_prompts` prefills once for several passes
    kept: KeptPrompts | None = None  # the prompts that are served now, if they are kept
    warm_up_calibration_s: float | None = None  # that drafts spent on measuring in the warm-up
    counts_reads = False  # the forwards of `runners` are all that its decode steps read
    are_steps_timed = False  # steps take their time alone, and do not wait for each other
    ranks_of_layer: int = 1  # the ranks that share a layer, whose sums are rounded by their number

    def __init__(
        self,
        options: ServeOptions,
        settings: SystemSettings,
        passes: Sequence[Pass],
        launch: Launch,
    ) -> None:
        self.options = options
        self.settings = settings
        self.passes = passes
        self.launch = launch
        self.has_drafts = any(serving_pass.is_drafting for serving_pass in passes)

    @abstractmethod
    def prepare(self, run_config: RunConfig, cache: SetupCache) -> None:
        """Make the run: find and check what the passes need. Raises ValueError, one line naming the
        flag, for errors of the user."""

    def find(
        self,
        run_config: RunConfig,
        capacity: Capacity,
        cache: SetupCache,
        placement: Placement = Placement(),
    ) -> ResolvedRun:
        """The models that hold `capacity`, as by `setup.prepare.find`; without a draft model if no
        pass drafts."""
        config = run_config if self.has_drafts else run_config.without_drafts()
        models = find(config, self.launch, cache, placement, capacity)
        most = models.source.config.max_length
        name = config.model.model
        self.options.check_lengths(most, f"--model {name}")
        return models

    def complete(self, models: ResolvedRun, cache: SetupCache) -> Prepared:
        """The run with a prompt for each request, before any memory plan or agreement of ranks."""
        options = self.options
        count = len(options.shapes), options.counted_by
        think_s = options.think_ms / 1e3
        return complete(
            models,
            cache,
            lambda launch, check: "",
            count,
            think_s=think_s,
            replay=options.replay,
        )

    @property
    def names(self) -> str:
        return " ".join(dict.fromkeys(serving_pass.name for serving_pass in self.passes))

    @abstractmethod
    def model_plans(self, serving_pass: Pass, rank: int) -> list[ModelPlan]:
        """The models that a rank holds in a pass, which `open` loads."""

    def plan(self, serving_pass: Pass, ranks: Sequence[int]) -> MemoryPlan:
        """The memory that `ranks` take together in a pass."""
        return add_up([plan_of(self.model_plans(serving_pass, rank)) for rank in ranks])

    def advice(self, serving_pass: Pass, room: MemoryBudget) -> str:
        """A way out for a pass that does not fit into `room`."""
        return "serve fewer or shorter requests at a time"

    def config_of(self, serving_pass: Pass) -> dict[str, Any]:
        config = self.run.config
        return (config if serving_pass.is_drafting else config.without_drafts()).to_dict()

    def describe_settings(self) -> dict[str, Any]:
        """The settings as they are recorded, with what was chosen for them."""
        return self.settings.describe()

    @abstractmethod
    def open(self, serving_pass: Pass, device: torch.device, progress: Progress) -> None:
        """Load this rank's models for a pass and connect it, keeping what an earlier pass opened if
        it fits."""

    @property
    def rows(self) -> int:
        """The number of requests that it serves at once."""
        return self.settings.rows(self.options, self.launch.world_size)

    @abstractmethod
    def step_shape(self, serving_pass: Pass) -> StepShape:
        """The largest forwards that decode in a pass."""

    def is_watched(self, serving_pass: Pass) -> bool:
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

    def keep_prompts(self, number: int, requests: Sequence[Request], name: str) -> list[Request]:
        """Prefill these requests, the group of that number, unless a cache has them. Returns them
        just after prefill, for `serve`, in every pass anew. For systems that have
        `keeps_prompts`; `name` says in the progress what is prefilled."""
        raise NotImplementedError

    @property
    def runners(self) -> Sequence[ModelRunner]:
        """This rank's runners whose forwards are counted."""
        return ()

    @abstractmethod
    def serve(
        self, serving_pass: Pass, requests: Sequence[Request], observer: PassObserver
    ) -> SystemDetails:
        """Serve all requests, each from its arrival on, or those of `keep_prompts`. Only the first
        rank's get their tokens. Raises ValueError, before the first step, if a request can never be
        served."""

    def end_warm_up(self) -> None:
        """Forget what the warm-up of a pass has measured, which ends now."""
        return None

    def now(self) -> float:
        """The time by the clock of arrivals. All ranks that compute must call it equally often."""
        return RealClock().now()

    @abstractmethod
    def close(self) -> None:
        """Free all that `open` took."""


class ReplayingSystem(System):
    """A system of the engine, whose batches can be served again, by another strategy. `runner` is
    None on a rank that waits."""

    runner: ModelRunner | None = None

    @property
    @abstractmethod
    def shares_prefixes(self) -> bool:
        """Whether texts share what their prompts have in common."""

    @abstractmethod
    def replay_mode(self, num_rows: int) -> str:
        """The mode whose forwards decode one row, or several."""

    @abstractmethod
    def replay(
        self,
        mode: str,
        requests: Sequence[Request],
        num_tokens: int,
        make: Callable[[ModelRunner], DecodingStrategy],
        concurrency: int | None = None,
        shares_prefixes: bool = False,
    ) -> None:
        """Serve requests at once, or at most `concurrency` of them, in the batches of `mode`, by a
        strategy that appends at most `num_tokens` in a step. What earlier passes left in the cache
        is lost. Texts share prefixes only if the system's do. The ranks that compute call it."""


def on_first_rank(models: ResolvedRun) -> ResolvedRun:
    """The run of the first rank alone, with the threads of all ranks of its host, but no more than
    its cores: threads that share a core mostly wait for each other."""
    asked = models.config.run_config
    machine = models.machine
    num_threads = models.config.parallel.threads * len(models.launch.local_ranks)
    threads = min(num_threads, machine.num_cpus)
    parallel = replace(asked.parallel, rank_group=(0,), threads=threads)
    draft = None if asked.draft is None else replace(asked.draft, rank_group=(0,))
    config = replace(asked, parallel=parallel, draft=draft)
    alone = replace(machine, world_size=1, local_world_size=1, first_rank=0)
    return resolve_run(
        config,
        Launch(0, 1, 0, 1),
        alone,
        models.source,
        models.draft_source,
        capacity=models.config.capacity,
    )


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
        at_s = begin_s + shape.arrival_ms / 1e3
        if conversations is None:
            params = make_params(sampling, shape.output_len, end_ids, len(requests), is_coupled)
            requests.append(Request(len(requests), prompt[: shape.prompt_len], params))
            requests[-1].arrived_s = at_s
            continue
        talk = conversations[i]
        own = list[Request]()  # of the conversation
        for place, plan in enumerate(talk.planned):
            number = len(requests) + len(own)
            length = min(shape.output_len, plan.output_len or shape.output_len)
            params = make_params(sampling, length, end_ids, number, is_coupled)
            request = Request(number, talk.known_prompt(place), params)
            request.turn = Turn(
                conversation=i,
                number=plan.number,
                after=tuple(own[before] for before in plan.after),
                prompt_after=talk.prompt_after,
                wait_s=plan.wait_s,
                at_s=plan.at_s,
                root=own[0] if own else None,
                branch=plan.branch,
                num_known=plan.num_known,
            )
            request.arrived_s = at_s + (0.0 if plan.after else request.offset_s)
            own.append(request)
        requests += own
    return requests


def shortened(shapes: Sequence[RequestShape], chunk: int) -> list[RequestShape]:
    """The shapes of warm-up requests: at most `chunk` prompt tokens and few output tokens."""
    return [
        RequestShape(0.0, min(chunk, shape.prompt_len), min(WARM_UP_TOKENS, shape.output_len))
        for shape in shapes
    ]
