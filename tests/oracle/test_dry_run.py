"""Decoding on a GPU that is not there (`pretend_cuda.py`): real values on tensors that say they are
on `cuda:0`. The tokens are the CPU's, no operator mixes devices, and the host waits for the device
only where `LISTED` says so: once in each step, and else while something is built or admitted.

What a GPU itself does is not tested: its kernels, their order, its memory, and its graphs, for
which `recorder.py` stands in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pretend_cuda
import pytest
import test_in_flight
import test_low_bit
import test_replay
import torch
from conftest import (
    TINY,
    make_draft,
    make_requests,
    make_runner,
    random_prompts,
    tiny_transformer,
)
from launches import BesideLayers
from pretend_cuda import DEVICE, MixedDevices, OnDevice, waits
from recorder import StandInRecorder
from several_ranks import generate_alone
from test_replay import (
    MIXED,
    PAIRS,
    SCRIPT,
    OneAlone,
    all_launches,
    interprets,
    launches,
    run,
    section_of,
    started,
)
from threaded_pipeline import divide, serve
from two_stages import serve_with_drafts

from magicdec.attention import triton
from magicdec.attention.sdpa import SDPABackend
from magicdec.attention.triton import TritonBackend
from magicdec.config.choices.backend import choose_graphs
from magicdec.config.choices.choice import Choice
from magicdec.config.sections import KVSection, SamplingSection
from magicdec.engine.engine import Engine
from magicdec.kv.cache import BatchRows
from magicdec.model.checkpoint.quantization import low_bit_copy
from magicdec.model.elementwise.triton import TritonElementwise
from magicdec.runner.forward_batch import ForwardBatch
from magicdec.runner.sampling.coupled import CoupledSampling
from magicdec.speculation.policies.policy import make_draft_kv
from magicdec.systems.pipeinfer.options import Options
from magicdec.systems.pipeinfer.path_drafter import ModelPathDrafter
from magicdec.systems.pipeinfer.run_stage import RunStage

__all__ = ["all_launches", "launches", "waits"]  # fixtures

STEP = "speculation/steps/steps._read: tolist"
LISTED = {
    STEP,
    # When models, caches and groups are made.
    "model/transformer.set_positions: upload",
    "distributed/groups.all_gather_range: upload",
    "distributed/groups.all_gather_range: tolist",
    # When prompts are complete.
    "runner/prefill.prefill: tolist",
    "runner/prefill.__init__: synchronize",
    "runner/prefill.seconds: synchronize",
    # When a pass begins or ends, and when a step is captured.
    "kv/forward_counts.copy: tolist",
}
# Drafts are measured before their number is chosen.
MEASUREMENT_WAITS = {"speculation/steps/calibration._measure: tolist"}
# Whether a chain goes on under `--pa`, which captured steps refuse.
PA_WAITS = {
    "speculation/draft_kv.draft_chain: is_nonzero",
    "speculation/drafter.proposal_of_source: item",
}
SHORT = [12, 6, 18, 3, 10]  # new tokens: every operator here takes much longer than elsewhere
STAGE_WAITS = {
    "distributed/channels/message.wait_for_stream: synchronize",
    "systems/mdi_llm/recurrent._tokens: tolist",
    "systems/mdi_llm/recurrent.judge: tolist",
    "systems/pipeinfer/run_stage.predict: download",
    "systems/pipeinfer/path_drafter._learn: tolist",
}


FEW_PAIRS = [
    pair
    if pair in (("self", "streaming_llm"), ("model", "snapkv"))
    else pytest.param(*pair, marks=pytest.mark.wide)
    for pair in [(None, None), *PAIRS, *MIXED]
]


def check(waits: Counter[str], listed: set[str] = LISTED) -> None:
    assert set(waits) <= listed, sorted(set(waits) - listed)


@pytest.mark.narrow(2, "pairs")
@pytest.mark.parametrize("kind", ["greedy", "mixed"])
@pytest.mark.parametrize("captures", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize(("drafter", "policy"), FEW_PAIRS, ids=str)
@pytest.mark.usefixtures("trusted_lookups")
def test_a_step_waits_once(
    drafter: str | None,
    policy: str | None,
    captures: bool,
    kind: str,
    waits: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prefill, drafts, verification and truncation; a standalone draft has its own cache."""
    monkeypatch.setattr(test_replay, "NUM_NEW", SHORT)
    kv = section_of(policy)
    tokens, accepted, _ = run(*started(kind), drafter, kv, 4, None)
    assert not waits, "nothing is on the device"
    engine, snapshots = started(kind, device=str(DEVICE))
    recorder = StandInRecorder() if captures else None
    found = run(engine, snapshots, drafter, kv, 4, recorder)
    resamples = kind == "mixed" and (drafter, policy) == ("model", "snapkv")
    assert found[:2] == (tokens, accepted) or (captures and resamples)
    assert isinstance(engine.runner.cache.k, OnDevice)
    check(waits)
    assert waits[STEP] == len(found[1]) and waits["runner/prefill.prefill: tolist"] == 1


