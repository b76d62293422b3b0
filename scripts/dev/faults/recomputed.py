"""Of numbers that follow from others: passes from their requests, intervals from what their values
are of, sums over ranks, and times from the events of a stream."""

from __future__ import annotations

from faults.fault import Fault, Property

PASSES = "test_recomputed_passes.py::"
LONG = "test_long_decode.py::"
PAIRS = "test_interval_pairs.py::"
RANKS = "test_ranks_that_differ.py::"
STREAMS = "test_stream_times.py::"
RECORDING = "bench/recording.py"
ACCEPTANCE = "records/acceptance.py"
REPORT = "bench/report/"
ENDPOINT = "systems/servers/system.py"
COUNTERS = "systems/servers/counters.py"

PROPERTIES = (
    Property(
        "Every metric of a pass, of its turns and of its groups follows from its requests.",
        f"{PASSES}test_every_metric_follows_from_the_requests",
        (
            Fault(
                "duration from the last arrival",
                "records/computing.py",
                "begin_ms = min(request.arrival_ms",
                "begin_ms = max(request.arrival_ms",
            ),
            Fault(
                "throughput of prompts",
                "records/computing.py",
                "tokens = [sum(request.output_len for",
                "tokens = [sum(request.prompt_len for",
            ),
            Fault(
                "goodput as a share",
                "records/computing.py",
                "request_goodput=sum(good) / duration_s",
                "request_goodput=sum(good) / len(good)",
            ),
            Fault(
                "speed of a request by the mean TPOT",
                "records/computing.py",
                "mean([1e3 / tpot for tpot in tpots if tpot])",
                "1e3 / (mean(tpots) or 1.0)",
            ),
            Fault(
                "prefill from the last time that a request joined",
                "records/computing.py",
                "request.first_token_ms - request.joined_ms[0]",
                "request.first_token_ms - request.joined_ms[-1]",
            ),
            Fault(
                "hits over the hits",
                "records/computing.py",
                "num_found / num_looked_up if num_looked_up",
                "num_looked_up / max(1, num_found) if num_looked_up",
            ),
            Fault(
                "TTFT of a turn until its last token",
                "records/computing.py",
                "[r.first_token_ms - r.arrival_ms for r in members]",
                "[r.finished_ms - r.arrival_ms for r in members]",
            ),
            Fault(
                "prompts of a turn with their outputs",
                "records/computing.py",
                "mean_prompt_len=statistics.fmean(request.prompt_len for",
                "mean_prompt_len=statistics.fmean(request.prompt_len + request.output_len for",
            ),
            Fault(
                "hits of a turn by its first request",
                "records/computing.py",
                "prefix_hit_rate=hit_rate(members)",
                "prefix_hit_rate=hit_rate(members[:1])",
            ),
            Fault(
                "a prompt as long as its group allows in the next group",
                "records/computing.py",
                "while most < request.prompt_len:",
                "while most <= request.prompt_len:",
            ),
            Fault(
                "groups by context that begin at another length",
                "records/metrics.py",
                "FIRST_CONTEXT = 2048",
                "FIRST_CONTEXT = 1024",
            ),
            Fault(
                "acceptance of a context of the first requests",
                "records/computing.py",
                "verifications.subset(members), len(members)",
                "verifications.subset(range(len(members))), len(members)",
            ),
            Fault(
                "a turn of the category of another prompt",
                "records/computing.py",
                "n if r.conversation is None else r.conversation for",
                "n for",
            ),
            Fault(
                "the most of percentiles at 95",
                "records/computing.py",
                "percentile(values, percent) for percent in PERCENTS",
                "percentile(values, min(percent, 95)) for percent in PERCENTS",
            ),
            Fault(
                "emitted tokens with the interval of the acceptance length",
                "records/acceptance.py",
                '"tokens_per_verification_interval": interval(estimates.emitted',
                '"tokens_per_verification_interval": interval(estimates.length',
            ),
            Fault(
                "the most cancelled drafts of a request in place of all",
                ACCEPTANCE,
                "num_cancelled = sum(cancelled.values())",
                "num_cancelled = max(cancelled.values())",
            ),
            Fault(
                "counters before answers",
                ACCEPTANCE,
                "found = pass_metrics | {name: value for name, value in found.items() "
                "if value is not None}",
                "found = found | pass_metrics",
            ),
            Fault(
                "a request of a group by its number in the pass",
                ACCEPTANCE,
                "found.by_request[number] = self.by_request[request_id]",
                "found.by_request[request_id] = self.by_request[request_id]",
            ),
            Fault(
                "a request that ends with its first token",
                RECORDING,
                "finished_ms=ms(request.finished_s)",
                "finished_ms=ms(request.first_token_s)",
            ),
            Fault(
                "drafted tokens in place of accepted ones",
                RECORDING,
                "for part in range(2))",
                "for part in (0, 0))",
            ),
            Fault(
                "looked-up tokens in place of found ones",
                "records/computing.py",
                "sum(sum(request.joined_prefix_tokens or ()) for request in known)",
                "sum(request.num_looked_up_tokens or 0 for request in known)",
            ),
        ),
    ),
    Property(
        "A verification is in the group by grown context that names the length of its text.",
        f"{LONG}test_a_text_is_in_the_group_that_names_its_length",
        (
            Fault(
                "a text as long as its group allows in the next group",
                "records/computing.py",
                "1 << (context - 1).bit_length()",
                "1 << context.bit_length()",
            ),
            Fault(
                "verifications whose place is not known left out",
                "records/computing.py",
                "            if step.num_before is None:\n                return None\n",
                "            if step.num_before is None:\n                continue\n",
            ),
        ),
    ),
    Property(
        "A step says how long the texts were before it, prompt included.",
        f"{LONG}test_a_step_says_how_long_the_texts_were_before_it",
        (
            Fault(
                "lengths of outputs",
                "engine/scheduler.py",
                "len(r.prompt_ids) + len(r.output_ids) for r",
                "len(r.output_ids) for r",
            ),
            Fault(
                "lengths of what is cached",
                "engine/scheduler.py",
                "len(r.prompt_ids) + len(r.output_ids) for r",
                "r.num_cached for r",
            ),
        ),
    ),
    Property(
        "A number of a pass that was edited is named.",
        f"{PASSES}test_a_number_that_was_edited_is_named",
        (
            Fault(
                "groups that nothing checks",
                "records/recomputing.py",
                "or follows(_plain(stated), _plain(found, stated))):",
                "or True):",
            ),
        ),
    ),
    Property(
        "A report shows no pass whose metrics do not follow from its requests.",
        f"{PASSES}test_a_report_shows_no_pass_whose_metrics_do_not_follow",
        (
            Fault(
                "passes not computed again",
                f"{REPORT}page.py",
                "name = unfounded_metric(record, command)",
                "name = None",
            ),
        ),
    ),
    Property(
        "The gate refuses a baseline whose metrics do not follow.",
        f"{PASSES}test_the_gate_refuses_a_baseline_whose_metrics_do_not_follow",
        (
            Fault(
                "passes of a baseline taken as they are",
                "bench/gate/cases.py",
                "name = unfounded_metric(record)",
                "name = None",
            ),
        ),
    ),
    Property(
        "Every interval is described as that of the value of its name.",
        f"{PAIRS}test_every_interval_is_described_as_that_of_the_value_of_its_name",
        (
            Fault(
                "the net speedup's interval as that of the speedup",
                "records/metrics.py",
                '        _interval(name, "ratio"),',
                '        _interval("speedup", "ratio"),',
            ),
            Fault(
                "an interval of another unit",
                ACCEPTANCE,
                '        "mean_acceptance_length", "tokens"\n    )',
                '        "mean_acceptance_length", "0 to 1"\n    )',
            ),
        ),
    ),
    Property(
        "Intervals of a run are those of their own values.",
        f"{PAIRS}test_intervals_of_a_run_are_those_of_their_own_values",
        (
            Fault(
                "the speedup with the interval of the net speedup",
                "records/computing.py",
                "ratio_interval(group_ratios)",
                'ratio_interval(found.get("net_speedup", group_ratios))',
            ),
            Fault(
                "the net speedup with the interval of the total speedup",
                "records/computing.py",
                '"net_speedup": ratios_of(ours, reference, net_ms)',
                '"net_speedup": ratios_of(ours, reference, steps_ms)',
            ),
            Fault(
                "decoding with the interval of prefill",
                "records/computing.py",
                '"prefill_tokens_per_s_interval": speed_interval(tokens, times_ms)',
                '"prefill_tokens_per_s_interval": speed_interval(tokens, tokens)',
            ),
            Fault(
                "the rate with bounds of the length",
                ACCEPTANCE,
                "interval(estimates.rate, 0, 1)",
                "interval(estimates.rate, 0, longest)",
            ),
        ),
    ),
    Property(
        "An interval of many batches of two kinds holds their median.",
        f"{PAIRS}test_an_interval_of_many_batches_of_two_kinds_holds_their_median",
        (
            Fault(
                "the interval of the mean beside the median",
                "records/intervals.py",
                "min(math.exp(middle - reach), median)",
                "math.exp(middle - reach)",
            ),
        ),
    ),
    Property(
        "Every exported value lies in its interval.",
        f"{PAIRS}test_every_exported_value_lies_in_its_interval",
        (
            Fault(
                "ends of intervals the wrong way round",
                f"{REPORT}frame.py",
                "row[ends[0]], row[ends[1]] = value",
                "row[ends[1]], row[ends[0]] = value",
            ),
            Fault(
                "groups with the intervals of all prompts",
                ACCEPTANCE,
                "kept = {name: value for name, value in found.items() if name in names}",
                "kept = {name: value for name, value in found.items() if name in names}\n"
                '    kept["draft_acceptance_rate_interval"] = kept.get('
                '"mean_acceptance_length_interval")',
            ),
        ),
    ),
    Property(
        "A cell shows the interval of its own value.",
        f"{PAIRS}test_a_cell_shows_the_interval_of_its_own_value",
        (
            Fault(
                "a cell with the upper end alone",
                f"{REPORT}tables.py",
                "ends = None if low is None else [low, run",
                "ends = None if low is None else [value, run",
            ),
            Fault(
                "the interval of the table of a run by another name",
                "records/metric_tables.py",
                'ends = getattr(metrics, f"{key}{SUFFIX}", None)',
                "ends = getattr(metrics, f\"{key.removeprefix('net_')}{SUFFIX}\", None)",
            ),
        ),
    ),
    Property(
        "A listing has the interval of each of its metrics.",
        f"{PAIRS}test_a_listing_has_the_interval_of_each_of_its_metrics",
        (
            Fault(
                "intervals of a listing the wrong way round",
                f"{REPORT}listing.py",
                'zip((f"{name}{end}" for end in ENDS), (low, high), strict=True)',
                'zip((f"{name}{end}" for end in ENDS), (high, low), strict=True)',
            ),
        ),
    ),
    Property(
        "The break-even length of unequal batches is the larger.",
        f"{PAIRS}test_the_break_even_length_of_unequal_batches_is_the_larger",
        (
            Fault(
                "the smaller of the two in the middle",
                "records/computing.py",
                "middle = statistics.median_high(found)",
                "middle = statistics.median_low(found)",
            ),
        ),
    ),
    Property(
        "The memory of a run is the sum over its ranks.",
        f"{RANKS}test_the_memory_of_a_run_is_the_sum_over_ranks",
        (
            Fault(
                "memory of the first rank",
                "setup/memory_sampler.py",
                "MemoryTaken(sum(f[0] for f in readings)",
                "MemoryTaken(readings[0][0]",
            ),
            Fault(
                "peak of the largest rank",
                "setup/memory_sampler.py",
                "sum(f[1] for f in readings)",
                "max(f[1] for f in readings)",
            ),
            Fault(
                "the last reading in place of the largest",
                "setup/memory_sampler.py",
                "self.most = max(self.most, peak_memory_bytes(self.device))",
                "self.most = peak_memory_bytes(self.device)",
            ),
        ),
    ),
    Property(
        "The counts of a batch are of each rank.",
        f"{RANKS}test_the_counts_of_a_batch_are_of_each_rank",
        (
            Fault(
                "bytes of the first rank",
                "bench/runner.py",
                "return [rank.bytes_read for rank in self.computing]",
                "return [self.ranks[0].bytes_read for rank in self.computing]",
            ),
            Fault(
                "tokens of drafts counted by each rank",
                "bench/runner.py",
                "return max(rank.draft_kv_tokens for rank in self.ranks)",
                "return self.ranks[0].draft_kv_tokens",
            ),
        ),
    ),
    Property(
        "The memory of a pass is the sum over its ranks.",
        "test_serve.py::test_the_memory_of_a_pass_is_the_sum_over_its_ranks",
        (
            Fault(
                "memory of the largest rank of a pass",
                "records/computing.py",
                "peaks = [sum(group.peak_memory_bytes)",
                "peaks = [max(group.peak_memory_bytes)",
            ),
        ),
    ),
    Property(
        "Times of a stream are those by hand, whatever comes without a token.",
        f"{STREAMS}test_times_of_a_stream_are_those_by_hand",
        (
            Fault(
                "a text beside ids is a token",
                ENDPOINT,
                'is_text = bool(choice.get("text")) and not has_ids',
                'is_text = bool(choice.get("text"))',
            ),
            Fault(
                "a text is one token",
                ENDPOINT,
                "return max(0, min(num_sent, most) - len(request.output_ids))",
                "return 1",
            ),
            Fault(
                "an empty text is a token",
                ENDPOINT,
                'bool(choice.get("text")) and not',
                '"text" in choice and not',
            ),
            Fault(
                "tokens that are lacking at the time of the first",
                ENDPOINT,
                "times += times[-1:] * lacking",
                "times += times[:1] * lacking",
            ),
            Fault(
                "the last texts cut with their times",
                ENDPOINT,
                "del output[count:], times[count - 1 : -1]",
                "del output[count:], times[count:]",
            ),
            Fault(
                "an answer that ends with its last event",
                ENDPOINT,
                "request.finished_s = times[-1]",
                "request.finished_s = self.now()",
            ),
            Fault(
                "a first token with the first event",
                "runner/request.py",
                "if self.first_token_s is None and tokens:",
                "if self.first_token_s is None:",
            ),
            Fault(
                "all ids of SGLang taken for new ones",
                "systems/servers/sglang.py",
                "ids = ids[num_before:]",
                "ids = list(ids)",
            ),
        ),
    ),
    Property(
        "Counters of several engines add up by position.",
        f"{STREAMS}test_counters_of_several_engines_add_up_by_position",
        (
            Fault(
                "the last engine alone",
                COUNTERS,
                "None if found is None else int(found[1])] += number",
                "None if found is None else int(found[1])] = number",
            ),
            Fault(
                "positions of one engine alone",
                COUNTERS,
                "values[name, None if found is None else int(found[1])] += number",
                "key = name, None if found is None else int(found[1])\n"
                "                values[key] = number + (values[key] if found is None else 0)",
            ),
            Fault(
                "a position that stands behind other labels is none",
                COUNTERS,
                "r'(?:^|,)\\s*position=\"(\\d{1,4})\"'",
                "r'^position=\"(\\d{1,4})\"'",
            ),
        ),
    ),
)
