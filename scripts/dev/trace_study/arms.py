"""What the study compares: ways to serve of this project, and servers of other programs, which are
started here. Each is a command of `magicdec serve` with `inflight` beside it."""

from __future__ import annotations

import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

from trace_study.pieces import Trace

from magicdec.bench.audit.starting import Arm as ServerArm
from magicdec.bench.audit.starting import free_port, last_lines, started, wait_for
from magicdec.records.pass_record import PassRecord
from magicdec.systems.servers.connection import Connection
from magicdec.systems.servers.openai import OPENAI

PEERS = Path(__file__).parents[1] / "peers"
READY_S = 300.0  # vLLM compiles
CONTEXT = 12_288  # tokens of a request to a server; none has more
IN_FLIGHT = "inflight"
LLAMA = "llama.cpp"
VLLM = "vLLM"
OPENAI_API = "openai"
# Everything in float32, which is `auto` on a CPU without units of bfloat16, and on one thread.
COMMON = (
    *("--model", "demo", "--dtype", "float32", "--ignore_eos"),
    *("--prefix_cache", "--block_tokens", "64", "--cache_tokens", "65536"),
)


@dataclass(frozen=True)
class Arm:
    """A mode beside `inflight`, and its flags. `label` is its name in figure and page."""

    name: str
    mode: str
    label: str
    words: tuple[str, ...]

    def command(self, trace: Trace, number: int, url: str | None, out: str) -> list[str]:
        """`magicdec serve` of a trace, whose file is in the folder in which it starts."""
        endpoint = [] if url is None else ["--endpoint", url]
        rows = ("--n_samples", str(trace.concurrency))
        return [
            *(sys.executable, "-m", "magicdec", "serve", *COMMON, *trace.words(number), *rows),
            *("--modes", IN_FLIGHT, self.mode, *self.words, *endpoint, "--out", out),
        ]


ONE_CORE = ("--threads", "1")
ARMS = (
    Arm("self", "inflight+draft", "self-drafts", (*ONE_CORE, "--draft", "self", "--budget", "65")),
    Arm("ngram", "inflight+draft", "lookups", (*ONE_CORE, "--draft", "ngram")),
    Arm(
        "eagle",
        "inflight+draft",
        "EAGLE-3 head",
        (*ONE_CORE, "--draft", "eagle:demo-eagle", "--kv_policy", "full"),
    ),
    Arm("ring", "ring", "ring of two ranks", ("--nproc", "2", "--B", "1")),
    Arm(LLAMA, "endpoint", LLAMA, (*ONE_CORE, "--endpoint_api", LLAMA)),
    Arm(VLLM, "endpoint", VLLM, (*ONE_CORE, "--endpoint_api", OPENAI_API)),
)
NAMES = [arm.name for arm in ARMS]


def arm_of(record: PassRecord) -> str | None:
    """The name of the arm of which a record is; None for `inflight`."""
    if record.mode == IN_FLIGHT:
        return None
    if record.mode == "ring":
        return record.mode
    if record.mode == "endpoint":
        (api,) = record.config["workload"]["endpoint_api"]
        return VLLM if api == OPENAI_API else LLAMA
    return str(record.config["decoding"]["drafter"])


@contextmanager
def serving(words: Sequence[str], name: str) -> Iterator[str]:
    """The root URL of a server that these words start, without its port, and that is ended with
    the block. Raises ValueError if it does not start."""
    port = free_port()
    root = f"http://127.0.0.1:{port}"
    connection = Connection(f"{root}/v1", OPENAI, READY_S, READY_S, None, name)
    with (
        TemporaryFile() as output,
        started(ServerArm(name), [*words, "--port", str(port)], output) as process,
    ):
        try:
            wait_for(connection, process, READY_S)
        except ValueError as error:
            raise ValueError(f"{error}: {last_lines(output)}") from None
        yield root


def llama_words(python: Path, model: Path, slots: int) -> list[str]:
    """K and V are in float16, as by default, which is faster than float32 there."""
    return [
        *(str(python), str(PEERS / "llama_cpp_server.py"), str(model), "--threads", "1"),
        *("--slots", str(slots), "--context", str(CONTEXT)),
    ]


def vllm_words(python: Path, checkpoint: Path) -> list[str]:
    return [
        *("env", "VLLM_SERVER_DEV_MODE=1"),  # for `forget`
        *(str(python), str(PEERS / "vllm_server.py"), str(checkpoint), "--dtype", "float32"),
        *("--max-model-len", str(CONTEXT), "--max-num-seqs", "4"),
        *("--enable-prompt-tokens-details", "--block-size", "32"),
    ]


def forget(root: str) -> None:
    """Empties the prefix cache of a server of vLLM."""
    request = urllib.request.Request(f"{root}/reset_prefix_cache", method="POST")
    with urllib.request.urlopen(request, timeout=READY_S):
        pass
