"""The tokenizer that a GGUF file describes, in the file formats of the libraries that compute it:
byte-level BPE as a `tokenizers` file, Llama's as a SentencePiece model. Imports no torch.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magicdec.model.gguf.file import GgufFile
from magicdec.model.gguf.named import OTHERWISE
from magicdec.output.files import AGAIN

BYTE_LEVEL = "gpt2"
SENTENCEPIECE = "llama"
# Types of tokens, which are SentencePiece's too.
CONTROL = 3
USER_DEFINED = 4
SPACE = "\u2581"  # how SentencePiece writes a space

CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = rf"{CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def llama3(digits: str, letters: str = r"\p{L}", no_letters: str = r"\p{L}") -> str:
    return (
        rf"(?i:{CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{digits}"
        rf"| ?[^\s{no_letters}\p{{N}}]+[\r\n]*|{SPACES}"
    )


def cased(digits: str, ending: str) -> str:
    """Words by the case of their letters, as o200k and Mistral's tekken split them."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{start}[{UPPER}]*[{LOWER}]+{ending}|{start}[{UPPER}]+[{LOWER}]*{ending}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
    )


GROUPED_DIGITS = r"\p{N}{1,3}"
DIGIT = r"\p{N}"
MARKED = r"\p{L}\p{M}"
# By `tokenizer.ggml.pre`: the patterns that split a text, one after the other.
SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "dbrx", "smaug-bpe"),
        (llama3(GROUPED_DIGITS),),
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan"), (llama3(DIGIT),)),
    "qwen35": (llama3(DIGIT, MARKED, MARKED),),
    **dict.fromkeys(
        ("gpt-4o", "llama4", "minimax-m2"), (cased(GROUPED_DIGITS, f"(?i:{CONTRACTIONS})?"),)
    ),
    "tekken": (cased(DIGIT, ""),),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (DIGIT, GPT2)
    ),
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "jais"), (GPT2,)),
}
# Of these, tokens that are whole words of a split text are taken before any merge, and prompts
# begin with BOS in files that do not say (llama.cpp's src/llama-vocab.cpp, as what follows).
LLAMA3_LIKE = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "tekken")
# SentencePiece's ids in files that do not say.
DEFAULT_IDS = {"bos": 1, "eos": 2, "unknown": 0}
# The keys of a tokenizer_config.json, and what stands for them in those of a file.
TOKEN_KEYS = {
    **{"bos_token": "bos", "eos_token": "eos"},
    **{"unk_token": "unknown", "pad_token": "padding"},
}
# The keys of tokens that end a text, and the names of tokens that do, whatever a file says of them.
ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
END_NAMES = {
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "[e~[",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
}
# The names of those that only end a text where no token has their key.
NAMES_BY_KEY = {
    "fim_pad": {"<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"},
    "fim_rep": {"<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"},
    "fim_sep": {"<|file_sep|>"},
}


@dataclass(frozen=True)
class Vocabulary:
    """`types` and `scores` are by token; `scores` of SentencePiece, `merges` of BPE alone. `before`
    and `after` are the ids around a text."""

    path: Path
    model: str
    splits: str
    tokens: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float]
    merges: Sequence[str]
    has_space_prefix: bool
    unknown_id: int | None
    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def pieces(self) -> list[str]:
        """The tokens as the libraries have them: llama.cpp's converter writes the spaces of
        SentencePiece's user-defined ones out, which it looks for before it escapes a text."""
        if self.model == BYTE_LEVEL:
            return list(self.tokens)
        return [
            token.replace(" ", SPACE) if kind == USER_DEFINED else token
            for token, kind in zip(self.tokens, self.types, strict=True)
        ]


