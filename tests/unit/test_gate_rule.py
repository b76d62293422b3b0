"""`magicdec compare` and the rule of the gate: what passes, what does not, and what is said."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, Command
from synthetic_records import (
    draw_chances,
    draw_pass,
    drawn,
    drawn_command,
    parse_record,
    parts_of,
    record_of,
    served,
    with_fields,
    with_losses,
)
from written_records import failed, line_of, mismatch, with_ties

from magicdec.cli import compare as compare_command
from magicdec.records.acceptance import PromptCounts
from magicdec.records.comparison.compare import (
    Match,
    PairedCounts,
    change_of,
    compare,
    exit_code,
    level_for,
    pair_of,
)
from magicdec.records.comparison.conditions import kind_of, method_of, weight_dtypes
from magicdec.records.correctness import Correctness
from magicdec.records.drafted import DraftedPass
from magicdec.records.pass_record import PassRecord, verifications_of
from magicdec.records.reading import load_passes
from magicdec.records.recomputing import unfounded_metric
from magicdec.records.record import Status

Gate = Callable[..., tuple[int, str]]
COMMITTED = ROOT / "results" / "baselines" / "acceptance.jsonl"
BASELINES = [baseline for baseline in load_passes(COMMITTED) if baseline.shares_prefill]
CERTAIN = [b for b in BASELINES if b.metrics and b.metrics.draft_acceptance_rate == 1.0]
OTHERS = [b for b in BASELINES if b not in CERTAIN]


@pytest.fixture
def gate(tmp_path: Path, command: Command) -> Gate:
    """Exit code and output of `magicdec compare`, for new and baseline records."""

    def run(new: Sequence[PassRecord], old: Sequence[PassRecord], *flags: str) -> tuple[int, str]:
        files = tmp_path / "new", tmp_path / "old"
        for path, records in zip(files, (new, old), strict=True):
            path.write_text("".join(f"{record.to_json()}\n" for record in records))
        code, out, err = command(compare_command, *files, *flags)
        assert err == ""
        return code, out

    return run


def test_equal_counts_are_the_same(gate: Gate) -> None:
    code, out = gate([drawn()], [drawn()])
    assert code == 0 and "all counts as before" in out and "1 same" in out
    assert "1 of 1 baselines covered, 0 not covered" in out
    assert out.startswith("--draft self --kv_policy streaming_llm --budget 257 --gamma 4: ")


@pytest.mark.parametrize("share", [0.05, 0.2])
def test_a_loss_beyond_the_margin_and_the_noise_is_a_regression(gate: Gate, share: float) -> None:
    old = drawn(num_prompts=16)
    code, out = gate([with_losses(old, share)], [old])
    assert code == 1 and ": regression, beyond the margin of 2 % and the noise" in out
    code, out = gate([old], [with_losses(old, share)])
    assert code == 0 and ": gain, beyond the margin" in out and "1 gain" in out


def test_a_change_within_the_margin_is_said_and_passes(gate: Gate) -> None:
    old = drawn(num_prompts=16)
    code, out = gate([with_losses(old, 0.01)], [old])
    assert code == 0 and ": tolerated, " in out and "1 tolerated" in out
    code, out = gate([with_losses(old, 0.05)], [old], "--margin", "0.5")
    assert code == 0 and "tolerated, within the margin of 50 %" in out


def test_a_difference_inside_the_noise_is_said_and_passes(gate: Gate) -> None:
    """Two draws of the same distribution, as after rounding has changed every output."""
    for seed in range(10):
        new = with_outputs(drawn(seed=seed + 1), ["0"] * 8)
        code, out = gate([new], [drawn()])
        assert code == 0 and "inside the noise" in out and "; 8 outputs differ" in out, seed


def test_unchanged_acceptance_rarely_fails_many_rows_at_once() -> None:
    """The rows share the false alarms if rounding may explain their changes."""
    alarms = 0
    for trial in range(20):
        rows = [(drawn(seed=100 * trial + i, budget=40 + i), 40 + i) for i in range(8)]
        new = [
            with_outputs(drawn(seed=100 * trial + 50 + i, budget=budget), ["0"] * 8)
            for i, (_, budget) in enumerate(rows)
        ]
        alarms += exit_code(compare(new, [row for row, _ in rows])) != 0
    assert alarms == 0


def test_the_rule_case_by_case(gate: Gate) -> None:
    """New records, baselines and flags, with the exit code and what is said."""
    good = drawn()
    sixteen = drawn(num_prompts=16)
    three = drawn(num_prompts=3)
    little = with_losses(good, 0.004, seed=1)
    nothing = record_of(draw_pass(np.random.default_rng(0), np.full(3, 1e-9), 4, 63))
    rates = np.array([0.9, *[1e-9] * 7])
    one_of_eight = record_of(draw_pass(np.random.default_rng(0), rates, 4, 63))
    unchecked = replace(
        good,
        status=Status.UNVERIFIED,
        correctness=Correctness(None, num_tokens=99),
        num_differing=None,
        reference=None,
    )
    bad = parse_record(failed())
    wrong = parse_record(mismatch())
    ties = parse_record(with_ties(line_of(good)))
    stale = [drawn(0.3), drawn(0.81)]
    every = ("--require_all",)
    for new, old, flags, code, message in (
        ([sixteen], [sixteen], (), 0, "1 same"),
        ([little], [good], (), 0, ""),
        # A baseline without a margin, as of a draft that is the target, tolerates no loss.
        ([little], [with_fields(good, margin=0.0)], (), 1, "regression, any loss is one"),
        ([good], [with_fields(little, margin=0.0)], (), 0, ""),
        ([three], [three], (), 0, "1 same"),  # equal counts need no statistics
        ([with_losses(three, 0.2)], [three], (), 3, "not comparable, 3 prompts; 4 are needed"),
        (
            [with_losses(three, 0.2)],
            [three],
            ("--margin", "0.5"),
            0,
            "tolerated, within the margin of 50 %",
        ),
        ([nothing], [three], (), 1, "no draft is accepted any more"),
        ([three], [nothing], (), 3, "not comparable, 3 prompts; 4 are needed"),
        ([good], [one_of_eight], (), 3, "not comparable, without one of the prompts nothing is"),
        # A stale baseline hides no regression from another.
        ([drawn(0.3)], stale, (), 1, "regression"),
        ([drawn(0.3)], stale[::-1], (), 1, "regression"),
        ([drawn(0.81)], stale, (), 0, ""),
        ([unchecked], [good], (), 3, "not comparable: its tokens were compared with nothing"),
        ([unchecked], [good], (), 3, "0 of 1 baselines covered"),
        ([bad], [good], (), 1, "the new pass: FAILED: RuntimeError: [enforce fail]"),
        ([wrong], [good], (), 1, "the new pass: MISMATCH, 1 of 8 requests differ from static"),
        ([wrong], [good], (), 1, "0 of 1 baselines covered, 1 not covered"),
        ([good], [good, bad], every, 3, "1 of 2 baselines covered"),
        ([good], [wrong], (), 3, "not comparable: the baseline's status is mismatch"),
        ([ties], [good], (), 0, "[verified_with_ties]: acceptance rate"),
        ([good], [ties], (), 0, "1 same"),
        ([good], [good, with_fields(drawn(0.3), config__model__dtype="bfloat16")], (), 0, "same"),
        ([good], [], (), 3, "not comparable: the baseline has no such record"),
        ([good], [drawn(budget=65)], (), 3, "not comparable: the baseline has no such record"),
        (
            [with_fields(good, metrics__draft_acceptance_rate=None)],
            [good],
            (),
            3,
            "not comparable: the new record has no draft_acceptance_rate",
        ),
    ):
        found, out = gate(new, old, *flags)
        assert found == code and message in out, (code, message, out)


def test_baselines_without_a_new_record_are_named_and_counted(gate: Gate) -> None:
    """And fail where all of them are asked for."""
    old = [drawn(budget=b) for b in (33, 65, 129)]
    for flags, expected in ((), 0), (("--require_all",), 3):
        code, out = gate([old[1]], old, *flags)
        assert code == expected and "1 of 3 baselines covered, 2 not covered" in out
        for budget in (33, 129):
            assert f"--budget {budget} --gamma 4: no new record covers this baseline" in out
        assert out.count("no new record covers") == 2
    assert gate(old, old, "--require_all")[0] == 0


def test_what_drafts_in_a_run_is_judged_and_what_was_served_is_shown(gate: Gate) -> None:
    """The pass without drafts of a run is in neither."""
    records = [*drawn_command(), served()]
    faster = with_fields(records[-1], metrics__output_throughput=1.0)
    code, out = gate([*records[:-1], faster], records)
    assert code == 0 and "1 same" in out and "1 of 1 baselines covered" in out
    assert out.splitlines()[0] == "inflight+draft: demo (float32)"
    assert out.count("output_throughput") == 1 and "static" not in out
    assert gate([faster], [served()])[0] == 0
    assert gate([parse_record(failed())], records)[0] == 1


OTHER = {
    "model": ({"workload__model": "other"}, "model other, was demo"),
    "weights": ({"workload__model_sha256": "x"}, "model demo has other weights"),
    "prefix": ({"workload__sha256": "x", "workload__prefix_len": 4}, "prefix_len 4, was 8"),
    "prompts": ({"workload__sha256": "x", "workload__num_prompts": 2}, "num_prompts 2, was 8"),
    "seed": ({"workload__sha256": "x", "workload__seed": 9}, "seed 9, was 0"),
    "format": (
        {"workload__sha256": "x", "config__workload__prompt_format": "chat"},
        "prompt_format chat, was plain",
    ),
    "text": ({"workload__sha256": "x"}, "dataset demo has other text for the same settings"),
    "dtype": ({"config__model__dtype": "bfloat16"}, "dtype bfloat16, was float32"),
    "int8": ({"config__model__target_dtype": "int8"}, "weights int8, was float32"),
    "int8 cache": ({"config__attention__kv_dtype": "int8"}, "kv_dtype int8, was float32"),
    "length": ({"config__workload__gen_len": 9}, "gen_len 9, was 64"),
    "corpus": ({"config__decoding__lookup_corpus": "a"}, "lookup_corpus a, was None"),
    "eos": ({"config__decoding__ignore_eos": "other"}, "ignore_eos other, was False"),
}


@pytest.mark.parametrize("condition", OTHER)
def test_the_first_cause_is_named_where_conditions_differ(gate: Gate, condition: str) -> None:
    fields, message = OTHER[condition]
    code, out = gate([with_fields(drawn(), **fields)], [drawn()])
    assert code == 3 and f"not comparable: {message}" in out and "->" not in out


def test_the_weights_of_target_and_draft_are_named() -> None:
    draft = {"model": "demo-draft", "draft_dtype": "int8"}
    config = drawn().config
    assert weight_dtypes(config | {"draft": draft}).endswith(", draft int8")


def with_outputs(record: PassRecord, hashes: Sequence[str]) -> PassRecord:
    """The record with other outputs."""
    pairs = zip(record.requests, hashes, strict=True)
    return replace(record, requests=[replace(request, output_hash=one) for request, one in pairs])


def test_a_loss_of_5_percent_in_every_row_is_found() -> None:
    """Recorded passes with 5 % of their acceptance lost, in requests and metrics alike, and the
    same outputs, by statistics: each row of 8 prompts is a regression."""
    chains = [b for b in OTHERS if kind_of(b) == method_of(b) and "+" not in method_of(b)]
    old = [with_outputs(b, ["0"] * len(b.requests)) for b in chains]
    new = [replace(with_losses(record, 0.05, seed=i), seal=None) for i, record in enumerate(old)]
    rows = compare(new, old)
    assert exit_code(rows) == 1 and len(rows) == len(old)
    assert all(row.change is not None and row.change.relative < -0.03 for row in rows)
    for row in rows:
        assert row.change is not None
        wanted = {"regression"} if row.change.num_prompts == 8 else {"regression", "tolerated"}
        assert row.verdict in wanted, row


def test_a_run_at_another_budget_is_not_taken_for_this_one(gate: Gate) -> None:
    """Budgets 65 and 129 of the demo differ little in acceptance; what the drafts read tells."""
    rows = {b.config["kv"]["budget"]: b for b in BASELINES[6:11]}
    posing = with_fields(rows[65], config__kv__budget=129)
    code, out = gate([posing], [rows[129]])
    assert code == 1 and "its draft forwards read 270 keys, was 526" in out
    code, out = gate([with_fields(posing, environment__torch="0")], [rows[129]])
    assert code == 1 and "a draft forward reads 67.5 tokens of a row's KV, was 131.5" in out


def test_the_reports_say_what_was_printed(gate: Gate, tmp_path: Path) -> None:
    junit = tmp_path / "junit.xml"
    summary = tmp_path / "summary.md"
    old = [drawn(budget=b) for b in (33, 65, 129, 200)]
    new = [old[0], drawn(0.4, budget=65), with_fields(old[2], config__workload__gen_len=9)]
    code, _ = gate(new, old, "--junit", str(junit), "--summary", str(summary))
    assert code == 1
    suite = ElementTree.parse(junit).getroot()
    counts = {"tests": "5", "failures": "1", "errors": "1", "skipped": "2"}
    assert dict(suite.attrib).items() >= counts.items()
    assert [case.find("failure") is not None for case in suite][:3] == [False, True, False]
    lines = summary.read_text().splitlines()
    assert lines[0] == "## Acceptance gate: 1 regression, 1 not comparable, 1 same, 2 missing"
    assert lines[4].startswith("| regression |") and "gen_len 9, was 64" in lines[5]
    assert len(lines) == 9


def pair(accepted: Sequence[int], num_different: int = 0) -> PairedCounts:
    """Of four prompts with 10 draft tokens each, of which 5 were accepted before."""

    def counts(numbers: Sequence[int]) -> PromptCounts:
        tens = np.full(4, 10.0)
        column = np.array(numbers, float).reshape(4, 1)
        return PromptCounts(tens, column[:, 0], tens, tens, tens.reshape(4, 1), column)

    return PairedCounts(counts([5] * 4), counts(accepted), num_different)


def test_a_change_by_hand() -> None:
    """The acceptance rate falls from 20/40 to 18/40. The quantiles of Student's t for 95 % are
    3.182446 with 3 degrees of freedom."""
    accepted = [4, 6, 5, 3]
    logs = np.log([(18 - count) / 15 for count in accepted])
    error = math.sqrt(3 / 4 * ((logs - logs.mean()) ** 2).sum())

    def ends(reach: float) -> tuple[float, float]:
        return 0.9 * math.exp(-reach) - 1, 0.9 * math.exp(reach) - 1

    assert pair(accepted).rates() == (0.5, 0.45)
    change = change_of(pair(accepted))
    assert change.relative == pytest.approx(-0.1)
    assert change.interval == pytest.approx(ends(3.182446 * error), rel=1e-6)


def test_rows_share_the_false_alarms() -> None:
    """Those whose outputs differ, or whose dtype rounds."""

    def matched(accepted: int, num_different: int, dtype: str) -> Match:
        record = with_fields(drawn(), config__model__dtype=dtype)
        drafted = DraftedPass.of(record)
        return Match("", pair([accepted] * 4, num_different), record, record, drafted, drafted)

    certain = [matched(4, 0, "float32"), matched(5, 0, "bfloat16")]
    others = [matched(4, 1, "float32"), matched(4, 0, "bfloat16"), matched(4, 2, "bfloat16")]
    assert level_for(certain) == level_for(others[:1]) == 0.99
    assert level_for([*certain, *others]) == pytest.approx(1 - 0.01 / 3)


def losing_pair(rng: np.random.Generator, num_prompts: int) -> PairedCounts:
    """Two drafts of the same prompts, of which the second is right 5 % less often."""
    chances = draw_chances(rng, num_prompts, 0.7, 0.1)
    before, after = (
        PromptCounts.of(
            verifications_of(parts_of(draw_pass(rng, c, 4, 63)).requests).by_request, num_prompts
        )
        for c in (chances, 0.95 * chances)
    )
    return PairedCounts(before, after, 0)


@cache
def true_change() -> float:
    """Over so many prompts that its own error does not count."""
    return change_of(losing_pair(np.random.default_rng(0), 4_000)).relative


@pytest.mark.parametrize("num_prompts", [4, pytest.param(16, marks=pytest.mark.wide)])
def test_the_interval_of_a_change_covers_the_truth(num_prompts: int) -> None:
    """In 93 to 97 % of 1000 pairs of records."""
    truth = true_change()
    rng = np.random.default_rng(num_prompts)
    covered = 0
    for _ in range(1000):
        interval = change_of(losing_pair(rng, num_prompts)).interval
        assert interval is not None
        covered += interval[0] <= truth <= interval[1]
    assert 930 <= covered <= 970


def test_prompts_that_fork_are_counted() -> None:
    new = with_outputs(drawn(), ["0" * 16] + ["x"] * 7)
    assert pair_of(DraftedPass.of(new), DraftedPass.of(drawn())).num_different == 7


def test_drawn_records_are_what_their_requests_give() -> None:
    """What the tests of this file are made of."""
    for record in (drawn(), with_losses(drawn(), 0.1)):
        assert unfounded_metric(record) is None
