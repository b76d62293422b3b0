"""Which way of decoding is predicted to win on 8 to 512 GPUs: a map for each model and context,
for nodes of 8 GPUs joined by InfiniBand and by two kinds of slow links. Nothing runs;
results/predictions/scale.md explains.

    python scripts/dev/scale_figure.py                # the tables of the page
    python scripts/dev/scale_figure.py --plot results/predictions/scale.png \\
        --gain results/predictions/scale_gain.png
    python scripts/dev/scale_figure.py --gpu h200     # another GPU

So many requests are in flight all the time, their prompts are in the cache, and every cell asks
for the most tokens a second of all of them together, which at a given number of requests is also
the shortest time of a token. GPUs are divided into replicas, each into stages of layers, each
stage into ranks of tensor parallelism: `Division`. Forwards cost what `predict/` says, pipelined
speculation what `predict/simulator/` says.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from matplotlib.patches import Patch, Rectangle

from magicdec.hardware.ceiling_file import Hardware, Link
from magicdec.hardware.costs import (
    Deployment,
    kv_bytes_per_token,
    slowest_shard,
    stored_bytes,
)
from magicdec.model.presets.presets import PRESETS
from magicdec.output.figures import COLOURS, GREY, check_picture, look, saved_figure
from magicdec.output.tables import Table, print_tables
from magicdec.predict.curves import expected_tokens
from magicdec.predict.simulator.run import Work, run_mode
from magicdec.predict.simulator.simulation import SimulatedMachine
from magicdec.systems.pipeinfer.drawn_drafts import draw_right
from magicdec.systems.pipeinfer.options import Options

DRAFT_OF = {
    "llama-3.1-8b": "llama-3.2-1b",
    "llama-3.1-70b": "llama-3.1-8b",
    "llama-3.1-405b": "llama-3.1-8b",
}  # of pipelined speculation
CONTEXTS = (4096, 32768, 131072)
GPUS = (8, 16, 32, 64, 128, 256, 512)
REQUESTS = (1, 4, 16, 64, 256, 1024, 4096)
ACCEPTANCES = (0.6, 0.7, 0.8)  # conditional
NODE = 8
BYTES = 2
BUDGET = 512
MAX_GAMMA = 8
ROOM = 0.9  # share of a GPU's memory for weights and KV cache
# Shares of the published peaks that kernels are taken to reach.
READ = 0.8
COMPUTE = 0.6
LAYER_S = 5e-6  # fixed time of a layer: gaps between kernels in a CUDA graph
# The most that is simulated.
PIPELINED_REQUESTS = 4
PIPELINED_STAGES = 32
PIPELINED_TOKENS = 64
NO_GAIN = 1.02  # a drafting way that is less better than plain decoding does not count
TENSOR = "tensor parallelism"
REPLICAS = "replicas, in-flight batches"
RING = "ring of stages"
PIPELINED = "asynchronous pipeline"
KINDS = (TENSOR, REPLICAS, RING, PIPELINED)
COLOUR_OF = {kind: COLOURS[index] for index, kind in enumerate(KINDS)}
NO_ROOM = "#E4E4E4"
DRAFT_RANKS = (1, 2, 4, 8)  # that share a small draft model
MOST_GAIN = 4  # drafts are tried where plain decoding is not further behind the best than this
SHOWN = 1.05  # the least gain that the maps show
EXAMPLES = (
    ("llama-3.1-8b", 4096, 8, 1),
    ("llama-3.1-8b", 32768, 64, 1024),
    ("llama-3.1-70b", 4096, 8, 64),
    ("llama-3.1-70b", 32768, 64, 256),
    ("llama-3.1-70b", 131072, 64, 64),
    ("llama-3.1-405b", 4096, 64, 1),
    ("llama-3.1-405b", 32768, 64, 64),
    ("llama-3.1-405b", 131072, 512, 64),
)


@dataclass(frozen=True)
class Gpu:
    """Published peaks: bytes read a second, FLOP/s in bfloat16, bytes of memory."""

    read: float
    flops: float
    memory: float


@dataclass(frozen=True)
class Network:
    """What joins nodes of 8 GPUs: the time of a message one way, and bytes a second of a node."""

    name: str
    latency_s: float
    bytes_per_s: float


SPECS = {"h100": Gpu(3.35e12, 989e12, 80e9), "h200": Gpu(4.8e12, 989e12, 141e9)}
NVLINK = Network("NVLink", 4e-6, 450e9)  # of one GPU in one direction; 8 us a small all-reduce
NETWORKS = (
    Network("InfiniBand, 400 Gbit/s a GPU", 10e-6, 8 * 50e9),
    Network("10 Gbit/s a node, 1 ms", 1e-3, 1.25e9),
    Network("1 Gbit/s a node, 10 ms", 10e-3, 0.125e9),
)


@dataclass(frozen=True)
class Division:
    """Replicas of a model, each of so many stages, each of `tp` GPUs."""

    replicas: int
    stages: int
    tp: int

    @property
    def kind(self) -> str:
        if self.stages > 1:
            return RING
        return REPLICAS if self.replicas > 1 else TENSOR


@dataclass(frozen=True)
class Winner:
    """A way, the tokens a second of all requests together, and how many times that is what the
    best way without drafts makes. `gamma`: self-drafts in a step; 0: none. `lead`, of a pipeline:
    how many times what the same draft model brings in turns with the model."""

    kind: str
    division: Division
    gamma: int
    tokens_per_s: float
    gain: float
    lead: float | None = None


@dataclass(frozen=True)
class GpuCluster:
    """GPUs in nodes of 8, and what they are predicted to do."""

    gpu: Gpu
    network: Network
    nvlink: Network = NVLINK

    def hardware(self, nodes: int) -> Hardware:
        """Rates of a GPU. A small all-reduce takes a message there and back in a node, and an
        exchange for each doubling of the nodes between them."""
        between = None
        if nodes > 1:
            latency_s = math.log2(nodes) * self.network.latency_s
            between = Link(latency_s, self.network.bytes_per_s)
        inside = Link(2 * self.nvlink.latency_s, self.nvlink.bytes_per_s)
        return Hardware(
            READ * self.gpu.read, COMPUTE * self.gpu.flops, LAYER_S, link=inside, node_link=between
        )

    @cache  # noqa: B019
    def seconds(self, model: str, tp: int, B: int, T: int, S: int) -> float:
        """A forward of the whole model on one stage's ranks."""
        nodes = max(1, tp // NODE)
        deployment = Deployment(PRESETS[model].config, self.hardware(nodes), BYTES, tp, nodes)
        return deployment.seconds(B, T, S)

    def hop_s(self, model: str, division: Division, rows: int) -> float:
        """A message from a stage to the next, in the mean over the ring: within a node where
        several stages share one."""
        if division.stages == 1:
            return 0.0
        size = rows * PRESETS[model].config.hidden_size * BYTES
        in_node = self.nvlink.latency_s + size / self.nvlink.bytes_per_s
        between = self.network.latency_s + size / self.network.bytes_per_s
        stages_per_node = max(1, NODE // division.tp)  # stages of a node
        if division.stages <= stages_per_node:
            return in_node
        return (in_node * (stages_per_node - 1) + between) / stages_per_node

    def fits(self, model: str, division: Division, rows: int, S: int) -> bool:
        """Whether a rank has room for its weights and for the cache of `rows` requests."""
        config = PRESETS[model].config
        shard = slowest_shard(config, division.tp)
        cached = rows * (S + BUDGET) * kv_bytes_per_token(config, shard, BYTES)
        stored = stored_bytes(config, shard, BYTES, is_packed=False)
        return (cached + stored) / division.stages <= ROOM * self.gpu.memory

    def step_s(
        self, model: str, division: Division, rows: int, passes: list[tuple[int, int]]
    ) -> float:
        """A step of all `rows` of a replica: `passes` of (new tokens, visible tokens) one after the
        other. In a ring, groups of rows circulate, as many as stages or twice as many."""
        p = division.stages
        best = math.inf
        for groups in {min(p, rows), min(2 * p, rows)}:
            rows_per_group = math.ceil(rows / groups)
            stage = hops = 0.0
            for T, S in passes:
                stage += self.seconds(model, division.tp, rows_per_group, T, S) / p
                hops += self.hop_s(model, division, rows_per_group * T)
            best = min(best, max(p * (stage + hops), groups * stage))
        return best

    def speed(
        self,
        model: str,
        division: Division,
        S: int,
        requests: int,
        gamma: int,
        acceptance: float,
        draft: str | None = None,
    ) -> float:
        """Tokens a second. Drafts are of the model itself, or of `draft` on some GPUs of each
        replica, which makes them while its stages wait."""
        rows = math.ceil(requests / division.replicas)
        drafts = [(1, min(S, BUDGET) + k) for k in range(gamma)]
        if draft is None:
            total = self.step_s(model, division, rows, [*drafts, (gamma + 1, S)])
        else:
            total = self.step_s(model, division, rows, [(gamma + 1, S)])
            widths = [tp for tp in DRAFT_RANKS if tp <= division.tp]
            total += min(
                sum(self.seconds(draft, tp, rows, T, seen) for T, seen in drafts) for tp in widths
            )
        return requests * expected_tokens(acceptance, gamma) / total

    @cache  # noqa: B019
    def pipelined(
        self, model: str, stages: int, tp: int, S: int, lanes: int, acceptance: float, ranks: int
    ) -> float:
        """Tokens a second of one replica with `lanes` requests in pipelined speculation, whose
        draft has `ranks` GPUs of its own."""
        one = self.seconds(model, tp, 1, 1, S)
        machine = SimulatedMachine(
            (one / stages,) * stages,
            layers=max(1, PRESETS[model].config.num_layers // stages),
            row_cost=self.seconds(model, tp, 1, 2, S) / one - 1,
            link_s=self.hop_s(model, Division(1, stages, tp), 1),
            cancel_s=self.network.latency_s,
            draft_s=self.seconds(DRAFT_OF[model], ranks, 1, 1, min(S, BUDGET)),
        )
        is_right = draw_right(acceptance, PIPELINED_TOKENS * lanes, 123)
        work = Work(is_right, PIPELINED_TOKENS, lanes)
        return run_mode("pipeinfer", machine, Options(lanes=lanes), work)[1].tokens_per_s


def divisions(model: str, gpus: int, requests: int) -> Iterator[Division]:
    """Powers of two, on at most so many GPUs. Replicas without requests are left out."""
    config = PRESETS[model].config
    powers = [2**k for k in range(gpus.bit_length())]
    for tp in powers:
        for stages in powers:
            for replicas in powers:
                if (
                    tp * stages * replicas <= gpus
                    and tp <= config.num_heads
                    and stages <= config.num_layers
                    and replicas <= requests
                ):
                    yield Division(replicas, stages, tp)


@cache
def answer(
    cluster: GpuCluster, model: str, S: int, gpus: int, requests: int, acceptance: float
) -> Winner | None:
    """The way that wins in a cell; None where no division has room."""
    fitting = [
        d
        for d in divisions(model, gpus, requests)
        if cluster.fits(model, d, math.ceil(requests / d.replicas), S)
    ]
    if not fitting:
        return None
    ways = [(cluster.speed(model, d, S, requests, 0, 0.0), d, 0) for d in fitting]
    plain = max(speed for speed, _, _ in ways)
    near = [d for speed, d, _ in ways if speed * MOST_GAIN > plain]
    drafting = [
        (cluster.speed(model, d, S, requests, gamma, acceptance), d, gamma)
        for d in near
        for gamma in range(1, MAX_GAMMA + 1)
    ]
    speed, division, gamma = max(ways, key=lambda way: way[0])
    best = max(drafting, key=lambda way: way[0])
    if best[0] > NO_GAIN * plain:
        speed, division, gamma = best
    if requests <= PIPELINED_REQUESTS:
        # What the same drafts bring if they are made and verified in turns.
        in_turns = max(
            cluster.speed(model, d, S, requests, g, acceptance, DRAFT_OF[model])
            for d in near
            for g in range(1, MAX_GAMMA + 1)
        )
        bound = NO_GAIN * max(speed, in_turns)
        pipeline = best_pipeline(cluster, model, S, gpus, requests, acceptance, fitting, bound)
        if pipeline is not None:
            speed, division = pipeline
            return Winner(PIPELINED, division, 0, speed, speed / plain, speed / in_turns)
    return Winner(division.kind, division, gamma, speed, speed / plain)


def best_pipeline(
    cluster: GpuCluster,
    model: str,
    S: int,
    gpus: int,
    requests: int,
    acceptance: float,
    fitting: list[Division],
    bound: float,
) -> tuple[float, Division] | None:
    """The fastest asynchronous pipeline with more than `bound` tokens a second, if there is one.
    Its draft takes GPUs beside those of the stages."""
    speeds = []
    draft = DRAFT_OF[model]
    for d in fitting:
        # A chain commits at most 1 / (1 - a) tokens in the time of a pass.
        most = requests / (1 - acceptance) / cluster.seconds(model, d.tp, 1, 1, S)
        widths = [n for n in DRAFT_RANKS if d.replicas * (d.stages * d.tp + n) <= gpus]
        if 1 < d.stages <= PIPELINED_STAGES and widths and most > bound:
            ranks = min(widths, key=lambda n: cluster.seconds(draft, n, 1, 1, min(S, BUDGET)))
            lanes = math.ceil(requests / d.replicas)
            speed = cluster.pipelined(model, d.stages, d.tp, S, lanes, acceptance, ranks)
            speeds.append((speed * requests / lanes, d))
    best = max(speeds, key=lambda way: way[0], default=None)
    return best if best is not None and best[0] > bound else None


def main() -> None:
    args = make_parser().parse_args()
    for flag, path in (("--plot", args.plot), ("--gain", args.gain)):
        if path is not None:
            check_picture(flag, path)
    clusters = [GpuCluster(SPECS[args.gpu], network) for network in NETWORKS]
    print_tables([winners(clusters), sensitivity(clusters), examples(clusters)], "md")
    if args.plot is not None:
        draw_maps(args.plot, clusters, args.gpu)
    if args.gain is not None:
        draw_gain(args.gain, clusters[0], args.gpu)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Ways of decoding on 8 to 512 GPUs, predicted.")
    add = parser.add_argument
    add("--gpu", choices=[*SPECS], default="h100")
    add("--plot", type=Path, metavar="FILE", help="the maps")
    add("--gain", type=Path, metavar="FILE", help="what self-speculation brings")
    return parser


Cell = tuple[str, int, int, int]  # model, context, GPUs, requests


def cells() -> Iterator[Cell]:
    for model in DRAFT_OF:
        for S in CONTEXTS:
            for gpus in GPUS:
                for requests in REQUESTS:
                    yield model, S, gpus, requests


def answers(cluster: GpuCluster, acceptance: float) -> dict[Cell, Winner]:
    """The winners of all cells with room."""
    ways = {cell: answer(cluster, *cell, acceptance) for cell in cells()}
    return {cell: way for cell, way in ways.items() if way is not None}


def winners(clusters: list[GpuCluster]) -> Table:
    """How many cells each kind wins, by network and acceptance."""
    rows = []
    for cluster in clusters:
        for acceptance in ACCEPTANCES:
            ways = answers(cluster, acceptance).values()
            kinds = [way.kind for way in ways]
            drafting = [way for way in ways if way.gamma]
            most = max(way.gain for way in drafting)
            leads = [way.lead for way in ways if way.lead is not None]
            rows.append(
                (
                    cluster.network.name,
                    f"{acceptance:g}",
                    *(str(kinds.count(k)) for k in KINDS),
                    f"{len(drafting)} of {len(ways)}",
                    f"{most:.2f}x",
                    f"{min(leads):.2f}x to {max(leads):.2f}x" if leads else "",
                )
            )
    columns = ["predicted winners, cells", "acceptance", *KINDS, "with self-drafts", "at most"]
    return Table([*columns, "pipeline over the same drafts in turns"], rows)


def sensitivity(clusters: list[GpuCluster]) -> Table:
    """In how many cells another kind wins, or drafts begin or cease to pay, under other
    assumptions."""
    rows = []
    for cluster in clusters:
        slow = replace(cluster.network, latency_s=2 * cluster.network.latency_s)
        far = replace(cluster.nvlink, latency_s=2 * cluster.nvlink.latency_s)
        base = answers(cluster, 0.7)
        for text, other in (
            ("latency between nodes x 2", replace(cluster, network=slow)),
            ("latency in a node x 2", replace(cluster, nvlink=far)),
        ):
            changed = answers(other, 0.7)
            kinds = sum(changed[cell].kind != way.kind for cell, way in base.items())
            drafts = sum((changed[cell].gamma > 0) != (way.gamma > 0) for cell, way in base.items())
            rows.append((cluster.network.name, text, f"{kinds} of {len(base)}", str(drafts)))
    return Table(["cells that change", "assumption", "kind", "self-drafts"], rows)


def examples(clusters: list[GpuCluster]) -> Table:
    """The best division of some cells."""
    rows = []
    for cluster in clusters:
        for cell in EXAMPLES:
            way = answer(cluster, *cell, 0.7)
            assert way is not None, "examples have room"
            model, S, gpus, requests = cell
            d = way.division
            ms = 1e3 * requests / way.tokens_per_s
            rows.append(
                (
                    cluster.network.name.split(",")[0],
                    model,
                    str(S),
                    str(gpus),
                    str(requests),
                    way.kind,
                    f"{d.replicas} x {d.stages} x {d.tp}",
                    str(way.gamma),
                    f"{way.tokens_per_s:,.0f}",
                    f"{ms:.2f}",
                    f"{way.gain:.2f}x",
                )
            )
    return Table(
        [
            "network",
            "model",
            "context",
            "GPUs",
            "requests",
            "winner",
            "replicas x stages x ranks",
            "gamma",
            "tokens/s",
            "ms a token",
            "over no drafts",
        ],
        rows,
    )


def draw_maps(path: Path, clusters: list[GpuCluster], gpu: str) -> None:
    """A map for each network, context and model: the colour is the kind that wins, the number what
    drafts bring."""
    rows = [(cluster, S) for cluster in clusters for S in CONTEXTS]
    size = (10.5, 2.1 * len(rows))
    with saved_figure("--plot", path, size, len(rows), len(DRAFT_OF)) as (figure, axes):
        panels = iter(axes)
        for row, (cluster, S) in enumerate(rows):
            for column, model in enumerate(DRAFT_OF):
                ax = next(panels)
                draw_map(ax, cluster, model, S)
                if row == 0:
                    ax.set_title(model.replace("llama-", "Llama-").replace("b", "B"))
                if column == 0:
                    network = cluster.network.name.split(",")[0]
                    ax.set_ylabel(f"{network}\n{S // 1024} k tokens\nrequests in flight")
                if row == len(rows) - 1:
                    ax.set_xlabel("GPUs")
        handles = [Patch(color=COLOUR_OF[kind], label=kind) for kind in KINDS]
        handles.append(Patch(color=NO_ROOM, label="does not fit"))
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=10)
        figure.suptitle(
            "Predicted: over InfiniBand a few requests want asynchronous pipelines,\n"
            "many want replicas of a node, and rings where a node is too small\n"
            f"{gpu.upper()}, nodes of {NODE}; {'; '.join(c.network.name for c in clusters)}\n"
            "Numbers: gain by drafts at acceptance 0.7 (+: only at 0.8)",
            fontsize=12,
        )


def draw_map(ax: Any, cluster: GpuCluster, model: str, S: int) -> None:
    for x, gpus in enumerate(GPUS):
        for y, requests in enumerate(REQUESTS):
            way = answer(cluster, model, S, gpus, requests, 0.7)
            colour = NO_ROOM if way is None else COLOUR_OF[way.kind]
            ax.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, edgecolor="white"))
            if way is None:
                continue
            optimist = answer(cluster, model, S, gpus, requests, 0.8)
            assert optimist is not None, "drafts take no room"
            text = f"{way.gain:.1f}" if way.gain >= SHOWN else "+" if optimist.gain >= SHOWN else ""
            ax.text(x + 0.5, y + 0.46, text, ha="center", va="center", fontsize=7, color="white")
    ax.set(xlim=(0, len(GPUS)), ylim=(0, len(REQUESTS)))
    ax.set_xticks([k + 0.5 for k in range(len(GPUS))], [str(n) for n in GPUS], fontsize=7)
    ax.set_yticks([k + 0.5 for k in range(len(REQUESTS))], [str(n) for n in REQUESTS], fontsize=7)
    ax.grid(visible=False)
    ax.tick_params(length=0)


