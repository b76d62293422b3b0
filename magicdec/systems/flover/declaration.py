"""What Flover (arXiv 2305.13484) says of itself: the modes of the engine, whole batches or a
running batch. Imports no torch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from magicdec.config.run_config import RunConfig
from magicdec.config.setting import setting
from magicdec.systems.declaration import Drafts, Mode, Ranks, SystemDeclaration
from magicdec.systems.row_settings import PrefillSettings, PrefixSettings, RowSettings

if TYPE_CHECKING:
    from magicdec.model.checkpoint.source import ModelSource
    from magicdec.systems.modes import Pass
    from magicdec.systems.options import ServeOptions

SEQUENTIAL = "sequential"  # one request after the other
DYNAMIC = "dynamic"  # the mode that has a time window
INFLIGHT = "inflight"
WINDOW_MS = 1000.0
HOST = "host"


@dataclass(frozen=True)
class FloverSettings(RowSettings, PrefillSettings, PrefixSettings):
    batch_ranks: str = setting(
        "first",
        "Ranks that serve in the modes without stages, but for tensor_parallel: the first, with "
        "the threads of all ranks of its host, or all, by tensor parallelism.",
        choices=("first", "all"),
        other_defaults="all in inflight",
    )
    window_ms: float | None = setting(
        None,
        f"How long the first request of a batch waits for others in {DYNAMIC} batching. Default: "
        f"{WINDOW_MS:.0f}.",
        metavar="MS",
        least=0,
    )
    block_tokens: int = setting(
        256, "Tokens of a block of the KV cache, which a request takes as it grows.", least=1
    )
    cache_tokens: int | None = setting(
        None,
        "Tokens that the KV cache holds of all requests together. If it runs out, the youngest "
        "request is preempted. Default: enough for every request to its end.",
        least=1,
    )

    kv_offload: str = setting(
        "none",
        "Where blocks go that leave the prefix cache: nowhere, or to host memory, from which they "
        "come back, with what a draft has of them, when a text begins with them.",
        choices=("none", HOST),
    )
    offload_tokens: int | None = setting(
        None,
        "Tokens of such blocks that host memory holds. Default: as many as the KV cache.",
        least=1,
    )

    def settled(self, load: ServeOptions, passes: Sequence[Pass]) -> Self:
        has_window = any(serving_pass.mode == DYNAMIC for serving_pass in passes)
        window_ms = WINDOW_MS if self.window_ms is None else self.window_ms
        return replace(self, window_ms=window_ms if has_window else None)

    def is_on_all(self, serving_pass: Pass, world_size: int) -> bool:
        """Whether all ranks share the model in a pass."""
        is_shared = serving_pass.ranks is Ranks.ALL or self.batch_ranks == "all"
        return is_shared and world_size > 1

    def instance_of(self, serving_pass: Pass, world_size: int) -> Hashable:
        return self.is_on_all(serving_pass, world_size)

    def check(
        self, load: ServeOptions, passes: Sequence[Pass], config: RunConfig, world_size: int
    ) -> None:
        if self.kv_offload == HOST and not self.prefix_cache:
            raise ValueError(
                f"--kv_offload {HOST} keeps blocks that leave the prefix cache, and there is none; "
                "give --prefix_cache, or leave it out"
            )
        if self.offload_tokens is not None and self.kv_offload != HOST:
            raise ValueError(
                f"--offload_tokens {self.offload_tokens} does nothing with --kv_offload "
                f"{self.kv_offload}; give --kv_offload {HOST}, or leave it out"
            )
        for serving_pass in passes:
            if serving_pass.ranks is Ranks.ALL and world_size == 1:
                raise ValueError(f"--modes {serving_pass.name} needs several ranks; see --nproc")

    def check_model(
        self, load: ServeOptions, passes: Sequence[Pass], source: ModelSource, world_size: int
    ) -> None:
        from magicdec.distributed.tensor_parallel import Shard

        if any(self.is_on_all(serving_pass, world_size) for serving_pass in passes):
            Shard(0, world_size).heads(source.config.num_heads, source.config.num_kv_heads)

    def check_cache(self, needed: int) -> None:
        """Raises ValueError if the KV cache is smaller than `needed`, the tokens of the longest
        request with its drafts."""
        if self.cache_tokens is not None and self.cache_tokens < needed:
            raise ValueError(
                f"--cache_tokens {self.cache_tokens} is too small; the longest request takes "
                f"{needed} tokens"
            )


BATCH_RANKS = ("batch_ranks",)
FLOVER = SystemDeclaration(
    name="flover",
    paper="2305.13484",
    page="flover.md",
    system="magicdec.systems.flover.system:Flover",
    settings=FloverSettings,
    modes={
        SEQUENTIAL: Mode(Ranks.FIRST, Drafts.MAYBE, "one request after the other", BATCH_RANKS),
        "static": Mode(Ranks.FIRST, Drafts.MAYBE, "whole batches", BATCH_RANKS),
        DYNAMIC: Mode(
            Ranks.FIRST,
            Drafts.MAYBE,
            "batches that wait a limited time",
            (*BATCH_RANKS, "window_ms"),
            is_default=False,
        ),
        INFLIGHT: Mode(
            Ranks.FIRST,
            Drafts.MAYBE,
            "requests join a running batch",
            BATCH_RANKS,
            is_draft_default=True,
            is_in_gate=True,
        ),
        "tensor_parallel": Mode(
            Ranks.ALL, Drafts.MAYBE, "the same on all ranks, which share every layer"
        ),
    },
    uses=frozenset({"parallel.rank_group", "draft.rank_group", "decoding.cuda_graphs"}),
    drafts_follow=(
        "batch_size",
        "n_samples",
        "prefill_tokens",
        "block_tokens",
        "cache_tokens",
        "window_ms",
        "prefix_cache",
        "kv_offload",
        "offload_tokens",
    ),
)
