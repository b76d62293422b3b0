"""Decode steps and verifications of a GGUF file, ours and llama.cpp's in turns.

    python scripts/gguf_speed.py --model checkpoints/smollm2/model.gguf --llama PYTHON \
        [--B 1] [--contexts 512 7680] [--rounds 3] [--threads 2] [--dataset demo]

`--llama` names a Python that has `llama-cpp-python`. Each side is a process of its own in each
round. Ours is `magicdec latency`, by each arithmetic; llama.cpp has its KV cache in float16 and
q8_0, with flash attention. Times are medians of a round's forwards, and then of the rounds. Of
several rows one is prefilled, and copied to the others; its time is the row `prefill`, which ours
has from `magicdec run` on the text `--dataset`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perplexity import CHUNK, GGML_TYPES

OURS = (
    ("stored", "packed_a8", "bfloat16"),
    ("stored", "packed", "bfloat16"),
    ("bfloat16", "packed", "bfloat16"),
)
VERIFIED = 5  # tokens of a verification
FORWARDS = 30

Times = dict[tuple[str, int, int, str], list[float]]
"""Milliseconds by way, batch size, context and forward."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--llama", metavar="PYTHON")
    parser.add_argument("--B", type=int, nargs="+", default=[1])
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 7680])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dataset", default="demo")
    parser.add_argument("--inside_llama", metavar="KV", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside_llama:
        print(json.dumps(time_llama(args)))
        return 0
    times: Times = defaultdict(list)
    for _ in range(args.rounds):
        for way in OURS:
            time_ours(args.model, args.B, args.contexts, args.threads, way, times)
            for context in args.contexts:
                ms = prefill_ours(args.model, context, args.threads, way, args.dataset)
                times[f"ours, {way[0]}, {way[1]}", 1, context, "prefill"].append(ms)
        for kv in GGML_TYPES if args.llama else ():
            for B in args.B:
                rows = llama_times(args.llama, args.model, kv, B, args.contexts, args.threads)
                for context, forward, ms in rows:
                    times[f"llama.cpp, KV {kv}", B, context, forward].append(ms)
    print("| B | context | forward | way | ms, median of rounds | rounds |")
    print("|--:|--:|---|---|--:|---|")
    for (name, *place, forward), found in sorted(times.items(), key=lambda item: item[0][1:]):
        listed = ", ".join(f"{ms:.2f}" for ms in found)
        shown = f"{statistics.median(found):.2f} | {listed}"
        print("|", " | ".join(map(str, place)), f"| {forward} | {name} | {shown} |")
    return 0


def time_ours(
    model: str,
    batch_sizes: Sequence[int],
    contexts: Sequence[int],
    threads: int,
    way: tuple[str, str, str],
    times: Times,
    tree: Path | None = None,
) -> None:
    """`tree`: the checkout that is timed, if not this one."""
    weights, linear, dtype = way
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "latency.jsonl"
        call = [
            *(sys.executable, "-m", "magicdec", "latency", "--model", str(Path(model).resolve())),
            *("--B", *map(str, batch_sizes), "--prefix_len", *map(str, contexts)),
            *("--T", str(VERIFIED), "--budget", "129", "--repeats", str(FORWARDS)),
            *("--threads", str(threads), "--out", str(out)),
            *("--target_dtype", weights, "--linear", linear, "--dtype", dtype),
        ]
        environment = os.environ | ({"PYTHONPATH": str(tree)} if tree else {})
        subprocess.run(call, capture_output=True, check=True, env=environment, cwd=tree)
        record = json.loads(out.read_text(encoding="utf-8").splitlines()[-1])
    name = f"ours, {weights}, {linear}"
    for row in record["rows"]:
        forward = row["phase"] if row["T"] == 1 else f"{row['phase']}, T {row['T']}"
        times[name, row["B"], row["context"], forward].append(row["ms_median"])


def prefill_ours(
    model: str, context: int, threads: int, way: tuple[str, str, str], dataset: str
) -> float:
    """Milliseconds of the prefill of one row, the mean of two."""
    weights, linear, dtype = way
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "run.jsonl"
        call = [
            *(sys.executable, "-m", "magicdec", "run", "--draft", "none", "--model", model),
            *("--B", "1", "--num_batches", "2", "--warmup_batches", "0", "--gen_len", "2"),
            *("--prefix_len", str(context), "--dataset", dataset, "--threads", str(threads)),
            *("--target_dtype", weights, "--linear", linear, "--dtype", dtype, "--out", str(out)),
        ]
        subprocess.run(call, capture_output=True, check=True)
        record = json.loads(out.read_text(encoding="utf-8").splitlines()[-1])
    return 1e3 * context / float(record["metrics"]["prefill_tokens_per_s"])


def llama_times(
    python: str, model: str, kv: str, B: int, contexts: Sequence[int], threads: int
) -> list[tuple[int, str, float]]:
    """Context, forward and milliseconds."""
    shared = ["--model", model, "--threads", str(threads), "--B", str(B)]
    call = [python, __file__, "--inside_llama", kv, *shared, "--contexts", *map(str, contexts)]
    done = subprocess.run(call, capture_output=True, text=True, check=True)
    rows: list[tuple[int, str, float]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def time_llama(args: argparse.Namespace) -> list[tuple[int, str, float]]:
    """Runs where llama.cpp is. Prompts of random tokens; what a forward appends is taken back."""
    import llama_cpp as lib

    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(args.model.encode(), lib.llama_model_default_params())
    size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    (B,) = args.B
    found = []
    for context in args.contexts:
        params = lib.llama_context_default_params()
        params.n_ctx = B * (-(-(context + VERIFIED) // 256) * 256)
        params.n_seq_max = B
        params.n_batch = params.n_ubatch = CHUNK
        params.n_threads = params.n_threads_batch = args.threads
        params.type_k = params.type_v = GGML_TYPES[args.inside_llama]
        params.flash_attn_type = 1
        params.kv_unified = False  # each row has a cache of its own
        state = lib.llama_init_from_model(model, params)
        batch = lib.llama_batch_init(CHUNK, 0, 1)
        started = time.perf_counter()
        for first in range(0, context, CHUNK):
            count = min(CHUNK, context - first)
            ids = [(7 * (first + i)) % size for i in range(count)]
            decode(lib, state, batch, ids, first, [0])
        lib.llama_synchronize(state)
        found.append((context, "prefill", 1e3 * (time.perf_counter() - started)))
        for row in range(1, B):
            lib.llama_memory_seq_cp(lib.llama_get_memory(state), 0, row, -1, -1)
        for name, count in (("decode", 1), (f"verify, T {VERIFIED}", VERIFIED)):
            taken = []
            for turn in range(FORWARDS + 3):
                at = time.perf_counter()
                decode(lib, state, batch, [11 + turn] * count, context, range(B))
                lib.llama_synchronize(state)
                taken.append(1e3 * (time.perf_counter() - at))
                for row in range(B):
                    lib.llama_memory_seq_rm(lib.llama_get_memory(state), row, context, -1)
            found.append((context, name, statistics.median(taken[3:])))
        lib.llama_free(state)
    return found


def decode(
    lib: Any, state: Any, batch: Any, ids: list[int], first: int, rows: Sequence[int]
) -> None:
    """The same ids for each of the rows."""
    batch.n_tokens = len(ids) * len(rows)
    for at in range(batch.n_tokens):
        i = at % len(ids)
        batch.token[at] = ids[i]
        batch.pos[at] = first + i
        batch.n_seq_id[at] = 1
        batch.seq_id[at][0] = rows[at // len(ids)]
        batch.logits[at] = len(ids) <= VERIFIED or i + 1 == len(ids)
    if lib.llama_decode(state, batch):
        raise RuntimeError("llama.cpp cannot decode the batch")


if __name__ == "__main__":
    sys.exit(main())
