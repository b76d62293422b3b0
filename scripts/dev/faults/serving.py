"""Of requests that arrive over time."""

from __future__ import annotations

from faults.fault import Fault, Property

METRICS = "test_serving_metrics.py::"
VIEW = "test_serving_view.py::"
BATCHING = "test_batching.py::"
TALKS = "test_conversations.py::"

PROPERTIES = (
    Property(
        "Serving metrics are those of the time stamps of each request.",
        f"{METRICS}test_metrics_are_those_of_the_time_stamps",
        (
            Fault(
                "duration until the end of the last to arrive",
                "records/computing.py",
                "return max(request.finished_ms for request in requests) - begin_ms",
                "return requests[-1].finished_ms - begin_ms",
            ),
            Fault(
                "end-to-end latency from the first token",
                "runner/request.py",
                "1e3 * (last_s - self.arrived_s)",
                "1e3 * (last_s - first_s)",
            ),
            Fault(
                "TPOT over all tokens of a request",
                "runner/request.py",
                "1e3 * (last_s - first_s) / num_later",
                "1e3 * (last_s - first_s) / (num_later + 1)",
            ),
            Fault(
                "arrivals counted instead of their gaps",
                "records/computing.py",
                "later = sum(len(requests) - 1 for requests in by_group)",
                "later = sum(len(requests) for requests in by_group)",
            ),
        ),
    ),
    Property(
        "Goodput counts the requests that keep each bound themselves.",
        f"{METRICS}test_goodput_is_of_each_request_and_not_of_their_mean",
        (
            Fault(
                "goodput by the mean of all requests",
                "records/computing.py",
                "good = [keeps(request, beside.goodput) for request in requests]",
                "good = [\n"
                "        statistics.fmean(r.first_token_ms - r.arrival_ms for r in requests)\n"
                "        <= beside.goodput.get('ttft', 1e9)\n"
                "    ] * len(requests)",
            ),
            Fault(
                "goodput by the mean TPOT",
                "records/computing.py",
                "good = [keeps(request, beside.goodput) for request in requests]",
                'good = [(mean(tpots) or 0.0) <= beside.goodput.get("tpot", 1e9)] * len(requests)',
            ),
        ),
    ),
    Property(
        "A good request keeps every bound; one with a single token keeps any of TPOT.",
        f"{METRICS}test_goodput_counts_the_requests_that_keep_every_bound",
        (
            Fault(
                "goodput of one bound of several",
                "records/computing.py",
                "return all(times[name] <= most",
                "return any(times[name] <= most",
            ),
            Fault(
                "a request without TPOT is no good one",
                "records/computing.py",
                '"tpot": request.tpot_ms or 0.0,',
                '"tpot": request.tpot_ms or math.inf,',
            ),
        ),
    ),
    Property(
        "Tokens of one step have no gap.",
        f"{METRICS}test_tokens_of_one_step_have_no_gap",
        (
            Fault(
                "gaps within a step",
                "runner/request.py",
                "sorted(set(self.token_times_s))",
                "sorted(self.token_times_s)",
            ),
        ),
    ),
    Property(
        "A step counts what it prefills and what it decodes.",
        f"{METRICS}test_a_step_counts_what_it_prefills_and_decodes",
        (
            Fault(
                "prompts are not in flight",
                "engine/scheduler.py",
                "self.num_in_flight += len(decoding) + len(plan.parts)",
                "self.num_in_flight += len(decoding)",
            ),
            Fault(
                "one preemption a step",
                "engine/scheduler.py",
                "self.num_preemptions += len(plan.preempted)",
                "self.num_preemptions += bool(plan.preempted)",
            ),
        ),
    ),
    Property(
        "A batch begins when its batching says so.",
        f"{BATCHING}test_each_batching_gives_the_engine_its_batches",
        (
            Fault(
                "a static batch begins with its first request",
                "systems/flover/batchings.py",
                "clock.wait_until(batch[-1].arrived_s)",
                "clock.wait_until(batch[0].arrived_s)",
            ),
        ),
    ),
    Property(
        "A dynamic batch waits for its window or until it is full.",
        f"{BATCHING}test_a_dynamic_batch_begins_when_it_is_full_or_its_window_ends",
        (
            Fault(
                "the window counted from the end of the batch before",
                "systems/flover/batchings.py",
                "max(clock.now(), min(full_s, coming_s[0] + window_s))",
                "min(full_s, max(clock.now(), coming_s[0]) + window_s)",
            ),
            Fault(
                "requests that arrive in the batch join it",
                "systems/flover/batchings.py",
                "arrivals.count(begins_s)",
                "arrivals.count(begins_s + window_s)",
            ),
        ),
    ),
    Property(
        "In a closed loop another request arrives when one ends.",
        "test_closed_loop.py::test_another_request_arrives_with_each_end",
        (
            Fault(
                "one more in flight than asked for",
                "engine/arrivals.py",
                "else concurrency :])",
                "else concurrency + 1 :])",
            ),
            Fault(
                "a clock decides in a closed loop, too",
                "engine/arrivals.py",
                "if self.concurrency is not None and not self.is_timed:",
                "if False:",
            ),
            Fault(
                "the next request arrives with the end of the newest",
                "engine/arrivals.py",
                "first.arrived_s = end_s + first.offset_s",
                "first.arrived_s = ended[-1].finished_s",
            ),
            Fault(
                "one request for several that have ended",
                "engine/arrivals.py",
                "                    insort(self._known, first, key=_arrival_of)",
                "                    insort(self._known, first, key=_arrival_of)\n"
                "                break",
            ),
        ),
    ),
    Property(
        "The next turn of a conversation arrives when the one before has ended.",
        f"{TALKS}test_the_next_turn_arrives_in_the_place_of_the_one_that_ended",
        (
            Fault(
                "another conversation begins instead",
                "engine/arrivals.py",
                "if self._later and not self._num_left[conversation]:",
                "if self._later:",
            ),
            Fault("answers in the wrong order", "runner/request.py", "answers[::-1]", "answers"),
            Fault(
                "a turn arrives when its conversation began",
                "runner/request.py",
                "        self.arrived_s = now + turn.wait_s\n",
                "",
            ),
        ),
    ),
    Property(
        "Prompts of conversations are those of transformers.",
        f"{TALKS}test_prompts_are_those_of_transformers[blocks-be brief]",
        (
            Fault(
                "no seam behind the last answer",
                "workload/chat_template.py",
                "(*self.between, self.after)",
                "(self.after, *self.between)",
            ),
            Fault(
                "a question before the answer",
                "workload/conversations.py",
                "for place in (None, question)",
                "for place in (question, None)",
            ),
        ),
    ),
    Property(
        "A replay shares prefixes as the pass did.",
        "test_verdict_of_modes.py::test_a_replay_shares_prefixes_as_the_pass_did",
        (
            Fault(
                "wherever the caches keep texts",
                "engine/engine.py",
                "runner.caches.prefixes if shares_prefixes else None",
                "runner.caches.prefixes",
            ),
        ),
    ),
    Property(
        "A turn behind another answer shows nothing.",
        f"{TALKS}test_a_turn_behind_another_answer_shows_nothing",
        (
            Fault(
                "compared all the same",
                "bench/check/passes.py",
                " if is_asked_alike(*pair)]",
                "]",
            ),
        ),
    ),
    Property(
        "The engine keeps the requests of a closed loop in flight.",
        "test_closed_loop.py::test_the_engine_keeps_so_many_in_flight",
        (
            Fault(
                "a batching that serves an open loop",
                "systems/flover/system.py",
                "            arrivals = Arrivals(requests, serving_pass.concurrency)\n",
                "            arrivals = Arrivals(requests)\n",
            ),
        ),
    ),
    Property(
        "Stages keep the requests of a closed loop in flight.",
        "test_closed_loop.py::test_every_kind_of_mode_is_recorded_with_its_loop",
        (
            Fault(
                "a ring that serves an open loop",
                "systems/mdi_llm/system.py",
                "Arrivals(requests, serving_pass.concurrency)",
                "Arrivals(requests)",
            ),
            Fault(
                "pipelined speculation that serves an open loop",
                "systems/pipeinfer/system.py",
                "Arrivals(requests, serving_pass.concurrency)",
                "Arrivals(requests)",
            ),
        ),
    ),
    Property(
        "A batch of a closed loop waits for nobody.",
        "test_closed_loop.py::test_a_batch_begins_with_all_that_are_in_flight",
        (
            Fault(
                "a dynamic batch waits for its window in a closed loop",
                "systems/flover/batchings.py",
                "if arrivals.concurrency is not None:  # nobody",
                "if False:  # nobody",
            ),
        ),
    ),
    Property(
        "No more requests are open at a server than are to be in flight.",
        "test_endpoint.py::test_so_many_requests_are_open_at_once_and_no_more",
        (
            Fault(
                "all are sent at once",
                "systems/servers/system.py",
                "arrivals = Arrivals(requests, serving_pass.concurrency)",
                "arrivals = Arrivals(requests)",
            ),
            Fault(
                "a request arrives with the last token of another",
                "systems/servers/system.py",
                "request.arrived_s = max(request.arrived_s, self.now())",
                "pass",
            ),
        ),
    ),
    Property(
        "Time stamps of a record count from the first arrival.",
        f"{METRICS}test_the_time_stamps_of_a_record_count_from_the_first_arrival",
        (
            Fault(
                "the first token after a preemption in place of the next",
                "bench/recording.py",
                "if t >= at_s), None))",
                "if t >= request.arrived_s), None))",
            ),
            Fault(
                "time stamps that count from each arrival",
                "bench/recording.py",
                "first_token_ms=ms(request.first_token_s)",
                "first_token_ms=ms(request.first_token_s) - ms(request.arrived_s)",
            ),
        ),
    ),
    Property(
        "The warm-up of a mode is in no number of its record.",
        "test_serve.py::test_warm_up_counts_in_nothing",
        (
            Fault(
                "no warm-up",
                "bench/groups.py",
                "        return 1\n\n    def prefill",
                "        return None\n\n    def prefill",
            ),
            Fault(
                "the first mode alone is warmed up",
                "bench/runner.py",
                "            self.warm_up(planned, number)",
                "            if planned is self.passes[0]:\n"
                "                self.warm_up(planned, number)",
            ),
            Fault(
                "whole requests as a warm-up",
                "bench/groups.py",
                "shapes = shortened(first, config.attention.prefill_chunk)",
                "shapes = first",
            ),
        ),
    ),
    Property(
        "A mode whose tokens are wrong has no metrics.",
        "test_serve.py::test_a_diverged_pass_gets_no_metrics",
        (
            Fault(
                "only the numbers of tokens are compared",
                "bench/check/passes.py",
                "expected.output_ids != found.output_ids",
                "len(expected.output_ids) != len(found.output_ids)",
            ),
        ),
    ),
    Property(
        "What was measured is kept when a later mode is interrupted.",
        "test_serve.py::test_records_of_finished_passes_are_kept",
        (
            Fault(
                "no record before all modes are done",
                "bench/measure.py",
                "        self.keep(record)\n",
                "        self.keep\n",
            ),
        ),
    ),
    Property(
        "What ends a command in one repeat costs no repeat before.",
        "test_serve.py::test_repeats_that_had_ended_are_kept",
        (
            Fault(
                "repeats lost with the one that was interrupted",
                "bench/measure.py",
                "            elif measured.groups:\n",
                "            elif False:\n",
            ),
            Fault(
                "a repeat that was not checked kept",
                "bench/measure.py",
                "            del measured.groups[len(measured.checks) :]\n",
                "",
            ),
        ),
    ),
    Property(
        "The load of several repeats is that of the worst.",
        "test_serve.py::test_the_load_of_a_mode_is_that_of_its_worst_repeat",
        (
            Fault(
                "the load of the least busy repeat",
                "hardware/other_load.py",
                "return max(loads, key=OtherLoad._badness",
                "return min(loads, key=OtherLoad._badness",
            ),
        ),
    ),
    Property(
        "What stages count in several repeats is counted of all.",
        "test_details.py::test_details_of_several_groups_are_sums_means_and_extremes",
        (
            Fault(
                "the details of the first repeat",
                "systems/details.py",
                "return replace(first, **found)",
                "return first",
            ),
        ),
    ),
    Property(
        "Drafts of a server are counted if every repeat has their counts.",
        "test_endpoint.py::test_answers_of_one_repeat_say_nothing_of_all",
        (
            Fault(
                "answers of some repeats counted",
                "bench/recording.py",
                "if all(own.reported for own in found):",
                "if any(own.reported for own in found):",
            ),
            Fault(
                "a source named that one repeat lacks",
                "systems/servers/details.py",
                "            if count == len(groups):\n",
                "            if count:\n",
            ),
        ),
    ),
    Property(
        "Repeats together are as bad as the worst.",
        "test_verdict.py::test_groups_together_are_as_bad_as_the_worst",
        (
            Fault(
                "a divergence hidden by tokens that were not compared",
                "bench/recording.py",
                "    if correctness.num_diverged:\n",
                "    if correctness.num_diverged and num_differing:\n",
            ),
            Fault(
                "ties before divergences",
                "bench/check/passes.py",
                "return found.num_diverged or 0, is_unjudged,",
                "return 0, is_unjudged,",
            ),
        ),
    ),
    Property(
        "A stalled step of a mode is counted and left out of its steady speed, and no other step.",
        "test_stalls.py::test_a_stalled_step_of_a_mode_is_counted_and_its_time_left_out",
        (
            Fault(
                "the steady speed with the stalls",
                "records/computing.py",
                "steady_s = duration_s - stalled_s",
                "steady_s = duration_s",
            ),
            Fault(
                "steps of modes of one kind",
                "records/stalls.py",
                "group.step_prompt_tokens or unknown",
                "unknown",
            ),
        ),
    ),
    Property(
        "A step of a mode is of the kind of its prompt tokens, drafts and rows.",
        "test_stalls.py::test_a_step_is_timed_with_the_prompt_tokens_that_it_takes",
        (
            Fault(
                "prompt tokens of a step not noted",
                "systems/observer.py",
                "sum([part.stop - part.start for part in plan.parts])",
                "0",
            ),
            Fault(
                "prompt tokens of an earlier step",
                "systems/observer.py",
                "self._prompt_tokens = sum(",
                "self._prompt_tokens += sum(",
            ),
        ),
    ),
    Property(
        "Prompt tokens that a prefix cache had are not prefilled.",
        f"{METRICS}test_tokens_that_were_found_are_not_prefilled",
        (
            Fault(
                "found tokens prefilled",
                "records/computing.py",
                "request.prompt_len - sum((request.joined_prefix_tokens or [])[:1])",
                "request.prompt_len",
            ),
            Fault(
                "tokens found after the first token",
                "records/computing.py",
                "sum((request.joined_prefix_tokens or [])[:1])",
                "sum(request.joined_prefix_tokens or [])",
            ),
        ),
    ),
)
