"""`magicdec sweep --executor`: a study in jobs is the study in one program, on a real Slurm of one
node and through submitit's local executor; what is resumed, retried and refused."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, WITH_SMALL_READS, Command
from test_sweep import GRID, untimed

from magicdec.bench.study.cells import config_key, file_of
from magicdec.bench.study.study import SlurmOptions
from magicdec.cli.sweep import parse
from magicdec.config.setting import declared
from magicdec.records.reading import load_records
from magicdec.records.record import RunRecord

NUM_CELLS = 12
MISSING = [
    name
    for name in ("slurmctld", "slurmd", "munged", "sbatch")
    if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None
]
on_slurm = pytest.mark.skipif(
    bool(MISSING) or os.geteuid() != 0,
    reason=f"a Slurm of one node needs slurm-wlm, munge and root; missing: {MISSING or 'root'}",
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """The environment of a Slurm of one node, which runs as long as its script can read."""
    server = subprocess.Popen(
        [ROOT / "scripts" / "slurm_node.sh", "sh", "-c", "echo $SLURM_CONF; cat"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert server.stdout is not None and server.stdin is not None
    path = server.stdout.readline().strip()
    assert path, "Slurm did not start"
    yield {"SLURM_CONF": path}
    server.stdin.close()
    assert server.wait(timeout=60) == 0
    assert not Path(path).parent.exists(), "nothing is left behind"


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start `magicdec sweep` in the test's folder, with further environment variables. Reading the
    real buffer for the bandwidth would take most of a run's time."""
    processes = []

    def run(*words: str, **env: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "magicdec", "sweep", *words], cwd=tmp_path, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, **WITH_SMALL_READS, "OMP_NUM_THREADS": "1", **env},
        )  # fmt: skip
        processes.append(process)
        return process

    yield run
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()


def write_study(folder: Path, tiny: Path, text: Path, slurm: str = "runs_per_job = 3") -> str:
    grid = GRID.format(model=tiny, text=text).replace("[20, 30]", "[20, 30, 40]")
    grid = grid.replace("B = [1, 2]", "B = 1")
    (folder / "study.toml").write_text(grid.replace("[common]", f"[slurm]\n{slurm}\n[common]"))
    return "study.toml"


