"""`magicdec advise`, `doctor` and `config`: what they say."""

import dataclasses
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, Command

from magicdec.attention import native
from magicdec.cli.drivers import RUN
from magicdec.cli.front import advise as module
from magicdec.cli.front import config_of, doctor
from magicdec.cli.front.advise import AdviceSection, Measured, describe_advice
from magicdec.config.machine import Machine
from magicdec.config.resolve import resolve
from magicdec.distributed.ranks import Ended
from magicdec.hardware.ceiling_file import Link, MachineFile, load_machine
from magicdec.names import KV_POLICIES
from magicdec.records.intervals import ratio_interval
from magicdec.records.reading import load_records


def read(*words: str) -> AdviceSection:
    return module.main.build_parser().read(words)[AdviceSection]


PLACE = "B 4 and 2048 tokens of context"
BASELINES = Path(ROOT, "results", "baselines", "acceptance.jsonl")


def machine_file(link: Link | None = None, **description: object) -> MachineFile:
    rates, overhead = {"float32": 1e11}, {"float32": 1e-5}
    kv_rates, of_tokens = {"float32": 1e10}, {"float32": 0.0}
    return MachineFile(description, 1e10, rates, overhead, kv_rates, link, None, rates, of_tokens)


@pytest.mark.parametrize(
    ("best", "said"),
    [
        (
            Measured("--draft self", 1.35, (1.28, 1.41), 1.3),
            ("Speculation pays here", "1.35 times", "(95 % interval: 1.28 to 1.41)",
             "; sure, because the plan expected 1.30 times here too."),
        ),
        (
            Measured("--draft ngram", 1.35, (1.28, 1.41)),
            ("Speculation pays here", "`--draft ngram`", "sure of this place, which says nothing"),
        ),
        (
            Measured("--draft self", 0.8, (0.7, 0.9), 1.4),
            ("does not pay here", "sure of this place but not of other contexts"),
        ),
        (
            Measured("--draft self", 1.1, (0.9, 1.3), 1.1),
            ("Speculation may or may not pay here", "unsure, because the interval"),
        ),
        (Measured("--draft self", 1.1, None, 1.1), ("unsure, because so few batches",)),
    ],
)  # fmt: skip
def test_the_advice_is_one_sentence(best: Measured, said: tuple[str, ...]) -> None:
    sentence = describe_advice(best, PLACE, "the plan expects; ")
    assert all(words in sentence for words in said), sentence
    assert PLACE in sentence and "\n" not in sentence and sentence.endswith(".")
    assert "; the plan expects; " in sentence


def test_advice_follows_from_records_and_the_plan(tmp_path: Path) -> None:
    """From recorded runs and a machine file, without running anything."""
    machine_file().save(tmp_path / "machine.json")
    runs = {
        (r.config["kv"]["policy"], r.config["kv"]["budget"]): r
        for r in load_records(BASELINES)
        if r.config["decoding"]["drafter"] == "self"
        and r.config["kv"]["policy"] != "full"
        and r.config["decoding"]["num_draft_tokens"] == 4
    }
    machine = ["--machine", str(tmp_path / "machine.json")]
    args = read(*machine, "--prefix_len", "4096", "--B", "4")

    def advice_of(policies: set[str]) -> tuple[float, str, str]:
        """The best net speedup of the runs with these policies, the sentence and the command."""
        records = {
            f"--draft self --kv_policy {p} --budget {b}": r
            for (p, b), r in runs.items() if p in policies
        }  # fmt: skip
        plan = module.make_plan(args, records, BASELINES)
        sentence, blank, line = module.find_advice(args, records, plan).split("\n")
        assert sentence.endswith(".") and blank == ""
        best = max(records.values(), key=module.least_speedup)
        return module.net_speedup(best), sentence, line

    for policy in ("streaming_llm", "snapkv"):
        speedup, sentence, line = advice_of({policy})
        assert f"{speedup:.2f} times" in sentence
        expected = r"pay from \d+ tokens on, and \d[.]\d\d times at \d+ with "
        expected += rf"`--kv_policy {policy} --budget \d+ --gamma \d`"
        assert re.search(f"; the plan expects self-speculation to {expected}; ", sentence)
        config = RUN.read(command_words(line))
        assert (config.kv.policy, config.workload.prefix_len) == (policy, 4096)
    best = max(runs.values(), key=module.least_speedup)
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
    slow = min(load_records(BASELINES), key=module.net_speedup)
    args = read("--model", str(tmp_path / "a model"), "--nproc", "2", "--dataset", "a b.txt")
    text = module.find_advice(args, {"--draft model:demo-draft --gamma 4": slow}, None)
    config = RUN.read(command_words(text.splitlines()[-1]))
    assert text.startswith("Speculation does not pay here") and config.decoding.drafter is None
    assert config.model.model == str(tmp_path / "a model") and config.parallel.nproc == 2
    assert config.workload.dataset == "a b.txt"


