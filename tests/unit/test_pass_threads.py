"""The threads that each pass computes with: measured where it computes, equal to those of its
config, in its record, and equal in all passes of a run. A pass with others is refused by name."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from conftest import ROOT
from synthetic_records import command_of, parse_record
from test_record import batches, plain_batches, run_records
from test_session import PARALLEL

from magicdec.bench.measure import execute
from magicdec.cli.serve import COMMANDS
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import (
    DecodingSection,
    KVSection,
    ModelSection,
    ParallelSection,
    WorkloadSection,
)
from magicdec.distributed.groups import Launch
from magicdec.engine.engine import Engine
from magicdec.hardware import threads as threads_module
from magicdec.hardware.threads import (
    RankThreads,
    ThreadCount,
    check_threads,
    num_threads,
    use_threads,
)
from magicdec.records.reading import load_passes
from magicdec.records.recomputing import unfounded_metric
from magicdec.setup.prepare import prepare
from magicdec.systems.flover.declaration import FloverSettings
from magicdec.systems.flover.system import Flover, on_first_rank
from magicdec.systems.mdi_llm.system import MDILLM, OpenRing
from magicdec.systems.modes import Pass
from magicdec.systems.options import ServeOptions
from magicdec.systems.prefilled_batching import PrefilledBatching
from magicdec.systems.stages.stage import StageLoop

ALONE = Launch(0, 1, 0, 1)
COMMITTED = (
    ROOT / "magicdec" / "bench" / "gate" / "baselines" / "acceptance.jsonl",
    ROOT / "results/cpu/records.jsonl.gz",
)


def test_the_numbers_are_those_of_the_thread_of_python_that_computes() -> None:
    """A new one has in OpenMP, whose number native code takes, that of the environment, until
    PyTorch is asked."""
    seen: list[Any] = []

    def native_only() -> None:
        seen.append(threads_module.openmp_threads()())

    for target in (native_only, lambda: seen.append(num_threads())):
        if seen:
            torch.set_num_threads(seen[0] + 1)
        thread = Thread(target=target)
        thread.start()
        thread.join()
    default_threads, measured = seen
    assert measured == (default_threads, default_threads + 1)
    assert num_threads() == (default_threads + 1,) * 2


def test_the_number_is_what_it_was_after_use() -> None:
    before = torch.get_num_threads()
    count = ThreadCount()
    with pytest.raises(KeyError), use_threads(before + 2), count.during():
        assert num_threads() == (before + 2,) * 2
        raise KeyError
    assert torch.get_num_threads() == before and count.measured == [before + 2] * 2


def test_what_changes_during_a_pass_is_seen() -> None:
    count = ThreadCount()
    before = torch.get_num_threads()
    with count.during():
        torch.set_num_threads(before + 1)
    assert count.rank_threads(2, before) == RankThreads(2, before, before, before + 1)
    assert ThreadCount().rank_threads(1, 0) == RankThreads(1, 0, 0, 0), "it waits"


@pytest.mark.parametrize(
    ("rank_threads", "message"),
    [
        (RankThreads(1, 2, 1, 1), "ring: rank 1 computed with 1 threads, but its config says 2"),
        (RankThreads(1, 2, 2, 3), "rank 1 computed with 2 to 3 threads, but its config says 2"),
        (RankThreads(1, 2, 1, 2), "rank 1 computed with 1 to 2 threads, but its config says 2"),
        (RankThreads(1, 0, 1, 1), "rank 1 computed with 1 threads, but its config says 0"),
        (RankThreads(1, 2, 0, 0), "rank 1 computed with 0 threads, but its config says 2"),
    ],
)
def test_a_rank_with_other_threads_than_its_config_is_named(
    rank_threads: RankThreads, message: str
) -> None:
    right = RankThreads(0, 4, 4, 4)
    assert check_threads("ring", [RankThreads(1, 0, 0, 0), right]) == [4, 0], "in their order"
    with pytest.raises(AssertionError, match=message):
        check_threads("ring", [right, rank_threads])


@pytest.mark.parametrize(
    ("threads", "message"),
    [
        ([[2], [1]], "group 1: the ranks had [1] threads, but [2] in the first"),
        ([[2], [2, 2]], "group 1: the ranks had [2, 2] threads, but [2] in the first"),
        ([[1, 2], [2, 1]], "group 1: the ranks had [2, 1] threads, but [1, 2] in the first"),
    ],
)
def test_a_record_whose_groups_had_other_resources_is_refused(threads: Any, message: str) -> None:
    """It can neither be read nor made."""
    record = run_records()[1]
    raw = json.loads(record.to_json())
    for group, counts in zip(raw["groups"], threads, strict=True):
        group["threads"] = counts
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_record(raw)
    pairs = zip(record.groups, threads, strict=True)
    with pytest.raises(AssertionError, match=re.escape(message)):
        replace(record, groups=[replace(group, threads=counts) for group, counts in pairs])


@pytest.mark.parametrize("threads", [[2], [2, 1]])
def test_passes_of_a_run_with_other_resources_are_refused(threads: list[int]) -> None:
    """No record of them is made, and the speedup in one that was edited is named."""
    base = [replace(batch, threads=threads) for batch in plain_batches()]
    ours = [replace(batch, threads=[1]) for batch in batches()]
    message = f"static+draft: the ranks had [1] threads, but {threads} in static"
    with pytest.raises(AssertionError, match=re.escape(message)):
        command_of(ours, baseline=base)
    plain, record = run_records()
    assert unfounded_metric(record, [plain, record]) is None
    others = [replace(group, threads=[*threads, 9]) for group in plain.groups]
    assert unfounded_metric(record, [replace(plain, groups=others), record]) == "speedup"


def test_committed_records_say_their_threads() -> None:
    for path in COMMITTED:
        records = load_passes(path, is_strict=True)
        groups = [group for record in records for group in record.groups]
        assert len(groups) > 20 and all(group.threads for group in groups)


def more_threads() -> None:
    torch.set_num_threads(torch.get_num_threads() + 1)


def before(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with more threads from its begin on."""

    def changed(*args: Any, **options: Any) -> Any:
        more_threads()
        return function(*args, **options)

    return changed


