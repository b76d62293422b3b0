"""The Python interface: requests are submitted, read, cancelled and refused."""

import itertools
import json
import re
import shutil
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY, random_prompts
from draft_heads import FITTED, write_head

import magicdec.llm
from magicdec import LLM
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import KVSection, ModelSection, SamplingSection
from magicdec.distributed.groups import Launch
from magicdec.kv.layer_caches import LayerCaches
from magicdec.kv.prefix_cache import Beginning
from magicdec.llm import CacheSizes, choose_max_tokens
from magicdec.runner.request import Request, RequestStatus, SamplingParams
from magicdec.setup.prepare import ResolvedRun, SetupCache, find

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
        {"draft": "ngram", "block_tokens": 64, "cache_tokens": 320, "max_concurrency": 3},
        {"draft": "self", "kv": KVSection("streaming_llm", 20, 4), "prefill_tokens": 9},
        {"draft": "self", "kv": KVSection("snapkv", 20, window_size=6)},
        {"draft": "self", "gamma": "auto"},
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


def test_a_second_turn_computes_what_is_new(
    expected: list[list[int]],
    tiny_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of the first turn, with its answer, is found, by a draft model too: its whole blocks, and
    a copy of a part of the last. A head lacks the slot of the last token, which depends on the next
    one."""
    write_head(tmp_path, replace(TINY, vocab_size=2051), FITTED)
    begun = list[int]()
    begin = LayerCaches.begin

    def recorded(caches: LayerCaches, row: int, text: Sequence[int], num_tokens: int) -> Beginning:
        beginning = begin(caches, row, text, num_tokens)
        begun.append(beginning.num_tokens)
        return beginning

    monkeypatch.setattr(LayerCaches, "begin", recorded)
    texts = [PROMPTS[1], (*PROMPTS[1], *expected[1][:90], *PROMPTS[0])]
    answers = list[list[int]]()
    for draft in ("none", "self", f"model:{tiny_checkpoint}", f"eagle:{tmp_path}"):
        sharing = {} if draft == "none" else {"prefix_cache": True, "block_tokens": 16}
        kv = KVSection("full" if ":" in draft else "streaming_llm")
        llm = make_llm(tiny_checkpoint, draft=draft, kv=kv, **sharing)
        for text, count in zip(texts, (100, 20), strict=True):
            stream = llm.submit(text, count, ignore_eos=True)
            answers.append(list(stream))
    assert answers[:2] == answers[2:4] == answers[4:6] == answers[6:]
    counts = llm._counts
    assert counts.num_found == 160 and counts.num_looked_up == 70 + 165
    assert begun == [0, 160, 0, 159]


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
    again = make_llm(tiny_checkpoint, draft="none")
    same = again.submit("The cat", 12, SamplingSection(temperature=0.7), ignore_eos=True)
    assert same.text() == text, "the first request has the same seed"


@pytest.mark.parametrize("draft", ["none", "ngram", "self"])
def test_a_result_says_what_became_of_a_request(
    draft: str, expected: list[list[int]], tiny_checkpoint: Path
) -> None:
    """The first ends at its length, the second at a token that ends a text, the third when it is
    cancelled while it runs, and the last while it waits."""
    llm = make_llm(tiny_checkpoint, draft=draft, max_concurrency=3)
    eos = expected[1][20]
    first = llm.submit(PROMPTS[0], 100, ignore_eos=True)
    llm.model = replace(llm.model, eos_token_ids=(eos,))
    second = llm.submit(PROMPTS[1], 100)
    third = llm.submit(PROMPTS[2], 100)
    last = llm.submit(PROMPTS[3], 100)
    next(third)
    third.cancel()
    last.cancel()
    results = [stream.result() for stream in (first, second, third, last)]
    end = expected[1].index(eos) + 1
    assert [result.finish_reason for result in results] == ["length", "stop", *["cancelled"] * 2]
    assert [result.request_id for result in results] == [0, 1, 2, 3]
    assert [result.prompt_ids for result in results] == PROMPTS
    assert list(results[0].output_ids) == expected[0]
    assert list(results[1].output_ids) == expected[1][:end]
    assert 0 < len(results[2].output_ids) < 100 and not results[3].output_ids
    for stream, result in zip((first, second, third, last), results, strict=True):
        assert result.text == llm.tokenizer.show(result.output_ids) == stream.text()
        assert stream.result() == result, "it can be read again"
    assert list(first) == expected[0], "a result takes no token away"


def test_the_metrics_of_a_request_are_those_of_its_times_and_steps(
    expected: list[list[int]], tiny_checkpoint: Path
) -> None:
    """By a clock that strikes each time that somebody reads it. One row: a request waits for
    another."""
    llm = make_llm(tiny_checkpoint, draft="self", gamma=3, max_concurrency=1)
    ticks = itertools.count()
    llm._engine.clock.now = lambda: float(next(ticks))  # type: ignore[method-assign]
    llm._counts.now = llm._engine.clock.now
    streams = [llm.submit(prompt, 30, ignore_eos=True) for prompt in PROMPTS[:2]]
    single = llm.submit(PROMPTS[2], 1, ignore_eos=True)
    first, second = (stream.result() for stream in streams)
    for stream, result in zip(streams, (first, second), strict=True):
        request = stream._request
        metrics = result.metrics
        times = request.token_times_s
        assert metrics.ttft_ms == 1e3 * (times[0] - request.arrived_s)
        assert metrics.e2el_ms == 1e3 * (times[-1] - request.arrived_s)
        assert metrics.tpot_ms == 1e3 * (times[-1] - times[0]) / 29
        found = metrics.acceptance
        assert found is not None and found.acceptance_histogram is not None
        by_count = list(enumerate(found.acceptance_histogram))
        assert found.num_spec_steps == sum(count for _, count in by_count) == len(set(times)) - 1
        assert found.num_draft_tokens == 3 * found.num_spec_steps
        accepted = sum(number * count for number, count in by_count)
        assert found.num_accepted_draft_tokens == accepted
        assert found.mean_acceptance_length == 1 + accepted / found.num_spec_steps
        assert found.draft_acceptance_rate == accepted / found.num_draft_tokens
    assert first.metrics.queue_ms is not None and second.metrics.queue_ms is not None
    ended_s = streams[0]._request.finished_s
    assert ended_s is not None
    arrived_s = streams[1]._request.arrived_s
    assert first.metrics.queue_ms < 1e3 * (ended_s - arrived_s) < second.metrics.queue_ms
    assert second.metrics.ttft_ms is not None and second.metrics.queue_ms < second.metrics.ttft_ms
    single_metrics = single.result().metrics
    assert single_metrics.tpot_ms is None and single_metrics.acceptance is None, (
        "it has no decode step"
    )
    assert single_metrics.ttft_ms == single_metrics.e2el_ms


def test_nothing_is_kept_of_requests_that_have_ended(tiny_checkpoint: Path) -> None:
    """The cache has blocks for two or three requests, so that some are preempted; of these one is
    cancelled while it waits, and another request while it runs."""
    llm = make_llm(
        tiny_checkpoint, draft="ngram", block_tokens=64, cache_tokens=320, max_concurrency=3
    )
    streams = [llm.submit(prompt, 100, ignore_eos=True) for prompt in PROMPTS * 2]
    while not llm._counts.num_preemptions:
        assert llm.step()
    (preempted,) = (s for s in streams if llm._counts.moves[s._request.request_id].preempted_s)
    assert preempted._request.status is RequestStatus.WAITING
    preempted.cancel()
    assert preempted.result().metrics.queue_ms is not None, "it had a row"
    running = next(s for s in streams if s._request.status is RequestStatus.RUNNING)
    running.cancel()
    assert running.result().metrics.queue_ms is not None and running.is_done
    streams[-1].cancel()
    assert streams[-1].result().metrics.queue_ms is None, "it never had one"
    while llm.step():
        pass
    assert not llm._streams and not llm._verifications.by_request and not llm._counts.moves


def test_random_weights_have_no_acceptance(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ResolvedRun, "is_random", property(lambda run: True))
    llm = make_llm(tiny_checkpoint, draft="self", gamma=2)
    found = llm.submit([5, 6, 7], 8, ignore_eos=True).result()
    assert len(found.output_ids) == 8 and found.metrics.acceptance is None


def test_pieces_of_text_are_the_text(tiny_checkpoint: Path) -> None:
    """They come while the request runs, whole characters only, beside the ids."""
    llm = make_llm(tiny_checkpoint, draft="ngram")
    sampling = SamplingSection(temperature=1.5)
    stream = llm.submit(PROMPTS[0], 60, sampling, ignore_eos=True)
    found = []
    for piece in stream.pieces():
        found.append((piece, stream.is_done))
    assert len(found) > 10 and not found[3][1]
    assert "".join(piece for piece, _ in found) == stream.text() == "".join(stream.pieces())
    assert len(list(stream)) == 60, "the ids can still be read"
    cancelled = llm.submit(PROMPTS[1], 60, sampling, ignore_eos=True)
    next(cancelled)
    cancelled.cancel()
    assert "".join(cancelled.pieces()) == cancelled.text()
    assert 0 < len(cancelled.result().output_ids) < 60


def test_what_can_never_be_served_is_refused(tiny_checkpoint: Path) -> None:
    llm = make_llm(tiny_checkpoint, max_tokens=100)
    with pytest.raises(ValueError, match=r"needs 119 tokens of KV cache .* holds at most 100"):
        llm.submit([5] * 90, 30)
    for prompt, message in (([], "is empty"), ([5, 2051], "has the token id 2051")):
        with pytest.raises(ValueError, match=f"the prompt {message}; ids are below 2051"):
            llm.submit(prompt)
    with pytest.raises(ValueError, match="max_new_tokens is too small"):
        llm.submit([5], 0)
    for wrong in (5, None, ["a"], [1.5], [None]):
        with pytest.raises(ValueError, match=r"the prompt is .*; give a text, or a sequence of to"):
            llm.submit(wrong)  # type: ignore[arg-type]
    for name, value in (("max_new_tokens", "3"), ("sampling", 0.5), ("ignore_eos", 1)):
        with pytest.raises(ValueError, match=f"{name} is {value!r}, of type "):
            llm.submit([5], **{name: value})  # type: ignore[arg-type]
    assert llm.submit(torch.tensor([5, 6]), 1).result().prompt_ids == (5, 6)  # type: ignore[arg-type]
    for options, message in (
        ({"draft": "model"}, "--draft model is not known; choose from self, model:NAME, eagle:DIR"),
        ({"draft": "model:nowhere"}, "--draft 'nowhere' is not known; choose from demo, "),
        ({"draft": "model:random:llama-68m"}, "has a vocabulary of 32000 ids, .* of 2051"),
        ({"gamma": 3}, "gamma 3 does nothing with draft none; choose another draft"),
        ({"draft": "self", "gamma": 0}, "--gamma"),
        ({"draft": "ngram", "kv": KVSection("full")}, "kv full does nothing with draft ngram"),
        ({"draft": "ngram", "draft_weights": "int8"}, "--draft_weights int8: no model drafts"),
        ({"max_tokens": 1}, "max_tokens is too small"),
        (
            {"max_tokens": 9999},
            "max_tokens 9999 exceeds the 1024 positions of .*; give at most 1024",
        ),
        ({"max_tokens": "9"}, "max_tokens is '9', of type str; give int or None"),
        ({"max_tokens": 9.0}, "max_tokens is 9.0, of type float; give int or None"),
        ({"max_concurrency": True}, "max_concurrency is True, of type bool; give int"),
        ({"gamma": 1.5}, "gamma is 1.5, of type float; give int or str or None"),
        ({"kv": "snapkv"}, "kv is 'snapkv', of type str; give KVSection"),
        ({"prefix_cache": "no"}, "prefix_cache is 'no', of type str; give bool"),
        ({"draft": None}, "draft is None, of type NoneType; give str"),
        ({"threads": 0}, "threads is too small"),
        ({"max_new_tokens": 0}, "max_new_tokens is too small"),
        ({"cache_tokens": 0}, "cache_tokens is too small"),
    ):
        with pytest.raises(ValueError, match=message):
            make_llm(tiny_checkpoint, **options)


def test_requests_are_as_long_as_the_models_and_memory_let_them_be(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make_llm(tiny_checkpoint, max_tokens=None)
    assert (whole.max_tokens, whole.max_new_tokens) == (1024, 1024)
    short = shutil.copytree(tiny_checkpoint, tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    drafting = {"draft": f"model:{short}", "kv": KVSection("full")}
    assert make_llm(tiny_checkpoint, max_tokens=None, **drafting).max_tokens == 512
    rolling = drafting | {"kv": KVSection("streaming_llm", 20, 4), "prefill_tokens": 64}
    assert make_llm(tiny_checkpoint, max_tokens=None, **rolling).max_tokens == 1024
    with pytest.raises(ValueError, match="max_tokens 513 exceeds the 512 positions of short"):
        make_llm(tiny_checkpoint, max_tokens=513, **drafting)


def test_memory_bounds_the_length_that_nobody_asked_for(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a host's. A length that was asked for may take all of it, and is refused beyond."""
    free = [0]
    monkeypatch.setattr(magicdec.llm, "free_device_memory", lambda kind, rank: free[0])
    asked = RunConfig(ModelSection(str(tiny_checkpoint), "float32"))
    run = find(asked, Launch(), SetupCache())
    rows = run.config.workload.batch_size
    sizes = CacheSizes(16, None, prefix_cache=False)

    def most(num_bytes: int, asked: int | None = None) -> int:
        free[0] = num_bytes
        return choose_max_tokens(run, asked, None, sizes)

    def fits(num_bytes: int) -> bool:
        try:
            return most(num_bytes, 1024) == 1024
        except ValueError as error:
            assert re.match(rf"max_tokens 1024 x max_concurrency {rows} needs .*give ", str(error))
            return False

    needed = bisect_left(range(1 << 32), True, key=fits)
    assert most(2 * needed) == 1024 > most(2 * needed - 2)
    with pytest.raises(ValueError, match="max_tokens 1023 would fit"):
        most(needed - 1, 1024)
    half = rows * 512 * 2 * TINY.num_layers * TINY.num_kv_heads * TINY.head_dim * 4
    assert 512 <= most(2 * (needed - half)) < 1024
    with pytest.raises(ValueError, match="give fewer"):
        most(1000)


@pytest.mark.parametrize(("most", "row_tokens"), [(30, 20 + 30 + 4), (None, 200 + 4)])
def test_what_a_policy_copies_has_room_for_the_longest_output(
    most: int | None, row_tokens: int, expected: list[list[int]], tiny_checkpoint: Path
) -> None:
    kv = KVSection("snapkv", 20, window_size=6)
    llm = make_llm(tiny_checkpoint, draft="self", kv=kv, max_new_tokens=most)
    streams = [llm.submit(prompt, 30, ignore_eos=True) for prompt in PROMPTS]
    assert [list(stream) for stream in streams] == [tokens[:30] for tokens in expected]
    draft_kv = llm._decoder.drafter.draft_kv  # type: ignore[attr-defined]
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
