"""Samples of passes that never ran, drawn from known distributions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from magicdec.records.samples import PassSamples, PrefillSamples

Rng = np.random.Generator
Array = np.ndarray[Any, Any]


def pass_samples(**values: Any) -> PassSamples:
    """A pass with these samples, and no others."""
    tokens = [sum(of_batch) for of_batch in values.get("sequence_tokens", ())]
    return replace(PassSamples.empty(), num_tokens=tokens, **values)


def draw_chances(rng: Rng, num: int, mean: float, spread: float) -> Array:
    """[num] for each prompt, the chance that a draft token is accepted if all before it were. Its
    standard deviation over prompts is `spread`."""
    size = mean * (1 - mean) / spread**2 - 1
    return rng.beta(mean * size, (1 - mean) * size, num)


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
        steps = [(c[e > 0].tolist(), e[e > 0].tolist()) for c, e in zip(counts, emitted)]  # noqa: B905
        steps = [(c, e) for c, e in steps if c]
        samples.begin_ms.append(0.0)
        samples.step_ms.append([1.0] * len(steps))
        samples.num_drafted.append([gamma] * len(steps))
        samples.num_accepted.append([c for c, _ in steps])
        samples.num_emitted.append([e for _, e in steps])
        samples.sequence_tokens.append([num_tokens] * len(rows))
        samples.num_tokens.append(num_tokens * len(rows))
        samples.sequence_ms.append([float(n) for n in (emitted > 0).sum(axis=0)])
        samples.bytes_read.append([1])
        samples.peak_memory_bytes.append([1])
    return samples


def baseline_pass(samples: PassSamples) -> PassSamples:
    """What decodes the same tokens without drafts, in steps of 1 ms."""
    found = PassSamples.empty()
    for tokens in samples.sequence_tokens:
        longest = max(tokens)
        found.begin_ms.append(0.0)
        found.step_ms.append([1.0] * longest)
        found.num_drafted.append([0] * longest)
        found.num_accepted.append([[] for _ in range(longest)])
        found.num_emitted.append([[1] * sum(n > i for n in tokens) for i in range(longest)])
        found.sequence_tokens.append(list(tokens))
        found.num_tokens.append(sum(tokens))
        found.sequence_ms.append([float(n) for n in tokens])
        found.bytes_read.append([1])
        found.peak_memory_bytes.append([1])
    return found


def scaled(samples: PassSamples, factors: Array) -> PassSamples:
    """The pass with the times of each batch multiplied by a factor."""
    factors = [float(f) for f in factors]
    samples.step_ms = [[ms * f for ms in b] for b, f in zip(samples.step_ms, factors, strict=True)]
    samples.sequence_ms = [
        [ms * f for ms in b] for b, f in zip(samples.sequence_ms, factors, strict=True)
    ]
    return samples


def prefill_of(samples: PassSamples) -> PrefillSamples:
    """Prompts of 10 tokens, prefilled in 1 ms each."""
    sizes = [len(tokens) for tokens in samples.sequence_tokens]
    return PrefillSamples(
        prefill_ms=[float(n) for n in sizes],
        ttft_ms=[[float(i + 1) for i in range(n)] for n in sizes],
        num_tokens=[10 * n for n in sizes],
    )
