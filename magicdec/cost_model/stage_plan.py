"""StagePlan: the predictions of `magicdec plan --stages`. A ring of stages, through which lanes of
samples circulate, next to tensor parallelism over the same ranks and to one process. Everything is
predicted from shapes and rates; nothing is run. Scheduling, sampling and messages are left out.
Imports no torch.

Source of the round: Macario et al. 2025, "Model-Distributed Inference for Large Language Models at
the Edge"; `docs/pipeline.md` derives it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from magicdec.cost_model.costs import (
    Deployment,
    kv_bytes_per_token,
    slowest_shard,
    stored_bytes,
)
from magicdec.distributed.layer_split import StageTimes, round_seconds, split_layers
from magicdec.hardware.ceiling_file import Hardware, Link


def ends_of(model: Deployment) -> Deployment:
    """The model without its layers: the final norm and the head."""
    return replace(model, config=replace(model.config, num_layers=0))


def stage_times(model: Deployment, B: int, S: int, T: int = 1) -> tuple[StageTimes, StageTimes]:
    """Of the first stage, which also has the ends of the model, and of each other stage: the time
    of a decode step of B rows with S cached tokens and T new ones each. `model.tp` ranks share a
    stage."""
    ends_s = ends_of(model).seconds(B, T, S)
    layer_s = (model.seconds(B, T, S) - ends_s) / model.config.num_layers
    return StageTimes(ends_s, layer_s), StageTimes(0.0, layer_s)


HEADER_BYTES, WORD_BYTES = 48, 8  # of a message: its header, and the number of each of its rows


@dataclass(frozen=True)
class StageCell:
    """A stage: bytes on each of its ranks, and its time for a message of a lane that decodes."""

    num_layers: int
    weight_bytes: int
    lane_kv_bytes: int
    decode_ms: float


@dataclass(frozen=True)
class RoundCell:
    """A number of samples in flight: the time in which each of them gains a token, and tokens per
    second. Fields are None if the model cannot be divided among all ranks by its heads."""

    num_lanes: int
    n_samples: int
    round_ms: float
    tokens_per_s: float
    tensor_parallel_ms: float | None
    tensor_parallel_tokens_per_s: float | None
    one_process_ms: float
    one_process_tokens_per_s: float

    @property
    def fastest(self) -> str:
        """The way with the most tokens per second."""
        ways = {"ring": self.tokens_per_s, "one process": self.one_process_tokens_per_s}
        if self.tensor_parallel_tokens_per_s is not None:
            ways["tensor parallel"] = self.tensor_parallel_tokens_per_s
        return max(ways, key=lambda name: ways[name])


@dataclass(frozen=True)
class RingCell:
    """The prediction for a lane size and a context. `link_ms` has the links in ring order, each
    from its stage to the next."""

    lane_size: int
    prefix_len: int
    stages: list[StageCell]
    hop_bytes: int
    link_ms: list[float]
    rounds: list[RoundCell]


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

    @property
    def lane_counts(self) -> list[int]:
        """One sample or lane alone, a lane for each stage, and two."""
        return sorted({1, self.num_stages, 2 * self.num_stages})

    def layers(self, B: int, S: int) -> list[int]:
        """Layers of each stage. Raises ValueError, naming the flag, for a split that cannot be."""
        first, other = stage_times(self.stage, B, S)
        times = [first, *[other] * (self.num_stages - 1)]
        split = split_layers(self.layer_split, self.num_stages, self.stage.config.num_layers, times)
        return [len(layers) for layers in split]

    def hop_bytes(self, B: int) -> int:
        """Bytes of a message of B rows that decode: its header and hidden states."""
        hidden = self.stage.config.hidden_size * self.stage.dtype_bytes
        return HEADER_BYTES + B * (WORD_BYTES + hidden)

    @property
    def links(self) -> list[Link]:
        """The link from each stage to the next, the last to the first. One stage has none."""
        if self.num_stages == 1:
            return []
        tp, per_node, found = self.stage.tp, self.num_ranks // self.nodes, []
        for first in range(0, self.num_ranks, tp):  # the other ranks of a stage send as far
            is_near = first // per_node == (first + tp) % self.num_ranks // per_node
            link = self.stage.hardware.link if is_near else self.stage.hardware.node_link
            assert link is not None, "checked with the flags"
            found.append(link)
        return found

    def carries_s(self, B: int) -> list[float]:
        """How long a message of B rows occupies each link. A hop takes the latency on top."""
        return [self.hop_bytes(B) / link.bytes_per_s for link in self.links]

    def predict(self, B: int, S: int) -> RingCell:
        """Lanes of B samples, each with S cached tokens."""
        stages, carries_s = self._stages(B, S), self.carries_s(B)
        hops_s = [link.latency_s + s for link, s in zip(self.links, carries_s, strict=True)]
        stages_s = [stage.decode_ms / 1e3 for stage in stages]
        # A link that is slower than every stage bounds the ring as a stage does.
        slowest_link_s = max(carries_s, default=0.0)
        return RingCell(
            lane_size=B,
            prefix_len=S,
            stages=stages,
            hop_bytes=self.hop_bytes(B),
            link_ms=[1e3 * seconds for seconds in hops_s],
            rounds=[
                self._round(n, B, S, max(round_seconds(stages_s, hops_s, n), n * slowest_link_s))
                for n in self.lane_counts
            ],
        )

    def _stages(self, B: int, S: int) -> list[StageCell]:
        first, other = stage_times(self.stage, B, S)
        model, size = self.stage, self.stage.dtype_bytes
        shard = slowest_shard(model.config, model.tp)
        ends = stored_bytes(ends_of(model).config, shard, size, False, model.is_int8)
        found = []
        for index, count in enumerate(self.layers(B, S)):
            config = replace(model.config, num_layers=count)
            held = stored_bytes(config, shard, size, False, model.is_int8)
            found.append(
                StageCell(
                    num_layers=count,
                    weight_bytes=held if index == 0 else held - ends,
                    lane_kv_bytes=B * S * kv_bytes_per_token(config, shard, size),
                    decode_ms=1e3 * (other if index else first).seconds(count),
                )
            )
        return found

    def _round(self, num_lanes: int, B: int, S: int, round_s: float) -> RoundCell:
        samples, together = num_lanes * B, self.tensor_parallel()
        shared_s = None if together is None else together.seconds(samples, 1, S)
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

    def tensor_parallel(self) -> Deployment | None:
        """The model with each layer shared by all ranks; None if its heads are fewer."""
        if self.num_ranks > self.stage.config.num_heads:
            return None
        return replace(self.stage, tp=self.num_ranks, nodes=self.nodes)

    def one_process(self) -> Deployment:
        """The model in one process of one host."""
        h, ranks = self.stage.hardware, self.num_ranks // self.nodes
        if self.shares_host:
            h = sum_of(h, ranks)
        return replace(self.stage, tp=1, nodes=1, hardware=h)


def sum_of(one: Hardware, ranks: int) -> Hardware:
    """The rates of that many ranks of a host together. The overheads of a forward stay."""

    def times(rate: float | None) -> float | None:
        return None if rate is None else ranks * rate

    return replace(
        one,
        read_bytes_per_s=ranks * one.read_bytes_per_s,
        flops_per_s=ranks * one.flops_per_s,
        kv_bytes_per_s=times(one.kv_bytes_per_s),
        attention_flops_per_s=times(one.attention_flops_per_s),
    )
