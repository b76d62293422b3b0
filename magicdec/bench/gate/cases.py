"""The cases of the gate: the passes, and the positions of texts, whose drafts are compared with
those of a baseline.

A file of baselines holds its own cases, because a record holds the configuration of its pass. The
standard cases make such a file for a model and a text. Must not know how records are judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from magicdec.config.capabilities import check_standalone, policy_called
from magicdec.config.run_config import RunConfig, join_draft
from magicdec.config.sections import (
    DEFAULT_GEN_LEN,
    MODEL_PREFIX,
    NGRAM,
    NONE,
    SELF,
    DecodingSection,
    DraftChoice,
    DraftSection,
    KVSection,
    ModelSection,
    ParallelSection,
    SamplingSection,
    WorkloadSection,
)
from magicdec.config.setting import same
from magicdec.names import (
    DEFAULT_KV_POLICY,
    DTYPES,
    EAGLE,
    FULL_KV_POLICY,
    KV_POLICIES,
    LOW_BIT,
    NGRAM_AND,
    WITHOUT_BUDGET,
)
from magicdec.records.comparison.conditions import (
    LOAD,
    describe,
    flags_at,
    flags_of,
    flags_of_mode,
    is_judged,
    kind_of,
)
from magicdec.records.drafted import EVERY_POSITION, JudgedRecord
from magicdec.records.recomputing import unfounded_metric
from magicdec.systems.declaration import WITH_DRAFT, Drafts, Ranks
from magicdec.systems.modes import DRAFTING, MODES, Pass
from magicdec.systems.options import ServeOptions, with_values
from magicdec.workload.request_shapes import BURST

DRAFTING_MODE = DRAFTING.full_name  # of the cases in whole batches
LEAST_PROMPTS = 4  # fewer show no loss (docs/results.md)
RANKS_PER_CORE = 2  # more of them would wait for each other for most of the time
GAMMA = 4
GAMMAS = (2, 4)  # of the default policy and of the full KV cache
BUDGETS = (33, 65, 129, 257, 513)  # of the default policy
SOME_BUDGETS = (129, 257, 513)  # of the other policies
DRAFT_BUDGET = 257  # of a standalone draft, and of the other ways to draft
SHORT_PREFIX = 1024  # of the cases whose prefill no other case shares, at most
FEW_PROMPTS = 8  # of sampled cases, whose prefill draws first tokens of its own
# Of the cases at every position: many texts, since losses depend on them, that are short.
POSITIONS_TEXTS = 16  # at most
POSITIONS = 64  # of each text
POSITIONS_BUDGETS = (65, 257)
SERVED_PREFIX = 512  # at most; also of the cases at every position
SERVED_REQUESTS = 8
SERVED_TOKENS = 32
# Of the systems that have such settings: few rows, and drafts that no threshold ends.
SERVED_SETTINGS = {"batch_size": 3, "pa": 0.0}
PA = 0.5
RESELECT_EVERY = 16
LOOKUP_GAMMA = 31  # rows propose different numbers of tokens
TEMPERATURE = 0.8
STEP_COST = 0.3, 0.1  # of `--gamma auto`, which chooses several lengths with it


@dataclass(frozen=True)
class Subject:
    """The models and the prompts of the standard cases."""

    model: str = same(ModelSection, "model")
    draft: str | None = same(DraftChoice, "draft", None, is_default=True)
    dataset: str = same(WorkloadSection, "dataset")
    dtype: str = same(ModelSection, "dtype", "float32", choices=DTYPES)
    prefix_len: int = same(WorkloadSection, "prefix_len")
    batch_size: int = same(WorkloadSection, "batch_size", 8)
    num_batches: int = same(WorkloadSection, "num_batches", 2)
    gen_len: int | None = same(WorkloadSection, "gen_len")
    nproc: int = same(ParallelSection, "nproc", 2)

    @property
    def standalone(self) -> str | None:
        """The standalone draft, which is by default the packaged one, of the packaged target alone.
        Raises ValueError for a draft that is no model."""
        if self.draft is None:
            return "demo-draft" if self.model == "demo" else None
        if self.draft == NONE:
            return None
        if not self.draft.startswith(MODEL_PREFIX):
            choices = f"{MODEL_PREFIX}NAME, {NONE}"
            raise ValueError(f"--draft {self.draft} is not known; choose from {choices}")
        return self.draft.removeprefix(MODEL_PREFIX)

    @property
    def head(self) -> str | None:
        """The packaged EAGLE-3 head, of the packaged target alone."""
        return "demo-eagle" if self.model == "demo" and self.draft != NONE else None

    def case(
        self,
        drafter: str,
        kv: KVSection,
        gamma: int | str,
        temperature: float = 0.0,
        **ways: Any,
    ) -> Case:
        """The case of a drafter and a policy; `ways` are further settings of decoding."""
        decoding = DecodingSection("speculative", drafter, gamma, ignore_eos=True, **ways)
        draft_models = {"model": self.standalone, EAGLE: self.head}
        draft = draft_models.get(decoding.model_drafter or "")
        config = RunConfig(
            model=ModelSection(self.model, self.dtype),
            draft=None if draft is None else DraftSection(draft),
            kv=kv,
            decoding=decoding,
            sampling=SamplingSection(temperature),
            workload=WorkloadSection(
                self.dataset,
                self.batch_size,
                self.prefix_len,
                self.gen_len or DEFAULT_GEN_LEN,
                num_batches=self.num_batches,
                warmup_batches=0,
            ),
        )
        return Case(config)

    def short(self, num_prompts: int) -> Subject:
        """Few and short prompts, for cases that share their prefill with no others."""
        rows = min(self.batch_size, num_prompts)
        return replace(
            self,
            batch_size=rows,
            num_batches=-(-num_prompts // rows),
            prefix_len=min(self.prefix_len, SHORT_PREFIX),
        )


def standard_cases(subject: Subject) -> list[Case]:
    """Self-speculation under every policy, prompt lookup, the standalone draft under every policy
    that it can have, and every other way to draft. Budgets that hold the whole prompt are left
    out."""
    full = KVSection(FULL_KV_POLICY)
    others = [p for p in KV_POLICIES if p not in (DEFAULT_KV_POLICY, *WITHOUT_BUDGET)]
    other_kvs = [kv for policy in others for kv in _budgets(subject, policy, SOME_BUDGETS)]
    other_kvs += [KVSection(policy) for policy in WITHOUT_BUDGET if policy != FULL_KV_POLICY]
    default_kvs = [*_budgets(subject, DEFAULT_KV_POLICY, BUDGETS), full]
    standalone = () if subject.standalone is None else _standalone(subject)
    return [
        *(subject.case("self", kv, gamma) for gamma in GAMMAS for kv in default_kvs),
        *(subject.case("self", kv, GAMMA) for kv in other_kvs),
        subject.case("ngram", full, GAMMA),
        *(subject.case("model", kv, GAMMA) for kv in standalone),
        *_head_cases(subject),
        *_other_ways(subject),
        *_on_ranks(subject),
        *_system_cases(subject),
        *_at_every_position(subject),
    ]


def _head_cases(subject: Subject) -> Iterator[Case]:
    """An EAGLE-3 head under both policies that it can have, and beside lookups."""
    if subject.head is None:
        return
    full = KVSection(FULL_KV_POLICY)
    for kv in (*_budgets(subject, DEFAULT_KV_POLICY, (DRAFT_BUDGET,)), full):
        yield subject.case(EAGLE, kv, GAMMA)
    yield subject.case(f"{NGRAM_AND}{EAGLE}", full, GAMMA)


def _other_ways(subject: Subject) -> Iterator[Case]:
    """Mixtures with lookups, low-bit drafts, chains that stop or whose length is
    chosen, choices that are made anew, and sampling."""
    full = KVSection(FULL_KV_POLICY)
    kv = KVSection(DEFAULT_KV_POLICY, DRAFT_BUDGET)
    if subject.prefix_len <= DRAFT_BUDGET:
        kv = full
    few = subject.short(FEW_PROMPTS)
    yield subject.case("ngram", full, LOOKUP_GAMMA)
    yield subject.case("ngram+self", kv, GAMMA)
    yield subject.case("ngram+self", kv, "auto", step_cost=STEP_COST)
    yield subject.case("self", kv, "auto", step_cost=STEP_COST)
    yield from (subject.case("self", kv, GAMMA, draft_weights=bits) for bits in LOW_BIT)
    for policy in KV_POLICIES:
        if "reselect_every" in policy_called(policy).settings and kv.policy != FULL_KV_POLICY:
            anew = KVSection(policy, DRAFT_BUDGET, reselect_every=RESELECT_EVERY)
            yield subject.case("self", anew, GAMMA)
    if subject.standalone is not None:
        yield subject.case("ngram+model", full, GAMMA)
        yield subject.case("model", full, GAMMA, pa=PA)
        yield subject.case("model", full, GAMMA, draft_weights=LOW_BIT[0])
        yield few.case("model", full, GAMMA, TEMPERATURE)
    yield subject.case("self", kv, GAMMA, pa=PA)
    yield few.case("self", kv, GAMMA, TEMPERATURE)
    yield few.case("ngram+self", kv, GAMMA, TEMPERATURE)


def _on_ranks(subject: Subject) -> Iterator[Case]:
    """Ranks of one host that share the target, on the CPU: self-speculation, under policies that
    choose for each of a rank's heads as well, and a draft model on the last rank alone."""
    if subject.nproc == 1:
        return
    few = subject.short(LEAST_PROMPTS)
    parallel = ParallelSection(device="cpu", nproc=subject.nproc)
    for policy in (policy for policy in KV_POLICIES if policy not in WITHOUT_BUDGET):
        for kv in _budgets(subject, policy, (DRAFT_BUDGET,)):
            config = few.case("self", kv, GAMMA).config
            yield Case(replace(config, parallel=parallel))
    last = (subject.nproc - 1,)
    if subject.standalone is not None:
        config = few.case("model", KVSection(FULL_KV_POLICY), GAMMA).config
        draft = DraftSection(subject.standalone, last)
        yield Case(replace(config, draft=draft, parallel=parallel))


