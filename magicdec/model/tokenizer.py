"""Tokenizers: text to token ids and back, for each of the three file formats a checkpoint may have.

Owns the choice of the format from the files in a directory. All formats behave alike: the text is
encoded as plain text and no special tokens are added. A tokenizer library is imported only when a
file of its format is opened.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

# Llama 3's published split pattern and its 256 special tokens, in the order of their ids.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPECIAL_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(4)),
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|reserved_special_token_4|>",
    "<|eot_id|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(5, 251)),
)
# The pattern's look-ahead overflows the regex engine's stack on about a million consecutive blanks.
# Llama 3's reference tokenizer splits runs of blanks at this length.
LONGEST_BLANK_RUN = re.compile(r"\s{25000}(?=\s)")
RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\r?(?:\n|\Z)")


@dataclass(frozen=True)
class Tokenizer:
    """The vocabulary of a file, and a library that encodes and decodes by it. Special tokens are
    ids only: no text encodes to one."""

    path: Path
    pieces: dict[int, str]
    encode_plain: Callable[[str], list[int]]
    decode_known: Callable[[list[int]], str]

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id (a model's own vocabulary may be padded beyond it)."""
        return max(self.pieces, default=-1) + 1

    def encode(self, text: str) -> list[int]:
        """Ids of the whole text, without BOS or EOS; a special token's name is plain text."""
        try:
            return list(self.encode_plain(text))
        except Exception as error:  # the libraries raise nothing narrower
            raise ValueError(f"{self.path}: the text cannot be encoded ({error})") from error

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; special tokens give none. Raises ValueError for an id that has no piece:
        one of the libraries would skip it, one raise and one panic."""
        last = self.vocab_size - 1
        for i in ids:
            if not 0 <= i <= last:
                raise ValueError(f"{self.path}: token id {i} has no piece; ids are 0 to {last}")
        return self.decode_known(list(ids))

    def vocabulary_hash(self) -> str:
        """sha256 (hex) of the id -> piece map: equal for two formats of one vocabulary."""
        listing = json.dumps(sorted(self.pieces.items()), separators=(",", ":"))
        return hashlib.sha256(listing.encode("ascii")).hexdigest()


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a checkpoint directory, from the first file of LOADERS that it holds.

    Raises ValueError when the directory holds none of them, or when the first one found cannot be
    read or is corrupt. The next file is not tried, because it might hold another vocabulary.
    """
    for name, load in LOADERS.items():
        path = directory / name
        if path.is_file():
            try:
                data = path.read_bytes()
            except OSError as error:
                raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
            return load(path, data)
    state = "holds no tokenizer" if directory.is_dir() else "is not a directory"
    raise ValueError(f"{directory}: {state}; looked for {', '.join(LOADERS)}")


def load_json(path: Path, data: bytes) -> Tokenizer:
    """A `tokenizer.json`, run by the `tokenizers` library."""
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path}: is not a `tokenizers` file ({error})") from error
    # The file may ask for truncation or padding, and by default the name of a special token in the
    # text is encoded as that token. A book must be encoded whole and as plain text.
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True

    def encode(text: str) -> list[int]:
        # The "fast" call skips character offsets, which at least halves the time for a whole book.
        ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    pieces = {i: piece for piece, i in backend.get_vocab(with_added_tokens=True).items()}
    return Tokenizer(path, pieces, encode, backend.decode)


def load_model_file(path: Path, data: bytes) -> Tokenizer:
    """Two formats are named `tokenizer.model`: Llama 3's rank file, which the first line tells, and
    SentencePiece's (Llama 2, Mistral)."""
    if RANK_LINE.match(data):
        return load_ranks(path, data)
    import sentencepiece

    try:
        # Given an empty byte string, the library returns an empty processor instead of raising.
        backend = sentencepiece.SentencePieceProcessor(model_proto=data) if data else None
    except RuntimeError:
        backend = None
    if backend is None:
        raise ValueError(f"{path}: is neither a SentencePiece model nor a tiktoken rank file")
    pieces = {i: backend.id_to_piece(i) for i in range(backend.get_piece_size())}
    return Tokenizer(path, pieces, backend.encode_as_ids, backend.decode)


def load_ranks(path: Path, data: bytes) -> Tokenizer:
    """A rank file. Its 256 special tokens, which are not in the file, have the ids after the last
    rank, and give no text."""
    import tiktoken

    ranks = _parse_ranks(path, data)
    specials = {name: i for i, name in enumerate(LLAMA3_SPECIAL_TOKENS, len(ranks))}
    backend = tiktoken.Encoding(
        name="llama3", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=specials
    )

    def encode(text: str) -> list[int]:
        cuts = [0, *(run.end() for run in LONGEST_BLANK_RUN.finditer(text)), len(text)]
        parts = [text[a:b] for a, b in itertools.pairwise(cuts)]
        return [i for part in parts for i in backend.encode_ordinary(part)]

    def decode(ids: list[int]) -> str:
        return backend.decode([i for i in ids if i < len(ranks)])

    # Pieces are written in the byte alphabet of `tokenizer.json`, so that both formats of one
    # vocabulary have the same hash.
    alphabet = _byte_alphabet()
    pieces = {i: "".join(alphabet[b] for b in piece) for piece, i in ranks.items()}
    pieces |= {i: name for name, i in specials.items()}
    return Tokenizer(path, pieces, encode, decode)


def _parse_ranks(path: Path, data: bytes) -> dict[bytes, int]:
    """Piece -> rank from lines "base64 rank". tiktoken's own reader is not used: it caches files by
    path."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            piece, rank = line.split()
            ranks[base64.b64decode(piece, validate=True)] = int(rank)
        except ValueError as error:
            raise ValueError(
                f"{path}: line {number} is not a piece in base64 and a rank"
            ) from error
    if sorted(ranks.values()) != list(range(number)):
        raise ValueError(f"{path}: the ranks of its {number} lines are not 0 to {number - 1}")
    missing = [b for b in range(256) if bytes([b]) not in ranks]
    if missing:
        raise ValueError(f"{path}: has no piece for byte {missing[0]}; all 256 are needed")
    return ranks


LOADERS: dict[str, Callable[[Path, bytes], Tokenizer]] = {
    "tokenizer.json": load_json,
    "tokenizer.model": load_model_file,
    "original/tokenizer.model": load_model_file,
}


def _byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2's table)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [b for b in range(256) if b not in printable]
    return [chr(b) if b in printable else chr(256 + others.index(b)) for b in range(256)]
