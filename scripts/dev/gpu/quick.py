"""`gpu_suite.sh quick`: seven parts, the ones worth most first, within 480 s by its own clock; and
`gpu_suite.sh again PART...`, the named parts within 180 s, of which measured cells are kept.

Each part is a process of its own that ends at its deadline at the latest, and leaves the cells that
it had. If it ends before, by a cell that hangs, crashes or breaks the device, another process goes
on behind that cell. What a part does not use of its share, the following ones have. Nothing that a
part does stops the next.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.results import STARTED_ANEW, is_alike, load_cells, read_file
from gpu.summary import copied_per_s, goal_lines, goals, peer_lines

QUICK_SECONDS = 480
AGAIN_SECONDS = 180
PARENT = "GPU_SUITE_PARENT"  # the process that started this one, which ends with it
THROUGH = (0, 1, 2)  # exit statuses: all cells measured, not all, a wrong command line
GRACE = 4  # seconds from a part's own time limit until its process is ended


@dataclass(frozen=True)
class QuickPart:
    """A part of `quick`: its stage, its share of the seconds, and the question that it answers. A
    cell that takes longer than `cell_share` of the part's time counts as one that hangs."""

    stage: str
    seconds: int
    question: str
    cell_share: float = 0.5


PARTS = (
    QuickPart("broken", 70, "What does not work at all?"),
    QuickPart("demo_tokens", 70, "Are the demo model's tokens the CPU's?"),
    QuickPart("drafts", 150, "What do drafts in few bits bring?"),
    QuickPart("hybrid", 60, "How long do forwards of a 27B model with linear attention take?"),
    # What an H200 has answered already.
    QuickPart("llama31", 50, "How long do forwards of an 8B model take?"),
    QuickPart("whole_runs", 40, "What does self-speculation bring, at an emulated acceptance?"),
    # Whose compilers may take all of it.
    QuickPart("peers", 40, "How long do other decoders take with such weights?", 1.0),
)


def folder_for(out: Path, made_with: dict[str, Any]) -> Path:
    """`out`, or a folder in it named after the device where a file in `out` is of another device or
    other software."""
    for part in PARTS:
        found = read_file(out / f"{part.stage}.json")
        if found and not is_alike(found["made_with"], made_with):
            names = ("gpu", "torch", "triton")
            text = " ".join(f"{name} {made_with[name]}" for name in names)
            words = re.findall(r"[A-Za-z0-9]+", text.removeprefix("gpu "))
            other = out / "-".join(words)
            print(f"quick: {out} holds {found['made_with']}; writing to {other}", file=sys.stderr)
            other.mkdir(exist_ok=True)
            return other
    return out


def run_parts(names: Sequence[str], out: Path, options: Sequence[str], seconds: int) -> bool:
    """Run the parts, and whether all of their cells are measured. `options` are those of the
    stage's command line. Raises ValueError for a name that is no part."""
    known = [part.stage for part in PARTS]
    for name in names:
        if name not in known:
            raise ValueError(f"PART {name} is not known; choose from {', '.join(known)}")
    parts = [part for part in PARTS if part.stage in names]
    share = seconds / sum(part.seconds for part in parts)
    started = time.monotonic()
    until = 0.0
    is_complete = True
    took: dict[str, float] = {}
    for part in parts:
        until += share * part.seconds
        left = until - (time.monotonic() - started)
        begun = time.monotonic()
        is_complete &= run_part(part.stage, out, options, left)
        took[part.stage] = time.monotonic() - begun
        print(f"quick: {part.stage} took {took[part.stage]:.0f} s", file=sys.stderr, flush=True)
        write_summary(out, took, time.monotonic() - started)  # if this process should be ended
    print((out / "summary.md").read_text())
    return is_complete


def run_part(stage: str, out: Path, options: Sequence[str], seconds: float) -> bool:
    """Run the stage in a process, and in another one if it ends before it is through. Whether it
    measured all of its cells in time."""
    until = time.monotonic() + seconds
    status = run_process(stage, out, options, seconds)
    while is_cut_off(status, out / f"{stage}.json") and until - time.monotonic() > GRACE:
        print(f"quick: {stage} goes on in another process", file=sys.stderr, flush=True)
        words = [*options, "--keep_failed"]
        status = run_process(stage, out, words, until - time.monotonic())
    return status == 0


def is_cut_off(status: int | None, file: Path) -> bool:
    """Whether a process that ended with this status, None at its deadline, has ended by one of its
    cells."""
    if status in (None, *THROUGH):
        return False
    return status == STARTED_ANEW or read_file(file).get("running") is not None


