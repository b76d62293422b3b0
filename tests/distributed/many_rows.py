"""One rank of a chain of drafts for more rows than a slot of shared memory has room for: the chain
in native code against forwards layer by layer. Started by test_collectives.py with a checkpoint;
rank 0 prints OK."""

import sys

import torch
from conftest import load, pack

from magicdec.attention.native import NativeBackend
from magicdec.distributed.groups import read_launch
from magicdec.distributed.shared_memory import SLOT_BYTES
from magicdec.distributed.start import close_groups, make_groups
from magicdec.distributed.tensor_parallel import Shard
from magicdec.runner.forward_batch import ForwardBatch
from magicdec.runner.model_runner import ModelRunner, greedy
from magicdec.runner.native_steps.executor import Executor
from magicdec.speculation.policies.policy import FullKV

BEST_BYTES = 32  # of a row's `Best` in runner/native_steps/forward.h
NUM_ROWS = 2 * (SLOT_BYTES // BEST_BYTES) + 1

torch.set_num_threads(1)
launch = read_launch()
order = tuple(range(launch.world_size))
group = make_groups(launch, order, torch.device("cpu"), "shared_memory").target
model = pack(load(sys.argv[1], Shard(group.index, group.size), dtype=torch.float32))
runner = ModelRunner(model, NativeBackend(), group, NUM_ROWS, 4, executor=Executor(model, group))
rows = range(NUM_ROWS)
everything = FullKV()
for row in rows:
    runner.allocate(row)
newest = first = (torch.arange(NUM_ROWS) % model.config.vocab_size).unsqueeze(1)
found = runner.draft(ForwardBatch(first, rows, everything, committed=[0] * NUM_ROWS), 2)
runner.truncate(rows, [0] * NUM_ROWS)
runner.executor = None
drafts = []
for _ in range(2):
    newest, _ = greedy(runner.forward(ForwardBatch(newest, rows)), model.head_rows[0], group)
    drafts.append(newest)
assert torch.equal(found, torch.cat(drafts, dim=1))
assert not runner.has_flaws and len(found.unique()) > 2
if launch.rank == 0:
    print("OK", flush=True)
close_groups()
