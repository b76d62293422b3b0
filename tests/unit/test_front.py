"""The front door: `magicdec run` and what stands around it (config files, several ranks, help,
models named as on the hub)."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from checkpoint_files import CONFIG
from conftest import HANG, ROOT, Command
from hub_server import Hub

from magicdec.cli import commands, flags
from magicdec.cli.commands import KNOWN
from magicdec.cli.drivers import RUN
from magicdec.cli.report import announce
from magicdec.config.machine import Machine
from magicdec.config.resolve import resolve
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import DecodingSection, KVSection, ModelSection, OutputSection
from magicdec.distributed import ranks
from magicdec.distributed.groups import Launch
from magicdec.distributed.watching import processes
from magicdec.model.families.hf_config import to_hf_config
from magicdec.setup.prepare import Prepared

ALONE = Launch(0, 1, 0, 1)


def read(*words: object) -> RunConfig:
    return RUN.read([str(word) for word in words])


def magicdec(*words: object, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "magicdec", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=HANG
    )


def test_a_draft_is_a_name() -> None:
    for words, strategy, drafter in (
        ((), "speculative", "self"),
        (("--draft", "ngram"), "speculative", "ngram"),
        (("--draft=none",), "autoregressive", None),
        (("--draft", "none", "--draft", "self"), "speculative", "self"),
    ):
        config = read(*words)
        assert (config.decoding.strategy, config.decoding.drafter) == (strategy, drafter)
        assert config.draft is None
        config.check(1)
    config = read("--model", "a", "--draft", "model:b", "--draft_ranks", 0, "--gamma", 2)
    assert config.draft is not None and (config.model.model, config.draft.model) == ("a", "b")
    assert config.decoding.drafter == "model" and config.draft.rank_group == (0,)
    config.check(1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--draft eagle",
            "--draft eagle is not known; choose from self, model:NAME, eagle:DIR, mtp, ngram,",
        ),
        ("--draft ngram+ngram", "--draft ngram+ngram names one source twice; give ngram"),
        (
            "--draft self+ngram",
            "--draft self+ngram is not known; choose from self, model:NAME, eagle:DIR, ",
        ),
        ("--draft ngram+model:", "--draft ngram+model: is not known; choose from self"),
        ("--draft_ranks 0", "--draft_ranks does nothing here: no other model drafts"),
        ("--draft none --gamma 3", "--gamma does nothing here: autoregressive"),
        ("--config nowhere.toml", "--config nowhere.toml: No such file"),
    ],
)
def test_what_a_run_cannot_be(words: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read(*words.split())


def test_flags_on_the_command_line_win_over_those_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'draft = "ngram"\nB = 3\ngamma = "auto"\nignore_eos = true\nprintoutput = false\n'
        "temperature = 0.5\nrank_group = [0]\nbudget = -1\n"
    )
    config = read("--B", 7, "--config", file, "--budget", 99, "--draft", "self")
    assert config.workload.batch_size == 7 and config.kv.budget == 99
    assert config.decoding.drafter == "self" and config.decoding.gamma == "auto"
    assert config.decoding.ignore_eos and not config.output.printoutput
    assert config.sampling.temperature == 0.5 and config.parallel.rank_group == (0,)
    capsys.readouterr()
    assert read("--config", file).decoding.drafter == "ngram"
    assert "--budget does nothing here: drafts of ngram" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--budget does nothing here: drafts of ngram"):
        read("--config", file, "--budget", 9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gama = 3", "'gama' is not the name of a flag; did you mean gamma?"),
        ("gamma = [1, 2]", "--gamma 1 2 is not known; choose a whole number or auto"),
        ("rank_group = []", "--rank_group: give at least one value"),
        ("ignore_eos = 1", "ignore_eos is a switch; give true or false"),
        ("gamma = ", "is not a TOML file"),
        ("config = 'a.toml'", "'config' is not the name of a flag"),
    ],
)
def test_a_bad_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        read("--config", file)
    assert "\n" not in str(refused.value) and str(refused.value).startswith(f"--config {file}")


def test_ranks_are_started_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert not ranks.is_other_start(None, ALONE) and not ranks.is_other_start(1, ALONE)
    assert ranks.is_other_start(2, ALONE) and ranks.find_world_size(2, ALONE) == 2
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not ranks.is_other_start(2, Launch(1, 2, 1, 2))
    with pytest.raises(ValueError, match="--nproc 3: 2 ranks were started already"):
        ranks.is_other_start(3, Launch(1, 2, 1, 2))


def test_an_error_is_left_to_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(processes.ERROR_FILE, raising=False)
    assert not processes.report_error("a line")
    monkeypatch.setenv(processes.ERROR_FILE, str(tmp_path / "error.json"))
    assert processes.report_error("a line")
    written = json.loads((tmp_path / "error.json").read_text())["message"]
    assert written["message"] == "a line" and int(written["extraInfo"]["timestamp"]) > 0
    monkeypatch.setenv(processes.ERROR_FILE, str(tmp_path / "none" / "error.json"))
    assert not processes.report_error("a line")


@pytest.mark.parametrize("is_early", [True, False])
def test_a_rank_ends_with_its_launcher(is_early: bool) -> None:
    """Also if the launcher is killed, before or after the rank has asked for that."""
    rank = """
