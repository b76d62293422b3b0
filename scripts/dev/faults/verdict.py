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
                "bench/check/judgement.py",
                "is_right = decided == walk.tokens and got == should",
                "is_right = got == should",
            ),
            Fault(
                "what a request has got not looked at",
                "bench/check/judgement.py",
                "is_right = decided == walk.tokens and got == should",
                "is_right = decided == walk.tokens",
            ),
            Fault(
                "padding judged as drafts",
                "bench/check/judgement.py",
                "count = step.counts[row]",
                "count = step.drafts.shape[1]",
            ),
            Fault(
                "steps judged wrong not counted",
                "bench/check/judgement.py",
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
                "bench/check/judgement.py",
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
                "bench/check/forwards.py",
                "            if expected != found:\n                break\n",
                "",
            ),
            Fault(
                "logits taken for those of the next token",
                "bench/check/forwards.py",
                "request_logits[first + count - 1] =",
                "request_logits[first + count] =",
            ),
            Fault(
                "logits compared after other prompts",
                "bench/check/forwards.py",
                "if one.prompt_ids != two.prompt_ids:",
                "if False:",
            ),
        ),
    ),
    Property(
        "What kernels may differ by is that of the dtype, and a fault beyond it fires.",
        f"{VERDICT}test_errors_beyond_what_is_allowed_fire",
        (
            Fault(
                "three times as much in bfloat16",
                "bench/check/forwards.py",
                '"bfloat16": 1.25}',
                '"bfloat16": 3.0}',
            ),
            Fault(
                "ten times as much in float32",
                "bench/check/forwards.py",
                '{"float32": 3.0,',
                '{"float32": 30.0,',
            ),
        ),
    ),
    Property(
        "The limits of errors and what could hide are those by hand.",
        f"{VERDICT}test_limits_and_what_could_hide_by_hand",
        (
            Fault(
                "errors that add up without squares",
                "bench/check/forwards.py",
                "math.sqrt(math.expm1(2 * seen))",
                "math.expm1(seen)",
            ),
            Fault(
                "blocks of two positions",
                "bench/check/forwards.py",
                "BLOCK = 8 ",
                "BLOCK = 2 ",
            ),
            Fault(
                "one alarm in a thousand for each limit",
                "bench/check/forwards.py",
                "TEST_ALARM = ALARM / 3",
                "TEST_ALARM = ALARM",
            ),
            Fault(
                "the largest of normal errors",
                "bench/check/forwards.py",
                "TAIL_FREEDOM = 8\n",
                "TAIL_FREEDOM = 800\n",
            ),
        ),
    ),
    Property(
        "How many largest logits rounding changes follows from known gaps.",
        f"{VERDICT}test_changes_that_rounding_makes_by_hand",
        (
            Fault(
                "moves to either side change a token",
                "bench/check/rounding.py",
                "(larger + as_large) / (4 * len(moves))",
                "(larger + as_large) / (2 * len(moves))",
            ),
            Fault(
                "the chance of all limits for one",
                "bench/check/forwards.py",
                "most_by_chance(chances, 1 - TEST_ALARM)",
                "most_by_chance(chances, 1 - ALARM)",
            ),
        ),
    ),
    Property(
        "The bound of margins follows from known gaps, and a token beyond it has diverged.",
        "test_check.py::test_the_bound_of_margins_by_hand",
        (
            Fault(
                "a wider tail",
                "bench/check/rounding.py",
                "TAIL = 5.0 ",
                "TAIL = 6.0 ",
            ),
            Fault(
                "errors at half of the positions",
                "bench/check/rounding.py",
                "true.abs().quantile(0.25)",
                "true.abs().quantile(0.5)",
            ),
            Fault(
                "the shape with the larger errors",
                "bench/check/rounding.py",
                "return TAIL * min((gap",
                "return TAIL * max((gap",
            ),
            Fault(
                "a margin up to twice the bound",
                "bench/check/check.py",
                "if not value <= bound]",
                "if not value <= 2 * bound]",
            ),
        ),
    ),
    Property(
        "A model is computed as transformers computes it up to the rounding of float32.",
        "test_model_check.py::test_what_rounding_explains_by_hand",
        (
            Fault(
                "a larger tolerance",
                "bench/model_check.py",
                "TOLERANCE = 2e-4",
                "TOLERANCE = 3e-4",
            ),
            Fault(
                "the largest logit without those below 0",
                "bench/model_check.py",
                "float(expected.logits.abs().max())",
                "float(expected.logits.max())",
            ),
        ),
    ),
    Property(
        "Honest forwards exceed the limits of the verdict in one of a thousand runs.",
        f"{VERDICT}test_honest_forwards_exceed_the_limits_once_in_a_thousand_runs",
        (
            Fault(
                "limits of the errors without chance",
                "bench/check/forwards.py",
                "math.log(allowed) + quantile(freedom, 1 - 2 * TEST_ALARM) * error",
                "math.log(allowed)",
            ),
            Fault(
                "the largest of many ratios judged like one",
                "bench/check/forwards.py",
                "quantile(TAIL_FREEDOM, 1 - 2 * TEST_ALARM / len(ratios))",
                "quantile(TAIL_FREEDOM, 0.98)",
            ),
            Fault(
                "half of the changes expected",
                "bench/check/forwards.py",
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
                "bench/check/forwards.py",
                "return limit, limit + quantile(freedom, 2 * SEEN - 1) * error",
                "return limit, math.log(allowed)",
            ),
        ),
    ),
    Property(
        "A pass with one wrong step, or whose errors give an alarm, is a mismatch.",
        f"{VERDICT}test_a_part_of_the_check_that_is_bad_makes_the_pass_a_mismatch",
        (
            Fault(
                "wrong steps forgiven",
                "bench/recording.py",
                "correctness.has_wrong_steps or correctness.has_alarms",
                "correctness.has_alarms",
            ),
            Fault(
                "alarms forgiven",
                "bench/recording.py",
                "correctness.has_wrong_steps or correctness.has_alarms",
                "correctness.has_wrong_steps",
            ),
        ),
    ),
    Property(
        "Outputs are replayed in the steps of the mode that is judged, and in no others.",
        f"{MODES}test_outputs_are_replayed_in_steps_of_any_size",
        (
            Fault(
                "a step of one token for each of several",
                "bench/check/forced.py",
                "min(self.num_tokens, len(text) - before)",
                "min(1, len(text) - before)",
            ),
            Fault(
                "the token after the one that a logit follows",
                "bench/check/forced.py",
                "text[before - 1 : before - 1 + self.num_tokens]",
                "text[before : before + self.num_tokens]",
            ),
            Fault(
                "the two best tokens of each shape",
                "bench/check/forced.py",
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
                "no recorder in serve",
                "systems/flover/system.py",
                "recorder.is_watching = observer.is_measured",
                "recorder.is_watching = False",
            ),
            Fault(
                "wrong steps of a mode without effect",
                "bench/recording.py",
                "if correctness.has_wrong_steps or correctness.has_alarms:",
                "if correctness.has_alarms:",
            ),
        ),
    ),
    Property(
        "Errors of the logits of a mode beyond rounding make it diverge.",
        f"{MODES}test_a_fault_in_verifications_is_seen[float32-noise 0.01]",
        (
            Fault(
                "forwards of modes are not compared",
                "bench/check/passes.py",
                "forwards = means.forwards(reference, output)",
                "forwards = None",
            ),
            Fault(
                "a mode compared with itself",
                "bench/check/replays.py",
                "pair = (first, reference.requests), (second, output.requests)",
                "pair = (second, output.requests), (second, output.requests)",
            ),
        ),
    ),
    Property(
        "Errors make a mode diverge where no token differs.",
        f"{MODES}test_errors_alone_make_a_mode_diverge",
        (
            Fault(
                "errors of a mode without effect",
                "bench/recording.py",
                "if correctness.has_wrong_steps or correctness.has_alarms:",
                "if correctness.has_wrong_steps:",
            ),
        ),
    ),
    Property(
        "A mode is measured in as many rows as the cache holds, on its own prompts.",
        f"{MODES}test_few_rows_take_turns_in_the_cache",
        (
            Fault(
                "prompts of other rows",
                "bench/check/replays.py",
                "    return rows_of(texts)\n",
                "    return rows_of(texts)[::-1]\n",
            ),
            Fault(
                "a group of rows that is left out",
                "bench/check/forwards.py",
                "range(0, len(places), room)",
                "range(0, room, room)",
            ),
            Fault(
                "the runner of a system kept behind its end",
                "systems/flover/system.py",
                "self.runner = self.draft = self.models = self.captured = None",
                "self.past = self.runner\n        self.runner = self.draft = self.models = None",
            ),
        ),
    ),
    Property(
        "Modes with stages are judged by an engine whose layers as many ranks share.",
        f"{MODES}test_stages_are_judged_by_the_engine_if_a_mode_is_one",
        (
            Fault(
                "any engine for the stages of a pipeline",
                "bench/check/replays.py",
                " and other.ranks_of_layer == system.ranks_of_layer:",
                ":",
            ),
        ),
    ),
)
