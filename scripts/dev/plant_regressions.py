"""Plants regressions of acceptance, one at a time, and says which of them the gate names.

    python scripts/dev/plant_regressions.py                # all
    python scripts/dev/plant_regressions.py retrieval ...  # those with one of the texts

Each regression of `faults/acceptance.py` is planted in a copy of the package, with which the cases
run that it can touch, and their records are compared as `magicdec gate` does it. They are the
standard cases with fewer and shorter prompts, of which the package as it is makes baselines first;
with `--baseline FILE` they are those of FILE. The exit code is 1 if the gate passes with a
regression, or if the text that it replaces does not occur exactly once.

As in `plant_faults.py`, every run has a process of its own, which is forked from one that has
imported the libraries, but nothing of the package.
"""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

from faults.acceptance import REGRESSIONS, Regression
from plant_faults import IMPORTED, PACKAGE, PlantedCase, occurrences

SMALL = ("--model", "demo", "--B", "8", "--num_batches", "1", "--prefix_len", "1024")
# Exit codes of a run.
PASSED = 0
NAMED = 1
BROKEN = 2


def main(words: Sequence[str]) -> int:
    """Plant all, or those with one of the texts, and print a line for each. Returns the exit
    code."""
    baseline = None
    texts = list(words)
    if "--baseline" in texts:
        place = texts.index("--baseline")
        baseline = Path(texts[place + 1]).absolute()
        del texts[place : place + 2]
    chosen = [r for r in REGRESSIONS if not texts or any(t in r.fault.name for t in texts)]
    for name in IMPORTED:
        import_module(name)
    assert "magicdec" not in sys.modules
    with TemporaryDirectory() as directory:
        folder = Path(directory)
        count = 0
        if baseline is None:
            baseline = folder / "baseline.jsonl"
            save(baseline)
        for number, regression in enumerate(chosen):
            code, line = plant(regression, baseline, folder / str(number))
            count += code == NAMED
            print(f"{'named' if code == NAMED else 'NOT NAMED':9} {regression.fault.name}: {line}")
            sys.stdout.flush()
    print(f"{count} of {len(chosen)} regressions are named by the gate")
    return int(count < len(chosen))


def save(baseline: Path) -> None:
    """Make the baselines with the package as it is."""
    words = [sys.executable, "-m", "magicdec", "gate", "save", "--baseline", str(baseline), *SMALL]
    subprocess.run(words, cwd=PACKAGE.parent, check=True)


def plant(regression: Regression, baseline: Path, copy: Path) -> tuple[int, str]:
    """The exit code and the last line of a run with a regression."""
    if (count := occurrences(regression.fault)) != 1:
        return BROKEN, f"its text occurs {count} times"
    PlantedCase(regression.fault, ()).plant(copy)
    if (child := os.fork()) == 0:
        run(regression, baseline, copy)
    _, status = os.waitpid(child, 0)
    lines = (copy / "out").read_text().splitlines()
    return os.waitstatus_to_exitcode(status), (lines or [""])[-1]


def run(regression: Regression, baseline: Path, copy: Path) -> None:
    """Ends this process. What it prints is in the file `out` of the copy."""
    code = BROKEN
    try:
        with (copy / "out").open("w") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        os.chdir(copy)
        # Compiled code would be written through a link into the package itself.
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # of the ranks of a case
        sys.path.insert(0, str(copy))
        code = compared(regression, baseline)
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def compared(regression: Regression, baseline: Path) -> int:
    """Run the cases, print what the gate says of those that it does not pass, and return the
    code."""
    from magicdec.bench.gate.cases import Case as GateCase
    from magicdec.bench.gate.files import read_baselines
    from magicdec.bench.gate.measuring import measure, run_cases
    from magicdec.records.comparison.compare import Comparison, compare, exit_code
    from magicdec.records.comparison.conditions import describe

    records = {describe(record): record for record in read_baselines(baseline)}
    names = {name for text in regression.cases for name in names_with(text, list(records))}
    baselines = [record for name, record in records.items() if name in names]
    if not baselines:
        print("the baseline file has no case of it")
        return BROKEN
    cases = [GateCase.from_record(record).with_threads(1) for record in baselines]
    single_rank = list[tuple[int, GateCase]]()
    several_ranks = list[int]()
    for number, case in enumerate(cases):
        if case.num_ranks == 1:
            single_rank.append((number, case))
        else:
            several_ranks.append(number)
    found = dict(run_cases(single_rank))
    on_ranks = measure([cases[number] for number in several_ranks], 1, lambda result: None)
    found |= zip(several_ranks, on_ranks, strict=True)
    comparisons = list[Comparison]()
    for number in range(len(cases)):
        result = found[number]
        if isinstance(result, str):  # the planted code does not run: that says nothing of the gate
            print(result)
            return BROKEN
        comparisons += compare([result], baselines)
    for comparison in comparisons:
        if exit_code([comparison]) == 1 or len(comparisons) == 1:
            print(comparison)
    return NAMED if exit_code(comparisons) == 1 else PASSED


def names_with(text: str, names: Sequence[str]) -> list[str]:
    """The cases whose names end with the text or, if none does, those of greedy requests on one
    rank that hold it as whole words."""
    is_served = text.startswith("--modes")
    ending = [n for n in names if n.endswith(text) and n.startswith("--modes") == is_served]
    others = ("--temperature", "--nproc", "--modes")
    plain = [name for name in names if not any(flag in name for flag in others)]
    return ending or [name for name in plain if f"{text} " in f"{name} "]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
