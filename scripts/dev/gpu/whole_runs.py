"""Stage `whole_runs` of `quick`: steps of self-speculation and of autoregressive decoding, with all
that the host does between forwards, for a model with random weights over random keys and values.
Random weights accept nothing, so the number of accepted drafts is drawn from a stated acceptance
rate after the verification has been computed: times are measured, acceptance is emulated, and the
tokens mean nothing. The file says so.
"""

from __future__ import annotations

import csv
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu.latency import EVEN, free_bytes, most_rows
from gpu.predict import MODEL, near
from gpu.scale import Suite
from magicdec.bench.latency.forwards import fill
from magicdec.config.resolved import ResolvedConfig
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import (
    DecodingSection,
    KVSection,
    ModelSection,
    ParallelSection,
    WorkloadSection,
)
from magicdec.distributed.groups import read_launch
from magicdec.hardware.timing import synchronize
from magicdec.model.presets.presets import find_config
from magicdec.output.console import make_progress
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.request import Batch, SamplingParams
from magicdec.runner.sampling.verification import Judgement
from magicdec.setup.loading import LoadedModels, runner_of, with_copy
from magicdec.setup.model_plan import ModelPlan
from magicdec.setup.prepare import ResolvedRun, SetupCache, find
from magicdec.setup.session import RankSession
from magicdec.speculation.steps import steps
from magicdec.speculation.steps.build import build_decoder
from magicdec.speculation.steps.strategy import DecodingStrategy

RATES_FILE = Path(__file__).parents[3] / "results" / "paper" / "acceptance_rates.csv"
DRAWS = 1 << 12  # steps until the drawn acceptance begins again
WARM_UP = 3
STEPS = 24


def run(suite: Suite) -> None:
    models: list[LoadedModels] = []  # the weights are made when the first cell is measured
    for most, S in suite.scale.run_places:
        B = fitting_rows(suite, most, S)
        for gamma in suite.scale.run_gammas:
            name = f"B{B}/S{S}/gamma{gamma}"
            suite.results.cell(name, partial(measure, suite, models, B, S, gamma))


def fitting_rows(suite: Suite, B: int, S: int, copy_bytes: int = 0) -> int:
    """B, or the largest multiple of EVEN rows that fits beside the weights and a copy of them; at
    least one."""
    config = find_config("--model", suite.scale.model.removeprefix("random:"))
    most = most_rows(config, S, free_bytes(suite.device), copy_bytes)
    return B if most is None or most >= B else max(1, most // EVEN * EVEN)


def rates_at(S: int) -> dict[str, float]:
    """The conditional acceptance rates that are emulated at a context: round ones, and the
    published one."""
    rates = {"0.7": 0.7, "0.8": 0.8, "0.9": 0.9}
    with RATES_FILE.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == MODEL]
    if (row := near(rows, S)) is not None:
        rates["published"] = float(row["acceptance_rate"])
    return rates


def find_run(suite: Suite, B: int, S: int, gamma: int, weights: str | None = None) -> ResolvedRun:
    """A self-speculative run at this place, whose drafts have `weights`. Raises ValueError as the
    commands do."""
    scale = suite.scale
    dtype = "float32" if suite.is_tiny else "bfloat16"
    room = (WARM_UP + STEPS + 2) * (gamma + 1)
    asked = RunConfig(
        model=ModelSection(model=scale.model, dtype=dtype),
        parallel=ParallelSection(device=suite.device.type),
        decoding=DecodingSection("speculative", "self", gamma, draft_weights=weights),
        kv=KVSection("streaming_llm", scale.run_budget),
        workload=WorkloadSection(batch_size=B, prefix_len=S, gen_len=room),
    )
    return find(asked, read_launch(), SetupCache())


