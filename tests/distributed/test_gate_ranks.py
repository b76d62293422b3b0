"""Cases of the gate on several ranks: what comes back of them, and that it repeats."""

from dataclasses import replace

import pytest

from magicdec.bench.gate.cases import DRAFT_BUDGET, GAMMA, Subject, standard_cases
from magicdec.bench.gate.measuring import Result, measure, run_cases, with_threads
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import KVSection, ModelSection, ParallelSection
from magicdec.records.comparison.compare import compare
from magicdec.records.record import RunRecord
from magicdec.records.samples import PassSamples
from magicdec.runner.observers.draft_log import DIGITS

SUBJECT = Subject(prefix_len=DRAFT_BUDGET + 63, batch_size=4, num_batches=1, gen_len=12)
RUNS = [case for case in standard_cases(SUBJECT) if isinstance(case, RunConfig)]
# One whose draft is the target itself, and one whose draft is on the last rank.
ON_RANKS = [with_threads(c, 1) for c in RUNS if c.parallel.nproc]
ON_RANKS = [ON_RANKS[0], ON_RANKS[-1]]
ABSENT = replace(ON_RANKS[0], model=ModelSection("no/such_model", "float32"))
ALONE = with_threads(SUBJECT.config("self", KVSection("streaming_llm", DRAFT_BUDGET), GAMMA), 1)


@pytest.fixture(scope="module")
def found() -> list[Result]:
    """Of each case on ranks, then of the first again, of one that is refused, and of one on one
    rank."""
    return measure([*ON_RANKS, ON_RANKS[0], ABSENT, ALONE], 2, lambda result: None)


def samples_of(result: Result) -> PassSamples:
    assert isinstance(result, RunRecord) and result.samples is not None, result
    return result.samples["speculative"].restored()


@pytest.mark.wide
def test_cases_on_ranks_have_whole_records(found: list[Result]) -> None:
    *on_ranks, again, absent, alone = found
    for record in on_ranks:
        samples = samples_of(record)
        assert isinstance(record, RunRecord) and record.status == "ok"
        assert record.environment.world_size == 2 and samples.threads == [[1, 1]]
        assert record.config["model"]["native_steps"] == "on"
        hashes = samples.draft_hashes
        assert hashes is not None and len(hashes[0]) == len(samples.step_ms[0])
        assert {len(each) for step in hashes[0] for each in step} == {2 * DIGITS}
    assert isinstance(again, RunRecord)
    same = compare([again], [record for record in on_ranks if isinstance(record, RunRecord)])
    assert [(c.verdict, c.rule) for c in same] == [("same", "exact")], same
    assert isinstance(absent, str) and "no/such_model" in absent and "rank" not in absent
    ours = samples_of(on_ranks[0])
    theirs = samples_of(alone)
    assert ours.draft_keys is not None and theirs.draft_keys is not None
    assert ours.draft_keys[0][0] == theirs.draft_keys[0][0], "keys that one KV head reads"
    assert isinstance(alone, RunRecord) and alone.environment.world_size == 1


@pytest.mark.wide
def test_the_log_of_a_draft_on_another_rank_is_in_the_record(found: list[Result]) -> None:
    """The record is made on the first rank, which drafts nothing here. The same draft on one rank
    reads the same number of keys."""
    draft = ON_RANKS[-1].draft
    assert draft is not None
    config = replace(
        ON_RANKS[-1],
        draft=replace(draft, rank_group=None),
        parallel=ParallelSection(device="cpu", threads=1),
    )
    ((_, alone),) = run_cases([(0, config)])
    ours = samples_of(found[len(ON_RANKS) - 1])
    theirs = samples_of(alone)
    assert ours.draft_keys is not None and theirs.draft_keys is not None
    assert ours.draft_keys[0][0] == theirs.draft_keys[0][0] and min(ours.draft_keys[0][0]) > 0
