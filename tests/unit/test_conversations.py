"""Conversations as requests: the prompt of each turn is what `transformers` makes of the answers
before it, later turns arrive when these end, and every mode answers as one that decodes alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from conftest import Launch
from identities import check_metrics
from serving_command import parse_as, prepare_as
from test_batching import measured
from test_chat_template import CHATTED, FRAME, TEMPLATES, reference, write
from test_prompt_sets import name_of
from test_workload import BOS, Characters, build
from transformers import AutoModelForCausalLM

from magicdec.bench.check.passes import check_differing
from magicdec.bench.check.replays import unanswered
from magicdec.bench.showing import tables, turn_tables
from magicdec.engine.arrivals import Arrivals
from magicdec.model.tokenizer import load_tokenizer
from magicdec.records.computing import Beside, categories_of
from magicdec.records.pass_record import PassRecord, hash_output
from magicdec.records.reading import read_records
from magicdec.runner.request import Request, SamplingParams, Turn
from magicdec.workload.books import read_prompts
from magicdec.workload.chat_template import ChatTemplate
from magicdec.workload.conversations import Conversation, conversation_of, roles_of_turns
from magicdec.workload.prompt_sets import ChatMessage, PromptItem

ANSWERS = ("thus", "12\n345 é", "x = [1];", "the")


def asked(*questions: str, system: str = "") -> PromptItem:
    first = [ChatMessage("system", system)] if system else []
    return PromptItem((*first, ChatMessage("user", questions[0])), later=questions[1:])


def test_a_chat_is_asked_question_by_question() -> None:
    """Every answer in it is then the model's own."""
    items = read_prompts(name_of("sharegpt", "sharegpt.json"), 9)
    first, second, _, fourth, _ = [item.in_turns() for item in items]
    assert (first.contents, first.later) == (["Why is the sea salty?"], ("Since when?",))
    assert (second, fourth) == (items[1], items[3]), "these have one question"
    (item, *_) = read_prompts(name_of("messages", "messages.jsonl"), 1)
    assert item.roles == ("system", "user", "assistant", "user")
    assert item.in_turns().roles == ("system", "user")
    assert item.in_turns().later == (item.contents[3],)
    (kept,) = read_prompts(name_of("mrcr", "mrcr.jsonl"), 1)
    assert kept.in_turns() == kept, "its answers are what it asks about"


@pytest.mark.parametrize("system", ["", "be brief"])
@pytest.mark.parametrize("name", ["blocks", "namespace"])
def test_prompts_are_those_of_transformers(tmp_path: Path, name: str, system: str) -> None:
    tokenizer = write(tmp_path, TEMPLATES[name])
    item = asked("the cat sat", "é 世界, 12", "x", system=system)
    frames = ChatTemplate(tokenizer).of(roles_of_turns(item, 3))
    encode = tokenizer.encode
    texts, later = [[encode(text) for text in parts] for parts in (item.contents, item.later)]
    frame = frames[item.roles]
    first = frame.around(frame.joined(texts))  # type: ignore[union-attr]
    talk = conversation_of(item, first, texts, later, frames, 3, 500, 20)
    assert (len(talk.turns), talk.num_left_out) == (3, 0)
    messages = [{"role": message.role, "content": message.content} for message in item.messages]
    for count in range(3):
        expected = reference(TEMPLATES[name]).apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        answers = [encode(answer) for answer in ANSWERS[:count]]
        assert list(talk.prompt_after(answers)) == expected
        messages += [{"role": "assistant", "content": ANSWERS[count]}]
        messages += [
            {"role": "user", "content": question} for question in item.later[count : count + 1]
        ]


def test_without_a_template_words_name_the_speakers(tmp_path: Path) -> None:
    set_of = {"turns": ["one", "two", "three"]}
    (tmp_path / "set.jsonl").write_text(json.dumps(set_of) + "\n")
    sizes = {"prefix_len": 200, "num_prompts": 1, "gen_len": 9, "is_whole": True}
    work = build(f"mt_bench:{tmp_path / 'set.jsonl'}", turns=3, **sizes)
    assert work.conversations is not None
    (talk,) = work.conversations
    prompt = talk.prompt_after([[*b"A, B"], [*b"C"]])
    assert prompt[0] == BOS and Characters().decode(prompt[1:]) == (  # type: ignore[attr-defined]
        "User: one\n\nAssistant:A, B\n\nUser: two\n\nAssistant:C\n\nUser: three\n\nAssistant:"
    )
    assert work.prompts == (talk.prompt_after([]),)


