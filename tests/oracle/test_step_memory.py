"""A step of decoding or verification takes no memory from the system: its tensors live in what
earlier steps gave back. Page faults count what a process touches for the first time."""

from __future__ import annotations

import resource

import pytest
import torch
from conftest import make_runner, pack, tiny_transformer

from magicdec.attention.native import NativeBackend, has_bfloat16_path

STEPS = 30


@pytest.mark.parametrize("num_new", [1, 5])
@pytest.mark.parametrize("is_packed", [False, True], ids=["float32", "packed"])
def test_steps_touch_no_new_memory(is_packed: bool, num_new: int) -> None:
    if is_packed and not has_bfloat16_path():
        pytest.skip("no AVX512-BF16")
    model = tiny_transformer(dtype=torch.bfloat16 if is_packed else torch.float32)
    if is_packed:
        pack(model)
    runner = make_runner(model, 4, 200, NativeBackend())
    rows, ids = range(4), torch.randint(0, 50, (4, num_new))
    for row in rows:
        runner.allocate(row)
    runner.forward(torch.randint(0, 50, (4, 150)), rows)

    def take_steps() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(STEPS):
            runner.forward(ids, rows).argmax(-1).tolist()
            runner.truncate(list(rows), [150] * 4)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    take_steps()
    assert take_steps() < STEPS, "pages, of all steps together"
