"""The exact comparison of two runs: what each prompt has drafted, read, accepted and emitted in
each step. Owns where it applies, and which difference is named first. Imports no torch.

In float32, on kernels that sum in a fixed order, unchanged code on one machine repeats every step,
so that any difference is one of the code (docs/statistics.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from magicdec.records.comparison.conditions import placement
from magicdec.records.record import RunRecord
from magicdec.records.samples import PassSamples

RENEW = "renew it with `magicdec gate save`"
# What of an environment the last bits depend on, with the words that name it.
OF_BITS = {
    "cpu": "CPU",
    "cpu_capability": "vector instructions of torch",
    "instructions": "instructions of the kernels",
    "compiler": "compiler",
    "torch": "torch",
    "system": "system",
}


@dataclass(frozen=True)
class StepLog:
    """What one step did for one prompt."""

    number: int  # of the step in its batch
    hashes: str | None  # of the drafted tokens, then of what was read; None: nothing was drafted
    num_read: int
    proposed: int
    accepted: int
    emitted: int

    def differences(self, before: StepLog) -> Iterator[str]:
        """What is not as it was, the cause before what follows from it."""
        half = len(self.hashes or "") // 2
        if (self.hashes is None) != (before.hashes is None):
            yield "nothing drafted, as it was" if self.hashes is None else "drafts, which had none"
        elif self.hashes is not None and before.hashes is not None:
            if self.num_read != before.num_read:
                yield f"its draft forwards read {self.num_read} keys, was {before.num_read}"
            elif self.hashes[half:] != before.hashes[half:]:
                yield f"its draft forwards read other positions ({self.num_read} keys, as before)"
            if self.hashes[:half] != before.hashes[:half]:
                yield "other tokens drafted"
        if self.proposed != before.proposed:
            yield f"{self.proposed} drafts proposed, was {before.proposed}"
        if (self.accepted, self.proposed) != (before.accepted, before.proposed):
            yield f"accepted {self.accepted} of {self.proposed}, was {before.accepted}"
        if self.emitted != before.emitted:
            yield f"emitted {self.emitted}, was {before.emitted}"


@dataclass(frozen=True)
class ExactChange:
    """The differences between two runs of the same prompts."""

    first: str  # such as `prompt 5, step 3: accepted 0 of 4, was 3`
    num_prompts: int  # those that differ

    def __str__(self) -> str:
        more = f"; {self.num_prompts} prompts differ" if self.num_prompts > 1 else ""
        return self.first + more


def why_not_exact(new: RunRecord, old: RunRecord) -> str | None:
    """Why two records of the same thing under the same conditions may differ although the code is
    the same; None if they may not."""
    config = new.config
    if config["model"]["dtype"] != "float32":
        return f"{config['model']['dtype']} rounds"
    if any(each.config["parallel"]["device"] != "cpu" for each in (new, old)):
        return "a GPU sums in any order"
    sections = [each.config[name] for each in (new, old) for name in ("model", "draft")]
    if any(each is not None and each.get("native_steps") != "on" for each in sections):
        return "not all layers are those of --native_steps, which sum in a fixed order"
    decoding = config["decoding"]
    if decoding["gamma"] == "auto" and decoding.get("step_cost") is None:
        return "the draft length follows from measured times"
    if not is_logged(old):
        return f"the baseline holds no log of what was drafted and read; {RENEW}"
    if not is_logged(new):
        return "the new record holds no log of what was drafted and read, as that of a gate's run"
    ours, theirs = ([*ranks_of(each)] for each in (new, old))
    if ours != theirs:
        return next(f"{a}, was {b}" for a, b in zip(ours, theirs, strict=True) if a != b)
    return other_machine(new, old)


def ranks_of(record: RunRecord) -> Iterator[str]:
    """What the order of sums between ranks follows from, in words."""
    yield placement(record)
    yield f"--collectives {record.config['parallel']['collectives']}"


def other_machine(new: RunRecord, old: RunRecord) -> str | None:
    """The first thing of the machine and its software from which other bits may follow."""
    for name, words in OF_BITS.items():
        ours = getattr(new.environment, name)
        theirs = getattr(old.environment, name)
        if isinstance(ours, list) and isinstance(theirs, list):
            more = listed(set(ours) - set(theirs))
            fewer = listed(set(theirs) - set(ours))
            both = [f"with {more}"] * bool(more) + [f"without {fewer}"] * bool(fewer)
            if both:
                return f"{words} are {' and '.join(both)} now"
        elif ours != theirs:
            return f"{words} {ours}, was {theirs}"
    return None


def listed(names: set[str], most: int = 3) -> str:
    """The first of these names, and how many more there are; empty without any."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(sorted(names)[:most]) + more


def is_logged(record: RunRecord) -> bool:
    """Whether it says of each step what was drafted and read."""
    samples = (record.samples or {}).get(record.config["decoding"]["strategy"])
    return samples is not None and samples.draft_hashes is not None


def find_change(new: PassSamples, old: PassSamples) -> ExactChange | None:
    """The differences between two passes over the same prompts; None if there are none. That tokens
    were others is said where nothing else is."""
    found = 0
    first = None
    pairs = zip(steps_by_prompt(new), steps_by_prompt(old), strict=True)
    for prompt, (ours, theirs) in enumerate(pairs):
        change = first_step(ours, theirs)
        if change is None and new.output_hashes[prompt] != old.output_hashes[prompt]:
            change = "emitted other tokens"
        if change is not None:
            found += 1
            first = first or f"prompt {prompt}, {change}"
    if first is not None:
        return ExactChange(first, found)
    for name in ("draft_kv_tokens", "draft_rows"):
        if getattr(new, name) != getattr(old, name):
            words = f"the draft forwards of all steps: {name} {getattr(new, name)}"
            return ExactChange(f"{words}, was {getattr(old, name)}", 0)
    return None


def first_step(ours: list[StepLog], theirs: list[StepLog]) -> str | None:
    """The first step of a prompt that is not as it was, with all that differs in it."""
    for now, before in zip(ours, theirs, strict=False):
        if now != before:
            return f"step {now.number}: {', '.join(now.differences(before))}"
    if len(ours) != len(theirs):
        return f"{len(ours)} steps, was {len(theirs)}"
    return None


def steps_by_prompt(samples: PassSamples) -> list[list[StepLog]]:
    """The steps of each prompt. A row has a part in a step until it has emitted all its tokens."""
    prompts = list[list[StepLog]]()
    for batch, lengths in enumerate(samples.sequence_tokens):
        left = list(lengths)
        logs = [list[StepLog]() for _ in lengths]
        for step, emitted in enumerate(samples.num_emitted[batch]):
            running = [i for i, tokens in enumerate(left) if tokens > 0]
            rows = zip(running, emitted, strict=False)
            for row, (i, tokens) in enumerate(rows):
                left[i] -= tokens
                logs[i].append(step_of(samples, batch, step, row, tokens))
        prompts += logs
    return prompts


def step_of(samples: PassSamples, batch: int, step: int, row: int, emitted: int) -> StepLog:
    accepted = samples.num_accepted[batch][step]
    if row >= len(accepted):  # nothing was drafted
        return StepLog(step, None, 0, 0, 0, emitted)
    assert samples.draft_hashes is not None and samples.draft_keys is not None, "a log is there"
    return StepLog(
        step,
        samples.draft_hashes[batch][step][row],
        samples.draft_keys[batch][step][row],
        samples.num_drafted[batch][step][row],
        accepted[row],
        emitted,
    )
