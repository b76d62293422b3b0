"""LLM: the Python interface for programs, a model in this process that serves requests which come
and go."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args, get_type_hints

import torch

from magicdec.config.capacity import Capacity
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import (
    NONE,
    AttentionSection,
    DecodingSection,
    KVSection,
    ModelSection,
    ParallelSection,
    SamplingSection,
    WorkloadSection,
)
from magicdec.distributed.groups import Group, Launch, ParallelGroups
from magicdec.engine.engine import Engine
from magicdec.engine.scheduler import StepCounts
from magicdec.model.detokenizer import Detokenizer
from magicdec.output.console import make_progress
from magicdec.records.acceptance import AcceptanceMetrics, Verifications, acceptance_metrics
from magicdec.runner.request import Moves, NotFinite, Request, RequestStatus, StepOutput
from magicdec.runner.sampling.sampling import make_params
from magicdec.runner.step_plan import PREFILL_TOKENS, BatchLimits, StepPlan
from magicdec.setup.loading import LoadedModels, make_draft, make_runner
from magicdec.setup.memory_check import (
    MemoryBudget,
    describe_place,
    free_device_memory,
    largest,
)
from magicdec.setup.memory_plan import model_plans_of, plan_of
from magicdec.setup.model_checks import is_rolling
from magicdec.setup.model_plan import ModelPlan, rewound_by_step
from magicdec.setup.prepare import ResolvedRun, SetupCache, check_models, find
from magicdec.speculation.steps.build import build_decoder
from magicdec.speculation.steps.strategy import DecodingStrategy

FEWEST = 2  # tokens of a request: one of its prompt, and one new one
# The share of the free memory that is taken where nobody asks for an amount: a host has others.
MOST_OF_FREE = {"cpu": 0.5, "cuda": 0.9}
MOST_CHUNK = 2048  # prompt tokens of a forward at most, which bounds its memory
ENDED = (RequestStatus.FINISHED, RequestStatus.CANCELLED)


class LLM:
    """A model that decodes up to `max_concurrency` requests together, of at most `max_tokens`
    tokens each, prompt included, admitted in the order of submission.

    Args:
        model: the model, named as `--model` names it.
        draft: what proposes draft tokens, as `--draft` names it: "none", "self", "model:NAME",
            "eagle:DIR", "mtp", "ngram", "ngram+self", "ngram+model:NAME", "ngram+eagle:DIR" or
            "ngram+mtp".
        gamma: draft tokens in each step, as `--gamma`, whose default for this draft holds; "auto"
            drafts as many as pay.
        kv: the entries of the KV cache that a drafting model reads.
        dtype: the dtype of activations and of the KV cache, as `--dtype`.
        max_tokens: most tokens of a request. Default: as many as the models have positions, or as
            memory has room for.
        max_concurrency: most requests that are decoded together.
        cache_tokens: tokens in the KV cache. Default: all requests at full length.
        block_tokens: tokens of a block of the cache.
        prefill_tokens: most prompt tokens that a step prefills.
        prefix_cache: whether blocks of texts that have ended are kept until others need them, and
            requests whose prompts begin alike share them, as `--prefix_cache` of `magicdec serve`.
        threads: CPU threads. Default: all cores.
        max_new_tokens: most new tokens of a request. Default: as many as fit in a row.
        draft_weights: the matrices that draft, as `--draft_weights`: "int8", "int4", "int4_g128"
            or "fp8".

    Raises:
        ValueError: in one line, before anything is loaded, for values that cannot be served.
    """

    def __init__(
        self,
        model: str = "demo",
        draft: str = NONE,
        gamma: int | str | None = None,
        kv: KVSection = KVSection(),
        dtype: str = "auto",
        max_tokens: int | None = None,
        max_concurrency: int = 8,
        cache_tokens: int | None = None,
        block_tokens: int = 256,
        prefill_tokens: int = PREFILL_TOKENS,
        threads: int | None = None,
        max_new_tokens: int | None = None,
        draft_weights: str | None = None,
        prefix_cache: bool = False,
    ) -> None:
        check_types(LLM.__init__, locals())
        check_positive(
            max_tokens=None if max_tokens is None else max_tokens - 1,
            max_concurrency=max_concurrency,
            block_tokens=block_tokens,
            prefill_tokens=prefill_tokens,
            threads=threads,
            cache_tokens=cache_tokens,
            max_new_tokens=max_new_tokens,
        )
        asked = RunConfig(
            model=ModelSection(model, dtype),
            attention=AttentionSection(prefill_chunk=min(prefill_tokens, MOST_CHUNK)),
            parallel=ParallelSection(threads=threads),
            kv=kv,
            decoding=DecodingSection(gamma=gamma, draft_weights=draft_weights),
            workload=WorkloadSection(batch_size=max_concurrency, prefix_len=FEWEST - 1, gen_len=1),
        ).with_draft(draft)
        check_used(asked, draft)
        cache = SetupCache()
        sizes = CacheSizes(block_tokens, cache_tokens, prefix_cache)
        run = find(asked, Launch(), cache)
        self.max_tokens = choose_max_tokens(run, max_tokens, max_new_tokens, sizes)
        self.max_new_tokens = min(max_new_tokens or self.max_tokens, self.max_tokens)
        capacity = capacity_of(max_concurrency, self.max_tokens, max_new_tokens)
        run = find(asked, Launch(), cache, capacity=capacity)
        _, self.tokenizer = check_models(run, cache)
        self.model = run.source.config
        self.is_random = run.is_random  # random weights have no acceptance
        self._engine, self._decoder = make_engine(run, self.max_tokens, prefill_tokens, sizes)
        self._num_requests = 0
        self._error: NotFinite | None = None
        self._streams: dict[int, Stream] = {}  # of the requests that have not ended
        self._counts = StepCounts(self._engine.clock.now)
        self._verifications = Verifications()

    def submit(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 64,
        sampling: SamplingSection = SamplingSection(),
        ignore_eos: bool = False,
    ) -> Stream:
        """Queue a request. Returns the stream of its tokens. Raises ValueError if it can never be
        served."""
        own = {"max_new_tokens": max_new_tokens, "sampling": sampling, "ignore_eos": ignore_eos}
        check_types(LLM.submit, own)
        ids = self._encode(prompt) if isinstance(prompt, str) else ids_of(prompt)
        wrong = next((i for i in ids if not 0 <= i < self.model.vocab_size), None)
        if wrong is not None or not ids:
            what = "is empty" if wrong is None else f"has the token id {wrong}"
            raise ValueError(f"the prompt {what}; ids are below {self.model.vocab_size}")
        check_positive(max_new_tokens=max_new_tokens)
        if max_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"max_new_tokens {max_new_tokens} is too large; this LLM was made for at most "
                f"{self.max_new_tokens}"
            )
        eos = () if ignore_eos else self.model.eos_token_ids
        params = make_params(sampling, max_new_tokens, eos, self._num_requests)
        request = Request(self._num_requests, ids, params)
        self._engine.scheduler.add([request], self._engine.clock.now())
        self._num_requests += 1
        stream = Stream(self, request)
        self._streams[request.request_id] = stream
        return stream

    def step(self) -> bool:
        """Advance all requests by one step; False without any. Raises NotFinite, then and later, if
        the logits of a request are not finite."""
        if self._error is not None:
            raise self._error
        plan = self._engine.scheduler.schedule()
        if plan is None:
            return False
        self._counts.watch(plan)
        try:
            self._engine.execute(plan, self._decoder, self._observe)
        except NotFinite as error:
            self._error = error  # the step has ended half-way
            raise
        self._settle(requests_of(plan))
        return True

    def _cancel(self, request: Request) -> None:
        self._engine.scheduler.cancel(request)
        self._settle([request])

    def _observe(self, request_ids: Sequence[int], output: StepOutput, seconds: float) -> None:
        self._verifications.observe(request_ids, output)

    def _settle(self, requests: Iterable[Request]) -> None:
        for request in requests:
            number = request.request_id
            if request.status in ENDED and number in self._streams:
                stream = self._streams.pop(number)
                stream.moves = self._counts.moves.pop(number, Moves())
                stream.verifications = self._verifications.take(number)

    def _encode(self, text: str) -> tuple[int, ...]:
        bos = self.tokenizer.bos_of(self.model.bos_token_id)
        return (*(() if bos is None else (bos,)), *self.tokenizer.encode(text))


def check_types(function: Callable[..., object], values: Mapping[str, object]) -> None:
    """Raises ValueError for a value of another type than its argument of `function` has."""
    hints = get_type_hints(function)
    for name in hints.keys() & values:
        kinds = get_args(hints[name]) or (hints[name],)
        value = values[name]
        # A truth value is no number, although it is an int to Python.
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            names = [kind.__name__.replace("NoneType", "None") for kind in kinds]
            raise ValueError(
                f"{name} is {reprlib.repr(value)}, of type {type(value).__name__}; give "
                f"{' or '.join(names)}"
            )


def ids_of(prompt: Sequence[int]) -> tuple[int, ...]:
    """Raises ValueError for a prompt that is neither a text nor token ids."""
    try:
        return tuple(map(operator.index, prompt))
    except TypeError:
        raise ValueError(
            f"the prompt is {reprlib.repr(prompt)}; give a text, or a sequence of token ids"
        ) from None


def check_positive(**numbers: int | None) -> None:
    """Raises ValueError for a number below 1; None is allowed."""
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ValueError(f"{name} is too small")


def requests_of(plan: StepPlan) -> Iterator[Request]:
    if plan.decoding is not None:
        yield from plan.decoding.requests
    yield from (part.request for part in plan.parts)
    yield from (request for request, _ in plan.cancelled)


def check_used(asked: RunConfig, draft: str) -> None:
    """Raises ValueError for settings of drafts that nothing would read."""
    decoding = asked.decoding
    if decoding.drafter is None and decoding.gamma is not None:
        raise ValueError(
            f"gamma {decoding.gamma} does nothing with draft {draft}; choose another "
            "draft, or leave gamma out"
        )
    if decoding.model_drafter is None and asked.kv != KVSection():
        raise ValueError(
            f"kv {asked.kv.policy} does nothing with draft {draft}, since no model drafts; choose "
            "another draft, or leave kv out"
        )


@dataclass(frozen=True)
class CacheSizes:
    """The arguments of the KV cache."""

    block_tokens: int
    cache_tokens: int | None
    prefix_cache: bool


def capacity_of(rows: int, max_tokens: int, max_new_tokens: int | None) -> Capacity:
    """The capacity for requests of so many tokens at most, and new tokens."""
    new_tokens = min(max_new_tokens or max_tokens, max_tokens)
    return Capacity(rows, max_tokens - 1, max_tokens, new_tokens)


def plans_of(run: ResolvedRun, sizes: CacheSizes) -> list[ModelPlan]:
    """What is held of the target, and of a draft model if there is one."""
    config = run.config
    target, *drafts = model_plans_of(config, run.models, 0)
    target = replace(
        target,
        block_tokens=sizes.block_tokens,
        cache_tokens=sizes.cache_tokens,
        rewound=rewound_by_step(config),
        shares_prefixes=sizes.prefix_cache,
    )
    return [target, *(draft.beside(target) for draft in drafts)]


def choose_max_tokens(
    run: ResolvedRun, asked: int | None, max_new_tokens: int | None, sizes: CacheSizes
) -> int:
    """The most tokens of a request: those asked for, or as many as the models have positions and
    memory has room for. Raises ValueError for more than that."""
    sources = [run.source]
    draft = run.draft_source
    # A head, or a draft whose cache forgets, drafts beyond its own positions.
    if draft is not None and not draft.config.is_head and not is_rolling(run.config):
        sources.append(draft)
    shortest = min(sources, key=lambda source: source.config.max_length)
    longest = shortest.config.max_length
    if asked is not None and asked > longest:
        raise ValueError(
            f"max_tokens {asked} exceeds the {longest} positions of {shortest.name}; give at most "
            f"{longest}"
        )
    device = run.config.parallel.device
    free = free_device_memory(device, 0)
    room = MemoryBudget((0,), describe_place(run.config, run.launch), free)
    if asked is None and free is not None:
        room = replace(room, free=int(MOST_OF_FREE[device] * free))

    rows = run.config.capacity.rows

    def refusal(max_tokens: int) -> str | None:
        capacity = capacity_of(rows, max_tokens, max_new_tokens)
        config = replace(run.config, capacity=capacity)
        return room.refusal(plan_of(plans_of(replace(run, config=config), sizes)))

    wanted = longest if asked is None else asked
    if (needed := refusal(wanted)) is None:
        return wanted
    most = largest(lambda number: number >= FEWEST and refusal(number) is None, wanted)
    if asked is None and most:
        return most
    fitting = f"max_tokens {most} would fit, or give fewer" if most else "give fewer"
    raise ValueError(f"max_tokens {wanted} x max_concurrency {rows} needs {needed}; {fitting}")


def make_engine(
    run: ResolvedRun, max_tokens: int, prefill_tokens: int, sizes: CacheSizes
) -> tuple[Engine, DecodingStrategy]:
    """The engine and decoder of requests of at most `max_tokens` tokens, with loaded models and
    caches."""
    config = run.config
    torch.set_num_threads(config.parallel.threads)
    alone = Group((0,), 0)
    groups = ParallelGroups(0, 1, alone, None if config.draft is None else alone)
    models = LoadedModels(torch.device(config.parallel.device), make_progress(False))
    plan, *_ = plans_of(run, sizes)
    runner = make_runner(plan, run.source, alone, models)
    draft = make_draft(run, groups, models, target=plan)
    decoder = build_decoder(runner, config.decoding, config.kv, draft=draft, is_in_flight=True)
    step_tokens = plan.tokens - max_tokens + 1
    block_size, num_blocks = runner.caches.limits
    limits = BatchLimits(
        max_tokens=plan.tokens,
        block_size=block_size,
        num_blocks=num_blocks,
        step_tokens=step_tokens,
        prefill_tokens=prefill_tokens,
    )
    return Engine(runner, config.attention.prefill_chunk, limits), decoder


@dataclass(frozen=True)
class RequestMetrics:
    """The times of a request in ms, and the acceptance of its drafts, named as in `magicdec serve`,
    which has means over its requests."""

    queue_ms: float | None
    """From its submission until it first got a row of the running batch; None if it never did."""
    ttft_ms: float | None
    """From its submission to its first output token; None if it has none."""
    tpot_ms: float | None
    """From its first output token to its last, divided by the number of tokens after the first;
    None if it has a single one or was cancelled."""
    e2el_ms: float | None
    """From its submission to its last output token; None if it was cancelled."""
    acceptance: AcceptanceMetrics | None
    """What it accepted, in vLLM's terms: `mean_acceptance_length`, `draft_acceptance_rate`,
    `acceptance_histogram`, `num_spec_steps`, `num_draft_tokens`, `num_accepted_draft_tokens` and
    others; None if nothing was drafted for it, and with random weights."""


@dataclass(frozen=True)
class RequestOutput:
    """The output of an ended request."""

    request_id: int
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    text: str
    """The text of its output. A token id that the tokenizer does not have is shown as
    "<id 2050>"."""
    finish_reason: str
    """"stop": its last token ends a text; "length": it has as many tokens as it asked for;
    "cancelled"."""
    metrics: RequestMetrics


class Stream:
    """The tokens of one request. Iterating runs steps, which advance all requests, until this one
    has another token id; an unread stream holds up no other."""

    def __init__(self, llm: LLM, request: Request) -> None:
        self._llm = llm
        self._request = request
        self._num_read = 0
        # Known when the request has ended.
        self.moves = Moves()
        self.verifications = Verifications()  # as those of a request 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        while self._num_read == len(self._request.output_ids):
            if self.is_done:
                raise StopIteration
            self._llm.step()
        self._num_read += 1
        return self._request.output_ids[self._num_read - 1]

    def read(self) -> list[int]:
        """The tokens since the last read, without running a step."""
        first = self._num_read
        self._num_read = len(self._request.output_ids)
        return self._request.output_ids[first:]

    def pieces(self) -> Iterator[str]:
        """The text of the request from its start, as its tokens come, in pieces of whole characters
        that join to `text()`, also where ids were read."""
        detokenizer = Detokenizer(self._llm.tokenizer)
        num_taken = 0
        while True:
            tokens = self._request.output_ids[num_taken:]
            num_taken += len(tokens)
            piece = "".join(map(detokenizer.add, tokens))
            if piece:
                yield piece
            if num_taken < len(self._request.output_ids):
                continue
            if self.is_done:
                break
            self._llm.step()
        rest = detokenizer.finish()
        if rest:
            yield rest

    @property
    def is_done(self) -> bool:
        """Whether the request has ended or was cancelled; tokens may still be unread."""
        return self._request.status in ENDED

    def text(self) -> str:
        """The whole text, after running steps to the request's end. An unknown id is shown as "<id
        2050>"."""
        self._run()
        return self._llm.tokenizer.show(self._request.output_ids)

    def result(self) -> RequestOutput:
        """The output of the request, after running steps to its end."""
        text = self.text()
        request = self._request
        return RequestOutput(
            request.request_id,
            request.prompt_ids,
            tuple(request.output_ids),
            text,
            self._finish_reason(),
            self._metrics(),
        )

    def cancel(self) -> None:
        """End the request. The next step frees its memory."""
        self._llm._cancel(self._request)

    def _run(self) -> None:
        while not self.is_done:
            self._llm.step()

    def _finish_reason(self) -> str:
        if self._request.status is RequestStatus.CANCELLED:
            return "cancelled"
        is_end = self._request.last_token in self._request.sampling.eos_token_ids
        return "stop" if is_end else "length"

    def _metrics(self) -> RequestMetrics:
        request = self._request
        times = request.times_ms()
        joined_s = self.moves.joined_s
        found = {} if self._llm.is_random else acceptance_metrics(self.verifications, 1)
        return RequestMetrics(
            queue_ms=1e3 * (joined_s[0] - request.arrived_s) if joined_s else None,
            ttft_ms=times.get("ttft"),
            tpot_ms=times.get("tpot"),
            e2el_ms=times.get("e2el"),
            acceptance=AcceptanceMetrics(**found) if found else None,
        )
