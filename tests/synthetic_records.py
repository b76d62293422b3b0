"""Records of runs that never ran: their samples are drawn, and their metrics computed from them."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
from synthetic_samples import (
    Array,
    Step,
    add_batch,
    baseline_pass,
    draw_chances,
    draw_pass,
    prefill_of,
)

from magicdec.config.machine import Machine
from magicdec.config.resolve import resolve
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import DecodingSection, KVSection
from magicdec.records.acceptance import count_by_prompt, estimates_of
from magicdec.records.correctness import Correctness
from magicdec.records.environment import Environment
from magicdec.records.metrics import run_metrics
from magicdec.records.reading import parse_line
from magicdec.records.record import RunRecord
from magicdec.records.samples import PassSamples
from magicdec.records.workload import WorkloadRecord

GAMMA = 4
NUM_TOKENS = 63
ENVIRONMENT = Environment(
    time_utc="2026-11-22T05:00:00+00:00",
    argv=["magicdec"],
    magicdec="0",
    python="3",
    torch="2",
    system="Linux",
    cpu="",
    cpu_capability="AVX2",
    world_size=1,
    threads=2,
    read_bandwidth_bytes_per_s=1e9,
)
WORKLOAD = WorkloadRecord(
    model="demo",
    random_weights=False,
    model_sha256="m",
    tokenizer="demo",
    dataset="demo",
    num_prompts=8,
    prefix_len=8,
    seed=0,
    sha256="w",
)
IDENTICAL = Correctness("autoregressive", True, 99, None, 0, 0, 1e-4)


def chances_of(rate: float, num_prompts: int = 8) -> Array:
    """The chance of each prompt that its next draft token is accepted, about `rate`."""
    return draw_chances(np.random.default_rng(7), num_prompts, rate, 0.08)


def drawn(rate: float = 0.8, budget: int = 257, seed: int = 0, num_prompts: int = 8) -> RunRecord:
    """A record of self-speculation. Equal arguments make equal counts."""
    rng = np.random.default_rng(seed)
    samples = draw_pass(rng, chances_of(rate, num_prompts), GAMMA, NUM_TOKENS)
    return record_of(samples, budget)


def record_of(samples: PassSamples, budget: int = 257) -> RunRecord:
    """The record that has these samples, and baseline samples of the same outputs."""
    num_prompts = sum(map(len, samples.sequence_tokens))
    samples.draft_kv_tokens = [budget]
    samples.draft_rows = [1]
    passes = {"autoregressive": baseline_pass(samples), "speculative": samples}
    for each in passes.values():
        each.threads = [[2]] * len(each.step_ms)
        each.output_hashes = [f"{i:016x}" for i in range(num_prompts)]
    decoding = DecodingSection("speculative", "self")
    config = resolve(RunConfig(kv=KVSection(budget=budget), decoding=decoding), Machine(2))
    prefill = prefill_of(samples)
    metrics = run_metrics(passes, prefill, 1e9, is_random=False)
    return RunRecord(
        status="ok",
        config=config.to_dict(),
        environment=ENVIRONMENT,
        workload=replace(WORKLOAD, num_prompts=num_prompts),
        correctness=IDENTICAL,
        metrics=metrics["speculative"],
        baseline_metrics=metrics["autoregressive"],
        samples={
            name: each.to_record(is_drafting=name == "speculative", is_random=False)
            for name, each in passes.items()
        },
        prefill_samples=prefill,
    )


def parse_record(raw: Any) -> RunRecord:
    """The record of a run from its JSON value."""
    return parse_line(json.dumps(raw), RunRecord)


def with_fields(record: RunRecord, **fields: Any) -> RunRecord:
    """The record with values at places such as `config__workload__gen_len`."""
    raw = json.loads(record.to_json())
    for name, value in fields.items():
        place = raw
        *path, last = name.split("__")
        for key in path:
            place = place[key]
        place[last] = value
    return parse_record(raw)


KERNELS = {"forward-HEAD_SIZE=64": "aa", "packed": "bb"}


def logged(record: RunRecord | None = None) -> RunRecord:
    """A record of a run of the gate on native kernels, which has a log."""
    record = with_fields(
        record or drawn(),
        config__model__native_steps="on",
        environment__compiler="g++ 12",
        environment__instructions=["AVX2", "FMA"],
        environment__kernels=KERNELS,
        seal="",
    )
    assert record.samples is not None
    counts = record.samples["speculative"].num_accepted or []
    log = [
        [[f"{b:02x}{s:02x}{r:04x}" for r, _ in enumerate(step)] for s, step in enumerate(steps)]
        for b, steps in enumerate(counts)
    ]
    keys = [[[260 for _ in step] for step in steps] for steps in counts]
    return with_fields(
        record, samples__speculative__draft_hashes=log, samples__speculative__draft_keys=keys
    )


def rate_of(samples: PassSamples) -> float:
    return float(estimates_of(count_by_prompt(samples)).rate[0])


def with_losses(record: RunRecord, share: float, seed: int = 0) -> RunRecord:
    """The record of a worse draft for the same outputs: it misses each token that it had right with
    a chance such that about `share` of the acceptance rate is lost."""
    assert record.samples is not None
    samples = record.samples["speculative"].restored()
    low = 0.0
    high = 0.5
    for _ in range(12):  # the chance is found by halving
        chance = (low + high) / 2
        lossy = _missing(samples, chance, np.random.default_rng(seed))
        lost = 1 - rate_of(lossy) / rate_of(samples)
        low, high = (chance, high) if lost < share else (low, chance)
    metrics = run_metrics(
        {"autoregressive": record.samples["autoregressive"].restored(), "speculative": lossy},
        prefill_of(lossy),
        1e9,
        is_random=False,
    )
    kept = lossy.to_record(is_drafting=True, is_random=False)
    return replace(
        record,
        metrics=metrics["speculative"],
        samples=record.samples | {"speculative": kept},
        prefill_samples=prefill_of(lossy),
    )


def _missing(samples: PassSamples, chance: float, rng: np.random.Generator) -> PassSamples:
    """The pass of a draft that misses each token that it had right with that chance."""
    found = PassSamples.empty()
    for batch, wanted in enumerate(samples.sequence_tokens):
        if 0 in samples.padded_gamma[batch]:
            rows = [_decoded(row, wanted[i], rng, chance) for i, row in _lookups(samples, batch)]
        else:
            gamma = max(samples.padded_gamma[batch])
            rights = _rights(samples, batch)
            rows = [_walk(right, gamma, wanted[i], rng, chance) for i, right in rights]
        steps = [[row[i] for row in rows if i < len(row)] for i in range(max(map(len, rows)))]
        add_batch(found, steps, wanted, [len(row) for row in rows])
    found.draft_kv_tokens = samples.draft_kv_tokens
    found.draft_rows = samples.draft_rows
    found.bytes_read = samples.bytes_read
    found.peak_memory_bytes = samples.peak_memory_bytes
    found.output_hashes = samples.output_hashes
    found.threads = samples.threads
    return found


def _rights(samples: PassSamples, batch: int) -> list[tuple[int, list[bool]]]:
    """For each sequence, whether the draft has each of its tokens right. A token that follows
    accepted drafts and was not drafted itself counts as right."""
    wanted = samples.sequence_tokens[batch]
    left, rights = list(wanted), [[] for _ in wanted]  # type: ignore[var-annotated]
    for drafted, accepted, emitted in zip(
        samples.padded_gamma[batch],
        samples.num_accepted[batch],
        samples.num_emitted[batch],
        strict=True,
    ):
        running = [i for i, tokens in enumerate(left) if tokens > 0]
        for i, count, tokens in zip(running, accepted, emitted, strict=True):
            left[i] -= tokens
            rights[i] += [True] * count + [count == drafted]
    return list(enumerate(rights))


def _lookups(samples: PassSamples, batch: int) -> list[tuple[int, list[tuple[int, int]]]]:
    """(proposed, accepted) of each sequence in each of its steps, some of which have no drafts."""
    left = list(samples.sequence_tokens[batch])
    found = [list[tuple[int, int]]() for _ in left]
    of_batch = samples.num_drafted[batch], samples.num_accepted[batch], samples.num_emitted[batch]
    for proposed, accepted, emitted in zip(*of_batch, strict=True):
        running = [i for i, tokens in enumerate(left) if tokens > 0]
        nothing = [0] * len(running)
        pairs = zip(proposed or nothing, accepted or nothing, strict=True)
        for i, pair, tokens in zip(running, pairs, emitted, strict=True):
            left[i] -= tokens
            found[i].append(pair)
    return list(enumerate(found))


def _decoded(
    steps: list[tuple[int, int]], num_tokens: int, rng: np.random.Generator, chance: float
) -> list[Step]:
    """The same steps of a sequence with fewer accepted tokens. Those that are lacking in the end
    are decoded without drafts."""
    found = list[Step]()
    left = num_tokens
    for proposed, accepted in [*steps, *[(0, 0)] * num_tokens]:
        if left == 0:
            break
        right = min(accepted, proposed)
        count = next((i for i in range(right) if rng.random() < chance), accepted)
        found.append((proposed, count, min(count + 1, left)))
        left -= found[-1][2]
    return found


def _walk(
    right: list[bool], gamma: int, num_tokens: int, rng: np.random.Generator, chance: float
) -> list[Step]:
    """Each verification of a sequence of `num_tokens` tokens."""
    kept = [is_right and rng.random() >= chance for is_right in right] + [True] * gamma
    steps = list[Step]()
    place = 0
    while place < num_tokens:
        count = next((i for i in range(gamma) if not kept[place + i]), gamma)
        emitted = min(count + 1, num_tokens - place)
        steps.append((gamma, count, emitted))
        place += emitted
    return steps
