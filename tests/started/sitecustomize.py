"""Python imports this at its start where this folder is in PYTHONPATH, as `WITH_SMALL_READS` of
`conftest.py` has it. Runs then read a small buffer for the bandwidth, as those in the tests' own
process do. What plans a run's memory knows the size of the real one."""

import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

PLAN = "magicdec.setup.memory_plan"
TIMING = "magicdec.hardware.timing"
SMALL = 1 << 22


class Finder:
    """Finds the module that plans a run's memory, and lets the buffer be small once it is there."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != PLAN:
            return None
        spec = PathFinder.find_spec(name, path, target)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_shrink(module: ModuleType) -> None:
            execute(module)
            sys.modules[TIMING].BANDWIDTH_BYTES = SMALL  # type: ignore[attr-defined]

        spec.loader.exec_module = execute_and_shrink  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder)
