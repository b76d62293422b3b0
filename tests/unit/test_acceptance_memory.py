"""The memory of `magicdec acceptance`: what is planned is what its caches take, what does not fit
is refused, and one draft's own cache is there at a time."""

import weakref
from pathlib import Path
from typing import Any

import pytest
from conftest import Command
from hypothesis import given
from hypothesis import strategies as st
from tiny_hybrids import save_with_tokenizer, the_model

from magicdec.bench.acceptance import measuring
from magicdec.bench.acceptance.record import AcceptanceRecord
from magicdec.kv.layer_caches import Forks
from magicdec.model.checkpoint.source import find_model
from magicdec.records.reading import read_records
from magicdec.runner.layer_states import RowStates
from magicdec.runner.observers.hidden_states import HiddenStates
from magicdec.setup import prepare
from magicdec.speculation.policies.retrieval import RetrievedBlocks

SMALL = "--prefix_len 64 96 --gen_len 17 --gamma 5 --B 3 --dtype float32 --threads 1 --ignore_eos"


@given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(1, 60)), min_size=1, max_size=4),
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from([1, 16, 64]),
)
def test_forks_take_no_more_blocks_than_are_planned(
    texts: list[tuple[int, int]], num_forks: int, room: int, block: int
) -> None:
    """Of any window of neighbouring positions, by the length of each prompt and its positions."""
    lengths = [prompt + number for prompt, count in texts for number in range(count)]
    most = Forks(num_forks, room).num_blocks(len(texts), block)
    for first in range(0, len(lengths), num_forks):
        some = lengths[first : first + num_forks]
        taken = sum(-(-(length + room) // block) - (length - 1) // block for length in some)
        assert taken <= most


@pytest.mark.parametrize(
    ("words", "num_drafts"),
    [
        ("--draft self ngram --kv_policy streaming_llm full --budget 33", 0),
        ("--draft self model:demo-draft --kv_policy full", 2),
        pytest.param(
            "--draft self model:demo-draft --kv_policy full --attention grouped",
            2,
            marks=pytest.mark.wide,
        ),
        ("--draft eagle:demo-eagle --kv_policy full", 2),
        ("--draft self --kv_policy snapkv --budget 33", 2),
        ("--draft self --kv_policy retrieval --budget 49", 0),
    ],
)
def test_caches_are_as_large_as_planned(
    words: str,
    num_drafts: int,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    made: list[int],
    tmp_path: Path,
) -> None:
    """One of all texts and their forks, and one of a draft model, or of what a policy has copied,
    at each context. Beside these the target keeps queries for the policy, states for a head and
    mean keys of texts alone, and a query of each fork."""
    states: list[int] = []
    make_states = HiddenStates.of
    keep_means = RetrievedBlocks.__init__

    def count_states(*given: Any) -> HiddenStates:
        states.append(make_states(*given).num_bytes)
        return make_states(*given)

    def count_means(kv: RetrievedBlocks, *given: Any) -> None:
        keep_means(kv, *given)
        states[:] = [kv._query.nbytes + kv._mean_keys.nbytes]  # one at a time, of equal size

    monkeypatch.setattr(HiddenStates, "of", count_states)
    monkeypatch.setattr(RetrievedBlocks, "__init__", count_means)
    out = tmp_path / "out.jsonl"
    ended = command("acceptance", *words.split(), *SMALL.split(), "--out", out)
    assert ended.code == 0 and ended.err.startswith("memory "), ended.err
    target, *drafts = made
    assert len(drafts) == num_drafts
    for record in read_records(out, AcceptanceRecord):
        assert record.is_forked
        assert record.memory.kv_bytes == target
        kv = record.config["kv"]
        observed = {"snapkv": kv["window_size"], "retrieval": 1}.get(kv["policy"], 0)
        model = find_model("--model", "demo").config
        size = model.num_layers * model.num_heads * model.head_dim * 4
        queries = 3 * observed * size
        assert record.memory.draft_kv_bytes == max(drafts, default=0) + queries + sum(states)
    assert len(states) == ("eagle" in words or "retrieval" in words) and sum(states) < target


def test_states_are_as_large_as_planned(
    tiny_checkpoint: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    made: list[int],
    tmp_path: Path,
) -> None:
    """Those of texts alone, which go back as far as the longest draft needs."""
    hybrid = tmp_path / "hybrid"
    vocab_size = find_model("--model", str(tiny_checkpoint)).config.vocab_size
    save_with_tokenizer(the_model(vocab_size), hybrid, tiny_checkpoint)
    sizes = []
    make = RowStates.zeros

    def count(*given: Any) -> RowStates:
        states = make(*given)
        numbers = [x for x in states.by_layer if x.is_floating_point()]
        sizes.append(sum(x.numel() * x.element_size() for x in numbers))
        return states

    monkeypatch.setattr(RowStates, "zeros", count)
    out = tmp_path / "out.jsonl"
    small = f"model:{tiny_checkpoint},gamma=2,kv_policy=full"  # whose cache is the largest draft's
    words = ["--draft", "ngram", small, "--model", hybrid]
    ended = command("acceptance", *words, *SMALL.split(), "--out", out)
    assert ended.code == 0, ended.err
    assert len(sizes) == 2  # now, and as at the ends of prompts
    for record in read_records(out, AcceptanceRecord):
        assert record.memory.kv_bytes == made[0] + sum(sizes)


def test_what_does_not_fit_is_refused_in_one_line(
    command: Command, monkeypatch: pytest.MonkeyPatch, made: list[int], tmp_path: Path
) -> None:
    monkeypatch.setattr(prepare, "free_device_memory", lambda device, rank: 160 << 20)
    out = tmp_path / "out.jsonl"
    few = command("acceptance", "--draft", "self", *SMALL.split(), "--B", 2, "--out", out)
    assert few.code == 0, few.err
    made.clear()
    words = ["--draft", "self", *SMALL.split(), "--prefix_len", 64, 4096, "--B", 24]
    code, _, err = command("acceptance", *words, "--out", tmp_path / "large.jsonl")
    assert code == 2 and made == []
    assert err.startswith("magicdec acceptance: --B 24 --prefix_len 4096 needs "), err
    assert "are free; choose a smaller --B, shorter contexts or fewer drafts" in err


def test_a_draft_is_freed_before_the_next_one_takes_memory(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also the first one, whose system has made the caches that all share."""
    begun: list[weakref.ref[Any]] = []
    begin = measuring.TextDrafts.__init__

    def begin_alone(system: Any, *given: Any) -> None:
        assert [earlier() for earlier in begun] == [None] * len(begun)
        begun.append(weakref.ref(system))
        begin(system, *given)

    monkeypatch.setattr(measuring.TextDrafts, "__init__", begin_alone)
    words = "--draft model:demo-draft self --kv_policy full snapkv --budget 33"
    out = tmp_path / "out.jsonl"
    ended = command("acceptance", *words.split(), *SMALL.split(), "--out", out)
    assert ended.code == 0, ended.err
    assert len(begun) == 8
