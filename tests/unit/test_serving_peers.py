"""The peers of `scripts/dev/bench_serving_peers.py`: wrong flags are refused before a peer starts,
the traces follow from their seed, requests are submitted when they arrive, and nothing is measured
after other tokens. This project and transformers serve alike; OpenVINO GenAI is checked by the
script, which measures only after all peers emit the same tokens."""

from __future__ import annotations

import inspect
import json
import time
from io import StringIO
from pathlib import Path
from typing import Any

import bench_serving_peers
import pytest
from bench_serving_peers import make_table, read_options
from conftest import random_prompts
from peers import ENVIRONMENTS, PEERS, Entry, serving_runs
from peers.process import PeerStart, started_here
from peers.serving_peer import ServedTokens, ServingPeer, ServingSizes, TimedRequest, serve_requests
from peers.serving_runs import WAYS, ServingWay, check_tokens, measure, metrics, sizes_of
from peers.serving_trace import describe_trace, make_trace
from rich.console import Console

pytestmark = pytest.mark.wide

NAMES = (
    "magicdec, magicdec-1024, openvino, openvino-2048, openvino-u8, openvino-2048-u8, "
    "transformers-256x2, transformers"
)
EXACT = WAYS[0]
OTHER = next(way for way in WAYS if way.name == "transformers-256x2")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--repetitions", "0"], "--repetitions 0: must be at least 1"),
        (["--kv_heads", "4"], "--kv_heads 4: must divide 6"),
        (["--ways", "vllm"], f"--ways vllm is not known; choose from {NAMES}"),
        (["--ways", "openvino"], "--ways openvino needs --openvino_python"),
        (
            ["--json", "/nowhere/a.json"],
            "--json /nowhere/a.json: directory /nowhere does not exist",
        ),
        (
            ["--openvino_python", "/nowhere/python"],
            "--openvino_python /nowhere/python: No such file or directory; choose the python of an "
            f"environment made by: {ENVIRONMENTS['openvino'].install_command('python')}",
        ),
    ],
)
def test_refuses_in_one_line(flags: list[str], message: str) -> None:
    with pytest.raises(ValueError) as error:
        read_options(flags)
    assert str(error.value) == message