def read_vocabulary(file: GgufFile) -> Vocabulary:
    """Raises ValueError, one line with the file, for a tokenizer that is not certainly computed."""

    def get(name: str, default: Any = None) -> Any:
        return file.metadata.get(f"tokenizer.ggml.{name}", default)

    model = get("model")
    if model not in (BYTE_LEVEL, SENTENCEPIECE):
        raise ValueError(
            f"{file.path}: tokenizer.ggml.model {model!r} is not read; "
            f"{BYTE_LEVEL} and {SENTENCEPIECE} are; {OTHERWISE}"
        )
    tokens = get("tokens", [])
    count = len(tokens)
    found = Vocabulary(
        file.path,
        model,
        str(get("pre", "")),
        tokens,
        get("token_type", [1] * count),
        get("scores", [0.0] * count),
        get("merges", []),
        bool(get("add_space_prefix", model == SENTENCEPIECE)),
        get("unknown_token_id"),
        *(ids_around(file, end, count) for end in ("bos", "eos")),
    )
    if not tokens or len(found.types) != count or len(found.scores) != count:
        raise ValueError(
            f"{file.path}: its tokenizer has {count} tokens, {len(found.types)} types and "
            f"{len(found.scores)} scores; {AGAIN}"
        )
    pieces = found.pieces
    if len(set(pieces)) != count:
        [(twice, _)] = Counter(pieces).most_common(1)
        raise ValueError(f"{file.path}: its tokenizer has {twice!r} twice; {AGAIN}")
    if model == BYTE_LEVEL and found.splits not in SPLITS:
        raise ValueError(
            f"{file.path}: tokenizer.ggml.pre {found.splits!r} is not known; known are "
            f"{', '.join(SPLITS)}; {OTHERWISE}"
        )
    return found


def named_id(file: GgufFile, name: str) -> int | None:
    """The id of a special token by its name in the keys, as "bos"."""
    default = DEFAULT_IDS.get(name) if model_of(file) == SENTENCEPIECE else None
    found: int | None = file.metadata.get(f"tokenizer.ggml.{name}_token_id", default)
    return found


def model_of(file: GgufFile) -> Any:
    return file.metadata.get("tokenizer.ggml.model")


def ids_around(file: GgufFile, end: str, count: int) -> tuple[int, ...]:
    """BOS before a text, or EOS behind it, if the file or llama.cpp's default for its tokenizer
    puts it there. Raises ValueError if that is none of the `count` tokens."""
    splits = file.metadata.get("tokenizer.ggml.pre")
    has_bos = model_of(file) == SENTENCEPIECE or splits in LLAMA3_LIKE
    key = f"tokenizer.ggml.add_{end}_token"
    if not file.metadata.get(key, end == "bos" and has_bos):
        return ()
    found = named_id(file, end)
    if not isinstance(found, int) or not 0 <= found < count:
        is_stated = key in file.metadata
        why = f"{key} is true" if is_stated else f"prompts of {splits or SENTENCEPIECE} begin so"
        raise ValueError(
            f"{file.path}: tokenizer.ggml.{end}_token_id {found} is none of its {count} tokens, "
            f"and {why}; {OTHERWISE}"
        )
    return (found,)


def tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """What a file says of special tokens and its chat template, as a tokenizer_config.json."""
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    config: dict[str, Any] = {"chat_template": file.metadata.get("tokenizer.chat_template")}
    for ours, theirs in TOKEN_KEYS.items():
        i = named_id(file, theirs)
        is_token = isinstance(i, int) and 0 <= i < len(tokens)
        config[ours] = tokens[i] if is_token else None
    return config


def tokenizer_files(file: GgufFile) -> dict[str, bytes]:
    """The files of a directory that has the tokenizer, by name."""
    vocabulary = read_vocabulary(file)
    config = tokenizer_config(file)
    if vocabulary.model == SENTENCEPIECE:
        # The class of transformers that puts a space in front of a text, or none.
        has_prefix = vocabulary.has_space_prefix
        config |= {
            "tokenizer_class": "LlamaTokenizer" if has_prefix else "GemmaTokenizer",
            "add_bos_token": bool(vocabulary.before),
            "add_eos_token": bool(vocabulary.after),
            "added_tokens_decoder": {str(t.pop("id")): t for t in added_tokens(vocabulary)},
            "legacy": False,
        }
        contents = {"tokenizer.model": sentencepiece_model(vocabulary)}
    else:
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        contents = {"tokenizer.json": json.dumps(tokenizers_file(vocabulary)).encode()}
    return contents | {"tokenizer_config.json": json.dumps(config, indent=1).encode()}


