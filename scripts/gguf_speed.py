"""Decode steps and verifications of a GGUF file, ours and llama.cpp's in turns.

    python scripts/gguf_speed.py --model checkpoints/smollm2/model.gguf --llama PYTHON \
        [--contexts 512 7680] [--rounds 3] [--threads 2]

`--llama` names a Python that has `llama-cpp-python`. Each side is a process of its own in each
round. Ours is `magicdec latency`, by each arithmetic; llama.cpp has its KV cache in float16 and
q8_0, with flash attention. Times are medians of a round's forwards, and then of the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
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

Times = dict[tuple[str, int, str], list[float]]
"""Milliseconds by way, context and forward."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--llama", metavar="PYTHON")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 7680])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--inside_llama", metavar="KV", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside_llama:
        print(json.dumps(time_llama(args)))
        return 0
    times: Times = defaultdict(list)
    for _ in range(args.rounds):
        for way in OURS:
            time_ours(args, way, times)
        for kv in GGML_TYPES if args.llama else ():
            shared = ["--model", args.model, "--threads", str(args.threads)]
            contexts = ["--contexts", *map(str, args.contexts)]
            call = [args.llama, __file__, "--inside_llama", kv, *shared, *contexts]
            done = subprocess.run(call, capture_output=True, text=True, check=True)
            for context, forward, ms in json.loads(done.stdout.splitlines()[-1]):
                times[f"llama.cpp, KV {kv}", context, forward].append(ms)
    print("| way | context | forward | ms, median of rounds | rounds |\n|---|--:|---|--:|---|")
    for (name, context, forward), found in sorted(times.items()):
        listed = ", ".join(f"{ms:.2f}" for ms in found)
        print(f"| {name} | {context} | {forward} | {statistics.median(found):.2f} | {listed} |")
    return 0


def time_ours(args: argparse.Namespace, way: tuple[str, str, str], times: Times) -> None:
    weights, linear, dtype = way
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "latency.jsonl"
        call = [
            *(sys.executable, "-m", "magicdec", "latency", "--model", args.model, "--B", "1"),
            *("--prefix_len", *map(str, args.contexts), "--T", str(VERIFIED), "--budget", "129"),
            *("--threads", str(args.threads), "--repeats", str(FORWARDS), "--out", str(out)),
            *("--target_dtype", weights, "--linear", linear, "--dtype", dtype),
        ]
        subprocess.run(call, capture_output=True, check=True)
        record = json.loads(out.read_text(encoding="utf-8").splitlines()[-1])
    name = f"ours, {weights}, {linear}"
    for row in record["rows"]:
        forward = row["phase"] if row["T"] == 1 else f"{row['phase']}, T {row['T']}"
        times[name, row["context"], forward].append(row["ms_median"])


def time_llama(args: argparse.Namespace) -> list[tuple[int, str, float]]:
    """Runs where llama.cpp is. Prompts of random tokens; a verification is taken back."""
    import llama_cpp as lib

    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(args.model.encode(), lib.llama_model_default_params())
    size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    found = []
    for context in args.contexts:
        params = lib.llama_context_default_params()
        params.n_ctx = -(-(context + 2 * FORWARDS + VERIFIED) // 256) * 256
        params.n_batch = params.n_ubatch = CHUNK
        params.n_threads = params.n_threads_batch = args.threads
        params.type_k = params.type_v = GGML_TYPES[args.inside_llama]
        params.flash_attn_type = 1
        state = lib.llama_init_from_model(model, params)
        batch = lib.llama_batch_init(CHUNK, 0, 1)
        started = time.perf_counter()
        for first in range(0, context, CHUNK):
            count = min(CHUNK, context - first)
            decode(lib, state, batch, [(7 * (first + i)) % size for i in range(count)], first)
        found.append((context, "prefill", 1e3 * (time.perf_counter() - started)))
        for name, count in (("decode", 1), (f"verify, T {VERIFIED}", VERIFIED)):
            taken = []
            for turn in range(FORWARDS + 3):
                at = time.perf_counter()
                decode(lib, state, batch, [11 + turn] * count, context)
                lib.llama_synchronize(state)
                taken.append(1e3 * (time.perf_counter() - at))
                lib.llama_memory_seq_rm(lib.llama_get_memory(state), 0, context, -1)
            found.append((context, name, statistics.median(taken[3:])))
        lib.llama_free(state)
    return found


def decode(lib: Any, state: Any, batch: Any, ids: list[int], first: int) -> None:
    batch.n_tokens = len(ids)
    for i, token in enumerate(ids):
        batch.token[i] = token
        batch.pos[i] = first + i
        batch.n_seq_id[i] = 1
        batch.seq_id[i][0] = 0
        batch.logits[i] = len(ids) <= VERIFIED or i + 1 == len(ids)
    if lib.llama_decode(state, batch):
        raise RuntimeError("llama.cpp cannot decode the batch")


if __name__ == "__main__":
    sys.exit(main())
