"""`magicdec advise`, `doctor` and `config`: what they say."""

import dataclasses
import json
import os
import re
import shlex
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from acceptance_records import acceptance_record, write_records
from conftest import ROOT, Command

from magicdec.attention import native
from magicdec.bench import model_check
from magicdec.bench.model_check import ModelCheck
from magicdec.bench.runner import Runner
from magicdec.bench.study.drafts import BaselineTimes
from magicdec.cli import advice, config_of, doctor
from magicdec.cli import advise as module
from magicdec.cli.advice import Finding, MeasuredDraft, describe_advice
from magicdec.cli.advise import AdviceSection, StopRequests
from magicdec.cli.drivers import RUN
from magicdec.config.machine import Machine
from magicdec.config.resolve import resolve
from magicdec.distributed.groups import Launch
from magicdec.hardware.ceiling_file import Link, MachineFile, load_machine
from magicdec.model.checkpoint import checked
from magicdec.names import DTYPES, KV_POLICIES
from magicdec.records.intervals import ratio_interval
from magicdec.records.pass_record import PassRecord
from magicdec.records.reading import load_passes


def read(*words: str) -> AdviceSection:
    return module.build_parser().read(words)[AdviceSection]


PLACE = "B 4 and 2048 tokens of context"
BASELINES = Path(ROOT, "magicdec", "bench", "gate", "baselines", "acceptance.jsonl")


def machine_file(link: Link | None = None, **description: object) -> MachineFile:
    def rates_of(value: float) -> dict[str, float]:
        return dict.fromkeys(DTYPES, value)

    rates = rates_of(1e11)
    none = rates_of(0.0)
    overhead = rates_of(1e-5)
    kv_rates = rates_of(1e10)
    return MachineFile(description, 1e10, rates, overhead, kv_rates, link, None, rates, none)


@pytest.mark.parametrize(
    ("best", "messages"),
    [
        (
            MeasuredDraft("--draft self", 1.35, (1.28, 1.41), 1.3),
            (
                "Speculation pays here",
                "net speedup of 1.35x [1.28, 1.41] (95 % interval) over",
                "; sure, because the plan expected 1.30x here too.",
            ),
        ),
        (
            MeasuredDraft("--draft ngram", 1.35, (1.28, 1.41)),
            ("Speculation pays here", "`--draft ngram`", "sure of this place, which says nothing"),
        ),
        (
            MeasuredDraft("--draft self", 0.8, (0.7, 0.9), 1.4),
            ("does not pay here", "sure of this place but not of other contexts"),
        ),
        (
            MeasuredDraft("--draft self", 1.1, (0.9, 1.3), 1.1),
            ("Speculation may or may not pay here", "unsure, because the interval"),
        ),
        (MeasuredDraft("--draft self", 1.1, None, 1.1), ("unsure, because so few batches",)),
    ],
)
def test_the_advice_is_one_sentence(best: MeasuredDraft, messages: tuple[str, ...]) -> None:
    sentence = describe_advice(Finding(best), PLACE, "the plan expects; ")
    assert all(words in sentence for words in messages), sentence
    assert PLACE in sentence and "\n" not in sentence and sentence.endswith(".")
    assert "; the plan expects; " in sentence
    busy = describe_advice(Finding(best, cores_taken=0.48), PLACE, "")
    assert "; unsure, because another load took up to 48% of the cores meanwhile" in busy


def with_ratios(record: PassRecord, *ratios: float) -> PassRecord:
    """The run with these net speedups of its batches."""
    assert record.metrics is not None
    ends = ratio_interval(ratios)
    metrics = dataclasses.replace(
        record.metrics,
        net_speedup=float(np.median(ratios)),
        net_speedup_per_group=[*ratios],
        net_speedup_interval=ends,
        speedup=2 * float(np.median(ratios)),
        speedup_per_group=[2 * ratio for ratio in ratios],
    )
    quiet = dataclasses.replace(record.environment, cores_taken=None)
    return dataclasses.replace(record, metrics=metrics, environment=quiet)