def _system_cases(subject: Subject) -> Iterator[Case]:
    """The systems that draft, with a draft model where there is one, else with lookups; and
    self-speculation in flight, whose requests take rows that others have left."""
    drafter = NGRAM if subject.standalone is None else "model"
    full = KVSection(FULL_KV_POLICY)
    kv = KVSection(DEFAULT_KV_POLICY, DRAFT_BUDGET)
    modes = [
        Pass.named(name if mode.drafts is Drafts.ALWAYS else f"{name}{WITH_DRAFT}")
        for name, mode in MODES.items()
        if mode.is_in_gate
    ]
    for serving_pass in modes:
        if serving_pass.ranks is Ranks.FIRST:
            self_kv = full if subject.prefix_len <= DRAFT_BUDGET else kv
            yield _served(subject, serving_pass, SELF, self_kv)
    for serving_pass in modes:
        # What is looked up follows from what is committed in time.
        if drafter != NGRAM or not serving_pass.declared.is_judged_by_time:
            yield _served(subject, serving_pass, drafter, full)


def _at_every_position(subject: Subject) -> Iterator[Case]:
    """Drafts that follow from the text, which forks make, at every position of one batch of
    texts."""
    texts = replace(
        subject,
        batch_size=min(subject.batch_size * subject.num_batches, POSITIONS_TEXTS),
        num_batches=1,
        prefix_len=min(subject.prefix_len, SERVED_PREFIX),
        gen_len=subject.gen_len or POSITIONS + 1,
    )
    drafts = [(SELF, kv) for kv in _budgets(texts, DEFAULT_KV_POLICY, POSITIONS_BUDGETS)]
    for drafter, kv in (*drafts, (NGRAM, KVSection(FULL_KV_POLICY))):
        config = texts.case(drafter, kv, GAMMA).config
        decoding = replace(config.decoding, baseline=False)
        yield Case(replace(config, decoding=decoding), EVERY_POSITION)


