"""`magicdec doctor`: a line each for what works on this machine. Exit code 1 if a need of every run
does not.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING

from magicdec.cli.flags import LoneCommand
from magicdec.cli.parsing.parser import ParsedValues
from magicdec.distributed.groups import Launch
from magicdec.output.console import labelled

if TYPE_CHECKING:
    from magicdec.config.machine import Machine

HEAD_SIZE = 64  # of the demo model


@dataclass(frozen=True)
class Check:
    """A capability of the machine. A run can do without it unless `is_needed`."""

    name: str
    works: bool
    detail: str
    is_needed: bool = False


def print_checks(values: ParsedValues) -> int:
    is_missing = False
    for check in find_checks():
        mark = "works" if check.works else "MISSING" if check.is_needed else "absent"
        is_missing = is_missing or mark == "MISSING"
        print(labelled(f"{mark:<8} {check.name}", check.detail, indent=26), flush=True)
    print("A run needs what is MISSING." if is_missing else "Everything that a run needs works.")
    return int(is_missing)


def find_checks() -> Iterator[Check]:
    yield Check("magicdec", True, f"{version('magicdec')}, Python {platform.python_version()}")
    if find_spec("torch") is None:
        yield Check("torch", False, "not installed; install it with: pip install torch", True)
        return
    import torch

    from magicdec.config.choices.collectives import lacking_memory
    from magicdec.hardware.environment import probe_machine
    from magicdec.kernels.build import find_compiler, refused_compilers
    from magicdec.model.checkpoint.source import find_model

    machine = probe_machine(Launch())
    capability = torch.backends.cpu.get_cpu_capability()
    yield Check("torch", True, f"{torch.__version__}, {machine.num_cpus} cores with {capability}")
    way = "the CPU has dot products for it"
    if not machine.has_bfloat16_products:
        way = "no dot products for it; the kernels widen it to float32 in registers"
        if not machine.widens_bfloat16:
            way = "no dot products for it, and no AVX2 or no compiler; runs use float32"
    is_fast = machine.has_bfloat16_products or machine.widens_bfloat16
    yield Check("bfloat16 on CPU", is_fast, way)
    missing = refused_compilers() or "none found; on Debian: apt install g++"
    missing += ". Without it, slower kernels run"
    yield Check("C++ compiler", find_compiler() is not None, find_compiler() or missing)
    yield check_kernels(machine)
    obstacle = lacking_memory(replace(machine, world_size=2, local_world_size=2), is_staged=True)
    free = machine.shared_memory_bytes
    left = "/dev/shm" if free is None else f"/dev/shm, {free / 1e9:.1f} GB free"
    yield Check("shared memory", obstacle is None, obstacle or left)
    names = [torch.cuda.get_device_name(i) for i in range(machine.num_gpus)]
    what = machine.gpu_obstacle or ", ".join(names) or "no GPU that torch can use"
    yield Check("CUDA", machine.has_cuda, what)
    has_triton = find_spec("triton") is not None
    yield Check("Triton", has_triton, version("triton") if has_triton else "not installed")
    for name, why in machine.missing_backends.items():
        yield Check(f"--attention {name}", False, why)
    yield needed("demo model", lambda: f"{find_model('--model', 'demo').config.num_layers} layers")
    yield needed("auto", lambda: describe_auto(machine))


def check_kernels(machine: Machine) -> Check:
    """Builds the attention kernel, unless it was built before, and loads it."""
    name = "CPU kernels"
    if not machine.has_compiler:
        return Check(name, False, "they need a C++ compiler")
    from magicdec.attention.native import has_dot_products, kernel

    try:
        library = kernel(HEAD_SIZE)
    except (RuntimeError, ValueError, OSError) as error:
        return Check(name, False, " ".join(str(error).split())[:200])
    if machine.has_bfloat16_products and not has_dot_products():
        return Check(name, False, "the compiler does not know this CPU's bfloat16 instructions")
    found = "built and loaded"
    if library.magicdec_may_use_tiles():
        found += "; tile registers (AMX) multiply bfloat16, int8 and int4"
    return Check(name, True, found)


def needed(name: str, describe: Callable[[], str]) -> Check:
    """A check that works unless `describe` raises ValueError."""
    try:
        return Check(name, True, describe(), is_needed=True)
    except ValueError as error:
        return Check(name, False, str(error), is_needed=True)


def describe_auto(machine: Machine) -> str:
    from magicdec.config.resolve import resolve
    from magicdec.config.run_config import RunConfig

    config = resolve(RunConfig(), machine)
    return (
        f"--device {config.parallel.device} --dtype {config.model.dtype} "
        f"--attention {config.attention.backend} --linear {config.model.linear} "
        f"--threads {config.parallel.threads}"
    )


main = LoneCommand(
    print_checks,
    "Check what works on this machine: compiler, CPU kernels, shared memory, CUDA, Triton, the "
    "packaged models, and which choices `auto` makes here.",
    {},
)
