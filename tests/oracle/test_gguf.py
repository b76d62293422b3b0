"""GGUF files: every block type against the `gguf` package, whole models against transformers on the
weights that `gguf` dequantises, tokenizers against the libraries' own, and files that lie."""

import io
import json
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
import torch
import transformers
from conftest import Command, make_runner
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize
from tiny_gguf import name_of, parts_of, permuted, random_blocks, write_gguf
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import ByteLevel

from magicdec.config.machine import Machine
from magicdec.config.resolve import resolve
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import ModelSection, WorkloadSection
from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.checkpoint.quantization import low_bit_copy
from magicdec.model.checkpoint.source import find_model, load_transformer
from magicdec.model.families.gguf_architectures import ARCHITECTURES, MIXTRAL
from magicdec.model.gguf.blocks import BLOCK_TYPES
from magicdec.model.gguf.file import read_gguf
from magicdec.model.linear.grouped import GroupedLinear
from magicdec.model.linear.packed import PackedLinear
from magicdec.model.tokenizer import load_tokenizer
from magicdec.names import STORED
from magicdec.runner.forward_batch import ForwardBatch
from magicdec.setup.loading import load_kind
from magicdec.setup.model_checks import check_fits, check_saves
from magicdec.setup.model_plan import Kinds

HIDDEN = 256
HEADS = 4
KV_HEADS = 2
SIZE = 64
WIDE = 512
LAYERS = 2
VOCAB = 97


@pytest.mark.parametrize("filling", [None, 0, 255, 127, 128])
@pytest.mark.parametrize("type_id", list(BLOCK_TYPES))
def test_blocks_are_dequantised_to_the_bit(type_id: int, filling: int | None) -> None:
    """Random bytes, infinite and NaN scales among them, and blocks of one byte."""
    kind = BLOCK_TYPES[type_id]
    shape = (40, 3 * kind.num_bytes)
    raw = np.random.default_rng(type_id).integers(0, 256, shape, dtype=np.uint8)
    if filling is not None:
        raw = np.full(shape, filling, np.uint8)
    with np.errstate(all="ignore"):
        expected = dequantize(raw, Type(type_id))
        groups = kind.groups(raw)
        found = groups.dense()
    assert gguf.GGML_QUANT_SIZES[Type(type_id)] == (kind.block, kind.num_bytes)
    assert kind.name == Type(type_id).name
    assert kind.least <= groups.numbers.min()
    assert groups.numbers.max() < kind.least + 2**kind.bits
    assert (groups.minimum is not None) == kind.has_minimum
    assert groups.scale.shape == (40, found.shape[1] // kind.group)
    is_nan = np.isnan(expected)
    assert np.array_equal(is_nan, np.isnan(found))
    assert np.array_equal(expected.view(np.uint32)[~is_nan], found.view(np.uint32)[~is_nan])
    narrowest = np.float16 if kind.scale == "float16" else np.float32
    with np.errstate(all="ignore"):
        kept = groups.scale.astype(narrowest).astype(np.float32)
    assert np.array_equal(kept, groups.scale, equal_nan=True)


def head_sizes(size: int) -> dict[str, int]:
    """What a file says of heads whose size is not the hidden size / their number."""
    lengths = dict.fromkeys(("attention.key_length", "attention.value_length"), size)
    return {"rope.dimension_count": size} | lengths


# By architecture: transformers' classes, and what its file says beside the sizes.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope.dimension_count": SIZE}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"attention.key_length": SIZE, "attention.value_length": SIZE}),
}
CONFIGS = {"Gemma3": "Gemma3TextConfig"}
BIASES = {"attention_bias": True, "mlp_bias": True}
PLAIN = (Type.F32, Type.F16, Type.BF16)
PLAIN_PARTS = ("token_embd", "output", "ffn_gate_inp")
MIXED = (Type.Q4_K, Type.Q6_K, Type.Q5_0, Type.Q8_0, Type.Q3_K, Type.Q4_1, Type.IQ4_XS)


