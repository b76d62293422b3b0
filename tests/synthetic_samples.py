"""Samples of passes that never ran, drawn from known distributions."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from magicdec.records.samples import PassSamples, PrefillSamples

Rng = np.random.Generator
Array = np.ndarray[Any, Any]
Step = tuple[int, int, int]
"""Of a row: how many tokens were proposed, accepted and emitted."""


def pass_samples(**values: Any) -> PassSamples:
    """A pass with these samples, and no others."""
    tokens = [sum(of_batch) for of_batch in values.get("sequence_tokens", ())]
    return replace(PassSamples.empty(), num_tokens=tokens, **values)


def draw_chances(rng: Rng, num: int, mean: float, spread: float) -> Array:
    """[num] for each prompt, the chance that a draft token is accepted if all before it were. Its
    standard deviation over prompts is `spread`."""
    size = mean * (1 - mean) / spread**2 - 1
    return rng.beta(mean * size, (1 - mean) * size, num)


def add_batch(
    samples: PassSamples,
    steps: Sequence[Sequence[Step]],
    tokens: Sequence[int],
    num_steps: Sequence[float],
) -> None:
    """A batch whose steps take 1 ms each, with the counts of each running row. The sequences have
    so many tokens after the first, and took part in so many steps."""
    samples.begin_ms.append(0.0)
    samples.step_ms.append([1.0] * len(steps))
    drafted = [max(proposed for proposed, _, _ in step) for step in steps]
    columns = [list(zip(*step, strict=True)) for step in steps]
    samples.padded_gamma.append(drafted)
    for counts, column in ((samples.num_drafted, 0), (samples.num_accepted, 1)):
        each = zip(columns, drafted, strict=True)
        counts.append([list(of_step[column]) if most else [] for of_step, most in each])
    samples.num_emitted.append([[e for _, _, e in step] for step in steps])
    samples.sequence_tokens.append(list(tokens))
    samples.num_tokens.append(sum(tokens))
    samples.sequence_ms.append([float(count) for count in num_steps])
    samples.bytes_read.append([1])
    samples.peak_memory_bytes.append([1])


def draw_pass(
    rng: Rng, chances: Array, gamma: int, num_tokens: int, num_batches: int = 1
) -> PassSamples:
    """A pass that drafts `gamma` tokens a step, until each prompt has emitted `num_tokens` after
    its first one. Each step takes 1 ms."""
    accepted = np.minimum(rng.geometric(1 - chances, (num_tokens, len(chances))) - 1, gamma)
    samples = PassSamples.empty()
    for rows in np.split(np.arange(len(chances)), num_batches):
        counts = accepted[:, rows]
        before = np.cumsum(counts + 1, axis=0) - counts - 1  # tokens before each step [steps, rows]
        emitted = np.minimum(counts + 1, num_tokens - before)
        is_running = emitted > 0
        steps = [
            [(gamma, a, n) for a, n in zip(c[running].tolist(), e[running].tolist(), strict=True)]
            for c, e, running in zip(counts, emitted, is_running, strict=True)
            if running.any()
        ]
        add_batch(samples, steps, [num_tokens] * len(rows), is_running.sum(axis=0))
    return samples


def baseline_pass(samples: PassSamples) -> PassSamples:
    """What decodes the same tokens without drafts, in steps of 1 ms."""
    baseline = PassSamples.empty()
    for tokens in samples.sequence_tokens:
        steps = [[(0, 0, 1)] * sum(n > i for n in tokens) for i in range(max(tokens))]
        add_batch(baseline, steps, tokens, tokens)
    return baseline


def scaled(samples: PassSamples, factors: Array) -> PassSamples:
    """The pass with the times of each batch multiplied by a factor."""
    for times in (samples.step_ms, samples.sequence_ms):
        times[:] = [[ms * float(f) for ms in b] for b, f in zip(times, factors, strict=True)]
    return samples


def prefill_of(samples: PassSamples) -> PrefillSamples:
    """Prompts of 10 tokens, prefilled in 1 ms each."""
    sizes = [len(tokens) for tokens in samples.sequence_tokens]
    return PrefillSamples(
        prefill_ms=[float(n) for n in sizes],
        ttft_ms=[[float(i + 1) for i in range(n)] for n in sizes],
        num_tokens=[10 * n for n in sizes],
    )
