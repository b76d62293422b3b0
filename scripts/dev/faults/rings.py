"""Of a ring of stages through which samples circulate."""

from __future__ import annotations

from faults.fault import Fault, Property

STAGES = "test_stage_times.py::"
WARM_UP = "test_warm_up.py::"
EMULATION = "test_emulation.py::"
RING = "test_pipeline_options.py::"
TRACES = "test_ring_traces.py::"

PROPERTIES = (
    Property(
        "A stage of a ring waits from its first message on, whatever it waits for.",
        f"{STAGES}test_another_stage_waits_from_its_first_message_on",
        (
            Fault(
                "waits of a stage before its second run left out",
                "systems/mdi_llm/details.py",
                "heads[-1].end_s - turns[0].begin_s if",
                "heads[-1].end_s - turns[1].begin_s if",
            ),
            Fault(
                "a stage's time until it answered its last run",
                "systems/mdi_llm/details.py",
                "heads[-1].end_s - turns[0].begin_s if",
                "turns[-1].end_s - turns[0].begin_s if",
            ),
        ),
    ),
    Property(
        "The time of a message that decodes is a median without prompts.",
        f"{STAGES}test_only_runs_that_decode_are_in_the_median",
        (
            Fault(
                "prompts timed as decoded tokens",
                "systems/mdi_llm/details.py",
                "span.run not in prompts if stage else span.value > 0",
                "stage > 0 or span.value > 0",
            ),
        ),
    ),
    Property(
        "The first stage of a ring waits for prompts too.",
        f"{STAGES}test_the_first_stage_waits_for_prompts_too",
        (
            Fault(
                "waits of the first stage taken for its work",
                "systems/mdi_llm/recurrent.py",
                "            message = self.ends.inbound.receive()\n"
                "            arrived_s = time.perf_counter()\n",
                "            arrived_s = time.perf_counter()\n"
                "            message = self.ends.inbound.receive()\n",
            ),
            Fault(
                "the first stage's time from its first message home on",
                "systems/mdi_llm/recurrent.py",
                "                with self.spans.during(SpanKind.HEAD, -1):\n"
                "                    self._take_arrivals()\n",
                "                self._take_arrivals()\n",
            ),
            Fault(
                "prompts of the next step timed as decoded tokens",
                "systems/mdi_llm/recurrent.py",
                "flight.is_decode and len(self.prompts) == num_prompts",
                "flight.is_decode",
            ),
        ),
    ),
    Property(
        "A ring serves requests from their arrival on.",
        "test_recurrent_order.py::test_a_ring_drains_and_begins_again_with_the_next_request",
        (
            Fault(
                "requests begin before they have arrived",
                "systems/mdi_llm/recurrent.py",
                "in self._arrivals.take(self._arrivals.count(now)):",
                "in self._arrivals.take(len(self._arrivals)):",
            ),
            Fault(
                "a ring ends before the last request has arrived",
                "systems/mdi_llm/recurrent.py",
                "        while self._under_way or self._arrivals:",
                "        while self._under_way:",
            ),
        ),
    ),
    Property(
        "The spans of a ring's first stage hold its work alone.",
        f"{STAGES}test_the_spans_of_the_first_stage_are_its_work_alone",
        (
            Fault(
                "a span with the link",
                "systems/mdi_llm/recurrent.py",
                "            out = self.stage.forward(token_ids, rows, status)\n",
                "            out = self.stage.forward(token_ids, rows, status)\n"
                "            time.sleep(0.25)\n",
            ),
        ),
    ),
    Property(
        "A message is queued from its sending until it is taken.",
        f"{STAGES}test_a_message_is_queued_from_its_sending_until_it_is_taken",
        (
            Fault(
                "the time on the link is not in the queue",
                "systems/stages/stage.py",
                "            if value is not None:\n",
                "            if answer is not None:\n"
                "                outbound.send(answer)\n                answer = None\n"
                "            if value is not None:\n",
            ),
        ),
    ),
    Property(
        "The lateness of sleeps does not add up.",
        f"{EMULATION}test_the_lateness_of_sleeps_does_not_add_up",
        (
            Fault(
                "emulated work from when its rank woke up",
                "systems/stages/emulation.py",
                "        self.due_s += seconds\n",
                "        self.due_s = time.perf_counter() + seconds\n",
            ),
            Fault(
                "a stage that begins before it is free",
                "systems/stages/emulation.py",
                "        self.due_s = max(self.due_s, due_s)\n",
                "        self.due_s = due_s\n",
            ),
            Fault(
                "stages that do not sleep",
                "systems/stages/emulation.py",
                "        sleep_until(self.due_s)\n",
                "",
            ),
            Fault(
                "a whole stage's time for each layer",
                "systems/stages/emulation.py",
                "self.emulated.sleep(self.seconds / len(self.layers))",
                "self.emulated.sleep(self.seconds)",
            ),
        ),
    ),
    Property(
        "An emulated link counts from when a message was due.",
        f"{EMULATION}test_an_emulated_link_counts_from_when_a_message_was_due",
        (
            Fault(
                "a link from when a message was really sent",
                "systems/stages/emulation.py",
                "due_s = self.delay_s + self.emulated.now_s",
                "due_s = self.delay_s + time.perf_counter()",
            ),
            Fault(
                "a link without delay",
                "systems/stages/emulation.py",
                "            sleep_until(due_s)\n",
                "",
            ),
        ),
    ),
    Property(
        "Queues are those between two stages, by one clock.",
        f"{TRACES}test_queues_by_the_times_of_both_sides",
        (
            Fault(
                "the turns of the first stage before any run came home",
                "systems/mdi_llm/details.py",
                "[span for span in heads if span.run >= 0]",
                "heads[:-1]",
            ),
            Fault(
                "what a stage sent taken by itself",
                "systems/mdi_llm/details.py",
                "zip(computed[stage - 1], taken, strict=True)",
                "zip(computed[stage], taken, strict=True)",
            ),
        ),
    ),
    Property(
        "A clock is compared by the fastest round trip, whose middle it is.",
        f"{TRACES}test_a_clock_is_compared_by_the_fastest_round_trip",
        (
            Fault(
                "the slowest round trip",
                "systems/stages/clocks.py",
                "return min(comparisons, key=",
                "return max(comparisons, key=",
            ),
            Fault(
                "an answer taken for the begin of its round trip",
                "systems/stages/clocks.py",
                "Ahead(answer.item() - begin_s - error_s, error_s)",
                "Ahead(answer.item() - begin_s, error_s)",
            ),
        ),
    ),
    Property(
        "A stage of a ring computes until the device is done.",
        f"{STAGES}test_a_message_that_decodes_takes_until_the_device_is_done",
        (
            Fault(
                "a stage timed until its work is launched",
                "systems/mdi_llm/ring_stage.py",
                "        wait_for_stream(out.device)\n        return out if status",
                "        return out if status",
            ),
        ),
    ),
    Property(
        "Drafting in a ring takes until the device is done.",
        f"{STAGES}test_drafting_takes_until_the_device_is_done",
        (
            Fault(
                "drafts timed until they are launched",
                "systems/mdi_llm/recurrent.py",
                "        wait_for_stream(self.runner.device)\n",
                "",
            ),
        ),
    ),
    Property(
        "Metrics of a ring are those of what its stages counted.",
        f"{RING}test_metrics_of_a_ring",
        (
            Fault(
                "waiting taken for work",
                "systems/mdi_llm/details.py",
                "return 1 - self.waiting_s / self.total_s",
                "return self.waiting_s / self.total_s",
            ),
            Fault(
                "the predicted round of samples in place of lanes",
                "systems/mdi_llm/details.py",
                "round_seconds(stage_s, links, lanes[0])",
                "round_seconds(stage_s, links, lanes[0] * lanes[1])",
            ),
        ),
    ),
    Property(
        "Drafts of a ring are counted by row, their time by message.",
        f"{RING}test_metrics_of_drafts",
        (
            Fault(
                "tokens of a round by message",
                "systems/mdi_llm/details.py",
                "num_later / drafts.num_rounds",
                "num_later / drafts.num_messages",
            ),
            Fault(
                "time of drafts by row",
                "systems/mdi_llm/details.py",
                "drafts.draft_s / drafts.num_messages",
                "drafts.draft_s / drafts.num_rounds",
            ),
        ),
    ),
    Property(
        "A round takes the slowest stage for each lane, or all stages and links once.",
        "test_layer_split.py::test_a_round_is_bound_by_the_slowest_stage_or_by_all",
        (
            Fault(
                "a round without its links",
                "distributed/layer_split.py",
                "sum(stages_s) + sum(links_s))",
                "sum(stages_s))",
            ),
        ),
    ),
    Property(
        "Every drafted row of a lane is counted.",
        "test_recurrent_order.py::test_an_end_token_among_accepted_drafts_ends_the_sample",
        (
            Fault(
                "drafts of a message counted as those of one row",
                "systems/mdi_llm/recurrent.py",
                "ids = [request.request_id for request in flight.requests]",
                "ids = [request.request_id for request in flight.requests[:1]]",
            ),
        ),
    ),
    Property(
        "A ring counts, times and shows what comes after its warm-up.",
        f"{WARM_UP}test_a_ring_counts_what_comes_after_it",
        (
            Fault(
                "a ring's spans not begun anew",
                "systems/mdi_llm/recurrent.py",
                "        self.spans = Spans()\n        self.samples = []\n"
                "        self.prompts = set()\n",
                "",
            ),
            Fault(
                "messages of the warm-up counted",
                "systems/mdi_llm/system.py",
                "sent = self.ends.outbound.traffic.since(before)",
                "sent = self.ends.outbound.traffic",
            ),
            Fault(
                "drafts of a ring's warm-up counted",
                "systems/mdi_llm/system.py",
                "            self.speculation.counts = DraftCounts()\n",
                "            pass\n",
            ),
        ),
    ),
)
