"""Of pipelined speculation."""

from __future__ import annotations

from faults.fault import Fault, Property

STAGES = "test_stage_times.py::"
WARM_UP = "test_warm_up.py::"
COMMAND = "test_pipeline_command.py::"
PARTS = "test_pipelined_parts.py::"
TRACES = "test_ring_traces.py::"

PROPERTIES = (
    Property(
        "The warm-up of pipelined speculation is in no count, span or time.",
        f"{WARM_UP}test_pipelined_speculation_counts_and_shows_what_comes_after_it",
        (
            Fault(
                "runs of the warm-up numbered again",
                "systems/pipeinfer/head.py",
                "            self.first_run = self.first_run + scheduler.counts.runs\n",
                "",
            ),
        ),
    ),
    Property(
        "A stage of pipelined speculation computes from a run's arrival until the device is done.",
        f"{STAGES}test_a_span_is_from_the_arrival_of_a_run_until_the_device_is_done",
        (
            Fault(
                "a run's span until it is launched",
                "systems/pipeinfer/run_stage.py",
                "                wait_for_stream(out.device)\n",
                "                pass\n",
            ),
            Fault(
                "a run's span with the wait for it",
                "systems/stages/stage.py",
                "            begin_s = time.perf_counter()\n",
                "            ends = [span.end_s for span in self.spans[-1:]]\n"
                "            begin_s = (ends or [time.perf_counter()])[0]\n",
            ),
        ),
    ),
    Property(
        "Ranks are idle or busy between the first token of all requests and the last.",
        f"{STAGES}test_a_rank_is_idle_from_the_first_token_on",
        (
            Fault(
                "waits before a rank's first run left out",
                "systems/pipeinfer/details.py",
                "begin_s = min(request.token_times_s[0] for request in requests)",
                "begin_s = min(s.begin_s for spans in by_rank[1:] for s in spans)",
            ),
            Fault(
                "time from one request's first token on",
                "systems/pipeinfer/details.py",
                "begin_s = min(request.token_times_s[0] for request in requests)",
                "begin_s = requests[0].token_times_s[0]",
            ),
            Fault(
                "time until the last request's last token",
                "systems/pipeinfer/details.py",
                "end_s = max(request.token_times_s[-1] for request in requests)",
                "end_s = requests[-1].token_times_s[-1]",
            ),
            Fault(
                "work after the last token counted",
                "systems/pipeinfer/details.py",
                "end = min(span.end_s, self.end_s)",
                "end = span.end_s",
            ),
        ),
    ),
    Property(
        "The use of ranks follows from their spans.",
        f"{COMMAND}test_metrics_follow_from_the_spans",
        (
            Fault(
                "prompts in the mean time of a stage",
                "systems/pipeinfer/details.py",
                "if span.run in rows and span.value == size]",
                "if span.value == size]",
            ),
            Fault(
                "runs skipped inside counted as skipped before",
                "systems/pipeinfer/details.py",
                "sum(computed == 0 for computed, _ in layers)",
                "sum(computed < size for computed, size in layers)",
            ),
            Fault(
                "overlapping work counted twice",
                "systems/pipeinfer/details.py",
                "until = max(until, end)",
                "until = self.begin_s",
            ),
        ),
    ),
    Property(
        "Means are of whole runs, and of links to idle stages.",
        f"{COMMAND}test_means_are_of_whole_runs_and_of_links_to_idle_stages",
        (
            Fault(
                "stopped runs in the mean time of a stage",
                "systems/pipeinfer/details.py",
                "if span.run in rows and span.value == size]",
                "if span.run in rows]",
            ),
            Fault(
                "a link's time with the wait for a busy stage",
                "systems/stages/spans.py",
                "if span.run in runs and free_s < ends[span.run]:",
                "if span.run in runs:",
            ),
            Fault(
                "prompts not in flight",
                "systems/pipeinfer/details.py",
                "(*observed.of(0, SpanKind.PROMPT), *observed.of(0, SpanKind.LAUNCH))",
                "observed.of(0, SpanKind.LAUNCH)",
            ),
        ),
    ),
    Property(
        "A prompt's speed does not count its waiting.",
        f"{COMMAND}test_the_speed_of_a_prompt_does_not_count_its_waiting",
        (
            Fault(
                "a prompt's speed from its arrival on",
                "records/computing.py",
                "request.first_token_ms - request.joined_ms[0], 1e-6",
                "request.first_token_ms - request.arrival_ms, 1e-6",
            ),
        ),
    ),
    Property(
        "A request gets its lane when its first run is launched.",
        f"{PARTS}test_a_request_gets_its_lane_when_its_first_run_is_launched",
        (
            Fault(
                "a request gets its lane when it arrives",
                "systems/pipeinfer/head.py",
                "Moves([self.clock()])",
                "Moves([request.arrived_s])",
            ),
        ),
    ),
    Property(
        "A head of asynchronous speculation serves requests from their arrival on.",
        f"{PARTS}test_a_head_begins_again_when_a_request_arrives_after_all_have_ended",
        (
            Fault(
                "runs begin before their request has arrived",
                "systems/pipeinfer/head.py",
                "in self._arrivals.take(self._arrivals.count(self.clock())):",
                "in self._arrivals.take(len(self._arrivals)):",
            ),
            Fault(
                "a head ends before the last request has arrived",
                "systems/pipeinfer/head.py",
                "        while self._arrivals or not self.scheduler.is_over",
                "        while not self.scheduler.is_over",
            ),
        ),
    ),
    Property(
        "Spans of other hosts are by the first rank's clock.",
        f"{TRACES}test_spans_of_another_host_are_converted_to_the_clock_of_the_first_rank",
        (
            Fault(
                "a clock's lead added",
                "systems/stages/clocks.py",
                "begin_s=span.begin_s - clock.ahead_s, end_s=span.end_s - clock.ahead_s",
                "begin_s=span.begin_s + clock.ahead_s, end_s=span.end_s + clock.ahead_s",
            ),
        ),
    ),
)
