"""One rank of samples that circulate through a ring of stages. Started by test_recurrent.py with
the directories of models; rank 0 prints the tokens of each case as JSON."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from conftest import make_draft, make_requests, random_prompts, trust_lookups
from several_ranks import arrive_over_time

from magicdec.attention.grouped import GroupedBackend
from magicdec.config.sections import DecodingSection, KVSection, SamplingSection
from magicdec.distributed.channels.connect import Connector
from magicdec.distributed.channels.message import MessageForm
from magicdec.distributed.groups import Group, Launch, read_launch
from magicdec.distributed.layer_split import split_layers
from magicdec.distributed.layout import StageGrid
from magicdec.distributed.start import close_groups, make_stage_groups
from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.checkpoint.source import ModelSource, find_model, load_transformer
from magicdec.records.acceptance import Verifications
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.request import Request
from magicdec.runner.step_plan import BatchLimits
from magicdec.speculation.drafter import DraftModel, DraftSetup, make_drafter
from magicdec.speculation.ngram import NgramDrafter
from magicdec.systems.mdi_llm.recurrent import RecurrentPipeline, RingSpeculation, most_under_way
from magicdec.systems.mdi_llm.ring_stage import Stage
from magicdec.systems.observer import PassObserver
from magicdec.systems.stages.clocks import compare_clocks
from magicdec.systems.stages.spans import SpanKind, Spans
from magicdec.systems.stages.stage import StageLoop

CHUNK = 16
MAX_TOKENS = 90
LENGTHS = [5, 40, 1, 33, 9, 61, 17, 2, 28, 3, 50]
NEW = [20, 9, 20, 1, 14, 6, 20, 11, 2, 20, 7]
NUM_DRAFTS = 3
NOISE = 0.01
PENALISED = SamplingSection(repetition_penalty=1.2)
SAMPLED = SamplingSection(temperature=0.8, top_k=20, repetition_penalty=1.2)


@dataclass(frozen=True)
class RingCase:
    """`rounds` times as many lanes as stages, of `lane_size` samples each. `drafter`: messages
    carry drafts of it. `mean_ms`: the mean time between two samples that arrive; 0: all at once."""

    rounds: int
    lane_size: int = 1
    tensor_parallel: int = 1
    collectives: str = "shared_memory"
    sampling: SamplingSection = SamplingSection()
    drafter: str | None = None
    goes_apart: bool = False  # hidden states, by process groups of their own (gloo, not NCCL)
    mean_ms: float = 0.0


CASES = [
    RingCase(1),
    RingCase(2),
    RingCase(1, lane_size=3),
    RingCase(1, mean_ms=10.0),
    RingCase(1, tensor_parallel=2, lane_size=2, collectives="gloo", sampling=SAMPLED),
    RingCase(2, drafter="ngram", goes_apart=True),
    RingCase(1, lane_size=3, collectives="gloo", drafter="model"),
    RingCase(1, tensor_parallel=2, lane_size=2, sampling=PENALISED, drafter="model"),
    RingCase(1, tensor_parallel=2, lane_size=2, sampling=PENALISED, drafter="model", mean_ms=10.0),
]
ALONE = [RingCase(0), RingCase(0, drafter="ngram")]  # one sample in flight: the stages work in turn


def requests_of(case: RingCase) -> list[Request]:
    """Two end tokens end some of the samples early."""
    return make_requests(random_prompts(LENGTHS, 97), NEW, (11, 40), case.sampling)


def cases_of(num_ranks: int, model: int) -> list[RingCase]:
    """Those whose stages `num_ranks` ranks can have; of any model but the first only those of more
    than 2 ranks with several samples in a message, which have all the rest too: drafts, stages of
    several ranks and both collectives."""
    cases = [case for case in CASES if num_ranks % case.tensor_parallel == 0]
    if model > 0:
        return [case for case in cases if case.lane_size > 1 and num_ranks > 2]
    return [*(ALONE if num_ranks == 2 else []), *cases]


def tokens_of(case: RingCase, path: str) -> list[list[int]]:
    launch = read_launch()
    device = torch.device("cpu")
    grid = StageGrid(launch.world_size // case.tensor_parallel, case.tensor_parallel)
    groups = make_stage_groups(launch, grid, device, case.collectives)
    source = find_model("--model", path)
    layers = split_layers(None, grid.num_stages, source.config.num_layers)[groups.stage]
    shard = Shard(groups.target.index, groups.target.size)
    place = (shard, layers, torch.float32, device, None, groups.stage == 0)
    model = load_transformer(source.config, source.weights, *place)
    num_lanes = max(1, case.rounds * grid.num_stages)
    sizes = num_lanes * case.lane_size, MAX_TOKENS
    runner = ModelRunner(model, GroupedBackend(), groups.target, *sizes)
    stage = Stage(runner, model.is_last)
    limits = BatchLimits(MAX_TOKENS, step_tokens=1 + NUM_DRAFTS, prefill_tokens=2 * CHUNK)
    depth = most_under_way(num_lanes, case.lane_size, limits, CHUNK)
    form = MessageForm(source.config.hidden_size, torch.float32, 2 * case.lane_size)
    apart = "gloo" if case.goes_apart else None
    connector = Connector(
        launch, case.collectives, form, device, apart, depth=depth, capacity=1 << 16
    )
    ends = connector.ring(grid)
    requests = requests_of(case)
    if groups.stage == 0:
        place_of = num_lanes, case.lane_size, limits, CHUNK
        speculation = None if case.drafter is None else make_speculation(runner, case, source)
        pipeline = RecurrentPipeline(stage, ends, *place_of, speculation=speculation)
        if case.mean_ms:
            arrive_over_time(requests, pipeline.shared_clock.now(), case.mean_ms)
        seen = PassObserver()
        pipeline.serve(requests, seen.observe)
        pipeline.close()
        assert groups.target.index or all(r.token_times_s[0] > r.arrived_s for r in requests)
        assert sum(span.value for span in pipeline.spans.of(SpanKind.HEAD)) > 0
        if speculation is not None:
            check_counts(speculation, requests, seen.verifications)
    else:
        StageLoop(stage, ends, Spans()).serve()
    assert not any(runner.cache.blocks), "the memory of every sample was freed"
    return [request.output_ids for request in requests]


def make_speculation(runner: ModelRunner, case: RingCase, source: ModelSource) -> RingSpeculation:
    """The draft model is the target with noise, on the first rank of the first stage."""
    assert case.drafter is not None
    decoding = DecodingSection("speculative", case.drafter, NUM_DRAFTS)
    draft = None
    kv = KVSection("full", budget=-1)
    if case.drafter == "model" and runner.group.index == 0:
        cpu = torch.device("cpu")
        generator = torch.Generator().manual_seed(5)
        model = load_transformer(source.config, source.weights, Shard(), None, torch.float32, cpu)
        for weight in model.parameters():
            weight.data += NOISE * torch.randn(weight.shape, generator=generator)
        draft = make_draft(model, kv, runner.num_rows, MAX_TOKENS, group=Group((0,), 0))
    elif case.drafter == "model":
        draft = DraftModel(None, 0, CHUNK)
    drafter = make_drafter(case.drafter, DraftSetup(runner, decoding, kv, draft))
    return RingSpeculation(runner, drafter, NUM_DRAFTS)


def check_counts(
    speculation: RingSpeculation, requests: Sequence[Request], judged: Verifications
) -> None:
    """Some drafts are accepted, with a model also past the end of a sample; some are rejected."""
    counts = speculation.counts
    later = sum(len(r.output_ids) - 1 for r in requests)
    if isinstance(speculation.drafter, NgramDrafter):  # of these texts little is repeated
        assert judged.num_accepted <= judged.num_drafted <= NUM_DRAFTS * counts.num_rounds
        assert 0 < counts.num_rounds <= later
        return
    assert 0 < judged.num_accepted < judged.num_drafted == NUM_DRAFTS * counts.num_rounds
    past_ends = counts.num_rounds + judged.num_accepted - later
    assert later > counts.num_rounds and past_ends >= (speculation.drafter.draft_kv is not None)


def check_clocks(launch: Launch) -> None:
    """The ranks of one host have one clock, so that no difference is more than its error."""
    clocks = compare_clocks(launch.rank, launch.world_size)
    assert len(clocks) == launch.world_size
    assert all(abs(clock.ahead_s) <= clock.error_s < 10 for clock in clocks)


def main(paths: Sequence[str]) -> None:
    torch.set_num_threads(1)
    trust_lookups()
    launch = read_launch()
    outputs = [
        [tokens_of(case, path) for case in cases_of(launch.world_size, model)]
        for model, path in enumerate(paths)
    ]
    if launch.rank == 0:
        print(json.dumps(outputs), flush=True)
    check_clocks(launch)
    close_groups()


if __name__ == "__main__":
    main(sys.argv[1:])
