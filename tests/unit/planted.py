"""Runs one test against each of several copies of the package, which have an error each. Started by
test_planted_errors.py with the directory of each copy and its test; prints the exit codes as JSON.

Every test runs in a process of its own, which is forked from one that has imported the libraries
that the package needs, but nothing of the package.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path

import pytest

IMPORTED = ("hypothesis", "numpy", "safetensors.torch", "scipy.special", "torch.distributed")


def run(copy: Path, test: str) -> int:
    """pytest's exit code. Its output is in the file `out` beside the copy."""
    if (child := os.fork()) == 0:
        with (copy / "out").open("w") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        os.chdir(copy)
        sys.path.insert(0, str(copy))
        os._exit(int(pytest.main(["-p", "no:cacheprovider", "-r", "fE", test])))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    for name in IMPORTED:
        import_module(name)
    assert "magicdec" not in sys.modules
    cases = zip(sys.argv[1::2], sys.argv[2::2], strict=True)
    print(json.dumps({copy: run(Path(copy), test) for copy, test in cases}))
