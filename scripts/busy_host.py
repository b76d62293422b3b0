"""Decode steps of a GGUF file beside processes that keep a core busy: ours with one and two
threads, and llama.cpp's, in turns.

    python scripts/busy_host.py --model checkpoints/smollm2/model.gguf --llama PYTHON \
        [--context 512] [--busy 0 1 2] [--rounds 3] [--also DIR]

`--also` names another checkout of this project, whose steps are timed too. Times are medians of a
round's forwards, and then of the rounds. The busy processes are ours and end with the program.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gguf_speed import Times, llama_times, time_ours

WAY = ("stored", "packed_a8", "bfloat16")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--llama", metavar="PYTHON")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2], help="processes")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--also", metavar="DIR", type=Path)
    args = parser.parse_args()
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for _ in range(args.rounds):
        for busy in args.busy:
            with busy_processes(busy):
                for name, ms in one_round(args):
                    found[name, busy].append(ms)
    print(f"| decode step at {args.context} tokens, ms | " + " | ".join(map(column, args.busy)))
    print("|---|" + "--:|" * len(args.busy))
    for name in dict.fromkeys(name for name, _ in found):
        cells = (cell(found[name, busy]) for busy in args.busy)
        print(f"| {name} | " + " | ".join(cells) + " |")
    return 0


def one_round(args: argparse.Namespace) -> Iterator[tuple[str, float]]:
    trees = [None, args.also] if args.also else [None]
    for threads in args.threads:
        for tree in trees:
            times: Times = defaultdict(list)
            time_ours(args.model, [1], [args.context], threads, WAY, times, tree)
            name = "ours" if tree is None else str(tree)
            ms = next(ms for (*_, forward), (ms,) in times.items() if forward == "decode")
            yield f"{name}, threads {threads}", ms
        if args.llama:
            rows = llama_times(args.llama, args.model, "f16", 1, [args.context], threads)
            ms = next(ms for _, forward, ms in rows if forward == "decode")
            yield f"llama.cpp, threads {threads}", ms


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    call = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(call) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def column(busy: int) -> str:
    return "alone" if not busy else f"beside {busy}"


def cell(found: list[float]) -> str:
    listed = ", ".join(f"{ms:.1f}" for ms in found)
    return f"{statistics.median(found):.1f} ({listed})"


if __name__ == "__main__":
    sys.exit(main())