def test_refuses_a_request_that_is_too_long(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival_ms": 5, "prompt_len": 32768, "output_len": 1}\n')
    with pytest.raises(ValueError, match="--arrival: a request has 32769 tokens; at most 32768"):
        read_options(["--arrival", f"trace:{path}"])


def test_every_way_has_a_peer_that_serves() -> None:
    for way in WAYS:
        peer = PEERS[way.peer].load_serving()
        assert issubclass(peer, ServingPeer) and not inspect.isabstract(peer)
        ServingSizes(1, 1, 1, 1, **way.settings)
    without = [way.name for way in read_options([]).ways]
    assert without == ["magicdec", "magicdec-1024", "transformers-256x2"], "no environment is given"


def test_a_trace_follows_from_its_seed_and_keeps_its_requests_when_arrivals_change() -> None:
    burst, again = (make_trace("burst", 32, 0) for _ in range(2))
    poisson = make_trace("poisson:100", 32, 0)
    other = make_trace("burst", 32, 1)
    assert burst == again and serving_runs.texts(burst) == serving_runs.texts(poisson)
    assert serving_runs.texts(burst) != serving_runs.texts(other)
    assert {r.arrival_s for r in burst} == {0.0} and poisson[0].arrival_s == 0.0
    assert all(256 <= len(r.prompt) <= 4096 and 16 <= r.output_len <= 128 for r in burst)
    assert len({tuple(r.prompt[:8]) for r in burst}) == 32, "no prefix can be shared"


def test_a_described_trace_can_be_read_again(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = describe_trace(make_trace("constant:20", 4, 0))
    path.write_text("\n".join(map(json.dumps, lines)))
    assert describe_trace(make_trace(f"trace:{path}", 3, 0)) == lines[:3]


class FakePeer(ServingPeer):
    """Emits a token of every request in a step of 1 ms. A `surplus` request gets one too many."""

    def __init__(self, surplus: int | None = None) -> None:
        self.surplus = surplus
        self.left: dict[int, int] = {}
        self.emitted: list[int] = []
        self.log: list[str] = []

    def version(self) -> str:
        return "0"

    def submit(self, request_id: int, request: TimedRequest) -> None:
        self.left[request_id] = request.output_len
        self.log.append(f"submit {request_id}")

    def advance(self, most_s: float | None) -> None:
        assert self.left, "an idle peer is not asked for a step"
        time.sleep(1e-3)
        self.emitted = list(self.left)
        self.left = {i: n - 1 for i, n in self.left.items() if n > 1}
        self.log.append("step")

    def read(self) -> list[tuple[int, list[int], list[float]]]:
        now_s = time.perf_counter()
        counts = [(i, 2 if i == self.surplus else 1) for i in self.emitted]
        return [(i, [7] * count, [now_s] * count) for i, count in counts]


def test_requests_are_submitted_when_they_arrive() -> None:
    """The second arrives after the first has ended: nothing runs meanwhile."""
    requests = [TimedRequest(0.1, [1], 2), TimedRequest(0.0, [1], 3)]
    peer = FakePeer()
    served = serve_requests(peer, requests)
    assert peer.log == ["submit 1", "step", "step", "step", "submit 0", "step", "step"]
    assert [one.token_ids for one in served] == [[7, 7], [7, 7, 7]]
    assert served[0].times_s[0] > 0.1 > served[1].times_s[0] > 0


def test_a_wrong_number_of_tokens_is_an_error() -> None:
    requests = [TimedRequest(0.0, [1], 2), TimedRequest(0.0, [1], 2)]
    with pytest.raises(RuntimeError, match="request 0 got 4 tokens instead of 2"):
        serve_requests(FakePeer(surplus=0), requests)


def test_metrics_are_those_of_serving_benchmarks() -> None:
    requests = [TimedRequest(0.0, [1], 3), TimedRequest(1.0, [1], 1)]
    served = [ServedTokens([5, 5, 5], [0.5, 1.0, 2.5]), ServedTokens([6], [2.0])]
    found = metrics(requests, served)
    assert found["duration_s"] == 2.5 and found["output_throughput"] == 4 / 2.5
    assert found["p50_ttft_ms"] == 750.0 and found["p90_ttft_ms"] == pytest.approx(950.0)
    assert found["mean_tpot_ms"] == 1000.0


def test_the_cache_has_room_for_all_requests_and_settings_reach_the_peer() -> None:
    short = TimedRequest(0.0, [1] * 10, 5)
    long = TimedRequest(0.0, [1] * 90, 10)
    sizes = sizes_of([[short] * 3, [long]], 2, ServingWay("a", "magicdec", {"batch_tokens": 64}))
    assert sizes == ServingSizes(2, 3, 100, 3 * (15 + 256), 64)


@pytest.mark.wide
def test_this_project_and_transformers_serve_alike(tiny_checkpoint: Path) -> None:
    """The last request joins the running batch, and prompts are prefilled in parts."""
    sizes = ServingSizes(1, 3, 64, 1024, batch_tokens=16)
    prompts = random_prompts([40, 5, 17], 97)
    requests = [TimedRequest(0.02 * (i == 2), list(p), 8 + i) for i, p in enumerate(prompts)]
    served = {}
    for name in ("magicdec", "transformers"):
        peer = PEERS[name].load_serving()(str(tiny_checkpoint), "float32", sizes)
        served[name] = [one.token_ids for one in serve_requests(peer, requests)]
        assert [one.token_ids for one in serve_requests(peer, requests)] == served[name]
        peer.close()
    assert served["magicdec"] == served["transformers"]


class FakeServingWorker:
    """Emits 7s; a peer whose model is "odd" 8s. Serving takes it a second a token."""

    version = "0"

    def __init__(self, start: PeerStart, dtype: str, sizes: ServingSizes) -> None:
        self.token = 8 if start.model == Path("odd") or dtype == "bfloat16" else 7

    def __enter__(self) -> FakeServingWorker:
        return self

    def __exit__(self, *error: object) -> None:
        """There is no process to end."""

    def ask(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        counts = [request["output_len"] for request in requests]
        times = [[1.0 + i for i in range(count)] for count in counts]
        pairs = zip(counts, times, strict=True)
        return {"served": [{"token_ids": [self.token] * n, "times_s": t} for n, t in pairs]}


@pytest.fixture
def _fake_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_runs, "ServingWorker", FakeServingWorker)


@pytest.mark.usefixtures("_fake_workers")
def test_other_float32_tokens_end_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the peer is not exact."""
    good = started_here("magicdec", Path())
    odd = started_here("transformers", Path("odd"))
    versions = {"magicdec": "0", "transformers": "0"}
    assert check_tokens([(EXACT, good), (OTHER, good)], 0, 1) == versions
    with pytest.raises(RuntimeError, match="transformers-256x2 and magicdec emit different"):
        check_tokens([(EXACT, good), (OTHER, odd)], 0, 1)
    monkeypatch.setitem(PEERS, "transformers", Entry("nowhere", is_exact=False))
    assert check_tokens([(EXACT, good), (OTHER, odd)], 0, 1) == versions


@pytest.mark.usefixtures("_fake_workers")
def test_rows_count_the_requests_unlike_float32_and_the_table_shows_each_way() -> None:
    traces = {name: make_trace(name, 3, 0) for name in ("burst", "poisson:100")}
    ways = [(way, started_here(way.peer, Path())) for way in (EXACT, OTHER)]
    lines: list[str] = []
    rows = measure(
        ways,
        traces,
        dict.fromkeys(PEERS, "bfloat16"),
        1,
        repetitions=2,
        report=lambda rows, line: lines.append(line),
    )
    longest = max(r.output_len for r in traces["burst"])
    assert lines[0].startswith(f"1/6 burst, magicdec: {longest:.1f} s; about ")
    assert lines[-1].endswith("; done") and len(lines) == 6
    assert [(row["arrival"], row["way"]) for row in rows] == [
        (arrival, way.name) for arrival in traces for way, _ in ways
    ]
    assert [len(row["all_duration_s"]) for row in rows] == [2, 1, 2, 1]
    assert {row["num_differing"] for row in rows} == {3}
    assert rows[0]["duration_s"] == longest
    printed = StringIO()
    Console(width=140, file=printed).print(make_table("burst", rows))
    assert printed.getvalue().count("transformers-256x2") == 1


@pytest.mark.usefixtures("_fake_workers")
def test_what_is_measured_is_kept_when_it_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the third of four served traces, the file and the tables have these three."""
    path = tmp_path / "serving.json"
    options = read_options(
        [
            "--ways",
            "magicdec",
            "magicdec-1024",
            "--num_requests",
            "3",
            "--repetitions",
            "1",
            "--json",
            str(path),
            "--threads",
            "1",
        ]
    )
    served = iter(range(20))
    original = serving_runs.serve

    def interrupted(worker: Any, requests: Any) -> list[ServedTokens]:
        if next(served) == 2 + 1 + 2 + 3:  # checks, float32 reference, warm-ups; then measured
            raise KeyboardInterrupt
        return original(worker, requests)

    monkeypatch.setattr(serving_runs, "serve", interrupted)
    monkeypatch.setattr(bench_serving_peers, "save_serving_model", lambda kv_heads, path: None)
    with pytest.raises(KeyboardInterrupt):
        bench_serving_peers.run(options)
    rows = json.loads(path.read_text())["serving"]
    measured = [(row["arrival"], row["way"]) for row in rows]
    both = [("burst", "magicdec"), ("burst", "magicdec-1024")]
    assert measured == [*both, ("poisson:100", "magicdec")]
    printed = capsys.readouterr()
    assert "3 requests, arrival burst" in printed.out and "1/4 burst, magicdec" in printed.err
