"""Prompt sets: the prompts that are made of each layout, whole or cut in the middle, every bad
file, and the hub. The fixtures in tests/prompt_sets/ have five items each."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from serving_command import parse_as, prepare_as
from test_workload import BOS, build

from magicdec.config.sections import SamplingSection
from magicdec.systems.pipeinfer.system import PipeInfer
from magicdec.systems.system import make_requests
from magicdec.workload.books import read_prompts
from magicdec.workload.prompt_sets import PLACEHOLDER, PROMPT_SETS, cut_middle

SETS = Path(__file__).parents[1] / "prompt_sets"


def texts_of(dataset: str, most: int = 50) -> list[str]:
    """The plain texts of a set's items, empty where nothing is asked."""
    return [item.plain_text if item.is_asked else "" for item in read_prompts(dataset, most)]


def name_of(kind: str, file: str) -> str:
    return f"{kind}:{SETS / file}"


def test_a_chat_ends_before_its_last_answer() -> None:
    first, second, third, fourth, fifth = texts_of(name_of("sharegpt", "sharegpt.json"))
    assert first == (
        "User: Why is the sea salty?\n\nAssistant: Rivers carry salt into it.\n\n"
        "User: Since when?\n\nAssistant:"
    )
    assert second == "System: Answer in a word.\n\nUser: What colour is the sky?\n\nAssistant:"
    assert fourth == "User: Write a line about rain.\n\nAssistant:"
    assert (third, fifth) == ("", "")  # an answer to nothing, and nothing


def test_speed_bench_is_read_as_prepared_and_as_published(tmp_path: Path) -> None:
    prepared = SETS / "speed_bench.jsonl"
    prompts = texts_of(f"speed_bench:{prepared}")
    assert prompts[0] == "User: Reverse a list in Python.\n\nAssistant:"
    rows = [json.loads(line) for line in prepared.read_text().splitlines()]
    for row in rows:
        row["turns"] = [message["content"] for message in row.pop("messages")]
    path = tmp_path / "test.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert texts_of(f"speed_bench:{path}") == prompts
    rows[3]["turns"][0] = f"{PLACEHOLDER} FROM THE SOURCE"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert texts_of(f"speed_bench:{path}", 3) == prompts[:3]
    with pytest.raises(ValueError, match=r"test\.parquet: row 3 is a placeholder .* prepare\.py"):
        texts_of(f"speed_bench:{path}")


# The plain text of the first item of a fixture, its further questions, and all categories.
READ = {
    "mt_bench": (
        "User: Write a line about a kite.\n\nAssistant:",
        ["Now make it rhyme."],
        ["writing", "math", "coding", "math", "writing"],
    ),
    "spec_bench": (
        "User: Write a line about a boat.\n\nAssistant:",
        ["Shorten it."],
        ["writing", "translation", "summarization", "qa", "rag"],
    ),
    "speed_bench": (
        "User: Reverse a list in Python.\n\nAssistant:",
        ["Now without a copy."],
        ["coding", "math", "qa", "writing", "rag"],
    ),
    "gsm8k": (
        "User: Tom has 3 bags of 4 nuts. How many nuts?\n\nAssistant:",
        [],
        [None] * 5,
    ),
    "math500": (
        "User: Solve $x + 2 = 5$.\n\nAssistant:",
        [],
        ["Algebra", "Geometry", "Number Theory", "Algebra", "Geometry"],
    ),
    "humaneval": ('def double(n):\n    """Twice n."""\n', [], [None] * 5),
    "mbpp": (
        "User: Write a function that adds two numbers.\n\nAssistant:",
        [],
        [None] * 5,
    ),
    "messages": (
        "System: Answer in a word.\n\nUser: What colour is snow?\n\nAssistant: White.\n\n"
        "User: And coal?\n\nAssistant:",
        [],
        [None] * 5,
    ),
    "mrcr": (
        "User: Write a line about owls.\n\nAssistant: Line 1 about owls.\n\n"
        "User: Write a line about rain.\n\nAssistant: Rain, for time 1.\n\n"
        "User: Write a line about owls.\n\nAssistant: Line 2 about owls.\n\n"
        "User: Write a line about rain.\n\nAssistant: Rain, for time 2.\n\n"
        "User: Prepend tag0x to the 2nd (1 indexed) line about owls. Do not include any other "
        "text in your response.\n\nAssistant:",
        [],
        ["2 needles", "4 needles", "2 needles", "4 needles", "2 needles"],
    ),
    "longbench": (
        "The mill stands by the river.\n\nQuestion: Where does the mill stand?\nAnswer:",
        [],
        ["d"] * 5,
    ),
    "sharegpt": (
        "User: Why is the sea salty?\n\nAssistant: Rivers carry salt into it.\n\n"
        "User: Since when?\n\nAssistant:",
        [],
        [None] * 5,
    ),
}