def _served(subject: Subject, serving_pass: Pass, drafter: str, kv: KVSection) -> Case:
    """On one rank where the mode has no stages. Few and short prompts, more than there are rows."""
    ranks = subject.nproc if serving_pass.ranks is Ranks.STAGES else 1
    config = subject.case(drafter, kv, GAMMA).config
    parallel = ParallelSection(device="cpu", nproc=ranks)
    workload = WorkloadSection(
        subject.dataset,
        prefix_len=min(subject.prefix_len, SERVED_PREFIX),
        gen_len=subject.gen_len or SERVED_TOKENS,
    )
    config = replace(config, parallel=parallel, workload=workload)
    case = Case(config, serving_pass.name, Load(SERVED_REQUESTS, tuple(SERVED_SETTINGS.items())))
    settled = options_of([case]).settings_of(serving_pass).describe()
    names = serving_pass.system.drafts_follow
    settings = tuple((name, settled[name]) for name in names)
    return replace(case, load=Load(SERVED_REQUESTS, settings))


def _budgets(subject: Subject, policy: str, budgets: Sequence[int]) -> Iterator[KVSection]:
    return (KVSection(policy, b) for b in budgets if b < subject.prefix_len)


def _standalone(subject: Subject) -> Iterator[KVSection]:
    for policy in KV_POLICIES:
        try:
            check_standalone(policy)
        except ValueError:
            continue
        if "budget" not in policy_called(policy).settings:
            yield KVSection(policy)
        else:
            yield from _budgets(subject, policy, (DRAFT_BUDGET,))


