"""What a prompt begins with and what ends an answer. A directory, a converted copy and a GGUF file
of one model make the ids of a call of transformers' tokenizer, whatever the configs beside it say;
where `llama-cpp-python` is installed, GGUF files are compared with llama.cpp too."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from conftest import ROOT, Command
from gguf.constants import GGMLQuantizationType as Type
from test_gguf import TEXTS, reference_model, save, trained_bpe, vocabulary_of
from tiny_gguf import write_gguf
from tokenizers import processors

from magicdec.config.run_config import RunConfig
from magicdec.config.sections import ModelSection, ParallelSection, WorkloadSection
from magicdec.distributed.groups import Launch
from magicdec.model.checkpoint.source import find_model
from magicdec.model.families.gguf_config import load_gguf_config
from magicdec.model.gguf.vocabulary import SPLITS
from magicdec.model.tokenizer import load_tokenizer
from magicdec.setup.prepare import prepare

BOS = "<|end|>"  # the special token of the vocabulary that is trained for tests, with id 0
TEMPLATE = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
BYTES = processors.ByteLevel(trim_offsets=False)
LLAMA3 = processors.Sequence([BYTES, TEMPLATE])
DEMO = ROOT / "magicdec" / "demo" / "target" / "tokenizer.model"
# Pre-tokenizers before which llama.cpp puts BOS in a file that says nothing (src/llama-vocab.cpp).
WITH_BOS = {"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "tekken"}
# Of files without layers, whose vocabulary is read all the same.
SIZES = {
    "block_count": 1,
    "context_length": 64,
    "embedding_length": 8,
    "feed_forward_length": 8,
    "attention.head_count": 1,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
EMBEDDING = np.zeros((480, 8), np.float32)


@pytest.fixture(scope="module")
def model() -> Any:
    return reference_model("Llama", vocab_size=420, num_hidden_layers=1)


@pytest.fixture(scope="module")
def weights(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("weights")
    model.save_pretrained(directory)
    return directory


def prompt_of(path: Path, text: str) -> list[int]:
    source = find_model("--model", str(path))
    assert source.tokenizer_path is not None
    tokenizer = load_tokenizer(source.tokenizer_path)
    bos = tokenizer.bos_of(source.config.bos_token_id)
    return [*([] if bos is None else [bos]), *tokenizer.encode(text)]


def edit(file: Path, **fields: Any) -> None:
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(known | fields))


def check_directory(directory: Path, texts: tuple[str, ...] = TEXTS) -> list[int]:
    """The ids of the last text, in this directory and by transformers' tokenizer of it."""
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    for text in texts:
        expected = theirs(text, split_special_tokens=True).input_ids
        assert prompt_of(directory, text) == expected, text
    return list(expected)


def converted(path: Path, command: Command) -> Path:
    out = path.parent / f"converted_{path.stem}" / "model.safetensors"
    done = command("model", "convert", path, "--out", out, "--dtype", "float32")
    assert done.code == 0, done.err
    return out.parent


@pytest.mark.parametrize(
    ("processor", "stated", "config_bos"),
    [
        (None, {"add_bos_token": False}, 0),  # Qwen's config.json names a BOS
        (BYTES, {}, 0),
        (TEMPLATE, {}, None),
        (LLAMA3, {"add_bos_token": False}, 5),
        (None, {"add_bos_token": True}, 0),
    ],
    ids=["nothing", "bytes", "template", "llama 3", "only a config"],
)
def test_a_directory_and_its_copy_make_the_ids_of_transformers(
    processor: Any,
    stated: dict[str, Any],
    config_bos: int | None,
    weights: Path,
    tmp_path: Path,
    command: Command,
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(weights, directory)
    tokenizer = trained_bpe("qwen2")
    if processor is not None:
        tokenizer.post_processor = processor
    tokenizer.save(str(directory / "tokenizer.json"))
    edit(directory / "config.json", bos_token_id=config_bos)
    more = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS}
    edit(directory / "tokenizer_config.json", **more, **stated)
    ids = check_directory(directory)
    assert (ids[0] == 0) == (processor in (TEMPLATE, LLAMA3)), "the case is what it says"
    copy = converted(directory, command)
    assert check_directory(copy) == ids
    config = RunConfig(
        model=ModelSection(str(copy), "float32", "torch"),
        parallel=ParallelSection(device="cpu"),
        workload=WorkloadSection(batch_size=1, prefix_len=20, gen_len=4, num_batches=1),
    )
    [prompt] = prepare(config, Launch(0, 1, 0, 1)).workload.prompts
    assert (prompt[0] == 0) == (ids[0] == 0), "a run's prompts too"


