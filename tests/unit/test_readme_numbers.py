"""Every number of the README follows from a committed record, from a section of the log that names
its command, or from a constant of the code. `CLAIMS` has each sentence with numbers and where they
come from; a number in no claim fails."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import cache

import pytest
from conftest import ROOT

from magicdec.records.comparison.compare import DEFAULT_MARGIN
from magicdec.records.reading import load_records
from magicdec.records.record import RunRecord
from magicdec.records.table import table_of, table_rows

sys.path.insert(0, str(ROOT / "scripts"))
import gpu_results

README = (ROOT / "README.md").read_text()
NUMBER = re.compile(r"(?<![\w.,/-])\d[\d,]*(?:\.\d+)?(?![\w-]|\.\d)")
# What claims nothing: commands, links, years of papers, versions, names of models and exit codes.
NO_CLAIMS = re.compile(
    r"^    .*$|`[^`\n]*`|\]\([^)]*\)|et al\. \d{4}|Python 3\.11|Gemma 3|8 A100|exits with\s1", re.M
)
PRINTED = README.partition("```\n")[2].partition("```\n")[0]


def plain(text: str) -> str:
    """The text in one line, without what `NO_CLAIMS` says of it."""
    return " ".join(text.split())


@cache
def records(name: str) -> list[RunRecord]:
    return load_records(ROOT / "results" / name)


def of_drafts(name: str, **wanted: object) -> RunRecord:
    """The record of a study with these settings of drafting, prompts or cache."""

    def settings(record: RunRecord) -> dict[str, object]:
        sections = ("workload", "kv", "decoding")
        return {k: v for s in sections for k, v in (record.config[s] or {}).items()}

    found = [r for r in records(name) if wanted.items() <= settings(r).items()]
    (record,) = [r for r in found if r.config["model"]["model"].endswith(".gguf")] or found
    return record


def in_log(page: str, heading: str) -> str:
    """A section of the log, which must name the command that measured it."""
    text = (ROOT / "docs" / "log" / page).read_text()
    _, found, rest = text.partition(f"\n## {heading}")
    assert found, f"docs/log/{page} has no section {heading}"
    section = rest.partition("\n## ")[0]
    assert re.search(r"`[^`]*(?:python |magicdec |scripts/)", section), "it names no command"
    return section


def smollm2(**wanted: object) -> tuple[str, str]:
    """Tokens a step and the net speedup with half of its interval, as the table shows them."""
    record = of_drafts("readme/smollm2.jsonl", **wanted)
    assert record.passed and record.metrics is not None and record.correctness is not None
    assert record.correctness.identical, "README: all tokens equal"
    metrics = record.metrics
    assert metrics.net_speedup is not None and metrics.net_speedup_interval is not None
    low, high = metrics.net_speedup_interval
    half = f"{(high - low) / 2:.2f}".lstrip("0")
    return f"{metrics.mean_emitted_tokens:.2f}", f"{metrics.net_speedup:.2f}x ({half})"


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


def peers() -> str:
    section = in_log("peers.md", "2026-11-25 Six KV heads at 16,384 tokens, once more")
    (line,) = [line for line in section.splitlines() if line.startswith("| decode |")]
    ours, openvino, _, llama, _, torch = re.findall(r"(\d+(?:\.\d+)?)\*{0,2} \(", line)
    return (
        f"took {ours} ms; llama.cpp took {float(llama):.0f} ms, OpenVINO GenAI "
        f"{float(openvino):.0f} ms and transformers {torch} ms"
    )
