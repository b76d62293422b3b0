"""What another load took of the cores, from readings of /proc that are made up."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import Command
from test_advise import machine_file
from test_record import small

from magicdec.bench.measure import Outcome
from magicdec.cli import report
from magicdec.hardware import other_load
from magicdec.hardware.other_load import (
    TICKS_PER_S,
    LoadWatch,
    OtherLoad,
    Reading,
    read_cores,
    warn_of_load,
)
from magicdec.records.environment import Environment

# Children of the launcher 99, and a program of somebody else.
RANKS = (100, 101)
OTHER = 900
SECONDS = 10


def test_the_worst_load_is_that_of_which_most_is_known_to_be_taken() -> None:
    unknown = OtherLoad()
    uncounted = OtherLoad(2.0, 0.0)  # waits are not counted
    calm = OtherLoad(0.5, 0.0, 0.1, 0.0)
    busy = OtherLoad(0.3, 0.0, 0.3, 0.2)
    assert OtherLoad.worst_of([]) == OtherLoad.worst_of([unknown]) == unknown
    for order in ([unknown, uncounted, calm, busy], [busy, calm, uncounted, unknown]):
        assert OtherLoad.worst_of(order) == busy
    assert OtherLoad.worst_of([unknown, uncounted]) == uncounted
    assert OtherLoad.worst_of([calm, uncounted]) == calm


def write_proc(
    root: Path,
    own_s: float = 0.0,
    other_s: float = 0.0,
    stolen_s: float = 0.0,
    waited_s: float | None = 0.0,
) -> Reading:
    """A reading of a /proc of two CPUs that this process may use and one that it may not, at which
    each of two ranks has computed `own_s`, and each of its two threads has waited `waited_s`."""
    ticks_of = {cpu: int((2 * own_s + other_s) * TICKS_PER_S / 2) for cpu in (0, 1)} | {2: 10**6}
    lines = [
        f"cpu{cpu} {ticks} 0 0 {10**7 - ticks} 0 0 0 {int(stolen_s * TICKS_PER_S / 2)} 7 0"
        for cpu, ticks in ticks_of.items()
    ]
    root.mkdir(exist_ok=True)
    (root / "stat").write_text("\n".join(["cpu  1 2 3 4 5 6 7 8 9 0", *lines, "intr 5", ""]))
    parents = {99: (1, 0.0), OTHER: (1, other_s)} | dict.fromkeys(RANKS, (99, own_s))
    for pid, (parent, seconds) in parents.items():
        folder = root / str(pid)
        (folder / "task").mkdir(parents=True, exist_ok=True)
        ticks = int(seconds * TICKS_PER_S)
        middle = " ".join(["0"] * 9)
        # Half of it by children that have ended. Its name is to confuse the reader.
        (folder / "stat").write_text(
            f"{pid} (a) 1 (b) S {parent} {middle} {ticks // 4} {ticks // 4} "
            f"{ticks // 4} {ticks // 4} 20 0 2"
        )
        for thread in (pid, pid + 1000):
            path = folder / "task" / str(thread) / "schedstat"
            path.parent.mkdir(exist_ok=True)
            if waited_s is not None:
                path.write_text(f"5 {int(waited_s * 1e9)} 5\n")
    found = read_cores(root, 99, (0, 1))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("case", "numbers", "taken", "is_busy"),
    [
        ("the ranks alone, with all cores", {"own_s": 10.0}, 0.0, False),
        ("more threads than cores wait for each other", {"own_s": 10.0, "waited_s": 5.0}, 0, False),
        ("others have the cores that the run does not want", {"own_s": 5, "other_s": 9}, 0, False),
        ("a little load", {"own_s": 9.5, "other_s": 1.0, "waited_s": 0.25}, 0.05, False),
        ("half a core", {"own_s": 7.5, "other_s": 5.0, "waited_s": 1.25}, 0.25, True),
        ("too many threads and half a core", {"own_s": 7.5, "other_s": 5, "waited_s": 9}, 0.25, 1),
        ("stolen by the hypervisor", {"own_s": 7.5, "stolen_s": 5.0}, 0.25, True),
        ("no run queue is counted", {"own_s": 7.5, "other_s": 5.0, "waited_s": None}, None, False),
    ],
)
def test_cores_are_taken_where_others_compute_and_the_run_waits(
    tmp_path: Path, case: str, numbers: dict[str, float], taken: float | None, is_busy: bool
) -> None:
    before = write_proc(tmp_path, waited_s=numbers.get("waited_s", 0.0) and 0.0)
    after = replace(write_proc(tmp_path, **numbers), at_s=before.at_s + SECONDS)
    found = OtherLoad.between(before, after)
    assert found.cores_taken == (None if taken is None else pytest.approx(taken, abs=0.01)), case
    assert other_load.is_busy(found.cores_taken) == is_busy, case
    assert found.cores_others == pytest.approx(numbers.get("other_s", 0) / SECONDS, abs=0.01)
    assert found.cores_stolen == pytest.approx(numbers.get("stolen_s", 0) / SECONDS)
    shorter = replace(after, at_s=before.at_s + 0.5)
    assert OtherLoad.between(before, shorter) == OtherLoad() == OtherLoad.between(None, after)


def test_a_system_that_counts_nothing_is_not_judged(tmp_path: Path) -> None:
    """Such as one in which /proc/stat is there and has zeros, or is of another form."""
    for text in (None, "", "cpu0 0 0 0 0 0 0 0 0 0 0\n", "cpu0 1 2 3\n", "cpu0 a b\n"):
        if text is not None:
            (tmp_path / "stat").write_text(text)
        assert read_cores(tmp_path, 1, (0,)) is None
    watch = LoadWatch(root=tmp_path)
    watch.begin()
    watch.end()
    assert watch.found == OtherLoad()


def test_this_machine_can_be_read() -> None:
    found = read_cores()
    assert found is not None and found.own_s > 0 and found.computed_s >= 0


def environment(taken: float | None) -> Environment:
    return replace(small().environment, cores_taken=taken)


def test_one_line_tells_of_all_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for shares, message in (
        ([None, 0.05], ""),
        ([0.25], "warning: another load took 25% of the cores meanwhile"),
        ([0.25, None, 0.4], "warning: 2 of 3 runs: another load took up to 40% of the cores"),
    ):
        warn_of_load([environment(taken) for taken in shares], "runs")
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == bool(message)


def test_a_run_tells_of_it_and_keeps_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = replace(small(), environment=environment(0.25))
    output = SimpleNamespace(save_tokens=None, printoutput=False, verbose=False)
    prepared = SimpleNamespace(config=SimpleNamespace(output=output))
    assert report.publish(prepared, Outcome([record]), tmp_path / "r.jsonl")  # type: ignore[arg-type]
    assert "another load took 25% of the cores" in capsys.readouterr().err
    assert '"cores_taken": 0.25' in (tmp_path / "r.jsonl").read_text()


def test_a_plan_refuses_a_machine_that_was_busy(tmp_path: Path, command: Command) -> None:
    path = tmp_path / "machine.json"
    words = ("plan", "--machine", path, "--acceptance", "0.8", "--dtype", "float32")
    for taken, code in ((None, 0), (0.05, 0), (0.3, 2)):
        machine_file(cores_taken=taken).save(path)
        done = command(*words)
        assert done.code == code, done.err
    assert f"--machine {path} was probed on a busy host: another load took 30%" in done.err
    assert done.err.count("\n") == 1 and "give --allow_busy_machine" in done.err
    code, _, err = command(*words, "--allow_busy_machine")
    message = f"--allow_busy_machine takes --machine {path}: another load took 30% of the cores"
    assert code == 0 and err.startswith(message) and err.count("\n") == 1
