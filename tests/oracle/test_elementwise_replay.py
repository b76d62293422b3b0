"""Steps over the Triton kernels between the products, recorded once and replayed, as CUDA graphs
are: the tokens of torch's operators. A launch is recorded with its numbers as they were then, and
replayed on what its tensors hold by then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from recorder import Recorder
from test_replay import run, section_of, started
from torch import Tensor

from magicdec.model.elementwise import triton as module
from magicdec.model.elementwise.operators import Elementwise
from magicdec.model.elementwise.triton import TritonElementwise

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="graphs themselves are there")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Has launches go through torch's dispatcher, which the recorder sees; the names of those that
    were made or made again."""
    kernels, made = module.kernels("cpu"), list[str]()
    given: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = []
    library = torch.library.Library("magicdec_tests", "DEF")
    library.define("launch(Tensor(a!)[] tensors, int number) -> ()")

    def launch(tensors: list[Tensor], number: int) -> None:
        (name, grid, args, options), current = given[number], iter(tensors)
        made.append(name)
        getattr(kernels, name)[grid](
            *(next(current) if arg is Tensor else arg for arg in args), **options
        )

    library.impl("launch", launch, "CPU")

    class Kernels:
        def __getattr__(self, name: str) -> Any:
            return Grid(name)

    class Grid:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def start(*args: Any, **options: Any) -> None:
                tensors = [arg for arg in args if isinstance(arg, Tensor)]
                others = tuple(Tensor if isinstance(arg, Tensor) else arg for arg in args)
                given.append((self.name, grid, others, options))
                torch.ops.magicdec_tests.launch(tensors, len(given) - 1)

            return start

    monkeypatch.setattr(module, "kernels", lambda device: Kernels())
    yield made
    library._destroy()


@pytest.mark.parametrize(("drafter", "policy"), [(None, None), ("self", "streaming_llm")], ids=str)
def test_replayed_steps_emit_the_tokens_of_torchs_operators(
    drafter: str | None, policy: str | None, launches: list[str]
) -> None:
    engine, snapshots = started()
    kv, recorder, model = section_of(policy), Recorder(), engine.runner.model
    expected, accepted, _ = run(engine, snapshots, drafter, kv, 3, None)
    assert type(model.elementwise) is Elementwise and not launches
    model.use(TritonElementwise())
    found, replayed, _ = run(engine, snapshots, drafter, kv, 3, recorder)
    assert (found, replayed) == (expected, accepted)
    assert recorder.replayed >= len(replayed)
    a_forward = 4 * model.config.num_layers + 1
    assert len(launches) % a_forward == 0 and len(launches) > recorder.replayed * a_forward
    assert set(launches) == {"norm_rows", "rotate_heads", "gate_rows"}
