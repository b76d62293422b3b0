"""Building C++ sources: cached, safe when ranks start together, and clear when it fails."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import HANG, Command

import magicdec
from magicdec.distributed.groups import Launch
from magicdec.hardware.environment import probe_machine
from magicdec.kernels import build, cpu

SOURCE = 'extern "C" int answer() { return 42; }\n'
LOAD = "from magicdec.kernels.build import load_library; from pathlib import Path; import sys; "
LOAD += "print(load_library(Path(sys.argv[1])).answer())"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    build.load_library.cache_clear()
    return tmp_path


def test_of_processes_that_start_together_one_builds(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has the source in another place, as another checkout has."""
    compiler = build.find_compiler()
    assert compiler is not None
    counting = home / "bin" / "g++"
    counting.parent.mkdir()
    counting.write_text(f'#!/bin/sh\necho "$*" >> {home}/calls\nexec {compiler} "$@"\n')
    counting.chmod(0o700)
    monkeypatch.setenv("PATH", f"{counting.parent}:{os.environ['PATH']}")
    sources = [home / place / "answer.cpp" for place in ("here", "there")]
    for source in sources:
        source.parent.mkdir(exist_ok=True)
        source.write_text(SOURCE)
    commands = [[sys.executable, "-c", LOAD, str(source)] for source in sources]
    running = [subprocess.Popen(c, stdout=subprocess.PIPE, text=True) for c in commands]
    assert [process.communicate(timeout=HANG)[0] for process in running] == ["42\n"] * 2
    built = [path.name for path in (home / ".cache" / "magicdec").glob("*.so")]
    assert len(built) == 1 and built[0].startswith("answer-"), built
    assert sum(" -o " in call for call in (home / "calls").read_text().splitlines()) == 1


def test_another_source_is_another_library(home: Path) -> None:
    source = home / "answer.cpp"
    for value in ("42", "43"):
        source.write_text(SOURCE.replace("42", value))
        build.load_library.cache_clear()
        assert build.load_library(source).answer() == int(value)


