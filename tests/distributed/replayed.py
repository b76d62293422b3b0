"""A case of each drafter and KV policy over all ranks, its steps recorded once and replayed, sums
over ranks included; greedy, or sampled with penalties. Started by test_engine_ranks.py; rank 0
prints what each emitted, eager and replayed, as JSON."""

import json
import sys

import torch
from conftest import decode, load, make_draft, random_prompts, served_pairs
from recorder import Recorder

from magicdec.attention.sdpa import SDPABackend
from magicdec.config.sections import DecodingSection, KVSection, SamplingSection
from magicdec.decoding.recorder import Eager
from magicdec.decoding.strategy import Setup
from magicdec.distributed.groups import Group, read_launch
from magicdec.distributed.start import close_groups, make_groups
from magicdec.distributed.tensor_parallel import Shard
from magicdec.drafting.drafter import DraftModel
from magicdec.engine import Engine
from magicdec.request import Request
from magicdec.runner import ModelRunner
from magicdec.sampling.sampling import make_params

PROMPTS, NUM_NEW = [5, 70, 1], [10, 8, 4]
MAX_TOKENS = 70 + 10 + 4
SAMPLINGS = {
    "greedy": [SamplingSection()] * 3,
    "sampled": [
        SamplingSection(temperature=0.9, repetition_penalty=1.3, presence_penalty=0.5),
        SamplingSection(temperature=1.2, top_k=20, top_p=0.9, min_p=0.02),
        SamplingSection(repetition_penalty=1.2),
    ],
}


def section_of(policy: str | None) -> KVSection:
    return KVSection("full") if policy in (None, "full") else KVSection(policy, 40, 4, 8)


def make_runner(path: str, group: Group, dtype: torch.dtype) -> ModelRunner:
    model = load(path, Shard(group.index, group.size), dtype=dtype)
    return ModelRunner(model, SDPABackend(16), group, len(PROMPTS), MAX_TOKENS)


def main() -> None:
    torch.set_num_threads(1)
    target_path, draft_path, sampling = sys.argv[1:]
    launch = read_launch()
    order, last = tuple(reversed(range(launch.world_size))), launch.world_size - 1
    groups = make_groups(launch, order, torch.device("cpu"), "gloo", (last,))
    # In float64 nothing rounds so that a random number falls to the other side.
    dtype = torch.float32 if sampling == "greedy" else torch.float64
    runner, draft_model = make_runner(target_path, groups.target, dtype), None
    if groups.draft is not None:
        draft_model = make_runner(draft_path, groups.draft, dtype).model
    engine = Engine(runner, 64)
    rows = zip(random_prompts(PROMPTS, 97), NUM_NEW, SAMPLINGS[sampling], strict=True)
    snapshots = engine.prefill(
        [Request(i, prompt, make_params(s, n, (), i)) for i, (prompt, n, s) in enumerate(rows)]
    )
    found = []
    for drafter, policy in [(None, None), *sorted(served_pairs(), key=str)]:
        kv, tokens, recorder = section_of(policy), [], Recorder()
        name = "speculative" if drafter else "autoregressive"
        for each in (Eager(), recorder):
            engine.rewind(snapshots)
            draft = None
            if drafter == "model":
                is_rolling = policy == "streaming_llm"
                draft = DraftModel(None, order.index(last), 16, is_rolling)
            if drafter == "model" and draft_model is not None:
                size = len(PROMPTS), MAX_TOKENS
                place = {"group": groups.draft, "source": order.index(last)}
                draft = make_draft(draft_model, kv, *size, SDPABackend(16), **place)
            decoding = DecodingSection(name, drafter, 3)
            setup = Setup(runner, decoding, kv, draft=draft, recorder=each)
            tokens.append([list(r.output_ids) for r in decode(engine, name, setup)])
        found.append((drafter, policy, *tokens, recorder.replayed))
    if launch.rank == 0:
        print(json.dumps(found), flush=True)
    close_groups()


if __name__ == "__main__":
    main()
