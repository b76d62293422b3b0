"""Workload: the token prefixes of a benchmark run, and their known answers."""

from __future__ import annotations

import hashlib
import random
import struct
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from magicdec.model.tokenizer import Tokenizer
from magicdec.workload import ruler
from magicdec.workload.answers import Answer, recall_prompts
from magicdec.workload.books import (
    NAMED_READERS,
    read_books,
    read_categorized_books,
    read_corpus,
    read_prompts,
    title_of,
)
from magicdec.workload.chat_template import FLAG, WAY_OUT, Frame, Frames, Refusal
from magicdec.workload.conversations import Conversation, conversation_of, roles_of_turns
from magicdec.workload.prompt_sets import (
    PromptItem,
    Roles,
    cut_middle,
    is_prompt_set,
    later_texts,
    sets_of,
)
from magicdec.workload.traces.block_texts import BlockTexts
from magicdec.workload.traces.replay import Replay

ENOUGH_BOOKS = 50  # of more only as many are read as the prompts need
MOST_ITEMS = 5000  # that are read of a dataset
# Tokens skipped in each book of a published dataset, as in the original suite: title page, contents
# and preface. Of a user's own text nothing is skipped.
SKIP_TOKENS = {"pg19": 8000}


@dataclass(frozen=True)
class Workload:
    """The prefixes in the order of the run, and their `answers`, if known. `sources` are (book
    index, chunk index), drawn from `num_available` prefixes; None if generated. `sha256` is of
    token ids and prompt boundaries. `categories` are those of the books or items, some of them
    None. Of a prompt set, `conversations` are the turns of items, of which `prompts` are the first,
    and `left_out` counts the items that were drawn and left out, by reason."""

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
    conversations: tuple[Conversation, ...] | None = None

    def first(self, num_prompts: int) -> Workload:
        prompts = self.prompts[:num_prompts]
        talks = self.conversations
        return replace(
            self,
            prompts=prompts,
            sources=None if self.sources is None else self.sources[:num_prompts],
            answers=None if self.answers is None else self.answers[:num_prompts],
            categories=None if self.categories is None else self.categories[:num_prompts],
            conversations=None if talks is None else talks[:num_prompts],
            sha256=_hash_prompts(prompts),
        )


