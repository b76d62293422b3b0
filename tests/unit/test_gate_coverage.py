"""The gate fails, and names the case, if it has not measured what it must: in its exit code, in its
JUnit file and in its summary. No model runs here: the processes that run cases are replaced, except
in the test of cases that cannot run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT, Command
from synthetic_records import drawn, logged, with_fields

from magicdec.bench.gate import files, measuring
from magicdec.bench.gate.cases import Case, quick
from magicdec.bench.gate.measuring import APART, NO_RESULT, Finished, Result, run_cases
from magicdec.cli import gate as gate_command
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import WorkloadSection
from magicdec.distributed.groups import Launch
from magicdec.distributed.watching.processes import is_alive
from magicdec.records.comparison.conditions import describe, method_of
from magicdec.records.pass_record import PassRecord

BUDGETS = (33, 65, 129)
CASES = [
    *(drawn(budget=budget) for budget in BUDGETS),
    *(with_fields(drawn(budget=b), config__kv__policy="retrieval") for b in BUDGETS),
    with_fields(drawn(), config__decoding__drafter="ngram"),
]
NAMES = [describe(case) for case in CASES]
FIRST = 0
SECOND = 1
LAST = len(CASES) - 1
Change = Callable[[list[Result]], Any]
"""What happens to the results of all cases on their way, in place."""


@dataclass(frozen=True)
class EndedGate:
    """How a gate has ended: what it printed, and the names of the test cases with a failure in its
    JUnit file, and of the rows with a regression in its summary."""

    code: int
    out: str
    failures: list[str]
    regressions: list[str]


Gate = Callable[..., EndedGate]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which a gate keeps the cases that have ended."""
    monkeypatch.setattr("magicdec.bench.gate.resuming.library_folder", lambda: tmp_path)
    return tmp_path / "gate"


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> Gate:
    def run(baselines: Sequence[PassRecord], change: Change | None, *flags: str) -> EndedGate:
        """With `change`, the result of each case is its baseline, and no process starts."""
        path, junit, summary = (tmp_path / name for name in ("old.jsonl", "gate.xml", "gate.md"))
        path.write_text("".join(record.to_json() + "\n" for record in baselines))
        if change is not None:
            monkeypatch.setattr(gate_command, "measure", answering(baselines, change))
        files = ("--baseline", path, "--junit", junit, "--summary", summary)
        code, out, _ = command("gate", *files, *flags)
        failed = [str(case.get("name")) for case in ElementTree.parse(junit).findall("*[failure]")]
        lines = summary.read_text().splitlines()
        worse = [line.split(" | ")[1] for line in lines if line.startswith("| regression |")]
        return EndedGate(code, out, failed, worse)

    return run


def answering(baselines: Sequence[PassRecord], change: Change) -> Callable[..., list[Result]]:
    """In place of `measure`."""
    answers = [(Case.from_record(baseline), baseline) for baseline in baselines]

    def measure(cases: Sequence[Case], num_processes: int, finished: Any) -> list[Result]:
        results: list[Result] = []
        for case in cases:
            parallel = replace(case.config.parallel, threads=None)
            plain = replace(case, config=replace(case.config, parallel=parallel))
            results.append(next(b for c, b in answers if c == plain))
        change(results)
        for number, result in enumerate(results):
            finished(Finished(number, result, (number + 1) / len(results)))
        return results

    return measure


def test_all_cases_with_their_results_pass(gate: Gate) -> None:
    ended = gate(CASES, lambda results: None)
    assert (ended.code, ended.failures, ended.regressions) == (0, [], [])
    assert f"{len(CASES)} same" in ended.out


def lose(*numbers: int) -> Change:
    return lambda results: [results.__setitem__(n, NO_RESULT) for n in numbers]


