"""Convert a nanoGPT checkpoint to a directory for `--model`.

    python scripts/convert_nanogpt.py out-shakespeare-char/ckpt.pt --out shakespeare

If `meta.pkl` is beside the checkpoint, the tokenizer is made from it. For a model with GPT-2's
vocabulary, copy GPT-2's tokenizer.json into the directory.

nanoGPT stores matrices as [out, in], and models trained with `bias=False` have no biases. Missing
biases are written as zeros, which computes the same. No pickled code is run.
"""

from __future__ import annotations

import argparse
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
COMPILED = "_orig_mod."  # the prefix that torch.compile adds to every name
SIZES = ("n_layer", "n_head", "n_embd", "vocab_size", "block_size")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--activation",
        choices=("gelu", "gelu_new"),
        default="gelu",
        help="gelu_new is for checkpoints from before February 2023 [gelu]",
    )
    args = parser.parse_args()
    try:
        has_tokenizer = convert_nanogpt(args.checkpoint, args.out, args.activation)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    rest = "" if has_tokenizer else "; add a tokenizer.json: no meta.pkl to make it from was found"
    print(f"wrote {args.out}{rest}")
    return 0


def convert_nanogpt(checkpoint: Path, out: Path, activation: str = "gelu") -> bool:
    """Write the directory `out`. Returns whether it has a tokenizer, which needs `meta.pkl` beside
    `checkpoint`.

    `activation`: gelu, or gelu_new for checkpoints from before February 2023. Raises ValueError
    naming the file that is not part of a nanoGPT checkpoint.
    """
    value = _load(checkpoint)
    try:
        sizes = {name: int(value["model_args"][name]) for name in SIZES}
        stored = {name.removeprefix(COMPILED): t for name, t in value["model"].items()}
        tensors = _tensors(stored, sizes["n_layer"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{checkpoint}: not a nanoGPT checkpoint (lacks {error})") from None
    meta = checkpoint.with_name("meta.pkl")
    tokenizer = _characters(meta, sizes["vocab_size"]) if meta.is_file() else None
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors")
    dtype = str(tensors["transformer.wte.weight"].dtype).removeprefix("torch.")
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_positions": sizes.pop("block_size"),
        **sizes,
        "activation_function": activation,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "torch_dtype": dtype,
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save(str(out / "tokenizer.json"))
    return tokenizer is not None


def _load(checkpoint: Path) -> Any:
    try:
        return torch.load(str(checkpoint), map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"{checkpoint}: not a readable torch.save archive ({reason})") from None


def _tensors(stored: dict[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """GPT-2's tensors, with zeros for missing biases and without the head, which is tied."""
    layers = [f"transformer.h.{i}." for i in range(num_layers)]
    tensors = {n: stored[n].clone() for n in ("transformer.wte.weight", "transformer.wpe.weight")}
    names = [layer + leaf for layer in layers for leaf in TRANSPOSED]
    names += [f"{layer}{norm}.weight" for layer in layers for norm in ("ln_1", "ln_2")]
    for name in (*names, "transformer.ln_f.weight"):
        weight, bias = stored[name], name.removesuffix("weight") + "bias"
        is_matrix = name.endswith(TRANSPOSED)
        tensors[name] = weight.T.contiguous() if is_matrix else weight.clone()
        tensors[bias] = stored.get(bias, weight.new_zeros(len(weight))).clone()
    return tensors


def _characters(meta: Path, vocab_size: int) -> Any:
    """A character-level tokenizer, from nanoGPT's table `stoi`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    try:
        with meta.open("rb") as handle:
            ids = {str(c): int(i) for c, i in _PlainData(handle).load()["stoi"].items()}
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{meta}: not nanoGPT's table of characters ({error})") from None
    if any(len(c) != 1 for c in ids) or sorted(ids.values()) != list(range(len(ids))):
        raise ValueError(f"{meta}: stoi is not a numbering of single characters")
    if len(ids) > vocab_size:
        raise ValueError(f"{meta}: {len(ids)} characters, but an embedding of {vocab_size}")
    tokenizer = Tokenizer(models.WordLevel(ids))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


class _PlainData(pickle.Unpickler):
    """Unpickles dicts, lists, strings and numbers. It refuses every class, so no code can run."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"holds a pickled {module}.{name}")


if __name__ == "__main__":
    sys.exit(main())
