"""One rank of a check of `gather_vocab`: uneven shards of a vocabulary, ranks in another order than
launched. Started by test_vocabulary.py; prints OK on rank 0."""

import sys

import torch

from magicdec.distributed.groups import read_launch
from magicdec.distributed.start import close_groups, make_groups
from magicdec.distributed.tensor_parallel import split_evenly
from magicdec.sampling.model_tokens import gather_vocab

launch = read_launch()
order = (1, 2, 0) if launch.world_size == 3 else (1, 0)
for collectives in sys.argv[1:]:
    group = make_groups(launch, order, torch.device("cpu"), collectives).target
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
