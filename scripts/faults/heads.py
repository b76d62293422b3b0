"""Of EAGLE-3 heads, of acceptance by chance, and of what drafting must bring to pay."""

from __future__ import annotations

from faults.fault import Fault, Property

DRAFTER = "speculation/eagle.py"

PROPERTIES = (
    Property(
        "Drafts of a head are those of its definition.",
        "test_eagle.py::test_drafts_equal_the_definition[a norm for each state-layers]",
        (
            Fault("a head's tokens are not the following ones", DRAFTER,
                  "following = self.states.ids_at(rows.index, positions + 1)",
                  "following = self.states.ids_at(rows.index, positions)"),
            Fault("drafts from slots of drafts", DRAFTER,
                  "        filled = lengths.plus(-shape.pending)",
                  "        filled = lengths.plus(-min(1, shape.pending))"),
            Fault("states before a layer's residual", "model/transformer.py",
                  "keep(layer, x if y is None else x + y)", "keep(layer, x)"),
            Fault("output fed back without its norm", "model/eagle.py",
                  "return logits, normed if self.norm_output else output",
                  "return logits, output"),
        ),
    ),
    Property(
        "Emulated acceptance has the rates that were asked for.",
        "test_emulated_acceptance.py::test_drafts_are_accepted_as_often_as_asked_for[self-0.0]",
        (
            Fault("rates of all drafts before, taken for those of one", "config/sections.py",
                  "return tuple(p / q if q > 0 else 0.0 for p, q in zip(padded, before, "
                  "strict=False))",
                  "return padded"),
            Fault("the target's verdict beside chance", "speculation/steps/steps.py",
                  "        if self.emulated is not None and proposal.ids.shape[1] > 0:",
                  "        if self.emulated is not None and proposal.ids.shape[1] > 9:"),
        ),
    ),
    Property(
        "Drafts of a policy that chooses anew begin with a choice.",
        "test_latency.py::test_drafting_pays_from_the_time_of_a_step_by_that_of_a_decode_step",
        (
            Fault("drafts without their choice", "bench/latency/record.py",
                  "of_drafts = first_ms.get(draft, ms) + (gamma - 1) * ms",
                  "of_drafts = gamma * ms"),
            Fault("verifications that are not watched", "bench/latency/record.py",
                  "policy = draft[0] if draft in first_ms else None",
                  "policy = None"),
        ),
    ),
)  # fmt: skip
