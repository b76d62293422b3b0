"""Run by `test_mutations.py` in a separate process: damages the headers of a checkpoint at random
(seeded) and calls `find_model` each time. Prints the number of each outcome. Any error except a
ValueError of one line ends the process with a traceback, as does using more than 1 GB of memory or
5 s of CPU time.

    mutations.py safetensors|index|config|pth DIRECTORY COUNT
"""

import json
import random
import resource
import signal
import struct
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from magicdec.model.checkpoint.source import find_model

MOST_BYTES = 1 << 30
MOST_CPU_S = 5  # of one mutation, which takes milliseconds
FILES = {
    "safetensors": "model.safetensors",
    "index": "model.safetensors.index.json",
    "config": "config.json",
    "pth": "model.pth",
}
STRANGE: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    2**64 - 1,
    10**30,
    1.5,
    float("inf"),
    float("nan"),
    "",
    "F32",
    "U64",
    "\0",
    "../../etc/passwd",
    "x" * 10_000,
    [],
    [[]],
    {},
    [0, 2**64 - 1],
    [-1, 4],
    {"a": {"b": []}},
    [2**40, 2**40],
]


def mutate_bytes(data: bytes, first: int, last: int, rng: random.Random) -> bytes:
    """Flip, replace, drop, repeat or insert a few bytes between `first` and `last`."""
    broken = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(first, max(first + 1, min(last, len(broken))))
        kind = rng.randrange(5)
        if kind == 0 and place < len(broken):
            broken[place] ^= 1 << rng.randrange(8)
        elif kind == 1 and place < len(broken):
            broken[place] = rng.randrange(256)
        elif kind == 2:
            del broken[place : place + rng.randint(1, 64)]
        elif kind == 3:
            broken[place:place] = broken[place : place + rng.randint(1, 64)]
        else:
            broken[place:place] = rng.randbytes(rng.randint(1, 16))
    return bytes(broken)


def mutate_json(value: Any, rng: random.Random) -> Any:
    """Replace a random part of a JSON value by an unexpected value, or remove it."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        kind = rng.random()
        if kind < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if kind < 0.2:
            return {("strange" if k == key else k): v for k, v in value.items()}
        return {**value, key: mutate_json(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        place = rng.randrange(len(value))
        return [*value[:place], mutate_json(value[place], rng), *value[place + 1 :]]
    return rng.choice(STRANGE)


def mutate_safetensors(data: bytes, rng: random.Random) -> bytes:
    (length,) = struct.unpack("<Q", data[:8])
    kind = rng.randrange(3)
    if kind == 0:  # its length
        strange = rng.choice([0, 1, length - 1, length + 1, 2**20, 10**8, 2**40, 2**63, 2**64 - 1])
        return struct.pack("<Q", strange) + data[8:]
    if kind == 1:
        return mutate_bytes(data, 0, 8 + length, rng)
    header = json.dumps(mutate_json(json.loads(data[8 : 8 + length]), rng)).encode()
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


def mutate(kind: str, data: bytes, rng: random.Random) -> bytes:
    if kind == "safetensors":
        return mutate_safetensors(data, rng)
    if kind == "pth":  # the pickle at its begin and the directory at its end
        if rng.random() < 0.5:
            return mutate_bytes(data, 0, 6000, rng)
        return mutate_bytes(data, len(data) - 3000, len(data), rng)
    if rng.random() < 0.3:
        return mutate_bytes(data, 0, len(data), rng)
    if kind == "config" and rng.random() < 0.3:  # sizes that would be a table of as many entries
        sizes = [name for name, value in json.loads(data).items() if type(value) is int]
        return json.dumps(json.loads(data) | {rng.choice(sizes): 10 ** rng.randint(7, 12)}).encode()
    return json.dumps(mutate_json(json.loads(data), rng)).encode()


class Endless(BaseException):
    """Raised at the CPU limit. Not an Exception, so no code that reads checkpoints catches it."""


def stop(signum: int, frame: object) -> None:
    raise Endless(f"more than {MOST_CPU_S} s of CPU")


def main(kind: str, directory: Path, count: int) -> None:
    find_model("--model", str(directory))  # whole, and everything is imported and set up
    statm = Path("/proc/self/statm").read_text().split()
    limit = int(statm[0]) * resource.getpagesize() + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.signal(signal.SIGPROF, stop)
    file = directory / FILES[kind]
    data = file.read_bytes()
    outcomes = Counter[str]()
    for seed in range(count):
        file.write_bytes(mutate(kind, data, random.Random(seed)))
        signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S)
        try:
            find_model("--model", str(directory))
        except ValueError as error:
            assert "\n" not in str(error), f"seed {seed}: {error}"
            assert len(str(error)) < 50_000 and str(directory) in str(error), f"seed {seed}"
            outcomes["refused"] += 1
        except BaseException:
            print(f"{kind}, seed {seed}", file=sys.stderr)
            raise
        else:
            outcomes["found"] += 1
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