def test_turns_that_could_be_too_long_are_counted_and_not_asked() -> None:
    dataset = name_of("mt_bench", "mt_bench.jsonl")
    sizes = {"num_prompts": 5, "is_whole": True, "gen_len": 7}
    whole = build(dataset, chat=CHATTED, prefix_len=500, turns=9, **sizes)
    assert whole.conversations is not None
    lengths = [sum(map(len, talk.turns[1])) + 7 for talk in whole.conversations]
    assert (
        len(set(lengths)) > 2
        and sum(conversation.num_left_out for conversation in whole.conversations) == 0
    )
    for most in sorted(set(lengths))[:-1]:
        some = build(dataset, chat=CHATTED, prefix_len=most, turns=2, **sizes)
        assert some.prompts == whole.prompts and some.conversations is not None
        asked = [len(talk.turns) == 2 for talk in some.conversations]
        assert asked == [length <= most for length in lengths]
        assert [talk.num_left_out for talk in some.conversations] == [
            1 - has_all for has_all in asked
        ]
        assert some.sha256 != whole.sha256, "ranks compare later questions too"
    with pytest.raises(ValueError) as refused:
        build(dataset, chat=CHATTED, prefix_len=min(lengths) - 1, turns=2, **sizes)
    assert str(refused.value).startswith(
        "--turns 2: no prompt of --dataset mt_bench:mt_bench.jsonl has a second question that fits"
    )


def test_a_template_that_takes_no_answers_asks_the_first_question_alone(tmp_path: Path) -> None:
    template = "{% for m in messages if m.role == 'user' %}<|user|>{{ m.content }}{% endfor %}</s>"
    item = asked("the", "cat")
    frames = ChatTemplate(write(tmp_path, template)).of(roles_of_turns(item, 2))
    talk = conversation_of(item, (5, 6), [[5]], [[6]], frames, 2, 99, 1)
    assert talk == Conversation((((5, 6),),), 1)


def test_a_template_may_move_messages_but_not_answers(tmp_path: Path) -> None:
    """As one that puts the system's message before the last question."""
    after = tuple(
        replace(FRAME, between=((7,), (8,), (9,)), order=order)
        for order in ((1, 2, 0, 3), (2, 1, 0, 3))
    )
    item = asked("b", "d", system="a")
    texts = [[1], [2]]
    later = [[3]]
    for frame, expected in ((after[0], True), (after[1], True)):
        roles = roles_of_turns(item, 2)
        talk = conversation_of(item, (0,), texts, later, {roles[1]: frame}, 2, 99, 1)
        assert (len(talk.turns) == 2) == expected
    assert talk.prompt_after([[40, 41]])[len(FRAME.before) :][:4] == (40, 41, 7, 2)
    two = [*roles_of_turns(asked("b", "d", "e"), 3)]
    swapped = replace(FRAME, between=((7,),) * 4, order=(0, 3, 2, 1, 4))
    frames = {two[1]: replace(FRAME, between=((7,),) * 2, order=(0, 1, 2)), two[2]: swapped}
    talk = conversation_of(asked("b", "d", "e"), (0,), [[1]], [[3], [4]], frames, 3, 99, 1)
    assert (len(talk.turns), talk.num_left_out) == (2, 1), "answers in another order are refused"


def talking(lengths: Sequence[int], params: SamplingParams = SamplingParams(1)) -> list[Request]:
    """Requests of conversations of so many turns, whose prompts are all answers before them."""
    requests = list[Request]()
    for number, length in enumerate(lengths):
        before: tuple[Request, ...] = ()
        for turn in range(1, length + 1):
            prompt = (number,) if turn == 1 else ()
            request = Request(len(requests), prompt, params)
            request.turn = Turn(number, turn, before, lambda answers: (9, *chain(*answers)))
            before = (request,)
            requests.append(request)
    return requests


