"""Whether a GGUF file is computed as llama.cpp computes it: logits of both after the same tokens.

    python scripts/gguf_logits.py --model FILE.gguf --llama PYTHON [--tokens 200] [--new 24]

`--llama` names a Python that has `llama-cpp-python`. Tokens are random ids. llama.cpp runs on the
CPU with its KV cache in float32, without flash attention and with whole caches of windows; ours in
float32, with exact products. Of matrices in blocks llama.cpp rounds what they are multiplied with
to 8 bits, and its GELU is a table in float16: a file in F32 shows most.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

Found = dict[str, Any]
"""`logits` [tokens, vocabulary] after each of the tokens, and the greedy tokens `new` after all."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--llama", metavar="PYTHON")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--new", type=int, default=24)
    parser.add_argument("--inside_llama", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.inside_llama:
        folder = Path(args.inside_llama)
        np.savez(folder / "found.npz", **in_llama(args, np.load(folder / "ids.npy").tolist()))
        return 0
    ids, ours = in_magicdec(args)
    with tempfile.TemporaryDirectory() as temporary:
        np.save(Path(temporary) / "ids.npy", np.array(ids))
        call = [args.llama, __file__, "--inside_llama", temporary, "--model", args.model]
        subprocess.run([*call, "--new", str(args.new)], check=True, stderr=subprocess.DEVNULL)
        theirs = dict(np.load(Path(temporary) / "found.npz"))
    error = np.abs(ours["logits"] - theirs["logits"]).max() / np.abs(ours["logits"]).max()
    best = [each["logits"].argmax(-1) for each in (ours, theirs)]
    pairs = list(zip(ours["new"], theirs["new"].tolist(), strict=True))
    print(
        f"{args.model}: logits of {len(ids)} tokens differ by {error:.1e} of the largest at most; "
        f"{(best[0] == best[1]).mean():.1%} have the same best token; "
        f"{sum(a == b for a, b in pairs)} of {args.new} greedy tokens are equal"
    )
    return 0


def in_magicdec(args: argparse.Namespace) -> tuple[list[int], Found]:
    import torch

    from magicdec.attention.native import NativeBackend
    from magicdec.distributed.groups import Group
    from magicdec.distributed.tensor_parallel import Shard
    from magicdec.model.checkpoint.source import find_model
    from magicdec.names import STORED
    from magicdec.runner.model_runner import ModelRunner
    from magicdec.setup.loading import load_kind
    from magicdec.setup.model_plan import Kinds

    source = find_model("--model", args.model)
    kinds = Kinds("float32", STORED if source.has_groups else "float32", "packed", "native")
    model = load_kind(source, Shard(), kinds, torch.device("cpu"))
    runner = ModelRunner(model, NativeBackend(), Group((0,), 0), 1, args.tokens + args.new)
    runner.allocate(0)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(source.config.vocab_size, (args.tokens,), generator=generator)
    new: list[int] = []
    with torch.inference_mode():
        logits = runner.forward(ids[None], [0], num_outputs=args.tokens)[0].numpy()
        new.append(int(logits[-1].argmax()))
        while len(new) < args.new:
            last = torch.tensor([new[-1:]])
            new.append(int(runner.forward(last, [0], num_outputs=1)[0, -1].argmax()))
    return ids.tolist(), {"logits": logits, "new": new}


def in_llama(args: argparse.Namespace, ids: list[int]) -> Found:
    from llama_cpp import Llama

    size = len(ids) + args.new
    model = Llama(
        args.model, n_ctx=size, n_batch=size, n_ubatch=size, logits_all=True, verbose=False,
        type_k=0, type_v=0, flash_attn=False, swa_full=True, n_gpu_layers=0,
    )  # fmt: skip
    model.eval(ids)
    logits = np.array(model.scores[: len(ids)])
    new = [int(logits[-1].argmax())]
    while len(new) < args.new:
        model.eval(new[-1:])
        new.append(int(model.scores[model.n_tokens - 1].argmax()))
    return {"logits": logits, "new": new}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