@pytest.mark.parametrize("stated", [None, True, False])
@pytest.mark.parametrize("pre", ["llama-bpe", "lfm2", "tekken", "qwen2"])
def test_a_gguf_file_and_its_copy_make_the_ids_of_transformers(
    pre: str, stated: bool | None, model: Any, tmp_path: Path, command: Command
) -> None:
    strings = vocabulary_of(trained_bpe("qwen2"), pre) | {"tokenizer.ggml.bos_token_id": 0}
    if stated is not None:
        strings["tokenizer.ggml.add_bos_token"] = stated
    path = tmp_path / "model.gguf"
    save(path, "llama", model, (Type.F32,), strings=strings)
    ids = check_directory(converted(path, command))
    assert prompt_of(path, TEXTS[-1]) == ids
    assert (ids[0] == 0) == (pre in WITH_BOS if stated is None else stated)


def written(path: Path, pre: str, **more: Any) -> Path:
    """A file without layers, with a vocabulary of BPE."""
    strings = vocabulary_of(trained_bpe("qwen2"), pre)
    named = {f"tokenizer.ggml.{key}": value for key, value in more.items()}
    write_gguf(path, "llama", SIZES, {}, strings | named)
    return path


def test_each_pre_tokenizer_has_llama_cpps_default(tmp_path: Path) -> None:
    for pre in SPLITS:
        path = written(tmp_path / "model.gguf", pre, bos_token_id=3)
        found = load_tokenizer(path)
        assert found.bos_of(None) == (3 if pre in WITH_BOS else None), pre
    for more, message in (
        ({}, r"tokenizer.ggml.bos_token_id None is none of its 367 tokens, and prompts of tekken"),
        ({"bos_token_id": 367}, r"bos_token_id 367 is none of its 367 tokens"),
        ({"bos_token_id": 0, "add_eos_token": True}, r"eos_token_id None is none of .*_token is t"),
    ):
        with pytest.raises(ValueError, match=message):
            load_tokenizer(written(path, "tekken", **more))


def test_more_than_one_token_around_a_text_is_refused(tmp_path: Path) -> None:
    """Only where a prompt would have it: a chat template has its own words."""
    tokenizer = trained_bpe("qwen2")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A {BOS}", special_tokens=[(BOS, 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    gguf_path = written(tmp_path / "m.gguf", "tekken", bos_token_id=0, eos_token_id=0)
    gguf_path = written(gguf_path, "tekken", bos_token_id=0, eos_token_id=0, add_eos_token=True)
    for path in (tmp_path, gguf_path):
        with pytest.raises(ValueError, match=r"puts '<\|end\|>' before a text and '<\|end\|>' beh"):
            load_tokenizer(path).bos_of(None)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, 7777)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="its post_processor adds the id 7777, which is no token"):
        load_tokenizer(tmp_path)


# --- SentencePiece ---

OBJECT = {"__type": "AddedToken", "content": "</s>", "special": True}
# By name: tokenizer_config.json, special_tokens_map.json, BOS.
PIECES: dict[str, tuple[dict[str, Any], dict[str, Any], int | None]] = {
    "said": ({"add_bos_token": True, "bos_token": "<s>"}, {}, 1),
    "an object": ({"add_bos_token": True, "bos_token": OBJECT}, {}, 2),
    "in the map": ({"add_bos_token": True, "bos_token": "</s>"}, {"bos_token": "<s>"}, 1),
    "not in the map": (
        {"add_bos_token": True, "bos_token": "</s>", "added_tokens_decoder": {}},
        {"bos_token": "<s>"},
        2,
    ),
    "not": ({"add_bos_token": False, "bos_token": "<s>"}, {}, None),
    "null": ({"add_bos_token": True, "bos_token": None}, {}, None),
}


