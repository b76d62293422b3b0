"""Makes a folder of wheels for a GPU machine that reaches no package index, of what such a machine
with torch, Triton and transformers lacks, and prints what to carry there and the two calls.

    python scripts/dev/gpu_wheels.py [--out wheels] [--python_version 3.12] [--also scipy]

The versions are those of `constraints.txt`. What the tree and the folder weigh together is printed,
because such machines take a limited size.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What the suite imports beside torch, numpy, scipy, Triton, transformers and what these bring.
NEEDED = (
    "pydantic",
    "pydantic_core",
    "annotated-types",
    "typing-inspection",
    "typing_extensions",
    "rich",
    "markdown-it-py",
    "mdurl",
    "Pygments",
    "shtab",
)
PLATFORMS = ("manylinux_2_28", "manylinux_2_17", "manylinux2014", "manylinux1")
MOST_BYTES = 64 << 20


def pins() -> dict[str, str]:
    """The pinned version of each package, by its name in lower case with hyphens."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if "==" in line)
    return {plain(name): version.strip() for name, version in pairs}


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def download(out: Path, python_version: str, names: Sequence[str]) -> None:
    """Fetch the wheels. Raises subprocess.CalledProcessError if pip does not find one."""
    versions = pins()
    wanted = [f"{name}=={versions[plain(name)]}" for name in names]
    platforms = [word for name in PLATFORMS for word in ("--platform", f"{name}_x86_64")]
    target = ["--python-version", python_version, "--implementation", "cp", *platforms]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--only-binary=:all:", *target, "-d", str(out), *wanted], check=True)


def tree_files() -> Iterator[Path]:
    """The files of the tree that travel with it."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return (ROOT / name for name in names.split("\0") if name and (ROOT / name).is_file())


EARLIER = "build/gpu_earlier"  # where the files that came back are to be put


def calls(out: Path) -> str:
    """What to run on the machine, in the root of the tree: first this, and then, when something has
    been mended, that. OUT is an empty folder there, whose files come back."""
    install = "python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target"
    suite = (
        f"{install} build/gpu_wheels {out}/*.whl && "
        "PYTHONPATH=$PWD/build/gpu_wheels PYTHON=python3 {earlier}scripts/gpu_suite.sh {command}"
    )
    return "\n".join(
        [
            f"First, in the root of the tree, with {out} carried there (8 minutes):",
            "",
            "    " + suite.format(earlier="", command="quick"),
            "",
            f"Later, with {EARLIER} carried too, which has the files that came back (3 minutes):",
            "",
            "    " + suite.format(earlier=f"FROM={EARLIER} ", command="again PART..."),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("build/wheels"), metavar="DIRECTORY")
    parser.add_argument("--python_version", default="3.12", metavar="VERSION")
    parser.add_argument("--also", nargs="+", default=(), metavar="NAME", help="what it lacks too")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.also if plain(name) not in pins()]:
        print(f"--also {unknown[0]} is not in constraints.txt", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        download(options.out, options.python_version, (*NEEDED, *options.also))
    except subprocess.CalledProcessError:
        print(f"--python_version {options.python_version}: pip found no wheels", file=sys.stderr)
        return 2
    wheels = sum(path.stat().st_size for path in options.out.glob("*.whl"))
    tree = sum(path.stat().st_size for path in tree_files())
    print(f"wheels {wheels / 2**20:.1f} MiB, tree {tree / 2**20:.1f} MiB")
    if wheels + tree > MOST_BYTES:
        print(f"together more than {MOST_BYTES >> 20} MiB", file=sys.stderr)
        return 1
    print(calls(options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
