"""Time decode steps and prefill of this project beside other decoders: same weights, same token
ids, same threads, taken in turn.

    python scripts/bench_peers.py
    python scripts/bench_peers.py --openvino_python VENV/bin/python --json peers.json

Then whole generations with the packaged demo model on its demo text: this project with and without
self-speculation, transformers' `generate` with and without its assisted generation.

`transformers` is measured always. OpenVINO GenAI is where VENV is a virtual environment with
`openvino-genai` and `optimum-intel` (it has its own: they pin other versions). Every peer first
emits the same float32 tokens from the same prompts; only then is anything timed, in bfloat16 where
this CPU computes in it. The model is random: 6 layers, width 384, 6 heads of 64, FFN 1024,
vocabulary 4096.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from measuring import describe_machine
from rich.console import Console
from rich.table import Table

from magicdec.bench.environment import probe_machine
from magicdec.bench.workload import build_workload
from magicdec.distributed.groups import read_launch
from magicdec.model.checkpoint import find_model
from magicdec.model.tokenizer import load_tokenizer

WORKER = Path(__file__).with_name("peer_worker.py")
VOCAB, LAYERS, HIDDEN, HEADS, FFN = 4096, 6, 384, 6, 1024
BATCH, CHECKED_PROMPT, CHECKED_TOKENS = 4, 200, 24
ROUNDS = 6  # interleaved turns of a cell
STEPS = {"transformers": 2}  # steps a turn; others STEPS_A_TURN
STEPS_A_TURN = 10
GENERATORS = ("magicdec", "magicdec_selfspec", "transformers_generate", "transformers_assisted")
GENERATED_PREFIX, GENERATED, GENERATED_ROUNDS = 8192, 96, 3
ROOM = 128  # tokens of cache past the longest prompt


@dataclass(frozen=True)
class Case:
    kv_heads: int
    prefix: int

    def kv_bytes(self, itemsize: int) -> int:
        """Of the whole batch's cache, which a decode step reads."""
        return 2 * LAYERS * BATCH * self.kv_heads * 64 * self.prefix * itemsize


CASES = (Case(6, 4096), Case(2, 16384), Case(6, 16384))