def gate_runs() -> list[PassRecord]:
    """The runs of the gate, with net speedups that rise from 0.7."""
    found = [record for record in load_passes(BASELINES) if record.shares_prefill]
    spread = (0.99, 1.0, 1.01, 1.0, 1.0)
    return [
        with_ratios(record, *((0.7 + 0.05 * place) * factor for factor in spread))
        for place, record in enumerate(found)
    ]


STEADY = (1.02, 1.03, 1.04, 1.03, 1.03)
NOISY = (0.8, 1.11, 1.6, 1.2, 0.9)
FASTER = (1.12, 1.13, 1.14, 1.13, 1.13)  # in each batch by a tenth
SLOW = (0.5, 0.51, 0.52, 0.5, 0.51)


@pytest.fixture(scope="module")
def any_run() -> PassRecord:
    return next(r for r in gate_runs() if r.metrics and advice.net_speedup(r) > 0)


@pytest.mark.parametrize(
    ("drafts", "advised", "equals"),
    [
        ({"a": STEADY, "b": NOISY, "c": SLOW}, "a", ["b"]),  # 1.03x over 1.11x, and it is said
        ({"a": STEADY, "b": FASTER, "c": SLOW}, "b", []),
        ({"a": STEADY[:2], "b": NOISY[:2]}, "a", []),  # too few batches to tell
    ],
)
def test_equal_drafts_are_called_equal(
    any_run: PassRecord, drafts: dict[str, tuple[float, ...]], advised: str, equals: list[str]
) -> None:
    records = {f"--draft {name}": with_ratios(any_run, *ratios) for name, ratios in drafts.items()}
    sentence, _, command = advice.find_advice(read(), records, None).split("\n")
    assert f"`--draft {advised}` has a net speedup of" in sentence
    assert command.split()[2:4] == ["--draft", advised]
    named = [name for name in drafts if f"`--draft {name}`" in sentence]
    assert named == sorted([advised, *equals])
    message = "its interval begins highest of those that 5 batches cannot tell apart from it"
    assert (message in sentence) == bool(equals)


def test_a_draft_that_ended_after_the_first_batch_is_not_advised(any_run: PassRecord) -> None:
    """However fast that batch was: the others had the same one. It counts as tried."""
    records = {
        "--draft ended": with_ratios(any_run, 1.4),
        "--draft last": with_ratios(any_run, *STEADY[:4]),
        "--draft best": with_ratios(any_run, *FASTER),
    }
    sentence, _, command = advice.find_advice(read(), records, None).split("\n")
    assert "`--draft best` has a net speedup of" in sentence and "`--draft ended`" not in sentence
    assert "for all 3 drafts together" in sentence and command.split()[3] == "best"
    ended = advice.describe_runs(records)[2]
    assert ended.endswith("net 1.40x"), "behind the others"
    both = {name: records[name] for name in ("--draft ended", "--draft last")}
    best, others = advice.find_best(advice.measured_drafts(both))
    assert best.draft == "--draft last" and others == []


def test_the_lines_have_the_intervals_of_the_sentence(any_run: PassRecord) -> None:
    """The best one comes first. All intervals hold together, and are wider than of one alone."""
    records = {
        "--draft b": with_ratios(any_run, *NOISY),
        "--draft a": with_ratios(any_run, *STEADY),
    }
    first, second, note = advice.describe_runs(records)
    low, high = ratio_interval(STEADY, 0.975)
    net = f"1.03x [{low:.2f}, {high:.2f}]"
    assert first.endswith(f"speedup 2.06x [{2 * low:.2f}, {2 * high:.2f}], net {net}")
    assert net in advice.find_advice(read(), records, None) and "net 1.11x [" in second
    assert note.strip() == "in brackets: 95 % intervals of all 2 drafts together"
    alone = ratio_interval(STEADY)
    assert alone is not None and low < alone[0]
    few = {name: with_ratios(any_run, 1.5, 1.6) for name in records}
    assert [line for line in advice.describe_runs(few) if "[" in line or "brackets" in line] == []


