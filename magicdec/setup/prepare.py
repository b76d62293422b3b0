"""Prepares a run: refuses whatever can be refused before any process group starts. Every rank
prepares alone, with the same result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import Any, TypeVar

from magicdec.config.capacity import Capacity
from magicdec.config.machine import Machine, ModelTraits
from magicdec.config.resolve import Placement, resolve
from magicdec.config.resolved import ResolvedConfig
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import CHAT, DraftSection, ModelSection, OutputSection, flag_of
from magicdec.config.setting import declared
from magicdec.distributed.groups import Launch, check_equal
from magicdec.hardware.environment import probe_machine
from magicdec.model.checkpoint.mtp_weights import find_mtp_head
from magicdec.model.checkpoint.source import ModelSource, find_model, fingerprint
from magicdec.model.config import ModelConfig
from magicdec.model.tokenizer import Tokenizer, load_tokenizer
from magicdec.names import MTP, STORED
from magicdec.records.workload import ModelRecord, WorkloadRecord
from magicdec.runner.native_steps.descriptions import layer_obstacle
from magicdec.setup.head_checks import check_head, check_kind, check_target, state_layers
from magicdec.setup.memory_check import check_memory, check_together, free_device_memory, planned
from magicdec.setup.memory_plan import MemoryPlan, Models
from magicdec.setup.model_checks import check_bos, check_draft, check_fits, check_interpreter
from magicdec.workload.chat_template import ChatTemplate
from magicdec.workload.traces.chat_texts import ChatTexts
from magicdec.workload.traces.replay import Replay
from magicdec.workload.workload import Wanted, Workload, build_workload, encode_corpus


@dataclass(frozen=True)
class ResolvedRun:
    """A run with found models and a resolved config, but unchecked memory and prompts."""

    config: ResolvedConfig
    launch: Launch
    machine: Machine
    source: ModelSource
    draft_source: ModelSource | None = None

    @property
    def models(self) -> Models:
        draft = self.draft_source
        return Models(self.source.config, None if draft is None else draft.config)

    @property
    def is_random(self) -> bool:
        """Whether the target or its standalone draft has random weights, which make acceptance
        meaningless."""
        return self.source.is_random or bool(self.draft_source and self.draft_source.is_random)


@dataclass(frozen=True, kw_only=True)
class Prepared(ResolvedRun):
    """A run after all checks: every error of the user has been refused."""

    tokenizer: Tokenizer
    tokenizer_name: str
    workload: Workload
    memory: str = ""  # the memory plan as one line of text
    plan: MemoryPlan = MemoryPlan(0, 0)  # the plan of all ranks together
    free: int | None = None  # bytes of free memory that this rank read
    corpus: tuple[int, ...] = ()  # in which prompt lookup searches beside the text
    plain_words: tuple[str, ...] = ()  # of the chat template: `ChatTemplate.plain_words`

    def first_batches(self, num_batches: int) -> Prepared:
        w = replace(self.config.workload, num_batches=num_batches)
        prompts = self.workload.first(num_batches * w.batch_size)
        return replace(self, config=replace(self.config, workload=w), workload=prompts)

    def describe_workload(self) -> WorkloadRecord:
        w = self.workload
        return WorkloadRecord(
            **vars(describe_model(self.source)),
            draft=None if self.draft_source is None else describe_model(self.draft_source),
            tokenizer=self.tokenizer_name,
            dataset=w.dataset,
            num_prompts=len(w.prompts),
            prefix_len=max(map(len, w.prompts)),
            num_available=w.num_available,
            skip_tokens=w.skip_tokens,
            seed=w.seed,
            sources=None if w.sources is None else [list(source) for source in w.sources],
            categories=None if w.categories is None else [*w.categories],
            num_later_turns=None
            if w.conversations is None
            else sum(conversation.num_left_out for conversation in w.conversations),
            left_out=w.left_out,
            sha256=w.sha256,
        )


def describe_model(source: ModelSource) -> ModelRecord:
    return ModelRecord(
        model=source.name, random_weights=source.is_random, model_sha256=fingerprint(source)
    )


T = TypeVar("T")


class SetupCache:
    """A cache of what preparations find, for the runs of a study."""

    def __init__(self) -> None:
        self._found: dict[tuple[Any, ...], Any] = {}

    def get(self, key: tuple[Any, ...], find: Callable[[], T]) -> T:
        if key not in self._found:
            self._found[key] = find()
        result: T = self._found[key]
        return result


def prepare(run_config: RunConfig, launch: Launch, cache: SetupCache | None = None) -> Prepared:
    """The checked run. Raises ValueError, one line naming the flag, for errors of the user. Runs
    that are prepared before the first of them begins may share a cache."""
    cache = cache or SetupCache()
    run = find(run_config, launch, cache)
    check_agreement(run)
    prepared = complete(run, cache)
    check_equal(launch, {"prompts, by their hash,": prepared.workload.sha256}, "prompts")
    return prepared


def check_agreement(run: ResolvedRun, more: Mapping[str, object] | None = None) -> None:
    """Raises ValueError, on every rank, if a rank has another version, setting, model or fact of
    `more`; paths and threads may differ."""
    if run.launch.world_size == 1:
        return
    facts: dict[str, Any] = {"magicdec": version("magicdec")}
    facts["collectives that serve here"] = run.config.parallel.collectives
    for section in vars(run.config.run_config).values():
        if section is not None and not isinstance(section, OutputSection):
            kind: type = type(section)
            names = declared(kind).keys() - {"model", "threads"}
            facts |= {flag_of(section, name): getattr(section, name) for name in sorted(names)}
    for role, source in (("model", run.source), ("draft", run.draft_source)):
        if source is not None:
            shape = asdict(replace(source.config, name=""))
            facts |= {f"{role}'s {name}": value for name, value in shape.items()}
            facts[f"{role}'s weights, by their fingerprint,"] = fingerprint(source)
    check_equal(run.launch, facts | dict(more or {}), "settings")


def find(
    run_config: RunConfig,
    launch: Launch,
    cache: SetupCache,
    placement: Placement = Placement(),
    capacity: Capacity | None = None,
) -> ResolvedRun:
    """The run with its models found, which hold `capacity`, and its config resolved. Raises
    ValueError as `prepare` does."""
    run_config.check(launch.world_size)

    def find_source(section: ModelSection | DraftSection) -> ModelSource:
        name = section.model
        flag = flag_of(section, "model")
        return cache.get(("model", name), lambda: find_model(flag, name))

    source = find_source(run_config.model)
    draft: ModelSource | None = None
    if run_config.draft is not None and run_config.decoding.has_mtp_head:
        flag = flag_of(run_config.draft, "model")
        draft = cache.get(
            ("mtp head", run_config.model.model), lambda: find_mtp_head(f"{flag} {MTP}", source)
        )
    elif run_config.draft is not None:
        draft = find_source(run_config.draft)
    machine = cache.get(("machine",), lambda: probe_machine(launch))
    run_config = as_stored(run_config, source, draft)
    return resolve_run(run_config, launch, machine, source, draft, placement, capacity)


def resolve_run(
    run_config: RunConfig,
    launch: Launch,
    machine: Machine,
    source: ModelSource,
    draft: ModelSource | None,
    placement: Placement = Placement(),
    capacity: Capacity | None = None,
) -> ResolvedRun:
    """The run of found models. Raises ValueError as `resolve` does."""
    check_target(flag_of(run_config.model, "model"), source)
    draft_traits = ModelTraits()
    if draft is not None:
        check_kind(run_config, draft)
        draft_traits = traits_of(draft.config)
        if draft.config.is_head:
            check_head(source, draft, placement.is_staged)
            layers = state_layers(run_config, source, draft)
            draft_traits = replace(draft_traits, state_layers=layers)
    config = resolve(
        run_config, machine, traits_of(source.config), draft_traits, placement, capacity
    )
    return ResolvedRun(config, launch, machine, source, draft)


def traits_of(model: ModelConfig) -> ModelTraits:
    return ModelTraits(
        head_dim=model.cached_head_dim,
        has_alibi=model.positions == "alibi",
        sliding_window=model.narrowest_window,
        has_sinks=model.sink_logits,
        layer_obstacle=layer_obstacle(model),
        has_states=bool(model.mixers),
    )


def complete(
    run: ResolvedRun,
    cache: SetupCache,
    agree: Callable[[Launch, Callable[[], str]], str] = check_together,
    num_prompts: tuple[int, str] | None = None,
    check: Callable[[ResolvedConfig, Models, Launch, int | None], str] = check_memory,
    cut_from: int | None = None,
    think_s: float = 0.0,
    replay: Replay | None = None,
) -> Prepared:
    """The run checked against its models, with prompts and a memory plan. Raises ValueError as
    `prepare`.

    `agree` lets all ranks refuse if one does. `num_prompts` is the number of requests and its flag,
    if requests are served: a prompt set then keeps its lengths. `check` makes the line about
    memory. Prompts from books are the beginnings of those with `cut_from` tokens. `think_s` and
    `replay` are as in `Wanted`.
    """
    config = run.config
    launch = run.launch
    tokenizer_source, tokenizer = check_models(run, cache)
    name = tokenizer_source.name
    w = config.workload
    is_given = num_prompts is not None or config.run_config.workload.num_batches is not None
    batch = None if is_given else w.batch_size
    workload = _workload_of(
        run,
        cache,
        name,
        tokenizer,
        num_prompts,
        batch,
        cut_from=cut_from,
        think_s=think_s,
        replay=replay,
    )
    if batch is not None:
        num_batches = len(workload.prompts) // batch
        config = replace(config, workload=replace(w, num_batches=num_batches))
    corpus = tuple[int, ...]()
    path = config.decoding.lookup_corpus
    if path is not None and config.decoding.looks_up:
        vocab_size = run.source.config.vocab_size
        corpus = cache.get(
            ("corpus", name, path, vocab_size), lambda: encode_corpus(path, tokenizer, vocab_size)
        )
    plain_words = tuple[str, ...]()
    if w.prompt_format == CHAT:
        chat = cache.get(("chat", tokenizer.path), lambda: ChatTemplate(tokenizer))
        plain_words = chat.plain_words
    device = config.parallel.device
    models = run.models
    free = cache.get(("free", device), lambda: free_device_memory(device, launch.local_rank))
    memory = agree(launch, lambda: check(config, models, launch, free))
    return Prepared(
        **vars(run) | {"config": config},
        tokenizer=tokenizer,
        tokenizer_name=name,
        workload=workload,
        memory=memory,
        plan=planned(config, models),
        free=free,
        corpus=corpus,
        plain_words=plain_words,
    )


def _workload_of(
    run: ResolvedRun,
    cache: SetupCache,
    tokenizer_name: str,
    tokenizer: Tokenizer,
    num_prompts: tuple[int, str] | None,
    batch: int | None,
    *,
    cut_from: int | None,
    think_s: float,
    replay: Replay | None,
) -> Workload:
    """The prompts, made once for equal ones. `num_prompts` as in `complete`, what follows it as in
    `Wanted`."""
    w = run.config.workload
    is_chat = w.prompt_format == CHAT  # a template has its own words before a text
    bos = None if is_chat else tokenizer.bos_of(run.source.config.bos_token_id)
    # Several contexts have one batch each.
    flags = "--B x --num_batches" if cut_from is None else "--B"
    count, counted_by = num_prompts or (w.num_prompts, flags)
    room = run.config.capacity
    wanted = Wanted(
        room.prompt_len,
        count,
        w.seed,
        gen_len=room.after_longest_prompt if room.turns == 1 else room.new_tokens,
        counted_by=counted_by,
        is_whole=num_prompts is not None,
        batch=batch,
        turns=room.turns,
        think_s=think_s,
        cut_from=cut_from,
        replay=replay,
    )
    chat: ChatTemplate | None = None
    if is_chat:
        chat = cache.get(("chat", tokenizer.path), lambda: ChatTemplate(tokenizer))
    made: Workload = cache.get(
        ("workload", tokenizer_name, w.dataset, w.skip_tokens, bos, wanted, chat),
        lambda: build_workload(w.dataset, tokenizer, bos, wanted, w.skip_tokens, chat),
    )
    return made


def check_models(run: ResolvedRun, cache: SetupCache) -> tuple[ModelSource, Tokenizer]:
    """The model whose tokenizer makes the prompts, and that tokenizer, after the checks of all
    models. Raises ValueError as `prepare` does."""
    config = run.config
    source = run.source
    label = f"{flag_of(config.run_config.model, 'model')} {config.model.model}"
    check_interpreter(config)
    check_fits(config, source, len(config.parallel.rank_group))
    if run.draft_source is not None:
        check_draft(config, source, run.draft_source)
    tokenizer_source, tokenizer = find_tokenizer(source, cache)
    if tokenizer.vocab_size > source.config.vocab_size:
        raise ValueError(
            f"{label}: its tokenizer has {tokenizer.vocab_size} ids, "
            f"its embedding {source.config.vocab_size}"
        )
    check_bos(label, source, tokenizer)
    return tokenizer_source, tokenizer


def find_tokenizer(source: ModelSource, cache: SetupCache) -> tuple[ModelSource, Tokenizer]:
    """The model whose tokenizer makes the prompts, and that tokenizer: for random weights the
    demo's, valid in any vocabulary at least as large."""
    tokenizer_source = source
    if source.tokenizer_path is None:
        tokenizer_source = cache.get(("model", "demo"), lambda: find_model("--model", "demo"))
    directory = tokenizer_source.tokenizer_path
    assert directory is not None
    return tokenizer_source, cache.get(("tokenizer", directory), lambda: load_tokenizer(directory))


