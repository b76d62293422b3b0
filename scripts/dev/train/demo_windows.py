"""Training windows for the demo models: book text, and tasks that need distant tokens.

A window is (token ids [W], positions [W], targets [W]); targets of -100 are ignored. Positions may
skip ahead over omitted text, so that a short window can train a long distance (positional skip-wise
training, PoSE, Zhu et al. 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

IGNORE = -100


@dataclass(frozen=True)
class WindowSource:
    """Draws windows from `books`, an array of token ids for each book. The generator passed to
    `draw` determines the windows."""

    books: list[np.ndarray]
    bos: int
    newline: int
    first_word: int  # lower ids are special tokens and bytes
    vocab_size: int
    max_positions: int

    def draw(
        self, rng: np.random.Generator, length: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        kinds = (self.plain, self.skipping, self.passage_recall, self.key_value_recall, self.repeat)
        make = kinds[rng.choice(5, p=[0.40, 0.35, 0.10, 0.075, 0.075])]
        ids, positions, targets = make(rng, length)
        assert (
            len(ids) == len(positions) == len(targets) == length
            and positions[-1] < self.max_positions
        )
        return ids, positions, targets

    def plain(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, ...]:
        """BOS at position 0 and consecutive text, which follows directly or, with probability 1/2,
        at a random later position."""
        ids = np.concatenate([[self.bos], self._text(rng, length - 1)])
        shift = int(rng.integers(0, self.max_positions - length)) if rng.random() < 0.5 else 0
        return ids, self._positions([1, length - 1], [shift]), self._targets(ids)

    def skipping(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, ...]:
        """The beginning of a text, which includes the attention sinks, then its continuation after
        a skipped distance."""
        head = int(rng.integers(16, max(17, length // 2)))
        gap = self._gap(rng, length)
        text = self._text(rng, length - 1 + gap)
        ids = np.concatenate([[self.bos], text[: head - 1], text[head - 1 + gap :]])
        targets = self._targets(ids)
        targets[head - 1] = IGNORE
        return ids, self._positions([head, length - head], [gap]), targets

    def passage_recall(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, ...]:
        """A passage that is repeated after a skipped distance, followed by other text."""
        size = int(rng.integers(48, max(49, min(600, length // 2 - 1))))
        before = int(rng.integers(1, length - 2 * size))
        rest = length - 1 - before - 2 * size
        between = int(rng.integers(0, rest + 1))
        passage = self._text(rng, size)
        middle = self._text(rng, between)
        after = self._text(rng, rest - between)
        ids = np.concatenate([[self.bos], self._text(rng, before), passage, middle, passage, after])
        repeat = 1 + before + size + between
        targets = self._targets(ids)
        targets[repeat - 1] = targets[repeat] = (
            IGNORE  # the start of the repetition cannot be predicted, nor its first tokens
        )
        if rest > between:
            targets[repeat + size - 1] = IGNORE
        return ids, self._positions([repeat, length - repeat], [self._gap(rng, length)]), targets

    def key_value_recall(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, ...]:
        """Lines "key value" of random tokens, and after a skipped distance the same lines in
        another order, in which only the values are scored."""
        num_pairs = int(rng.integers(2, max(3, min(100, length // 13))))
        words = rng.integers(self.first_word, self.vocab_size, size=(num_pairs, 5))
        lines = np.concatenate([words, np.full((num_pairs, 1), self.newline)], axis=1)
        listed = lines.reshape(-1)
        asked = lines[rng.permutation(num_pairs)].reshape(-1)
        rest = length - 1 - 2 * len(listed)
        before = int(rng.integers(0, rest // 2 + 1))
        ids = np.concatenate(
            [[self.bos], self._text(rng, before), listed, self._text(rng, rest - before), asked]
        )
        repeat = length - len(asked)
        targets = self._targets(ids)
        targets[before : before + len(listed)] = IGNORE
        targets[repeat - 1 :] = IGNORE
        for line in range(repeat, length, 6):  # key is two tokens, value three, newline one
            targets[line + 1 : line + 5] = ids[line + 2 : line + 6]
        return ids, self._positions([repeat, length - repeat], [self._gap(rng, length)]), targets

    def repeat(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, ...]:
        """Text, random tokens, and the same random tokens again. Of the random tokens only the
        repetition is scored."""
        size = int(rng.integers(16, max(17, min(600, length // 2 - 1))))
        noise = rng.integers(self.first_word, self.vocab_size, size=size)
        ids = np.concatenate([[self.bos], self._text(rng, length - 1 - 2 * size), noise, noise])
        targets = self._targets(ids)
        targets[length - 2 * size - 1 : length - size + 1] = IGNORE
        return ids, self._positions([length - size, size], [self._gap(rng, length)]), targets

    def _text(self, rng: np.random.Generator, length: int) -> np.ndarray:
        sizes = np.array([max(0, len(book) - length) for book in self.books], dtype=float)
        book = self.books[rng.choice(len(self.books), p=sizes / sizes.sum())]
        start = int(rng.integers(0, len(book) - length))
        return book[start : start + length]

    def _gap(self, rng: np.random.Generator, length: int) -> int:
        """A skipped distance, uniform in its logarithm, up to the largest possible position."""
        largest = self.max_positions - length
        return int(min(largest - 1, np.exp(rng.uniform(0.0, np.log(largest)))))

    @staticmethod
    def _positions(sizes: list[int], gaps: list[int]) -> np.ndarray:
        steps = np.ones(sum(sizes), dtype=np.int64)
        steps[0] = 0
        for size, gap in zip(np.cumsum(sizes), gaps, strict=False):
            steps[size] += gap
        return np.cumsum(steps)

    @staticmethod
    def _targets(ids: np.ndarray) -> np.ndarray:
        return np.concatenate([ids[1:], [IGNORE]]).astype(np.int64)