def test_advice_follows_from_records_and_the_plan(tmp_path: Path) -> None:
    """From recorded runs and a machine file, without running anything."""
    machine_file().save(tmp_path / "machine.json")
    runs = {
        (r.config["kv"]["policy"], r.config["kv"]["budget"]): r
        for r in gate_runs()
        if r.config["decoding"]["drafter"] == "self"
        and r.config["kv"]["policy"] != "full"
        and r.config["decoding"]["gamma"] == 4
    }
    machine = ["--machine", str(tmp_path / "machine.json")]
    args = read(*machine, "--prefix_len", "4096", "--B", "4")

    def advice_of(policies: set[str]) -> tuple[float, str, str]:
        """The best net speedup of the runs with these policies, the sentence and the command."""
        records = {
            f"--draft self --kv_policy {p} --budget {b}": r
            for (p, b), r in runs.items()
            if p in policies
        }
        plan = advice.make_plan(args, records, BASELINES)
        sentence, blank, line = advice.find_advice(args, records, plan).split("\n")
        assert sentence.endswith(".") and blank == ""
        best, _ = advice.find_best(advice.measured_drafts(records))
        return best.speedup, sentence, line

    for policy in ("streaming_llm", "snapkv"):
        speedup, sentence, line = advice_of({policy})
        assert f"net speedup of {speedup:.2f}x" in sentence
        expected = r"pay from \d+ tokens on, and \d[.]\d\dx at \d+ with "
        expected += rf"`--kv_policy {policy} --budget \d+ --gamma \d`"
        assert re.search(f"; the plan expects self-speculation to {expected}; ", sentence)
        config = RUN.read(command_words(line))
        assert (config.kv.policy, config.workload.prefix_len) == (policy, 4096)
    best = max(runs.values(), key=advice.net_speedup)  # of so few batches, which have no interval
    _, sentence, line = advice_of({policy for policy, _ in runs})
    config = RUN.read(command_words(line))
    assert (config.kv.policy, config.kv.budget) == tuple(
        best.config["kv"][name] for name in ("policy", "budget")
    )
    assert f"`--kv_policy {config.kv.policy} --budget" in sentence


def command_words(line: str) -> list[str]:
    """What follows `magicdec run` in a line that can be copied into a shell."""
    assert line.startswith("    magicdec run ")
    return shlex.split(line)[2:]


def test_where_drafts_do_not_pay_the_command_has_none(tmp_path: Path) -> None:
    slow = min(gate_runs(), key=advice.net_speedup)
    args = read("--model", str(tmp_path / "a model"), "--nproc", "2", "--dataset", "a b.txt")
    text = advice.find_advice(args, {"--draft model:demo-draft --gamma 4": slow}, None)
    config = RUN.read(command_words(text.splitlines()[-1]))
    assert text.startswith("Speculation does not pay here") and config.decoding.drafter is None
    assert config.model.model == str(tmp_path / "a model") and config.parallel.nproc == 2
    assert config.workload.dataset == "a b.txt"


