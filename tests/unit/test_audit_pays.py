"""Where drafts pay, in `magicdec audit`: verdicts and schedules from made-up cells, arms that are
named wrongly, and servers that commands start and that are ended again."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
import speculating_server
from conftest import Command
from speculating_server import SpeculatingServer
from synthetic_records import ENVIRONMENT

from magicdec.bench.audit import asking, starting
from magicdec.bench.audit.arms import (
    Arms,
    ArmsPlan,
    cell_of_rounds,
    check_of_arms,
    draft_length,
    num_steps_in,
)
from magicdec.bench.audit.asking import AuditedServer, ServerAnswer, together
from magicdec.bench.audit.figure import draw
from magicdec.bench.audit.pays import (
    DRAFTS,
    IDLE,
    LOSES,
    PAYS,
    PLAIN,
    REJECTED,
    UNDECIDED,
    ArmCell,
    Ratio,
    compared,
    ranges_of,
    schedule_of,
    sentence,
    sentences,
)
from magicdec.bench.audit.record import AuditRecord, comparisons_of
from magicdec.bench.audit.starting import Arm, parse_arms
from magicdec.hardware.energy import EnergyCounter, EnergyMeter
from magicdec.records.acceptance import ReportedCounts
from magicdec.records.comparison.compare import REGRESSION, SAME
from magicdec.records.reading import read_records

STEP_S = 2**-5  # of a clock that counts events, exactly


def made(arm: str, context: int, concurrency: int, steps: Sequence[float], rate: float) -> ArmCell:
    """A cell whose steps take so long by round, and emit so many tokens."""
    return ArmCell(
        arm=arm,
        context=context,
        concurrency=concurrency,
        num_requests=8,
        token_s=[step_s / rate for step_s in steps],
        step_s=[*steps],
        tokens_per_step=rate,
        output_tokens_per_s=100.0,
        first_token_s=0.1,
        num_cached=None,
        draft_length=4 if arm == DRAFTS else None,
    )


def both(context: int, concurrency: int, steps: Sequence[float], rate: float) -> list[ArmCell]:
    """A plain cell, whose steps take 9 to 11 ms, and one with drafts."""
    plain = made(PLAIN, context, concurrency, [0.009, 0.01, 0.011], 1.0)
    return [plain, made(DRAFTS, context, concurrency, steps, rate)]


CELLS = [
    *both(512, 1, [0.015, 0.016, 0.017], 2.0),  # 8 ms a token, 8.5 at most
    *both(2048, 1, [0.015, 0.016, 0.017], 3.0),
    *both(512, 8, [0.03, 0.031, 0.032], 2.0),
    *both(2048, 8, [0.018, 0.019, 0.021], 2.0),  # 9 to 10.5 ms a token
]


def test_a_figure_says_verdicts_without_colours(tmp_path: Path) -> None:
    """In words, and undecided cells are hatched: a shape more than the others have."""
    draw("--plot", tmp_path / "map.svg", compared(CELLS))
    text = (tmp_path / "map.svg").read_text()
    ratio = compared(CELLS)[-1].speedup
    lines = [f"{ratio.value:.2f}", f"[{ratio.low:.2f}, {ratio.high:.2f}]", "undecided"]
    assert all(text.count(f"<!-- {line} -->") == 1 for line in [*lines, "does not pay"])
    assert text.count("<!-- pays -->") == 2 and text.count("<pattern") == 1


def test_a_ratio_has_the_range_over_pairs_of_rounds() -> None:
    ratio = Ratio.of([2.0, 4.0], [1.0, 2.0])
    assert (ratio.value, ratio.low, ratio.high) == (2.0, 1.0, 4.0)
    assert str(ratio) == "2.00 [1.00, 4.00]" and ratio.percent == "100.0 % [0.0, 300.0]"


def test_verdicts_of_cells() -> None:
    found = {(cell.context, cell.concurrency): cell for cell in compared(CELLS)}
    verdicts = {place: cell.verdict for place, cell in found.items()}
    assert verdicts == {(512, 1): PAYS, (2048, 1): PAYS, (512, 8): LOSES, (2048, 8): UNDECIDED}
    cell = found[2048, 1]
    assert cell.speedup.value == pytest.approx(0.01 * 3 / 0.016)
    assert cell.needed is not None and cell.needed.value == pytest.approx(1.6)
    assert cell.idle is None and cell.rejected is None
    assert sentences([*found.values()]) == [
        "pays from context 512 on at concurrency 1",
        "pays nowhere at concurrency 8 (undecided at 2048)",
    ]


def test_a_cell_pays_if_a_step_emits_more_than_it_needs() -> None:
    for cell in compared(CELLS):
        drafts = cell.cells[DRAFTS]
        assert cell.needed is not None and drafts.tokens_per_step is not None
        assert cell.speedup.value == pytest.approx(drafts.tokens_per_step / cell.needed.value)


@pytest.mark.parametrize(
    ("verdicts", "text"),
    [
        ([LOSES, PAYS, PAYS], "pays from context 2 on at concurrency 4"),
        ([PAYS, PAYS, PAYS], "pays from context 1 on at concurrency 4"),
        ([LOSES, UNDECIDED, PAYS], "pays from context 3 on at concurrency 4 (undecided at 2)"),
        ([PAYS, LOSES, LOSES], "pays up to context 1 at concurrency 4"),
        ([PAYS, LOSES, PAYS], "pays at context 1 and 3 alone at concurrency 4"),
        ([LOSES, LOSES, LOSES], "pays nowhere at concurrency 4"),
        ([UNDECIDED, LOSES, LOSES], "pays nowhere at concurrency 4 (undecided at 1)"),
        ([UNDECIDED] * 3, "undecided at concurrency 4"),
    ],
)
def test_sentences(verdicts: Sequence[str], text: str) -> None:
    assert sentence(4, dict(enumerate(verdicts, 1))) == text


def test_the_tax_of_idle_drafts_and_the_loss_if_all_are_rejected() -> None:
    idle = made(IDLE, 512, 1, [0.011, 0.011, 0.011], 1.0)
    rejected = made(REJECTED, 512, 1, [0.02, 0.02, 0.02], 1.0)
    cell = compared([*both(512, 1, [0.016] * 3, 2.0), idle, rejected])[0]
    assert cell.idle is not None and cell.idle.value == pytest.approx(1.1)
    assert cell.rejected is not None and cell.rejected.value == pytest.approx(0.5)
    text = check_of_arms([*cell.cells.values()]).text
    assert "cost up to 10.0 % [0.0, 22.2] of a step, which is undecided" in text
    costly = made(IDLE, 512, 1, [0.02, 0.02, 0.02], 1.0)
    assert check_of_arms([*both(512, 1, [0.016] * 3, 2.0), costly]).text.endswith("of a step")


def test_plain_decoding_that_was_measured_twice_has_all_its_rounds() -> None:
    """A machine that has become faster meanwhile leaves it undecided."""
    again = made(PLAIN, 512, 1, [0.007, 0.007, 0.007], 1.0)
    assert compared(CELLS)[0].verdict == PAYS
    cell = compared([*CELLS, again])[0]
    assert cell.verdict == UNDECIDED and len(cell.cells[PLAIN].token_s) == 6
    assert cell.speedup.value == pytest.approx(0.0085 / 0.008)


def test_steps_that_are_faster_with_drafts_decide_nothing() -> None:
    cells = both(512, 1, [0.008, 0.0085, 0.0085], 2.0)
    assert compared(cells)[0].speedup.low > 1 and compared(cells)[0].verdict == UNDECIDED
    text = "at context 512 and concurrency 1 a step with drafts takes less time than one without"
    assert text in check_of_arms(cells).text


def test_drafts_that_no_longer_pay_are_a_regression() -> None:
    later = [*both(512, 1, [0.03] * 3, 2.0), *both(2048, 8, [0.03] * 3, 2.0)]
    records = [
        AuditRecord(
            environment=ENVIRONMENT,
            config={},
            status="verified",
            checks=[],
            noise=[],
            greedy=[],
            wrong=[],
            sampled=[],
            states=[],
            arms=cells,
            num_requests=0,
            seconds=0.0,
        )
        for cells in (later, CELLS)
    ]
    verdicts = {found.name: found.verdict for found in comparisons_of(*records)}
    assert verdicts == {
        "drafts after 512 tokens, 1 at once": REGRESSION,
        "drafts after 2048 tokens, 8 at once": SAME,  # it was undecided
    }


def test_a_check_without_steps_or_drafts_judges_nothing() -> None:
    assert check_of_arms(CELLS).status == "verified"
    unknown = [replace(cell, step_s=None, tokens_per_step=None) for cell in CELLS]
    check = check_of_arms([c if c.arm == PLAIN else u for c, u in zip(CELLS, unknown, strict=True)])
    assert check.status == "unverified" and "steps of drafts are not known" in check.text
    assert "pays from context 512 on at concurrency 1" in check.text
    useless = check_of_arms(both(512, 1, [0.02] * 3, 1.0))
    assert useless.status == "unverified" and "no draft was accepted" in useless.text
    open_one = check_of_arms(both(512, 1, [0.02] * 3, 2.0))
    assert open_one.status == "unverified" and "more --rounds" in open_one.text


@pytest.mark.parametrize(
    ("lengths", "ranges"),
    [
        ({1: 4}, [[1, 1, 4]]),
        ({1: 4, 8: 4, 32: 0}, [[1, 8, 4], [9, 32, 0]]),
        ({1: 0, 8: 4}, [[1, 7, 0], [8, 8, 4]]),
        ({4: 3, 5: 0}, [[1, 4, 3], [5, 5, 0]]),
        ({1: 4, 8: 0, 9: 4}, [[1, 1, 4], [2, 8, 0], [9, 9, 4]]),
    ],
)
def test_ranges_start_at_1_and_have_no_gaps(
    lengths: dict[int, int], ranges: list[list[int]]
) -> None:
    assert ranges_of(lengths) == ranges
    assert all(before[1] + 1 == after[0] for before, after in pairwise(ranges))


def test_the_schedule_is_that_of_the_longest_context() -> None:
    """Where it is undecided, nothing is drafted."""
    assert schedule_of(compared(CELLS)) == {
        "context": 2048,
        "num_speculative_tokens_per_batch_size": [[1, 1, 4], [2, 8, 0]],
        "1": {"candidate_steps": [4]},
        "2": {"candidate_steps": [0]},
        "8": {"candidate_steps": [0]},
    }
    unknown = [replace(cell, draft_length=None) for cell in CELLS]
    with pytest.raises(ValueError, match="at concurrency 1 is not known"):
        schedule_of(compared(unknown))


def answer(
    sizes: Sequence[int], gap_s: float = 0.1, counts: ReportedCounts | None = None
) -> ServerAnswer:
    parts = [(gap_s * number, size) for number, size in enumerate(sizes, 1)]
    return ServerAnswer((1, 2), [3] * sum(sizes), parts, counts=counts)


def test_steps_of_answers_none_of_whose_drafts_is_accepted() -> None:
    """One event is one step, if another answer shows that."""
    assert num_steps_in([answer([1, 1, 1, 1])]) is None
    assert num_steps_in([answer([1, 1, 1, 1]), answer([1, 3, 2])]) == 5


def test_the_length_of_drafts() -> None:
    by_step = ReportedCounts(11, 5, 3, steps=((4, 2), (4, 3), (3, 0)))
    by_answer = ReportedCounts(11, 5, 3)
    sums = ReportedCounts(11, 5)
    assert draft_length([answer([1, 3, 4, 1], counts=by_step)]) == 4
    assert draft_length([answer([1, 3, 4, 1], counts=by_answer)]) == 4
    assert draft_length([answer([1, 3, 4, 1], counts=sums)]) == 3
    assert draft_length([answer([1, 1, 1])]) is None


def test_a_cell_of_rounds() -> None:
    rounds = [[answer([1, 3, 2]), answer([1, 5])], [answer([1, 3, 2], 0.2), answer([1, 5], 0.2)]]
    firsts = [answer([1], wait_s) for wait_s in (0.3, 0.1, 0.2)]
    cell = cell_of_rounds(DRAFTS, 7, 2, rounds, firsts, 2.88)
    assert cell.token_s == pytest.approx([0.03, 0.06]) and cell.step_s == pytest.approx([0.1, 0.2])
    assert cell.tokens_per_step == pytest.approx(10 / 3) and cell.draft_length == 4
    assert cell.output_tokens_per_s == pytest.approx(2 * 24 / (0.3 + 0.2 + 0.6 + 0.4))
    assert cell.first_token_s == 0.2 and cell.dollars_per_million == pytest.approx(25.0)
    whole = ServerAnswer((1, 2), [3] * 6)
    again = cell_of_rounds(DRAFTS, 7, 2, [[*found, whole] for found in rounds], [whole], 2.88)
    assert again == replace(cell, num_requests=3, first_token_s=None)
    plain = cell_of_rounds(PLAIN, 7, 2, [[answer([1, 1, 1])]], firsts, None)
    assert plain.token_s == plain.step_s == pytest.approx([0.1])
    assert plain.tokens_per_step == 1 and plain.dollars_per_million is None


def test_decoding_is_timed_apart_from_prompts() -> None:
    """The rounds ask for prompts whose KV the first of them leaves; those without come last."""
    asked = list[tuple[int, str | None]]()
    numbers = count(1)

    class Server:
        num_requests = 0
        answers = AuditedServer.answers

        def new_salt(self) -> str:
            return f"salt {next(numbers)}"

        def answer(self, prompt: list[int], most: int, *, salt: str | None = None) -> ServerAnswer:
            asked.append((most, salt))
            return answer([1] * most)

    plan = ArmsPlan((), (1,), 5, 2, 3, None, 1.0, None)
    nothing: Any = None
    server: Any = Server()
    energy = iter([0, 1000, 2000, 2010, 3000, 3020, 4000, 4030])  # before and after each round
    meter = EnergyMeter([EnergyCounter("meter", lambda: next(energy), 1.0)])
    arms = Arms(plan, nothing, nothing, print, meter=meter)
    cell = arms._cell(server, Arm(PLAIN), 3, 1, [[1, 2, 3], [4, 5, 6]])
    assert asked[:8] == [(5, None)] * 8 and len(cell.token_s) == 3
    assert asked[8:] == [(1, "salt 1"), (1, "salt 2")]
    assert cell.first_token_s == pytest.approx(0.1) and cell.token_s == pytest.approx([0.1] * 3)
    assert cell.joules_per_token == 60 / 30  # without the round that warms up
    elsewhere = arms._cell(server, Arm(PLAIN, "http://10.0.0.1/v1"), 3, 1, [[1, 2, 3]])
    assert elsewhere.joules_per_token is None


# Arms.


def test_arms_are_urls_or_commands() -> None:
    texts = ["plain=http://127.0.0.1:1/v1", "drafts=serve 'my model' --port={port} --host x"]
    assert parse_arms(texts) == texts
    assert [*map(Arm.of, texts)] == [
        Arm("plain", "http://127.0.0.1:1/v1"),
        Arm("drafts", None, ("serve", "my model", "--port={port}", "--host", "x")),
    ]


def test_which_arms_are_on_this_machine() -> None:
    """A meter of this machine says nothing of another one."""
    here = ["127.0.0.1:80", "127.3.0.1", "localhost:8000", "[::1]:80"]
    assert all(Arm(PLAIN, f"http://{host}/v1").is_here for host in here)
    assert Arm(PLAIN, None, ("serve",)).is_here
    others = ["10.0.0.1", "example.org", "localhost.example.org", "0.0.0.0"]
    assert not any(Arm(PLAIN, f"http://{host}/v1").is_here for host in others)


URL = "http://127.0.0.1:9/v1"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--arm", f"plain={URL}"], "--arm lacks drafts; give drafts=URL or drafts=COMMAND too"),
        (["--arm", f"fast={URL}"], f"--arm fast={URL} is no arm; give NAME=URL"),
        (["--arm", "plain="], "--arm plain= is no arm"),
        (["--arm", f"plain={URL}", f"plain={URL}"], "--arm names plain twice"),
        (["--arm", f"plain={URL}", f"drafts={URL}"], "--arm has one server for several arms"),
        (["--arm", "plain=serve --port 80"], "plain=serve --port 80: the command has no {port}"),
        (["--arm", "plain=serve '{port}"], "No closing quotation; mend the command"),
        (["--arm", f"plain={URL}", "drafts=http://:0/v1"], "is no URL"),
        (
            ["--arm", f"plain={URL}", "drafts=no-such-server {port}"],
            "--arm drafts=no-such-server: there is no such program; no shell reads the command",
        ),
        ([], "there is no server; give --endpoint URL, or --arm plain=URL drafts=URL"),
        (["--checks", "pays"], "--checks pays needs --arm plain=URL drafts=URL"),
        (["--endpoint", URL, "--checks", "pays"], "--checks pays needs --arm"),
        (["--endpoint", URL, "--price_per_hour", 2], "--price_per_hour does nothing here"),
        (["--endpoint", URL, "--plot", "map.png"], "--plot does nothing here: there is no --arm"),
        (["--endpoint", URL, "--rounds", 3], "--rounds does nothing here: there is no --arm"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    command: Command, words: list[object], reason: str
) -> None:
    code, _, err = command("audit", "--dataset", "book.txt", *words)
    assert code == 2 and len(err.splitlines()) == 1 and reason in err, err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--checks", "greedy"], "--checks greedy needs --endpoint URL"),
        (["--endpoint", URL, "--checks", "greedy"], "--arm is for the check pays"),
        (["--endpoint", URL, "--checks", "pays"], "--endpoint is for other checks than pays"),
        (["--plain", URL], "--plain is for other checks than pays; leave it out"),
        (["--gen_len", 1], "--gen_len 1 with --checks pays"),
        (["--rounds", 1], "--rounds 1 is too small"),
    ],
)
def test_what_does_not_go_with_arms_is_refused(
    command: Command, words: list[object], reason: str
) -> None:
    arms = ["--arm", f"plain={URL}", f"drafts={URL}2"]
    code, _, err = command("audit", "--dataset", "book.txt", *arms, *words)
    assert code == 2 and len(err.splitlines()) == 1 and reason in err, err


# Servers.


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("books") / "book.txt"
    path.write_text("".join(chr(32 + (number * number) % 89) for number in range(400)))
    return path


Starting = Callable[..., str]


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Starting]:
    """Commands that serve with these settings, in a child, as launchers of servers do; each notes
    its process, and none may be left."""
    pids = tmp_path / "pids"
    pids.mkdir()

    def command(**settings: Any) -> str:
        script = (
            "import os, pathlib, runpy, sys; pathlib.Path(sys.argv.pop(1), str(os.getpid()))"
            ".touch(); sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
        )
        launcher = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"
        words = [sys.executable, "-c", launcher, sys.executable, "-c", script, str(pids)]
        return shlex.join([*words, speculating_server.__file__, "{port}", json.dumps(settings)])

    yield command
    left = [path.name for path in pids.iterdir() if Path("/proc", path.name).exists()]
    assert not left


Auditing = Callable[..., tuple[Any, list[AuditRecord]]]


@pytest.fixture
def audit(command: Command, book: Path, tmp_path: Path) -> Auditing:
    def run(*words: object) -> tuple[Any, list[AuditRecord]]:
        out = tmp_path / "audits.jsonl"
        small = ["--prefix_len", 16, 32, "--gen_len", 16, "--num_requests", 2, "--rounds", 2]
        few = ["--concurrency", 1, 3, "--out", out]
        ended = command("audit", "--dataset", book, *small, *few, *words)
        return ended, list(read_records(out, AuditRecord)) if out.is_file() else []

    return run


Running = Callable[..., list[str]]


@pytest.fixture
def running() -> Iterator[Running]:
    """Starts servers, by arm the settings of each, and says them as arms."""
    servers = list[SpeculatingServer]()

    def start(settings: dict[str, dict[str, Any]]) -> list[str]:
        servers.extend(SpeculatingServer(**words) for words in settings.values())
        for server in servers:
            server.start()
        return [
            f"{name}={server.address}/v1" for name, server in zip(settings, servers, strict=True)
        ]

    yield start
    for server in servers:
        server.stop()


class EventClock(threading.local):
    """Goes on by a step whenever a thread asks for the time, which is once for each event of an
    answer, so that a busy machine decides nothing."""

    now_s = 0.0
    time_ns = staticmethod(time.time_ns)

    def monotonic(self) -> float:
        self.now_s += STEP_S
        return self.now_s


def test_arms_that_commands_start(
    audit: Auditing, serving: Starting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Their steps take equally long, so that drafts pay everywhere."""
    monkeypatch.setattr(asking, "time", EventClock())
    schedule = tmp_path / "schedule.json"
    ended, records = audit(
        *("--arm", f"plain={serving(speculates=False)}"),
        f"drafts={serving()}",
        f"idle={serving(speculates=False)}",
        *("--price_per_hour", 2.5, "--export_schedule", schedule, "--concurrency", 3),
        *("--plot", tmp_path / "map.svg"),
    )
    assert (tmp_path / "map.svg").is_file()
    assert ended.code == 0, ended
    check = records[0].checks[0]
    assert (check.name, check.status) == ("pays", "verified")
    assert "pays from context 16 on at concurrency 3" in check.text
    arms = ["plain", "drafts", "idle", "plain"]
    places = [(arm, context, 3) for arm in arms for context in (16, 32)]
    assert [(cell.arm, cell.context, cell.concurrency) for cell in records[0].arms] == places
    assert (records[0].model, records[0].server, records[0].program) == ("toy", None, "vllm")
    for cell in records[0].arms:
        assert cell.step_s == [STEP_S] * 2
    drafts = records[0].arms[3]
    assert 2 < (drafts.tokens_per_step or 0) < 5 and drafts.draft_length == 4
    assert all(cell.tokens_per_step == 1 for cell in records[0].arms if cell.arm != "drafts")
    assert all((cell.dollars_per_million or 0) > 0 for cell in records[0].arms)
    # In each cell 3 rounds, and once more for the first tokens alone. A round has as many prompts
    # as requests at once. By the model that they serve, arms are compared at 12 places of 3 texts,
    # which the first one writes after it was asked for log-probabilities at all.
    assert records[0].num_requests == len(places) * 4 * 3 + 3 * 12 * 3 + 3 + 1
    assert json.loads(schedule.read_text()) == {
        "context": 32,
        "num_speculative_tokens_per_batch_size": [[1, 3, 4]],
        "1": {"candidate_steps": [4]},
        "3": {"candidate_steps": [4]},
    }
    assert "plain ms/step" in ended.out and "$ a million tokens" in ended.out


