"""The ten traces of the study: whole files of public traces, or said parts of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

LONGEST_WAIT_S = Fraction(1, 16)  # after scaling; the tools of MLPerf's sample take as long
WEKA = "weka"
MLPERF = "mlperf"
MOONCAKE = "mooncake"
AGENTS = "edge_agentic.jsonl"
CONVERSATIONS = "mooncake_conversation_2000.jsonl"


@dataclass(frozen=True)
class Trace:
    """Sessions of a file of one form, `concurrency` of them at once. `sessions` names those of a
    file of MLPerf's, and `calls` says how many calls of each are served, from its first on; without
    it all. `lines` are the first and the last line of a file of Mooncake's, from 1."""

    name: str
    form: str
    file: str
    scale: str = "1"
    concurrency: int = 1
    calls: int | None = None
    sessions: tuple[str, ...] = ()
    lines: tuple[int, int] = (1, 0)

    @property
    def file_name(self) -> str:
        """Of the part, which is the trace's name in records."""
        return f"{self.name}.{'json' if self.form == WEKA else 'jsonl'}"

    @property
    def arrival(self) -> str:
        return f"{self.form}:{self.file_name}"

    @property
    def part(self) -> str:
        """What is served of the file, in words."""
        if self.form == MOONCAKE:
            return f"lines {self.lines[0]} to {self.lines[1]}"
        names = " and ".join(f"`{session}`" for session in self.sessions)
        calls = "all calls" if self.calls is None else f"the first {self.calls} calls"
        return f"{calls} of {names}" if names else calls

    def write(self, folder: Path, files: Path) -> None:
        """The part, as a file in `folder`. Raises ValueError if `files` lacks it."""
        source = files / self.file
        if not source.is_file():
            raise ValueError(f"--traces {files}: it has no {self.file}")
        text = source.read_text()
        made = self._cut(text) if self.form == WEKA else "".join(self._lines_of(text))
        if not made:
            raise ValueError(f"--traces {files}: {self.file} has not {self.part}")
        (folder / self.file_name).write_text(made)

    def _cut(self, text: str) -> str:
        trace = json.loads(text)
        return json.dumps(trace | {"requests": trace["requests"][: self.calls]})

    def _lines_of(self, text: str) -> Iterator[str]:
        lines = [f"{line}\n" for line in text.split("\n") if line]
        if self.form == MOONCAKE:
            yield from lines[self.lines[0] - 1 : self.lines[1]]
            return
        for session in self.sessions:
            # A few lines of other sessions are no JSON.
            begin = json.dumps({"conversation_id": session})[:-1] + ","
            num_calls = 0
            for line in (line for line in lines if line.startswith(begin)):
                num_calls += json.loads(line)["role"] != "assistant"
                if self.calls is not None and num_calls > self.calls:
                    break
                yield line

    def words(self, number: int) -> list[str]:
        """Flags of `magicdec serve` for the trace with this number, which has text of its own."""
        longest_s = LONGEST_WAIT_S / Fraction(self.scale)
        scale = [] if self.form == MLPERF else ["--scale", self.scale]
        waits = [] if self.form == MOONCAKE else ["--longest_wait_s", f"{float(longest_s):g}"]
        return [
            *("--arrival", self.arrival, *scale, *waits),
            *("--concurrency", str(self.concurrency), "--seed", str(number)),
        ]


TRACES = (
    Trace("weka-0504", WEKA, "trace_0504.json", "1/2"),
    Trace("weka-0693", WEKA, "trace_0693.json", "1/8"),
    Trace("weka-0372", WEKA, "trace_0372.json", "1/16"),
    Trace("weka-0527", WEKA, "trace_0527.json", "1/16", calls=32),
    Trace("mlperf-1", MLPERF, AGENTS, calls=6, sessions=("sympy__sympy-18763",)),
    Trace("mlperf-2", MLPERF, AGENTS, calls=5, sessions=("psf__requests-1142",)),
    Trace(
        *("mlperf-3", MLPERF, AGENTS),
        concurrency=2,
        calls=2,
        sessions=("django__django-16899", "sympy__sympy-12096"),
    ),
    Trace(
        *("mlperf-4", MLPERF, AGENTS),
        concurrency=2,
        calls=2,
        sessions=("django__django-13158", "pydata__xarray-3305"),
    ),
    Trace("mooncake-1", MOONCAKE, CONVERSATIONS, "1/16", 4, lines=(481, 500)),
    Trace("mooncake-2", MOONCAKE, CONVERSATIONS, "1/16", 4, lines=(1211, 1230)),
)
