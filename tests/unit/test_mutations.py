"""Randomly damaged headers never crash the process or use 1 GB, and are refused with one line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_files import make_tensors, write, write_pth, write_sharded
from conftest import HANG

pytestmark = pytest.mark.wide

MUTATIONS = Path(__file__).with_name("mutations.py")


@pytest.mark.wide
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_AS is Linux's")
@pytest.mark.parametrize("kind", ["safetensors", "index", "config", "pth"])
def test_mutated_headers(kind: str, tmp_path: Path) -> None:
    writer = {"index": write_sharded, "pth": write_pth}.get(kind, write)
    writer(tmp_path, make_tensors())
    command = [sys.executable, str(MUTATIONS), kind, str(tmp_path), "200"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr[-3000:]
    outcomes = json.loads(done.stdout)
    assert sum(outcomes.values()) == 200
    assert outcomes["refused"] >= 100  # most damage is an error