def test_a_command_that_does_not_start(audit: Auditing, serving: Starting, tmp_path: Path) -> None:
    """What was measured before stays."""
    script = "import sys; print('loading {port}'); sys.exit('no memory for the drafts')"
    ended, records = audit(
        *("--arm", f"plain={serving(speculates=False)}"),
        f"drafts={shlex.join([sys.executable, '-c', script])}",
        *("--export_schedule", tmp_path / "schedule.json"),
    )
    assert ended.code == 3, ended
    check = records[0].checks[0]
    assert check.status == "failed" and "\n" not in check.text
    assert check.text.startswith("--arm drafts does not start; its command ended with 1; it wrote")
    assert check.text.endswith("| no memory for the drafts")
    assert {cell.arm for cell in records[0].arms} == {"plain"}
    assert "was not written: not all arms were measured" in ended.err
    assert not (tmp_path / "schedule.json").exists()


def test_a_command_that_is_never_ready(
    audit: Auditing, serving: Starting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It also ignores SIGTERM."""
    monkeypatch.setattr(starting, "GRACE_S", 0.3)
    ignoring = "import signal, time; signal.signal(15, signal.SIG_IGN); "
    script = f"{ignoring}print('{{port}} loads', flush=True); time.sleep(600)"
    ended, records = audit(
        *("--arm", f"plain={shlex.join([sys.executable, '-c', script])}"),
        f"drafts={serving()}",
        *("--endpoint_total_s", 1),
    )
    assert ended.code == 3, ended
    text = records[0].checks[0].text
    assert text.startswith("--arm plain is not ready after 1 s: ") and text.endswith("loads")
    assert records[0].model is None


def test_a_server_that_dies(audit: Auditing, serving: Starting) -> None:
    dying = serving(speculates=False, dies_after=4)
    ended, records = audit("--arm", f"plain={dying}", f"drafts={serving()}")
    assert ended.code == 3, ended
    text = records[0].checks[0].text
    assert text.startswith("--arm plain http://127.0.0.1:") and "\n" not in text
    assert text.endswith("; its command ended with 3; it wrote last: out of memory")


@pytest.mark.parametrize(
    ("arm", "settings", "reason"),
    [
        ("plain", {}, "but it is to have no drafts; mend its flags, or name it drafts"),
        ("idle", {}, "but it is to load drafts and use none"),
        ("rejected", {}, "but it is to reject all drafts"),
    ],
)
def test_an_arm_that_is_not_what_its_name_says(
    audit: Auditing, running: Running, arm: str, settings: dict[str, Any], reason: str
) -> None:
    arms = running({PLAIN: {"speculates": False}, DRAFTS: {}} | {arm: settings})
    ended, records = audit("--arm", *arms)
    assert ended.code == 3 and reason in records[0].checks[0].text


def test_an_arm_with_another_model_is_named(audit: Auditing, running: Running) -> None:
    other = {"speculates": False, "sharpness": 9.0}
    arms = running({PLAIN: {"speculates": False}, DRAFTS: {}, IDLE: other})
    ended, records = audit("--arm", *arms, "--concurrency", 1)
    assert ended.code == 3, ended
    named = (
        f"--arm idle {arms[2].removeprefix('idle=')} serves another model than --arm plain: its "
    )
    assert records[0].checks[0].text.startswith(f"{named}log-probabilities of the same places")
    assert {cell.arm for cell in records[0].arms} == {PLAIN, DRAFTS}


def test_without_log_probabilities_the_model_is_not_known(
    audit: Auditing, running: Running
) -> None:
    arms = running({PLAIN: {"speculates": False}, DRAFTS: {"lacks": ("scores",)}})
    _, records = audit("--arm", *arms, "--concurrency", 1)
    text = "; that all arms serve one model is not known: --arm drafts http://127.0.0.1:"
    assert text in records[0].checks[0].text and len(records[0].arms) == 6


def test_servers_that_run_already_beside_other_checks(audit: Auditing, running: Running) -> None:
    arms = running({PLAIN: {"speculates": False}, DRAFTS: {}})
    drafts = arms[1].removeprefix("drafts=")
    ended, records = audit("--endpoint", drafts, "--arm", *arms)
    assert ended.code in (0, 3), ended  # of so few tokens, not everything can be judged
    assert [check.name for check in records[0].checks][-1] == PAYS
    assert len(records[0].checks) == 5 and records[0].server == drafts
    assert records[0].config["arm"] == arms


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_server(
    book: Path, serving: Starting, tmp_path: Path, number: signal.Signals
) -> None:
    """In the middle of answers, which would take minutes, as would scores of them."""
    words = [sys.executable, "-m", "magicdec", "audit", "--dataset", str(book)]
    words += ["--prefix_len", "16", "--concurrency", "2", "--num_requests", "2"]
    words += ["--out", str(tmp_path / "audits.jsonl")]
    slow = serving(speculates=False, step_s=10.0, lacks=("scores",))
    process = subprocess.Popen(
        [*words, "--arm", f"plain={slow}", f"drafts={slow}"],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if "2 at once" in line:
                break
        time.sleep(0.5)  # until both are asked
        process.send_signal(number)
        assert process.wait(30) == 128 + number
        assert "interrupted" in process.stderr.read()
    finally:
        process.kill()
        process.stderr.close()


def test_ctrl_c_starts_no_further_jobs() -> None:
    release = threading.Event()
    begun = list[int]()

    def job() -> None:
        begun.append(1)
        release.wait(20)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        together([job] * 6, 2)
    signal.signal(signal.SIGINT, before)
    release.set()
    time.sleep(0.1)
    assert len(begun) == 2
