"""Tokenizers for the file formats of a checkpoint. Text is encoded as plain text, without special
tokens, and a prompt begins with what the files say. A library is imported only for a file of its
format.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from magicdec.model.gguf.file import read_gguf
from magicdec.model.gguf.named import is_gguf
from magicdec.model.gguf.special_tokens import check_special_tokens
from magicdec.model.gguf.vocabulary import (
    SENTENCEPIECE,
    read_vocabulary,
    sentencepiece_model,
    tokenizers_file,
)
from magicdec.model.rank_file import (
    SPECIAL_TOKENS,
    SPLIT,
    is_rank_file,
    parse_ranks,
    pieces_of,
)
from magicdec.output.files import AGAIN, exists, load_object, read_bytes

CONFIG_FILE = "tokenizer_config.json"
NAMES_FILE = "special_tokens_map.json"
Around = tuple[tuple[int, ...], tuple[int, ...]]
"""Token ids before a text, and after it."""
MOST_TOKENIZER_BYTES = 256 << 20  # the largest published ones have 35 MB


@dataclass(frozen=True)
class Tokenizer:
    """A vocabulary, and functions that encode and decode by it. No text encodes to special
    tokens, except by `encode_with_special`, which is for a chat template's own words. `around`:
    what a call of transformers' tokenizer puts around a text, None if the files do not say."""

    path: Path
    pieces: dict[int, str]
    encode_plain: Callable[[str], list[int]]
    encode_special: Callable[[str], list[int]]
    decode_known: Callable[[list[int]], str]
    around: Around | None = None

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id (a model may pad beyond it)."""
        return max(self.pieces, default=-1) + 1

    def bos_of(self, stated: int | None) -> int | None:
        """The token that a prompt begins with, if any. `stated` is that of the model's config,
        which decides where no file of the tokenizer says. Raises ValueError if there is more."""
        if self.around is None:
            return stated
        before, after = self.around
        if len(before) > 1 or after:
            shown = [" ".join(self.pieces.get(i, f"<id {i}>") for i in ids) for ids in self.around]
            raise ValueError(
                f"{self.path}: puts {shown[0]!r} before a text and {shown[1]!r} behind it (by the "
                "post_processor of tokenizer.json, or add_eos_token); a prompt begins with one "
                "token at most and ends with its text; change that, or use --prompt_format chat"
            )
        return before[0] if before else None

    @cached_property
    def ids(self) -> dict[str, int]:
        """The id of each piece."""
        return {piece: i for i, piece in self.pieces.items()}

    def encode(self, text: str) -> list[int]:
        """Ids of the whole text, without BOS or EOS; special tokens' names are plain text."""
        with _refusing(self.path, "the text cannot be encoded"):
            return list(self.encode_plain(text))

    def encode_with_special(self, text: str) -> list[int]:
        """As `encode`, but the names of special tokens become these tokens."""
        with _refusing(self.path, "the text cannot be encoded"):
            return list(self.encode_special(text))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; special tokens give none. Raises ValueError for an id without piece,
        which one library would skip."""
        last = self.vocab_size - 1
        for i in ids:
            if not 0 <= i <= last:
                raise ValueError(f"{self.path}: token id {i} has no piece; ids are 0 to {last}")
        return self.decode_known(list(ids))

    def show(self, ids: Sequence[int]) -> str:
        """Text of the ids for people. An id without piece, such as vocabulary padding, is shown
        as "<id 2050>"."""
        shown = ""
        known = list[int]()
        for i in ids:
            if i in self.pieces:
                known.append(i)
                continue
            shown += (self.decode_known(known) if known else "") + f"<id {i}>"
            known = []
        return shown + (self.decode_known(known) if known else "")

    def vocabulary_hash(self) -> str:
        """sha256 (hex) of the id -> piece map, equal for all formats of a vocabulary."""
        listing = json.dumps(sorted(self.pieces.items()), separators=(",", ":"))
        return hashlib.sha256(listing.encode("ascii")).hexdigest()


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a GGUF file, or of a checkpoint directory, from the first file of LOADERS
    in it.

    Raises:
        ValueError: there is none, or the first is corrupt. The next might hold another vocabulary.
    """
    if is_gguf(directory):
        return load_gguf(directory)
    for name, load in LOADERS.items():
        path = directory / name
        if exists(path):
            try:
                data = read_bytes(path, MOST_TOKENIZER_BYTES)
            except OSError as error:
                raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
            return load(path, data)
    state = "holds no tokenizer" if directory.is_dir() else "is not a directory"
    raise ValueError(f"{directory}: {state}; looked for {', '.join(LOADERS)}")


