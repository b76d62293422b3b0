"""One rank of pipelined speculation. Started by test_speculation_ranks.py with the directories of a
target and of a draft model; rank 0 prints the tokens of each case, and what was drafted in mode
sync, as JSON."""

import json
import sys
import time
from dataclasses import dataclass

import torch
from conftest import load, make_draft, make_requests, random_prompts
from several_ranks import arrive_over_time

from magicdec.attention.grouped import GroupedBackend
from magicdec.config.sections import KVSection, SamplingSection
from magicdec.distributed.channels.connect import Connector
from magicdec.distributed.channels.message import MessageForm
from magicdec.distributed.groups import Group, read_launch
from magicdec.distributed.layout import make_layout
from magicdec.distributed.start import close_groups, make_stage_groups
from magicdec.distributed.tensor_parallel import Shard
from magicdec.hardware.threads import ThreadCount
from magicdec.model.checkpoint.source import find_model
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.request import Request, ignore_step
from magicdec.runner.sampling.coupled import CoupledSampling
from magicdec.systems.pipeinfer.head import PipelineRank, connect_ranks
from magicdec.systems.pipeinfer.options import Options
from magicdec.systems.pipeinfer.path_drafter import LookupPathDrafter, ModelPathDrafter, PathDrafter
from magicdec.systems.pipeinfer.run_stage import RunStage
from magicdec.systems.pipeinfer.scheduler import PipelinedScheduler

CHUNK = 16
MAX_TOKENS = 120
LANES = 2
LENGTHS = [5, 40, 1, 33]
NEW = [20, 9, 20, 14]
MODES = ("pipeline", "pipeline+draft", "pipeinfer")
KV = {
    "full": KVSection("full"),
    "streaming_llm": KVSection("streaming_llm", 12, 2),
    "snapkv": KVSection("snapkv", 12, window_size=4),
}


@dataclass(frozen=True)
class SpeculationCase:
    """All modes are served with the same channels, one after the other. `drafter` is `lookup`, or
    a model and its KV policy; `self` is the target. `mean_ms`: the mean time between two requests
    that arrive; 0: all at once."""

    split: str
    drafter: str
    collectives: str = "shared_memory"
    goes_apart: bool = False  # hidden states, by process groups of their own (gloo, not NCCL)
    temperature: float = 0.0
    penalty: float = 1.0
    mean_ms: float = 0.0

    @property
    def sampling(self) -> SamplingSection:
        return SamplingSection(temperature=self.temperature, repetition_penalty=self.penalty)


CASES = {
    2: [
        SpeculationCase("0,1.0/head", "model full"),
        SpeculationCase("0.5,0.5/head", "self streaming_llm"),
        SpeculationCase("0.5,0.5/head", "lookup"),
        SpeculationCase("1.0/1.0", "model full", temperature=0.9),
        SpeculationCase("1.0/head", "model full", temperature=0.9, penalty=1.2),
        SpeculationCase("0.5,0.5/head", "lookup", temperature=0.9, mean_ms=20.0),
    ],
    3: [
        SpeculationCase("0.4,0.6/1.0", "model full"),
        SpeculationCase("0.4,0.6/1.0", "self streaming_llm"),
        SpeculationCase("0.5,0.5/1.0", "model full", penalty=1.2),
        SpeculationCase("0.5,0.5/1.0", "self snapkv", "gloo", temperature=0.9),
        SpeculationCase("0.2,0.4,0.4/head", "self snapkv", "gloo", goes_apart=True),
        SpeculationCase("0,1.0/head", "self full", "gloo"),
        SpeculationCase("1.0/1.0", "model full", goes_apart=True),
    ],
    4: [
        SpeculationCase("0,0.5,0.5/1.0", "self snapkv", "gloo"),
        SpeculationCase("0.2,0.2,0.6/1.0", "lookup", goes_apart=True),
        SpeculationCase("0.4,0.6/head", "model full", temperature=0.9, mean_ms=20.0),
        SpeculationCase("0.4,0.6/head", "lookup", "gloo", goes_apart=True, penalty=1.2),
        SpeculationCase("0.3,0.3,0.4/1.0", "self streaming_llm", temperature=0.9, penalty=1.2),
        SpeculationCase("0,0.5,0.5/1.0", "model full", temperature=0.9, mean_ms=20.0),
        SpeculationCase("0.4,0.3,0.3/1.0", "model snapkv", "gloo"),
    ],
}


def served_requests(sampling: SamplingSection) -> list[Request]:
    """Two end tokens end some of them early."""
    return make_requests(random_prompts(LENGTHS, 97), NEW, (11, 40), sampling, is_coupled=True)


def options_of(case: SpeculationCase, mode: str) -> Options:
    return Options(mode=mode, gamma=3, pa=0.1, lanes=LANES)


def make_drafter(
    case: SpeculationCase, target: str, draft: str, group: Group = Group((0,), 0)
) -> PathDrafter:
    kind, _, policy = case.drafter.partition(" ")
    if kind == "lookup":
        return LookupPathDrafter()
    model = load(target if kind == "self" else draft, shard=Shard(group.index, group.size))
    rows = LANES, MAX_TOKENS
    made = make_draft(model, KV[policy], *rows, chunk=CHUNK, max_drafts=MAX_TOKENS, group=group)
    vocab_size = model.config.vocab_size
    return ModelPathDrafter(made, KV[policy], vocab_size, CoupledSampling(case.sampling))


def serve(case: SpeculationCase, target: str, draft: str) -> list[list[list[int]]]:
    """The tokens of each mode."""
    launch = read_launch()
    layout = make_layout(
        case.split, launch.world_size, find_model("--model", target).config.num_layers
    )
    place = layout.grid, torch.device("cpu"), case.collectives
    groups = make_stage_groups(launch, *place, (layout.draft_rank,))
    stage = None
    drafter = None
    if len(layout.layers[launch.rank]):
        shard = Shard(groups.target.index, groups.target.size)
        layers = load(target, layers=layout.layers[launch.rank], shard=shard)
        runner = ModelRunner(layers, GroupedBackend(), groups.target, LANES, MAX_TOKENS)
        stage = RunStage(runner, CoupledSampling(case.sampling))
    if groups.draft is not None:
        drafter = make_drafter(case, target, draft, groups.draft)
    form = MessageForm(find_model("--model", target).config.hidden_size, torch.float32, 0)
    apart = "gloo" if case.goes_apart else None
    connector = Connector(launch, case.collectives, form, torch.device("cpu"), apart)
    wires = connect_ranks(connector, layout, has_drafter=True)
    member = PipelineRank(launch.rank, wires, stage, drafter)
    found: list[list[list[int]]] = []
    for mode in MODES:
        requests = served_requests(case.sampling)
        if case.mean_ms:
            arrive_over_time(requests, time.perf_counter(), case.mean_ms)
        scheduler = PipelinedScheduler(options_of(case, mode), CHUNK)
        member.serve(scheduler, requests, ignore_step, ThreadCount())
        if launch.rank == 0:
            assert all(r.arrived_s < r.token_times_s[0] for r in requests)
            found.append([request.output_ids for request in requests])
    member.close()
    return found


def main(target: str, draft: str) -> None:
    torch.set_num_threads(1)
    launch = read_launch()
    outputs = [serve(case, target, draft) for case in CASES[launch.world_size]]
    if launch.rank == 0:
        print(json.dumps(outputs), flush=True)
    close_groups()


if __name__ == "__main__":
    main(*sys.argv[1:])
