"""One rank of a check of collectives: shared memory and direct exchange against gloo, on the shapes
that decoding sends; broadcasts; values of Python, which are no pickles; and uneven shards of a
vocabulary, with ranks in another order than launched. Started by test_collectives.py with the
directory of the shared files; prints OK on rank 0, or dies as asked."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from magicdec.distributed import shared_memory
from magicdec.distributed.groups import Group, read_launch
from magicdec.distributed.start import close_groups, make_groups
from magicdec.distributed.tensor_parallel import split_evenly
from magicdec.runner.model_runner import gather_vocab

shared_memory.DIRECTORY = Path(sys.argv[1])
launch = read_launch()


def check(group: Group, ranks: tuple[int, ...], turns: int) -> None:
    for turn in range(turns):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            for shape in ((1,), (4, 1, 256), (3, 5, 7), (300, 1000)):
                x = torch.randn(shape).to(dtype)
                parts = [torch.empty_like(x) for _ in ranks]
                dist.all_gather(parts, x)
                ours = group.all_reduce(x.clone())
                expected = torch.stack([parts[r] for r in ranks]).double().sum(0)
                tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
                assert (ours.double() - expected).abs().max() <= tolerance * expected.abs().max()
                same = [torch.empty_like(ours) for _ in ranks]
                dist.all_gather(same, ours)
                assert all(torch.equal(ours, other) for other in same), (
                    "every rank has the same bits"
                )
                assert torch.equal(group.all_gather(x), torch.stack([parts[r] for r in ranks]))
                if turn > 1:
                    break


order = tuple(reversed(range(launch.world_size)))
groups = make_groups(launch, order, torch.device("cpu"), "shared_memory")
group = groups.target
assert group.exchange is not None
torch.manual_seed(launch.rank)
if sys.argv[2:] == ["die"]:
    if launch.rank == 1:
        os._exit(7)
    try:
        group.all_reduce(torch.ones(3))
    except RuntimeError as error:
        print(f"NOTICED: {error}", file=sys.stderr)
        sys.exit(3)
check(group, order, 20)
x = torch.full((2, 3), launch.rank)
for index, rank in enumerate(order):
    assert torch.equal(group.broadcast(x.clone(), index), torch.full((2, 3), rank))
for collectives in ("gloo", "shared_memory"):
    order = (1, 2, 0) if launch.world_size == 3 else (1, 0)
    group = make_groups(launch, order, torch.device("cpu"), collectives).target
    check(group, order, 10)
    by_rank = group.all_gather_values((launch.rank, "ä" * launch.rank), tuple[int, str])
    assert by_rank == [(rank, "ä" * rank) for rank in range(launch.world_size)]
    large = torch.full((3 << 20,), 1.0 + launch.rank)  # more than receivers are ready for
    assert torch.equal(group.all_gather(large)[:, -1], torch.tensor(order) + 1.0)
    assert torch.equal(
        group.all_reduce(large).unique(), torch.tensor([sum(order) + 1.0 * len(order)])
    )
    for vocab_size in (97, 98, 99, 20_001):
        for dtype in (torch.float32, torch.bfloat16):
            generator = torch.Generator().manual_seed(0)
            whole = torch.randn(2, 3, vocab_size, generator=generator).to(dtype)
            first, last = split_evenly(vocab_size, group.size, group.index)
            places = group.all_gather_range((first, last), torch.device("cpu"))
            assert torch.equal(gather_vocab(whole[..., first:last], places, group), whole)
if launch.rank == 0:
    print("OK", flush=True)
close_groups()
