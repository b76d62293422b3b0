"""RankSession: what it sets up, and when it leaves the groups."""

from dataclasses import replace

import pytest
import torch

from magicdec.config.resolved import ResolvedParallel
from magicdec.distributed.groups import Launch
from magicdec.setup import session as session_module
from magicdec.setup.session import RankSession

ALONE = Launch(0, 1, 0, 1)
PARALLEL = ResolvedParallel((0,), "cpu", None, threads=1)


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    monkeypatch.setattr(session_module, "close_groups", lambda: calls.append("closed"))
    return calls


def test_groups_are_left_at_the_end(closed: list[str]) -> None:
    torch.set_num_threads(2)
    with RankSession(ALONE, PARALLEL, draft_ranks=(0,)) as session:
        assert torch.get_num_threads() == 1
        assert session.device == torch.device("cpu")
        assert session.groups.target.ranks == (0,) and session.groups.draft is not None
        assert closed == []
    assert closed == ["closed"]


def test_groups_are_not_left_after_an_error(closed: list[str]) -> None:
    """Leaving a group would wait for ranks that may be gone."""
    with pytest.raises(KeyError), RankSession(ALONE, PARALLEL):
        raise KeyError
    assert closed == []


def test_what_was_measured_is_in_the_environment() -> None:
    with RankSession(ALONE, PARALLEL) as session:
        pass
    assert session.describe_environment().read_bandwidth_bytes_per_s is None
    found = session.describe_environment(7.0)
    assert found.read_bandwidth_bytes_per_s == 7.0 and found.threads == 1
    assert found.time_utc == session.started.isoformat(timespec="seconds")


def test_on_cuda_the_device_is_that_of_the_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks share GPUs in turns where there are fewer GPUs than ranks."""
    for num_gpus, expected in ((4, 1), (1, 0)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=num_gpus: count)
        session = RankSession(Launch(5, 8, 1, 4), replace(PARALLEL, device="cuda"))
        assert session.device == torch.device("cuda", expected)
