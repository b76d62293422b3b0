"""Launches of our Triton kernels, without a GPU: recorded instead of executed, with operators of
torch counted when they are dispatched; or executed by the interpreter as operators of torch, which
a recorder of steps sees."""

import os
import re
import subprocess
import sys
import tempfile
from collections import ChainMap, Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from pretend_cuda import PACKAGE, values_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from magicdec.model.block import Block
from magicdec.model.elementwise import triton as module

ALLOCATIONS = {"aten.new_empty", "aten.empty", "aten.empty_like", "aten._unsafe_view"}


@dataclass(frozen=True)
class CountedLaunch:
    kernel: str
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]


@dataclass
class LaunchRecorder:
    """Replaces the module of kernels."""

    launches: list[CountedLaunch] = field(default_factory=list)

    def __getattr__(self, kernel: str) -> Any:
        class Kernel:
            def __getitem__(_, grid: tuple[int, ...]) -> Callable[..., None]:
                return lambda *args, **options: self.launches.append(
                    CountedLaunch(kernel, grid, args, options)
                )

        return Kernel()


def record_launches(monkeypatch: pytest.MonkeyPatch) -> list[CountedLaunch]:
    """From now on our kernels are not run, but added to the list."""
    recorder = LaunchRecorder()
    monkeypatch.setattr(module, "kernels", lambda device: recorder)
    return recorder.launches


class Operators(TorchDispatchMode):
    """Counts torch's operators that launch a kernel, so not views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func).rsplit(".", 1)[0]
        kinds = [value.alias_info for value in func._schema.returns]
        is_view = bool(kinds) and all(kind is not None and not kind.is_write for kind in kinds)
        if is_view and isinstance(out, Tensor):  # or a copy, as `to` and `reshape` may make
            storages = {values_of(t).untyped_storage()._cdata for t in (out, args[0])}
            is_view = len(storages) == 1
        if name.startswith("aten.") and not is_view and name not in ALLOCATIONS:
            self.note(name)
        return out

    def note(self, name: str) -> None:
        self.counts[name] += 1


class BesideLayers(Operators):
    """Counts what is launched outside of a model's layers, our kernels (`dispatched`) included, by
    operator and by the function of the package that asks for it. A view that a layer is the first
    to ask for counts as well."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "magicdec_tests":
            self.note("ours")
        return super().__torch_dispatch__(func, types, args, kwargs)

    def note(self, name: str) -> None:
        frame = sys._getframe(1)
        place = None
        while frame is not None:
            file = Path(frame.f_code.co_filename)
            if place is None and file.is_relative_to(PACKAGE):
                path = file.relative_to(PACKAGE).with_suffix("")
                place = f"{path}.{frame.f_code.co_name}: {name}"
            if frame.f_code is Block.forward.__code__ and not str(place).startswith("kv/view"):
                return
            frame = frame.f_back  # type: ignore[assignment]
        if place is not None:
            self.counts[place] += 1


POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
POINTERS |= {torch.int32: "*i32", torch.int64: "*i64", torch.int8: "*i8", torch.uint8: "*u8"}
POINTERS |= {torch.float8_e4m3fn: "*fp8e4nv"}


def compile_launch(
    kernel: Any, launch: CountedLaunch, capability: int, is_aligned: bool = True
) -> Any:
    """The machine code of a launch, with arguments specialised as Triton does. Without `is_aligned`
    the first tensor does not begin at a multiple of 16 bytes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    given = dict(zip(kernel.arg_names, launch.args, strict=False)) | launch.options
    signature = {}
    constants = {}
    attributes = {}
    for i, (name, param) in enumerate(zip(kernel.arg_names, kernel.params, strict=True)):
        value = given[name]
        is_special = not param.do_not_specialize
        is_one = is_special and isinstance(value, int) and value == 1
        if name in launch.options or value is None or is_one:
            signature[name] = "constexpr"
            constants[(i,)] = value
            continue
        if isinstance(value, Tensor):
            signature[name] = POINTERS[value.dtype]
            is_special = is_aligned or i > 0
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            is_special = is_special and isinstance(value, int) and value % 16 == 0
        if is_special:
            attributes[(i,)] = [["tt.divisibility", 16]]
    options = {n: v for n, v in launch.options.items() if n not in kernel.arg_names}
    source = ASTSource(kernel, signature, constants, attributes)
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def resources(cubin: bytes) -> dict[str, int]:
    """What machine code takes for each thread: registers (REG), and memory for what is spilled
    (STACK, LOCAL). By the disassembler that Triton includes."""
    import triton

    disassembler = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        words = [disassembler, "--dump-resource-usage", file.name]
        usage = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, number in re.findall("([A-Z]+):([0-9]+)", usage)}


def compile_apart(code: str, cache: Path) -> None:
    """Run code that compiles our kernels to machine code, in a process that does not interpret
    them. Triton includes its assembler."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    here = Path(__file__).parent
    paths = [str(here), str(here.parent), env.get("PYTHONPATH", "")]
    env |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(paths)}
    # The tests' own imports must not make it interpret.
    code = "import torch; torch.cuda.is_available = lambda: True\n" + code
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class Launches:
    """Stands where modules of kernels do. A launch is an operator with its numbers as they were
    then, replayed on what its tensors hold by then. `made` has the names of all that were made."""

    def __init__(self, *modules: ModuleType) -> None:
        self._kernels = ChainMap(*map(vars, modules))
        self._given: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = []
        self.made: list[str] = []

    def __getattr__(self, name: str) -> Any:
        found = self._kernels[name]
        return _Kernel(self, name) if type(found).__name__ == "InterpretedFunction" else found

    def start(self, name: str, grid: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        others = tuple(Tensor if isinstance(arg, Tensor) else arg for arg in args)
        self._given.append((name, grid, others, options))
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        torch.ops.magicdec_tests.launch(tensors, len(self._given) - 1)

    def make(self, tensors: list[Tensor], number: int) -> None:
        name, grid, args, options = self._given[number]
        current = iter(tensors)
        self.made.append(name)
        self._kernels[name][grid](
            *(next(current) if arg is Tensor else arg for arg in args), **options
        )


class _Kernel:
    def __init__(self, launches: Launches, name: str) -> None:
        self.launches = launches
        self.name = name

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **options: self.launches.start(self.name, grid, args, options)


@contextmanager
def dispatched(*modules: ModuleType) -> Iterator[Launches]:
    """One at a time."""
    launches = Launches(*modules)
    library = torch.library.Library("magicdec_tests", "DEF")
    library.define("launch(Tensor(a!)[] tensors, int number) -> ()")
    library.impl("launch", launches.make, "CPU")
    try:
        yield launches
    finally:
        library._destroy()
