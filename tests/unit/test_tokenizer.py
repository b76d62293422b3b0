"""Tokenizers: the choice of the format, the same ids as the underlying library, text that is never
encoded as special tokens, and errors.

Every vocabulary is built here, in a temporary folder; nothing is downloaded.
"""

import base64
import io
import re
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from magicdec.model import tokenizer as module
from magicdec.model.tokenizer import LLAMA3_PATTERN, LLAMA3_SPECIAL_TOKENS, Tokenizer

MERGES = (b"th", b"the", b" th", b" the", b"at", b"cat", b"\n\n", b"  ")
CORPUS = ("the cat sat on the mat", "a long tale of the sea, told twice", "Chapter 12. No more!")
SPECIAL = {"json": "<s>", "sentencepiece": "<s>", "tiktoken": "<|eot_id|>"}
FILES = {
    "json": "tokenizer.json",
    "sentencepiece": "tokenizer.model",
    "tiktoken": "original/tokenizer.model",
}


def json_bytes() -> bytes:
    """Byte-level BPE with settings that must not apply to books: BOS, truncation, padding."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    return backend.to_str().encode()


def sentencepiece_bytes() -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 3),
        model_writer=model,
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return model.getvalue()


def ranks() -> dict[bytes, int]:
    return {piece: i for i, piece in enumerate([*(bytes([b]) for b in range(256)), *MERGES])}


def rank_bytes() -> bytes:
    lines = (base64.b64encode(piece) + b" %d\n" % rank for piece, rank in ranks().items())
    return b"".join(lines)


BYTES = {"json": json_bytes, "sentencepiece": sentencepiece_bytes, "tiktoken": rank_bytes}
BUILT = {kind: build() for kind, build in BYTES.items()}
KINDS = tuple(BUILT)


def load(directory: Path, name: str, data: bytes) -> Tokenizer:
    (directory / name).parent.mkdir(parents=True, exist_ok=True)
    (directory / name).write_bytes(data)
    return module.load_tokenizer(directory)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {kind: load(root / kind, FILES[kind], BUILT[kind]) for kind in KINDS}


def reference(kind: str) -> Any:
    """The underlying library's encoding, without this project's wrapper."""
    if kind == "json":
        backend = tokenizers.Tokenizer.from_str(BUILT[kind].decode())
        backend.no_truncation()
        backend.no_padding()
        return lambda text: backend.encode(text, add_special_tokens=False).ids
    if kind == "sentencepiece":
        return sentencepiece.SentencePieceProcessor(model_proto=BUILT[kind]).encode_as_ids
    return tiktoken.Encoding(
        "x", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks(), special_tokens={}
    ).encode


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")))
def test_text_comes_back_and_ids_are_the_librarys(
    loaded: dict[str, Tokenizer], kind: str, text: str
) -> None:
    ids = loaded[kind].encode(text)
    assert loaded[kind].decode(ids) == text
    assert ids == list(reference(kind)(text))
    assert all(0 <= i < loaded[kind].vocab_size for i in ids)


@pytest.mark.parametrize("kind", KINDS)
def test_special_strings_in_text_stay_text(loaded: dict[str, Tokenizer], kind: str) -> None:
    text = f"the cat {SPECIAL[kind]} sat"
    specials = {0, 1} if kind == "json" else {0, 1, 2}
    if kind == "tiktoken":
        specials = set(range(len(ranks()), loaded[kind].vocab_size))
    ids = loaded[kind].encode(text)
    assert not specials & set(ids)
    assert loaded[kind].decode(ids) == text


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_added_cut_or_padded(loaded: dict[str, Tokenizer], kind: str) -> None:
    assert loaded[kind].encode("") == []
    assert loaded[kind].decode([]) == ""
    assert len(loaded[kind].encode("xyz " * 500)) >= 500
    assert len(loaded[kind].encode("x")) <= 2  # SentencePiece puts a blank in front


def test_special_ids_decode_to_nothing(loaded: dict[str, Tokenizer]) -> None:
    first_special = {"json": 0, "sentencepiece": 1, "tiktoken": len(ranks())}
    for kind, tokenizer in loaded.items():
        assert tokenizer.decode([first_special[kind], *tokenizer.encode("the cat")]) == "the cat"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offset", [-1, 0])
def test_decode_refuses_ids_without_a_piece(
    loaded: dict[str, Tokenizer], kind: str, offset: int
) -> None:
    bad = -1 if offset else loaded[kind].vocab_size
    with pytest.raises(ValueError, match=f"token id {bad} has no piece; ids are 0 to"):
        loaded[kind].decode([3, bad])


def test_llama3_special_tokens_have_their_published_places() -> None:
    assert len(LLAMA3_SPECIAL_TOKENS) == len(set(LLAMA3_SPECIAL_TOKENS)) == 256
    published = {
        "<|begin_of_text|>": 128000,
        "<|end_of_text|>": 128001,
        "<|start_header_id|>": 128006,
        "<|end_header_id|>": 128007,
        "<|eot_id|>": 128009,
        "<|reserved_special_token_5|>": 128010,
        "<|reserved_special_token_250|>": 128255,
    }
    assert published == {t: 128000 + LLAMA3_SPECIAL_TOKENS.index(t) for t in published}


@pytest.mark.parametrize("tail", ["", "the"])
def test_tiktoken_survives_a_million_blanks(loaded: dict[str, Tokenizer], tail: str) -> None:
    text = "the cat" + " " * 1_000_000 + tail
    assert loaded["tiktoken"].decode(loaded["tiktoken"].encode(text)) == text


def test_hash_is_of_the_vocabulary_not_of_the_format(
    loaded: dict[str, Tokenizer], tmp_path: Path
) -> None:
    """One vocabulary has the same hash in two formats; a changed piece changes the hash."""
    letters = {b: c for c, b in zip(module._byte_alphabet(), range(256), strict=True)}
    spell = {i: "".join(letters[b] for b in piece) for piece, i in ranks().items()}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "th"), ("Ġth", "e"), ("a", "t"), ("c", "at")]
    backend = tokenizers.Tokenizer(models.BPE({p: i for i, p in spell.items()}, merges))
    backend.add_special_tokens(list(LLAMA3_SPECIAL_TOKENS))
    converted = load(tmp_path / "same", "tokenizer.json", backend.to_str().encode())
    assert converted.vocab_size == loaded["tiktoken"].vocab_size
    assert converted.vocabulary_hash() == loaded["tiktoken"].vocabulary_hash()
    other = rank_bytes().replace(base64.b64encode(b"cat"), base64.b64encode(b"dog"))
    changed = load(tmp_path / "other", "tokenizer.model", other)
    hashes = {t.vocabulary_hash() for t in (*loaded.values(), changed)}
    assert len(hashes) == 4
    assert all(re.fullmatch("[0-9a-f]{64}", h) for h in hashes)


def test_files_are_looked_for_in_order(loaded: dict[str, Tokenizer], tmp_path: Path) -> None:
    for kind, name in reversed(FILES.items()):
        assert load(tmp_path, name, BUILT[kind]).pieces == loaded[kind].pieces


@pytest.mark.parametrize("name", ["tokenizer.model", "original/tokenizer.model"])
def test_one_name_two_formats(loaded: dict[str, Tokenizer], tmp_path: Path, name: str) -> None:
    windows = BUILT["tiktoken"].replace(b"\n", b"\r\n")
    for data in (BUILT["tiktoken"], windows):
        assert load(tmp_path, name, data).pieces == loaded["tiktoken"].pieces
    assert load(tmp_path, name, BUILT["sentencepiece"]).pieces == loaded["sentencepiece"].pieces


def test_no_tokenizer(tmp_path: Path) -> None:
    looked_for = "looked for tokenizer.json, tokenizer.model, original/tokenizer.model"
    with pytest.raises(ValueError, match=f"{tmp_path}: holds no tokenizer; {looked_for}"):
        module.load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path}/x: is not a directory; {looked_for}"):
        module.load_tokenizer(tmp_path / "x")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("tokenizer.json", b"{", "is not a `tokenizers` file"),
        ("tokenizer.json", b"", "is not a `tokenizers` file"),
        ("tokenizer.model", b"", "is neither a SentencePiece model nor a tiktoken rank file"),
        ("tokenizer.model", b"version https://x\n", "is neither a SentencePiece model nor"),
        ("tokenizer.model", BUILT["sentencepiece"][:-9], "is neither a SentencePiece model nor"),
        ("tokenizer.model", b"QQ== 0\nQg==\n", "line 2 is not a piece in base64 and a rank"),
        ("tokenizer.model", b"QQ== 0\nQ*== 1\n", "line 2 is not a piece in base64 and a rank"),
        ("tokenizer.model", b"QQ== 0\nQg== 2\n", "the ranks of its 2 lines are not 0 to 1"),
        ("tokenizer.model", b"QQ== 0\nQg== 1\n", "has no piece for byte 0; all 256 are needed"),
    ],
)
def test_corrupt_files_are_named(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / name}: {message}")) as caught:
        load(tmp_path, name, data)
    assert "\n" not in str(caught.value)


def test_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    (tmp_path / "tokenizer.json").touch()
    with pytest.raises(ValueError, match=r"tokenizer.json: cannot be read \(Permission denied\)"):
        module.load_tokenizer(tmp_path)
