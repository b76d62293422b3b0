"""Workload: the token prefixes of a benchmark run, and their known answers."""

from __future__ import annotations

import hashlib
import random
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from magicdec.model.tokenizer import Tokenizer
from magicdec.workload import ruler
from magicdec.workload.answers import Answer, recall_prompts
from magicdec.workload.books import (
    NAMED_READERS,
    read_books,
    read_corpus,
    read_prompts,
    title_of,
)
from magicdec.workload.chat_template import FLAG, WAY_OUT, Frame, Frames, Refusal
from magicdec.workload.prompt_sets import PromptItem, cut_middle, is_prompt_set, sets_of

ENOUGH_BOOKS = 50  # of more only as many are read as the prompts need
MOST_ITEMS = 5000  # that are read of a dataset
# Tokens skipped in each book of a published dataset, as in the original suite: title page, contents
# and preface. Of a user's own text nothing is skipped.
SKIP_TOKENS = {"pg19": 8000}


@dataclass(frozen=True)
class Workload:
    """The prefixes in the order of the run, and their `answers`, if known. `sources` are (book
    index, chunk index), drawn from `num_available` prefixes; None if generated. `sha256` is of
    token ids and prompt boundaries. Of a prompt set, `categories` are those of its items, some of
    them None, `later_turns` the numbers of their further questions, which are not asked, and
    `left_out` counts the items that were drawn and left out, by reason."""

    dataset: str
    prompts: tuple[tuple[int, ...], ...]
    sources: tuple[tuple[int, int], ...] | None
    num_available: int | None
    skip_tokens: int | None
    seed: int
    sha256: str
    answers: tuple[Answer, ...] | None = None
    categories: tuple[str | None, ...] | None = None
    left_out: dict[str, int] | None = None
    later_turns: tuple[int, ...] | None = None

    def first(self, num_prompts: int) -> Workload:
        prompts = self.prompts[:num_prompts]
        return replace(
            self,
            prompts=prompts,
            sources=None if self.sources is None else self.sources[:num_prompts],
            answers=None if self.answers is None else self.answers[:num_prompts],
            categories=None if self.categories is None else self.categories[:num_prompts],
            later_turns=None if self.later_turns is None else self.later_turns[:num_prompts],
            sha256=_hash_prompts(prompts),
        )


def build_workload(
    dataset: str,
    tokenizer: Tokenizer,
    bos_token_id: int | None,
    prefix_len: int,
    num_prompts: int,
    seed: int,
    gen_len: int = 64,
    counted_by: str = "--B x --num_batches",
    is_whole: bool = False,
    skip_tokens: int | None = None,
    batch: int | None = None,
    chat: Frames | None = None,
) -> Workload:
    """Distinct prefixes of `prefix_len` tokens: chunks of books, drawn without replacement. BOS, if
    any, replaces the first token.

    `dataset` is `ruler:TASK`, `recall`, `recall:BOOKS`, a prompt set, or books (a name, files or
    folders). `gen_len`: tokens of recall's continuation. `counted_by`: the flags behind
    `num_prompts`. `is_whole`: a set's prompts keep lengths up to `prefix_len`. `skip_tokens`: left
    out of each book (None: by SKIP_TOKENS). `batch`: a short text gives whole batches of so many.
    `chat`: what a chat template puts around each text, BOS included, within `prefix_len`, and
    between the messages of a conversation.

    Raises ValueError for an unknown or unreadable dataset (see `read_books`), too few prefixes, and
    too short ones.
    """
    kind, colon, name = dataset.partition(":")
    if skip_tokens is not None and (kind == "ruler" or is_prompt_set(dataset)):
        raise ValueError(
            f"--skip_tokens {skip_tokens} does nothing with --dataset {dataset}, which is not cut "
            "from books; leave it out"
        )
    if kind == "recall" and chat is not None:
        raise ValueError(
            f"{FLAG}: the answer of --dataset {dataset} goes on where the prompt ends, within the "
            f"text that a chat template closes; {WAY_OUT}"
        )
    if chat is not None:
        bos_token_id = None
    frame = Frame() if chat is None else chat.frame
    if kind == "ruler":
        prompts, strings = ruler.make_prompts(
            name, tokenizer.encode, bos_token_id, prefix_len, num_prompts, seed, frame
        )
        digest = _hash_prompts(prompts)
        return Workload(dataset, prompts, None, None, None, seed, digest, strings)
    if is_prompt_set(dataset):
        return _of_prompt_set(
            dataset,
            tokenizer,
            bos_token_id,
            prefix_len,
            num_prompts,
            seed,
            counted_by,
            is_whole,
            batch,
            chat,
        )
    books = dataset
    if kind == "recall":
        books = name if colon else "demo"
    skip = SKIP_TOKENS.get(books, 0) if skip_tokens is None else skip_tokens
    cut = _prefixes_of_books(
        books,
        tokenizer,
        bos_token_id,
        prefix_len,
        num_prompts,
        seed,
        counted_by,
        skip,
        batch,
        frame,
    )
    if kind != "recall":
        return cut
    prompts, answers = recall_prompts(cut.prompts, gen_len, seed)
    digest = _hash_prompts(prompts)
    dataset = f"recall:{cut.dataset}"
    return replace(cut, dataset=dataset, prompts=prompts, answers=answers, sha256=digest)


