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
from magicdec.systems.pipeinfer.speculative_pipeline import SpeculativePipeline
from magicdec.systems.system import make_requests
from magicdec.workload.books import read_prompts
from magicdec.workload.prompt_sets import PLACEHOLDER, cut_middle

SETS = Path(__file__).parents[1] / "prompt_sets"


def name_of(kind: str, file: str) -> str:
    return f"{kind}:{SETS / file}"


def test_a_chat_ends_before_its_last_answer() -> None:
    first, second, third, fourth, fifth = read_prompts(name_of("sharegpt", "sharegpt.json"), 50)
    assert first == (
        "User: Why is the sea salty?\n\nAssistant: Rivers carry salt into it.\n\n"
        "User: Since when?\n\nAssistant:"
    )
    assert second == "System: Answer in a word.\n\nUser: What colour is the sky?\n\nAssistant:"
    assert fourth == "User: Write a line about rain.\n\nAssistant:"
    assert (third, fifth) == ("", "")  # an answer to nothing, and nothing


def test_speed_bench_is_read_as_prepared_and_as_published(tmp_path: Path) -> None:
    prepared = SETS / "speed_bench.jsonl"
    prompts = read_prompts(f"speed_bench:{prepared}", 50)
    assert prompts[0] == "User: Reverse a list in Python.\n\nAssistant:"
    rows = [json.loads(line) for line in prepared.read_text().splitlines()]
    for row in rows:
        row["turns"] = [message["content"] for message in row.pop("messages")]
    path = tmp_path / "test.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert read_prompts(f"speed_bench:{path}", 50) == prompts
    rows[3]["turns"][0] = f"{PLACEHOLDER} FROM THE SOURCE"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert read_prompts(f"speed_bench:{path}", 3) == prompts[:3]
    with pytest.raises(ValueError, match=r"test\.parquet: row 3 is a placeholder .* prepare\.py"):
        read_prompts(f"speed_bench:{path}", 50)


def test_longbench_asks_about_its_document() -> None:
    prompts = read_prompts(name_of("longbench", "longbench.jsonl"), 50)
    assert prompts[0] == (
        "The mill stands by the river.\n\nQuestion: Where does the mill stand?\nAnswer:"
    )
    assert prompts[2] == "It rained all day and the road was wet.\n\n\nAnswer:"
    second = read_prompts(name_of("longbench", "longbench_v2.json"), 50)
    assert second[0] == (
        "The mill stands by the river.\n\nQuestion: Where does the mill stand?\n"
        "(A) by the river\n(B) nothing\n(C) a hill\n(D) three\nAnswer:"
    )
    assert len(prompts) == len(second) == 5


def test_served_prompts_keep_their_lengths() -> None:
    dataset = name_of("sharegpt", "sharegpt.json")
    texts = read_prompts(dataset, 50)
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
    prompts, shapes = prepared.run.workload.prompts, prepared.options.shapes
    assert prepared.run.describe_workload().prefix_len == max(map(len, prompts))
    requests = make_requests(prompts, shapes, 0.0, SamplingSection())
    assert [request.prompt_ids for request in requests] == [*prompts]
    assert len({len(prompt) for prompt in prompts}) == 3


def test_an_emulated_drafter_knows_where_outputs_begin(tmp_path: Path) -> None:
    words = ("--dataset", name_of("sharegpt", "sharegpt.json"), "--num_requests", "3")
    words += ("--emulate_stage_ms", "1", "--emulate_acceptance", "0.5", "--modes", "async")
    (system,) = prepare_as("serve", tmp_path, *words, world_size=2).systems
    assert isinstance(system, SpeculativePipeline)
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
    texts = read_prompts(dataset, 50)
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
        ("longbench", {"input": "a"}, "line 2 has no 'context' that is a string"),
        ("longbench", {"context": "a"}, "line 2 has no 'input' that is a string"),
        ("longbench", {"context": "a", "question": "b"}, "line 2 has no 'choice_A'"),
    ],
)
def test_a_missing_key_is_named_with_its_line(
    tmp_path: Path, kind: str, item: object, reason: str
) -> None:
    path = tmp_path / "items.jsonl"
    first = {"conversations": [], "turns": ["a"], "context": "a", "input": "b"}
    path.write_text(f"{json.dumps(first)}\n{json.dumps(item)}\n")
    with pytest.raises(ValueError, match=re.escape(f"--dataset {kind}:{path}: {reason}")) as error:
        read_prompts(f"{kind}:{path}", 50)
    assert "\n" not in str(error.value)


def test_missing_files_and_names_of_no_form(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.json: cannot be read \(No such file"):
        read_prompts(f"sharegpt:{tmp_path / 'none.json'}", 50)
    for name in ("", "chats", "chats.csv", "a/b/c"):
        with pytest.raises(
            ValueError, match=f"'sharegpt:{name}' is not known; give sharegpt: with"
        ):
            read_prompts(f"sharegpt:{name}", 50)


def test_sets_come_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    rows = [{"turns": ["Who wrote Emma?"]}]

    def load(repository: str, config: str | None, split: str | None, streaming: bool) -> Any:
        assert (repository, split, streaming) == ("nvidia/SPEED-Bench", None, True)
        return {"test": rows if config == "qualitative" else rows * 2}

    monkeypatch.setattr(datasets, "load_dataset", load)
    expected = ["User: Who wrote Emma?\n\nAssistant:"]
    assert read_prompts("speed_bench:nvidia/SPEED-Bench:qualitative", 50) == expected
    assert read_prompts("speed_bench:nvidia/SPEED-Bench", 50) == expected * 2

    def offline(*args: Any, **options: Any) -> None:
        raise ConnectionError("Couldn't reach it\nsecond line")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(ValueError, match=r"ConnectionError: Couldn't .* give the path of a") as e:
        read_prompts("longbench:zai-org/LongBench-v2", 50)
    assert "\n" not in str(e.value)
