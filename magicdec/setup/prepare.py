"""Prepares a run: everything that can be refused is refused here, before any process group starts.

Owns the order of the checks. Every rank prepares on its own, and all ranks reach the same result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from magicdec.config.resolve import resolve
from magicdec.config.resolved import ResolvedConfig
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import DraftSection, ModelSection, flag_of
from magicdec.config.threads import agreed_threads
from magicdec.cost_model.speculation import StepEstimate
from magicdec.distributed.groups import Launch, check_equal
from magicdec.executor.descriptions import layer_obstacle
from magicdec.hardware.environment import probe_machine
from magicdec.memory.check import check_memory, check_together, planned
from magicdec.memory.free_memory import free_device_memory
from magicdec.memory.plan import MemoryPlan, Models
from magicdec.memory.working_memory import max_tokens
from magicdec.model.checkpoint.source import ModelSource, find_model, fingerprint
from magicdec.model.tokenizer import Tokenizer, load_tokenizer
from magicdec.records.workload import ModelRecord, WorkloadRecord
from magicdec.setup.draft_checks import check_draft
from magicdec.setup.model_checks import (
    check_bos,
    check_fits,
    check_interpreter,
    check_scores,
    check_window,
)
from magicdec.setup.step_estimate import estimate_steps
from magicdec.workload.workload import Workload, build_workload


@dataclass(frozen=True)
class Prepared:
    """A run after all checks: everything that a user can cause has been refused by now."""

    config: ResolvedConfig
    launch: Launch
    source: ModelSource
    tokenizer: Tokenizer
    tokenizer_name: str
    workload: Workload
    draft_source: ModelSource | None = None
    memory: str = ""  # the memory plan as one line of text
    plan: MemoryPlan = MemoryPlan(0, 0)  # the plan of all ranks together
    free: int | None = None  # bytes of free memory that this rank read
    step_estimate: StepEstimate | None = None  # the first step times of `--gamma auto`

    @property
    def is_random(self) -> bool:
        """Whether the target or its standalone draft has random weights, which make acceptance
        meaningless."""
        return self.source.is_random or bool(self.draft_source and self.draft_source.is_random)

    def describe_workload(self) -> WorkloadRecord:
        """The record's `workload`: the prompts, the models and the tokenizer."""
        model, w = describe_model(self.source), self.workload
        return WorkloadRecord(
            model=model.model,
            random_weights=model.random_weights,
            model_sha256=model.model_sha256,
            draft=None if self.draft_source is None else describe_model(self.draft_source),
            tokenizer=self.tokenizer_name,
            dataset=w.dataset,
            num_prompts=len(w.prompts),
            prefix_len=len(w.prompts[0]),
            num_available=w.num_available,
            skip_tokens=w.skip_tokens,
            seed=w.seed,
            sources=None if w.sources is None else [list(source) for source in w.sources],
            sha256=w.sha256,
        )


def describe_model(source: ModelSource) -> ModelRecord:
    return ModelRecord(
        model=source.name, random_weights=source.is_random, model_sha256=fingerprint(source)
    )


T = TypeVar("T")


class Known:
    """What was found while runs were prepared, so that the runs of a study find it once."""

    def __init__(self) -> None:
        self._found: dict[tuple[Any, ...], Any] = {}

    def get(self, key: tuple[Any, ...], find: Callable[[], T]) -> T:
        if key not in self._found:
            self._found[key] = find()
        found: T = self._found[key]
        return found


@dataclass(frozen=True)
class Found:
    """A run whose models were found and whose config is resolved. What it needs of the machine, and
    its prompts, are not checked yet."""

    config: ResolvedConfig
    launch: Launch
    source: ModelSource
    draft: ModelSource | None = None

    @property
    def models(self) -> Models:
        return Models(self.source.config, None if self.draft is None else self.draft.config)


def prepare(asked: RunConfig, launch: Launch) -> Prepared:
    """Resolve the config and check everything. Raises ValueError, one line naming the flag, for
    errors that a user can correct."""
    check_threads_equal(launch, asked)
    known = Known()
    return complete(find(asked, launch, known), known)


def check_threads_equal(launch: Launch, asked: RunConfig) -> None:
    """Raises ValueError, on every rank, if ranks were given different lists of `--threads`."""
    check_equal(launch, {"--threads": agreed_threads(asked.parallel.threads)}, "threads")


