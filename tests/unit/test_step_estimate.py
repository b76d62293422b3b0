"""The first step times of `--gamma auto` from a machine file: predicted as in `magicdec plan`, and
refused where the file belongs to another machine."""

import datetime
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from conftest import TINY

from magicdec.config.resolve import resolve
from magicdec.config.resolved import ResolvedConfig
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import (
    DecodingSection,
    DraftSection,
    KVSection,
    ModelSection,
    ParallelSection,
)
from magicdec.cost_model.costs import Deployment
from magicdec.cost_model.speculation import Speculation, StepEstimate
from magicdec.distributed.groups import Launch
from magicdec.hardware.ceiling_file import Hardware, Link, MachineFile
from magicdec.hardware.environment import describe_environment, probe_machine
from magicdec.names import DTYPES
from magicdec.setup.prepare import estimate_steps

ALONE = Launch(0, 1, 0, 1)
TARGET = Deployment(TINY, Hardware(1e9, 1e10, 1e-4), 4)
SMALL = replace(TINY, num_layers=1)


def save(path: Path, **changed: object) -> Path:
    """A file that was measured here with one thread."""
    now = datetime.datetime.now(datetime.timezone.utc)
    description = {**asdict(describe_environment(ALONE, "cpu", now)), "threads": 1, **changed}
    of_each = [dict.fromkeys(DTYPES, rate) for rate in (1e11, 2e-4, 3e10, 5e10, 1e-6)]
    flops, overhead, kv, attention, token = of_each
    link = Link(1e-5, 1e9)
    MachineFile(description, 4e10, flops, overhead, kv, link, None, attention, token).save(path)
    return path


def make_config(path: Path | None, drafter: str = "self", policy: str = "snapkv") -> ResolvedConfig:
    machine = None if path is None else str(path)
    return resolve(
        RunConfig(
            model=ModelSection("demo", "float32"),
            draft=DraftSection() if drafter == "model" else None,
            parallel=ParallelSection(device="cpu", threads=1),
            kv=KVSection(policy, 100),
            decoding=DecodingSection("speculative", drafter, "auto", machine=machine),
        ),
        probe_machine(ALONE),
    )


def test_it_predicts_the_steps_of_a_plan() -> None:
    for budget, draft in ((50, TARGET), (10**6, TARGET), (50, replace(TARGET, config=SMALL))):
        estimate = StepEstimate(TARGET, draft, budget, 8)
        plan = Speculation(TARGET, draft, budget, 0.8)
        found = estimate(4, 1000)
        for count, seconds in enumerate(found):
            expected = plan.predict(4, 1000, count)
            total = expected.decode_s
            if expected.draft_s is not None and expected.verify_s is not None:
                total = expected.draft_s + expected.verify_s
            assert seconds == pytest.approx(total)
        assert len(found) == 9
    everything = StepEstimate(TARGET, TARGET, None, 8)
    assert everything(4, 1000) == StepEstimate(TARGET, TARGET, 1000, 8)(4, 1000)
    lookup = StepEstimate(TARGET, None, None, 8)(2, 500)
    assert lookup == [TARGET.seconds(2, 1 + count, 500) for count in range(9)]


@pytest.mark.parametrize(
    ("drafter", "policy", "budget"),
    [("self", "snapkv", 100), ("self", "full", None), ("model", "streaming_llm", 100)],
)
def test_it_follows_the_config(
    drafter: str, policy: str, budget: int | None, tmp_path: Path
) -> None:
    path = save(tmp_path / "machine.json")
    found = estimate_steps(make_config(path, drafter, policy), TINY, SMALL, ALONE)
    assert found is not None and found.budget == budget and found.most_draft_tokens == 8
    assert found.target.config is TINY and found.target.dtype_bytes == 4
    assert found.draft is not None
    assert found.draft.config is (SMALL if drafter == "model" else TINY)


def test_prompt_lookup_has_no_model_that_drafts(tmp_path: Path) -> None:
    found = estimate_steps(
        make_config(save(tmp_path / "machine.json"), "ngram", "full"), TINY, None, ALONE
    )
    assert found is not None and found.draft is None


def test_without_a_file_there_is_none() -> None:
    assert estimate_steps(make_config(None), TINY, None, ALONE) is None


@pytest.mark.parametrize(
    "changed", [{"threads": 7}, {"world_size": 2}, {"cpu": "another"}, {"gpu": "H100"}], ids=str
)
def test_a_file_of_another_machine_is_refused(changed: dict[str, object], tmp_path: Path) -> None:
    path = save(tmp_path / "machine.json", **changed)
    with pytest.raises(ValueError, match=f"--machine .* was measured with {next(iter(changed))}"):
        estimate_steps(make_config(path), TINY, None, ALONE)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--machine .* No such file"):
        estimate_steps(make_config(tmp_path / "none.json"), TINY, None, ALONE)


def test_the_file_is_for_gamma_auto() -> None:
    config = RunConfig(decoding=DecodingSection("speculative", "self", 4, machine="m.json"))
    with pytest.raises(ValueError, match=r"--machine m.json is for --gamma auto.* --gamma is 4"):
        config.check(1)
