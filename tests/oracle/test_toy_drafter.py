"""A drafter is a file and a line in the name table: one of a few lines drafts in every command."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import decode_both, make_requests, make_runner, random_prompts, tiny_transformer

from magicdec.attention.native import NativeBackend
from magicdec.config import run_config
from magicdec.config.run_config import RunConfig, example_of
from magicdec.config.sections import KVSection
from magicdec.names import DRAFTERS
from magicdec.records.comparison.conditions import policy_of
from magicdec.runner.device_batch import DeviceBatch
from magicdec.runner.sampling.model_tokens import Proposal
from magicdec.speculation.drafter import Drafter, DraftSetup, DraftShape

NAME = "repeat"
GAMMA = 3


class RepeatDrafter(Drafter):
    """A drafter of the newest token, again and again."""

    has_probabilities = False

    @classmethod
    def build(cls, setup: DraftSetup) -> RepeatDrafter:
        return cls()

    def propose(self, batch: DeviceBatch, shape: DraftShape) -> Proposal:
        return Proposal(batch.newest[:, -1:].repeat(1, shape.gamma))


@pytest.fixture(autouse=True)
def line_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DRAFTERS, NAME, f"{__name__}:{RepeatDrafter.__name__}")


@pytest.mark.parametrize("backend", [None, NativeBackend], ids=["default", "native"])
def test_a_drafter_of_a_few_lines_emits_the_targets_tokens(
    backend: Callable[[], NativeBackend] | None,
) -> None:
    """It accepts as many drafts as the output repeats a token."""
    model = tiny_transformer()
    lengths = [40, 9, 23]
    runner = make_runner(model, len(lengths), 120, *(() if backend is None else (backend(),)))
    requests = make_requests(random_prompts(lengths, model.config.vocab_size), 60)
    section = KVSection("full")
    baseline, tokens, accepted = decode_both(runner, requests, section, GAMMA, drafter=NAME)
    assert tokens == baseline and accepted
    repeats = 0
    for row in baseline:
        repeats += sum(one == other for one, other in pairwise(row))
    assert 0 < sum(map(sum, accepted)) <= repeats


def test_flags_name_it_and_it_has_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    choices = (*map(example_of, DRAFTERS), "none")
    assert NAME in choices and NAME not in run_config.DRAFTS
    config = RunConfig().with_draft(NAME, choices)
    config.check(1)
    decoding = config.decoding
    assert decoding.drafter == NAME and decoding.model_drafter is None and config.draft is None
    assert not (decoding.drafts_itself or decoding.has_draft_model or decoding.looks_up)
    assert policy_of({"decoding": {"drafter": NAME}, "kv": {"policy": "full"}}) is None


def test_no_other_file_of_the_package_knows_it() -> None:
    """The word stands nowhere as a string, so that nothing asks for it by name."""
    package = Path(run_config.__file__).parents[1]
    found = [p for p in package.rglob("*.py") if f'"{NAME}"' in p.read_text(encoding="utf-8")]
    assert found == []
