"""One rank of `magicdec pipeline` that serves every pass again and again, and notes what it holds
after each. Started by scripts/soak_pipeline.py:

    rank.py DIRECTORY PASSES MEASURED PLANTED FLAGS...

PASSES are those after the first one of each mode. MEASURED is 0 or 1: whether anything but the
tokens is noted. PLANTED is `none` or a leak, which must then be found. Shared memory segments are
made in DIRECTORY/segments, so that what is left there is this case's.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from queue import Queue, SimpleQueue
from threading import Event, Thread
from typing import Any

import torch.distributed as dist

from magicdec.bench.serving.measure import Experiment, Served
from magicdec.cli.serve import pipeline
from magicdec.distributed import shared_memory
from magicdec.distributed.channels.carriers import PacketCarrier
from magicdec.distributed.ranks import end_with_launcher
from magicdec.engine.scheduler import StepCounts
from magicdec.hardware.threads import ThreadCount
from magicdec.systems.modes import SPECULATIVE, Pass
from magicdec.systems.pipeinfer.head import Wires
from magicdec.systems.pipeinfer.run_stage import RunStage
from magicdec.systems.pipeinfer.speculative_pipeline import SpeculativePipeline
from magicdec.systems.system import PassObserver
from magicdec.workload.request_shapes import RequestShape

DIRECTORY, PASSES, IS_MEASURED = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1"
PLANTED = sys.argv[4]
del sys.argv[1:5]
SEGMENTS = DIRECTORY / "segments"
READINGS = 5  # of a count, which may be larger for an instant, while a thread ends
serve = Experiment.serve


def repeat(
    self: Experiment, each: Pass, shapes: Sequence[RequestShape], observer: PassObserver
) -> Served:
    served = serve(self, each, shapes, observer)
    if each.system != SPECULATIVE or not observer.is_measured:
        return served
    system = self.prepared.system_of(each)
    assert isinstance(system, SpeculativePipeline) and system.member is not None, "it has served"
    for number in range(PASSES):
        line = {"mode": each.name, "pass": number} | tokens_of(served)
        note(self.launch.rank, line, system.member.wires)
        if IS_MEASURED:
            dist.barrier()  # the next pass begins when all have measured
        again = replace(observer, counts=StepCounts(), threads=ThreadCount(), is_measured=False)
        served = serve(self, each, shapes, again)
    return served


def tokens_of(served: Served) -> dict[str, Any]:
    outputs = [request.output_ids for request in served.requests]
    return {"outputs": outputs, "runs": served.observer.counts.num_steps}


def note(rank: int, line: dict[str, Any], wires: Wires) -> None:
    line |= held(wires) if IS_MEASURED else {}
    with (DIRECTORY / f"rank{rank}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def held(wires: Wires) -> dict[str, int]:
    # Gloo cannot say that a send is over, so that an edge keeps up to 192 until it needs their
    # places: one that carries a message a pass would grow for as many passes.
    for carrier in [each for each in gc.get_objects() if isinstance(each, PacketCarrier)]:
        carrier.close()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    readings = []
    for _ in range(READINGS):
        readings.append(count(wires))
        time.sleep(0.01)
    return {name: min(reading[name] for reading in readings) for name in readings[0]}


def count(wires: Wires) -> dict[str, int]:
    """Memory is that of the heap: the pages of ring buffers are shared and filled once."""
    status, own = Path("/proc/self/status").read_text(), Path("/proc/self")
    anonymous = next(line for line in status.splitlines() if line.startswith("RssAnon:"))
    return {
        "anonymous_kb": int(anonymous.split()[1]),
        "objects": len(gc.get_objects()),
        "threads": len(list((own / "task").iterdir())),
        "files": len(list((own / "fd").iterdir())),
        "segments": len(list(SEGMENTS.iterdir())),
        "mappings": (own / "maps").read_text().count(str(SEGMENTS)),
        "waiting": waiting(wires, set()),
    }


def waiting(owner: object, seen: set[int]) -> int:
    """How much is in the queues and containers that channels hold, each counted once."""
    seen.add(id(owner))
    total = 0
    for value in vars(owner).values():
        if isinstance(value, SimpleQueue | Queue):
            total += value.qsize()
        elif hasattr(value, "__len__") and "memory" not in type(value).__name__:
            total += len(value)
        elif type(value).__module__.startswith("magicdec.") and hasattr(value, "__dict__"):
            total += 0 if id(value) in seen else waiting(value, seen)
    return total


def plant(name: str) -> None:
    """Keep something for every run."""
    compute, kept = RunStage.compute, list[Any]()

    def leak(self: RunStage, *args: Any) -> Any:
        if name == "payload":
            kept.append(args[1])
        elif name == "thread":
            kept.append(Thread(target=Event().wait, daemon=True))
            kept[-1].start()
        elif name == "file":
            kept.append(Path("/dev/null").open())  # noqa: SIM115
        elif name == "buffer":  # memory that no object of Python's collector stands for
            kept.append(bytes(1024))
        return compute(self, *args)

    RunStage.compute = leak  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    sys.argv[0] = "magicdec pipeline"
    end_with_launcher()
    shared_memory.DIRECTORY = SEGMENTS
    Experiment.serve = repeat  # type: ignore[method-assign]
    plant(PLANTED)
    pipeline()