class Worker:
    """A peer in a process of its own."""

    def __init__(self, name: str, python: str, model: Path, dtype: str, *sizes: int) -> None:
        self.name = name
        command = [python, str(WORKER), name, str(model), dtype, *map(str, sizes)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._answer()

    def ask(self, **command: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with code {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def save_model(kv_heads: int, directory: Path) -> None:
    """Random weights of the benchmark's shape, as transformers saves them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(kv_heads)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=kv_heads, head_dim=64,
        max_position_embeddings=32768, bos_token_id=1, eos_token_id=2, initializer_range=0.1,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(directory)


def export_openvino(python: str, model: Path, directory: Path) -> None:
    """In the peer's own environment, uncompressed; with the demo's tokenizer: it wants one."""
    code = (
        "import sys; from optimum.intel import OVModelForCausalLM as M; "
        "M.from_pretrained(sys.argv[1], export=True, load_in_8bit=False, compile=False)"
        ".save_pretrained(sys.argv[2]); "
        "from transformers import LlamaTokenizerFast as T; "
        "from openvino_tokenizers import convert_tokenizer as c; import openvino as ov; "
        "a, b = c(T(vocab_file=sys.argv[3]), with_detokenizer=True); "
        "ov.save_model(a, sys.argv[2] + '/openvino_tokenizer.xml'); "
        "ov.save_model(b, sys.argv[2] + '/openvino_detokenizer.xml')"
    )
    demo = Path(__file__).parents[1] / "magicdec" / "demo" / "target" / "tokenizer.model"
    command = [python, "-c", code, str(model), str(directory), str(demo)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"export for OpenVINO failed: {done.stderr.strip()[-800:]}")


def prompts(length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(length)
    rows: list[list[int]] = torch.randint(3, VOCAB, (BATCH, length), generator=generator).tolist()
    return rows


def check_tokens(starts: dict[str, tuple[str, Path]], threads: int) -> None:
    """Every peer emits the same tokens in float32, or nothing is measured."""
    emitted = {}
    for name, (python, model) in starts.items():
        worker = Worker(name, python, model, "float32", threads, CHECKED_PROMPT + ROOM, BATCH)
        worker.ask(do="prefill", prompts=prompts(CHECKED_PROMPT))
        tokens = worker.ask(do="step", count=CHECKED_TOKENS)["tokens"]
        emitted[name] = [row[:CHECKED_TOKENS] for row in tokens]
        worker.close()
    for name, rows in emitted.items():
        if rows != emitted["magicdec"]:
            raise RuntimeError(f"{name} and magicdec emit different float32 tokens")


def measure(
    case: Case, starts: dict[str, tuple[str, Path]], dtype: str, threads: int
) -> list[dict[str, Any]]:
    """A row a peer: milliseconds of a decode step of the batch, and tokens a second of prefill."""
    sizes = (threads, case.prefix + ROOM, BATCH)
    workers = [Worker(name, *start, dtype, *sizes) for name, start in starts.items()]
    batch = prompts(case.prefix)
    prefill = {w.name: w.ask(do="prefill", prompts=batch)["seconds"][0] for w in workers}
    steps: dict[str, list[float]] = {w.name: [] for w in workers}
    for turn in range(ROUNDS):
        for worker in workers if turn % 2 == 0 else reversed(workers):
            count = STEPS.get(worker.name, STEPS_A_TURN)
            seconds = worker.ask(do="step", count=count)["seconds"]
            steps[worker.name] += [1e3 * s for s in seconds] if turn else []  # the first warms up
    for worker in workers:
        worker.close()
    rows = []
    for name, values in steps.items():
        tenths = statistics.quantiles(values, n=10, method="inclusive")
        row = {"peer": name, "dtype": dtype, "batch": BATCH, **asdict(case)}
        row |= {"ms": statistics.median(values), "ms_p10": tenths[0], "ms_p90": tenths[-1]}
        row["prefill_tokens_per_s"] = BATCH * case.prefix / prefill[name]
        rows.append(row | {"bytes": case.kv_bytes(getattr(torch, dtype).itemsize)})
    return rows


def generations(dtype: str, threads: int) -> list[dict[str, Any]]:
    """A row a way: seconds from prompts to the last token. In float32 all emit the same tokens."""
    demo = Path(__file__).parents[1] / "magicdec" / "demo" / "target"
    source = find_model("--model", "demo")
    workload = build_workload(
        "demo", load_tokenizer(demo), source.config.bos_token_id, GENERATED_PREFIX, BATCH, 0
    )
    batch = [list(prompt) for prompt in workload.prompts]
    command: dict[str, Any] = {"do": "generate", "prompts": batch, "num_new": GENERATED}
    emitted, seconds = {}, dict[str, list[float]]()
    for checking in (True, False):
        sizes = (threads, GENERATED_PREFIX + ROOM, BATCH)
        kind = "float32" if checking else dtype
        workers = [Worker(name, sys.executable, demo, kind, *sizes) for name in GENERATORS]
        for turn in range(1 if checking else 1 + GENERATED_ROUNDS):  # the first warms up
            for worker in workers:
                answer = worker.ask(**command)
                if checking:
                    emitted[worker.name] = [row[:GENERATED] for row in answer["tokens"]]
                elif turn:
                    seconds.setdefault(worker.name, []).extend(answer["seconds"])
        for worker in workers:
            worker.close()
        for name, rows in emitted.items():
            if rows != emitted["magicdec"]:
                raise RuntimeError(f"{name} and magicdec emit different float32 tokens")
    return [
        {"way": name, "dtype": dtype, "batch": BATCH, "prefix": GENERATED_PREFIX}
        | {"num_new": GENERATED, "seconds": statistics.median(values), "all_seconds": values}
        for name, values in seconds.items()
    ]


def print_table(measured: dict[str, Any]) -> None:
    bandwidth = measured["machine"]["read_bytes_per_s"]
    table = Table(title=f"decode step of {BATCH} rows; KV roofline at {bandwidth / 1e9:.1f} GB/s")
    columns = (
        "peer",
        "KV heads",
        "prefix",
        "step, ms",
        "10-90 %",
        "KV roofline",
        "prefill, tokens/s",
    )
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in measured["decode"]:
        table.add_row(
            row["peer"], str(row["kv_heads"]), str(row["prefix"]), f"{row['ms']:.2f}",
            f"{row['ms_p10']:.2f}-{row['ms_p90']:.2f}",
            f"{row['bytes'] / bandwidth / (row['ms'] / 1e3):.0%}",
            f"{row['prefill_tokens_per_s']:.0f}",
        )  # fmt: skip
    console = Console(width=110)
    console.print(table)
    title = f"{BATCH} x {GENERATED} tokens after prefixes of {GENERATED_PREFIX}, demo model"
    table = Table(title=title)
    for column in ("way", "seconds, prefill included", "least-most"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in measured["generate"]:
        spread = f"{min(row['all_seconds']):.2f}-{max(row['all_seconds']):.2f}"
        table.add_row(row["way"], f"{row['seconds']:.2f}", spread)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--openvino_python", help="python of an environment with openvino-genai")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = "bfloat16" if probe_machine(read_launch()).has_fast_bfloat16 else "float32"
    measured: dict[str, Any] = {"machine": describe_machine(), "decode": []}
    with tempfile.TemporaryDirectory() as temporary:
        for case in CASES:
            plain, exported = (
                Path(temporary) / f"{kind}-{case.kv_heads}" for kind in ("hf", "openvino")
            )
            starts = dict.fromkeys(("magicdec", "transformers"), (sys.executable, plain))
            if args.openvino_python:
                starts["openvino"] = (args.openvino_python, exported)
            if not plain.exists():
                save_model(case.kv_heads, plain)
                if args.openvino_python:
                    export_openvino(args.openvino_python, plain, exported)
                check_tokens(starts, args.threads)
            measured["decode"] += measure(case, starts, dtype, args.threads)
            print(f"measured {case}", file=sys.stderr, flush=True)
    measured["generate"] = generations(dtype, args.threads)
    print_table(measured)
    if args.json:
        args.json.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
