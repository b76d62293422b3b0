"""Cases of the gate on several ranks: what comes back of them, and that it repeats."""

from dataclasses import replace

import pytest

from magicdec.bench.gate.cases import DRAFT_BUDGET, GAMMA, Case, Subject, standard_cases
from magicdec.bench.gate.measuring import Result, measure, run_cases
from magicdec.config.sections import KVSection, ModelSection, ParallelSection
from magicdec.records.comparison.compare import compare
from magicdec.records.pass_record import PassRecord, RequestRecord
from magicdec.records.record import Status
from magicdec.runner.observers.draft_log import DIGITS

SUBJECT = Subject(prefix_len=DRAFT_BUDGET + 63, batch_size=4, num_batches=1, gen_len=12)
BATCHES = [case for case in standard_cases(SUBJECT) if case.shares_prefill]
# One whose draft is the target itself, and one whose draft is on the last rank.
EVERY = [case.with_threads(1) for case in BATCHES if case.config.parallel.nproc]
ON_RANKS = [EVERY[0], EVERY[-1]]
OTHER = replace(ON_RANKS[0].config, model=ModelSection("no/such_model", "float32"))
ABSENT = replace(ON_RANKS[0], config=OTHER)
ALONE = SUBJECT.case("self", KVSection("streaming_llm", DRAFT_BUDGET), GAMMA).with_threads(1)


@pytest.fixture(scope="module")
def found() -> list[Result]:
    """Of each case on ranks, then of the first again, of one that is refused, and of one on one
    rank."""
    return measure([*ON_RANKS, ON_RANKS[0], ABSENT, ALONE], 2, lambda result: None)


def first_of(result: Result) -> RequestRecord:
    """The first request of a record."""
    assert isinstance(result, PassRecord), result
    return result.requests[0]


@pytest.mark.wide
def test_cases_on_ranks_have_whole_records(found: list[Result]) -> None:
    *on_ranks, again, absent, alone = found
    for record in on_ranks:
        assert isinstance(record, PassRecord) and record.status == Status.VERIFIED
        (group,) = record.groups
        assert record.environment.world_size == 2 and group.threads == [1, 1]
        assert record.config["model"]["native_steps"] == "on"
        hashes = [request.draft_hashes or [] for request in record.requests]
        assert max(map(len, hashes)) == len(group.step_ms) and all(hashes)
        assert {len(digest) for request_hashes in hashes for digest in request_hashes} == {
            2 * DIGITS
        }
    assert isinstance(again, PassRecord)
    same = compare([again], [record for record in on_ranks if isinstance(record, PassRecord)])
    assert [(c.verdict, c.rule) for c in same] == [("same", "exact")], same
    assert isinstance(absent, str) and "no/such_model" in absent and "rank" not in absent
    ours = first_of(on_ranks[0]).num_draft_kv_read
    theirs = first_of(alone).num_draft_kv_read
    assert ours is not None and theirs is not None
    assert ours[0] == theirs[0], "keys that one KV head reads"
    assert isinstance(alone, PassRecord) and alone.environment.world_size == 1


@pytest.mark.wide
def test_the_log_of_a_draft_on_another_rank_is_in_the_record(found: list[Result]) -> None:
    """The record is made on the first rank, which drafts nothing here. The same draft on one rank
    reads the same number of keys."""
    config = ON_RANKS[-1].config
    draft = config.draft
    assert draft is not None
    config = replace(
        config,
        draft=replace(draft, rank_group=None),
        parallel=ParallelSection(device="cpu", threads=1),
    )
    ((_, alone),) = run_cases([(0, Case(config))])
    ours = first_of(found[len(ON_RANKS) - 1]).num_draft_kv_read
    theirs = first_of(alone).num_draft_kv_read
    assert ours is not None and theirs is not None
    assert ours[0] == theirs[0] and ours[0] > 0