@pytest.mark.parametrize("kind", PROMPT_SETS)
def test_each_set_has_its_question_its_turns_and_its_categories(kind: str) -> None:
    (path,) = SETS.glob(f"{kind}.json*")
    text, later, categories = READ[kind]
    items = read_prompts(f"{kind}:{path}", 50)
    assert (items[0].plain_text, [*items[0].later]) == (text, later)
    assert [item.category for item in items] == categories


def test_the_hubs_copy_of_mt_bench_has_its_turns_in_prompt(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    row = {"prompt": ["Why?", "Why not?"], "prompt_id": 7, "category": "stem", "reference": []}
    path.write_text(json.dumps(row))
    (item,) = read_prompts(f"mt_bench:{path}", 50)
    assert (item.contents, item.later, item.category) == (["Why?"], ("Why not?",), "stem")


def test_a_request_ends_on_its_last_question() -> None:
    items = read_prompts(name_of("messages", "messages.jsonl"), 50)
    assert [item.roles for item in items] == [
        ("system", "user", "assistant", "user"),
        ("user",),
        ("user",),
        (),
        ("system", "user"),
    ]


def test_several_sets_are_drawn_from_together() -> None:
    names = [name_of(kind, f"{kind}.jsonl") for kind in ("gsm8k", "mt_bench")]
    dataset = ",".join(names)
    work = build(dataset, prefix_len=500, num_prompts=10, is_whole=True)
    assert work.dataset == "gsm8k:gsm8k.jsonl,mt_bench:mt_bench.jsonl"
    assert work.num_available == 10 and work.sources is not None and work.categories is not None
    by_index = dict(zip((index for index, _ in work.sources), work.categories, strict=True))
    expected = ["gsm8k"] * 5 + [f"mt_bench {name}" for name in READ["mt_bench"][2]]
    assert [by_index[i] for i in range(10)] == expected
    talks = work.conversations
    assert talks is not None and sum(talk.num_left_out for talk in talks) == 5
    few = work.first(2)
    assert (few.categories, few.conversations) == (work.categories[:2], talks[:2])


def test_items_that_are_left_out_are_counted() -> None:
    dataset = name_of("mt_bench", "mt_bench.jsonl")
    texts = texts_of(dataset)
    length = sorted(map(len, texts))[2] + 1  # with BOS
    whole = build(dataset, prefix_len=length, num_prompts=3, is_whole=True)
    longer = (whole.left_out or {}).get("longer", 0)
    assert whole.sources is not None
    assert all(len(texts[index]) < length for index, _ in whole.sources) and longer <= 2
    cut = build(dataset, prefix_len=length, num_prompts=3)
    assert cut.left_out in ({}, {"shorter": 1}, {"shorter": 2})
    for seed in range(5):
        work = build(dataset, prefix_len=length, num_prompts=3, seed=seed, is_whole=True)
        drawn = 3 + sum((work.left_out or {}).values())
        first = build(dataset, prefix_len=500, num_prompts=drawn, seed=seed, is_whole=True)
        assert first.sources is not None and work.sources == tuple(
            (index, 0) for index, _ in first.sources if len(texts[index]) < length
        )


def test_longbench_asks_about_its_document() -> None:
    prompts = texts_of(name_of("longbench", "longbench.jsonl"))
    assert prompts[0] == (
        "The mill stands by the river.\n\nQuestion: Where does the mill stand?\nAnswer:"
    )
    assert prompts[2] == "It rained all day and the road was wet.\n\n\nAnswer:"
    second = texts_of(name_of("longbench", "longbench_v2.json"))
    assert second[0] == (
        "The mill stands by the river.\n\nQuestion: Where does the mill stand?\n"
        "(A) by the river\n(B) nothing\n(C) a hill\n(D) three\nAnswer:"
    )
    assert len(prompts) == len(second) == 5


def test_served_prompts_keep_their_lengths() -> None:
    dataset = name_of("sharegpt", "sharegpt.json")
    texts = texts_of(dataset)
    work = build(dataset, prefix_len=500, num_prompts=3, is_whole=True)
    assert (work.dataset, work.num_available, work.answers) == ("sharegpt:sharegpt.json", 3, None)
    assert sorted(work.sources) == [(0, 0), (1, 0), (3, 0)]
    for (index, _), prompt in zip(work.sources, work.prompts, strict=True):
        assert prompt == (BOS, *map(ord, texts[index]))
    longest = max(map(len, work.prompts))
    assert build(dataset, prefix_len=longest, num_prompts=3, is_whole=True) == work
    message = f"holds 2 prompts of at most --prefix_len {longest - 1} tokens; 3 are needed (--B"
    with pytest.raises(ValueError, match=re.escape(message)):
        build(dataset, prefix_len=longest - 1, num_prompts=3, is_whole=True)


def test_requests_are_whole_prompts(tmp_path: Path) -> None:
    words = ("--dataset", name_of("sharegpt", "sharegpt.json"), "--num_requests", "3")
    prepared = prepare_as("serve", tmp_path, *words, "--modes", "sequential", "inflight")
    prompts = prepared.run.workload.prompts
    shapes = prepared.options.shapes
    assert prepared.run.describe_workload().prefix_len == max(map(len, prompts))
    requests = make_requests(prompts, shapes, 0.0, SamplingSection())
    assert [request.prompt_ids for request in requests] == [*prompts]
    assert len({len(prompt) for prompt in prompts}) == 3


def test_an_emulated_drafter_knows_where_outputs_begin(tmp_path: Path) -> None:
    words = ("--dataset", name_of("sharegpt", "sharegpt.json"), "--num_requests", "3")
    words += ("--emulate_stage_ms", "1", "--emulate_acceptance", "0.5", "--modes", "pipeinfer")
    (system,) = prepare_as("serve", tmp_path, *words, world_size=2).systems
    assert isinstance(system, PipeInfer)
    lengths = [len(prompt) for prompt in system.run.workload.prompts]
    drafter = system._scripted(0.5)
    assert [*drafter.prompt_lens] == lengths
    assert [output[0] for output in drafter.outputs] == lengths


@pytest.mark.parametrize(
    "words", [("--prefix_len", "uniform:5:50"), ("--arrival", "trace:requests.jsonl")]
)
def test_lengths_of_a_set_are_its_own(tmp_path: Path, words: tuple[str, ...]) -> None:
    dataset = name_of("sharegpt", "sharegpt.json")
    with pytest.raises(ValueError, match="its prompts have their own lengths; --prefix_len is"):
        parse_as("inflight", tmp_path, "--dataset", dataset, *words)


@pytest.mark.parametrize("bos", [None, BOS])
def test_prompts_of_a_run_are_cut_in_their_middle(bos: int | None) -> None:
    dataset = name_of("longbench", "longbench.jsonl")
    texts = texts_of(dataset)
    work = build(dataset, bos, prefix_len=61, num_prompts=2)
    for (index, _), prompt in zip(work.sources, work.prompts, strict=True):
        ids = [*([] if bos is None else [bos]), *map(ord, texts[index])]
        assert len(ids) >= 61
        assert prompt == (*ids[:31], *ids[-30:])
    with pytest.raises(ValueError, match="holds 0 prompts of at least --prefix_len 5000 tokens"):
        build(dataset, bos, prefix_len=5000)


def test_cutting_keeps_both_ends() -> None:
    assert [cut_middle("abcde", n) for n in (1, 2, 5)] == [("a",), ("a", "e"), tuple("abcde")]


@pytest.mark.parametrize(
    ("kind", "item", "reason"),
    [
        ("sharegpt", {"items": []}, "line 2 has no 'conversations' that is a list"),
        ("sharegpt", {"conversations": [{"from": "human"}]}, "line 2, turn 0 has no 'value'"),
        ("sharegpt", {"conversations": ["hello"]}, "line 2, turn 0 has no 'from'"),
        ("speed_bench", {"text": "a"}, "line 2 has no 'turns' that is a list"),
        ("speed_bench", {"turns": [7]}, "line 2, first of 'turns' has no 'content'"),
        ("speed_bench", {"messages": []}, "line 2, first of 'messages' has no 'content'"),
        ("speed_bench", {"turns": ["a", 7]}, "line 2, turn 1 of 'turns' has no 'content'"),
        ("mt_bench", {"turns": ["a"], "category": 7}, "line 2 has no 'category' that is a string"),
        ("gsm8k", {"problem": "a"}, "line 2 has no 'question' that is a string"),
        ("math500", {"question": "a"}, "line 2 has no 'problem' that is a string"),
        ("humaneval", ["a"], "line 2 has no 'prompt' that is a string"),
        ("mbpp", {}, "line 2 has no 'text' that is a string"),
        ("messages", {"messages": [{"role": "user"}]}, "line 2, turn 0 has no 'content'"),
        ("mrcr", {"prompt": []}, "line 2 has no 'prompt' that is a string"),
        ("mrcr", {"prompt": "["}, "line 2: 'prompt' is not JSON (Expecting value"),
        ("mrcr", {"prompt": "{}"}, "line 2: 'prompt' is not the JSON of a list"),
        ("mrcr", {"prompt": "[1]"}, "line 2, 'prompt', turn 0 has no 'role' that is a string"),
        ("mrcr", {"prompt": "[]"}, "line 2 has no 'n_needles' that is a whole number"),
        ("longbench", {"input": "a"}, "line 2 has no 'context' that is a string"),
        ("longbench", {"context": "a"}, "line 2 has no 'input' that is a string"),
        ("longbench", {"context": "a", "question": "b"}, "line 2 has no 'choice_A'"),
    ],
)
def test_a_missing_key_is_named_with_its_line(
    tmp_path: Path, kind: str, item: object, reason: str
) -> None:
    path = tmp_path / "items.jsonl"
    first = {"conversations": [], "turns": ["a"], "context": "a", "input": "b", "question": "c"}
    if kind == "longbench":
        del first["question"]
    first |= {"text": "d", "problem": "e"}
    if kind == "messages":
        first |= {"messages": []}
    if kind in ("humaneval", "mrcr"):
        first |= {"prompt": "[]", "n_needles": 2}
    path.write_text(f"{json.dumps(first)}\n{json.dumps(item)}\n")
    with pytest.raises(ValueError, match=re.escape(f"--dataset {kind}:{path}: {reason}")) as error:
        texts_of(f"{kind}:{path}")
    assert "\n" not in str(error.value)


def test_missing_files_and_names_of_no_form(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.json: cannot be read \(No such file"):
        texts_of(f"sharegpt:{tmp_path / 'none.json'}")
    for name in ("", "chats", "chats.csv", "a/b/c"):
        with pytest.raises(
            ValueError, match=f"'sharegpt:{name}' is not known; give sharegpt: with"
        ):
            texts_of(f"sharegpt:{name}")


def test_sets_come_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    rows = [{"turns": ["Who wrote Emma?"]}]

    def load(repository: str, config: str | None, split: str | None, streaming: bool) -> Any:
        assert (repository, split, streaming) == ("nvidia/SPEED-Bench", None, True)
        return {"test": rows if config == "qualitative" else rows * 2}

    monkeypatch.setattr(datasets, "load_dataset", load)
    expected = ["User: Who wrote Emma?\n\nAssistant:"]
    assert texts_of("speed_bench:nvidia/SPEED-Bench:qualitative") == expected
    assert texts_of("speed_bench:nvidia/SPEED-Bench") == expected * 2

    def offline(*args: Any, **options: Any) -> None:
        raise ConnectionError("Couldn't reach it\nsecond line")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(ValueError, match=r"ConnectionError: Couldn't .* give the path of a") as e:
        texts_of("longbench:zai-org/LongBench-v2")
    assert "\n" not in str(e.value)
