"""Of pipelines in virtual time."""

from __future__ import annotations

from faults.fault import Fault, Property

SIMULATE = "test_simulate.py::"

PROPERTIES = (
    Property(
        "A token takes all stages and all links, the one home too.",
        f"{SIMULATE}test_plain_decoding_takes_all_stages_and_links_for_each_token",
        (
            Fault(
                "no link home",
                "predict/simulator/simulation.py",
                "at = sent + (machine.link_s if last > 0 else 0.0)",
                "at = sent + (machine.link_s if stage < last else 0.0)",
            ),
            Fault(
                "tokens/s with the first token",
                "predict/simulator/run.py",
                "(len(t) - 1) / (t[-1] - t[0])",
                "len(t) / (t[-1] - t[0])",
            ),
            Fault(
                "work of the prompt counted",
                "predict/simulator/run.py",
                "return max(0.0, min(end, last) - max(begin, first))",
                "return max(0.0, min(end, last) - begin)",
            ),
        ),
    ),
    Property(
        "A link is occupied for the bytes of a message.",
        f"{SIMULATE}test_a_link_is_occupied_for_the_bytes_of_a_message",
        (
            Fault(
                "messages without headers",
                "predict/simulator/simulation.py",
                "machine.transfer_s(VOID_BYTES + (0 if is_void else size))",
                "machine.transfer_s(0 if is_void else size)",
            ),
            Fault(
                "hidden states sent home by the last stage",
                "predict/simulator/simulation.py",
                "size = size if stage == last else rows * machine.row_bytes",
                "size = rows * machine.row_bytes",
            ),
        ),
    ),
    Property(
        "Messages take turns on a link, with the bytes of all their rows.",
        f"{SIMULATE}test_messages_take_turns_on_a_link",
        (
            Fault(
                "a link carries any number of messages at once",
                "predict/simulator/simulation.py",
                "sent = end if before is None else max(end, before.sent_s[stage])",
                "sent = end",
            ),
            Fault(
                "messages of one row",
                "predict/simulator/simulation.py",
                "size = size if stage == last else rows * machine.row_bytes",
                "size = size if stage == last else machine.row_bytes",
            ),
        ),
    ),
    Property(
        "A stage stops after the layer in which it hears of a cancellation.",
        f"{SIMULATE}test_a_cancelled_run_stops_after_its_layer",
        (
            Fault(
                "a stage stops before the layer that runs",
                "predict/simulator/simulation.py",
                "math.ceil((cancelled_s[stage] - start) / layer_s)",
                "math.floor((cancelled_s[stage] - start) / layer_s)",
            ),
            Fault(
                "a run computed behind a stage that skipped it",
                "predict/simulator/simulation.py",
                "if is_void or (cancelled_s is not None and cancelled_s[stage] <= start):",
                "if cancelled_s is not None and cancelled_s[stage] <= start:",
            ),
            Fault(
                "runs behind a cancelled one not computed again",
                "predict/simulator/simulation.py",
                "            if is_changed:\n                self._compute(flight, before)",
                "            if flight.cancelled_s is not None:\n"
                "                self._compute(flight, before)",
            ),
        ),
    ),
    Property(
        "A cancellation takes its time to each stage.",
        f"{SIMULATE}test_a_cancellation_takes_its_time",
        (
            Fault(
                "cancellations known at once",
                "predict/simulator/simulation.py",
                "[self._now_s + delay for delay in delays]",
                "[self._now_s for delay in delays]",
            ),
            Fault(
                "cancelled work counted as useful",
                "predict/simulator/run.py",
                "if run not in trace.cancelled)",
                "if run >= 0)",
            ),
        ),
    ),
    Property(
        "A stage takes more for more rows.",
        f"{SIMULATE}test_a_stage_takes_more_for_more_rows",
        (
            Fault(
                "the first row counted as a further one",
                "predict/simulator/simulation.py",
                "(1 + self.row_cost * (num_rows - 1))",
                "(1 + self.row_cost * num_rows)",
            ),
        ),
    ),
    Property(
        "A round of the ring is as long as the formula.",
        f"{SIMULATE}test_a_round_of_the_ring_is_as_long_as_the_formula",
        (
            Fault(
                "a stage computes two runs at once",
                "predict/simulator/simulation.py",
                "start = at if before is None else max(at, before.end_s[stage])",
                "start = at if before is None else max(at, before.start_s[stage])",
            ),
        ),
    ),
    Property(
        "Synchronous steps take their drafts and one round.",
        f"{SIMULATE}test_a_right_draft_makes_synchronous_steps_as_long_as_the_formula",
        (
            Fault(
                "drafts that take no time",
                "predict/simulator/simulation.py",
                "self._draft_s = self._now_s + self.machine.draft_s",
                "self._draft_s = self._now_s",
            ),
        ),
    ),
    Property(
        "Simulated times between tokens are defined as those of records.",
        f"{SIMULATE}test_times_between_tokens_are_defined_as_in_records",
        (
            Fault(
                "the largest gap as the 99th percentile",
                "predict/simulator/run.py",
                "p99_itl_ms=percentile(itl_ms, 99)",
                "p99_itl_ms=max(itl_ms, default=None)",
            ),
            Fault(
                "no time between tokens of one commit",
                "predict/simulator/run.py",
                "pairwise(sorted(set(token_times)))",
                "pairwise(token_times)",
            ),
        ),
    ),
    Property(
        "A cluster divides layers and nodes.",
        f"{SIMULATE}test_a_cluster_divides_layers_and_nodes",
        (
            Fault(
                "one all-reduce a layer",
                "predict/simulator/simulation.py",
                "2 * self.all_reduce_s if width > 1",
                "self.all_reduce_s if width > 1",
            ),
            Fault(
                "layers that are left over lost",
                "predict/simulator/simulation.py",
                "(num_layers + (stage < rest))",
                "num_layers",
            ),
        ),
    ),
)