import os, sys, time
from magicdec.distributed.ranks import end_with_launcher
if sys.argv[1] == "early":
    print("started", os.getpid(), flush=True)
    while os.getppid() == int(os.environ["MAGICDEC_LAUNCHER"]):
        time.sleep(0.01)
end_with_launcher()
print("running", os.getpid(), flush=True)
time.sleep(600)
"""
    launcher = """
import os, subprocess, sys, time
env = {**os.environ, "MAGICDEC_LAUNCHER": str(os.getpid()), "WORLD_SIZE": "2"}
subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], env=env, start_new_session=True)
time.sleep(600)
"""
    words = [sys.executable, "-c", launcher, rank, "early" if is_early else "late"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        state, pid = process.stdout.readline().split()
        assert state == ("started" if is_early else "running")
        process.kill()
        hung = threading.Timer(HANG, os.kill, (int(pid), signal.SIGKILL))
        hung.start()
        assert process.stdout.read() == "", "its output is closed when the rank has ended"
        assert hung.is_alive(), "the rank ran on"
        hung.cancel()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("catches", [True, False])
def test_a_command_that_a_signal_ends_has_its_exit_code(
    number: signal.Signals, catches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can end in order, and may have caught Ctrl-C for that."""
    ended: list[str] = []

    def run() -> None:
        try:
            signal.raise_signal(number)
            time.sleep(HANG)
        except KeyboardInterrupt:
            ended.append("in order")
            if catches:
                sys.exit(ranks.INTERRUPTED)
            raise

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(commands, "function_of", lambda name: run)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    try:
        with pytest.raises(SystemExit) as exited:
            commands.start("run")
    finally:
        signal.signal(signal.SIGINT, before)
    assert exited.value.code == 128 + number and ended == ["in order"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


SMALL = ("--B", 1, "--prefix_len", 64, "--gen_len", 4, "--num_batches", 1, "--threads", 1)


def test_a_run_on_two_ranks_is_one_command(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    done = magicdec("run", *SMALL, "--nproc", 2, cwd=tmp_path, TMPDIR=str(temporary))
    assert done.returncode == 0, done.stderr
    assert list(temporary.iterdir()) == []
    lines = (tmp_path / "results" / "runs.jsonl").read_text().splitlines()
    plain, record = map(json.loads, lines)
    assert (plain["name"], record["name"]) == ("static", "static+draft")
    assert record["environment"]["world_size"] == 2 and record["status"] == "verified"
    assert record["environment"]["argv"][:2] == ["magicdec run", "--B"]
    notes = [line for line in done.stderr.splitlines() if "another load" not in line]
    budget = "--budget 257 is not smaller than the prompts of 64 tokens, so that drafts read all"
    assert notes == [f"{budget} of them", "2 records appended to results/runs.jsonl"]
    model, memory, verdict, *_ = done.stdout.splitlines()
    assert model == f"model  demo, {record['config']['model']['dtype']}, ranks 2 x threads 1, cpu"
    assert memory.startswith("memory ") and verdict.startswith("verified: ")


def test_verbose_says_every_setting_before_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    for is_verbose in (False, True):
        config = resolve(RunConfig(output=OutputSection(verbose=is_verbose)), Machine(2))
        announce(cast(Prepared, SimpleNamespace(config=config, launch=ALONE, memory="1 GB")))
        lines = capsys.readouterr().out.splitlines()
        assert lines[-1] == "memory 1 GB" and (len(lines) > 2) == is_verbose
        assert any("prefill_chunk=512" in line for line in lines) == is_verbose


def test_stored_weights_are_said_beside_the_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    """A GGUF file of int4 weights is no float32 model, though it computes in float32."""
    config = resolve(RunConfig(model=ModelSection(dtype="float32")), Machine(2))
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, target_dtype="stored")
    )
    announce(cast(Prepared, SimpleNamespace(config=config, launch=ALONE, memory="1 GB")))
    assert capsys.readouterr().out.startswith("model  demo, float32, stored weights, ranks 1 x ")


