"""Tokenizers: the choice of the format, the same ids as the underlying library, text that is never
encoded as special tokens, and errors.

Every vocabulary is built here, in a temporary folder; nothing is downloaded.
"""

import base64
import inspect
import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers.convert_slow_tokenizer import TikTokenConverter, bytes_to_unicode

from magicdec.model import tokenizer as module
from magicdec.model.detokenizer import Detokenizer
from magicdec.model.rank_file import SPECIAL_TOKENS, SPLIT
from magicdec.model.tokenizer import Tokenizer

CORPUS = ("the cat sat on the mat", "a long tale of the sea, told twice", "Chapter 12. No more!")
SPECIAL = {"json": "<s>", "sentencepiece": "<s>", "ranks": "<|begin_of_text|>"}
FILES = {
    "json": "tokenizer.json",
    "sentencepiece": "tokenizer.model",
    "ranks": "tokenizer.model",
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


def fallback_bytes() -> bytes:
    """As of Llama 2: a blank is a part of a token, and a character that has no token is a run of
    bytes, which is unreadable as a whole if one of them is."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", "\u2581\u2581", "\u2581the", "\u2581cat", *"abthecs\n\xe9\u4e16"]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    model = models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>")
    backend = tokenizers.Tokenizer(model)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return backend.to_str().encode()


TEXTS = ("th", "the", " the", " s", "at", " sat", "12", "123", "\n\n", "  ", "    ", "é", "dog")
"""Tokens of the rank file beside bytes. No two tokens make "dog": only a whole word does."""
RANKS = {bytes([(byte + 33) % 256]): byte for byte in range(256)}
for learnt in (*(text.encode() for text in TEXTS), b"\xe4\xb8", b"\xe4\xb8\x96"):  # 世
    RANKS[learnt] = len(RANKS)


def lines_of(ranks: dict[bytes, int]) -> bytes:
    return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items())


def rank_bytes() -> bytes:
    return lines_of(RANKS)


def ranks_as_json() -> bytes:
    """The vocabulary of the rank file as `transformers` converts it: a merge for every two tokens
    that make a third, by its rank, and whole words before merges."""
    characters = bytes_to_unicode()

    def piece(token: bytes) -> str:
        return "".join(characters[byte] for byte in token)

    merges = [
        (piece(token[:at]), piece(token[at:]))
        for token in sorted(RANKS, key=RANKS.__getitem__)
        for at in range(1, len(token))
        if token[:at] in RANKS and token[at:] in RANKS
    ]
    vocabulary = {piece(token): rank for token, rank in RANKS.items()}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    split = pre_tokenizers.Split(tokenizers.Regex(SPLIT), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    return backend.to_str().encode()


BYTES = {"json": json_bytes, "sentencepiece": sentencepiece_bytes, "ranks": rank_bytes}
BUILT = {kind: build() for kind, build in BYTES.items()}
KINDS = tuple(BUILT)
AS_JSON = ranks_as_json()


def load(directory: Path, name: str, data: bytes) -> Tokenizer:
    (directory / name).parent.mkdir(parents=True, exist_ok=True)
    (directory / name).write_bytes(data)
    return module.load_tokenizer(directory)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {kind: load(root / kind, FILES[kind], BUILT[kind]) for kind in KINDS}


@pytest.fixture(scope="module")
def streamed(
    loaded: dict[str, Tokenizer], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("fallback")
    return loaded | {"fallback": load(folder, FILES["json"], fallback_bytes())}


def reference(kind: str) -> Any:
    """The underlying library's encoding, without this project's wrapper."""
    if kind == "json":
        backend = tokenizers.Tokenizer.from_str(BUILT[kind].decode())
        backend.no_truncation()
        backend.no_padding()
        return lambda text: backend.encode(text, add_special_tokens=False).ids
    if kind == "ranks":
        return tiktoken.Encoding(
            "reference", pat_str=SPLIT, mergeable_ranks=RANKS, special_tokens={}
        ).encode_ordinary
    return sentencepiece.SentencePieceProcessor(model_proto=BUILT[kind]).encode_as_ids


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")))
def test_text_comes_back_and_ids_are_the_librarys(
    loaded: dict[str, Tokenizer], kind: str, text: str
) -> None:
    ids = loaded[kind].encode(text)
    assert loaded[kind].decode(ids) == text
    assert ids == list(reference(kind)(text))
    assert all(0 <= i < loaded[kind].vocab_size for i in ids)


@pytest.mark.parametrize("kind", [*KINDS, "fallback"])
@given(data=st.data())
def test_pieces_of_text_are_the_text(
    streamed: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    """Of any tokens, those of text, and those that stand for nothing or for single bytes. No piece
    ends within a character."""
    tokenizer = streamed[kind]
    tokens = st.integers(0, tokenizer.vocab_size + 1)
    few = st.lists(tokens, min_size=1, max_size=3).flatmap(
        lambda found: st.sampled_from([*found, 0, 1, 2])
    )
    texts = st.text("aé世😀 \n,", max_size=9).map(tokenizer.encode)
    ids = data.draw(st.one_of(texts, st.lists(tokens, max_size=20), st.lists(few, max_size=20)))
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.add(token) for token in ids]
    text = tokenizer.show(ids)
    assert "".join(pieces) + detokenizer.finish() == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_blank_after_text_comes_by_itself(streamed: dict[str, Tokenizer]) -> None:
    """Alone it has no text, since a text begins without it."""
    tokenizer = streamed["fallback"]
    ids = {piece: i for i, piece in tokenizer.pieces.items()}
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.add(ids[piece]) for piece in ("\u2581the", "\u2581", "\u2581cat", "s")]
    assert pieces == ["the", " ", " cat", "s"]


def test_pieces_come_as_soon_as_they_are_certain(loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded["json"]
    detokenizer = Detokenizer(tokenizer)
    ids = [token for character in "a é😀b" for token in tokenizer.encode(character)]
    assert len(ids) == 9
    pieces = [detokenizer.add(token) for token in ids]
    assert pieces == ["a", " ", "", "é", "", "", "", "😀", "b"]
    assert detokenizer.add(ids[2]) == "" and detokenizer.finish() == "\ufffd"


def test_a_long_text_is_decoded_a_few_tokens_at_a_time(loaded: dict[str, Tokenizer]) -> None:
    lengths = list[int]()
    tokenizer = loaded["json"]

    def decode(ids: list[int]) -> str:
        lengths.append(len(ids))
        return tokenizer.decode_known(ids)

    detokenizer = Detokenizer(replace(tokenizer, decode_known=decode))
    for token in tokenizer.encode("the cat sat on the sea, " * 50):
        detokenizer.add(token)
    assert max(lengths) <= 2


@pytest.mark.parametrize("kind", KINDS)
def test_special_strings_in_text_stay_text(loaded: dict[str, Tokenizer], kind: str) -> None:
    text = f"the cat {SPECIAL[kind]} sat"
    specials = {
        "json": {0, 1},
        "sentencepiece": {0, 1, 2},
        "ranks": set(range(len(RANKS), len(RANKS) + 256)),
    }[kind]
    ids = loaded[kind].encode(text)
    assert not specials & set(ids)
    assert loaded[kind].decode(ids) == text


@pytest.mark.parametrize("kind", KINDS)
def test_a_template_may_name_special_tokens(loaded: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = loaded[kind]
    name = SPECIAL[kind]
    (special,) = [i for i, piece in tokenizer.pieces.items() if piece == name]
    the_cat = tokenizer.encode("the cat")
    sat = tokenizer.encode(" sat")
    assert tokenizer.encode_with_special(f"{name}the cat{name} sat") == [
        special,
        *the_cat,
        special,
        *sat,
    ]
    assert tokenizer.encode_with_special("the cat") == the_cat
    assert special not in tokenizer.encode(name)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_added_cut_or_padded(loaded: dict[str, Tokenizer], kind: str) -> None:
    assert loaded[kind].encode("") == []
    assert loaded[kind].decode([]) == ""
    assert len(loaded[kind].encode("xyz " * 500)) >= 500
    assert len(loaded[kind].encode("x")) <= 2  # SentencePiece puts a blank in front


def test_special_ids_decode_to_nothing(loaded: dict[str, Tokenizer]) -> None:
    first_special = {"json": 0, "sentencepiece": 1, "ranks": len(RANKS)}
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


@pytest.mark.parametrize("kind", KINDS)
def test_ids_without_a_piece_are_shown(loaded: dict[str, Tokenizer], kind: str) -> None:
    """People see the text of a padded vocabulary, and which id stands where."""
    tokenizer = loaded[kind]
    text = tokenizer.encode("the cat")
    padding = tokenizer.vocab_size
    assert tokenizer.show(text) == "the cat" and tokenizer.show([]) == ""
    assert tokenizer.show([*text, padding]) == f"the cat<id {padding}>"
    assert tokenizer.show([-1, padding + 7, *text]) == f"<id -1><id {padding + 7}>the cat"


def test_a_changed_piece_changes_the_hash(loaded: dict[str, Tokenizer], tmp_path: Path) -> None:
    vocabulary = json.loads(BUILT["json"])
    pieces = vocabulary["model"]["vocab"]
    pieces["changed"] = pieces.pop("!")
    changed = load(tmp_path, "tokenizer.json", json.dumps(vocabulary).encode())
    hashes = {t.vocabulary_hash() for t in (*loaded.values(), changed)}
    assert len(hashes) == 4 and all(re.fullmatch("[0-9a-f]{64}", h) for h in hashes)


def test_files_are_looked_for_in_order(loaded: dict[str, Tokenizer], tmp_path: Path) -> None:
    for kind, name in (("ranks", "tokenizer.model"), *reversed(FILES.items())):
        assert load(tmp_path, name, BUILT[kind]).pieces == loaded[kind].pieces


def test_no_tokenizer(tmp_path: Path) -> None:
    looked_for = "looked for tokenizer.json, tokenizer.model"
    with pytest.raises(ValueError, match=f"{tmp_path}: holds no tokenizer; {looked_for}"):
        module.load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path}/x: is not a directory; {looked_for}"):
        module.load_tokenizer(tmp_path / "x")


@pytest.mark.parametrize(
    ("words", "added", "message"),
    [
        ({"a": 0, "b": 1}, {"<s>": 2, "<t>": 3}, None),
        ({"a": 0, "b": 1, "<s>": 2}, {"<s>": 2}, None),
        ({"a": 0, "b": 1}, {"<s>": 5}, "gives '<s>' the id 5, but the words before it make that 2"),
        ({"a": 0, "b": 1}, {"<s>": 0}, "gives '<s>' the id 0, but the words before it make that 2"),
        ({"a": 0, "b": 1, "<s>": 2}, {"<s>": 7}, "gives '<s>' the id 7, but the words before it"),
        ({"a": 0, "b": 1}, {"<s>": 2, "<t>": 2}, "gives '<t>' the id 2, but the words before it"),
        ({"a": 0, "b": 0}, {}, "'a' and 'b' both have the id 0"),
    ],
)
def test_ids_that_a_file_states_twice_agree(
    words: dict[str, int], added: dict[str, int], message: str | None, tmp_path: Path
) -> None:
    """The library numbers tokens anew without a word, and encodes a text by its own numbers."""
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(models.BPE(words, [])).save(str(path))
    content = json.loads(path.read_text())
    content["model"]["vocab"] = words
    options = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"] = [
        {"id": i, "content": token, "special": True, **options} for token, i in added.items()
    ]
    path.write_text(json.dumps(content))
    theirs = tokenizers.Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    if message is None:
        assert theirs == words | added
        assert module.load_tokenizer(tmp_path).ids == theirs
        return
    assert theirs != words | added or len(set(theirs.values())) < len(theirs)
    with pytest.raises(ValueError, match=re.escape(message)):
        module.load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("tokenizer.json", b"{", "is not a `tokenizers` file"),
        ("tokenizer.json", b"", "is not a `tokenizers` file"),
        ("tokenizer.model", b"", "is no SentencePiece model"),
        ("tokenizer.model", b"version https://x\n", "is no SentencePiece model"),
        ("tokenizer.model", BUILT["sentencepiece"][:-9], "is no SentencePiece model"),
        ("tokenizer.model", b"\n" + BUILT["ranks"], "is no SentencePiece model, nor a rank file"),
        ("tokenizer.model", b"=A== 0\n", "line 1 has a token that is not base64"),
        ("tokenizer.model", BUILT["ranks"] + b"A 271\n", "line 272 has a token that is not base64"),
        ("tokenizer.model", BUILT["ranks"] + b"AA\xc3== 271\n", "line 272 has a token that is not"),
        ("tokenizer.model", BUILT["ranks"] + b"dGhhdA==\n", "line 272 is not a token in base64"),
        ("tokenizer.model", BUILT["ranks"] + b"dGhhdA== -1\n", "line 272 is not a token in base64"),
        ("tokenizer.model", BUILT["ranks"] + b"dGhhdA== 1 2\n", "line 272 is not a token in"),
        ("tokenizer.model", BUILT["ranks"] + b"dGhhdA== 2\n", "line 272 has the rank 2 of line 3"),
        (
            "tokenizer.model",
            BUILT["ranks"] + b"dGhl 271\n",
            "line 272 has a token that came before",
        ),
        ("tokenizer.model", BUILT["ranks"] + b" 271\n", "line 272 has no token"),
        ("tokenizer.model", BUILT["ranks"] + b"dGhhdA== 272\n", "has no token of rank 271; ranks"),
        ("tokenizer.model", BUILT["ranks"][7:], "has no token of rank 0; ranks go up to 270"),
        ("tokenizer.model", b"QQ== 0\n", "has no token of the byte 0x00"),
    ],
)
def test_corrupt_files_are_named(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / name}: {message}")) as caught:
        load(tmp_path, name, data)
    assert "\n" not in str(caught.value)


VARIED = (
    "the cat sat on the mat, 1234567 times; it's the DOG's\n\n  and they'LL\r\n\tgo ",
    "    def f(x):\n        return x[1:]  # 世界 é é 😀😀 naïve\u2028\u0661\u0662\u0663\n\n\n",
    "dog adog  dog\u3000dog \u00a0 the   \n  12 123 123123",
    "<|begin_of_text|>the<|eot_id|>\x00\x7f",
)


@pytest.mark.parametrize("text", VARIED)
def test_a_rank_file_is_the_json_of_its_vocabulary(
    loaded: dict[str, Tokenizer], tmp_path: Path, text: str
) -> None:
    ranks = loaded["ranks"]
    as_json = load(tmp_path, "tokenizer.json", AS_JSON)
    assert ranks.encode(text) == as_json.encode(text) == reference("ranks")(text)
    assert ranks.decode(ranks.encode(text)) == text
    assert ranks.pieces == as_json.pieces
    assert ranks.vocabulary_hash() == as_json.vocabulary_hash()


@given(text=st.text(st.sampled_from("the sat123dog世é😀\n\r\t'.\u00a0LЖ")))
def test_any_text_has_the_ids_of_the_json(text: str) -> None:
    as_json = module.load_json(Path("tokenizer.json"), AS_JSON)
    ranks = module.load_model(Path("tokenizer.model"), BUILT["ranks"])
    assert ranks.encode(text) == as_json.encode(text)


def test_the_split_is_llama_3s() -> None:
    """That of the converter of `transformers`, which made its `tokenizer.json`."""
    assert inspect.signature(TikTokenConverter).parameters["pattern"].default == SPLIT


def test_special_tokens_follow_the_ranks(loaded: dict[str, Tokenizer]) -> None:
    """As in Meta's releases, in which 128000 tokens come before them."""
    ranks = loaded["ranks"]
    ids = {piece: i - len(RANKS) for i, piece in ranks.pieces.items() if i >= len(RANKS)}
    assert len(ids) == 256 and ranks.vocab_size == len(RANKS) + 256
    known = {"<|begin_of_text|>": 0, "<|end_of_text|>": 1, "<|reserved_special_token_3|>": 5}
    known |= {"<|start_header_id|>": 6, "<|end_header_id|>": 7, "<|eot_id|>": 9}
    known |= {"<|reserved_special_token_4|>": 8, "<|reserved_special_token_250|>": 255}
    assert {name: ids[name] for name in known} == known


def test_lines_may_end_as_on_windows(loaded: dict[str, Tokenizer], tmp_path: Path) -> None:
    lines = BUILT["ranks"].replace(b"\n", b"\r\n").removesuffix(b"\r\n")
    assert load(tmp_path, "tokenizer.model", lines).pieces == loaded["ranks"].pieces


def test_a_lone_surrogate_is_refused(loaded: dict[str, Tokenizer]) -> None:
    with pytest.raises(ValueError, match=r"tokenizer.model: the text cannot be encoded"):
        loaded["ranks"].encode("the \ud800")


def test_without_tiktoken_only_rank_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    load(tmp_path, "tokenizer.model", BUILT["sentencepiece"])
    with pytest.raises(ValueError, match=r"tokenizer.model: is .* not installed; pip install tikt"):
        load(tmp_path, "tokenizer.model", BUILT["ranks"])


def test_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, most: int) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(module, "read_bytes", refuse)
    (tmp_path / "tokenizer.json").touch()
    with pytest.raises(ValueError, match=r"tokenizer.json: cannot be read \(Permission denied\)"):
        module.load_tokenizer(tmp_path)


def test_a_pattern_on_which_the_library_panics_is_refused(tmp_path: Path) -> None:
    """A panic of Rust code is no `Exception`."""
    backend = tokenizers.Tokenizer(models.BPE(vocab={"x": 0, "y": 1}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("(x+x+)+y"), "isolated")
    (tmp_path / "tokenizer.json").write_text(backend.to_str())
    loaded = module.load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer.json: the text cannot be encoded \(.*Regex"):
        loaded.encode("x" * 50_000)
