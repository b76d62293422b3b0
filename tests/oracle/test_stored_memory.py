"""The memory of weights in the formats that checkpoints store them in: what a model takes when it
is loaded is what the plan of a run says, on one rank, on two, and in stages."""

import pytest
import torch
from stored_formats import FORMATS, stored

from magicdec.bench import roofline
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import ModelSection, ParallelSection, WorkloadSection
from magicdec.distributed.groups import Launch
from magicdec.hardware.costs import DTYPE_BYTES, weight_bytes
from magicdec.model.checkpoint.source import find_model, find_stored_config
from magicdec.names import NARROW, STORED
from magicdec.setup.loading import load_kind
from magicdec.setup.model_plan import ModelPlan, StagePart
from magicdec.setup.prepare import SetupCache, find

WITHIN = 0.1
PARTS = {
    "whole": ((0,), StagePart()),
    "half": ((0, 1), StagePart()),
    "first stage": ((0,), StagePart(range(1))),
    "last stage": ((0,), StagePart(range(1, 2))),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("linear", ["torch", "packed"])
@pytest.mark.parametrize("weights", [STORED, "plain"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.narrow("values", "pairs")
def test_weights_take_what_is_planned(
    name: str, dtype: str, weights: str, linear: str, part: str
) -> None:
    """All tensors of the model, beside which a run holds none of the checkpoint. Packed heads of
    this small vocabulary are filled up, which is planned too."""
    path = str(stored(name))
    target_dtype = STORED if FORMATS[name].has_groups and weights == STORED else dtype
    config = RunConfig(
        model=ModelSection(path, dtype, linear, target_dtype=target_dtype),
        parallel=ParallelSection(device="cpu", threads=1),
        workload=WorkloadSection(prefix_len=50, gen_len=8),
    )
    ranks, stage_layers = PARTS[part]
    run = find(config, Launch(0, 1, 0, 1), SetupCache())
    plan = ModelPlan(run.config, run.source.config, ranks, 0, stage_layers)
    model = load_kind(run.source, plan.shard, plan.kinds, torch.device("cpu"), stage_layers)
    taken = sum(parameter.nbytes for parameter in model.parameters())
    assert abs(taken - plan.weight_bytes) <= WITHIN * taken
    if part == "whole" and linear == "torch":
        narrow = target_dtype if target_dtype in NARROW else None
        planned = weight_bytes(run.source.config, plan.shard, DTYPE_BYTES[dtype], narrow)
        read = roofline.weight_bytes(model)
        assert abs(read - planned) <= 0.001 * read


@pytest.mark.parametrize("linear", ["torch", "packed"])
def test_matrices_that_ranks_widen_are_planned_as_plain(linear: str) -> None:
    """The output and down projections of act-order, whose inputs two ranks share."""
    test_weights_take_what_is_planned("gptq, act-order", "float32", STORED, linear, "half")


def test_a_plan_without_loading_knows_the_same_bytes() -> None:
    for name in FORMATS:
        path = str(stored(name))
        config = find_stored_config("--model", path)
        assert config == find_model("--model", path).config
        assert (config.stored_bytes is not None) == FORMATS[name].has_groups
