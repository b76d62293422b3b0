"""Every number of the README follows from a committed record, from a row of the log that names its
command, or from a constant of the code. `CLAIMS` has each sentence with numbers and where they come
from; a number in no claim fails."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import gpu_results
import pytest
from conftest import ROOT

from magicdec.bench.showing import tables
from magicdec.output.tables import Table
from magicdec.records.comparison.compare import DEFAULT_MARGIN
from magicdec.records.pass_record import PassRecord
from magicdec.records.reading import load_passes

README = (ROOT / "README.md").read_text()
NUMBER = re.compile(r"(?<![\w.,/-])\d[\d,]*(?:\.\d+)?(?![\w-]|\.\d)")
# What claims nothing: commands, links, years of papers, versions, names of models and exit codes.
NO_CLAIMS = re.compile(
    r"^    .*$|`[^`\n]*`|\]\([^)]*\)|et al\. \d{4}|Python 3\.11|Gemma 3|8 A100|exit code\s1", re.M
)
PRINTED = README.partition("```\n")[2].partition("```\n")[0]


def plain(text: str) -> str:
    """The text in one line."""
    return " ".join(text.split())


@cache
def records(name: str) -> list[PassRecord]:
    return load_passes(ROOT / "results" / name)


def drafting_record(name: str, **wanted: object) -> PassRecord:
    """The record of a study with these settings of drafting, prompts or cache."""

    def settings(record: PassRecord) -> dict[str, object]:
        sections = ("workload", "kv", "decoding")
        return {k: v for s in sections for k, v in (record.config[s] or {}).items()}

    found = [r for r in records(name) if wanted.items() <= settings(r).items()]
    (record,) = [r for r in found if r.config["model"]["model"].endswith(".gguf")] or found
    return record


def in_log(page: str, words: str) -> str:
    """The one row of the log whose claim has these words, and the command that measured it."""
    lines = (ROOT / "docs" / "log" / page).read_text().splitlines()
    found = [line for line in lines if line.startswith("|") and words in line.split("|")[1]]
    assert len(found) == 1, f"docs/log/{page} has {len(found)} rows whose claim has: {words}"
    (row,) = found
    claim = row.split("|")[1]
    assert re.search(r"`(?:magicdec |\w+\.(?:py|sh) )[^`]*`", claim), f"it names no command: {row}"
    return row


def smollm2(**wanted: object) -> tuple[str, str]:
    """Tokens a step and the net speedup with half of its interval, as the table shows them."""
    record = drafting_record("readme/smollm2.jsonl", **wanted)
    assert record.passed and record.metrics is not None and record.correctness is not None
    assert record.correctness.identical, "README: all tokens equal"
    metrics = record.metrics
    assert metrics.net_speedup is not None and metrics.net_speedup_interval is not None
    low, high = metrics.net_speedup_interval
    half = f"{(high - low) / 2:.2f}".lstrip("0")
    return f"{metrics.tokens_per_verification:.2f}", f"{metrics.net_speedup:.2f}x ({half})"


def smollm2_row(first: dict[str, object], second: dict[str, object]) -> str:
    tokens, speedups = zip(smollm2(**first), smollm2(**second), strict=True)
    return f"| {'; '.join(tokens)} | {'; '.join(speedups)} |"


def net(model: str, drafters: tuple[str, ...], **wanted: object) -> tuple[float, float]:
    """The smallest and the largest net speedup in the picture of contexts."""
    found = [
        r.metrics.net_speedup
        for r in records("contexts/records.jsonl.gz")
        if r.metrics is not None
        and r.metrics.net_speedup is not None
        and r.config["model"]["model"].split("/")[-1] == model
        and r.config["decoding"]["drafter"] in drafters
        and wanted.items() <= r.config["workload"].items()
    ]
    return min(found), max(found)


def between(pair: tuple[float, float]) -> str:
    return "{:.1f} to {:.1f}x".format(*pair)


def gpu() -> str:
    folder = ROOT / "results" / "gpu"
    return gpu_results.section(folder, gpu_results.read_parts(folder))


def rounded_from(row: str, words: str) -> str:
    """`words`, if each of its numbers is one of the row, rounded; else what is missing."""
    known = [float(n.replace(",", "")) for n in re.findall(r"\d[\d,]*(?:\.\d+)?", row)]
    missing = []
    for text in NUMBER.findall(words):
        digits = len(text.partition(".")[2])
        value = float(text.replace(",", ""))
        if not any(round(number, digits) == value for number in known):
            missing.append(text)
    return f"not in the log: {missing}" if missing else words


def peers_text() -> str:
    words = (
        "On 2 cores of an AMD EPYC with AVX512-BF16, a decode step of four rows over 16384 cached "
        "tokens took 14.9 ms; llama.cpp took 26 ms, OpenVINO GenAI 31 ms and transformers 275 ms "
        "with the same weights."
    )
    return rounded_from(in_log("peers.md", "6 KV heads, 16,384 cached tokens"), words)


def contexts() -> str:
    heads = net("demo", ("eagle",), batch_size=4, prefix_len=16384)
    tokens = [
        r.metrics.tokens_per_verification
        for r in records("contexts/records.jsonl.gz")
        if r.metrics is not None and r.config["decoding"]["drafter"] == "eagle"
        if r.metrics.tokens_per_verification is not None
    ]
    itself = between(net("demo", ("self",), batch_size=4, prefix_len=16384))
    smollm2_itself = between(net("model.gguf", ("self",), batch_size=4, prefix_len=7680))
    smollm2_heads = between(net("model.gguf", ("eagle",), batch_size=4, prefix_len=7680))
    return (
        f"{itself} net at 16384 tokens and B 4, while heads that emit "
        f"{min(tokens):.1f} to {max(tokens):.1f} tokens a step make {between(heads)} there "
        f"(SmolLM2 at 7680: {smollm2_itself} and {smollm2_heads})."
    )


def demo_table() -> Table:
    """What `magicdec run` printed of it."""
    (table,) = tables(records("readme/demo.jsonl"), is_verbose=False)
    return table


def demo_title() -> str:
    return demo_table().title


STREAMING = {"drafter": "self", "policy": "streaming_llm"}
LOOKUP = {"drafter": "ngram+self", "budget": 129}
CLAIMS: dict[str, Callable[[], str]] = {
    "the run's title": demo_title,
    "SmolLM2 by itself": lambda: smollm2_row(
        STREAMING | {"budget": 129, "gamma": 1}, STREAMING | {"budget": 513, "gamma": 2}
    ),
    "SmolLM2 with lookups": lambda: smollm2_row(LOOKUP | {"gamma": 2}, LOOKUP | {"gamma": 4}),
    "contexts": contexts,
    "the margin of the gate": lambda: f"a loss beyond {100 * DEFAULT_MARGIN:g} % of the rate",
    "break-even on a GPU": gpu,
    "other programs": peers_text,
}
# Settings, which the commands beside them have, and minutes of a machine that is named.
SETTINGS = (
    "on 2 CPU ranks",
    "2 cores of a shared AMD EPYC the run printed, in less than a minute",
    "On the same 2 cores, after 4,096 tokens of three PG-19 books",
    "itself with 129 of its KV cache (StreamingLLM), 1 token; with 513, 2 tokens",
    "looked up in the text, 2 tokens; else itself with 129, 4 tokens",
    "half of the 95 % interval",
    "six PG-19 books, on a Xeon with AMX, 3 drafts a step",
    "SmolLM2-135M in 4 bits",
)


@pytest.mark.parametrize("name", CLAIMS)
def test_what_the_readme_says_was_measured(name: str) -> None:
    claim = plain(CLAIMS[name]())
    assert claim in plain(README), claim


def test_the_printed_run_is_that_of_the_record() -> None:
    table = demo_table()
    rows = {label: cells for label, *cells in table.body}
    lines = PRINTED.splitlines()
    assert lines[: len(table.lead)] == [line.text for line in table.lead]
    shown = [re.split(r"\s*│\s*", line)[1:-1] for line in lines if line.startswith("│")]
    assert len(shown) >= 3
    for label, *cells in shown:
        assert rows[label] == cells, label
    assert lines[-1].removesuffix("[...]") and table.below[0].startswith(
        lines[-1].removesuffix("[...]").rstrip()
    )


def test_every_number_of_the_readme_is_in_a_claim() -> None:
    text = README.replace(PRINTED, "")
    text = plain(NO_CLAIMS.sub("", text))
    for known in (*(claim() for claim in CLAIMS.values()), *SETTINGS):
        text = text.replace(plain(NO_CLAIMS.sub("", known)), "")
    left = [text[max(0, m.start() - 60) : m.end() + 20] for m in NUMBER.finditer(text)]
    assert left == []