@pytest.mark.parametrize("name", PIECES)
def test_a_directory_with_a_sentencepiece_model_says_in_its_configs(
    name: str, tmp_path: Path
) -> None:
    config, names, bos = PIECES[name]
    shutil.copy(DEMO, tmp_path)
    edit(tmp_path / "special_tokens_map.json", **names)
    edit(tmp_path / "tokenizer_config.json", tokenizer_class="LlamaTokenizer", **config)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "bos_token_id": 9}')
    found = load_tokenizer(tmp_path)
    assert found.bos_of(9) == bos
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "Once upon a time, 1984."
    assert theirs(text).input_ids == [*([] if bos is None else [bos]), *found.encode(text)]


def test_without_a_word_of_it_a_sentencepiece_model_leaves_it_to_the_config(tmp_path: Path) -> None:
    shutil.copy(DEMO, tmp_path)
    assert load_tokenizer(tmp_path).bos_of(9) == 9 and load_tokenizer(tmp_path).bos_of(None) is None
    file = tmp_path / "tokenizer_config.json"
    for fields, message in (
        ({}, "add_bos_token is true, and no bos_token"),
        ({"bos_token": "<bos>"}, "and bos_token '<bos>' is no token of tokenizer.model; name the"),
    ):
        edit(file, add_bos_token=True, **fields)
        with pytest.raises(ValueError, match=rf"{file}: .*{message}"):
            load_tokenizer(tmp_path)
    file.write_text("[")
    with pytest.raises(ValueError, match=rf"{file}: cannot be read \(not valid JSON"):
        load_tokenizer(tmp_path)


def spaced_vocabulary(has_prefix: bool) -> dict[str, Any]:
    """Of Gemma's kind, with runs of spaces that are tokens, as llama.cpp's converter writes it."""
    known = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    known += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    space = "\u2581"
    known += [(space, -1.0, 1), ("a", -2.0, 1), ("b", -3.0, 1), (f"{space}b", -0.5, 1)]
    known += [("   ", -1000.0, 4), ("<tag>", -1000.0, 4)]
    tokens, scores, types = (list(column) for column in zip(*known, strict=True))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.add_space_prefix": has_prefix,
    }


def test_a_sentencepiece_gguf_and_its_copy_make_the_ids_of_transformers(
    tmp_path: Path, command: Command
) -> None:
    """BOS is token 1 of a file that does not say. The right ids of the first text are known."""
    path = tmp_path / "model.gguf"
    strings = spaced_vocabulary(has_prefix=False)
    model = reference_model("Llama", vocab_size=265, num_hidden_layers=1)
    save(path, "llama", model, (Type.F32,), strings=strings)
    assert load_gguf_config(path).eos_token_ids == (2,)
    directory = converted(path, command)
    texts = ("a   b", "   b a", "<tag> b <tag>b", "      a\n   b")
    for text in texts:
        assert prompt_of(directory, text) == prompt_of(path, text)
    assert prompt_of(path, texts[0]) == [1, 260, 263, 261]
    check_directory(directory, texts)


# --- what ends an answer ---

# The names at which llama.cpp ends (src/llama-vocab.cpp).
ENDS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<|eom_id|>",
    "</s>",
    "<eos>",
    "[e~[",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<end_of_utterance>",
    "<turn|>",
    "<|tool_response>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<|fim_pad|>",
    "<|fim_repo|>",
    "<|file_sep|>",
    "<fim-pad>",
    "<fim_pad>",
    "<PAD>",
    "[PAD]",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
)


def with_names(
    path: Path, names: list[str], kind: int = 3, pre: str = "qwen2", **more: Any
) -> list[int]:
    """Write a vocabulary that ends with these tokens; their ids."""
    strings = vocabulary_of(trained_bpe("qwen2"), pre)
    tokens = [token.replace(BOS, "<|start|>") for token in strings["tokenizer.ggml.tokens"]]
    first = len(tokens)
    strings["tokenizer.ggml.tokens"] = tokens + names
    strings["tokenizer.ggml.token_type"] += [kind] * len(names)
    named = {f"tokenizer.ggml.{key}": value for key, value in more.items()}
    embedding = EMBEDDING[: len(tokens) + len(names)]
    write_gguf(path, "llama", SIZES, {"token_embd.weight": embedding}, strings | named)
    return list(range(first, first + len(names)))


