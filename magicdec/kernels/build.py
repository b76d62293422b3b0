"""Builds the project's C++ sources at first use, loads Triton kernels, and asks for large pages for
the KV cache and packed weights. Imports no other module of the project but `cpu.py`.

Libraries are cached in `~/.cache/magicdec`, keyed by source, flags, compiler and CPU; of several
ranks one builds. Triton kernels are compiled for CUDA or interpreted on a CPU, which Triton decides
at its first import.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

from torch import Tensor

from magicdec.kernels.cpu import (
    CannotExecute,
    check_executable,
    compiler_macros,
    cpu_features,
    cpu_field,
    used_features,
)

SHARED_HEADERS = Path(__file__).parent  # amx.h, arithmetic.h, and so on
FLAGS = (
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-shared",
    # A source has the same bits wherever it is inlined: sums are added in the order in which they
    # are written, and a product is joined with a sum where that says `fused`, and nowhere else.
    "-ffp-contract=off",
    # What lets loops become vectors. -ffast-math is more: other orders are allowed, and the whole
    # process that such a library is loaded into flushes subnormal numbers to zero.
    "-fno-signed-zeros",
    "-fno-trapping-math",
    "-fno-math-errno",
    "-ffinite-math-only",
)
# The CPU for which the libraries are compiled: one that this machine can run, such as x86-64-v3.
CPU = os.environ.get("MAGICDEC_MARCH")
MARCH = f"-march={CPU}" if CPU else "-march=native"
# A forward of so many new tokens a row is a prefill (LONG_CHUNK in native_problem.h), also if they
# are not said to be a prompt's. In decoding and verification, which have fewer, a token's attention
# has the same bits however many there are.
PREFILL_FROM = 256
COMPILERS = ("g++", "clang++", "c++")
MADV_HUGEPAGE = 14  # linux/mman.h


# What the sources use of the language and of the compiler.
TRIAL = "#include <omp.h>\nint main() { return [](auto f) { return f.template operator()<0>(); }"
TRIAL += "([]<int n>() { return n; }); }\n"


def find_compiler() -> str | None:
    """The first C++ compiler of this system that compiles the kernels, or None."""
    return next((path for path, refusal in _compilers() if not refusal), None)


def refused_compilers() -> str | None:
    """The reasons why the present compilers refuse the kernels; None if one does not."""
    compilers = _compilers()
    if not compilers or find_compiler() is not None:
        return None
    return "; ".join(f"{path}: {refusal}" for path, refusal in compilers)


def _compilers() -> list[tuple[str, str]]:
    paths = [path for name in COMPILERS if (path := shutil.which(name))]
    return [(path, _refusal(path, Path(path).resolve().stat().st_mtime_ns)) for path in paths]


@cache
def _refusal(path: str, version_ns: int) -> str:
    """The first error of a trial, kept beside the libraries."""
    command = [path, *FLAGS, MARCH, "-fopenmp", "-fsyntax-only", "-x", "c++", "-"]
    key = "\n".join([*command, TRIAL, str(version_ns), *cpu_features()])
    result = library_folder() / f"compiler-{hashlib.sha256(key.encode()).hexdigest()[:20]}.txt"
    if result.exists():
        return result.read_text()
    process = subprocess.run(command, input=TRIAL, capture_output=True, text=True)
    errors = [line for line in process.stderr.splitlines() if "error" in line]
    refusal = (errors or ["it failed"])[0].strip() if process.returncode else ""
    write_whole(result, lambda partial: partial.write_text(refusal))
    return refusal


def check_cpu() -> None:
    """Raises ValueError if MAGICDEC_MARCH names a CPU that this one cannot execute, or no compiler
    knows."""
    compiler = find_compiler()
    try:
        if compiler is not None:
            check_executable(compiler, [MARCH])
        for path, refusal in _compilers() if compiler is None else ():
            if CPU and CPU in refusal:  # and not another flag of the kernels, or the language
                raise CannotExecute(f"{MARCH} is a CPU that {path} does not know")
    except CannotExecute as error:
        raise ValueError(f"MAGICDEC_MARCH={CPU}: {error}; unset it, or name another CPU") from None


def is_compiled_for(macro: str) -> bool:
    """Whether libraries use a feature, by the compiler's macro, since MAGICDEC_MARCH may exclude
    it."""
    compiler = find_compiler()
    if not CPU or compiler is None:
        return True
    return f"#define {macro} " in (compiler_macros(compiler, (MARCH,)) or "")


@cache
def compiler_version() -> str | None:
    """The compiler's own description; None without a compiler."""
    compiler = find_compiler()
    if compiler is None:
        return None
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    return done.stdout.partition("\n")[0]


