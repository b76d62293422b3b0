"""Of the gate's coverage, and of the threads that passes compute with."""

from __future__ import annotations

from faults.fault import Fault, Property

COVERAGE = "test_gate_coverage.py::"
THREADS = "test_pass_threads.py::"
EXACT = "test_gate_exact.py::"
RULE = "test_gate_rule.py::"
POSITIONS = "test_gate_positions.py::"
CASES = "test_gate_cases.py::"
LOG = "test_draft_log.py::"

PROPERTIES = (
    Property(
        "A case of the gate without a result of its own fails with its name.",
        f"{COVERAGE}test_a_case_without_a_result_of_its_own_fails_with_its_name",
        (
            Fault(
                "a case without a record passes",
                "cli/gate.py",
                "        if isinstance(result, str)\n    ]",
                "        if False\n    ]",
            ),
        ),
    ),
    Property(
        "--quick has a case of every drafter and policy.",
        f"{COVERAGE}test_quick_has_a_case_of_every_drafter_and_policy_of_the_file",
        (
            Fault(
                "kinds without a case pass",
                "bench/gate/cases.py",
                "for alike in kinds.values()]",
                "for alike in [*kinds.values()][1:]]",
            ),
        ),
    ),
    Property(
        "A worker gives a result of each of its cases.",
        f"{COVERAGE}test_a_worker_gives_a_result_of_each_case_that_ends_with_any_error",
        (
            Fault(
                "an unexpected error ends the worker",
                "bench/gate/measuring.py",
                "except Exception as error:  # such as",
                "except KeyError as error:  # such as",
            ),
        ),
    ),
    Property(
        "Where runs repeat exactly, any difference fails the gate, gain or loss.",
        f"{EXACT}test_any_difference_is_named_and_fails_gain_or_loss",
        (
            Fault(
                "a change passes",
                "records/comparison/compare.py",
                "EXIT_CODES = {REGRESSION: 1, CHANGED: 1, ",
                "EXIT_CODES = {REGRESSION: 1, ",
            ),
            Fault(
                "other positions are not named",
                "records/drafted.py",
                "elif self.hashes[half:] != before.hashes[half:]:",
                "elif False:",
            ),
            Fault(
                "accepted drafts are not named",
                "records/drafted.py",
                "if (self.accepted, self.proposed) != (before.accepted, before.proposed):",
                "if self.proposed != before.proposed:",
            ),
            Fault(
                "other outputs pass",
                "records/comparison/exact.py",
                "new.output_hashes[prompt] != old.output_hashes[prompt]",
                "False",
            ),
            Fault(
                "what kernels counted is not compared",
                "records/comparison/exact.py",
                "for name, value in new.totals.items():",
                "for name, value in ():",
            ),
        ),
    ),
    Property(
        "Statistics compare drafts that run ahead by the places that were judged in both passes.",
        f"{EXACT}test_drafts_that_run_ahead_are_judged_by_their_places_on_another_machine",
        (
            Fault(
                "all drafts of both passes count",
                "records/comparison/compare.py",
                "pair = pair_of(*at_the_same_places(m.after, m.before))",
                "pair = m.pair",
            ),
        ),
    ),
    Property(
        "Drafts that run ahead are compared at the places that were judged in both passes.",
        f"{EXACT}test_drafts_that_run_ahead_are_compared_by_their_place",
        (
            Fault(
                "verdicts are not compared",
                "records/comparison/exact.py",
                "if ours[place] != theirs[place]",
                "if False",
            ),
            Fault(
                "outputs are not compared",
                "records/comparison/exact.py",
                "if hashes[0] != hashes[1] else None",
                "if False else None",
            ),
            Fault(
                "what follows a rejected draft is judged",
                "records/drafted.py",
                "found[verification.position + verification.accepted] = False",
                "found |= dict.fromkeys(range(verification.position + verification.accepted, "
                "verification.position + verification.drafted), False)",
            ),
        ),
    ),
    Property(
        "Of drafts at every position any difference is named.",
        f"{POSITIONS}test_any_change_of_a_position_is_named_and_fails",
        (
            Fault(
                "positions without drafts are left out",
                "bench/acceptance/record.py",
                "[Verification(*pair, emitted=1) for pair in pairs]",
                "[Verification(*pair, emitted=1) for pair in pairs if pair[0]]",
            ),
            Fault(
                "the texts are not compared one by one",
                "bench/acceptance/record.py",
                "return self.text_hashes or [",
                "return [",
            ),
        ),
    ),
    Property(
        "Sampled texts are no baseline, and are not left out in silence.",
        f"{POSITIONS}test_sampled_texts_are_refused_as_baselines_in_one_line",
        (
            Fault(
                "they are left out",
                "bench/gate/cases.py",
                "elif record.mode == EVERY_POSITION:",
                "elif False:",
            ),
        ),
    ),
    Property(
        "Drafts at every position have a prefill of their own.",
        f"{CASES}test_drafts_that_follow_from_the_text_are_cases_at_every_position",
        (
            Fault(
                "they are taken to share that of passes",
                "bench/gate/measuring.py",
                "own = case.load, case.is_at_every_position",
                "own = case.load, None",
            ),
        ),
    ),
    Property(
        "Passes of other loads are not compared.",
        f"{EXACT}test_passes_that_stop_chains_elsewhere_are_not_compared",
        (
            Fault(
                "loads are not compared",
                "records/comparison/conditions.py",
                "*load_of(record).items(),",
                "",
            ),
        ),
    ),
    Property(
        "Drafts that run ahead without their places fall under statistics.",
        f"{EXACT}test_drafts_that_run_ahead_without_their_places_fall_under_statistics",
        (
            Fault(
                "only the new pass is asked whether drafts run ahead",
                "records/comparison/exact.py",
                "if are_judged_by_time(new) or are_judged_by_time(old):",
                "if are_judged_by_time(new):",
            ),
        ),
    ),
    Property(
        "Of a run the pass that drafts gets a verdict, and what was served without the gate none.",
        f"{RULE}test_what_drafts_in_a_run_is_judged_and_what_was_served_is_shown",
        (
            Fault(
                "passes without drafts are judged",
                "records/pass_record.py",
                "(self.shares_prefill and self.is_drafting)",
                "self.shares_prefill",
            ),
            Fault(
                "served passes are judged",
                "records/pass_record.py",
                "(self.shares_prefill and self.is_drafting)",
                "self.is_drafting",
            ),
        ),
    ),
    Property(
        "Where bits may differ, statistics decide, and the line says why.",
        f"{EXACT}test_statistics_decide_where_bits_may_differ_and_the_line_says_why",
        (
            Fault(
                "instructions of the kernels are not compared",
                "records/comparison/exact.py",
                '    "instructions": "instructions of the kernels",\n',
                "",
            ),
            Fault(
                "changed kernels are taken for the same",
                "records/comparison/exact.py",
                "if new[name] != old[name]",
                "if False",
            ),
            Fault(
                "layer by layer is taken for exact",
                "records/comparison/exact.py",
                'section.get("native_steps") != "on"',
                'section.get("native_steps") is None',
            ),
            Fault(
                "measured draft lengths are taken for exact",
                "records/comparison/exact.py",
                'and decoding.get("step_cost") is None',
                "and False",
            ),
        ),
    ),
    Property(
        "A baseline that was edited is refused with its line.",
        f"{EXACT}test_an_edited_baseline_is_refused_with_its_line",
        (
            Fault(
                "no seal is looked at",
                "records/reading.py",
                "and not is_intact(",
                "and False and (",
            ),
            Fault(
                "without a seal all is well",
                "records/pass_record.py",
                "return self.seal is not None or has_log",
                "return self.seal is not None",
            ),
        ),
    ),
    Property(
        "A dead prompt is a regression by statistics too.",
        f"{EXACT}test_one_dead_prompt_of_many_is_a_regression_by_statistics_too",
        (
            Fault(
                "the worst prompt does not count",
                "records/comparison/compare.py",
                "worst.is_loss((1 - level) / 2)",
                "False",
            ),
        ),
    ),
    Property(
        "The loss that would be seen is seen in 19 of 20 runs.",
        f"{EXACT}test_the_loss_that_would_be_seen_is_seen_in_19_of_20",
        (
            Fault(
                "a loss at the bar itself",
                "records/comparison/compare.py",
                "-math.expm1(-bar - error * room)",
                "-math.expm1(-bar)",
            ),
        ),
    ),
    Property(
        "Another set of positions of one head of one layer is seen.",
        f"{LOG}test_another_set_of_one_head_of_one_layer_is_seen",
        (
            Fault(
                "heads are alike",
                "runner/observers/draft_log.py",
                "(weights * head_sums).sum",
                "(weights * 0 + head_sums).sum",
            ),
            Fault(
                "the first layer counts",
                "runner/observers/draft_log.py",
                "row_ranges = view_ranges[:, place]",
                "row_ranges = view_ranges[:1, place]",
            ),
        ),
    ),
    Property(
        "A draft log counts layers with a window of their own apart.",
        f"{LOG}test_layers_with_another_window_count_for_themselves",
        (
            Fault(
                "what all layers read is that of the widest",
                "runner/observers/draft_log.py",
                "row_ranges = view_ranges[:, place]",
                "row_ranges = ranges[0][:, place]",
            ),
            Fault(
                "keys of the widest layers are counted",
                "runner/observers/draft_log.py",
                "num_read += len(layers) * keys",
                "num_read = len(windows.window_indices) * keys",
            ),
        ),
    ),
    Property(
        "Entries of a copy are the positions that they hold.",
        f"{LOG}test_entries_of_a_copy_are_the_positions_that_they_hold",
        (
            Fault(
                "cells of a copy are taken for positions",
                "runner/observers/draft_log.py",
                "chosen = self._chosen.get((id(cache), row))",
                "chosen = None",
            ),
        ),
    ),
    Property(
        "A rank that computed with other threads than its config says is named.",
        f"{THREADS}test_a_rank_with_other_threads_than_its_config_is_named",
        (
            Fault(
                "threads are not compared",
                "hardware/threads.py",
                "if not fewest == expected == most:",
                "if not fewest == most:",
            ),
            Fault(
                "only the fewest threads are compared",
                "hardware/threads.py",
                "if not fewest == expected == most:",
                "if fewest != expected:",
            ),
        ),
    ),
    Property(
        "Passes of a run have equal threads and ranks.",
        f"{THREADS}test_a_record_whose_groups_had_other_resources_is_refused",
        (
            Fault(
                "a record may have unequal passes",
                "records/pass_record.py",
                " or unequal_threads(self)",
                "",
            ),
            Fault(
                "only the first batch is compared",
                "records/pass_record.py",
                "for number, group in enumerate(record.groups):",
                "for number, group in enumerate(record.groups[:1]):",
            ),
        ),
    ),
    Property(
        "One process computes with the threads of all ranks of its host.",
        f"{THREADS}test_each_rank_has_its_own_and_one_process_those_of_its_host",
        (
            Fault(
                "one process expected to have a rank's threads",
                "systems/system.py",
                "threads = min(num_threads, machine.num_cpus)",
                "threads = models.config.parallel.threads",
            ),
        ),
    ),
    Property(
        "A run whose threads change while it decodes ends.",
        f"{THREADS}test_a_run_whose_decoding_changes_the_threads_ends",
        (
            Fault(
                "threads measured before a pass alone",
                "hardware/threads.py",
                "        yield\n        self.note()\n",
                "        yield\n",
            ),
        ),
    ),
)
