"""The measurements of `bench_serving_peers.py`: the check that all peers emit the same float32
tokens, and the same requests served by all peers in turn."""

from __future__ import annotations

import shutil
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from magicdec.records.computing import percentile
from peers import PEERS
from peers.process import PeerStart, ServingWorker
from peers.runs import DEMO, save_model
from peers.serving_peer import ServedTokens, ServingSizes, TimedRequest
from peers.serving_trace import make_checked_trace, make_warm_up

BLOCK = 256  # tokens; at most so many are lost in the last block of a request


@dataclass(frozen=True)
class ServingWay:
    """A peer with its settings, which are fields of `ServingSizes`; none: its defaults.
    `most_repetitions` is for a way that takes much longer than the others. `is_default`: whether it
    is measured unless other ways are asked for."""

    name: str
    peer: str
    settings: dict[str, int] = field(default_factory=dict)
    most_repetitions: int | None = None
    is_default: bool = True


WAYS = (
    ServingWay("magicdec", "magicdec"),
    ServingWay("magicdec-1024", "magicdec", {"batch_tokens": 1024}),
    ServingWay("openvino", "openvino"),
    ServingWay("openvino-2048", "openvino", {"batch_tokens": 2048}),
    ServingWay("openvino-u8", "openvino_u8"),
    ServingWay("openvino-2048-u8", "openvino_u8", {"batch_tokens": 2048}),
    ServingWay("transformers-256x2", "transformers", {"batch_tokens": 256, "max_running": 2}, 1),
    ServingWay("transformers", "transformers", {}, 1, is_default=False),
)


def sizes_of(
    traces: Iterable[Sequence[TimedRequest]], threads: int, way: ServingWay
) -> ServingSizes:
    """Room for all requests of any of `traces` at the same time."""
    lengths = [[len(r.prompt) + r.output_len for r in requests] for requests in traces]
    return ServingSizes(
        threads,
        num_requests=max(map(len, lengths)),
        max_tokens=max(map(max, lengths)),
        cache_tokens=max(
            sum(trace_lengths) + BLOCK * len(trace_lengths) for trace_lengths in lengths
        ),
        **way.settings,
    )


def save_serving_model(kv_heads: int, directory: Path) -> None:
    """The random model of `bench_peers.py` with the demo's tokenizer, since servers load one."""
    save_model(kv_heads, directory)
    shutil.copy(DEMO / "tokenizer.model", directory)


def check_tokens(
    ways: Sequence[tuple[ServingWay, PeerStart]], seed: int, threads: int
) -> dict[str, str]:
    """Check that all ways with an exact peer emit the same float32 tokens. Returns the versions of
    the peers. Raises RuntimeError if tokens differ."""
    requests = make_checked_trace(seed)
    versions = {}
    expected: list[ServedTokens] = []
    for way, start in ways:
        with ServingWorker(start, "float32", sizes_of([requests], threads, way)) as worker:
            versions[way.peer] = worker.version
            served = serve(worker, requests)
        expected = expected or served
        if PEERS[way.peer].is_exact and differing(expected, served):
            raise RuntimeError(f"{way.name} and {ways[0][0].name} emit different float32 tokens")
    return versions


def serve(worker: ServingWorker, requests: Sequence[TimedRequest]) -> list[ServedTokens]:
    answer = worker.ask(requests=[asdict(request) for request in requests])
    return [ServedTokens(**one) for one in answer["served"]]


def differing(expected: Sequence[ServedTokens], found: Sequence[ServedTokens]) -> list[int]:
    """The requests whose tokens are not the same."""
    pairs = enumerate(zip(expected, found, strict=True))
    return [i for i, (a, b) in pairs if a.token_ids != b.token_ids]


def serve_exactly(
    way: ServingWay, start: PeerStart, traces: dict[str, list[TimedRequest]], threads: int
) -> dict[str, list[ServedTokens]]:
    """The float32 tokens of each trace. Traces with the same requests are served once."""
    served: dict[str, list[ServedTokens]] = {}
    for arrival, requests in traces.items():
        same = next((a for a in served if texts(traces[a]) == texts(requests)), None)
        if same is not None:
            served[arrival] = served[same]
            continue
        with ServingWorker(start, "float32", sizes_of([requests], threads, way)) as worker:
            served[arrival] = serve(worker, requests)
    return served


