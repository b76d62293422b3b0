"""Of plans with acceptance by context, and of golden files."""

from __future__ import annotations

from faults.fault import Fault, Property

TESTS = "test_acceptance_by_context.py::"
LENGTHS = "predict/lengths.py"
SPECULATION = "predict/speculation.py"
SELECTION = "bench/acceptance/selection.py"

PROPERTIES = (
    Property(
        "A context of a plan has its own acceptance, and the interval of its texts.",
        f"{TESTS}test_each_context_has_its_own_speedup_with_its_interval",
        (
            Fault(
                "the acceptance of one context at every one",
                SPECULATION,
                "expected_tokens(self.acceptance, gamma, S)",
                "expected_tokens(self.acceptance, gamma, 1024)",
            ),
            Fault(
                "an interval of tokens a step for one of speedups",
                SPECULATION,
                "per_token = step.speedup / step.tokens_per_step",
                "per_token = 1.0",
            ),
            Fault(
                "an interval of all texts with a text left out of none",
                LENGTHS,
                "return interval(np.array(self.estimates(context, gamma)), 1, 1 + gamma)",
                "return interval(np.array(self.estimates(context, gamma))[:2], 1, 1 + gamma)",
            ),
        ),
    ),
    Property(
        "Between contexts acceptance is linear in the logarithm, of the same texts.",
        f"{TESTS}test_between_contexts_lengths_are_linear_in_the_logarithm",
        (
            Fault(
                "acceptance that is linear in the context",
                LENGTHS,
                "math.log2(context / low) / math.log2(high / low)",
                "(context - low) / (high - low)",
            ),
            Fault(
                "texts of one context beside fewer of another",
                LENGTHS,
                "len(below) if len(below) == len(above) else 1",
                "min(len(below), len(above))",
            ),
        ),
    ),
    Property(
        "A plan says what the acceptance of its shortest context alone would predict.",
        f"{TESTS}test_the_record_and_the_tables_have_it",
        (
            Fault(
                "a flat prediction that knows every context",
                "predict/plan.py",
                "{budget: held(curve) for",
                "{budget: curve for",
            ),
        ),
    ),
    Property(
        "A golden file has the lengths of the records, at every context.",
        f"{TESTS}test_a_golden_file_has_the_lengths_of_every_context",
        (
            Fault(
                "golden lengths of two digits",
                "bench/export/golden.py",
                "{gamma: estimates[0] for",
                "{gamma: round(estimates[0], 2) for",
            ),
        ),
    ),
    Property(
        "Of several records of a context the one with most drafts and positions counts.",
        f"{TESTS}test_of_several_cells_of_a_context_the_one_with_most_drafts_counts",
        (
            Fault(
                "the newest record of a context, however few its drafts",
                SELECTION,
                "_weight(record) >= _weight(old)",
                "record.num_positions >= old.num_positions",
            ),
        ),
    ),
)
