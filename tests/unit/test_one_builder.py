"""A decoder is built at one place, and so is a recorder; prefill keeps what the drafter needs."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from pathlib import Path

import pytest
import torch
from conftest import make_runner, tiny_transformer

from magicdec.config.sections import DecodingSection, KVSection
from magicdec.names import BASELINE
from magicdec.runner.forward_batch import ForwardBatch
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.observers.attention import AttentionQueries
from magicdec.runner.observers.prompt_queries import PromptQueries
from magicdec.speculation.steps.build import build_decoder

PACKAGE = Path(__file__).parents[2] / "magicdec"
SNAPKV = KVSection("snapkv", 20, window_size=6)
HOMES = {
    "make_strategy": {"speculation/steps/build.py"},
    "Setup": {"speculation/steps/build.py"},
    "CudaGraphs": {"speculation/steps/recorder.py"},
    "make_drafter": {
        "speculation/steps/speculative.py",
        "speculation/mixed.py",
        "systems/mdi_llm/recurrent.py",  # whose first stage drafts, and judges what comes home
        "bench/acceptance/forks.py",  # whose drafts are compared with how a text goes on
    },
    "acceptance_metrics": {
        "records/computing.py",
        "predict/simulator/run.py",
        "llm.py",
    },
}


def test_what_decodes_is_built_at_one_place() -> None:
    """By the files of the package that call a function or a class of one of these names."""
    callers: dict[str, set[str]] = {name: set() for name in HOMES}
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if not any(f"{name}(" in text for name in HOMES):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                callers.get(node.func.id, set()).add(path.relative_to(PACKAGE).as_posix())
    assert callers == HOMES


@pytest.mark.parametrize("has_copy", [False, True])
def test_prefill_keeps_the_queries_of_the_decoder_that_was_built_last(has_copy: bool) -> None:
    """Of a running batch; prompts that are in the cache keep theirs."""
    runner = make_runner(tiny_transformer(), 2, 100)
    if has_copy:
        runner = runner.with_draft_runner(runner.with_model(tiny_transformer(), None))
    decoding = DecodingSection("speculative", "self", 3)
    build_decoder(runner, decoding, SNAPKV)
    assert runner.observer(PromptQueries) is None
    build_decoder(runner, decoding, SNAPKV, is_in_flight=True)
    kept = runner.observer(PromptQueries)
    assert kept is not None and runner.drafting_runner.observers == [kept]
    build_decoder(runner, decoding, SNAPKV, name=BASELINE)
    assert runner.observer(PromptQueries) is kept
    for options in ({"name": BASELINE}, {"is_in_flight": True}):
        lookup = DecodingSection("speculative", "ngram", 3)
        section = decoding if "name" in options else lookup
        build_decoder(runner, section, SNAPKV, **{"is_in_flight": True} | options)  # type: ignore[arg-type]
        assert runner.observers == [] and runner.drafting_runner.observers == []
        build_decoder(runner, decoding, SNAPKV, is_in_flight=True)


def test_a_runner_is_whole_when_it_is_made() -> None:
    """One with a draft runner shares what it computes with that before; a cache of its own shares
    the counts, and every runner the observers."""
    target = make_runner(tiny_transformer(), 2, 100)
    runner = target.with_draft_runner(target.with_model(tiny_transformer(), None))
    copied = runner.with_cache(30)
    assert runner.draft_runner is runner.drafting_runner is not runner
    assert runner.caches is target.caches is runner.drafting_runner.caches
    assert runner.counts is target.counts is copied.counts is not runner.drafting_runner.counts
    assert copied.caches is not runner.caches and copied.drafting_runner is copied
    observer = PromptQueries(3)
    target.set_observer(PromptQueries, observer)
    for made in (target, runner, copied, runner.drafting_runner):
        assert made.observer(PromptQueries) is observer
    assert [f.name for f in dataclasses.fields(ModelRunner) if not f.init] == []


def test_a_forward_has_one_signature() -> None:
    for name in ("forward", "enqueue"):
        method = getattr(ModelRunner, name)
        assert list(inspect.signature(method).parameters) == ["self", "batch"]


def test_who_observes_one_forward_sees_no_other() -> None:
    runner = make_runner(tiny_transformer(), 2, 100)
    runner.allocate(0)
    always = AttentionQueries()
    once = AttentionQueries()
    runner.set_observer(AttentionQueries, always)
    runner.forward(ForwardBatch([[1, 2, 3]], [0], observers=[once]))
    first = once.layers
    assert first and all(torch.equal(first[layer], always.layers[layer]) for layer in first)
    once.layers = {}
    runner.forward(ForwardBatch([[4]], [0]))
    assert once.layers == {} and always.layers[0].shape[1] == 1
    assert runner.observers == [always]
