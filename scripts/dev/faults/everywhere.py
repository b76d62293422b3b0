"""Of acceptance at every position, counted and by probabilities."""

from __future__ import annotations

from faults.fault import Fault, Property

VERIFICATION = "test_verification.py::"
COMMAND = "test_acceptance_command.py::"
SAMPLED = "test_sampled_acceptance.py::"
RECORD = "bench/acceptance/record.py"

PROPERTIES = (
    Property(
        "The probability of acceptance has the mean of what is accepted, and its first value is "
        "that of every draft.",
        f"{VERIFICATION}test_the_probability_of_acceptance_is_unbiased_over_drafts_from_q[0]",
        (
            Fault(
                "accepted drafts taken for drawn ones",
                "runner/sampling/verification.py",
                "ratio[:, :-1].cumprod(dim=1)",
                "overlap[:, :-1].cumprod(dim=1)",
            ),
            Fault(
                "the probability of the draft that was drawn",
                "runner/sampling/verification.py",
                "    return before * overlap\n",
                "    return before * ratio\n",
            ),
        ),
    ),
    Property(
        "Padding is never accepted.",
        f"{VERIFICATION}test_the_probability_of_acceptance_by_its_definition",
        (
            Fault(
                "padding counts with its overlap",
                "runner/sampling/verification.py",
                "        overlap = overlap * is_real\n",
                "",
            ),
        ),
    ),
    Property(
        "At a temperature a run accepts drafts with the probabilities of the table.",
        f"{SAMPLED}test_a_run_accepts_drafts_with_the_probabilities_of_the_table[model]",
        (
            Fault(
                "drawn drafts judged like lookups",
                "runner/sampling/model_tokens.py",
                "proposal.ids, proposal.probabilities, probs, proposal.counts_on_device",
                "proposal.ids, None, probs, proposal.counts_on_device",
            ),
            Fault(
                "a position has the probabilities of another row",
                "speculation/steps/speculative.py",
                "pairs = zip(in_rows, counts, strict=True)",
                "pairs = zip(reversed(in_rows), counts, strict=True)",
            ),
        ),
    ),
    Property(
        "Sampled texts are those of decoding without drafts.",
        f"{SAMPLED}test_sampled_texts_are_those_of_decoding_without_drafts",
        (
            Fault(
                "texts follow the drafts that were accepted",
                "runner/sampling/model_tokens.py",
                "ids = torch.cat([token.unsqueeze(1), target.ids[:, 1:]], dim=1)",
                "ids = target.ids",
            ),
        ),
    ),
    Property(
        "A category has the acceptance of its texts alone.",
        f"{COMMAND}test_a_category_has_the_acceptance_of_its_texts_alone",
        (
            Fault(
                "drafts of the first texts for those of a category",
                RECORD,
                "counts = [drafted[place] for place in places]",
                "counts = drafted[: len(places)]",
            ),
            Fault(
                "a category without a position",
                RECORD,
                "        if any(map(len, texts)):\n",
                "        if True:\n",
            ),
        ),
    ),
    Property(
        "Probabilities count as shares of positions.",
        f"{COMMAND}test_probabilities_count_as_shares_of_positions",
        (
            Fault(
                "a draft token judged where none was drafted",
                RECORD,
                "return np.where(is_drafted, before, 0.0)",
                "return before",
            ),
        ),
    ),
)