@dataclass(frozen=True)
class Load:
    """Requests that all arrive at once and take rows that others have left. `settings` are those
    of the system of the mode on which its drafts depend, with their names."""

    num_requests: int
    settings: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Case:
    """A mode that drafts, and what it decodes: prompts of `config.workload`, of which a load has as
    many as it says. Without a load they are whole batches, and cases with the same prompts share
    their prefill and the pass that they are compared with; those at every position are compared
    with no pass, and share their texts."""

    config: RunConfig
    mode: str = DRAFTING_MODE
    load: Load | None = None

    @property
    def shares_prefill(self) -> bool:
        return self.load is None

    @property
    def is_at_every_position(self) -> bool:
        return self.mode == EVERY_POSITION

    @property
    def serving_pass(self) -> Pass:
        return Pass.named(self.mode)

    def joins(self, others: Sequence[Case]) -> bool:
        """Whether one command can serve in its mode and in those of others."""
        if self.load is None or any(other.load is None for other in others):
            return False
        first = others[0]
        is_alike = self.config == first.config and self.num_prompts == first.num_prompts
        system = self.serving_pass.system
        beside = [other for other in others if other.serving_pass.system is system]
        return is_alike and all(other.load == self.load for other in beside)

    @property
    def num_ranks(self) -> int:
        nproc = self.config.parallel.nproc
        return 1 if nproc is None else nproc  # 0 is refused by its name

    @property
    def num_prompts(self) -> int:
        return self.config.workload.num_prompts if self.load is None else self.load.num_requests

    @property
    def draft(self) -> str:
        """As `--draft` names it."""
        draft = self.config.draft
        drafter = self.config.decoding.drafter or NONE
        return join_draft(drafter, None if draft is None else draft.model)

    @property
    def name(self) -> str:
        """As `describe` names its record."""
        sections = asdict(self.config)
        if self.shares_prefill:
            return flags_at(self.mode, flags_of(sections))
        return flags_of_mode(self.mode, sections, num_ranks=self.num_ranks)

    def check(self) -> None:
        """Raises ValueError for what cannot be, with any model."""
        if self.load is not None:
            options_of([self]).check(self.config, self.num_ranks)
        elif self.num_ranks != 1:
            self.config.check(self.num_ranks)
        w = self.config.workload
        counted = f"{self.num_prompts} requests"
        if self.shares_prefill:
            batches = f"--B {w.batch_size} x --num_batches {w.num_batches}"
            counted = f"{batches} are {self.num_prompts} prompts"
        if self.num_prompts < LEAST_PROMPTS:
            raise ValueError(f"{counted}; a gate needs at least {LEAST_PROMPTS}, better 8")

    def with_threads(self, threads: int) -> Case:
        parallel = replace(self.config.parallel, threads=threads)
        return replace(self, config=replace(self.config, parallel=parallel))

    @classmethod
    def from_record(cls, record: JudgedRecord) -> Case:
        """What repeats the pass of a record, here, on as many ranks. What `auto` chose then is left
        to `auto` again. Raises ValueError, naming it, if its config is not one of a pass."""
        if record.error is not None:
            raise ValueError(f"{describe(record)}: it has failed; leave it out of the baselines")
        try:
            config = config_of_record(record)
            if record.shares_prefill:
                return cls(config, record.mode)
            flags = record.config["workload"]
            known = LOAD | flags
            names = Pass.named(record.mode).system.drafts_follow
            settings = tuple((name, known[name]) for name in names)
            return cls(config, record.mode, Load(int(flags["num_requests"]), settings))
        except (TypeError, AttributeError, KeyError, ValueError) as error:
            raise ValueError(
                f"{describe(record)}: its config is not one of a pass: {error}"
            ) from None


