"""Building the project's C++ sources with the system's compiler at first use. Imports nothing of
ours.

Owns the cache of built libraries, `~/.cache/magicdec`, keyed by source, flags, compiler and CPU.
Safe when several ranks start at once: each builds into a file of its own and renames it into place.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

SHARED_HEADERS = Path(__file__).parent  # arithmetic.h, bf16.h, int8.h
FLAGS = ("-std=c++20", "-O3", "-march=native", "-fPIC", "-shared")
# What -ffast-math gives the vectoriser, and not -ffast-math itself: linked into a library, that
# makes the whole process flush subnormal numbers to zero.
FAST_MATH = (
    *("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno"),
    *("-ffinite-math-only", "-freciprocal-math"),
)
COMPILERS = ("g++", "clang++", "c++")


def find_compiler() -> str | None:
    """The system's C++ compiler, or None."""
    return next((path for name in COMPILERS if (path := shutil.which(name))), None)


@cache
def load_library(
    source: Path, flags: tuple[str, ...] = (), headers: tuple[Path, ...] = ()
) -> ctypes.CDLL:
    """The library built from `source`, which includes `headers`, from the cache if it stands there.

    Raises ValueError where there is no compiler, RuntimeError with its words where it fails.
    """
    compiler = find_compiler()
    if compiler is None:
        raise ValueError(f"{source.name} needs a C++ compiler; on Debian: apt install g++")
    command = [compiler, *FLAGS, *flags, str(source)]
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    texts = [path.read_text() for path in (source, *headers)]
    key = "\n".join([*command, *texts, version.stdout, cpu_identity()])
    directory = Path.home() / ".cache" / "magicdec"
    path = directory / f"{source.stem}-{hashlib.sha256(key.encode()).hexdigest()[:20]}.so"
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(suffix=".so", dir=directory)
        os.close(descriptor)
        built = subprocess.run([*command, "-o", partial], capture_output=True, text=True)
        if built.returncode:
            Path(partial).unlink()
            raise RuntimeError(f"{' '.join(command)} failed: {built.stderr.strip()}")
        Path(partial).replace(path)
    return ctypes.CDLL(str(path))


def share_openmp() -> None:
    """Make torch's own OpenMP runtime the one that a library finds: two runtimes would bring two
    sets of threads to the same cores. Call before `load_library` with -fopenmp."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    for path in {line.split()[-1] for line in lines if "libgomp" in line or "libiomp" in line}:
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)


def cpu_identity() -> str:
    """Model and instruction sets, since -march=native compiles for this CPU alone."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    kept = [line for line in lines if line.startswith(("model name", "flags"))]
    return "\n".join(kept[:2])
