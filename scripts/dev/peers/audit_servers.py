"""Audits real servers one after the other, each with its own prompts, seed and settings, and prints
what `magicdec audit` found. A sound server must be clean every time.

    python scripts/dev/peers/audit_servers.py --books books.jsonl --count 50 --out audits.jsonl \\
        --kinds llama-model llama-lookup llama-map llama-mod llama-cache \\
        --llama_python llama/bin/python --gguf demo.gguf --draft_gguf draft.gguf \\
        --vllm_python vllm/bin/python --checkpoint demo --head demo-eagle \\
        --flags --total_variation 0.2 --judged 24

The kinds follow each other over and over. Servers and audits draw their settings by `--seed` and
their number. The environments of the servers are made as `llama_cpp_server.py` and `vllm_server.py`
say. A server is started on a free port of the loopback, and ended after its audits. The exit code
is the number of audits that were not clean, at most 100.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

from magicdec.bench.audit.record import AuditRecord
from magicdec.bench.audit.starting import Arm, free_port, last_lines, started, wait_for
from magicdec.records.reading import read_records
from magicdec.systems.servers.connection import Connection
from magicdec.systems.servers.openai import OPENAI

SCRIPTS = Path(__file__).parent
PORT = "{port}"  # the word of a command in whose place the port comes
READY_S = 1800.0  # vLLM imports for a minute, and on a busy machine for many
CONTEXT = 768  # tokens of a request, with its conversation
CHARACTERS = 20_000  # of a book, from a place of its own for each audit
LLAMA = "llama"
CODES = {0: "clean", 1: "FAULT", 3: "not judged"}
NO_VERDICT = "no verdict"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--books", type=Path, required=True, help="JSON lines with a text each")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, required=True)
    parser.add_argument("--count", type=int, default=50, help="audits [50]")
    parser.add_argument("--first", type=int, default=0, help="the number of the first one [0]")
    parser.add_argument("--per_server", type=int, default=1, help="audits of a server [1]")
    parser.add_argument("--seed", type=int, default=1, help="[1]")
    parser.add_argument("--threads", type=int, default=1, help="of llama.cpp [1]")
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
class ServerSettings:
    """Of a server of one kind: `slots` requests at once, and drafts of `draft_len` tokens."""

    kind: str
    slots: int
    draft_len: int
    float32_cache: bool

    @classmethod
    def drawn(cls, number: int, asked: argparse.Namespace) -> ServerSettings:
        draws = random.Random(f"server {asked.seed} {number}")
        kind = asked.kinds[number % len(asked.kinds)]
        return cls(
            kind=kind,
            slots=draws.choice([1, 2, 4]),
            draft_len=draws.choice([3, 4, 6]),
            float32_cache=kind.startswith(LLAMA) and draws.random() < 0.5,
        )

    def __str__(self) -> str:
        cache = ", float32 cache" if self.float32_cache else ""
        return f"{self.kind}, {self.slots} at once, drafts of {self.draft_len}{cache}"


@dataclass(frozen=True)
class AuditSettings:
    context: tuple[int, ...]
    gen_len: int
    num_requests: int
    temperatures: tuple[float, ...]
    top_k: int
    top_p: float

    @classmethod
    def drawn(cls, number: int, kind: str, asked: argparse.Namespace) -> AuditSettings:
        draws = random.Random(f"audit {asked.seed} {number}")
        temperatures = draws.choice([(1.0, 0.6), (1.0, 0.8), (0.7, 1.0), (1.0,)])
        has_top_k = draws.random() < 0.2
        return cls(
            context=draws.choice([(48,), (64,), (100,), (40, 80)]),
            gen_len=draws.choice([20, 24, 32]),
            num_requests=draws.choice([6, 8]),
            temperatures=temperatures,
            # vLLM 0.32.0 ends at a step without drafts of a request with `top_k`.
            top_k=draws.choice([5, 10]) if has_top_k and kind.startswith(LLAMA) else 0,
            top_p=0.6 if temperatures == (1.0,) and not has_top_k else 1.0,
        )

    def words(self, slots: int) -> list[str]:
        """Flags of `magicdec audit`."""
        return [
            *("--prefix_len", *map(str, self.context), "--gen_len", str(self.gen_len)),
            *("--num_requests", str(self.num_requests)),
            *("--concurrency", *map(str, sorted({1, slots}))),
            *("--temperature", *map(str, self.temperatures)),
            *("--top_k", str(self.top_k), "--top_p", str(self.top_p)),
        ]

    def __str__(self) -> str:
        shown = [
            f"{self.num_requests} of {'+'.join(map(str, self.context))}, {self.gen_len} new",
            f"temperature {'+'.join(map(str, self.temperatures))}",
        ]
        shown += [f"top_k {self.top_k}"] if self.top_k else []
        shown += [f"top_p {self.top_p}"] if self.top_p < 1 else []
        return ", ".join(shown)


def llama_words(settings: ServerSettings, asked: argparse.Namespace, drafts: str) -> list[str]:
    words = [
        *(str(asked.llama_python), str(SCRIPTS / "llama_cpp_server.py"), str(asked.gguf)),
        *("--port", PORT, "--threads", str(asked.threads), "--context", str(CONTEXT)),
        *("--drafts", drafts, "--draft_len", str(settings.draft_len)),
        *("--slots", str(settings.slots)),
    ]
    if drafts == "model":
        words += ["--draft_model", str(asked.draft_gguf)]
    # Flash attention converts a float32 cache to float16 in each step.
    exact = ["--float32_cache", "--flash_attention", "off"]
    return words + (exact if settings.float32_cache else [])


def vllm_words(settings: ServerSettings, asked: argparse.Namespace, method: str) -> list[str]:
    config: dict[str, object] = {"method": method, "num_speculative_tokens": settings.draft_len}
    if method == "ngram":
        config |= {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
    else:
        config |= {"model": str(asked.head)}
    return [
        *(str(asked.vllm_python), str(SCRIPTS / "vllm_server.py"), "--mended"),
        *(str(asked.checkpoint), "--port", PORT, "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", str(CONTEXT), "--max-num-seqs", str(max(2, settings.slots))),
        *("--per-request-spec-decode-metrics", "detailed", "--enable-prompt-tokens-details"),
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


@contextmanager
def served(settings: ServerSettings, asked: argparse.Namespace) -> Iterator[str]:
    """The URL of a server, which is ended with the block. Raises ValueError if it does not
    start."""
    make_words, drafts = KINDS[settings.kind]
    port = str(free_port())
    words = [port if word == PORT else word for word in make_words(settings, asked, drafts)]
    url = f"http://127.0.0.1:{port}/v1"
    connection = Connection(url, OPENAI, READY_S, READY_S, None, settings.kind)
    with TemporaryFile() as output, started(Arm(settings.kind), words, output) as process:
        try:
            wait_for(connection, process, READY_S)
        except ValueError as error:
            raise ValueError(f"{error}: {last_lines(output)}") from None
        yield url


def passages(path: Path, seed: int) -> list[str]:
    """Parts of the books, none twice."""
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    parts = [
        text[i : i + CHARACTERS]
        for text in texts
        for i in range(0, len(text) - CHARACTERS + 1, CHARACTERS)
    ]
    random.Random(seed).shuffle(parts)
    return parts


def audit(kind: str, url: str, words: Sequence[str], out: Path, text: str) -> int:
    """Audit a server with these flags, and print what was found. Returns the exit code."""
    with TemporaryDirectory() as folder:
        book = Path(folder) / "book.txt"
        book.write_text(text)
        command = [
            *(sys.executable, "-m", "magicdec", "audit", "--endpoint", url),
            *("--endpoint_api", "llama.cpp" if kind.startswith(LLAMA) else "openai"),
            *("--endpoint_metrics", f"{url.removesuffix('/v1')}/metrics"),
            *("--dataset", str(book), "--out", str(out), *words),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in CODES:
        print(f"    {NO_VERDICT}: {done.stderr.strip()}", flush=True)
        return done.returncode
    record = list(read_records(out, AuditRecord))[-1]
    verdicts = ", ".join(f"{check.name} {check.status}" for check in record.checks)
    sums = f"{record.seconds:.0f} s, {record.num_requests} requests"
    print(f"    {CODES[done.returncode]} ({sums}): {verdicts}", *reasons(record), sep="\n")
    return done.returncode


def reasons(record: AuditRecord) -> Iterator[str]:
    """Why an audit is not clean."""
    for check in record.checks:
        if check.status in ("unverified", "failed"):
            yield f"    {check.name}: {check.text}"
        for found in check.findings:
            yield f"    {check.name}: {found.name}: {found.text}"


def main() -> int:
    asked = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the server too
    texts = passages(asked.books, asked.seed)
    if len(texts) < asked.first + asked.count:
        most = max(0, len(texts) - asked.first)
        sys.exit(f"--books {asked.books} has texts for --count {most} after --first {asked.first}")
    verdicts = Counter[str]()
    numbers = range(asked.first, asked.first + asked.count)
    for server_number, group in itertools.groupby(numbers, lambda n: n // asked.per_server):
        server = ServerSettings.drawn(server_number, asked)
        try:
            with served(server, asked) as url:
                for number in group:
                    settings = AuditSettings.drawn(number, server.kind, asked)
                    print(f"{number}: {server}; {settings}", flush=True)
                    words = [*settings.words(server.slots), *asked.flags]
                    code = audit(server.kind, url, words, asked.out, texts[number])
                    verdicts[CODES.get(code, NO_VERDICT)] += 1
        except ValueError as error:
            print(f"    {error}", flush=True)
            verdicts[NO_VERDICT] += 1
    print(", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()))
    return min(100, verdicts.total() - verdicts[CODES[0]])


if __name__ == "__main__":
    sys.exit(main())