def find(asked: RunConfig, launch: Launch, known: Known, is_part: bool = False) -> Found:
    """Find the models and resolve the config. Raises ValueError as `prepare` does. `is_part`:
    this rank is a stage of a pipeline, as in `find_model` and `resolve`."""
    asked.check(launch.world_size)

    def named(section: ModelSection | DraftSection) -> ModelSource:
        name, flag = section.model, flag_of(section, "model")
        return known.get(("model", name), lambda: find_model(flag, name, is_part))

    source = named(asked.model)
    draft = None if asked.draft is None else named(asked.draft)
    config = resolve(
        as_stored(asked, source, draft),
        known.get(("machine",), lambda: probe_machine(launch)),
        source.config.cached_head_dim,
        (source if draft is None else draft).config.cached_head_dim,
        (layer_obstacle(source.config), None if draft is None else layer_obstacle(draft.config)),
        is_part,
    )
    return Found(config, launch, source, draft)


def complete(
    found: Found,
    known: Known,
    agree: Callable[[Launch, Callable[[], str]], str] = check_together,
    num_prompts: tuple[int, str] | None = None,
    check: Callable[[ResolvedConfig, Models, Launch, int | None], str] = check_memory,
) -> Prepared:
    """Check the run against its models, make its prompts and plan its memory. Raises ValueError as
    `prepare` does. `agree` lets all ranks refuse if one does. `num_prompts` are the number of
    prompts and the flag that says it, where these are not whole batches. `check` makes the line
    about memory."""
    config, launch, source, draft = found.config, found.launch, found.source, found.draft
    flag = flag_of(config.asked.model, "model")
    check_interpreter(config)
    check_fits(config, source, len(config.parallel.rank_group))
    if draft is not None:
        check_draft(config, source, draft)
        assert config.draft is not None and config.asked.draft is not None, "a draft was found"
        draft_flag = flag_of(config.asked.draft, "model")
        backend = config.draft.backend_choice.settled
        check_scores(backend, config.model.dtype, draft_flag, draft)
        check_window(backend, max_tokens(config), draft_flag, draft)
    described, tokenizer = find_tokenizer(source, known)
    if tokenizer.vocab_size > source.config.vocab_size:
        raise ValueError(
            f"{flag} {config.model.model}: its tokenizer has {tokenizer.vocab_size} ids, "
            f"its embedding {source.config.vocab_size}"
        )
    bos, w = source.config.bos_token_id, config.workload
    check_bos(f"{flag} {config.model.model}", source, tokenizer)
    count, counted_by = num_prompts or (w.num_prompts, "--B x --num_batches")
    sizes = w.prefix_len, count, w.seed
    workload = known.get(
        ("workload", described.name, w.dataset, bos, *sizes, w.num_new_tokens),
        lambda: build_workload(
            w.dataset, tokenizer, bos, *sizes, gen_len=w.num_new_tokens, counted_by=counted_by
        ),
    )
    device, models = config.parallel.device, found.models
    free = known.get(("free", device), lambda: free_device_memory(device, launch.local_rank))
    memory = agree(launch, lambda: check(config, models, launch, free))
    plan, parts = planned(config, models), (tokenizer, described.name, workload, draft)
    estimate = estimate_steps(config, models.target, models.draft, launch)
    return Prepared(config, launch, source, *parts, memory, plan, free, estimate)


def find_tokenizer(source: ModelSource, known: Known) -> tuple[ModelSource, Tokenizer]:
    """The model whose tokenizer makes the prompts, and that tokenizer. Random weights have none, so
    the demo's is used. Its ids are valid in any vocabulary that is at least as large."""
    described = source
    if source.tokenizer_directory is None:
        described = known.get(("model", "demo"), lambda: find_model("--model", "demo"))
    directory = described.tokenizer_directory
    assert directory is not None
    return described, known.get(("tokenizer", directory), lambda: load_tokenizer(directory))


def as_stored(
    config: RunConfig, source: ModelSource, draft: ModelSource | None = None
) -> RunConfig:
    """`config` with int8 as the weight dtype of each model that is stored in int8. Raises
    ValueError if another dtype was requested, because the original weights are not stored."""
    model, section = config.model, config.draft
    if source.is_int8:
        named = f"{flag_of(model, 'model')} {model.model}"
        check_int8("--target_dtype", model.target_dtype, named)
        model = replace(model, target_dtype="int8")
    if draft is not None and draft.is_int8:
        assert section is not None, "a draft was found for it"
        named = f"{flag_of(section, 'model')} {section.model}"
        check_int8("--draft_dtype", section.draft_dtype, named)
        section = replace(section, draft_dtype="int8")
    return replace(config, model=model, draft=section)


def check_int8(flag: str, asked: str, named: str) -> None:
    """Raise ValueError if a model that is stored in int8 should have another weight dtype."""
    if asked not in ("auto", "int8"):
        raise ValueError(f"{flag} {asked}: {named} holds int8 weights; choose from auto, int8")
