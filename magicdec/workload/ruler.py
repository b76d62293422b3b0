"""RULER-style prompts of an exact number of tokens (RULER, arXiv 2404.06654, section 3), in this
project's own words. `Composer` finds the largest text of a task that fits, and pads with haystack.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from magicdec.workload.answers import Strings
from magicdec.workload.chat_template import Frame

# The haystack repeats these sentences (RULER's "noise").
HAYSTACK = (
    "The road goes on past the mill.",
    "The river is wide and slow.",
    "The bread on the table is still warm.",
    "A bell rings in the town.",
    "We walk a little and then we rest.",
)
# No adjective ends with another one and no noun begins with another one, so that no
# adjective-noun pair is a substring of another pair.
ADJECTIVES = """
    able amber ancient bitter blue bold brave brief bright broad calm careful clean clear clever
    cold common cool curious dark deep distant dry dusty eager early empty even faint fair famous
    fast fierce final firm flat foreign frank fresh gentle glad golden good grand gray great green
    happy hard heavy high hollow honest humble idle iron jolly kind large late lazy light little
    lively lonely long loud loyal lucky mellow merry mild narrow neat noble odd open pale
    patient plain polite proud quick quiet"""
NOUNS = """
    anchor apple arrow barrel basket beach bird boat bottle branch bridge brush bucket butter
    button candle carpet castle cellar chair cherry circle cloud coat coin corner cottage crown cup
    desk doctor donkey door dragon drum eagle engine farmer feather fence field finger fire fish
    flag flower forest fountain fox garden gate ghost giant glass glove goat guitar hammer harbor
    hat hill horse house island jacket jewel kettle key kitchen kite ladder lake lamp lantern leaf
    lemon letter lion market meadow mirror monkey moon mountain needle nest ocean orange owl paper
    pencil piano pillow pocket pond potato queen rabbit ribbon"""
NUM_KEYS = 4  # needles of niah_multikey
ORDINALS = ("first", "second", "third", "fourth")  # needles with one key in mrcr
NUM_VARIABLES = 5  # of vt: one is assigned a value, each of the others is assigned the one before
NUM_COMMON = 10  # words that cwe asks for
# occurrences of a common word and of any other word in cwe's list
MOST_COMMON = 30
MOST_RARE = 3
NUM_FREQUENT = 3  # words that fwe asks for
DOTS = "...."  # fwe's most frequent word, which is not part of the answer


@dataclass(frozen=True)
class Sample:
    """The text of a prompt. The question ends with the beginning of the answer, for base models."""

    head: str
    body: str
    question: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Task:
    """A task. `make` makes a sample of `size` units (sentences or words), at least `least`, equal
    for equal generator states."""

    make: Callable[[random.Random, int], Sample]
    least: int


def niah_single(rng: random.Random, size: int) -> Sample:
    """A needle in a haystack: one sentence with a number among `size` sentences."""
    return _niah(rng, size, num_keys=1)


def niah_multikey(rng: random.Random, size: int) -> Sample:
    """`niah_single` with further needles, whose keys are not asked for."""
    return _niah(rng, size, num_keys=NUM_KEYS)


def mrcr(rng: random.Random, size: int) -> Sample:
    """Several needles with the same key, one of which is asked for by its place among them, and as
    many with another key (after MRCR, arXiv 2409.12640, section 3)."""
    wanted, other = _words(rng, 2)
    keys = [wanted, other] * len(ORDINALS)
    rng.shuffle(keys)
    values = _numbers(rng, len(keys))
    needles = [f"The magic number of {k} is {v}." for k, v in zip(keys, values, strict=True)]
    place = rng.randrange(len(ORDINALS))
    answer = [value for key, value in zip(keys, values, strict=True) if key == wanted][place]
    which = f"{ORDINALS[place]} magic number of {wanted}"
    return Sample(
        head="Magic numbers are hidden in the text below, several of each name. Remember them in "
        "their order.\n",
        body=_hide(rng, needles, size),
        question=f"\nQuestion: What is the {which} in the text? Answer: The {which} is",
        answers=(answer,),
    )


def vt(rng: random.Random, size: int) -> Sample:
    """Variable tracking: a chain of assignments of one value, hidden among `size` sentences."""
    letters = "".join(rng.sample("ABCDEFGHIJKLMNOPQRSTUVWXYZ", 5 * NUM_VARIABLES))
    names = [letters[i : i + 5] for i in range(0, len(letters), 5)]
    value = rng.randrange(10_000, 100_000)
    links = zip(names, [str(value), *(f"VAR {name}" for name in names)], strict=False)
    return Sample(
        head="Variables are set in the text below. Keep track of their values.\n",
        body=_hide(rng, [f"VAR {name} = {source}." for name, source in links], size),
        question=f"\nQuestion: Which variables have the value {value}, directly or through another "
        f"one? Answer: The {NUM_VARIABLES} variables that have the value {value} are",
        answers=tuple(names),
    )


def cwe(rng: random.Random, size: int) -> Sample:
    """Common words extraction: a shuffled, numbered list of `size` words. Up to 600, half are
    common; longer lists are filled with rare words."""
    num_others = len(_all_words()) - NUM_COMMON
    often = min(MOST_COMMON, size // 20)
    rare = max(1, often * MOST_RARE // MOST_COMMON, -(-size // num_others))
    often = max(often, rare // MOST_RARE * MOST_COMMON)  # if rare words repeat
    num_rare = size - NUM_COMMON * often
    words = _words(rng, NUM_COMMON + -(-num_rare // rare))
    common = words[:NUM_COMMON]
    word_list = common * often + (words[NUM_COMMON:] * rare)[:num_rare]
    rng.shuffle(word_list)
    return Sample(
        head="Below is a numbered list of words. Remember those that come most often.\n",
        body=" ".join(f"{i}. {word}" for i, word in enumerate(word_list, 1)),
        question=f"\nQuestion: Which {NUM_COMMON} words come most often in the list? "
        f"Answer: The {NUM_COMMON} words that come most often are",
        answers=tuple(common),
    )


def fwe(rng: random.Random, size: int) -> Sample:
    """Frequent words extraction: `size` coded words. The k-th most frequent word appears 1 / k^2
    times as often as the first, which is DOTS."""
    share = 6 / math.pi**2  # the first word's share, since the sum of 1 / k^2 is pi^2 / 6
    counts = [int(size * share / k**2) for k in range(1, size + 1)]
    counts = [count for count in counts if count > 0]
    counts += [1] * (size - sum(counts))  # the tail: words that appear once
    coded = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in counts[1:]]
    words = [DOTS, *dict.fromkeys(coded)]  # without duplicates
    text = [word for word, count in zip(words, counts, strict=False) for _ in range(count)]
    rng.shuffle(text)
    return Sample(
        head=f"Below is a text of coded words. Keep track of how often each comes; "
        f"{DOTS} is not a word.\n",
        body=" ".join(text),
        question=f"\nQuestion: Which {NUM_FREQUENT} coded words come most often in the text? "
        f"Answer: The {NUM_FREQUENT} coded words that come most often are",
        answers=tuple(words[1 : 1 + NUM_FREQUENT]),
    )


TASKS = {
    "niah_single": Task(niah_single, least=8),
    "niah_multikey": Task(niah_multikey, least=8),
    "mrcr": Task(mrcr, least=8),
    "vt": Task(vt, least=8),
    "cwe": Task(cwe, least=80),
    "fwe": Task(fwe, least=80),
}


def _niah(rng: random.Random, size: int, num_keys: int) -> Sample:
    keys = _words(rng, num_keys)
    values = _numbers(rng, num_keys)
    needles = [f"The magic number of {k} is {v}." for k, v in zip(keys, values, strict=True)]
    wanted_key = rng.randrange(num_keys)
    return Sample(
        head="Magic numbers are hidden in the text below. Remember them.\n",
        body=_hide(rng, needles, size),
        question=f"\nQuestion: What is the magic number of {keys[wanted_key]} in the text? "
        f"Answer: The magic number of {keys[wanted_key]} is",
        answers=(values[wanted_key],),
    )


def _numbers(rng: random.Random, count: int) -> list[str]:
    return [str(value) for value in rng.sample(range(1_000_000, 10_000_000), count)]


def _hide(rng: random.Random, statements: Sequence[str], size: int) -> str:
    places = sorted(rng.randint(0, size) for _ in statements)
    text = [HAYSTACK[i % len(HAYSTACK)] for i in range(size)]
    for place, statement in zip(reversed(places), reversed(statements), strict=True):
        text.insert(place, statement)
    return " ".join(text)


def _words(rng: random.Random, count: int) -> list[str]:
    return rng.sample(_all_words(), count)


def _all_words() -> list[str]:
    return [f"{adjective}-{noun}" for noun in NOUNS.split() for adjective in ADJECTIVES.split()]


def make_prompts(
    name: str,
    encode: Callable[[str], list[int]],
    bos: int | None,
    prefix_len: int,
    num_prompts: int,
    seed: int,
    frame: Frame = Frame(),
) -> tuple[tuple[tuple[int, ...], ...], tuple[Strings, ...]]:
    """Prompts of `prefix_len` tokens, including BOS and `frame`, and their answers. Raises
    ValueError for an unknown task and for a prefix too short for it."""
    if name not in TASKS:
        choices = ", ".join(f"ruler:{task}" for task in TASKS)
        raise ValueError(f"--dataset {f'ruler:{name}'!r} is not known; choose from {choices}")
    composer = Composer(TASKS[name], encode, () if bos is None else (bos,))
    seeds = [f"{seed}:{name}:{i}" for i in range(num_prompts)]
    least = max(composer.num_tokens(s, composer.task.least) for s in seeds)
    room = prefix_len - frame.num_tokens
    if room < least:
        raise ValueError(
            f"--prefix_len {prefix_len} is too short for --dataset ruler:{name}; "
            f"it must be at least {least + frame.num_tokens}"
        )
    size = composer.largest_size(seeds[0], room)
    sizes = [composer.fitting_size(s, size, room) for s in seeds]
    samples = [composer.sample(s, n) for s, n in zip(seeds, sizes, strict=True)]
    prompts = tuple(frame.around(composer.prompt(sample, room)) for sample in samples)
    return prompts, tuple(Strings(sample.answers) for sample in samples)


@dataclass(frozen=True)
class Composer:
    """The composer of token ids: `start` (BOS, if any), the head, then haystack, body and question,
    encoded together."""

    task: Task
    encode: Callable[[str], list[int]]
    start: tuple[int, ...]

    def sample(self, seed: str, size: int) -> Sample:
        return self.task.make(random.Random(seed), size)

    def num_tokens(self, seed: str, size: int) -> int:
        """Tokens of the prompt with one sentence of haystack, the part that may be cut."""
        sample = self.sample(seed, size)
        return len(self._head(sample)) + len(self._rest(sample, 1))

    def largest_size(self, seed: str, prefix_len: int) -> int:
        """The largest size that fits, to within 1/64, because every try encodes the whole text."""
        low = self.task.least
        high = 2 * self.task.least
        while self.num_tokens(seed, high) <= prefix_len:
            low = high
            high = 2 * high
        while high - low > max(1, low // 64):
            middle = (low + high) // 2
            if self.num_tokens(seed, middle) <= prefix_len:
                low = middle
            else:
                high = middle
        return low

    def fitting_size(self, seed: str, size: int, prefix_len: int) -> int:
        """`size`, reduced if this sample's words take more tokens than the first sample's."""
        while size > self.task.least and self.num_tokens(seed, size) > prefix_len:
            size -= max(1, size // 64)
        return max(size, self.task.least)

    def prompt(self, sample: Sample, prefix_len: int) -> tuple[int, ...]:
        """Exactly `prefix_len` tokens. The haystack is cut at its beginning."""
        head = self._head(sample)
        sentences = 1
        room = prefix_len - len(head)
        rest = self._rest(sample, sentences)
        while len(rest) < room:
            sentences *= 2
            rest = self._rest(sample, sentences)
        return (*head, *rest[len(rest) - room :])

    def _head(self, sample: Sample) -> list[int]:
        return [*self.start, *self.encode(sample.head)]

    def _rest(self, sample: Sample, sentences: int) -> list[int]:
        filling = [HAYSTACK[-1 - i % len(HAYSTACK)] for i in reversed(range(sentences))]
        return self.encode(" ".join([*filling, sample.body]) + sample.question)
