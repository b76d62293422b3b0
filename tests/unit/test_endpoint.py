"""`magicdec serve --endpoint`: another program's server beside our modes, by a small server on the
loopback that knows the right tokens, and the ways in which it fails."""

from __future__ import annotations

import json
import re
import threading
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from conftest import Command
from identities import check_command, check_metrics
from trace_files import agent, call, weka, write_lines

from magicdec.bench.showing import break_even, context_tables
from magicdec.cli.serve import COMMANDS
from magicdec.config.masking import masked
from magicdec.distributed.groups import Launch
from magicdec.records.acceptance import ReportedCounts, Verifications
from magicdec.records.computing import acceptance_by_context
from magicdec.records.pass_record import PassRecord
from magicdec.records.reading import read_records
from magicdec.systems.flover.system import Flover
from magicdec.systems.servers.connection import is_same_server, without_openai

ALONE = Launch(0, 1, 0, 1)


IDS = "--model tiny0 has the ids 0 to 2050"
PATIENCE_S = 30.0
POLL_S = 0.01  # until a server that is stopped notices it


@dataclass
class StandInServer:
    """Answers with `answers` by prompt. `fault` names how it fails, after two tokens if it can."""

    answers: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    has_ids: bool = True
    has_usage: bool = True
    fault: str = ""
    odd: Any = None  # sent after two tokens
    report: dict[str, Any] = field(default_factory=dict)  # fields of the last event of an answer
    counters: list[str] = field(default_factory=list)  # sent by /metrics in turn, the last again
    bodies: list[dict[str, Any]] = field(default_factory=list)
    trials: list[dict[str, Any]] = field(default_factory=list)  # of prompts of a single token
    keys: list[str | None] = field(default_factory=list)  # the Authorization of each request
    address: str = ""
    released: threading.Event = field(default_factory=threading.Event)
    num_tokens: int = 0  # that it has sent
    together: int = 0  # answers begin when so many requests have been open at once
    num_open: int = 0
    most_open: int = 0
    counting: threading.Condition = field(default_factory=threading.Condition)

    def begin(self) -> None:
        with self.counting:
            self.num_open += 1
            self.most_open = max(self.most_open, self.num_open)
            self.counting.notify_all()
            self.counting.wait_for(lambda: self.most_open >= self.together, PATIENCE_S)

    def end(self) -> None:
        """Before the client can know that its request has ended."""
        with self.counting:
            self.num_open -= 1

    def events(self, body: dict[str, Any]) -> Iterator[dict[str, Any] | None]:
        """What is streamed; None ends the connection."""
        known = self.answers.get(tuple(body["prompt"]), [1] * body["max_tokens"])
        self.num_tokens += min(len(known), body["max_tokens"])
        output = known[: body["max_tokens"]]
        if self.fault == "wrong":
            output = [*output[:-1], output[-1] + 1]
        if self.fault == "fewer":
            output = output[:-1]
        if self.fault == "more":
            output = [*output, 3]
        for number, token in enumerate(output):
            if number == 2 and self.fault == "stalls":
                self.released.wait()
            while number == 2 and self.fault == "pings" and not self.released.wait(0.02):
                yield {"choices": []}
            while number == 2 and self.fault == "endless":
                yield {"choices": [{"text": "", "token_ids": []}], "padding": "x" * 5000}
            if number == 2 and self.fault == "stops":
                yield None
            if number == 2 and self.fault == "error event":
                yield {"error": {"message": "out of memory"}}
            if number == 2 and self.fault == "odd":
                yield self.odd
            if self.has_ids:
                yield {"choices": [{"text": "", "token_ids": [token]}]}
            elif number != 1 or not self.has_usage:  # the second has no text of its own
                yield {"choices": [{"text": "x", "token_ids": None}]}
        if self.has_usage:
            yield {"choices": [], "usage": {"completion_tokens": len(output)}} | self.report

    def as_sglang(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of /generate, which have all ids so far."""
        sampling = body["sampling_params"]
        asked = {"prompt": body["input_ids"], "max_tokens": sampling["max_new_tokens"]}
        ids = list[int]()
        for event in self.events(asked):
            for choice in (event or {}).get("choices", []):
                ids += choice["token_ids"]
                info = {"completion_tokens": len(ids), "finish_reason": None}
                yield {"text": "", "output_ids": [*ids], "meta_info": info}
        ended = {"completion_tokens": len(ids), "finish_reason": {"type": "length"}}
        yield {"text": "", "output_ids": ids, "meta_info": ended | self.report}

    def as_llama_cpp(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of /completion, whose ids are new ones."""
        asked = {"prompt": body["prompt"], "max_tokens": body["n_predict"]}
        for event in self.events(asked):
            for choice in (event or {}).get("choices", []):
                yield {"content": "", "tokens": choice["token_ids"], "stop": False}
        yield {
            "content": "",
            "tokens": [],
            "stop": True,
            "timings": {"predicted_n": 4} | self.report,
        }


class Handler(BaseHTTPRequestHandler):
    """A request to a `Server`: its counters, its models, or an answer that is streamed."""

    ours: StandInServer

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""

    def answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        self.ours.keys.append(self.headers["Authorization"])
        if path == "/metrics":
            self.answer_counters()
            return
        assert query in ("", "token=q1")
        if path == "/v1/models":
            self.answer_models()
        else:
            self.answer(404, "no such page")

    def answer_counters(self) -> None:
        counters = self.ours.counters
        text = counters.pop(0) if len(counters) > 1 else counters[0]
        self.answer(200, text.format(self.ours.num_tokens))

    def answer_models(self) -> None:
        fault = self.ours.fault
        if fault == "slow":
            while not self.ours.released.wait(0.02):
                self.wfile.write(b"H")
            return
        if fault == "large":
            self.answer(200, f'["{"x" * (5 << 20)}"]')
            return
        models: Any = {"data": [{"id": "tiny"}, {"id": "other"}]}
        if fault == "odd models":
            models = self.ours.odd
        self.answer(200, "<html>" if fault == "no JSON" else json.dumps(models))

    def do_POST(self) -> None:
        ours = self.ours
        key = self.headers["Authorization"]
        ours.keys.append(key)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body.get("prompt", body.get("input_ids"))
        if len(prompt) == 1:  # whether the server takes token ids
            ours.trials.append(body)
        else:
            ours.bodies.append(body)
            ours.begin()
        if ours.fault == "takes text alone" and not isinstance(prompt, str):
            self.answer(400, '{"error": "invalid prompt type"}')
        elif ours.fault == "refuses" and len(prompt) > 1:
            self.answer(400, '{"error": "prompt is\\n too long"}')
        elif ours.fault == "repeats the key":
            self.answer(401, f"\x1b[31mno such key: {key}")
        else:
            self.stream(self.path.partition("?")[0], body)

    def stream(self, path: str, body: dict[str, Any]) -> None:
        """The events of an answer, and what says that it has ended."""
        ours = self.ours
        self.answer(200, "")
        events = {
            "/v1/completions": ours.events,
            "/generate": ours.as_sglang,
            "/completion": ours.as_llama_cpp,
        }[path]
        for event in events(body):
            if event is None:
                return
            self.wfile.write(f": ping\n\nevent: new\ndata: {json.dumps(event)}\n\n".encode())
            self.wfile.flush()
        if body in ours.bodies:
            ours.end()
        if path != "/completion":  # whose last event says that it is
            self.wfile.write(b"data: [DONE]\n\n")


@pytest.fixture
def server() -> Iterator[StandInServer]:
    ours = StandInServer()
    handler = type("OwnHandler", (Handler,), {"ours": ours})
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    http.daemon_threads = True
    http.handle_error = lambda request, address: None  # type: ignore[method-assign]
    thread = threading.Thread(target=http.serve_forever, args=(POLL_S,))
    thread.start()
    ours.address = f"http://127.0.0.1:{http.server_port}/v1"
    yield ours
    ours.released.set()
    http.shutdown()
    http.server_close()
    thread.join()


@pytest.fixture
def words(
    tiny_checkpoint: Path, text_file: Path, tmp_path: Path, server: StandInServer
) -> list[str]:
    return [
        *("--model", str(tiny_checkpoint), "--dataset", str(text_file), "--dtype", "float32"),
        *("--device", "cpu", "--threads", "1", "--out", str(tmp_path / "out.jsonl")),
        *("--num_requests", "3", "--prefix_len", "uniform:5:20", "--gen_len", "4", "--ignore_eos"),
        *("--arrival", "constant:10", "--endpoint", server.address),
    ]


@pytest.fixture
def learning(server: StandInServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server answers as our own modes did."""
    original = Flover.serve

    def serve(batching: Flover, served_pass: Any, requests: Any, watch: Any) -> Any:
        extras = original(batching, served_pass, requests, watch)
        server.answers |= {r.prompt_ids: list(r.output_ids) for r in requests}
        return extras

    monkeypatch.setattr(Flover, "serve", serve)


def run(words: list[str]) -> int:
    return COMMANDS["serve"].parse(words, ALONE).run(words, ALONE)


def records_of(tmp_path: Path) -> list[dict[str, Any]]:
    """Of passes whose metrics follow from their requests."""
    path = tmp_path / "out.jsonl"
    for record in read_records(path, PassRecord):
        assert check_metrics(record) == [], record.name
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.usefixtures("learning")
def test_a_server_is_measured_and_compared_like_a_mode(
    words: list[str],
    server: StandInServer,
    tmp_path: Path,
    command: Command,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run([*words, "--modes", "sequential", "endpoint"]) == 0
    ours, theirs = records_of(tmp_path)
    assert (theirs["name"], theirs["status"]) == ("endpoint", "verified")
    assert theirs["num_differing"] == 0
    assert theirs["config"]["workload"]["endpoint"] == [server.address]
    (group,) = theirs["groups"]
    assert group["threads"] == [0] and theirs["metrics"]["peak_memory_bytes"] is None
    assert theirs["metrics"]["num_steps"] is theirs["metrics"]["num_preemptions"] is None
    assert set(theirs["metrics"]) == set(ours["metrics"])
    assert theirs["metrics"]["mean_ttft_ms"] > 0 and theirs["metrics"]["mean_tpot_ms"] > 0
    for a, b in zip(ours["requests"], theirs["requests"], strict=True):
        same = ("prompt_len", "output_len", "arrival_ms")
        assert [b[name] for name in same] == pytest.approx([a[name] for name in same])
        assert b["arrival_ms"] <= b["joined_ms"][0] <= b["first_token_ms"] <= b["finished_ms"]
    body = server.bodies[-1]
    assert body["model"] == "tiny" and body["max_tokens"] == body["min_tokens"] == 4
    assert body["temperature"] == 0 and body["stream"] and body["ignore_eos"]
    out = capsys.readouterr().out
    assert "verified: the other pass has the 12 tokens of sequential" in out
    assert "endpoint: does not say whether it drafts; see --endpoint_metrics" in out
    assert theirs["details"]["source"] is None and len(theirs["details"]["missing"]) == 9
    assert "endpoint" in command("table", tmp_path / "out.jsonl").out


@pytest.mark.usefixtures("learning")
def test_so_many_requests_are_open_at_once_and_no_more(
    words: list[str], server: StandInServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.together = 2
    arrival = words.index("--arrival")
    closed = [*words[:arrival], *words[arrival + 2 :], "--num_requests", "6"]
    assert run([*closed, "--modes", "sequential", "endpoint", "--concurrency", "2"]) == 0
    ours, theirs = records_of(tmp_path)
    assert (theirs["name"], theirs["status"]) == ("endpoint, 2 at once", "verified")
    assert theirs["reference"] == ours["name"] == "sequential, 2 at once"
    assert theirs["config"]["workload"]["concurrency"] == 2 and len(theirs["requests"]) == 6
    assert server.most_open == 2 and server.num_open == 0
    assert "6 requests, arrival closed loop" in capsys.readouterr().out
    ends = sorted(request["finished_ms"] for request in theirs["requests"])
    for request, end in zip(theirs["requests"][2:], ends, strict=False):
        assert request["arrival_ms"] > end, "it is sent when an answer has ended, and not before"


@pytest.mark.usefixtures("learning")
def test_a_conversation_goes_on_with_the_servers_own_answers(
    words: list[str], server: StandInServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which is learnt here. A server that sends text alone cannot be asked further."""
    items = [{"turns": [f"{'far ' * n}{turn}" for turn in range(3)]} for n in range(3)]
    (tmp_path / "set.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    arrival = words.index("--arrival")
    talk = [*words[:arrival], *words[arrival + 2 :], "--dataset", f"mt_bench:{tmp_path}/set.jsonl"]
    talk += ["--concurrency", "2", "--turns", "2", "--prefix_len", "90"]
    assert run([*talk, "--modes", "sequential", "endpoint"]) == 0
    ours, theirs = records_of(tmp_path)
    assert (theirs["status"], theirs["num_differing"]) == ("verified", 0)
    lengths = [
        [request["prompt_len"] for request in record["requests"]] for record in (ours, theirs)
    ]
    assert lengths[0] == lengths[1] and len(lengths[0]) == 6
    assert [their["turn"] for their in theirs["requests"]] == [1, 2] * 3
    assert [turn["num_requests"] for turn in theirs["times_by_turn"]] == [3, 3]
    prompts = [body["prompt"] for body in server.bodies]
    first = min((prompt for prompt in prompts if tuple(prompt) in server.answers), key=len)
    answer = server.answers[tuple(first)]
    assert any(prompt[: len(first) + 4] == [*first, *answer] for prompt in prompts)
    assert "3 later questions are not asked" in capsys.readouterr().out
    server.has_ids = False
    with pytest.raises(ValueError) as refused:
        run([*talk, "--modes", "endpoint"])
    assert str(refused.value).endswith(
        "sends an answer without all of its token ids, with which a conversation of --turns 2 "
        "would go on; ask by an --endpoint_api that sends ids, or leave --turns out"
    )


@pytest.mark.usefixtures("learning")
def test_a_server_gets_the_requests_of_a_trace(
    words: list[str], server: StandInServer, tmp_path: Path
) -> None:
    """Each as its answer before has ended and its tool was used, whatever the answer was."""
    calls = [call(at, 16 + at, think_time=0.05 * at, out=4) for at in range(3)]
    rows = [weka(*calls, agent(4, call(4, 24, [9, 10, 11], out=2))), weka(call(0, 8))]
    trace = write_lines(tmp_path / "trace.jsonl", rows)
    own = words[: words.index("--num_requests")]
    own += ["--ignore_eos", "--endpoint", server.address, "--arrival", f"weka:{trace}"]
    assert run([*own, "--modes", "sequential", "endpoint"]) == 0
    ours, theirs = records_of(tmp_path)
    assert (theirs["status"], theirs["num_differing"]) == ("verified", 0)
    for record in (ours, theirs):
        first, second, third, inner, other = record["requests"]
        rounding_ms = 1e-6
        assert second["arrival_ms"] >= first["finished_ms"] + 50 - rounding_ms
        assert third["arrival_ms"] >= second["finished_ms"] + 100 - rounding_ms
        assert inner["arrival_ms"] >= third["finished_ms"] + 1000 - rounding_ms
        assert inner["branch"] == 1
        assert (other["conversation"], other["arrival_ms"]) == (1, 0.0)
    server.has_ids = False  # no prompt needs them
    assert run([*own, "--modes", "endpoint"]) == 0


def test_no_prompt_begins_as_one_of_the_warm_up(words: list[str], server: StandInServer) -> None:
    """A server may keep what it has computed of them."""
    assert run([*words, "--modes", "endpoint"]) == 0
    prompts = [body["prompt"] for body in server.bodies]
    warm = prompts[:3]
    measured = prompts[3:]
    assert len(measured) == 3 and {p[0] for p in warm}.isdisjoint(p[0] for p in measured)


@pytest.mark.usefixtures("learning")
@pytest.mark.parametrize(
    ("api", "report"),
    [
        (
            "openai",
            {"usage": {"completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 3}}},
        ),
        ("sglang", {"cached_tokens": 3}),
        ("llama.cpp", {"predicted_n": 4, "cache_n": 3}),
    ],
)
def test_what_a_server_had_of_prompts_is_counted_as_hits(
    api: str, report: dict[str, Any], words: list[str], server: StandInServer, tmp_path: Path
) -> None:
    """llama.cpp's server is asked to keep prompts, as it is asked not to without --prefix_cache."""
    server.report = report
    given = [*words, "--modes", "endpoint", "--endpoint_api", api]
    for more, kept in ([], False), (["--prefix_cache"], True):
        assert run([*given, *more]) == 0
        record = records_of(tmp_path)[-1]
        lengths = [request["prompt_len"] for request in record["requests"]]
        assert record["metrics"]["prefix_hit_rate"] == 9 / sum(lengths)
        assert [request["joined_prefix_tokens"] for request in record["requests"]] == [
            [3],
            [3],
            [3],
        ]
        assert server.bodies[-1].get("cache_prompt", kept) == kept
    key = {"openai": "usage", "sglang": "cached_tokens", "llama.cpp": "cache_n"}[api]
    details = {"prompt_tokens_details": {"cached_tokens": 21}}
    server.report = report | {key: {"completion_tokens": 4} | details if api == "openai" else 21}
    assert run(given) == 0
    record = records_of(tmp_path)[-1]
    assert record["metrics"]["prefix_hit_rate"] is None
    (problem,) = record["details"]["problems"]
    assert re.fullmatch(r"request \d: 21 cached tokens of a prompt of \d+", problem)


# What a server reports of 2 verifications with 3 draft tokens, after 4 tokens of an answer.
VLLM_REPORT = {
    "metrics": {
        "speculative_decoding": {
            "num_draft_tokens": 3,
            "num_accepted_draft_tokens": 1,
            "num_spec_steps": 2,
            "acceptance_histogram": [1, 1, 0],
            "per_step_accepted": [1, 0],
            "per_step_drafted": [2, 1],
        }
    }
}
SGLANG_REPORT = {
    "spec_verify_ct": 2,
    "spec_num_correct_drafts": 1,
    "spec_num_proposed_drafts": 3,
    "spec_correct_drafts_histogram": [1, 1],
}
LLAMA_CPP_REPORT = {"draft_n": 3, "draft_n_accepted": 1}


@pytest.mark.narrow(2)
@pytest.mark.usefixtures("learning")
@pytest.mark.parametrize(
    ("api", "program", "report", "length"),
    [
        ("openai", "vllm", VLLM_REPORT, 1.5),
        ("openai", "llama.cpp", {"timings": {"predicted_n": 4} | LLAMA_CPP_REPORT}, None),
        ("sglang", "sglang", SGLANG_REPORT, 1.5),
        ("llama.cpp", "llama.cpp", LLAMA_CPP_REPORT, None),
    ],
)
def test_acceptance_is_a_column_beside_our_modes(
    api: str,
    program: str,
    report: dict[str, Any],
    length: float | None,
    words: list[str],
    server: StandInServer,
    tmp_path: Path,
    command: Command,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server.report = report
    modes = ["--modes", "sequential", "endpoint", "--endpoint_api", api, "--verbose"]
    assert run([*words, *modes]) == 0
    _, record = records_of(tmp_path)
    assert (record["status"], record["num_differing"]) == ("verified", 0)
    metrics = record["metrics"]
    details = record["details"]
    assert (details["program"], details["source"], details["problems"]) == (program, "answers", [])
    assert (metrics["num_draft_tokens"], metrics["num_accepted_draft_tokens"]) == (9, 3)
    assert metrics["draft_acceptance_rate"] == 1 / 3
    assert metrics["mean_acceptance_length"] == length
    assert ("mean_acceptance_length" in details["missing"]) == (length is None)
    for request in record["requests"]:
        assert (request["num_draft_tokens"], request["num_accepted_draft_tokens"]) == (3, 1)
        assert request["per_step_drafted"] == ([2, 1] if program == "vllm" else None)
        assert request["num_spec_steps"] == (2 if length else None)
    (group,) = record["acceptance_by_context"]
    assert (group["most_context"], group["num_requests"]) == (2048, 3)
    assert group["draft_acceptance_rate"] == 1 / 3
    out = capsys.readouterr().out
    assert re.search(r"acceptance rate +│ +│ +0\.333", out), out
    assert f"endpoint: acceptance by the answers of {program}" in out
    assert "0.333" in command("table", tmp_path / "out.jsonl").out
    if program == "vllm":
        code, _, _ = command("report", tmp_path / "out.jsonl", "--out", tmp_path / "page")
        page = (tmp_path / "page" / "index.html").read_text()
        assert code == 0 and "acceptance by the answers of vllm" in page


@pytest.mark.usefixtures("learning")
def test_what_contradicts_itself_is_one_line_and_the_times_stay(
    words: list[str], server: StandInServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = VLLM_REPORT["metrics"]["speculative_decoding"]
    wrong = counts | {"acceptance_histogram": [1, 0, 1]}
    server.report = {"metrics": {"speculative_decoding": wrong}}
    assert run([*words, "--modes", "sequential", "endpoint"]) == 0
    _, record = records_of(tmp_path)
    assert record["metrics"]["draft_acceptance_rate"] is record["acceptance_by_context"] is None
    assert record["metrics"]["mean_ttft_ms"] > 0 and record["details"]["source"] is None
    assert "draft_acceptance_rate" in record["details"]["missing"]
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "not taken" in line]
    assert line == ("endpoint: not taken: request 0: a histogram of 2 accepted draft tokens, not 1")


COUNTERS = """vllm:generation_tokens_total {{0}}
vllm:spec_decode_num_drafts_total {}
vllm:spec_decode_num_draft_tokens_total {}
vllm:spec_decode_num_accepted_tokens_total {}
"""


@pytest.mark.narrow(2)
@pytest.mark.usefixtures("learning")
@pytest.mark.parametrize(
    ("after", "extra", "problem"),
    [
        ((9, 18, 7), "", None),
        ((4, 18, 7), "", "spec_decode_num_drafts_total went from 5 to 4, so that the server has"),
        (
            (9, 18, 7),
            "vllm:generation_tokens_total 5\n",
            "17 generated tokens, but the answers have",
        ),
        ((9, 90, 7), "", None),
        ((60, 90, 7), "", "55 verifications, but 9 output tokens after the first ones"),
    ],
)
def test_counters_are_read_around_the_pass(
    after: tuple[int, ...],
    extra: str,
    problem: str | None,
    words: list[str],
    server: StandInServer,
    tmp_path: Path,
) -> None:
    """The first reading is the check before the command, and the second after the warm-up."""
    before = COUNTERS.format(5, 10, 3)
    server.counters = [before, before, COUNTERS.format(*after) + extra]
    address = server.address.removesuffix("/v1")
    flags = ("--modes", "sequential", "endpoint", "--endpoint_metrics", f"{address}/metrics")
    assert run([*words, *flags]) == 0
    _, record = records_of(tmp_path)
    details = record["details"]
    metrics = record["metrics"]
    assert record["acceptance_by_context"] is None
    if problem is None:
        assert (details["source"], details["problems"]) == ("counters", [])
        assert metrics["mean_acceptance_length"] == 2 and metrics["num_spec_steps"] == 4
        assert metrics["draft_acceptance_rate"] == 4 / (after[1] - 10)
        assert metrics["draft_acceptance_rate_interval"] is None
        assert details["missing"] == [
            *("tokens_per_verification", "acceptance_per_position", "judged_per_position"),
            "acceptance_histogram",
        ]
    else:
        assert details["source"] is None and metrics["num_spec_steps"] is None
        assert [problem in text for text in details["problems"]] == [True]


@pytest.mark.usefixtures("learning")
@pytest.mark.parametrize(
    ("second", "problems", "expected"),
    [
        ((13, 26, 11), [], (8, 16)),
        (
            (8, 26, 11),  # the server has restarted
            ["counters: vllm:spec_decode_num_drafts_total went from 9 to 8", "counters: known of"],
            (None, None),
        ),
    ],
)
def test_counters_are_read_around_each_repeat(
    second: tuple[int, ...],
    problems: list[str],
    expected: tuple[int | None, ...],
    words: list[str],
    server: StandInServer,
    tmp_path: Path,
) -> None:
    """In the second repeat the server is first. Where one repeat has no counts, their sum is not
    known, and the record, read back, does not say that it has counters."""
    first = COUNTERS.format(5, 10, 3)
    between = COUNTERS.format(9, 18, 7)
    server.counters = [first, first, between, between, COUNTERS.format(*second)]
    address = server.address.removesuffix("/v1")
    flags = ("--modes", "sequential", "endpoint", "--endpoint_metrics", f"{address}/metrics")
    assert run([*words, *flags, "--repeats", "2"]) == 0
    ours, theirs = records_of(tmp_path)
    assert check_command(list(read_records(tmp_path / "out.jsonl", PassRecord))) == []
    assert (theirs["status"], theirs["num_differing"]) == ("verified", 0)
    assert [group["num_requests"] for group in theirs["groups"]] == [3, 3]
    assert len(ours["requests"]) == len(theirs["requests"]) == 6
    assert theirs["correctness"]["num_tokens"] == 24
    details = theirs["details"]
    metrics = theirs["metrics"]
    assert (metrics["num_spec_steps"], metrics["num_draft_tokens"]) == expected
    assert details["source"] == (None if problems else "counters")
    assert len(details["problems"]) == len(problems)
    for problem, start in zip(details["problems"], problems, strict=True):
        assert problem.startswith(start)
    assert ("draft_acceptance_rate" in details["missing"]) == bool(problems)
    assert len(metrics["throughput_ratio_per_group"]) == 2


@pytest.mark.usefixtures("learning")
def test_answers_of_one_repeat_say_nothing_of_all(
    words: list[str], server: StandInServer, tmp_path: Path
) -> None:
    """Drafts that only the answers of the first repeat report are not counted beside the tokens of
    both."""
    server.report = VLLM_REPORT
    begin = server.begin

    def reporting() -> None:
        begin()
        num_measured = sum(body["max_tokens"] == 4 for body in server.bodies)  # no warm-ups
        if num_measured > 3:
            server.report = {}

    server.begin = reporting  # type: ignore[method-assign]
    assert run([*words, "--modes", "sequential", "endpoint", "--repeats", "2"]) == 0
    _, theirs = records_of(tmp_path)
    assert (theirs["status"], len(theirs["requests"])) == ("verified", 6)
    assert theirs["details"]["source"] is theirs["metrics"]["num_draft_tokens"] is None
    assert theirs["details"]["problems"] == ["answers: known of 1 of 2 repeats alone"]
    assert [request["num_draft_tokens"] for request in theirs["requests"]] == [None] * 6


@pytest.mark.usefixtures("learning")
def test_a_server_may_count_a_moment_after_it_answers(
    words: list[str], server: StandInServer, tmp_path: Path
) -> None:
    before = COUNTERS.format(0, 0, 0)
    late = COUNTERS.format(4, 8, 4)
    behind = before.replace("{0}", "10")  # the warm-up had 9 tokens
    server.counters = [before, before, behind, behind, late]
    address = server.address.removesuffix("/v1")
    assert run([*words, "--modes", "endpoint", "--endpoint_metrics", f"{address}/metrics"]) == 0
    (record,) = records_of(tmp_path)
    assert record["details"]["problems"] == []
    assert record["metrics"]["mean_acceptance_length"] == 2


@pytest.mark.usefixtures("learning")
def test_several_servers_have_a_column_each(
    words: list[str],
    server: StandInServer,
    tmp_path: Path,
    command: Command,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server.report = {"timings": {"predicted_n": 4} | LLAMA_CPP_REPORT}
    other = server.address.replace("127.0.0.1", "localhost")
    flags = ["--endpoint", server.address, other, "--endpoint_model", "tiny", "other"]
    assert run([*words, "--modes", "sequential", "endpoint", *flags]) == 0
    assert [record["name"] for record in records_of(tmp_path)] == [
        *("sequential", "endpoint", "endpoint2"),
    ]
    assert [body["model"] for body in server.bodies] == ["tiny"] * 6 + ["other"] * 6
    out = capsys.readouterr().out
    assert "verified: all other passes have the 12 tokens of sequential" in out
    exported = tmp_path / "vllm.jsonl"
    words = [str(tmp_path / "out.jsonl"), "--format", "vllm", "--out", str(exported)]
    assert command("export", *words).code == 0 and len(exported.read_text().splitlines()) == 3


def test_drafts_of_a_server_break_even_beside_the_same_server_without_them(
    tmp_path: Path, words: list[str], server: StandInServer
) -> None:
    """By hand: 3 tokens after the first of each of 3 requests, 2 verifications for each."""
    server.report = VLLM_REPORT
    assert run([*words, "--modes", "endpoint"]) == 0
    (drafting,) = read_records(tmp_path / "out.jsonl", PassRecord)
    assert drafting.metrics is not None and drafting.details is not None
    times = replace(drafting.metrics, mean_tpot_ms=30.0)
    drafting = replace(drafting, metrics=times)
    without = replace(times, mean_tpot_ms=20.0, num_draft_tokens=None, num_spec_steps=None)
    plain = replace(drafting, metrics=without)
    assert break_even(drafting, [drafting]) is break_even(plain, [plain, drafting]) is None
    # 9 tokens take the time of 13.5 plain steps; 6 verifications of 1.5 tokens emit all of them.
    assert break_even(drafting, [plain, drafting]) == pytest.approx(13.5 / 6)
    other = replace(plain, details=replace(drafting.details, program="sglang"))
    assert break_even(drafting, [other, drafting]) is None
    ours = replace(drafting, name="inflight+draft", details=None)
    beside = [replace(plain, name=name, details=None) for name in ("static", "inflight")]
    assert break_even(ours, [*beside, ours]) == pytest.approx(13.5 / 6)
    assert break_even(ours, [beside[0], ours]) is None
    assert break_even(replace(ours, name="pipeinfer"), [*beside, ours]) is None
    few = replace(ours, metrics=replace(times, num_spec_steps=2))  # 3 tokens of 9
    assert break_even(few, [*beside, few]) is None


@pytest.mark.usefixtures("learning")
@pytest.mark.parametrize("has_usage", [True, False])
def test_tokens_without_ids_are_counted_and_not_compared(
    has_usage: bool,
    words: list[str],
    server: StandInServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Three texts are four tokens, if the server says so."""
    server.has_ids = False
    server.has_usage = has_usage
    assert run([*words, "--modes", "endpoint", "sequential", "--endpoint_model", "other"]) == 0
    for record in records_of(tmp_path):
        assert (record["status"], record["num_differing"]) == ("unverified", None)
        assert [request["output_len"] for request in record["requests"]] == [4, 4, 4]
    assert server.bodies[-1]["model"] == "other"
    message = "sequential: unverified, its 12 tokens are not compared, because a server sent no"
    assert message in capsys.readouterr().out


@pytest.mark.usefixtures("learning")
def test_other_tokens_in_another_program_are_no_divergence(
    words: list[str], server: StandInServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.fault = "wrong"
    assert run([*words, "--modes", "sequential", "endpoint"]) == 0
    _, record = records_of(tmp_path)
    assert (record["status"], record["num_differing"]) == ("unverified", 3) and record["metrics"]
    message = "endpoint: unverified, 3 of 3 requests differ from sequential in 12 tokens; rounding"
    assert message in capsys.readouterr().out


@pytest.mark.narrow(4)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("fewer", "has 2 tokens, not 3 as it was asked for"),
        ("more", "has 4 tokens, not 3 as it was asked for"),
        ("stalls", "has sent nothing of use for 0.2 s"),
        ("pings", "has sent nothing of use for 0.2 s"),
        ("endless", "bytes that it may need"),
        ("stops", "ends in the middle of an answer"),
        ("error event", "ends an answer with: {'message': 'out of memory'}"),
        ("refuses", 'answers /completions with 400: {"error": "prompt is'),
    ],
)
def test_a_failing_server_costs_only_its_own_record(
    fault: str,
    message: str,
    words: list[str],
    server: StandInServer,
    tmp_path: Path,
    command: Command,
) -> None:
    server.fault = fault
    patience = "0.2" if fault in ("stalls", "pings") else "30"
    words += ["--modes", "sequential", "endpoint", "--endpoint_timeout_s", patience]
    code, _, err = command("serve", *words)
    (line,) = [line for line in err.splitlines() if "--endpoint" in line]
    assert code == 2 and message in line and server.address in line
    (record,) = records_of(tmp_path)
    assert record["name"] == "sequential" and record["metrics"]


@pytest.mark.narrow(4)
@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ([1], "answers /completions with no object: [1]"),
        ({"choices": ["a"]}, "sends choices that are no list of objects: ['a']"),
        ({"choices": [{"token_ids": ["5"]}]}, "sends token_ids that are no ids: ['5']"),
        ({"choices": [{"token_ids": 5}]}, "sends token_ids that are no ids: 5"),
        ({"choices": [{"token_ids": [-1]}]}, f"sends a token id -1, but {IDS}"),
        ({"choices": [{"token_ids": [10**30]}]}, f"sends a token id {10**30}, but {IDS}"),
        ({"choices": [{"token_ids": [2051]}]}, f"sends a token id 2051, but {IDS}"),
        ({"choices": [{"token_ids": [True]}]}, "sends token_ids that are no ids: [True]"),
        ({"choices": [{"token_ids": [7] * 10**5}]}, "has 100002 tokens, not 3 as it was asked for"),
    ],
)
def test_an_odd_stream_is_one_line(
    odd: Any,
    message: str,
    words: list[str],
    server: StandInServer,
    tmp_path: Path,
    command: Command,
) -> None:
    server.fault = "odd"
    server.odd = odd
    code, _, err = command("serve", *words, "--modes", "sequential", "endpoint")
    assert code == 2 and message in err.splitlines()[-1], err
    assert f"--endpoint {server.address}" in err and len(err.splitlines()[-1]) < 400
    assert [record["name"] for record in records_of(tmp_path)] == ["sequential"]


@pytest.mark.usefixtures("learning")
@pytest.mark.parametrize(
    "odd", [{"choices": None}, {"error": None}, {"usage": {"completion_tokens": "many"}}]
)
def test_what_says_nothing_is_passed_over(
    odd: Any, words: list[str], server: StandInServer, tmp_path: Path
) -> None:
    server.fault = "odd"
    server.odd = odd
    assert run([*words, "--modes", "sequential", "endpoint"]) == 0
    assert records_of(tmp_path)[1]["status"] == "verified"


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ([], "answers /models with no object: []"),
        ({"data": 3}, "sends data that are no list of objects: 3"),
        ({"data": None}, "--endpoint_model None is not served there; choose from no model"),
        ({"data": [{}]}, "--endpoint_model None is not served there; choose from no model"),
    ],
)
def test_odd_models_are_one_line(
    odd: Any, message: str, words: list[str], server: StandInServer, command: Command
) -> None:
    server.fault = "odd models"
    server.odd = odd
    code, _, err = command("serve", *words, "--modes", "endpoint")
    assert code == 2 and message in err.splitlines()[-1], err


@pytest.mark.parametrize("api", ["openai", "sglang", "llama.cpp"])
def test_a_server_that_takes_no_ids_is_named_before_others_are_measured(
    api: str, words: list[str], server: StandInServer, tmp_path: Path, command: Command
) -> None:
    server.fault = "takes text alone"
    flags = ["--modes", "sequential", "endpoint", "--endpoint_api", api]
    code, _, err = command("serve", *words, *flags)
    line = err.splitlines()[-1]
    assert code == 2 and "invalid prompt type" in line and "give --endpoint_prompts text" in line
    assert not (tmp_path / "out.jsonl").exists() and not server.bodies
    if api == "openai":
        assert command("serve", *words, *flags, "--endpoint_prompts", "text").code == 0


def test_a_url_without_v1_is_said(
    words: list[str], server: StandInServer, command: Command
) -> None:
    bare = server.address.removesuffix("/v1")
    code, _, err = command("serve", *words[:-1], bare, "--modes", "endpoint")
    line = err.splitlines()[-1]
    assert code == 2 and "answers /models with 404" in line
    assert line.endswith("the URL of OpenAI's interface ends in /v1")


def test_what_no_server_can_serve_is_refused(
    words: list[str], server: StandInServer, tmp_path: Path, command: Command
) -> None:
    """Before anything is measured."""
    address = server.address
    for flags, message in (
        ("--endpoint_model big", "--endpoint_model big is not served there; choose from tiny, oth"),
        ("--endpoint http://127.0.0.1:9/v1", "--endpoint http://127.0.0.1:9/v1: [Errno 111] Conn"),
        ("--endpoint localhost:80", "--endpoint localhost:80 is no URL; give one such as http://"),
        ("--temperature 1", "--temperature 1 does nothing with --modes endpoint, whose server"),
        ("--modes inflight", "--endpoint does nothing here: no mode of --modes inflight uses it"),
        (
            "--emulate_stage_ms 3",
            "--emulate_stage_ms does nothing here: no mode of --modes endpoint uses it",
        ),
        (
            "--modes endpoint pipeinfer --emulate_acceptance 0.5",
            "--modes pipeinfer drafts ahead of stages that compute",
        ),
        ("--endpoint_prompts words", "--endpoint_prompts words is not known; choose from ids, te"),
        ("--endpoint_api vllm", "--endpoint_api vllm is not known; choose from openai, sglang, ll"),
        (f"--endpoint {address} {address}", "--endpoint names a server twice; name each once"),
        ("--endpoint_api openai sglang", "--endpoint_api has 2 values for 1 servers of --endpoint"),
        ("--endpoint_metrics localhost", "--endpoint_metrics localhost is no URL; give one such"),
        ("--endpoint_metrics http://127.0.0.1:9/m", "--endpoint_metrics http://127.0.0.1:9/m: [Er"),
        (
            f"--endpoint_metrics {address}/models",
            f"--endpoint_metrics {address}/models has no counters of a known server (vllm:*, sgla",
        ),
    ):
        code, _, err = command("serve", *words, "--modes", "endpoint", *flags.split())
        assert code == 2 and message in err, err
    server.fault = "no JSON"
    assert f"{address} answers /models with no JSON" in command("serve", *words).err
    assert "--modes endpoint needs --endpoint URL" in command("serve", "--modes", "endpoint").err
    assert not (tmp_path / "out.jsonl").exists() and not server.bodies


@pytest.mark.parametrize("fault", ["slow", "large"])
def test_a_first_answer_has_limits(
    fault: str, words: list[str], server: StandInServer, command: Command
) -> None:
    """A status line that never ends, and a list of models of several megabytes."""
    server.fault = fault
    flags = ["--modes", "endpoint", "--endpoint_timeout_s", "0.3" if fault == "slow" else "30"]
    code, _, err = command("serve", *words, *flags)
    message = "has sent nothing of use for 0.3 s" if fault == "slow" else "bytes that it may need"
    assert code == 2 and message in err.splitlines()[-1], err


def test_a_whole_answer_has_a_limit(
    words: list[str], server: StandInServer, command: Command
) -> None:
    """Although tokens come."""
    server.fault = "pings"
    flags = "--modes endpoint --endpoint_timeout_s 30 --endpoint_total_s 0.3"
    code, _, err = command("serve", *words, *flags.split())
    assert code == 2 and "has not ended an answer in 0.3 s" in err.splitlines()[-1], err


SECRET = "sk-0123456789"


@pytest.mark.parametrize("fault", ["", "repeats the key"])
def test_a_key_is_sent_and_never_said(
    fault: str,
    words: list[str],
    server: StandInServer,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not even if the server says it."""
    monkeypatch.setenv("SERVERS_KEY", SECRET)
    server.fault = fault
    flags = ["--modes", "sequential", "endpoint", "--endpoint_key_env", "SERVERS_KEY"]
    code, out, err = command("serve", *words, *flags)
    assert set(server.keys) == {f"Bearer {SECRET}"} and len(server.keys) > 1
    assert code == (2 if fault else 0), err
    assert SECRET not in out + err
    if not fault:
        assert SECRET not in (tmp_path / "out.jsonl").read_text()
    else:
        assert "no such key: Bearer ***" in err and "\x1b" not in err


@pytest.mark.parametrize("fault", ["", "no JSON", "repeats the key"])
def test_credentials_of_the_url_are_sent_and_never_said(
    fault: str, words: list[str], server: StandInServer, tmp_path: Path, command: Command
) -> None:
    url = f"{server.address.replace('://', '://me:pass%40word@')}?token=q1"
    server.fault = fault
    flags = ["--modes", "sequential", "endpoint", "--endpoint", url]
    code, out, err = command("serve", *words[:-2], *flags)
    assert set(server.keys) == {f"Basic {b64encode(b'me:pass@word').decode()}"}
    printed = out + err
    if not fault:
        assert code == 0, err
        printed += (tmp_path / "out.jsonl").read_text()
        hidden = f"{server.address.replace('://', '://***@')}?***"
        assert records_of(tmp_path)[1]["environment"]["argv"][-2:] == ["--endpoint", hidden]
    assert not [word for word in ("pass%40word", "pass@word", "q1", "bWU6") if word in printed]


def test_credentials_that_cannot_be_are_refused(
    words: list[str], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWO_LINES", f"{SECRET}\nHost: x")
    monkeypatch.setenv("GOOD", SECRET)
    for flags, message in (
        ("--endpoint_key_env NONE_SUCH", "--endpoint_key_env NONE_SUCH: there is no such environ"),
        ("--endpoint_key_env TWO_LINES", "--endpoint_key_env TWO_LINES: its value is no key"),
        (
            "--endpoint_key_env GOOD --endpoint http://me:secret@localhost/v1",
            "--endpoint_key_env GOOD: --endpoint http://***@localhost/v1 has a user already",
        ),
        (
            "--endpoint http://me:secret@host:port/v1",
            "--endpoint http://***@host:port/v1 is no U",
        ),
        ("--endpoint ftp://me:secret@host/v1", "--endpoint ftp://***@host/v1 is no URL"),
    ):
        code, _, err = command("serve", *words, "--modes", "endpoint", *flags.split())
        assert code == 2 and message in err and "secret" not in err and SECRET not in err, err


def test_secrets_of_urls_are_masked() -> None:
    for text, shown in (
        ("http://h:80/v1", "http://h:80/v1"),
        ("--endpoint=http://u:p@h/v1", "--endpoint=http://***@h/v1"),
        ("https://u:p@/?x@h/v1?key=1#s", "https://***@h/v1?***"),
        ("a mail@host and http://h/p?key=1 b", "a mail@host and http://h/p?*** b"),
        ("serve m --api-key k --port 1", "serve m --api-key *** --port 1"),
        ("serve --llm_api_key=k --hf-token t", "serve --llm_api_key=*** --hf-token ***"),
        ("--max-num-batched-tokens 8 --key-bits 4", "--max-num-batched-tokens 8 --key-bits 4"),
    ):
        assert masked(text) == shown


def test_prompts_can_be_text(words: list[str], server: StandInServer) -> None:
    assert run([*words, "--modes", "endpoint", "--endpoint_prompts", "text"]) == 0
    assert all(isinstance(body["prompt"], str) and body["prompt"] for body in server.bodies)


def test_a_server_is_among_the_default_modes(words: list[str]) -> None:
    plain = [word for word in words if word != "--ignore_eos"]
    for name in ("serve", "inflight"):
        names = [
            serving_pass.name for serving_pass in COMMANDS[name].parse(plain, ALONE).options.passes
        ]
        assert names.index("endpoint") == len(names) - 1 > 2
        without = COMMANDS[name].parse(plain[:-2], ALONE).options.passes
        assert [serving_pass.name for serving_pass in without] == names[:-1]


def test_acceptance_by_the_length_of_prompts(
    tmp_path: Path, words: list[str], server: StandInServer
) -> None:
    """Of groups that double, each with its own requests; CSV says which is which."""
    server.report = {"timings": {"predicted_n": 4} | LLAMA_CPP_REPORT}
    assert run([*words, "--modes", "endpoint"]) == 0
    (record,) = read_records(tmp_path / "out.jsonl", PassRecord)
    counts = {0: ReportedCounts(10, 5), 1: ReportedCounts(10, 1), 3: ReportedCounts(30, 29)}
    lengths = (2049, 4096, 4097, 2048)
    requests = [replace(record.requests[0], prompt_len=length) for length in lengths]
    groups = acceptance_by_context(requests, Verifications(reported=counts))
    assert groups is not None
    found = [(g.most_context, g.num_requests, g.draft_acceptance_rate) for g in groups]
    assert found == [(2048, 1, 29 / 30), (4096, 2, 6 / 20), (8192, 1, None)]
    table = context_tables([replace(record, acceptance_by_context=groups)])[0].csv()
    assert "draft_acceptance_rate_2048,0.96" in table and "draft_acceptance_rate_4096,0.3" in table
    assert context_tables([record]) == []
    assert acceptance_by_context(requests, Verifications()) is None


@pytest.mark.usefixtures("learning")
def test_only_counters_of_the_same_server_get_its_key(
    words: list[str], server: StandInServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_KEY", "sk-17")
    server.counters = ["vllm:generation_tokens_total {}"]
    root = server.address.removesuffix("/v1")
    for other, expected in (
        (root, {"Bearer sk-17"}),
        (root.replace("127.0.0.1", "localhost"), {"Bearer sk-17", None}),
    ):
        server.keys.clear()
        flags = [
            "--endpoint_key_env",
            "SERVER_KEY",
            "--endpoint_metrics",
            f"{other}/metrics?token=q1",
        ]
        assert run([*words, "--modes", "endpoint", *flags]) == 0
        assert set(server.keys) == expected
    for record in records_of(tmp_path):
        (shown,) = record["config"]["workload"]["endpoint_metrics"]
        assert shown.endswith("/metrics?***") and "q1" not in json.dumps(record)


def test_the_root_of_a_server() -> None:
    assert without_openai("http://a:1/v1/") == without_openai("http://a:1") == "http://a:1"
    assert without_openai("http://u:p@a/x/v1?k=1") == "http://u:p@a/x?k=1"
    assert not is_same_server("http://a:1/metrics", "https://a:1/v1")
    assert not is_same_server("http://a/metrics", "http://a:8000/v1")
