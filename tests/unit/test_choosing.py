"""SamplingMetadata: after updates of its tensors, it equals metadata that is made anew from
requests that emitted the same tokens."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from magicdec.runner.request import Request, SamplingParams
from magicdec.runner.sampling.metadata import NO_TOP_K, Filters, Penalties, SamplingMetadata
from magicdec.runner.sampling.randomness import Purpose
from magicdec.runner.sampling.sampling import probabilities, process

VOCAB = 20
CPU = torch.device("cpu")
WARM = SamplingParams(9, temperature=1.0, seed=5)
PENALISED = SamplingParams(9, repetition_penalty=1.5, presence_penalty=0.5)
BOTH = SamplingParams(9, temperature=0.5, top_k=3, presence_penalty=1.0, seed=8)
PARAMS = (PENALISED, SamplingParams(9), BOTH, WARM, BOTH)
OUTPUTS: tuple[list[int], ...] = ([4, 7], [], [1], [2, 2, 2], [9])


def requests_of(outputs: Sequence[list[int]]) -> list[Request]:
    return [
        Request(i, (3, i), params, list(output))
        for i, (params, output) in enumerate(zip(PARAMS, outputs, strict=True))
    ]


def logits() -> Tensor:
    return torch.randn(len(PARAMS), 3, VOCAB, generator=torch.Generator().manual_seed(0))


def same(a: SamplingMetadata, b: SamplingMetadata) -> None:
    """Assert that both choose the same tokens: history, parameters and random numbers are equal."""
    assert a.draws is not None and b.draws is not None
    processed = [process(logits(), metadata.penalties) for metadata in (a, b)]
    assert torch.equal(*processed)
    assert torch.equal(
        probabilities(logits(), a.draws.filters), probabilities(logits(), b.draws.filters)
    )
    assert torch.equal(a.draws.ahead(4, Purpose.ACCEPT, 1), b.draws.ahead(4, Purpose.ACCEPT, 1))


def test_take_equals_metadata_made_from_the_longer_outputs() -> None:
    """Only active rows emit tokens, each its own number. The ids after these are not added to an
    output."""
    choosing = SamplingMetadata.of(requests_of(OUTPUTS), VOCAB, CPU)
    ids = torch.tensor([[5, 5, 6], [8, 9, 10], [1, 11, 12], [13, 14, 15], [16, 17, 18]])
    counts = torch.tensor([2, 3, 1, 3, 2])
    active = torch.tensor([1, 1, 1, 1, 0]).bool()
    outputs = [list(output) for output in OUTPUTS]
    for _ in range(2):
        choosing.take(ids, counts, active)
        for row, count in enumerate((counts * active).tolist()):
            outputs[row] += ids[row, :count].tolist()
        same(choosing, SamplingMetadata.of(requests_of(outputs), VOCAB, CPU))
        ids = ids.flip(1)


def test_load_restores_the_state_of_the_given_requests() -> None:
    """`load` replaces what was taken before. Rows that are not given have emitted nothing."""
    choosing = SamplingMetadata.of(requests_of(OUTPUTS), VOCAB, CPU)
    kept = [tensor.clone() for tensor in choosing.state]
    every = torch.ones(5, dtype=torch.int64)
    choosing.take(torch.arange(10).view(5, 2), every * 2, every.bool())
    choosing.note(torch.full((5, 1, VOCAB), torch.nan))
    assert all(not torch.equal(a, b) for a, b in zip(kept, choosing.state, strict=True))
    choosing.load(requests_of(OUTPUTS))
    assert all(torch.equal(a, b) for a, b in zip(kept, choosing.state, strict=True))
    none = [[], [], [1], [], []]
    choosing.load([r if r.request_id == 2 else None for r in requests_of(OUTPUTS)])
    same(choosing, SamplingMetadata.of(requests_of(none), VOCAB, CPU))


def test_parameters_that_no_row_uses_have_no_tensor() -> None:
    """Steps that are not captured make the metadata often, so unused tensors would cost time. One
    tells whether logits were finite."""
    greedy = [Request(0, (1,), SamplingParams(9), [2])]
    assert (
        SamplingMetadata.of(greedy, VOCAB, CPU) == SamplingMetadata()
        and SamplingMetadata().state == []
    )
    penalised = SamplingMetadata.of([Request(0, (1,), PENALISED)], VOCAB, CPU)
    assert penalised.draws is None and len(penalised.state) == 2
    warm = SamplingMetadata.of([*greedy, Request(1, (1,), WARM)], VOCAB, CPU)
    assert warm.penalties is None and warm.draws is not None and len(warm.state) == 2
    assert warm.draws.filters.top is None and warm.draws.filters.min_p is None


def test_the_largest_top_k_fits_a_tensor() -> None:
    params = [SamplingParams(9, temperature=1.0, top_k=k) for k in (0, 1, (1 << 63) - 1)]
    top = Filters.of(params, CPU).top
    assert top is not None and top[0].flatten().tolist() == [NO_TOP_K, 1, NO_TOP_K]


@pytest.mark.parametrize("drafts", [None, torch.tensor([[6, 9]] * 5)])
def test_penalties_of_a_larger_vocabulary_act_the_same(drafts: Tensor | None) -> None:
    """Two models whose vocabularies are padded to different sizes share one history."""
    made = [Penalties.of(requests_of(OUTPUTS), size, CPU) for size in (VOCAB, VOCAB + 7)]
    assert torch.equal(*(process(logits(), penalties, drafts) for penalties in made))


def test_penalties_of_a_smaller_vocabulary_leave_out_unknown_ids() -> None:
    """A standalone draft may lack some ids that the target emitted."""
    found = Penalties.of(requests_of(OUTPUTS), 5, CPU)
    assert found is not None and found.in_output.shape == (3, 5)
    assert found.in_output[0].nonzero().flatten().tolist() == [4]
    assert found.in_output[2].nonzero().flatten().tolist() == []
