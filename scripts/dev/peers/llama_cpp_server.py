"""Serves a GGUF file by llama.cpp's own server (the package `xllamacpp` has it as a wheel), for
`magicdec audit` and `magicdec serve --endpoint`:

    python -m venv llama && llama/bin/python -m pip install 'xllamacpp==2026.10.*'
    llama/bin/python scripts/dev/peers/llama_cpp_server.py model.gguf --port 8081
    llama/bin/python scripts/dev/peers/llama_cpp_server.py model.gguf --port 8081 \\
        --drafts model --draft_model draft.gguf

Prints one line when it answers, and serves until it gets SIGTERM or SIGINT, or its parent ends.
Must not import torch, because it runs in llama.cpp's environment. `requantize_gguf.py` makes a
draft model.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
from pathlib import Path
from typing import Any

POLL_S = 0.5  # how often it looks whether its parent lives
DRAFTS = {
    "none": "NONE",
    "model": "DRAFT_SIMPLE",
    "lookup": "NGRAM_SIMPLE",
    "lookup_map": "NGRAM_MAP_K",
    "lookup_mod": "NGRAM_MOD",
    "lookup_cache": "NGRAM_CACHE",
}
FLASH_ATTENTION = {"auto": "AUTO", "on": "ENABLED", "off": "DISABLED"}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="the target, a GGUF file")
    parser.add_argument("--port", type=int, default=8081, help="a port of 127.0.0.1 [8081]")
    parser.add_argument("--drafts", choices=DRAFTS, default="none", help="who drafts [none]")
    parser.add_argument("--draft_model", type=Path, help="a GGUF file, for --drafts model")
    parser.add_argument("--draft_len", type=int, default=4, help="tokens a draft, at most [4]")
    parser.add_argument(
        "--draft_sampling", choices=("greedy", "probabilistic"), default="greedy", help="[greedy]"
    )
    parser.add_argument("--match_len", type=int, default=3, help="tokens that a lookup matches [3]")
    parser.add_argument(
        "--synthetic_len",
        type=float,
        help="tokens a step, drawn whatever is drafted; 1 rejects all, and leaves the text right",
    )
    parser.add_argument("--slots", type=int, default=1, help="requests at once [1]")
    parser.add_argument("--context", type=int, default=2048, help="tokens of each slot [2048]")
    parser.add_argument("--threads", type=int, default=2, help="[2]")
    parser.add_argument("--float32_cache", action="store_true", help="K and V as float32")
    parser.add_argument("--flash_attention", choices=FLASH_ATTENTION, default="auto", help="[auto]")
    return parser.parse_args()


def parameters(asked: argparse.Namespace, llama: Any) -> Any:
    """The server's `CommonParams`. Raises ValueError for a file that is not there."""
    for path in (asked.model, asked.draft_model):
        if path is not None and not path.is_file():
            raise ValueError(f"{path}: there is no such file")
    params = llama.CommonParams()
    params.hostnames = ["127.0.0.1"]
    params.port = asked.port
    params.model.path = str(asked.model)
    params.model_alias = {asked.model.parent.name}
    params.n_parallel = asked.slots
    params.n_ctx = asked.context * asked.slots
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = asked.threads
    params.cpuparams_batch.n_threads = asked.threads
    params.endpoint_metrics = True
    params.endpoint_slots = True
    params.ui = False
    params.fit_params = False
    params.cache_ram_mib = 256
    if asked.float32_cache:
        params.cache_type_k = llama.ggml_type.GGML_TYPE_F32
        params.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    flash = f"LLAMA_FLASH_ATTN_TYPE_{FLASH_ATTENTION[asked.flash_attention]}"
    params.flash_attn_type = getattr(llama.llama_flash_attn_type, flash)
    add_drafts(asked, params.speculative, llama)
    return params


def add_drafts(asked: argparse.Namespace, speculative: Any, llama: Any) -> None:
    """Raises ValueError for `--drafts model` without a draft model."""
    name = f"COMMON_SPECULATIVE_TYPE_{DRAFTS[asked.drafts]}"
    speculative.types = [getattr(llama.common_speculative_type, name)]
    if asked.synthetic_len is not None:
        speculative.synth_len = asked.synthetic_len
    if asked.drafts == "model":
        if asked.draft_model is None:
            raise ValueError("--drafts model needs --draft_model FILE")
        draft = speculative.draft
        draft.mparams.path = str(asked.draft_model)
        draft.n_max = asked.draft_len
        draft.n_gpu_layers = 0
        draft.probabilistic = asked.draft_sampling == "probabilistic"
        draft.cpuparams.n_threads = asked.threads
        draft.cpuparams_batch.n_threads = asked.threads
    elif asked.drafts in ("lookup", "lookup_map"):
        lookup = speculative.ngram_simple if asked.drafts == "lookup" else speculative.ngram_map_k
        lookup.size_n = asked.match_len
        lookup.size_m = asked.draft_len
        lookup.min_hits = 1
    elif asked.drafts == "lookup_mod":
        speculative.ngram_mod.n_match = asked.match_len
        speculative.ngram_mod.n_max = asked.draft_len
        speculative.ngram_mod.n_min = 0
    elif asked.drafts == "lookup_cache":
        speculative.draft.n_max = asked.draft_len


def main() -> None:
    asked = parse()
    parent = os.getppid()
    ended = threading.Event()
    # Threads that spin for each other take a hundred times as long where others use the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import xllamacpp

    try:
        server = xllamacpp.Server(parameters(asked, xllamacpp))
    except (ValueError, RuntimeError) as error:
        raise SystemExit(f"{asked.model}: {error}") from None
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    print(f"serving {asked.model} at {server.listening_address}", flush=True)
    while os.getppid() == parent and not ended.wait(POLL_S):
        pass
    # Without the server's own end, which waits for requests that no one reads any more.
    os._exit(0)


if __name__ == "__main__":
    main()