@pytest.mark.parametrize("name", ENDS)
def test_an_answer_ends_at_tokens_of_these_names(name: str, tmp_path: Path) -> None:
    """Beside the stated one, whatever their type is."""
    for kind in (1, 3, 4):
        path = tmp_path / "model.gguf"
        [end] = with_names(path, [name], kind, eos_token_id=7)
        assert load_gguf_config(path).eos_token_ids == (7, end)


# Vocabularies with several of them, and which end an answer.
BESIDE = (
    (["<|end|>", "<|return|>", "<|call|>"], {"<|return|>", "<|call|>"}),
    (["<|end|>", "<|flush|>", "<|calls|>"], {"<|flush|>", "<|calls|>"}),
    (["<|end|>", "<|return|>"], {"<|end|>", "<|return|>"}),
    (["<|end|>", "<|call|>"], {"<|end|>", "<|call|>"}),
    (["</s>", "<|tool_response>", "<eos>"], {"<|tool_response>", "<eos>"}),
    (["<|im_start|>", "<|im_end|>"], {"<|im_end|>"}),
)


@pytest.mark.parametrize(("names", "ends"), BESIDE)
def test_names_that_end_nothing_beside_others(
    names: list[str], ends: set[str], tmp_path: Path
) -> None:
    """<|end|> ends a message of gpt-oss and Solar, </s> is a word of Gemma 4."""
    path = tmp_path / "model.gguf"
    ids = with_names(path, names, eos_token_id=7)
    known = {i for i, name in zip(ids, names, strict=True) if name in ends}
    assert set(load_gguf_config(path).eos_token_ids) == {7} | known


def test_a_stated_token_is_the_only_one_of_its_kind(tmp_path: Path) -> None:
    """Of those that end a file, not an answer."""
    path = tmp_path / "model.gguf"
    with_names(path, ["<|fim_pad|>", "<|repo_name|>"], fim_pad_token_id=7, fim_rep_token_id=9)
    assert set(load_gguf_config(path).eos_token_ids) == {7, 9}


# --- llama.cpp itself ---


def check_llama_cpp(path: Path, texts: tuple[str, ...]) -> None:
    """The ids of texts, and which tokens end an answer."""
    lib = pytest.importorskip("llama_cpp")
    model = lib.Llama(str(path), vocab_only=True, verbose=False)
    found = load_tokenizer(path)
    bos = found.bos_of(None)
    for text in texts:
        expected = model.tokenize(text.encode(), add_bos=True, special=False)
        ours = [*([] if bos is None else [bos]), *found.encode(text)]
        assert ours == expected, (path.name, text)
    vocabulary = lib.llama_model_get_vocab(model.model)
    ids = range(lib.llama_vocab_n_tokens(vocabulary))
    ends = {i for i in ids if lib.llama_vocab_is_eog(vocabulary, i)}
    model.close()
    config = load_gguf_config(path)
    assert set(config.eos_token_ids) == ends, path.name


@pytest.mark.parametrize("stated", [None, True, False])
def test_llama_cpp_makes_the_same_ids(stated: bool | None, tmp_path: Path) -> None:
    flag = {} if stated is None else {"add_bos_token": stated}
    for pre in SPLITS:
        path = tmp_path / f"{pre}.gguf"
        with_names(path, ["<|im_end|>"], pre=pre, bos_token_id=3, eos_token_id=0, **flag)
        check_llama_cpp(path, TEXTS[:1])
    for has_prefix in (False, True):
        path = tmp_path / f"{has_prefix}.gguf"
        named = {f"tokenizer.ggml.{key}": value for key, value in flag.items()}
        strings = spaced_vocabulary(has_prefix) | named
        write_gguf(path, "llama", SIZES, {"token_embd.weight": EMBEDDING[:265]}, strings)
        # With a space in front of a text, llama.cpp puts one behind a user-defined token too,
        # unlike SentencePiece.
        texts = ("a b ab", "ba  b")
        spaced = ("a   b", "      b   a", "<tag> a")
        check_llama_cpp(path, texts if has_prefix else texts + spaced)


def test_llama_cpp_ends_at_the_same_tokens(tmp_path: Path) -> None:
    for number, names in enumerate((*([name] for name in ENDS), *(names for names, *_ in BESIDE))):
        path = tmp_path / f"{number}.gguf"
        with_names(path, names, eos_token_id=7, bos_token_id=3)
        check_llama_cpp(path, ())
