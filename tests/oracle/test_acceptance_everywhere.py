"""The claim of `magicdec acceptance`: in float32 every verification of a run accepts what the table
has at its position, or all that the run drafted, if that is less. So for every drafter and policy
whose drafts follow from the text, and not for the others, which say so."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import Command
from tiny_hybrids import PlainMtpHead, save_with_tokenizer, the_model

from magicdec.bench import groups
from magicdec.bench.acceptance import forks, measuring
from magicdec.bench.acceptance.record import counts_of
from magicdec.cli.commands import console
from magicdec.engine.engine import Engine
from magicdec.model.checkpoint.source import find_model
from magicdec.runner.request import StepOutput
from magicdec.runner.sampling.sampling import make_params
from magicdec.setup.prepare import complete
from magicdec.speculation.head_drafter import HeadDrafter
from magicdec.systems.observer import PassObserver

WORKLOAD = "--prefix_len 160 --gen_len 33 --B 3 --dtype float32 --threads 1 --ignore_eos"
MOST = 6
# The words of a run, and of the acceptance that it is compared with. Cells of equal words for the
# latter are measured by one command, after one prefill.
DRAFTS_BY_TEXT = {
    "self streaming_llm 49": "--draft self --budget 49",
    "self full": "--draft self --budget -1",
    "self snapkv 49": "--draft self --budget 49 --kv_policy snapkv",
    "self retrieval 97": "--draft self --budget 97 --kv_policy retrieval",
    "self:int8 streaming_llm 49": "--draft self --draft_weights int8 --budget 49",
    "self:int4 snapkv 49": "--draft self --draft_weights int4 --budget 49 --kv_policy snapkv",
    "model:demo-draft full": "--draft model:demo-draft --budget -1",
    "eagle:demo-eagle full": "--draft eagle:demo-eagle --budget -1",
    "ngram": "--draft ngram",
}
NOT_OF_TEXT = {
    "eagle:demo-eagle streaming_llm 49": "--draft eagle:demo-eagle --budget 49",
    "model:demo-draft streaming_llm 49": "--draft model:demo-draft --budget 49",
    "self verified 97": "--draft self --budget 97 --kv_policy verified",
    "self snapkv 49 reselect": "--draft self --budget 49 --kv_policy snapkv --reselect_every 16",
    "ngram+self streaming_llm 49": "--draft ngram+self --budget 49",
}
COMMANDS = (
    "--draft self self:int8 model:demo-draft eagle:demo-eagle ngram --budget 49 "
    "--kv_policy streaming_llm full",
    "--draft self self:int4 --budget 49 --kv_policy snapkv",
    "--draft self --budget 97 --kv_policy retrieval verified",
    "--draft self --budget 49 --kv_policy snapkv --reselect_every 16",
    "--draft ngram+self --budget 49",
)
WINDOWED_HEAD = "eagle:demo-eagle streaming_llm 49"
ENDS = tuple(range(0, 4096, 24))
Steps = list[tuple[Sequence[int], StepOutput]]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return table_of(tmp_path_factory.mktemp("acceptance"), WORKLOAD)


def table_of(folder: Path, workload: str) -> dict[str, Any]:
    """The records by draft."""
    out = folder / "table.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        for words in COMMANDS:
            line = f"magicdec acceptance {words} {workload} --gamma {MOST} --out {out}"
            patch.setattr("sys.argv", line.split())
            with pytest.raises(SystemExit) as ended:
                console()
            assert not ended.value.code
    found = {}
    for line in out.read_text().splitlines():
        record = json.loads(line)
        found[name_of(record)] = record
    assert set(found) == {*DRAFTS_BY_TEXT, *NOT_OF_TEXT, "self:int8 full"}
    assert len({record["outputs_sha256"] for record in found.values()}) == 1
    return found


def name_of(record: dict[str, Any]) -> str:
    decoding = record["config"]["decoding"]
    kv = record["config"]["kv"]
    draft = record["config"]["draft"]
    words = [decoding["drafter"]]
    named = draft is not None and decoding["drafter"] != "mtp"  # whose head is the target's
    words += [draft["model"].rpartition("/")[2]] if named else []
    words += [decoding["draft_weights"]] if decoding["draft_weights"] else []
    name = ":".join(words)
    if decoding["drafter"] == "ngram":
        return name
    budget = "" if kv["policy"] == "full" else f" {kv['budget']}"
    return f"{name} {kv['policy']}{budget}" + (" reselect" if kv["reselect_every"] else "")


def verifications(steps: Steps) -> dict[int, list[tuple[int, int, int]]]:
    """By request: the position in the output, the drafted and the accepted tokens."""
    found: dict[int, list[tuple[int, int, int]]] = {}
    position: dict[int, int] = {}
    for ids, output in steps:
        for place, number in enumerate(ids):
            at = position.setdefault(number, 1)  # the first token is of the prefill
            drafted = output.num_drafted[place] if output.num_drafted else 0
            if drafted:
                accepted = min(drafted, (output.num_accepted or [])[place])
                found.setdefault(number, []).append((at, drafted, accepted))
            position[number] = at + len(output.token_ids[place])
    return found


def pairs_of(
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    record: dict[str, Any],
    words: str,
    workload: str = WORKLOAD,
) -> list[tuple[int, int]]:
    """What each verification of a run accepted, and what the table says."""
    steps: Steps = []
    observe = PassObserver.observe

    def see(observer: PassObserver, ids: Sequence[int], output: StepOutput, seconds: float) -> None:
        steps.append((ids, output))
        observe(observer, ids, output, seconds)

    monkeypatch.setattr(PassObserver, "observe", see)
    more = f"{workload} --num_batches 1 --warmup_batches 0 --no_baseline --out {folder}/out.jsonl"
    ended = command("run", *words.split(), *more.split())
    assert ended.code == 0, ended.err
    counts = [counts_of(text) for text in record["accepted"]]
    w = record["config"]["workload"]
    last = w["gen_len"] - 1
    assert [len(text) for text in counts] == [last] * w["batch_size"]
    return [
        (accepted, min(counts[number][at - 1], drafted))
        for number, request_verifications in verifications(steps).items()
        for at, drafted, accepted in request_verifications
        if at <= last
    ]


@pytest.mark.narrow(9)  # every draft, half of them with each gamma
@pytest.mark.parametrize("gamma", [3, MOST])
@pytest.mark.parametrize("name", DRAFTS_BY_TEXT)
def test_every_verification_of_a_run_accepts_what_the_table_says(
    name: str,
    gamma: int,
    table: dict[str, Any],
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    words = f"{DRAFTS_BY_TEXT[name]} --gamma {gamma}"
    pairs = pairs_of(command, monkeypatch, tmp_path, table[name], words)
    assert table[name]["inexact"] is None
    assert len(pairs) > (0 if name == "ngram" else 12)
    assert [ours for ours, _ in pairs] == [theirs for _, theirs in pairs]
    (record,) = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    rows = {row["depth"]: row["tokens_per_step"] for row in table[name]["rows"]}
    if name != "ngram":  # a lookup of which a run drafts fewer tokens
        assert record["metrics"]["mean_acceptance_length"] == pytest.approx(rows[gamma], rel=1e-12)
    is_lossless = name == "self full"
    assert len({ours for ours, _ in pairs}) > 1 or name == "ngram" or is_lossless


@pytest.mark.wide
def test_by_the_thousand_verifications_accept_what_the_table_says(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    workload = "--prefix_len 512 --gen_len 193 --B 8 --dtype float32 --threads 1 --ignore_eos"
    table = table_of(tmp_path, workload)
    num_verifications = 0
    for name, words in DRAFTS_BY_TEXT.items():
        for gamma in (2, MOST):
            given = f"{words} --gamma {gamma}"
            folder = tmp_path / f"{len(name)} {gamma} {num_verifications}".replace(" ", "-")
            with monkeypatch.context() as patch:
                pairs = pairs_of(command, patch, folder, table[name], given, workload)
            different = [pair for pair in pairs if pair[0] != pair[1]]
            print(f"{name} gamma {gamma}: {len(pairs)} verifications, {len(different)} differ")
            assert not different, name
            num_verifications += len(pairs)
    assert num_verifications > 5000


CHAINS = [name for name in NOT_OF_TEXT if "verified" not in name and "+" not in name]


@pytest.mark.parametrize("name", NOT_OF_TEXT)
def test_drafts_that_follow_from_the_way_there_say_so(
    name: str,
    table: dict[str, Any],
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Most verifications accept what the table says all the same."""
    assert table[name]["inexact"]
    words = f"{NOT_OF_TEXT[name]} --gamma {MOST}"
    pairs = pairs_of(command, monkeypatch, tmp_path, table[name], words)
    equal = sum(ours == theirs for ours, theirs in pairs)
    assert len(pairs) > 12 and equal >= 0.8 * len(pairs)
    tokens = [row["tokens_per_step"] for row in table[name]["rows"]]
    assert (None in tokens) == (name not in CHAINS) and tokens[-1] is not None