def test_the_next_turn_arrives_in_the_place_of_the_one_that_ended() -> None:
    requests = talking([1, 3, 2, 1])
    a, b1, b2, b3, c1, c2, d = requests
    arrivals = Arrivals(requests, 2)
    assert len(arrivals) == 7 and arrivals.take(9) == [a, b1]
    b1.append([4], 2.0)
    assert arrivals.take(9) == [b2] and (b2.arrived_s, b2.prompt_ids) == (2.0, (9, 4))
    b2.append([5], 3.0)
    a.append([6], 3.0)
    assert arrivals.known_s == [3.0, 3.0] and arrivals.take(9) == [c1, b3], "by number at a time"
    assert b3.prompt_ids == (9, 4, 5) and len(arrivals) == 2
    c1.append([7], 5.0)
    b3.append([8], 4.0)
    assert arrivals.take(9) == [d, c2] and not arrivals
    assert (d.arrived_s, c2.arrived_s) == (4.0, 5.0)


def test_conversations_of_an_open_loop_begin_at_their_times() -> None:
    """A later turn comes some time after the end before it, in the order of time; one that follows
    on two requests after the later end, and not before its own time."""
    requests = talking([2, 2, 1])
    a1, a2, b1, b2, c = requests
    for request, at_s in ((a1, 0.0), (b1, 1.0), (c, 9.0)):
        request.arrived_s = at_s
    for request, wait_s in ((a2, 5.0), (b2, 0.5)):
        assert request.turn is not None
        request.turn = replace(request.turn, wait_s=wait_s, root=request.turn.after[0])
    arrivals = Arrivals(requests)
    assert arrivals.is_timed and len(arrivals) == 5 and arrivals.known_s == [0.0, 1.0, 9.0]
    assert arrivals.take(2) == [a1, b1]
    a1.append([4], 2.0)
    b1.append([5], 3.0)
    assert arrivals.known_s == [3.5, 7.0, 9.0] and arrivals.count(6.0) == 1
    assert arrivals.take(9) == [b2, a2, c] and (b2.prompt_ids, a2.prompt_ids) == ((9, 5), (9, 4))
    assert not arrivals
    one, two, joined = talking([1, 1, 1])
    joined.turn = replace(Turn(0, 2, (one, two), tuple, wait_s=1.0, root=one), at_s=7.5)  # type: ignore[arg-type]
    arrivals = Arrivals([one, two, joined])
    assert arrivals.take(9) == [one, two]
    two.append([1], 4.0)
    assert arrivals.next_s == float("inf") and arrivals.count(99.0) == 0
    one.append([1], 3.0)
    assert arrivals.next_s == 7.5 and joined.prompt_ids == (2,), "its prompt is known"


def test_a_turn_has_the_category_of_its_conversation() -> None:
    """Where requests are none, the prompts of a later group are the same again."""
    numbers = [request.turn and request.turn.conversation for request in talking([1, 3, 2])]
    for conversations, categories, expected in (
        (numbers, ["x", None, "y"], ["x", None, None, None, "y", "y"]),
        ([None] * 4, ["x", "y"], ["x", "y", "x", "y"]),
    ):
        requests = [SimpleNamespace(conversation=conversation) for conversation in conversations]
        beside = Beside(is_drafting=True, categories=categories)
        parts: Any = SimpleNamespace(requests=requests)
        assert categories_of(parts, beside) == expected


def test_a_conversation_goes_on_without_the_token_that_ends_an_answer() -> None:
    first, second = talking([2], SamplingParams(3, eos_token_ids=(2,)))
    first.append([7, 2], 1.0)
    second.follow(1.0)
    assert second.prompt_ids == (9, 7) and first.output_ids == [7, 2]
    first, second = talking([2], SamplingParams(2, eos_token_ids=(2,)))
    first.append([7, 8], 1.0)
    second.follow(1.0)
    assert second.prompt_ids == (9, 7, 8)


WORDS = (
    "--num_requests",
    "5",
    "--turns",
    "3",
    "--concurrency",
    "2",
    "--gen_len",
    "6",
    "--prefix_len",
    "400",
    "--dtype",
    "float32",
    "--threads",
    "1",
    "--ignore_eos",
)