@pytest.mark.wide
def test_what_a_rank_refuses_is_the_only_line(tmp_path: Path) -> None:
    done = magicdec("run", *SMALL, "--nproc", 2, "--dataset", "nope.txt", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("magicdec run: --dataset nope.txt: cannot be read")
    assert done.stderr.count("\n") == 1


def test_the_help_is_printed_on_one_rank(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    for rank, words, shown in (("0", "--help", 1), ("1", "--help", 0), ("1", "--help_all", 0)):
        monkeypatch.setenv("RANK", rank)
        code, out, _ = command("run", words)
        assert code == 0 and out.count("usage:") == shown


def test_the_command_names_itself_and_its_commands(command: Command) -> None:
    for words, code, message in (
        (["--version"], 0, "magicdec 0."),
        (["--help"], 0, "usage: magicdec COMMAND"),
        (["rum"], 2, "unknown command 'rum'; did you mean run?"),
    ):
        ended = command(*words)
        assert ended.code == code and message in ended.out + ended.err
        assert max(map(len, (ended.out + ended.err).splitlines())) <= 80


def test_the_help_has_every_command_once(command: Command) -> None:
    """In groups, and the help of a command has its own default alone."""
    lines = command("--help").out.splitlines()
    named = [line[2:16].strip() for line in lines if line.startswith("  ")]
    assert sorted(named) == sorted(KNOWN)
    assert next(line for line in lines if line.endswith(":")) == "Start here:"
    own = command("gate", "save", "--help").out
    assert "[8]" in own and " in latency" not in own


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run --batch_size 4", "unknown argument --batch_size; did you mean --B?"),
        ("latency --batch-size=4", "unknown argument --batch-size=4; did you mean --B?"),
        ("run --max_new_tokens 9", "unknown argument --max_new_tokens; did you mean --gen_len?"),
        ("run --num_speculative_tokens 2", "did you mean --gamma?"),
    ],
)
def test_the_name_that_other_programs_have_for_a_flag_leads_to_it(
    words: str, message: str, command: Command
) -> None:
    ended = command(*words.split())
    assert ended.code == 2 and message in ended.err and ended.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run --model hff", "--model hff: no such directory or file of weights; did you mean hf?"),
        ("run --model ./hff", "--model ./hff: no such directory or file of weights; did you mea"),
        (
            "run --model models/lama",
            "no such directory; did you mean models/llama? (`magicdec m",
        ),
        ("run --model model/llama", "no such directory; did you mean models/llama?"),
        ("run --model x/hf", "no such directory; did you mean hf?"),
        (
            "run --draft model:models/y",
            "no such directory (`magicdec model get models/y` looks",
        ),
        ("plan --conditional_acceptance 0.5 --model hff", "did you mean hf?"),
        ("table run.jsonl", "run.jsonl: no such file; did you mean runs.jsonl?"),
        ("sweep models", "models is a directory; name a study file"),
    ],
)
def test_a_path_that_does_not_exist_is_refused_at_once(
    words: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
) -> None:
    """No hub is asked for what looks like a path."""
    for folder in ("hf", "models/llama"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "runs.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    asked = "magicdec.model.checkpoint.hub.find_repository"
    monkeypatch.setattr(asked, lambda *_: pytest.fail("the hub was asked"))
    ended = command(*words.split())
    assert ended.code == 2 and message in ended.err and ended.err.count("\n") == 1


HEADS = "ranks cannot share 4 attention heads"
STAGES = "stages cannot share 6 layers"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run", f"--nproc 100: 100 {HEADS}; use at most 4 ranks"),
        ("run --model nowhere", "--model 'nowhere' is not known; choose from"),
        ("latency", f"--nproc 100: 100 {HEADS}"),
        ("recurrent", f"--nproc 100: 100 {STAGES}; use fewer"),
        ("run --nproc 4", None),
        ("recurrent --layer_split 3,2", "--layer_split 3,2 adds up to 5 layers"),
        ("pipeline --layer_split 3,3", f"--nproc 100: 50 {HEADS}"),
        ("pipeline --layer_split 2,2,2", "2,2,2 names 3 ranks, but 100 were started; start 3, or"),
    ],
)
def test_ranks_that_a_model_cannot_have_are_not_started(
    words: str,
    message: str | None,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(flags, "start_ranks", lambda nproc, words: 77)
    name, *more = words.split()
    code, _, err = command(name, "--nproc", 100, *more)
    assert code == (77 if message is None else 2) and (message or "") in err


@pytest.mark.parametrize("name", sorted(commands.KNOWN))
def test_a_command_refuses_an_unknown_flag_in_one_line(name: str, command: Command) -> None:
    code, out, err = command(*name.split(), "--no_such_flag")
    assert code == 2 and out == ""
    assert err.startswith(f"magicdec {name}: ") and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("model", "unknown command 'model'; choose from model get, model check, model convert"),
        ("model get", "the following arguments are required: ID"),
        ("model convert", "give either DIR or --verify"),
    ],
)
def test_bad_commands_are_refused_in_one_line(words: str, message: str, command: Command) -> None:
    code, out, err = command(*words.split())
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1


