"""What others make of a GGUF file, for `magicdec model check`: its values by the `gguf` package, in
the order of Hugging Face, and llama.cpp's token ids, end tokens and logits, by `llama-cpp-python`.
Nothing here reads the file by this project's own loader.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

EXPERT = re.compile(r"(?P<before>.*\.experts)\.(?P<number>\d+)\.(?P<after>.*)")
# By architecture: the tensors in whose outputs the converter has put the two that RoPE rotates
# together beside each other, and the key of the number of heads. Hugging Face has them half a head
# apart.
PAIRS = {"llama": {"attn_q": "head_count", "attn_k": "head_count_kv"}}
# Norms to whose weights the converter has added 1, but for PLAIN_NORM.
PLUS_ONE = {"gemma3", "qwen35", "qwen35moe", "qwen3next"}
PLAIN_NORM = "ssm_norm"
LINEAR = ".linear_attn."
TILED = {"qwen35", "qwen35moe"}  # the order of whose value heads the converter has changed
HEADS = ("group_count", "time_step_rank", "state_size")  # keys of their numbers
ONE_PROJECTION = "ssm_in"  # of older files of Qwen3-Next: q, k, v and z, key head by key head
# Other names under which the package may know the end of a name, and the file have it.
OTHER_NAMES = {
    "linear_attn.in_proj_qkv.weight": "linear_attn.in_proj_qkvz.weight",
    "linear_attn.in_proj_z.weight": "linear_attn.in_proj_qkvz.weight",
    "experts.gate_proj.weight": "experts.gate_up_proj.weight",
    "experts.up_proj.weight": "experts.gate_up_proj.weight",
    "linear_attn.dt_bias": "linear_attn.dt_proj.bias",
    "linear_attn.in_proj_b.weight": "linear_attn.in_proj_ba.weight",
    "linear_attn.in_proj_a.weight": "linear_attn.in_proj_ba.weight",
}


def values_of(files: Sequence[Path], names: Iterable[str]) -> dict[str, Tensor]:
    """The tensors of these Hugging Face names, one of each expert, in float32. `files` are all
    parts of a split file, the first one first. Raises ValueError for a name that the `gguf`
    package does not know or the files do not have."""
    import gguf

    readers = [gguf.GGUFReader(file) for file in files]
    stored = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
    fields = readers[0].fields
    architecture = str(fields["general.architecture"].contents())
    kinds = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    num_layers = int(fields[f"{architecture}.block_count"].contents())
    table = gguf.get_tensor_name_map(kinds[architecture], num_layers)
    found = {}
    whole = dict[str, NDArray[np.float32]]()  # of experts, dequantised once
    for name in names:
        expert = EXPERT.fullmatch(name)
        merged = name if expert is None else f"{expert['before']}.{expert['after']}"
        ends = [end for end in OTHER_NAMES if merged.endswith(end)]
        others = [merged.removesuffix(end) + OTHER_NAMES[end] for end in ends]
        known = [
            table.get_name(theirs_name, try_suffixes=(".weight", ".bias"))
            for theirs_name in (merged, f"{merged}.weight", *others)
        ]
        theirs = next((candidate for candidate in known if candidate in stored), None)
        if theirs is None:
            raise ValueError(f"the gguf package finds no tensor {name}")
        if expert is None:
            values = dequantised(stored[theirs])
        else:
            if theirs not in whole:
                whole[theirs] = dequantised(stored[theirs])
            values = whole[theirs][int(expert["number"])]
            if "gate_up" in theirs:
                gate, up = np.split(values, 2)
                values = gate if expert["after"].startswith("gate") else up
        part = re.sub(r"\.(weight|bias)$", "", theirs).split(".")[-1]
        key = PAIRS.get(architecture, {}).get(part)
        if key is not None:
            heads = int(fields[f"{architecture}.attention.{key}"].contents())
            pairs = values.reshape(heads, -1, 2, *values.shape[1:])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        if architecture in PLUS_ONE and part.endswith("norm") and part != PLAIN_NORM:
            values = values - np.float32(1)
        if LINEAR in name:
            sizes = {key: int(fields[f"{architecture}.ssm.{key}"].contents()) for key in HEADS}
            if part == ONE_PROJECTION:
                values = one_projection(values, name, sizes)
            else:
                values = linear_values(values, name, sizes, architecture in TILED)
        if name.endswith("shared_expert_gate.weight"):
            values = values.reshape(1, -1)
        found[name] = torch.from_numpy(np.require(values, requirements=["C", "W"]))
    return found


def linear_values(
    values: NDArray[np.float32], name: str, sizes: dict[str, int], is_tiled: bool
) -> NDArray[np.float32]:
    """A tensor as Hugging Face has it. Those with value heads are written with dimensions for key
    heads and for the value heads of each; if they are tiled, the file has these the other way
    round."""
    key_heads = sizes["group_count"]
    group = sizes["time_step_rank"] // key_heads
    num_keys = 2 * key_heads * sizes["state_size"]

    def untiled(rows: NDArray[np.float32]) -> NDArray[np.float32]:
        if not is_tiled:
            return rows
        heads = rows.reshape(group, key_heads, -1, *rows.shape[1:])
        return heads.swapaxes(0, 1).reshape(rows.shape)

    part = name.partition(LINEAR)[2].removesuffix(".weight")
    if part in ("in_proj_qkv", "conv1d"):
        values = np.concatenate([values[:num_keys], untiled(values[num_keys:])])
        return values[:, None] if part == "conv1d" else values
    if part in ("in_proj_b", "in_proj_a") and not is_tiled:
        rates = values.reshape(key_heads, 2, group, -1)[:, int(part == "in_proj_a")]
        return rates.reshape(key_heads * group, -1)
    if part == "A_log":
        return untiled(np.log(-values))
    if part == "out_proj":
        return untiled(values.T).T
    return values if part == "norm" else untiled(values)


def one_projection(
    values: NDArray[np.float32], name: str, sizes: dict[str, int]
) -> NDArray[np.float32]:
    """Of ONE_PROJECTION the rows of q, of k and of v of all heads, or those of z."""
    key = sizes["state_size"]
    heads = values.reshape(sizes["group_count"], -1, values.shape[1])
    value = (heads.shape[1] - 2 * key) // 2
    q, k, v, z = np.split(heads, [key, 2 * key, 2 * key + value], axis=1)
    wanted = (z,) if name.endswith("in_proj_z.weight") else (q, k, v)
    return np.concatenate([rows.reshape(-1, values.shape[1]) for rows in wanted])


def dequantised(tensor: Any) -> NDArray[np.float32]:
    from gguf.quants import dequantize

    if tensor.data.dtype == np.float64:
        return np.asarray(tensor.data, np.float32)
    return dequantize(tensor.data, tensor.tensor_type)


class LlamaCpp:
    """A GGUF file in llama.cpp, on the CPU, with its KV cache in float32 and whole caches of
    windows."""

    def __init__(self, path: Path, longest: int, threads: int) -> None:
        import llama_cpp

        self._lib: Any = llama_cpp
        self.version: str = llama_cpp.__version__
        self._model: Any = llama_cpp.Llama(
            str(path),
            n_ctx=longest,
            n_threads=threads,
            n_threads_batch=threads,
            type_k=llama_cpp.GGML_TYPE_F32,
            type_v=llama_cpp.GGML_TYPE_F32,
            flash_attn=False,
            swa_full=True,
            n_gpu_layers=0,
            verbose=False,
        )
        self._vocabulary = llama_cpp.llama_model_get_vocab(self._model.model)
        self._size: int = llama_cpp.llama_vocab_n_tokens(self._vocabulary)

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, special tokens' names as plain text."""
        ids: list[int] = self._model.tokenize(text.encode(), add_bos=True, special=False)
        return ids

    def end_ids(self) -> set[int]:
        is_end = self._lib.llama_vocab_is_eog
        return {i for i in range(self._size) if is_end(self._vocabulary, i)}

    def forward(self, ids: Sequence[int]) -> Tensor:
        """Append tokens; the logits [1, V] after the last one."""
        self._model.eval(list(ids))
        logits = self._lib.llama_get_logits_ith(self._model.ctx, -1)
        return torch.from_numpy(np.ctypeslib.as_array(logits, (1, self._size)).copy())

    def restart(self) -> None:
        self._model.reset()

    def close(self) -> None:
        self._model.close()