@dataclass(frozen=True)
class Wanted:
    """The prompts to make: so many of `prefix_len` tokens, to be continued by `gen_len`.

    `cut_from`: prompts from books are the beginnings of those with so many tokens (None: whole).
    `counted_by`: the flags behind `num_prompts`. `is_whole`: a set's prompts keep lengths up to
    `prefix_len`. `batch`: a short text gives whole batches of so many. `turns`: questions of a
    conversation that are asked at most, within `prefix_len` with the answers to those before, each
    `think_s` after the answer before it. `replay`: the sessions whose prompts are to be made.
    """

    prefix_len: int
    num_prompts: int
    seed: int
    gen_len: int = 64
    counted_by: str = "--B x --num_batches"
    is_whole: bool = False
    batch: int | None = None
    turns: int = 1
    think_s: float = 0.0
    cut_from: int | None = None
    replay: Replay | None = None

    def enough(self, num_held: int) -> int:
        """The prompts to draw from `num_held`: with `batch`, whole batches, at least one."""
        if self.batch is None or num_held >= self.num_prompts:
            return self.num_prompts
        return max(1, num_held // self.batch) * self.batch


def build_workload(
    dataset: str,
    tokenizer: Tokenizer,
    bos_token_id: int | None,
    wanted: Wanted,
    skip_tokens: int | None = None,
    chat: Frames | None = None,
) -> Workload:
    """Distinct prefixes: chunks of books, drawn without replacement. BOS, if any, replaces the
    first token.

    `dataset` is `ruler:TASK`, `recall`, `recall:BOOKS`, a prompt set, or books (a name, files or
    folders). `skip_tokens`: left out of each book (None: by SKIP_TOKENS). `chat`: what a chat
    template puts around each text, BOS included, within `prefix_len`, and between the messages of a
    conversation.

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
    if wanted.replay is not None:
        return _sessions_workload(
            dataset, tokenizer, bos_token_id, wanted, wanted.replay, skip_tokens
        )
    if chat is not None:
        bos_token_id = None
    frame = Frame() if chat is None else chat.frame
    seed = wanted.seed
    if kind == "ruler":
        prompts, strings = ruler.make_prompts(
            name,
            tokenizer.encode,
            bos_token_id,
            wanted.prefix_len,
            wanted.num_prompts,
            seed,
            frame,
        )
        digest = _hash_prompts(prompts)
        return Workload(dataset, prompts, None, None, None, seed, digest, strings)
    if is_prompt_set(dataset):
        return _prompt_set_workload(dataset, tokenizer, bos_token_id, wanted, chat)
    books = dataset
    if kind == "recall":
        books = name if colon else "demo"
    skip = SKIP_TOKENS.get(books, 0) if skip_tokens is None else skip_tokens
    cut = _prefixes_of_books(books, tokenizer, bos_token_id, wanted, skip, frame)
    if kind != "recall":
        return cut
    prompts, answers = recall_prompts(cut.prompts, wanted.gen_len, seed)
    digest = _hash_prompts(prompts)
    dataset = f"recall:{cut.dataset}"
    return replace(cut, dataset=dataset, prompts=prompts, answers=answers, sha256=digest)


def _prefixes_of_books(
    books: str,
    tokenizer: Tokenizer,
    bos_token_id: int | None,
    wanted: Wanted,
    skip: int,
    frame: Frame,
) -> Workload:
    name = title_of(books)
    prefix_len = wanted.prefix_len
    seed = wanted.seed
    room = frame.room(prefix_len)
    chunk_len = prefix_len if wanted.cut_from is None else wanted.cut_from
    chunk = frame.room(chunk_len)
    texts, names, places = _cut_books(books, tokenizer, skip, chunk, wanted.num_prompts)
    num_prompts = wanted.enough(len(places))
    if len(places) < num_prompts:
        after = f" after the first {skip} of each text (--skip_tokens)" if skip else ""
        raise ValueError(
            f"--dataset {name} holds {len(places)} prefixes of --prefix_len {chunk_len} tokens"
            f"{after}; {num_prompts} are needed ({wanted.counted_by})"
        )
    random.Random(seed).shuffle(places)
    if any(names):
        places = in_turns(places, [names[b] for b, _ in places])
    sources = tuple(places[:num_prompts])
    chunks = (_prefix(texts[b], c, chunk, bos_token_id) for b, c in sources)
    prompts = tuple(frame.around(tokens[:room]) for tokens in chunks)
    digest = _hash_prompts(prompts)
    categories = tuple(names[b] for b, _ in sources)
    return Workload(
        name,
        prompts,
        sources,
        len(places),
        skip,
        seed,
        digest,
        categories=categories if any(categories) else None,
    )


def in_turns(
    places: Sequence[tuple[int, int]], categories: Sequence[str | None]
) -> list[tuple[int, int]]:
    """Places in an order in which their categories take turns: first one of each, and so on."""
    num_before: Counter[str | None] = Counter()
    turns = list[int]()
    for category in categories:
        turns.append(num_before[category])
        num_before[category] += 1
    order = sorted(range(len(places)), key=lambda index: turns[index])
    return [places[index] for index in order]


def _cut_books(
    books: str, tokenizer: Tokenizer, skip: int, prefix_len: int, num_prompts: int
) -> tuple[list[array[int]], list[str | None], list[tuple[int, int]]]:
    """The tokens of books, their categories, and the places of prefixes: book and chunk."""
    texts: list[array[int]] = []
    categories = list[str | None]()
    places = list[tuple[int, int]]()
    for text, category in read_categorized_books(books, MOST_ITEMS):
        ids = array("q", tokenizer.encode(text))
        places += [(len(texts), c) for c in range(max(len(ids) - skip, 0) // prefix_len)]
        texts.append(ids[skip:])
        categories.append(category)
        if len(texts) >= ENOUGH_BOOKS and len(places) >= num_prompts:
            break
    return texts, categories, places


# Why an item of a prompt set is left out, as a record has it (`records/workload.py`).
LONGER = "longer"
SHORTER = "shorter"
REFUSED = "refused"


@dataclass
class DrawnItems:
    """The items of a prompt set that were drawn: those that became prompts, and how many were left
    out. `encode` gives the ids of the messages of a prompt, and `encode_later` of what follows."""

    wanted: Wanted
    encode: Callable[[Sequence[str]], list[list[int]]]
    encode_later: Callable[[str], list[int]]
    taken: list[tuple[int, PromptItem]] = field(default_factory=list)
    conversations: list[Conversation] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    refusal: str = ""  # of the last one that the chat template refused

    def draw(self, dataset: str, chat: Frames | None) -> int:
        """Draws items in random order until there are enough prompts. Returns how many ask
        something."""
        turns = self.wanted.turns
        items = read_prompts(dataset, MOST_ITEMS)
        if turns > 1:
            items = [item.in_turns() for item in items]
        asked = [(i, item) for i, item in enumerate(items) if item.is_asked]
        random.Random(self.wanted.seed).shuffle(asked)
        roles = [name for _, item in asked for name in roles_of_turns(item, turns)]
        frames = None if chat is None else chat.of(roles)
        for index, item in asked:
            if len(self.taken) == self.wanted.num_prompts:
                break
            self._take(index, item, frames)
        return len(asked)

    def _take(
        self, index: int, item: PromptItem, frames: Mapping[Roles, Frame | Refusal] | None
    ) -> None:
        """Make a prompt of item `index`, if its length serves: whole, or cut in the middle."""
        wanted = self.wanted
        frame = Frame() if frames is None else frames[item.roles]
        if isinstance(frame, Refusal):
            self.refusal = frame.reason
            return self._leave_out(REFUSED)
        texts = self.encode([item.plain_text] if frames is None else item.contents)
        ids = frame.joined(texts)
        room = wanted.prefix_len - frame.num_tokens
        if len(ids) > room if wanted.is_whole else room < 1:
            return self._leave_out(LONGER)
        if len(ids) < room and not wanted.is_whole:
            return self._leave_out(SHORTER)
        first = frame.around(ids if wanted.is_whole else cut_middle(ids, room))
        asked = item.later[: wanted.turns - 1]
        later = [self.encode_later(text) for text in later_texts(asked, is_chat=frames is not None)]
        made = conversation_of(
            item, first, texts, later, frames, wanted.turns, wanted.prefix_len, wanted.gen_len
        )
        if wanted.think_s:
            made = made.waiting(wanted.think_s)
        self.taken.append((index, item))
        self.conversations.append(made)

    def _leave_out(self, reason: str) -> None:
        self.left_out[reason] = self.left_out.get(reason, 0) + 1

    def keep(self, num_prompts: int) -> None:
        del self.taken[num_prompts:], self.conversations[num_prompts:]

    @property
    def missing_text(self) -> str:
        """What there is, for a message."""
        bound = "most" if self.wanted.is_whole else "least"
        count = len(self.taken)
        return f"holds {count} prompts of at {bound} --prefix_len {self.wanted.prefix_len} tokens"

    @property
    def refused_text(self) -> str:
        if not self.refusal:
            return ""
        count = self.left_out[REFUSED]
        return f"; {count} more are left out, because the chat template {self.refusal}"


def _prompt_set_workload(
    dataset: str, tokenizer: Tokenizer, bos: int | None, wanted: Wanted, chat: Frames | None
) -> Workload:
    """Items of a prompt set that ask something, in random order: whole up to `prefix_len` tokens,
    or longer ones cut in the middle to exactly so many."""
    start = [] if bos is None else [bos]

    def encode(texts: Sequence[str]) -> list[list[int]]:
        first, *others = map(tokenizer.encode, texts)
        return [[*start, *first], *others]

    if chat is not None:
        chat.frame.room(wanted.prefix_len)
    drawn = DrawnItems(wanted, encode, tokenizer.encode)
    num_asked = drawn.draw(dataset, chat)
    num_prompts = wanted.enough(len(drawn.taken))
    drawn.keep(num_prompts)
    name = ",".join(f"{kind}:{Path(prompt_set).name}" for kind, prompt_set in sets_of(dataset))
    if len(drawn.taken) < num_prompts:
        raise ValueError(
            f"--dataset {name} {drawn.missing_text}; {num_prompts} are needed ({wanted.counted_by})"
            f"{drawn.refused_text}"
        )
    talks = tuple(drawn.conversations)
    if wanted.turns > 1 and all(len(talk.turns) == 1 for talk in talks):
        raise ValueError(
            f"--turns {wanted.turns}: no prompt of --dataset {name} has a second question that "
            f"fits into --prefix_len {wanted.prefix_len} behind an answer of --gen_len "
            f"{wanted.gen_len}; choose a larger --prefix_len, or a set of conversations such as "
            "mt_bench, or leave it out"
        )
    prompts = tuple(talk.prompt_after([]) for talk in talks)
    later = [piece for talk in talks for pieces in talk.turns[1:] for piece in pieces]
    return Workload(
        name,
        prompts,
        tuple((index, 0) for index, _ in drawn.taken),
        num_asked,
        0,
        wanted.seed,
        _hash_prompts((*prompts, *later)),
        categories=tuple(item.category for _, item in drawn.taken),
        left_out=drawn.left_out,
        conversations=talks,
    )


def _sessions_workload(
    dataset: str,
    tokenizer: Tokenizer,
    bos: int | None,
    wanted: Wanted,
    replay: Replay,
    skip_tokens: int | None,
) -> Workload:
    """The prompts of all requests of a trace: their own texts, or blocks that are cut from
    books."""
    skip = SKIP_TOKENS.get(dataset, 0) if skip_tokens is None else skip_tokens
    corpus = array("q")
    for text in read_books(dataset, MOST_ITEMS) if replay.has_blocks else ():
        corpus += array("q", tokenizer.encode(text))[skip:]
        if len(corpus) >= replay.num_block_tokens:
            break
    name = title_of(dataset) if replay.has_blocks else replay.name
    texts = BlockTexts(name, corpus, wanted.seed, bos)
    talks = list[Conversation]()
    for session, plans in zip(replay.sessions, replay.plans(), strict=True):
        prompts = [texts.ids_of(session.namespace, request.prompt) for request in session.requests]
        talks.append(Conversation(tuple((prompt,) for prompt in prompts), plans=plans))
    every = tuple(prompt for talk in talks for (prompt,) in talk.turns)
    return Workload(
        name,
        tuple(talk.known_prompt(0) for talk in talks),
        None,
        None,
        skip if replay.has_blocks else None,
        wanted.seed,
        _hash_prompts(every),
        conversations=tuple(talks),
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
