"""The features of this CPU, and whether it can execute the compiler's code. Imports no other module
of the project."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

# What the compiler defines where it may use instructions beyond those of every CPU of its kind.
X86_FEATURE = re.compile(
    r"#define __((?:SS?SE|AVX|AMX|FMA|F16C|BMI|LZCNT|POPCNT|MOVBE)\w*?)(?<!_MATH)__ "
)
ARM_FEATURE = re.compile(r"#define __ARM_FEATURE_(\w+) ")
# Features that /proc/cpuinfo calls by another name. Others have the compiler's name in lower case,
# with or without underscores.
X86_NAMES = {"sse3": "pni", "lzcnt": "abm", "bmi": "bmi1"}
ARM_NAMES = {
    "dotprod": "asimddp",
    "matmulint8": "i8mm",
    "fp16vectorarithmetic": "asimdhp",
    "bf16vectorarithmetic": "bf16",
    "sve": "sve",
    "sve2": "sve2",
    "bf16": "bf16",
}


class CannotExecute(ValueError):
    """A library with instructions that this CPU lacks; calling it would end the process."""


def cpu_field(name: str) -> str:
    """A field of the first CPU in /proc/cpuinfo, or an empty string."""
    fields = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    return next((value.strip() for key, _, value in fields if key.strip() == name), "")


def cpu_features() -> list[str]:
    """The features of the first CPU by their names in /proc/cpuinfo (`flags` on x86, `Features` on
    ARM)."""
    return (cpu_field("flags") or cpu_field("Features")).split()


def check_executable(compiler: str, flags: Iterable[str]) -> None:
    """Raises CannotExecute if code compiled with `flags` may need instructions that this CPU lacks,
    or names a CPU unknown to the compiler. Without a named CPU, code is for this one."""
    for_machine = tuple(flag for flag in flags if flag.startswith("-m"))
    named = [flag for flag in for_machine if flag.startswith(("-march=", "-mcpu="))]
    if not named or named[-1].endswith("=native"):
        return
    macros = compiler_macros(compiler, for_machine)
    if macros is None:
        raise CannotExecute(f"{named[-1]} is a CPU that {compiler} does not know")
    if missing := missing_features(macros, cpu_features()):
        raise CannotExecute(f"{named[-1]} needs {', '.join(missing)}, which this CPU lacks")


def missing_features(macros: str, features: Iterable[str]) -> list[str]:
    """The features that code compiled under `macros` (lines of `-dM -E`) needs beyond `features`,
    named as in /proc/cpuinfo."""
    present = {_plain(feature) for feature in features}
    needed = [(name, X86_NAMES) for name in X86_FEATURE.findall(macros)]
    needed += [(name, ARM_NAMES) for name in ARM_FEATURE.findall(macros)]
    missing = set()
    for name, names in needed:
        plain = _plain(name)
        if names is ARM_NAMES and plain not in names:
            continue  # of the language, or of every ARM CPU with 64 bits
        if _plain(names.get(plain, plain)) not in present:
            missing.add(names.get(plain, name.lower()))
    return sorted(missing)


def used_features(macros: str) -> list[str]:
    """The instructions of code compiled under `macros`, such as AVX2."""
    return sorted({*X86_FEATURE.findall(macros), *ARM_FEATURE.findall(macros)})


@cache
def compiler_macros(compiler: str, flags: tuple[str, ...]) -> str | None:
    """The compiler's macros with these flags; None if it refuses them."""
    command = [compiler, *flags, "-dM", "-E", "-x", "c++", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None


def _plain(name: str) -> str:
    return name.lower().replace("_", "")
