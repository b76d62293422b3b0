"""The details of systems over several groups of requests, as `--repeats` makes them."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from written_records import PIPELINE

from magicdec.names import load_object
from magicdec.records.fields import description_of
from magicdec.systems.details import Details
from magicdec.systems.mdi_llm.details import StageUse, ring_metrics
from magicdec.systems.modes import SYSTEMS
from magicdec.systems.pipeinfer.details import PipeInferDetails

# What is chosen before a mode begins, which all of its groups share.
CHOSEN = {"kind", "num_layers", "draft_rank", "tensor_parallel", "num_lanes", "lane_size"}
CHOSEN |= {"decode_hop_bytes"}
KINDS = [load_object(system.details) for system in SYSTEMS.values() if system.details]


def test_details_of_several_groups_are_sums_means_and_extremes() -> None:
    first = PIPELINE
    second = replace(
        first,
        runs=5,
        most_in_flight=7,
        least_margin=0.25,
        mean_in_flight=2.5,
        busy=[0.25, 0.75],
        idle_s=[1.0, 2.0],
        link_ms=3.0,
        occupancy=[[0.5, 0.25], [0.125, 1.0]],
    )
    found = PipeInferDetails.joined([first, second])
    assert PipeInferDetails.joined([second]) == second
    assert (found.runs, found.most_in_flight, found.least_margin) == (8, 7, 0.25)
    assert (found.mean_in_flight, found.busy, found.idle_s) == (2.0, [0.5, 0.5], [1.5, 3.5])
    assert (found.link_ms, found.draft_ms, found.num_layers) == (3.0, None, [2, 2])
    assert found.occupancy == second.occupancy, "the other does not say it"
    with pytest.raises(AssertionError, match="num_layers"):
        PipeInferDetails.joined([first, replace(second, num_layers=[1, 3])])


def test_a_ring_has_sent_what_it_sent_in_all_groups() -> None:
    first, second = (
        ring_metrics([1, 1], 1, (1, 1), [StageUse(4.0, waiting, 0.1, 8, 2, 0.0)] * 2, 8, 2.0)
        for waiting in (1.0, 3.0)
    )
    found = type(first).joined([first, second])
    assert (found.sent_messages, found.sent_bytes) == ([4, 4], [16, 16])
    assert found.busy == [0.5, 0.5] and found.measured_round_ms == 2.0


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "joined" not in vars(kind)])
def test_every_number_of_details_says_what_it_is_over_groups(kind: type[Details]) -> None:
    without = {item.name for item in fields(kind) if description_of(item).over_groups is None}
    assert "kind" in without and without <= CHOSEN
