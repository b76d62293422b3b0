"""What `--attention auto` means on a machine, and the choice of CUDA graphs, which depends on the
backend. Imports no torch itself, but reading the capabilities of a
backend does. Knows a backend only by its `Capabilities`.
"""

from __future__ import annotations

from collections.abc import Sequence

from magicdec.config.capabilities import capabilities_of, list_backends, policy_called
from magicdec.config.choices.choice import Choice, How, asked_for, first_obstacle
from magicdec.config.machine import Machine
from magicdec.names import AUTO_BACKENDS, PORTABLE_BACKEND, REFERENCE_BACKEND


def choose_backend(
    value: str,
    device: str,
    machine: Machine,
    head_dim: int,
    dtype: str = "float32",
    needs_trees: bool = False,
    is_staged: bool = False,
) -> Choice:
    """The attention backend to use. Raises ValueError if the user named one that cannot serve. On
    CUDA, `auto` is the portable backend until a measurement has chosen. `needs_trees`: the run
    drafts trees. `is_staged`: the ranks are stages of a pipeline."""
    if value == "auto" and device == "cuda" and is_staged:
        why = f"auto: {PORTABLE_BACKEND}, because the stages of a pipeline measure no backends"
        return Choice(PORTABLE_BACKEND, why, How.SECOND_BEST)
    if value == "auto" and device == "cuda":
        return Choice(PORTABLE_BACKEND, "auto: to be measured", How.TO_BE_MEASURED)
    if value == "auto":
        return _choose_on_cpu(device, machine, head_dim, dtype, needs_trees)
    capabilities = capabilities_of(value)
    if needs_trees and not capabilities.supports_trees:
        fitting = ", ".join(list_backends(lambda c: c.supports_trees))
        raise ValueError(
            f"--attention {value} computes no draft trees, which --tree needs; choose from auto, "
            f"{fitting}"
        )
    obstacle = capabilities.obstacle(machine, device, head_dim, dtype)
    is_interpreted = capabilities.is_interpreted_on_cpu and device == "cpu"
    others = f"auto, {REFERENCE_BACKEND}, {PORTABLE_BACKEND}"
    return asked_for("--attention", value, obstacle, others, is_interpreted)


def _choose_on_cpu(
    device: str, machine: Machine, head_dim: int, dtype: str, needs_trees: bool
) -> Choice:
    """The first of AUTO_BACKENDS that can serve, and why those before it cannot."""
    obstacles: list[str] = []
    for name in AUTO_BACKENDS:
        capabilities = capabilities_of(name)
        obstacle = capabilities.obstacle(machine, device, head_dim, dtype)
        if needs_trees and not capabilities.supports_trees:
            obstacle = f"{name} computes no draft trees"
        if obstacle is None:
            how = How.SECOND_BEST if obstacles else How.AUTO
            return Choice(name, "; ".join([f"auto: {name}", *obstacles]), how)
        obstacles.append(obstacle)
    raise AssertionError("the last of AUTO_BACKENDS serves every model")


def check_returns_weights(backend: str, policy: str) -> None:
    """Raise ValueError if the policy needs the target's attention weights and the backend does not
    return them."""
    if policy_called(policy).needs_weights and not capabilities_of(backend).returns_weights:
        fitting = ", ".join(list_backends(lambda c: c.returns_weights))
        raise ValueError(
            f"--attention {backend} does not return attention weights, which --kv_policy {policy} "
            f"needs; choose from auto, {fitting}"
        )


def choose_graphs(
    value: str,
    device: str,
    backends: Sequence[Choice],
    drafts_trees: bool = False,
    is_staged: bool = False,
    pa: float | None = None,
) -> Choice:
    """Whether CUDA graphs are on or off. `backends` are the target's and a draft's; those that a
    measurement will choose do not count. `is_staged`: the ranks are stages of a pipeline. `pa` is
    `--pa`. Raises ValueError if the user asked for graphs that cannot be captured."""
    names = [choice.settled for choice in backends if choice.settled is not None]
    unfit = next((name for name in names if not capabilities_of(name).can_be_recorded), None)
    obstacles = {
        f"--device {device} has none": device != "cuda",
        f"--attention {unfit} needs lengths on the host": unfit is not None,
        "steps with a --tree are not captured": drafts_trees,
        f"the host decides in each draft whether --pa {pa} stops it": bool(pa),
        "the steps of a pipeline are not captured": is_staged,
    }
    obstacle = first_obstacle(obstacles)
    if value != "auto":
        return asked_for("--cuda_graphs", value, obstacle if value == "on" else None, "auto, off")
    if obstacle:
        return Choice("off", f"auto: off, {obstacle}", How.SECOND_BEST)
    return Choice("on", "auto: on")
