"""LLM: a model in this process that serves requests which come and go. This is the Python interface
for programs; the drivers measure whole batches.

Owns how an engine is built for that, and the streams of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from magicdec.config.run_config import RunConfig
from magicdec.config.sections import (
    AttentionSection,
    DecodingSection,
    KVSection,
    ModelSection,
    ParallelSection,
    SamplingSection,
    WorkloadSection,
)
from magicdec.distributed.groups import Group, Launch
from magicdec.engine.engine import Engine
from magicdec.names import BASELINE
from magicdec.output.console import make_progress
from magicdec.runner.request import NotFinite, Request, Status
from magicdec.runner.sampling.sampling import make_params
from magicdec.runner.step_plan import PREFILL_TOKENS, Limits
from magicdec.setup.loading import LoadedModels, make_runner
from magicdec.setup.model_checks import check_fits
from magicdec.setup.model_plan import ModelPlan
from magicdec.setup.model_plan import max_tokens as row_tokens
from magicdec.setup.prepare import SetupCache, find, find_tokenizer
from magicdec.speculation.policies.policy import keep_queries
from magicdec.speculation.steps.recorder import CudaGraphs, Eager, Recorder
from magicdec.speculation.steps.strategy import Setup, make_strategy

DRAFTERS = (None, "self", "ngram", "ngram+self")  # those that need no second model
MOST_CHUNK = 2048  # prompt tokens of a forward at most, which bounds its memory


class LLM:
    """Loads `model` and decodes up to `max_concurrency` requests together, of at most `max_tokens`
    tokens each, prompt included.

    `drafter` (self, ngram or ngram+self; None: no speculation) drafts `num_draft_tokens` tokens a
    step, or as many as pay with "auto"; with self it reads what `kv` shows, and computes with
    `draft_weights` (int8 or int4: a copy of the model's matrices). A request asks for at most
    `max_new_tokens` (default: as many as fit in a row), which bounds what a policy copies. The KV
    cache holds `cache_tokens` tokens of all requests together (default: enough for all of them at
    full length), in blocks of `block_tokens`. A step prefills at most `prefill_tokens` tokens of
    prompts. Requests are admitted in the order in which they were submitted.

    Raises ValueError, in one line, for values that cannot be served.
    """

    def __init__(
        self,
        model: str = "demo",
        drafter: str | None = None,
        num_draft_tokens: int | str | None = None,
        kv: KVSection = KVSection(),
        dtype: str = "auto",
        max_tokens: int = 2048,
        max_concurrency: int = 8,
        cache_tokens: int | None = None,
        block_tokens: int = 256,
        prefill_tokens: int = PREFILL_TOKENS,
        threads: int | None = None,
        max_new_tokens: int | None = None,
        draft_weights: str | None = None,
    ) -> None:
        if drafter not in DRAFTERS:
            raise ValueError(f"drafter {drafter}; choose from {', '.join(map(str, DRAFTERS))}")
        check_positive(
            max_tokens=max_tokens - 1, block_tokens=block_tokens, prefill_tokens=prefill_tokens,
            cache_tokens=cache_tokens, max_new_tokens=max_new_tokens,
        )  # fmt: skip
        self.max_new_tokens = min(max_new_tokens or max_tokens, max_tokens)
        strategy = BASELINE if drafter is None else "speculative"
        run_config = RunConfig(
            model=ModelSection(model, dtype),
            attention=AttentionSection(prefill_chunk=min(prefill_tokens, MOST_CHUNK)),
            parallel=ParallelSection(threads=threads),
            kv=kv,
            decoding=DecodingSection(
                strategy, drafter, num_draft_tokens, draft_weights=draft_weights
            ),
            workload=WorkloadSection(
                batch_size=max_concurrency,
                prefix_len=max_tokens - 1,
                gen_len=1,
                extra_new_tokens=self.max_new_tokens - 1,
            ),
        )
        run, cache = find(run_config, Launch(), SetupCache()), SetupCache()
        check_fits(run.config, run.source, world_size=1)
        self.model = run.source.config
        _, self.tokenizer = find_tokenizer(run.source, cache)
        device, group = torch.device(run.config.parallel.device), Group((0,), 0)
        torch.set_num_threads(run.config.parallel.threads)
        config = run.config
        models, longest = LoadedModels(device, make_progress(False)), row_tokens(config)
        plan = ModelPlan(
            config, self.model, group.ranks, 0, row_tokens=longest, block_tokens=block_tokens,
            cache_tokens=cache_tokens,
        )  # fmt: skip
        runner = make_runner(plan, run.source, group, models)
        if run_config.decoding.model_drafter == "self":
            keep_queries(runner, config.kv)
        recorder: Recorder = CudaGraphs(device) if config.decoding.cuda_graphs == "on" else Eager()
        setup = Setup(runner, config.decoding, config.kv, recorder=recorder, is_in_flight=True)
        shape, step_tokens = runner.cache.shape, longest - max_tokens + 1
        limits = Limits(longest, shape.block_size, shape.num_blocks, step_tokens, prefill_tokens)
        self._engine = Engine(runner, config.attention.prefill_chunk, limits)
        self._strategy = make_strategy(strategy, setup)
        self._num_requests = 0
        self._error: NotFinite | None = None

    def submit(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 64,
        sampling: SamplingSection = SamplingSection(),
        ignore_eos: bool = False,
    ) -> Stream:
        """Let a request wait for a place in the batch. Returns the stream of its tokens. Raises
        ValueError if it can never be served."""
        ids = self._encode(prompt) if isinstance(prompt, str) else tuple(prompt)
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
        return Stream(self, request)

    def step(self) -> bool:
        """Advance all requests by one step. False if there are none. Raises NotFinite if the logits
        of a request are not finite, and from then on."""
        if self._error is not None:
            raise self._error
        engine = self._engine
        plan = engine.scheduler.schedule()
        try:
            if plan is not None:
                engine.execute(plan, self._strategy)
        except NotFinite as error:
            self._error = error  # the step has ended half-way
            raise
        return plan is not None

    def _encode(self, text: str) -> tuple[int, ...]:
        bos = self.model.bos_token_id
        return (*(() if bos is None else (bos,)), *self.tokenizer.encode(text))


def check_positive(**numbers: int | None) -> None:
    """Raises ValueError for a number below 1; None is none."""
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ValueError(f"{name} is too small")


class Stream:
    """The token ids of one request. Iterating runs steps, which advance all requests, until this
    one has another token; a stream that nobody reads does not hold up the others."""

    def __init__(self, llm: LLM, request: Request) -> None:
        self._llm, self._request, self._num_read = llm, request, 0

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
        """The tokens that were emitted since the last read, without running a step."""
        first, self._num_read = self._num_read, len(self._request.output_ids)
        return self._request.output_ids[first:]

    @property
    def is_done(self) -> bool:
        """Whether the request has ended or was cancelled; tokens may still be unread."""
        return self._request.status in (Status.FINISHED, Status.CANCELLED)

    def text(self) -> str:
        """Read to the end, and return all tokens of the request as text. An id that the tokenizer
        does not have is shown as "<id 2050>"."""
        for _ in self:
            pass
        return self._llm.tokenizer.show(self._request.output_ids)

    def cancel(self) -> None:
        """End the request. The next step frees its memory."""
        self._llm._engine.scheduler.cancel(self._request)
