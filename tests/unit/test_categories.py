"""Acceptance by category: of each the numbers and intervals of its prompts alone, in the record, in
the tables of runs and served modes, in the report and in an export."""

import json
import random
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path

import pandas
import pytest
from synthetic_records import STEPS, drawn, drawn_command, parse_record, served, with_fields
from test_record_document import problems
from test_report import numbers_by_hand

from magicdec.bench.showing import tables
from magicdec.cli import records
from magicdec.output.tables import Table, print_tables
from magicdec.records.acceptance import (
    AcceptanceMetrics,
    ReportedCounts,
    Verification,
    Verifications,
    acceptance_by,
    acceptance_metrics,
)
from magicdec.records.intervals import FEWEST_PROMPTS
from magicdec.records.metric_tables import category_tables
from magicdec.records.metrics import without_chance
from magicdec.records.pass_record import PassRecord

__all__ = ["numbers_by_hand"]  # a fixture of all tests here
NAMES = ("coding", "summarization", "writing")
RATES = {"coding": 0.9, "summarization": 0.6, "writing": 0.3}
CATEGORIES: list[str | None] = [*(NAMES[i % 3] for i in range(18)), None, "qa"]  # 20 prompts


def verified(seed: int = 0) -> dict[int, list[Verification]]:
    """Verifications of three drafts, by request. Nothing was drafted for the last one."""
    rng = random.Random(seed)
    by_request = defaultdict[int, list[Verification]](list)
    for request, name in enumerate(CATEGORIES[:-1]):
        chance = RATES.get(name or "", 0.5) + rng.uniform(-0.1, 0.1)
        for _ in range(rng.randint(5, 15)):
            accepted = next((k for k in range(3) if rng.random() > chance), 3)
            by_request[request].append(Verification(3, accepted, accepted + 1))
    return by_request


def metrics_of(categories: list[str | None] | None) -> AcceptanceMetrics:
    found = Verifications(verified())
    return AcceptanceMetrics(**acceptance_metrics(found, len(CATEGORIES), categories))


def test_a_category_is_a_pass_of_its_prompts_alone() -> None:
    by_request = verified()
    groups = metrics_of(CATEGORIES).acceptance_by_category
    assert groups is not None and [*groups] == ["coding", "qa", "summarization", "writing"]
    for name in NAMES:
        own = [by_request[i] for i, category in enumerate(CATEGORIES) if category == name]
        alone = Verifications(defaultdict(list, dict(enumerate(own))))
        expected = acceptance_metrics(alone, len(own))
        found = asdict(groups[name])
        assert found.pop("num_prompts") == len(own) == 6
        assert found == {key: expected[key] for key in found}
        assert found["draft_acceptance_rate_interval"] is not None
    rates = [groups[name].draft_acceptance_rate or 0.0 for name in NAMES]
    assert rates == sorted(rates, reverse=True)


def test_categories_add_up_to_all_prompts() -> None:
    whole = metrics_of(["every"] * len(CATEGORIES))
    assert whole.acceptance_by_category is not None
    every = asdict(whole.acceptance_by_category["every"])
    assert every.pop("num_prompts") == len(CATEGORIES)
    assert every == {key: value for key, value in asdict(whole).items() if key in every}
    parts = acceptance_by(
        [category or "none" for category in CATEGORIES], Verifications(verified())
    )
    for key in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens"):
        assert sum(getattr(part, key) for part in parts.values()) == getattr(whole, key), key


def test_what_another_program_reports_by_request_has_categories_too() -> None:
    """From its totals alone no category follows, and of each what it does not say is unknown."""
    steps = verified()
    by_request = {i: ReportedCounts.of(verifications) for i, verifications in steps.items()}
    reported = Verifications(reported=by_request)
    known = acceptance_by(CATEGORIES, Verifications(steps))
    assert acceptance_by(CATEGORIES, reported) == known
    rates_alone = {
        i: ReportedCounts(counts.drafted, counts.accepted) for i, counts in by_request.items()
    }
    coding = acceptance_by(CATEGORIES, Verifications(reported=rates_alone))["coding"]
    assert coding.draft_acceptance_rate == known["coding"].draft_acceptance_rate
    assert coding.num_spec_steps is coding.mean_acceptance_length is None
    total = Verifications(reported_total=ReportedCounts(90, 30, 30))
    total_metrics = acceptance_metrics(total, len(CATEGORIES), CATEGORIES)
    assert total_metrics["num_draft_tokens"] == 90 and "acceptance_by_category" not in total_metrics


def test_what_has_no_drafts_has_no_rate_and_few_prompts_no_interval() -> None:
    groups = acceptance_by(CATEGORIES, Verifications(verified()))
    unknown = asdict(groups["qa"])
    assert unknown.pop("num_prompts") == 1
    assert {key for key, value in unknown.items() if value is None} == {
        "draft_acceptance_rate",
        "draft_acceptance_rate_interval",
        "mean_acceptance_length",
        "mean_acceptance_length_interval",
    }
    assert {value for value in unknown.values() if value is not None} == {0}
    few = acceptance_by(["few"] * (FEWEST_PROMPTS - 1), Verifications(verified()))["few"]
    assert few.draft_acceptance_rate is not None and few.draft_acceptance_rate_interval is None
    assert metrics_of(None).acceptance_by_category is None
    assert metrics_of([None] * len(CATEGORIES)).acceptance_by_category is None


