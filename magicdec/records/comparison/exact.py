"""The exact comparison of two passes: what each prompt has drafted, read, accepted and emitted in
each step. Owns where it applies, and which difference is named first. Imports no torch.

In float32, on kernels that sum in a fixed order, unchanged code on one machine repeats every step,
so that any difference is one of the code (docs/results.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from magicdec.names import FULL_KV_POLICY
from magicdec.records.acceptance import Verifications
from magicdec.records.comparison.conditions import placement
from magicdec.records.drafted import DraftedPass, JudgedRecord, StepLog

BURST = "burst"  # the arrival of requests that all arrive at once
RENEW = "renew it with `magicdec gate save`"
# What of an environment the last bits depend on, with the words that name it.
BIT_CONDITIONS = {
    "cpu": "CPU",
    "cpu_capability": "vector instructions of torch",
    "instructions": "instructions of the kernels",
    "compiler": "compiler",
    "torch": "torch",
    "system": "system",
}


@dataclass(frozen=True)
class ExactChange:
    """The differences between two passes over the same prompts."""

    first: str  # such as `prompt 5, step 3: accepted 0 of 4, was 3`
    num_prompts: int  # those that differ

    def __str__(self) -> str:
        more = f"; {self.num_prompts} prompts differ" if self.num_prompts > 1 else ""
        return self.first + more


def why_not_exact(new: JudgedRecord, old: JudgedRecord) -> str | None:
    """Why two records of the same thing under the same conditions may differ although the code is
    the same; None if they may not."""
    config = new.config
    if config["model"]["dtype"] != "float32":
        return f"{config['model']['dtype']} rounds"
    if any(record.config["parallel"]["device"] != "cpu" for record in (new, old)):
        return "a GPU sums in any order"
    sections = [record.config.get(name) for record in (new, old) for name in ("model", "draft")]
    if any(section is not None and section.get("native_steps") != "on" for section in sections):
        return "not all layers are those of --native_steps, which sum in a fixed order"
    decoding = config["decoding"]
    if decoding["gamma"] == "auto" and decoding.get("step_cost") is None:
        return "the draft length follows from measured times"
    if (why := why_other_drafts(new, old)) is not None:
        return why
    if not old.is_logged:
        return f"the baseline holds no log of what was drafted and read; {RENEW}"
    if not new.is_logged:
        return "the new record holds no log of what was drafted and read, as one of the gate does"
    ours, theirs = ([*ranks_of(record)] for record in (new, old))
    if ours != theirs:
        return next(f"{a}, was {b}" for a, b in zip(ours, theirs, strict=True) if a != b)
    return other_machine(new, old)


def why_other_drafts(new: JudgedRecord, old: JudgedRecord) -> str | None:
    """Why unchanged code may draft other tokens in either of two passes of the same thing; None if
    only rounding decides."""
    if are_judged_by_time(new) or are_judged_by_time(old):
        if not drafts_by_text(new):
            return "which drafts are made and judged follows from measured times"
        if not all(map(has_places, (new, old))):
            return "a record does not say where its drafts were; renew it"
    if not new.shares_prefill and new.config["workload"].get("arrival") != BURST:
        return "requests join at measured times"
    return None


def are_judged_by_time(record: JudgedRecord) -> bool:
    """Whether times decide which drafts are judged, so that only drafts at the same place of the
    same text can be compared: where they run ahead of the newest token, and say where they are."""
    return any(verification.position is not None for verification in record.verifications().every)


def has_places(record: JudgedRecord) -> bool:
    """Whether it says of all drafts where they were."""
    return all(verification.position is not None for verification in record.verifications().every)


def are_compared_by_place(new: JudgedRecord, old: JudgedRecord) -> bool:
    """Whether times decide which drafts of two records are judged, and a draft at a place of the
    text is the same in both."""
    by_time = are_judged_by_time(new) or are_judged_by_time(old)
    return by_time and drafts_by_text(new) and all(map(has_places, (new, old)))


def drafts_by_text(record: JudgedRecord) -> bool:
    """Whether a draft follows from the text before it alone, committed or not: a model that reads
    all of it does so, and lookups know only what is committed."""
    kv = record.config.get("kv") or {}
    return (record.config["decoding"]["drafter"], kv.get("policy")) == ("model", FULL_KV_POLICY)


def ranks_of(record: JudgedRecord) -> Iterator[str]:
    """What the order of sums between ranks follows from, in words."""
    yield placement(record)
    yield f"--collectives {record.config['parallel']['collectives']}"


def other_machine(new: JudgedRecord, old: JudgedRecord) -> str | None:
    """The first thing of the machine and its software from which other bits may follow."""
    for name, words in BIT_CONDITIONS.items():
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
    return other_kernels(new.environment.kernels, old.environment.kernels)


def other_kernels(new: dict[str, str] | None, old: dict[str, str] | None) -> str | None:
    """Whether other machine code computed, of the kernels that both processes had loaded: those of
    a run are among them."""
    if new is None or old is None:
        which = "baseline" if old is None else "new record"
        return f"the {which} does not say which kernels computed it; {RENEW}"
    changed = {name for name in new.keys() & old.keys() if new[name] != old[name]}
    return f"kernels have changed since: {listed(changed)}" if changed else None


def listed(names: set[str], most: int = 3) -> str:
    """The first of these names, and how many more there are; empty without any."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(sorted(names)[:most]) + more