@pytest.fixture(scope="module")
def plain(
    tiny_checkpoint: Path, text_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The study in one program: its records without times, by their configs."""
    folder = tmp_path_factory.mktemp("plain")
    command = [sys.executable, "-m", "magicdec", "sweep"]
    words = write_study(folder, tiny_checkpoint, text_file)
    env = {**os.environ, **WITH_SMALL_READS}
    subprocess.run([*command, words], cwd=folder, check=True, capture_output=True, env=env)
    return by_config(load_records(folder / "runs.jsonl"))


def by_config(records: list[RunRecord]) -> dict[str, Any]:
    assert len(records) == NUM_CELLS and {record.status for record in records} == {"ok"}
    return {config_key(record.config): untimed(record) for record in records}


def wait_for_record(folder: Path) -> None:
    """Wait until the first run of a job has left its record."""
    for _ in range(3000):
        if list(folder.glob("runs.jsonl.jobs/*.jsonl")):
            return
        time.sleep(0.02)
    raise AssertionError("no job has written a record")


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code and stderr."""
    _, stderr = process.communicate(timeout=300)
    return process.returncode, stderr


@pytest.mark.wide
def test_local_jobs_are_the_study(
    start: Start, plain: dict[str, Any], tiny_checkpoint: Path, text_file: Path, tmp_path: Path
) -> None:
    """Ctrl-C in the middle leaves whole records; the same command runs the others, once each. What
    a job has measured while nobody watched is merged."""
    study = write_study(tmp_path, tiny_checkpoint, text_file, "runs_per_job = 6")
    sweep = start(study, "--executor", "local")
    wait_for_record(tmp_path)
    sweep.send_signal(signal.SIGINT)
    code, stderr = ended(sweep)
    assert code == 130 and "asking 1 jobs to stop" in stderr and "Traceback" not in stderr
    first = load_records(tmp_path / "runs.jsonl", is_strict=True)
    assert 0 < len(first) < NUM_CELLS
    (tmp_path / "runs.jsonl").unlink()
    code, stderr = ended(start(study, "--executor", "local"))
    assert code == 0, stderr
    assert f"{NUM_CELLS} runs, {len(first)} of them done before" in stderr
    assert by_config(load_records(tmp_path / "runs.jsonl")) == plain
    code, stderr = ended(start(study, "--executor", "local"))
    assert code == 0 and f"{NUM_CELLS} of them done before" in stderr
    assert len(load_records(tmp_path / "runs.jsonl")) == NUM_CELLS


@on_slurm
@pytest.mark.wide
def test_jobs_of_slurm_are_the_study(
    cluster: dict[str, str], start: Start, plain: dict[str, Any], tiny_checkpoint: Path,
    text_file: Path, tmp_path: Path,
) -> None:  # fmt: skip
    """Interrupted by Ctrl-C, then by `scancel` of a job, then to its end."""
    study = write_study(tmp_path, tiny_checkpoint, text_file)
    command, results = (study, "--executor", "slurm"), tmp_path / "runs.jsonl"
    sweep = start(*command, **cluster)
    wait_for_record(tmp_path)
    sweep.send_signal(signal.SIGINT)
    code, stderr = ended(sweep)
    assert code == 130 and "asking 4 jobs to stop" in stderr and "Traceback" not in stderr
    first = load_records(results, is_strict=True)
    assert 0 < len(first) < NUM_CELLS
    sweep = start(*command, **cluster)
    while not (jobs := squeue(cluster, "--states", "RUNNING", "--format", "%i")):
        assert sweep.poll() is None, "jobs start while it runs"
    subprocess.run(["scancel", jobs[0]], check=True, env={**os.environ, **cluster})
    code, stderr = ended(sweep)
    assert code == 1 and f"{len(first)} of them done before" in stderr
    assert f"job {jobs[0]}: CANCELLED" in stderr and "left, which the same command runs" in stderr
    assert len(load_records(results, is_strict=True)) < NUM_CELLS
    code, stderr = ended(start(*command, **cluster))
    assert code == 0, stderr
    assert by_config(load_records(results)) == plain


@on_slurm
@pytest.mark.wide
def test_a_job_that_gives_way_is_submitted_again(
    cluster: dict[str, str], start: Start, plain: dict[str, Any], tiny_checkpoint: Path,
    text_file: Path, tmp_path: Path,
) -> None:  # fmt: skip
    slurm = 'partition = "low"\nruns_per_job = 12\nmore = ["comment=slow"]'
    study = write_study(tmp_path, tiny_checkpoint, text_file, slurm)
    sweep = start(study, "--executor", "slurm", **cluster)
    while not squeue(cluster, "--states", "RUNNING"):
        assert sweep.poll() is None
        time.sleep(0.1)
    other = ["sbatch", "--exclusive", "--output", "/dev/null", "--wrap", "sleep 1"]
    subprocess.run(other, check=True, env={**os.environ, **cluster}, capture_output=True)
    code, stderr = ended(sweep)
    assert code == 0 and "PREEMPTED; it is submitted again" in stderr, stderr
    assert by_config(load_records(tmp_path / "runs.jsonl")) == plain


@on_slurm
@pytest.mark.wide
def test_the_printed_script_runs_with_sbatch(
    cluster: dict[str, str], start: Start, plain: dict[str, Any], tiny_checkpoint: Path,
    text_file: Path, tmp_path: Path,
) -> None:  # fmt: skip
    study = write_study(tmp_path, tiny_checkpoint, text_file, "runs_per_job = 6")
    printed = start(study, "--print_sbatch")
    (tmp_path / "job.sh").write_text(printed.communicate(timeout=300)[0])
    assert not (tmp_path / "runs.jsonl").exists()
    env = {**os.environ, **cluster, "OMP_NUM_THREADS": "1"}
    subprocess.run(["sbatch", "--wait", "job.sh"], check=True, cwd=tmp_path, env=env)
    code, stderr = ended(start(study, "--executor", "slurm", PATH=""))
    assert code == 0 and f"{NUM_CELLS} of them done before" in stderr, "neither is needed to merge"
    assert by_config(load_records(tmp_path / "runs.jsonl")) == plain


@on_slurm
@pytest.mark.wide
def test_what_slurm_refuses_or_does_not_start_is_said(
    cluster: dict[str, str], start: Start, tiny_checkpoint: Path, text_file: Path, tmp_path: Path
) -> None:
    study = write_study(tmp_path, tiny_checkpoint, text_file, 'partition = "nowhere"')
    code, stderr = ended(start(study, "--executor", "slurm", **cluster))
    assert code == 2 and "invalid partition specified: nowhere" in stderr.splitlines()[-1]
    assert len(stderr.splitlines()) == 2, "beside how many runs there are"
    write_study(tmp_path, tiny_checkpoint, text_file, 'partition = "closed"\nruns_per_job = 12')
    sweep = start(study, "--executor", "slurm", **cluster)
    assert sweep.stderr is not None
    line = next(line for line in sweep.stderr if "no job has started" in line)
    assert line.endswith("s; Slurm says: PartitionDown (1 jobs)\n")
    code, stderr = ended(start(study, "--executor", "slurm", **cluster))
    assert code == 2 and "jobs of this study are in Slurm's queue" in stderr
    sweep.send_signal(signal.SIGINT)
    assert ended(sweep)[0] == 130
    assert squeue(cluster, "--format", "%i") == [], "the job is not left in the queue"


@on_slurm
@pytest.mark.wide
def test_ranks_on_two_nodes_are_those_of_one(
    start: Start, tiny_checkpoint: Path, text_file: Path, tmp_path: Path
) -> None:
    """torchrun starts them, through `srun`, and leaves no folder behind."""
    (tmp_path / "tmp").mkdir()
    env = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    study = write_study(tmp_path, tiny_checkpoint, text_file, "nodes = 2\nruns_per_job = 12")
    few = (tmp_path / study).read_text().replace("gamma = [1, 2]\n", "")
    (tmp_path / study).write_text(few)
    code, stderr = ended(start(study, "--nproc", "2", "--out", "one.jsonl"))
    assert code == 0, stderr
    command = [sys.executable, "-m", "magicdec", "sweep", study, "--executor", "slurm"]
    script = [ROOT / "scripts" / "slurm_node.sh", "--nodes", "2", *command]
    done = subprocess.run(script, cwd=tmp_path, text=True, capture_output=True, env=env)
    assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "tmp").iterdir())
    one, two = (load_records(tmp_path / name) for name in ("one.jsonl", "runs.jsonl"))
    assert {r.environment.world_size for r in two} == {2}
    facts = [
        sorted(repr((r.config["kv"], untimed(r)["samples"], r.correctness)) for r in records)
        for records in (one, two)
    ]
    assert len(two) == 6 and facts[0] == facts[1]


