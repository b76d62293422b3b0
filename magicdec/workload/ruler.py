"""RULER-style prompts of an exact number of tokens (Hsieh et al. 2024).

Owns how a task of `ruler_tasks.py` fills a context: finds the largest size that fits and pads with
haystack sentences between the task's head and body. Must not know the content of the tasks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from magicdec.workload.answers import Strings
from magicdec.workload.ruler_tasks import HAYSTACK, TASKS, Sample, Task


def make_prompts(
    name: str,
    encode: Callable[[str], list[int]],
    bos: int | None,
    prefix_len: int,
    num_prompts: int,
    seed: int,
) -> tuple[tuple[tuple[int, ...], ...], tuple[Strings, ...]]:
    """Prompts of `prefix_len` tokens, including BOS, and the strings that answer them. Raises
    ValueError for an unknown task and for a prefix that is too short for it."""
    if name not in TASKS:
        choices = ", ".join(f"ruler:{task}" for task in TASKS)
        raise ValueError(f"--dataset {f'ruler:{name}'!r} is not known; choose from {choices}")
    composer = Composer(TASKS[name], encode, () if bos is None else (bos,))
    seeds = [f"{seed}:{name}:{i}" for i in range(num_prompts)]
    least = max(composer.num_tokens(s, composer.task.least) for s in seeds)
    if prefix_len < least:
        raise ValueError(
            f"--prefix_len {prefix_len} is too short for --dataset ruler:{name}; "
            f"it must be at least {least}"
        )
    size = composer.largest_size(seeds[0], prefix_len)
    sizes = [composer.fitting_size(s, size, prefix_len) for s in seeds]
    samples = [composer.sample(s, n) for s, n in zip(seeds, sizes, strict=True)]
    prompts = tuple(composer.prompt(sample, prefix_len) for sample in samples)
    return prompts, tuple(Strings(sample.answers) for sample in samples)


@dataclass(frozen=True)
class Composer:
    """Composes a sample's token ids: `start` (BOS, if any), the head, then the haystack, the body
    and the question, which are encoded together."""

    task: Task
    encode: Callable[[str], list[int]]
    start: tuple[int, ...]

    def sample(self, seed: str, size: int) -> Sample:
        return self.task.make(random.Random(seed), size)

    def num_tokens(self, seed: str, size: int) -> int:
        """Tokens of the prompt with one sentence of haystack, the part that may be cut."""
        sample = self.sample(seed, size)
        return len(self._head(sample)) + len(self._rest(sample, 1))

    def largest_size(self, seed: str, prefix_len: int) -> int:
        """The largest size that fits, to within 1/64. It is not found exactly, because every try
        encodes the whole text."""
        low, high = self.task.least, 2 * self.task.least
        while self.num_tokens(seed, high) <= prefix_len:
            low, high = high, 2 * high
        while high - low > max(1, low // 64):
            middle = (low + high) // 2
            if self.num_tokens(seed, middle) <= prefix_len:
                low = middle
            else:
                high = middle
        return low

    def fitting_size(self, seed: str, size: int, prefix_len: int) -> int:
        """`size`, reduced if this sample's words take more tokens than the first sample's."""
        while size > self.task.least and self.num_tokens(seed, size) > prefix_len:
            size -= max(1, size // 64)
        return max(size, self.task.least)

    def prompt(self, sample: Sample, prefix_len: int) -> tuple[int, ...]:
        """Exactly `prefix_len` tokens. The haystack before the body is cut at its beginning."""
        head, sentences = self._head(sample), 1
        room, rest = prefix_len - len(head), self._rest(sample, sentences)
        while len(rest) < room:
            sentences *= 2
            rest = self._rest(sample, sentences)
        return (*head, *rest[len(rest) - room :])

    def _head(self, sample: Sample) -> list[int]:
        return [*self.start, *self.encode(sample.head)]

    def _rest(self, sample: Sample, sentences: int) -> list[int]:
        filling = [HAYSTACK[-1 - i % len(HAYSTACK)] for i in reversed(range(sentences))]
        return self.encode(" ".join([*filling, sample.body]) + sample.question)
