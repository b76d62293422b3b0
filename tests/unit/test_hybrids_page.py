"""results/hybrids: the page's table has what its records say."""

from collections.abc import Callable
from pathlib import Path

from magicdec.bench.acceptance.record import AcceptanceRecord
from magicdec.bench.latency.record import LatencyRecord, break_even, by_place
from magicdec.names import DEFAULT_KV_POLICY
from magicdec.records.reading import read_records

RESULTS = Path(__file__).parents[2] / "results"
FILES = {
    "hybrid": RESULTS / "hybrids" / "demo_hybrid.jsonl.gz",
    "dense": RESULTS / "acceptance" / "demo.jsonl.gz",
}
MODELS = {"hybrid": "demo-hybrid", "dense": "demo"}
GAMMA = 4
# Beginnings of rows by those of drafts in records.
DRAFTS: dict[str, Callable[[str], bool]] = {
    "self, `streaming_llm` 257": "self streaming_llm 257".__eq__,
    "self, `streaming_llm` 65": "self streaming_llm 65".__eq__,
    "self, `snapkv` 257": "self snapkv 257".__eq__,
    "self, `retrieval` 257": "self retrieval 257".__eq__,
    "its head (`mtp`; EAGLE-3)": lambda draft: draft.startswith(("mtp", "eagle")),
    "`ngram`": "ngram".__eq__,
    "`model:demo-draft`": "model:demo-draft full".__eq__,
}
PAYS = "self 257 pays from (8 rows, one thread)"


def rows() -> dict[tuple[str, str], list[float]]:
    """The numbers of a row, by context, by its draft and model."""
    text = (RESULTS / "hybrids" / "README.md").read_text(encoding="utf-8")
    lines = text.partition("| draft | model |")[2].partition("\n\n")[0].splitlines()[2:]
    found = {}
    draft = ""
    for line in lines:
        first, model, *numbers = (cell.strip() for cell in line.strip("|").split("|"))
        draft = first or draft
        found[draft, model] = [float(number) for number in numbers]
    return found


def test_the_table_has_what_the_records_say() -> None:
    shown = rows()
    assert {draft for draft, _ in shown} == {*DRAFTS, PAYS}
    for model, file in FILES.items():
        records = list(read_records(file, AcceptanceRecord))
        for draft, is_draft in DRAFTS.items():
            own = sorted((r for r in records if is_draft(r.draft)), key=lambda r: r.context)
            assert [record.context for record in own] == [512, 2048, 8192, 16384]
            tokens = [record.rows[GAMMA - 1].tokens_per_step for record in own]
            assert [f"{number:.2f}" for number in tokens] == [
                f"{number:.2f}" for number in shown[draft, model]
            ], (draft, model)


def test_what_pays_is_what_was_timed() -> None:
    shown = rows()
    records = read_records(RESULTS / "hybrids" / "latency.jsonl.gz", LatencyRecord)
    times = {record.config["model"]["model"]: record for record in records}
    for model, name in MODELS.items():
        places = by_place(times[name].rows)
        found = [break_even(place)[DEFAULT_KV_POLICY, 257, None][GAMMA] for place in places]
        assert [round(number, 2) for number in found] == shown[PAYS, model]