def test_every_source_is_tried() -> None:
    """Budgets belong to what drafts with a part of a cache; a policy that cannot is left out."""
    configs, notes = module.make_configs(read())
    found = [(c.decoding.drafter, c.kv.policy, c.kv.budget) for c in configs.values()]
    policies = [name for name in KV_POLICIES if name not in ("full", "streaming_llm")]
    assert found == [
        ("self", "streaming_llm", 65),
        ("self", "streaming_llm", 257),
        *(("self", policy, 257) for policy in policies),
        *[("self", "streaming_llm", 257)] * 2,
        ("ngram", "streaming_llm", 257),
        *(("ngram+self", "streaming_llm", budget) for budget in (65, 257)),
    ]
    assert notes == []
    configs, notes = module.make_configs(read("--budget", "20", "--draft", "ngram", "self"))
    assert list(configs)[:2] == ["--draft ngram", "--draft self --budget 20 --gamma 4"]
    left_out = "left out   --draft self --kv_policy snapkv --budget 20: --budget 20"
    assert any(note.startswith(left_out) for note in notes)
    for draft, message in (("none", "--draft none: every draft"), ("x", "--draft x is not known")):
        with pytest.raises(ValueError, match=message):
            module.make_configs(read("--draft", draft))


def test_a_new_source_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    more = ["--draft", "self", "--draft_weights", "int8"]
    monkeypatch.setattr(module, "SOURCES", (["--draft", "self"], more))
    sources = module.find_sources(read("--draft", "self", "--budget", "65", "257"))
    plain = [["--draft", "self", "--budget", budget] for budget in ("65", "257")]
    assert sources == [*plain, [*more, "--budget", "257"]]
    mixed = ["--draft", "ngram+self"]
    monkeypatch.setattr(module, "SOURCES", (mixed,))
    sources = module.find_sources(read("--draft", "ngram+self", "--budget", "65"))
    assert sources == [[*mixed, "--budget", "65"]]


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.Advice, "give", lambda *given: pytest.fail("it was measured"))


@pytest.mark.usefixtures("unmeasured")
def test_bad_input_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """Before anything is measured."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "run_on_ranks", lambda *given: pytest.fail("ranks were started"))
    for name in ("machine.json", "machine-nproc2.json"):
        machine_file(world_size=1).save(tmp_path / name)
    machine_file(cores_taken=0.5).save(tmp_path / "busy.json")
    for words, message in (
        ("--bugdet 65", "unknown argument --bugdet; did you mean --budget?"),
        ("--nproc 0", "--nproc 0 is too small; it must be at least 1"),
        ("--nproc 2", "make it again: magicdec probe --nproc 2 --out machine-nproc2.json"),
        ("--machine busy.json", "busy host: another load took 50% of the cores meanwhile"),
        ("--time 5", "--time 5 is no time of at least 30s; give one such as 90s or 5m"),
        ("--time soon", "--time soon is no time of at least 30s"),
        ("--time nan", "--time nan is no time of at least 30s"),
    ):
        code, _, err = command("advise", *words.split())
        assert code == 2 and message in err and err.count("\n") == 1, err


def test_times_have_units() -> None:
    assert [module.parse_time(text) for text in ("90", "90s", "1.5m", "2h")] == [90, 90, 90, 7200]


def test_several_ranks_have_a_machine_file_of_their_own(tmp_path: Path) -> None:
    """That of another number of ranks is kept, and the one beside it is probed once."""
    path = tmp_path / "machine.json"
    beside = tmp_path / "machine-nproc2.json"
    machine_file(world_size=1).save(path)
    args = read("--machine", str(path), "--nproc", "2")
    found, (note,) = module.find_machine(args)
    assert found == beside and f"{path} was probed with --nproc 1; {beside} is for 2" in note
    machine_file(Link(1e-5, 1e10), world_size=2).save(beside)
    found, (_, note) = module.find_machine(args)
    assert found == beside and note == f"machine    {beside}, probed before"
    machine_file(world_size=2, cores_taken=0.3).save(beside)
    with pytest.raises(ValueError, match="busy host"):
        module.find_machine(args)
    found, _ = module.find_machine(replace(args, allow_busy_machine=True))
    assert found == beside
    assert load_machine(path).description["world_size"] == 1


# Self with three policies, for which 40 are enough, and one without a budget, two kinds of weights,
# and ngram.
NUM_SMALL = 7


@pytest.fixture
def small(tmp_path: Path, tiny_checkpoint: Path, text_file: Path) -> list[str]:
    """The flags of advice about a tiny model, which takes a second. No machine file is there."""
    words = ["--model", str(tiny_checkpoint), "--dataset", str(text_file), "--budget", "40"]
    words += ["--draft", "self", "ngram", "--prefix_len", "90", "--gen_len", "8"]
    words += ["--num_batches", "2", "--out", str(tmp_path / "r.jsonl")]
    return [*words, "--machine", str(tmp_path / "machine.json")]


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Answers a probe with a machine file of such a description; counts the probes."""
    probed: list[str] = []

    def answer(**description: object) -> list[str]:
        def measured(*given: object) -> MachineFile:
            probed.append("")
            return machine_file(**description)

        monkeypatch.setattr(module.Advice, "probe", measured)
        return probed

    return answer