def test_kernels_are_named_by_their_machine_code(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the same for another comment and in another folder, and another for another flag or
    constant. Each variant of a source has a name of its own."""

    def hash_of(text: str, folder: str, name: str, *flags: str) -> str:
        source = home / folder / "answer.cpp"
        source.parent.mkdir()
        source.write_text(text)
        monkeypatch.setenv("HOME", str(source.parent))  # with no other library
        build.load_library.cache_clear()
        build.load_library(source, flags)
        return build.loaded_kernels()[name]

    first = hash_of(SOURCE, "here", "answer")
    assert len(first) == 12 and first == hash_of(f"// a comment\n{SOURCE}", "there", "answer")
    assert first != hash_of(SOURCE.replace("42", "43"), "other", "answer")
    assert hash_of(SOURCE, "sized", "answer-SIZE=16", "-DSIZE=16") == first


def test_what_does_not_compile_says_so_and_leaves_nothing(home: Path) -> None:
    source = home / "broken.cpp"
    source.write_text("not C++")
    with pytest.raises(RuntimeError, match="failed: "):
        build.load_library(source)
    assert list((home / ".cache" / "magicdec").glob("*.so")) == []


def test_without_a_compiler_it_says_what_to_install(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    assert build.find_compiler() is None
    with pytest.raises(ValueError, match="needs a C\\+\\+ compiler; on Debian: apt install g"):
        build.load_library(home / "answer.cpp")


def test_a_compiler_that_cannot_compile_the_kernels_is_passed_over(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is tried once. If no other one is there, a line says what it refused."""
    good = build.find_compiler()
    old = home / "bin" / "g++"
    assert good is not None
    old.parent.mkdir()
    old.write_text(f"#!/bin/sh\necho x >> {home}/calls\necho 'g++: error: c++20?' >&2\nexit 1\n")
    old.chmod(0o700)
    (old.parent / "clang++").symlink_to(good)
    monkeypatch.setenv("PATH", str(old.parent))
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-B/usr/bin"))
    assert build.find_compiler() == str(old.parent / "clang++")
    assert build.refused_compilers() is None
    (old.parent / "clang++").unlink()
    build._refusal.cache_clear()
    assert build.find_compiler() is None and (home / "calls").read_text() == "x\n"
    assert build.refused_compilers() == f"{old}: g++: error: c++20?"
    assert not probe_machine(Launch()).has_compiler
    assert "no C++ compiler compiles the CPU kernels" in capsys.readouterr().err


def test_a_triton_that_cannot_interpret_is_refused() -> None:
    build.check_interpreter("--attention triton", "3.7.1", "2.5.0")
    build.check_interpreter("--attention triton", "3.6.0", "2.3.5")
    message = "--attention triton --device cpu: triton 3.6.0 cannot interpret kernels with numpy "
    with pytest.raises(ValueError, match=f"^{message}2.4.6; install triton 3.7 or numpy 2.3$"):
        build.check_interpreter("--attention triton", "3.6.0", "2.4.6")


HASWELL = (
    "fpu sse sse2 pni ssse3 fma cx16 sse4_1 sse4_2 movbe popcnt avx f16c rdrand lahf_lm abm bmi1 "
    "avx2 bmi2"
)
GENOA = HASWELL + (
    " sse4a avx512f avx512dq avx512ifma avx512cd avx512bw avx512vl avx512_bf16 avx512vbmi "
    "avx512_vbmi2 avx512_vnni avx512_bitalg avx512_vpopcntdq"
)
needs_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86 compilers")


def pretend(monkeypatch: pytest.MonkeyPatch, flags: str) -> None:
    """From now on /proc/cpuinfo says that this CPU has these features."""
    monkeypatch.setattr(cpu, "cpu_field", lambda name: flags if name == "flags" else "")


@needs_x86
@pytest.mark.parametrize(
    ("flags", "features", "missing"),
    [
        (["-march=x86-64-v3"], HASWELL, None),
        (["-march=x86-64-v4"], GENOA, None),
        (["-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"], GENOA, None),
        (["-march=native", "-mavx512f"], HASWELL, None),
        (["-march=x86-64-v4", "-march=native"], HASWELL, None),
        (["-march=x86-64-v4", "-O3", "-fopenmp"], HASWELL, "avx512bw.*, avx512vl"),
        (["-march=native", "-march=x86-64-v4"], HASWELL, "avx512bw.*, avx512vl"),
        (["-march=x86-64-v3"], HASWELL.replace("abm", "").replace("bmi1", ""), "abm, bmi1"),
        (["-march=x86-64-v3", "-mavx512bf16"], HASWELL, "avx512bf16"),
        (["-march=sapphirerapids"], GENOA, "amx_bf16, amx_int8, amx_tile, .*avx512fp16"),
    ],
)
def test_code_for_a_cpu_that_this_one_is_not_is_refused(
    flags: list[str], features: str, missing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what the compiler may use, and what a made-up /proc/cpuinfo says."""
    pretend(monkeypatch, features)
    compiler = build.find_compiler()
    assert compiler is not None
    if missing is None:
        cpu.check_executable(compiler, flags)
        return
    with pytest.raises(cpu.CannotExecute, match=f"^-march=.* needs {missing}.* this CPU lacks$"):
        cpu.check_executable(compiler, flags)


def test_features_of_arm_have_names_of_their_own() -> None:
    macros = "#define __ARM_FEATURE_DOTPROD 1\n#define __ARM_FEATURE_UNALIGNED 1\n"
    assert cpu.missing_features(macros, ["asimd"]) == ["asimddp"]
    assert cpu.missing_features(macros, ["asimd", "asimddp"]) == []


@needs_x86
def test_a_library_for_another_cpu_is_built_but_not_loaded(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, HASWELL)
    source = home / "answer.cpp"
    source.write_text(SOURCE)
    with pytest.raises(cpu.CannotExecute, match="-march=x86-64-v4 needs avx512bw"):
        build.load_library(source, ("-march=x86-64-v4",))
    assert len(list((home / ".cache" / "magicdec").glob("answer-*.so"))) == 1


@needs_x86
@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("x86-64-v4", "-march=x86-64-v4 needs avx512bw, .*which this CPU lacks"),
        ("pentium-9", "-march=pentium-9 is a CPU that .* does not know"),
    ],
)
def test_another_cpu_in_the_environment_ends_a_command_in_one_line(
    name: str, error: str, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    pretend(monkeypatch, HASWELL)
    monkeypatch.setattr(build, "CPU", name)
    monkeypatch.setattr(build, "MARCH", f"-march={name}")
    ended = command("run", "--prefix_len", 64, "--gen_len", 2, "--B", 1)
    assert ended.code == 2
    assert re.fullmatch(f"magicdec run: MAGICDEC_MARCH={name}: {error}; unset it.*\n", ended.err), (
        ended.err
    )


@pytest.mark.parametrize("name", ["x86-64-v4", "sapphirerapids"])
@pytest.mark.parametrize(
    "source", sorted(Path(magicdec.__file__).parent.rglob("*.cpp")), ids=lambda path: path.stem
)
def test_sources_are_whole_for_cpus_that_this_one_is_not(source: Path, name: str) -> None:
    """With and without dot products and tile registers. Such code is left out elsewhere, so that
    only its own CPUs would see what does not compile."""
    compiler = build.find_compiler()
    assert compiler is not None
    command = [compiler, "-std=c++20", f"-march={name}", "-fopenmp", "-DHEAD_SIZE=64"]
    command.append("-fsyntax-only")
    nothing = [*command, "-x", "c++", os.devnull]
    if subprocess.run(nothing, capture_output=True).returncode:
        pytest.skip(f"this compiler does not know {name}")
    ended = subprocess.run([*command, str(source)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[:2000]
