"""`magicdec simulate`: simulated times are those of the formulas where there are formulas, and the
command prints, draws and records them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from magicdec.cli.simulate import main
from magicdec.predict.curves import conditional_rate
from magicdec.predict.simulator.run import MODES, SimulatedMetrics, Work, measure, run_mode
from magicdec.predict.simulator.simulation import (
    RESULT_BYTES,
    VOID_BYTES,
    Cluster,
    Pipeline,
    SimulatedMachine,
    divisions,
)
from magicdec.systems.pipeinfer.drawn_drafts import draw_right
from magicdec.systems.pipeinfer.messages import RunLaunch
from magicdec.systems.pipeinfer.options import Options
from magicdec.systems.pipeinfer.scheduler import Counts

FOUR = SimulatedMachine((0.02,) * 4, link_s=0.001, cancel_s=0.001, draft_s=0.004)
ROUND_S = 0.084  # four stages, three links between them and one back to the head


def run(
    mode: str,
    machine: SimulatedMachine = FOUR,
    acceptance: float = 1.0,
    options: Options | None = None,
    gen_len: int = 200,
    ring_requests: int | None = None,
) -> SimulatedMetrics:
    is_right = draw_right(acceptance, gen_len, seed=1)
    work = Work(is_right, gen_len, ring_requests=ring_requests)
    return run_mode(mode, machine, options or Options(gamma=4), work)[1]


def test_as_many_candidates_are_right_as_the_rate_says() -> None:
    """In every text, and with the mean in short ones; in different places by seed."""
    for rate, length in ((0.913, 64), (0.5, 1), (0.0, 9), (1.0, 9)):
        texts = [draw_right(rate, length, seed) for seed in range(200)]
        counts = [sum(text) for text in texts]
        assert {len(text) for text in texts} == {length}
        assert all(abs(count - rate * length) < 1 for count in counts)
        assert np.mean(counts) == pytest.approx(rate * length, abs=0.1)
    assert draw_right(0.5, 64, 1) == draw_right(0.5, 64, 1) != draw_right(0.5, 64, 2)


def test_plain_decoding_takes_all_stages_and_links_for_each_token() -> None:
    found = run("pipeline", gen_len=20)
    assert found.tokens_per_s == pytest.approx(1 / ROUND_S)
    times = found.ttft_ms, found.mean_itl_ms, found.p99_itl_ms
    assert times == pytest.approx((84, 84, 84))
    assert found.busy == found.useful == pytest.approx(20 / 84)
    assert (found.runs, found.layers_skipped, found.draft_acceptance_rate) == (20, 0, None)


@pytest.mark.parametrize("requests", [1, 3, 4, 5, 12])
@pytest.mark.parametrize("stages", [(0.02,) * 4, (0.01, 0.03, 0.02), (0.05,)])
def test_a_round_of_the_ring_is_as_long_as_the_formula(
    stages: tuple[float, ...], requests: int
) -> None:
    """MDI-LLM: the slowest stage for every request, or all stages and links once."""
    machine = replace(FOUR, stage_s=stages)
    links = len(stages) if len(stages) > 1 else 0
    expected = max(requests * max(stages), sum(stages) + 0.001 * links)
    found = run("ring", machine, gen_len=9, ring_requests=requests)
    assert found.tokens_per_s == pytest.approx(requests / expected)


@pytest.mark.parametrize("draft", [1, 4, 8])
def test_a_right_draft_makes_synchronous_steps_as_long_as_the_formula(draft: int) -> None:
    found = run("pipeline+draft", options=Options(gamma=draft), gen_len=1 + 6 * (draft + 1))
    assert found.tokens_per_s == pytest.approx((draft + 1) / (0.004 * draft + ROUND_S))


@pytest.mark.parametrize("draft", [1, 4, 8])
def test_a_right_draft_fills_the_pipeline(draft: int) -> None:
    """A microbatch comes home every time that the slower of stage and drafter needs."""
    found = run("pipeinfer", options=Options(gamma=draft), gen_len=100 * draft)
    assert found.tokens_per_s == pytest.approx(draft / max(0.02, 0.004 * draft), rel=0.05)
    assert found.invalid_runs == found.layers_skipped == 0


def test_a_link_is_occupied_for_the_bytes_of_a_message() -> None:
    machine = replace(FOUR, bytes_per_s=1e6, row_bytes=5000)
    bytes_of_a_token = 3 * (5000 + VOID_BYTES) + RESULT_BYTES + VOID_BYTES
    found = run("pipeline", machine, gen_len=5)
    assert found.mean_itl_ms == pytest.approx(84 + bytes_of_a_token / 1e3)
    ring = run("ring", machine, gen_len=5, ring_requests=1)
    assert ring.mean_itl_ms == pytest.approx(84 + 4 * (5000 + VOID_BYTES) / 1e3)


def launch(run: int, num_rows: int) -> RunLaunch:
    return RunLaunch(run, 0, 0, False, 1, 0, 0, (0,) * num_rows)


def test_messages_take_turns_on_a_link() -> None:
    """A run of one row and one of three, whose hidden states take 2 s a row and a header 64 ms."""
    machine = SimulatedMachine((1.0, 1.0), bytes_per_s=1000.0, row_bytes=2000)
    pipeline = Pipeline(machine)
    for run, num_rows in enumerate((1, 3)):
        pipeline.launch(0.0, launch(run, num_rows), is_prompt=False)
    first, second = pipeline.in_flight
    assert first.start_s == pytest.approx([0.0, 1.0 + 2.064])
    assert second.start_s == pytest.approx([1.0, 1.0 + 2.064 + 6.064])
    home_s = 1e-3 * (VOID_BYTES + RESULT_BYTES)
    assert second.home_s == pytest.approx(second.start_s[1] + 1.0 + home_s)


def test_a_cancelled_run_stops_after_its_layer() -> None:
    """Layers take 1 s. The first of two stages hears at 5.5 s that run 1 is cancelled, in its
    second layer of four; the other stage gets a void header. Run 2 follows at once."""
    pipeline = Pipeline(SimulatedMachine((4.0, 4.0), layers=4))
    for run in range(3):
        pipeline.launch(0.0, launch(run, 1), is_prompt=False)
    pipeline.cancel([1], [5.5, 100.0])
    flights = list(pipeline.in_flight)
    assert [flight.layers for flight in flights] == [[4, 4], [2, 0], [4, 4]]
    assert [flight.start_s for flight in flights] == [[0, 4], [4, 8], [6, 10]]
    assert [flight.is_void for flight in flights] == [False, True, False]
    assert [flight.home_s for flight in flights] == [8, 8, 14]


def test_a_cancellation_takes_its_time() -> None:
    """One that comes when all is computed skips nothing; what it came for was of no use."""
    soon = run("pipeinfer", replace(FOUR, cancel_s=0.0), acceptance=0.0)
    late = run("pipeinfer", replace(FOUR, cancel_s=1.0), acceptance=0.0)
    assert soon.layers_skipped > 0 == late.layers_skipped
    assert late.layers_computed == late.runs * 4 * FOUR.layers
    assert late.useful < soon.useful < soon.busy < late.busy


def test_a_stage_takes_more_for_more_rows() -> None:
    machine = SimulatedMachine((0.02, 0.04), row_cost=0.5)
    assert [machine.busy_s(1, rows) for rows in (1, 3)] == [0.04, 0.08]


def test_it_pays() -> None:
    """Acceptance 0.8 is that of records: accepted / drafted tokens, here with 4 drafts a step."""
    found = {mode: run(mode, acceptance=conditional_rate(0.8, 4), gen_len=1000) for mode in MODES}
    assert found["pipeline+draft"].draft_acceptance_rate == pytest.approx(0.8, abs=0.04)
    rates = {mode: result.tokens_per_s for mode, result in found.items()}
    assert rates["pipeinfer"] >= 1.5 * rates["pipeline+draft"]
    assert rates["pipeinfer"] >= 2 * rates["pipeline"]


@pytest.mark.parametrize("draft", [1, 2, 4, 8])
def test_a_wrong_draft_costs_little(draft: int) -> None:
    wrong = run("pipeinfer", acceptance=0.0, options=Options(gamma=draft))
    assert wrong.tokens_per_s >= 0.9 / ROUND_S
    assert wrong.useful == pytest.approx(20 / 84, rel=0.1)


def test_nothing_is_cancelled_later_than_the_layer_that_runs() -> None:
    """With one layer for each stage a run that has begun is finished: more is wasted."""
    fine, coarse = (
        run("pipeinfer", replace(FOUR, layers=layers), acceptance=0.5) for layers in (16, 1)
    )
    assert fine.busy - fine.useful < coarse.busy - coarse.useful
    assert fine.tokens_per_s > coarse.tokens_per_s


def test_times_between_tokens_are_defined_as_in_records() -> None:
    """Synchronous speculation commits several tokens at a time, and these have no time between
    them. Percentiles are interpolated, as numpy does it; the last commit is late, so that one time
    is larger than all others."""
    trace, _ = run_mode("pipeline+draft", FOUR, Options(gamma=4), Work([True] * 12, 12))
    last_s, commit = trace.commits[-1]
    late = replace(trace, commits=[*trace.commits[:-1], (last_s + 1.0, commit)])
    measured = measure(FOUR, late, Counts())
    assert any(len(commit.tokens) > 1 for _, commit in late.commits)
    itl_ms = np.diff([1e3 * at_s for at_s, _ in late.commits])
    assert measured.mean_itl_ms == pytest.approx(itl_ms.mean())
    assert measured.p99_itl_ms == pytest.approx(np.percentile(itl_ms, 99))
    assert measured.p99_itl_ms < max(itl_ms) - 10, "and not the nearest of the times"


def test_one_token_has_no_time_between_tokens() -> None:
    found = run("pipeline", gen_len=1)
    assert found.mean_itl_ms is None and found.p99_itl_ms is None


def test_flags_have_the_defaults_of_the_settings() -> None:
    assert main.build_parser().read([])[Options] == Options()


def test_a_cluster_divides_layers_and_nodes() -> None:
    base = replace(FOUR, stage_s=())
    cluster = Cluster(0.32, 32, 0.001, base)
    assert cluster.machine(4, 4).stage_s == pytest.approx((0.08,) * 4)
    assert cluster.machine(4, 4).layers == 8
    wide = cluster.machine(8, 2)  # four nodes a stage, two all-reduces a layer
    assert wide.stage_s == pytest.approx((16 * (0.01 / 4 + 0.002),) * 2)
    assert [round(1e3 * s) for s in cluster.machine(3, 3).stage_s] == [110, 110, 100]
    assert list(divisions([4, 6], None, 3)) == [(4, 1), (4, 2), (6, 1), (6, 2), (6, 3)]
    assert list(divisions([4, 6], [2, 4], 32)) == [(4, 2), (4, 4), (6, 2)]


Command = Callable[..., tuple[int, str, str]]


def test_the_command_prints_draws_and_records(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out.jsonl"
    chart = tmp_path / "chart.png"
    words = ("--gen_len", 40, "--pr", 0.1, "--conditional_acceptance", 0.7)
    code, shown, _ = command("simulate", *words, "--out", out, "--plot", chart)
    printed = shown.splitlines()
    assert code == 0
    assert max(map(len, printed)) <= 80
    modes = [[mode] for mode in MODES]
    rows = {line.split()[0]: line.split() for line in printed if line.split()[:1] in modes}
    assert list(rows) == list(MODES)
    assert chart.read_bytes().startswith(b"\x89PNG")
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["config"]["mode"] for line in lines] == list(MODES)
    for line in lines:
        assert (line["schema_version"], line["kind"]) == (4, "simulation")
        assert rows[line["config"]["mode"]][1] == f"{line['metrics']['tokens_per_s']:.2f}"
    config = lines[0]["config"]
    assert config["work"]["conditional_acceptance"] == [0.7]
    assert config["options"]["pr"] == 0.1 and len(config["machine"]["stage_s"]) == 4


def test_many_clusters_are_compared(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    words = ("--model_ms", 160, "--gen_len", 12, "--out", out)
    code, printed, _ = command("simulate", "--nodes", *range(4, 68, 4), *words)
    assert code == 0 and max(map(len, printed.splitlines())) <= 80
    assert "Of 102 clusters" in printed
    assert len(out.read_text().splitlines()) == 4 * 102


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--stage_ms", "1", "2", "--stages", "3"), "--stage_ms has 2 values"),
        (("--nodes", "4"), "--model_ms"),
        (("--nodes", "4", "--model_ms", "9", "--stages", "3"), "--stages"),
        (("--acceptance", "1.5"), "--acceptance 1.5"),
        (("--conditional_acceptance", ".4", ".1"), "--conditional_acceptance has several values"),
        (("--plot_ms", "5"), "--plot_ms does nothing"),
        (("--stages", "2", "4", "--plot", "chart.png"), "--plot is for one cluster"),
        (("--acceptance", "0.5", "0.6"), "--acceptance has several values"),
        (("--gen_len", "10000000000"), "--gen_len 10000000000 x --lanes 1 are more than"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    command: Command, words: tuple[str, ...], named: str
) -> None:
    code, out, err = command("simulate", *words)
    assert code == 2 and named in err and len(err.strip().splitlines()) == 1 and not out
