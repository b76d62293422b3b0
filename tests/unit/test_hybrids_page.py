"""results/hybrids: the page and its picture have what the records say."""

from collections.abc import Callable, Sequence
from pathlib import Path

import hybrid_picture
from matplotlib.figure import Figure
from which_models_pay import PAYS

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
    "the same, weights in int4": "self:int4 streaming_llm 257".__eq__,
    "self, `streaming_llm` 65": "self streaming_llm 65".__eq__,
    "self, `snapkv` 257": "self snapkv 257".__eq__,
    "self, `retrieval` 257": "self retrieval 257".__eq__,
    "self, `quantised` (int4)": "self quantised int4".__eq__,
    "its head (`mtp`; EAGLE-3)": lambda draft: draft.startswith(("mtp", "eagle")),
    "`ngram`": "ngram".__eq__,
    "`model:demo-draft`": "model:demo-draft full".__eq__,
}
TIMED = "self 257 pays from (8 rows, one thread)"


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
    assert {draft for draft, model in shown if model == "hybrid"} == {*DRAFTS, TIMED}
    records = {model: list(read_records(file, AcceptanceRecord)) for model, file in FILES.items()}
    for (draft, model), numbers in shown.items():
        if draft == TIMED:
            continue
        own = [record for record in records[model] if DRAFTS[draft](record.draft)]
        own.sort(key=lambda record: record.context)
        assert [record.context for record in own] == [512, 2048, 8192, 16384]
        tokens = [record.rows[GAMMA - 1].tokens_per_step for record in own]
        assert [f"{number:.2f}" for number in tokens] == [f"{number:.2f}" for number in numbers]


def test_what_pays_is_what_was_timed() -> None:
    shown = rows()
    records = read_records(RESULTS / "hybrids" / "latency.jsonl.gz", LatencyRecord)
    times = {record.config["model"]["model"]: record for record in records}
    for model, name in MODELS.items():
        places = by_place(times[name].rows)
        found = [break_even(place)[DEFAULT_KV_POLICY, 257, None][GAMMA] for place in places]
        assert [round(number, 2) for number in found] == shown[TIMED, model]


def test_what_it_would_be_worth_is_what_the_picture_shows() -> None:
    """In its right panel: from which context on drafts pay, and their speedup at 128k."""
    figure = Figure()
    ax = figure.subplots()
    dense, hybrid = (list(read_records(FILES[m], AcceptanceRecord)) for m in ("dense", "hybrid"))
    hybrid_picture.draw_worth(ax, dense, hybrid)
    curves = {str(line.get_label()): line.get_ydata() for line in ax.lines}
    taken = curves["acceptance 0.8 at all contexts"]
    own = curves["as measured of demo-hybrid"]
    assert [pays_from(taken), pays_from(own)] == [64 * 1024, 32 * 1024]
    at = hybrid_picture.CONTEXTS.index(128 * 1024)
    assert [f"{values[at]:.1f}" for values in (taken, own)] == ["1.3", "1.6"]
    text = " ".join((RESULTS / "hybrids" / "README.md").read_text(encoding="utf-8").split())
    assert "pay from 32k tokens in place of 64k, and bring 1.6x in place of 1.3x at 128k" in text


def pays_from(speedups: Sequence[float]) -> int:
    pairs = zip(hybrid_picture.CONTEXTS, speedups, strict=True)
    return next(context for context, speedup in pairs if speedup >= PAYS)


def test_the_picture_has_both_models_and_when_they_pay(tmp_path: Path) -> None:
    picture = tmp_path / "picture.svg"
    words = ["--dense", FILES["dense"], "--hybrid", FILES["hybrid"]]
    words += ["--latency", RESULTS / "hybrids" / "latency.jsonl.gz", "--plot", picture]
    hybrid_picture.main([str(word) for word in words])
    drawn = picture.read_text(encoding="utf-8")
    for text in ("demo-hybrid", "mtp:demo-hybrid full", "pays from (timed)", "qwen3.5-27b"):
        assert text in drawn, text
