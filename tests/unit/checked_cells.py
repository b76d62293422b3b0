"""A target and a draft for simulated schedules, whose tokens depend on all that a row reads, and
the KV cells of every stage: a cell holds the text that its row stood on, or poison if its run was
skipped."""

import random
from collections.abc import Sequence

from magicdec.predict.simulator.simulation import SimulatedMachine, SimulatedRun
from magicdec.systems.pipeinfer.messages import Candidate, DraftAction, RunLaunch

VOCABULARY = 11
EMPTY = 7  # the text before the first token
PROBABILITY = 0.6  # of every candidate
Cell = tuple[int, int] | None
"""(text before the row, text with its token), or None: poison."""


def read(text: int, token: int) -> int:
    """The text with one token more, as a number."""
    return (text * 1103515245 + (token + 1) * 12345) & 0xFFFFFFFF


def next_token(text: int) -> int:
    return (text >> 7) % VOCABULARY


def generate(prompt: Sequence[int], max_new_tokens: int, eos: int) -> list[int]:
    """What the target writes alone."""
    text = EMPTY
    output = list[int]()
    for token in prompt:
        text = read(text, token)
    while len(output) < max_new_tokens and eos not in output:
        output.append(next_token(text))
        text = read(text, output[-1])
    return output


class CheckedModels:
    """Raises AssertionError if a run that is not cancelled reads a cell that was not written, is
    poisoned or belongs to another text."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        machine: SimulatedMachine,
        acceptance: float,
        cancelled: set[int],
        seed: int,
    ) -> None:
        self.prompts = prompts
        self.acceptance = acceptance
        self.seed = seed
        self.cancelled = cancelled
        self.num_layers = machine.layers  # of a stage; one that computed fewer skipped the run
        self.stages: list[dict[tuple[int, int], Cell]] = [{} for _ in machine.stage_s]

    def home(self, flight: SimulatedRun) -> tuple[int, ...] | None:
        launch = RunLaunch.from_words(flight.launch.to_words())
        texts: list[int | None] = [None] * launch.num_rows
        for stage, cells in enumerate(self.stages):
            found = self._rows(launch, cells, flight.layers[stage] < self.num_layers)
            equal = zip(texts, found, strict=True)
            texts = found if stage == 0 else [a if a == b else None for a, b in equal]
        if flight.is_void:
            return None
        if launch.run not in self.cancelled:
            assert None not in texts, f"run {launch.run} read a cell that it must not"
        shown = texts[launch.num_rows - launch.num_outputs :]
        return tuple(-1 if text is None else next_token(text) for text in shown)

    def _rows(
        self, launch: RunLaunch, cells: dict[tuple[int, int], Cell], is_skipped: bool
    ) -> list[int | None]:
        """The text of each row at one stage, whose cells are written."""
        text = None if is_skipped else self._read(launch, cells)
        texts: list[int | None] = []
        for position, token in zip(launch.positions, launch.tokens, strict=True):
            before = text
            text = None if text is None else read(text, token)
            texts.append(text)
            written = before is not None and text is not None
            cells[launch.lane, position] = (before, text) if written else None
        return texts

    def _read(self, launch: RunLaunch, cells: dict[tuple[int, int], Cell]) -> int | None:
        """The text before the rows, of which every cell must be; None if one is not."""
        text = EMPTY
        for position in range(launch.first):
            cell = cells.get((launch.lane, position))
            if cell is None or cell[0] != text:
                return None
            text = cell[1]
        return text

    def propose(self, draft: DraftAction, output: Sequence[int]) -> Candidate:
        text = EMPTY
        for token in (*self.prompts[draft.request], *output, *draft.path):
            text = read(text, token)
        chooser = random.Random(self.seed * 1_000_003 + text)
        right = next_token(text)
        wrong = chooser.choice([t for t in range(VOCABULARY) if t != right])
        return right if chooser.random() < self.acceptance else wrong, PROBABILITY
