"""Plants regressions of acceptance, one at a time, and says which of them the gate names.

    python scripts/plant_regressions.py                # all
    python scripts/plant_regressions.py retrieval ...  # those with one of the texts in their name

Each regression of `faults/acceptance.py` is planted in a copy of the package, in which `magicdec
gate` runs the cases that it can touch. They are the standard cases with fewer and shorter prompts,
of which the package as it is makes baselines first; with `--baseline FILE` they are those of FILE.
The exit code is 1 if the gate passes with a regression, or if the text that it replaces does not
occur exactly once. It takes about 10 s for each on two idle cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from faults.acceptance import REGRESSIONS, Regression
from plant_faults import PACKAGE, Case, occurrences

from magicdec.records.comparison.conditions import describe
from magicdec.records.reading import load_records

SMALL = ("--model", "demo", "--B", "8", "--num_batches", "1", "--prefix_len", "1024")
NAMED = (": changed", ": regression", "the case failed", "the new run")


@dataclass(frozen=True)
class Seen:
    """What the gate says with a regression: the line that names it, or why there is none."""

    is_named: bool
    line: str


def main(words: Sequence[str]) -> int:
    """Plant all, or those with one of the texts, and print a line for each. Returns the exit
    code."""
    baseline, texts = None, list(words)
    if "--baseline" in texts:
        place = texts.index("--baseline")
        baseline = Path(texts[place + 1])
        del texts[place : place + 2]
    chosen = [r for r in REGRESSIONS if not texts or any(t in text_of(r) for t in texts)]
    with TemporaryDirectory() as directory:
        folder = Path(directory)
        if baseline is None:
            baseline = folder / "baseline.jsonl"
            gate(PACKAGE.parent, "save", "--baseline", baseline, *SMALL)
        seen = list[Seen]()
        for number, each in enumerate(chosen):
            seen.append(plant(each, baseline, folder / str(number)))
            verdict = "named" if seen[-1].is_named else "NOT NAMED"
            print(f"{verdict:9} {each.fault.name}: {seen[-1].line}", flush=True)
    count = sum(each.is_named for each in seen)
    print(f"{count} of {len(chosen)} regressions are named by the gate")
    return int(count < len(chosen))


def text_of(each: Regression) -> str:
    return " ".join([each.fault.name, each.fault.file, *each.cases])


def plant(each: Regression, baseline: Path, copy: Path) -> Seen:
    """Run the cases that a regression can touch against a copy of the package with it."""
    if (count := occurrences(each.fault)) != 1:
        return Seen(False, f"its text occurs {count} times")
    records = {describe(record): record for record in load_records(baseline)}
    names = {name for text in each.cases for name in names_with(text, list(records))}
    cases = [record for name, record in records.items() if name in names]
    if not cases:
        return Seen(False, "the baseline file has no case of it")
    Case(each.fault, ()).plant(copy)
    own = copy / "baseline.jsonl"
    own.write_text("".join(f"{case.to_json()}\n" for case in cases))
    done = gate(copy, "--baseline", own, "--processes", "1")
    lines = done.stdout.splitlines()
    found = [line for line in lines if any(words in line for words in NAMED)]
    is_named = done.returncode == 1 and bool(found)
    return Seen(is_named, found[-1] if found else (lines or done.stderr.splitlines() or [""])[-1])


def names_with(text: str, names: Sequence[str]) -> list[str]:
    """The cases whose names end with the text or, if none does, those of greedy requests that hold
    it as whole words."""
    ending = [name for name in names if name.endswith(text)]
    return ending or [n for n in names if f"{text} " in f"{n} " and "--temperature" not in n]


def gate(package: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """`magicdec gate` of the package in that folder."""
    paths = os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-m", "magicdec", "gate", *map(str, words)],
        cwd=package, env=environment, capture_output=True, text=True,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
