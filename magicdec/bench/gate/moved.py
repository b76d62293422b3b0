"""Checks that models and text which lie at other places than a baseline file says are those of the
file, before any case runs. Must not know how cases are run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from magicdec.config.run_config import RunConfig
from magicdec.config.sections import MODEL_PREFIX, ParallelSection
from magicdec.distributed.groups import Launch
from magicdec.records.comparison.conditions import describe
from magicdec.records.record import RunRecord
from magicdec.records.workload import WorkloadRecord
from magicdec.setup.prepare import SetupCache, complete, find


def with_names_here(
    configs: Sequence[RunConfig], baselines: Sequence[RunRecord]
) -> list[RunRecord]:
    """The baselines, whose models have the names that they have here. `configs` are their cases
    with the places of here. Raises ValueError, naming the flag, for a model or prompts whose hash
    is not that of the baseline."""
    cache = SetupCache()
    here = list[RunRecord]()
    for config, baseline in zip(configs, baselines, strict=True):
        # Cases differ in how and on which ranks they draft, from which neither hash follows.
        run = complete(find(on_one_rank(config), Launch(), cache), cache, lambda launch, check: "")
        ours = run.describe_workload()
        theirs = baseline.workload
        if theirs is None:  # of a run that failed, which the comparison says
            here.append(baseline)
            continue
        if (other := _other(config, ours, theirs)) is not None:
            raise ValueError(f"{other} that the baseline was measured with ({describe(baseline)})")
        draft = None
        if ours.draft is not None and theirs.draft is not None:
            draft = replace(theirs.draft, model=ours.draft.model)
        named = replace(theirs, model=ours.model, draft=draft)
        here.append(replace(baseline, workload=named))
    return here


def on_one_rank(config: RunConfig) -> RunConfig:
    """The case with all that it holds on one rank."""
    draft = None if config.draft is None else replace(config.draft, rank_group=None)
    parallel = ParallelSection(device=config.parallel.device)
    return replace(config, draft=draft, parallel=parallel)


def _other(config: RunConfig, ours: WorkloadRecord, theirs: WorkloadRecord) -> str | None:
    """The first thing that is not that of the baseline, with its flag."""
    if ours.model_sha256 != theirs.model_sha256:
        return f"--model {config.model.model}: its weights are not those"
    drafts = [each.draft and each.draft.model_sha256 for each in (ours, theirs)]
    if config.draft is not None and drafts[0] != drafts[1]:
        return f"--draft {MODEL_PREFIX}{config.draft.model}: its weights are not those"
    if ours.sha256 != theirs.sha256:
        return f"--dataset {config.workload.dataset}: its prompts are not those"
    return None
