"""Of the verdict on a run."""

from __future__ import annotations

from faults.fault import Fault, Property

VERDICT = "test_verdict.py::"
MODES = "test_verdict_of_modes.py::"

PROPERTIES = (
    Property(
        "A step that is judged again is judged by its logits alone, without tolerance.",
        f"{VERDICT}test_a_step_is_judged_by_its_logits_alone",
        (
            Fault(
                "the step's own decision believed",
                "bench/verdict/judgement.py",
                "is_right = decided == walk.tokens and got == should",
                "is_right = got == should",
            ),
            Fault(
                "what a request has got not looked at",
                "bench/verdict/judgement.py",
                "is_right = decided == walk.tokens and got == should",
                "is_right = decided == walk.tokens",
            ),
            Fault(
                "padding judged as drafts",
                "bench/verdict/judgement.py",
                "count = step.counts[row]",
                "count = step.drafts.shape[1]",
            ),
            Fault(
                "steps judged wrong not counted",
                "bench/verdict/judgement.py",
                "            wrong += first_wrong(step, walk)\n",
                "",
            ),
        ),
    ),
    Property(
        "A request ends where its end tokens and its length say.",
        f"{VERDICT}test_a_request_ends_where_its_end_tokens_and_its_length_say",
        (
            Fault(
                "tokens after the end not seen",
                "bench/verdict/judgement.py",
                "if ended == [len(output)]:",
                "if len(output) in ended:",
            ),
        ),
    ),
    Property(
        "Logits of two passes are compared after the same text alone.",
        f"{VERDICT}test_logits_are_compared_after_the_same_text_alone",
        (
            Fault(
                "logits compared after other texts",
                "bench/verdict/forwards.py",
                "            if expected != found:\n                break\n",
                "",
            ),
            Fault(
                "logits taken for those of the next token",
                "bench/verdict/forwards.py",
                "of_request[first + count - 1] =",
                "of_request[first + count] =",
            ),
        ),
    ),
    Property(
        "Honest forwards exceed the limits of the verdict in one of a thousand runs.",
        f"{VERDICT}test_honest_forwards_exceed_the_limits_once_in_a_thousand_runs",
        (
            Fault(
                "limits of the errors without chance",
                "bench/verdict/forwards.py",
                "math.log(allowed) + quantile(freedom, 1 - 2 * EACH) * error",
                "math.log(allowed)",
            ),
            Fault(
                "the largest of many ratios judged like one",
                "bench/verdict/forwards.py",
                "quantile(TAIL_FREEDOM, 1 - 2 * EACH / len(ratios))",
                "quantile(TAIL_FREEDOM, 0.98)",
            ),
            Fault(
                "half of the changes expected",
                "bench/verdict/forwards.py",
                "return torch.maximum(measured, normal).tolist()",
                "return torch.maximum(measured / 2, normal / 2).tolist()",
            ),
        ),
    ),
    Property(
        "Errors as large as the verdict says would have been seen.",
        f"{VERDICT}test_errors_as_large_as_the_verdict_says_would_have_been_seen",
        (
            Fault(
                "what could hide without the chance to miss it",
                "bench/verdict/forwards.py",
                "return limit, limit + quantile(freedom, 2 * SEEN - 1) * error",
                "return limit, math.log(allowed)",
            ),
        ),
    ),
    Property(
        "A run with one wrong step, or whose errors give an alarm, has diverged.",
        f"{VERDICT}test_a_part_of_the_verdict_that_is_bad_makes_the_run_diverge",
        (
            Fault(
                "wrong steps forgiven",
                "records/correctness.py",
                "if self.has_wrong_steps:\n            return False",
                "if False:\n            return False",
            ),
            Fault(
                "alarms forgiven",
                "records/correctness.py",
                "return is_same and not has_alarms",
                "return is_same",
            ),
        ),
    ),
    Property(
        "Outputs are replayed in the steps of the mode that is judged, and in no others.",
        f"{MODES}test_outputs_are_replayed_in_steps_of_any_size",
        (
            Fault(
                "a step of one token for each of several",
                "bench/verdict/forced.py",
                "min(self.num_tokens, len(text) - before)",
                "min(1, len(text) - before)",
            ),
            Fault(
                "the token after the one that a logit follows",
                "bench/verdict/forced.py",
                "text[before - 1 : before - 1 + self.num_tokens]",
                "text[before : before + self.num_tokens]",
            ),
            Fault(
                "the two best tokens of each shape",
                "bench/verdict/forced.py",
                "if self.pairs is None:",
                "if self.pairs is None or self.num_tokens > 3:",
            ),
        ),
    ),
    Property(
        "A mode of `serve` whose steps are wrong has diverged, if its tokens are right too.",
        f"{MODES}test_a_lone_mode_with_wrong_steps_diverges",
        (
            Fault(
                "no witness in serve",
                "systems/batching.py",
                "witness.is_watching = observer.is_measured",
                "witness.is_watching = False",
            ),
            Fault(
                "wrong steps of a mode without effect",
                "bench/serving/record.py",
                """    if correctness.has_wrong_steps:
        return "diverged"
""",
                "",
            ),
        ),
    ),
    Property(
        "Modes with stages are judged by an engine whose layers as many ranks share.",
        f"{MODES}test_stages_are_judged_by_the_engine_if_a_mode_is_one",
        (
            Fault(
                "any engine for the stages of a pipeline",
                "bench/serving/verdict.py",
                "isinstance(other, Batching) and other.ranks_of_layer == system.ranks_of_layer",
                "isinstance(other, Batching)",
            ),
        ),
    ),
)
