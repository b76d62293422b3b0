"""Puts what `scripts/gpu_suite.sh quick` measured on a GPU into `results/gpu/`, and says it in the
README's section on GPUs. Every number is read from the files that came back.

    python scripts/gpu_results.py FOLDER [--write]

Without `--write` it prints the section and changes nothing. Files that were not made on a GPU, or
on several ones, are refused.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_stages.quick import PARTS
from gpu_stages.results import is_alike, read_file
from gpu_stages.summary import copied_per_s

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "gpu"
README = ROOT / "README.md"
SECTION = re.compile(r"## GPU\n.*?(?=\n## )", re.S)
COMMAND = "scripts/gpu_suite.sh quick"


def read_parts(folder: Path) -> dict[str, dict[str, Any]]:
    """The files of the parts that are there. Raises ValueError if there are none, or if they are
    not of one GPU."""
    files = {part.stage: read_file(folder / f"{part.stage}.json") for part in PARTS}
    found = {stage: content for stage, content in files.items() if content}
    if not found:
        raise ValueError(f"FOLDER {folder} has no file of {COMMAND}; give the one that came back")
    made = [content["made_with"] for content in found.values()]
    if not all(is_alike(each, made[0]) for each in made):
        raise ValueError(f"FOLDER {folder} holds files of several machines: {made}")
    if made[0]["device"] != "cuda" or made[0]["tiny"]:
        raise ValueError(f"FOLDER {folder} was not measured on a GPU: {made[0]}")
    return found


def section(folder: Path, parts: dict[str, dict[str, Any]]) -> str:
    """The README's section: where it was measured, forwards, and what failed."""
    made = next(iter(parts.values()))["made_with"]
    dates = sorted(date for each in parts.values() for date in each.get("dates", {}).values())
    failed = sum(len(each["failed"]) for each in parts.values())
    measured = sum(len(each["cells"]) for each in parts.values())
    lines = [
        "## GPU",
        "",
        "On a machine with CUDA the same commands use the GPU: attention by Triton, else "
        "flash-attn, else torch, and steps that are recorded once as CUDA graphs and replayed.",
        f"Measured on {made['gpu']} (driver {made['driver']}, torch {made['torch']}) on "
        f"{dates[0] if dates else 'an unknown date'} by `{COMMAND}`: {measured} cells, of which "
        f"{failed} failed.",
    ]
    lines += forwards(parts.get("llama31", {}).get("cells", {}), copied_per_s(folder))
    lines += [
        "[docs/gpu.md](docs/gpu.md) has the suite, and [results/gpu](results/gpu) all numbers."
    ]
    return "\n".join(lines) + "\n"


def forwards(cells: dict[str, Any], copied: float | None) -> list[str]:
    """A sentence for each decode forward of the 8B model."""
    rows = [row for cell in cells.values() for row in cell["rows"] if row["phase"] == "decode"]
    sentences = []
    for row in sorted(rows, key=lambda row: (row["context"], row["B"])):
        share = ""
        if copied is not None:
            of_copy = row["bytes"] / copied / (row["ms_median"] / 1e3)
            share = f", {100 * of_copy:.0f} % of what a copy moves"
        place = f"B {row['B']}, {row['context']} tokens"
        sentences.append(
            f"- decode, Llama-3.1-8B's shape, {place}: {row['ms_median']:.2f} ms{share}"
        )
    return ["", *sentences, ""] if sentences else []


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
    README.write_text(SECTION.sub(lambda found: text, README.read_text()))
    print(f"{RESULTS} and {README.name} are renewed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