def used_instructions() -> list[str] | None:
    compiler = find_compiler()
    return None if compiler is None else used_features(compiler_macros(compiler, (MARCH,)) or "")


def loaded_kernels() -> dict[str, str]:
    """The libraries that this process has loaded, by the name of their source and what they were
    compiled for (`native-HEAD_SIZE=64`): the first digits of the SHA-256 of their machine code. The
    compiler writes the same code for the same sources, flags, version and instructions."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = {line.split(maxsplit=5)[-1] for line in lines if line.endswith(".so")}
    folder = library_folder().resolve()
    ours = sorted(path for path in map(Path, mapped) if path.parent == folder)
    return {
        path.stem.rpartition("-")[0]: hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        for path in ours
    }


def library_folder() -> Path:
    folder = Path.home() / ".cache" / "magicdec"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@cache
def load_library(
    source: Path, flags: tuple[str, ...] = (), headers: tuple[Path, ...] = ()
) -> ctypes.CDLL:
    """The library built from `source` and `headers`, or its cached build. Raises ValueError without
    a compiler, RuntimeError with its output if it fails, and CannotExecute if this CPU lacks
    instructions."""
    compiler = find_compiler()
    if compiler is None:
        raise ValueError(f"{source.name} needs a C++ compiler; on Debian: apt install g++")
    command = [compiler, *FLAGS, MARCH, *flags]
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    texts = [path.read_text() for path in (source, *headers)]
    cpu = cpu_field("model name"), " ".join(cpu_features())  # which -march=native is for
    key = "\n".join([*command, *texts, version.stdout, *cpu])
    directory = library_folder()
    name = hashlib.sha256(key.encode()).hexdigest()[:20]
    defined = [flag.removeprefix("-D") for flag in flags if flag.startswith("-D")]
    path = directory / f"{'-'.join([source.stem, *defined, name])}.so"
    if not path.exists():
        with (directory / "build.lock").open("w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX, 1, int(name[:8], 16))  # a byte for each library
            if not path.exists():
                write_whole(path, lambda partial: _build([*command, str(source)], partial))
    check_executable(compiler, (MARCH, *flags))
    return ctypes.CDLL(str(path))


def _build(command: list[str], path: Path) -> None:
    process = subprocess.run([*command, "-o", str(path)], capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {process.stderr.strip()}")


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make the file, which appears at `path` when complete."""
    descriptor, name = tempfile.mkstemp(suffix=path.suffix, dir=path.parent)
    os.close(descriptor)
    try:
        write(Path(name))
    except BaseException:
        Path(name).unlink()
        raise
    Path(name).replace(path)


def share_openmp() -> None:
    """Make libraries use torch's OpenMP runtime, not a second set of threads. Call before
    `load_library` with -fopenmp."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    for path in {line.split()[-1] for line in lines if "libgomp" in line or "libiomp" in line}:
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)


def use_huge_pages(tensor: Tensor) -> None:
    """Ask Linux for 2 MiB pages of a fresh CPU tensor: reading it front to back then stops the
    prefetcher 512 times less often. A refusal is no error."""
    if tensor.device.type != "cpu" or not sys.platform.startswith("linux"):
        return
    page = mmap.PAGESIZE
    first = -(-tensor.data_ptr() // page) * page
    size = (tensor.data_ptr() + tensor.numel() * tensor.element_size() - first) // page * page
    if size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), MADV_HUGEPAGE)


def load_kernels(module: str, flag: str, device: str) -> ModuleType:
    """The kernels in `module`. Raises ValueError naming `flag` if Triton was imported in the other
    mode, or cannot interpret here."""
    interpret = device == "cpu"
    if interpret and "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
    kernels = importlib.import_module(module)
    kinds = {type(value).__name__ for value in vars(kernels).values()}
    if ("InterpretedFunction" in kinds) != interpret:
        raise ValueError(
            f"{flag} --device {device}: TRITON_INTERPRET must be "
            f"{'1' if interpret else 'unset'} when triton is first imported; change it and restart"
        )
    if interpret:
        versions = (importlib.import_module(n).__version__ for n in ("triton", "numpy"))
        check_interpreter(flag, *versions)
    return kernels


def check_interpreter(flag: str, triton: str, numpy: str) -> None:
    """Raises ValueError if this Triton cannot interpret with this numpy: before 3.7 a loop's bound
    is an array, which numpy 2.4 refuses as a number."""
    old, new = (tuple(map(int, text.split(".")[:2])) for text in (triton, numpy))
    if old < (3, 7) and new >= (2, 4):
        raise ValueError(
            f"{flag} --device cpu: triton {triton} cannot interpret kernels with numpy {numpy}; "
            "install triton 3.7 or numpy 2.3"
        )


def next_power(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