def test_advice_is_one_run_of_all_drafts(
    small: list[str], probe: Callable[..., list[str]], tmp_path: Path, command: Command
) -> None:
    """The machine is probed once, and its file is used from then on."""
    probed = probe(world_size=1)
    for number in (1, 2):
        code, out, err = command("advise", *small)
        assert code == 0, err
        passes = load_passes(tmp_path / "r.jsonl")
        assert len(passes) == number * 2 * NUM_SMALL, "each beside the one that all share"
        records = [serving_pass for serving_pass in passes if serving_pass.is_drafting][-NUM_SMALL:]
        plain = [serving_pass for serving_pass in passes if not serving_pass.is_drafting][
            -NUM_SMALL:
        ]
        assert len({json.dumps(r.to_json()) for r in records}) == NUM_SMALL
        assert len({str([group.step_ms for group in record.groups]) for record in plain}) == 1
        assert out.count("\nrun        ") == NUM_SMALL and "Speculation" in out
        RUN.read(command_words(out.splitlines()[-1])).check(1)
    assert len(probed) == 1 and load_machine(tmp_path / "machine.json").description


def test_a_machine_that_is_busy_gives_no_prediction(
    small: list[str], probe: Callable[..., list[str]], tmp_path: Path, command: Command
) -> None:
    """Its file is not written, and the runs are reported. It is probed again after them, and what
    would give the prediction is said."""
    probed = probe(world_size=1, cores_taken=0.5)
    few = [*small, "--num_batches", "1"]
    code, out, _ = command("advise", *few)
    assert code == 0 and "the plan expects" not in out and "Speculation" in out
    message = "left out   the prediction for other contexts: another load took 50% of the cores"
    assert message in out and not (tmp_path / "machine.json").exists() and len(probed) == 2
    assert f"`magicdec probe --nproc 1 --out {tmp_path / 'machine.json'}`" in out
    code, out, _ = command("advise", *few, "--allow_busy_machine")
    assert code == 0 and message not in out and (tmp_path / "machine.json").exists()


def test_a_machine_that_is_quiet_after_the_runs_gives_a_prediction(
    small: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: Command
) -> None:
    loads = iter((0.5, 0.0))
    monkeypatch.setattr(
        module.Advice, "probe", lambda *_: machine_file(world_size=1, cores_taken=next(loads))
    )
    code, out, _ = command("advise", *small, "--num_batches", "1", "--draft", "self")
    assert code == 0 and "the plan expects" in out and "left out   the prediction" not in out
    assert "so it is probed again when the drafts are measured" in out
    assert load_machine(tmp_path / "machine.json").description["cores_taken"] == 0.0