def test_a_window_of_a_head_depends_on_how_many_tokens_a_step_commits(
    table: dict[str, Any],
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Where a run fills the slots of a step before it drafts, so that the window of the first draft
    begins where that of the table does, all verifications are equal."""
    begin = HeadDrafter.__init__

    def begin_with_one_slot(drafter: HeadDrafter, *place: Any, **named: Any) -> None:
        begin(drafter, *place, **named)
        drafter.pending = (1,)

    monkeypatch.setattr(HeadDrafter, "__init__", begin_with_one_slot)
    words = f"{NOT_OF_TEXT[WINDOWED_HEAD]} --gamma {MOST}"
    pairs = pairs_of(command, monkeypatch, tmp_path, table[WINDOWED_HEAD], words)
    assert len(pairs) > 12 and [ours for ours, _ in pairs] == [theirs for _, theirs in pairs]


FORKED = {
    "snapkv": "--draft self self:int4 --budget 49 --kv_policy snapkv",
    "streaming_llm": "--draft self self:int8 --budget 49",
    "retrieval": "--draft self self:int8 --budget 81 --kv_policy retrieval",
    "quantised": "--draft self self:int8 --kv_policy quantised",
    "full": "--draft self --kv_policy full",
    "model": "--draft model:demo-draft --kv_policy full",
    "eagle": "--draft eagle:demo-eagle --kv_policy full",
    "ngram": "--draft ngram",
}
CONTEXTS = (
    "--draft self self:int8 ngram --kv_policy snapkv streaming_llm --budget 49",
    "--draft self --kv_policy retrieval --budget 97",
    "--draft model:demo-draft eagle:demo-eagle self,kv_policy=retrieval,budget=97 --kv_policy full",
)


@pytest.mark.parametrize("words", CONTEXTS)
def test_contexts_that_share_a_prefill_accept_what_they_accept_alone(
    words: str, command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The shorter prompts are the beginnings of the longest ones. They are prefilled once for all
    drafts, also where a head reads their states; or each by a command of its own, which knows no
    other."""
    workload = "--gen_len 17 --B 2 --dtype float32 --threads 1 --gamma 3"
    num_prefills = []
    prefill = Engine.prefill

    def count(engine: Engine, requests: Any, *more: Any) -> Any:
        num_prefills.append(len(requests[0].prompt_ids))
        return prefill(engine, requests, *more)

    def complete_alone(*given: Any, **named: Any) -> Any:
        return complete(*given, **named | {"cut_from": 130})

    monkeypatch.setattr(Engine, "prefill", count)
    found = []
    for contexts in ([70, 130, 97],), ([130], [97], [70]):
        out = tmp_path / f"{len(contexts)}.jsonl"
        for context in contexts:
            ended = command(
                "acceptance",
                *words.split(),
                *workload.split(),
                "--prefix_len",
                *context,
                "--out",
                out,
            )
            assert ended.code == 0, ended.err
        monkeypatch.setattr(measuring, "complete", complete_alone)
        records = [json.loads(line) for line in out.read_text().splitlines()]
        keys = ("accepted", "drafted", "rows", "outputs_sha256", "text_hashes")
        found.append(
            {repr(record["config"]): {key: record[key] for key in keys} for record in records}
        )
    together, apart = found
    assert together == apart and len({record["outputs_sha256"] for record in apart.values()}) == 3
    assert num_prefills == [130, *[130, 97, 70]]


@pytest.mark.narrow("values")
@pytest.mark.parametrize("most", [128, 7])
@pytest.mark.parametrize("words", FORKED.values(), ids=FORKED)
def test_forks_accept_what_verifications_step_by_step_accept(
    words: str, most: int, command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """At every position, also where a text ends early and where a batch of forks is of several
    texts. Every 24th token ends a text."""

    def ending(section: Any, count: int, ends: Any, number: int) -> Any:
        return make_params(section, count, ENDS, number)

    monkeypatch.setattr(groups, "make_params", ending)
    monkeypatch.setattr(forks, "MOST_FORKS", most)
    workload = "--prefix_len 100 --gen_len 25 --B 5 --dtype float32 --threads 1 --gamma 4"
    found = []
    for name in ("forks", "steps"):
        out = tmp_path / f"{name}.jsonl"
        if name == "steps":
            monkeypatch.setattr(measuring, "can_fork", lambda run: False)
        ended = command("acceptance", *words.split(), *workload.split(), "--out", out)
        assert ended.code == 0, ended.err
        records = [json.loads(line) for line in out.read_text().splitlines()]
        assert {record["is_forked"] for record in records} == {name == "forks"}
        keys = ("accepted", "drafted", "rows", "outputs_sha256")
        found.append([{key: record[key] for key in keys} for record in records])
    assert found[0] == found[1]
    lengths = [len(text) for text in found[0][0]["accepted"]]
    assert min(lengths) < 24 and sum(lengths) > 40, lengths


HYBRID = {
    "self streaming_llm 33": "--draft self --budget 33",
    "self snapkv 49": "--draft self --budget 49 --kv_policy snapkv",
    "self:int8 retrieval 81": (
        "--draft self --draft_weights int8 --budget 81 --kv_policy retrieval"
    ),
    "mtp full": "--draft mtp --kv_policy full",
    "ngram": "--draft ngram",
}
HYBRID_DRAFTS = (
    "self,budget=33 self,kv_policy=snapkv,budget=49 self:int8,kv_policy=retrieval,budget=81 "
    "mtp,kv_policy=full ngram"
)


@pytest.fixture(scope="module")
def hybrid(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = the_model(find_model("--model", str(tiny_checkpoint)).config.vocab_size)
    head = PlainMtpHead(target)
    head.fit()
    folder = tmp_path_factory.mktemp("hybrid")
    save_with_tokenizer(target, folder, tiny_checkpoint)
    head.add_to(folder)
    return folder


def test_drafts_of_layers_with_states_accept_what_the_table_says(
    hybrid: Path, command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After a prefill for all drafts, of another context too: no text forks from states."""
    num_prefills = []
    prefill = Engine.prefill

    def count(engine: Engine, requests: Any, *more: Any) -> Any:
        num_prefills.append(len(requests[0].prompt_ids))
        return prefill(engine, requests, *more)

    monkeypatch.setattr(Engine, "prefill", count)
    workload = f"{WORKLOAD} --model {hybrid}"
    out = tmp_path / "table.jsonl"
    words = ["--draft", *HYBRID_DRAFTS.split(), *workload.split(), "--gamma", MOST]
    ended = command("acceptance", *words, "--prefix_len", 100, 160, "--out", out)
    assert ended.code == 0, ended.err
    assert num_prefills == [160, 100]
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert not any(record["is_forked"] for record in records)
    table = {name_of(r): r for r in records if r["config"]["workload"]["prefix_len"] == 160}
    assert set(table) == set(HYBRID) and len(records) == 2 * len(HYBRID)
    assert len({record["outputs_sha256"] for record in records}) == 2
    accepted = set()
    for name, draft in HYBRID.items():
        folder = tmp_path / name.replace(" ", "-")
        given = f"{draft} --gamma {MOST}"
        with monkeypatch.context() as patch:
            pairs = pairs_of(command, patch, folder, table[name], given, workload)
        assert [ours for ours, _ in pairs] == [theirs for _, theirs in pairs], name
        assert len(pairs) > (0 if name == "ngram" else 12)
        accepted |= {(name, ours) for ours, _ in pairs}
    assert len(accepted) > 12


def test_a_draft_model_with_states_does_not_fork(
    hybrid: Path, tiny_checkpoint: Path, command: Command, monkeypatch: Any, tmp_path: Path
) -> None:
    words = f"--draft model:{hybrid} --kv_policy full --gamma {MOST}"
    workload = f"{WORKLOAD} --model {tiny_checkpoint}"
    out = tmp_path / "table.jsonl"
    ended = command("acceptance", *words.split(), *workload.split(), "--out", out)
    assert ended.code == 0, ended.err
    (record,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert not record["is_forked"]
    pairs = pairs_of(command, monkeypatch, tmp_path, record, words, workload)
    assert len(pairs) > 12 and [ours for ours, _ in pairs] == [theirs for _, theirs in pairs]