def categorized() -> PassRecord:
    """The drafting pass of a run of eight prompts of two categories."""
    run = drawn()
    names = ["code, and more", "prose"] * 4
    by_category = acceptance_by(names, run.verifications())
    raw = json.loads(run.to_json())
    raw["metrics"]["acceptance_by_category"] = {k: asdict(v) for k, v in by_category.items()}
    raw["workload"] |= {"categories": names, "num_later_turns": 3, "left_out": {"longer": 2}}
    return parse_record(raw)


def test_a_record_keeps_categories_as_the_schema_says() -> None:
    run = categorized()
    raw = json.loads(run.to_json())
    assert problems(raw) == [] and parse_record(raw) == run
    raw["metrics"]["acceptance_by_category"]["prose"]["num_prompts"] = None
    assert problems(raw) != []
    with pytest.raises(ValueError, match=r"acceptance_by_category\.prose\.num_prompts"):
        parse_record(raw)
    assert run.metrics is not None
    assert without_chance(run.metrics).acceptance_by_category is None  # of random weights


def lines_of(table: Table, capsys: pytest.CaptureFixture[str], width: int) -> list[str]:
    table.print(width)
    return capsys.readouterr().out.splitlines()


def test_the_table_of_categories_has_room_in_80_columns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    metrics = metrics_of(CATEGORIES)
    (table,) = category_tables("inflight+draft", metrics)
    lines = lines_of(table, capsys, 80)
    assert max(map(len, lines)) <= 80
    head = ["category", "prompts", "drafts", "acceptance rate", "acceptance length"]
    assert [cell.strip() for cell in lines[3].strip("┃").split("┃")] == head
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if "│" in line]
    assert [row[0] for row in cells] == [
        "coding",
        "qa",
        "summarization",
        "writing",
        "all prompts",
    ]
    assert cells[1] == ["qa", "1", "0", "", ""]
    groups = metrics.acceptance_by_category or {}
    low, high = groups["coding"].draft_acceptance_rate_interval or (0, 0)
    rate = groups["coding"].draft_acceptance_rate or 0
    assert cells[0][3] == f"{rate:.3f} [{low:.3f}, {high:.3f}]"
    assert cells[-1][2] == f"{metrics.num_draft_tokens:,}"
    assert category_tables("x", metrics_of(None)) == category_tables("x", None) == []


def test_a_run_prints_its_categories_and_what_was_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_tables(tables([drawn_command()[0], categorized()], is_verbose=False))
    text = capsys.readouterr().out
    assert "2 more items were drawn and left out: 2 longer than --prefix_len\n" in text
    assert text.count("acceptance by category") == 1
    assert text.index("2 more items") < text.index("code, and more") < text.rindex("all prompts")
    print_tables(tables(drawn_command(), is_verbose=False))
    assert "category" not in capsys.readouterr().out


def served_record() -> PassRecord:
    """A served mode whose prompts have the categories of `CATEGORIES`."""
    record = served(STEPS)
    record = replace(record, acceptance_by_context=None)
    assert record.metrics is not None
    found = acceptance_metrics(Verifications(verified()), len(CATEGORIES), CATEGORIES)
    return replace(record, metrics=replace(record.metrics, **found))


def test_each_drafting_mode_has_a_table_of_categories() -> None:
    drafting = served_record()
    assert drafting.metrics is not None
    plain = replace(
        drafting, name="inflight", metrics=replace(drafting.metrics, acceptance_by_category=None)
    )
    shown = [t for t in tables([plain, drafting]) if "by the length of the text" not in t.title]
    _, first, *others = shown
    assert "metric" in {column.key for column in first.headings}
    assert [table.title.partition(":")[0] for table in others] == ["inflight+draft"]
    assert [table.rows[0][0] for table in others] == ["coding"]


def test_report_and_export_have_the_categories(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    lines = [categorized().to_json(), with_fields(drawn()).to_json(), served_record().to_json()]
    path.write_text("".join(f"{line}\n" for line in lines))
    out = tmp_path / "out"
    records.write_page(records.report.build_parser().read([str(path), "--out", str(out)]))
    page = (out / "index.html").read_text(encoding="utf-8")
    assert page.count("<h3>Acceptance by category</h3>") == 1
    every = pandas.read_csv(out / "categories.csv")
    assert [*every["category"]][2:] == ["coding", "qa", "summarization", "writing"]
    table = every[:2]
    assert [*table["run"]] == [1, 1] and [*table["category"]] == ["code, and more", "prose"]
    groups = (categorized().metrics or pytest.fail()).acceptance_by_category or {}
    assert [*table["draft_acceptance_rate"]] == [
        pytest.approx(groups[name].draft_acceptance_rate) for name in groups
    ]
    assert "inflight+draft: acceptance by category" in page
    csv = tmp_path / "runs.csv"
    records.write_export(records.export.build_parser().read([str(path), "--out", str(csv)]))
    rows = pandas.read_csv(csv)
    column = rows["acceptance_by_category.prose.mean_acceptance_length"]
    assert column.notna().sum() == 1
    assert column.dropna().item() == pytest.approx(groups["prose"].mean_acceptance_length)
    assert "acceptance_by_category" not in rows


def test_what_is_reported_of_several_groups_is_their_sum_or_unknown() -> None:
    one = ReportedCounts(9, 3, 3, 6, (1, 1, 1))
    other = ReportedCounts(8, 5, 2, 7, (0, 0, 1, 1))
    assert ReportedCounts.sum_of([one, other]) == ReportedCounts(17, 8, 5, 13, (1, 1, 2, 1))
    assert ReportedCounts.sum_of([one]) == one
    assert ReportedCounts.sum_of([one, None]) is ReportedCounts.sum_of([None]) is None
    rates_alone = ReportedCounts(9, 3)
    assert ReportedCounts.sum_of([one, rates_alone]) == ReportedCounts(18, 6)