def test_a_copy_of_every_token_has_a_prediction_without_a_budget(
    small: list[str], monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """Where it is the only draft, and so the fastest."""
    monkeypatch.setattr(module, "SOURCES", (["--draft", "self", "--kv_policy", "quantised"],))
    monkeypatch.setattr(module.Advice, "probe", lambda *_: machine_file(world_size=1))
    code, out, err = command("advise", *small, "--num_batches", "1", "--draft", "self")
    assert code == 0, err
    assert "the plan expects" in out and "--budget" not in out.split("the plan expects")[1]


def test_with_little_time_the_answer_has_no_prediction(
    small: list[str], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths that were given stay; what was not is cut down and said."""
    monkeypatch.setattr(BaselineTimes, "seconds", lambda self, w, num_candidates: 1e6)
    words = [word for word in small if word not in ("--gen_len", "8")]
    code, out, err = command("advise", *words, "--time", "170s")
    assert code == 0, err
    assert "left out   the prediction for other contexts: a probe needs --time 180s" in out
    assert "left out   --gen_len 64, for which there is no time; 16 instead" in out
    assert "--prefix_len 90" in out and "--prefix_len 90, for" not in out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_passes_and_not_the_report(
    small: list[str],
    number: signal.Signals,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """It comes with the second pass of the second batch."""
    machine_file(world_size=1).save(tmp_path / "machine.json")
    count = [0]
    original = Runner.measure_pass

    def measure_pass(self: Runner, *given: Any) -> None:
        count[0] += 1
        if count[0] == NUM_SMALL + 3:
            os.kill(os.getpid(), number)
        original(self, *given)

    monkeypatch.setattr(Runner, "measure_pass", measure_pass)
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    code, out, err = command("advise", *small)
    assert code == 128 + number
    assert out.count("\nrun        ") == NUM_SMALL and "Speculation" in out
    assert "left out   1 of 2 batches" in out and "magicdec run" in out.splitlines()[-1]
    assert f"interrupted; {2 * NUM_SMALL} records are in {tmp_path / 'r.jsonl'}" in err
    assert len(load_passes(tmp_path / "r.jsonl")) == 2 * NUM_SMALL
    assert handlers == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))


def test_a_signal_before_the_first_pass_is_said(
    small: list[str], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        module.Advice, "find_rates", lambda *given: os.kill(os.getpid(), signal.SIGTERM)
    )
    code, _, err = command("advise", *small)
    assert (code, err) == (143, "interrupted; nothing was measured yet\n")


def test_ranks_end_after_the_pass_unless_they_are_asked_again() -> None:
    with StopRequests(Launch(0, 2, 0, 2)) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.is_requested()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.code == 143


def test_a_prediction_stops_at_the_longest_context_of_the_model(tmp_path: Path) -> None:
    """Where a draft with a fixed budget would pay only beyond it."""
    machine_file().save(tmp_path / "machine.json")
    record = next(r for r in gate_runs() if r.config["kv"]["policy"] == "streaming_llm")
    args = read("--machine", str(tmp_path / "machine.json"), "--prefix_len", "4096")
    plan = advice.make_plan(args, {"": record}, BASELINES)
    assert plan is not None and plan.longest == 20480
    pays_from = plan.break_even(1)
    assert pays_from is not None and max(plan.prefix_lens) == 20480 - 64
    shorter = replace(plan.target.config, max_position_embeddings=pays_from - 1)
    shorter_plan = replace(plan, target=replace(plan.target, config=shorter))
    assert shorter_plan.break_even(1) is None
    message = advice.expectation_of(shorter_plan, args)
    assert f"not to pay up to {pays_from - 1} tokens, the longest context" in message


def test_a_prediction_has_the_acceptance_of_runs_whatever_else_the_file_has(
    tmp_path: Path,
) -> None:
    machine_file().save(tmp_path / "machine.json")
    record = next(r for r in gate_runs() if r.config["kv"]["policy"] == "streaming_llm")
    args = read("--machine", str(tmp_path / "machine.json"), "--prefix_len", "4096")
    several = [acceptance_record(64, dataset=name) for name in ("books", "code")]
    file = write_records(tmp_path / "runs.jsonl", several)
    with file.open("ab") as lines:
        lines.write(BASELINES.read_bytes())
    plan = advice.make_plan(args, {"": record}, file)
    expected = advice.make_plan(args, {"": record}, BASELINES)
    assert plan is not None and expected is not None and plan.curves == expected.curves


def test_a_machine_file_of_another_machine_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = gate_runs()[0]
    capsys.readouterr()
    here = record.environment
    args = read("--machine", str(tmp_path / "machine.json"))
    for description, told in (
        ({}, ""),
        ({"cpu": here.cpu, "gpu": None, "threads": here.threads}, ""),
        ({"cpu": "Z80", "threads": here.threads}, f"with cpu Z80, here {here.cpu}; "),
        ({"cpu": here.cpu, "threads": 64}, f"with threads 64, here {here.threads}; "),
    ):
        machine_file(**description).save(args.machine)
        module.warn_of_other_machine(args, {"": record})
        err = capsys.readouterr().err
        assert told in err and bool(err) == bool(told)


def test_a_run_that_is_refused_ends_the_advice_in_one_line(
    small: list[str], probe: Callable[..., list[str]], command: Command
) -> None:
    probe()
    code, _, err = command("advise", *small, "--prefix_len", "5000")
    assert code == 2 and err.startswith("magicdec advise: --prefix_len 5000")
    assert err.count("\n") == 1


def test_a_record_becomes_the_flags_of_its_run(tmp_path: Path) -> None:
    """Read back, they resolve to the recorded config, for every drafter and policy."""
    machine = Machine(2, has_compiler=True, has_bfloat16_products=True)
    for record in gate_runs():
        file = tmp_path / "run.toml"
        file.write_text(config_of.to_toml(config_of.flags_of(record)))
        config = RUN.read(["--config", str(file)])
        config.check(record.environment.world_size)
        found = resolve(config, machine).to_dict()
        for section in ("decoding", "kv", "sampling", "workload"):
            ours = found[section]
            theirs = record.config[section]
            same = [k for k in theirs if not k.endswith("_reason") and k in ours]
            same = [k for k in same if k != "step_cost"]  # of cases of the gate, without a flag
            if record.config["decoding"]["drafter"] == "ngram" and section == "kv":
                continue  # it reads no cache
            differing = {
                k: (ours[k], theirs[k])
                for k in same
                if ours[k] != theirs[k] and not (section == "kv" and k not in _used(record.config))
            }
            assert differing == {}, section
        assert (found["draft"] or {}).get("model") == (record.config["draft"] or {}).get("model")


def _used(config: dict) -> tuple[str, ...]:  # type: ignore[type-arg]
    from magicdec.config.capabilities import policy_called

    return ("policy", *policy_called(config["kv"]["policy"]).settings)


def test_the_config_command_chooses_a_record(command: Command, tmp_path: Path) -> None:
    records = gate_runs()
    file = tmp_path / "r.jsonl"
    file.write_text("".join(BASELINES.read_text().splitlines(keepends=True)[:2]))
    for index, expected in (("1", records[0]), ("-1", records[1])):
        code, out, _ = command("config", file, "--record", index)
        flags = config_of.to_toml(config_of.flags_of(expected))
        assert (code, out) == (0, f"# magicdec run --config FILE\n{flags}")
    for index in ("0", "3", "-3"):
        code, _, err = command("config", file, "--record", index)
        assert code == 2 and "holds 2 records" in err


def test_the_doctor_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    checks = [
        doctor.Check("a", True, "there"),
        doctor.Check("b", False, "not there"),
    ]
    for more, code, last in (
        ([], 0, "Everything that a run needs works."),
        ([doctor.Check("c", False, "broken", is_needed=True)], 1, "A run needs what is MISSING."),
    ):
        monkeypatch.setattr(doctor, "find_checks", lambda more=more: iter([*checks, *more]))
        ended, out, _ = command("doctor")
        lines = out.splitlines()
        assert ended == code and lines[-1] == last
        assert lines[0].split() == ["works", "a", "there"] and lines[1].startswith("absent   b")
        assert ("MISSING" in lines[2]) == bool(more)


def test_the_doctor_needs_no_torch(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    ended = command("doctor")
    lines = [line.split()[:2] for line in ended.out.splitlines()[:-1]]
    assert lines == [["works", "magicdec"], ["MISSING", "torch"]] and ended.code == 1


def test_the_doctor_looks_at_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {check.name: check for check in doctor.find_checks()}
    assert found["demo model"].works and found["auto"].works
    assert {"C++ compiler", "CPU kernels", "shared memory", "CUDA", "Triton"} <= set(found)
    without = doctor.check_kernels(Machine(2))
    assert not without.works and "compiler" in without.detail
    monkeypatch.setattr(native, "has_dot_products", lambda: False)  # as an old compiler builds it
    old = doctor.check_kernels(Machine(2, has_compiler=True, has_bfloat16_products=True))
    assert not old.works and "does not know this CPU's bfloat16 instructions" in old.detail


def test_drafts_are_ranked_by_what_their_intervals_leave_sure(any_run: PassRecord) -> None:
    """A disturbed run has a high speedup and a wide interval; the steady one is advised."""
    ratios = {65: (0.4, 3.5, 16.0, 0.5, 12.0), 257: (1.4, 1.5, 1.6, 1.5, 1.45)}
    records = {
        f"--draft self --budget {budget}": with_ratios(any_run, *batch_ratios)
        for budget, batch_ratios in ratios.items()
    }
    text = advice.find_advice(read(), records, None)
    assert "`--draft self --budget 257` has" in text and "(`--draft self --budget 65` 3.50x" in text


def test_the_best_of_many_drafts_without_a_gain_is_not_sure() -> None:
    """Ten drafts are as fast as decoding without them. At 95 % each, the best one would be sure to
    pay in about 22 of 100 cases."""
    record = next(r for r in gate_runs() if r.metrics and advice.net_speedup(r) > 0)
    assert record.metrics is not None
    chance = np.random.default_rng(0)
    num_sure = 0
    num_cases = 400
    for _ in range(num_cases):
        records = {}
        for draft in range(10):
            ratios = np.exp(chance.normal(0, 0.05, 5)).tolist()
            metrics = dataclasses.replace(
                record.metrics,
                net_speedup=float(np.median(ratios)),
                net_speedup_per_group=ratios,
                net_speedup_interval=ratio_interval(ratios),
            )
            records[f"--draft ngram --gamma {draft}"] = dataclasses.replace(record, metrics=metrics)
        num_sure += advice.find_advice(read(), records, None).startswith("Speculation pays here")
    assert num_sure < 0.05 * num_cases


@pytest.mark.parametrize(
    ("outcome", "asked", "refused"),
    [
        (None, True, False),
        ("told", True, True),
        ("equal", False, False),
        ("not compared", False, False),
        ("differs", False, True),
    ],
)
def test_advice_is_on_a_model_that_is_computed_as_transformers_computes_it(
    outcome: str | None,
    asked: bool,
    refused: bool,
    tiny_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A model that was compared before is not compared again."""
    calls = list[float]()

    def check(name: str, most_s: float, say: object) -> ModelCheck:
        calls.append(most_s)
        return ModelCheck(outcome="differs" if refused else "equal")

    monkeypatch.setattr(checked, "outcome_of", lambda source: outcome)
    monkeypatch.setattr(model_check, "check_model", check)
    name = str(tiny_checkpoint)
    args = read("--model", name, "--time", "100s")
    if refused:
        with pytest.raises(ValueError, match=f"^--model {name} is not computed as transformers"):
            module.compare_model(name, args, Launch())
    else:
        module.compare_model(name, args, Launch())
    assert calls == [20.0] * asked
    assert ("before: " in capsys.readouterr().out) != asked
    module.compare_model("demo", args, Launch())
    assert len(calls) == asked, "packaged models are compared by tests"