def draw_gain(path: Path, cluster: GpuCluster, gpu: str) -> None:
    """What self-speculation brings on 64 GPUs by requests in flight, a panel for each context."""
    gpus = 64
    counts = [2**k for k in range(13)]
    with saved_figure("--gain", path, (10.5, 3.6), 1, len(CONTEXTS), sharey=True) as (figure, axes):
        for ax, S in zip(axes, CONTEXTS, strict=True):
            for index, model in enumerate(DRAFT_OF):
                bands = []
                for requests in counts:
                    gains = [gain_of(cluster, model, S, gpus, requests, a) for a in ACCEPTANCES]
                    if None not in gains:
                        bands.append((requests, *gains))
                x, low, middle, high = zip(*bands, strict=True)
                style = look(index)
                ax.fill_between(x, low, high, color=style.colour, alpha=0.2)
                ax.plot(
                    x,
                    middle,
                    style.line,
                    color=style.colour,
                    marker=style.marker,
                    markersize=4,
                    label=model,
                )
            ax.axhline(1, color=GREY, linewidth=0.8)
            ax.set_xscale("log", base=2)
            ax.xaxis.set_major_formatter("{x:.0f}")
            ax.set(title=f"{S // 1024} k tokens of context", xlabel="requests in flight")
        axes[0].set_ylabel("times as fast as without drafts")
        axes[0].legend(loc="upper left")
        figure.suptitle(
            f"Predicted: self-speculation on {gpus} {gpu.upper()}, {cluster.network.name}; lines: "
            "acceptance 0.7, bands: 0.6 to 0.8. Lines end where memory does",
            fontsize=10,
        )


def gain_of(
    cluster: GpuCluster, model: str, S: int, gpus: int, requests: int, acceptance: float
) -> float | None:
    """What self-drafts bring; 1 where they do not pay, None without room."""
    way = answer(cluster, model, S, gpus, requests, acceptance)
    if way is None or way.kind != PIPELINED:
        return None if way is None else way.gain
    return 1.0


if __name__ == "__main__":
    main()