def after(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with more threads from its end on, as of something that it has called."""

    def changed(*args: Any, **options: Any) -> Any:
        found = function(*args, **options)
        more_threads()
        return found

    return changed


@pytest.fixture
def config(tiny_checkpoint: Path, text_file: Path) -> RunConfig:
    return RunConfig(
        model=ModelSection(str(tiny_checkpoint), "float32"),
        parallel=ParallelSection(device="cpu", threads=1),
        kv=KVSection("streaming_llm", 18),
        decoding=DecodingSection("speculative", "self", 2, ignore_eos=True),
        workload=WorkloadSection(str(text_file), 2, 20, 6, num_batches=2, warmup_batches=0),
    )


def test_both_passes_of_a_run_say_their_threads_in_each_batch(config: RunConfig) -> None:
    records = execute(prepare(config, ALONE)).records
    assert [[group.threads for group in record.groups] for record in records] == [[[1], [1]]] * 2


RUN_FAULTS = {
    "before a pass": ("_make_strategy", before, "2 threads"),
    "at the begin of a pass": ("_prepare", before, "1 to 2 threads"),
    "at the end of its preparation": ("_prepare", after, "1 to 2 threads"),
}


@pytest.mark.parametrize("name", ["static", "static+draft"])
@pytest.mark.parametrize("fault", RUN_FAULTS)
def test_a_pass_of_a_run_with_other_threads_ends_it(
    fault: str, name: str, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, change, measured = RUN_FAULTS[fault]
    original = getattr(PrefilledBatching, method)

    def changed(self: PrefilledBatching, served_pass: Pass, *args: Any) -> Any:
        function = change(original) if served_pass.name == name else original
        return function(self, served_pass, *args)

    monkeypatch.setattr(PrefilledBatching, method, changed)
    message = f"^{re.escape(name)}: rank 0 computed with {measured}, but its config says 1$"
    with pytest.raises(AssertionError, match=message):
        execute(prepare(config, ALONE))


def test_a_run_whose_decoding_changes_the_threads_ends(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "decode", after(Engine.decode))
    with pytest.raises(AssertionError, match=r"^static: rank 0 computed with 1 to 2 threads"):
        execute(prepare(config, ALONE))


@pytest.mark.parametrize("cores, threads", [(8, 6), (6, 6), (5, 5), (2, 2)])
def test_each_rank_has_its_own_and_one_process_those_of_its_host(
    config: RunConfig, cores: int, threads: int
) -> None:
    """Ranks 2 and 3 are on another host. One process has no more threads than cores."""
    whole = prepare(config, ALONE)
    serving_pass = Pass.named("inflight")
    parallel = replace(PARALLEL, threads=3)
    machine = replace(whole.machine, num_cpus=cores)
    for is_on_all, expected_threads in ((True, [3, 3, 3, 3]), (False, [threads, 0, 0, 0])):
        expected = []
        for launch in (Launch(rank, 4, rank % 2, 2) for rank in range(4)):
            changed = replace(whole.config, parallel=parallel)
            run = replace(whole, config=changed, launch=launch, machine=machine)
            ranks = "all" if is_on_all else "first"
            settings = FloverSettings(batch_ranks=ranks)
            batching = Flover(ServeOptions(), settings, [serving_pass], launch)
            batching.run = run if is_on_all else on_first_rank(run)
            expected.append(batching.expected_threads)
        assert expected == expected_threads


Serve = Callable[[str], dict[str, list[int]]]


@pytest.fixture
def serve(tiny_checkpoint: Path, text_file: Path, tmp_path: Path) -> Serve:
    """Runs a command on one rank in this process. Returns the threads of each pass, as recorded."""

    def run(command: str) -> dict[str, list[int]]:
        out = tmp_path / "r.jsonl"
        words = [
            "--model",
            tiny_checkpoint,
            "--dataset",
            text_file,
            "--dtype",
            "float32",
            "--device",
            "cpu",
            "--threads",
            1,
            "--num_requests",
            2,
            "--prefix_len",
            12,
            "--gen_len",
            4,
            "--out",
            out,
            *FLAGS[command][0],
        ]
        argv = list(map(str, words))
        assert COMMANDS[command].parse(argv, ALONE).run(argv, ALONE) == 0
        records = map(json.loads, out.read_text().splitlines())
        return {record["name"]: record["groups"][0]["threads"] for record in records}

    return run


FLAGS: dict[str, tuple[tuple[object, ...], list[str]]] = {  # and the modes
    "inflight": (("--modes", "sequential", "inflight"), ["sequential", "inflight"]),
    "recurrent": (
        ("--draft", "ngram", "--gamma", 2),
        ["sequential", "inflight", "ring", "ring+draft"],
    ),
    "pipeline": (
        (
            "--draft",
            "ngram",
            "--layer_split",
            "1.0/head",
            "--modes",
            "sequential",
            "pipeline",
            "pipeline+draft",
        ),
        ["sequential", "pipeline", "pipeline+draft"],
    ),
}


@pytest.mark.parametrize("command", FLAGS)
def test_the_record_of_each_pass_has_the_threads_of_its_ranks(command: str, serve: Serve) -> None:
    assert serve(command) == {name: [1] for name in FLAGS[command][1]}


SERVED = {
    "before a batching serves": ("inflight", "Flover.open", "sequential", "2"),
    "while a batching serves": ("inflight", "Engine.serve", "sequential", "1 to 3"),
    "before a ring serves": ("recurrent", "MDILLM.open", "ring", "2"),
    "while a ring serves": ("recurrent", "OpenRing.serve", "ring", "1 to 2"),
    "while a stage or a drafter serves": ("pipeline", "StageLoop.serve", "pipeline", "1 to 2"),
}
CLASSES = {loop.__name__: loop for loop in (Engine, Flover, MDILLM, OpenRing, StageLoop)}


@pytest.mark.parametrize("fault", SERVED)
def test_a_pass_that_is_served_with_other_threads_ends_the_command(
    fault: str, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, place, name, measured = SERVED[fault]
    owner, _, method = place.partition(".")
    monkeypatch.setattr(CLASSES[owner], method, after(getattr(CLASSES[owner], method)))
    message = f"^{re.escape(name)}: rank 0 computed with {measured} threads, but its config says 1$"
    with pytest.raises(AssertionError, match=message):
        serve(command)