def _prefixes_of_books(
    books: str,
    tokenizer: Tokenizer,
    bos_token_id: int | None,
    prefix_len: int,
    num_prompts: int,
    seed: int,
    counted_by: str,
    skip: int,
    batch: int | None,
    frame: Frame,
) -> Workload:
    name = title_of(books)
    room = frame.room(prefix_len)
    texts, places = _cut_books(books, tokenizer, skip, room, num_prompts)
    num_prompts = _enough(len(places), num_prompts, batch)
    if len(places) < num_prompts:
        after = f" after the first {skip} of each text (--skip_tokens)" if skip else ""
        raise ValueError(
            f"--dataset {name} holds {len(places)} prefixes of --prefix_len {prefix_len} tokens"
            f"{after}; {num_prompts} are needed ({counted_by})"
        )
    random.Random(seed).shuffle(places)
    sources = tuple(places[:num_prompts])
    prompts = tuple(frame.around(_prefix(texts[b], c, room, bos_token_id)) for b, c in sources)
    digest = _hash_prompts(prompts)
    return Workload(name, prompts, sources, len(places), skip, seed, digest)


def _enough(num_held: int, num_wanted: int, batch: int | None) -> int:
    """The prompts to draw from `num_held`: with `batch`, whole batches, at least one."""
    if batch is None or num_held >= num_wanted:
        return num_wanted
    return max(1, num_held // batch) * batch


def _cut_books(
    books: str, tokenizer: Tokenizer, skip: int, prefix_len: int, num_prompts: int
) -> tuple[list[array[int]], list[tuple[int, int]]]:
    texts: list[array[int]] = []
    places = list[tuple[int, int]]()
    for text in read_books(books, MOST_ITEMS):
        ids = array("q", tokenizer.encode(text))
        places += [(len(texts), c) for c in range(max(len(ids) - skip, 0) // prefix_len)]
        texts.append(ids[skip:])
        if len(texts) >= ENOUGH_BOOKS and len(places) >= num_prompts:
            break
    return texts, places


# Why an item of a prompt set is left out, as a record has it (`records/workload.py`).
LONGER = "longer"
SHORTER = "shorter"
REFUSED = "refused"


@dataclass
class DrawnItems:
    """The items of a prompt set that were drawn: those that became prompts of at most, or of
    exactly, `prefix_len` tokens (`is_whole`, or not), and how many were left out."""

    prefix_len: int
    is_whole: bool
    taken: list[tuple[int, PromptItem]] = field(default_factory=list)
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    refusal: str = ""  # of the last one that the chat template refused

    def leave_out(self, reason: str) -> None:
        self.left_out[reason] = self.left_out.get(reason, 0) + 1

    def take(self, index: int, item: PromptItem, frame: Frame, ids: Sequence[int]) -> None:
        """Make a prompt of item `index`, whose text has these ids, if its length serves."""
        room = self.prefix_len - frame.num_tokens
        if len(ids) > room if self.is_whole else room < 1:
            self.leave_out(LONGER)
        elif len(ids) < room and not self.is_whole:
            self.leave_out(SHORTER)
        else:
            self.taken.append((index, item))
            self.prompts.append(frame.around(ids if self.is_whole else cut_middle(ids, room)))

    def keep(self, num_prompts: int) -> None:
        del self.taken[num_prompts:], self.prompts[num_prompts:]

    @property
    def missing_text(self) -> str:
        """What there is, for a message."""
        bound = "most" if self.is_whole else "least"
        count = len(self.prompts)
        return f"holds {count} prompts of at {bound} --prefix_len {self.prefix_len} tokens"

    @property
    def refused_text(self) -> str:
        if not self.refusal:
            return ""
        count = self.left_out[REFUSED]
        return f"; {count} more are left out, because the chat template {self.refusal}"


def _draw_items(
    dataset: str,
    encode: Callable[[Sequence[str]], list[list[int]]],
    drawn: DrawnItems,
    num_prompts: int,
    seed: int,
    chat: Frames | None,
) -> int:
    """Draws items in random order until there are enough prompts. Returns how many ask something.
    `encode` gives the ids of the texts of a prompt."""
    asked = [(i, item) for i, item in enumerate(read_prompts(dataset, MOST_ITEMS)) if item.is_asked]
    random.Random(seed).shuffle(asked)
    frames = {} if chat is None else chat.of([item.roles for _, item in asked])
    for index, item in asked:
        if len(drawn.prompts) == num_prompts:
            break
        frame = Frame() if chat is None else frames[item.roles]
        if isinstance(frame, Refusal):
            drawn.refusal = frame.reason
            drawn.leave_out(REFUSED)
            continue
        texts = [item.plain_text] if chat is None else item.contents
        drawn.take(index, item, frame, frame.joined(encode(texts)))
    return len(asked)


def _of_prompt_set(
    dataset: str,
    tokenizer: Tokenizer,
    bos: int | None,
    prefix_len: int,
    num_prompts: int,
    seed: int,
    counted_by: str,
    is_whole: bool,
    batch: int | None,
    chat: Frames | None,
) -> Workload:
    """Items of a prompt set that ask something, in random order: whole up to `prefix_len` tokens,
    or longer ones cut in the middle to exactly so many."""
    start = [] if bos is None else [bos]

    def encode(texts: Sequence[str]) -> list[list[int]]:
        first, *others = map(tokenizer.encode, texts)
        return [[*start, *first], *others]

    if chat is not None:
        chat.frame.room(prefix_len)
    drawn = DrawnItems(prefix_len, is_whole)
    num_asked = _draw_items(dataset, encode, drawn, num_prompts, seed, chat)
    num_prompts = _enough(len(drawn.prompts), num_prompts, batch)
    drawn.keep(num_prompts)
    name = ",".join(f"{kind}:{Path(of_set).name}" for kind, of_set in sets_of(dataset))
    if len(drawn.prompts) < num_prompts:
        raise ValueError(
            f"--dataset {name} {drawn.missing_text}; {num_prompts} are needed ({counted_by})"
            f"{drawn.refused_text}"
        )
    prompts = tuple(drawn.prompts)
    return Workload(
        name,
        prompts,
        tuple((index, 0) for index, _ in drawn.taken),
        num_asked,
        0,
        seed,
        _hash_prompts(prompts),
        categories=tuple(item.category for _, item in drawn.taken),
        left_out=drawn.left_out,
        later_turns=tuple(len(item.later) for _, item in drawn.taken),
    )


def encode_corpus(path: str, tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """The token ids of a file for prompt lookup. Raises ValueError for an unreadable file, and for
    ids of another vocabulary."""
    most = ENOUGH_BOOKS if path in NAMED_READERS else MOST_ITEMS
    ids = tuple(chain.from_iterable(read_corpus(path, most, tokenizer.encode)))
    if not 0 <= min(ids, default=0) <= max(ids, default=0) < vocab_size:
        raise ValueError(
            f"--lookup_corpus {path}: token ids from {min(ids)} to {max(ids)} are of another "
            f"tokenizer; the model's are below {vocab_size}"
        )
    return ids


def _prefix(book: array[int], chunk: int, prefix_len: int, bos: int | None) -> tuple[int, ...]:
    tokens = book[chunk * prefix_len : (chunk + 1) * prefix_len]
    if bos is not None:
        tokens[0] = bos
    return tuple(tokens)


def _hash_prompts(prompts: tuple[tuple[int, ...], ...]) -> str:
    """sha256 over each prompt's length and ids, as little-endian int64 on every platform."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(struct.pack(f"<{len(prompt) + 1}q", len(prompt), *prompt))
    return digest.hexdigest()
