"""The copy that a KV policy keeps for drafts is as large as the memory plan says, for requests of
any lengths, and it is made once."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from conftest import TINY, make_draft, make_requests, make_runner, random_prompts, tiny_transformer
from several_ranks import generate_alone
from threaded_pipeline import divide, serve

from magicdec.bench.prepare import prepare
from magicdec.cli.serve import COMMANDS, RecordFile
from magicdec.config.sections import KVSection
from magicdec.distributed.groups import Group, Launch, ParallelGroups
from magicdec.engine.engine import Engine
from magicdec.model.config import LayerKind
from magicdec.output.console import Silent
from magicdec.runner.forward_batch import ForwardBatch
from magicdec.setup.loading import LoadedModels
from magicdec.setup.loading import make_draft as load_draft
from magicdec.setup.prepare import Prepared
from magicdec.speculation.policies.policy import make_draft_kv, make_policy
from magicdec.speculation.policies.snapkv import ChosenCopy
from magicdec.systems.modes import Pass
from magicdec.systems.pipeinfer.head import DraftRequest
from magicdec.systems.pipeinfer.options import Options
from magicdec.systems.pipeinfer.path_drafter import ModelPathDrafter
from magicdec.systems.pipeinfer.run_stage import RunStage
from magicdec.systems.pipeinfer.system import PipeInfer

ALONE = Launch(0, 1, 0, 1)
WINDOW = 6
COPIED = "--kv_policy", "snapkv", "--budget", "20", "--window_size", str(WINDOW)
FLAGS = "--dtype", "float32", "--threads", "1", "--attention", "grouped"


def query_bytes(prepared: Prepared) -> int:
    """What the plan of the draft's KV has beside caches: the newest queries of prompts."""
    room = prepared.config.capacity
    policy = make_policy(prepared.config.kv)
    num_queries = room.rows * min(policy.observed_tokens, room.prompt_len)
    return 4 * num_queries * TINY.num_layers * TINY.num_heads * TINY.head_dim


def mixed_lengths(random: Random) -> list[tuple[int, int]]:
    """(prompt, output): now one of them is long, now the other, or both or neither."""

    def length() -> int:
        return random.randint(*random.choice(((1, 9), (60, 150))))

    return [(length(), length()) for _ in range(random.randint(2, 5))]


@pytest.mark.narrow("values")
@pytest.mark.parametrize("drafter", ["self", "model"])
@pytest.mark.parametrize("seed", range(2))
def test_what_is_copied_in_flight_is_what_was_planned(
    seed: int, drafter: str, tiny_checkpoint: Path, tmp_path: Path, made: list[int]
) -> None:
    random = Random(seed)
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"arrival_ms": float(i), "prompt_len": prompt_len, "output_len": output_len}
        for i, (prompt_len, output_len) in enumerate(mixed_lengths(random))
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    draft = "self" if drafter == "self" else f"model:{tiny_checkpoint}"
    experiment = COMMANDS["inflight"].parse(
        [
            "--model",
            str(tiny_checkpoint),
            *FLAGS,
            "--arrival",
            f"trace:{trace}",
            "--B",
            str(random.randint(1, 3)),
            "--modes",
            "inflight",
            "inflight+draft",
            "--draft",
            draft,
            *COPIED,
            "--gamma",
            str(random.randint(1, 4)),
            "--out",
            str(tmp_path / "out.jsonl"),
        ],
        ALONE,
    )
    prepared = prepare(experiment.config, experiment.options, ALONE)
    (batching,) = prepared.systems
    plan = batching.plan(Pass.named("inflight+draft"), (0,))
    assert made == []
    records = experiment.measure(prepared, RecordFile(tmp_path / "out.jsonl")).records
    assert [record.num_differing for record in records] == [0, 0]
    target, *drafts = made
    whole = drafts[:1] if drafter == "model" else []  # the context, of which entries are copied
    # One to warm up, and one for all requests. What follows are K and V of the wider model, with
    # which the forwards of both modes are compared.
    copies = drafts[len(whole) :][:2]
    assert len(copies) == 2
    assert plan.kv == target
    assert {sum(whole) + copy for copy in copies} == {plan.draft_kv - query_bytes(batching.run)}


