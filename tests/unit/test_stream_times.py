"""The time stamps of what a server streams: an event without a token changes none, tokens that come
together have one, and TTFT, TPOT and the other times are those by hand. Counters of several engines
add up."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from test_serving_metrics import serving_metrics

from magicdec.engine.scheduler import StepCounts
from magicdec.names import SERVER_APIS, load_object
from magicdec.runner.request import UNKNOWN_ID, Moves, Request, SamplingParams
from magicdec.systems.observer import PassObserver
from magicdec.systems.servers.connection import Connection
from magicdec.systems.servers.counters import Counters
from magicdec.systems.servers.details import ServerCounts, cached_of, count_pass, is_behind
from magicdec.systems.servers.http_client import AnswerLimits
from magicdec.systems.servers.system import Servers

Event = dict[str, Any]
MOST = 6  # tokens that are asked for
ARRIVED_S = 100.0


class ScriptedConnection(Connection):
    """Answers with events at times of a clock that stands still between them."""

    clock_s = ARRIVED_S
    script: Sequence[tuple[float, Event]] = ()

    def events(self, limits: AnswerLimits, body: dict[str, Any]) -> Generator[Event]:
        for at_s, event in self.script:
            self.clock_s = ARRIVED_S + at_s
            yield event


class ScriptedStream(Servers):
    """A server whose answers are events at times."""

    def __init__(self, api: str, events: Sequence[tuple[float, Event]]) -> None:
        self.api = load_object(SERVER_APIS[api])
        self.scripted = ScriptedConnection("http://localhost/v1", self.api, 1.0, 1.0)
        self.scripted.script = events
        self.connection = self.scripted
        self.server_counts = ServerCounts()
        self.sends_text = False
        self.model = "tiny"
        decoding = SimpleNamespace(ignore_eos=False)
        source = SimpleNamespace(config=SimpleNamespace(vocab_size=50), name="tiny")
        self.run: Any = SimpleNamespace(config=SimpleNamespace(decoding=decoding), source=source)
        self.options: Any = SimpleNamespace(turns=1)
        self.settings: Any = SimpleNamespace(prefix_cache=False)

    def now(self) -> float:
        return self.scripted.clock_s


def streamed(api: str, events: Sequence[tuple[float, Event]]) -> Request:
    request = Request(0, (1, 2, 3), SamplingParams(MOST))
    request.arrived_s = ARRIVED_S
    ScriptedStream(api, events)._stream(request, PassObserver())
    return request


def ids(*tokens: int, text: str = "", **more: Any) -> Event:
    return {"choices": [{"text": text, "token_ids": list(tokens)}]} | more


def text(words: str, **more: Any) -> Event:
    return {"choices": [{"text": words}]} | more


def used(count: int) -> Event:
    return {"usage": {"completion_tokens": count}}


def sglang(count: int, tokens: Sequence[int] | None, words: str = "", end: bool = False) -> Event:
    reason = {"type": "length"} if end else None
    event: Event = {
        "text": words,
        "meta_info": {"completion_tokens": count, "finish_reason": reason},
    }
    return event if tokens is None else event | {"output_ids": list(tokens)}


def llama(count: int, tokens: Sequence[int], words: str = "", end: bool = False) -> Event:
    return {"content": words, "tokens": list(tokens), "tokens_predicted": count, "stop": end}


# Six tokens, of which the first comes after 0.5 s, two after 0.75 s, two after 1.25 s and the last
# after 1.5 s; before, between and after them come events without a token.
EMPTY: Event = {"choices": []}
STREAMS: dict[str, tuple[str, list[tuple[float, Event]]]] = {
    "ids": (
        "openai",
        [
            (0.1, EMPTY),
            (0.2, ids()),
            (0.3, {"choices": None}),
            (0.5, ids(4, text="a")),
            (0.6, EMPTY),
            (0.75, ids(5, 6, text="b")),
            (0.9, ids(text="c")),  # a text of tokens that were known
            (1.25, ids(7, 8)),
            (1.5, ids(9)),
            (1.6, ids(text="d")),
            (1.75, {"choices": [{"text": "e", "token_ids": None}]}),
            (2.0, EMPTY | used(6)),
        ],
    ),
    "texts, counted at the end": (
        "openai",
        [
            (0.25, text("")),
            (0.5, text("a")),
            (0.6, text("")),
            (0.75, text("b c")),
            (1.25, text("d")),
            (1.5, text("e f")),
            (1.75, text("")),
            (2.0, EMPTY | used(6)),
        ],
    ),
    "texts, counted in each event": (
        "openai",
        [
            (0.4, text("") | used(0)),
            (0.5, text("a") | used(1)),
            (0.75, text("b c") | used(3)),
            (1.0, text(" ") | used(3)),
            (1.25, text("d") | used(5)),
            (1.5, text("e") | used(6)),
            (1.75, text("f") | used(6)),
        ],
    ),
    "more texts than tokens": (
        "openai",
        [
            *((at_s, text("a")) for at_s in (0.5, 0.6, 0.75, 0.9, 1.0, 1.25, 1.4, 1.5)),
            (2.0, EMPTY | used(6)),
        ],
    ),
    "all ids so far": (
        "sglang",
        [
            (0.5, sglang(1, [4], "a")),
            (0.6, sglang(1, [4], "a")),
            (0.75, sglang(3, [4, 5, 6], "a b c")),
            (1.25, sglang(5, [4, 5, 6, 7, 8], "a b c d e")),
            (1.5, sglang(6, [4, 5, 6, 7, 8, 9], "a b c d e f")),
            (1.75, sglang(6, [4, 5, 6, 7, 8, 9], "a b c d e f", end=True)),
        ],
    ),
    "new ids": (
        "sglang",
        [
            (0.5, sglang(1, [4], "a")),
            (0.75, sglang(3, [5, 6], "b c")),
            (1.25, sglang(5, [7, 8], "d e")),
            (1.5, sglang(6, [9], "f")),
            (1.75, sglang(6, [], "", end=True)),
        ],
    ),
    "all text so far": (
        "sglang",
        [
            (0.5, sglang(1, None, "a")),
            (0.75, sglang(3, None, "a b c")),
            (1.0, sglang(3, None, "a b c")),
            (1.25, sglang(5, None, "a b c d e")),
            (1.5, sglang(6, None, "a b c d e f")),
            (1.75, sglang(6, None, "a b c d e f", end=True)),
        ],
    ),
    "llama.cpp": (
        "llama.cpp",
        [
            (0.25, llama(0, [])),
            (0.5, llama(1, [4], "a")),
            (0.75, llama(3, [5, 6], "b c")),
            (1.0, llama(3, [], " ")),
            (1.25, llama(5, [7, 8], "d e")),
            (1.5, llama(6, [9], "f")),
            (1.75, llama(6, [], "", end=True)),
        ],
    ),
}
EXACT = [0.5, 0.75, 0.75, 1.25, 1.25, 1.5]
# Where the tokens of a text are not known, those that are lacking come with the last text, and of
# too many texts those before the last are none.
OTHER = {
    "texts, counted at the end": [0.5, 0.75, 1.25, 1.5, 1.5, 1.5],
    "more texts than tokens": [0.5, 0.6, 0.75, 0.9, 1.0, 1.5],
}


@pytest.mark.parametrize("name", STREAMS)
def test_times_of_a_stream_are_those_by_hand(name: str) -> None:
    request = streamed(*STREAMS[name])
    stamps = [at_s - ARRIVED_S for at_s in request.token_times_s]
    assert stamps == pytest.approx(OTHER.get(name, EXACT)), name
    assert all(earlier <= later for earlier, later in pairwise(stamps))
    has_ids = "ids" in name or name == "llama.cpp"
    assert request.output_ids == ([4, 5, 6, 7, 8, 9] if has_ids else [UNKNOWN_ID] * 6)
    assert request.first_token_s == ARRIVED_S + 0.5 and request.finished_s == ARRIVED_S + 1.5
    found = serving_metrics([request], StepCounts(moves={0: Moves([ARRIVED_S])}))
    assert found.duration_s == 1.5 and found.output_throughput == 6 / 1.5
    assert (found.mean_ttft_ms, found.mean_e2el_ms) == (500.0, 1500.0)
    assert found.mean_tpot_ms == pytest.approx(1000.0 / 5)
    assert found.request_tokens_per_s == pytest.approx(5 / 1.0)
    assert found.request_prefill_tokens_per_s == pytest.approx(3 / 0.5)
    gaps = sorted({*stamps[1:]})
    assert found.mean_itl_ms == pytest.approx(1000.0 / len(gaps))


def test_a_token_without_an_event_keeps_its_place() -> None:
    """llama.cpp sends none for a token that ends inside a character, and says how many there
    are."""
    events = [(0.5, llama(1, [4])), (0.75, llama(3, [6])), (1.0, llama(3, [], end=True))]
    request = streamed("llama.cpp", events)
    assert request.output_ids == [4, UNKNOWN_ID, 6]
    with pytest.raises(ValueError, match="has 13 tokens, not 1 to 6"):
        streamed("llama.cpp", [(0.5, llama(10**9, [4])), (0.6, llama(10**9, [5] * 7))])


def test_a_count_of_a_server_makes_no_tokens_without_end() -> None:
    with pytest.raises(ValueError, match=r"has \d+ tokens, not 1 to 6 as it was asked for"):
        streamed("openai", [(0.5, text("a") | used(10**12))])
    request = streamed("openai", [(0.5, text("a") | used(-3)), (0.75, text("b") | used(1))])
    assert request.token_times_s == [ARRIVED_S + 0.75]


def counters(*engines: tuple[int, ...], order: int = 1) -> Counters:
    """Counts of several engines as a server shows them: the verifications, drafts, accepted drafts,
    tokens of each, then accepted drafts by position."""
    names = ("spec_decode_num_drafts", "spec_decode_num_draft_tokens")
    names += ("spec_decode_num_accepted_tokens", "generation_tokens")
    lines = []
    for number, (*sums, first, second) in enumerate(engines):
        label = f'engine="{number}",model_name="a, b"'
        lines += [
            f"vllm:{name}_total{{{label}}} {count}.0"
            for name, count in zip(names, sums, strict=True)
        ]
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        lines += [
            f'{name}{{position="0",{label}}} {first}',
            f'{name}{{{label},position="1"}} {second} 1790000000',
        ]
    return Counters.read("\n".join(lines[::order]))


@pytest.mark.parametrize("order", [1, -1])
def test_counters_of_several_engines_add_up_by_position(order: int) -> None:
    """The third engine counts for the first time."""
    before = counters((5, 10, 6, 100, 4, 2), (7, 14, 3, 50, 3, 0), order=order)
    after = counters((8, 16, 10, 107, 6, 4), (9, 18, 4, 53, 4, 0), (1, 2, 2, 4, 1, 1), order=order)
    request = Request(0, (1,), SamplingParams(14), [3] * 14)
    found = count_pass(before, after, [request]).counts
    # 3 + 2 + 1 verifications of two draft tokens each, of which 4 + 1 + 2 were accepted.
    assert (found.verifications, found.drafted, found.accepted) == (6, 12, 7)
    assert found.accepted_by_position() == [2 + 1 + 1, 2 + 0 + 1]
    assert found.histogram == (6 - 4, 4 - 3, 3)
    assert found.find_contradiction(13) is None


def test_counters_that_appear_with_the_first_draft_count_from_nothing() -> None:
    """No verification accepted nothing, or one token alone."""
    request = Request(0, (1,), SamplingParams(9), [3] * 9)
    found = count_pass(Counters.read(""), counters((3, 6, 6, 9, 3, 3)), [request]).counts
    assert (found.verifications, found.drafted, found.accepted) == (3, 6, 6)
    assert found.histogram == (0, 0, 3) and found.find_contradiction(8) is None


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [(0, 0, True), (100, 103, True), (100, 104, False), (100, 109, False), (100, 90, False)],
)
def test_a_server_is_behind_until_all_tokens_are_counted(
    before: int, after: int, expected: bool
) -> None:
    """Of a request with four tokens; a server that has restarted counts no more of them."""
    readings = [Counters.read(f"vllm:generation_tokens_total {n}") for n in (before, after)]
    request = Request(0, (1, 2, 3, 4, 5, 6), SamplingParams(4), [3] * 4)
    assert is_behind(*readings, [request]) == expected


def test_a_prompt_of_which_a_server_had_nothing_is_counted() -> None:
    requests = [Request(number, (1, 2, 3), SamplingParams(4)) for number in range(2)]
    assert cached_of(ServerCounts(cached={0: 0, 1: 3}), requests) == {0: 0, 1: 3}
    assert cached_of(ServerCounts(cached={0: 0}), requests) == {}
    for wrong in (-1, 4, 1.0):
        with pytest.raises(ValueError, match="cached"):
            cached_of(ServerCounts(cached={0: 0, 1: wrong}), requests)