def options_of(cases: Sequence[Case]) -> ServeOptions:
    """The settled options of a command that serves the load of these cases, which `joins` found
    alike, in their modes."""
    first = cases[0]
    w = first.config.workload
    options = ServeOptions(
        num_requests=first.num_prompts,
        prefix_len=str(w.prefix_len),
        gen_len=str(w.gen_len),
        modes=tuple(case.mode for case in cases),
        arrival=BURST,
        draft=first.draft,
    )
    settings = {
        case.serving_pass.system.name: with_values(
            case.serving_pass.system.settings(), dict(case.load.settings)
        )
        for case in cases
        if case.load is not None
    }
    passes = [case.serving_pass for case in cases]
    return options.settle(passes, w.seed, settings)


def config_of_record(record: JudgedRecord) -> RunConfig:
    """The sections of a pass. Ranks that serve are placed by their mode."""
    kinds = {item.name: type(getattr(RunConfig(), item.name)) for item in fields(RunConfig)}
    kinds["draft"] = DraftSection
    sections: dict[str, Any] = {
        name: kind(**_values_of_user(kind, record.config[name]))
        for name, kind in kinds.items()
        if name not in ("output", "workload") and record.config.get(name) is not None
    }
    flags = record.config["workload"]
    if record.shares_prefill:
        workload = WorkloadSection(**_values_of_user(WorkloadSection, flags))
    else:
        workload = WorkloadSection(
            dataset=flags["dataset"],
            prefix_len=int(flags["prefix_len"]),
            gen_len=int(flags["gen_len"]),
            seed=flags["seed"],
        )
    config = RunConfig(**sections, workload=workload)
    ranks = record.environment.world_size
    parallel = ParallelSection(device=config.parallel.device)
    draft = config.draft
    if not record.shares_prefill:
        parallel = replace(parallel, nproc=ranks)
        draft = draft and replace(draft, rank_group=None)
    elif ranks != 1:
        parallel = replace(config.parallel, threads=None, nproc=ranks)
    return replace(config, parallel=parallel, draft=draft)


