#!/usr/bin/env python3
"""Ten traces of agents and of conversations, served by the demo model in every way: sessions an
hour, what prefix caches find, and acceptance by turn.

    python scripts/dev/traces_study.py --traces DIR --llama_python llama/bin/python \\
        --gguf demo.gguf --vllm_python vllm/bin/python --checkpoint demo-hf --minutes 35
    python scripts/dev/traces_study.py

The first measures what has no record yet, trace by trace with all arms of each, and then does what
the second does: it draws the figure and writes what stands between the marks of
results/traces/README.md, from the records that are there. `--traces` is a folder with the files
that this page names, `--gguf` and `--checkpoint` are the demo model for the two servers
(`peers/llama_cpp_server.py` and `peers/vllm_server.py` say how their environments are made);
without these, their arms are left out. A command that was ended goes on where it was.
"""

from __future__ import annotations

import argparse
import gzip
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from trace_study.arms import (
    ARMS,
    LLAMA,
    NAMES,
    VLLM,
    Arm,
    forget,
    llama_words,
    serving,
    vllm_words,
)
from trace_study.cells import cells_of
from trace_study.page import write_page
from trace_study.pieces import TRACES, Trace

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "results" / "traces"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, help="a folder with the files of traces")
    parser.add_argument("--llama_python", type=Path, help="the Python of llama.cpp's environment")
    parser.add_argument("--gguf", type=Path, help="the demo model as a GGUF file in float32")
    parser.add_argument("--vllm_python", type=Path, help="the Python of vLLM's environment")
    parser.add_argument("--checkpoint", type=Path, help="the demo model as transformers' folder")
    names = [trace.name for trace in TRACES]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="traces [all]")
    parser.add_argument("--arms", nargs="+", choices=NAMES, default=NAMES, help="[all]")
    parser.add_argument("--minutes", type=float, help="no command starts later than that")
    parser.add_argument("--out", type=Path, default=FOLDER, help=f"[{FOLDER.relative_to(ROOT)}]")
    return parser.parse_args(arguments)


@dataclass
class Measuring:
    """Measures the cells that are missing, in a folder in which the parts of the traces are."""

    asked: argparse.Namespace
    records: Path
    folder: Path
    servers: ExitStack = field(default_factory=ExitStack)
    vllm: str | None = None  # the URL of the server, which serves all traces

    @property
    def arms(self) -> list[Arm]:
        """Those for which there is what they need."""
        given = {
            LLAMA: self.asked.llama_python and self.asked.gguf,
            VLLM: self.asked.vllm_python and self.asked.checkpoint,
        }
        return [arm for arm in ARMS if arm.name in self.asked.arms and given.get(arm.name, True)]

    def run(self) -> None:
        begin_s = time.monotonic()
        done = cells_of(self.records)
        numbered = enumerate(TRACES)
        for number, trace in [(n, t) for n, t in numbered if t.name in self.asked.only]:
            trace.write(self.folder, self.asked.traces)
            for arm in self.arms:
                elapsed_s = time.monotonic() - begin_s
                if self.asked.minutes is not None and elapsed_s > 60 * self.asked.minutes:
                    return
                if (trace.name, arm.name) not in done:
                    problem = self.measure(number, trace, arm)
                    seconds = time.monotonic() - begin_s - elapsed_s
                    ending = problem or f"{seconds:.0f} s"
                    print(f"{elapsed_s:.0f} s: {trace.name}, {arm.name}: {ending}", flush=True)

    def measure(self, number: int, trace: Trace, arm: Arm) -> str | None:
        """Appends the records of a cell. Returns what went wrong."""
        try:
            if arm.name == LLAMA:
                words = llama_words(self.asked.llama_python, self.asked.gguf, trace.concurrency)
                with serving(words, LLAMA) as url:
                    return self.serve(number, trace, arm, url)
            if arm.name == VLLM:
                if self.vllm is None:
                    words = vllm_words(self.asked.vllm_python, self.asked.checkpoint)
                    self.vllm = self.servers.enter_context(serving(words, VLLM))
                forget(self.vllm)
                return self.serve(number, trace, arm, f"{self.vllm}/v1")
            return self.serve(number, trace, arm, None)
        except (ValueError, OSError) as error:
            return str(error)

    def serve(self, number: int, trace: Trace, arm: Arm, url: str | None) -> str | None:
        out = self.folder / f"{arm.name}.jsonl"
        out.unlink(missing_ok=True)
        done = subprocess.run(
            arm.command(trace, number, url, out.name),
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            return f"exit code {done.returncode}: {done.stderr.strip()[-1000:]}"
        with gzip.open(self.records, "ab") as file:
            file.write(out.read_bytes())
        return None


def main() -> int:
    asked = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends servers too
    asked.out.mkdir(parents=True, exist_ok=True)
    records = asked.out / "records.jsonl.gz"
    if asked.traces is not None:
        with tempfile.TemporaryDirectory() as name:
            measuring = Measuring(asked, records, Path(name))
            with measuring.servers:
                measuring.run()
    write_page(records, asked.out / "README.md", asked.out / "traces.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