def reference_model(kind: str, **fields: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, CONFIGS.get(kind, f"{kind}Config"))(
        vocab_size=fields.pop("vocab_size", VOCAB),
        hidden_size=HIDDEN,
        intermediate_size=WIDE,
        num_hidden_layers=fields.pop("num_hidden_layers", LAYERS),
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=SIZE,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        **fields,
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def save(
    path: Path,
    architecture: str,
    model: Any,
    types: tuple[Type, ...] = MIXED,
    more: dict[str, Any] | None = None,
    divisors: Any = None,
    strings: dict[str, Any] | None = None,
) -> None:
    """Write a model's file with random blocks in its matrices, and give the model the weights that
    these stand for."""
    stored: dict[str, Any] = {}
    parameters = [(n, p.data) for n, p in model.named_parameters()]
    parts = [part for parameter in parameters for part in parts_of(*parameter, architecture)]
    for i, (name, values) in enumerate(parts):
        ours = name_of(architecture, name)
        order = torch.arange(len(values))
        part = ours.split(".")[-2]
        if architecture == "llama" and part in ("attn_q", "attn_k"):
            order = permuted(order, HEADS if part == "attn_q" else KV_HEADS)
        if values.dim() == 1 or ours.endswith("bias") or part in PLAIN_PARTS:
            offset = float(architecture == "gemma3" and name.endswith("norm.weight"))
            sums = values + offset
            values.copy_(sums - offset)
            stored[ours] = sums[order].numpy()
            continue
        kind = types[i % len(types)]
        if kind in PLAIN:
            blocks = quantize(values.numpy(), kind)
        else:
            blocks = random_blocks(tuple(values.shape), kind, i)
        values.copy_(torch.from_numpy(dequantize(blocks, kind).copy()))
        stored[ours] = (blocks[order.numpy()], kind)
    metadata = {
        "block_count": len(model.model.layers),
        "context_length": 256,
        "embedding_length": HIDDEN,
        "feed_forward_length": WIDE,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    if divisors is not None:
        stored["rope_freqs.weight"] = divisors
    _, own = MODELS.get(architecture, ("", {}))
    write_gguf(path, architecture, metadata | own | (more or {}), stored, strings)


KINDS = {
    "as numbers": Kinds("float32", "float32"),
    "in groups, by torch": Kinds("float32", STORED),
    "in groups, packed": Kinds("float32", STORED, "packed"),
}


def check_logits(path: Path, model: Any) -> None:
    """With the weights as numbers and in groups; in chunks of a prompt, and token by token."""
    text = torch.randint(0, VOCAB, (1, 200), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(text).logits
    source = find_model("--model", str(path))
    for name, kinds in KINDS.items():
        if kinds.weights == STORED and not source.has_groups:
            continue
        loaded = load_kind(source, Shard(), kinds, torch.device("cpu"))
        runner = make_runner(loaded, 1, 200)
        runner.allocate(0)
        first = 0
        for chunk in text.split([120, 64, 14, 1, 1], dim=1):
            with torch.inference_mode():
                found = runner.forward(ForwardBatch(chunk, [0], num_outputs=chunk.shape[1]))
            last = first + chunk.shape[1]
            difference = (found - expected[:, first:last]).abs().max()
            assert difference <= 1e-4 * expected.abs().max(), name
            first = last
        if kinds.weights == STORED:
            inner = [m for m in loaded.modules() if isinstance(m, GroupedLinear | PackedLinear)]
            assert len(inner) >= 4 * LAYERS, "the matrices are not widened"


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [("llama", {}), ("llama", BIASES), ("qwen2", {}), ("qwen3", {})],
    ids=["llama", "llama with biases", "qwen2", "qwen3"],
)
def test_a_model_computes_as_transformers_on_the_dequantised_weights(
    architecture: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    """Types of blocks are mixed, so that q, k and v differ."""
    model = reference_model(MODELS[architecture][0], **fields)
    path = tmp_path / "model.gguf"
    save(path, architecture, model)
    check_logits(path, model)


@pytest.mark.parametrize(
    "kind", [Type.F32, Type.F16, Type.BF16, Type.MXFP4, Type.Q2_K, Type.IQ4_NL]
)
def test_each_type_of_a_matrix_is_read(kind: Type, tmp_path: Path) -> None:
    model = reference_model("Llama", tie_word_embeddings=True)
    path = tmp_path / "model.gguf"
    save(path, "llama", model, (kind,))
    check_logits(path, model)
    source = find_model("--model", str(path))
    assert source.config.tie_word_embeddings and source.config.norm_eps == 1e-5


def test_llama_3_has_divisors_in_place_of_a_scaling(tmp_path: Path) -> None:
    """Factor 32 as of Llama 3.2, and divisors of another scaling, which are refused."""
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    model = reference_model("Llama", rope_parameters=rope)
    plain = 5e5 ** (-torch.arange(0, SIZE, 2, dtype=torch.float64) / SIZE)
    divisors = (plain / model.model.rotary_emb.inv_freq.double()).float().numpy()
    path = tmp_path / "model.gguf"
    save(path, "llama", model, more={"rope.freq_base": 5e5}, divisors=divisors)
    assert find_model("--model", str(path)).config.rope.factor == 32.0
    check_logits(path, model)
    divisors[SIZE // 4] *= 1.01
    save(path, "llama", model, more={"rope.freq_base": 5e5}, divisors=divisors)
    with pytest.raises(ValueError, match=r"model\.gguf: rope_freqs.weight are not those"):
        find_model("--model", str(path))


def test_yarn_and_linear_scalings_are_read(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    yarn["original_max_position_embeddings"] = 64
    keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    keys["rope.scaling.original_context_length"] = 64
    linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    path = tmp_path / "model.gguf"
    for rope, more in (
        (yarn, keys),
        (linear, {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}),
    ):
        model = reference_model("Qwen2", rope_parameters=rope)
        save(path, "qwen2", model, more=more)
        check_logits(path, model)


def test_slices_are_those_of_the_whole_tensor(tmp_path: Path) -> None:
    """Of permuted rows and biases too, within a head and across heads. Mixtral's are Llama's."""
    known = {
        architecture.name
        for architecture in (*ARCHITECTURES.values(), MIXTRAL)
        if architecture.is_permuted
    }
    assert known == {"LlamaForCausalLM", "MixtralForCausalLM"}, "others need a case of their own"
    path = tmp_path / "model.gguf"
    model = reference_model("Llama", **BIASES)
    save(path, "llama", model)
    weights = find_model("--model", str(path)).weights
    for name, parameter in model.named_parameters():
        assert torch.equal(weights.read(name).float(), parameter), name
        for rows in (slice(0, 7), slice(60, 70), slice(1, len(parameter) - 3)):
            if parameter.dim() == 1:
                assert torch.equal(weights.read(name, (rows,)), parameter[rows]), (name, rows)
                continue
            found = weights.read(name, (rows, slice(32, 96)))
            assert torch.equal(found.float(), parameter[rows, 32:96]), (name, rows)
            if weights.tensors[name].numbers is not None:
                numbers = weights.read_numbers(name, (rows, slice(32, 96)))
                assert torch.equal(numbers.dense(), parameter[rows, 32:96]), (name, rows)


# --- tokenizers ---

TEXTS = (
    "The year 1984, 3 clocks: it's 13.5%!\n\n  def f(x):\n\treturn x**2  # ok\r\n",
    "Ça va? Größe 12345678 \u2013 \u4f60\u597d, \u0939\u093f\u0928\u094d\u0926\u0940!",
    "\U0001f600\u200d\U0001f680 \u2028 \u00a0x",
    " leading, trailing   ",
    "THEY'LL don't <|end|> I'M",
)
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = {
    "gpt-2": [ByteLevel(add_prefix_space=False)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), ByteLevel(add_prefix_space=False)],
    "llama-bpe": [
        pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated"),
        ByteLevel(add_prefix_space=False, use_regex=False),
    ],
    "qwen2": [
        pre_tokenizers.Split(Regex(LLAMA3_SPLIT.replace("{1,3}", "")), "isolated"),
        ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}


def trained_bpe(pre: str) -> Tokenizer:
    """A byte-level BPE of a few merges, as a `tokenizer.json` would have it."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(PRE_TOKENIZERS[pre])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


def vocabulary_of(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token == "<|end|>" else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
    }


@pytest.mark.parametrize("pre", list(PRE_TOKENIZERS))
def test_byte_level_bpe_is_that_of_the_library(pre: str, tmp_path: Path) -> None:
    expected = trained_bpe(pre)
    expected.encode_special_tokens = True
    path = tmp_path / "tokenizer.gguf"
    strings = vocabulary_of(expected, pre) | {"tokenizer.ggml.bos_token_id": 0}
    write_gguf(path, "llama", {}, {}, strings)
    found = load_tokenizer(path)
    for text in TEXTS:
        ids = found.encode(text)
        assert ids == expected.encode(text, add_special_tokens=False).ids, text
        assert found.decode(ids) == text
    assert found.decode([0]) == "", "a special token is no text"


def test_an_unknown_pre_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.gguf"
    strings = vocabulary_of(trained_bpe("gpt-2"), "default")
    write_gguf(path, "llama", {}, {}, strings)
    with pytest.raises(ValueError, match=r"tokenizer.ggml.pre 'default' is not known; known are"):
        load_tokenizer(path)
    write_gguf(path, "llama", {}, {}, strings | {"tokenizer.ggml.model": "t5"})
    with pytest.raises(ValueError, match="'t5' is not read; gpt2 and llama are; choose another"):
        load_tokenizer(path)


@pytest.mark.parametrize("has_prefix", [True, False])
def test_a_sentencepiece_vocabulary_is_that_of_the_library(
    has_prefix: bool, tmp_path: Path
) -> None:
    """Trained here; some bytes of the texts have no piece but that of the byte. Runs of spaces are
    user-defined, as Gemma's are, and llama.cpp's converter writes them as bare spaces."""
    user_defined = ["<tool>", *("\u2581" * count for count in (2, 3, 4, 7)), "a\u2581b"]
    stream = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXTS[0], TEXTS[2], TEXTS[3]] * 20),
        model_writer=stream,
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=has_prefix,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=user_defined,
        minloglevel=2,
    )
    expected = sentencepiece.SentencePieceProcessor(model_proto=stream.getvalue())
    ids = range(expected.get_piece_size())
    kinds = [
        (expected.is_unknown, 2),
        (expected.is_control, 3),
        (expected.is_byte, 6),
        (lambda i: expected.id_to_piece(i) in user_defined, 4),
    ]
    types = [next((kind for is_kind, kind in kinds if is_kind(i)), 1) for i in ids]
    pieces = [expected.id_to_piece(i) for i in ids]
    strings = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [
            piece.replace("\u2581", " ") if kind == 4 else piece
            for piece, kind in zip(pieces, types, strict=True)
        ],
        "tokenizer.ggml.scores": [expected.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.unknown_token_id": expected.unk_id(),
        "tokenizer.ggml.add_space_prefix": has_prefix,
    }
    path = tmp_path / "tokenizer.gguf"
    write_gguf(path, "llama", {}, {}, strings)
    found = load_tokenizer(path)
    spaced = [f"a{' ' * count}b\n{' ' * count}c  <tool>" for count in range(12)]
    for text in (*TEXTS, "a <tool> b", *spaced):
        assert found.encode(text) == expected.encode(text), text
        assert found.decode(found.encode(text)) == expected.decode(expected.encode(text))
    assert found.pieces == dict(enumerate(pieces))
    strings["tokenizer.ggml.tokens"][-1] = strings["tokenizer.ggml.tokens"][-2]
    write_gguf(path, "llama", {}, {}, strings)
    with pytest.raises(ValueError, match=re.escape(f"its tokenizer has {pieces[-2]!r} twice")):
        load_tokenizer(path)


# --- files that lie ---


def small_file(path: Path) -> bytes:
    save(path, "llama", reference_model("Llama"))
    return path.read_bytes()


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    whole = small_file(tmp_path / "whole.gguf")
    path = tmp_path / "cut.gguf"
    header = read_gguf(tmp_path / "whole.gguf").tensors
    start = min(tensor.offset for tensor in header.values())
    for length in (*range(0, start, 97), start, len(whole) - 64, len(whole) // 2):
        path.write_bytes(whole[:length])
        message = refused(path)
        if length >= start:  # within the data of a tensor, the first that is not whole
            name, kind = next(
                (name, BLOCK_TYPES[tensor.type_id].name if tensor.type_id in BLOCK_TYPES else "F32")
                for name, tensor in header.items()
                if tensor.offset + tensor.num_rows * tensor.row_bytes > length
            )
            assert f"tensor {name} of type {kind} ends at" in message


def refused(path: Path) -> str:
    """The line that refuses a file, which it begins with; a way out ends it."""
    with pytest.raises(ValueError) as caught:
        find_model("--model", str(path))
    line = str(caught.value)
    ways_out = "fetch or convert the checkpoint again|choose another GGUF file"
    assert re.fullmatch(rf"{re.escape(str(path))}: .*; ({ways_out}).*", line), line
    assert line.count(str(path)) == 1, "the file once"
    return line


def test_a_file_that_shrinks_or_goes_away_is_refused_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    whole = small_file(path)
    source = find_model("--model", str(path))
    path.write_bytes(whole[: len(whole) // 2])
    message = rf"{path}: tensor {{}}.*; fetch or convert the checkpoint again"
    with pytest.raises(ValueError, match=message.format("output.weight is cut off")):
        source.weights.read("lm_head.weight")
    path.unlink()
    with pytest.raises(ValueError, match=message.format("output_norm.weight cannot be read")):
        source.weights.read("model.norm.weight")


def patched(path: Path, whole: bytes, at: int, kind: str, value: Any) -> None:
    data = bytearray(whole)
    struct.pack_into(kind, data, at, value)
    path.write_bytes(data)


def test_counts_offsets_and_types_that_lie_are_refused(tmp_path: Path) -> None:
    whole = small_file(tmp_path / "whole.gguf")
    path = tmp_path / "lies.gguf"
    info = whole.index(b"token_embd.weight") + len("token_embd.weight")
    offset = info + 4 + 16 + 4
    lies = [
        (0, "<I", 7, "does not begin with GGUF"),
        (4, "<I", 1, "version 1; little-endian versions 2 and 3 are read"),
        (4, ">I", 3, "it is big-endian"),
        (8, "<Q", 1 << 60, "it says that it has 1152921504606846976 tensors"),
        (16, "<Q", 1 << 40, "it says that it has 1099511627776 values"),
        (24, "<Q", 1 << 62, "it says that it has 4611686018427387904 bytes of a text"),
        (info, "<I", 9, "has 9 dimensions"),
        (info + 4, "<Q", 1 << 50, "ends at"),
        (info + 20, "<I", 34, "type TQ1_0, which is not read; types that are: F32"),
        (info + 20, "<I", 4, "type number 4, which is retired"),
        (offset, "<Q", 1 << 50, "ends at"),
        (offset, "<Q", 3, "is not aligned to 32"),
        (offset, "<Q", 32, "token_embd.weight is at .*, but the one before it ends at"),
        (info + 20, "<I", 1, "attn_q.weight is at .*, but the one before it ends at"),
    ]
    for at, kind, value, message in lies:
        patched(path, whole, at, kind, value)
        assert re.search(message, refused(path))


def test_keys_that_would_change_the_computation_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = reference_model("Llama")
    for key, value, message in (
        ("block_count", 1 << 31, "block_count 2147483648 is over 10000"),
        ("attention.sliding_window", 128, "llama.attention.sliding_window 128 is not read"),
        ("expert_count", 8, "'blk.0.ffn_down_exps.weight' is missing"),
        ("rope.scaling.type", "longrope", "rope.scaling.type longrope is not read"),
        ("rope.dimension_count", 32, "32 is not the size 64 of a head"),
        ("vocab_size", 98, "vocab_size 98 is not the 97 rows"),
    ):
        more = {key: value} | ({"rope.scaling.factor": 2.0} if "scaling" in key else {})
        save(path, "llama", model, more=more)
        assert message in refused(path)
    save(path, "llama", model)
    reader = gguf.GGUFReader(path)
    keys = {k: v for k, v in read_gguf(path).metadata.items() if k.startswith("llama.")}
    for without in ("token_embd.weight", "blk.1.attn_k.weight"):
        tensors = {t.name: (t.data, t.tensor_type) for t in reader.tensors if t.name != without}
        write_gguf(path := tmp_path / "without.gguf", "llama", {}, tensors, keys)
        theirs = "'token_embd.weight'" if "embd" in without else "layers.1.self_attn.k_proj.weight"
        assert f"{theirs} is missing" in refused(path)
    write_gguf(path, "mamba", {"block_count": 2}, {})
    assert "general.architecture 'mamba' is not read; those that are: llama, " in refused(path)


def test_a_split_file_is_read_and_a_missing_part_is_named(tmp_path: Path) -> None:
    model = reference_model("Llama")
    save(tmp_path / "whole.gguf", "llama", model)
    reader = gguf.GGUFReader(tmp_path / "whole.gguf")
    tensors = {t.name: (t.data, t.tensor_type) for t in reader.tensors}
    names = list(tensors)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    keys = read_gguf(tmp_path / "whole.gguf").metadata
    own = {k: v for k, v in keys.items() if k.startswith("llama.")}
    for number, half in enumerate(halves):
        strings = {"split.no": number, "split.count": 2, "split.tensors.count": len(names)}
        path = tmp_path / f"model-{number + 1:05d}-of-00002.gguf"
        part = {name: tensors[name] for name in half}
        write_gguf(path, "llama", {}, part, (own if number == 0 else {}) | strings)
    first = tmp_path / "model-00001-of-00002.gguf"
    check_logits(first, model)
    (tmp_path / "model-00002-of-00002.gguf").rename(tmp_path / "away")
    read_gguf.__globals__["_read_known"].cache_clear()
    with pytest.raises(
        ValueError, match=r"its part model-00002-of-00002.gguf is not beside it; put"
    ):
        find_model("--model", str(first))


def test_ranks_that_would_cut_a_group_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q4_0 has groups of 32. 3 ranks share the 17 of 544 units; of 4 heads of size 8, the first of
    3 ranks has one, which is less than a group of 16."""
    monkeypatch.setitem(globals(), "WIDE", 544)
    path = tmp_path / "model.gguf"
    workload = WorkloadSection(prefix_len=100, gen_len=20)

    def check(weights: str, num_ranks: int) -> None:
        source = find_model("--model", str(path))
        section = ModelSection(str(path), "bfloat16", target_dtype=weights)
        config = resolve(RunConfig(model=section, workload=workload), Machine(num_ranks))
        check_fits(config, source, num_ranks)

    save(path, "llama", reference_model("Llama"), (Type.Q4_0,))
    check(STORED, 3)
    monkeypatch.setitem(globals(), "SIZE", 8)
    monkeypatch.setitem(MODELS, "llama", ("Llama", head_sizes(8)))
    path = tmp_path / "small_heads.gguf"
    save(path, "llama", reference_model("Llama"), (Type.Q4_0,))
    for weights, num_ranks in ((STORED, 1), (STORED, 2), ("bfloat16", 3)):
        check(weights, num_ranks)
    message = (
        r"--model small_heads: 3 ranks cannot share the 32 inputs of model\.layers\.0\.self_attn\."
        r"o_proj\.weight in groups of 16 or more: rank 0 has inputs 0 to 8; choose "
        r"--target_dtype bfloat16, or fewer ranks$"
    )
    with pytest.raises(ValueError, match=message):
        check(STORED, 3)


@pytest.mark.parametrize("low_bit", ["int8", "int4"])
@pytest.mark.parametrize(
    ("types", "vocab_size", "dtype", "saves"),
    [
        ((Type.Q4_0,), 97, "bfloat16", ()),
        ((Type.Q4_0,), 97, "float32", ()),
        ((Type.Q4_0,), 480, "bfloat16", ("int4",)),  # for the head, which is plain
        ((Type.Q4_0,), 1200, "float32", ("int4", "int8")),
        ((Type.Q8_0,), 97, "bfloat16", ("int4",)),
        ((Type.Q4_0, Type.F32), 97, "bfloat16", ("int4", "int8")),
    ],
)
def test_a_copy_saves_if_it_holds_fewer_bytes_than_the_model(
    types: tuple[Type, ...],
    vocab_size: int,
    dtype: str,
    saves: tuple[str, ...],
    low_bit: str,
    tmp_path: Path,
) -> None:
    """Counted in the matrices of the loaded models, of which the head is one."""
    path = tmp_path / "model.gguf"
    save(path, "llama", reference_model("Llama", vocab_size=vocab_size), types)
    source = find_model("--model", str(path))
    model = load_kind(source, Shard(), Kinds(dtype, STORED), torch.device("cpu"))
    held, copied = (matrix_bytes(kept) for kept in (model, low_bit_copy(model, low_bit, False)))
    assert (copied <= 0.85 * held) == (low_bit in saves), "the case is what it says"
    if low_bit in saves:
        check_saves(low_bit, "it", source.config, dtype)
        return
    plain = load_kind(source, Shard(), Kinds("float32", "float32"), torch.device("cpu"))
    bits = 8 * held / (matrix_bytes(plain) / 4)
    message = f"--draft_weights {low_bit}: the weights of it have {bits:.1f} bits, so that"
    with pytest.raises(ValueError, match=f"{message}.*choose same, or leave it out"):
        check_saves(low_bit, "it", source.config, dtype)


def matrix_bytes(model: torch.nn.Module) -> int:
    """Bytes of all linear layers."""
    layers = [
        module for module in model.modules() if isinstance(module, GroupedLinear | torch.nn.Linear)
    ]
    tensors = [tensor for layer in layers for tensor in layer.state_dict().values()]
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def test_a_file_is_planned_for_and_drafts_with_its_own_weights(
    tmp_path: Path, command: Command
) -> None:
    """`same` drafts with the model's own weights, which save the KV cache alone."""
    path = tmp_path / "model.gguf"
    strings = vocabulary_of(trained_bpe("gpt-2"), "gpt-2")
    model = reference_model("Llama", vocab_size=420)
    save(path, "llama", model, (Type.Q4_0,), strings=strings)
    config = find_model("--model", str(path)).config
    assert (config.stored_bytes, config.plain_share, config.head_bytes) == (0.5625, 0.0, None)
    rates = ("--bandwidth", 40, "--flops", 0.4, "--acceptance", 0.8)
    done = command("plan", "--model", path, *rates, "--B", 1, "--prefix_len", 100)
    assert done.code == 0 and "in stored on 1 rank" in done.out, done
    flags = ("--model", path, "--device", "cpu", "--prefix_len", 64, "--gen_len", 8, "--B", 1)
    done = command("run", *flags, "--draft", "self", "--draft_weights", "same")
    assert done.code == 0, done.err


@pytest.mark.parametrize(("kind", "fields"), [("Qwen2", {}), ("Llama", BIASES)])
def test_a_file_is_converted_to_a_directory_of_hugging_face(
    kind: str, fields: dict[str, Any], tmp_path: Path, command: Command
) -> None:
    """Which transformers reads: the weights, the config and the ids are the file's."""
    path = tmp_path / "model.gguf"
    tokenizer = trained_bpe("qwen2")
    model = reference_model(kind, vocab_size=420, **fields)
    save(path, kind.lower(), model, strings=vocabulary_of(tokenizer, "qwen2"))
    out = tmp_path / "converted" / "model.safetensors"
    done = command("model", "convert", path, "--out", out, "--dtype", "float32")
    assert done.code == 0, done.err
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out.parent, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name
    ids = torch.arange(50)[None]
    with torch.inference_mode():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert load_tokenizer(out.parent).encode(TEXTS[0]) == load_tokenizer(path).encode(TEXTS[0])
    source = find_model("--model", str(out.parent))
    assert replace(source.config, name="") == replace(
        find_model("--model", str(path)).config, name="", stored_bytes=None, plain_share=0.0
    )


@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
@pytest.mark.parametrize("out", ["model.safetensors", "model.pth"])
def test_a_converted_file_keeps_the_numbers(
    kind: str, out: str, tmp_path: Path, command: Command
) -> None:
    """To the bit, on ranks too: of all types, permuted rows and biases, and a head that is the
    embedding."""
    path = tmp_path / "model.gguf"
    strings = vocabulary_of(trained_bpe("gpt-2"), "gpt-2")
    fields = {"tie_word_embeddings": True} if kind == "Qwen2" else BIASES
    model = reference_model(kind, vocab_size=420, **fields)
    save(path, kind.lower(), model, strings=strings)
    converted = tmp_path / "converted" / out
    done = command("model", "convert", path, "--out", converted)
    assert done.code == 0, done.err
    sources = [find_model("--model", str(file)) for file in (path, converted)]
    configs = [replace(source.config, name="") for source in sources]
    assert configs[0] == configs[1] and configs[0].stored_bytes is not None
    for shard in (Shard(), Shard(0, 2), Shard(1, 2)):
        theirs, ours = (
            load_transformer(
                s.config, s.weights, shard, None, torch.float32, torch.device("cpu"), STORED
            )
            for s in sources
        )
        formats = [getattr(module, "format", None) for module in theirs.modules()]
        assert len(set(formats)) > 2
        assert formats == [getattr(module, "format", None) for module in ours.modules()]
        expected = theirs.state_dict()
        found = ours.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