def _values_of_user(kind: type, saved: dict[str, Any]) -> dict[str, Any]:
    """The values of a section's fields, without those that `auto` chose."""
    names = [item.name for item in fields(kind) if item.name in saved]
    return {
        name: tuple(saved[name]) if isinstance(saved[name], list) else saved[name]
        for name in names
        if not str(saved.get(f"{name}_reason")).startswith("auto")
    }


def baselines_in(records: Iterable[JudgedRecord]) -> list[JudgedRecord]:
    """Those that comparisons judge. Raises ValueError for drafts at every position of sampled
    texts, which would be left out."""
    found = list[JudgedRecord]()
    for record in records:
        if is_judged(record):
            found.append(record)
        elif record.mode == EVERY_POSITION:
            raise ValueError(
                f"{describe(record)}: drafts of sampled texts are probable and not counted, so "
                "that no rule compares them; leave it out, or measure it without --temperature"
            )
    return found


def unfounded(record: JudgedRecord) -> str | None:
    """A sentence if a metric of the record does not follow from its requests."""
    try:
        name = unfounded_metric(record)
    except ValueError as error:
        return str(error)
    return None if name is None else f"its {name} does not follow from its requests"


def margin_of(case: Case) -> float | None:
    """0 where every draft is accepted, because the draft is the target with the same cache; None,
    the default, elsewhere. In bfloat16 rounding may refuse a draft."""
    config = case.config
    decoding = config.decoding
    is_target = decoding.drafter == "self" and config.kv.policy == FULL_KV_POLICY
    is_target &= decoding.draft_weights is None and config.sampling.temperature == 0
    return 0.0 if is_target and config.model.dtype == "float32" else None


@dataclass(frozen=True)
class Places:
    """Where the models and the text of a baseline file are here, if not where they were. What is
    None is where the file says."""

    model: str | None = same(ModelSection, "model", None, is_default=True)
    draft: str | None = same(DraftChoice, "draft", None, is_default=True)
    dataset: str | None = same(WorkloadSection, "dataset", None, is_default=True)

    def moved(self, case: Case) -> Case:
        """The case with its files at these places. Raises ValueError for a draft that is no
        model."""
        config = case.config
        if self.model is not None:
            config = replace(config, model=replace(config.model, model=self.model))
        if self.draft is not None and not self.draft.startswith(MODEL_PREFIX):
            raise ValueError(f"--draft {self.draft} is not known; choose {MODEL_PREFIX}NAME")
        if self.draft is not None and config.draft is not None:
            name = self.draft.removeprefix(MODEL_PREFIX)
            config = replace(config, draft=replace(config.draft, model=name))
        if self.dataset is not None:
            config = replace(config, workload=replace(config.workload, dataset=self.dataset))
        return replace(case, config=config)


def check_case(case: Case, num_cores: int) -> None:
    """Raises ValueError for a case of too few prompts to show anything, and for one of more ranks
    than a machine with so many cores can run, or than its other settings allow."""
    ranks = case.num_ranks
    most = RANKS_PER_CORE * num_cores
    if ranks > most:
        raise ValueError(
            f"{case.name}: {ranks} ranks are too many for {num_cores} cores, which run at "
            f"most {most}; run it on a larger machine, or save a baseline file of fewer ranks: "
            "`magicdec gate save --nproc`"
        )
    try:
        case.check()
    except ValueError as error:
        raise ValueError(f"{case.name}: {error}") from None


def quick(baselines: Sequence[JudgedRecord]) -> list[JudgedRecord]:
    """One baseline for each drafter and policy, and for each other way to draft, the middle one of
    its baselines in the file."""
    kinds: dict[str, list[JudgedRecord]] = {}
    for baseline in baselines:
        kinds.setdefault(kind_of(baseline), []).append(baseline)
    return [alike[len(alike) // 2] for alike in kinds.values()]
