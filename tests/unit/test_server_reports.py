"""What servers report of their drafts, by the fields that they document: read, converted, and
refused where it does not add up."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from magicdec.names import SERVER_APIS, SERVER_FORMATS, load_object
from magicdec.records.acceptance import (
    ReportedCounts,
    Verification,
    Verifications,
    acceptance_metrics,
)
from magicdec.runner.request import Request, SamplingParams
from magicdec.systems.servers.counters import Counters
from magicdec.systems.servers.details import (
    ANSWERS,
    BOTH,
    COUNTERS,
    ServerCounts,
    ServersDetails,
    conclude,
    count_pass,
    form_of,
    formats,
)
from magicdec.systems.servers.server_format import NOTHING, AskedText

STEPS = ((3, 3), (3, 0), (3, 1), (2, 2))  # of one request: drafted and accepted
COUNTS = ReportedCounts(11, 6, 4, histogram=(1, 1, 1, 1), steps=STEPS)
NUM_TOKENS = 11  # of its output: 1 of the prompt, 4 + 1 + 2 + 3 of verifications
# The last event of an answer by program, with what is read of it.
EVENTS: dict[str, tuple[dict[str, Any], ReportedCounts]] = {
    "vllm": (
        {
            "choices": [],
            "metrics": {
                "speculative_decoding": {
                    "mean_acceptance_length": 2.5,
                    "draft_acceptance_rate": 6 / 11,
                    "acceptance_histogram": [1, 1, 1, 1],
                    "num_spec_steps": 4,
                    "num_accepted_draft_tokens": 6,
                    "num_draft_tokens": 11,
                    "num_spec_tokens": 3,
                    "per_step_accepted": [3, 0, 1, 2],
                    "per_step_drafted": [3, 3, 3, 2],
                }
            },
        },
        COUNTS,
    ),
    "llama.cpp": (
        {"choices": [], "timings": {"predicted_n": 11, "draft_n": 11, "draft_n_accepted": 6}},
        ReportedCounts(11, 6),
    ),
    "sglang": (
        {
            "text": "",
            "meta_info": {
                "finish_reason": {"type": "length", "length": 11},
                "completion_tokens": 11,
                "spec_accept_rate": 0.5,
                "spec_accept_length": 11 / 4,
                "spec_verify_ct": 4,
                "spec_num_correct_drafts": 6,
                "spec_num_proposed_drafts": 12,
                "spec_correct_drafts_histogram": [1, 1, 1, 1],
            },
        },
        ReportedCounts(12, 6, 4, 10, (1, 1, 1, 1)),
    ),
}
# Counters by program, before and after a pass of one such request, with what is counted.
VLLM_COUNTERS = """
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="a}} b"}} {0}.0
vllm:spec_decode_num_drafts_created{{engine="0",model_name="a"}} 1.79e+09
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="a"}} {1}
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="a"}} {2}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="a",position="0"}} {3}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="a",position="1"}} {4}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="a",position="2"}} {5}
vllm:generation_tokens_total{{engine="0",model_name="a"}} {6}
process_start_time_seconds 1.79585952551e+09
"""
LLAMA_COUNTERS = (
    VLLM_COUNTERS.replace("vllm:", "llamacpp:")
    .replace("generation_tokens", "tokens_predicted")
    .replace("process_start", "other_start")
)
SGLANG_COUNTERS = """
sglang:generation_tokens_total{{model_name="a",tp_rank="0"}} {6}
sglang:spec_verify_calls_total{{model_name="a",tp_rank="0"}} {0}
"""
BEFORE = (5, 15, 10, 4, 3, 3, 100)
AFTER = (9, 26, 16, 7, 5, 4, 111)
COUNTED = {
    "vllm": (VLLM_COUNTERS, replace(COUNTS, steps=None)),
    "llama.cpp": (LLAMA_COUNTERS, replace(COUNTS, steps=None)),
    "sglang": (SGLANG_COUNTERS, ReportedCounts(verifications=4, emitted=10)),
}


def ended(request_id: int = 0, num_tokens: int = NUM_TOKENS) -> Request:
    return Request(request_id, (1, 2), SamplingParams(num_tokens), list(range(num_tokens)))


def answers_with(*counts: ReportedCounts, program: str = "vllm") -> ServerCounts:
    return ServerCounts(by_request=dict(enumerate((program, count) for count in counts)))


def counters(text: str, values: tuple[int, ...]) -> Counters:
    return Counters.read(text.format(*values))


def test_every_program_has_a_row() -> None:
    assert set(EVENTS) == set(COUNTED) == set(SERVER_FORMATS)


@pytest.mark.parametrize("program", EVENTS)
def test_an_answer_is_read_by_its_own_form_alone(program: str) -> None:
    event, expected = EVENTS[program]
    found = {name: form.read(event) for name, form in formats().items()}
    assert found == {name: expected if name == program else None for name in SERVER_FORMATS}
    assert expected.find_contradiction(NUM_TOKENS - 1) is None


def test_an_answer_without_drafts_says_so() -> None:
    """Where the program tells that from saying nothing."""
    form = formats()
    assert form["llama.cpp"].read({"timings": {"predicted_n": 5}}) == NOTHING
    running = {"completion_tokens": 5, "finish_reason": None}
    assert form["sglang"].read({"meta_info": running}) is None
    assert form["sglang"].read({"meta_info": running | {"finish_reason": {}}}) is None
    assert form["sglang"].read({"meta_info": running | {"finish_reason": {"type": "s"}}}) == NOTHING
    for event in ({}, {"metrics": None}, {"metrics": {}}, {"timings": 3}, {"meta_info": []}):
        assert [server.read(event) for server in form.values()] == [None] * len(form)


@pytest.mark.parametrize(
    "names",
    ["spec_accepted_drafts spec_proposed_drafts", "spec_accept_token_num spec_draft_token_num"],
)
def test_older_names_of_sglang(names: str) -> None:
    accepted, proposed = names.split()
    event, expected = EVENTS["sglang"]
    new = event["meta_info"]
    old = {name: value for name, value in new.items() if not name.startswith("spec_")}
    old |= {"spec_verify_ct": 4, accepted: 6, proposed: 12, "spec_accept_histogram": [1, 1, 1, 1]}
    assert formats()["sglang"].read({"meta_info": old}) == expected


@pytest.mark.parametrize(
    ("program", "path", "value", "message"),
    [
        ("vllm", "num_draft_tokens", 11.0, "num_draft_tokens is no count"),
        ("vllm", "num_spec_steps", None, "num_spec_steps is no count"),
        ("vllm", "acceptance_histogram", [1, -1], "acceptance_histogram is no count"),
        ("vllm", "per_step_drafted", [3], "have not the same length"),
        ("llama.cpp", "draft_n_accepted", "6", "draft_n_accepted is no count"),
        ("sglang", "spec_correct_drafts_histogram", {"0": 1}, "is no list of counts"),
    ],
)
def test_what_is_no_count_is_named(program: str, path: str, value: Any, message: str) -> None:
    event, _ = EVENTS[program]
    (part,) = (name for name in event if isinstance(event[name], dict))
    inner = event[part].get("speculative_decoding", event[part]) | {path: value}
    odd = {part: {"speculative_decoding": inner} if program == "vllm" else inner}
    counts = ServerCounts()
    counts.observe(0, odd)
    verifications, report = conclude(counts, [ended()], lambda: None)
    assert not verifications.has_drafts and report.source is None
    (problem,) = report.problems
    assert problem.startswith("request 0: ") and message in problem


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accepted": 12}, "12 accepted of 11 draft tokens"),
        ({"verifications": 12}, "12 verifications of 11 draft tokens"),
        ({"verifications": 11, "drafted": 33}, "11 verifications, but 10 output tokens after"),
        ({"histogram": (1, 1, 2, 0)}, "a histogram of 5 accepted draft tokens, not 6"),
        ({"histogram": (2, 1, 1, 1)}, "a histogram of 5 verifications, not 4"),
        ({"steps": STEPS[:3]}, "single steps that are not the 4 verifications"),
        ({"steps": ((3, 0), (3, 3), (3, 0), (2, 3))}, "accepted more draft tokens than it had"),
    ],
)
def test_counts_that_do_not_add_up_are_not_taken(changes: dict[str, Any], message: str) -> None:
    """Of no request, because the mean of the others would be of other requests."""
    odd = replace(COUNTS, **changes)
    requests = [ended(0), ended(1)]
    verifications, report = conclude(answers_with(COUNTS, odd), requests, lambda: None)
    assert not verifications.reported and report.source is None and report.program == "vllm"
    (problem,) = report.problems
    assert problem.startswith("request 1: ") and message in problem


@pytest.mark.parametrize(
    ("steps", "num_tokens"),
    [
        (((3, 3), (3, 3)), 8),  # all drafts are right
        (((1, 0), (1, 0)), 2),  # none is, and no step is without one
        (((2, 2),), 1),  # past the end
    ],
)
def test_counts_at_their_bounds_are_taken(
    steps: tuple[tuple[int, int], ...], num_tokens: int
) -> None:
    counts = ReportedCounts.of([Verification(*step, 1) for step in steps])
    requests = [ended(0, 1 + num_tokens)]
    verifications, report = conclude(answers_with(counts), requests, lambda: None)
    assert verifications.reported == {0: counts} and report.problems == []


def test_an_answer_that_lacks_what_others_have_is_named() -> None:
    _, report = conclude(answers_with(COUNTS), [ended(0), ended(1)], lambda: None)
    assert report.problems == ["request 1 does not say what was drafted, as others do"]


@pytest.mark.parametrize("program", COUNTED)
def test_counters_count_by_difference(program: str) -> None:
    text, expected = COUNTED[program]
    before = counters(text, BEFORE)
    after = counters(text, AFTER)
    found = count_pass(before, after, [ended()])
    assert (found.program, found.counts) == (program, expected)
    taken, report = conclude(ServerCounts(), [ended()], lambda: found)
    assert taken.reported_total == expected
    assert (report.program, report.source, report.problems) == (program, COUNTERS, [])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((9, 26, 16, 7, 5, 4, 99), "went from 100 to 99, so that the server has restarted"),
        ((3, 26, 16, 7, 5, 4, 111), "num_drafts_total went from 5 to 3"),
        (
            (9, 26, 16, 7, 5, 4, 120),
            "20 generated tokens, but the answers have 11; it served other",
        ),
        (
            (9, 26, 16, 7, 5, 4, 105),
            "5 generated tokens, but the answers have 11; it does not count",
        ),
        ((9, 26, 16, 7, 8, 4, 111), "accepted at a position than at the one before"),
        ((9, 26.5, 16, 7, 5, 4, 111), "has grown by 11.5, which is no count"),
        ((9, 26, 17, 7, 5, 4, 111), "a histogram of 6 accepted draft tokens, not 7"),
        ((16, 26, 16, 7, 5, 4, 111), "11 verifications, but 10 output tokens"),
    ],
)
def test_counters_of_something_else_are_not_taken(values: tuple[int, ...], message: str) -> None:
    before = counters(VLLM_COUNTERS, BEFORE)
    after = counters(VLLM_COUNTERS, values)
    requests = [ended()]
    taken, report = conclude(ServerCounts(), requests, lambda: count_pass(before, after, requests))
    assert taken.reported_total is None and report.source is None
    (problem,) = report.problems
    assert problem.startswith("counters: ") and message in problem


def test_a_restart_shows_by_the_start_of_the_process() -> None:
    before = counters(VLLM_COUNTERS, BEFORE)
    after = counters(VLLM_COUNTERS, AFTER)
    with pytest.raises(ValueError, match="restarted"):
        replace(after, started_s=before.started_s and before.started_s + 60).since(before)


def test_counters_fill_in_what_answers_lack() -> None:
    """llama.cpp says two sums by request, and of the whole server all."""
    text, expected = COUNTED["llama.cpp"]
    before = counters(text, BEFORE)
    after = counters(text, AFTER)
    requests = [ended()]
    answers = answers_with(ReportedCounts(11, 6), program="llama.cpp")
    taken, report = conclude(answers, requests, lambda: count_pass(before, after, requests))
    assert report.source == BOTH and taken.reported_total == expected
    metrics = acceptance_metrics(taken, 1)
    assert metrics["draft_acceptance_rate"] == 6 / 11
    assert metrics["mean_acceptance_length"] == 1 + 6 / 4
    assert metrics["acceptance_histogram"] == [1, 1, 1, 1]
    alone = acceptance_metrics(Verifications(reported=taken.reported), 1)
    assert alone["draft_acceptance_rate"] == 6 / 11
    assert alone["mean_acceptance_length"] is alone["acceptance_histogram"] is None


def test_counters_that_count_more_drafts_than_the_answers_are_not_taken() -> None:
    """Other clients may have drafted while this pass emitted all tokens that were counted."""
    text, _ = COUNTED["llama.cpp"]
    before = counters(text, BEFORE)
    after = counters(text, AFTER)
    requests = [ended()]
    answers = answers_with(ReportedCounts(9, 6), program="llama.cpp")
    taken, report = conclude(answers, requests, lambda: count_pass(before, after, requests))
    assert report.source == ANSWERS and taken.reported_total is None
    assert report.problems == [
        "counters: 11 drafted, but the answers have 9, so that they count others too"
    ]


def test_unknown_counters_are_refused() -> None:
    for text in ("", "<html>", "go_gc_cycles_total 3\n", VLLM_COUNTERS + SGLANG_COUNTERS):
        with pytest.raises(ValueError, match="has no counters of a known server"):
            form_of(counters(text, BEFORE))
    old = "llamacpp:tokens_predicted_total {6}\n"
    with pytest.raises(ValueError, match="this version of llama"):
        count_pass(counters(old, BEFORE), counters(old, AFTER), [ended()])
    plain = "vllm:generation_tokens_total {6}\n"
    counted = count_pass(counters(plain, BEFORE), counters(plain, AFTER), [ended()])
    assert counted.counts == NOTHING


def test_reported_counts_give_the_metrics_of_the_same_verifications() -> None:
    """The oracle is this project's own way over single verifications."""
    steps = {
        request: [Verification(d, a, a + 1) for d, a in STEPS[request % 3 :]]
        for request in range(5)
    }
    expected = acceptance_metrics(Verifications(by_request=steps), 6)
    whole = {request: ReportedCounts.of(verifications) for request, verifications in steps.items()}
    assert acceptance_metrics(Verifications(reported=whole), 6) == expected
    without = {
        request: replace(counts, steps=None, emitted=None) for request, counts in whole.items()
    }
    found = acceptance_metrics(Verifications(reported=without), 6)
    lacking = {name for name, value in found.items() if value != expected[name]}
    assert lacking == {
        "tokens_per_verification",
        "tokens_per_verification_interval",
        "judged_per_position",
        "acceptance_per_position",
        "acceptance_per_position_interval",
    } and {found[name] for name in lacking} == {None}