def squeue(cluster: dict[str, str], *words: str) -> list[str]:
    command = ["squeue", "--noheader", "--array", *words]
    env = {**os.environ, **cluster}
    return subprocess.run(command, env=env, text=True, capture_output=True).stdout.split()


def test_the_script_of_several_nodes_starts_ranks_on_each(
    command: Command, tiny_checkpoint: Path, text_file: Path, tmp_path: Path
) -> None:
    slurm = 'nodes = 2\ncpus_per_task = 3\nmem_gb = 8\ntime = 5\nmore = ["qos=high", "exclusive"]'
    study = write_study(tmp_path, tiny_checkpoint, text_file, slurm)
    script = command("sweep", tmp_path / study, "--print_sbatch", "--nproc", 2).out
    for line in ("nodes=2", "cpus-per-task=3", "mem=8G", "time=5", "qos=high", "exclusive"):
        assert f"#SBATCH --{line}\n" in script
    assert "#SBATCH --array=0-11%256\n" in script
    assert "exec srun --cpus-per-task=3 bash -c" in script and "--nproc 4 --only ${runs[" in script
    (tmp_path / "job.sh").write_text(script)
    subprocess.run(["bash", "-n", "job.sh"], cwd=tmp_path, check=True)


BAD_TABLES = {
    "[slurm]\npartion = 'a'": "study.toml, line 2: unknown key partion; did you mean partition?",
    "[slurm]\ntime = 0": "study.toml, line 2: --time 0 is too small; it must be at least 1",
    "slurm = 3": "study.toml: slurm must be a table of options of jobs, [slurm]",
}


@pytest.mark.parametrize("text", BAD_TABLES)
def test_a_bad_table_of_slurm_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(f"{text}\n[[grid]]\ndriver = 'run'\n")
    with pytest.raises(ValueError) as refused:
        parse([str(tmp_path / "study.toml")])
    assert str(refused.value).endswith(BAD_TABLES[text])


@pytest.mark.parametrize(
    ("words", "env", "expected"),
    [
        ("--executor slurm", {"PATH": ""}, "this machine has no sbatch"),
        ("--executor cluster", {}, "choose from in_process, local, slurm"),
        ("--executor local", {"BROKEN": "submitit"}, "need submitit: pip install"),
        ("--executor local", {"WORLD_SIZE": "2"}, "--executor local: a launcher"),
        ("--only abc", {}, "--only abc is no run of this study; --dry_run prints the names"),
    ],
)
def test_what_keeps_jobs_from_running_is_one_line(
    words: str, env: dict[str, str], expected: str, command: Command, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """`BROKEN` is a package that cannot be imported."""
    monkeypatch.chdir(tmp_path)  # the default --out is in the current folder
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    if "BROKEN" in env:
        monkeypatch.setitem(sys.modules, env["BROKEN"], None)
    (tmp_path / "study.toml").write_text("[[grid]]\ndriver = 'run'\nB = [1, 2]\n")
    code, _, stderr = command("sweep", tmp_path / "study.toml", *words.split())
    assert code == 2 and expected in stderr.splitlines()[-1]
    assert len(stderr.splitlines()) <= 2


def test_jobs_of_one_machine_have_one_node(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.toml").write_text("[slurm]\nnodes = 2\n[[grid]]\ndriver = 'run'\n")
    code, _, stderr = command("sweep", tmp_path / "study.toml", "--executor", "local")
    assert code == 2 and "[slurm] nodes = 2, but this is one machine" in stderr


def test_the_options_of_slurm_are_documented() -> None:
    page = (ROOT / "docs" / "cluster.md").read_text()
    for name, each in declared(SlurmOptions).items():
        assert f"| `{name}` | {each.setting.help} |" in page
    assert file_of(Path("results/runs.jsonl"), "NAME") == Path("results/runs.jsonl.jobs/NAME.jsonl")
