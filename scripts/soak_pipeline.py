"""Run `magicdec pipeline` on real ranks with random settings for a long time, and check that
nothing hangs, differs, leaks or stays behind.

    python scripts/soak_pipeline.py --minutes 30
    python scripts/soak_pipeline.py --minutes 2 --seed 7 --first_case 12
    python scripts/soak_pipeline.py --plant payload

Each case is one command in float32 with settings that follow from the seed and the case's number,
so that `--seed` and `--first_case` run it again. Three kinds of cases take turns:

modes   every mode once: all have the tokens of one process.
leaks   one mode 81 times on the same ranks: `soak/leaks.py` says what must not grow. If something
        does, 337 times: a leak goes on, what the allocator keeps for itself comes to an end.
killed  a rank is killed with SIGKILL at a random time while runs are in flight: every other rank
        ends within 30 s and names it.

The first case that fails ends the soak with exit code 1 and its flags. The last line is a summary
as JSON. `--plant` has the ranks leak something for every run: the soak must then fail.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shlex
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import Any, NoReturn

from soak.choices import draw
from soak.leaks import BOUNDS, COUNTS, WARM_UP, find_leaks, growth
from soak.ranks import Ranks

HANGS_S = 900.0  # no case takes nearly as long
PROMISED_S = 30.0  # until all ranks have ended after one was killed
STEADY = (64, 320)  # passes after the warm-up: at first, and if something seems to grow
KINDS = ("modes", "leaks", "killed")
PLANTS = ("none", "payload", "buffer", "thread", "file")


class Failure(Exception):
    """What is wrong with a case."""


class Growth(Failure):
    """Something has grown from pass to pass."""


@dataclass
class Totals:
    """Of all cases so far."""

    cases: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    passes: int = 0
    runs: int = 0
    slowest_end_s: float = 0.0
    largest_growth: dict[str, float] = field(default_factory=dict)


def run_modes(ranks: Ranks, totals: Totals, chooser: random.Random) -> str:
    records = wait_for_end(ranks)
    if len(records) != 4:
        raise Failure(f"{len(records)} records, not those of one process and three modes")
    runs = count_runs(records)
    totals.passes, totals.runs = totals.passes + 3, totals.runs + runs
    return f"{runs} runs"


def run_leaks(ranks: Ranks, totals: Totals, chooser: random.Random) -> str:
    records = wait_for_end(ranks)
    found, largest = list[str](), dict.fromkeys(BOUNDS, 0.0)
    for rank in range(ranks.num_ranks):
        samples = ranks.noted(rank)
        if len(samples) - WARM_UP not in STEADY:
            raise Failure(f"rank {rank} has noted {len(samples)} passes")
        found += [f"rank {rank}: {leak}" for leak in find_leaks(samples)]
        for name in BOUNDS:
            slope = growth([sample[name] for sample in samples[WARM_UP:]])
            largest[name] = max(largest[name], slope)
    if found:
        raise Growth("; ".join(found))
    samples = ranks.noted(0)
    if any(sample["outputs"] != samples[0]["outputs"] for sample in samples):
        raise Failure("the passes differ in their tokens")
    runs = count_runs(records) + sum(sample["runs"] for sample in samples)
    totals.passes, totals.runs = totals.passes + len(samples) + 1, totals.runs + runs
    for name, slope in largest.items():
        totals.largest_growth[name] = max(totals.largest_growth.get(name, 0.0), slope)
    shown = ", ".join(f"{slope:+.2f} {name}" for name, slope in largest.items())
    return f"{runs} runs in {len(samples) + 1} passes, at most {shown} a pass"


def run_killed(ranks: Ranks, totals: Totals, chooser: random.Random) -> str:
    """A rank has noted its first pass when the second has begun."""
    everyone = range(ranks.num_ranks)
    until = time.monotonic() + HANGS_S
    while not ranks.noted(0):
        if ranks.failed() or time.monotonic() > until:
            raise Failure(f"no pass has ended:\n{logs(ranks)}")
        time.sleep(0.05)
    killed, after_s = chooser.choice(everyone), chooser.uniform(0.0, 3.0)
    time.sleep(after_s)
    ranks.kill(killed)
    begun = time.monotonic()
    others = [rank for rank in everyone if rank != killed]
    left = ranks.wait(others, PROMISED_S)
    seconds = time.monotonic() - begun
    if left:
        raise Failure(f"ranks {left} run {PROMISED_S:.0f} s after rank {killed} was killed")
    for rank in others:
        said = rf"rank {rank}: (rank {killed} has|ranks [\d, ]*\b{killed}\b[\d, ]* have) ended"
        if ranks.processes[rank].returncode == 0 or not re.search(said, ranks.log(rank)):
            raise Failure(f"rank {rank} does not name rank {killed}:\n{logs(ranks)}")
    if left_behind := ranks.left():
        raise Failure(f"left in shared memory: {', '.join(left_behind)}")
    totals.slowest_end_s = max(totals.slowest_end_s, seconds)
    return (
        f"rank {killed} of {ranks.num_ranks} killed after {after_s:.1f} s, named in {seconds:.1f}"
    )


def wait_for_end(ranks: Ranks) -> list[dict[str, Any]]:
    """The records of a case, which are all of the right tokens."""
    until = time.monotonic() + HANGS_S
    while ranks.wait(range(ranks.num_ranks), 0.5):
        if ranks.failed():
            ranks.wait(range(ranks.num_ranks), PROMISED_S)
            break
        if time.monotonic() > until:
            raise Failure(f"hangs for {HANGS_S:.0f} s:\n{logs(ranks)}")
    if failed := ranks.failed():
        raise Failure(f"ranks {failed} failed:\n{logs(ranks)}")
    records = ranks.records()
    if any(record["status"] != "ok" for record in records):
        raise Failure(f"statuses {[record['status'] for record in records]}")
    if left := ranks.left():
        raise Failure(f"left in shared memory: {', '.join(left)}")
    return records


def count_runs(records: list[dict[str, Any]]) -> int:
    uses = [record["speculation"] for record in records]
    return sum(use["runs"] for use in uses if use is not None)


def logs(ranks: Ranks) -> str:
    return "\n".join(ranks.log(rank)[-2000:] for rank in range(ranks.num_ranks))


RUN = {"modes": run_modes, "leaks": run_leaks, "killed": run_killed}
# By kind, the passes after the first; if there are several numbers, a case with growth runs again.
PASSES = {"modes": (0,), "leaks": tuple(WARM_UP + count for count in STEADY), "killed": (10**6,)}


def main() -> int:
    asked = read_arguments()
    signal.signal(signal.SIGTERM, stop)
    begun, case, totals = time.monotonic(), asked.first_case, Totals()
    problem = None
    while problem is None and time.monotonic() - begun < 60 * asked.minutes:
        kind = KINDS[case % len(KINDS)] if asked.plant == "none" else "leaks"
        chooser = random.Random(f"{asked.seed}/{case}")
        num_ranks, flags = draw(chooser, is_repeated=kind != "modes")
        began = time.monotonic()
        for passes in PASSES[kind]:
            words = [str(passes), str(int(kind == "leaks")), asked.plant, *flags]
            try:
                with Ranks(num_ranks, words) as ranks:
                    said = RUN[kind](ranks, totals, chooser)
            except Failure as error:
                if isinstance(error, Growth) and passes != PASSES[kind][-1]:
                    print(f"case {case} ({kind}): {error}; again, longer", flush=True)
                    continue
                problem = str(error)
                said = f"FAILED\n--nproc {num_ranks} {shlex.join(flags)}\n{problem}"
            break
        totals.cases[kind] += 1
        print(f"case {case} ({kind}, {time.monotonic() - began:.0f} s): {said}", flush=True)
        case += 1
    print(json.dumps(summary(asked, totals, time.monotonic() - begun, problem)))
    return 0 if problem is None else 1


def summary(
    asked: argparse.Namespace, totals: Totals, seconds: float, problem: str | None
) -> dict[str, Any]:
    return {
        "failed": problem,
        "seed": asked.seed,
        "first_case": asked.first_case,
        "minutes": round(seconds / 60, 1),
        "cases": totals.cases,
        "passes": totals.passes,
        "runs": totals.runs,
        "slowest_end_after_kill_s": round(totals.slowest_end_s, 1),
        "largest_growth_a_pass": {k: round(v, 2) for k, v in totals.largest_growth.items()},
        "bounds_a_pass": BOUNDS | dict.fromkeys(COUNTS, 0),
        "steady_passes_a_case": STEADY,
    }


def stop(number: int, frame: object) -> NoReturn:
    """Leave all contexts, which end the ranks and remove what they left."""
    sys.exit(128 + number)


def read_arguments() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="how long to go on [30]")
    parser.add_argument("--seed", type=int, default=0, help="of the settings [0]")
    parser.add_argument(
        "--first_case", type=int, default=0, metavar="N", help="the case to begin with [0]"
    )
    parser.add_argument(
        "--plant", choices=PLANTS, default="none", help="a leak in every run [none]"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
