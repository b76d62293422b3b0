"""Plants faults in the code that measures, one at a time, and says whether a test sees them.

    python scripts/dev/plant_faults.py           # all faults
    python scripts/dev/plant_faults.py TPOT ...  # those whose line has one of the texts
    python scripts/dev/plant_faults.py --one     # the first of each property, as CI does

Each fault of `faults/` is planted in a copy of the package, against which the test of its property
runs. The exit code is 1 if a test passes with its fault, or fails without one, or if the text that
a fault replaces does not occur exactly once. With `--one`, no test runs without a fault: CI runs
all tests beside it.

Every test runs in a process of its own, which is forked from one that has imported the libraries
that the package needs, but nothing of the package.
"""

from __future__ import annotations

import compileall
import gc
import inspect
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from faults import PROPERTIES
from faults.fault import Fault, Property

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "magicdec"
TESTS = ROOT / "tests"
IMPORTED = (
    "hypothesis",
    "numpy",
    "pandas",
    "pydantic.dataclasses",
    "safetensors.torch",
    "scipy.stats",
    "torch.distributed",
    "gguf",
    "transformers.models.llama.modeling_llama",
)
PROCESSES = 2
# A test takes a second, but a fault may make it wait for ever. The cases of `make test` see it.
FLAGS = (
    "-mnot wide",
    "--timeout=120",
    "-pno:cacheprovider",
    "-pno:xdist",
    "-pno:anyio",
    "-pno:unraisableexception",
    "-pno:threadexception",
)
# A test that fails with its fault need not say how, nor what else would fail.
BRIEF = "--assert=plain", "--tb=line", "-x", "--hypothesis-profile=planted"
SEEN = "seen"
UNSEEN = "NOT SEEN"
PASSED = "passed"
FAILED = "FAILED"
MISPLACED = "MISPLACED"
NOT_RUN = "NOT RUN"


@dataclass(frozen=True)
class PlantedCase:
    """Tests that run against the package with a fault, or as it is."""

    fault: Fault | None
    tests: tuple[str, ...]

    def line(self, verdict: str) -> str:
        if self.fault is None:
            return f"{verdict:9} all of these tests without a fault"
        return f"{verdict:9} {self.fault.file:37} {self.fault.name:58} {self.tests[0]}"

    def plant(self, copy: Path) -> None:
        """Make a copy of the package with the fault."""
        copy.mkdir()
        if self.fault is None:
            (copy / "magicdec").symlink_to(PACKAGE)
            return
        link(PACKAGE, copy / "magicdec", self.fault.file)
        source, planted = (package / self.fault.file for package in (PACKAGE, copy / "magicdec"))
        planted.unlink()
        planted.write_text(source.read_text().replace(self.fault.text, self.fault.replacement))

    def verdict(self, code: int) -> str:
        """What pytest's exit code says: 0 if all tests have passed, and 1 if one has failed."""
        known = {0: PASSED, 1: FAILED} if self.fault is None else {0: UNSEEN, 1: SEEN}
        return known.get(code, NOT_RUN)


def link(source: Path, copy: Path, file: str) -> None:
    """Fill the folder `copy` with links to what `source` holds, except for the folders on the way
    to `file`, which are filled in the same way."""
    copy.mkdir()
    for entry in source.iterdir():
        (copy / entry.name).symlink_to(entry)
    folder, _, rest = file.partition("/")
    if rest:
        (copy / folder).unlink()
        link(source / folder, copy / folder, rest)


def plant(
    properties: Sequence[Property], texts: Sequence[str] = (), runs_without: bool = True
) -> int:
    """Plant the faults whose line has one of the texts, or all, and print a line for each, and one
    for their tests without a fault if `runs_without`. Returns the exit code."""
    cases = [PlantedCase(fault, (prop.test,)) for prop in properties for fault in prop.faults]
    if texts:
        cases = [case for case in cases if any(text in case.line("") for text in texts)]
    tests = dict.fromkeys(test for case in cases for test in case.tests)
    placed = [PlantedCase(None, tuple(tests))] if runs_without else []
    num_bad = 0
    for case in cases:
        if (count := occurrences(case.fault)) == 1:
            placed.append(case)
        else:
            num_bad += 1
            print(case.line(MISPLACED), f"its text occurs {count} times", sep=": ")
    with TemporaryDirectory() as directory:
        copies = [Path(directory, str(number)) for number in range(len(placed))]
        for case, copy, code in zip(placed, copies, run_all(placed, copies), strict=True):
            print(case.line(verdict := case.verdict(code)))
            if verdict not in (SEEN, PASSED):
                num_bad += 1
                print((copy / "out").read_text()[-3000:])
    print(f"{len(cases)} faults; {num_bad} lines are not as they should be")
    return int(num_bad > 0)


def occurrences(fault: Fault | None) -> int:
    """How often the text is in its file."""
    return 1 if fault is None else (PACKAGE / fault.file).read_text().count(fault.text)


def run_all(cases: Sequence[PlantedCase], copies: Sequence[Path]) -> list[int]:
    """pytest's exit code for each case."""
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which one of these may do
    for name in IMPORTED:
        import_module(name)
    assert "magicdec" not in sys.modules
    inspect.getmodule(sys._getframe())  # it goes through all modules once, and torch asks it
    compileall.compile_dir(PACKAGE, quiet=1)  # once, and not in every copy
    gc.freeze()
    gc.disable()  # a child ends before its garbage matters
    running = dict[int, int]()
    codes = [0] * len(cases)
    for number, (case, copy) in enumerate(zip(cases, copies, strict=True)):
        if len(running) == PROCESSES:
            wait_for_one(running, codes)
        case.plant(copy)
        if (child := os.fork()) == 0:
            run(case, copy)
        running[child] = number
    while running:
        wait_for_one(running, codes)
    return codes


def run(case: PlantedCase, copy: Path) -> None:
    """Ends this process. The output of pytest is in the file `out` of the copy."""
    code = -1
    try:
        with (copy / "out").open("w") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        os.chdir(copy)
        # Compiled code would be written through a link into the package itself.
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        sys.path.insert(0, str(copy))
        flags = [*FLAGS, *(BRIEF if case.fault else ())]
        code = int(pytest.main([*flags, *map(place_of, case.tests)]))
        sys.stdout.flush()
    finally:
        os._exit(code)


def place_of(test: str) -> str:
    """The test with the folder of its file, whose name no other folder has."""
    file, _, name = test.partition("::")
    (path,) = TESTS.glob(f"*/{file}")
    return f"{path}::{name}"


def wait_for_one(running: dict[int, int], codes: list[int]) -> None:
    child, status = os.wait()
    codes[running.pop(child)] = os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    words = sys.argv[1:]
    if words == ["--one"]:
        first = [replace(prop, faults=prop.faults[:1]) for prop in PROPERTIES]
        sys.exit(plant(first, runs_without=False))
    sys.exit(plant(PROPERTIES, words))
