"""One rank of a ragged batch: baseline and self-speculation over the ranks, prompts of different
lengths, rows ending apart. Started by test_ragged.py; rank 0 prints tokens and accepted counts as
JSON."""

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from conftest import decode_both, make_draft, make_requests, random_prompts

from magicdec.attention.native import NativeBackend
from magicdec.config.sections import KVSection, SamplingSection
from magicdec.distributed.groups import read_launch
from magicdec.distributed.start import close_groups, make_groups
from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.checkpoint.source import find_model, load_transformer
from magicdec.model.transformer import Transformer
from magicdec.runner import ModelRunner

torch.set_num_threads(1)
launch, device = read_launch(), torch.device("cpu")
order = tuple(reversed(range(launch.world_size)))
collectives = "shared_memory" if launch.world_size > 1 else None
group = make_groups(launch, order, device, collectives).target


def decode(path: str) -> list[list[list[int]]]:
    """The baseline's greedy tokens, which speculation emits under every policy. For every policy,
    how many drafts each step accepted, and sampled tokens. Sampled tokens are not the baseline's,
    but each rank count drafts and draws the same ones."""
    source, shard = find_model("--model", path), Shard(group.index, group.size)
    model = load_transformer(source.config, source.weights, shard, None, torch.float32, device)
    outputs: list[list[list[int]]] = []
    for kv in (
        KVSection("full"),
        KVSection("streaming_llm", 17, 16),
        KVSection("snapkv", 20, window_size=6, reselect_every=7),
        KVSection("verified", 40, 4),
        KVSection("retrieval", 40, 4),
    ):
        runner = ModelRunner(model, NativeBackend(), group, 4, 70 + 40 + 4)
        requests = make_requests(random_prompts([5, 70, 1, 33], 97), [40, 9, 40, 31])
        names = ["speculative"] if outputs else ["autoregressive", "speculative"]
        baseline, ours, accepted = decode_both(runner, requests, kv, 4, names=names)
        outputs = outputs or [baseline]
        assert ours == outputs[0], kv
        section = SamplingSection(temperature=0.8, top_p=0.9, repetition_penalty=1.1)
        sampled = make_requests(random_prompts([5, 70, 1, 33], 97), 20, sampling=section)
        outputs += [accepted, decode_both(runner, sampled, kv, 4, names=["speculative"])[1]]
    return [*outputs, *drafted_apart(model)]


def drafted_apart(model: Transformer) -> list[list[list[int]]]:
    """The same for a standalone draft on all ranks, which chooses from its own cache. Its weights
    are the target's."""
    kv, max_tokens = KVSection("snapkv", 20, window_size=6), 70 + 40 + 4
    runner = ModelRunner(model, NativeBackend(), group, 4, max_tokens)
    draft = make_draft(model, kv, 4, max_tokens, NativeBackend(), group=group)
    requests = make_requests(random_prompts([5, 70, 1, 33], 97), [40, 9, 40, 31])
    baseline, ours, accepted = decode_both(runner, requests, kv, 4, drafter="model", draft=draft)
    assert ours == baseline and any(a < 4 for step in accepted for a in step)
    return [baseline, accepted]


outputs = [decode(path) for path in sys.argv[1:]]
if launch.rank == 0:
    print(json.dumps(outputs), flush=True)
close_groups()
