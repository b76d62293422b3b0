"""The baseline files of the same cases, one for each kind of CPU, which stand side by side:
`acceptance.jsonl`, and beside it `acceptance.amx.jsonl` and the like. Exact lines are those of one
kind of CPU; a file of another kind is compared by statistics.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from magicdec.bench.gate.cases import baselines_in
from magicdec.kernels.build import used_instructions
from magicdec.output.writing import write_text
from magicdec.records.comparison.conditions import describe
from magicdec.records.drafted import JudgedRecord
from magicdec.records.reading import read_records

RECORD_KINDS = "pass", "acceptance"  # that can be baselines
# The instructions that the kernels differ by, by the name of the kind of CPU, the newest first.
KINDS = {"amx": "AMX_BF16", "avx512_bf16": "AVX512BF16", "avx2": "AVX2"}


def kind_of_cpu(instructions: Collection[str] | None) -> str:
    """The kind of CPU that kernels were compiled for; `plain` without any of these instructions."""
    return next((kind for kind, name in KINDS.items() if name in (instructions or ())), "plain")


def kind_here() -> str:
    """That of this machine, or of MAGICDEC_MARCH."""
    return kind_of_cpu(used_instructions())


def kind_of_file(path: Path) -> str:
    """That of a file of baselines, by its first line."""
    return kind_of_cpu(read_baselines(path)[0].environment.instructions)


def read_baselines(path: Path) -> list[JudgedRecord]:
    """Raises ValueError if there are none."""
    records = baselines_in(read_records(path, JudgedRecord, is_strict=True, kinds=RECORD_KINDS))
    if not records:
        raise ValueError(
            f"{path} holds no records; make it with `magicdec gate save --baseline {path}`"
        )
    return records


def beside(path: Path, kind: str) -> Path:
    """The file of the same cases for another kind of CPU."""
    return path.with_suffix(f".{kind}{path.suffix}")


def to_compare_with(path: Path) -> Path:
    """The file of this kind of CPU, if one stands beside `path`, else `path`."""
    ours = beside(path, kind_here())
    return ours if ours.exists() else path


def to_renew(path: Path) -> Path:
    """The file that this kind of CPU renews: `path` unless that is the one of another kind."""
    is_ours = not path.exists() or kind_of_file(path) == kind_here()
    return path if is_ours else beside(path, kind_here())


def void_on_others(path: Path, renewed: Path, changed: Sequence[JudgedRecord]) -> list[Path]:
    """Leave the lines of these cases in the files of other kinds of CPU to statistics: what has
    changed and was accepted on this kind has changed there too, and cannot be measured here. Such
    a line no longer names its kernels. Returns the files in which there were any."""
    names = {describe(case) for case in changed}
    voided = list[Path]()
    for other in (path, *(beside(path, kind) for kind in KINDS)):
        if other == renewed or not other.exists():
            continue
        lines = read_baselines(other)
        kept = [void(line) if describe(line) in names else line for line in lines]
        if kept != lines:
            write_text("--baseline", other, "".join(line.to_json() + "\n" for line in kept))
            voided.append(other)
    return voided


def void(line: JudgedRecord) -> JudgedRecord:
    return replace(line, environment=replace(line.environment, kernels=None), seal="")
