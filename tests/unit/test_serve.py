"""`magicdec serve`: what is refused, the same tokens in every mode, and how any system is served:
warm-ups count in nothing, wrong tokens have no metrics, and what was measured is kept."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from conftest import Command, Launch
from fake_clock import VirtualClock
from identities import check_command, check_metrics
from rich.console import Console
from serving_command import prepare_as

from magicdec.bench import runner as runner_module
from magicdec.bench.runner import OneRank
from magicdec.bench.showing import tables
from magicdec.cli import serve
from magicdec.cli.serve import COMMANDS
from magicdec.config.run_config import RunConfig
from magicdec.distributed.groups import Launch as Ranks
from magicdec.hardware.other_load import LoadWatch, OtherLoad
from magicdec.hardware.threads import RankThreads
from magicdec.output import tables as output_tables
from magicdec.output.console import Progress
from magicdec.output.tables import Table, text_of
from magicdec.records.describe import verdict_of
from magicdec.records.pass_record import PassRecord
from magicdec.records.reading import parse_line, read_records
from magicdec.records.record import Status
from magicdec.runner.request import Batch, NotFinite, Request, StepOutput
from magicdec.runner.step_plan import StepPlan
from magicdec.setup.model_plan import ModelPlan
from magicdec.setup.prepare import SetupCache
from magicdec.systems.declaration import Drafts
from magicdec.systems.flover.system import Flover
from magicdec.systems.modes import MODES, NAMES, SYSTEM_OF, Pass
from magicdec.systems.observer import PassObserver
from magicdec.systems.system import WARM_UP_TOKENS, StepShape, System, SystemDetails

ALONE = Ranks(0, 1, 0, 1)
UNUSED = "does nothing here: no mode of --modes"
REFUSALS = [  # (ranks, flags, message)
    (1, "--modes nonsense", "--modes nonsense is not known; choose from sequential, static, "),
    (1, "--modes ring ring", "--modes names ring twice"),
    (1, "--modes pipeinfer+draft --draft ngram", "--modes pipeinfer+draft is not known; choose"),
    (1, "--modes pipeline+draft", "--modes pipeline+draft drafts; say by --draft what drafts"),
    (1, "--modes ring+draft", "--modes ring+draft drafts; say by --draft what drafts"),
    (1, "--draft ngram --modes static ring", "static ring drafts; add one, such as static+draft"),
    (1, "--modes tensor_parallel", "--modes tensor_parallel needs several ranks; see --nproc"),
    (1, "--layer_split 2 --modes inflight", f"--layer_split {UNUSED} inflight uses it"),
    (3, "--layer_split 0,1 --modes ring", "--layer_split 0,1: a ring has no head without layers"),
    (2, "--modes pipeinfer --draft ngram --gamma auto", "--modes pipeinfer drafts a fixed"),
    (2, "--modes ring+draft --draft ngram --gamma auto", "--gamma auto: --modes ring+draft drafts"),
    (1, "--modes ring+draft --draft self", "--draft self: --modes ring+draft lacks layers"),
    (1, "--gamma 4", "--gamma does nothing here: autoregressive decoding drafts nothing"),
    (1, "--draft ngram --budget 65", "--budget does nothing here: drafts of ngram read no KV"),
    (1, "--draft other", "--draft other is not known; choose from self, model:NAME, eagle:DIR, "),
    (2, "--modes pipeinfer --draft ngram+self", "--modes pipeinfer drafts from one source; choose"),
    (2, "--modes ring+draft --draft ngram+self", "--modes ring+draft drafts from one source"),
    (1, "--modes inflight+draft --draft self --pr 0.3", f"--pr {UNUSED} inflight+draft uses it"),
    (1, "--modes inflight+draft --draft ngram --pa 0.3", "lookup ends where its own evidence does"),
    (1, "--modes inflight --pa 0.3", f"--pa {UNUSED} inflight uses it; leave it out"),
    (1, "--modes pipeline --pa 0.3", f"--pa {UNUSED} pipeline uses it"),
    (1, "--modes pipeline --pr 0.1", f"--pr {UNUSED} pipeline uses it"),
    (1, "--modes static --window_ms 5", f"--window_ms {UNUSED} static uses it"),
    (1, "--kv_offload host", "--kv_offload host keeps blocks that leave the prefix cache"),
    (1, "--prefix_cache --offload_tokens 99", "--offload_tokens 99 does nothing with --kv_offload"),
    (1, "--modes ring --cache_tokens 16", f"--cache_tokens {UNUSED} ring uses it"),
    (1, "--modes ring --batch_ranks all", f"--batch_ranks {UNUSED} ring uses it"),
    (1, "--modes pipeline --prefill_tokens 9", f"--prefill_tokens {UNUSED} pipeline uses it"),
    (1, "--modes pipeline --B 2", f"--B {UNUSED} pipeline uses it"),
    (1, "--modes inflight --emulate_link_ms 3", f"--emulate_link_ms {UNUSED} inflight uses it"),
    (1, "--emulate_link_ms 3", "--emulate_link_ms 3.0: one rank has no link"),
    (1, "--emulate_draft_ms 3 --modes pipeline+draft --draft ngram", "is for --emulate_acceptance"),
    (1, "--emulate_acceptance 0.5 --modes inflight", f"--emulate_acceptance {UNUSED}"),
    (1, "--emulate_acceptance 0.5 --modes pipeline+draft", "drafts ahead of stages that"),
    (1, "--emulate_stage_ms 3 --emulate_acceptance 2 --modes pipeinfer", "takes one probability"),
    (
        *(1, "--emulate_acceptance 5.5 --gamma 3 --draft ngram --modes inflight+draft"),
        "a step emits at most 4 tokens",
    ),
    (1, "--emulate_acceptance 2 --draft ngram --modes ring+draft", "stages judge the drafts of"),
    (1, "--emulate_acceptance 2 --draft ngram --modes inflight+draft static", "would be the refer"),
    (1, "--emulate_acceptance 2 --modes inflight+draft", "inflight+draft drafts; say by --draft"),
    (
        *(1, "--emulate_acceptance .5 --draft ngram --modes inflight+draft --emulate_stage_ms 3"),
        f"--emulate_stage_ms {UNUSED} inflight+draft uses it",
    ),
    (1, "--emulate_stage_ms 3 --modes ring inflight", "inflight has no stages that could sleep"),
    (
        *(1, "--emulate_stage_ms 3 --emulate_acceptance .5 --draft ngram --modes pipeline+draft"),
        "--draft does nothing here: --emulate_acceptance drafts",
    ),
    (1, "--emulate_stage_ms 3 --modes ring --native_steps on", "--native_steps does nothing here"),
    (1, "--emulate_stage_ms 3 --modes ring --linear torch", "--linear does nothing here: emulated"),
    (1, "--emulate_stage_ms 3 --modes ring --target_dtype int8", "--target_dtype does nothing he"),
    (1, "--emulate_stage_ms 3 --modes ring --elementwise torch", "--elementwise does nothing here"),
    (1, "--emulate_stage_ms 3 --modes pipeinfer ring --draft ngram", "give --emulate_acceptance"),
    (1, "--emulate_stage_ms 3 --modes ring --temperature 1", "--temperature 1 does nothing with -"),
    (1, "--emulate_stage_ms 3 --modes ring+draft --draft model:demo-draft", "no tokens that --dra"),
    (1, "--emulate_stage_ms 3 --modes ring --presence_penalty 1", "--presence_penalty 1 does noth"),
    (3, "--modes ring --n_samples 3 --B 2", "--n_samples 3 is not a multiple of --B 2"),
    (3, "--modes ring --num_requests 2 --n_samples 4", "--num_requests 2 is less than the samples"),
    (1, "--arrival sometimes", "--arrival sometimes is not known; choose from burst, "),
    (1, "--arrival trace:a.jsonl --gen_len 8", "--gen_len does nothing here: the trace has the"),
    (1, "--arrival trace:nowhere.jsonl", "--arrival trace: nowhere.jsonl: No such file"),
    (1, "--gen_len -3", "--gen_len -3 is not known; choose a whole number of"),
    (1, "--goodput speed:3", "--goodput speed:3 is not known; choose from ttft:MS, tpot:MS, "),
    (1, "--top_k 5", "--top_k 5 does nothing at --temperature 0 (greedy)"),
    (1, "--rank_group 0 1", "--rank_group 0 1: name all of the launched ranks"),
    (1, "--out .", "--out .: Is a directory"),
    (1, "--plot x.jpeg", "--plot x.jpeg: the name must end in .png or .svg or .pdf"),
    (1, "--plot_ms 3", "--plot_ms does nothing without --plot; leave it out"),
    (1, "--rate 4", "unknown argument --rate"),
]


@pytest.mark.parametrize(("world_size", "flags", "message"), REFUSALS)
def test_what_cannot_be_served_is_refused_in_one_line(
    world_size: int, flags: str, message: str
) -> None:
    with pytest.raises(ValueError) as refused:
        COMMANDS["serve"].parse(flags.split(), Ranks(0, world_size, 0, world_size))
    assert message in str(refused.value) and "\n" not in str(refused.value)


BATCHED = ["sequential", "static", "dynamic", "inflight"]
PIPELINED = "pipeline", "pipeline+draft", "pipeinfer"
DEFAULTS = [  # (command, ranks, flags, modes)
    ("serve", 1, "", ["sequential", "static", "inflight", "ring", "pipeline"]),
    ("serve", 2, "", ["sequential", "static", "inflight", "tensor_parallel", "ring", "pipeline"]),
    (
        *("serve", 1, "--draft ngram"),
        ["sequential", "static", "inflight", "inflight+draft", "ring", *PIPELINED],
    ),
    ("inflight", 2, "", BATCHED),
    ("inflight", 1, "--draft self", [*BATCHED, "inflight+draft"]),
    ("recurrent", 1, "", ["sequential", "inflight", "ring"]),
    (
        *("recurrent", 2, "--draft ngram"),
        ["sequential", "inflight", "tensor_parallel", "ring", "ring+draft"],
    ),
    ("recurrent", 2, "--emulate_stage_ms 3", ["ring"]),
    ("pipeline", 2, "", ["sequential", *PIPELINED]),
    ("pipeline", 2, "--draft none", ["sequential", "pipeline"]),
    ("pipeline", 2, "--emulate_stage_ms 3 --emulate_acceptance 0.4", [*PIPELINED]),
]


@pytest.mark.parametrize(("command", "world_size", "flags", "names"), DEFAULTS)
def test_a_command_serves_in_the_modes_that_its_ranks_and_draft_allow(
    command: str, world_size: int, flags: str, names: list[str]
) -> None:
    launch = Ranks(0, world_size, 0, world_size)
    options = COMMANDS[command].parse(flags.split(), launch).options
    assert [serving_pass.name for serving_pass in options.passes] == names


def test_a_name_of_a_mode_says_whether_it_drafts() -> None:
    for name in NAMES:
        serving_pass = Pass.named(name)
        assert serving_pass.name == name and serving_pass.mode in MODES
        drafts = MODES[serving_pass.mode].drafts
        is_always = drafts is Drafts.ALWAYS
        assert serving_pass.is_drafting == (is_always or name.endswith("+draft"))
        assert not (drafts is Drafts.NEVER and serving_pass.is_drafting)


def test_modes_have_their_names_of_earlier_versions_too() -> None:
    """On the command line, and in records."""
    words = ["--modes", "iterative", "sync", "async", "--draft", "ngram"]
    options = COMMANDS["serve"].parse(words, Ranks(0, 2, 0, 2)).options
    assert [serving_pass.name for serving_pass in options.passes] == list(PIPELINED)
    assert options.describe()["modes"] == list(PIPELINED)
    assert Pass.named("async, 4 at once") == Pass("pipeinfer", True, concurrency=4)
    with pytest.raises(ValueError, match="--modes names pipeinfer twice"):
        COMMANDS["serve"].parse(["--modes", "async", "pipeinfer"], ALONE)


@pytest.fixture
def words(tiny_checkpoint: Path, text_file: Path, tmp_path: Path) -> list[str]:
    """The flags of a small command in float32 on one thread."""
    return [
        *("--model", str(tiny_checkpoint), "--dataset", str(text_file), "--dtype", "float32"),
        *("--device", "cpu", "--threads", "1", "--out", str(tmp_path / "out.jsonl")),
    ]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# Each system is closed, and opened again for its other passes.
ALL = (
    *("sequential", "static", "ring", "dynamic", "inflight", "pipeinfer", "inflight+draft"),
    *("ring+draft", "pipeline", "pipeline+draft"),
)


@pytest.mark.parametrize(
    ("draft", "rows", "pa"),
    [
        pytest.param("ngram", 2, 0, marks=pytest.mark.wide),
        pytest.param("model", 5, 0, marks=pytest.mark.wide),
        ("model", 3, 0.15),
    ],
)
def test_every_mode_serves_the_tokens_of_the_first(
    draft: str,
    rows: int,
    pa: float,
    words: list[str],
    tiny_checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With all files that the command can write, and with more rows than requests. The model that
    drafts is the target itself."""
    drafter = "ngram" if draft == "ngram" else f"model:{tiny_checkpoint}"
    files = {f"--{kind}": tmp_path / f"{kind}.{end}" for kind, end in KINDS.items()}
    flags = [
        *("--modes", *ALL, "--draft", drafter, "--gamma", "3", "--arrival", "poisson:10"),
        *("--num_requests", "4", "--prefix_len", "uniform:5:40", "--gen_len", "uniform:3:12"),
        *("--B", str(rows), "--pa", str(pa)),
        *(word for flag, path in files.items() for word in (flag, str(path))),
    ]
    assert COMMANDS["serve"].parse([*words, *flags], ALONE).run([*words, *flags], ALONE) == 0
    records = read(tmp_path / "out.jsonl")
    assert [record["name"] for record in records] == list(ALL)
    for record in records:
        assert (record["kind"], record["reference"]) == ("pass", "sequential")
        assert (record["status"], record["num_differing"]) == ("verified", 0), record["name"]
        assert check_metrics(parse_line(json.dumps(record), PassRecord)) == [], record["name"]
        serving_pass = Pass.named(record["name"])
        config = record["config"]
        assert config["workload"]["mode"] == serving_pass.mode and len(record["requests"]) == 4
        settings = config["workload"]  # of the load, and of its own system alone
        assert settings.get("batch_size") == (None if "lanes" in settings else rows)
        assert ("lanes" in settings) == (record["name"] in PIPELINED)
        assert config["workload"]["prompt_format"] == "plain"
        if serving_pass.is_drafting and serving_pass.mode in ("inflight", "ring"):
            assert config["decoding"]["drafter"] == draft
            assert config["decoding"]["pa"] == (pa if draft == "model" else None)
        kinds = {"ring": "mdi_llm"} | dict.fromkeys(PIPELINED, "pipeinfer")
        assert (record["details"] or {}).get("kind") == kinds.get(serving_pass.mode)
    by_name = {record["name"]: record for record in records}
    if draft == "model":
        ring = by_name["ring+draft"]["metrics"]
        assert ring["draft_acceptance_rate"] == 1
        assert (ring["num_draft_tokens"] < 24) == (pa > 0), "of four requests, three in a step"
        assert by_name["pipeline+draft"]["metrics"]["draft_acceptance_rate"] == 1
    printed = capsys.readouterr()
    assert "verified: all other passes have the " in printed.out
    assert "10 records appended" in printed.err
    assert files["--plot"].read_bytes().startswith(b"\x89PNG")
    check_events(json.loads(files["--trace"].read_text())["traceEvents"])