def find_change(new: DraftedPass, old: DraftedPass) -> ExactChange | None:
    """The differences between two passes over the same prompts; None if there are none. That tokens
    were others is said where nothing else is."""
    assert new.steps is not None and old.steps is not None, "both are logged"
    found = 0
    first = None
    for prompt, (ours, theirs) in enumerate(zip(new.steps, old.steps, strict=True)):
        change = first_step(ours, theirs)
        if change is None and new.output_hashes[prompt] != old.output_hashes[prompt]:
            change = "emitted other tokens"
        if change is not None:
            found += 1
            first = first or f"prompt {prompt}, {change}"
    if first is not None:
        return ExactChange(first, found)
    for name, value in new.totals.items():
        if name in old.totals and value != old.totals[name]:
            words = f"the draft forwards of all steps: {name} {value}"
            return ExactChange(f"{words}, was {old.totals[name]}", 0)
    return None


def find_other_verdict(new: DraftedPass, old: DraftedPass) -> tuple[ExactChange | None, int]:
    """The differences between two passes over the same prompts in which times decide which drafts
    are judged, and how many places of the texts have a judged draft in both: a draft there follows
    from the text before it alone."""
    found = 0
    first = None
    both = [judged_in_both(new, old, prompt) for prompt in range(new.num_prompts)]
    for prompt, (ours, theirs) in enumerate(both):
        hashes = new.output_hashes[prompt], old.output_hashes[prompt]
        change = "emitted other tokens" if hashes[0] != hashes[1] else None
        wrong = next((place for place in ours if ours[place] != theirs[place]), None)
        if change is None and wrong is not None:
            words = "accepted, was rejected" if ours[wrong] else "rejected, was accepted"
            change = f"position {wrong}: the draft is {words}"
        if change is not None:
            found += 1
            first = first or f"prompt {prompt}, {change}"
    num_places = sum(len(ours) for ours, _ in both)
    return (None if first is None else ExactChange(first, found)), num_places


def judged_in_both(
    new: DraftedPass, old: DraftedPass, prompt: int
) -> tuple[dict[int, bool], dict[int, bool]]:
    """By place of the text, in their order, whether the draft there was right in either pass."""
    ours = new.verdicts(prompt)
    theirs = old.verdicts(prompt)
    places = sorted(ours.keys() & theirs.keys())
    return {place: ours[place] for place in places}, {place: theirs[place] for place in places}


def at_the_same_places(new: DraftedPass, old: DraftedPass) -> tuple[DraftedPass, DraftedPass]:
    """The passes with the drafts alone that were judged in both, each as a verification of one."""
    found = Verifications(), Verifications()
    for prompt in range(new.num_prompts):
        for verifications, verdicts in zip(found, judged_in_both(new, old, prompt), strict=True):
            for place, is_right in verdicts.items():
                verifications.add(prompt, 1, int(is_right), 1, position=place)
    return replace(new, verifications=found[0]), replace(old, verifications=found[1])


def first_step(ours: Sequence[StepLog], theirs: Sequence[StepLog]) -> str | None:
    """The first step of a prompt that is not as it was, with all that differs in it."""
    for now, before in zip(ours, theirs, strict=False):
        if now != before:
            return f"step {now.number}: {', '.join(now.differences(before))}"
    if len(ours) != len(theirs):
        return f"{len(ours)} steps, was {len(theirs)}"
    return None