QUESTIONS = [
    [f"{'far ' * 9 * index}{turn}" for turn in range(count)]
    for index, count in enumerate((3, 1, 2, 3, 2))
]
NEXT = "\n\n"


def chats(path: Path) -> str:
    items = [{"category": "ab"[i % 2], "turns": turns} for i, turns in enumerate(QUESTIONS)]
    path.write_text("".join(json.dumps(item) + NEXT[1] for item in items))
    return f"mt_bench:{path}"


def test_every_mode_answers_every_turn_as_it_would_alone(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """The prompt of each turn has the answers before it, by a lone greedy run of that prompt."""
    modes = (
        "sequential",
        "static",
        "inflight",
        "inflight+draft",
        "ring",
        "ring+draft",
        "pipeinfer",
    )
    experiment = parse_as(
        "serve",
        tmp_path,
        *WORDS,
        "--model",
        str(tiny_checkpoint),
        "--dataset",
        chats(tmp_path / "set.jsonl"),
        "--draft",
        "ngram",
        "--prefix_cache",
        "--block_tokens",
        "16",
        "--kv_offload",
        "host",
        "--modes",
        *modes,
    )
    records = measured(experiment).records
    assert [record.status for record in records] == ["verified"] * len(modes)
    first = records[0]
    expected = answered_by_transformers(tiny_checkpoint, first.workload.sources or [])
    assert len(expected) == 11
    for record in records:
        found = [
            (request.conversation, request.turn, request.prompt_len, request.output_hash)
            for request in record.requests
        ]
        assert found == expected, record.name
        assert record.num_differing == 0 and record.correctness is not None
        assert check_metrics(record) == [], record.name
        check_times(record)
    by_mode = {passed.mode: passed.times_by_turn for passed in records}
    hits = [[turn.prefix_hit_rate for turn in by_mode[mode] or ()] for mode in modes[:4]]
    # First turns find what others begin with, as far as these have come before.
    later = [mode_hits[1:] for mode_hits in hits]
    assert later[0] == later[1] == later[2] and hits[0][0] < hits[0][2]
    assert all(drafting >= plain for plain, drafting in zip(later[2], later[3], strict=True))
    offloads = [record.groups[0].blocks_to_host is not None for record in records]
    assert offloads == [mode in modes[:4] for mode in modes]
    assert [t.prefix_hit_rate for t in by_mode["ring"] or ()] == [None] * 3
    categories = first.workload.categories
    assert categories is not None and set(categories) == {"a", "b"}
    (table,) = turn_tables(records)
    assert [column.key for column in table.headings] == ["metric", "turn_1", "turn_2", "turn_3"]
    assert "every mode mean_prompt_len" in table.csv() and table in tables(records)
    assert "5 conversations, arrival closed loop of up to 3 turns" in tables(records)[0].title


def test_two_ranks_ask_the_same_turns(
    launch: Launch, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """By tensor parallelism each rank makes the prompts of later turns itself, and in a ring the
    ranks of the first stage."""
    out = tmp_path / "out.jsonl"
    done = launch(
        "inflight_benchmark.py",
        *WORDS[:-1],
        "--model",
        tiny_checkpoint,
        "--dataset",
        chats(tmp_path / "set.jsonl"),
        "--draft",
        "ngram",
        "--prefix_cache",
        "--modes",
        "sequential",
        "inflight+draft",
        "ring",
        "--device",
        "cpu",
        "--out",
        out,
        num_ranks=2,
    )
    assert done.returncode == 0, done.stderr
    first, *others = read_records(out, PassRecord)
    expected = answered_by_transformers(tiny_checkpoint, first.workload.sources or [])
    for record in (first, *others):
        found = [
            (request.conversation, request.turn, request.prompt_len, request.output_hash)
            for request in record.requests
        ]
        assert (record.status, found) == ("verified", expected), record.name
        assert record.environment.world_size == 2


def answered_by_transformers(
    checkpoint: Path, sources: Sequence[Sequence[int]]
) -> list[tuple[int, int, int, str]]:
    """Of each request in order: conversation, turn, length of its prompt and hash of its answer."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    encode = load_tokenizer(checkpoint).encode
    found = list[tuple[int, int, int, str]]()
    for number, (index, _) in enumerate(sources):
        ids = [model.config.bos_token_id]
        for turn, question in enumerate(QUESTIONS[index], 1):
            ids += encode(f"{NEXT if turn > 1 else ''}User: {question}\n\nAssistant:")
            prompt_len = len(ids)
            for _ in range(6):
                with torch.no_grad():
                    ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            found.append((number, turn, prompt_len, hash_output(ids[prompt_len:])))
    return found


def check_times(record: PassRecord) -> None:
    """A later turn arrives when the one before has ended, and the first wait for others."""
    ends = {
        (request.conversation, request.turn): request.finished_ms for request in record.requests
    }
    for request in record.requests:
        assert request.turn is not None
        if request.turn > 1:
            assert request.arrival_ms == pytest.approx(ends[request.conversation, request.turn - 1])
    turns = record.times_by_turn
    assert turns is not None and [turn.num_requests for turn in turns] == [5, 4, 2]
    total = sum(turn.num_requests * turn.mean_ttft_ms for turn in turns)
    assert record.metrics is not None
    assert total == pytest.approx(11 * record.metrics.mean_ttft_ms)


REFUSED = {
    "--concurrency 1": "--turns 3: --dataset demo has no conversations; give a set that has some",
    "--concurrency 1 --dataset SET --prefix_len 20": "holds 1 prompts of at most --prefix_len 20",
    "--concurrency 1 --dataset SET --emulate_acceptance 0.5": "--turns 3: a conversation goes on "
    "with its answers, but --emulate_acceptance accepts drafts by chance",
    "--concurrency 1 --dataset SET --emulate_stage_ms 2": "--turns 3: a conversation goes on with "
    "its answers, but --emulate_stage_ms chooses no tokens",
    "--concurrency 6 --dataset SET": "--concurrency 6 exceeds the 5 requests",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_a_conversation_is_refused_in_one_line(
    words: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    given = words.replace("SET", chats(tmp_path / "set.jsonl")).split()
    more = ["--modes", "pipeline+draft" if "acceptance" in words else "ring"]
    model = ["--model", str(tiny_checkpoint), "--num_requests", "5", "--turns", "3"]
    with pytest.raises(ValueError) as refused:
        prepare_as("serve", tmp_path, *model, *more, *given)
    assert REFUSED[words] in str(refused.value) and "\n" not in str(refused.value)


def test_replayed_turns_arrive_as_they_did() -> None:
    """With their own prompts, whatever the answer that is replayed; what is replayed alone arrives
    alone."""
    requests = talking([2, 1])
    _, second, other = requests
    for request in requests:
        if request is second:
            request.follow(1.0)
        request.append([7, 8][: len(request.prompt_ids)], 1.0)
    again = unanswered(requests)
    assert [rest.prompt_ids for rest in again] == [(0,), (9, 7), (1,)]
    arrivals = Arrivals(again, 1)
    (taken,) = arrivals.take(9)
    taken.append([5], 2.0)
    assert arrivals.take(9) == [again[1]] and again[1].prompt_ids == second.prompt_ids
    assert [rest.sampling.max_new_tokens for rest in again] == [1, 1, 1]
    (alone,) = unanswered([second])
    assert alone.prompt_ids == second.prompt_ids and alone.previous is None
    assert other.prompt_ids == again[2].prompt_ids


@dataclass
class Replayed(Exception):
    """Stands for replays, and is raised where they would be made."""

    ids: list[int] = field(default_factory=list)
    world_size: int = 1

    def gaps(self, requests: Sequence[Request]) -> NoReturn:
        self.ids = [request.request_id for request in requests]
        raise self


def test_a_turn_behind_another_answer_shows_nothing() -> None:
    """It was asked something else, so that no rounding has to explain its answer."""
    sides = list[list[Request]]()
    for answer in (4, 5):
        requests = first, second, other, last = talking([2, 2])
        first.append([answer], 1.0)
        other.append([7], 1.0)
        for request in (second, last):
            request.follow(1.0)
            request.append([answer], 2.0)
        sides.append(requests)
    replayed = Replayed()
    with pytest.raises(Replayed):
        check_differing("first", *sides, replayed, 1)  # type: ignore[arg-type]
    assert replayed.ids == [0, 2, 3]
