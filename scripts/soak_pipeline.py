"""Run pipelined speculation on real ranks with random settings for a long time, and check that
nothing hangs, differs or stays behind.

    python scripts/soak_pipeline.py --minutes 30
    python scripts/soak_pipeline.py --minutes 2 --seed 7 --requests 200

Each case is one `magicdec pipeline` in float32 with settings that are drawn with the seed, so that
a case that fails can be run again. Every fourth case serves `--requests` requests; the memory,
threads and open files of its ranks are sampled, and the growth from its middle to its end is
printed. The first case that fails ends the soak with exit code 1 and its command.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HANGS_S = 400.0  # no case takes nearly as long
SHARED = Path("/dev/shm")


@dataclass(frozen=True)
class Sample:
    """All ranks of a case at one time."""

    at_s: float
    memory_mb: float
    threads: int
    files: int


def draw(chooser: random.Random, num_requests: int) -> list[str]:
    """The flags of a case."""
    num_ranks = chooser.choice([2, 3, 4])
    splits = {
        2: ["0.5,0.5/head", "0,1.0/head", "1.0/1.0"],
        3: ["0.3,0.3,0.4/head", "0.5,0.5/1.0", "0,0.5,0.5/head"],
        4: ["0.25,0.25,0.25,0.25/head", "0.3,0.3,0.4/1.0", "0,0.5,0.5/1.0"],
    }
    words = {
        "--layer_split": chooser.choice(splits[num_ranks]),
        "--drafter": chooser.choice(["model:demo-draft", "ngram"]),
        "--draft": chooser.choice([1, 2, 4, 8]),
        "--np": chooser.choice([1, 1, 2, 4]),
        "--pa": chooser.choice([0.0, 0.3, 0.6]),
        "--ps": chooser.choice([0.05, 0.2]),
        "--pr": chooser.choice([0.0, 0.1]),
        "--pd": chooser.choice([0.0, 0.05]),
        "--recovery": chooser.choice(["acceptance", "attempt"]),
        "--lanes": chooser.choice([1, 1, 2, 3]),
        "--collectives": chooser.choice(["shared_memory", "shared_memory", "gloo"]),
        "--native_steps": chooser.choice(["auto", "off"]),
        "--prefix_len": f"uniform:4:{chooser.choice([40, 300])}",
        "--output_len": f"uniform:1:{chooser.choice([12, 60])}",
        "--num_requests": num_requests or chooser.randint(1, 4),
        "--seed": chooser.randrange(1000),
    }
    flags = [str(word) for pair in words.items() for word in pair]
    if chooser.random() < 0.3:
        flags.append("--relaunch")
    if chooser.random() < 0.3:
        flags += ["--max_in_flight", str(chooser.choice([1, 2, 5]))]
    fixed = ["--nproc", str(num_ranks), "--dtype", "float32", "--threads", "1"]
    return [*fixed, *flags, "--mode", "iterative", "sync", "async"]


def descendants(pid: int) -> Iterator[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    for child in children.read_text().split() if children.exists() else ():
        yield int(child)
        yield from descendants(int(child))


def observe(pid: int, started: float) -> Sample | None:
    """None if a rank ends meanwhile."""
    memory = threads = files = 0
    try:
        for each in descendants(pid):
            fields = Path(f"/proc/{each}/statm").read_text().split()
            memory += int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
            threads += len(list(Path(f"/proc/{each}/task").iterdir()))
            files += len(list(Path(f"/proc/{each}/fd").iterdir()))
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Sample(time.perf_counter() - started, memory / 1e6, threads, files)


def run(flags: list[str]) -> tuple[list[Sample], list[dict[str, Any]]]:
    """The samples and the records of a case. Raises RuntimeError, naming the command, if it hangs,
    fails, differs, or leaves shared memory behind."""
    before = {path.name for path in SHARED.iterdir()}
    with tempfile.TemporaryDirectory() as directory:
        out, log = Path(directory, "runs.jsonl"), Path(directory, "log")
        command = [sys.executable, "-m", "magicdec", "pipeline", *flags, "--out", str(out)]
        with log.open("wb") as text:
            case = subprocess.Popen(command, stdout=text, stderr=text)
        samples = list(watch(case, shlex.join(command)))
        records = list(map(json.loads, out.read_text().splitlines())) if out.exists() else []
        problem = None
        if case.returncode != 0:
            problem = f"exit code {case.returncode}: {log.read_text()[-2000:]}"
        elif {record["status"] for record in records} != {"ok"} or len(records) != 4:
            problem = f"statuses {[record['status'] for record in records]}"
        elif left := {path.name for path in SHARED.iterdir()} - before:
            problem = f"left in {SHARED}: {', '.join(sorted(left))}"
    if problem:
        raise RuntimeError(f"{shlex.join(command)}\n{problem}")
    return samples, records


def watch(case: subprocess.Popen[bytes], command: str) -> Iterator[Sample]:
    started = time.perf_counter()
    while case.poll() is None:
        if time.perf_counter() - started > HANGS_S:
            case.kill()
            case.wait()
            raise RuntimeError(f"{command}\nhangs for {HANGS_S:.0f} s")
        sample = observe(case.pid, started)
        if sample is not None and sample.memory_mb:
            yield sample
        time.sleep(0.5)


def growth(samples: list[Sample]) -> str:
    """From the middle of a case to shortly before its end. The passes of a case follow each other,
    and each begins with what the one before it has left."""
    middle, end = samples[len(samples) // 2], samples[-3]
    return (
        f"{end.memory_mb - middle.memory_mb:+.1f} MB of {middle.memory_mb:.0f}, "
        f"{end.threads - middle.threads:+d} threads, {end.files - middle.files:+d} files in "
        f"{end.at_s - middle.at_s:.0f} s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="how long to go on [30]")
    parser.add_argument("--seed", type=int, default=0, help="of the settings [0]")
    parser.add_argument(
        "--requests", type=int, default=100, metavar="N", help="requests of a long case [100]"
    )
    asked = parser.parse_args()
    chooser, begun, case, total = random.Random(asked.seed), time.perf_counter(), 0, 0
    while time.perf_counter() - begun < 60 * asked.minutes:
        case += 1
        is_long = case % 4 == 0
        flags = draw(chooser, asked.requests if is_long else 0)
        try:
            samples, records = run(flags)
        except RuntimeError as error:
            print(f"case {case} failed: {error}", flush=True)
            return 1
        uses = [record["metrics"]["use"] for record in records]
        runs = sum(use["runs"] for use in uses if use is not None)
        total += runs
        shown = f"; {growth(samples)}" if is_long and len(samples) > 8 else ""
        print(f"case {case}: ok, {runs} runs{shown}", flush=True)
    seconds = time.perf_counter() - begun
    print(f"{case} cases, {total} runs, {seconds / 60:.1f} minutes: all ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
