"""Puts what `scripts/gpu_suite.sh quick` measured on a GPU into `results/gpu/`, and says it in the
README's section on GPUs. Every number is read from the files that came back.

    python scripts/dev/gpu_results.py FOLDER [--write]

Without `--write` it prints the section and changes nothing. Files that were not made on a GPU, or
on several ones, are refused.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu.quick import PARTS
from gpu.results import is_alike, read_file
from gpu.summary import copied_per_s

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "gpu"
README = ROOT / "README.md"
SECTION = re.compile(r"## GPU\n.*?(?=\n## )", re.S)
COMMAND = "scripts/gpu_suite.sh quick"
WIDTH = 120


Places = dict[tuple[int, int], dict[str, Any]]
"""(context, rows) -> phase -> row of `magicdec latency`."""


def read_parts(folder: Path) -> dict[str, dict[str, Any]]:
    """The files of the parts that are there. Raises ValueError if there are none, or if they are
    not of one GPU."""
    files = {part.stage: read_file(folder / f"{part.stage}.json") for part in PARTS}
    found = {stage: content for stage, content in files.items() if content}
    if not found:
        raise ValueError(f"FOLDER {folder} has no file of {COMMAND}; give the one that came back")
    made = [content["made_with"] for content in found.values()]
    if not all(is_alike(suite, made[0]) for suite in made):
        raise ValueError(f"FOLDER {folder} holds files of several machines: {made}")
    if made[0]["device"] != "cuda" or made[0]["tiny"]:
        raise ValueError(f"FOLDER {folder} was not measured on a GPU: {made[0]}")
    return found


def section(folder: Path, parts: dict[str, dict[str, Any]]) -> str:
    """The README's section: where it was measured, what failed, and from where drafts pay."""
    made = next(iter(parts.values()))["made_with"]
    dates = sorted(date for part in parts.values() for date in part.get("dates", {}).values())
    failed = sum(len(part["failed"]) for part in parts.values())
    measured = sum(len(part["cells"]) for part in parts.values())
    places = by_place(parts.get("llama31", {}).get("cells", {}))
    grid = break_even_grid(places)
    words = [
        "With CUDA the same commands use the GPU: attention by Triton, steps as CUDA graphs.",
        f"Measured on {made['gpu']} (driver {made['driver']}, torch {made['torch']}) on "
        f"{dates[0] if dates else 'an unknown date'} by `{COMMAND}`: {measured} cells, of which "
        f"{failed} failed ([more](results/gpu/README.md); [how](docs/gpu.md)).",
    ]
    if grid:
        phases = next(phases for phases in places.values() if break_even(phases) is not None)
        num_drafts = phases["verify"]["T"] - 1
        budget = phases["draft"]["budget"]
        words.append(
            f"A step of {num_drafts} drafts emits {num_drafts + 1} tokens at most, and pays from "
            "so many on with Llama-3.1-8B's shape (random weights, bfloat16, drafts of budget "
            f"{budget}), by requests and cached tokens:"
        )
    lines = textwrap.wrap(" ".join(words), WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join(["## GPU", "", *lines, *grid]) + "\n"


def break_even(phases: dict[str, Any]) -> float | None:
    """The tokens that a step must emit to be as fast as decoding: a draft forward for each of its
    draft tokens and a verification, in forwards that decode. None if one was not measured."""
    if not phases.keys() >= {"decode", "verify", "draft"}:
        return None
    num_drafts = phases["verify"]["T"] - 1
    step_ms = num_drafts * phases["draft"]["ms_median"] + phases["verify"]["ms_median"]
    return step_ms / phases["decode"]["ms_median"]


def break_even_grid(places: Places) -> list[str]:
    """The break-even of all places as a table, contexts beside each other. A number of rows that
    not every context has, because its cache does not fit, stands beside the value."""
    known = {place: value for place in places if (value := break_even(places[place])) is not None}
    rows: dict[int, list[int]] = defaultdict(list)  # context -> numbers of rows
    for context, num_rows in sorted(known):
        rows[context].append(num_rows)
    if not known:
        return []
    contexts = sorted(rows)
    lines = [
        "",
        f"| requests | {' | '.join(f'{context} tokens' for context in contexts)} |",
        "|---|" + "--:|" * len(contexts),
    ]
    usual = max(rows.values(), key=lambda counts: len(counts))
    for line, num_rows in enumerate(usual):
        cells = list[str]()
        for context in contexts:
            own = rows[context][line] if line < len(rows[context]) else None
            text = "" if own is None else f"{known[context, own]:.2f}"
            cells.append(text if own in (None, num_rows) else f"{text} ({own})")
        lines.append(f"| {num_rows} | {' | '.join(cells)} |")
    return lines


def page(parts: dict[str, dict[str, Any]], copied: float | None) -> str:
    """The page of `results/gpu/`: a table of all forwards."""
    cells = parts.get("llama31", {}).get("cells", {})
    return "\n".join(["# Measured on a GPU", *table(cells, copied)])


def by_place(cells: dict[str, Any]) -> Places:
    places: Places = defaultdict(dict)
    for cell in cells.values():
        for row in cell["rows"]:
            places[row["context"], row["B"]][row["phase"]] = row
    return places


def described(places: Places) -> str:
    rows = [row for phases in places.values() for row in phases.values()]
    tokens = sorted({row["T"] for row in rows if row["phase"] == "verify"})
    budgets = sorted({row["budget"] for row in rows if row["phase"] == "draft"})
    return (
        f"random weights, bfloat16; verify: {', '.join(map(str, tokens))} tokens a row; draft: "
        f"budget {', '.join(map(str, budgets))}"
    )


def share_of(decode: dict[str, Any] | None, copied: float | None) -> str:
    """The bytes of a decode forward as a share of those that a copy moves in its time."""
    if decode is None or copied is None:
        return ""
    return f"{100 * decode['bytes'] / copied / (decode['ms_median'] / 1e3):.0f} %"


def table(cells: dict[str, Any], copied: float | None) -> list[str]:
    """Milliseconds of the 8B model's forwards by place, and the tokens that a step must emit."""
    places = by_place(cells)
    if not places:
        return []
    lines = [
        "| rows x tokens | decode, ms | of a copy | verify, ms | draft, ms | tokens that pay |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for (context, rows), phases in sorted(places.items()):
        times = {name: f"{row['ms_median']:.2f}" for name, row in phases.items()}
        shown = [times.get("decode", ""), share_of(phases.get("decode"), copied)]
        needed = break_even(phases)
        shown += [times.get("verify", ""), times.get("draft", "")]
        shown.append("" if needed is None else f"{needed:.2f}")
        lines.append(f"| {rows} x {context} | {' | '.join(shown)} |")
    return ["", f"Llama-3.1-8B's shape ({described(places)}):", "", *lines, ""]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    try:
        parts = read_parts(options.folder)
    except ValueError as error:
        print(f"gpu_results.py: {error}", file=sys.stderr)
        return 2
    text = section(options.folder, parts)
    if not options.write:
        print(text)
        return 0
    RESULTS.mkdir(parents=True, exist_ok=True)
    for path in [*options.folder.glob("*.json"), options.folder / "summary.md"]:
        if path.is_file():
            shutil.copy(path, RESULTS)
    (RESULTS / "README.md").write_text(page(parts, copied_per_s(options.folder)))
    README.write_text(SECTION.sub(lambda found: text, README.read_text()))
    print(f"{RESULTS} and {README.name} are renewed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