def texts(requests: Sequence[TimedRequest]) -> list[tuple[list[int], int]]:
    return [(request.prompt, request.output_len) for request in requests]


Rows = list[dict[str, Any]]


def measure(
    ways: Sequence[tuple[ServingWay, PeerStart]],
    traces: dict[str, list[TimedRequest]],
    dtypes: Mapping[str, str],
    threads: int,
    repetitions: int,
    report: Callable[[Rows, str], None] = lambda rows, line: None,
) -> Rows:
    """One row for each arrival process and way. All workers stay loaded and take turns, each turn
    in the reverse order of the one before. After each served trace, `report` gets the rows of what
    is measured so far and a line of progress."""
    exact = serve_exactly(*ways[0], traces, threads)
    served: dict[tuple[str, str], list[list[ServedTokens]]] = {}
    warm_up = make_warm_up(next(iter(traces.values())))

    def make_rows() -> Rows:
        return [
            make_row(way, arrival, requests, served[arrival, way.name], exact[arrival])
            | {"dtype": dtypes[way.peer]}
            for arrival, requests in traces.items()
            for way, _ in ways
            if (arrival, way.name) in served
        ]

    order = [
        (arrival, way.name)
        for turn in range(repetitions)
        for arrival in traces
        for way, _ in (ways if turn % 2 == 0 else reversed(ways))
        if turn < (way.most_repetitions or repetitions)
    ]
    with ExitStack() as stack:
        workers = {}
        for way, start in ways:
            sizes = sizes_of(traces.values(), threads, way)
            workers[way.name] = stack.enter_context(ServingWorker(start, dtypes[way.peer], sizes))
            serve(workers[way.name], warm_up)
        for number, (arrival, name) in enumerate(order, start=1):
            outputs = serve(workers[name], traces[arrival])
            served.setdefault((arrival, name), []).append(outputs)
            rows = make_rows()
            duration_s = max(output.times_s[-1] for output in outputs)
            left_s = estimate_left(rows, order[number:])
            report(rows, f"{number}/{len(order)} {arrival}, {name}: {duration_s:.1f} s; {left_s}")
    return make_rows()


def estimate_left(rows: Rows, order: Sequence[tuple[str, str]]) -> str:
    """How long the runs in `order`, (arrival, way) each, will take: each as long as its way took
    before, or as the mean of all ways if its way was not measured yet."""
    if not order:
        return "done"
    by_way: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        by_way[row["way"]].append(row["duration_s"])
    means = {name: statistics.fmean(durations) for name, durations in by_way.items()}
    mean = statistics.fmean(means.values())
    minutes = sum(means.get(name, mean) for _, name in order) / 60
    return f"about {minutes:.1f} minutes left"


def make_row(
    way: ServingWay,
    arrival: str,
    requests: Sequence[TimedRequest],
    served: Sequence[list[ServedTokens]],
    exact: Sequence[ServedTokens],
) -> dict[str, Any]:
    """Medians over the repetitions `served`. The tokens of the first are compared with `exact`."""
    runs = [metrics(requests, one) for one in served]
    durations = [run["duration_s"] for run in runs]
    medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    row: dict[str, Any] = {"way": way.name, "peer": way.peer, "settings": way.settings}
    row |= {"is_exact": PEERS[way.peer].is_exact}
    row |= {"arrival": arrival, "num_requests": len(requests)}
    row |= medians | {"all_duration_s": durations}
    return row | {"num_differing": len(differing(exact, served[0]))}


def metrics(requests: Sequence[TimedRequest], served: Sequence[ServedTokens]) -> dict[str, float]:
    """As `magicdec.records.computing` defines them."""
    pairs = list(zip(requests, served, strict=True))
    duration_s = max(one.times_s[-1] for one in served)
    ttft_ms = [1e3 * (one.times_s[0] - request.arrival_s) for request, one in pairs]
    p50, p90 = (percentile(ttft_ms, percent) for percent in (50, 90))
    assert p50 is not None and p90 is not None, "requests were served"
    tpot_ms = [
        1e3 * (one.times_s[-1] - one.times_s[0]) / (len(one.times_s) - 1)
        for one in served
        if len(one.times_s) > 1
    ]
    return {
        "duration_s": duration_s,
        "output_throughput": sum(len(one.token_ids) for one in served) / duration_s,
        "p50_ttft_ms": p50,
        "p90_ttft_ms": p90,
        "mean_tpot_ms": statistics.fmean(tpot_ms),
    }
