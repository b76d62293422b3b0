"""GGUF files of models with linear attention, as llama.cpp's converter writes them: logits, tokens
and tensors of transformers' models, heads for multi-token prediction, and files that lie. What the
converter does to a tensor is written here from its definition, row by row."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Command
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file
from test_gguf import MIXED, PLAIN, check_logits, refused, trained_bpe, vocabulary_of
from test_gguf_families import write_with
from tiny_gguf import name_of, random_blocks, write_gguf
from tiny_hybrids import PlainMtpHead, check_greedy_tokens, the_model
from torch import Tensor

from magicdec.bench.gguf_reference import values_of
from magicdec.bench.model_check import check_model
from magicdec.config.sections import KVSection
from magicdec.distributed.tensor_parallel import Shard
from magicdec.hardware.costs import weight_bytes
from magicdec.llm import LLM
from magicdec.model.checkpoint import checked
from magicdec.model.checkpoint.gguf_tensors import LinearOrders, PlacedTensor, Placing
from magicdec.model.checkpoint.mtp_weights import find_mtp_head
from magicdec.model.checkpoint.source import find_model, load_transformer
from magicdec.model.families.gguf_config import load_gguf_config
from magicdec.model.families.hf_config import parse_hf_config, to_hf_config
from magicdec.model.gguf.file import GgufTensor
from magicdec.model.linear.grouped import GroupedLinear
from magicdec.names import STORED

VOCAB = 97
KEY_HEADS = 2
GROUP = 4  # value heads of a key head: more than key heads, so that two orders differ from one
KEY = 16
VALUE = 32  # a group of the types of blocks
SIZES = {
    "hidden_size": 256,
    "head_dim": 64,
    "linear_num_key_heads": KEY_HEADS,
    "linear_num_value_heads": KEY_HEADS * GROUP,
    "linear_key_head_dim": KEY,
    "linear_value_head_dim": VALUE,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2}
WIDTHS = {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
# By architecture: transformers' class and its fields.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen35": ("Qwen3_5ForCausalLM", {"intermediate_size": 256}),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", WIDTHS),
    "qwen3next": ("Qwen3NextForCausalLM", WIDTHS),
}
PLAIN_PARTS = ("token_embd", "output", "ffn_gate_inp", "ffn_gate_inp_shexp", "ssm_conv1d")
MTP_NAMES = {
    "mtp.fc.weight": "nextn.eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "nextn.enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "nextn.hnorm.weight",
    "mtp.norm.weight": "nextn.shared_head_norm.weight",
}


def a_model(architecture: str, vocab_size: int = VOCAB, **changes: Any) -> Any:
    kind, own = MODELS[architecture]
    return the_model(vocab_size, kind, **(SIZES | own | changes))


def keys_of(config: Any, **more: Any) -> dict[str, Any]:
    """What the converter says of a model, without the architecture's name."""
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
        "rope.dimension_count": config.head_dim // 4,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "full_attention_interval": 4,
    }
    if hasattr(config, "num_experts"):
        keys |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        }
    else:
        keys["feed_forward_length"] = config.intermediate_size
    if config.model_type != "qwen3_next":
        keys["rope.dimension_sections"] = [11, 11, 10, 0]
    return keys | {key.replace("__", "."): value for key, value in more.items()}


def tiled(config: Any, size: int, first: int = 0) -> list[int]:
    """For each stored row of value heads of `size` rows, which begin with the row `first`, the one
    of Hugging Face: ggml repeats all key heads one after the other, so that the value head j of
    the key head g is at place j * (number of key heads) + g."""
    keys = config.linear_num_key_heads
    group = config.linear_num_value_heads // keys
    rows = [0] * (keys * group * size)
    for g in range(keys):
        for j in range(group):
            for i in range(size):
                rows[(j * keys + g) * size + i] = first + (g * group + j) * size + i
    return rows


def by_key_head(config: Any) -> tuple[list[int], list[int]]:
    """Of Qwen3-Next's `in_proj_qkvz`, which has q, k, v and z of a key head beside each other: the
    rows of q of all heads, then of k, then of v; and those of z."""
    key = config.linear_key_head_dim
    group = config.linear_num_value_heads // config.linear_num_key_heads
    value = group * config.linear_value_head_dim
    found: dict[str, list[int]] = {part: [] for part in "qkvz"}
    row = 0
    for _ in range(config.linear_num_key_heads):
        for part, count in (("q", key), ("k", key), ("v", value), ("z", value)):
            found[part] += range(row, row + count)
            row += count
    return found["q"] + found["k"] + found["v"], found["z"]


