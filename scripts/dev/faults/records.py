"""Of what is computed from samples, and compared between records."""

from __future__ import annotations

from faults.fault import Fault, Property

METRICS = "test_metrics.py::"
RULE = "test_gate_rule.py::"
INTERVALS = "test_intervals.py::"
REPORTS = "test_server_reports.py::"
STALLS = "test_stalls.py::"
MAPS = "test_report_maps.py::"
MACHINE = 'MACHINE = ("device", "ranks", "threads")'
WEIGHTS = 'WEIGHTS = ("model", "target_dtype", "draft_model", "draft_weights")'
ENTRIES = (
    "*WEIGHTS",
    '"drafter"',
    '"kv_policy"',
    '"dtype"',
    '"dataset"',
    '"gen_len"',
    '"temperature"',
    "*MACHINE",
)
HELD = "".join(f"    {entry},\n" for entry in ENTRIES)


def held(entry: str) -> str:
    """The line of an entry of `HELD`."""
    return f"    {entry},\n"


# (what, the entry that is lost, the line that has it) of the settings that a panel holds
POOLED = (
    ("devices", '"device", ', MACHINE),
    ("ranks", '"ranks", ', MACHINE),
    ("threads", ', "threads"', MACHINE),
    ("models", '"model", ', WEIGHTS),
    ("weight dtypes", '"target_dtype", ', WEIGHTS),
    ("draft models", '"draft_model", ', WEIGHTS),
    ("low-bit drafts", ', "draft_weights"', WEIGHTS),
    ("all weights", held("*WEIGHTS"), HELD),
    ("drafters", held('"drafter"'), HELD),
    ("policies", held('"kv_policy"'), HELD),
    ("dtypes", held('"dtype"'), HELD),
    ("datasets", held('"dataset"'), HELD),
    ("output lengths", held('"gen_len"'), HELD),
    ("temperatures", held('"temperature"'), HELD),
    ("all machines", held("*MACHINE"), HELD),
)

