"""Of the engine, its steps, and whole runs."""

from __future__ import annotations

from faults.fault import Fault, Property

RUN = "test_measurement.py::"
STEPS = "test_step_times.py::"
TOGETHER = "test_together.py::"

PROPERTIES = (
    Property(
        "The time of a step is that of the strategy, whether it drafts or not.",
        f"{RUN}test_the_time_of_a_step_is_that_of_the_strategy",
        (
            Fault(
                "step time halved on drafting steps",
                "engine/engine.py",
                "output, now), now - started)",
                "output, now), (now - started) / (2 if output.draft_width else 1))",
            ),
        ),
    ),
    Property(
        "A step and its phases end when the host has read the tokens.",
        f"{STEPS}test_a_step_and_its_phases_end_when_the_tokens_are_read",
        (
            Fault(
                "a step timed until it begins",
                "engine/engine.py",
                "output = self._step(batch, strategy)\n        now = self.clock_of_ends.now()",
                "now = self.clock_of_ends.now()\n        output = self._step(batch, strategy)",
            ),
            Fault(
                "tokens of a step read after its phase",
                "speculation/steps/steps.py",
                "            return self._judged(batch, proposal)\n",
                "            self._show(batch)\n"
                "            verification = self._begin(proposal)\n"
                "            self.runner.execute()\n"
                "            result = self._finish(verification)\n"
                "        return self._read(result, verification.proposal.ids.shape[1])\n",
            ),
            Fault(
                "the end of a phase marked before its work on CUDA",
                "hardware/timing.py",
                "        yield\n        last.record()",
                "        last.record()\n        yield",
            ),
            Fault(
                "draft lengths learn from times without the step",
                "speculation/steps/speculative.py",
                "        seconds = time.perf_counter() - together.started",
                "        seconds = time.perf_counter() - time.perf_counter()",
            ),
        ),
    ),
    Property(
        "A first token is there when the device has computed it.",
        f"{STEPS}test_a_first_token_is_there_when_the_device_has_computed_it",
        (
            Fault(
                "prefill's clock started while the device is busy",
                "runner/prefill.py",
                "            torch.cuda.synchronize(device)\n",
                "",
            ),
            Fault(
                "TTFT from the first of the first tokens on",
                "runner/prefill.py",
                "        first, *marks = self._events\n",
                "        _, *marks = self._events\n        first = marks[0]\n",
            ),
        ),
    ),
    Property(
        "A forward by itself is timed from its start to its end.",
        f"{STEPS}test_a_forward_alone_is_timed_from_its_start_to_its_end",
        (
            Fault(
                "a forward timed with its preparation",
                "bench/latency/forwards.py",
                "    synchronize(runner.device)\n    group.barrier()",
                "    group.barrier()",
            ),
            Fault(
                "a forward timed until it is launched",
                "bench/latency/forwards.py",
                "    synchronize(runner.device)\n    seconds",
                "    seconds",
            ),
        ),
    ),
    Property(
        "Tokens past the end of a request are not counted.",
        "test_scheduler.py::test_tokens_after_the_end_are_dropped",
        (
            Fault(
                "all tokens of a step counted",
                "runner/request.py",
                "return tokens if len(emitted) == before + len(tokens) else emitted[before:]",
                "return tokens",
            ),
            Fault(
                "the output of a step not cut",
                "engine/scheduler.py",
                "return replace(output, token_ids=appended, contexts=contexts)",
                "return replace(output, contexts=contexts)",
            ),
            Fault(
                "a request ends a token late",
                "runner/request.py",
                "num_output >= self.max_new_tokens",
                "num_output > self.max_new_tokens",
            ),
        ),
    ),
    Property(
        "A step's verifications are those of the requests that it ran.",
        f"{RUN}test_metrics_of_the_steps",
        (
            Fault(
                "a step's rows taken from the first request on",
                "records/acceptance.py",
                "in zip(request_ids, *columns, strict=True)",
                "in zip(range(len(drafted)), *columns, strict=True)",
            ),
        ),
    ),
    Property(
        "TPOT is from a sequence's first token to its own last one, without other passes.",
        f"{RUN}test_tpot_is_the_time_from_the_first_token_to_the_last",
        (
            Fault(
                "TPOT's clock shifted by 0.5 ms",
                "bench/recording.py",
                "end_s + (at_s - begun_s)",
                "end_s + (at_s - begun_s) - 0.0005",
            ),
            Fault(
                "all sequences end with the last",
                "bench/recording.py",
                "finished_s=times_s[-1])",
                "finished_s=end_s + max(r.token_times_s[-1] for r in group.requests) - begun_s)",
            ),
            Fault(
                "other passes counted",
                "bench/recording.py",
                "else end_s + (at_s - begun_s)",
                "else at_s",
            ),
        ),
    ),
    Property(
        "TTFT is of each sequence, and prefill counts each prompt once.",
        f"{RUN}test_prefill_rate_and_the_ttft_of_each_sequence",
        (
            Fault(
                "TTFT of the first sequence for all",
                "engine/scheduler.py",
                "times = output.emitted_s or",
                "times = (output.emitted_s or [])[:1] * len(batch.requests) or",
            ),
            Fault(
                "prefill rate doubled",
                "records/computing.py",
                '"prefill_tokens_per_s": sum(tokens) / total_s',
                '"prefill_tokens_per_s": 2 * sum(tokens) / total_s',
            ),
        ),
    ),
    Property(
        "The net speedup begins at the end of prefill, with all that a strategy prepares.",
        f"{RUN}test_the_net_speedup_begins_at_the_end_of_prefill",
        (
            Fault(
                "net speedup without what comes before the first step",
                "records/computing.py",
                "return [end - prefill_end_ms(group) for group, end in pairs]",
                "return [end - prefill_end_ms(g) - (g.begin_ms or 0) for g, end in pairs]",
            ),
            Fault(
                "a strategy's preparation timed until it is launched",
                "systems/prefilled_batching.py",
                "        synchronize(self.device)\n        group",
                "        group",
            ),
        ),
    ),
    Property(
        "Calibration counts in the batches and in the warm-up, once each.",
        f"{RUN}test_calibration_is_counted_once_in_the_warm_up_and_once_in_the_batches",
        (
            Fault(
                "calibration of earlier batches counted again",
                "systems/prefilled_batching.py",
                "(self.draft_length.calibration_s or 0.0) - calibrated_s",
                "self.draft_length.calibration_s or 0.0",
            ),
            Fault(
                "no calibration in the batches",
                "systems/prefilled_batching.py",
                "        self.draft_length.forget_times()\n",
                "",
            ),
        ),
    ),
    Property(
        "The bandwidth is the larger of those before and after a run.",
        f"{RUN}test_the_bandwidth_is_the_larger_of_those_before_and_after",
        (
            Fault(
                "bandwidth as the smaller of two",
                "bench/runner.py",
                "max(self.bandwidths, default=None)",
                "min(self.bandwidths, default=None)",
            ),
        ),
    ),
    Property(
        "Each bandwidth is the best of all reads of all ranks at once.",
        f"{RUN}test_bandwidth_is_the_best_of_all_reads_at_once",
        (
            Fault(
                "bandwidth as the worst of all reads",
                "hardware/timing.py",
                "return max(read_bandwidths(",
                "return min(read_bandwidths(",
            ),
            Fault(
                "bandwidth of the first rank alone",
                "hardware/timing.py",
                "[sum(rank_rates) for",
                "[rank_rates[0] for",
            ),
        ),
    ),
    Property(
        "Every strategy is warmed up, and they take turns at going first.",
        f"{RUN}test_every_strategy_is_warmed_up_and_they_take_turns_at_going_first",
        (
            Fault(
                "the baseline always first",
                "bench/runner.py",
                "self.passes[:] if number % 2 == 0 else self.passes[::-1]",
                "self.passes[:]",
            ),
            Fault(
                "the baseline not warmed up",
                "bench/runner.py",
                "for _ in range(rounds):",
                "for _ in range(rounds * (planned is not self.passes[0])):",
            ),
            Fault(
                "phases of the warm-up timed",
                "bench/runner.py",
                "self.serve(planned, number, PassObserver())",
                "self.serve(planned, number, PassObserver(phases=PhaseTimer(self.device)))",
            ),
        ),
    ),
    Property(
        "Cores are taken where others compute and the run waits.",
        "test_other_load.py::test_cores_are_taken_where_others_compute_and_the_run_waits",
        (
            Fault(
                "what a run waits for itself taken by others",
                "hardware/other_load.py",
                "min(others, waited) +",
                "waited +",
            ),
            Fault(
                "cores that a run does not want taken",
                "hardware/other_load.py",
                "min(others, waited) +",
                "others +",
            ),
            Fault(
                "stolen time not taken",
                "hardware/other_load.py",
                "taken = min(others, waited) + own_stolen",
                "taken = min(others, waited)",
            ),
            Fault(
                "children that have ended counted as others",
                "hardware/other_load.py",
                "after_name[11:15]",
                "after_name[11:13]",
            ),
            Fault(
                "the other ranks of a host counted as others",
                "hardware/other_load.py",
                "        left += children[pid]\n",
                "",
            ),
        ),
    ),
    Property(
        "Drafts that are measured together have one baseline, beside them in each batch.",
        f"{TOGETHER}test_all_drafts_have_one_prefill_and_one_baseline",
        (
            Fault(
                "all drafts always after the baseline",
                "bench/runner.py",
                "self.passes[:] if number % 2 == 0 else self.passes[::-1]",
                "self.passes[:]",
            ),
            Fault(
                "a low-bit copy with a prefill of its own",
                "systems/shared_prefill.py",
                "        model.target_dtype,\n",
                "        (model.target_dtype, config.low_bit),\n",
            ),
        ),
    ),
    Property(
        "Drafts that are far behind after the first batch end there, with the record of one batch.",
        f"{TOGETHER}test_drafts_that_are_far_behind_end_after_the_first_batch",
        (
            Fault(
                "drafts compared with the slowest",
                "bench/study/timed_runner.py",
                "most_ms = FAR_BEHIND * min(times, default=0.0)",
                "most_ms = FAR_BEHIND * max(times, default=0.0)",
            ),
            Fault(
                "their records left out",
                "bench/study/timed_runner.py",
                "        found |= self.ended\n",
                "",
            ),
        ),
    ),
    Property(
        "Of passes that ended early, the batches count that have a baseline.",
        f"{TOGETHER}test_what_is_done_is_kept_when_it_ends_early",
        (
            Fault(
                "a batch without its baseline counted",
                "bench/study/timed_runner.py",
                "pair = self.measured[self.baseline], self.measured[planned]",
                "pair = (self.measured[planned],)",
            ),
            Fault(
                "the prompts of all batches in the record",
                "bench/study/timed_runner.py",
                "planned.system.run.first_batches(num_batches)",
                "planned.system.run",
            ),
        ),
    ),
)