def stored_parts(
    architecture: str, name: str, values: Tensor, config: Any, is_old: bool = False
) -> list[tuple[str, Tensor, list[int] | None, int]]:
    """The tensors that the converter makes of one: their names, what they are made of, and in which
    order of its rows (or columns, if the dimension is 1)."""
    end = name.partition("linear_attn.")[2]
    is_tiled = architecture != "qwen3next"
    ours = name.replace("dt_bias", "dt_proj.bias")
    if name.endswith("experts.gate_up_proj"):
        parts = zip(("gate", "up"), values.chunk(2, dim=1), strict=True)
        return [(name.replace("gate_up_proj", f"{p}_proj.weight"), v, None, 0) for p, v in parts]
    if name.endswith("experts.down_proj"):
        return [(f"{name}.weight", values, None, 0)]
    if end == "in_proj_qkvz.weight" and not is_old:
        qkv, z = by_key_head(config)
        names = [name.replace("qkvz", part) for part in ("qkv", "z")]
        return [(names[0], values, qkv, 0), (names[1], values, z, 0)]
    if end == "conv1d.weight":
        values = values[:, 0]
    if not is_tiled or not end or end == "norm.weight":
        return [(ours, values, None, 0)]
    num_keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    size = config.linear_value_head_dim
    if end in ("in_proj_qkv.weight", "conv1d.weight"):
        return [(ours, values, [*range(num_keys), *tiled(config, size, num_keys)], 0)]
    if end == "out_proj.weight":
        return [(ours, values, tiled(config, size), 1)]
    return [(ours, values, tiled(config, size if end == "in_proj_z.weight" else 1), 0)]


def save(
    path: Path,
    architecture: str,
    model: Any,
    types: tuple[Type, ...] = MIXED,
    head: PlainMtpHead | None = None,
    strings: dict[str, Any] | None = None,
    is_old: bool = False,
    **more: Any,
) -> None:
    """Write a model's file, with random blocks in matrices of quantised types, and give the model
    the weights that these stand for."""
    config = model.config
    stored: dict[str, Any] = {}
    parameters = [(name, p.data) for name, p in model.named_parameters()]
    num_layers = config.num_hidden_layers
    if head is not None:
        more = {"block_count": num_layers + 1, "nextn_predict_layers": 1} | more
        parameters += head_parameters(head)
    seed = 0
    for name, parameter in parameters:
        ours = name.replace("mtp.layers.0.", f"model.layers.{num_layers}.")
        for part, values, order, dim in stored_parts(architecture, ours, parameter, config, is_old):
            seed += 1
            if part in MTP_NAMES:
                known = f"blk.{num_layers}.{MTP_NAMES[part]}"
            else:
                known = name_of(architecture, part)
            if name.endswith("A_log"):
                known = known.removesuffix(".weight")
                values.copy_((values.exp()).log())
                stored[known] = (-values.exp()).numpy()
            is_norm = name.endswith("norm.weight") or "pre_fc_norm" in name
            if is_norm and "linear_attn" not in name:
                values.copy_((values + 1) - 1)
                stored[known] = (values + 1).numpy()
            if known not in stored:
                stored[known] = in_type(known, values, types[seed % len(types)], order, dim, seed)
            elif order is not None:
                stored[known] = stored[known][order]
    write_gguf(path, architecture, keys_of(config, **more), stored, strings)


def in_type(
    name: str, values: Tensor, kind: Type, order: list[int] | None, dim: int, seed: int
) -> Any:
    """What is stored of values, which become those that it stands for. Blocks are of the order in
    the file."""
    index = torch.arange(values.shape[dim]) if order is None else torch.tensor(order)
    if values.dim() == 1 or name.split(".")[-2] in PLAIN_PARTS:
        return values.index_select(dim, index).contiguous().numpy()
    if kind in PLAIN:
        blocks = quantize(values.index_select(dim, index).contiguous().numpy(), kind)
    else:
        shape = list(values.shape)
        shape[dim] = len(index)
        blocks = random_blocks(tuple(shape), kind, seed)
    values.index_copy_(dim, index, torch.from_numpy(dequantize(blocks, kind).copy()))
    return blocks, kind