def test_every_source_is_tried(capsys: pytest.CaptureFixture[str]) -> None:
    """Budgets belong to what drafts with a part of a cache; a policy that cannot is left out."""
    configs = [RUN.read(words[1:]) for words in module.make_commands(read()).values()]
    found = [(c.decoding.drafter, c.kv.policy, c.kv.budget) for c in configs]
    policies = [name for name in KV_POLICIES if name not in ("full", "streaming_llm")]
    assert found == [
        ("self", "streaming_llm", 65), ("self", "streaming_llm", 257),
        *(("self", policy, 257) for policy in policies), *[("self", "streaming_llm", 257)] * 2,
        ("ngram", "streaming_llm", 257),
        *(("ngram+self", "streaming_llm", budget) for budget in (65, 257)),
    ]  # fmt: skip
    assert capsys.readouterr().out == ""
    commands = module.make_commands(read("--budget", "20", "--draft", "ngram", "self"))
    assert list(commands)[:2] == ["--draft ngram", "--draft self --budget 20 --gamma 4"]
    left_out = capsys.readouterr().out
    assert "left out   --draft self --kv_policy snapkv --budget 20: --budget 20" in left_out
    for draft, message in (("none", "--draft none: every draft"), ("x", "--draft x is not known")):
        with pytest.raises(ValueError, match=message):
            module.make_commands(read("--draft", draft))


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


