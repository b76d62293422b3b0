"""Runs a study as jobs, of Slurm or local processes, through submitit.

A job runs `magicdec sweep STUDY --only NAMES`, which writes a file for each run; this program alone
appends to the study's results. It resolves no config, because `auto` depends on where a job runs.
"""

from __future__ import annotations

import hashlib
import io
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any

from magicdec.bench.study.cells import file_of, name_of, results_in, whole_records
from magicdec.bench.study.plan import grouped, is_done
from magicdec.bench.study.progress import describe, say, shown
from magicdec.bench.study.study import Study
from magicdec.config.run_config import RunConfig
from magicdec.distributed.ranks import INTERRUPTED, interrupting_no_child, package_command
from magicdec.names import IN_PROCESS
from magicdec.output.console import make_progress
from magicdec.records.record import append_records

FIRST_WORD_S = 10.0  # until the user is told that nothing starts; then after twice the time
STOP_S = 60.0  # for jobs that were asked to stop
GONE = "ended"  # all that is known of a job which is not in the queue any more
LOST = ("PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "REVOKED")  # ended, but another try may succeed
ENDED = (GONE, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "DEADLINE", *LOST)
# Ranks on several nodes meet on the first one, where `srun` was called. After the dashes, torchrun
# takes no flag for one of its own. It would leave its folder behind. SIGTERM, which all processes
# of a job get, must not end the shell before torchrun has ended.
TORCHRUN = (
    "trap : TERM; folder=$(mktemp -d); export PYTHONUNBUFFERED=1; "
    '"$0" -P -m torch.distributed.run --log-dir "$folder" '
    '--nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$1" --node-rank "$SLURM_NODEID" '
    '--master-addr "$SLURM_LAUNCH_NODE_IPADDR" '
    '--master-port "$((20000 + SLURM_JOB_ID % 20000))" --no-python -- "${@:2}"; '
    'code=$?; rm -r "$folder"; exit "$code"'
)
CellNames = tuple[str, ...]


class LocalJobs:
    """A study as local processes, one at a time for undisturbed times. `words` are those of the
    user's `magicdec sweep`, `nproc` the ranks of a node, `wanted` the number of records that ends a
    run."""

    at_once = 1
    poll_s = 0.5
    before: Sequence[str] = ()  # words before the command of a job

    def __init__(
        self,
        configs: Iterable[RunConfig],
        study: Study,
        words: Sequence[str],
        nproc: int,
        retries_failed: bool,
    ) -> None:
        self.configs = {name_of(config): config for config in configs}
        self.settings = study.settings
        self.slurm = study.slurm
        self.words = words
        self.nproc = nproc
        self.retries_failed = retries_failed
        self.out = Path(study.settings.out)
        self.merged = {hash(record.to_json()) for record in results_in(self.out)}
        self.wanted = dict[str, int]()
        self.num_bad = 0
        self.tries = Counter[CellNames]()
        self.jobs = dict[str, CellNames]()
        self.submitted = dict[str, Any]()
        self.idle_since = time.monotonic()
        self.next_word_s = FIRST_WORD_S

    def conclude(self) -> int:
        """Runs what is left, reports it, and returns the exit code, as `sweep.conclude`. Raises
        ValueError for what the user can correct, after the jobs have stopped."""
        is_interrupted = False
        num_runs = len(self.configs)
        self.merge(self.configs)  # what the jobs of an earlier command have left
        queue = self.groups()
        say(f"{num_runs} runs, {num_runs - len(self.wanted)} of them done before")
        try:
            if queue:
                self.run(queue, self.make_executor())
        except KeyboardInterrupt:
            is_interrupted = True
        left = f"; {len(self.wanted)} left, which the same command runs" if self.wanted else ""
        bad = f", {self.num_bad} of the new ones without success" if self.num_bad else ""
        say(f"{num_runs - len(self.wanted)} of {num_runs} runs done{bad}{left}: {self.out}")
        return INTERRUPTED if is_interrupted else int(bool(self.num_bad or self.wanted))

    def groups(self) -> list[CellNames]:
        """The runs of each job: a random order of groups that share prompts."""
        for name in self.configs:
            records = whole_records(file_of(self.out, name))
            num_done = sum(is_done(record, self.retries_failed) for record in records)
            if num_done < self.settings.repeats:
                num_ended = sum(is_done(record, False) for record in records)
                self.wanted[name] = num_ended + self.settings.repeats - num_done
        with_prompts = {n: (c.model, c.parallel, c.workload) for n, c in self.configs.items()}
        alike = grouped(self.wanted, with_prompts.__getitem__)
        random.Random(self.settings.order_seed).shuffle(alike)
        names = [name for each in alike for name in each]
        size = self.slurm.runs_per_job
        return [tuple(names[i : i + size]) for i in range(0, len(names), size)]

    def run(self, queue: list[CellNames], executor: Any) -> None:
        with make_progress(True).task("runs", len(self.wanted)) as advance:
            try:
                while queue or self.jobs:
                    num_free = self.at_once - len(self.jobs)
                    self.submit(executor, queue[:num_free])
                    del queue[:num_free]
                    time.sleep(self.poll_s)
                    states = self.states()
                    advance(self.merge(name for names in self.jobs.values() for name in names))
                    queue += self.end(states)
                    self.tell_waiting(states)
            finally:
                self.stop()

    def merge(self, names: Iterable[str]) -> int:
        """Appends the new records of these runs to the results. Returns the number of runs that
        ended."""
        num_left = len(self.wanted)
        folder = file_of(self.out, "").parent
        for name in {path.stem for path in folder.glob("*.jsonl")}.intersection(names):
            records = whole_records(file_of(self.out, name))
            for record in records:
                if hash(record.to_json()) not in self.merged:
                    append_records("--out", self.out, [record])
                    self.merged.add(hash(record.to_json()))
                    self.num_bad += not record.passed
                    say(f"{describe(record.config)}: {shown(record)}")
            if sum(is_done(record, False) for record in records) >= self.wanted.get(name, 1):
                self.wanted.pop(name, None)
        return num_left - len(self.wanted)

    def end(self, states: dict[str, tuple[str, str]]) -> list[CellNames]:
        again = []
        for job, names in list(self.jobs.items()):
            state, _ = states[job]
            if state not in ENDED:
                continue
            del self.jobs[job]
            num_left = sum(n in self.wanted for n in names)
            path = self.submitted[job].paths.stderr
            if num_left and state in LOST and self.tries[names] < self.slurm.retries:
                self.tries[names] += 1
                say(f"job {job}: {state}; it is submitted again")
                again.append(names)
            elif num_left:
                lines = path.read_text(errors="replace").split("\n") if path.is_file() else []
                last = next((line for line in reversed(lines) if line.strip()), "it wrote nothing")
                say(f"job {job}: {state}, {num_left} runs without a record: {last} ({path})")
        return again

    def tell_waiting(self, states: dict[str, tuple[str, str]]) -> None:
        waiting = Counter(why for state, why in states.values() if state in ("PENDING", "UNKNOWN"))
        now = time.monotonic()
        if not waiting or any(state == "RUNNING" for state, _ in states.values()):
            self.idle_since = now
            self.next_word_s = FIRST_WORD_S
        elif now - self.idle_since >= self.next_word_s:
            self.next_word_s *= 2
            reasons = ", ".join(f"{why} ({count} jobs)" for why, count in waiting.items())
            say(f"no job has started for {now - self.idle_since:.0f} s; Slurm says: {reasons}")

    def stop(self) -> None:
        names = [n for each in self.jobs.values() for n in each]
        give_up = time.monotonic() + STOP_S
        if self.jobs:
            say(f"asking {len(self.jobs)} jobs to stop")
            self.cancel()
        while self.jobs and time.monotonic() < give_up:
            time.sleep(0.5)
            states = self.states()
            self.jobs = {j: each for j, each in self.jobs.items() if states[j][0] not in ENDED}
        self.merge(names)

    def command(self, names: Sequence[str]) -> list[str]:
        """The command line of a job, equal on all of its nodes. Names come last."""
        words = [*package_command(), "sweep", *self.words, "--executor", IN_PROCESS]
        if self.slurm.nodes == 1:
            return [*words, "--only", *names]
        words += ["--nproc", str(self.nproc * self.slurm.nodes), "--only", *names]
        return ["bash", "-c", TORCHRUN, sys.executable, str(self.nproc), *words]

    def script(self, groups: Sequence[CellNames]) -> str:
        tasks = {"array": f"0-{len(groups) - 1}%{self.slurm.jobs_at_once}", "requeue": True}
        options = self.slurm.options | tasks | self.slurm.more_options
        lines = ["#!/bin/bash"]
        for name, value in ({"job_name": self.label, "open_mode": "append"} | options).items():
            end = "" if value is True else f"={value}"
            lines.append(f"#SBATCH --{name.replace('_', '-')}{end}")
        command = shlex.join(["srun", *self.slurm.srun_options, *self.command([])])
        lines.append(f"# When they are done: cat {shlex.quote(str(self.out))}.jobs/*.jsonl")
        lines += ["runs=(", *(f"  '{' '.join(names)}'" for names in groups), ")"]
        return "\n".join([*lines, f"exec {command} ${{runs[$SLURM_ARRAY_TASK_ID]}}"])

    @property
    def label(self) -> str:
        return f"{self.out.stem}-{hashlib.sha256(bytes(self.out.absolute())).hexdigest()[:8]}"

    def make_executor(self) -> Any:
        """submitit's executor. Raises ValueError if jobs cannot run here."""
        if self.slurm.nodes > 1:
            raise ValueError(
                f"--executor local: [slurm] nodes = {self.slurm.nodes}, but this is "
                "one machine; choose 1, or --executor slurm"
            )
        executor = import_submitit().LocalExecutor(Path(f"{self.out}.jobs", "logs"))
        executor.update_parameters(timeout_min=self.slurm.time)
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES")  # which submitit hides from a job
        given = [] if gpus is None else [f"CUDA_VISIBLE_DEVICES={gpus}"]
        self.before = ("env", "-u", "CUDA_VISIBLE_DEVICES", *given)
        return executor

    def submit(self, executor: Any, groups: Sequence[CellNames]) -> None:
        # submitit pickles what a job calls into the folder of this study, and the job unpickles it:
        # the name `os.execvp` and words. Whoever can write there can change the study anyway. The
        # process becomes the command, so that signals reach it, and no result is pickled: what a
        # job has done is known from its records alone.
        commands = [[*self.before, *self.command(names)] for names in groups]
        calls = [partial(os.execvp, words[0], words) for words in commands]
        with interrupting_no_child():
            jobs = executor.submit_array(calls) if calls else []
            self.submitted |= {job.job_id: job for job in jobs}
            self.jobs |= {job.job_id: names for job, names in zip(jobs, groups, strict=True)}

    def states(self) -> dict[str, tuple[str, str]]:
        """Each job's state in Slurm's words, and what it waits for."""
        return {job: (GONE if self.submitted[job].done() else "RUNNING", "") for job in self.jobs}

    def cancel(self) -> None:
        for job in self.jobs:
            if not self.submitted[job].done():  # whose id is that of a process which passes it on
                os.kill(int(job), signal.SIGTERM)


class SlurmJobs(LocalJobs):
    """A study in array jobs of Slurm, with states from `squeue`, which needs no accounting."""

    # how many run at a time is left to Slurm
    at_once = 10**9
    poll_s = 3.0

    def make_executor(self) -> Any:
        if shutil.which("sbatch") is None:
            raise ValueError(
                "--executor slurm: this machine has no sbatch; start it where Slurm's "
                "commands are, or choose --executor local"
            )
        submitit = import_submitit()
        queued = squeue("--me", "--name", self.label, "--format", "%A").stdout.split()
        if queued:
            raise ValueError(
                f"--executor slurm: jobs of this study are in Slurm's queue; wait for "
                f"them, or end them: scancel {' '.join(set(queued))}"
            )
        executor = submitit.SlurmExecutor(Path(f"{self.out}.jobs", "logs"))
        executor.update_parameters(
            job_name=self.label,
            **self.slurm.options,
            additional_parameters=self.slurm.more_options,
            srun_args=self.slurm.srun_options,
            array_parallelism=self.slurm.jobs_at_once,
            signal_delay_s=1,  # a job does nothing more when it hears of its end
        )
        return executor

    def submit(self, executor: Any, groups: Sequence[CellNames]) -> None:
        from submitit.core.utils import FailedJobError

        try:
            with redirect_stderr(io.StringIO()):  # on which submitit says the same
                super().submit(executor, groups)
        except FailedJobError as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"--executor slurm: Slurm refuses the jobs: {reason}") from None

    def states(self) -> dict[str, tuple[str, str]]:
        arrays = ",".join(sorted({job.partition("_")[0] for job in self.jobs}))
        answer = squeue("--array", "--states", "all", "--jobs", arrays, "--format", "%i|%T|%r")
        is_known = answer.returncode == 0 or "Invalid job id" in answer.stderr
        other = (GONE, "") if is_known else ("UNKNOWN", answer.stderr.strip())
        lines = (line.split("|", 2) for line in answer.stdout.splitlines())
        known = {job: (state, reason) for job, state, reason in lines}
        return {job: known.get(job, other) for job in self.jobs}

    def cancel(self) -> None:
        subprocess.run(["scancel", *self.jobs], capture_output=True, check=False)


def squeue(*words: str) -> subprocess.CompletedProcess[str]:
    command = ["squeue", "--noheader", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def import_submitit() -> Any:
    try:
        import submitit
    except ImportError:
        raise ValueError(
            "--executor slurm and local need submitit: pip install 'magicdec[slurm]'; or print a "
            "script with --print_sbatch"
        ) from None
    return submitit
