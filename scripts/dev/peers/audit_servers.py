"""Audits real servers one after the other, each with its own prompts, seed and settings, and prints
a line for each: what `magicdec audit` found, and how long its checks took. A sound server must be
clean every time.

    python scripts/dev/peers/audit_servers.py --books books.jsonl --count 50 --out audits.jsonl \\
        --kinds llama-model llama-lookup vllm-lookup vllm-eagle \\
        --llama_python llama/bin/python --gguf demo.gguf --draft_gguf draft.gguf \\
        --vllm_python vllm/bin/python --checkpoint demo --head demo-eagle

Audit `n` has the kind `n` of the list, over and over, and draws its settings by `--seed` and `n`.
The environments of the servers are made as `llama_cpp_server.py` and `peers/__init__.py` say. A
server is started on a free port of the loopback, and ended after its audit. The exit code is the
number of audits that were not clean, at most 100.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

from magicdec.bench.audit.record import AuditRecord
from magicdec.bench.audit.starting import Arm, free_port, last_lines, started, wait_for
from magicdec.records.reading import read_records
from magicdec.systems.servers.connection import Connection
from magicdec.systems.servers.openai import OPENAI

SCRIPTS = Path(__file__).parent
READY_S = 300.0  # vLLM compiles for a minute
AUDIT_S = 1800
CHARACTERS = 60_000  # of a book, from a place of its own for each audit
CODES = {0: "clean", 1: "FAULT", 3: "not judged"}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--books", type=Path, required=True, help="JSON lines with a text each")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, required=True)
    parser.add_argument("--count", type=int, default=50, help="audits [50]")
    parser.add_argument("--first", type=int, default=0, help="the number of the first one [0]")
    parser.add_argument("--seed", type=int, default=1, help="[1]")
    parser.add_argument("--threads", type=int, default=1, help="of a server [1]")
    parser.add_argument("--out", type=Path, required=True, help="records are appended")
    parser.add_argument("--llama_python", type=Path)
    parser.add_argument("--gguf", type=Path, help="the target of llama.cpp")
    parser.add_argument("--draft_gguf", type=Path, help="its draft model")
    parser.add_argument("--vllm_python", type=Path)
    parser.add_argument("--checkpoint", type=Path, help="the target of vLLM, with a tokenizer")
    parser.add_argument("--head", type=Path, help="an EAGLE-3 head of it")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="more of the audit")
    return parser.parse_args()


@dataclass(frozen=True)
class Settings:
    """Of one audit and its server."""

    number: int
    kind: str
    context: tuple[int, ...]
    gen_len: int
    num_requests: int
    slots: int
    draft_len: int
    temperatures: tuple[float, ...]
    top_k: int
    top_p: float
    float32_cache: bool

    @classmethod
    def drawn(cls, number: int, asked: argparse.Namespace) -> Settings:
        draws = random.Random(f"{asked.seed} {number}")
        temperatures = draws.choice([(1.0, 0.6), (1.0, 0.8), (0.7, 1.0), (1.0,)])
        is_closed = draws.random() < 0.2
        return cls(
            number=number,
            kind=asked.kinds[number % len(asked.kinds)],
            context=draws.choice([(64,), (100,), (128,), (64, 160), (48, 128)]),
            gen_len=draws.choice([32, 48, 64]),
            num_requests=draws.choice([6, 8]),
            slots=draws.choice([1, 2, 4]),
            draft_len=draws.choice([2, 3, 4, 6]),
            temperatures=temperatures,
            top_k=draws.choice([5, 10]) if is_closed else 0,
            top_p=0.9 if temperatures == (1.0,) and not is_closed else 1.0,
            float32_cache=draws.random() < 0.5,
        )

    def words(self) -> list[str]:
        """Flags of `magicdec audit`."""
        concurrency = {1, self.slots}
        return [
            *("--prefix_len", *map(str, self.context), "--gen_len", str(self.gen_len)),
            *("--num_requests", str(self.num_requests)),
            *("--concurrency", *map(str, sorted(concurrency))),
            *("--temperature", *map(str, self.temperatures)),
            *("--top_k", str(self.top_k), "--top_p", str(self.top_p)),
        ]

    def __str__(self) -> str:
        shown = [
            f"{self.number:3} {self.kind:12}",
            f"context {'+'.join(map(str, self.context)):6} new {self.gen_len}",
            f"x{self.num_requests}, {self.slots} at once, K {self.draft_len}",
            f"T {'+'.join(map(str, self.temperatures))}",
        ]
        shown += [f"top_k {self.top_k}"] if self.top_k else []
        shown += [f"top_p {self.top_p}"] if self.top_p < 1 else []
        return ", ".join(shown)


def llama_words(settings: Settings, asked: argparse.Namespace, drafts: str) -> list[str]:
    words = [
        *(str(asked.llama_python), str(SCRIPTS / "llama_cpp_server.py"), str(asked.gguf)),
        *("--port", "{port}", "--threads", str(asked.threads), "--drafts", drafts),
        *("--draft_len", str(settings.draft_len), "--slots", str(settings.slots)),
    ]
    if drafts == "model":
        words += ["--draft_model", str(asked.draft_gguf)]
    return words + (["--float32_cache"] if settings.float32_cache else [])


def vllm_words(settings: Settings, asked: argparse.Namespace, method: str) -> list[str]:
    config: dict[str, object] = {"method": method, "num_speculative_tokens": settings.draft_len}
    if method == "ngram":
        config |= {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
    else:
        config |= {"model": str(asked.head)}
    return [
        *(str(asked.vllm_python), str(SCRIPTS / "vllm_server.py"), str(asked.checkpoint)),
        *("--port", "{port}", "--dtype", "float32", "--max-num-seqs", str(max(2, settings.slots))),
        *("--per-request-spec-decode-metrics", "detailed"),
        *("--speculative-config", json.dumps(config)),
    ]


KINDS = {
    "llama-model": (llama_words, "model"),
    "llama-lookup": (llama_words, "lookup"),
    "llama-map": (llama_words, "lookup_map"),
    "llama-mod": (llama_words, "lookup_mod"),
    "llama-cache": (llama_words, "lookup_cache"),
    "vllm-lookup": (vllm_words, "ngram"),
    "vllm-eagle": (vllm_words, "eagle3"),
}


def passages(path: Path, seed: int) -> Iterator[str]:
    """Parts of the books, none twice."""
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    parts = [
        text[i : i + CHARACTERS]
        for text in texts
        for i in range(0, len(text) - CHARACTERS + 1, CHARACTERS)
    ]
    random.Random(seed).shuffle(parts)
    return iter(parts)


def audited(settings: Settings, asked: argparse.Namespace, text: str) -> tuple[int, str]:
    """The exit code of one audit, and what it wrote if it has no verdict."""
    make_words, drafts = KINDS[settings.kind]
    port = free_port()
    words = [word.replace("{port}", str(port)) for word in make_words(settings, asked, drafts)]
    url = f"http://127.0.0.1:{port}/v1"
    connection = Connection(url, OPENAI, READY_S, READY_S, None, settings.kind)
    api = "llama.cpp" if settings.kind.startswith("llama") else "openai"
    with TemporaryDirectory() as folder, TemporaryFile() as output:
        book = Path(folder) / "book.txt"
        book.write_text(text)
        with started(Arm(settings.kind), words, output) as process:
            try:
                wait_for(connection, process, READY_S)
            except ValueError as error:
                return 2, f"{error}: {last_lines(output)}"
            command = [
                *(sys.executable, "-m", "magicdec", "audit", "--endpoint", url),
                *("--endpoint_api", api, "--endpoint_metrics", f"{url.removesuffix('/v1')}/metrics"),
                *("--dataset", str(book), "--out", str(asked.out)),
                *settings.words(),
                *asked.flags,
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=AUDIT_S)
        return done.returncode, f"{done.stderr}{done.stdout}"


def verdicts(record: AuditRecord) -> str:
    return ", ".join(f"{check.name} {check.status}" for check in record.checks)


def findings(record: AuditRecord) -> Sequence[str]:
    return [
        f"      {check.name}: {found.name}: {found.text}"
        for check in record.checks
        for found in check.findings
    ] + [
        f"      {check.name}: {check.text}"
        for check in record.checks
        if check.status in ("unverified", "failed")
    ]


def main() -> int:
    asked = parse()
    texts = itertools.islice(passages(asked.books, asked.seed), asked.first, None)
    codes = Counter[int]()
    print(f"process {os.getpid()}", flush=True)
    for number in range(asked.first, asked.first + asked.count):
        settings = Settings.drawn(number, asked)
        started_s = time.monotonic()
        code, said = audited(settings, asked, next(texts))
        seconds = time.monotonic() - started_s
        codes[code] += 1
        print(f"{settings}: {CODES.get(code, 'no verdict')} in {seconds:.0f} s", flush=True)
        if code in CODES:
            record = list(read_records(asked.out, AuditRecord))[-1]
            audit_s = f"{record.seconds:.0f} s, {record.num_requests} requests"
            print(f"      {audit_s}: {verdicts(record)}", *findings(record), sep="\n", flush=True)
        else:
            print(f"      {said.strip()}", flush=True)
    print({CODES.get(code, "no verdict"): count for code, count in codes.items()})
    return min(100, sum(count for code, count in codes.items() if code))


if __name__ == "__main__":
    sys.exit(main())
