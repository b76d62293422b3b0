"""One rank of ragged batches with standalone drafts on every kind of subgroup. Started by
test_longspec.py; rank 0 prints the tokens as JSON."""

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from conftest import decode_both, make_requests, random_prompts

from magicdec.attention.native import NativeBackend
from magicdec.config.sections import KVSection, SamplingSection
from magicdec.distributed.groups import read_launch
from magicdec.distributed.start import close_groups, make_groups
from magicdec.distributed.tensor_parallel import Shard
from magicdec.drafting.drafter import DraftModel
from magicdec.drafting.policies.policy import make_policy
from magicdec.drafting.rolling_runner import RollingRunner
from magicdec.model.checkpoint.source import find_model, load_transformer
from magicdec.runner import ModelRunner

torch.set_num_threads(1)
launch, device = read_launch(), torch.device("cpu")
collectives = sys.argv[3] if launch.world_size > 1 else None
order = tuple(reversed(range(launch.world_size)))
subgroups = {(0,), (launch.world_size - 1,), order, tuple(range(launch.world_size))}
outputs = []


def load(path, group):
    source, shard = find_model("--model", path), Shard(group.index, group.size)
    return load_transformer(source.config, source.weights, shard, None, torch.float32, device)


def decode(groups, draft_ranks, kv, sampling):
    """(baseline, speculation) and, on the draft's ranks, a check of what the draft did."""
    place = (NativeBackend(), groups.target, 4, 70 + 24 + 4)
    target = ModelRunner(load(sys.argv[1], groups.target), *place)
    runner = None
    if groups.draft is not None:
        place = (load(sys.argv[2], groups.draft), NativeBackend(), groups.draft, 4, 70 + 24 + 4)
        if kv.policy == "full":
            runner = ModelRunner(*place)
        else:
            runner = RollingRunner(*place, make_policy(kv), max_tail=20, block_size=8)
    assert (runner is not None) == (launch.rank in draft_ranks)
    draft = DraftModel(runner, order.index(draft_ranks[0]), 16)
    requests = make_requests(random_prompts([5, 70, 1, 33], 97), [24, 9, 24, 17], sampling=sampling)
    baseline, ours, accepted = decode_both(target, requests, kv, 4, 64, "model", draft)
    assert any(a for step in accepted for a in step), "the draft is of use"
    return baseline, ours


for ranks in sorted(subgroups, key=lambda ranks: (len(ranks), ranks)):
    groups = make_groups(launch, order, device, collectives, ranks)
    for kv in (KVSection("full"), KVSection("streaming_llm", 24, 4)):
        baseline, ours = decode(groups, ranks, kv, SamplingSection())
        assert ours == baseline, (ranks, kv)
        outputs.append(baseline)
    _, sampled = decode(groups, ranks, KVSection("full"), SamplingSection(temperature=0.7))
    everyone = groups.target.all_gather_object(sampled)
    assert all(tokens == sampled for tokens in everyone), "ranks sample alike"
    x = torch.full((2, 3), launch.rank)
    for index, rank in enumerate(order):
        assert torch.equal(groups.target.broadcast(x.clone(), index), torch.full((2, 3), rank))
assert all(tokens == outputs[0] for tokens in outputs)
if launch.rank == 0:
    print(json.dumps(outputs[0]), flush=True)
close_groups()