@pytest.fixture
def hub() -> Iterator[Hub]:
    files = {
        "config.json": json.dumps(to_hf_config(CONFIG)).encode(),
        "tokenizer.json": b"{}",
        "model.safetensors": b"not read here",
    }
    hub = Hub(files)
    hub.start()
    yield hub
    hub.stop()


@pytest.mark.wide
def test_a_model_of_the_hub_is_fetched_once(hub: Hub, tmp_path: Path) -> None:
    code = (
        "from magicdec.model.checkpoint.hub import find_local\n"
        "print(find_local('--model', 'org/model'), find_local('--model', 'demo'))"
    )
    env = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    for message in ("fetching org/model into checkpoints/org/model", ""):
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=HANG,
            check=True,
        )
        assert done.stdout.splitlines()[-1] == "checkpoints/org/model demo"
        assert (message in done.stderr) if message else (done.stderr == "")
    assert (tmp_path / "checkpoints/org/model/model.safetensors").read_bytes() == b"not read here"


@pytest.mark.wide
def test_a_model_is_got(hub: Hub, tmp_path: Path) -> None:
    env = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home")}
    done = magicdec("model", "get", "org/model", cwd=tmp_path, **env)
    assert done.returncode == 0 and "checkpoints/org/model runs them" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("drafter", "kv", "gamma", "messages"),
    [
        ("self", KVSection(budget=100), 4, ["--budget 100 is not smaller than the prompts of 100"]),
        ("self", KVSection(budget=99), 8, []),
        ("self", KVSection(budget=99), 9, ["--gamma 9 is larger than the output of 8 tokens"]),
        ("self", KVSection("full"), 4, []),
        ("self", KVSection(budget=99), "auto", []),
        ("ngram", KVSection(budget=257), 31, []),  # reads no cache, and looks up what is there
        ("ngram+self", KVSection(budget=257), 31, ["--budget 257 is not smaller"]),
    ],
)
def test_limits_that_limit_nothing_are_said(
    drafter: str,
    kv: KVSection,
    gamma: int | str,
    messages: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = resolve(
        RunConfig(kv=kv, decoding=DecodingSection("speculative", drafter, gamma)), Machine(2)
    )
    flags.announce_limits(config, 100, 8)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(messages)
    assert all(line.startswith(start) for line, start in zip(lines, messages, strict=True))


def test_the_first_rank_alone_announces_what_was_prepared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every rank measures."""
    calls = list[str]()
    command = SimpleNamespace(
        config=RunConfig(),
        kept="nothing",
        check_ranks=lambda config, nproc: None,
        preparation=lambda: lambda config, launch: f"rank {launch.rank}",
        announce=lambda prepared: calls.append(f"{prepared} announces"),
        conclude=lambda prepared: calls.append(f"{prepared} measures") or 3,
    )
    monkeypatch.setattr(flags, "run_on_ranks", lambda *given: None)
    monkeypatch.setattr(flags, "watch_ranks", lambda launch: None)
    for rank in range(2):
        launch = Launch(rank, 2, rank, 2)
        assert flags.measure_on_ranks(cast(flags.RankCommand, command), [], launch) == 3
    assert calls == ["rank 0 announces", "rank 0 measures", "rank 1 measures"]
