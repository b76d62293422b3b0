"""Perplexity of a model on texts, by each arithmetic of ours and by llama.cpp with the same file.

    python scripts/perplexity.py --model checkpoints/smollm2/model.gguf --dataset validation.jsonl \
        [--tokens 50000] [--window 2000] [--llama PYTHON] [--threads N]

The texts are cut into windows; every token of a window but the first is predicted from those before
it. `--llama` names a Python that has `llama-cpp-python`, which is then measured on the same
token ids, with KV caches in float16 and q8_0. It also
says whether llama.cpp's tokenizer gives these ids.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

CHUNK = 500  # tokens whose logits are in memory together
# Activations and KV cache, storage of the matrices, and their products.
OURS = (
    ("float32", "float32", "packed"),
    ("float32", "stored", "packed"),
    ("float32", "stored", "packed_a8"),
    ("bfloat16", "bfloat16", "packed"),
    ("bfloat16", "stored", "packed"),
    ("bfloat16", "stored", "packed_a8"),
)
LLAMA = (("f16", True), ("q8_0", True))
GGML_TYPES = {"f16": 1, "q8_0": 8}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dataset", default="demo")
    parser.add_argument("--tokens", type=int, default=50_000)
    parser.add_argument("--window", type=int, default=2000)
    parser.add_argument("--llama", metavar="PYTHON")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--inside_llama", metavar="TOKENS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside_llama:
        measure_llama(args)
        return 0
    windows, text = make_windows(args)
    rows = []
    for way, measured in measure_ours(args, windows):
        rows.append((" / ".join(way), *measured))
        print(rows[-1], file=sys.stderr, flush=True)  # the rest may take long
    equal = None
    if args.llama:
        with tempfile.TemporaryDirectory() as temporary:
            np.save(Path(temporary) / "tokens.npy", windows)
            (Path(temporary) / "text.txt").write_text(text, encoding="utf-8")
            call = [args.llama, __file__, "--inside_llama", temporary, "--model", args.model]
            done = subprocess.run(
                [*call, "--threads", str(args.threads)], capture_output=True, text=True, check=True
            )
        found = json.loads(done.stdout.splitlines()[-1])
        rows += [tuple(row) for row in found["rows"]]
        equal = found["ids"]
    best = rows[0][1]
    print(f"{windows.size} tokens in windows of {windows.shape[1]}")
    print("| arithmetic | perplexity | of the first | tokens/s |\n|---|--:|--:|--:|")
    for name, perplexity, rate in rows:
        print(
            f"| {name} | {perplexity:.4f} | {100 * (perplexity / best - 1):+.2f} % | {rate:.0f} |"
        )
    if equal is not None:
        ours = encode(args, text)
        same = ours == equal
        print(f"llama.cpp's tokenizer: {len(equal)} ids of {len(text)} characters, equal: {same}")
    return 0


def encode(args: argparse.Namespace, text: str) -> list[int]:
    from magicdec.model.checkpoint.source import find_model
    from magicdec.model.tokenizer import load_tokenizer

    path = find_model("--model", args.model).tokenizer_path
    assert path is not None, "random weights have no tokenizer"
    return load_tokenizer(path).encode(text)


def make_windows(args: argparse.Namespace) -> tuple[np.ndarray, str]:
    """Token ids [windows, window], and a text of about 100 kB for the tokenizers."""
    from magicdec.workload.books import read_books

    ids: list[int] = []
    texts = []
    for text in read_books(args.dataset, 100):
        texts.append(text)
        ids += encode(args, text[: 8 * (args.tokens - len(ids))])
        if len(ids) >= args.tokens:
            break
    count = min(args.tokens, len(ids)) // args.window
    windows = np.array(ids[: count * args.window]).reshape(count, args.window)
    code = Path(__file__).read_text(encoding="utf-8")
    digits = " ".join(str(i * i) for i in range(2000))
    return windows, texts[0][:80_000] + code + digits


def measure_ours(
    args: argparse.Namespace, windows: np.ndarray
) -> Iterator[tuple[tuple[str, ...], tuple[float, float]]]:
    import torch

    from magicdec.attention.native import NativeBackend
    from magicdec.distributed.groups import Group
    from magicdec.distributed.tensor_parallel import Shard
    from magicdec.model.checkpoint.source import find_model
    from magicdec.runner.model_runner import ModelRunner
    from magicdec.setup.loading import load_kind
    from magicdec.setup.model_plan import Kinds

    torch.set_num_threads(args.threads)
    source = find_model("--model", args.model)
    for way in OURS:
        dtype, weights, linear = way
        if weights == "stored" and not source.has_groups:
            continue
        kinds = Kinds(dtype, weights, linear, "native")
        model = load_kind(source, Shard(), kinds, torch.device("cpu"))
        runner = ModelRunner(model, NativeBackend(), Group((0,), 0), 1, windows.shape[1])
        runner.allocate(0)
        total = 0.0
        started = time.perf_counter()
        with torch.inference_mode():
            for window in torch.from_numpy(windows):
                runner.truncate([0], [0])
                for first in range(0, len(window), CHUNK):
                    ids = window[first : first + CHUNK]
                    logits = runner.forward(ids[None], [0], num_outputs=len(ids))[0]
                    after = window[first + 1 : first + CHUNK + 1]
                    total += float(
                        torch.nn.functional.cross_entropy(
                            logits[: len(after)].float(), after, reduction="sum"
                        )
                    )
        seconds = time.perf_counter() - started
        count = windows.size - len(windows)
        yield way, (math.exp(total / count), windows.size / seconds)


def measure_llama(args: argparse.Namespace) -> None:
    """Runs where llama.cpp is, and prints one line of JSON."""
    import llama_cpp as lib

    directory = Path(args.inside_llama)
    windows = np.load(directory / "tokens.npy")
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(args.model.encode(), lib.llama_model_default_params())
    vocabulary = lib.llama_model_get_vocab(model)
    size = lib.llama_vocab_n_tokens(vocabulary)
    rows = [llama_row(lib, model, size, windows, args.threads, *way) for way in LLAMA]
    text = (directory / "text.txt").read_bytes()
    found = (lib.llama_token * len(text))()
    count = lib.llama_tokenize(vocabulary, text, len(text), found, len(text), False, False)
    print(json.dumps({"rows": rows, "ids": list(found[:count])}))


def llama_row(
    lib: Any, model: Any, size: int, windows: Sequence[Any], threads: int, kv: str, is_flash: bool
) -> tuple[str, float, float]:
    params = lib.llama_context_default_params()
    length = len(windows[0])
    params.n_ctx = -(-length // 256) * 256
    params.n_batch = params.n_ubatch = CHUNK
    params.n_threads = params.n_threads_batch = threads
    params.type_k = params.type_v = GGML_TYPES[kv]
    params.flash_attn_type = int(is_flash)
    context = lib.llama_init_from_model(model, params)
    batch = lib.llama_batch_init(CHUNK, 0, 1)
    total = 0.0
    started = time.perf_counter()
    for window in windows:
        lib.llama_memory_clear(lib.llama_get_memory(context), False)
        for first in range(0, length, CHUNK):
            ids = window[first : first + CHUNK]
            batch.n_tokens = len(ids)
            for i, token in enumerate(ids):
                batch.token[i] = int(token)
                batch.pos[i] = first + i
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = 0
                batch.logits[i] = True
            if lib.llama_decode(context, batch):
                raise RuntimeError("llama.cpp cannot decode the batch")
            pointer = lib.llama_get_logits(context)
            logits = np.ctypeslib.as_array(pointer, (len(ids), size)).astype(np.float64)
            after = window[first + 1 : first + CHUNK + 1]
            logits = logits[: len(after)]
            most = logits.max(axis=1, keepdims=True)
            norm = np.log(np.exp(logits - most).sum(axis=1)) + most[:, 0]
            total += float((norm - logits[np.arange(len(after)), after]).sum())
    seconds = time.perf_counter() - started
    lib.llama_free(context)
    count = windows.size - len(windows)  # type: ignore[attr-defined]
    name = f"llama.cpp, KV {kv}{', flash attention' if is_flash else ''}"
    return name, math.exp(total / count), windows.size / seconds  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main())