def end_ids(file: GgufFile) -> list[int]:
    """The tokens that end a text, those that are stated first."""
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    stated = {key: found for key in ENDS if (found := named_id(file, key)) is not None}
    names = END_NAMES.union(*(NAMES_BY_KEY[key] for key in NAMES_BY_KEY if key not in stated))
    named = {token: i for i, token in enumerate(tokens) if token in names}
    no_ends = set[str]()
    # Of gpt-oss and Solar it ends a message, after which a text goes on; of Gemma 4 it is a word.
    if named.keys() & {"<|return|>", "<|flush|>"} and named.keys() & {"<|call|>", "<|calls|>"}:
        no_ends.add("<|end|>")
    if "<|tool_response>" in named:
        no_ends.add("</s>")
    without = {named[name] for name in no_ends & named.keys()}
    ids = dict.fromkeys((*stated.values(), *named.values()))
    return [i for i in ids if i not in without]


def added_tokens(vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """The tokens that are looked for in a text before all others, as a `tokenizer.json` has them;
    SentencePiece's user-defined ones where spaces have been replaced."""
    return [
        {
            "id": i,
            "content": piece,
            "special": kind == CONTROL,
            "normalized": kind == USER_DEFINED and vocabulary.model == SENTENCEPIECE,
            **dict.fromkeys(("single_word", "lstrip", "rstrip"), False),
        }
        for i, (piece, kind) in enumerate(zip(vocabulary.pieces, vocabulary.types, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]


def tokenizers_file(vocabulary: Vocabulary) -> dict[str, Any]:
    """The content of a `tokenizer.json` of byte-level BPE."""
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    merges = [merge.split(" ") for merge in vocabulary.merges]
    wrong = next((m for m in merges if len(m) != 2 or "".join(m) not in ids), None)
    if wrong is not None:
        raise ValueError(f"{vocabulary.path}: its tokenizer merges {wrong} to no token; {AGAIN}")
    splits = [
        {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
        for split in SPLITS[vocabulary.splits]
    ]
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": False}
    byte_level["add_prefix_space"] = vocabulary.has_space_prefix
    added_ids = (*vocabulary.before, *vocabulary.after)
    parts = [{"SpecialToken": {"id": vocabulary.tokens[i], "type_id": 0}} for i in added_ids]
    parts.insert(len(vocabulary.before), {"Sequence": {"id": "A", "type_id": 0}})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens(vocabulary),
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": parts,
            "pair": [*parts, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {
                vocabulary.tokens[i]: {
                    "id": vocabulary.tokens[i],
                    "ids": [i],
                    "tokens": [vocabulary.tokens[i]],
                }
                for i in added_ids
            },
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            **dict.fromkeys(("dropout", "unk_token"), None),
            **dict.fromkeys(("continuing_subword_prefix", "end_of_word_suffix"), None),
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": vocabulary.splits in LLAMA3_LIKE,
            "vocab": ids,
            "merges": merges,
        },
    }


def sentencepiece_model(vocabulary: Vocabulary) -> bytes:
    """The content of a `tokenizer.model`: SentencePiece's ModelProto, BPE with byte fallback."""
    pieces = b"".join(
        _message(1, _message(1, piece.encode()), _float(2, score), _number(3, kind))
        for piece, score, kind in zip(
            vocabulary.pieces, vocabulary.scores, vocabulary.types, strict=True
        )
    )
    unknown = 0 if vocabulary.unknown_id is None else vocabulary.unknown_id
    bpe = 2
    trainer = _message(
        2,
        _number(3, bpe),
        _number(4, len(vocabulary.tokens)),
        _number(35, 1),
        _number(40, unknown),
    )
    # Text is kept as it is, but for the space in front of it.
    normalizer = _message(
        3,
        _message(1, b"identity"),
        _number(3, vocabulary.has_space_prefix),
        _number(4, 0),
        _number(5, 1),
    )
    return pieces + trainer + normalizer


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)


def _message(field: int, *parts: bytes) -> bytes:
    data = b"".join(parts)
    return _varint(field << 3 | 2) + _varint(len(data)) + data