def test_equal_draft_lengths_say_which_positions_were_judged() -> None:
    steps = [Verification(3, accepted, accepted + 1) for accepted in (3, 0, 1, 2, 2)]
    whole = ReportedCounts.of(steps)
    known = replace(whole, steps=None)
    assert known.judged_by_position() == whole.judged_by_position() == [5, 4, 3]
    assert replace(known, drafted=14).judged_by_position() is None
    metrics = acceptance_metrics(Verifications(reported={0: known}), 1)
    assert metrics["acceptance_per_position"] == pytest.approx([4 / 5, 3 / 5, 1 / 5])


def test_nothing_is_not_a_number_in_metrics() -> None:
    for counts in (ReportedCounts(11, 6), ReportedCounts(verifications=4, emitted=10), COUNTS):
        for value in acceptance_metrics(Verifications(reported={0: counts}), 3).values():
            assert not (isinstance(value, float) and math.isnan(value))


@pytest.mark.parametrize("name", SERVER_APIS)
@pytest.mark.parametrize("prompt", [(5, 6), "text"])
def test_every_interface_asks_for_greedy_tokens(name: str, prompt: Any) -> None:
    api = load_object(SERVER_APIS[name])
    body = api.body(AskedText("m", prompt, 7, True))
    flat = body | body.get("sampling_params", {})
    assert flat["temperature"] == 0 and flat["ignore_eos"] is True and body["stream"] is True
    assert 7 in flat.values() and (list(prompt) if prompt != "text" else prompt) in flat.values()


