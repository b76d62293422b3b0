"""One rank of requests that join and leave a running batch, for every drafter over the ranks.
Started by test_engine_ranks.py; rank 0 prints the tokens as JSON.

The ranks' clocks disagree, so that the schedule depends on which rank decides."""

import json
import sys

import torch
from conftest import load, make_draft, make_requests, random_prompts, trust_lookups
from fake_clock import VirtualClock

from magicdec.attention.native import NativeBackend
from magicdec.attention.sdpa import SDPABackend
from magicdec.config.sections import DecodingSection, KVSection
from magicdec.decoding.strategy import Setup, make_strategy
from magicdec.distributed.groups import read_launch
from magicdec.distributed.start import close_groups, make_groups
from magicdec.distributed.tensor_parallel import Shard
from magicdec.drafting.draft_length import AutoLength
from magicdec.drafting.policies.policy import keep_queries
from magicdec.engine import Engine
from magicdec.runner import ModelRunner
from magicdec.scheduling.plan import Limits

GAMMA, NEW, MAX_TOKENS = 3, [20, 9, 20, 1, 14], 40 + 20 + 3
CASES = [
    ("autoregressive", "self", KVSection("full"), False),
    ("speculative", "ngram", KVSection("full"), False),
    ("speculative", "self", KVSection("snapkv", 12, window_size=6), False),
    ("speculative", "self", KVSection("verified", 40, 4), False),
    ("speculative", "self", KVSection("streaming_llm", 12, 4), True),
    ("speculative", "model", KVSection("streaming_llm", 12, 4), True),
    ("speculative", "ngram+self", KVSection("streaming_llm", 12, 4), True),
    ("speculative", "ngram+model", KVSection("streaming_llm", 12, 4), False),
]

torch.set_num_threads(1)
trust_lookups()
launch, device = read_launch(), torch.device("cpu")
collectives = "shared_memory" if launch.world_size > 1 else None
group = make_groups(launch, tuple(range(launch.world_size)), device, collectives).target
model = load(sys.argv[1], Shard(group.index, group.size))


def tokens_of(name: str, drafter: str, kv: KVSection, is_auto: bool) -> list[list[int]]:
    backend = NativeBackend() if is_auto else SDPABackend(8)
    runner = ModelRunner(model, backend, group, 3, MAX_TOKENS, num_blocks=None if is_auto else 10)
    draft = None
    if drafter.endswith("model"):
        draft = make_draft(model, kv, 3, MAX_TOKENS, NativeBackend(), group=group)
    keep_queries(runner, kv)
    length = AutoLength(GAMMA, group, device) if is_auto else None
    section = DecodingSection("speculative", drafter, GAMMA)
    setup = Setup(runner, section, kv, draft=draft, draft_length=length, is_in_flight=True)
    shape = runner.cache.shape
    limits = Limits(MAX_TOKENS, shape.block_size, shape.num_blocks, 1 + GAMMA, 7)
    clock = VirtualClock(1.0 + launch.rank)
    requests = make_requests(random_prompts([5, 40, 1, 33, 9], 97), NEW)
    for request in requests:
        request.arrived_s = 1.5 * request.request_id
    Engine(runner, 16, limits, clock).serve(make_strategy(name, setup), requests)
    assert not any(runner.cache.blocks)
    return [request.output_ids for request in requests]


outputs = [tokens_of(*case) for case in CASES]
if launch.rank == 0:
    print(json.dumps(outputs), flush=True)
close_groups()
