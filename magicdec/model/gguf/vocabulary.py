"""The tokenizer that a GGUF file describes, in the file formats of the libraries that compute it:
byte-level BPE as a `tokenizers` file, Llama's as a SentencePiece model. Imports no torch.
"""

from __future__ import annotations

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
# Tokens that are whole words of a split text are taken before any merge.
WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken")


@dataclass(frozen=True)
class Vocabulary:
    """`types` and `scores` are by token; `scores` of SentencePiece, `merges` of BPE alone."""

    path: Path
    model: str
    splits: str
    tokens: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float]
    merges: Sequence[str]
    has_space_prefix: bool
    unknown_id: int | None

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


def tokenizers_file(vocabulary: Vocabulary) -> dict[str, Any]:
    """The content of a `tokenizer.json` of byte-level BPE."""
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    merges = [merge.split(" ") for merge in vocabulary.merges]
    wrong = next((m for m in merges if len(m) != 2 or "".join(m) not in ids), None)
    if wrong is not None:
        raise ValueError(f"{vocabulary.path}: its tokenizer merges {wrong} to no token; {AGAIN}")
    added = [
        {
            "id": i,
            "content": vocabulary.tokens[i],
            "special": kind == CONTROL,
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        }
        for i, kind in enumerate(vocabulary.types)
        if kind in (CONTROL, USER_DEFINED)
    ]
    splits = [
        {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False}
        for each in SPLITS[vocabulary.splits]
    ]
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": False}
    byte_level["add_prefix_space"] = vocabulary.has_space_prefix
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            **dict.fromkeys(("dropout", "unk_token"), None),
            **dict.fromkeys(("continuing_subword_prefix", "end_of_word_suffix"), None),
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": vocabulary.splits in WORDS_FIRST,
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
        *(2, _number(3, bpe), _number(4, len(vocabulary.tokens)), _number(35, 1)),
        _number(40, unknown),
    )
    # Text is kept as it is, but for the space in front of it.
    normalizer = _message(
        *(3, _message(1, b"identity"), _number(3, vocabulary.has_space_prefix)),
        *(_number(4, 0), _number(5, 1)),
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
