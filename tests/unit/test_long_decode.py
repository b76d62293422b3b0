"""`magicdec longdecode`: outputs much longer than prompts, and acceptance by the length that texts
have grown to, computed from the definition in plain Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Command

from magicdec.bench.showing import grown_tables, tables
from magicdec.cli.commands import parser_of
from magicdec.config.sections import KVSection
from magicdec.engine.scheduler import BatchLimits, Scheduler
from magicdec.records.acceptance import Verifications
from magicdec.records.computing import acceptance_by_grown_context
from magicdec.records.pass_record import PassRecord
from magicdec.records.reading import load_passes
from magicdec.runner.request import Batch, Request, SamplingParams, StepOutput

PROMPT = 96
OUTPUT = 7 * PROMPT  # so that the cache grows to eight times the prompt
WORDS = ("--prefix_len", PROMPT, "--gen_len", OUTPUT, "--B", 4, "--threads", 1)
GROUPS = {"up to 512": (0, 512), "513 to 1024": (512, 1024)}


def run(command: Command, out: Path, *words: object) -> tuple[PassRecord, str]:
    """The drafting pass of a command, and what it printed."""
    ended = command("longdecode", *WORDS, *words, "--dtype", "float32", "--out", out)
    assert ended.code == 0, ended.err
    *_, record = load_passes(out)
    assert record.status == "verified"
    return record, ended.out


def by_hand(requests: list[dict[str, Any]], low: int, high: int) -> dict[str, Any]:
    """The acceptance of the verifications whose text had more than `low` and at most `high` tokens,
    found by walking along each request. Every step drafted for it."""
    drafted = accepted = steps = 0
    prompts = set()
    for number, request in enumerate(requests):
        length = request["prompt_len"] + 1  # with the token that prefill emits
        counts = zip(
            request["per_step_drafted"],
            request["per_step_accepted"],
            request["per_step_emitted"],
            strict=True,
        )
        for num_drafted, num_accepted, num_emitted in counts:
            if low < length <= high:
                drafted += num_drafted
                accepted += num_accepted
                steps += 1
                prompts.add(number)
            length += num_emitted
        assert length == request["prompt_len"] + request["output_len"]
    return {
        "num_prompts": len(prompts),
        "num_spec_steps": steps,
        "num_draft_tokens": drafted,
        "num_accepted_draft_tokens": accepted,
        "draft_acceptance_rate": pytest.approx(accepted / drafted),
        "mean_acceptance_length": pytest.approx(1 + accepted / steps),
    }


def test_acceptance_by_grown_context_is_that_of_the_steps(command: Command, tmp_path: Path) -> None:
    words = ("--kv_policy", "verified", "--budget", 65, "--gamma", 3)
    record, printed = run(command, tmp_path / "runs.jsonl", *words)
    line = json.loads(record.to_json())
    assert {request["output_len"] for request in line["requests"]} == {OUTPUT}
    groups = line["acceptance_by_grown_context"]
    assert list(groups) == list(GROUPS)
    for name, (low, high) in GROUPS.items():
        expected = by_hand(line["requests"], low, high)
        assert {key: groups[name][key] for key in expected} == expected
        shown = f"{groups[name]['mean_acceptance_length']:.2f}"
        assert any(name in row and shown in row for row in printed.splitlines())
    rate, (least, most) = (
        groups["up to 512"][f"draft_acceptance_rate{end}"] for end in ("", "_interval")
    )
    assert least < rate < most


def test_a_text_is_in_the_group_that_names_its_length() -> None:
    for context, name in (
        (1, "up to 512"),
        (512, "up to 512"),
        (513, "513 to 1024"),
        (1024, "513 to 1024"),
        (1025, "1025 to 2048"),
        (8192, "4097 to 8192"),
    ):
        found = Verifications()
        found.add(3, 4, 2, 3, context=context)
        groups = acceptance_by_grown_context(found)
        assert groups is not None and [*groups] == [name]
        assert groups[name].num_prompts == 1
    found.add(3, 4, 2, 3)
    assert acceptance_by_grown_context(found) is None, "it is not known where that one was"


def test_steps_without_drafts_move_the_text_on(command: Command, tmp_path: Path) -> None:
    """Of lookups, which draft at some places alone: between two verifications lie as many tokens as
    the first has emitted, and those of the steps between."""
    record, _ = run(command, tmp_path / "runs.jsonl", "--draft", "ngram")
    num_plain = 0
    for request in record.requests:
        contexts = request.per_step_context or []
        emitted = request.per_step_emitted or []
        ends = [PROMPT + 1, *(sum(pair) for pair in zip(contexts, emitted, strict=True))]
        gaps = [b - a for a, b in zip(ends, [*contexts, PROMPT + OUTPUT], strict=True)]
        assert min(gaps) >= 0
        assert sum(gaps) + sum(emitted) == OUTPUT - 1
        num_plain += sum(gaps)
    assert num_plain > 0
    assert record.acceptance_by_grown_context is not None


def test_a_step_says_how_long_the_texts_were_before_it() -> None:
    """Also of a request that has emitted some before it joined."""
    scheduler = Scheduler(2, BatchLimits())
    requests = [Request(n, (1, 2, 3)[: n + 1], SamplingParams(9)) for n in range(2)]
    requests[1].output_ids = [7, 7, 7]
    output = StepOutput([[4, 5], [6]], 2, [1, 0], [2, 2])
    assert scheduler.commit(Batch(tuple(requests)), output, 0.0).contexts == [1, 5]
    assert scheduler.commit(Batch(tuple(requests)), output, 0.0).contexts == [3, 6]
    plain = StepOutput([[4], [6]])
    assert scheduler.commit(Batch(tuple(requests)), plain, 0.0).contexts is None


def test_the_preset_is_run_with_other_lengths() -> None:
    ours, theirs = (parser_of(name) for name in ("longdecode", "run"))
    defaults = {flag: setting.default for flag, setting in ours.settings.items()}
    usual = {flag: setting.default for flag, setting in theirs.settings.items()}
    assert usual.keys() - defaults.keys() == {"decoding.ignore_eos"}
    changed = {flag: value for flag, value in defaults.items() if value != usual[flag]}
    assert changed == {
        "workload.prefix_len": 1024,
        "workload.gen_len": 16384,
        "workload.num_batches": 1,
        "workload.warmup_batches": 0,
    }
    assert parser_of("longdecode").sections["decoding"].ignore_eos


def test_what_a_model_has_no_positions_for_is_refused_in_a_line(command: Command) -> None:
    ended = command("longdecode", "--gen_len", 20000)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.strip() == (
        "magicdec longdecode: --prefix_len 1024 + 20000 generated tokens = 21024 exceeds the 20480 "
        "positions of --model demo; 544 tokens fewer fit"
    )


@pytest.mark.parametrize(
    ("gen_len", "reselect_every", "is_warned"), [(70, 0, True), (70, 30, False), (20, 0, False)]
)
def test_a_choice_that_the_output_pushes_out_is_named(
    command: Command, tmp_path: Path, gen_len: int, reselect_every: int, is_warned: bool
) -> None:
    words = ("--kv_policy", "snapkv", "--budget", 65, "--reselect_every", reselect_every)
    short = ("--prefix_len", PROMPT, "--gen_len", gen_len, "--B", 1, "--threads", 1)
    ended = command("longdecode", *words, *short, "--no_baseline", "--out", tmp_path / "r.jsonl")
    assert ended.code == 0, ended.err
    assert ("chooses once" in ended.err) == is_warned
    assert KVSection().window_size == 32


def test_a_short_output_has_no_table(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    short = ("--prefix_len", PROMPT, "--gen_len", 20, "--B", 1, "--threads", 1, "--no_baseline")
    ended = command("run", *short, "--budget", 65, "--num_batches", 1, "--out", out)
    assert ended.code == 0, ended.err
    (record,) = load_passes(out)
    assert record.acceptance_by_grown_context is not None and grown_tables(record) == []
    assert not any("before the drafts" in table.title for table in tables([record]))
