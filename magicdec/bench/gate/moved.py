"""Checks that models and text which lie at other places than a baseline file says are those of the
file, before any case runs. Must not know how cases are run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from magicdec.bench.gate.cases import Case
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import MODEL_PREFIX, ParallelSection
from magicdec.distributed.groups import Launch
from magicdec.records.comparison.conditions import describe
from magicdec.records.drafted import JudgedRecord
from magicdec.records.workload import WorkloadRecord
from magicdec.setup.prepare import ResolvedRun, SetupCache, complete, describe_model, find


def with_names_here(cases: Sequence[Case], baselines: Sequence[JudgedRecord]) -> list[JudgedRecord]:
    """The baselines, whose models have the names that they have here. `cases` are theirs
    with the places of here. Raises ValueError, naming the flag, for a model or prompts whose hash
    is not that of the baseline."""
    cache = SetupCache()
    here = list[JudgedRecord]()
    for case, baseline in zip(cases, baselines, strict=True):
        theirs = baseline.workload
        assert theirs is not None, "only a pass that failed has none, and it has no case"
        # Cases differ in how and on which ranks they draft, from which neither hash follows.
        found = find(on_one_rank(case.config), Launch(), cache)
        _refuse(
            _other_model(case.config, found, theirs), baseline
        )  # before it is asked for prompts
        if case.shares_prefill:  # those of requests are made with their lengths, and compared then
            run = complete(found, cache, lambda launch, check: "")
            if run.workload.sha256 != theirs.sha256:
                other = f"--dataset {case.config.workload.dataset}: its prompts are not those"
                _refuse(other, baseline)
        draft = theirs.draft
        if found.draft_source is not None and draft is not None:
            draft = replace(draft, model=found.draft_source.name)
        named = replace(theirs, model=found.source.name, draft=draft)
        here.append(replace(baseline, workload=named))
    return here


def on_one_rank(config: RunConfig) -> RunConfig:
    """The case with all that it holds on one rank."""
    draft = None if config.draft is None else replace(config.draft, rank_group=None)
    parallel = ParallelSection(device=config.parallel.device)
    return replace(config, draft=draft, parallel=parallel)


def _other_model(config: RunConfig, found: ResolvedRun, theirs: WorkloadRecord) -> str | None:
    """The first model that is not that of the baseline, with its flag."""
    if describe_model(found.source).model_sha256 != theirs.model_sha256:
        return f"--model {config.model.model}: its weights are not those"
    draft = None if found.draft_source is None else describe_model(found.draft_source)
    drafts = [weights and weights.model_sha256 for weights in (draft, theirs.draft)]
    if config.draft is not None and drafts[0] != drafts[1]:
        return f"--draft {MODEL_PREFIX}{config.draft.model}: its weights are not those"
    return None


def _refuse(other: str | None, baseline: JudgedRecord) -> None:
    """Raises ValueError if something is not that of the baseline."""
    if other is not None:
        raise ValueError(
            f"{other} that the baseline was measured with ({describe(baseline)}); `magicdec gate "
            "save` makes a baseline file of other models and text"
        )