PROPERTIES = (
    Property(
        "The speedup is the median of the batches.",
        "test_measurement.py::test_the_speedup_is_the_median_of_batches",
        (
            Fault(
                "speedup as the maximum over batches",
                "records/computing.py",
                "fields[name] = statistics.median(group_ratios)",
                "fields[name] = max(group_ratios)",
            ),
        ),
    ),
    Property(
        "Stalled steps are counted beside the median of their kind.",
        f"{STALLS}test_steps_that_stalled_are_counted_beside_the_median_of_their_kind",
        (
            Fault(
                "a stall only beyond the noise alone",
                "records/stalls.py",
                "max(FACTOR, math.exp(",
                "max(100 * FACTOR, math.exp(",
            ),
            Fault(
                "stalls of the last batch alone",
                "records/stalls.py",
                "if self._ms(place) > bound * median",
                "if self._ms(place) > bound * median and place[0] > 1",
            ),
            Fault(
                "all the time of stalls as lost",
                "records/stalls.py",
                "return self.ms - self.median_ms",
                "return self.ms",
            ),
        ),
    ),
    Property(
        "A stalled step counts as its median in the speedup, and in full in the total speedup.",
        f"{STALLS}test_a_stalled_step_counts_as_the_median_in_the_speedup_and_in_full_in_the_total",
        (
            Fault(
                "stalls in the speedup",
                "records/computing.py",
                '"speedup": ratios_of(ours, reference, steady_ms)',
                '"speedup": ratios_of(ours, reference, steps_ms)',
            ),
            Fault(
                "no stalls in the total speedup",
                "records/computing.py",
                '"total_speedup": ratios_of(ours, reference, steps_ms)',
                '"total_speedup": ratios_of(ours, reference, steady_ms)',
            ),
        ),
    ),
    Property(
        "A step that does more is no stall.",
        f"{STALLS}test_a_step_that_does_more_is_no_stall",
        (
            Fault(
                "steps judged without their forwards",
                "records/stalls.py",
                "group.step_forwards or unknown",
                "unknown",
            ),
            Fault(
                "steps judged without their draft tokens",
                "records/stalls.py",
                "group.step_max_gamma or unknown",
                "unknown",
            ),
            Fault(
                "steps judged without their rows",
                "records/stalls.py",
                "group.step_rows or unknown",
                "unknown",
            ),
        ),
    ),
    Property(
        "Growing contexts and a slower machine are no stalls.",
        f"{STALLS}test_growing_contexts_and_a_slower_machine_are_no_stalls",
        (
            Fault(
                "steps judged by all of their batch",
                "records/stalls.py",
                "count = min(NEAREST, len(times))",
                "count = len(times)",
            ),
        ),
    ),
    Property(
        "A step of a rare kind is judged by kinds that do at least as much.",
        f"{STALLS}test_a_rare_kind_is_judged_by_kinds_that_do_at_least_as_much",
        (
            Fault(
                "a step judged by kinds that do less",
                "records/stalls.py",
                "does_as_much(other, kind)",
                "does_as_much(kind, other)",
            ),
            Fault(
                "steps of short batches not judged",
                "records/stalls.py",
                "[median_ms] * len(inside) if few",
                "[math.inf] * len(inside) if few",
            ),
        ),
    ),
    Property(
        "Noise is no stall.",
        f"{STALLS}test_noise_is_no_stall",
        (
            Fault(
                "stalls beyond two deviations",
                "records/stalls.py",
                "SPREADS = 6.0",
                "SPREADS = 2.0",
            ),
            Fault("stalls beyond the double", "records/stalls.py", "FACTOR = 3.0", "FACTOR = 2.0"),
        ),
    ),
    Property(
        "Forwards of a step are those that it ran.",
        "test_measurement.py::test_the_forwards_of_a_step_are_those_that_it_ran",
        (
            Fault(
                "all forwards so far",
                "systems/observer.py",
                "self._num_forwards - before",
                "self._num_forwards",
            ),
        ),
    ),
    Property(
        "A panel never pools machines, dtypes or prompts of other kinds.",
        f"{MAPS}test_a_panel_never_pools_machines_or_dtypes",
        tuple(
            Fault(
                f"panels pool {what}",
                "bench/report/figures/passes.py",
                text,
                text.replace(entry, ""),
            )
            for what, entry, text in POOLED
        ),
    ),
    Property(
        "A colour claims no more than its interval.",
        f"{MAPS}test_a_colour_claims_no_more_than_its_interval",
        (
            Fault(
                "a colour only where the interval holds no 1",
                "bench/report/figures/passes.py",
                "is_wide or low <= 1 <= high",
                "low <= 1 <= high",
            ),
            Fault(
                "a colour beside an interval that holds 1",
                "bench/report/figures/passes.py",
                "is_wide or low <= 1 <= high",
                "is_wide",
            ),
        ),
    ),
    Property(
        "A map shows no colour that its interval does not bear.",
        f"{MAPS}test_a_map_shows_no_colour_that_its_interval_does_not_bear",
        (
            Fault(
                "all cells of a map in colour",
                "bench/report/figures/passes.py",
                ".where(table[CLAIM].isin(COLOURED))",
                "",
            ),
            Fault(
                "a busy host in colour",
                "bench/report/figures/passes.py",
                "COLOURED = (HOLDS,",
                "COLOURED = (HOLDS, BUSY,",
            ),
            Fault(
                "a cell without an interval like another",
                "bench/report/figures/passes.py",
                "if cell[CLAIM] != HOLDS:",
                "if cell[CLAIM] == DOUBTFUL:",
            ),
        ),
    ),
    Property(
        "The best run of a place is the one that is surely fast.",
        f"{MAPS}test_the_best_run_of_a_place_is_the_one_that_is_surely_fast",
        (
            Fault(
                "the most disturbed run as the best",
                "bench/report/figures/passes.py",
                "lows.fillna(values)",
                "values",
            ),
            Fault(
                "the fastest steps as the best",
                "bench/report/figures/passes.py",
                "best_last(passes, NET)",
                "best_last(passes, KINDS[1])",
            ),
            Fault(
                "a run of a busy host as the best",
                "bench/report/figures/passes.py",
                "ranked.sort_values([*ranked]",
                'ranked.sort_values(["has", "low"]',
            ),
        ),
    ),
    Property(
        "The net speedup counts calibration, and breaks even at its first gain.",
        f"{METRICS}test_the_net_speedup_counts_what_comes_before_the_first_step",
        (
            Fault(
                "calibration not in the net speedup",
                "records/computing.py",
                "return [end - prefill_end_ms(group) for group, end in pairs]",
                "return [end - prefill_end_ms(g) - (g.calibration_ms or 0) for g, end in pairs]",
            ),
            Fault(
                "break-even a token early",
                "records/computing.py",
                "(their_per_token - per_token))) + 2",
                "(their_per_token - per_token))) + 1",
            ),
        ),
    ),
    Property(
        "The metrics of a pass are those of its samples.",
        f"{METRICS}test_decode_metrics_by_hand",
        (
            Fault(
                "peak memory of the largest rank alone",
                "records/computing.py",
                "[sum(group.peak_memory_bytes) for group",
                "[max(group.peak_memory_bytes) for group",
            ),
            Fault(
                "tokens/s without the last batch",
                "records/computing.py",
                '"decode_tokens_per_s": sum(tokens) / decode_s',
                '"decode_tokens_per_s": sum(tokens[:-1]) / decode_s',
            ),
            Fault(
                "share of the roofline by the mean batch",
                "records/computing.py",
                "roofline_s = read / beside.bandwidth",
                "roofline_s = read / len(groups) / beside.bandwidth",
            ),
        ),
    ),
    Property(
        "The rest of a step is what its phases leave, drafting or not.",
        f"{METRICS}test_steps_that_draft_and_steps_that_do_not",
        (
            Fault(
                "rest of a step without the phase of plain decoding",
                "records/computing.py",
                "sum(g.draft_ms) + sum(g.verify_ms) + sum(g.decode_ms) for",
                "sum(g.draft_ms) + sum(g.verify_ms) for",
            ),
            Fault(
                "mean draft tokens of the steps that draft",
                "records/computing.py",
                "sum(gammas) / num_steps if beside.is_drafting",
                "sum(gammas) / sum(map(bool, gammas)) if beside.is_drafting",
            ),
        ),
    ),
    Property(
        "Acceptance counts survivors at each position.",
        f"{METRICS}test_acceptance_counts_survivors",
        (
            Fault(
                "a position judged by all that drafted it",
                "records/acceptance.py",
                "np.minimum(drafted, accepted + 1)",
                "drafted",
            ),
            Fault(
                "acceptance length without the token of the target",
                "records/acceptance.py",
                "length=1 + num_accepted",
                "length=num_accepted",
            ),
        ),
    ),
    Property(
        "The acceptance rate is of all draft tokens, however many a step drafts.",
        f"{METRICS}test_steps_may_draft_different_numbers",
        (
            Fault(
                "acceptance rate by verifications",
                "records/acceptance.py",
                "rate=num_accepted / drafted",
                "rate=num_accepted / verified / judged.shape[1]",
            ),
        ),
    ),
    Property(
        "Emitted tokens of a verification are those up to the end of a row.",
        f"{METRICS}test_drafts_accepted_past_the_end_of_a_row_were_not_emitted",
        (
            Fault(
                "drafted tokens taken for emitted ones",
                "records/pass_record.py",
                "            self.per_step_emitted,\n            digests,",
                "            [1 + n for n in self.per_step_accepted or ()],\n            digests,",
            ),
        ),
    ),
    Property(
        "The padding of a row is no draft, and a row without drafts has no verification.",
        "test_observer.py::test_a_row_without_drafts_has_no_verification",
        (
            Fault(
                "rows without drafts counted as verifications",
                "records/acceptance.py",
                "        if drafted:\n",
                "        if True:\n",
            ),
        ),
    ),
    Property(
        "What a server reports of its drafts is taken only if it adds up.",
        f"{REPORTS}test_counts_that_do_not_add_up_are_not_taken",
        (
            Fault(
                "a histogram of other sums taken",
                "records/acceptance.py",
                "if accepted is not None and total != accepted:",
                "if accepted is None and total != accepted:",
            ),
            Fault(
                "only the first answers checked",
                "systems/servers/details.py",
                "found := counts[request_id].find_contradiction(num_tokens)",
                "found := counts[0].find_contradiction(num_tokens)",
            ),
        ),
    ),
    Property(
        "Counters of a server are taken only if they count this pass alone.",
        f"{REPORTS}test_counters_of_something_else_are_not_taken",
        (
            Fault(
                "other clients counted too",
                "systems/servers/details.py",
                "if generated != num_tokens:",
                "if (generated or 0) < num_tokens:",
            ),
            Fault(
                "counters that may go backwards",
                "systems/servers/counters.py",
                "if not now >= value:",
                "if math.isinf(now):",
            ),
        ),
    ),
    Property(
        "Counts by position follow from a histogram.",
        f"{REPORTS}test_reported_counts_give_the_metrics_of_the_same_verifications",
        (
            Fault(
                "a histogram read from its other end",
                "records/acceptance.py",
                "list(accumulate(self.histogram[:0:-1]))[::-1]",
                "list(accumulate(self.histogram[1:]))",
            ),
            Fault(
                "unequal draft lengths taken for equal ones",
                "records/acceptance.py",
                "or self.drafted != verified * len(positions)",
                "",
            ),
        ),
    ),
    Property(
        "TPOT divides by the tokens after the first.",
        f"{METRICS}test_tpot_is_the_time_from_the_first_token_over_the_tokens_after_it",
        (
            Fault(
                "TPOT over all tokens",
                "records/pass_record.py",
                "        num_later = self.output_len - 1\n",
                "        num_later = self.output_len\n",
            ),
            Fault(
                "the first token counted as decoded",
                "records/computing.py",
                "[sum(request.output_len - 1 for request in requests) for requests in by_group]",
                "[sum(request.output_len for request in requests) for requests in by_group]",
            ),
        ),
    ),
    Property(
        "Percentiles are interpolated as in numpy.",
        f"{METRICS}test_percentiles_are_numpys",
        (
            Fault(
                "a percentile as the value below it",
                "records/computing.py",
                "np.percentile(values, percent)",
                'np.percentile(values, percent, method="lower")',
            ),
        ),
    ),
    Property(
        "Intervals are those of Student's t by hand.",
        f"{INTERVALS}test_intervals_by_hand",
        (
            Fault(
                "jackknife without its factor",
                "records/intervals.py",
                "math.sqrt((n - 1) / n * ",
                "math.sqrt(1 / n * ",
            ),
            Fault(
                "a degree of freedom too many",
                "records/intervals.py",
                "reach = quantile(num_groups - 1) * error",
                "reach = quantile(num_groups) * error",
            ),
            Fault(
                "spread of ratios as of a whole population",
                "records/intervals.py",
                "logs.std(ddof=1)",
                "logs.std(ddof=0)",
            ),
            Fault(
                "one-sided quantiles",
                "records/intervals.py",
                "stdtrit(freedom, (1 + level) / 2)",
                "stdtrit(freedom, level)",
            ),
        ),
    ),
    Property(
        "A prompt's counts are those of its own rows and positions.",
        f"{INTERVALS}test_steps_that_draft_other_numbers_of_tokens_are_counted_by_position",
        (
            Fault(
                "only accepted positions judged",
                "records/acceptance.py",
                "np.minimum(drafted, accepted + 1)",
                "accepted",
            ),
        ),
    ),
    Property(
        "A category's acceptance is that of a pass over its prompts alone.",
        "test_categories.py::test_a_category_is_a_pass_of_its_prompts_alone",
        (
            Fault(
                "the prompts of the batch's beginning",
                "records/acceptance.py",
                "name: acceptance_of_group(verifications.subset(members), len(members))",
                "name: acceptance_of_group(verifications, len(members))",
            ),
        ),
    ),
    Property(
        "A category is that of the prompt, in the order of the run.",
        "test_prompt_sets.py::test_several_sets_are_drawn_from_together",
        (
            Fault(
                "categories in another order",
                "workload/workload.py",
                "categories=tuple(item.category for _, item in drawn.taken)",
                "categories=tuple(item.category for _, item in sorted(drawn.taken)[::-1])",
            ),
            Fault(
                "all categories of a shorter run",
                "workload/workload.py",
                "categories=None if self.categories is None else self.categories[:num_prompts]",
                "categories=self.categories",
            ),
        ),
    ),
    Property(
        "A message of a conversation stands where the template puts it.",
        "test_chat_template.py::test_a_template_may_change_the_order_of_messages",
        (
            Fault(
                "messages in the order of the chat",
                "workload/chat_template.py",
                "zip(self.between, self.order[1:], strict=True)",
                "zip(self.between, sorted(self.order)[1:], strict=True)",
            ),
        ),
    ),
    Property(
        "A change is the new rate over the old, with its interval.",
        f"{RULE}test_a_change_by_hand",
        (
            Fault(
                "a change over the new rate",
                "records/comparison/compare.py",
                "np.log(after / before)",
                "np.log(before / after)",
            ),
            Fault(
                "one degree of freedom too many",
                "records/comparison/compare.py",
                "quantile(num_prompts - 1, level)",
                "quantile(num_prompts, level)",
            ),
        ),
    ),
    Property(
        "Rows whose counts rounding may change share the false alarms.",
        f"{RULE}test_rows_share_the_false_alarms",
        (
            Fault(
                "false alarms not shared",
                "records/comparison/compare.py",
                "FALSE_ALARMS / max(1, num_tests)",
                "FALSE_ALARMS",
            ),
            Fault(
                "equal outputs certain in any dtype",
                "records/comparison/compare.py",
                '(dtype == "float32" and self.pair.num_different == 0)',
                "self.pair.num_different == 0",
            ),
        ),
    ),
    Property(
        "A loss beyond the margin and the noise is a regression.",
        f"{RULE}test_a_loss_beyond_the_margin_and_the_noise_is_a_regression",
        (
            Fault(
                "every change taken for noise",
                "records/comparison/compare.py",
                "self.interval[0] <= 0 <= self.interval[1]",
                "self.interval[0] <= self.interval[1]",
            ),
            Fault(
                "losses and gains confused",
                "records/comparison/compare.py",
                "REGRESSION if change.relative < 0 else GAIN",
                "REGRESSION if change.relative > 0 else GAIN",
            ),
        ),
    ),
    Property(
        "A change within the margin passes.",
        f"{RULE}test_a_change_within_the_margin_is_said_and_passes",
        (
            Fault(
                "a margin taken for percent",
                "records/comparison/compare.py",
                "    if abs(change.relative) <= margin:",
                "    if abs(change.relative) <= margin / 100:",
            ),
        ),
    ),
    Property(
        "A prediction that has changed is a regression.",
        "test_pass_records.py::test_a_prediction_is_printed_repeated_and_compared",
        (
            Fault(
                "changed predictions pass",
                "records/comparison/values.py",
                "if not is_close(*pair[1:])",
                "if is_close(*pair[1:])",
            ),
        ),
    ),
    Property(
        "A policy that reads other tokens is another policy.",
        f"{RULE}test_a_run_at_another_budget_is_not_taken_for_this_one",
        (
            Fault(
                "fewer tokens read are no change",
                "records/comparison/compare.py",
                "abs(after - before) <= READS_TOLERANCE",
                "after - before <= READS_TOLERANCE",
            ),
        ),
    ),
    Property(
        "A share of the time of a forward is at most 100 %, or null with its reason.",
        "test_latency.py::test_a_share_above_100_percent_is_null_with_its_reason",
        (
            Fault(
                "a share above 100 % of products",
                "bench/latency/record.py",
                "products_fraction=products_share if products_share <= 1 else None",
                "products_fraction=products_share",
            ),
            Fault(
                "a share above 100 % of bytes",
                "bench/latency/record.py",
                "roofline_fraction=bytes_share if bytes_share <= 1 else None",
                "roofline_fraction=bytes_share",
            ),
            Fault(
                "no share of the whole time",
                "bench/latency/record.py",
                "products_reason=None if products_share <= 1 else",
                "products_reason=None if products_share < 1 else",
            ),
        ),
    ),
    Property(
        "The end of a prefill is timed as that of a prompt, and its attention alone.",
        "test_latency.py::test_the_end_of_a_prefill_is_that_of_a_prompt",
        (
            Fault(
                "the tokens follow the context",
                "bench/latency/forwards.py",
                "runner.truncate(rows, [context - T])",
                "runner.truncate(rows, [context])",
            ),
            Fault(
                "it is timed for every batch size",
                "bench/latency/forwards.py",
                " and runner.num_rows == grid.batch_sizes[0]",
                "",
            ),
            Fault(
                "attention of one layer",
                "bench/latency/forwards.py",
                "runner.backends[index].run(number,",
                "runner.backends[index].run(0,",
            ),
        ),
    ),
    Property(
        "Products by themselves take the least of their times.",
        "test_latency.py::test_other_programs_only_add_to_the_time_of_products",
        (
            Fault(
                "the mean of the times of products",
                "bench/latency/forwards.py",
                "seconds = min(seconds_of(",
                "seconds = sum(seconds_of(",
            ),
        ),
    ),
)