def test_weights_that_draft_are_for_the_modes_that_draft(tmp_path: Path) -> None:
    words = "--modes", "ring", "inflight+draft", "--draft", "self", "--draft_weights", "int4"
    ring, batching = prepare_as("serve", tmp_path, *words).systems
    weights = [system.run.config.decoding.draft_weights for system in (ring, batching)]
    assert weights == [None, "int4"]


SMALL = ("--num_requests", "1", "--prefix_len", "8", "--gen_len", "2")
KINDS = {"plot": "png", "trace": "json"}


def check_events(events: list[dict[str, Any]]) -> None:
    """Each mode has a process for its requests, and one for each of its stages."""
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert [name for name in names if name.endswith(": requests")] == [
        f"{name}: requests" for name in ALL
    ]
    assert (
        "ring: stage 0" in names
        and sum(name.startswith("pipeinfer: rank 0") for name in names) == 1
    )
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == set(range(len(names)))
    assert min(event["ts"] for event in spans) >= 0 <= min(event["dur"] for event in spans)


def test_a_lost_record_still_prints_the_table(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(path: Path, line: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(serve, "append_line", full)
    words += [
        "--modes",
        "sequential",
        "ring",
        "--num_requests",
        "1",
        "--prefix_len",
        "8",
        "--gen_len",
        "2",
    ]
    code = COMMANDS["recurrent"].parse(words, ALONE).run(words, ALONE)
    out = tmp_path / "out.jsonl"
    printed = capsys.readouterr()
    assert code == 1 and "has the most output tokens/s" in printed.out
    lost = [line for line in printed.err.splitlines() if line.endswith("the record is lost")]
    assert len(lost) == 2 and lost[0].startswith(f"--out {out}: No space left on device")
    assert f"0 records appended to {out}" in printed.err


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_the_modes_before_a_failure_are_recorded_and_printed(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: type[BaseException],
) -> None:
    original = Flover.serve
    out = tmp_path / "out.jsonl"

    def interrupted(batching: Flover, serving_pass: Pass, *work: Any) -> SystemDetails:
        if serving_pass.mode == "inflight":
            raise error
        return original(batching, serving_pass, *work)

    monkeypatch.setattr(Flover, "serve", interrupted)
    words += [
        "--modes",
        "sequential",
        "inflight",
        "--num_requests",
        "2",
        "--prefix_len",
        "8",
        "--gen_len",
        "3",
    ]
    monkeypatch.setattr("sys.argv", ["magicdec inflight", *words])
    with pytest.raises((SystemExit, RuntimeError)) as ended:
        serve.inflight()
    printed = capsys.readouterr()
    assert "│ sequential │" in printed.out and "tokens/s" in printed.out
    if error is KeyboardInterrupt:
        assert isinstance(ended.value, SystemExit) and ended.value.code == 130
        assert f"interrupted; 1 record is in {out}" in printed.err
    (record,) = read(out)
    assert record["config"]["workload"]["mode"] == "sequential" and record["metrics"]


def test_the_driver_prints_one_table(launch: Launch, tiny_checkpoint: Path, tmp_path: Path) -> None:
    done = launch(
        "inflight_benchmark.py",
        "--model",
        tiny_checkpoint,
        "--num_requests",
        3,
        "--prefix_len",
        20,
        "--gen_len",
        "uniform:2:5",
        "--arrival",
        "constant:1",
        "--modes",
        "inflight",
        "static",
        "--dtype",
        "float32",
        "--out",
        tmp_path / "out.jsonl",
    )
    assert done.returncode == 0, done.stderr
    assert "verified: the other pass has the " in done.stdout
    assert len([line for line in done.stdout.splitlines() if line.startswith("│")]) == 2
    assert "2 records appended" in done.stderr
    assert len(read(tmp_path / "out.jsonl")) == 2


Toy = Callable[..., tuple[int, list[dict[str, Any]]]]
"""Serves in the passes of these names. Returns the exit code and the records."""

# --- A system that is not of the package: the newest token of each request in turn.


class RoundRobin(System):
    """Requests get one token each in turn, whose numbers follow from their prompts. A token takes a
    second. `log` has the lengths of the prompts and outputs of what was served in which pass."""

    made: ClassVar[list[RoundRobin]] = []
    wrong: ClassVar[str | None] = None  # the pass that emits other tokens
    interrupted: ClassVar[str | None] = None  # the pass that a user interrupts

    def prepare(self, run_config: RunConfig, cache: SetupCache) -> None:
        capacity = self.options.capacity(1)
        self.run = self.complete(self.find(run_config, capacity, cache), cache)
        self.clock = VirtualClock(1.0)
        self.log = list[tuple[str, list[tuple[int, int]]]]()
        self.made.append(self)

    def model_plans(self, serving_pass: Pass, rank: int) -> list[ModelPlan]:
        return []

    def open(self, serving_pass: Pass, device: torch.device, progress: Progress) -> None:
        """It holds nothing."""

    def step_shape(self, serving_pass: Pass) -> StepShape:
        return StepShape(1, 1)

    @property
    def rows(self) -> int:
        return 2

    @property
    def computes(self) -> bool:
        return True

    def now(self) -> float:
        return self.clock.now()

    def serve(
        self, serving_pass: Pass, requests: Sequence[Request], observer: PassObserver
    ) -> SystemDetails:
        lengths = [(len(r.prompt_ids), r.sampling.max_new_tokens) for r in requests]
        self.log.append((serving_pass.name, lengths))
        if observer.is_measured and serving_pass.name == self.interrupted:
            raise KeyboardInterrupt
        observer.counts.now = self.clock.now
        waiting = list(requests)
        order = list[Request]()
        with observer.threads.during():
            while waiting or order:
                self.clock.wait_until(0.0 if order else waiting[0].arrived_s)
                arrived = [r for r in waiting if r.arrived_s <= self.clock.now()]
                waiting = waiting[len(arrived) :]
                order = order + arrived
                request = order.pop(0)
                row = request.request_id
                admitted = tuple((admitted_request, row) for admitted_request in arrived)
                observer.counts.watch(StepPlan(Batch((request,)), admitted=admitted))
                self.clock.after_step()
                self.emit(serving_pass, request, observer)
                order += [request] * (request.finished_s is None)
        return SystemDetails()

    def close(self) -> None:
        """It took nothing."""

    def emit(self, serving_pass: Pass, request: Request, observer: PassObserver) -> None:
        token = sum(request.prompt_ids) + len(request.output_ids)
        request.output_ids.append(
            token + (serving_pass.name == self.wrong and request.request_id == 1)
        )
        request.token_times_s.append(self.clock.now())
        observer.observe([request.request_id], StepOutput([[0]]), 0.0)
        if len(request.output_ids) == 1:
            request.first_token_s = self.clock.now()
        if len(request.output_ids) == request.sampling.max_new_tokens:
            request.finished_s = self.clock.now()


SHAPES = [(0, 6, 5), (500, 3, 1), (60_000, 9, 4)]  # ms of the arrival, prompt, output
CHUNK = 4


@pytest.fixture
def toy(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toy:
    for name, system in SYSTEM_OF.items():
        monkeypatch.setitem(SYSTEM_OF, name, replace(system, system="test_serve:RoundRobin"))
    monkeypatch.setattr(RoundRobin, "made", [])
    trace = tmp_path / "trace.jsonl"
    names = "arrival_ms", "prompt_len", "output_len"
    lines = [json.dumps(dict(zip(names, shape, strict=True))) for shape in SHAPES]
    trace.write_text("\n".join(lines))
    words += ["--arrival", f"trace:{trace}", "--prefill_chunk", str(CHUNK)]

    def serve_toy(*names: str) -> tuple[int, list[dict[str, Any]]]:
        experiment = COMMANDS["serve"].parse(words, ALONE)
        passes = tuple(Pass.named(name) for name in names)
        experiment = replace(experiment, options=experiment.options.settle(passes, seed=0))
        return experiment.run(words, ALONE), read(tmp_path / "out.jsonl")

    return serve_toy


def first_of(name: str) -> str:
    return "sequential" if name != "sequential" else "static"


@pytest.mark.narrow(4)
@pytest.mark.parametrize("name", NAMES)
def test_warm_up_counts_in_nothing(name: str, toy: Toy) -> None:
    """The requests of the trace: the second arrives while the first is served, and the last when
    the others have ended. Tokens come at 1, 2, 4, 5 and 6 s, at 3 s, and from 61 to 64 s."""
    code, records = toy(first_of(name), name)
    warm_up = [(CHUNK, WARM_UP_TOKENS), (3, 1)]
    lengths = [(prompt, output) for _, prompt, output in SHAPES]
    log = [served for system in RoundRobin.made for served in system.log]
    assert sorted(log) == sorted(
        (mode, work) for mode in (first_of(name), name) for work in (warm_up, lengths)
    )
    assert code == 0 and [record["name"] for record in records] == [first_of(name), name]
    for record in records:
        metrics = record["metrics"]
        (group,) = record["groups"]
        facts = record["status"], group["threads"], metrics["num_steps"]
        assert facts == ("verified", [1], 10)
        assert metrics["duration_s"] == 64 and metrics["output_throughput"] == 10 / 64
        assert metrics["mean_ttft_ms"] == pytest.approx((1000 + 2500 + 1000) / 3)
        assert metrics["mean_in_flight"] == 1
        stamps = [(r["arrival_ms"], r["joined_ms"], r["finished_ms"]) for r in record["requests"]]
        assert stamps == [
            (0, [0], 6000),
            (500, [1000], 3000),
            (60_000, [60_000], 64_000),
        ]


@pytest.mark.parametrize("wrong", [None, "inflight"])
def test_with_repeats_the_modes_take_turns_at_going_first(
    wrong: str | None, toy: Toy, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each repeat is warmed up, and compared with the first mode in it."""
    monkeypatch.setattr(RoundRobin, "wrong", wrong)
    words += ["--repeats", "3"]
    _, records = toy("sequential", "inflight")
    (system,) = RoundRobin.made
    both = ["sequential", "inflight"]
    served = [name for name, lengths in system.log if len(lengths) == len(SHAPES)]
    assert served == both + both[::-1] + both
    assert len(system.log) == 2 * len(served)
    assert [record["name"] for record in records] == both
    assert {record["reference"] for record in records} == {"sequential"}
    expected = (0, 0) if wrong is None else (0, 3)
    assert tuple(record["num_differing"] for record in records) == expected
    assert all(record["config"]["workload"]["repeats"] == 3 for record in records)
    for record in records:
        assert [group["num_requests"] for group in record["groups"]] == [len(SHAPES)] * 3
        assert len(record["requests"]) == 3 * len(SHAPES)


def test_repeats_give_a_ratio_its_interval(
    toy: Toy, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of the second mode take longer in each repeat. The last request comes after 60 s and
    has four steps."""
    serve_toy = RoundRobin.serve

    def slower(self: RoundRobin, serving_pass: Pass, *rest: Any) -> SystemDetails:
        is_first = serving_pass.name == "sequential"
        self.clock.step_s = 1.0 if is_first else 1.0 + len(self.log) / 8
        return serve_toy(self, serving_pass, *rest)

    monkeypatch.setattr(RoundRobin, "serve", slower)
    words += ["--repeats", "3"]
    _, (first, second) = toy("sequential", "inflight")
    assert first["metrics"]["throughput_ratio"] is None
    metrics = second["metrics"]
    expected = [64 / (60 + 4 * (1 + number / 8)) for number in (3, 5, 11)]
    assert metrics["throughput_ratio_per_group"] == pytest.approx(expected)
    assert metrics["throughput_ratio"] == pytest.approx(expected[1])
    low, high = metrics["throughput_ratio_interval"]
    assert low < metrics["throughput_ratio"] < high
    assert metrics["duration_s"] == pytest.approx(sum(64 / ratio for ratio in expected))


@pytest.mark.narrow("values")
@pytest.mark.parametrize("error", [KeyboardInterrupt(), NotFinite("the logits are not finite")])
@pytest.mark.parametrize(
    ("failing", "repeat", "expected"),
    [
        ("inflight", 2, {"sequential": 1, "inflight": 1}),  # the reference is second then
        ("sequential", 2, {"sequential": 1, "inflight": 1}),  # nothing has checked the other yet
        ("inflight", 3, {"sequential": 3, "inflight": 2}),
    ],
)
def test_repeats_that_had_ended_are_kept(
    error: BaseException,
    failing: str,
    repeat: int,
    expected: dict[str, int],
    toy: Toy,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    command: Command,
) -> None:
    """What ends the command in one repeat of a mode costs no earlier one, of any mode."""
    serve_toy = RoundRobin.serve

    def ending(
        self: RoundRobin, serving_pass: Pass, requests: Sequence[Request], observer: PassObserver
    ) -> SystemDetails:
        served = [name for name, lengths in self.log if len(lengths) == len(SHAPES)]
        is_last = observer.is_measured and served.count(failing) == repeat - 1
        if serving_pass.name == failing and is_last:
            raise error
        return serve_toy(self, serving_pass, requests, observer)

    monkeypatch.setattr(RoundRobin, "serve", ending)
    words += ["--repeats", "3"]
    if isinstance(error, NotFinite):
        with pytest.raises(NotFinite):
            toy("sequential", "inflight")
    else:
        assert toy("sequential", "inflight")[0] == 130
    out = tmp_path / "out.jsonl"
    records = list(read_records(out, PassRecord))
    assert {record.name: len(record.groups) for record in records} == expected
    assert check_command(records) == []
    assert command("export", out, "--out", tmp_path / "out.csv").code == 0
    assert command("report", out, "--out", tmp_path / "page").code == 0
    printed = command("table", out).out
    for record in records:
        assert len(record.requests) == len(record.groups) * len(SHAPES)
        assert record.num_missing_repeats == 3 - len(record.groups)
        if record.name == failing and isinstance(error, NotFinite):
            assert (record.status, record.metrics) == (Status.FAILED, None)
            place = f"repeat {repeat} of 3: {failing}: "
            assert record.error == f"{place}the logits are not finite"
            continue
        assert record.status == Status.VERIFIED and record.metrics is not None
        if record.name == "inflight":
            ratios = record.metrics.throughput_ratio_per_group or ()
            assert len(ratios) == len(record.groups)
            assert f"inflight: verified, all {len(record.requests)} requests have the" in printed
            assert f", {len(record.groups)} of 3 repeats" in printed


def test_the_load_of_a_mode_is_that_of_its_worst_repeat(
    toy: Toy, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load of the whole command, which is watched too, is none of them."""
    shares = iter([0.1, 0.3, 0.2])

    def end(self: LoadWatch) -> None:
        share = next(shares, 0.9)
        self.found = OtherLoad(10 * share, 0.0, 1.0, share)

    monkeypatch.setattr(LoadWatch, "end", end)
    words += ["--repeats", "3"]
    _, (record,) = toy("sequential")
    environment = record["environment"]
    assert (environment["cores_taken"], environment["cores_others"]) == (0.3, 3.0)


def test_the_table_has_groups_the_winner_and_ratios_to_the_first_mode(
    toy: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    _, raw = toy("sequential", "inflight")
    out = capsys.readouterr().out
    assert "sequential has the most output tokens/s, 0.2\n" in out
    first, second = (parse_line(json.dumps(raw_record), PassRecord) for raw_record in raw)
    assert first.metrics is not None and second.metrics is not None
    fast = replace(
        second.metrics, output_throughput=5 / 16, throughput_ratio=2.0, mean_ttft_ms=750.0
    )
    records = [first, replace(second, metrics=fast)]
    summary, table, *_ = tables(records)
    labels = [text_of(row[0]) for row in table.rows]
    assert labels[:5] == [
        "Throughput",
        "duration, s",
        "requests/s",
        "output tokens/s",
        "  times sequential",
    ]
    assert list(map(text_of, table.rows[4][1:])) == ["", "2.00x"]
    assert "TTFT p50, ms" in labels and not [label for label in labels if "p9" in label]
    (comparison_line,) = summary.below
    assert comparison_line.startswith(
        "inflight has the most output tokens/s, 0.3: 2.00 times those of sequ"
    )
    assert "0.50 times its mean TTFT" in comparison_line
    keys = [line.split(",")[0] for line in table.csv().splitlines()]
    assert keys[:4] == ["metric", "duration_s", "request_throughput", "output_throughput"]
    many = [
        replace(
            record,
            requests=list(record.requests) * 34,
            groups=[replace(record.groups[0], num_requests=len(record.requests) * 34)],
        )
        for record in records
    ]
    assert "TTFT p99, ms" in [text_of(row[0]) for row in tables(many)[1].rows]


def closed_loop(record: PassRecord, concurrency: int) -> PassRecord:
    """The record as if its pass had been one of a closed loop."""
    workload = record.config["workload"] | {"concurrency": concurrency}
    name = f"{record.name}, {concurrency} at once"
    return replace(record, name=name, config=record.config | {"workload": workload})


def test_passes_of_several_concurrencies_have_a_table_a_mode_and_a_summary(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On 80 columns no number is broken, and no metric is left out."""
    _, raw = toy("sequential", "inflight", "static")
    modes = [parse_line(json.dumps(raw_record), PassRecord) for raw_record in raw]
    grid = [closed_loop(record, count) for record in modes for count in (1, 2, 4, 64)]
    for place, record in enumerate(grid):
        assert record.metrics is not None
        metrics = replace(record.metrics, duration_s=float(place), mean_ttft_ms=1_234_567.8)
        grid[place] = replace(record, metrics=metrics)
    grid[6] = replace(grid[6], status="mismatch", metrics=None, num_differing=1)
    capsys.readouterr()
    monkeypatch.setattr(output_tables, "make_console", lambda: Console(width=80, highlight=False))
    summary, *parts = tables(grid)
    assert [part.title for part in parts] == ["sequential", "inflight", "static"]
    headings = [(column.label, column.key) for column in parts[1].headings[1:]]
    assert headings == [(f"{n} at once", f"inflight, {n} at once") for n in (1, 2, 4, 64)]
    for place, part in enumerate(parts):
        _, mode_table = tables([modes[place]])
        assert labels_of(mode_table) <= labels_of(part)
        assert part.rows[1][1].value == 4 * place, "the duration of its own first pass"
        part.print()
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        for row in part.body:
            assert sum(line == " ".join(row).split() for line in lines) == 1, row
    assert [(row[0], row[1], row[-1]) for row in summary.rows if row] == [
        (record.mode, record.concurrency, record.status) for record in grid
    ]
    keys = [column.key for column in summary.headings[2:-1]]
    assert keys == ["output_throughput", "mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms"]
    styles = ["bold"] * 6 + ["bold red"] + ["bold"] * 5
    assert [line.style for line in summary.lead[:-1]] == styles
    (brief,) = tables(grid, is_verbose=False)
    assert brief.body == summary.body and brief.lead[0].style == "bold red"
    summary.print()
    lines = [line for line in capsys.readouterr().out.splitlines() if line[0] in "┃│"]
    assert " 1,234,567.8 " in "".join(lines) and max(map(len, lines)) <= 80


def test_a_table_is_no_wider_than_80_columns_but_for_two_modes(toy: Toy) -> None:
    """The labels of its rows are whole."""
    _, raw = toy("sequential", "inflight")
    records = [parse_line(json.dumps(raw_record), PassRecord) for raw_record in raw]
    many = [replace(records[0], name=f"endpoint{number}") for number in range(2, 9)]
    found = tables(many)[1:]
    assert [column.label for table in found for column in table.headings[1:]] == [
        record.name for record in many
    ]
    assert len(found) == 2 and all(table._least_width() <= 80 for table in found)
    wide = [replace(record, name=record.name * 4) for record in many[:3]]
    assert [len(table.columns) for table in tables(wide)[1:]] == [3, 2]


def labels_of(table: Table) -> set[str]:
    return {text_of(row[0]) for row in table.rows}


def test_a_mode_with_wrong_tokens_wins_nothing(toy: Toy) -> None:
    _, raw = toy("sequential", "inflight")
    records = [parse_line(json.dumps(raw_record), PassRecord) for raw_record in raw]
    wrong = replace(records[1], status="mismatch", metrics=None, num_differing=1)
    (summary, table, *_) = tables([records[0], wrong])
    assert summary.below == table.below == [] and table.rows[4][2] is None
    (brief,) = tables([records[0], wrong], is_verbose=False)
    warnings = [f"inflight: {verdict_of(wrong)}"]
    assert [line.text for line in brief.lead[:-1]] == warnings, "one that is wrong says all"


def test_every_mode_ends_in_a_row_and_all_tokens_in_a_line(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All else is for `--verbose`, and what is emulated is said in any case."""
    _, raw = toy("sequential", "inflight")
    records = [parse_line(json.dumps(raw_record), PassRecord) for raw_record in raw]
    (brief,) = tables(records, is_verbose=False)
    assert [row[0] for row in brief.rows] == ["sequential", "inflight"]
    assert brief.lead[0].text == "verified: the other pass has the 10 tokens of sequential"
    monkeypatch.undo()  # which systems serve
    workload = records[1].config["workload"] | {"emulate_acceptance": [0.5]}
    decoding = records[1].config["decoding"] | {"strategy": "speculative", "drafter": "model"}
    config = records[1].config | {"workload": workload, "decoding": decoding}
    emulated = replace(records[1], name="pipeinfer", config=config)
    (brief,) = tables([records[0], emulated], is_verbose=False)
    assert ", EMULATED by --emulate_acceptance" in brief.lead[0].text
    workload = workload | {"emulate_stage_ms": 3.0, "emulate_link_ms": 1.0}
    slept = replace(records[0], config=config | {"workload": workload})
    (brief,) = tables([slept], is_verbose=False)
    assert ", EMULATED by --emulate_stage_ms --emulate_link_ms" in brief.lead[0].text


@pytest.mark.narrow(4)
@pytest.mark.parametrize("name", NAMES)
def test_a_diverged_pass_gets_no_metrics(
    name: str, toy: Toy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(RoundRobin, "wrong", name)
    code, (first, record) = toy(first_of(name), name)
    assert code == 1 and first["status"] == "verified" and first["metrics"]
    assert (record["status"], record["num_differing"]) == ("mismatch", 1)
    assert record["metrics"] is record["details"] is None
    assert f"{name}: MISMATCH, 1 of 3 requests differ from {first_of(name)}" in (
        capsys.readouterr().out
    )


@pytest.mark.narrow(4)
@pytest.mark.parametrize("name", NAMES)
def test_records_of_finished_passes_are_kept(
    name: str, toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RoundRobin, "interrupted", name)
    code, (record,) = toy(first_of(name), name)
    assert code == 130 and record["name"] == first_of(name) and record["metrics"]


def test_rounding_may_be_why_tokens_differ(
    words: list[str], toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RoundRobin, "wrong", "inflight")
    words[words.index("float32")] = "bfloat16"
    code, (_, record) = toy("sequential", "inflight")
    assert code == 0 and (record["status"], record["num_differing"]) == ("unverified", 1)
    assert record["metrics"]


def test_a_single_pass_has_no_reference(toy: Toy) -> None:
    _, (record,) = toy("ring")
    assert (record["status"], record["reference"]) == ("unverified", None) and record["metrics"]


def test_a_rank_with_other_threads_ends_every_rank(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each learns what all have measured."""

    def all_gather(ours: OneRank, kind: object, world_size: int) -> list[object]:
        return [ours, ours._replace(threads=RankThreads(1, 3, 1, 3))]

    monkeypatch.setattr(runner_module, "all_gather_values", all_gather)
    with pytest.raises(AssertionError, match=r"^ring: rank 1 computed with 1 to 3 threads"):
        toy("ring")


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([(RankThreads(1, 2, 2, 2), 7), (RankThreads(2, 1, 1, 1), 30)], 100 + 7 + 30),
        ([(RankThreads(1, 0, 0, 0), 7)], 100),  # it waits
        ([(RankThreads(1, 2, 2, 2), None)], None),
    ],
)
def test_the_memory_of_a_pass_is_the_sum_over_its_ranks(
    others: list[tuple[RankThreads, int | None]],
    expected: int | None,
    toy: Toy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original: Callable[..., list[Any]] = runner_module.all_gather_values

    def all_gather(ours: Any, kind: Any, size: int) -> list[Any]:
        if kind is not OneRank:
            return original(ours, kind, size)
        other_readings = [
            ours._replace(threads=threads, peak=peak or 0, is_peak_reset=peak is not None)
            for threads, peak in others
        ]
        return [ours._replace(peak=100, is_peak_reset=True), *other_readings]

    monkeypatch.setattr(runner_module, "all_gather_values", all_gather)
    _, (record,) = toy("ring")
    assert record["metrics"]["peak_memory_bytes"] == expected
    assert record["groups"][0]["threads"] == [1, *(most for (_, _, _, most), _ in others)]
