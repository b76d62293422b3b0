"""Float32 tokens of the demo model on a GPU are the CPU's, for every drafter and KV policy and
every attention backend that computes in float32 there, steps replayed from CUDA graphs or not."""

from functools import cache

import pytest
import torch
from conftest import decode_both, make_draft, make_requests, random_prompts, served_pairs
from recorder import StandInRecorder

from magicdec.config.capabilities import capabilities_of, list_backends, policy_called
from magicdec.config.sections import KVSection
from magicdec.distributed.groups import Group
from magicdec.model.checkpoint.source import find_model
from magicdec.model.eagle import EagleHead
from magicdec.model.transformer import Transformer
from magicdec.names import EAGLE
from magicdec.output.console import make_progress
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.observers.hidden_states import HiddenStates
from magicdec.setup.loading import load_model, make_backend
from magicdec.setup.model_plan import Kinds
from magicdec.speculation.rolling_runner import BLOCK_SIZE
from magicdec.speculation.steps.recorder import CudaGraphs
from magicdec.speculation.steps.recorder import Recorder as AnyRecorder

pytestmark = pytest.mark.wide

PAIRS = sorted(served_pairs(), key=str)
FLOAT32_BACKENDS = sorted(list_backends(lambda c: "cuda" in c.devices and "float32" in c.dtypes))
PROMPTS = [300, 70, 1, 190]
NUM_NEW = 40
DEMO_STATES = (1, 3, 5)  # of the layers of the demo model, which its head takes


@cache
def load(name: str, device: str, elementwise: str = "torch") -> Transformer:
    source = find_model("--model", name)
    kinds = Kinds("float32", "float32", "torch", elementwise)
    return load_model(source, Group((0,), 0), kinds, torch.device(device), make_progress(False))


def section_of(policy: str | None) -> KVSection:
    """Budgets that leave much of the prompts out; `full` has none."""
    return KVSection("full") if policy in (None, "full") else KVSection(policy, 65)


def emitted(
    device: str,
    drafter: str,
    policy: str | None,
    backend: str,
    elementwise: str = "torch",
    recorder: AnyRecorder | None = None,
) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """(baseline tokens, speculation's tokens, accepted by step) of the demo model."""
    target = load("demo", device, elementwise)
    total = max(PROMPTS) + NUM_NEW + 4
    runner = ModelRunner(target, make_backend(backend), Group((0,), 0), len(PROMPTS), total)
    kv = section_of(policy)
    draft = None
    if drafter == "model":
        drafts = load("demo-draft", device, elementwise)
        draft = make_draft(
            drafts, kv, len(PROMPTS), total, make_backend(backend), block_size=BLOCK_SIZE
        )
    if drafter == EAGLE:
        head = load("demo-eagle", device, elementwise)
        assert isinstance(head, EagleHead)
        head.share(target)
        runner.observers.append(HiddenStates.of(runner, DEMO_STATES))
        draft = make_draft(
            head, kv, len(PROMPTS), total, make_backend(backend), block_size=BLOCK_SIZE
        )
    requests = make_requests(random_prompts(PROMPTS, target.config.vocab_size), NUM_NEW)
    return decode_both(runner, requests, kv, 4, 64, drafter, draft, recorder)


@cache
def on_cpu(drafter: str, policy: str | None) -> list[list[int]]:
    backend = next(name for name in ("grouped", "sdpa") if reads(name, policy))
    baseline, ours, _ = emitted("cpu", drafter, policy, backend)
    assert ours == baseline
    return ours


def reads(backend: str, policy: str | None) -> bool:
    """Whether the backend reads what drafts under this policy do."""
    reads_codes = policy is not None and policy_called(policy).reads_codes
    return capabilities_of(backend).reads_codes or not reads_codes


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("drafter", "policy", "backend", "graphs"),
    [
        (*pair, backend, graphs)
        for pair in PAIRS
        for backend in FLOAT32_BACKENDS
        for graphs in (False, True)
        if reads(backend, pair[1]) and (not graphs or capabilities_of(backend).can_be_recorded)
    ],
    ids=str,
)
def test_tokens_on_a_gpu_are_the_cpus(
    drafter: str, policy: str | None, backend: str, graphs: bool
) -> None:
    elementwise = "triton" if backend == "triton" else "torch"  # our kernels go together
    recorder = CudaGraphs(torch.device("cuda")) if graphs else None
    found = emitted("cuda", drafter, policy, backend, elementwise, recorder)
    baseline, ours, accepted = found
    assert baseline == on_cpu(drafter, policy), "autoregressive decoding"
    assert ours == baseline
    assert accepted, "nothing was drafted"


@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize(
    ("drafter", "policy"), [("self", "snapkv"), ("model", "streaming_llm"), ("eagle", "full")]
)
def test_what_the_gpu_is_held_to_runs_on_a_cpu(drafter: str, policy: str, replays: bool) -> None:
    """The comparison itself: another backend emits the same, and something is accepted."""
    recorder = StandInRecorder() if replays else None
    baseline, ours, accepted = emitted("cpu", drafter, policy, "sdpa", "torch", recorder)
    assert baseline == ours == on_cpu(drafter, policy)
    assert all(len(row) == NUM_NEW for row in ours)
    # The head was trained on books, and drafts nothing of what follows random tokens.
    assert drafter == EAGLE or sum(map(sum, accepted)) > 0
    assert {"grouped", "sdpa", "triton"} == set(FLOAT32_BACKENDS)
