"""A drafter that knows the target's output: on stages that sleep, whose output is known, and in
tests."""

from __future__ import annotations

from collections.abc import Sequence

from magicdec.systems.pipeinfer.drawn_drafts import DRAFT_PROBABILITY, draw_right
from magicdec.systems.pipeinfer.messages import Candidate
from magicdec.systems.pipeinfer.path_drafter import DraftRequest, PathDrafter
from magicdec.systems.stages.emulation import EmulatedTime, following_tokens


class ScriptedPathDrafter(PathDrafter):
    """A drafter of known outputs. Output token i is right if `is_right[i]`. A step takes
    `seconds`."""

    def __init__(
        self,
        outputs: Sequence[Sequence[int]],
        prompt_lens: Sequence[int],
        is_right: Sequence[Sequence[bool]],
        probability: float,
        seconds: float = 0.0,
        emulated: EmulatedTime | None = None,
    ) -> None:
        self.outputs = outputs
        self.prompt_lens = prompt_lens
        self.is_right = is_right
        self.probability = probability
        self.seconds = seconds
        self.emulated = emulated or EmulatedTime()

    @classmethod
    def for_emulated_stages(
        cls,
        acceptance: float,
        prompt_lens: Sequence[int],
        output_lens: Sequence[int],
        vocab_size: int,
        seed: int,
        seconds: float,
        emulated: EmulatedTime,
    ) -> ScriptedPathDrafter:
        """A drafter for stages that sleep, which is right with a probability of `acceptance`."""
        lengths = list(zip(prompt_lens, output_lens, strict=True))
        outputs = [following_tokens(*length, vocab_size) for length in lengths]
        is_right = [
            draw_right(acceptance, length, seed + index) for index, length in enumerate(output_lens)
        ]
        return cls(outputs, prompt_lens, is_right, DRAFT_PROBABILITY, seconds, emulated)

    def propose(self, step: DraftRequest, text: list[int]) -> Candidate | None:
        if step.path is None:
            return None
        self.emulated.begin(self.seconds)
        self.emulated.sleep(self.seconds)
        output = self.outputs[step.request]
        begin = len(text) - self.prompt_lens[step.request]
        place = begin + len(step.path)
        if begin < 0 or place >= len(output):
            return None  # a shortened request, or past the end
        follows = tuple(output[begin:place]) == step.path
        if follows and self.is_right[step.request][place]:
            return output[place], self.probability
        return int(output[place] == 0), self.probability
