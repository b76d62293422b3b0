"""Of audits of other programs' servers."""

from __future__ import annotations

from faults.fault import Fault, Property

AUDIT = "test_audit.py::"
STATISTICS = "test_audit_statistics.py::"
PAYS = "test_audit_pays.py::"
ROOM = "bench/audit/"

PROPERTIES = (
    Property(
        "An audit finds and names the faults of a server.",
        f"{AUDIT}test_a_planted_fault_is_found_and_named",
        (
            Fault(
                "any margin is noise",
                f"{ROOM}noise.py",
                "return Noise(pairs, min(tolerance, MOST_NOISE), relative, contradictions)",
                "return Noise(pairs, 100.0, relative, contradictions)",
            ),
            Fault(
                "log-probabilities that contradict each other are noise",
                f"{ROOM}noise.py",
                "if pair.largest > CONTRADICTION:",
                "if False:",
            ),
            Fault(
                "no token of a draw is tested",
                f"{ROOM}sampling.py",
                "beginnings: list[FirstTokens] = [(), (place.first,)]",
                "return []",
            ),
            Fault(
                "counters are compared with themselves",
                f"{ROOM}counters.py",
                "if counted != sum(known):",
                "if counted != counted:",
            ),
            Fault(
                "the rates of an answer are as reported",
                f"{ROOM}counters.py",
                "[*_contradictions(answer), *_wrong_rates(answer)]",
                "_contradictions(answer)",
            ),
            Fault(
                "no state loses acceptance",
                f"{ROOM}states.py",
                "is_little = warm > (1 - LEAST_LOSS) * cold",
                "is_little = True",
            ),
        ),
    ),
    Property(
        "An audit of a sound server finds nothing.",
        f"{AUDIT}test_a_sound_server_is_clean",
        (
            Fault(
                "no draft may be accepted past the end",
                f"{ROOM}counters.py",
                "if verified + accepted > count + past:",
                "if verified + accepted > count:",
            ),
        ),
    ),
    Property(
        "Preemptions that no server counts are not judged.",
        f"{AUDIT}test_preemption_is_not_judged_where_none_is_seen",
        (
            Fault(
                "any request was preempted",
                f"{ROOM}preemption.py",
                "return counted.count(counter) or 0, answers",
                "return size, answers",
            ),
        ),
    ),
    Property(
        "A chi-squared test of draws has its level and its power.",
        f"{STATISTICS}test_that_many_draws_find_that_distance",
        (
            Fault(
                "half the draws",
                f"{ROOM}statistics.py",
                "return math.ceil(noncentrality / (4 * total_variation**2))",
                "return math.ceil(noncentrality / (8 * total_variation**2))",
            ),
        ),
    ),
    Property(
        "Wrong draws look wrong, and are found by those that are drawn then.",
        f"{STATISTICS}test_wrong_draws_are_found_with_the_power_of_both_draws",
        (
            Fault(
                "each of both tests has the power of the whole",
                f"{ROOM}sampling.py",
                "power = math.sqrt(POWER)",
                "power = POWER**2",
            ),
        ),
    ),
    Property(
        "Right draws are rejected as often as the level says, though some are drawn again.",
        f"{STATISTICS}test_right_draws_that_look_wrong_are_drawn_again",
        (
            Fault(
                "the second draws alone",
                f"{ROOM}sampling.py",
                "p_value=SUSPICION * again.p_value",
                "p_value=again.p_value",
            ),
        ),
    ),
    Property(
        "What looks right keeps its p-value beside what is drawn again.",
        f"{STATISTICS}test_a_depth_that_looks_right_keeps_its_p_value_beside_one_that_is_drawn_again",
        (
            Fault(
                "each depth has the p-value of both draws",
                f"{ROOM}sampling.py",
                "if first.p_value > SUSPICION:",
                "if False:",
            ),
        ),
    ),
    Property(
        "The chance of a loss of acceptance is Student's.",
        f"{STATISTICS}test_the_chance_of_a_mean_is_that_of_scipys_t_test",
        (
            Fault(
                "a degree of freedom too many of a place",
                f"{ROOM}statistics.py",
                "(spread / math.sqrt(len(values))), len(values) - 1))",
                "(spread / math.sqrt(len(values))), len(values)))",
            ),
        ),
    ),
    Property(
        "Samples are drawn where lookups draft.",
        f"{AUDIT}test_samples_are_drawn_where_lookups_draft",
        (
            Fault(
                "the text of a place is as it was",
                f"{ROOM}sampling.py",
                "return replace(self, ids=(*self.ids[-LOOKED_UP:], self.first, draft, *self.ids))",
                "return self",
            ),
        ),
    ),
    Property(
        "The noise of the probabilities is no fault of draws.",
        f"{STATISTICS}test_an_error_of_the_probabilities_is_no_fault",
        (
            Fault(
                "an exact reference",
                f"{ROOM}statistics.py",
                "chi_squared_tail(statistic, len(seen) - 1, total * error**2)",
                "chi_squared_tail(statistic, len(seen) - 1, 0.0)",
            ),
        ),
    ),
    Property(
        "The expected distribution of draws is that of temperature and top-k.",
        f"{STATISTICS}test_the_expected_distribution_is_that_of_sampling",
        (
            Fault(
                "temperature multiplies",
                f"{ROOM}sampling.py",
                "math.exp(value / sampling.temperature)",
                "math.exp(value * sampling.temperature)",
            ),
        ),
    ),
    Property(
        "The steps of an answer follow from its tokens and what was accepted.",
        f"{STATISTICS}test_steps_follow_from_what_is_accepted",
        (
            Fault(
                "the token of the prompt's forward is a step",
                f"{ROOM}counting.py",
                "count = len(answer.output_ids) - 1\n    if answer.counts is not None and",
                "count = len(answer.output_ids)\n    if answer.counts is not None and",
            ),
        ),
    ),
    Property(
        "A token that llama.cpp sends no event of keeps its place.",
        "test_stream_times.py::test_a_token_without_an_event_keeps_its_place",
        (
            Fault(
                "it is left out",
                "systems/servers/llama_cpp.py",
                'choice["num_lost"] = max(0, predicted - num_before - len(tokens))',
                'choice["num_lost"] = 0',
            ),
        ),
    ),
    Property(
        "Drafts pay where every round with them is faster than every round without.",
        f"{PAYS}test_verdicts_of_cells",
        (
            Fault(
                "one round decides",
                f"{ROOM}pays.py",
                "return cls(value, min(above) / max(below), max(above) / min(below))",
                "return cls(value, value, value)",
            ),
        ),
    ),
    Property(
        "Plain decoding that is measured again shows whether the machine has changed.",
        f"{PAYS}test_plain_decoding_that_was_measured_twice_has_all_its_rounds",
        (
            Fault(
                "the last measurement of an arm counts",
                f"{ROOM}pays.py",
                "first = arms.get(cell.arm)",
                "first = None",
            ),
        ),
    ),
    Property(
        "An arm that is not what its name says is named.",
        f"{PAYS}test_an_arm_that_is_not_what_its_name_says",
        (
            Fault(
                "any arm is what its name says",
                f"{ROOM}arms.py",
                "if arm.name in MEANINGS and is_other:",
                "if False:",
            ),
        ),
    ),
    Property(
        "An arm that serves another model is named.",
        f"{PAYS}test_an_arm_with_another_model_is_named",
        (
            Fault(
                "any model is the same",
                f"{ROOM}noise.py",
                "if median > MOST_NOISE:",
                "if False:",
            ),
        ),
    ),
    Property(
        "Energy is that of packages and their memory.",
        "test_energy.py::test_packages_and_their_memory_are_summed",
        (
            Fault(
                "zones inside of packages count twice",
                "hardware/energy.py",
                "if not name.startswith(COUNTED):",
                "if False:",
            ),
        ),
    ),
    Property(
        "A counter of energy may start again.",
        "test_energy.py::test_a_counter_that_starts_again",
        (
            Fault(
                "a counter never starts again",
                "hardware/energy.py",
                "(self.most if after < before else 0)",
                "0",
            ),
        ),
    ),
    Property(
        "Between two batch sizes that were measured, drafts are no longer than at both.",
        f"{PAYS}test_ranges_start_at_1_and_have_no_gaps",
        (
            Fault(
                "the larger length is for sizes between",
                f"{ROOM}pays.py",
                "min(lengths[before], lengths[size])",
                "max(lengths[before], lengths[size])",
            ),
        ),
    ),
)