def find_chat_texts(run_config: RunConfig, cache: SetupCache) -> ChatTexts:
    """What makes texts of the chats of a trace, by the tokenizer and the chat template of the
    model. Raises ValueError, one line naming the flag, if it has none."""
    section = run_config.model
    flag = flag_of(section, "model")
    source = cache.get(("model", section.model), lambda: find_model(flag, section.model))
    _, tokenizer = find_tokenizer(source, cache)
    if run_config.workload.prompt_format != CHAT:
        return ChatTexts(tokenizer, tokenizer.bos_of(source.config.bos_token_id), None)
    template = cache.get(("chat", tokenizer.path), lambda: ChatTemplate(tokenizer))
    return ChatTexts(tokenizer, None, template)


def as_stored(
    config: RunConfig, source: ModelSource, draft: ModelSource | None = None
) -> RunConfig:
    """`config` with weights in groups for models that are stored so, unless others are asked for.
    Raises ValueError if numbers in groups are asked for and there are none."""
    if source.has_groups and config.model.target_dtype == "auto":
        config = replace(config, model=replace(config.model, target_dtype=STORED))
    elif config.model.target_dtype == STORED and not source.has_groups:
        flag = flag_of(config.model, "model")
        raise ValueError(
            f"--target_dtype {STORED}: {flag} {source.name} stores no numbers in groups; "
            "choose from auto, float32, bfloat16, int8"
        )
    if draft is not None and draft.has_groups and config.decoding.draft_weights is None:
        config = replace(config, decoding=replace(config.decoding, draft_weights=STORED))
    return config