def measure(
    suite: Suite,
    models: list[LoadedModels],
    B: int,
    S: int,
    gamma: int,
    weights: str | None = None,
    only: Sequence[str] = (),
) -> dict[str, Any]:
    """Milliseconds of a step of both strategies, and the speedup by acceptance rate, or at the
    first rate of `only` that there is. Raises ValueError or torch's out-of-memory error where the
    place does not fit."""
    run = find_run(suite, B, S, gamma, weights)
    config = run.config
    with filled_runner(models, run, S) as (runner, batch):
        device = runner.device
        baseline = time_steps(runner, batch, config, "autoregressive", S)
        found: dict[str, Any] = {
            "measured": "times of steps; random weights, random keys and values",
            "attention": config.attention.backend,
            "cuda_graphs": config.decoding.cuda_graphs,
            "autoregressive": baseline,
            "emulated_acceptance": {},
        }
        rates = rates_at(S)
        names = [name for name in only if name in rates][:1] or list(rates)
        for name, rate in ((name, rates[name]) for name in names):
            with emulated(rate, gamma, B, device):
                speculative = time_steps(runner, batch, config, "speculative", S)
            speedup = speculative["tokens_per_s"] / baseline["tokens_per_s"]
            found["emulated_acceptance"][name] = speculative | {"rate": rate, "speedup": speedup}
        return found


@contextmanager
def filled_runner(
    models: list[LoadedModels], run: ResolvedRun, S: int
) -> Iterator[tuple[ModelRunner, Batch]]:
    """A runner whose rows hold S tokens of random keys and values, and their batch. Its weights are
    those of `models`, made if there are none yet."""
    config = run.config
    source = run.source
    with RankSession(read_launch(), config.parallel) as session:
        if not models:
            models.append(LoadedModels(session.device, make_progress(False)))
        plan = ModelPlan(config, source.config, (0,), 0)
        model = models[0].get(source, session.groups.target, plan.kinds)
        copy = models[0].get_copy(source, session.groups.target, plan)
        runner = with_copy(plan, runner_of(plan, model, session.groups.target), copy)
        yield runner, fill(runner, S)


def new_batch(filled: Batch, max_new_tokens: int) -> Batch:
    """The requests of a filled batch anew, which decode at most so many tokens."""
    greedy = SamplingParams(max_new_tokens=max_new_tokens)
    copies = [replace(r, sampling=greedy, output_ids=[*r.output_ids]) for r in filled.requests]
    return Batch(tuple(copies))


@contextmanager
def emulated(rate: float, gamma: int, B: int, device: torch.device) -> Iterator[None]:
    """Within it, verifications are computed and judged, and the number of accepted drafts is then
    replaced by one that was drawn: each draft is accepted with probability `rate` if those before
    it were. The draws lie on the device, so that captured steps take the next ones at each
    replay."""
    drawn = np.random.default_rng(0).random((DRAWS, B, gamma)) < rate
    table = torch.from_numpy(drawn.cumprod(2).sum(2)).to(device)
    step = torch.zeros(1, dtype=torch.int64, device=device)
    judge = steps.judge

    def judge_emulated(*arguments: Any) -> Judgement:
        judgement = judge(*arguments)
        gamma = judgement.ids.shape[1] - 1
        accepted: Tensor = table[step % DRAWS][0][: len(judgement.ids)].clamp(max=gamma)
        step.add_(1)
        return replace(judgement, accepted=accepted)

    steps.judge = judge_emulated  # type: ignore[assignment]
    try:
        yield
    finally:
        steps.judge = judge


def time_steps(
    runner: ModelRunner, batch: Batch, config: ResolvedConfig, name: str, S: int
) -> dict[str, Any]:
    """Times of the steps of a strategy over the filled cache, the first ones left out, and the
    tokens that they emit in a second. The cache has its old length afterwards."""
    rows = new_batch(batch, config.workload.gen_len)
    strategy = build_decoder(runner, config.decoding, config.kv, name=name)
    strategy.admit(rows)
    for _ in range(WARM_UP):
        take_step(strategy, rows)
    seconds = []
    num_tokens = 0
    for _ in range(STEPS):
        synchronize(runner.device)
        started = time.perf_counter()
        num_tokens += take_step(strategy, rows)
        synchronize(runner.device)
        seconds.append(time.perf_counter() - started)
    strategy.release(rows.rows)
    runner.truncate(rows.rows, [S] * len(rows.rows))
    return {
        "step_ms": 1e3 * statistics.median(seconds),
        "step_ms_all": [1e3 * second for second in seconds],
        "tokens_a_step": num_tokens / STEPS / len(rows.requests),
        "tokens_per_s": num_tokens / STEPS / statistics.median(seconds),
    }


def take_step(strategy: DecodingStrategy, batch: Batch) -> int:
    """One step. The number of tokens that it emits, which are appended to the requests."""
    output = strategy.step(batch)
    for request, emitted in zip(batch.requests, output.token_ids, strict=True):
        request.output_ids.extend(emitted)
    return sum(map(len, output.token_ids))
