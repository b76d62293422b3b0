"""scripts/dev/scale_figure.py: two cells by hand, as results/predictions/scale.md has them, a
ring beside the simulator, and what has room."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from magicdec.predict.simulator.run import Work, run_mode
from magicdec.predict.simulator.simulation import SimulatedMachine
from magicdec.systems.pipeinfer.options import Options


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> Any:
    import scale_figure

    return scale_figure


@pytest.fixture
def cluster(scale: Any) -> Any:
    return scale.GpuCluster(scale.SPECS["h100"], scale.NETWORKS[0])


READ = 0.8 * 3.35e12
COMPUTE = 0.6 * 989e12


def test_8b_by_hand(scale: Any, cluster: Any) -> None:
    """One request of 4096 tokens on 8 GPUs: a KV head a rank, 7.50 billion weights read."""
    weights = 2 * 7_504_924_672 / 8 / READ
    kv = 4097 * 2 * 32 * 128 * 2 / READ
    sums = 65 * 8e-6 + (64 * 4096 * 2 + 16) * 2 * 7 / 8 / 450e9
    expected = weights + kv + sums + 32 * 5e-6
    one = scale.Division(1, 1, 8)
    speed = cluster.speed("llama-3.1-8b", one, 4096, 1, 0, 0.0)
    assert speed == pytest.approx(1 / expected, rel=1e-3)


def test_70b_with_drafts_by_hand(scale: Any, cluster: Any) -> None:
    """256 requests of 32768 tokens on 8 nodes: 32 rows of a replica, two drafts of 512 tokens."""

    def seconds(T: int, S: int) -> float:
        linear = max(2 * 69.5e9 / 8 / READ, 2 * 32 * T * 69.5e9 / 8 / COMPUTE)
        kv = 32 * (S + T) * 2 * 80 * 128 * 2 / READ
        return linear + kv + 161 * 8e-6 + 160 * 1.75 * 32 * T * 8192 * 2 / 450e9 + 80 * 5e-6

    step = seconds(1, 512) + seconds(1, 513) + seconds(3, 32768)
    way = scale.Division(8, 1, 8)
    speed = cluster.speed("llama-3.1-70b", way, 32768, 256, 2, 0.7)
    assert speed == pytest.approx(256 * (1 + 0.7 + 0.49) / step, rel=2e-3)


@pytest.mark.parametrize("rows", [4, 8])
def test_a_ring_is_that_of_the_simulator(scale: Any, cluster: Any, rows: int) -> None:
    ring = scale.Division(1, 4, 8)
    model = "llama-3.1-405b"
    S = 32768
    stage_s = cluster.seconds(model, 8, 1, 1, S) / 4
    hop_s = cluster.hop_s(model, ring, 1)
    machine = SimulatedMachine((stage_s,) * 4, link_s=hop_s)
    work = Work([True], 16, ring_requests=rows)
    _, metrics = run_mode("ring", machine, Options(), work)
    # Rows one by one, without what groups of several rows would share.
    assert cluster.seconds(model, 8, 2, 1, S) > cluster.seconds(model, 8, 1, 1, S)
    expected = rows / max(4 * (stage_s + hop_s), rows * stage_s)
    assert metrics.tokens_per_s == pytest.approx(expected, rel=1e-6)
    least = rows / cluster.step_s(model, ring, rows, [(1, S)])
    assert least >= expected if rows > 4 else least == pytest.approx(expected)


def test_a_model_needs_room(scale: Any, cluster: Any) -> None:
    """405 billion weights in bfloat16 are more than 8 H100 have, and fewer than 16 have."""
    model = "llama-3.1-405b"
    assert not cluster.fits(model, scale.Division(1, 1, 8), 1, 4096)
    assert cluster.fits(model, scale.Division(1, 2, 8), 1, 4096)
    assert cluster.fits(model, scale.Division(1, 1, 16), 1, 4096)
    assert not cluster.fits(model, scale.Division(1, 2, 8), 256, 131072)
    assert scale.answer(cluster, model, 4096, 8, 1, 0.7) is None


def test_hops_cross_nodes_where_stages_do(scale: Any, cluster: Any) -> None:
    model = "llama-3.1-8b"
    inside = cluster.hop_s(model, scale.Division(1, 2, 4), 1)
    mixed = cluster.hop_s(model, scale.Division(1, 4, 4), 1)
    between = cluster.hop_s(model, scale.Division(1, 2, 8), 1)
    assert 0 < inside < mixed < between
    assert mixed == pytest.approx((inside + between) / 2)


def test_drafts_take_gpus_of_a_pipeline(scale: Any, cluster: Any) -> None:
    """On 16 GPUs two stages of 8 leave none for the draft."""
    for gpus in (16, 32):
        fitting = [scale.Division(1, 2, 8)]
        best = scale.best_pipeline(cluster, "llama-3.1-70b", 4096, gpus, 1, 0.7, fitting, 1.0)
        assert (best is None) == (gpus == 16)


def test_a_cell_of_the_map_is_that_of_its_gpus_and_requests(
    scale: Any, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its colour is the winner's, its number the gain; a plus is a gain at acceptance 0.8 alone."""

    def answer(*place: Any) -> Any:
        _, _, _, gpus, requests, acceptance = place
        if requests > 16 * gpus:
            return None
        gain = gpus / 8 if gpus > 8 else 1.0 + (acceptance == 0.8) * (requests == 4)
        return SimpleNamespace(kind=scale.KINDS[(gpus // 8 + requests) % 4], gain=gain)

    monkeypatch.setattr(scale, "answer", answer)
    ax = Figure().subplots()
    scale.draw_map(ax, cluster, "llama-3.1-8b", 4096)
    names = [[text.get_text() for text in axis.get_ticklabels()] for axis in (ax.xaxis, ax.yaxis)]
    gpus, requests = (list(map(int, name)) for name in names)
    assert (tuple(gpus), tuple(requests)) == (scale.GPUS, scale.REQUESTS)
    cells = {
        (gpus[round(patch.get_x())], requests[round(patch.get_y())]): to_hex(patch.get_facecolor())
        for patch in ax.patches
    }
    assert len(cells) == len(gpus) * len(requests)
    for (count, asked), colour in cells.items():
        way = answer(None, None, None, count, asked, 0.7)
        wanted = scale.NO_ROOM if way is None else scale.COLOUR_OF[way.kind]
        assert colour == to_hex(wanted)
    texts = {
        (gpus[int(text.get_position()[0])], requests[int(text.get_position()[1])]): text.get_text()
        for text in ax.texts
    }
    assert (
        texts[64, 16] == "8.0"
        and texts[8, 4] == "+"
        and texts[8, 1] == ""
        and (8, 256) not in texts
    )


def test_a_line_of_gains_is_at_its_requests(
    scale: Any, cluster: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def gain(*place: Any) -> float | None:
        _, model, S, _, requests, acceptance = place
        base = scale.CONTEXTS.index(S) + 1 / requests + len(model)
        return None if requests > 256 else base + 10 * acceptance

    figures: list[Figure] = []
    monkeypatch.setattr(scale, "gain_of", gain)
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, path, **_: (figures.append(figure), Path(path).touch())
    )
    scale.draw_gain(tmp_path / "a.png", cluster, "h100")
    counts = [2**k for k in range(9)]
    for ax, S in zip(figures[0].axes, scale.CONTEXTS, strict=True):
        assert ax.get_title(loc="left") == f"{S // 1024} k tokens of context"
        for line in ax.lines[:-1]:
            model = str(line.get_label())
            middle = [gain(0, model, S, 64, count, 0.7) for count in counts]
            assert [*line.get_xdata()] == counts and [*line.get_ydata()] == middle
        assert {str(line.get_label()) for line in ax.lines[:-1]} == {*scale.DRAFT_OF}
        for band, model in zip(ax.collections, scale.DRAFT_OF, strict=True):
            heights = band.get_paths()[0].vertices[:, 1]
            ends = [gain(0, model, S, 64, at, a) for at, a in ((256, 0.6), (1, 0.8))]
            assert [heights.min(), heights.max()] == pytest.approx(ends)