def run_process(stage: str, out: Path, options: Sequence[str], seconds: float) -> int | None:
    """The exit status of the stage in a process; None if it was ended at its deadline."""
    suite = str(Path(__file__).parents[1] / "gpu_suite.py")
    limit = max(1, int(seconds - GRACE))
    share = next(part.cell_share for part in PARTS if part.stage == stage)
    limits = ["--seconds", str(limit), "--cell_seconds", str(max(1, int(share * limit)))]
    call = [sys.executable, suite, stage, "--quick", "--out", str(out), *limits]
    environment = {**os.environ, PARENT: str(os.getpid())}
    process = subprocess.Popen([*call, *options], start_new_session=True, env=environment)
    try:
        return process.wait(timeout=limit + GRACE)
    except subprocess.TimeoutExpired:
        print(f"quick: {stage} is ended after {limit + GRACE} s", file=sys.stderr, flush=True)
        return None
    finally:
        end_group(process)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End the part's process and what it has started, which would occupy the device."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def write_summary(out: Path, took: dict[str, float], seconds: float) -> None:
    """`summary.md`, from the parts' files that are there."""
    page = "\n".join(summary_lines(out, took, seconds)) + "\n"
    (out / "summary.md").write_text(page)


def summary_lines(out: Path, took: dict[str, float], seconds: float) -> list[str]:
    lines = [f"# quick, {seconds:.0f} s", ""]
    made_with: dict[str, Any] = next(
        (f["made_with"] for p in PARTS if (f := read_file(out / f"{p.stage}.json"))), {}
    )
    lines += [f"{key}: {value}" for key, value in made_with.items()]
    lines += ["", "| part | s | measured | failed | no time |", "|---|--:|--:|--:|--:|"]
    for part in PARTS:
        found = read_file(out / f"{part.stage}.json")
        counts = [str(len(found.get(key, ()))) for key in ("cells", "failed", "left")]
        spent = f"{took[part.stage]:.0f}" if part.stage in took else ""
        lines.append(f"| {part.stage} | {spent} | {' | '.join(counts)} |")
    for part in PARTS:
        found = read_file(out / f"{part.stage}.json")
        lines += [f"- {part.stage}: {name}: {why}" for name, why in found.get("failed", {}).items()]
        if (running := found.get("running")) is not None:
            lines.append(f"- {part.stage}: {running}: it ran when the part was ended")
    lines += ["", *goal_lines(goals(out))]
    lines += draft_lines(load_cells(out / "drafts.json"))
    lines += forward_lines(load_cells(out / "llama31.json"), copied_per_s(out))
    lines += run_lines(load_cells(out / "whole_runs.json"))
    lines += forward_lines(load_cells(out / "hybrid.json"), copied_per_s(out), "Linear attention")
    lines += peer_lines(load_cells(out / "peers.json"))
    return lines


def draft_lines(cells: dict[str, Any]) -> list[str]:
    """Of products the fastest function by rows, draft steps by their weights, and whole runs."""
    lines = []
    for name, cell in cells.items():
        kind, _, what = name.partition("/")
        if kind == "product":
            for rows, functions in cell.items():
                best = min(functions, key=lambda function: functions[function]["ms"])
                found = functions[best]
                share = f"{100 * found['of_copy']:.0f} %"
                lines.append(f"| {what} | {rows} | {best} | {found['ms']:.4f} | {share} |")
    if lines:
        lines = [
            "",
            "| product | rows | fastest | ms | of a copy |",
            "|---|--:|---|--:|--:|",
            *lines,
        ]
    steps = [
        row for name, cell in cells.items() if name.startswith("step/") for row in cell["rows"]
    ]
    if steps:
        lines += ["", "| draft step | B | budget | ms |", "|---|--:|--:|--:|"]
    for row in steps:
        weights = row["draft_weights"] or row["phase"]
        lines.append(f"| {weights} | {row['B']} | {row['budget'] or ''} | {row['ms_median']:.3f} |")
    runs = {name: cell for name, cell in cells.items() if name.startswith("run/")}
    return lines + run_lines(runs)


def forward_lines(cells: dict[str, Any], copied: float | None, title: str = "forward") -> list[str]:
    """Times of the forwards, and the bytes that they read in a second as a share of those that a
    copy moves, `copied`."""
    rows = [row for cell in cells.values() for row in cell["rows"]]
    if not rows:
        return []
    lines = [
        "",
        f"| {title} | B | context | T | ms | of a copy |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        shown = ""
        if copied is not None:
            shown = f"{100 * row['bytes'] / copied / (row['ms_median'] / 1e3):.0f} %"
        place = f"{row['phase']} | {row['B']} | {row['context']} | {row['T']}"
        lines.append(f"| {place} | {row['ms_median']:.3f} | {shown} |")
    return lines


def run_lines(cells: dict[str, Any]) -> list[str]:
    """Speedups, each marked as one at an emulated acceptance."""
    lines = []
    for place, cell in cells.items():
        decode = cell["autoregressive"]
        for name, found in cell["emulated_acceptance"].items():
            lines.append(
                f"| {place} | {name} ({found['rate']:.2f}) | {found['tokens_a_step']:.2f} | "
                f"{decode['step_ms']:.2f} | {found['step_ms']:.2f} | {found['speedup']:.2f}x |"
            )
    if not lines:
        return []
    head = "| place | emulated acceptance | tokens a step | decode ms | step ms | speedup |"
    return [
        "",
        "Times are measured, acceptance is emulated:",
        "",
        head,
        "|---|---|--:|--:|--:|--:|",
        *lines,
    ]