@pytest.mark.parametrize("seed", range(3))
def test_what_a_pipelines_drafter_copies_is_what_was_planned(
    seed: int, tiny_checkpoint: Path, tmp_path: Path, made: list[int]
) -> None:
    """Its requests do not say how far their rows grow."""
    experiment = COMMANDS["pipeline"].parse(
        [
            "--model",
            str(tiny_checkpoint),
            *FLAGS,
            "--device",
            "cpu",
            "--modes",
            "pipeinfer",
            "--prefix_len",
            "uniform:1:120",
            "--gen_len",
            "uniform:2:60",
            "--num_requests",
            "4",
            "--seed",
            str(seed),
            "--draft",
            "self",
            *COPIED,
            "--out",
            str(tmp_path / "r.jsonl"),
        ],
        ALONE,
    )
    (pipeline,) = prepare(experiment.config, experiment.options, ALONE).systems
    assert isinstance(pipeline, PipeInfer)
    drafting = pipeline.drafting
    assert drafting is not None and drafting.draft_source is not None
    alone = Group((0,), 0)
    models = LoadedModels(torch.device("cpu"), Silent())
    groups = ParallelGroups(0, 1, alone, draft=alone)
    draft = load_draft(drafting, groups, models)
    assert draft is not None
    drafter = ModelPathDrafter(draft, drafting.config.kv, TINY.vocab_size)
    for number, (shape, prompt) in enumerate(
        zip(experiment.options.shapes, drafting.workload.prompts, strict=True)
    ):
        text = list(prompt[: shape.prompt_len])
        drafter.propose(DraftRequest(number, 0, 0, tuple(text), (5,)), text)
    plan = pipeline.plan(Pass.named("pipeinfer"), (0,))
    assert len(made) == 2, "the whole context, and the copy"
    assert sum(made) == plan.draft_kv - query_bytes(drafting)


@pytest.mark.parametrize("seed", range(2))
def test_a_pipelines_drafter_needs_no_more_than_that(seed: int) -> None:
    random = Random(seed)
    model = tiny_transformer(replace(TINY, num_layers=2))
    lengths = [(random.randint(1, 60), random.randint(1, 30)) for _ in range(4)]
    served = [
        make_requests([prompt], new)[0]
        for prompt, (_, new) in zip(
            random_prompts([p for p, _ in lengths], 97), lengths, strict=True
        )
    ]
    served = [replace(request, request_id=i) for i, request in enumerate(served)]
    expected = generate_alone(model, [replace(r, output_ids=[]) for r in served], 100)
    options = Options(mode="pipeline+draft", gamma=4, pa=0.0, lanes=2)
    # Synchronous speculation drafts past the end of an output.
    num_cells = max(p + n for p, n in lengths) + options.gamma
    kv = KVSection("snapkv", 12, window_size=4)
    following = max(n for _, n in lengths) + options.gamma
    draft = make_draft(model, kv, 2, num_cells, max_following=following)
    drafter = ModelPathDrafter(draft, kv, TINY.vocab_size)
    parts = [RunStage(make_runner(part, 2, num_cells)) for part in divide(model, 2)]
    serve(parts, drafter, options, served, 16)
    assert [request.output_ids for request in served] == expected
    assert drafter.kv.runner.max_tokens == min(12 + following, num_cells)


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_are_far_behind_copy_nothing_past_the_end_of_others(seed: int) -> None:
    """One row decodes without drafts nearly to its end, beside one that always drafts and is at its
    end first."""
    new = 24
    gamma = 3
    budget = 12
    prompts = random_prompts([9, 40], TINY.vocab_size, seed)
    room = 40 + new + gamma
    runner = make_runner(tiny_transformer(), 2, room, max_following=new + gamma)
    engine = Engine(runner, 16)
    engine.prefill(make_requests(prompts, new))
    requests = engine.scheduler.running
    reader = make_draft_kv(runner, KVSection("snapkv", budget, window_size=4))
    assert isinstance(reader, ChosenCopy)
    reader.admit(requests)
    generator = torch.Generator().manual_seed(seed)
    for request in requests:
        count = new - 2
        tokens = torch.randint(TINY.vocab_size, (1, count), generator=generator)
        runner.forward(ForwardBatch(tokens, [request.row]))
        request.output_ids.extend(tokens[0].tolist())
    # The second row has followed the target all along.
    reader.prepare(requests[1:], gamma)
    before = reader.lengths([1]).bounds
    reader.prepare(requests, gamma)
    assert reader.lengths([1]).bounds == before == (40 + new - 2,)
    assert reader.lengths([0, 1]).bounds == tuple(r.num_cached for r in requests)
    cache = reader.runner.cache
    for row, prompt in enumerate((9, 40)):
        places = torch.arange(prompt, prompt + new - 2)[None]
        index = torch.tensor([row])
        wanted = runner.cache.read(1, runner.cache.slots(index, places))
        found = cache.read(1, cache.slots(index, places - reader.shifts[row]))
        assert all(map(torch.equal, found, wanted))


def test_a_short_prompt_keeps_what_its_own_end_still_sees() -> None:
    """Under a sliding window, beside a row that has room for more than the window."""
    new = 8
    gamma = 3
    budget = 12
    room = 60 + new + gamma
    model = tiny_transformer(replace(TINY, layer_kinds=(LayerKind(24),)))
    runner = make_runner(model, 2, room, max_following=new + gamma)
    engine = Engine(runner, 16)
    engine.prefill(make_requests(random_prompts([14, 60], TINY.vocab_size), new))
    reader = make_draft_kv(runner, KVSection("snapkv", budget, window_size=4))
    assert isinstance(reader, ChosenCopy)
    reader.admit(engine.scheduler.running)
    last = [length + new + gamma - 1 for length in (14, 60)]
    seen = [min(budget, 14), min(budget, 60 - (last[1] - 24 + 1))]
    assert [reader.runner.cache.lengths[row] for row in (0, 1)] == seen
