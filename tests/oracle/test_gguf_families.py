"""GGUF files of Gemma 3 and of mixtures of experts: logits against transformers on the weights that
`gguf` dequantises, keys that llama.cpp reads, and files that lie about their experts."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import Command
from gguf.constants import GGMLQuantizationType as Type
from test_gguf import (
    HIDDEN,
    KV_HEADS,
    MIXED,
    SIZE,
    VOCAB,
    WIDE,
    check_logits,
    head_sizes,
    reference_model,
    refused,
    save,
    trained_bpe,
    vocabulary_of,
)
from tiny_gguf import random_blocks, write_gguf

from magicdec.bench.gguf_reference import values_of
from magicdec.bench.model_check import check_model
from magicdec.distributed.tensor_parallel import Shard
from magicdec.hardware.costs import weight_bytes
from magicdec.model.checkpoint import checked
from magicdec.model.checkpoint.source import find_model, load_transformer
from magicdec.model.config import ModelConfig
from magicdec.model.families.gguf_config import load_gguf_config
from magicdec.model.families.hf_config import parse_hf_config, to_hf_config
from magicdec.model.linear.grouped import GroupedLinear
from magicdec.names import STORED

NUM_EXPERTS = 4
NUM_USED = 2
WIDTH = 256
WINDOW = 24
SLIDING = "sliding_attention"
FULL = "full_attention"


@dataclass(frozen=True)
class Model:
    """Transformers' class and fields, and what a file says of them beside the sizes."""

    architecture: str
    kind: str
    fields: dict[str, Any]
    keys: dict[str, Any] = field(default_factory=dict)

    def saved(
        self,
        path: Path,
        types: tuple[Type, ...] = MIXED,
        strings: dict[str, Any] | None = None,
        vocab_size: int = VOCAB,
        **more: Any,
    ) -> Any:
        """The model, in a file. `more`: keys of the architecture. `strings`: of its tokenizer."""
        model = reference_model(self.kind, vocab_size=vocab_size, **self.fields)
        save(path, self.architecture, model, types, self.keys | more, strings=strings)
        return model


def gemma(num_layers: int, base: float, scaling: dict[str, Any], **fields: Any) -> dict[str, Any]:
    ropes = {
        SLIDING: {"rope_type": "default", "rope_theta": base},
        FULL: {"rope_type": "default", "rope_theta": 1e6} | scaling,
    }
    return fields | {
        "num_hidden_layers": num_layers,
        "rope_parameters": ropes,
        "query_pre_attn_scalar": SIZE,
        "tie_word_embeddings": True,
        "sliding_window": WINDOW,
    }


YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "truncate": False,
}
GEMMA_KEYS = head_sizes(SIZE) | {"rope.freq_base": 1e6, "attention.sliding_window": WINDOW}
EXPERT_KEYS = {"expert_count": NUM_EXPERTS, "expert_used_count": NUM_USED}
EXPERTS = {"num_experts_per_tok": NUM_USED}
MODELS = {
    # Of seven layers the sixth sees all tokens, without a word of it in the file.
    "gemma3": Model(
        "gemma3",
        "Gemma3",
        gemma(7, 1e4, {"rope_type": "linear", "factor": 8.0}),
        GEMMA_KEYS | {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "gemma3, all keys": Model(
        "gemma3",
        "Gemma3",
        gemma(3, 500.0, {}, layer_types=[SLIDING, FULL, SLIDING]),
        GEMMA_KEYS
        | {"rope.freq_base_swa": 500.0, "attention.sliding_window_pattern": [True, False, True]}
        | {"final_logit_softcapping": 0.0},
    ),
    "qwen3moe": Model(
        "qwen3moe",
        "Qwen3Moe",
        EXPERTS
        | {"num_experts": NUM_EXPERTS, "moe_intermediate_size": WIDTH, "norm_topk_prob": True},
        head_sizes(SIZE) | EXPERT_KEYS | {"expert_feed_forward_length": WIDTH},
    ),
    "gpt-oss": Model(
        "gpt-oss",
        "GptOss",
        EXPERTS
        | {"num_local_experts": NUM_EXPERTS, "sliding_window": WINDOW}
        | {"rope_parameters": YARN},
        head_sizes(SIZE)
        | EXPERT_KEYS
        | {"expert_feed_forward_length": WIDE, "attention.sliding_window": WINDOW}
        | {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0}
        | {"rope.scaling.original_context_length": 32},
    ),
    "mixtral": Model(
        "llama",
        "Mixtral",
        EXPERTS | {"num_local_experts": NUM_EXPERTS, "rope_parameters": {"rope_theta": 1e4}},
        EXPERT_KEYS,
    ),
}
MIXTURES = ("qwen3moe", "mixtral")


@pytest.mark.narrow(3)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_as_transformers_on_the_dequantised_weights(
    name: str, tmp_path: Path
) -> None:
    """Block types are mixed, so that gate, up and down of an expert differ."""
    path = tmp_path / "model.gguf"
    check_logits(path, MODELS[name].saved(path))


@pytest.mark.parametrize("name", MODELS)
def test_tensors_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    """By the names that transformers saves: of norms those less 1, of experts each one's. So are
    those of the reader with which `magicdec model check` compares ours."""
    path = tmp_path / "model.gguf"
    model = MODELS[name].saved(path)
    model.save_pretrained(tmp_path)
    theirs = find_model("--model", str(tmp_path))
    ours = find_model("--model", str(path))
    assert ours.tensors.keys() == theirs.tensors.keys()
    by_gguf = values_of([path], ours.tensors)
    for tensor in ours.tensors:
        expected = theirs.weights.read(tensor)
        assert torch.equal(ours.weights.read(tensor).float(), expected), tensor
        assert torch.equal(by_gguf[tensor], expected), tensor
        if ours.tensors[tensor].numbers is not None:
            part = slice(5, 40), slice(64, 192)
            found = ours.weights.read_numbers(tensor, part).dense()
            assert torch.equal(found, expected[part]), tensor
    unlike = {"name": "", "stored_bytes": None, "plain_share": 0.0, "dtype": ""}
    configs = [replace(source.config, **unlike, bos_token_id=None) for source in (ours, theirs)]
    assert replace(configs[0], eos_token_ids=()) == replace(configs[1], eos_token_ids=())


@pytest.mark.parametrize("name", MODELS)
def test_a_config_of_a_file_is_written_as_one_of_hugging_face(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = MODELS[name].saved(path)
    config = load_gguf_config(path)
    fields = to_hf_config(config)
    assert parse_hf_config(fields, config.name) == config
    theirs = type(model.config).from_dict(fields)
    for key in ("rope_parameters", "layer_types", "num_experts_per_tok", "query_pre_attn_scalar"):
        found, wanted = (getattr(config, key, None) for config in (theirs, model.config))
        if isinstance(wanted, dict):  # beside what follows from it
            found = {name: found[name] for name in wanted}
        assert found == wanted, key


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_a_mixture_is_converted(
    name: str, dtype: str | None, tmp_path: Path, command: Command
) -> None:
    """With the stored numbers, or with weights that transformers reads."""
    path = tmp_path / "model.gguf"
    strings = vocabulary_of(trained_bpe("gpt-2"), "gpt-2")
    model = MODELS[name].saved(path, strings=strings, vocab_size=420)
    out = tmp_path / "converted" / "model.safetensors"
    flags = ["--dtype", dtype] if dtype else []
    done = command("model", "convert", path, "--out", out, *flags)
    assert done.code == 0, done.err
    if dtype is None:
        configs = [find_model("--model", str(file)).config for file in (path, out)]
        assert replace(configs[0], name="") == replace(configs[1], name="")
        return
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out.parent, dtype=torch.float32)
    for parameter, values in model.named_parameters():
        assert torch.equal(loaded.get_parameter(parameter), values), parameter


def test_a_file_of_gemma_is_compared_with_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `magicdec model check`, with a text that is longer than the window."""
    monkeypatch.setenv(checked.VARIABLE, str(tmp_path / "checked"))
    path = tmp_path / "model.gguf"
    strings = vocabulary_of(trained_bpe("gpt-2"), "gpt-2")
    MODELS["gemma3, all keys"].saved(path, strings=strings, vocab_size=420)
    check = check_model(str(path), 1e-9)
    assert check.outcome == checked.EQUAL, check.lines
    assert "on the dequantised weights as gguf 0." in check.lines[10]


def test_experts_are_held_in_groups_on_every_rank(tmp_path: Path) -> None:
    """And counted so. The router is plain, also if a file has it in blocks."""
    path = tmp_path / "model.gguf"
    MODELS["qwen3moe"].saved(path, (Type.Q4_0,))
    source = find_model("--model", str(path))
    router = "model.layers.1.mlp.gate.weight"
    cpu = torch.device("cpu")
    for shard in (Shard(), Shard(0, 2), Shard(1, 2)):
        model = load_transformer(
            source.config, source.weights, shard, None, torch.float32, cpu, STORED
        )
        layers = {n: m for n, m in model.named_modules() if isinstance(m, GroupedLinear)}
        assert sum(".mlp." in name for name in layers) == 2 * 2 * NUM_EXPERTS
        # 4 bits and a scale of 16 bits for 32 of them.
        held = sum(t.nbytes for m in layers.values() for t in m.state_dict().values())
        planned = weight_bytes(source.config, shard, 4, STORED)
        plain = [p for n, p in model.named_parameters() if not n.startswith("embedding")]
        plain_bytes = sum(p.nbytes for p in plain if p.dtype == torch.float32)
        assert planned == held + plain_bytes
    assert source.tensors[router].numbers is None
    blocks = random_blocks((NUM_EXPERTS, HIDDEN), Type.Q8_0, 1)
    write_with(path, {"blk.1.ffn_gate_inp.weight": (blocks, Type.Q8_0)})
    source = find_model("--model", str(path))
    assert source.tensors[router].numbers is None
    assert source.weights.read(router).shape == (NUM_EXPERTS, HIDDEN)


def write_with(path: Path, changed: dict[str, Any], **keys: Any) -> None:
    """Write a file again with other tensors, None for one that is left out, and other keys."""
    import gguf

    from magicdec.model.gguf.file import read_gguf

    reader = gguf.GGUFReader(path)
    tensors = {t.name: (t.data.copy(), t.tensor_type) for t in reader.tensors} | changed
    file = read_gguf(path)
    prefixes = (f"{file.architecture}.", "tokenizer.")
    own = {k: v for k, v in file.metadata.items() if k.startswith(prefixes)}
    own |= {f"{file.architecture}.{key}": value for key, value in keys.items()}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    write_gguf(path, file.architecture, {}, kept, own)


# --- what a file leaves out, and what it may not say ---


def gemma_config(path: Path, num_layers: int = 13, **keys: Any) -> ModelConfig:
    """Of a file without layers, whose config is read all the same."""
    sizes = {
        "block_count": num_layers,
        "context_length": 512,
        "embedding_length": HIDDEN,
        "feed_forward_length": WIDE,
        "attention.head_count": 4,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6,
    }
    embedding = torch.zeros(97, HIDDEN).numpy()
    more = {key.replace("__", "."): value for key, value in keys.items()}
    metadata = sizes | head_sizes(32) | more
    write_gguf(path, "gemma3", metadata, {"token_embd.weight": embedding})
    return load_gguf_config(path)


def test_layers_of_gemma_are_those_of_llama_cpp(tmp_path: Path) -> None:
    """(il % pattern) < pattern - 1 have the window; 0: all have. Their base is 10000 and is not
    scaled; a factor without a type is linear."""
    path = tmp_path / "model.gguf"
    window = {"attention__sliding_window": 16}
    for pattern, full in ((None, {5, 11}), (2, set(range(1, 13, 2))), (1, set(range(13))), (0, {})):
        keys = {} if pattern is None else {"attention__sliding_window_pattern": pattern}
        config = gemma_config(path, **window, **keys, rope__scaling__factor=8.0)
        kinds = config.kinds
        assert {i for i, kind in enumerate(kinds) if kind.window is None} == set(full), pattern
        for kind in kinds:
            rope = config.rope_of(kind)
            known = (1e6, 8.0) if kind.window is None else (1e4, 1.0)
            assert (rope.theta, rope.factor) == known
    assert gemma_config(path).windows == (None,), "a file without a window"
    # Scores are divided by the root of the head size, but in the 27B by that of hidden / heads.
    assert gemma_config(path, **window).query_scale == 1.0
    assert gemma_config(path, 62, **window).query_scale == pytest.approx((32 / 64) ** 0.5)
    assert config.embedding_scale == HIDDEN**0.5 and config.tie_word_embeddings


def test_keys_that_would_change_gemma_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    yarn["rope__scaling__original_context_length"] = 64
    for keys, message in (
        ({"final_logit_softcapping": 30.0}, "gemma3.final_logit_softcapping 30.0 is not read"),
        ({"attention__scale": 0.5}, "gemma3.attention.scale 0.5 is not read"),
        ({"attention__sliding_window": 16} | yarn, "rope type yarn of gemma3 is not read"),
        (
            {"attention__sliding_window": 16, "attention__sliding_window_pattern": [True, False]},
            "attention.sliding_window_pattern has 2 values for 13 layers",
        ),
    ):
        with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}: {message}; [^\n]*$"):
            gemma_config(path, **keys)


def test_keys_that_would_change_a_mixture_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    qwen = MODELS["qwen3moe"]
    qwen.saved(path, (Type.Q4_0,))
    whole = path.read_bytes()
    for key, value, message in (
        ("expert_gating_func", 2, "qwen3moe.expert_gating_func 2 is not read"),
        ("expert_weights_scale", 2.5, "qwen3moe.expert_weights_scale 2.5 is not read"),
        ("expert_weights_norm", False, "qwen3moe.expert_weights_norm False is not read"),
        ("expert_shared_count", 1, "qwen3moe.expert_shared_count 1 is not read"),
        ("expert_group_count", 2, "qwen3moe.expert_group_count 2 is not read"),
        ("leading_dense_block_count", 1, "leading_dense_block_count 1 is not read"),
        ("expert_used_count", 5, "num_experts_per_tok 5 is more than the 4 experts"),
        ("expert_count", 8, "has shape (4, 256, 256), but expert_count 8"),
        ("expert_count", 1 << 31, "has shape (4, 256, 256), but expert_count 2147483648"),
        ("expert_feed_forward_length", 128, "has shape (4, 256, 256), but expert_count 4, the"),
    ):
        path.write_bytes(whole)
        write_with(path, {}, **{key: value})
        assert message in refused(path)
    path.write_bytes(whole)
    for key, value in (("expert_gating_func", 1), ("expert_weights_scale", 1.0)):
        write_with(path, {}, **{key: value})
        assert find_model("--model", str(path)).config.experts is not None
    mixtral = MODELS["mixtral"]
    mixtral.saved(path, (Type.Q4_0,), expert_feed_forward_length=128)
    assert "expert_feed_forward_length 128 is not feed_forward_length 512" in refused(path)


def test_experts_that_are_missing_or_of_another_shape_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    MODELS["qwen3moe"].saved(path, (Type.Q4_0,))
    whole = path.read_bytes()
    one = (random_blocks((3, WIDTH, HIDDEN), Type.Q4_0, 0), Type.Q4_0)
    flat = (random_blocks((WIDTH, HIDDEN), Type.Q4_0, 0), Type.Q4_0)
    gate = "blk.1.ffn_gate_exps.weight"
    dense = "blk.1.ffn_gate.weight"
    name = "model.layers.1.mlp.experts.0.gate_proj.weight is missing"
    for changed, message in (
        ({gate: one}, f"tensor {gate} has shape (3, 256, 256), but expert_count 4, the experts'"),
        ({gate: flat}, f"tensor {gate} has shape (256, 256), but expert_count 4"),
        ({gate: None}, name),
        ({gate: None, dense: flat}, name),
        ({"blk.0.ffn_down_exps.weight": None}, "'blk.0.ffn_down_exps.weight' is missing"),
        ({"blk.0.ffn_gate_inp.weight": None}, "model.layers.0.mlp.gate.weight is missing"),
        ({dense: flat}, "model.layers.1.mlp.gate_proj.weight of shape (256, 256) is not part of"),
    ):
        path.write_bytes(whole)
        write_with(path, changed)
        assert message in refused(path)
    path.write_bytes(whole[:-100])  # the last tensor is the head, which is plain
    assert "tensor output.weight of type F32 ends at" in refused(path)
    cut = whole.index(b"blk.1.ffn_up_exps.weight") + len("blk.1.ffn_up_exps.weight") + 4 + 3 * 8
    path.write_bytes(whole[:cut] + (34).to_bytes(4, "little") + whole[cut + 4 :])
    assert "tensor blk.1.ffn_up_exps.weight has type TQ1_0, which is not read" in refused(path)


def test_an_expert_that_is_cut_off_while_it_is_read_names_its_tensor(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    MODELS["qwen3moe"].saved(path, (Type.Q4_0,))
    source = find_model("--model", str(path))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 97 * HIDDEN * 4 - 8000)
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    message = r"model\.gguf: tensor blk\.1\.ffn_down_exps\.weight is cut off, as the file has"
    with pytest.raises(ValueError, match=message):
        source.weights.read(name)
