"""Rank file: tiktoken's form of a byte-level BPE vocabulary, one line "base64-token rank" for each
token. Meta's releases of Llama 3 have one as `tokenizer.model`."""

from __future__ import annotations

import base64
import binascii
import re
from pathlib import Path

# As in Meta's `llama3/tokenizer.py`. Llama 3.1 names some of the reserved tokens; their ids stay.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(4)),
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|reserved_special_token_4|>",
    "<|eot_id|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(5, 251)),
)
FIRST_LINE = re.compile(rb"[!-~]+ +[0-9]+\r?(\n|$)")
RANK = re.compile(rb"[0-9]{1,9}")


def is_rank_file(data: bytes) -> bool:
    """Whether a `tokenizer.model` is a rank file; one of SentencePiece begins with a newline."""
    return FIRST_LINE.match(data) is not None


def parse_ranks(path: Path, data: bytes) -> dict[bytes, int]:
    """The rank of each token. Raises ValueError, in one line that names the file, unless the ranks
    are 0, 1, 2, ... once each, of different tokens, with one for each byte."""
    ranks: dict[bytes, int] = {}
    lines: dict[int, int] = {}  # the line of each rank
    for number, line in enumerate(data.splitlines(), 1):
        place = f"{path}: line {number}"
        word, _, rank_word = line.partition(b" ")
        if not RANK.fullmatch(rank_word.strip()):
            raise ValueError(f"{place} is not a token in base64 and its rank")
        rank = int(rank_word)
        try:
            token = base64.b64decode(word, validate=True)
        except binascii.Error as error:
            raise ValueError(f"{place} has a token that is not base64 ({error})") from error
        if not token or token in ranks:
            raise ValueError(f"{place} has {'a token that came before' if token else 'no token'}")
        if rank in lines:
            raise ValueError(f"{place} has the rank {rank} of line {lines[rank]}")
        ranks[token] = rank
        lines[rank] = number
    missing = next((rank for rank in range(len(ranks)) if rank not in lines), None)
    if missing is not None:
        raise ValueError(f"{path}: has no token of rank {missing}; ranks go up to {max(lines)}")
    byte = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if byte is not None:
        raise ValueError(f"{path}: has no token of the byte 0x{byte:02x}; no text can be encoded")
    return ranks


def byte_characters() -> dict[int, str]:
    """The printable character that stands for each byte in a piece, as in `tokenizer.json`."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + i) for i, byte in enumerate(others)
    }


def pieces_of(ranks: dict[bytes, int]) -> dict[int, str]:
    """The piece of each id: of tokens as in the `tokenizer.json` of the same vocabulary, then of
    special tokens."""
    characters = byte_characters()
    pieces = {rank: "".join(map(characters.__getitem__, token)) for token, rank in ranks.items()}
    return pieces | {len(ranks) + i: name for i, name in enumerate(SPECIAL_TOKENS)}
