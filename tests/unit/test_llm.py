"""The Python interface: requests are submitted, read, cancelled and refused."""

import re
from pathlib import Path

import pytest
from conftest import ROOT, random_prompts

from magicdec import LLM
from magicdec.config.sections import KVSection, SamplingSection
from magicdec.runner.request import Request, SamplingParams

PROMPTS = random_prompts([5, 70, 1, 33], 97)


def make_llm(path: Path, **options: object) -> LLM:
    defaults = {"dtype": "float32", "threads": 1, "max_tokens": 200}
    return LLM(str(path), **defaults | options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def expected(tiny_checkpoint: Path) -> list[list[int]]:
    """The tokens of each prompt alone."""
    llm = make_llm(tiny_checkpoint, max_concurrency=1)
    return [list(llm.submit(prompt, 100, ignore_eos=True)) for prompt in PROMPTS]


@pytest.mark.parametrize(
    "options",
    [
        {"drafter": "ngram", "block_tokens": 64, "cache_tokens": 320, "max_concurrency": 3},
        {"drafter": "self", "kv": KVSection("streaming_llm", 20, 4), "prefill_tokens": 9},
        {"drafter": "self", "kv": KVSection("snapkv", 20, window_size=6)},
        {"drafter": "self", "num_draft_tokens": "auto"},
    ],
    ids=str,
)
def test_requests_emit_the_tokens_of_their_lone_runs(
    options: dict[str, object], expected: list[list[int]], tiny_checkpoint: Path
) -> None:
    """The first case has blocks for two or three requests of 170 tokens, so that one is
    preempted."""
    llm = make_llm(tiny_checkpoint, **options)
    streams = [llm.submit(prompt, 100, ignore_eos=True) for prompt in PROMPTS]
    assert [list(stream) for stream in reversed(streams)] == expected[::-1]
    assert not llm.step(), "nothing is left"


def test_reading_runs_no_step(expected: list[list[int]], tiny_checkpoint: Path) -> None:
    llm = make_llm(tiny_checkpoint)
    stream = llm.submit(PROMPTS[0], 100, ignore_eos=True)
    assert stream.read() == []
    assert [next(stream), *stream.read()] == expected[0][:1]
    while llm.step():
        pass
    assert stream.read() == expected[0][1:] and stream.read() == list(stream) == []


def test_a_text_is_answered_with_a_text(tiny_checkpoint: Path) -> None:
    llm = make_llm(tiny_checkpoint)
    stream = llm.submit("The cat", 12, SamplingSection(temperature=0.7), ignore_eos=True)
    text = stream.text()
    assert text == llm.tokenizer.decode(stream._request.output_ids)
    assert stream._request.prompt_ids[0] == llm.model.bos_token_id
    again = make_llm(tiny_checkpoint, drafter=None)
    same = again.submit("The cat", 12, SamplingSection(temperature=0.7), ignore_eos=True)
    assert same.text() == text, "the first request has the same seed"


def test_what_can_never_be_served_is_refused(tiny_checkpoint: Path) -> None:
    llm = make_llm(tiny_checkpoint, max_tokens=100)
    with pytest.raises(ValueError, match=r"needs 119 tokens of KV cache .* holds at most 100"):
        llm.submit([5] * 90, 30)
    for prompt, message in (([], "is empty"), ([5, 2051], "has the token id 2051")):
        with pytest.raises(ValueError, match=f"the prompt {message}; ids are below 2051"):
            llm.submit(prompt)
    with pytest.raises(ValueError, match="max_new_tokens is too small"):
        llm.submit([5], 0)
    for options, message in (
        ({"drafter": "model"}, "drafter model; choose from None, self, ngram"),
        ({"max_tokens": 1}, "max_tokens is too small"),
        ({"max_tokens": 9999}, "9999"),
        ({"max_new_tokens": 0}, "max_new_tokens is too small"),
        ({"cache_tokens": 0}, "cache_tokens is too small"),
    ):
        with pytest.raises(ValueError, match=message):
            make_llm(tiny_checkpoint, **options)


@pytest.mark.parametrize(("most", "row_tokens"), [(30, 20 + 30 + 4), (None, 200 + 4)])
def test_what_a_policy_copies_has_room_for_the_longest_output(
    most: int | None, row_tokens: int, expected: list[list[int]], tiny_checkpoint: Path
) -> None:
    kv = KVSection("snapkv", 20, window_size=6)
    llm = make_llm(tiny_checkpoint, drafter="self", kv=kv, max_new_tokens=most)
    streams = [llm.submit(prompt, 30, ignore_eos=True) for prompt in PROMPTS]
    assert [list(stream) for stream in streams] == [tokens[:30] for tokens in expected]
    draft_kv = llm._strategy.drafter.draft_kv  # type: ignore[attr-defined]
    assert draft_kv.runner.max_tokens == row_tokens
    if most is not None:
        with pytest.raises(ValueError, match=r"max_new_tokens 31 is too large; .* at most 30"):
            llm.submit(PROMPTS[0], 31)


def test_the_example_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "README.md").read_text()
    (example,) = re.findall(
        r"^    from magicdec import LLM\n(?:(?:    .*)?\n)*", text, re.MULTILINE
    )
    exec(re.sub(r"^    ", "", example, flags=re.MULTILINE), {})
    assert len(capsys.readouterr().out) > 20


def test_a_reader_that_stops_and_one_that_cancels_leave_the_others_alone(
    expected: list[list[int]], tiny_checkpoint: Path
) -> None:
    llm = make_llm(tiny_checkpoint, max_concurrency=3, block_tokens=64)
    unread, cancelled, read = (llm.submit(p, 100, ignore_eos=True) for p in PROMPTS[:3])
    blocks = llm._engine.runner.cache.blocks
    assert next(unread) == expected[0][0] and next(cancelled) == expected[1][0]
    row = cancelled._request.row
    assert row is not None and blocks[row]
    cancelled.cancel()
    llm.step()
    assert not blocks[row] and cancelled.is_done, "one step frees its blocks"
    assert list(read) == expected[2]
    assert list(llm.submit(PROMPTS[3], 100, ignore_eos=True)) == expected[3]
    assert [expected[0][0], *unread] == expected[0], "nothing was lost"


def test_serving_refuses_what_can_never_be_held_before_the_first_step(
    tiny_checkpoint: Path,
) -> None:
    engine = make_llm(tiny_checkpoint, max_tokens=100)._engine
    requests = [Request(i, (5,) * n, SamplingParams(30)) for i, n in enumerate((9, 90))]
    with pytest.raises(ValueError, match=r"request 1 needs 119 tokens .* holds at most 100"):
        engine.serve(LLM.step, requests)  # type: ignore[arg-type]
    assert not engine.scheduler.waiting and engine.runner.counts.num_forwards == 0