@contextmanager
def _refusing(path: Path, what: str) -> Iterator[None]:
    """Raise ValueError, with file and reason, for any error of a library; panics of Rust are no
    `Exception`."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = str(error).split("\n")[0]
        raise ValueError(f"{path}: {what} ({reason})") from error


def load_json(path: Path, data: bytes) -> Tokenizer:
    import tokenizers

    with _refusing(path, "is not a `tokenizers` file"):
        backend = tokenizers.Tokenizer.from_buffer(data)
    _check_ids(path, json.loads(data), backend.token_to_id)
    # The file may ask for truncation or padding, and by default the name of a special token in the
    # text is encoded as that token. A book must be encoded whole and as plain text.
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True

    def encode(text: str) -> list[int]:
        # The "fast" call skips character offsets, which at least halves the time for a whole book.
        ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def encode_special(text: str) -> list[int]:
        backend.encode_special_tokens = False
        try:
            return encode(text)
        finally:
            backend.encode_special_tokens = True

    pieces = {i: piece for piece, i in backend.get_vocab(with_added_tokens=True).items()}
    around = _around(path, backend)
    for i in (place for end in around for place in end):
        if i not in pieces:
            raise ValueError(
                f"{path}: its post_processor adds the id {i}, which is no token; {AGAIN}"
            )
    return Tokenizer(path, pieces, encode, encode_special, backend.decode, around)


def _around(path: Path, backend: Any) -> Around:
    """What the post-processor puts around a text. It decides, whatever the configs beside the file
    say."""
    with _refusing(path, "its post_processor cannot be used"):
        whole = backend.encode("a")
    is_added = [bool(flag) for flag in whole.special_tokens_mask]
    first = is_added.index(False) if False in is_added else len(is_added)
    last = len(is_added) - is_added[::-1].index(False) if False in is_added else len(is_added)
    return tuple(whole.ids[:first]), tuple(whole.ids[last:])


def _check_ids(path: Path, content: Any, id_of: Callable[[str], int | None]) -> None:
    """Raise ValueError for a token that the file gives another id than the library does, which
    numbers added tokens anew where ids are taken or left out; or for an id that two words have."""
    words = content["model"].get("vocab")
    if isinstance(words, dict):
        by_id = {i: word for word, i in words.items()}
        twice = next((word for word, i in words.items() if by_id[i] != word), None)
        if twice is not None:
            i = words[twice]
            raise ValueError(f"{path}: {twice!r} and {by_id[i]!r} both have the id {i}; {AGAIN}")
    for token in content.get("added_tokens") or ():
        found = id_of(token["content"])
        if found != token["id"]:
            raise ValueError(
                f"{path}: added_tokens gives {token['content']!r} the id {token['id']}, but the "
                f"words before it make that {found}; {AGAIN}"
            )


def load_sentencepiece(path: Path, data: bytes) -> Tokenizer:
    """A `tokenizer.model` of SentencePiece (Llama 2, Mistral, Baichuan)."""
    import sentencepiece

    try:
        # Given an empty byte string, the library returns an empty processor instead of raising.
        backend = sentencepiece.SentencePieceProcessor(model_proto=data) if data else None
    except RuntimeError:
        backend = None
    if backend is None:
        raise ValueError(f"{path}: is no SentencePiece model, nor a rank file of tiktoken")
    pieces = {i: backend.id_to_piece(i) for i in range(backend.get_piece_size())}
    controls = {piece: i for i, piece in pieces.items() if backend.is_control(i)}
    longest_first = sorted(controls, key=len, reverse=True)
    names = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

    def encode_special(text: str) -> list[int]:
        ids = list[int]()
        for part in names.split(text):
            ids += [controls[part]] if part in controls else backend.encode_as_ids(part)
        return ids

    return Tokenizer(path, pieces, backend.encode_as_ids, encode_special, backend.decode)


def load_rank_file(path: Path, data: bytes) -> Tokenizer:
    """A `tokenizer.model` of tiktoken, as in Meta's releases of Llama 3."""
    ranks = parse_ranks(path, data)
    try:
        import tiktoken
    except ImportError as error:
        raise ValueError(
            f"{path}: is a rank file of tiktoken, which is not installed; pip install tiktoken"
        ) from error
    first_special = len(ranks)
    specials = {name: first_special + i for i, name in enumerate(SPECIAL_TOKENS)}
    with _refusing(path, "is not a rank file of tiktoken"):
        backend = tiktoken.Encoding(
            str(path), pat_str=SPLIT, mergeable_ranks=ranks, special_tokens=specials
        )

    def encode(text: str) -> list[int]:
        text.encode("utf-8")  # the library would replace a lone surrogate
        ids: list[int] = backend.encode_ordinary(text)
        return ids

    def encode_special(text: str) -> list[int]:
        ids: list[int] = backend.encode(text, allowed_special="all")
        return ids

    def decode(ids: list[int]) -> str:
        text: str = backend.decode([i for i in ids if i < first_special])
        return text

    return Tokenizer(path, pieces_of(ranks), encode, encode_special, decode)


