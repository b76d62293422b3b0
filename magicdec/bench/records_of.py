"""The records of a command's passes: of a run, of the modes of `magicdec serve`, and of what an
error ended. Each says beside what was measured (`recording.py`) what the command was asked for.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from magicdec.bench.check.check import identical, uncompared
from magicdec.bench.check.passes import Checked
from magicdec.bench.prepare import PreparedServing
from magicdec.bench.recording import parts_of, pass_record
from magicdec.bench.runner import MeasuredPass, PlannedPass, Runner
from magicdec.config.resolved import ResolvedConfig
from magicdec.config.run_config import split_draft
from magicdec.distributed.groups import Launch
from magicdec.hardware.environment import describe_environment
from magicdec.hardware.other_load import OtherLoad
from magicdec.names import BASELINE, SPECULATIVE
from magicdec.records.environment import Environment
from magicdec.records.pass_record import PassRecord
from magicdec.records.record import Status
from magicdec.records.workload import WorkloadRecord
from magicdec.setup.memory_sampler import NOT_MEASURED, MemoryTaken, describe_memory
from magicdec.setup.prepare import Prepared
from magicdec.systems.modes import DRAFTING, PLAIN
from magicdec.systems.system import System

PARTS = ("model", "parallel", "attention", "decoding", "sampling")  # of a config that are recorded
DRAFT_PARTS = ("draft", "kv")  # and those of a pass with drafts


def records_of_run(
    prepared: Prepared,
    passes: Sequence[MeasuredPass],
    checked: Checked,
    environment: Environment,
    taken: MemoryTaken,
) -> list[PassRecord]:
    """The records of the passes of a run, the last of which was checked beside the first."""
    checks = [*(reference_check(measured, checked) for measured in passes[:-1]), checked]
    workload = prepared.describe_workload()
    memory = describe_memory(prepared.plan, prepared.free, taken)
    return [
        pass_record(
            measured,
            pass_check,
            passes[0] if len(passes) > 1 else None,
            config=config_of_run(prepared, measured).to_dict(),
            environment=environment,
            workload=workload,
            memory=memory,
        )
        for measured, pass_check in zip(passes, checks, strict=True)
    ]


def reference_check(reference: MeasuredPass, checked: Checked) -> Checked:
    """What the check of another pass says of its reference."""
    if checked.num_differing is None:
        return Checked(None, uncompared(reference.requests))
    return Checked(0, identical(reference.name, reference.requests))


def config_of_run(prepared: Prepared, measured: MeasuredPass) -> ResolvedConfig:
    is_drafting = measured.planned.serving_pass.is_drafting
    return prepared.config if is_drafting else prepared.config.without_drafts()


def record_of_mode(
    prepared: PreparedServing, measured: MeasuredPass, checked: Checked, runner: Runner
) -> PassRecord:
    """The record of a pass of `magicdec serve`."""
    system = measured.planned.system
    memory = None
    if not system.is_external:
        memory = describe_memory(measured.plan, None, measured.memory)
    return pass_record(
        measured,
        checked,
        runner.measured[runner.passes[0]] if len(runner.passes) > 1 else None,
        config=describe_config(prepared, measured.planned),
        environment=runner.describe_environment(
            OtherLoad.worst_of([group.load.found for group in measured.groups])
        ),
        workload=describe_workload(prepared, system),
        memory=memory,
        goodput=prepared.options.goodput,
    )


def failed_record(
    prepared: PreparedServing, measured: MeasuredPass, runner: Runner, error: str
) -> PassRecord:
    """The record of a pass that an error ended, with the groups that it had served before."""
    planned = measured.planned
    parts = parts_of(measured)
    return PassRecord(
        status=Status.FAILED,
        name=planned.name,
        config=describe_config(prepared, planned),
        environment=runner.session.describe_environment(),
        workload=describe_workload(prepared, planned.system),
        reference=runner.passes[0].name if len(runner.passes) > 1 else None,
        requests=list(parts.requests),
        groups=list(parts.groups),
        error=error,
    )


def unfinished_record(
    config: ResolvedConfig,
    prepared: Prepared | None,
    launch: Launch,
    started: datetime.datetime,
    error: str,
) -> PassRecord:
    """The record of a failed run. `prepared` is None if it was refused before."""
    serving_pass = PLAIN if config.decoding.strategy == BASELINE else DRAFTING
    memory = None
    if prepared is not None:
        memory = describe_memory(prepared.plan, prepared.free, NOT_MEASURED)
    return PassRecord(
        status=Status.FAILED,
        name=serving_pass.name,
        config=config.to_dict(),
        environment=describe_environment(launch, config.parallel.device, started),
        workload=None if prepared is None else prepared.describe_workload(),
        requests=[],
        groups=[],
        memory=memory,
        error=error,
    )


def describe_workload(prepared: PreparedServing, system: System) -> WorkloadRecord:
    """The prompts of all modes, with the models of this one."""
    return replace(system.run, workload=prepared.run.workload).describe_workload()


def describe_config(prepared: PreparedServing, planned: PlannedPass) -> dict[str, Any]:
    """The resolved config of a pass, with the flags of the load and of its system. It says what
    drafts also where stages draft nothing themselves."""
    system = planned.system
    serving_pass = planned.serving_pass
    options = prepared.options
    config = system.config_of(serving_pass)
    asked = system.run.config.workload
    settings: dict[str, Any] = {
        "dataset": asked.dataset,
        "prompt_format": asked.prompt_format,
        "seed": prepared.run.workload.seed,
    }
    settings |= options.describe() | system.describe_settings()
    settings |= {"mode": serving_pass.mode, "concurrency": serving_pass.concurrency}
    decoding = config["decoding"]
    has_draft = serving_pass.is_drafting and bool(decoding["drafter"] or config["draft"])
    if serving_pass.is_drafting:
        drafter, _ = split_draft(options.draft)
        config = config | {"decoding": decoding | {"strategy": SPECULATIVE, "drafter": drafter}}
    names = (*PARTS, *DRAFT_PARTS) if has_draft else PARTS
    return {name: config[name] for name in names} | {"workload": settings}
