"""A target and a draft for simulated schedules, whose tokens depend on all that a row reads, and
the KV cells of every stage: a cell holds the text that its row stood on, or poison if its run was
skipped."""

import random
from collections.abc import Sequence

from magicdec.pipelined_speculation.messages import Candidates, Draft, Launch
from magicdec.simulator.simulation import Flight, Machine

VOCABULARY = 11
EMPTY = 7  # the text before the first token
Cell = tuple[int, int] | None
"""(text before the row, text with its token), or None: poison."""


def read(text: int, token: int) -> int:
    """The text with one token more, as a number."""
    return (text * 1103515245 + (token + 1) * 12345) & 0xFFFFFFFF


def next_token(text: int) -> int:
    return (text >> 7) % VOCABULARY


def generate(prompt: Sequence[int], max_new_tokens: int, eos: int) -> list[int]:
    """What the target writes alone."""
    text, output = EMPTY, list[int]()
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
        machine: Machine,
        acceptance: float,
        probabilities: Sequence[float],
        cancelled: set[int],
        seed: int,
    ) -> None:
        self.prompts, self.acceptance, self.seed = prompts, acceptance, seed
        self.probabilities, self.cancelled = probabilities, cancelled
        self.num_layers = machine.layers  # of a stage; one that computed fewer skipped the run
        self.stages: list[dict[tuple[int, int], Cell]] = [{} for _ in machine.stage_s]

    def home(self, flight: Flight) -> tuple[int, ...] | None:
        launch = Launch.from_words(flight.launch.to_words())
        texts: list[int | None] = [None] * launch.num_rows
        for stage, cells in enumerate(self.stages):
            for source, target in launch.moves:
                cells[launch.lane, target] = cells.get((launch.lane, source))
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
        self, launch: Launch, cells: dict[tuple[int, int], Cell], is_skipped: bool
    ) -> list[int | None]:
        """The text of each row at one stage, whose cells are written."""
        context = [cells.get((launch.lane, c)) for a, b in launch.context for c in range(a, b)]
        end = self._end(context, launch.positions[0]) if not is_skipped else None
        texts: list[int | None] = []
        for row, token in enumerate(launch.tokens):
            before = end if launch.parents[row] < 0 else texts[launch.parents[row]]
            text = None if before is None or is_skipped else read(before, token)
            texts.append(text)
            cell = None if text is None or before is None else (before, text)
            cells[launch.lane, launch.cells[row]] = cell
        return texts

    def _end(self, context: Sequence[Cell], position: int) -> int | None:
        """The text of which the context has one cell for each token; None if it has not."""
        after = {cell[0]: cell[1] for cell in context if cell is not None}
        if len(context) != position or len(after) != position:
            return None
        text = EMPTY
        for _ in range(position):
            if text not in after:
                return None
            text = after[text]
        return text

    def propose(self, draft: Draft, output: Sequence[int]) -> list[Candidates]:
        return [self._candidates(draft.request, [*output, *path]) for path in draft.paths]

    def _candidates(self, request: int, tokens: Sequence[int]) -> Candidates:
        text = EMPTY
        for token in (*self.prompts[request], *tokens):
            text = read(text, token)
        chooser = random.Random(self.seed * 1_000_003 + text)
        wrong = [t for t in range(VOCABULARY) if t != next_token(text)]
        found = chooser.sample(wrong, len(self.probabilities))
        if chooser.random() < self.acceptance:
            found[0] = next_token(text)
        elif self.acceptance < 1 and chooser.random() < self.acceptance:
            found[chooser.randrange(len(found))] = next_token(text)
        return tuple(zip(found, self.probabilities, strict=True))
