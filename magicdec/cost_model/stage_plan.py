"""StagePlan: the predictions of `magicdec plan --stages`; and StagePlanRecord, with its tables. A
ring of stages, through which lanes of samples circulate, next to tensor parallelism over the same
ranks and to one process. Everything is predicted from shapes and rates; nothing is run. Scheduling,
sampling and messages are left out. Imports no torch.

Source of the round: Macario et al. 2025, "Model-Distributed Inference for Large Language Models at
the Edge"; `docs/pipeline.md` derives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from magicdec.cost_model.costs import (
    Deployment,
    kv_bytes_per_token,
    slowest_shard,
    stored_bytes,
)
from magicdec.cost_model.plan import (
    PREDICTED,
    describe_machine,
    describe_model,
    describe_ranks,
)
from magicdec.distributed.layer_split import StageTimes, round_seconds, split_layers
from magicdec.hardware.ceiling_file import Link
from magicdec.records.fields import Part, recorded
from magicdec.records.metric_tables import fixed, metric_columns
from magicdec.records.record import Record
from magicdec.tables import Column, Table


def ends_of(model: Deployment) -> Deployment:
    """The model without its layers: the final norm and the head."""
    return replace(model, config=replace(model.config, num_layers=0))


def stage_times(model: Deployment, B: int, S: int) -> tuple[StageTimes, StageTimes]:
    """The times of a decode step of B rows with S cached tokens each: of the first stage, which
    also has the ends of the model, and of each other stage. `model.tp` ranks share a stage."""
    ends_s = ends_of(model).seconds(B, 1, S)
    layer_s = (model.seconds(B, 1, S) - ends_s) / model.config.num_layers
    return StageTimes(ends_s, layer_s), StageTimes(0.0, layer_s)


HEADER_BYTES, WORD_BYTES = 56, 8  # of a message: its header, and the number of each of its rows
RATES = ("read_bytes_per_s", "flops_per_s", "kv_bytes_per_s", "attention_flops_per_s")
FEW_HEADS = "if the model has too few heads for that"


@dataclass(frozen=True, kw_only=True)
class StageCell(Part):
    """A stage."""

    num_layers: int = recorded("its layers", label="layers")
    weight_bytes: int = recorded(
        "weights on each of its ranks", "bytes", label="weights, MB", digits=1, scale=1e-6
    )
    lane_kv_bytes: int = recorded(
        "KV cache of a lane on each of its ranks", "bytes",
        label="KV of a lane, MB", digits=1, scale=1e-6,
    )  # fmt: skip
    decode_ms: float = recorded(
        "its time for a message of a lane that decodes", "ms", label="decode, ms", digits=3
    )


@dataclass(frozen=True, kw_only=True)
class RoundCell(Part):
    """A number of samples in flight, which all gain a token in a round."""

    num_lanes: int = recorded("lanes that circulate", label="lanes")
    n_samples: int = recorded("samples in all lanes", label="samples")
    round_ms: float = recorded(
        "`max(num_lanes * slowest stage or link, sum of stages and hops)`", "ms",
        label="round, ms", digits=2,
    )  # fmt: skip
    tokens_per_s: float = recorded("of all samples", "tokens/s", label="ring", digits=1)
    tensor_parallel_ms: float | None = recorded(
        "a step of as many samples with every layer divided among all ranks", "ms", null=FEW_HEADS
    )
    tensor_parallel_tokens_per_s: float | None = recorded(
        "the samples divided by that", "tokens/s",
        label="tensor parallel", digits=1, null=FEW_HEADS,
    )  # fmt: skip
    one_process_ms: float = recorded("a step of as many samples in one process", "ms")
    one_process_tokens_per_s: float = recorded(
        "the samples divided by that", "tokens/s", label="one process", digits=1
    )

    @property
    def fastest(self) -> str:
        """The way with the most tokens per second."""
        ways = {"ring": self.tokens_per_s, "one process": self.one_process_tokens_per_s}
        if self.tensor_parallel_tokens_per_s is not None:
            ways["tensor parallel"] = self.tensor_parallel_tokens_per_s
        return max(ways, key=lambda name: ways[name])


@dataclass(frozen=True, kw_only=True)
class RingCell(Part):
    """The prediction for a lane size and a context."""

    lane_size: int = recorded("samples of a lane, which travel in one message")
    prefix_len: int = recorded("cached tokens of each sample", "tokens")
    stages: list[StageCell] = recorded("the stages in ring order")
    hop_bytes: int = recorded("bytes of a message: its header and hidden states", "bytes")
    link_ms: list[float] = recorded(
        "time of such a message from each stage to the next, the last to the first; empty with one "
        "stage", "ms",
    )  # fmt: skip
    rounds: list[RoundCell] = recorded(
        "one lane alone, a lane for each stage, and two for each stage"
    )


@dataclass(frozen=True)
class StagePlan:
    """`stage` is the model on the ranks of a stage, of which there are `num_stages` on `nodes`
    hosts. `layer_split` is the text of that flag. `shares_host`: the ranks of a host share its
    cores, so that one process has the rates of all of them; else a rank has a device of its own."""

    stage: Deployment
    num_stages: int
    nodes: int
    layer_split: str | None
    shares_host: bool
    dtype: str
    machine_source: str
    lane_sizes: tuple[int, ...]
    prefix_lens: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        return self.num_stages * self.stage.tp

    def layers(self, B: int, S: int) -> list[int]:
        """Layers of each stage. Raises ValueError, naming the flag, for a split that cannot be."""
        first, other = stage_times(self.stage, B, S)
        times = [first, *[other] * (self.num_stages - 1)]
        split = split_layers(self.layer_split, self.num_stages, self.stage.config.num_layers, times)
        return [len(layers) for layers in split]

    @property
    def links(self) -> list[Link]:
        """The link from each stage to the next, the last to the first. One stage has none."""
        if self.num_stages == 1:
            return []
        tp, per_node = self.stage.tp, self.num_ranks // self.nodes
        links = []
        for first in range(0, self.num_ranks, tp):  # the other ranks of a stage send as far
            is_near = first // per_node == (first + tp) % self.num_ranks // per_node
            link = self.stage.hardware.link if is_near else self.stage.hardware.node_link
            assert link is not None, "checked with the flags"
            links.append(link)
        return links

    def predict(self, B: int, S: int) -> RingCell:
        """Lanes of B samples, each with S cached tokens. A lane circulates alone, or there is a
        lane for each stage, or two."""
        stages, links = self._stages(B, S), self.links
        hidden_bytes = self.stage.config.hidden_size * self.stage.dtype_bytes
        hop_bytes = HEADER_BYTES + B * (WORD_BYTES + hidden_bytes)
        # A message occupies a link for its bytes. A hop takes the latency on top.
        carries_s = [hop_bytes / link.bytes_per_s for link in links]
        hops_s = [link.latency_s + s for link, s in zip(links, carries_s, strict=True)]
        stages_s = [stage.decode_ms / 1e3 for stage in stages]
        # A link that is slower than every stage bounds the ring as a stage does.
        slowest_link_s = max(carries_s, default=0.0)
        return RingCell(
            lane_size=B,
            prefix_len=S,
            stages=stages,
            hop_bytes=hop_bytes,
            link_ms=[1e3 * seconds for seconds in hops_s],
            rounds=[
                self._round(n, B, S, max(round_seconds(stages_s, hops_s, n), n * slowest_link_s))
                for n in sorted({1, self.num_stages, 2 * self.num_stages})
            ],
        )

    def _stages(self, B: int, S: int) -> list[StageCell]:
        first, other = stage_times(self.stage, B, S)
        model, size = self.stage, self.stage.dtype_bytes
        shard = slowest_shard(model.config, model.tp)
        ends = stored_bytes(ends_of(model).config, shard, size, False, model.is_int8)
        cells = []
        for index, count in enumerate(self.layers(B, S)):
            config = replace(model.config, num_layers=count)
            stage_bytes = stored_bytes(config, shard, size, False, model.is_int8)
            cells.append(
                StageCell(
                    num_layers=count,
                    weight_bytes=stage_bytes if index == 0 else stage_bytes - ends,
                    lane_kv_bytes=B * S * kv_bytes_per_token(config, shard, size),
                    decode_ms=1e3 * (other if index else first).seconds(count),
                )
            )
        return cells

    def _round(self, num_lanes: int, B: int, S: int, round_s: float) -> RoundCell:
        samples = num_lanes * B
        shared_s = None
        if self.num_ranks <= self.stage.config.num_heads:  # each layer shared by all ranks
            together = replace(self.stage, tp=self.num_ranks, nodes=self.nodes)
            shared_s = together.seconds(samples, 1, S)
        alone_s = self.one_process().seconds(samples, 1, S)
        return RoundCell(
            num_lanes=num_lanes,
            n_samples=samples,
            round_ms=1e3 * round_s,
            tokens_per_s=samples / round_s,
            tensor_parallel_ms=None if shared_s is None else 1e3 * shared_s,
            tensor_parallel_tokens_per_s=None if shared_s is None else samples / shared_s,
            one_process_ms=1e3 * alone_s,
            one_process_tokens_per_s=samples / alone_s,
        )

    def one_process(self) -> Deployment:
        """The model in one process of one host. Where ranks share the host, it has the rates of all
        of them; the overheads of a forward stay."""
        hardware = self.stage.hardware
        ranks = self.num_ranks // self.nodes
        if self.shares_host:
            rates = {name: getattr(hardware, name) for name in RATES}
            together = {name: ranks * rate for name, rate in rates.items() if rate is not None}
            hardware = replace(hardware, **together)
        return replace(self.stage, tp=1, nodes=1, hardware=hardware)


@dataclass(frozen=True, kw_only=True)
class StagePlanRecord(Record):
    """A prediction of a ring of stages for each size of a lane and context."""

    kind: Literal["stage_plan"] = recorded("`stage_plan`", default="stage_plan")
    status: Literal["predicted"] = recorded("`predicted`: nothing has run", default="predicted")
    config: dict[str, Any] = recorded(
        "the inputs: `model` with its dtypes, and `parallel` with the rates of one rank, the "
        "stages, `layer_split` as it was given, and whether one process has the rates of all ranks "
        "of its host; and the `flags` of the command"
    )
    cells: list[RingCell] = recorded("the predictions")


def make_record(plan: StagePlan) -> StagePlanRecord:
    """The record of all predictions of a plan."""
    ring = {
        "nodes": plan.nodes,
        "num_stages": plan.num_stages,
        "layer_split": plan.layer_split,
        "one_process_has_all_ranks": plan.shares_host,
    }
    inputs = {
        "model": describe_model(plan.stage, plan.dtype),
        "parallel": describe_ranks(plan.stage, plan.machine_source) | ring,
    }
    places = [(B, S) for B in plan.lane_sizes for S in plan.prefix_lens]
    return StagePlanRecord(config=inputs, cells=[plan.predict(B, S) for B, S in places])


def tables(records: Sequence[StagePlanRecord]) -> list[Table]:
    """Of each record the inputs, the stages of each lane size and context, and what the ring,
    tensor parallelism and one process give."""
    return [
        table
        for record in records
        for table in (_inputs(record), *map(_stages, record.cells), _rounds(record.cells))
    ]


def _inputs(record: StagePlanRecord) -> Table:
    model, ring = record.config["model"], record.config["parallel"]
    tp, nodes, num_stages = model["tp"], ring["nodes"], ring["num_stages"]
    hosts = f" on {nodes} hosts" if nodes > 1 else ""
    shared = f"all {num_stages * tp // nodes} ranks of a host"
    return Table(above=[
        f"{PREDICTED}, and scheduling and sampling are left out",
        f"model       {model['model']}{' in int8' * (model['target_dtype'] == 'int8')}, "
        f"{model['dtype']}; {num_stages} stages of {tp} rank{'s' * (tp > 1)}{hosts}; "
        f"--layer_split {ring['layer_split'] or 'equal'}",
        f"{describe_machine(ring)}; one process has the rates of "
        f"{shared if ring['one_process_has_all_ranks'] else 'one rank'}",
    ])  # fmt: skip


def _stages(cell: RingCell) -> Table:
    links = f"; a hop has {cell.hop_bytes:,} bytes" if cell.link_ms else ""
    columns, rows = metric_columns(StageCell, cell.stages)
    hops: Sequence[float | None] = cell.link_ms or [None] * len(rows)
    return Table(
        ["stage", *columns, Column("hop, ms", key="link_ms")],
        [
            [index, *cells, fixed(hop_ms, 3)]
            for index, (cells, hop_ms) in enumerate(zip(rows, hops, strict=True))
        ],
        f"stages for lanes of {cell.lane_size} with {cell.prefix_len} cached tokens{links}",
    )


def _rounds(cells: Sequence[RingCell]) -> Table:
    rounds = [(cell, each) for cell in cells for each in cell.rounds]
    columns, rows = metric_columns(RoundCell, [each for _, each in rounds])
    return Table(
        [Column("B", key="lane_size"), Column("prefix", key="prefix_len"), *columns, "fastest"],
        [
            [cell.lane_size, cell.prefix_len, *row, each.fastest]
            for (cell, each), row in zip(rounds, rows, strict=True)
        ],
        "round = max(lanes x slowest stage or link, sum of stages and hops); then tokens/s",
    )
