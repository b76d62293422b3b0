"""One rank of ragged batches: prompts of different lengths, rows that end apart; baseline,
self-speculation, and standalone drafts on every kind of subgroup. Started by test_engine_ranks.py;
rank 0 prints tokens and accepted counts as JSON."""

import json
import sys

import torch
from conftest import decode_both, load, make_draft, make_requests, random_prompts

from magicdec.attention.native import NativeBackend
from magicdec.config.sections import KVSection, SamplingSection
from magicdec.distributed.groups import Group, ParallelGroups, read_launch
from magicdec.distributed.start import close_groups, make_groups
from magicdec.distributed.tensor_parallel import Shard
from magicdec.drafting.drafter import DraftModel
from magicdec.model.transformer import Transformer
from magicdec.runner import ModelRunner

torch.set_num_threads(1)
collectives, draft_path, *paths = sys.argv[1:]
launch, device = read_launch(), torch.device("cpu")
order = tuple(reversed(range(launch.world_size)))
SIZE = 4, 70 + 24 + 4
PROMPTS, NUM_NEW = random_prompts([5, 70, 1, 33], 97), [24, 9, 24, 19]
SAMPLED = SamplingSection(temperature=0.8, top_p=0.9, repetition_penalty=1.1)


def groups_for(draft_ranks: tuple[int, ...] | None = None) -> ParallelGroups:
    chosen = collectives if launch.world_size > 1 else None
    return make_groups(launch, order, device, chosen, draft_ranks)


def load_shard(path: str, group: Group) -> Transformer:
    return load(path, Shard(group.index, group.size))


def decode(model: Transformer) -> list[list[list[int]]]:
    """The baseline's greedy tokens, which speculation emits under every policy. For every policy,
    how many drafts each step accepted, and sampled tokens. Sampled tokens are not the baseline's,
    but each rank count drafts and draws the same ones."""
    outputs: list[list[list[int]]] = []
    for kv in (
        KVSection("full"),
        KVSection("streaming_llm", 17, 16),
        KVSection("snapkv", 20, window_size=6, reselect_every=7),
        KVSection("verified", 40, 4),
        KVSection("retrieval", 40, 4),
    ):
        runner = ModelRunner(model, NativeBackend(), group, *SIZE)
        names = ["speculative"] if outputs else ["autoregressive", "speculative"]
        requests = make_requests(PROMPTS, NUM_NEW)
        baseline, ours, accepted = decode_both(runner, requests, kv, 4, names=names)
        outputs = outputs or [baseline]
        assert ours == outputs[0], kv
        sampled = make_requests(PROMPTS, 12, sampling=SAMPLED)
        outputs += [accepted, decode_both(runner, sampled, kv, 4, names=["speculative"])[1]]
    return outputs


def draft_apart(kv: KVSection, ranks: tuple[int, ...]) -> list[list[int]]:
    """How many drafts of a standalone draft on `ranks` each step accepted. It emits the baseline's
    tokens, and all ranks sample the same ones."""
    groups = groups_for(ranks)
    runner = ModelRunner(load_shard(paths[0], groups.target), NativeBackend(), groups.target, *SIZE)
    source, draft = order.index(ranks[0]), None
    assert (groups.draft is not None) == (launch.rank in ranks)
    if groups.draft is not None:
        model = load_shard(draft_path, groups.draft)
        place = {"group": groups.draft, "source": source}
        draft = make_draft(model, kv, *SIZE, NativeBackend(), **place)
    draft = draft or DraftModel(None, source, 16, kv.policy == "streaming_llm")
    how = {"drafter": "model", "draft": draft, "names": ["speculative"]}
    _, ours, accepted = decode_both(runner, make_requests(PROMPTS, NUM_NEW), kv, 4, **how)
    assert ours == outputs[0][0], (ranks, kv)
    assert any(a for step in accepted for a in step), "the draft is of use"
    if kv.policy == "full":
        sampled = make_requests(PROMPTS, 12, sampling=SamplingSection(temperature=0.7))
        _, drawn, _ = decode_both(runner, sampled, kv, 4, **how)
        assert all(tokens == drawn for tokens in groups.target.all_gather_object(drawn))
    return accepted


group = groups_for().target
outputs = [decode(load_shard(path, group)) for path in paths]
subgroups = {(0,), (launch.world_size - 1,), order, tuple(range(launch.world_size))}
for ranks in sorted(subgroups, key=lambda ranks: (len(ranks), ranks)):
    for kv in (KVSection("full"), KVSection("streaming_llm", 24, 4)):
        draft_apart(kv, ranks)
accepted = draft_apart(KVSection("snapkv", 20, window_size=6), order)
if launch.rank == 0:
    print(json.dumps([*outputs, accepted]), flush=True)
close_groups()