CHANGES: dict[str, tuple[Change, list[int], str]] = {
    "the last never came": (lose(LAST), [LAST], "no result came back"),
    "two never came": (lose(SECOND, 5), [SECOND, 5], "no result came back"),
    "the text of an error": (
        lambda found: found.__setitem__(LAST, "no memory"),
        [LAST],
        "failed: no memory",
    ),
    "an error without text": (lambda found: found.__setitem__(0, ""), [FIRST], "failed"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_case_without_a_result_of_its_own_fails_with_its_name(change: str, gate: Gate) -> None:
    apply, cases, message = CHANGES[change]
    ended = gate(CASES, apply)
    names = [NAMES[number] for number in cases]
    assert (ended.code, ended.failures, ended.regressions) == (1, names, names)
    assert message in ended.out and f"{len(cases)} regression" in ended.out


def test_a_record_under_other_conditions_is_not_comparable_as_before(gate: Gate) -> None:
    """The file is older than a change of its conditions, and the case was measured."""
    changed = with_fields(CASES[0], config__decoding__ignore_eos=True)
    ended = gate(CASES, lambda found: found.__setitem__(0, changed))
    assert ended.code == 3 and ended.failures == [] and "ignore_eos True, was" in ended.out


def test_quick_has_a_case_of_every_drafter_and_policy_of_the_file(gate: Gate) -> None:
    ended = gate(CASES, lambda found: None, "--quick")
    assert (ended.code, ended.failures) == (0, []) and "3 same" in ended.out
    assert {method_of(case) for case in quick(CASES)} == set(map(method_of, CASES))


def test_quick_must_have_a_result_of_each_of_its_cases(gate: Gate) -> None:
    ended = gate(CASES, lose(1), "--quick")
    assert (ended.code, ended.failures) == (1, [NAMES[4]])


def test_a_file_is_saved_only_with_a_record_of_each_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    path = tmp_path / "old.jsonl"
    text = "".join(record.to_json() + "\n" for record in CASES)
    for change, code in ((lose(0), 1), (lambda found: None, 0)):
        path.write_text(text)
        monkeypatch.setattr(gate_command, "measure", answering(CASES, change))
        ended = command("gate", "save", "--baseline", path)
        assert ended.code == code and path.read_text() == text
        named = (
            "--draft self --kv_policy streaming_llm --budget 33 --gamma 4: failed: no result came"
        )
        assert (named in ended.err) == (code == 1)


def test_an_interrupted_gate_goes_on_with_the_cases_that_are_left(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """A failure is not kept, and other cases, or another model, begin anew."""
    path = tmp_path / "old.jsonl"
    path.write_text("".join(record.to_json() + "\n" for record in CASES))
    asked: list[int] = []

    def interrupted(cases: Sequence[Case], num_processes: int, finished: Any) -> Any:
        asked.append(len(cases))
        finished(Finished(0, CASES[0], 0.25))
        finished(Finished(1, "no memory", 0.5))
        finished(Finished(2, CASES[2], 0.5))
        raise KeyboardInterrupt

    monkeypatch.setattr(gate_command, "measure", interrupted)
    ended = command("gate", "--baseline", path)
    assert ended.code == 130 and "3 of 7 cases are kept; the same command goes on" in ended.err
    assert " s left: --draft self" in ended.out
    (left,) = cache.iterdir()
    (left / "2.jsonl").write_text((left / "2.jsonl").read_text()[:-30])  # killed while it wrote
    ended = command("gate", "--baseline", path, "--quick")
    assert ended.code == 130 and asked == [7, 3], "other cases begin anew"

    def rest(cases: Sequence[Case], num_processes: int, finished: Any) -> list[Result]:
        asked.append(len(cases))
        return [*CASES[1:]]

    monkeypatch.setattr(gate_command, "measure", rest)
    ended = command("gate", "--baseline", path)
    assert ended.code == 0 and asked[-1] == 6 and "7 same" in ended.out
    assert "1 of them had ended when this command was interrupted" in ended.out
    assert not left.exists()


def test_the_share_of_the_work_that_is_done_counts_a_prefill_once() -> None:
    config = Case.from_record(CASES[0]).config
    few, many = (Case(replace(config, workload=w)) for w in workloads())
    share = [(0, many), (1, many), (2, few)]
    # 8 prompts of 100 tokens each, which decode 10 tokens of 5 prefilled ones each
    assert dict(measuring.costs_of(share)) == {0: 800 + 400, 1: 400, 2: 400 + 200}


def workloads() -> list[WorkloadSection]:
    return [
        WorkloadSection(batch_size=4, num_batches=n, prefix_len=100, gen_len=10) for n in (1, 2)
    ]


def test_each_kind_of_cpu_has_a_file_beside_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """It is compared with and renewed. What was accepted on one kind is left to statistics on the
    others."""
    path = tmp_path / "old.jsonl"

    def records_of(name: str) -> list[PassRecord]:
        found = {"environment__instructions": [name], "environment__kernels": {"packed": "aa"}}
        return [with_fields(logged(case), **found, seal="") for case in CASES]

    def here(name: str, records: Sequence[PassRecord]) -> None:
        monkeypatch.setattr(files, "used_instructions", lambda: [name])
        monkeypatch.setattr(gate_command, "measure", answering(records, lambda found: None))

    path.write_text("".join(record.to_json() + "\n" for record in records_of("AVX2")))
    here("AVX512BF16", records_of("AVX512BF16"))
    ended = command("gate", "save", "--baseline", path)
    ours = tmp_path / "old.avx512_bf16.jsonl"
    assert ended.code == 0 and ours.exists() and "AVX2" in path.read_text()
    ours.write_text("".join(ours.read_text().splitlines(keepends=True)[:-1]))
    ended = command("gate", "save", "--baseline", path)
    assert ended.code == 0 and len(ours.read_text().splitlines()) == 7, "the cases of the first"
    ended = command("gate", "--baseline", path)
    assert "7 same" in ended.out and ended.out.count("every step as before [exact]") == 7
    changed = records_of("AVX512BF16")
    hashes = changed[1].requests[0].draft_hashes
    assert hashes is not None
    hashes[0] = "ffffffff"
    here("AVX512BF16", changed)
    ended = command("gate", "save", "--baseline", path)
    assert f"{path}: statistics compare what has changed" in ended.out
    here("AVX2", records_of("AVX2"))
    ended = command("gate", "--baseline", path)
    assert ended.out.count("[exact]") == 6 and ended.out.count("does not say which kernels") == 1
    assert ended.code == 0


def test_a_worker_gives_a_result_of_each_case_that_ends_with_any_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that one case does not cost the others of its process."""

    def no_memory(*args: object) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr("magicdec.setup.prepare.prepare", no_memory)
    arrivals = list(run_cases(list(enumerate(map(Case.from_record, CASES)))))
    assert arrivals == [(n, "MemoryError: no memory") for n in range(len(CASES))]


def test_ranks_stop_after_a_case_that_failed_on_any_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their states may differ. Other ranks tell of failures alone, and of no refusal, which is that
    of the first as well."""
    absent, *cases = [Case.from_record(case) for case in CASES[:4]]

    def prepare(config: RunConfig, launch: Launch, cache: object) -> object:
        if config == absent.config:
            raise ValueError("absent")
        return SimpleNamespace(config=config)

    results: list[Result] = [CASES[1], "RuntimeError: no room", CASES[3]]
    monkeypatch.setattr("magicdec.setup.prepare.prepare", prepare)
    monkeypatch.setattr("magicdec.systems.shared_prefill.prefill_key", lambda config: 0)
    monkeypatch.setattr(
        measuring, "_run_group", lambda group, _: zip((n for n, _ in group), results, strict=True)
    )
    numbered = list(enumerate([absent, *cases]))
    failed = (2, "RuntimeError: no room")
    first, other = (list(run_cases(numbered, Launch(rank, 2, rank, 2))) for rank in (0, 1))
    assert first == [(0, "absent"), (1, CASES[1]), failed, (3, APART)]
    assert other == [failed, (3, APART)]
    alone = list(run_cases(numbered))
    assert alone == [(0, "absent"), (1, CASES[1]), failed, (3, CASES[3])], "costs this case alone"


@pytest.mark.wide
def test_cases_that_cannot_run_here_are_named_and_fail(gate: Gate, tmp_path: Path) -> None:
    """In real processes. The policies of the other cases exist, but no case has a model."""
    absent = with_fields(drawn(), config__kv__policy="no_such_policy")
    cases = [with_fields(c, config__model__model=str(tmp_path / "absent")) for c in CASES[:3]]
    ended = gate([absent, *cases], None)
    names = [describe(case) for case in (absent, *cases)]
    assert (ended.code, ended.failures, ended.regressions) == (1, names, names)
    assert "no_such_policy is not known; choose from full, streaming_llm" in ended.out
    assert ended.out.count(str(tmp_path / "absent")) >= 3, "what is not there is said"
    assert "no result came back" not in ended.out, "each case of each process has one"


@pytest.mark.parametrize(
    ("section", "value"), [("attention", 5), ("model", ["demo"]), ("sampling", True)]
)
def test_a_case_of_no_config_is_refused_with_its_name(
    section: str, value: object, tmp_path: Path, command: Command
) -> None:
    raw = json.loads(CASES[1].to_json())
    raw["config"][section] = value
    path = tmp_path / "old.jsonl"
    path.write_text(json.dumps(raw) + "\n")
    code, _, err = command("gate", "--baseline", path)
    assert code == 2 and err.count("\n") == 1
    assert section in err if section == "model" else NAMES[1] in err


def wait_for(look: Callable[[], Any], seconds: float = 60.0) -> Any:
    until = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < until
        time.sleep(0.02)
    return found


GATE = """
import sys, time
from multiprocessing import current_process
from pathlib import Path
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import ParallelSection
from magicdec.bench.gate import measuring
from magicdec.bench.gate.cases import Case

def run_cases(cases, launch):
    Path(sys.argv[1], str(current_process().pid)).touch()
    if launch.rank == 0:
        yield cases[0][0], "done"
    time.sleep(600)

if __name__ == "__main__":
    config = RunConfig(parallel=ParallelSection(nproc=int(sys.argv[2])))
    for n, result in enumerate(measuring.measure([Case(config)] * 5, 2, lambda result: None)):
        print(n, result)
else:
    measuring.run_cases = run_cases
"""


@pytest.fixture
def ranks() -> int:
    """Of each case of `sleeping_gate`."""
    return 1


@pytest.fixture
def sleeping_gate(tmp_path: Path, ranks: int) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A gate whose two processes sleep after their first case, and their numbers."""
    script = tmp_path / "gate.py"
    folder = tmp_path / "pids"
    script.write_text(GATE)
    folder.mkdir()
    words = [sys.executable, script, folder, str(ranks)]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        words, text=True, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": paths}
    ) as gate:
        pids = [int(path.name) for path in wait_for(lambda: two(list(folder.iterdir())))]
        try:
            yield gate, pids
        finally:
            gate.kill()
            for pid in filter(is_alive, pids):
                os.kill(pid, signal.SIGKILL)


def two(found: list[Path]) -> list[Path]:
    return found if len(found) == 2 else []


def test_a_gate_whose_process_is_killed_ends_and_names_it(
    sleeping_gate: tuple[subprocess.Popen[str], list[int]],
) -> None:
    gate, pids = sleeping_gate
    os.kill(pids[0], signal.SIGKILL)
    out, _ = gate.communicate(timeout=60)
    results = [line.split(" ", 1)[1] for line in out.splitlines()]
    assert len(results) == 5 and gate.returncode == 0
    lost = f"process {pids[0]} of the gate was ended by SIGKILL"
    assert results.count("done") + results.count(lost) == 5 and results.count(lost) >= 3
    assert not any(map(is_alive, pids))


@pytest.mark.narrow(1)
@pytest.mark.parametrize("ranks", [2])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_rank_is_named_by_the_cases_that_it_had_left(
    lost: int, sleeping_gate: tuple[subprocess.Popen[str], list[int]]
) -> None:
    gate, pids = sleeping_gate
    os.kill(pids[lost], signal.SIGKILL)
    out, _ = gate.communicate(timeout=60)
    results = [line.split(" ", 1)[1] for line in out.splitlines()]
    named = [
        f"rank {rank} of 2 (process {pids[lost]} of the gate) was ended by SIGKILL"
        for rank in (0, 1)
    ]
    assert results[0] in ("done", *named) and len(results) == 5 and gate.returncode == 0
    assert results[1] in named and results[1:] == [results[1]] * 4
    assert not any(map(is_alive, pids))


@pytest.mark.narrow("values")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_gate_leaves_no_process(
    number: signal.Signals, sleeping_gate: tuple[subprocess.Popen[str], list[int]]
) -> None:
    gate, pids = sleeping_gate
    gate.send_signal(number)
    gate.wait(60)
    wait_for(lambda: not any(map(is_alive, pids)))