@pytest.mark.wide
@pytest.mark.parametrize("captures", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize(("drafter", "policy"), [("self", "snapkv"), ("model", "full")])
def test_steps_of_any_draft_lengths_wait_once(
    drafter: str, policy: str, captures: bool, waits: Counter[str]
) -> None:
    """The measurement of `--gamma auto` comes first, which waits for each of its drafts."""
    kv = section_of(policy)
    tokens, *_ = run(*started(), drafter, kv, "auto", None, OneAlone(SCRIPT))
    recorder = StandInRecorder() if captures else None
    found = run(*started(device=str(DEVICE)), drafter, kv, "auto", recorder, OneAlone(SCRIPT))
    assert found[0] == tokens
    check(waits, LISTED | MEASUREMENT_WAITS)


@pytest.mark.wide
@interprets
@pytest.mark.parametrize("captures", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("policy", ["streaming_llm", "verified"])
def test_attention_by_triton(
    policy: str,
    captures: bool,
    launches: list[str],
    waits: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its kernels are interpreted, over tensors of the device alone."""
    monkeypatch.setattr(triton, "count_resident", lambda *kernel: 4)  # nothing is compiled
    config = replace(TINY, num_layers=1, num_heads=2, num_kv_heads=1)

    def decoded(device: torch.device, recorder: StandInRecorder | None) -> object:
        model = tiny_transformer(config).to(device)
        engine = Engine(make_runner(model, 2, 32, TritonBackend(2)), 26)
        requests = make_requests(random_prompts([26, 1], 97), [3, 4])
        snapshots = engine.prefill(requests)
        kv = KVSection(policy, 20, 4, 8)
        return run(engine, snapshots, "self", kv, 2, recorder)[:2]

    expected = decoded(torch.device("cpu"), None)
    launches.clear()
    assert decoded(DEVICE, StandInRecorder() if captures else None) == expected
    assert ("sum_mass" in launches) == (policy == "verified")
    check(waits)


# What a forward launches beside its layers, by the function that asks for it.
A_FORWARD = {
    "kv/kernel_view.compute: ours": 1,
    "model/transformer._embed: aten.embedding": 1,
    "model/transformer._position_encodings: aten.index": 1,
    "model/elementwise/triton._launch_norm: ours": 1,
    "model/transformer._multiply_head: aten.linear": 1,
    "kv/cache.advance: aten.index_add_": 1,
    "runner/model_runner._run_layers: aten.index_add_": 1,
}
A_STEP = {  # of a captured verification of 4 drafts, and of these
    "full": (28, 48),
    "streaming_llm": (28, 52),
    "snapkv": (29, 97),
    "verified": (30, 109),
}
A_LIST = {"attention/triton.list_keys: ours": 1}  # of keys, where a draft does not see all
IN_COPY = {  # the lengths in SnapKV's copies
    "speculation/policies/snapkv._shifted: aten.index": 1,
    "speculation/policies/snapkv._shifted: aten.add": 1,
}


@pytest.mark.wide
@interprets
@pytest.mark.parametrize("policy", ["full", "streaming_llm", "snapkv", "verified"])
def test_a_forward_launches_few_kernels_beside_its_layers(
    policy: str, all_launches: list[str], waits: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode, a verification of 5 tokens and a draft after the first of a step, as they are
    captured; and what a whole verification of 4 drafts launches, and the drafts. The numbers are
    those of docs/gpu.md. Kernels are interpreted and those of layers not counted, so that one
    layer is enough, except where a policy keeps something of each, and so are keys that are not
    split."""
    monkeypatch.setattr(triton, "count_resident", lambda *kernel: 4)  # nothing is compiled
    layers = 2 if policy == "verified" else 1
    config = replace(TINY, num_layers=layers, num_heads=2, num_kv_heads=1)
    model = tiny_transformer(config).to(DEVICE)
    model.use(TritonElementwise())
    runner = make_runner(model, 2, 48, TritonBackend(1))
    engine = Engine(runner, 40)
    requests = engine.prefill(make_requests(random_prompts([26, 22], 97), [2, 2]))
    section = KVSection(policy, -1 if policy == "full" else 20, 4, 8)
    kv = make_draft_kv(runner, section)
    rows = BatchRows.of([0, 1], DEVICE, 6)
    kv.admit(requests)
    ids = torch.ones(2, 5, dtype=torch.int64, device=DEVICE)
    committed = kv.lengths(rows)

    @torch.inference_mode()
    def launched(forward: Callable[[], torch.Tensor]) -> dict[str, int]:
        forward()
        with BesideLayers() as operators:
            forward()
        return dict(operators.counts)

    assert launched(lambda: runner.forward(ForwardBatch(ids[:, :1], rows))) == A_FORWARD
    runner.truncate([0, 1], [26, 22])
    assert launched(lambda: runner.forward(ForwardBatch(ids, rows))) == A_FORWARD
    runner.truncate([0, 1], [26, 22])
    own = A_FORWARD if policy == "full" else A_FORWARD | A_LIST
    own |= IN_COPY if policy == "snapkv" else {}
    assert launched(lambda: kv.forward(ids[:, :1], rows, committed, num_outputs=1)) == own

    class Counted(StandInRecorder):
        def record(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
            with BesideLayers() as operators:
                replay = super().record(work)
            totals.append(operators.counts.total())
            return replay

    totals: list[int] = []
    run(engine, requests, "self", section, 4, Counted())
    assert tuple(totals) == A_STEP[policy]


@pytest.mark.wide
@interprets
@pytest.mark.parametrize("captures", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_low_bit_drafts_by_triton(
    weights: str,
    captures: bool,
    all_launches: list[str],
    waits: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their products are our kernel's, as on a GPU. The sizes are multiples of a group of int4, and
    there is one layer and the outputs are short, because the kernel is interpreted."""
    config = replace(test_low_bit.SMALL, num_layers=1)
    monkeypatch.setattr(test_replay, "TINY", config)
    monkeypatch.setattr(test_replay, "NUM_NEW", [4, 3, 6, 2, 5])
    kv = section_of("streaming_llm")
    tokens = run(*started(), None, kv, 3, None)[0]
    model = tiny_transformer(config)
    copy = low_bit_copy(model, weights, False).to(DEVICE)
    engine, requests = started(device=str(DEVICE))
    runner = engine.runner
    engine = engine.with_runner(runner.with_draft_runner(runner.with_model(copy, None)))
    found = run(engine, requests, "self", kv, 3, StandInRecorder() if captures else None)
    assert found[0] == tokens and any(map(any, found[1])), "some drafts are accepted"
    assert set(all_launches) == {"multiply_groups"}
    check(waits)
    assert waits[STEP] == len(found[1])


@pytest.mark.wide
@pytest.mark.usefixtures("trusted_lookups")
@pytest.mark.parametrize(
    ("drafter", "policy"), [("self", "streaming_llm"), ("model", "full"), *MIXED[:1]], ids=str
)
def test_chains_that_stop(drafter: str, policy: str, waits: Counter[str]) -> None:
    """The host waits for each draft token under `--pa`, and for nothing else."""
    kv = section_of(policy)
    expected = run(*started(), drafter, kv, 4, None, pa=0.02)
    found = run(*started(device=str(DEVICE)), drafter, kv, 4, None, pa=0.02)
    assert found[:2] == expected[:2]
    check(waits, LISTED | PA_WAITS)
    assert set(waits) & PA_WAITS


def test_graphs_of_stages_and_of_chains_that_stop_are_refused() -> None:
    sdpa = [Choice("sdpa")]
    for arguments, reason in (
        ({"pa": 0.3}, "the host decides in each draft whether --pa 0.3 stops it"),
        ({"is_staged": True}, "the steps of a pipeline are not captured"),
    ):
        with pytest.raises(ValueError, match=reason):
            choose_graphs("on", "cuda", sdpa, **arguments)


@pytest.mark.wide
@pytest.mark.narrow("values")
@pytest.mark.parametrize("captures", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize(
    ("drafter", "policy"), [(None, "full"), ("self", "verified"), ("model", "full")]
)
def test_requests_in_flight(
    drafter: str | None,
    policy: str,
    captures: bool,
    waits: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the schedules of test_in_flight.py, which compares with what a request emits alone on the
    CPU."""
    monkeypatch.setattr(test_in_flight, "NativeBackend", lambda: SDPABackend(8))
    kv = KVSection(policy, 20 if policy == "verified" else -1, 2, recent_window=2)
    seeds = [9, 11]
    monkeypatch.setattr(test_in_flight, "MODEL", tiny_transformer(seed=1).to(DEVICE))
    test_in_flight.check_seeds(seeds, drafter, kv, captures)
    check(waits, LISTED | MEASUREMENT_WAITS | (set() if captures else PA_WAITS))
    assert waits[STEP] > 0


@pytest.mark.wide
@pytest.mark.parametrize("drafter", ["ngram", "model"])
def test_a_ring_of_stages(drafter: str, waits: Counter[str]) -> None:
    def served(device: str | torch.device) -> list[list[int]]:
        requests = make_requests(random_prompts([5, 40, 1, 33], 97), [20, 9, 20, 14])
        model = tiny_transformer().to(device)
        draft = None
        if drafter == "model":
            draft = make_draft(tiny_transformer(seed=1).to(device), KVSection("full", -1), 4, 90)
        serve_with_drafts(model, requests, (2, 2), 90, 3, drafter, draft)
        return [request.output_ids for request in requests]

    assert served(DEVICE) == served("cpu")
    check(waits, LISTED | STAGE_WAITS)


@pytest.mark.wide
@pytest.mark.parametrize("mode", ["pipeline", "pipeline+draft", "pipeinfer"])
def test_a_pipeline_of_stages(mode: str, waits: Counter[str]) -> None:
    model = tiny_transformer(replace(TINY, num_layers=3))
    expected, requests = (
        make_requests(random_prompts([5, 40, 1, 33], 97), [20, 9, 20, 14]) for _ in "ab"
    )
    tokens = generate_alone(model, expected, 90)
    parts = [RunStage(make_runner(part.to(DEVICE), 2, 90)) for part in divide(model, 3)]
    full = KVSection("full", -1)
    draft = make_draft(tiny_transformer(seed=1).to(DEVICE), full, 2, 90, max_drafts=20)
    drafter = ModelPathDrafter(draft, full, TINY.vocab_size, CoupledSampling(SamplingSection()))
    serve(parts, drafter, Options(mode=mode, gamma=3, pa=0.1, lanes=2), requests, 16)
    assert [request.output_ids for request in requests] == tokens
    check(waits, LISTED | STAGE_WAITS)


TOUCHES: dict[str, Callable[[torch.Tensor], object]] = {
    "_local_scalar_dense": lambda x: bool(x.any()) and x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "index": lambda x: x[x > 1],
    "nonzero": lambda x: x.nonzero(),
    "download": lambda x: x.cpu(),
    "upload": lambda x: x + torch.tensor([1, 2, 3], device=x.device),
}
MIXTURES: dict[str, Callable[[torch.Tensor], object]] = {
    "a sum": lambda x: x + torch.ones(3),
    "an index": lambda x: x[torch.tensor([0, 2])],
    "a list": lambda x: x[[0, 2]],
    "a place": lambda x: x.index_fill_(0, torch.tensor([1]), 0),
}


@pytest.mark.wide
@pytest.mark.parametrize("what", TOUCHES)
def test_a_wait_is_noted(what: str, waits: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """This test stands in for the package."""
    monkeypatch.setattr(pretend_cuda, "PACKAGE", Path(__file__).parent)
    x = torch.tensor([1, 2, 3]).pin_memory().to(DEVICE, non_blocking=True)
    assert not waits
    TOUCHES[what](x)
    assert [place.rpartition(": ")[2] for place in waits] == [what]


@pytest.mark.wide
@pytest.mark.parametrize("what", MIXTURES)
def test_a_mixture_of_devices_is_refused(what: str, waits: Counter[str]) -> None:
    with pytest.raises(MixedDevices):
        MIXTURES[what](torch.ones(3, device=DEVICE))