def test_bad_input_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """Before anything is measured."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "run_command", lambda words: pytest.fail("a command was started"))
    for name in ("machine.json", "machine-nproc2.json"):
        machine_file(world_size=1).save(tmp_path / name)
    for words, message in (
        ("--bugdet 65", "unknown argument --bugdet; did you mean --budget?"),
        ("--nproc 0", "--nproc 0 is too small; it must be at least 1"),
        ("--nproc 2", "make it again: magicdec probe --nproc 2 --out machine-nproc2.json"),
    ):
        code, _, err = command("advise", *words.split())
        assert code == 2 and message in err and err.count("\n") == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "advise starts the ranks itself; give --nproc" in command("advise").err


def test_several_ranks_are_probed_run_and_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """Every command that advise starts has the ranks, and the plan shares the model over them. A
    machine file of another number of ranks is kept, and the one beside it is probed once."""
    started: list[list[str]] = []
    record = next(
        r for r in load_records(BASELINES)
        if r.config["decoding"]["drafter"] == "self"
        and r.config["decoding"]["num_draft_tokens"] == 4
        and r.config["kv"]["policy"] == "streaming_llm"
    )  # fmt: skip

    def run_command(words: list[object]) -> Ended:
        started.append([str(word) for word in words])
        if words[0] == "probe":
            machine_file(Link(1e-5, 1e10), world_size=2).save(Path(str(words[-1])))
            return Ended(0, "warning: the host is busy\n")
        Path(str(words[-1])).write_text(record.to_json() + "\n")
        return Ended(0, "record appended\n")

    monkeypatch.setattr(module, "run_command", run_command)
    monkeypatch.setattr(module, "SOURCES", (["--draft", "self"],))
    out, budget = tmp_path / "advice.jsonl", record.config["kv"]["budget"]
    words = ["--draft", "self", "--budget", str(budget), "--out", str(out)]
    words += ["--nproc", "2", "--machine", str(tmp_path / "machine.json")]
    machine_file(world_size=1).save(tmp_path / "machine.json")
    code, out_text, err = command("advise", *words)
    assert code == 0 and [words[0] for words in started] == ["run", "probe"]
    assert all(words[words.index("--nproc") + 1] == "2" for words in started)
    assert len(load_records(out)) == 1
    assert RUN.read(command_words(out_text.splitlines()[-1])).parallel.nproc == 2
    assert "the plan expects self-speculation" in out_text
    assert err == "warning: the host is busy\n"
    assert started[1][-1] == str(tmp_path / "machine-nproc2.json")
    assert load_machine(tmp_path / "machine.json").description["world_size"] == 1
    assert command("advise", *words).code == 0 and [words[0] for words in started[2:]] == ["run"]


def test_a_machine_file_of_another_machine_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = load_records(BASELINES)[0]
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    file = tmp_path / "machine.json"
    machine_file().save(file)
    refused = Ended(2, "preparing\nmagicdec run: --prefix_len 9 is too long\n")
    monkeypatch.setattr(module, "run_command", lambda words: refused)
    words = ["--machine", str(file), "--out", str(tmp_path / "advice.jsonl")]
    code, _, err = command("advise", *words)
    assert (code, err) == (2, "magicdec advise: --prefix_len 9 is too long\n")


def test_a_record_becomes_the_flags_of_its_run(tmp_path: Path) -> None:
    """Read back, they resolve to the recorded config, for every drafter and policy."""
    machine = Machine(2, has_compiler=True, has_bfloat16_products=True)
    for record in load_records(BASELINES):
        file = tmp_path / "run.toml"
        file.write_text(config_of.to_toml(config_of.flags_of(record)))
        config = RUN.read(["--config", str(file)])
        config.check(1)
        found = resolve(config, machine).to_dict()
        for section in ("decoding", "kv", "sampling", "workload"):
            ours, theirs = found[section], record.config[section]
            same = [k for k in theirs if not k.endswith("_reason") and k in ours]
            if record.config["decoding"]["drafter"] == "ngram" and section == "kv":
                continue  # it reads no cache
            differing = {
                k: (ours[k], theirs[k]) for k in same
                if ours[k] != theirs[k] and not (section == "kv" and k not in _used(record.config))
            }  # fmt: skip
            assert differing == {}, section
        assert (found["draft"] or {}).get("model") == (record.config["draft"] or {}).get("model")


def _used(config: dict) -> tuple[str, ...]:  # type: ignore[type-arg]
    from magicdec.config.capabilities import policy_called

    return ("policy", *policy_called(config["kv"]["policy"]).settings)


def test_the_config_command_chooses_a_record(command: Command, tmp_path: Path) -> None:
    records = load_records(BASELINES)
    file = tmp_path / "r.jsonl"
    file.write_text("".join(json.dumps(dataclasses.asdict(r)) + "\n" for r in records[:2]))
    for index, expected in (("1", records[0]), ("-1", records[1])):
        code, out, _ = command("config", file, "--record", index)
        flags = config_of.to_toml(config_of.flags_of(expected))
        assert (code, out) == (0, f"# magicdec run --config FILE\n{flags}")
    for index in ("0", "3", "-3"):
        code, _, err = command("config", file, "--record", index)
        assert code == 2 and "holds 2 records" in err


def test_the_doctor_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    checks = [
        doctor.Check("a", True, "there"), doctor.Check("b", False, "not there"),
    ]  # fmt: skip
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


def test_the_doctor_looks_at_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {check.name: check for check in doctor.find_checks()}
    assert found["demo model"].works and found["auto"].works
    assert {"C++ compiler", "CPU kernels", "shared memory", "CUDA", "Triton"} <= set(found)
    without = doctor.check_kernels(Machine(2))
    assert not without.works and "compiler" in without.detail
    monkeypatch.setattr(native, "has_dot_products", lambda: False)  # as an old compiler builds it
    old = doctor.check_kernels(Machine(2, has_compiler=True, has_bfloat16_products=True))
    assert not old.works and "does not know this CPU's bfloat16 instructions" in old.detail


def test_drafts_are_ranked_by_what_their_intervals_leave_sure() -> None:
    """A disturbed run has a high speedup and a wide interval; the steady one is advised."""
    steady = next(r for r in load_records(BASELINES) if r.metrics and module.net_speedup(r) > 0)
    metrics = steady.metrics
    assert metrics is not None
    records = {
        f"--draft self --budget {budget}": dataclasses.replace(
            steady,
            metrics=dataclasses.replace(
                metrics, net_speedup=speedup, net_speedup_interval=interval
            ),
        )
        for budget, speedup, interval in ((65, 3.5, [0.3, 16.0]), (257, 1.5, [1.4, 1.6]))
    }
    assert "`--draft self --budget 257`" in module.find_advice(read(), records, None)


def test_the_best_of_many_drafts_without_a_gain_is_not_sure() -> None:
    """Ten drafts are as fast as decoding without them. At 95 % each, the best one would be sure to
    pay in about 22 of 100 cases."""
    record = next(r for r in load_records(BASELINES) if r.metrics and module.net_speedup(r) > 0)
    assert record.metrics is not None
    chance, num_sure, num_cases = np.random.default_rng(0), 0, 400
    for _ in range(num_cases):
        records = {}
        for draft in range(10):
            ratios = np.exp(chance.normal(0, 0.05, 5)).tolist()
            metrics = dataclasses.replace(
                record.metrics, net_speedup=float(np.median(ratios)), net_speedup_per_batch=ratios,
                net_speedup_interval=ratio_interval(ratios),
            )  # fmt: skip
            records[f"--draft ngram --gamma {draft}"] = dataclasses.replace(record, metrics=metrics)
        num_sure += module.find_advice(read(), records, None).startswith("Speculation pays here")
    assert num_sure < 0.05 * num_cases
