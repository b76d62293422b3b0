"""Runs `short_run` in bfloat16 over all ranks, exactly or with a lossy rule. Started by
test_engine_ranks.py with a folder and `exact` or `lossy`; each rank writes its verdict to a file
of the folder."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from lossy import plant, short_run

from magicdec.bench.measure import execute
from magicdec.distributed.groups import read_launch
from magicdec.setup.prepare import prepare


def main() -> None:
    launch = read_launch()
    out = Path(sys.argv[1])
    if sys.argv[2] == "lossy":
        plant(pytest.MonkeyPatch(), 0.2)
    prepared = prepare(short_run("bfloat16", launch.world_size), launch)
    record = execute(prepared).record
    assert record.correctness is not None
    found = [record.status, asdict(record.correctness)]
    (out / f"{launch.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
