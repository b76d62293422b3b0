"""The finished cases of a gate that was interrupted or killed, with which the same command goes on.

They are kept beside the compiled kernels until the gate ends, under a hash of all that they follow
from: the cases, the files that these name, the package's own sources, and the machine.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from magicdec.bench.gate.cases import Case
from magicdec.bench.gate.files import read_baselines
from magicdec.kernels.build import compiler_version, library_folder, used_instructions
from magicdec.kernels.cpu import cpu_field
from magicdec.output.writing import write_text
from magicdec.records.drafted import JudgedRecord

PACKAGE = Path(__file__).parents[2]
SOURCES = (".py", ".cpp", ".h")
VARIABLES = ("MAGICDEC_NATIVE_STEPS", "ATEN_CPU_CAPABILITY")  # that other bits follow from
KEPT_S = 7 * 86400.0  # after which nobody goes on


@dataclass(frozen=True)
class FinishedCases:
    """The folder of the finished cases of a gate, a file with one record for each."""

    folder: Path

    @classmethod
    def of(cls, cases: Sequence[Case]) -> FinishedCases:
        """Also removes what other gates have left a week ago."""
        folders = library_folder() / "gate"
        folders.mkdir(exist_ok=True)
        for other in folders.iterdir():
            if time.time() - other.stat().st_mtime > KEPT_S:
                shutil.rmtree(other, ignore_errors=True)
        return cls(folders / key_of(cases))

    def read(self) -> dict[int, JudgedRecord]:
        """Those of earlier, by the number of their case."""
        found = {}
        for path in self.folder.glob("*.jsonl"):
            with suppress(ValueError):  # cut off, or of another version: it is measured again
                (found[int(path.stem)],) = read_baselines(path)
        return found

    def keep(self, number: int, record: JudgedRecord) -> None:
        self.folder.mkdir(exist_ok=True)
        write_text("the finished cases", self.folder / f"{number}.jsonl", record.to_json() + "\n")

    def forget(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def key_of(cases: Sequence[Case]) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in PACKAGE.rglob("*") if path.suffix in SOURCES):
        digest.update(path.read_bytes())
    machine = cpu_field("model name"), used_instructions(), compiler_version(), version("torch")
    variables = [os.environ.get(name) for name in VARIABLES]
    digest.update(repr((cases, machine, variables)).encode())
    for path in sorted({path for case in cases for path in files_of(case)}):
        stat = path.stat()
        digest.update(repr((path, stat.st_mtime_ns, stat.st_size)).encode())
    return digest.hexdigest()[:20]


def files_of(case: Case) -> Iterator[Path]:
    """Those of its models and of its text, where these are no packaged ones."""
    config = case.config
    draft = None if config.draft is None else config.draft.model
    for name in (config.model.model, draft, config.workload.dataset):
        path = Path(name or "no file")
        yield from path.iterdir() if path.is_dir() else [path] * path.is_file()
