"""Checks that models and text which lie at other places than a baseline file says are those of the
file, before any case runs. Must not know how cases are run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from magicdec.bench.gate.cases import Baseline, Case, ServedCase
from magicdec.bench.gate.measuring import Result
from magicdec.bench.serving.record import ServingRecord
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import MODEL_PREFIX, ParallelSection
from magicdec.distributed.groups import Launch
from magicdec.records.comparison.conditions import describe
from magicdec.records.workload import WorkloadRecord
from magicdec.setup.prepare import ResolvedRun, SetupCache, complete, describe_model, find


def with_names_here(cases: Sequence[Case], baselines: Sequence[Baseline]) -> list[Baseline]:
    """The baselines, whose models have the names that they have here. `cases` are theirs
    with the places of here. Raises ValueError, naming the flag, for a model or prompts whose hash
    is not that of the baseline."""
    cache = SetupCache()
    here = list[Baseline]()
    for config, baseline in zip(cases, baselines, strict=True):
        if isinstance(config, ServedCase) or isinstance(baseline, ServingRecord):
            here.append(baseline)  # `with_names_of` compares when it has been served
            continue
        theirs = baseline.workload
        if theirs is None:  # of a run that failed, which the comparison says
            here.append(baseline)
            continue
        # Cases differ in how and on which ranks they draft, from which neither hash follows.
        found = find(on_one_rank(config), Launch(), cache)
        _refuse(_other_model(config, found, theirs), baseline)  # before it is asked for the prompts
        run = complete(found, cache, lambda launch, check: "")
        ours = run.describe_workload()
        if ours.sha256 != theirs.sha256:
            _refuse(f"--dataset {config.workload.dataset}: its prompts are not those", baseline)
        draft = None
        if ours.draft is not None and theirs.draft is not None:
            draft = replace(theirs.draft, model=ours.draft.model)
        named = replace(theirs, model=ours.model, draft=draft)
        here.append(replace(baseline, workload=named))
    return here


def with_names_of(baseline: Baseline, result: Result) -> Baseline:
    """The baseline of requests that a mode served, whose models have the names that they have in
    the result. That they are the same models the comparison finds out by their hashes."""
    if not isinstance(baseline, ServingRecord) or not isinstance(result, ServingRecord):
        return baseline
    ours = result.workload
    theirs = baseline.workload
    draft = theirs.draft
    if ours.draft is not None and draft is not None:
        draft = replace(draft, model=ours.draft.model)
    return replace(baseline, workload=replace(theirs, model=ours.model, draft=draft))


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
    drafts = [each and each.model_sha256 for each in (draft, theirs.draft)]
    if config.draft is not None and drafts[0] != drafts[1]:
        return f"--draft {MODEL_PREFIX}{config.draft.model}: its weights are not those"
    return None


def _refuse(other: str | None, baseline: Baseline) -> None:
    """Raises ValueError if something is not that of the baseline."""
    if other is not None:
        raise ValueError(
            f"{other} that the baseline was measured with ({describe(baseline)}); `magicdec gate "
            "save` makes a baseline file of other models and text"
        )
