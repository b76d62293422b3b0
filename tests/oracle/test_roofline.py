"""The bytes in a record are the bytes that the kernel read, as counted by the kernel; the budget
bounds what a draft forward reads; and a step of decoding or verification takes no memory from the
system."""

import resource
from dataclasses import replace

import pytest
import torch
from conftest import (
    TINY,
    decode,
    decode_both,
    make_draft,
    make_requests,
    make_runner,
    pack,
    random_prompts,
    served_pairs,
    tiny_transformer,
)
from draft_heads import made_head, state_layers
from recorder import StandInRecorder

from magicdec.attention.native import NativeBackend, kernel
from magicdec.bench.roofline import bytes_read, kv_bytes_per_token, weight_bytes
from magicdec.config.sections import DecodingSection, KVSection
from magicdec.engine.engine import Engine
from magicdec.kv.view import WEIGHTS_BLOCK
from magicdec.names import HEADS, WITHOUT_BUDGET
from magicdec.runner.forward_batch import EnqueuedForward, ForwardBatch
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.native_steps.executor import Executor
from magicdec.runner.observers.hidden_states import HiddenStates
from magicdec.speculation.steps.strategy import Setup

LENGTHS = [5, 70, 1, 33]


@pytest.mark.narrow("values")
@pytest.mark.parametrize("native_steps", [False, True], ids=["layers", "native_steps"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("strategy", "kv"),
    [
        ("autoregressive", KVSection("full")),
        ("speculative", KVSection("full")),
        ("speculative", KVSection("streaming_llm", 21, 16)),
        ("speculative", KVSection("verified", 50, 4)),
        ("speculative", KVSection("retrieval", 50, 4)),
        ("speculative", KVSection("snapkv", 30, window_size=8, reselect_every=7)),
    ],
    ids=str,
)
def test_kv_bytes_are_what_the_kernel_counts(
    strategy: str, kv: KVSection, dtype: torch.dtype, native_steps: bool
) -> None:
    """Decoding, drafting with a budget and verification, with rows of unequal length."""
    config = replace(TINY, num_kv_heads=3)
    model = tiny_transformer(config, dtype=dtype)
    runner = make_runner(model, len(LENGTHS), 120, NativeBackend())
    if native_steps:
        runner.executor = Executor(pack(model), runner.group)

    def keys_read() -> int:
        by_layer = kernel(config.head_dim).magicdec_keys_read()
        return int(by_layer) + (runner.executor.keys_read if runner.executor else 0)

    engine = Engine(runner, 16)
    engine.prefill(make_requests(random_prompts(LENGTHS, config.vocab_size), 20))
    counts = runner.counts.copy()
    keys = keys_read()
    decode(engine, strategy, Setup(runner, DecodingSection(strategy, "self", 3), kv))
    keys = keys_read() - keys
    used = runner.counts.minus(counts)
    bytes_counted = keys * 2 * config.head_dim * dtype.itemsize  # a key and its value, of one head
    assert bytes_counted == used.kv_tokens_read * kv_bytes_per_token(model) > 0
    expected = bytes_counted + used.num_forwards * weight_bytes(model)
    assert bytes_read(model, used) == expected


def test_bytes_read_are_those_of_the_keys() -> None:
    """The kernel counts keys. A key and its value take two bytes for each number."""
    model = tiny_transformer(dtype=torch.bfloat16)
    runner = make_runner(model, 2, 70, NativeBackend())
    for row in range(2):
        runner.cache.allocate(row, 70)
    for ids in (torch.ones(2, 40, dtype=torch.long), torch.ones(2, 1, dtype=torch.long)):
        counts = runner.counts.copy()
        keys = kernel(TINY.head_dim).magicdec_keys_read()
        runner.forward(ForwardBatch(ids, [0, 1]))
        keys = kernel(TINY.head_dim).magicdec_keys_read() - keys
        used = runner.counts.minus(counts)
        if ids.shape[1] == 1:  # a long chunk reads a key once for several tokens
            assert used.kv_bytes_read == keys * 2 * 2 * TINY.head_dim > 0
        assert bytes_read(model, used) == used.kv_bytes_read + weight_bytes(model)


STEPS = 30


@pytest.mark.parametrize("num_new", [1, 5])
@pytest.mark.parametrize("is_packed", [False, True], ids=["float32", "packed"])
def test_steps_touch_no_new_memory(is_packed: bool, num_new: int) -> None:
    """Their tensors live in what earlier steps gave back. Page faults count what a process touches
    for the first time."""
    model = tiny_transformer(dtype=torch.bfloat16 if is_packed else torch.float32)
    if is_packed:
        pack(model)
    runner = make_runner(model, 4, 200, NativeBackend())
    rows = range(4)
    ids = torch.randint(0, 50, (4, num_new))
    for row in rows:
        runner.allocate(row)
    runner.forward(ForwardBatch(torch.randint(0, 50, (4, 150)), rows))

    def take_steps() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(STEPS):
            runner.forward(ForwardBatch(ids, rows)).argmax(-1).tolist()
            runner.truncate(list(rows), [150] * 4)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    take_steps()
    assert take_steps() < STEPS, "pages, of all steps together"


BUDGET = 48
GAMMA = 3
NUM_NEW = [60, 60, 40]
PAIRS = sorted((d, p) for d, p in served_pairs() if p not in (None, *WITHOUT_BUDGET))


@pytest.mark.narrow(3)
@pytest.mark.parametrize("is_captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize(("drafter", "policy"), PAIRS)
def test_a_draft_forward_reads_the_budget_and_its_step(
    drafter: str, policy: str, is_captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that begin within the budget and past it. A standalone draft also takes the draft of the
    last step that it has not read itself, and a head all that the last step has committed."""
    reads: list[int] = []
    run_layers = ModelRunner._run_layers

    def spy(runner: ModelRunner, forward: EnqueuedForward) -> None:
        run_layers(runner, forward)
        if forward.is_draft and not forward.rows.is_captured:
            reads.extend(forward.view.count_keys().tolist())

    monkeypatch.setattr(ModelRunner, "_run_layers", spy)
    model = tiny_transformer()
    kv = KVSection(policy, BUDGET, 4, 8)
    runner = make_runner(model, 3, 100 + max(NUM_NEW) + GAMMA)
    draft = None
    if drafter == "model":
        draft = make_draft(tiny_transformer(seed=1), kv, 3, runner.max_tokens)
    elif drafter in HEADS:
        runner.observers.append(HiddenStates.of(runner, state_layers(drafter, model.config)))
        draft = make_draft(made_head(model, drafter=drafter), kv, 3, runner.max_tokens)
    requests = make_requests(random_prompts([100, 20, 60], model.config.vocab_size), NUM_NEW)
    recorder = StandInRecorder() if is_captured else None
    drafting = runner if draft is None or draft.runner is None else draft.runner
    before = drafting.counts.copy()
    how = {"drafter": drafter, "draft": draft, "recorder": recorder, "names": ["speculative"]}
    decode_both(runner, requests, kv, GAMMA, **how)
    used = drafting.counts.minus(before)
    most = BUDGET + GAMMA + (drafter == "model") + GAMMA * (drafter in HEADS)
    assert used.draft_rows > 0 and used.draft_kv_tokens_read <= most * used.draft_rows
    if not is_captured:
        assert (sum(reads), len(reads)) == (used.draft_kv_tokens_read, used.draft_rows)
        # A choice of whole blocks leaves less than two blocks of the budget unread.
        assert BUDGET - 2 * WEIGHTS_BLOCK < max(reads) <= most
        mean_of_long = torch.tensor(reads[-30:]).float().mean()
        assert mean_of_long > BUDGET - 2 * WEIGHTS_BLOCK, "the budget is used"