def head_parameters(head: PlainMtpHead) -> list[tuple[str, Tensor]]:
    layer = {
        name.replace("model.", "mtp.", 1): parameter.data
        for name, parameter in head.layer.named_parameters()
        if name.startswith(("model.layers.", "model.norm."))
    }
    return [
        *layer.items(),
        ("mtp.fc.weight", head.fc),
        ("mtp.pre_fc_norm_embedding.weight", head.token_norm),
        ("mtp.pre_fc_norm_hidden.weight", head.state_norm),
    ]


@pytest.mark.narrow("values")
@pytest.mark.parametrize("types", [(Type.F32,), (Type.F16,), MIXED], ids=["F32", "F16", "blocks"])
@pytest.mark.parametrize("architecture", MODELS)
def test_a_model_computes_as_transformers(
    architecture: str, types: tuple[Type, ...], tmp_path: Path
) -> None:
    """Block types are mixed, so that the parts of a layer's projections differ."""
    path = tmp_path / "model.gguf"
    model = a_model(architecture)
    save(path, architecture, model, types)
    check_logits(path, model)


def checkpoint_tensors(folder: Path, architecture: str, model: Any) -> dict[str, Tensor]:
    """The tensors of a saved model by Qwen3.5's names, under which those of Qwen3-Next are read
    too: q, k, v, z and the two rates are apart there."""
    model.save_pretrained(folder)
    source = find_model("--model", str(folder))
    found = {name: source.weights.read(name) for name in source.tensors}
    if architecture != "qwen3next":
        return found
    config = model.config
    group = config.linear_num_value_heads // config.linear_num_key_heads
    for layer in range(3):
        prefix = f"model.layers.{layer}.linear_attn.in_proj_"
        qkv, z = by_key_head(config)
        both = found.pop(f"{prefix}qkvz.weight")
        found |= {f"{prefix}qkv.weight": both[qkv], f"{prefix}z.weight": both[z]}
        rates = found.pop(f"{prefix}ba.weight")
        rows = range(len(rates))
        found[f"{prefix}b.weight"] = rates[[row for row in rows if row // group % 2 == 0]]
        found[f"{prefix}a.weight"] = rates[[row for row in rows if row // group % 2 == 1]]
    return found


@pytest.mark.parametrize("architecture", MODELS)
def test_tensors_are_those_of_the_checkpoint(architecture: str, tmp_path: Path) -> None:
    """Also slices of them, as ranks read them, and the groups of their blocks. So are those of the
    reader with which `magicdec model check` compares ours."""
    path = tmp_path / "model.gguf"
    model = a_model(architecture)
    save(path, architecture, model)
    theirs = checkpoint_tensors(tmp_path, architecture, model)
    ours = find_model("--model", str(path))
    assert ours.tensors.keys() == theirs.keys()
    by_gguf = values_of([path], ours.tensors)
    num_groups = 0
    for name, expected in theirs.items():
        tolerance = 1e-6 if name.endswith("A_log") else 0.0
        found = ours.weights.read(name).float()
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)
        torch.testing.assert_close(by_gguf[name], expected, atol=tolerance, rtol=0)
        part = (slice(5, 40), slice(64, 192))[: 2 - (expected.dim() != 2)]
        assert torch.equal(ours.weights.read(name, part).float(), found[part]), name
        if ours.tensors[name].numbers is not None:
            num_groups += 1
            numbers = ours.weights.read_numbers(name, part).dense()
            assert torch.equal(numbers, expected[part]), name
    assert sum(name.endswith("out_proj.weight") for name in theirs) == 3
    assert num_groups >= 3 * 5, "of linear attention, at least"


@pytest.mark.parametrize("architecture", ["qwen35", "qwen35moe"])
def test_the_config_is_that_of_the_checkpoint(architecture: str, tmp_path: Path) -> None:
    """And is written as one, which transformers reads."""
    path = tmp_path / "model.gguf"
    model = a_model(architecture)
    save(path, architecture, model, (Type.F32,))
    model.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text()) | {"mtp_num_hidden_layers": 0}
    config = load_gguf_config(path)
    unlike = {"name": "", "dtype": "", "bos_token_id": None, "eos_token_ids": ()}
    theirs = parse_hf_config(raw, "")
    assert replace(config, **unlike) == replace(theirs, **unlike)
    fields = to_hf_config(config)
    assert parse_hf_config(fields, config.name) == config
    written = type(model.config).from_dict(fields)
    for key in ("layer_types", "linear_value_head_dim", "head_dim", "num_key_value_heads"):
        assert getattr(written, key) == getattr(model.config, key), key
    found = {key: written.rope_parameters[key] for key in model.config.rope_parameters}
    assert found == model.config.rope_parameters


def test_heads_whose_columns_no_group_holds_are_read_as_numbers(tmp_path: Path) -> None:
    """Value heads of 8 numbers, in another order than the blocks of 32 that they are stored in."""
    path = tmp_path / "model.gguf"
    model = a_model("qwen35", linear_value_head_dim=8)
    save(path, "qwen35", model, (Type.Q8_0,))
    check_logits(path, model)
    tensors = find_model("--model", str(path)).tensors
    assert tensors["model.layers.0.linear_attn.out_proj.weight"].numbers is None
    assert tensors["model.layers.0.linear_attn.in_proj_z.weight"].numbers is not None


def test_as_many_value_heads_as_key_heads_and_a_tied_head(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = a_model("qwen35", linear_num_value_heads=KEY_HEADS, tie_word_embeddings=True)
    save(path, "qwen35", model, (Type.F32,))
    check_logits(path, model)


def test_which_layers_have_linear_attention(tmp_path: Path) -> None:
    """By the list of them, if a file has one, else one of so many has full attention."""
    path = tmp_path / "model.gguf"
    types = ["full_attention", "linear_attention", "full_attention"]
    model = a_model("qwen35", num_hidden_layers=3, layer_types=types)
    recurrent = [layer_type == "linear_attention" for layer_type in types]
    save(path, "qwen35", model, (Type.F32,), attention__recurrent_layers=recurrent)
    check_logits(path, model)
    model = a_model("qwen35", layer_types=["linear_attention", "full_attention"] * 2)
    save(path, "qwen35", model, (Type.F32,), full_attention_interval=2)
    check_logits(path, model)


def test_older_files_of_qwen3_next_have_one_projection(tmp_path: Path) -> None:
    """And those of its converter's `--fuse-gate-up-exps` one tensor for gates and ups."""
    path = tmp_path / "model.gguf"
    model = a_model("qwen3next")
    save(path, "qwen3next", model, (Type.Q8_0,), is_old=True)
    check_logits(path, model)
    fuse_experts(path)
    check_logits(path, model)


def fuse_experts(path: Path) -> None:
    fused: dict[str, Any] = {}
    for layer in range(4):
        names = [f"blk.{layer}.ffn_{part}_exps.weight" for part in ("gate", "up")]
        parts = read_blocks(path, names)
        fused |= dict.fromkeys(names)
        both = np.concatenate(parts, axis=1)
        fused[f"blk.{layer}.ffn_gate_up_exps.weight"] = (both, Type.Q8_0)
    write_with(path, fused)


def read_blocks(path: Path, names: list[str]) -> list[Any]:
    import gguf

    found = {tensor.name: tensor.data.copy() for tensor in gguf.GGUFReader(path).tensors}
    return [found[name] for name in names]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("architecture", MODELS)
def test_matrices_are_held_in_groups_on_every_rank(
    architecture: str, num_ranks: int, tmp_path: Path
) -> None:
    """And counted so. The convolution and the gates of experts are plain."""
    path = tmp_path / "model.gguf"
    save(path, architecture, a_model(architecture), MIXED if num_ranks == 1 else (Type.Q8_0,))
    source = find_model("--model", str(path))
    cpu = torch.device("cpu")
    for shard in [Shard(rank, num_ranks) for rank in range(num_ranks)]:
        model = load_transformer(
            source.config, source.weights, shard, None, torch.float32, cpu, STORED
        )
        layers = {n: m for n, m in model.named_modules() if isinstance(m, GroupedLinear)}
        assert sum(name.endswith("attention.inputs") for name in layers) == 3
        assert sum(name.endswith("attention.output") for name in layers) == 4
        held = [p for name, p in model.named_parameters() if not name.startswith("embedding")]
        planned = weight_bytes(source.config, shard, 4, STORED)
        assert planned == sum(parameter.nbytes for parameter in held)


# --- heads for multi-token prediction ---


def with_head(folder: Path, architecture: str, **changes: Any) -> tuple[Path, Path]:
    """A file with a head, and the directory of the same model."""
    kind, own = MODELS[architecture]
    model = a_model(architecture, vocab_size=STRINGS_SIZE, **changes)
    head = PlainMtpHead(model, kind, **(SIZES | own | changes))
    head.fit()
    path = folder / "model.gguf"
    save(path, architecture, model, (Type.F32,), head, strings=STRINGS)
    checkpoint = folder / "checkpoint"
    model.save_pretrained(checkpoint)
    head.add_to(checkpoint)
    return path, checkpoint


STRINGS = vocabulary_of(trained_bpe("qwen2"), "qwen2") | {"tokenizer.ggml.eos_token_id": 0}
STRINGS_SIZE = len(STRINGS["tokenizer.ggml.tokens"])


@pytest.mark.parametrize("architecture", MODELS)
def test_a_head_is_that_of_the_checkpoint(architecture: str, tmp_path: Path) -> None:
    """Which is behind the layers of the model, and counted among them."""
    path, checkpoint = with_head(tmp_path, architecture)
    sources = [find_model("--model", str(place)) for place in (path, checkpoint)]
    assert sources[0].config.num_layers == 4
    ours, theirs = (find_mtp_head("--draft mtp", source) for source in sources)
    assert ours.weights.tensors.keys() == theirs.tensors.keys()
    for name in theirs.tensors:
        assert torch.equal(ours.weights.read(name), theirs.weights.read(name)), name


@pytest.mark.parametrize("architecture", ["qwen35", "qwen3next"])
def test_drafts_of_a_head_change_no_token(
    architecture: str, tmp_path: Path, command: Command
) -> None:
    path, _ = with_head(tmp_path, architecture)
    out = tmp_path / "out.jsonl"
    words = "--dtype float32 --dataset demo --prefix_len 70 --gen_len 24 --threads 1 --ignore_eos"
    words += " --draft mtp --kv_policy full --B 3 --gamma 3"
    ended = command("run", "--model", path, *words.split(), "--out", out)
    assert ended.code == 0, ended.err
    records = [json.loads(text) for text in out.read_text().splitlines()]
    assert [record["status"] for record in records] == ["verified"] * 2
    assert records[1]["metrics"]["draft_acceptance_rate"] > 0.1


def test_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    path, checkpoint = with_head(tmp_path, "qwen35")
    llm = LLM(str(path), draft="mtp", kv=KVSection("full"), dtype="float32", threads=1)
    check_greedy_tokens(llm, checkpoint, num_new=24)


def test_a_file_without_a_head_drafts_nothing_with_it(tmp_path: Path) -> None:
    """Also one that says that it has a head, which some do whose checkpoints had none."""
    path = tmp_path / "model.gguf"
    model = a_model("qwen35")
    for keys in ({}, {"block_count": 5, "nextn_predict_layers": 1}):
        save(path, "qwen35", model, (Type.F32,), **keys)
        source = find_model("--model", str(path))
        assert source.config.num_layers == 4
        with pytest.raises(ValueError, match=r"has no head for multi-token prediction \(tensors"):
            find_mtp_head("--draft mtp", source)


@pytest.mark.narrow(3)
@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
@pytest.mark.parametrize("form", ["file", "directory"])
def test_a_head_is_converted_with_its_model(
    form: str, quantize: str | None, tmp_path: Path, command: Command
) -> None:
    """Of a GGUF file and of a directory, plain and with its matrices quantised."""
    path, checkpoint = with_head(tmp_path, "qwen35moe")
    source_path = path if form == "file" else checkpoint
    out = tmp_path / "converted" / "model.safetensors"
    words = ["--quantize", quantize] if quantize else []
    done = command("model", "convert", source_path, "--out", out, *words)
    assert done.code == 0, done.err
    heads = [
        find_mtp_head("--draft mtp", find_model("--model", str(place)))
        for place in (source_path, out.parent)
    ]
    assert heads[0].tensors.keys() == heads[1].tensors.keys()
    for name in heads[0].tensors:
        plain, found = (head.weights.read(name).float() for head in heads)
        least_bits = {None: 24, "int8": 7, "int4": 3}[quantize]
        largest = plain.abs().max()
        assert (found - plain).abs().max() <= largest * 2.0**-least_bits, name
        is_matrix = plain.dim() == 2 and not name.endswith("gate.weight")
        assert (heads[1].tensors[name].numbers is not None) == (is_matrix and quantize is not None)
    if form == "file" and quantize == "int4":  # whose tokenizer was written too
        words = (
            "--dtype float32 --dataset demo --prefix_len 40 --gen_len 8 --threads 1 --ignore_eos"
        )
        words += " --draft mtp --kv_policy full --B 2"
        ended = command("run", "--model", out, *words.split(), "--out", tmp_path / "records")
        assert ended.code == 0, ended.err


def test_a_head_that_is_not_that_of_its_config_is_left_out_with_a_word(
    tmp_path: Path, command: Command
) -> None:
    _, checkpoint = with_head(tmp_path, "qwen35")
    config = checkpoint / "config.json"
    config.write_text(config.read_text().replace("{", '{"mtp_num_hidden_layers": 2,', 1))
    out = tmp_path / "converted" / "model.safetensors"
    done = command("model", "convert", checkpoint, "--out", out)
    assert done.code == 0, done.err
    assert "its head for multi-token prediction is not written: " in done.out
    assert "mtp.* are 1 layers for multi-token prediction, but its config says 2" in done.out
    assert not any(name.startswith("mtp.") for name in load_file(out))


# --- comparisons, plans and files that lie ---


@pytest.mark.narrow(2)
@pytest.mark.parametrize("fault", ["none", "order of heads", "decay", "norms"])
def test_a_file_is_compared_with_transformers(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `magicdec model check`, which finds a loader that is wrong."""
    monkeypatch.setenv(checked.VARIABLE, str(tmp_path / "checked"))
    path = tmp_path / "model.gguf"
    save(path, "qwen35moe", a_model("qwen35moe", STRINGS_SIZE), strings=STRINGS)
    plain = Placing.plain
    if fault == "order of heads":
        monkeypatch.setattr(LinearOrders, "values", lambda o, size: np.arange(8 * size))
    elif fault == "decay":
        monkeypatch.setattr(LinearOrders, "parts", as_stored)
    elif fault == "norms":
        monkeypatch.setattr(Placing, "plain", lambda *a: replace(plain(*a), offset=0.0))
    check = check_model(str(path), 1e-9)
    assert check.outcome == (checked.EQUAL if fault == "none" else checked.DIFFERS), check.lines
    assert any("on the dequantised weights as gguf 0." in line for line in check.lines)


@pytest.mark.parametrize("is_wrong", [False, True])
def test_an_older_file_is_compared_with_transformers(
    is_wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(checked.VARIABLE, str(tmp_path / "checked"))
    path = tmp_path / "model.gguf"
    model = a_model("qwen3next", STRINGS_SIZE)
    save(path, "qwen3next", model, (Type.Q8_0,), strings=STRINGS, is_old=True)
    fuse_experts(path)
    if is_wrong:  # as if q, k and v of all heads were one behind the other
        rows = LinearOrders.by_key_head
        monkeypatch.setattr(
            LinearOrders, "by_key_head", lambda o: (np.sort(rows(o)[0]), np.sort(rows(o)[1]))
        )
    check = check_model(str(path), 1e-9)
    assert check.outcome == (checked.DIFFERS if is_wrong else checked.EQUAL), check.lines


LINEAR_PARTS = LinearOrders.parts


def as_stored(orders: LinearOrders, part: str, tensor: GgufTensor) -> dict[str, PlacedTensor]:
    parts = LINEAR_PARTS(orders, part, tensor)
    return {name: replace(placed, is_decay=False) for name, placed in parts.items()}


def test_a_file_is_planned(tmp_path: Path, command: Command) -> None:
    """With the bytes of the checkpoint that it was made from, and with its head."""
    path, checkpoint = with_head(tmp_path, "qwen35")
    words = ["--acceptance", "0.8", "--bandwidth", "0.01", "--flops", "0.001", "--draft", "mtp"]
    tables = []
    for model in (path, checkpoint):
        done = command("plan", "--model", model, "--dtype", "float32", *words)
        assert done.code == 0, done.err
        tables.append([line for line in done.out.splitlines() if line.startswith("\u2502")])
    assert len(tables[0]) >= 9 and tables[0] == tables[1]


CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "value heads": ({"ssm__time_step_rank": 6}, "ssm.inner_size 256 is no multiple of"),
    "no value heads": ({"ssm__time_step_rank": 0}, "linear_num_value_heads 0 is not a positive"),
    "many heads": (
        {"ssm__group_count": 1 << 30, "ssm__time_step_rank": 1 << 30, "ssm__inner_size": 1 << 30},
        "but the keys ssm.* make",
    ),
    "key heads": ({"ssm__group_count": 3}, "is not a multiple of linear_num_key_heads 3"),
    "other key heads": (
        {"ssm__group_count": 4},
        "tensor blk.0.ssm_conv1d.weight has shape (320, 4), but the keys ssm.* make 384 in place",
    ),
    "kernel": (
        {"ssm__conv_kernel": 3},
        "conv1d.weight has shape (320, 1, 4), expected (320, 1, 3)",
    ),
    "all layers of the head": (
        {"nextn_predict_layers": 4},
        "nextn_predict_layers 4 of block_count 4",
    ),
    "sections": (
        {"rope__dimension_sections": [8, 0, 0, 0]},
        "rope.dimension_sections [8, 0, 0, 0] leave pair 1 of 16 rotated dimensions without",
    ),
    "too few layers are typed": (
        {"attention__recurrent_layers": [True, False]},
        "attention.recurrent_layers has no value for each of 4 blocks",
    ),
    "other layers": (
        {"full_attention_interval": 2},
        "model.layers.1.self_attn.q_proj.weight is missing",
    ),
    "a key that is not known": (
        {"attention__scale": 0.5},
        "qwen35.attention.scale 0.5 is not read",
    ),
    "blocks": ({"block_count": 1 << 31}, "block_count 2147483648 is over 10000"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_metadata_that_the_tensors_contradict_are_refused(case: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    keys, message = CONTRADICTIONS[case]
    save(path, "qwen35", a_model("qwen35"), (Type.F32,), **keys)
    assert message in refused(path)


@pytest.mark.parametrize(
    ("name", "hf_name"),
    [
        ("attn_qkv.weight", "in_proj_qkv.weight"),
        ("attn_gate.weight", "in_proj_z.weight"),
        ("ssm_a", "A_log"),
        ("ssm_dt.bias", "dt_bias"),
        ("ssm_conv1d.weight", "conv1d.weight"),
        ("ssm_norm.weight", "norm.weight"),
        ("ssm_out.weight", "out_proj.weight"),
        ("ssm_alpha.weight", "in_proj_a.weight"),
    ],
)
def test_a_tensor_of_linear_attention_that_is_missing_is_named(
    name: str, hf_name: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    save(path, "qwen35", a_model("qwen35"), (Type.F32,))
    write_with(path, {f"blk.1.{name}": None})
    assert f"model.layers.1.linear_attn.{hf_name} is missing, expected shape" in refused(path)


def test_heads_that_lie_are_refused(tmp_path: Path) -> None:
    path, _ = with_head(tmp_path, "qwen35")
    whole = path.read_bytes()
    for keys, message in (
        ({"nextn_predict_layers": 0}, "tensors blk.4.nextn.* are those of a head for multi-token"),
        ({"block_count": 6, "nextn_predict_layers": 1}, "block_count 6 and nextn_predict_layers 1"),
        ({"attention.recurrent_layers": [True] * 5}, "a layer of the head for multi-token"),
    ):
        path.write_bytes(whole)
        write_with(path, {}, **keys)
        assert message in refused(path)
    for changed, message in (
        ({"blk.4.nextn.eh_proj.weight": None}, "mtp.fc.weight is missing"),
        ({"blk.4.attn_q.weight": None}, "mtp.layers.0.self_attn.q_proj.weight is missing"),
        (
            {"blk.4.nextn.embed_tokens.weight": np.zeros((STRINGS_SIZE, 256), np.float32)},
            "mtp.embed_tokens.weight of shape .* is not part of the model",
        ),
    ):
        path.write_bytes(whole)
        write_with(path, changed)
        source = find_model("--model", str(path))  # which runs without its head
        with pytest.raises(ValueError, match=message):
            find_mtp_head("--draft mtp", source)


@pytest.mark.parametrize("architecture", ["kimi-linear", "mamba2", "nemotron_h", "qwen2moe"])
def test_other_architectures_are_refused_by_name(architecture: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, architecture, {"block_count": 4}, {"token_embd.weight": np.zeros((9, 32))})
    assert f"general.architecture {architecture!r} is not read; those that are: llama" in refused(
        path
    )