def test_ids_of_sglang_are_new_ones() -> None:
    """Of all so far by default, and of new ones with --incremental-streaming-output."""
    api = load_object(SERVER_APIS["sglang"])
    for sent, before in (([4, 5, 6], 1), ([5, 6], 1), ([4, 5, 6], 0)):
        event = {"output_ids": sent, "meta_info": {"completion_tokens": 3}}
        (choice,) = api.event(event, before)["choices"]
        assert choice["token_ids"] == [4, 5, 6][before:]


def test_only_what_all_groups_report_is_taken_of_them() -> None:
    """A source that one group lacks says nothing of all; why is said, and nothing twice."""

    def group(source: str | None, *problems: str, program: str | None = "vllm") -> ServersDetails:
        return ServersDetails(program=program, source=source, missing=[], problems=[*problems])

    both = group("answers and counters")
    assert ServersDetails.joined([both]) == ServersDetails.joined([both, both]) == both
    answers = group("answers", "counters: 17 generated tokens")
    alone = "counters: known of 1 of 2 repeats alone"
    assert ServersDetails.joined([both, answers]) == group("answers", answers.problems[0], alone)
    joined = ServersDetails.joined([group(None, "a", "b", program=None), group("counters", "b")])
    assert joined == group(None, "a", "b", alone)
    assert not joined.takes_totals