def load_model(path: Path, data: bytes) -> Tokenizer:
    """A `tokenizer.model`, whose content tells the format. The configs beside it may say what is
    put around a text."""
    loaded = load_rank_file(path, data) if is_rank_file(data) else load_sentencepiece(path, data)
    return replace(loaded, around=_stated_around(loaded))


def _stated_around(tokenizer: Tokenizer) -> Around | None:
    directory = tokenizer.path.parent
    config = _load_settings(directory / CONFIG_FILE)
    if config.get("add_bos_token") is None and not config.get("add_eos_token"):
        return None
    # As transformers reads them: the older file comes first, unless the newer one has all tokens.
    is_whole = "added_tokens_decoder" in config
    names = config if is_whole else config | _load_settings(directory / NAMES_FILE)
    ids = {piece: i for i, piece in tokenizer.pieces.items()}
    around = list[tuple[int, ...]]()
    for end in ("bos", "eos"):
        key = f"{end}_token"
        value = names.get(key)
        name = value.get("content") if isinstance(value, dict) else value
        if not config.get(f"add_{key}") or (key in names and not name):
            around.append(())
        elif name in ids:
            around.append((ids[name],))
        else:
            cause = f"{key} {name!r} is no token of {tokenizer.path.name}" if name else f"no {key}"
            raise ValueError(
                f"{directory / CONFIG_FILE}: add_{key} is true, and {cause}; name the token of the "
                f"vocabulary there, or set add_{key} to false"
            )
    before, after = around
    return before, after


def _load_settings(path: Path) -> dict[str, Any]:
    """The fields of a file that a directory may lack."""
    try:
        return load_object(path) if exists(path) else {}
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error).split("\n")[0]
        raise ValueError(f"{path}: cannot be read ({reason})") from error


def load_gguf(path: Path) -> Tokenizer:
    """The tokenizer that a GGUF file's metadata describe."""
    check_special_tokens(read_gguf(path))
    vocabulary = read_vocabulary(read_gguf(path))
    if vocabulary.model == SENTENCEPIECE:
        loaded = load_sentencepiece(path, sentencepiece_model(vocabulary))
        return replace(loaded, around=(vocabulary.before, vocabulary.after))
    return load_json(path, json.dumps(tokenizers_file(vocabulary)).encode())


LOADERS: dict[str, Callable[[Path, bytes], Tokenizer]] = {
    "tokenizer.json": load_json,
    "tokenizer.model": load_model,
}
