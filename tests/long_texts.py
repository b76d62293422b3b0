"""Long texts are encoded once in a process. Most commands of the tests cut their prompts from the
packaged text, and encoding all of its books took a quarter of such a run."""

from sentencepiece import SentencePieceProcessor

from magicdec.model.presets.presets import demo_directory
from magicdec.model.tokenizer import load_tokenizer
from magicdec.workload.books import read_books
from magicdec.workload.workload import ENOUGH_BOOKS

LONG = 20_000  # characters; shorter texts are encoded anew each time
ENCODED: dict[tuple[bytes, str], tuple[int, ...]] = {}


def remember_long_texts() -> None:
    """From now on, what SentencePiece makes of a long text is kept with the model's own bytes."""
    encode = SentencePieceProcessor.EncodeAsIds

    def encode_once(processor: SentencePieceProcessor, text: object, **more: object) -> list[int]:
        if more or not isinstance(text, str) or len(text) < LONG:
            ids: list[int] = encode(processor, text, **more)
            return ids
        key = processor.serialized_model_proto(), text
        if key not in ENCODED:
            ENCODED[key] = tuple(encode(processor, text))
        return list(ENCODED[key])

    SentencePieceProcessor.EncodeAsIds = SentencePieceProcessor.encode_as_ids = encode_once


def encode_demo_text() -> None:
    """For processes that are forked from this one."""
    tokenizer = load_tokenizer(demo_directory("demo"))
    for text in read_books("demo", ENOUGH_BOOKS):
        tokenizer.encode(text)
